"""Connections to Redis whose calls end by a deadline as a whole, and whose answers have a bound.

The package's own timeout is of one read: a server that sends a byte now and then would hold a thread for ever, and one
that sends more than was asked for would fill memory. Imports the package `redis`.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from redis.connection import Connection, SSLConnection

from onefold.cache.tiers.remote.grid import VALUE_BYTES

MOST_ANSWERED = 2 * VALUE_BYTES
"""Bytes of all answers to one call: a value, or a list of names."""


class BoundedSocket:
    """A socket that is given to the package in place of the one it wraps. Its clock begins with each send."""

    def __init__(self, wrapped: socket.socket, seconds: float) -> None:
        self._wrapped, self._seconds = wrapped, seconds
        self._asked: float | None = seconds
        """The timeout that the package has set last."""
        self._until = time.monotonic() + seconds
        self._received = 0

    def settimeout(self, seconds: float | None) -> None:
        self._asked = seconds
        self._wrapped.settimeout(seconds)

    def sendall(self, data: Any, flags: int = 0) -> None:
        self._until, self._received = time.monotonic() + self._seconds, 0
        self._wrapped.settimeout(self._seconds)
        self._wrapped.sendall(data, flags)

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._arm()
        found = self._wrapped.recv(size, flags)
        self._count(len(found))
        return found

    def recv_into(self, buffer: Any, size: int = 0, flags: int = 0) -> int:
        self._arm()
        found = self._wrapped.recv_into(buffer, size, flags)
        self._count(found)
        return found

    def _arm(self) -> None:
        """Wait no longer than is left. Raises TimeoutError if nothing is. The package asks with a timeout of 0 whether
        an idle connection has something to say."""
        if self._asked == 0:
            return
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer takes longer than the deadline")
        self._wrapped.settimeout(left if self._asked is None else min(left, self._asked))

    def _count(self, n_bytes: int) -> None:
        self._received += n_bytes
        if self._received > MOST_ANSWERED:
            raise OSError(f"the answer has more than {MOST_ANSWERED} bytes")

    def __getattr__(self, name: str) -> Any:
        """Returns what is the wrapped socket's: `close`, `shutdown`, `fileno` and others."""
        return getattr(self._wrapped, name)


def _bounded(wrapped: socket.socket, seconds: float | None) -> BoundedSocket:
    assert seconds is not None, "the store sets a deadline"
    return BoundedSocket(wrapped, seconds)


class BoundedConnection(Connection):
    def _connect(self) -> Any:
        return _bounded(super()._connect(), self.socket_timeout)


class BoundedSslConnection(SSLConnection):
    def _connect(self) -> Any:
        return _bounded(super()._connect(), self.socket_timeout)
