"""README.md: its example runs, and its tree names the files that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import llama

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
FOLDERS = {"src": "py", "tests": "py", "benchmarks": "py", "examples": "py", "docs": "md"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def tree() -> list[str]:
    """The files of the drawn tree, as paths from the root."""
    (drawn,) = blocks("text")
    folders: list[str] = []
    found = []
    for line in drawn.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()  # type: ignore[union-attr]
        del folders[len(indent) // 2 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            assert len(line.split()) > 1, f"{name} has no line of its own words"
            found.append("".join([*folders, name]))
    return found


class Letters:
    """A tokenizer of sorts."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) % 100 for c in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(32 + t) for t in tokens)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 24
    code, replaced = re.subn(r"^model, tokenizer = load\(.*\)$", "", code, flags=re.MULTILINE)
    assert replaced == 1
    mx.random.seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "num_attention_heads": 2}
    args = llama.ModelArgs(model_type="llama", rms_norm_eps=1e-5, vocab_size=100, **shape)
    names: dict[str, Any] = {"model": llama.Model(args), "tokenizer": Letters()}
    exec(compile(code, "README.md", "exec"), names)
    first, second, last = capsys.readouterr().out.splitlines()
    assert first.startswith("0 of 48 prompt tokens reused")
    assert second.startswith("98 of 117 prompt tokens reused")
    assert last == "1 turns continued in place"


def test_what_the_tree_names_exists() -> None:
    missing = [file for file in tree() if not (ROOT / file).is_file()]
    assert not missing
    assert len(set(tree())) == len(tree())


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_tree_names_every_file(folder: str) -> None:
    there = {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob(f"*.{FOLDERS[folder]}")}
    assert there - set(tree()) == set()
    assert {f for f in tree() if f.startswith(f"{folder}/")} - there == set()


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", README):
        assert (ROOT / link).is_file(), link
