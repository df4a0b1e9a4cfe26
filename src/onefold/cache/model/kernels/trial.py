"""Tries a device's kernels in a process of their own before they serve, and keeps the results.

A wrong kernel may give wrong results, but also hang, or end its process. So it is compared with plain operations
(`comparison`) in a child process (`child`) with a time limit: once for each device, shape or type, version of MLX and
Onefold, and content of the kernels' source files. The results are in `kernels.json` in the user's cache folder.
`onefold doctor` repeats the comparison.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.backend import version_of
from onefold.cache.model.kernels.coded_rows import Coding
from onefold.cache.model.kernels.decode import Format, Shape
from onefold.cache_folder import cache_folder
from onefold.errors import ConfigError

log = logging.getLogger("onefold")

SECONDS = 120.0
"""A child has so long: it imports MLX, and compiles each variant."""
FILE = "kernels.json"
CHILD = "onefold.cache.model.kernels.child"
_TYPES = {"bfloat16": mx.bfloat16, "float16": mx.float16, "float32": mx.float32}


class Trial(NamedTuple):
    """What is tried of the decode kernel: a shape, with the heads of the queries and of the keys."""

    shape: Shape
    heads: int
    n_kv: int

    def described(self) -> dict[str, Any]:
        """Returns it in values that JSON has."""
        form = self.shape.format
        assert form is not None
        dims = {"key_dim": self.shape.key_dim, "value_dim": self.shape.value_dim}
        heads = {"heads": self.heads, "kv_heads": self.n_kv}
        return {**dims, **heads, "type": str(self.shape.dtype).rpartition(".")[2], "format": list(form)}

    @classmethod
    def parsed(cls, described: dict[str, Any]) -> Trial:
        """Raises KeyError, TypeError or ValueError if the description is invalid."""
        name, arrays, bits, group, value_bits, turns = described["format"]
        form = Format(str(name), int(arrays), int(bits), int(group), int(value_bits), bool(turns))
        dims = int(described["key_dim"]), int(described["value_dim"])
        return cls(Shape(*dims, _TYPES[described["type"]], form), int(described["heads"]), int(described["kv_heads"]))

    def __str__(self) -> str:
        given = self.described()
        form = self.shape.format
        assert form is not None
        bits = f"{form.bits} and {form.value_bits}" if form.value_bits else form.bits
        stored = given["type"] if form.name == "plain" else f"{bits} bits, {form.name}"
        k, v = self.shape.key_dim, self.shape.value_dim
        return f"heads of {k if k == v else f'{k} and {v}'} in {stored}, {self.heads} on {self.n_kv}"


class ProductTrial(NamedTuple):
    """What is tried of the kernel for products: a type of weights."""

    dtype: mx.Dtype

    def described(self) -> dict[str, Any]:
        return {"product": str(self.dtype).rpartition(".")[2]}

    def __str__(self) -> str:
        return f"products of a few rows in {self.described()['product']}"


class CodingTrial(NamedTuple):
    """What is tried of the kernels that rotate and encode: a format of stored KV."""

    coding: Coding

    def described(self) -> dict[str, Any]:
        *sizes, dtype = self.coding
        return {"coding": sizes, "type": str(dtype).rpartition(".")[2]}

    @classmethod
    def parsed(cls, described: dict[str, Any]) -> CodingTrial:
        name, k, v, key_bits, value_bits = described["coding"]
        dtype = _TYPES[described["type"]]
        return cls(Coding(str(name), int(k), int(v), int(key_bits), int(value_bits), dtype))

    def __str__(self) -> str:
        name, k, v, key_bits, value_bits, _ = self.coding
        return f"encoding heads of {k if k == v else f'{k} and {v}'} in {key_bits} and {value_bits} bits, {name}"


AnyTrial = Trial | ProductTrial | CodingTrial


def parsed(described: dict[str, Any]) -> AnyTrial:
    """Raises KeyError, TypeError or ValueError if the description is invalid."""
    if "product" in described:
        return ProductTrial(_TYPES[described["product"]])
    return CodingTrial.parsed(described) if "coding" in described else Trial.parsed(described)


def reason(trial: AnyTrial) -> str:
    """Returns why the kernel may not serve; empty if it may. Uses the result that is kept, or else runs the child."""
    known = _read().get(_key(trial))
    return str(known["reason"]) if isinstance(known, dict) and "reason" in known else repeat(trial)


def repeat(trial: AnyTrial, seconds: float = SECONDS) -> str:
    """Runs the child, keeps its result, and returns it like `reason`."""
    found = _run(trial, seconds)
    if found:
        log.warning("the kernel is not used for %s: %s; MLX's own operations are used instead", trial, found)
    _keep(_key(trial), {"trial": trial.described(), "reason": found})
    return found


def kept() -> dict[str, AnyTrial]:
    """Returns the trials whose results are kept for this device and these versions, with their reasons' keys."""
    found = {}
    for key, entry in _read().items():
        with contextlib.suppress(KeyError, TypeError, ValueError):
            trial = parsed(entry["trial"])
            if _key(trial) == key:
                found[key] = trial
    return found


def _run(trial: AnyTrial, seconds: float) -> str:
    """Returns what the child found, or how it ended."""
    command = [sys.executable, "-m", CHILD, json.dumps(trial.described())]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its trial did not end within {seconds:.0f} seconds"
    except OSError as error:
        return f"its trial could not be started: {error}"
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"found"')]
    if done.returncode == 0 and lines:
        return str(json.loads(lines[-1])["found"])
    last = (done.stderr.strip().splitlines() or ["without a message"])[-1]
    return f"its trial ended with exit code {done.returncode}: {last[:300]}"


def _key(trial: AnyTrial) -> str:
    info = mx.device_info() if mx.default_device().type == mx.DeviceType.gpu else {}
    device = " ".join(str(info[name]) for name in ("device_name", "architecture") if info.get(name))
    versions = ", ".join(f"{name} {version_of(name) or 'unknown'}" for name in ("mlx", "onefold"))
    return f"{device or 'cpu'}; {versions} {sources()}; {json.dumps(trial.described(), sort_keys=True)}"


@functools.cache
def sources() -> str:
    """Returns a digest of the kernels' source files: in a clone they change more often than the version."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in [*sorted(folder.glob("*.py")), *folder.parent.glob("levels.py")]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _path() -> Path | None:
    with contextlib.suppress(ConfigError):
        return cache_folder() / FILE
    return None


def _read() -> dict[str, Any]:
    path = _path()
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _keep(key: str, result: dict[str, Any]) -> None:
    """Write a result to the file, which is replaced whole. Nothing is kept where the folder cannot be written."""
    path = _path()
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=FILE)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(_read() | {key: result}, file, indent=1)
            os.replace(name, path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
