"""Namespaces: what may never share KV.

Another model, adapter, KV format, bound, or salt is another namespace. A model is told by its weights, not by
its name: shapes and types of all of them, and a sample of the bytes of each. On disk, where KV outlives the process, by
the sum of all bytes too, and by the code that computes with them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Hashable
from typing import Any

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


def lasting_digest(known: str, *models: nn.Module | None) -> str:
    """For KV that outlives the process: all of the weights, and the source of the modules that compute with them;
    `known` is their `model_digest`."""
    digest = hashlib.blake2b(known.encode(), digest_size=16)
    for model in models:
        if model is None:
            continue
        sums = {n: mx.sum(_words(p)) for n, p in sorted(dict(tree_flatten(model.parameters())).items())}
        mx.eval(sums)
        for name, total in sums.items():
            digest.update(f"{name}{total.item()}".encode())
        for module in sorted(_code(model)):
            digest.update(module.encode() + _source(module))
    return digest.hexdigest()


def _words(array: mx.array) -> mx.array:
    """Its bytes as whole numbers, whose sum wraps around."""
    flat = array.reshape(-1)
    size = flat.dtype.size
    return (
        flat.astype(mx.uint32)
        if flat.dtype == mx.bool_
        else mx.view(flat, {1: mx.uint8, 2: mx.uint16}.get(size, mx.uint32))
    )


def _code(model: nn.Module) -> set[str]:
    """The modules that the model's classes are of, and those that they have something of, within its package."""
    own = {type(m).__module__ for m in model.modules()}
    package = type(model).__module__.rpartition(".")[0]
    used = {str(getattr(v, "__module__", "")) for m in own if m in sys.modules for v in vars(sys.modules[m]).values()}
    return own | {m for m in used if package and m.startswith(package + ".")}


def _source(module: str) -> bytes:
    try:
        return inspect.getsource(sys.modules[module]).encode()
    except (OSError, TypeError, KeyError):
        return b"?"


def salt_of(namespace: Hashable) -> str | None:
    """A name for a caller's namespace that will be the same in another process; None if it has none."""
    plain = _plain(namespace)
    return None if plain is None else json.dumps(plain)


def _plain(value: Any) -> list[Any] | None:
    if value is None or isinstance(value, (bool, int, float, str)):
        return [type(value).__name__, repr(value)]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, tuple):
        parts = [_plain(v) for v in value]
        return None if None in parts else ["tuple", parts]
    return None


def name_of(about: dict[str, Any], salt: str) -> str:
    """The folder of a namespace: a digest of everything that changes the bytes, and of the salt."""
    text = json.dumps([about, salt], sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=16, person=b"onefold space").hexdigest()
