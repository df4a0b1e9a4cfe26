"""The disk tier on a GPU: Llama-8B shape, random weights, bf16.

    python benchmarks/gpu_disk.py [--layers 32] [--tokens 16384] [--folder DIR]

write      a conversation committed and written through: seconds, GB/s, the peak beyond what is held
decode     ms per token while that is being written, and after
restore    the same after a restart: seconds, GB/s, the peak over the entry, the time to the next turn's first token
           beside a prefill of everything, and whether the next tokens are those of one that never left memory
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import onefold  # first: it preloads a real BLAS

# isort: split
import mlx.core as mx
from mlx_lm.generate import generate_step
from shapes import llama_model

from onefold.cache.memory import arrays


def words(n: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + seed * 13) % 500 for i in range(n)]


def turn(model: Any, cache: onefold.PrefixCache, prompt: list[int], n: int) -> tuple[list[int], float, float]:
    """Tokens, seconds to the first of them, and ms per further one."""
    began = time.perf_counter()
    found: list[int] = []
    first = 0.0
    with cache.lease(prompt, reserve_tokens=n) as lease:
        for token, _ in generate_step(mx.array(lease.rest), model, prompt_cache=lease.layers, max_tokens=n):
            if not found:
                first = time.perf_counter() - began
            found.append(int(token))
        each = (time.perf_counter() - began - first) / max(1, n - 1) * 1000
        held = [*prompt, *found][: lease.offset]
        lease.commit(held)
    return found, first, each


def written(
    model: Any, settings: dict[str, Any], prompt: list[int], more: list[int], rows: list[tuple[str, str]]
) -> tuple[list[int], list[int], float]:
    """A conversation is written while another one decodes. Returns its tokens, and its next turn from memory: the
    answer and the seconds to its first token."""
    with onefold.PrefixCache(model, **settings) as cache:
        said, _, _ = turn(model, cache, prompt, 16)
        whole = [*prompt, *said[:-1]]
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        began = time.perf_counter()
        _, _, beside = turn(model, cache, words(300, 3), 64)
        written_meanwhile = cache.stats().disk.written_bytes
        cache.flush()
        seconds = time.perf_counter() - began
        size = cache.stats().disk.written_bytes
        rows.append(("written", f"{size / 1e9:.2f} GB in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s"))
        rows.append(("peak while writing, beyond what was held", f"{(mx.get_peak_memory() - held) / 1e9:.3f} GB"))
        mx.reset_peak_memory()
        held = mx.get_active_memory()
        _, _, after = turn(model, cache, words(300, 4), 64)
        rows.append(("the same with nothing to write", f"{(mx.get_peak_memory() - held) / 1e9:.3f} GB"))
        meanwhile = f"{written_meanwhile / 1e9:.2f} GB written meanwhile"
        rows.append(("decode while writing", f"{beside:.2f} ms/token, {meanwhile}"))
        rows.append(("decode with nothing to write", f"{after:.2f} ms/token"))
        cache.check()
        warm, warm_first, _ = turn(model, cache, [*whole, *more], 16)
    return whole, warm, warm_first


def restored(model: Any, settings: dict[str, Any], tokens: list[int], rows: list[tuple[str, str]]) -> None:
    """The conversation is read back."""
    with onefold.PrefixCache(model, **settings) as cache:
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        began = time.perf_counter()
        restore = cache.restore(tokens)
        assert restore is not None
        while restore.step():
            pass
        seconds = time.perf_counter() - began
        stats = cache.stats()
        entry = stats.bytes["stored"] + stats.bytes["live"]
        rows.append(
            (
                "restored",
                f"{stats.disk.restored_bytes / 1e9:.2f} GB in {seconds:.2f} s, "
                f"{stats.disk.restored_bytes / seconds / 1e9:.2f} GB/s",
            )
        )
        rows.append(("peak over the entry", f"{(mx.get_peak_memory() - before) / entry:.3f}"))
        rows.append(("active memory beside the ledger", f"{mx.get_active_memory() - before} {entry}"))
        cache.clear(disk=False)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layers", type=int, default=32)
    options.add_argument("--tokens", type=int, default=16_384)
    options.add_argument("--folder", default=None)
    given = options.parse_args()
    folder = Path(given.folder or tempfile.mkdtemp())
    shape = {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "vocab": 32000}
    model = llama_model(layers=given.layers, dtype=mx.bfloat16, **shape)  # type: ignore[arg-type]
    mx.eval(model.parameters())
    weights = mx.get_active_memory()
    rows: list[tuple[str, str]] = [("bytes are read where they lie", str(arrays.addressable()))]
    settings: dict[str, Any] = {"budget": "40GB", "disk": folder, "disk_budget": "30GB", "disk_mode": "through"}
    prompt, more = words(given.tokens), words(32, 5)
    with onefold.PrefixCache(model, "40GB") as cache:
        turn(model, cache, words(512, 9), 8)  # warm
        _, cold_first, _ = turn(model, cache, prompt, 2)
    whole, warm, warm_first = written(model, settings, prompt, more, rows)
    print("\n".join(f"{name:45} {value}" for name, value in rows), flush=True)
    rows.clear()
    mx.clear_cache()
    restored(model, settings, [*whole, *more], rows)
    with onefold.PrefixCache(model, **settings) as cache:
        again, first, _ = turn(model, cache, [*whole, *more], 16)
        rows.append(("first token after a restart", f"{first:.2f} s"))
        rows.append(("first token from memory, and cold", f"{warm_first:.2f} s, {cold_first:.2f} s"))
        rows.append(("the same tokens as from memory", str(again == warm)))
        rows.append(("tokens from disk", f"{cache.stats().tokens_from_disk} of {len(whole)}"))
        rows.append(("rejected", str(cache.stats().disk.rejected_records)))
        cache.check()
    rows.append(("weights alone at the end", str(abs(mx.get_active_memory() - weights) < 1 << 20)))
    print("\n".join(f"{name:45} {value}" for name, value in rows))
    if given.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
