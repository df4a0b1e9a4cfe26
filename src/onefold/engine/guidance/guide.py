"""Which tokens may come next in one answer.

A guide follows the tokens of its answer, one by one. It rests while the model thinks, and where its grammar leaves one
way on it names the tokens of that way at once (`forced`), as it does with those that complete an answer near its limit
of tokens. Used by the engine's thread alone. Knows nothing of MLX.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

from onefold.engine.guidance.closing import FIRST_LOOK, MOST_SPARE, Completions, allowed_tokens
from onefold.engine.guidance.limits import SLOW_SECONDS, SLOW_STEPS
from onefold.engine.guidance.messages import explained
from onefold.errors import PromptError, RequestError

log = logging.getLogger("onefold.engine")

GUIDED_STATES = frozenset({"normal", "tool"})
"""States of an answer that the grammar is about; in others, as in reasoning, everything is allowed."""

NOT_ALLOWED = (
    "this answer cannot be kept to its schema or grammar any further: the token that was computed is not allowed; "
    "simplify the schema, or ask again"
)


class Guide:
    def __init__(
        self,
        matcher: Any,
        vocab: int,
        *,
        ends: Sequence[int],
        state: str,
        thinks: Sequence[int] = (),
        begins_call: Sequence[int] = (),
        must_answer: bool = False,
        completions: Completions | None = None,
    ) -> None:
        """`matcher`: llguidance's, at the beginning, for `vocab` tokens. `ends`: the tokens that end an answer.
        `state`: what the answer begins in. `thinks`: the tokens by which the answer may begin to think, if it may.
        `begins_call`: the tokens by which a call begins. `must_answer`: an answer may not end in a thought.
        `completions`: completes the answer near its limit of tokens; None: it is cut there."""
        self._matcher = matcher
        self.vocab = vocab
        self._ends = frozenset(ends)
        self._resting = state not in GUIDED_STATES
        self._thinks = tuple(thinks)
        self._begins_call = list(begins_call)
        self._must_answer = must_answer
        self._completions = completions
        self._look_at = FIRST_LOOK
        self._completing = False
        self._slow = 0
        self.suspect = False
        """It may be the one of several guides whose mask took long."""
        self.forced: deque[int] = deque()
        """The only tokens that may come next, as far as they are known."""
        if not self._resting and not self._thinks:
            self._look_ahead()

    @property
    def rests(self) -> bool:
        """Whether the grammar does not concern the next token: the model thinks."""
        return self._resting and not self.forced

    @property
    def began(self) -> bool:
        """Whether the grammar holds for the next token: the model no longer thinks, or never does."""
        return not self._resting and not self._thinks

    @property
    def forbidden(self) -> frozenset[int]:
        """Tokens that may not come next while it rests: those that end the answer, if there must be one."""
        return self._ends if self._must_answer else frozenset()

    @property
    def free(self) -> bool:
        """Whether every token may come next."""
        return self.rests and not self.forbidden

    @property
    def matcher(self) -> Any:
        """What computes the mask, if neither `rests` nor `forced`."""
        return self._matcher

    @property
    def may_think(self) -> int | None:
        """A token that may come next beside those of the mask: the model may begin to think."""
        return self._thinks[0] if self._thinks else None

    @property
    def completed(self) -> bool:
        """Whether the answer was completed because of its limit, and ends here."""
        return self._completing and not self.forced

    def read(self, token: int, state: str | None, left: int) -> None:
        """Follows a token of the answer. `state`: what the answer is in behind it. `left`: tokens that may still come.
        Raises RequestError if the grammar has become too complex, or has no way on."""
        begun = time.thread_time()
        self._read(token, state)
        self.note_time(time.thread_time() - begun)
        self.check()
        if self._completions is not None and left <= self._look_at and self.began and not self._completing:
            self._consider_completing(self._completions, left)

    def note_time(self, seconds: float) -> None:
        """Notes the processor time that one mask, or following one token, took: all rows wait for it."""
        self.suspect = False
        self._slow += seconds > SLOW_SECONDS

    def _read(self, token: int, state: str | None) -> None:
        thinks, self._thinks = self._thinks, ()
        if self.forced:
            allowed = token == self.forced.popleft()
        elif thinks and token == thinks[0]:
            self._resting = True
            self.forced.extend(thinks[1:])
            return
        else:
            allowed = self._resting or token in self._ends or bool(self._matcher.try_consume_tokens([token]))
        if not allowed:
            self._refuse(token)
        if not self.forced and token not in self._ends and state in GUIDED_STATES and self._awake(state):
            self._look_ahead()

    def _refuse(self, token: int) -> NoReturn:
        """Raises RequestError for a token that the grammar forbids, and logs it. A lexer that has reached its limits
        reports that only when the next mask is computed."""
        allowed = allowed_tokens(self._matcher)
        self.check()
        log.warning(
            "the engine computed token %d, which its answer's grammar forbids; the mask allows %d tokens and %s it",
            token,
            len(allowed),
            "contains" if token in allowed else "does not contain",
        )
        raise RequestError(NOT_ALLOWED)

    def _awake(self, state: str | None) -> bool:
        """Ends a rest, and returns whether the grammar holds from here on. A call that begins in the middle of a
        thought is kept to the grammar if it is one of its calls; else the grammar begins behind it."""
        if self._resting and state == "tool":
            begun = self._begins_call
            if not begun or self._matcher.validate_tokens(begun) < len(begun):
                return False
            self._matcher.consume_tokens(begun)
        self._resting = False
        return True

    def _look_ahead(self) -> None:
        ahead = self._matcher.compute_ff_tokens()
        if ahead:
            self._matcher.consume_tokens(ahead)
            self.check()
            self.forced.extend(ahead)

    def _consider_completing(self, completions: Completions, left: int) -> None:
        """Forces the tokens that complete the answer, if the tokens that are left just suffice for them; else says when
        to look again."""
        if self._matcher.is_stopped():  # all that may come is the end
            return
        begun = time.thread_time()
        found = completions.find(self._matcher, left - len(self.forced))
        if time.thread_time() - begun > SLOW_SECONDS / 2:  # all rows wait for it: not again
            self._completions = None
        needed = len(self.forced) + len(found or ())
        least = needed + max(1, min(MOST_SPARE, needed // 4))
        if found is None:
            self._look_at = left * 2 // 3
        elif left <= least:
            self._matcher.consume_tokens(found)
            self.forced.extend(found)
            self._completing = True
        else:
            self._look_at = min(left - 1, max(least, (left + needed) // 2))

    def check(self) -> None:
        """Raises PromptError if the grammar cannot be followed any further."""
        if self._slow >= SLOW_STEPS:
            raise PromptError("an answer cannot be kept to this schema or grammar: it takes too long; simplify it")
        if self._matcher.is_error():
            why = explained(self._matcher.get_error())
            raise PromptError(f"an answer cannot be kept to this schema or grammar: {why}; simplify it")
