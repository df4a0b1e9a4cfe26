"""A folder that an earlier version wrote (0.5.1, records of format 1) is read as it is, and continued in format 2.

`tests/golden` holds two conversations of each of two models; `tests/golden.json` their tokens. The models' digest is a
constant there, because the real one contains the source of the tests' model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from disk_caches import files, opened, small_records, turn
from fake import FakeModel, Session, settled, text
from test_disk import HYBRID

from onefold.cli.cache import run

GOLDEN = Path(__file__).parent / "golden"
SAID: dict[str, list[list[int]]] = json.loads((GOLDEN.parent / "golden.json").read_text())
KINDS = {"full": ("full", "full"), "hybrid": HYBRID}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("onefold.cache.prefix_cache.lasting_digest", lambda *_: "golden")
    return Path(shutil.copytree(GOLDEN, tmp_path / "cache"))


@pytest.mark.parametrize("name", KINDS)
def test_its_conversations_are_continued(name: str, folder: Path) -> None:
    model = FakeModel(KINDS[name])
    with opened(model, folder, tokenizer="words", label=name) as cache:
        for said in SAID[name]:
            assert cache.durable(said) == len(said)
            session = Session(model, cache, [*said, 1])  # every layer is compared with a fresh run
            assert session.cached == len(said) and session.lease.restored > 0
            session.prefill().decode(2).commit()
        assert cache.stats().disk.rejected_records == 0
        settled(cache)


@pytest.mark.parametrize("name", KINDS)
def test_the_same_conversation_is_the_same_files(name: str, folder: Path, tmp_path: Path) -> None:
    """Names, and so namespaces and addresses, and every byte, of format 1."""
    model = FakeModel(KINDS[name])
    with opened(model, tmp_path / "new", tokenizer="words", label=name) as cache:
        small_records(cache, 40)
        cache.parts.tier.spiller.jobs.version = 1
        said = turn(model, cache, text(100))
        turn(model, cache, [*said[:60], *text(30, 5)])
        assert cache.flush(10, everything=True)
    made = {p.relative_to(tmp_path / "new"): p.read_bytes() for p in files(tmp_path / "new")}
    known = {p.relative_to(folder): p.read_bytes() for p in files(folder)}
    assert made and made.items() <= known.items()


def test_it_is_found_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", "--json", "--disk", str(folder)]) == 0
    assert json.loads(capsys.readouterr().out)["bad"] == []
