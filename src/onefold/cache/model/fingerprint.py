"""Namespaces: what may never share KV.

Another model, adapter, KV format, bound, or salt is another namespace. A model is told by its weights, not by
its name: shapes and types of all of them, a sample of the bytes of each, and what its modules were told beside. On
disk, where KV outlives the process, by every byte of them, and by the code that computes with them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import xxhash
from mlx.utils import tree_flatten

from onefold.cache.memory import arrays

_SAMPLE = 64
_COPIED_BYTES = 64 << 20


def model_name(model: nn.Module | None) -> str:
    """What to call a model in messages: its module and class, such as "llama.Model"."""
    return "no model" if model is None else f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"


def model_digest(*models: nn.Module | None) -> str:
    digest = xxhash.xxh3_128()
    for model in models:
        if model is None:
            digest.update(b"none")
            continue
        digest.update(type(model).__module__.encode())
        digest.update(repr(getattr(model, "args", None)).encode())  # what the weights do not show, rope for one
        for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
            digest.update(f"{name}{type(module).__qualname__}{_settings(module)}".encode())
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
        for name, weight in sorted(dict(tree_flatten(model.parameters())).items()):
            digest.update(name.encode() + _hash(weight))
        for module in sorted(_code(model)):
            digest.update(module.encode() + _source(module))
    return digest.hexdigest()


def _settings(module: nn.Module) -> list[tuple[str, str]]:
    """What a module was told beside its weights, such as the scale of an adapter. What it keeps for itself (`_scale`,
    made at the first forward) follows from that."""
    told = {**vars(module), **module}
    return sorted((k, _told(v)) for k, v in told.items() if not k.startswith("_"))


def _told(value: Any) -> str:
    """A value in words, without what differs from process to process. Modules and arrays are told elsewhere."""
    if isinstance(value, (nn.Module, mx.array)):
        return type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_told, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{k}:{_told(v)}' for k, v in value.items()))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _told({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _hash(array: mx.array) -> bytes:
    digest = xxhash.xxh3_128()
    for part in arrays.Payload([array], _COPIED_BYTES, direct=arrays.addressable()):
        digest.update(part.data)
    return digest.digest()


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
