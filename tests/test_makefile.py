"""The Makefile: which backend `make setup` installs, and that the workflow runs targets that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))

pytestmark = pytest.mark.system("make")


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    left_out = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "BACKEND", "VENV")
    environment = {k: v for k, v in os.environ.items() if k not in left_out}
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("backend, extras, removed", [
    ("cpu", "dev,cpu", "mlx-cuda-12 mlx-cuda-13"),
    ("cuda12", "dev,cuda12", "mlx-cpu mlx-cuda-13"),
    ("cuda13", "dev,cuda13", "mlx-cpu mlx-cuda-12"),
    ("none", "dev", "mlx-cpu mlx-cuda-12 mlx-cuda-13"),
])  # fmt: skip
def test_setup_installs_the_backend_that_is_named(tmp_path: Path, backend: str, extras: str, removed: str) -> None:
    done = make("-n", "setup", f"BACKEND={backend}", f"VENV={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert f"install -e '.[{extras}]'" in done.stdout
    assert f"show {removed} >" in done.stdout


def test_setup_goes_on_with_the_backend_that_was_chosen(tmp_path: Path) -> None:
    (tmp_path / ".backend").write_text("cuda12\n")
    assert "'.[dev,cuda12]'" in make("-n", "setup", f"VENV={tmp_path}").stdout


def test_setup_chooses_one(tmp_path: Path) -> None:
    found = re.search(r"install -e '\.\[dev(?:,(\w+))?\]'", make("-n", "setup", f"VENV={tmp_path}").stdout)
    assert found is not None
    assert found[1] is None if sys.platform == "darwin" else found[1] in ("cpu", "cuda12", "cuda13")


def test_setup_refuses_another_name(tmp_path: Path) -> None:
    done = make("setup", "BACKEND=gpu", f"VENV={tmp_path}")
    assert done.returncode != 0 and list(tmp_path.iterdir()) == []
    assert "BACKEND is one of cpu cuda12 cuda13 none, not 'gpu'" in done.stderr


def test_every_step_of_the_workflow_is_a_target() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    run = {step["run"] for step in steps if "run" in step}
    assert {f"make {target}" for target in ("lint", "types", "test-all", "dist")} <= run
    assert run <= {f"make {target}" for target in TARGETS}
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm", "macos-15"]
    assert workflow["permissions"] == {"contents": "read"}


def test_hooks_fetch_nothing() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    assert {hook["language"] for repo in hooks["repos"] for hook in repo["hooks"]} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/") for repo in hooks["repos"] for hook in repo["hooks"])


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/install.md"])
def test_documents_name_targets_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    named = set(re.findall(r"`make ([a-z-]+)", text)) | set(re.findall(r"^make ([a-z-]+)", text, re.MULTILINE))
    assert named and named <= TARGETS


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/install.md"])
def test_links_lead_somewhere(name: str) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / name).read_text()):
        assert ((ROOT / name).parent / link).is_file(), link
