"""The buffers, in memory, through which the bytes of records leave for the disk.

- A buffer has room for the largest record. Several small ones share it: a conversation whose turns follow each other at
  once stages a small record with each, and all of them lie in a few buffers.
- Some buffers are always there. While they are full, and the budget has free bytes, more are made, up to a limit;
  each is freed when its last record was written. Nothing is evicted for them, and the ledger counts every one.

All methods are called with the cache's lock held.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from onefold.cache.memory.ledger import Account, Ledger, Purpose


class Buffer:
    def __init__(self, n_bytes: int) -> None:
        self.bytes = np.empty(n_bytes, np.uint8)
        self.account: Account | None = None
        """The account of a temporary buffer; None for one of the pool."""
        self.filled = 0
        """Bytes that were given out since it was last empty."""
        self.records = 0
        """That lie in it."""


class Place(NamedTuple):
    """Where the bytes of one record lie until they are written."""

    bytes: npt.NDArray[np.uint8]
    buffer: Buffer


class Staging:
    def __init__(self, ledger: Ledger, buffer_bytes: int, n_buffers: int, most_bytes: int) -> None:
        """`n_buffers` are there from now on, and counted by the caller. All of them and those that are made for a while
        take at most `most_bytes`."""
        self.buffer_bytes = buffer_bytes
        self._ledger = ledger
        self._free = [Buffer(buffer_bytes) for _ in range(n_buffers)]
        self._filling: Buffer | None = None
        self._more = max(0, most_bytes // buffer_bytes - n_buffers)
        """Buffers that may still be made."""
        self.extra_bytes = 0
        """The bytes of the temporary buffers."""

    def fits(self, n_bytes: int) -> bool:
        """Whether so many bytes could be taken now: of one record, or of several that fill the buffers well."""
        left = 0 if self._filling is None else self.buffer_bytes - self._filling.filled
        missing = -(-(n_bytes - left) // self.buffer_bytes) - len(self._free)
        return missing <= 0 or (missing <= self._more and self._ledger.fits(missing * self.buffer_bytes))

    def take(self, n_bytes: int) -> Place | None:
        """Returns a place for a record of so many bytes, at most `buffer_bytes`; None if there is no room."""
        buffer = self._filling
        if buffer is None or buffer.filled + n_bytes > self.buffer_bytes:
            buffer = self._free.pop() if self._free else self._another()
            if buffer is None:
                return None
            self._filling = buffer
        place = Place(buffer.bytes[buffer.filled : buffer.filled + n_bytes], buffer)
        buffer.filled += n_bytes
        buffer.records += 1
        return place

    def give(self, place: Place) -> None:
        """Release the place of a record that was written or failed. Once for each place."""
        buffer = place.buffer
        buffer.records -= 1
        if buffer.records:
            return
        buffer.filled = 0
        if buffer is self._filling:
            self._filling = None
        if buffer.account is None:
            self._free.append(buffer)
        else:
            buffer.account.close()
            self.extra_bytes -= self.buffer_bytes
            self._more += 1

    def _another(self) -> Buffer | None:
        """Returns one more buffer, from the free bytes of the budget; None if there are none."""
        if self._more <= 0 or not self._ledger.fits(self.buffer_bytes):
            return None
        try:
            buffer = Buffer(self.buffer_bytes)
        except MemoryError:
            return None
        buffer.account = self._ledger.open(Purpose.DISK, self.buffer_bytes, "records on their way to the disk")
        self._more -= 1
        self.extra_bytes += self.buffer_bytes
        return buffer
