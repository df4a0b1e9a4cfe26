"""What a shared store can do: hold values of at most 4 MiB under names, for several machines.

No call but `names` waits beyond the deadline, whatever a network or a file system does: what a store has not done by
then is a `StoreError`, and its thread is left behind (`Bounded`). The end of the process does not wait for that thread,
so it must not call MLX: stores read and write bytes. Methods are called on threads of the tier, several at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.errors import OnefoldError
from onefold.worker import Worker

_THREADS = 32
"""More than a tier and a census ask at the same time. If all of them are left behind, nothing is asked."""
_MARGIN = 0.5
"""Seconds beyond the deadline in which a store can still give its own reason."""
_PATIENT = 64
"""Names of a patient look that have one deadline."""

Answer = TypeVar("Answer")


class StoreError(OnefoldError):
    """The store did not do what it was asked."""

    def __init__(self, reason: RemoteReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Held(NamedTuple):
    """A value that a store holds."""

    name: str
    size: int


class Point(NamedTuple):
    """The name of a checkpoint, and how many of a chain's values it continues: it is of no use without them."""

    needs: int
    name: str


class Look(NamedTuple):
    """What a store has of a chain."""

    leading: int
    """Values, from the first name on."""
    point: int = -1
    """The last of the points that is there and whose values are there; -1 if there is none."""


class Store(Protocol):
    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        """Returns how many of these names, from the first on, the store has values under, and which of `points`, in
        the order of a conversation; in one round trip where the store can, and begins their time anew where it has
        one. A store that needs many round trips returns what it knows when its deadline is near, unless `patient`.
        Raises StoreError."""
        ...

    def get(self, name: str) -> bytes | None:
        """Returns the value; None if there is none. Raises RecordError if what lies there is none of ours, or larger
        than 4 MiB, and StoreError."""
        ...

    def add(self, name: str, value: bytes) -> bool:
        """Store a value, unless there is one under this name. Returns whether there was none. Raises StoreError."""
        ...

    def remove(self, name: str) -> None:
        """Remove a value, if there is one. Raises StoreError."""
        ...

    def names(self, prefix: str) -> Iterator[Held]:
        """Yields what lies under names that begin so, in any order. Raises StoreError."""
        ...

    def close(self) -> None: ...


class Address(NamedTuple):
    """Where a store is."""

    url: str
    """As the user gave it."""
    shown: str
    """The same without a password, for messages and logs."""
    local: bool
    """Whether only programs of this machine can reach it."""


class StoreSettings(NamedTuple):
    address: Address
    deadline: float
    """Seconds that a call may take."""
    ttl: int
    """Seconds that a value stays, if the store can forget values by itself; each use begins them again. 0: values that
    are written stay, and looking at others changes nothing."""


Opener = Callable[[StoreSettings], Store]
"""Opens a store, without connecting. Raises ConfigError if the URL is wrong, or a package is not installed."""


class Bounded:
    """A store whose calls end by the deadline, though those of the store that it opens may block."""

    def __init__(self, settings: StoreSettings, opener: Opener) -> None:
        """Raises ConfigError, and StoreError if that takes too long."""
        self._shown, self._seconds = settings.address.shown, settings.deadline + _MARGIN
        self._free = threading.Semaphore(_THREADS)
        self._store = self._called(opener, settings)

    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        if not patient:
            return self._called(self._store.look, names, points)
        leading = 0
        for begin in range(0, len(names), _PATIENT):
            found = self._called(partial(self._store.look, patient=True), names[begin : begin + _PATIENT]).leading
            leading += found
            if found < _PATIENT:
                break
        return Look(leading, self.look((), [Point(int(p.needs > leading), p.name) for p in points]).point)

    def get(self, name: str) -> bytes | None:
        return self._called(self._store.get, name)

    def add(self, name: str, value: bytes) -> bool:
        return self._called(self._store.add, name, value)

    def remove(self, name: str) -> None:
        self._called(self._store.remove, name)

    def names(self, prefix: str) -> Iterator[Held]:
        return self._store.names(prefix)

    def close(self) -> None:
        self._store.close()

    def _called(self, call: Callable[..., Answer], *given: Any) -> Answer:
        """Returns what the call returns. Raises what it raises, and StoreError if it takes too long."""
        answer: Future[Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(call(*given))
            except OnefoldError as error:
                answer.set_exception(error)
            finally:
                self._free.release()
                if not answer.done():
                    answer.set_exception(RuntimeError("a call of the shared store failed"))

        try:
            if not self._free.acquire(blocking=False):
                raise TimeoutError
            Worker(run, "onefold-store").start()
            return answer.result(self._seconds)
        except RuntimeError:  # the system has no more threads, or `call` failed
            if not answer.done():
                self._free.release()
            raise
        except TimeoutError as error:
            raise StoreError(RemoteReason.SLOW, f"{self._shown} has not answered in time") from error
