"""Namespaces: what may never share KV.

Another model, adapter, KV format, bound, or salt is another namespace. A model is told by its weights, not by
its name: shapes and types of all of them, and a sample of the bytes of each.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash
from mlx.utils import tree_flatten

_SAMPLE = 64


def model_digest(*models: nn.Module | None) -> str:
    digest = xxhash.xxh3_128()
    for model in models:
        if model is None:
            digest.update(b"none")
            continue
        digest.update(type(model).__module__.encode())
        digest.update(repr(getattr(model, "args", None)).encode())  # what the weights do not show, rope for one
        for name, p in sorted(dict(tree_flatten(model.parameters())).items()):
            digest.update(f"{name}{p.shape}{p.dtype}".encode())
            flat = p.reshape(-1)
            step = max(1, flat.size // _SAMPLE)
            digest.update(np.array(mx.view(flat[::step][:_SAMPLE], mx.uint8)).tobytes())
    return digest.hexdigest()
