"""Which backend of MLX is installed: none, one, or several that overwrite each other.

On Linux the `mlx` distribution has no backend: `mlx-cpu`, `mlx-cuda-12` or `mlx-cuda-13` brings it. Each of those
installs `mlx/lib/libmlx.so`, so of two only the one that was installed last works. On macOS `mlx` depends on
`mlx-metal`.

Keeps true:

1. Only metadata of distributions and names of files are read: MLX is not imported.
2. Without a backend `import onefold` works, and so do the commands that need no MLX; the first import of `mlx.core`
   raises NoBackend, which says what to install.
3. With several backends `import onefold` warns and says how to keep one. Nothing is installed or removed here.
4. A backend that was installed after `import onefold` is found.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType

from onefold.errors import NoBackend

EXTRAS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
"""The distributions that bring a backend on Linux, and the extra of ours that asks for each."""
METAL = "mlx-metal"
_LIBRARIES = ("libmlx.so", "libmlx.dylib")
_NVIDIA = "/proc/driver/nvidia"


def names() -> list[str]:
    """Return the distributions that bring a backend and are installed. A backend that was built together with MLX, and
    has no distribution of its own, is "mlx"."""
    found = [name for name in (*EXTRAS, METAL) if _is_installed(name)]
    return found or (["mlx"] if _library() else [])


def installed() -> dict[str, str]:
    """Return the backends that are installed and their versions: {"mlx-cpu": "0.32.4"}."""
    return {name: version_of(name) or "" for name in names()}


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _is_installed(distribution: str) -> bool:
    """Whether a distribution is installed. Faster than `version_of`: its metadata is not read."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _library() -> str | None:
    """Return the path of MLX's library; None if there is none."""
    spec = importlib.util.find_spec("mlx")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for name in _LIBRARIES:
            path = os.path.join(folder, "lib", name)
            if os.path.exists(path):
                return path
    return None


def nvidia() -> bool:
    """Whether there is an NVIDIA GPU with a driver here."""
    return sys.platform == "linux" and (os.path.exists(_NVIDIA) or shutil.which("nvidia-smi") is not None)


def wanted() -> str:
    """Return the distribution whose backend fits this machine."""
    if sys.platform == "darwin":
        return METAL
    return "mlx-cuda-13" if nvidia() else "mlx-cpu"


def how_to_install() -> str:
    """Return the command that installs a backend that fits this machine."""
    name = wanted()
    return f"pip install 'onefold[{EXTRAS[name]}]'" if name in EXTRAS else "pip install --force-reinstall mlx"


def how_to_keep_one(found: dict[str, str]) -> str:
    """Return the command that leaves one of these backends, whole: the one that fits this machine, or else the last.

    Removing a backend also removes the files that it shares with the others, so the remaining one is installed again.
    """
    kept = wanted() if wanted() in found else max(found)
    others = " ".join(name for name in found if name != kept)
    return f"pip uninstall -y {others} && pip install --force-reinstall --no-deps {kept}=={found[kept]}"


def missing() -> str:
    """Return what is wrong and what to do if there is no backend; nothing if there is one."""
    if names():
        return ""
    if sys.platform == "darwin":
        return f"MLX has no backend here: mlx-metal is missing. Run: {how_to_install()}"
    others = " or ".join(f"onefold[{extra}]" for name, extra in EXTRAS.items() if name != wanted())
    return f"MLX has no backend here: the mlx package brings none on Linux. Run: {how_to_install()} (or: {others})"


def several() -> str:
    """Return what is wrong and what to do if there are several backends; nothing otherwise."""
    if len(names()) < 2:
        return ""
    found = installed()
    return (
        f"{' and '.join(found)} are installed together, and each overwrites the other's mlx/lib/libmlx.so: MLX may "
        f"fail or compute on the wrong device. Run: {how_to_keep_one(found)}"
    )


def check() -> None:
    """Warn of several backends; without one, have the import of `mlx.core` raise NoBackend."""
    found = names()
    if len(found) > 1:
        warnings.warn(several(), RuntimeWarning, stacklevel=3)
    elif not found and "mlx.core" not in sys.modules:
        sys.meta_path.insert(0, _Refusing())


def require() -> None:
    """Raise NoBackend if there is no backend and MLX is not imported yet."""
    fault = "" if "mlx.core" in sys.modules else missing()
    if fault:
        raise NoBackend(fault, name="mlx.core")


class _Refusing:
    """An import finder that finds nothing, and raises NoBackend when `mlx.core` is looked for without a backend."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "mlx.core":
            require()
        return None
