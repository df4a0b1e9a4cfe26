"""Tokenising only what is new gives what tokenising all of it would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from onefold.engine import tokenising
from onefold.engine.tokenising import Tokeniser

WORDS = ["the quick", " brown fox", "\n\njumps", " over 12345", "  the", " lazy dog's", " naïve", "🙂", "<|im_end|"]


def trained(pre: Any, *, special: bool = True, lstrip: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(["".join(WORDS) * 3, "the lazy brown dog jumps over the fox " * 9], trainer)
    tokenizer.add_tokens(
        [
            AddedToken("<|im_start|>", special=special, normalized=False, lstrip=lstrip),
            AddedToken("<|im_end|>", special=special, normalized=False, lstrip=lstrip),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
PREFIXED = trained(pre_tokenizers.Metaspace(prepend_scheme="first"))


class Counting:
    """Counts the characters that are really tokenised."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.seen = tokenizer, 0

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        self.seen += len(text)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


def turns(words: list[str]) -> str:
    return "".join(f"<|im_start|>user\n{w}<|im_end|>\n" for w in words)


PIECES = st.lists(st.sampled_from([*WORDS, "<|im_start|>", "<|im_end|>"]), max_size=40).map("".join)


@pytest.mark.parametrize("tokenizer", [BYTES, PREFIXED], ids=["bytes", "prefix"])
@given(texts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60), PIECES), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_it_is_what_the_whole_text_would_give(tokenizer: Any, texts: list[tuple[int, int, str]]) -> None:
    """Each text begins like an earlier one, up to anywhere, and goes on in its own way."""
    tokeniser = Tokeniser(tokenizer)
    made = [turns(WORDS)]
    for which, keep, rest in texts:
        before = made[which % len(made)]
        made.append(before[: len(before) - keep] + rest)
    least, tokenising.LEAST = tokenising.LEAST, 1
    try:
        for text in made:
            assert tokeniser.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False)
    finally:
        tokenising.LEAST = least


def test_only_what_is_new_is_tokenised() -> None:
    counting = Counting(BYTES)
    tokeniser = Tokeniser(counting)
    text = turns(WORDS * 60)
    tokeniser.encode(text)
    counting.seen = 0
    longer = text + turns(["and one more"])
    assert tokeniser.encode(longer).tolist() == BYTES.encode(longer, add_special_tokens=False)
    assert counting.seen < 200 < len(longer)


def test_tokens_that_swallow_spaces_are_no_place_to_cut() -> None:
    assert Tokeniser(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), lstrip=True))._markers == {}
    assert Tokeniser(trained(pre_tokenizers.ByteLevel(add_prefix_space=False), special=False))._markers == {}
    assert set(Tokeniser(BYTES)._markers) == {"<|im_start|>", "<|im_end|>"}


def test_tokens_that_can_overlap_are_no_place_to_cut() -> None:
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("###", special=True, normalized=False)], special_tokens=True)
    tokenizer.add_tokens([AddedToken("|>x", special=True, normalized=False)], special_tokens=True)
    assert Tokeniser(tokenizer)._markers == {}
    tokeniser = Tokeniser(tokenizer)
    for text in ("x" * 5000 + "####b", "x" * 5000 + "####c"):
        assert tokeniser.encode(text).tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_few_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tokeniser = Tokeniser(BYTES)
    for i in range(tokenising.KEPT_TEXTS + 9):
        tokeniser.encode(f"{i} " + turns(WORDS * 30))
    assert len(tokeniser._known) == tokenising.KEPT_TEXTS
    monkeypatch.setattr(tokenising, "KEPT_CHARACTERS", 50_000)
    tokeniser.encode(turns(WORDS * 31))
    assert sum(map(len, tokeniser._known)) <= 50_000
