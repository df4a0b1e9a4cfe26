"""One measurement on one prompt cache behind mlx-lm's own server, in a process of its own so that memory starts clean.

    python benchmarks/dropin_measures.py continue --cache stock --path single --model FOLDER --tokens 4096

`benchmarks/dropin.py` starts these and makes a table of them. The last line printed is the result, as JSON. Everything
is asked over HTTP on the loopback interface; memory is MLX's own count. What is measured:

continue   A conversation of `tokens` tokens is stored, then continued by a short turn. `ratio` is the peak of active
           memory from just before that request until its result is stored, less the weights and less the activations
           of one forward over as many tokens as the turn has, by the bytes of the KV that was stored before. The
           activations are measured without any cache; they grow with the length of the turn, not of the conversation.
           `held` is active memory just before that request, less the weights, by the same.
concurrent Six requests in one batch, of different lengths, that end at different times. `ratio` is what active memory
           has grown by when all are done and stored, by the bytes that the cache says it holds.
fetch      `fetch_nearest_cache` on one stored conversation, in milliseconds, with the server left out.
converse   Five turns of one conversation: seconds for all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import KVCache

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from prompt_caches import CHOICES, prompt_cache_class
from serving import CHAT, Server, cached_tokens, serving, text_of

WORDS = ["the", "of", "a", "to", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with", "as", "or", "hot"]


def text(seed: int, length: int) -> str:
    """So many characters, which are as many tokens of the local model."""
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(WORDS, length // 3 + 1))[:length]


def active() -> int:
    """Active memory, once nothing changes it any more: what was started asynchronously is done."""
    gc.collect()
    before = -1
    while before != (now := int(mx.get_active_memory())):
        before = now
        time.sleep(0.1)
    return now


def activations(model_folder: Path, tokens: int) -> int:
    """Peak bytes of one forward over so many tokens, less the weights."""
    model = load(str(model_folder))[0]
    weights = active()
    mx.reset_peak_memory()
    mx.eval(model(mx.zeros((1, tokens), mx.int32)))
    return int(mx.get_peak_memory()) - weights


def ask(server: Server, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    """The answer, which also becomes part of the conversation."""
    answer = server.post(CHAT, {"messages": messages, "temperature": 0.0, **options})
    messages.append({"role": "assistant", "content": text_of(answer)})
    return answer


def options_of(path: str) -> dict[str, int]:
    """A request with a seed is served alone, and so is every request beside a draft model."""
    return {"seed": 1} if path == "single" else {}


def measure_continue(args: argparse.Namespace) -> dict[str, Any]:
    turn, answer_tokens = 24, 8
    transient = activations(args.model, turn + 32)
    with serving(prompt_cache_class(args.cache)(), model=args.model, draft=args.draft) as server:
        weights = active()
        messages = [{"role": "user", "content": text(0, args.tokens)}]
        options = {"max_tokens": answer_tokens, **options_of(args.path)}
        first = ask(server, messages, **options)
        stored = first["usage"]["total_tokens"]
        entry = stored * args.token_bytes
        messages.append({"role": "user", "content": text(1, turn)})
        mx.clear_cache()
        held = active() - weights
        mx.reset_peak_memory()
        second = ask(server, messages, **options)
        peak = int(mx.get_peak_memory()) - weights - transient
    return {
        "ratio": peak / entry,
        "held": held / entry,
        "cached": cached_tokens(second),
        "stored": stored,
        "answers": [text_of(first), text_of(second)],
    }


def measure_concurrent(args: argparse.Namespace) -> dict[str, Any]:
    system = [{"role": "system", "content": text(7, args.tokens // 4)}] if args.shared else []
    with serving(prompt_cache_class(args.cache)(), model=args.model) as server:
        weights = active()
        bodies = [
            {
                "messages": [*system, {"role": "user", "content": text(10 + i, args.tokens // 16 + 37 * i)}],
                "max_tokens": 8 + 8 * i,
                "temperature": 0.0,
            }
            for i in range(6)
        ]
        answers = server.together(CHAT, bodies)
        mx.clear_cache()
        held, reported = active() - weights, int(server.cache.nbytes)
        tokens = sum(a["usage"]["total_tokens"] for a in answers)
    return {
        "ratio": held / max(reported, 1),
        "held": held,
        "reported": reported,
        "all": tokens * args.token_bytes,
        "answers": [text_of(a) for a in answers],
    }


def measure_fetch(args: argparse.Namespace) -> dict[str, Any]:
    n, rng = args.tokens, np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, n).tolist()
    other = rng.integers(150_000, 160_000, 1000).tolist()
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, n, 8)), mx.zeros((1, 1, n, 8)))
    mx.eval(layer.keys, layer.values)
    cache = prompt_cache_class(args.cache)()
    cache.insert_cache("model", tokens, [layer])
    del layer
    prompts = {"half": tokens[: n // 2] + other, "early": tokens[:100] + other, "extend": tokens + other}
    times = {}
    for name, prompt in prompts.items():
        took = []
        for _ in range(args.times):
            start = time.perf_counter()
            found, rest = cache.fetch_nearest_cache("model", prompt)
            took.append(1e3 * (time.perf_counter() - start))
            assert found is not None and rest == other, (name, len(rest))
            del found
        times[name] = statistics.median(took)
    return times


def measure_converse(args: argparse.Namespace) -> dict[str, Any]:
    with serving(prompt_cache_class(args.cache)(), model=args.model, draft=args.draft) as server:
        ask(server, [{"role": "user", "content": "warm"}], max_tokens=4, **options_of(args.path))
        messages = [{"role": "system", "content": text(3, args.tokens // 4)}]
        answers = []
        start = time.perf_counter()
        for i in range(5):
            messages.append({"role": "user", "content": text(20 + i, args.tokens // 16)})
            answers.append(text_of(ask(server, messages, max_tokens=32, **options_of(args.path))))
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "answers": answers}


MEASURES = {
    "continue": measure_continue,
    "concurrent": measure_concurrent,
    "fetch": measure_fetch,
    "converse": measure_converse,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--cache", choices=CHOICES, required=True)
    parser.add_argument("--path", choices=["single", "draft", "batched"], default="batched")
    parser.add_argument("--shared", action="store_true", help="concurrent: on one system prompt")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--token-bytes", type=int, default=0, help="KV of one token, of both models if two")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--times", type=int, default=1, help="fetch: how often, for the median")
    args = parser.parse_args()
    print(json.dumps(MEASURES[args.measure](args)))


if __name__ == "__main__":
    main()
