"""The checks of `make mac-check` that compute in their own process: decoding, a long prompt, the ledger, donation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from gpu_serve import Asked, Numbers, Words, ms, settle
from mac_check_report import Found, Given, Say, Skipped, table
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from shapes import llama_model

from onefold.cache.memory import device
from onefold.cache.model import metal
from onefold.engine.engine import Engine

ROWS = 8
AT_LEAST = 0.9
CHUNK_SECONDS = 2.0
WORDS = 100
"""Tokens are below this: every model has so many."""
KIB16 = 16 << 10
SMALL_MEMORY = 8_000_000_000


def _dtype() -> mx.Dtype:
    """float16: every Apple GPU computes with it natively. MLX's CPU device emulates it."""
    return mx.float16 if device.on_gpu() else mx.float32


def _small(given: Given) -> bool:
    return given.quick or not device.on_gpu()


def _model(given: Given) -> nn.Module:
    """The model that was given, or one of a billion random weights; a tiny one with --quick and on a CPU."""
    if given.model:
        return mlx_lm.load(given.model)[0]
    if _small(given):
        return llama_model(layers=4, hidden=256, heads=8, kv_heads=2, head_dim=64, intermediate=512, dtype=_dtype())
    shape = {"hidden": 2048, "heads": 32, "kv_heads": 8, "head_dim": 64, "intermediate": 8192, "vocab": 32000}
    return llama_model(layers=4 if device.memory_bytes() < SMALL_MEMORY else 16, dtype=_dtype(), **shape)  # type: ignore[arg-type]


def _mb(n_bytes: float) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def _answered(asked: list[Asked], n_tokens: int) -> None:
    """Waits for the answers. Raises RuntimeError if one has failed or is too short."""
    for one in asked:
        if len(one.wait().text.split()) < n_tokens:
            raise RuntimeError(f"an answer has {len(one.text.split())} of {n_tokens} tokens; see the output above")


# -- decoding --------------------------------------------------------------------------------------------


def _ours(model: nn.Module, prompts: list[list[int]], n_tokens: int) -> tuple[float, float]:
    with Engine(model, Numbers(), budget="2GB") as engine:
        one = Asked(engine, prompts[0], n_tokens)
        _answered([one], n_tokens)
        alone = 1e3 / ms(one.times)
        began = time.perf_counter()
        rows = [Asked(engine, prompt, n_tokens) for prompt in prompts[1:]]
        _answered(rows, n_tokens)
        return alone, len(rows) * n_tokens / (time.perf_counter() - began)


def _theirs(model: nn.Module, prompts: list[list[int]], n_tokens: int) -> tuple[float, float]:
    times = []
    for _ in generate_step(mx.array(prompts[0]), model, max_tokens=n_tokens):
        times.append(time.perf_counter())
    rows = prompts[1:]
    generator = BatchGenerator(model, max_tokens=n_tokens, completion_batch_size=ROWS, prefill_batch_size=ROWS)
    began = time.perf_counter()
    left = set(generator.insert(rows, [n_tokens] * len(rows)))
    while left:
        _, responses = generator.next()
        left -= {r.uid for r in responses if r.finish_reason is not None}
    together = len(rows) * n_tokens / (time.perf_counter() - began)
    generator.close()
    return 1e3 / ms(times), together


