"""MLX's fused attention on slices of a buffer, on a GPU: which of them it gets wrong.

    python benchmarks/gpu_attention.py

Each row: queries, whether the slice of keys and values begins at 0 or further on, how many of the shapes tried gave
NaN or another result than the same values in a buffer of their own, or how the process ended. Onefold gives the kernel
no slice that begins past 0 on CUDA (`cache/model/composed_row.py`); its last rows run its own attention on such pieces.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from importlib.metadata import version

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx

from onefold.cache.memory.shapes import View
from onefold.cache.model.attention import Handle, attention
from onefold.cache.model.formats.plain import PlainCodec

QUERIES = (1, 2, 9, 512)


def wrong(out: mx.array, want: mx.array) -> str:
    if bool(mx.isnan(out).any()):
        return "nan"
    return "other" if bool(mx.abs(out - want).max() > 3e-2 * mx.abs(want).max()) else ""


def tried(by: str, queries: int, past: bool) -> dict[str, int]:
    found = {"": 0, "nan": 0, "other": 0}
    shapes = itertools.product((mx.bfloat16, mx.float16, mx.float32), (64, 128), ((8, 2), (32, 8), (4, 4)))
    for dtype, dim, (heads, kv_heads) in shapes:
        for lo, length in ((1, 300), (8, 1000), (64, 77), (256, 2048), (300, 513)):
            start = lo if past else 0
            mx.random.seed(length)
            q = mx.random.normal((1, heads, queries, dim)).astype(dtype)
            k, v = (mx.random.normal((1, kv_heads, 4096, dim)).astype(dtype) for _ in range(2))
            hi, scale = start + max(length, queries), 1 / math.sqrt(dim)
            mask = "causal" if queries > 1 else None
            own = [mx.contiguous(a[..., start:hi, :]) + 0 for a in (k, v)]
            want = mx.fast.scaled_dot_product_attention(q, *own, scale=scale, mask=mask)
            if by == "kernel":
                slices = [a[..., start:hi, :] for a in (k, v)]
                out = mx.fast.scaled_dot_product_attention(q, *slices, scale=scale, mask=mask)
            else:
                views = [View([k, v], start, hi, 1)]
                pair = [Handle([views], PlainCodec(), (1, kv_heads, hi - start, dim), dtype, [0])] * 2
                out = attention(q, pair[0], pair[1], None, scale, mask)
            found[wrong(out, want)] += 1
    return found


def main() -> None:
    if len(sys.argv) > 1:
        found = tried(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "past 0")
        print(f"{sum(found.values()):>6} {found['nan']:>5} {found['other']:>6}")
        return
    print(f"{mx.default_device()}, MLX {version('mlx')}")
    print(f"{'queries':>8} {'by':>8} {'begins':>7} {'tried':>6} {'nan':>5} {'other':>6}")
    for by, queries, where in itertools.product(("kernel", "onefold"), QUERIES, ("0", "past 0")):
        command = [sys.executable, __file__, by, str(queries), where]  # a process each: some calls end it
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        said = run.stdout.rstrip() if run.returncode == 0 else "  the process ended: " + _last_error(run.stderr)
        print(f"{queries:>8} {by:>8} {where:>7} {said}", flush=True)


def _last_error(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if "Error" in line), text[-100:])


if __name__ == "__main__":
    main()
