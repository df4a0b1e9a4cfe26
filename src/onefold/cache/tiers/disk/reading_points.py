"""Reading a checkpoint from disk, one tensor after the other, so that no more than one is in memory twice.

A checkpoint whose windows continue those of earlier points is read as a chain of records, oldest first (`points`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import mlx.core as mx

from onefold.cache.memory.arrays import Bytes
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.runs import Run
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.reading import Reading, fill, no_room, open_buffers, read_header
from onefold.cache.tiers.points import PointBuilder
from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content
from onefold.errors import BudgetError, RecordError


class PointReader:
    """Reads the records of one checkpoint. The last of them is `point`."""

    def __init__(self, state: CacheState, shared: Reading, node: Node, point: Record | None) -> None:
        self._state, self._shared, self._node, self._point = state, shared, node, point
        self._builder = PointBuilder(state, shared.layout, 0 if point is None else point.start)
        self._runs: list[Run] = []

    def read(self, record: Record, *, direct: bool, is_done: Callable[[], bool]) -> bool:
        """Read the next record; the last one gives the node its checkpoint. Returns False if the node needs none, or
        the restore is done by then. Called with the cache's lock held, which is released while the file is read. Raises
        RecordError, OSError and BudgetError."""
        state, node = self._state, self._node
        with self._shared.links.catalog.folder.reading(record.namespace, record.name) as file:
            content, data_at, checksum = read_header(file, record)
            self._shared.layout.require(content)
            size = content.payload_bytes
            assert self._point is not None
            if node.end != self._point.start or node.checkpoint is not None:
                return False
            if not state.reclaiming.admit_checkpoint(size):
                raise BudgetError("a checkpoint", needed_bytes=size, available_bytes=0)
            run = Run(state.ledger.open(Purpose.CHECKPOINT, size, "a checkpoint from disk"))
            self._runs.append(run)
            try:
                largest = max((t.nbytes for t in content.tensors), default=0)
                n_bytes = system.chosen.staged_bytes(largest) + (0 if direct else largest)
                with contextlib.closing(open_buffers(state, n_bytes)):
                    with state.lock.released():
                        read = _read_tensors(file, content, data_at, checksum, direct=direct)
                        found = self._builder.add(content, read, run, last=record is self._point)
                    if found is not None and found.account is run.account:
                        self._runs.remove(run)
                    if is_done() or node.checkpoint is not None:  # other threads had the lock meanwhile
                        if found is not None:
                            found.close()
                        return False
                    if run in self._runs:
                        run.account.resize(run.bytes, force=True)
                    if found is not None:
                        found.account.resize(found.bytes, force=True)
                        node.checkpoint = found
            except (MemoryError, RuntimeError) as error:
                raise no_room(error, size) from error
            finally:
                system.chosen.free_stages()
        return True

    def release(self) -> None:
        """Free what was read and no checkpoint has."""
        runs, self._runs = self._runs, []
        self._builder.clear()
        for run in runs:
            if not run.holders:
                run.close()


def _read_tensors(file: int, content: Content, data_at: int, checksum: str, *, direct: bool) -> dict[str, mx.array]:
    """Returns the record's tensors by name. Raises RecordError if its checksum does not agree."""
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
    return read
