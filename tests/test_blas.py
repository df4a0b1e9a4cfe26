"""Which BLAS MLX is given: each case in a process of its own, since the choice is made once in each."""

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is given another BLAS")

# The module is loaded by its path, so that nothing else of the package runs before it.
_SOURCE = importlib.util.find_spec("onefold")
assert _SOURCE is not None and _SOURCE.submodule_search_locations is not None
_BLAS = Path(_SOURCE.submodule_search_locations[0]) / "blas.py"

_HEAD = f"""
import ctypes, importlib.util, json, logging, os, sys
spec = importlib.util.spec_from_file_location("blas", {str(_BLAS)!r})
blas = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blas)
def say(**answer): print(json.dumps(answer))
"""

_MATMUL = """
import mlx.core as mx, numpy as np
mx.set_default_device(mx.cpu)
rng = np.random.default_rng(0)
worst = 0.0
for m, k, n in ((1, 1, 1), (3, 5, 7), (1, 300, 200), (129, 257, 65), (512, 512, 512)):
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    want = a.astype(np.float64) @ b.astype(np.float64)
    for left, right in ((mx.array(a), mx.array(b)), (mx.array(a.T.copy()).T, mx.array(b.T.copy()).T)):
        worst = max(worst, float(np.abs(np.array(left @ right) - want).max()))
square = rng.standard_normal((100, 100)).astype(np.float32) + 100 * np.eye(100, dtype=np.float32)
inverse = np.array(mx.linalg.inv(mx.array(square)))
inverse_error = float(np.abs(inverse @ square - np.eye(100)).max())
"""


def run(body: str, **environment: str) -> dict:
    """Run the body after the head, in a fresh interpreter; return what it said."""
    clean = {k: v for k, v in os.environ.items() if k not in ("ONEFOLD_BLAS", "OPENBLAS_CORETYPE")}
    command = [sys.executable, "-c", _HEAD + body]
    done = subprocess.run(command, env=clean | environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"stderr": done.stderr}


def library_in_use() -> str:
    """Return the library that is chosen here; skip where there is none to choose."""
    chosen = run("say(chosen=blas.preload())")["chosen"]
    if chosen.startswith("MLX's own"):
        pytest.skip(f"no other BLAS here: {chosen}")
    return chosen.rsplit(" (", 1)[0]


def wheel_library() -> str:
    """Return the library that this platform's wheel carries; skip where there is no such wheel."""
    found = run("say(found=[name for name, origin in blas._candidates() if 'wheel' in origin])")["found"]
    if not found:
        pytest.skip("no BLAS wheel is installed here")
    return found[0]


@linux
def test_declared_wheel_is_found() -> None:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no BLAS wheel is asked for on this architecture")
    answer = run("say(chosen=blas.preload(), again=blas.preload(), in_use=blas.in_use())")
    assert not answer["chosen"].startswith("MLX's own"), answer["chosen"]
    assert answer["chosen"] == answer["again"] == answer["in_use"]
    assert Path(wheel_library()).is_file()


@linux
@pytest.mark.parametrize("choice", ["default", "wheel"])
def test_mlx_resolves_to_the_preloaded_library(choice: str) -> None:
    library = library_in_use() if choice == "default" else wheel_library()
    answer = run(
        f"""
blas.preload()
import mlx.core
def address(library): return ctypes.cast(library.cblas_sgemm, ctypes.c_void_p).value
say(resolved=address(ctypes.CDLL(None)), preloaded=address(ctypes.CDLL({library!r})))
""",
        **({} if choice == "default" else {"ONEFOLD_BLAS": library}),
    )
    assert answer["resolved"] == answer["preloaded"]


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc tells what it binds")
@pytest.mark.parametrize("setting", ["", "off"])
def test_linker_binds_mlx_to_it(setting: str, tmp_path: Path) -> None:
    library = library_in_use()
    log = tmp_path / "bindings"
    run(
        "blas.preload()\nimport mlx.core\nsay()",
        ONEFOLD_BLAS=setting,
        LD_DEBUG="bindings",
        LD_DEBUG_OUTPUT=str(log),
    )
    lines = [line for file in tmp_path.iterdir() for line in file.read_text(errors="replace").splitlines()]
    bound = [line for line in lines if "libmlx.so" in line and "`cblas_sgemm'" in line]
    assert bound, "MLX calls cblas_sgemm"
    assert all((Path(library).name in line) == (setting == "") for line in bound), bound


@linux
@pytest.mark.parametrize("choice", ["default", "wheel", "off"])
def test_results_are_right(choice: str) -> None:
    setting = {"default": "", "wheel": wheel_library() if choice == "wheel" else "", "off": "off"}[choice]
    answer = run("blas.preload()" + _MATMUL + "say(worst=worst, inverse_error=inverse_error)", ONEFOLD_BLAS=setting)
    assert answer["worst"] < 1e-3
    assert answer["inverse_error"] < 1e-4


