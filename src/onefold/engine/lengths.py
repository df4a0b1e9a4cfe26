"""How long a prompt and its answer may be: by the memory budget, and by the context that the model was made for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from onefold.cache.prefix_cache import PrefixCache
from onefold.engine.recovery import too_long
from onefold.engine.request import Request
from onefold.errors import TooLong

TOKENISED_BEYOND = 4
"""Times the longest prompt that can be run."""


class Lengths:
    def __init__(self, cache: PrefixCache, most_tokens: int, context_length: int | None) -> None:
        """`most_tokens` is the longest conversation that the budget has room for; `context_length` the longest that the
        model was made for, None if that is not known."""
        self._cache = cache
        self._most_tokens = most_tokens
        self._context_length = context_length

    @property
    def most_tokenised(self) -> int:
        """How many tokens of a prompt are tokenised at most. A prompt that is a little too long is tokenised whole: the
        API's errors name its tokens, and clients shorten it by that."""
        return TOKENISED_BEYOND * min(self._most_tokens, self._context_length or self._most_tokens)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Raises TooLong with the longest prompt, in place of one with the position where tokenising ended."""
        try:
            yield
        except TooLong as error:
            self.check(error.tokens, "about ")
            raise

    def check(self, tokens: int, about: str = "") -> None:
        """Raises TooLong, with the smaller of the two limits, if a prompt of `tokens` tokens is longer."""
        made_for = self._context_length
        if tokens > self._most_tokens and (made_for is None or self._most_tokens < made_for):
            raise too_long(tokens, self._most_tokens, self._cache, about)
        if made_for is not None and tokens > made_for:
            message = f"this prompt has {about}{tokens} tokens, and the model was made for {made_for}; shorten it"
            raise TooLong(message, tokens=tokens, most=made_for)

    def within_context(self, request: Request) -> Request:
        """Returns the request with an answer that ends where the model's context does. An answer always has room for
        one token."""
        if self._context_length is None:
            return request
        room = max(1, self._context_length - len(request.prompt))
        return replace(request, max_tokens=room if request.max_tokens is None else min(room, request.max_tokens))
