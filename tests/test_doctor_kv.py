"""`onefold doctor --kv`: what every format costs on a model and a text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny import tiny

import onefold
from onefold import kv_trial
from onefold.cache.model.formats.names import NAMES
from onefold.cli import main
from onefold.kv_trial import MOST_DIVERGENCE, Quality, recommended


class Words:
    def encode(self, text: str) -> list[int]:
        return [len(word) * 7 % 90 for word in text.split()]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onefold, "load", lambda name: (tiny(name), Words()), raising=False)


def test_every_format_is_tried(loaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("one three five seven nineteen " * 40)
    assert main(["doctor", "--kv", "llama_q", "--text", str(text), "--tokens", "150", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == 150 and list(told["formats"]) == list(NAMES) and not told["refused"]
    shares = [told["formats"][name]["share"] for name in ("16", "8", "k8v4", "4", "turbo4", "turbo3")]
    assert shares == sorted(shares, reverse=True) and shares[0] == 1
    worst = told["formats"]["turbo3"]["mean_kl"]
    assert told["formats"]["16"]["mean_kl"] == 0 <= told["formats"]["8"]["mean_kl"] < worst
    assert main(["doctor", "--kv", "llama_q", "--text", str(text)]) == 0
    assert f"recommended: --kv {told['recommended']}" in capsys.readouterr().out


def test_what_a_model_cannot_take_is_named(loaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("a bb " * 99)
    assert main(["doctor", "--kv", "llama", "--text", str(text), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recommended"] == "16" and "heads of 16" in told["refused"]["8"]


@pytest.mark.parametrize(
    "content, said", [(b"a b c", "at least 64"), (b"\xff\xfe\x00", "cannot be read as text"), (None, "cannot be")]
)
def test_a_text_that_cannot_be_used(
    content: bytes | None, said: str, loaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert main(["doctor", "--kv", "llama_q", "--text", str(tmp_path / "text")]) == 2
    assert said in capsys.readouterr().err


def test_the_fewest_bytes_that_are_good_enough_are_recommended() -> None:
    def quality(n_bytes: int, divergence: float) -> Quality:
        return Quality(n_bytes, divergence, 1.0, 1)

    found = {"16": quality(16, 0), "8": quality(8, 0.001), "4": quality(4, MOST_DIVERGENCE), "3": quality(3, 0.5)}
    assert recommended(found) == "4"
    assert kv_trial.recommended({"16": quality(16, 0), "3": quality(3, 0.5)}) == "16"
