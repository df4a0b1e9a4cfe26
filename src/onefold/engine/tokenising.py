"""Tokenising a conversation that has grown: only what is new.

A long conversation is tokenised again on every turn, at some milliseconds per thousand tokens. What lies before a
special token never changes the tokens behind it, so a text that begins like an earlier one needs only its own end
tokenised, from the last special token that both have.

Of a long text, one short piece at a time is tokenised: no call keeps the interpreter to itself for long, a short text
need not wait for a long one, and all of them together take one core at most.

- The result is that of tokenising the whole text. Where that is not certain, the whole text is tokenised.
- Any number of threads may ask.

Knows nothing of templates, of MLX, or of the cache.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from onefold.engine.cutting import Cuts
from onefold.engine.turnstile import Turnstile, Visitor
from onefold.errors import TooLong

KEPT_TEXTS = 64
KEPT_CHARACTERS = 8_000_000
LEAST = 4096
"""Characters of a text that is worth remembering."""


def tokenizer_digest(tokenizer: Any) -> str:
    """Returns a digest that identifies the tokenizer: two tokenizers may make other tokens of the same text."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.blake2b(vocabulary.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Encoded(NamedTuple):
    tokens: np.ndarray
    marks: tuple[tuple[int, int], ...]
    """Where pieces of the text begin, in characters and in tokens: to find one by the other, decode one piece."""


NOTHING = Encoded(np.empty(0, np.int32), ())


class Tokeniser:
    def __init__(self, tokenizer: Any, between: Callable[[], None] | None = None) -> None:
        """`between` is called between two pieces of a long text, and may raise."""
        self._tokenizer = tokenizer
        self._between = between or (lambda: None)
        self._markers = _markers(tokenizer)
        self._cuts = Cuts(tokenizer)
        self._turnstile = Turnstile()
        self._around = _around(tokenizer)
        self._knowing = threading.Lock()
        self._known: OrderedDict[str, Encoded] = OrderedDict()
        """Texts, the one used last at the end."""

    def encode(self, text: str, *, special: bool = False, most_tokens: int | None = None) -> np.ndarray:
        """Returns the tokens of a text. `special`: with those that the tokenizer puts around a text. Raises what the
        tokenizer raises, and TooLong as soon as there are more than `most_tokens`: how many, it then estimates."""
        if special:
            if self._around is None:
                return _array(self._tokenizer.encode(text))
            before, after = self._around
            return np.concatenate([before, self.encode(text, most_tokens=most_tokens), after])
        return self.encode_marked(text, most_tokens=most_tokens).tokens

    def encode_marked(self, text: str, *, most_tokens: int | None = None) -> Encoded:
        """Encodes a text as `encode` does, without special tokens, and returns where the marks lie in the tokens."""
        if len(text) < LEAST:
            return Encoded(_array(self._tokenizer.encode(text, add_special_tokens=False)), ((0, 0),))
        with self._knowing:
            head, known = self._head(text) if self._markers else (0, NOTHING)
        found = self._encode_rest(text, head, known, most_tokens)
        if self._markers:
            self._remember(text, found)
        return found

    def _encode_rest(self, text: str, head: int, known: Encoded, most_tokens: int | None) -> Encoded:
        parts, count, marks = [known.tokens], len(known.tokens), list(known.marks)
        visitor, done = Visitor(), head
        for piece in self._cuts.pieces(text[head:]):
            self._between()
            if most_tokens is not None and count > most_tokens:
                about = count * len(text) // max(done, 1)
                message = f"this prompt has about {about} tokens; more than {most_tokens} are not taken"
                raise TooLong(message, tokens=about, most=most_tokens)
            with self._turnstile.turn(visitor, len(text) - done):
                parts.append(_array(self._tokenizer.encode(piece, add_special_tokens=False)))
            marks.append((done, count))
            count += len(parts[-1])
            done += len(piece)
        return Encoded(np.concatenate(parts), tuple(marks))

    def _remember(self, text: str, found: Encoded) -> None:
        with self._knowing:
            self._known[text] = found
            self._known.move_to_end(text)
            while len(self._known) > KEPT_TEXTS or sum(map(len, self._known)) > KEPT_CHARACTERS:
                self._known.popitem(last=False)

    def _head(self, text: str) -> tuple[int, Encoded]:
        """Returns how much of the text is known from an earlier one, up to a special token, and its tokens."""
        best, source = 0, ""
        for known in reversed(self._known):
            common = _common(known, text, best)
            if common > best:
                best, source = common, known
        at, marker = max(((text.rfind(m, 0, best), m) for m in self._markers), default=(-1, ""))
        if at <= 0:
            return 0, NOTHING
        tokens, marks = self._known[source]
        places = np.flatnonzero(tokens == self._markers[marker])
        if len(places) != source.count(marker):  # it is also part of something else
            return 0, NOTHING
        here = int(places[text.count(marker, 0, at)])
        return at, Encoded(tokens[:here], tuple(mark for mark in marks if mark[0] <= at and mark[1] <= here))


def _array(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def _around(tokenizer: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The tokens that a tokenizer puts before and after a text; None if it does something else with it."""
    found = set()
    for text in ("a", "Some words, 12 "):
        whole = tuple(tokenizer.encode(text))
        bare = tuple(tokenizer.encode(text, add_special_tokens=False))
        at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), None)
        if not bare or at is None:
            return None
        found.add((whole[:at], whole[at + len(bare) :]))
    if len(found) != 1:
        return None
    ((before, after),) = found
    return _array(before), _array(after)


def _common(a: str, b: str, more_than: int) -> int:
    """Characters that both begin with; 0 if they are no more than `more_than`. Compares slices, not characters."""
    low, high = more_than, min(len(a), len(b))
    if high <= low or a[:low + 1] != b[:low + 1]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _markers(tokenizer: Any) -> dict[str, int]:
    """Special tokens that are matched as they are, and at which this tokenizer can really be cut."""
    found = {
        added.content: token
        for token, added in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if added.special and not (added.lstrip or added.rstrip or added.single_word or added.normalized)
    }
    return {m: t for m, t in found.items() if len(m) > 2 and _cuts(tokenizer, m, found)}


def _overlap(a: str, b: str) -> bool:
    """Whether the two can share characters of a text without being the same occurrence of the same string."""
    ends = any(a.endswith(b[:n]) or b.endswith(a[:n]) for n in range(1, min(len(a), len(b))))
    return ends or (a != b and (a in b or b in a))


def _cuts(tokenizer: Any, marker: str, all_markers: dict[str, int]) -> bool:
    if any(_overlap(marker, other) for other in all_markers):
        return False

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    head, tail = " Some words, 12 ", f"{marker} and\n\n more  words"
    return all(encode(a + b) == encode(a) + encode(b) for a, b in ((head, tail), (head.strip(), tail), (marker, tail)))
