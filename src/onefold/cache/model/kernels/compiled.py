"""Makes kernels from their sources.

MLX finds what it compiled by the name of a kernel. On CUDA some versions do so whatever its source is, also in files
that an earlier process wrote. So a digest of the source is part of the name.
"""

from __future__ import annotations

import hashlib
from typing import Any

import mlx.core as mx


def kernel(parts: dict[str, Any], *, metal: bool = False, shared_memory: int = 0) -> Any:
    """Returns the kernel with this name, these arguments, this header and this source, to be called as MLX's own.
    `shared_memory`: bytes that a block asks for beyond what the source declares, on CUDA."""
    written = "\0".join((parts["header"], parts["source"]))
    name = f"{parts['name']}_{hashlib.sha256(written.encode()).hexdigest()[:12]}"
    given = {**parts, "name": name, "ensure_row_contiguous": False}
    return mx.fast.metal_kernel(**given) if metal else mx.fast.cuda_kernel(**given, shared_memory=shared_memory)
