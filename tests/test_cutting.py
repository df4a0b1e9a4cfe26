"""Pieces of a text give the tokens of the whole, with every kind of tokenizer; and no thread waits for a long text."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from onefold.engine import cutting, tokenising
from onefold.engine.ageing import PASSED_OVER
from onefold.engine.cutting import Cuts, separators
from onefold.engine.tokenising import Tokeniser
from onefold.engine.turnstile import Turnstile, Visitor
from onefold.errors import TooLong

COMMA, STOP = "\uff0c", "\u3002"
TEXT = (
    "The quick brown fox jumps over the lazy dog's 12345 bones, doesn't it? We'll see. def f(x): return x + 1\n\n"
    f"naïve café, Straße; 中文文字{COMMA}没有空格的一段文字{STOP}再来一段。 Привет, мир! 🙂🙂 a  b   c\t\tend\n"
    '{"name": "value", "list": [1, 2, 30000]} <p>text</p> 1.5 3,141,592 x=1;y=2 of the of the of the '
)
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
ALPHABET = pre_tokenizers.ByteLevel.alphabet()


def fast(tokenizer: Tokenizer, trainer: Any) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    tokenizer.add_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def bpe(pre: Any, normalizer: Any = None, alphabet: list[str] = ALPHABET) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(unk_token=None if alphabet else "<unk>"))
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    special = [] if alphabet else ["<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, show_progress=False, initial_alphabet=alphabet, special_tokens=special
    )
    return fast(tokenizer, trainer)


def split(pattern: str) -> Any:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


def unigram() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.normalizer = normalizers.NFKC()
    trainer = trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    return fast(tokenizer, trainer)


def wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.normalizer = normalizers.BertNormalizer()
    return fast(tokenizer, trainers.WordPieceTrainer(vocab_size=400, show_progress=False, special_tokens=["[UNK]"]))


def like_llama_2() -> PreTrainedTokenizerFast:
    """Nothing splits a text: a token may be anything that the merges give. They were learnt on single words."""
    found = bpe(pre_tokenizers.Metaspace(prepend_scheme="never"), alphabet=[])
    backend = found.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence([])
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


TOKENIZERS = {
    "gpt2": bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2, prefix": bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "cl100k": bpe(split(CL100K)),
    "digits from the right": bpe(split(r"\d{1,3}(?=(?:\d{3})*\b)|" + CL100K)),
    "whole": bpe(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "metaspace": bpe(pre_tokenizers.Metaspace(prepend_scheme="first"), alphabet=[]),
    "stripped": bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip()),
    "llama 2": like_llama_2(),
    "unigram": unigram(),
    "wordpiece": wordpiece(),
}
CUTS = {name: Cuts(tokenizer) for name, tokenizer in TOKENIZERS.items()}
PARTS = [*TEXT.split(" "), " ", "  ", "\n", ",", COMMA, STOP, "'s", "<|end|>", " of the", "é", "e\u0301", "字", "1"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.lists(st.sampled_from(PARTS), max_size=60).map("".join), piece=st.integers(4, 40))
@settings(deadline=None, max_examples=100)
def test_pieces_give_the_tokens_of_the_whole(name: str, text: str, piece: int) -> None:
    tokenizer = TOKENIZERS[name]
    before, cutting.PIECE = cutting.PIECE, piece
    try:
        pieces = list(CUTS[name].pieces(text))
    finally:
        cutting.PIECE = before
    assert "".join(pieces) == text or name == "llama 2"
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    assert tokens == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["gpt2", "cl100k", "digits from the right"])
def test_text_and_code_are_cut_into_short_pieces(name: str) -> None:
    for text in (TEXT * 400, "hello world " * 5000, '{"a":"b","cd":"ef"},' * 3000, f"中文文字{COMMA}" * 9000):
        assert max(map(len, Cuts(TOKENIZERS[name]).pieces(text))) <= cutting.PIECE


def test_a_tokenizer_that_puts_a_space_before_every_text_is_cut_at_spaces() -> None:
    pieces = list(Cuts(TOKENIZERS["llama 2"]).pieces("hello word, " * 5000))
    assert max(map(len, pieces)) <= cutting.PIECE and len("".join(pieces)) == 60_000 - len(pieces) + 1


def test_tokenizers_that_cannot_be_cut_get_the_whole_text() -> None:
    assert " " not in separators(TOKENIZERS["whole"])  # "of the" is a token
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Prepend("Begin: "))
    assert list(Cuts(tokenizer).pieces("hello word, " * 5000)) == ["hello word, " * 5000]


def test_a_text_without_a_place_to_cut_is_one_piece_up_to_the_next_place() -> None:
    blob = "Ab3" * 20_000
    pieces = list(Cuts(TOKENIZERS["gpt2"]).pieces(blob + " and more " + blob))
    assert [len(piece) for piece in pieces] == [60_000, 4, 60_006] or len(pieces) <= 4
    assert "".join(pieces) == blob + " and more " + blob


def test_an_added_token_that_swallows_spaces_forbids_cuts_before_them() -> None:
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    assert " " in separators(tokenizer)
    tokenizer.add_tokens([AddedToken("STOP", rstrip=True, normalized=False)])
    assert " " not in separators(tokenizer)
    tokenizer.add_tokens([AddedToken("a,b", normalized=False)])
    assert "," not in separators(tokenizer)


# -- the tokeniser -----------------------------------------------------------------------------------


def test_special_tokens_are_put_around_a_long_text_as_the_tokenizer_does() -> None:
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|end|> $A <|end|>", special_tokens=[("<|end|>", tokenizer.convert_tokens_to_ids("<|end|>"))]
    )
    tokeniser = Tokeniser(tokenizer)
    for text in ("", "a", TEXT * 100):
        assert tokeniser.encode(text, special=True).tolist() == tokenizer.encode(text)
    assert len(tokenizer.encode("")) == 2


def test_a_text_that_is_too_long_is_not_tokenised_to_its_end() -> None:
    seen = []

    class Counting:
        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            seen.append(len(text))
            return TOKENIZERS["gpt2"].encode(text, add_special_tokens=add_special_tokens)

        def __getattr__(self, name: str) -> Any:
            return getattr(TOKENIZERS["gpt2"], name)

    tokeniser = Tokeniser(Counting())
    text = "hello world, " * 100_000
    with pytest.raises(TooLong, match="more than 1000 "):
        tokeniser.encode(text, most_tokens=1000)
    assert sum(seen) < 60_000 < len(text)


def test_many_threads_tokenise_at_once_and_a_short_text_passes_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenising, "LEAST", 100)
    tokenizer, go = TOKENIZERS["gpt2"], threading.Event()

    def between() -> None:
        assert go.wait(60)  # nobody is through before all of them are there

    tokeniser = Tokeniser(tokenizer, between)
    long = [TEXT * n for n in (700, 800, 900)]
    ended: list[str] = []

    def encode(name: str, text: str) -> Any:
        found = tokeniser.encode(text)
        ended.append(name)
        return found

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(encode, f"long {i}", text) for i, text in enumerate(long)]
        short = pool.submit(encode, "short", TEXT * 2)
        go.set()
        assert short.result(60).tolist() == tokenizer.encode(TEXT * 2, add_special_tokens=False)
        for future, text in zip(running, long, strict=True):
            assert future.result(120).tolist() == tokenizer.encode(text, add_special_tokens=False)
    assert ended[0] == "short"


# -- the turnstile -----------------------------------------------------------------------------------


def order_of(lefts: list[int], pieces: int) -> list[int]:
    """Who passes, in order, if all of them want `pieces` turns, and are there when the first one leaves."""
    turnstile, passed, ready = Turnstile(), [], threading.Semaphore(0)
    hold, wanting = threading.Event(), [pieces] * len(lefts)

    def first() -> None:
        with turnstile.turn(Visitor(), 0):
            ready.release()
            hold.wait(60)

    def visit(index: int) -> None:
        visitor = Visitor()
        for _ in range(pieces):
            with turnstile.turn(visitor, lefts[index]):
                passed.append(index)
                wanting[index] -= 1
                while len(turnstile._waiting) < sum(n > 0 for n in wanting) - (wanting[index] > 0):
                    time.sleep(0.001)  # until the others have queued again

    with ThreadPoolExecutor(len(lefts) + 1) as pool:
        pool.submit(first)
        ready.acquire()
        waiting = [pool.submit(visit, i) for i in range(len(lefts))]
        while len(turnstile._waiting) < len(lefts):
            time.sleep(0.001)
        hold.set()
        for future in waiting:
            future.result(60)
    return passed


def test_the_one_with_the_least_left_is_next() -> None:
    assert order_of([30, 10, 20], 1) == [1, 2, 0]


def test_the_one_with_the_most_left_gets_its_turns() -> None:
    passed = order_of([100, 1, 1, 1], 12)
    assert 0 in passed[: PASSED_OVER + 2]
    assert passed[:24].count(0) >= 3


def test_a_turn_that_fails_lets_the_next_one_in() -> None:
    turnstile = Turnstile()
    with pytest.raises(ValueError, match="no"), turnstile.turn(Visitor(), 1):
        raise ValueError("no")
    with turnstile.turn(Visitor(), 1):
        pass


@pytest.mark.parametrize(
    ("crossing", "text"),
    [
        ("),", "word \u2474, word"),  # NFKC makes (1) of the one character
        ("f(", "word f\uff08word"),  # and a plain bracket of the full-width one
    ],
)
def test_a_cut_is_exact_for_what_a_normalizer_makes_of_the_text(
    crossing: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = sorted({chr(i) for i in range(0x20, 0x7F)} | set("".join(cutting.SAMPLES)) | set(cutting.SEPARATORS))
    vocabulary = {token: i for i, token in enumerate([*letters, crossing])}
    backend = Tokenizer(models.BPE(vocabulary, [(crossing[0], crossing[1])]))
    backend.normalizer = normalizers.NFKC()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    monkeypatch.setattr(cutting, "PIECE", text.index("\u2474" if "\u2474" in text else "f") + 2)
    pieces = list(Cuts(tokenizer).pieces(text))
    assert len(pieces) > 1
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_a_tokenizer_that_joins_contractions_to_words_is_not_cut_at_apostrophes() -> None:
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"
    alphabet = [*ALPHABET, "ta"]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, [("t", "a")]))
    backend.pre_tokenizer = split(pattern)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    pattern_found = Cuts(tokenizer)._rule.pattern
    assert pattern_found is not None and pattern_found.search("a,b") and not pattern_found.search("don'tall")
