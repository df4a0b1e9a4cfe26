"""Four threads, each with a conversation of its own on one system prompt. The cache may be used by all of them, a
lease by one at a time."""

import threading

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models import llama

shape = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4}
args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=100, **shape)
model = llama.Model(args)  # or any model: model, tokenizer = mlx_lm.load("...")
mx.eval(model.parameters())  # lazy arrays cannot cross threads

system = [i * 7 % 97 for i in range(600)]
report: list[str] = []


def turn(cache: onefold.PrefixCache, prompt: list[int]) -> tuple[list[int], int]:
    """One request. What it gives to the cache has been evaluated, so every thread can read it."""
    with cache.lease(prompt) as lease:
        steps = generate_step(mx.array(lease.rest), model, max_tokens=8, prompt_cache=lease.layers)
        answer = [token for token, _ in steps]
        lease.commit(prompt + answer)
    return prompt + answer, lease.cached


def converse(cache: onefold.PrefixCache, who: int) -> None:
    conversation, reused = [*system, who], 0
    for question in ([1, 2, 3], [4, 5], [6, 7, 8]):
        conversation, cached = turn(cache, conversation + question)
        reused += cached
    mx.clear_streams()  # MLX keeps a stream per thread: the thread ends here
    report.append(f"thread {who}: {reused} tokens reused in 3 turns, {len(conversation)} tokens in the end")


with onefold.PrefixCache(model, budget="256MB") as cache:
    turn(cache, [*system, 0])  # once, before they all come
    threads = [threading.Thread(target=converse, args=(cache, who)) for who in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(*sorted(report), sep="\n")
    cache.check()
    print(f"{cache.stats().stored_tokens} tokens held for {4 * len(system) + 4 * 34} in four conversations")
