"""One request in the engine: its lease, its position, and the events that it has to deliver.

    waiting ── open ──> prefilling ── prefilled ──> decoding ──> over
       ^                    │                          │
       └──── suspend ───────┴──────────────────────────┘

    tokens    |<------------ prompt ------------>|<-- read -->|
    layers    |<---------------- held ----------------->|       (all but the newest token, or all)
    chosen    tokens that the device was told to compute, one of them perhaps not read yet

A job that is preempted continues later from the tokens it had: what was computed stays in the tree while there is
room for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from onefold.cache.memory.tier import Fetch
from onefold.cache.memory.tokens import Tokens
from onefold.cache.prefix_cache import PrefixCache
from onefold.cache.request.lease import Lease
from onefold.engine.answer import Answer
from onefold.engine.guidance.compiler import Guided
from onefold.engine.prompt import describe_divergence
from onefold.engine.request import (
    Done,
    Event,
    Failed,
    Finish,
    Generated,
    Hit,
    Logprob,
    Place,
    Progress,
    Request,
    Started,
)
from onefold.engine.sampling import Chosen, Row, Turn
from onefold.errors import DeviceError, OnefoldError

Deliver = Callable[[list[Event]], None]
READS = 4
"""How often the same records are read, if they are evicted each time before there is a row for the request."""


class Job:
    def __init__(
        self,
        number: int,
        request: Request,
        deliver: Deliver,
        tokenizer: Any,
        vocab: int,
        guided: Guided | None = None,
    ) -> None:
        self.number = number
        """In the order of arrival."""
        self.request = request
        self.arrived_at = time.monotonic()
        self.tokens: list[int] = request.prompt.tokens.tolist()
        self.lease: Lease | None = None
        self.restore: Fetch | None = None
        """What it has on disk, on its way into memory."""
        self.looked = False
        """The disk was searched for this request."""
        self._read: list[Fetch] = []
        """What was read before that, and was damaged or did not last."""
        self.position = 0
        """Tokens that the layers hold."""
        self.chosen: Chosen | None = None
        self.seat = 0
        self.n_chosen = 0
        self.hit: Hit | None = None
        self.over = False
        self._place: Place | None = None
        """Where what was kept of it ends in the tree."""
        self.gave_way_at = -1
        """Its position when it was last preempted."""
        self.passed_over = 0
        """Chunks that other prompts got since its own last one."""
        self.last_resort = False
        """All stored KV was freed for it once."""
        self._deliver = deliver
        self._tokenizer = tokenizer
        self._row = Row(request.sampling, vocab, request.top_logprobs)
        self.guide = None if guided is None else guided.guide
        self._answer = Answer(tokenizer, request, None if guided is None else guided.calls)
        self._all_text = guided is not None and guided.all_text
        self._events: list[Event] = []

    # -- memory ------------------------------------------------------------------------------

    def look_on_disk(self, cache: PrefixCache, reserve_tokens: int) -> bool:
        """Starts to read what is on disk of the request. Returns whether it must wait for that. Raises BudgetError."""
        if not self.looked or self._may_read_again:
            room = min(self.left, reserve_tokens)
            found = cache.restore(self._so_far, namespace=self.request.namespace, reserve_tokens=room)
            self.looked = True
            if found is not None:
                self._read += [] if self.restore is None else [self.restore]
                self.restore = found
        return self.restore is not None and not self.restore.done

    @property
    def _may_read_again(self) -> bool:
        """What was read may not have been right; or it was evicted while there was no row for it, and that a few times
        at most."""
        if self.restore is None or not self.restore.done:
            return False
        return self.restore.rejected or len(self._read) < READS

    @property
    def _so_far(self) -> Tokens:
        return self.request.prompt.tokens if self.n_chosen == 0 else np.array(self.tokens, np.int32)

    def open(self, cache: PrefixCache, reserve_tokens: int) -> None:
        """Opens a lease on all tokens so far. Raises BudgetError; then nothing has changed."""
        prompt, namespace, tokens = self.request.prompt, self.request.namespace, self._so_far
        known = cache.inventory.continuation(tokens, namespace=namespace)
        self.lease = cache.lease(
            tokens,
            namespace=namespace,
            checkpoints=prompt.checkpoints,
            reserve_tokens=min(self.left, reserve_tokens),
            after=self._read if self.restore is None else [*self._read, self.restore],
        )
        self._forget_restores()
        self.position = self.lease.cached
        if self.hit is None:
            lease = self.lease
            diverged = describe_divergence(prompt, lease.matched, known.tolist(), self._tokenizer)
            found = (lease.matched, lease.cached, lease.reason, diverged, lease.restored, lease.hold.from_remote)
            self.hit = Hit(len(prompt), *found)
            self._events.append(Started(self.hit, lease.hold.place))

    def _forget_restores(self) -> None:
        self.restore, self.looked, self._read = None, False, []

    def publish(self) -> None:
        """Commits what the layers hold by now, so that other requests can borrow it."""
        if self.lease is not None and self.position:
            self.lease.commit(self.tokens[: self.position], close=False)

    def settle(self, finish: Finish | None = None) -> DeviceError | None:
        """Closes the lease, and keeps what its layers hold. `finish` is why the answer ended, None if it did not.
        Returns the error if the device has failed since the lease was opened: then nothing is kept."""
        if self.restore is not None:
            self.restore.finish()
        self._forget_restores()
        lease, self.lease, self.chosen = self.lease, None, None
        if lease is None or lease.closed:
            return None
        try:
            if 0 < self.position == lease.offset:
                over = finish == "stop" and bool(self.request.tools) and not self._answer.calls_tools
                lease.commit(self.tokens[: self.position], turn_over=over)
            else:
                lease.cancel()
            self._place = lease.hold.place
        except DeviceError as error:  # what was being computed is lost, and the cache has counted it
            return error
        return None

    # -- tokens ------------------------------------------------------------------------------

    @property
    def left(self) -> int:
        """Tokens that may still be chosen."""
        most = self.request.max_tokens
        return (1 << 30 if most is None else most) - self.n_chosen

    @property
    def n_read(self) -> int:
        """Tokens that were chosen and are known."""
        return len(self.tokens) - len(self.request.prompt)

    def turn(self) -> Turn:
        newest = None if self.chosen is None else self.chosen.tokens[self.seat : self.seat + 1]
        return Turn(self._row, self.tokens, len(self.request.prompt), self.n_chosen, newest, self.guide)

    def seated(self, chosen: Chosen, seat: int) -> None:
        """Notes that its next token is being computed."""
        self.chosen, self.seat = chosen, seat
        self.n_chosen += 1

    def read(self, chosen: Chosen, seat: int) -> Finish | None:
        """Reads a token that was chosen. Returns the reason if the answer ends with it, else None. Raises RequestError
        if its guide fails."""
        token = chosen.read(seat)
        if self.chosen is chosen:
            self.chosen = None
        return self._take(token, self._logprob(token, chosen.logprob(seat)))

    def take_forced(self, most: int) -> Finish | None:
        """Takes up to `most` tokens into the answer that its guide forces, without a model. Returns the reason if the
        answer ends with one of them, else None."""
        assert self.guide is not None
        for _ in range(min(most, self.left, len(self.guide.forced))):
            self.n_chosen += 1
            finish = self._take(self.guide.forced[0], None)
            if finish is not None:
                return finish
        return None

    def _take(self, token: int, logprob: Logprob | None) -> Finish | None:
        self.tokens.append(token)
        if self._all_text and self.guide is not None and self.guide.began:
            self._answer.read_as_text()
        events, ended = self._answer.read(token, logprob)
        self._events += events
        if ended:
            return "stop"
        if self.guide is not None:
            self.guide.read(token, self._answer.state, self.left)
        completed = self.guide is not None and self.guide.completed
        return "length" if completed or (self.left == 0 and self.chosen is None) else None

    def _logprob(self, token: int, found: tuple[float, list[tuple[int, float]]] | None) -> Logprob | None:
        if found is None:
            return None
        logprob, top = found
        decode = self._tokenizer.decode
        return Logprob(token, decode([token]), logprob, tuple((t, decode([t]), p) for t, p in top))

    # -- telling -----------------------------------------------------------------------------

    def progressed(self) -> None:
        self._events.append(Progress(min(self.position, len(self.request.prompt)), len(self.request.prompt)))

    def finish(self, finish: Finish) -> None:
        self._events += self._answer.close(ended=finish == "stop")
        if finish == "stop" and self._answer.calls:
            finish = "tool_calls"
        hit = self.hit or Hit(len(self.request.prompt), 0, 0)
        answer = self._answer
        done = Done(finish, self.n_read, hit, answer.stopped_by, answer.reasoning_tokens, self._place)
        self._events.append(done)
        self.over = True

    def fail(self, error: OnefoldError) -> None:
        self._events.append(Failed(error))
        self.over = True

    def tell(self) -> None:
        if self._events:
            events, self._events = self._events, []
            if self.n_read and not self.over:
                events.append(Generated(self.n_read))
            self._deliver(events)
