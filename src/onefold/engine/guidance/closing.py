"""Completes an answer that is about to reach its limit of tokens: JSON that is cut in the middle is of no use.

Strings are closed, no optional property is begun, and what the schema still requires is made short. A candidate for the
next token is one character, and the grammar is asked whether it may come, which takes microseconds.
"""

from __future__ import annotations

import string
import time
from typing import Any

import numpy as np

from onefold.engine.guidance.limits import SLOW_SECONDS

FIRST_LOOK = 512
"""Tokens before the limit at which completing is considered first."""
MOST_TOKENS = 256
"""The longest completion."""
MOST_SPARE = 8
"""A completion begins with at most so many tokens to spare, and a quarter of its own: what comes next may need more."""
CLOSERS = '}],:"'
"""What makes an answer outside a string shortest, the best first. In a string it is the quotation mark."""
OTHERS = "0123456789-tfn[{." + string.punctuation + string.ascii_letters + " "
"""What is tried next, in this order: in a pattern, punctuation leads on to its next part."""
ONLY_INSIDE = "(a%~_"
"""Where one of them may come next, it is in a string: "a" begins nothing in JSON."""


class Completions:
    def __init__(self, vocabulary: Any) -> None:
        """`vocabulary`: llguidance's."""
        tokens = {letter: vocabulary.tokenize_str(letter) for letter in {*CLOSERS, *OTHERS}}

        def single(letters: str) -> list[int]:
            return [tokens[letter][0] for letter in letters if len(tokens[letter]) == 1]

        self._quote, self._closers = single('"'), single(CLOSERS)
        self._others, self._only_inside = single(OTHERS), single(ONLY_INSIDE)

    def find(self, matcher: Any, most: int) -> list[int] | None:
        """Returns at most `most` tokens that complete an answer from where `matcher` is; None if none are found within
        the limits. Leaves the matcher as it is, but for what its lexer has learnt. Every token that is tried takes some
        20 microseconds, and all rows wait."""
        matcher, found = matcher.deep_copy(), list[int]()
        used: dict[int, int] = {}
        most = min(most, MOST_TOKENS)
        until = time.thread_time() + SLOW_SECONDS
        while not matcher.is_accepting():
            ahead = matcher.compute_ff_tokens() or self._next(matcher, used)
            if not ahead or len(found) + len(ahead) > most or time.thread_time() > until:
                return None
            matcher.consume_tokens(ahead)
            found += ahead
        return found

    def _next(self, matcher: Any, used: dict[int, int]) -> list[int]:
        """Returns the next token of a completion; none if nothing may come. Of the tokens that close nothing it takes
        the one that was used least, so that each part of a pattern has its turn."""
        inside = any(_may_come(matcher, token) for token in self._only_inside)
        for token in self._quote if inside else self._closers:
            if _may_come(matcher, token):
                return [token]
        for token in sorted(self._others, key=lambda one: used.get(one, 0)):
            if _may_come(matcher, token):
                used[token] = used.get(token, 0) + 1
                return [token]
        return _first_allowed(matcher)


def _may_come(matcher: Any, token: int) -> bool:
    return bool(matcher.validate_tokens([token]) == 1)


def _first_allowed(matcher: Any) -> list[int]:
    """The first token of the vocabulary that may come next; none if there is none. Rare: the middle of a letter that
    has several bytes."""
    return allowed_tokens(matcher)[:1].tolist()


def allowed_tokens(matcher: Any) -> np.ndarray:
    """Returns the tokens that may come next, in order. Computes a whole mask."""
    return np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
