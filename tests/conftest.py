"""A faster BLAS, before any test imports MLX (a Linux CPU), and the model folders of tests that serve."""

from pathlib import Path

import onefold  # noqa: F401

# isort: split
import pytest
from local_model import DRAFT, write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("draft"), DRAFT)
