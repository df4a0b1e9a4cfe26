"""The core figures, each beside mlx-lm's own classes in the same run, as ratios.

    make bench-core            # or: python benchmarks/core.py [--only continue,share,...] [--tokens 4096]

The shape is one where KV outweighs activations: 32 layers, hidden 128, 2 heads of dimension 128.
On a GPU, `python benchmarks/gpu.py` adds the Llama-8B shape.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import LRUPromptCache, PromptTrie, make_prompt_cache
from rich.console import Console
from rich.table import Table

from onefold.cache.memory.device import weight_bytes
from onefold.cache.memory.tree import Tree

sys.path.insert(0, str(Path(__file__).parent))
from shapes import hybrid_model, llama_model


@dataclass
class Row:
    what: str
    ours: float
    target: str
    met: bool
    stock: str
    unit: str = ""


def settle() -> None:
    gc.collect()
    mx.clear_cache()


def kv_peak(model: nn.Module, run: Callable[[], object]) -> int:
    """Peak bytes over `run`, less the weights."""
    settle()
    mx.reset_peak_memory()
    run()
    return int(mx.get_peak_memory()) - weight_bytes(model)


def generate(model: nn.Module, prompt: object, layers: object, n: int, step: int = 512) -> list[int]:
    return [
        int(t)
        for t, _ in generate_step(
            mx.array(np.asarray(prompt)), model, max_tokens=n, prompt_cache=layers, prefill_step_size=step
        )
    ]


def conversation(rng: np.random.Generator, n: int) -> list[int]:
    return rng.integers(0, 120, n).tolist()


def token_bytes(model: nn.Module) -> int:
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    return sum(2 * c.keys.shape[1] * c.keys.shape[3] * c.keys.dtype.size for c in caches)


# -- continue one long conversation by a short turn -----------------------------------------------


def bench_continue(tokens: int) -> list[Row]:
    model, rng = llama_model(), np.random.default_rng(0)
    first, turn = conversation(rng, tokens), conversation(rng, 32)
    entry = tokens * token_bytes(model)
    room = 512 * token_bytes(model)

    cache = onefold.PrefixCache(model, "8GB")
    with cache.lease(first) as lease:
        history = first + generate(model, lease.rest, lease.layers, 8)
        lease.commit(history)

    def ours(cache: onefold.PrefixCache = cache) -> None:
        with cache.lease(history + turn) as lease:
            assert lease.cached == len(history), (lease.cached, len(history))
            out = generate(model, lease.rest, lease.layers, 64, step=32)
            lease.commit(history + turn + out)

    peak = kv_peak(model, ours)
    cache.check()
    cache.close()
    del cache, ours
    settle()

    stock = LRUPromptCache()
    layers = make_prompt_cache(model)
    history = first + generate(model, first, layers, 8)
    stock.insert_cache("m", history, layers)
    del layers

    def theirs() -> None:
        layers, rest = stock.fetch_nearest_cache("m", history + turn)
        generate(model, rest, layers, 64, step=32)

    stock_peak = kv_peak(model, theirs)
    ratio, stock_ratio = peak / (entry + room), stock_peak / (entry + room)
    return [
        Row(
            "continue by a short turn: peak KV / (entry + 512 tokens)",
            ratio,
            "≤ 1.05",
            ratio <= 1.05,
            f"{stock_ratio:.2f}",
        )
    ]


# -- 8 concurrent leases on one prefix --------------------------------------------------------------


def bench_share(tokens: int) -> list[Row]:
    model, rng = llama_model(), np.random.default_rng(1)
    prefix = conversation(rng, tokens)
    per_token, rows = token_bytes(model), 8
    cache = onefold.PrefixCache(model, "8GB")
    with cache.lease(prefix) as lease:
        generate(model, lease.rest, lease.layers, 1)
        lease.commit(prefix)
    held = mx.get_active_memory() - weight_bytes(model)

    def ours(cache: onefold.PrefixCache = cache) -> None:
        leases = [cache.lease([*prefix, 100 + i, i]) for i in range(rows)]
        for lease in leases:
            assert lease.cached == tokens
            model(mx.array(lease.rest[:-1])[None], cache=lease.layers)
            mx.eval([c.state for c in lease.layers])
        batch = cache.batch(leases)
        y = mx.array([int(lease.tokens[-1]) for lease in leases])
        for _ in range(16):
            y = mx.argmax(batch.step(y), axis=-1)
            mx.eval(y)
        for lease in leases:
            lease.cancel()

    extra = (kv_peak(model, ours) - held) / rows / per_token
    cache.check()
    cache.close()
    del cache, ours
    settle()

    stock = LRUPromptCache(max_size=64)
    layers = make_prompt_cache(model)
    generate(model, prefix, layers, 1)
    from mlx_lm.models.cache import trim_prompt_cache

    trim_prompt_cache(layers, layers[0].offset - tokens)
    stock.insert_cache("m", prefix, layers)
    del layers

    def theirs() -> None:
        out = [stock.fetch_nearest_cache("m", [*prefix, 100 + i, i]) for i in range(rows)]
        for layers, rest in out:
            generate(model, rest, layers, 4)

    stock_extra = (kv_peak(model, theirs) - held) / rows / per_token
    return [
        Row(
            f"{rows} leases on one {tokens}-token prefix, decoding: extra peak per lease",
            extra,
            "≤ 512",
            extra <= 512,
            f"{stock_extra:.0f}",
            "tokens",
        )
    ]


# -- matching, and the index ------------------------------------------------------------------------


def bench_match() -> list[Row]:
    rng, n = np.random.default_rng(2), 131_072
    tokens = rng.integers(0, 150_000, n).astype(np.int32)
    tree: Tree[Any, Any] = Tree()
    tree.add(tree.root, tokens)
    longer = np.concatenate([tokens, tokens[:100]])
    branch = np.concatenate([tokens[: n // 2], tokens[:1000]])
    as_list = longer.tolist()

    def best(run: Callable[[], object], times: int = 20) -> float:
        took = []
        for _ in range(times):
            start = time.perf_counter()
            run()
            took.append(time.perf_counter() - start)
        return 1e3 * statistics.median(took)

    extend_ms, branch_ms = best(lambda: tree.match(longer)), best(lambda: tree.match(branch))
    convert_ms = best(lambda: np.asarray(as_list, dtype=np.int32))
    trie = PromptTrie()
    trie.add("m", tokens.tolist(), 1)
    stock_extend = best(lambda: trie.search("m", as_list), 3)
    branch_list = branch.tolist()
    stock_branch = best(lambda: trie.search("m", branch_list), 1)
    per_token = tree.index_bytes() / n
    return [
        Row("match, 131,072 tokens: extension", extend_ms, "≤ 2", extend_ms <= 2, f"{stock_extend:.0f}", "ms"),
        Row(
            "match, 131,072 tokens: branch at half",
            branch_ms,
            "≤ 2",
            branch_ms <= 2,
            f"{stock_branch:.0f}",
            "ms",
        ),
        Row("(a Python list: plus its conversion)", convert_ms, "—", True, "—", "ms"),
        Row("index memory per token", per_token, "≤ 16", per_token <= 16, "about 220", "bytes"),
    ]


# -- the ledger against MLX's own count -----------------------------------------------------------


def bench_ledger() -> list[Row]:
    worst = 0.0
    for model in (llama_model(layers=8), hybrid_model()):
        settle()
        weights = mx.get_active_memory()
        cache = onefold.PrefixCache(model, "300MB")
        rng = np.random.default_rng(3)
        known: list[list[int]] = [conversation(rng, 300) for _ in range(4)]

        def off(cache: onefold.PrefixCache = cache, weights: int = weights) -> float:
            held = cache.stats()
            ours = sum(held.bytes[p] for p in ("live", "stored", "checkpoint"))
            real = int(mx.get_active_memory()) - weights
            return abs(ours - real) / max(real, 1 << 20)

        for i in range(100):
            base = known[int(rng.integers(len(known)))]
            cut = len(base) if rng.random() < 0.6 else int(rng.integers(20, len(base)))
            prompt = base[:cut] + conversation(rng, int(rng.integers(1, 200)))
            lease = cache.lease(prompt)
            out: list[int] = []
            for t, _ in generate_step(
                mx.array(lease.rest),
                model,
                max_tokens=int(rng.integers(1, 12)),
                prompt_cache=lease.layers,
                prefill_step_size=128,
            ):
                out.append(int(t))
                mx.eval([c.state for c in lease.layers])
                mx.synchronize()
                if len(out) % 4 == 0:
                    worst = max(worst, off())
            if rng.random() < 0.2:
                lease.cancel()
            else:
                lease.commit(prompt + out)
                known[int(rng.integers(len(known)))] = prompt + out
            worst = max(worst, off())
            if i % 10 == 0:
                cache.check()
        cache.close()
        del cache, model
    return [
        Row(
            "ledger against MLX's active memory, 200 mixed requests: worst difference",
            100 * worst,
            "≤ 1",
            worst <= 0.01,
            "5 times off",
            "%",
        )
    ]


# -- a hybrid model ----------------------------------------------------------------------------------


def bench_hybrid() -> list[Row]:
    model, rng = hybrid_model(), np.random.default_rng(4)
    cache = onefold.PrefixCache(model, "1GB")
    stock = LRUPromptCache(max_size=64)
    history, stock_tokens = conversation(rng, 300), 0
    for _ in range(5):
        with cache.lease(history) as lease:
            out = generate(model, lease.rest, lease.layers, 40)
            lease.commit(history + out)
        layers, rest = stock.fetch_nearest_cache("m", history)
        layers = layers or make_prompt_cache(model)
        generate(model, rest, layers, 1)
        stock.insert_cache("m", history, copy.deepcopy(layers), cache_type="user")
        history = history + out + conversation(rng, 60)
    stored = cache.stats()
    unique = len(history) - 60
    stock_tokens = sum(
        e.prompt_cache[-1].offset if hasattr(e.prompt_cache[-1], "offset") else 0 for e in _stock_entries(stock)
    )
    ratio = stored.stored_tokens / unique
    kept, kv = stored.bytes["checkpoint"] / 1e6, stored.bytes["stored"] / 1e6
    said = f"{kept:.2f} MB in {stored.checkpoints} checkpoints beside {kv:.2f} MB of KV"
    cache.close()
    return [
        Row(
            "hybrid model, 5 turns: tokens of KV stored / unique tokens",
            ratio,
            "≤ 1.05",
            ratio <= 1.05,
            f"{stock_tokens / unique:.1f}",
        ),
        Row(f"  ({said})", float(stored.checkpoints), "≤ 4", stored.checkpoints <= 4, "—", "checkpoints"),
    ]


def _stock_entries(stock: LRUPromptCache) -> list[Any]:
    found: list[Any] = []

    def walk(x: object) -> None:
        if isinstance(x, dict):
            for v in x.values():
                walk(v)
        elif hasattr(x, "prompt_cache"):
            found.append(x)

    walk(vars(stock).get("_trie").__dict__ if "_trie" in vars(stock) else vars(stock))
    return found


# -- decode speed --------------------------------------------------------------------------------------


def bench_decode(tokens: int) -> list[Row]:
    """A lone request on a moved entry, and a 100-turn conversation with branches, against one stock buffer."""
    model, rng = llama_model(), np.random.default_rng(5)
    first = conversation(rng, tokens)
    cache = onefold.PrefixCache(model, "8GB")
    with cache.lease(first) as lease:
        generate(model, lease.rest, lease.layers, 1)
        lease.commit(first)
    layers = make_prompt_cache(model)
    generate(model, first, layers, 1)

    long = conversation(rng, 64)
    branchy = onefold.PrefixCache(model, "8GB")
    for _ in range(100):
        for attempt in (0, 1):  # each turn is asked twice: a branch that stays behind
            prompt = [*long, *conversation(rng, 16), attempt]
            with branchy.lease(prompt) as lease:
                out = generate(model, lease.rest, lease.layers, 3)
                lease.commit(prompt + out)
        long = prompt + out
    n = len(long)
    plain = make_prompt_cache(model)
    generate(model, long, plain, 1)

    def speed(layers: object, n: int = 10) -> float:
        token = mx.array([[7]])
        mx.eval(model(token, cache=layers))
        start = time.perf_counter()
        for _ in range(n):
            mx.eval(model(token, cache=layers))
        return n / (time.perf_counter() - start)

    def compare(cache: onefold.PrefixCache, tokens: list[int], stock: object, pairs: int = 21) -> float:
        """Short runs in turn, so that what else the machine does falls on both alike."""
        with cache.lease([*tokens, 7], reserve_tokens=256) as lease:
            assert lease.cached == len(tokens)
            return statistics.median(speed(lease.layers) / speed(stock) for _ in range(pairs))

    ratio, branched = compare(cache, first, layers), compare(branchy, long, plain)
    cache.close()
    branchy.close()
    return [
        Row("decode speed, lone request on a moved entry / stock", ratio, "≥ 0.97", ratio >= 0.97, "1"),
        Row(
            f"decode speed, 100 turns with branches ({n} tokens) / one buffer",
            branched,
            "≥ 0.95",
            branched >= 0.95,
            "1",
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated: continue,share,match,ledger,hybrid,decode")
    parser.add_argument("--tokens", type=int, default=4096)
    args = parser.parse_args()
    benches: dict[str, Callable[[], list[Row]]] = {
        "continue": lambda: bench_continue(args.tokens),
        "share": lambda: bench_share(args.tokens),
        "match": bench_match,
        "ledger": bench_ledger,
        "hybrid": bench_hybrid,
        "decode": lambda: bench_decode(args.tokens),
    }
    chosen = [b for b in args.only.split(",") if b] or list(benches)
    console = Console(width=150)
    table = Table(title=f"Onefold {onefold.__version__}, MLX {version('mlx')}, {mx.default_device()}")
    for column in ("what", "Onefold", "target", "", "mlx-lm, same run"):
        table.add_column(column, justify="left" if column == "what" else "right")
    missed = 0
    for name in chosen:
        with console.status(name):
            rows = benches[name]()
        for row in rows:
            missed += not row.met
            table.add_row(
                row.what,
                f"{row.ours:.2f} {row.unit}".strip(),
                row.target,
                "ok" if row.met else "MISSED",
                row.stock,
            )
    console.print(table)
    console.print("Rows on one 32k prefix, on a GPU: python benchmarks/gpu.py")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
