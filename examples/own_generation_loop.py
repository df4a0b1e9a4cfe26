"""A server's generation loop in twenty lines: requests come and go, one forward per step serves them all."""

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.models import llama

shape = {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4}
args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=100, **shape)
model = llama.Model(args)  # or any model: model, tokenizer = mlx_lm.load("...")
END, MOST = 0, 12


def serve(cache: onefold.PrefixCache, waiting: list[list[int]]) -> list[list[int]]:
    rows: list[tuple[onefold.Lease, list[int]]] = []  # each: what it holds, and all of its tokens
    batch, done = cache.batch([]), []
    while waiting or rows:
        if waiting and len(rows) < 4:  # one more: prefill what is not cached, all but the last token
            tokens = waiting.pop(0)
            lease = cache.lease(tokens)  # raises BudgetError if it cannot fit: let it wait, or refuse it
            for chunk in lease.chunks():
                mx.eval(model(mx.array(chunk)[None], cache=lease.layers))
            rows.append((lease, list(tokens)))
            batch.add(lease)
        logits = batch.step([tokens[-1] for _, tokens in rows])  # each row's newest token goes in
        for (lease, tokens), token in zip(list(rows), mx.argmax(logits, axis=-1).tolist(), strict=True):
            tokens.append(token)
            if token == END or len(tokens) >= len(lease.tokens) + MOST:
                batch.remove(lease)
                rows.remove((lease, tokens))
                lease.commit(tokens[:-1])  # what the layers hold; a client that went away: lease.cancel()
                done.append(tokens)
    return done


with onefold.PrefixCache(model, budget="64MB") as cache:
    system = [i * 7 % 97 for i in range(300)]
    first = serve(cache, [[*system, who, 5, 6] for who in range(1, 7)])
    serve(cache, [[*tokens, 8, 9] for tokens in first])
    stats = cache.stats()
    print(f"{stats.tokens_cached} of {stats.tokens_requested} prompt tokens reused")
    print(f"{stats.stored_tokens} tokens held for {sum(len(t) + 14 for t in first)} in six conversations")
