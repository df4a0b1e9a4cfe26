"""Finds places where a text can be cut so that its pieces give the tokens of the whole.

A cut lies between a letter and a separator (a space, a newline, a comma ...). It is exact for a separator if

- no token of the vocabulary has a letter right before that separator, so no token can lie across the cut;
- none has one before what a tokenizer may make of that separator first (a full-width comma becomes a plain one);
- no added token swallows the space behind it where it ends in a letter;
- the tokenizer gives the same tokens for samples, whole and in two pieces. This finds tokenizers that add something to
  the beginning of a text, or strip it.

Only a letter that stays letters in every normal form of Unicode is one here: of \u2474 a tokenizer may make "(1)".

A tokenizer that puts a space before every text (Llama 2's does) is cut at single spaces, and the space is left out: it
comes back. A tokenizer for which nothing passes is never cut. Knows nothing of MLX or of the cache.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from typing import Any, NamedTuple

PIECE = 8192
"""Characters of a piece: some milliseconds of work."""
SEPARATORS = " \n,.;:!?\"'()[]{}<>=/*+-" + "\uff0c\u3002\u3001\uff1b\uff1a\uff01\uff1f\uff08\uff09\u300c\u300d"
"""The second half: the full-width ones of Chinese and Japanese."""
LETTER = r"[^\W\d_]"
BYTE = "[\udc80-\udcff]"
"""A byte of a token that is no part of a whole character, as Python's "surrogateescape" writes it."""
SAMPLES = (
    "One word, and{0}another word{0} and{0}{0}then more",
    "naïve café{0}Straße {0}x",
    "data{0}12 and x{0}\n\nnext  line{0}\ttab",
    "中文{0}文字更多文字{0} 结束",
    "Привет{0}мир{0}'s and{0}'ll",
    "don{0}tall it{0}seen we{0}really he{0}ll she{0}dared",
)


class Cuts:
    """Where texts of one tokenizer can be cut. Its vocabulary is read when a long text first comes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def pieces(self, text: str) -> Iterator[str]:
        """Yields the text in pieces of at most `PIECE` characters; longer where there is no place to cut."""
        start = 0
        while len(text) - start > PIECE:
            end = self._place(text, start)
            yield text[start:end]
            start = end + self._rule.skip
        if start < len(text):
            yield text[start:]

    def _place(self, text: str, start: int) -> int:
        """The last place to cut in the piece that begins at `start`, else the next one after it, else the end."""
        pattern = self._rule.pattern
        if pattern is None:
            return len(text)
        limit = start + PIECE
        for window in (256, PIECE):
            found = [match.end() for match in pattern.finditer(text, max(start, limit - window), limit)]
            last = next((end for end in reversed(found) if _stays_letters(text[end - 1])), None)
            if last is not None:
                return last
        later = (match.end() for match in pattern.finditer(text, limit - 1))
        return next((end for end in later if _stays_letters(text[end - 1])), len(text))

    @functools.cached_property
    def _rule(self) -> Rule:
        possible = separators(self._tokenizer)
        proven = "".join(s for s in possible if _exact(self._tokenizer, s, _rule(s)))
        if proven:
            return _rule(proven)
        space = Rule(re.compile(f"{LETTER}(?= {LETTER})"), skip=1)
        return space if " " in possible and _exact(self._tokenizer, " ", space) else Rule(None)


class Rule(NamedTuple):
    pattern: re.Pattern[str] | None
    """Matches the letter before a cut."""
    skip: int = 0
    """Characters behind the cut that are left out."""


def _rule(separators: str) -> Rule:
    return Rule(re.compile(f"{LETTER}(?=[{re.escape(separators)}])"))


def separators(tokenizer: Any) -> str:
    """Those of `SEPARATORS` that no token of the vocabulary has behind a letter."""
    vocabulary, left = tokenizer.get_vocab(), set(SEPARATORS)
    in_bytes = "\u0120" in vocabulary and "▁" not in vocabulary
    crossing = re.compile(f"(?:{LETTER}|{BYTE})(?=([{re.escape(SEPARATORS)}]))")
    ending_inside = re.compile(f"{LETTER}({BYTE}+)$")
    for token in vocabulary:
        text = _read(token) if in_bytes else token.replace("▁", " ")
        left -= set(crossing.findall(text))
        if match := ending_inside.search(text):
            begun = match[1].encode(errors="surrogateescape")
            left = {s for s in left if not s.encode().startswith(begun)}
    for added in getattr(tokenizer, "added_tokens_decoder", {}).values():
        left -= set(crossing.findall(added.content))
        if added.rstrip and added.content[-1:].isalpha():
            left -= {" ", "\n"}
    return "".join(s for s in SEPARATORS if s in left and unicodedata.normalize("NFKC", s) in left)


def _stays_letters(letter: str) -> bool:
    return unicodedata.normalize("NFKD", letter).isalpha()


def _read(token: str) -> str:
    """A token of a byte-level vocabulary as text. One that has other characters is an added token, and is text."""
    try:
        return bytes(_bytes()[c] for c in token).decode(errors="surrogateescape")
    except KeyError:
        return token


@functools.cache
def _bytes() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable ones for themselves, the others in
    order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _exact(tokenizer: Any, separator: str, rule: Rule) -> bool:
    """Whether samples with this separator give the same tokens in two pieces as whole."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    assert rule.pattern is not None
    for sample in SAMPLES:
        text = sample.format(separator)
        whole = encode(text)
        for match in rule.pattern.finditer(text):
            if encode(text[: match.end()]) + encode(text[match.end() + rule.skip :]) != whole:
                return False
    return True