def decode(given: Given, say: Say) -> Found:
    """Tokens per second of one stream and of eight, beside mlx-lm, in turns."""
    model, words = _model(given), Words(WORDS)
    n_prompt, n_tokens, rounds = (128, 48, 3) if _small(given) else (512, 128, 3)
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "theirs": []}
    sides: list[tuple[str, Callable[[Any, list[list[int]], int], tuple[float, float]]]]
    sides = [("ours", _ours), ("theirs", _theirs)]
    for number in range(rounds + 1):
        for name, measure in sides if number % 2 else sides[::-1]:
            prompts = [words(n_prompt + 7 * i) for i in range(ROWS + 1)]
            settle()
            one, many = measure(model, prompts, n_tokens)
            if number:  # the first is to warm up
                found[name].append((one, many))
            told = {"ours": "Onefold", "theirs": "mlx-lm"}[name]
            say(f"round {number} of {rounds}, {told}: {one:.1f} tokens/s, {ROWS} at once {many:.1f}")
    faults, rows, ratios = [], [], []
    for at, what in enumerate(("one stream", f"{ROWS} at once")):
        ours, theirs = (statistics.median(pair[at] for pair in found[name]) for name in ("ours", "theirs"))
        ratios.append(f"{what} {ours / theirs:.2f} times mlx-lm")
        rows.append((what, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"))
        if ours < AT_LEAST * theirs and device.on_gpu():
            known = ", which is known until Onefold has a decode kernel for Metal" if at and device.on_metal() else ""
            faults.append(f"{what}: {ours / theirs:.2f} times mlx-lm's tokens per second{known}")
    header = ("tokens/s", "Onefold", "mlx-lm", "ratio")
    not_judged = "" if device.on_gpu() else "times are not judged on a CPU"
    return Found(", ".join(ratios), table(header, rows), faults, not_judged)


# -- a long prompt ---------------------------------------------------------------------------------------


def fused(given: Given, say: Say) -> Found:
    """Whether scores are stored only where bytes are reserved for them."""
    from fused import compare

    if not device.on_gpu():
        raise Skipped("on a CPU no attention is fused, and all scores are reserved")
    rows, wrong = compare()
    faults = [f"scores are stored and not reserved: {shape}" for shape in wrong]
    idle = sum(measured == "fused" != reserved for _, measured, reserved in rows)
    told = f"of {len(rows)} shapes {len(wrong)} store scores that are not reserved; {idle} are reserved and fused"
    return Found(told, table(("shape", "measured", "reserved as"), rows), faults)


def long_prompt(given: Given, say: Say) -> Found:
    """A prompt whose attention Metal does not fuse, in the chunks that Onefold chooses by itself."""
    n_tokens = 1024 if _small(given) else 16384
    shape = {"hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 256, "intermediate": 2048, "vocab": 1000}
    model = llama_model(layers=2, dtype=_dtype(), **shape)  # type: ignore[arg-type]
    say(f"{n_tokens} tokens, 16 heads of 256; keep the display on and use the machine: the cursor should not stall")
    tokens = Words(WORDS)(n_tokens)
    weights = settle()
    chunks: list[tuple[int, float]] = []
    with onefold.PrefixCache(model, device.default_budget(model)) as cache:
        with cache.lease(tokens) as lease:
            for chunk in lease.chunks():
                began = time.perf_counter()
                try:
                    model(mx.array(chunk)[None], cache=lease.layers)
                    mx.eval([layer.state for layer in lease.layers])
                except RuntimeError as error:
                    at = sum(n for n, _ in chunks)
                    raise RuntimeError(f"chunk of {len(chunk)} at {at}: {error}{metal.hint(error)}") from error
                chunks.append((len(chunk), time.perf_counter() - began))
                if len(chunks) % 4 == 0:
                    say(f"{sum(n for n, _ in chunks)} tokens, this chunk took {chunks[-1][1] * 1e3:.0f} ms")
            lease.commit()
        stats = cache.stats()
    # the first chunk makes kernels, which is no time of the GPU's
    peak, longest = mx.get_peak_memory() - weights, max(chunks[1:] or chunks, key=lambda pair: pair[1])
    faults = []
    if device.on_gpu() and longest[1] >= CHUNK_SECONDS:
        faults.append(f"a chunk of {longest[0]} tokens took {longest[1]:.1f} s")
    reserved = stats.peak_bytes - stats.bytes["pool"]
    for name, limit in (("budget", stats.budget_bytes), ("ledger's peak", reserved)):
        if peak > limit:
            faults.append(f"the peak beyond the weights is {_mb(peak)}, more than the {name}, {_mb(limit)}")
    rows = [
        ("tokens, chunks", f"{n_tokens}, {len(chunks)} of {min(chunks)[0]} to {max(chunks)[0]}"),
        ("first chunk, with kernels that are made then", f"{chunks[0][0]} tokens, {chunks[0][1] * 1e3:.0f} ms"),
        ("longest of the others", f"{longest[0]} tokens, {longest[1] * 1e3:.0f} ms"),
        ("tokens/s", f"{sum(n for n, _ in chunks) / sum(s for _, s in chunks):.0f}"),
        ("peak beyond the weights", _mb(peak)),
        ("ledger's peak, without MLX's pool", _mb(reserved)),
        ("KV", _mb(n_tokens * stats.token_bytes)),
        ("budget", _mb(stats.budget_bytes)),
    ]
    told = f"{n_tokens} tokens, longest chunk {longest[1] * 1e3:.0f} ms, peak {_mb(peak)}, ledger's peak "
    return Found(told + _mb(reserved), table(("", ""), rows), faults)


# -- the books -------------------------------------------------------------------------------------------


def ledger(given: Given, say: Say) -> Found:
    """Five turns of a conversation: MLX's own figures beside the ledger's."""
    model, words = _model(given), Words(WORDS)
    n_tokens = 24 if _small(given) else 128
    weights = settle()
    with Engine(model, Numbers(), budget="1GB") as engine:
        _answered([Asked(engine, words(64), 4)], 4)  # what MLX keeps from the first forward on is not KV
        engine.clear()
        beside = settle() - weights
        talk = words(8 * n_tokens)
        peaks = []
        for turn in range(5):
            mx.reset_peak_memory()
            asked = Asked(engine, talk, n_tokens)
            _answered([asked], n_tokens)
            peaks.append(mx.get_peak_memory() - weights)
            talk = [*talk, *(int(t) for t in asked.text.split()), *words(2 * n_tokens)]
            say(f"turn {turn + 1}: {asked.hit.cached} tokens reused, peak {_mb(peaks[-1])} beyond the weights")
        engine.check()
        stats, held = engine.cache.stats(), engine.cache.inventory.held_bytes
        active = settle() - weights - beside
    buffers = 2 * len(model.layers) * max(1, stats.nodes)
    allowed = 0.1 * held + KIB16 * buffers
    faults = []
    if max(peaks) > stats.budget_bytes:
        faults.append(f"the peak beyond the weights is {_mb(max(peaks))}, the budget {_mb(stats.budget_bytes)}")
    if abs(active - held) > allowed:
        faults.append(f"MLX holds {_mb(active)}, the ledger has {_mb(held)}; {_mb(allowed)} may differ")
    rows = [
        ("budget", _mb(stats.budget_bytes)),
        ("peak beyond the weights, by turn", ", ".join(map(_mb, peaks))),
        ("ledger's peak (with MLX's pool)", _mb(stats.peak_bytes)),
        ("ledger at the end", _mb(held)),
        ("MLX at the end, beyond weights and tables", _mb(active)),
        ("tables that the model keeps", _mb(beside)),
        ("buffers at most", str(buffers)),
    ]
    told = f"peak {_mb(max(peaks))} of a budget of {_mb(stats.budget_bytes)}; ledger {_mb(held)}, MLX {_mb(active)}"
    return Found(told, table(("", ""), rows), faults)


# -- donation --------------------------------------------------------------------------------------------


def _steps(model: Any, layers: list[Any], n: int) -> tuple[float, int]:
    """Decodes `n` tokens with each step queued before the one before is read. Returns the milliseconds of a step and
    the bytes by which the peak exceeds what was held before."""

    def step(token: mx.array) -> mx.array:
        following = mx.argmax(model(token[None], cache=layers)[:, -1], axis=-1)
        mx.async_eval(following)
        return following

    token = step(mx.array([1]))
    for _ in range(8):
        following = step(token)
        token.item()
        token = following
    mx.eval(token, [layer.state for layer in layers])
    mx.clear_cache()
    mx.reset_peak_memory()
    held, began = mx.get_active_memory(), time.perf_counter()
    for _ in range(n):
        following = step(token)
        token.item()
        token = following
    mx.eval(token)
    return (time.perf_counter() - began) / n * 1e3, mx.get_peak_memory() - held


def _feed(model: Any, layers: list[Any], tokens: Any) -> None:
    model(mx.array(tokens)[None], cache=layers)
    mx.eval([layer.state for layer in layers])


def donation(given: Given, say: Say) -> Found:
    """The peak of queued decode steps on a long context, ours beside mlx-lm's cache."""
    context, n = (2048 if _small(given) else 8192), 64
    shape = {"hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "intermediate": 512}
    model: Any = llama_model(layers=4, dtype=_dtype(), **shape)  # type: ignore[arg-type]
    tokens = Words(WORDS)(context)
    found: dict[str, list[tuple[float, int]]] = {"Onefold": [], "mlx-lm": []}
    for number in range(3):
        settle()
        with onefold.PrefixCache(model, "1GB") as cache, cache.lease(tokens, reserve_tokens=2 * n) as lease:
            for chunk in lease.chunks(512):
                _feed(model, lease.layers, chunk)
            _feed(model, lease.layers, tokens[-1:])
            found["Onefold"].append(_steps(model, lease.layers, n))
            lease.discard()
        settle()
        layers = make_prompt_cache(model)
        for at in range(0, context, 512):
            _feed(model, layers, tokens[at : at + 512])
        found["mlx-lm"].append(_steps(model, layers, n))
        del layers
        say(f"round {number + 1} of 3: " + ", ".join(f"{k} {_mb(v[-1][1])}" for k, v in found.items()))
    array_bytes = context * shape["kv_heads"] * shape["head_dim"] * _dtype().size
    rows, peaks = [], {name: statistics.median(peak for _, peak in runs) for name, runs in found.items()}
    for name, runs in found.items():
        rows.append((name, f"{statistics.median(took for took, _ in runs):.2f} ms", _mb(peaks[name])))
    rows.append(("one layer's array", "", _mb(array_bytes)))
    faults = []
    if peaks["Onefold"] >= array_bytes:
        faults.append(f"the peak grows by {_mb(peaks['Onefold'])}, and one layer's array is {_mb(array_bytes)}")
    told = f"the peak grows by {_mb(peaks['Onefold'])}, mlx-lm's by {_mb(peaks['mlx-lm'])}"
    return Found(f"{told}; one layer's array is {_mb(array_bytes)}", table(("", "step", "peak growth"), rows), faults)
