"""Reading a checkpoint from disk, one tensor after the other, so that no more than one is in memory twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx

from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers.disk import host
from onefold.cache.tiers.disk.reading import Reading, fill, no_room, open_buffers, read_header
from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content
from onefold.errors import BudgetError, RecordError


def read_point(
    state: CacheState,
    shared: Reading,
    record: Record,
    node: Node,
    *,
    direct: bool,
    is_done: Callable[[], bool],
) -> bool:
    """Read a checkpoint and give it to the node that ends there. Returns False if the node needs none, or the restore
    is done by then. Called with the cache's lock held, which is released while the file is read. Raises RecordError,
    OSError and BudgetError."""
    with shared.links.catalog.folder.reading(record.namespace, record.name) as file:
        content, data_at, checksum = read_header(file, record)
        shared.layout.require(content)
        size = content.payload_bytes
        if node.end != record.start or node.checkpoint is not None:
            return False
        if not state.reclaiming.admit_checkpoint(size):
            raise BudgetError("a checkpoint", needed_bytes=size, available_bytes=0)
        account = state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint from disk")
        kept = False
        try:
            largest = max((t.nbytes for t in content.tensors), default=0)
            n_bytes = system.chosen.staged_bytes(largest) + (0 if direct else largest)
            with contextlib.closing(open_buffers(state, n_bytes)):
                with state.lock.released():
                    found = _revive(state, file, content, data_at, checksum, account, direct=direct)
                if is_done() or node.checkpoint is not None:  # other threads had the lock meanwhile
                    return False
                node.checkpoint, kept = found, True
        except (MemoryError, RuntimeError) as error:
            raise no_room(error, size) from error
        finally:
            system.chosen.free_stages()
            if not kept:
                account.close()
    return True


def _revive(
    state: CacheState, file: int, content: Content, data_at: int, checksum: str, account: Account, *, direct: bool
) -> Checkpoint:
    read: dict[str, mx.array] = {}

    def tensors(at: int) -> Iterator[Bytes]:
        for tensor in content.tensors:

            def fill_in(place: Bytes, at: int = at) -> None:
                fill(file, [place], at)

            read[tensor.name], data = host.array_in(tensor, fill_in, direct=direct)
            at += tensor.nbytes
            yield data

    if content.checksum(tensors(data_at)) != checksum:
        raise RecordError(DiskReason.CHECKSUM)
    try:
        position, snapshots = state.model.revive(content.state, read)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise RecordError(DiskReason.NO_HEADER) from error
    if position != content.start or not state.model.accepts(state.store, snapshots, position):
        raise RecordError(DiskReason.OTHER_LAYOUT)
    return Checkpoint.of(position, snapshots, account)
