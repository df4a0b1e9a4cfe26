"""mlx-lm's own tests, on our prompt cache in place of mlx-lm's.

They come from the source distribution of the very version that is installed, fetched with pip when a test first needs
it and kept in pytest's cache; without a network they are skipped. What they load from a model hub is a local model
where its download would lie. mlx-lm's own class runs as well: what fails on both says nothing about ours.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import pytest
from local_model import Shape, write_as_downloaded
from prompt_caches import AVAILABLE

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
MODEL = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
"""What upstream's tests load."""

STAND_IN = Shape(seed=3)
"""What they get. One of them wants the same answer from a cached prompt as from a new one, with a repetition penalty:
mlx-lm applies that to the tokens which are not cached, so it holds for a model that the penalty does not sway."""

FILES = ["test_server.py", "test_prompt_cache.py", "test_generate.py"]
"""The first tests the prompt cache and everything that serves from it. The others test mlx-lm's cache layers and batch
generator, which have to be what they were in a process where our class is at work."""

TRAINED = {
    "test_generate.TestGenerate.test_stream_generate_input_embeddings",
    "test_generate.TestGenerate.test_stream_generate_input_embeddings_prefill",
}
"""These ask the model to say a word, which only the trained one can, and use no prompt cache."""

NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|ReadTimeout|NameResolutionError|Temporary failure in name resolution"
    r"|Network is unreachable|Connection refused|ProxyError|Cannot connect to proxy"
)


@pytest.fixture(scope="module")
def upstream_tests(pytestconfig: pytest.Config) -> Path:
    """The folder of the test files of the installed mlx-lm."""
    installed = version("mlx-lm")
    kept = pytestconfig.cache.mkdir("upstream")  # type: ignore[union-attr]
    folder = kept / f"mlx-lm-{installed}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=kept) as scratch:
            unpacked = Path(scratch) / "tests"
            unpack_tests(download(installed, Path(scratch)), unpacked)
            try:
                unpacked.rename(folder)  # whole or not at all, whoever else is fetching it
            except OSError:
                assert folder.is_dir()
    return folder


def download(installed: str, into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries=1", "--timeout=15"]
    command += ["--no-deps", "--no-binary=mlx-lm", f"--dest={into}", f"mlx-lm=={installed}"]
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode and NO_NETWORK.search(said):
        pytest.skip("no network: the package index that mlx-lm's source distribution comes from cannot be reached")
    assert done.returncode == 0, said
    (archive,) = into.glob("*.tar.gz")
    return archive


def unpack_tests(archive: Path, folder: Path) -> None:
    folder.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            if re.fullmatch(r"[^/]+/tests/\w+\.py", member.name) and (content := tar.extractfile(member)):
                (folder / Path(member.name).name).write_bytes(content.read())


@pytest.mark.parametrize("cache", AVAILABLE)
def test_upstream(cache: str, upstream_tests: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    report = tmp_path / "report.json"
    write_as_downloaded(tmp_path / "hub", MODEL, STAND_IN)
    command = [sys.executable, HERE / "upstream_run.py", "--cache", cache, "--report", report]
    command += [upstream_tests / file for file in FILES]
    offline = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=200)
    assert report.is_file(), done.stdout + done.stderr
    outcomes = json.loads(report.read_text())
    assert {name.split(".")[0] for name in outcomes} == {Path(file).stem for file in FILES}
    assert outcomes.keys() >= TRAINED
    for name, outcome in sorted(outcomes.items()):
        if name in TRAINED:
            continue
        with subtests.test(name):
            assert outcome == "passed", outcome
