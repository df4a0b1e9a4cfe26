"""Identifies a model, so that different models never share KV.

Another model, adapter, KV format, bound or caller's namespace is another namespace. A model is identified not by its
name but by its weights (shapes and types of all of them, a sample of the bytes of each) and by its modules'
configuration. On disk, where KV outlives the process, it is identified by every byte of its weights and by the code of
its modules.
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
    """Returns the name of a model for messages: its module and class, such as "llama.Model"."""
    return "no model" if model is None else f"{type(model).__module__.rpartition('.')[2]}.{type(model).__name__}"


def model_digest(*models: nn.Module | None) -> str:
    digest = xxhash.xxh3_128()
    for model in models:
        if model is None:
            digest.update(b"none")
            continue
        digest.update(type(model).__module__.encode())
        digest.update(repr(getattr(model, "args", None)).encode())  # settings that the weights do not show, like rope
        for name, module in sorted(model.named_modules(), key=lambda pair: pair[0]):
            digest.update(f"{name}{type(module).__qualname__}{_settings(module)}".encode())
        for name, p in sorted(dict(tree_flatten(model.parameters())).items()):
            digest.update(f"{name}{p.shape}{p.dtype}".encode())
            flat = p.reshape(-1)
            step = max(1, flat.size // _SAMPLE)
            digest.update(np.array(mx.view(flat[::step][:_SAMPLE], mx.uint8)).tobytes())
    return digest.hexdigest()


def lasting_digest(known: str, *models: nn.Module | None) -> str:
    """Returns the digest for KV that outlives the process: of all weights, and of the source of the modules that
    compute with them. `known` is the models' `model_digest`."""
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
    """Returns a module's configuration in addition to its weights, such as the scale of an adapter. Private attributes
    (`_scale`, made at the first forward) follow from it."""
    settings = {**vars(module), **module}
    return sorted((k, _as_text(v)) for k, v in settings.items() if not k.startswith("_"))


def _as_text(value: Any) -> str:
    """Returns a value as text that is the same in every process. Of modules and arrays, only the name of the class:
    they are digested separately."""
    if isinstance(value, (nn.Module, mx.array)):
        return type(value).__name__
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_as_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(sorted(f'{k}:{_as_text(v)}' for k, v in value.items()))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _as_text({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _hash(array: mx.array) -> bytes:
    digest = xxhash.xxh3_128()
    for part in arrays.Payload([array], _COPIED_BYTES, direct=arrays.addressable()):
        digest.update(part.data)
    return digest.digest()


def _code(model: nn.Module) -> set[str]:
    """Returns the names of the modules that define the model's classes, and of those in its package from which they
    import."""
    own = {type(m).__module__ for m in model.modules()}
    package = type(model).__module__.rpartition(".")[0]
    used = {str(getattr(v, "__module__", "")) for m in own if m in sys.modules for v in vars(sys.modules[m]).values()}
    return own | {m for m in used if package and m.startswith(package + ".")}


def _source(module: str) -> bytes:
    try:
        return inspect.getsource(sys.modules[module]).encode()
    except (OSError, TypeError, KeyError):
        return b"?"
