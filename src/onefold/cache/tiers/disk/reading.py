"""What all restores of a disk share, and how the file of a record is read.

Every file is checked: its name, its header, its size, its layout, its parent, and the checksum of all of it.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers.disk.linking import Links
from onefold.cache.tiers.pace import Pace
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.files import read_all
from onefold.cache.tiers.records.heads import read_content
from onefold.cache.tiers.records.layout import Layout
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content
from onefold.errors import BudgetError, RecordError


@dataclass
class Reading:
    """What the restores of a tier share."""

    links: Links
    layout: Layout
    reader: concurrent.futures.ThreadPoolExecutor
    """Reads the next records while one is being checked."""
    dirtied: Callable[[Node], None]
    """Called with nodes that memory has, and the disk no longer."""
    read_pace: Pace = field(default_factory=Pace)
    """Seconds a byte takes to restore."""
    prefill_pace: Pace = field(default_factory=Pace)
    """Seconds a token takes to compute."""
    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)


def read_header(file: int, record: Record) -> tuple[Content, int, str]:
    """Returns what a record's file holds, where its tensors begin, and the checksum that all of it must have. Raises
    RecordError and OSError."""
    head, content = read_content(file, record.namespace, record.named, os.fstat(file).st_size)
    if content.parent != (b"" if record.parent is None else record.parent.address):
        raise RecordError(DiskReason.MISNAMED)
    return content, head.data_at + content.tokens.nbytes, head.checksum


def fill(file: int, places: list[np.ndarray], at: int) -> None:  # type: ignore[type-arg]
    """Fill arrays from position `at` of a file. Raises RecordError if the file ends before, and OSError."""
    if read_all(file, places, at) != sum(p.nbytes for p in places):
        raise RecordError(DiskReason.TRUNCATED)


def open_buffers(state: CacheState, n_bytes: int) -> Account:
    """Reserve memory for bytes that cannot be read straight into their place. Raises BudgetError."""
    return state.ledger.open(Purpose.DISK, n_bytes, "records on their way from the disk")


def no_room(error: Exception, n_bytes: int) -> BudgetError:
    """Returns the error for an allocation that the device refused."""
    return BudgetError(f"no room on the device: {error}", needed_bytes=n_bytes, available_bytes=0)
