"""A record as the catalog knows it: which file it is, what it continues, and which nodes need it.

No MLX in this file, and no file is touched.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onefold.cache.memory.tokens import Tokens
from onefold.cache.tiers.records.index import NO_STAMP
from onefold.cache.tiers.records.record import VERSION, Named, What, file_name

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
        self.children = 0
        """How many records continue this one directly."""
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
        return Named(self.what, self.start, self.address, self.version)

    @property
    def name(self) -> str:
        return file_name(*self.named)

    def link(self, parent: Record | None, end: int) -> None:
        """Set which record this one continues, and where it ends."""
        if self.parent is not parent:
            if self.parent is not None:
                self.parent.children -= 1
            if parent is not None:
                parent.children += 1
        self.parent, self.end = parent, end

    def continues(self, parent: Record) -> bool:
        """Whether it begins where a record that continues `parent` may begin."""
        return parent.start < self.start <= parent.end

    def __repr__(self) -> str:
        return f"<{self.what.value} record [{self.start}, {self.end}) of {self.size} bytes>"


class Loaded(NamedTuple):
    """A record whose head was read, with its tokens."""

    record: Record
    tokens: Tokens