@linux
def test_numpy_keeps_its_own() -> None:
    library_in_use()
    answer = run("""
import numpy as np
before = np.random.default_rng(0).standard_normal((200, 200))
blas.preload()
import mlx.core as mx
mx.eval(mx.ones((64, 64), dtype=mx.float32) @ mx.ones((64, 64), dtype=mx.float32))
solved = np.linalg.solve(before, before @ before)
say(error=float(np.abs(solved - before).max()))
""")
    assert answer["error"] < 1e-8


@linux
@pytest.mark.parametrize("setting", ["off", "OFF", "0"])
def test_off(setting: str) -> None:
    answer = run("say(chosen=blas.preload(), found=hasattr(ctypes.CDLL(None), 'cblas_sgemm'))", ONEFOLD_BLAS=setting)
    assert answer["chosen"] == f"MLX's own (ONEFOLD_BLAS={setting})"
    assert not answer["found"]


@linux
def test_given_path_is_used() -> None:
    library = wheel_library()
    assert run("say(chosen=blas.preload())", ONEFOLD_BLAS=library)["chosen"] == f"{library} (ONEFOLD_BLAS)"


@linux
@pytest.mark.parametrize(
    ("setting", "fault"),
    [("/nonexistent/libblas.so", "cannot open"), ("libm.so.6", "no cblas_sgemm"), (__file__, "invalid ELF")],
)
def test_unfit_path_is_reported_and_mlx_still_works(setting: str, fault: str) -> None:
    answer = run(
        "chosen = blas.preload()" + _MATMUL + "say(chosen=chosen, in_use=blas.in_use(), worst=worst)",
        ONEFOLD_BLAS=setting,
    )
    assert answer["chosen"].startswith(f"MLX's own (ONEFOLD_BLAS={setting} was refused: ")
    assert fault in answer["chosen"]
    assert answer["in_use"] == answer["chosen"]
    assert answer["chosen"] in answer["stderr"], "a setting that is refused is a warning"
    assert answer["worst"] < 1e-3


@linux
def test_mlx_imported_first_is_reported() -> None:
    answer = run("import mlx.core\nsay(chosen=blas.preload(), found=hasattr(ctypes.CDLL(None), 'cblas_sgemm'))")
    assert answer["chosen"] == "MLX's own (mlx was imported first)"
    assert not answer["found"]


@linux
def test_no_library_anywhere() -> None:
    answer = run("""
blas._SYSTEM, blas._WHEELS = ("libno-such-blas.so.0",), (("no-such-distribution", "libno-such-blas.so"),)
say(chosen=blas.preload())
""")
    assert answer["chosen"] == "MLX's own (no other was found)"


def test_other_systems_are_left_alone() -> None:
    answer = run("sys.platform = 'darwin'\nsay(before=blas.in_use(), chosen=blas.preload())")
    assert answer["before"] == "MLX's own (preload() was not called)"
    assert answer["chosen"] == "MLX's own (only Linux needs another)"


@linux
def test_logged_once() -> None:
    answer = run("""
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
say(chosen=blas.preload(), again=blas.preload())
""")
    assert answer["stderr"].splitlines() == [f"INFO onefold BLAS in use: {answer['chosen']}"]


@linux
def test_openblas_runs_kernels_the_processor_has() -> None:
    answer = run(
        """
blas.preload()
library = ctypes.CDLL(None)
core = None
if hasattr(library, "openblas_get_corename"):
    library.openblas_get_corename.restype = ctypes.c_char_p
    core = library.openblas_get_corename().decode()
say(core=core, hint=blas._core_for(blas._cpu_flags()), left=os.environ.get("OPENBLAS_CORETYPE"))
""",
        ONEFOLD_BLAS=wheel_library(),
    )
    assert answer["left"] is None, "the environment is left as it was"
    if answer["core"] is None or answer["hint"] is None:
        pytest.skip("this platform's wheel is no OpenBLAS, or there is nothing to tell it")
    assert answer["core"].lower() == answer["hint"].lower()


@linux
def test_core_type_of_the_environment_is_kept() -> None:
    answer = run(
        """
with blas._core_type():
    inside = os.environ["OPENBLAS_CORETYPE"]
say(inside=inside, after=os.environ["OPENBLAS_CORETYPE"])
""",
        OPENBLAS_CORETYPE="Nehalem",
    )
    assert answer["inside"] == answer["after"] == "Nehalem"


def test_core_type_by_flags() -> None:
    avx2 = ["avx2", "fma"]
    avx512 = [*avx2, "avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"]
    answer = run(f"say(cores=[blas._core_for(frozenset(f)) for f in ([], {avx2}, {avx512[:-1]}, {avx512})])")
    assert answer["cores"] == [None, "Haswell", "Haswell", "SkylakeX"]
