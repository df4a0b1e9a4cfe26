"""A record as the catalog knows it: which file it is, what it continues, and which nodes need it.

No MLX in this file, and no file is touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.records.index import NO_STAMP
from onefold.cache.tiers.records.record import VERSION, Named, What, file_name, is_state

BLOCK = 4096
"""A file takes a multiple of this on a disk."""
NO_TOKENS: Tokens = np.empty(0, np.int32)


def on_disk(size: int) -> int:
    """Returns how many bytes a file of this size takes on a disk."""
    return -(-size // BLOCK) * BLOCK


class Record:
    """One file: on disk, or being written."""

    __slots__ = (
        "address",
        "after",
        "after_address",
        "children",
        "end",
        "hollow",
        "in_doubt",
        "namespace",
        "nodes",
        "parent",
        "pins",
        "ready",
        "size",
        "stamp",
        "start",
        "tried",
        "unread",
        "used",
        "version",
        "what",
    )

    def __init__(
        self,
        namespace: str,
        what: What,
        at: bytes,
        start: int,
        end: int,
        size: int,
        used: float,
        version: int = VERSION,
        after_address: bytes = b"",
    ) -> None:
        self.namespace = namespace
        self.what = what
        self.address = at
        self.start = start
        self.end = end
        self.size = size
        self.used = used
        self.version = version
        self.hollow = False
        """A range that has tokens and no KV."""
        self.parent: Record | None = None
        self.after_address = after_address
        self.after: Record | None = None
        """The point whose windows this one's continue: like a parent, it is there as long as this one is."""
        self.children = 0
        """How many records continue this one directly, tokens or windows."""
        self.nodes: set[Any] = set()
        """The nodes that need it."""
        self.pins = 0
        """How many restores are reading it."""
        self.ready = True
        """The file is there, under its name."""
        self.unread = False
        """It could not be read. If that was its head, its end and its parent are unknown."""
        self.in_doubt = False
        """Its head can be read, and its content could not: it is not used before all of it was read once."""
        self.tried = 0.0
        """When that was tried last."""
        self.stamp = NO_STAMP
        """Identifies its file in the index, until its head was read."""

    @property
    def named(self) -> Named:
        return Named(self.what, self.start, self.address, self.version, self.after_address)

    @property
    def name(self) -> str:
        return file_name(*self.named)

    def link(self, parent: Record | None, end: int, after: Record | None = None) -> None:
        """Set which records this one continues, and where it ends."""
        for before, now in ((self.parent, parent), (self.after, after)):
            if before is not now:
                if before is not None:
                    before.children -= 1
                if now is not None:
                    now.children += 1
        self.parent, self.after, self.end = parent, after, end

    @property
    def above(self) -> list[Record]:
        """The records that it continues."""
        return [r for r in (self.parent, self.after) if r is not None]

    @property
    def is_state(self) -> bool:
        return is_state(self.what, self.version)

    def continues(self, parent: Record) -> bool:
        """Whether it begins where a record that continues `parent` may begin."""
        return parent.start < self.start <= parent.end

    def __repr__(self) -> str:
        return f"<{self.what.value} record [{self.start}, {self.end}) of {self.size} bytes>"


class Loaded(NamedTuple):
    """A record whose head was read, with its tokens."""

    record: Record
    tokens: Tokens
