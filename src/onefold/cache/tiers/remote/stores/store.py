"""What a shared store can do: hold values of at most 4 MiB under names, for several machines.

A store never waits beyond its deadline: what it cannot do by then is a `StoreError` with the reason. Its methods are
called on threads of the tier, several at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.errors import OnefoldError


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
