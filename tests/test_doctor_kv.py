"""`onefold doctor --kv`: what every format costs on a model and a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
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
    assert "150 tokens say little" in told["warning"]
    assert main(["doctor", "--kv", "llama_q", "--text", str(text)]) == 0
    printed = capsys.readouterr()
    assert f"recommended: --kv {told['recommended']}" in printed.out
    assert told["model_bits"] == 32 and "share: of the bytes of the model's own 32 bits" in printed.out
    assert "trying 16, 8," in printed.err and "200 of 200 tokens" in printed.err


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


def test_a_model_without_kv_of_all_tokens(loaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("a bb " * 99)
    assert main(["doctor", "--kv", "mamba", "--text", str(text)]) == 2
    assert "no layer of this model keeps the KV of all tokens" in capsys.readouterr().err


def spoil(monkeypatch: pytest.MonkeyPatch, factor: float, after: int = 0) -> None:
    """Multiply the logits of the model under test by `factor`, but not for the first `after` chunks of the text."""
    model, chunks = tiny("llama_q"), list[int]()
    given = type(model).__call__

    def spoilt(self: Any, tokens: mx.array, *more: Any, **options: Any) -> mx.array:
        if tokens.shape[1] >= 64:  # a cache tries a model with a few tokens
            chunks.append(tokens.shape[1])
        return given(self, tokens, *more, **options) * (factor if len(chunks) > after else 1)

    monkeypatch.setattr(type(model), "__call__", spoilt)
    monkeypatch.setattr(onefold, "load", lambda name: (model, Words()), raising=False)


@pytest.mark.parametrize("factor", [float("nan"), 1e9])
def test_a_model_whose_outputs_are_not_numbers(
    factor: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, factor)
    (tmp_path / "text").write_text("one three five seven nineteen " * 40)
    assert main(["doctor", "--kv", "llama_q", "--text", str(tmp_path / "text")]) == 2
    assert "the model's own outputs on this text are not numbers" in capsys.readouterr().err


def test_formats_with_which_outputs_are_not_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, float("nan"), after=1)  # a chunk is fed to `16` first
    (tmp_path / "text").write_text("one three five seven nineteen " * 40)
    assert main(["doctor", "--kv", "llama_q", "--text", str(tmp_path / "text"), "--tokens", "150", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert list(told["formats"]) == ["16"] and told["recommended"] == "16"
    assert "not numbers" in told["refused"]["8"]


def test_tokens_that_no_model_gives() -> None:
    """A masked token has no probability in either distribution, and adds nothing to the KL."""
    quality, exact = Quality(), mx.array([[-1.0, float("-inf")]])
    quality.add(exact, mx.exp(exact), exact, [0])
    assert quality.is_finite and quality.mean_divergence == 0


@pytest.mark.parametrize(
    "given, said",
    [
        (["--text", ""], "--text is empty"),
        (["--disk", "folder"], "give --kv or --disk"),
        (["--tokens", "1"], "at least 64"),
        (["--text", "no/such"], "cannot be read"),
        (["--kv", "8"], "on a model: give its name or folder in place of 8"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(
    given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(onefold, "load", lambda name: pytest.fail("the model was loaded"), raising=False)
    try:
        assert main(["doctor", "--kv", "llama_q", *given]) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert said in capsys.readouterr().err


def test_a_text_that_is_longer_than_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model: Any = tiny("llama_q")
    model.args.max_position_embeddings = 120
    monkeypatch.setattr(onefold, "load", lambda name: (model, Words()), raising=False)
    (tmp_path / "text").write_text("one two " * 100)
    assert main(["doctor", "--kv", "llama_q", "--text", str(tmp_path / "text")]) == 2
    assert "this model's context of 120: give --tokens of at most 104" in capsys.readouterr().err


def test_a_folder_of_the_environment_is_no_argument(
    loaded: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEFOLD_DISK", str(tmp_path))
    (tmp_path / "text").write_text("a bb " * 99)
    assert main(["doctor", "--kv", "llama", "--text", str(tmp_path / "text")]) == 0
    assert "recommended: --kv 16" in capsys.readouterr().out


def test_the_fewest_bytes_that_are_good_enough_are_recommended() -> None:
    def quality(n_bytes: int, divergence: float) -> Quality:
        return Quality(n_bytes, divergence, 1.0, 1)

    found = {"16": quality(16, 0), "8": quality(8, 0.001), "4": quality(4, MOST_DIVERGENCE), "3": quality(3, 0.5)}
    assert recommended(found) == "4"
    assert kv_trial.recommended({"16": quality(16, 0), "3": quality(3, 0.5)}) == "16"
