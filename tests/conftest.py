"""How all tests run: one BLAS thread a process, no compiled graphs, a collector that skips what was imported.

Also the model folders of tests that serve.
"""

import gc
import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: more threads would wait for each other
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import mlx.core as mx
import pytest
from local_model import DRAFT, write_model

from onefold import faults
from onefold.errors import IntegrityError

faults.NOT_CAUGHT = (AssertionError, IntegrityError)  # a bug must not pass as a cache miss
mx.disable_compile()  # on a CPU each graph is a run of a C++ compiler; tests/test_compiled.py has it on


def pytest_collection_finish() -> None:
    """Hundreds of thousands of imported objects live for ever: `gc.collect()` in a test need not look at them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draft"), DRAFT)
