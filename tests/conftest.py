"""How all tests run: one BLAS thread a process, no compiled graphs, a collector that skips what was imported.

Also the model folders, and the server, of tests that serve.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: more threads would wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import pytest
from hypothesis import settings
from local_model import DRAFT, write_model
from programs import pytest_configure, pytest_runtest_setup, pytest_terminal_summary  # noqa: F401

from onefold import faults
from onefold.cache.model import stock
from onefold.cache.tiers.records.folder import Folder
from onefold.errors import IntegrityError

if TYPE_CHECKING:
    from scripted_engine import ScriptedEngine

faults.NOT_CAUGHT = (AssertionError, IntegrityError)  # a bug must not pass as a cache miss
stock.hook_saving()  # for good: otherwise each cache that is the last one to close looks through all loaded modules
mx.disable_compile()  # on a CPU each graph is a run of a C++ compiler; tests/test_compiled.py has it on

settings.register_profile("any machine", deadline=None)  # how long an example takes is the machine's business
settings.load_profile("any machine")


def leave_alone() -> None:
    """Hundreds of thousands of imported objects live for ever: `gc.collect()` in a test need not look at them."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    leave_alone()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Between two modules, when nothing of the first one's is left: what it imported lives for ever, too."""
    done = yield
    if nextitem is not None and nextitem.path != item.path:
        leave_alone()
    return done


@pytest.fixture(scope="module")
def scripted_server() -> Iterator[tuple[str, ScriptedEngine]]:
    """The URL of a server with an engine that says what a test tells it, for the tests of one file."""
    from listening import listening
    from scripted_engine import ScriptedEngine

    engine = ScriptedEngine()
    with listening(engine) as url:
        yield url, engine


@pytest.fixture
def scripted_engine(scripted_server: tuple[str, ScriptedEngine]) -> ScriptedEngine:
    """That engine, as new, behind the same server."""
    engine = scripted_server[1]
    vars(engine).clear()
    engine.__init__()  # type: ignore[misc]
    return engine


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    """An empty folder of the disk tier, open for writing."""
    made = Folder.make(tmp_path / "cache")
    yield made
    made.unlock()


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draft"), DRAFT)
