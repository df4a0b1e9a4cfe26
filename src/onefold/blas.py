"""Give MLX a fast BLAS on a Linux CPU.

MLX's Linux wheels link the reference BLAS, which is many times slower than the processor allows. A BLAS
loaded into the process's global symbol scope before MLX is bound to in its place, by the dynamic linker.

Invariants:

1. Only Linux is touched, and only before ``mlx.core`` is imported: its calls are bound as it is loaded.
2. At most one library is made global, and only one that has plain-named, 32-bit-integer ``cblas_*gemm``.
3. ``ONEFOLD_BLAS`` is obeyed (``0`` or ``off``: none; else that library or none), never second-guessed.
4. A library that is missing or unfit is no error: MLX's own BLAS is used, and `in_use` returns the reason.
5. The first call decides and later ones repeat its answer; the environment is left as it was found.
"""

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

_LOG = logging.getLogger("onefold")

# What MLX calls; the rest of what it needs is LAPACK, which its own wheel can go on providing.
_NEEDED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")

# The dynamic linker's own search finds these wherever the system keeps them, at no cost where it has none;
# ctypes.util.find_library would start a compiler to look. First the name Fedora gives its threaded build.
_SYSTEM = ("libopenblasp.so.0", "libopenblas.so.0", "libopenblas.so")

# Distribution and library, best first, of the wheels that pyproject.toml asks for.
_WHEELS = (
    ("nvpl-blas", "libnvpl_blas_lp64_gomp.so.0"),
    ("nvpl-blas", "libnvpl_blas_lp64_seq.so.0"),  # one thread, where there is no libgomp
    ("scipy-openblas32", "libopenblas_python.so"),
)

_answer: str | None = None


def preload() -> str:
    """Load a fast BLAS for MLX where it helps and one is installed; return which BLAS is in use."""
    global _answer
    if _answer is None:
        _answer, level = _choose()
        _LOG.log(level, "BLAS in use: %s", _answer)
    return _answer


def in_use() -> str:
    """Say which BLAS MLX uses on the CPU: the library's path and origin, or "MLX's own" and the reason."""
    return _own("preload() was not called") if _answer is None else _answer


def _choose() -> tuple[str, int]:
    """Load what there is to load; return the answer and the level to log it at."""
    if sys.platform != "linux":
        return _own("only Linux needs another"), logging.INFO
    setting = os.environ.get("ONEFOLD_BLAS", "").strip()
    if setting.lower() in ("0", "off"):
        return _own(f"ONEFOLD_BLAS={setting}"), logging.INFO
    if "mlx.core" in sys.modules:
        return _own("mlx was imported first"), logging.INFO
    if setting:
        fault = _load(setting)
        if fault:
            return _own(f"ONEFOLD_BLAS={setting} was refused: {fault}"), logging.WARNING
        return f"{setting} (ONEFOLD_BLAS)", logging.INFO
    for name, origin in _candidates():
        fault = _load(name)
        if not fault:
            return f"{name} ({origin})", logging.INFO
        _LOG.debug("BLAS passed over: %s: %s", name, fault)
    return _own("no other was found"), logging.INFO


def _own(reason: str) -> str:
    return f"MLX's own ({reason})"


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield what to try to load, best first, each with its origin in words."""
    for soname in _SYSTEM:
        yield soname, "the system's OpenBLAS"
    for distribution, library in _WHEELS:
        try:
            files = metadata.files(distribution)
        except metadata.PackageNotFoundError:
            continue
        for file in files or ():
            if file.name == library:
                yield str(Path(str(file.locate())).resolve()), f"the {distribution} wheel"


def _load(name: str) -> str:
    """Load a library and make its symbols global, if it is fit for MLX; else return what is wrong with it."""
    try:
        if "_gomp." in Path(name).name:
            ctypes.CDLL("libgomp.so.1")  # NVPL loads it at its first call, and aborts where there is none
        with _core_type():
            library = ctypes.CDLL(name, mode=ctypes.RTLD_LOCAL)
        missing = [symbol for symbol in _NEEDED if not hasattr(library, symbol)]
        if missing:
            return f"it has no {missing[0]}"
        if hasattr(library, "openblas_get_config"):
            library.openblas_get_config.restype = ctypes.c_char_p
            if b"USE64BITINT" in library.openblas_get_config():
                return "it takes 64-bit integers"
        ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error)
    return ""


@contextmanager
def _core_type() -> Iterator[None]:
    """Tell an OpenBLAS that loads in this context which kernels the processor can run.

    An OpenBLAS older than the processor takes it for one of 2004 and loses most of its speed. The kernels
    are chosen by the instructions that Linux reports, unless OPENBLAS_CORETYPE names them already.
    """
    variable = "OPENBLAS_CORETYPE"
    core = None if variable in os.environ else _core_for(_cpu_flags())
    if core is None:
        yield
        return
    os.environ[variable] = core
    try:
        yield
    finally:
        del os.environ[variable]


def _core_for(flags: frozenset[str]) -> str | None:
    """Return OpenBLAS's name for the best x86-64 kernels these flags allow; None leaves it to OpenBLAS."""
    if flags >= {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}:
        return "SkylakeX"
    if flags >= {"avx2", "fma"}:
        return "Haswell"
    return None


def _cpu_flags() -> frozenset[str]:
    """Return the x86-64 processor's flags; none on another architecture or where Linux does not tell."""
    if platform.machine() != "x86_64":
        return frozenset()
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "flags":
                    return frozenset(value.split())
    except OSError as error:
        _LOG.debug("processor flags are unknown: %s", error)
    return frozenset()
