"""Reading a checkpoint from disk, one tensor after the other, so that no more than one is in memory twice.

A checkpoint whose windows continue those of earlier points is read as a chain of records, oldest first. Each becomes a
run; the last record is the checkpoint, and has all of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.memory.arrays import Bytes, own_bytes
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.runs import Run, Stretch
from onefold.cache.memory.state import CacheState
from onefold.cache.tiers import host
from onefold.cache.tiers.disk.reading import Reading, fill, no_room, open_buffers, read_header
from onefold.cache.tiers.records import system
from onefold.cache.tiers.records.entry import Record
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import Content
from onefold.errors import BudgetError, RecordError

_NONSENSE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


class PointReader:
    """Reads the records of one checkpoint. The last of them is `point`."""

    def __init__(self, state: CacheState, shared: Reading, node: Node, point: Record | None) -> None:
        self._state, self._shared, self._node, self._point = state, shared, node, point
        self._begin = 0 if point is None else max(0, point.start - state.model.window)
        """The entries of windows before this position are not needed."""
        self._stretches: dict[int, list[Stretch]] = {}
        """What was read of each leaf's window, by the leaf's number, oldest first."""
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
                        found = self._understand(record, content, read, run)
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
        runs, self._runs, self._stretches = self._runs, [], {}
        for run in runs:
            if not run.holders:
                run.close()

    def _understand(self, record: Record, content: Content, read: dict[str, mx.array], run: Run) -> Checkpoint | None:
        """Returns the checkpoint if this was its last record. Raises RecordError."""
        try:
            leaves = json.loads(content.state)["leaves"]
            in_runs = self._shared.layout.are_windows(leaves) and self._state.model.window > 0
            if in_runs:
                self._add_windows(leaves, read, run)
            elif record is not self._point:
                raise RecordError(DiskReason.OTHER_LAYOUT)
            if record is not self._point:
                return None
            windows = {i: tuple(found) for i, found in self._stretches.items()} if in_runs else {}
            position, snapshots = self._state.model.revive(content.state, {} if in_runs else read, windows)
        except _NONSENSE as error:
            raise RecordError(DiskReason.NO_HEADER) from error
        if position != content.start or not self._state.model.accepts(self._state.store, snapshots, position):
            raise RecordError(DiskReason.OTHER_LAYOUT)
        if in_runs:
            return Checkpoint.of(position, snapshots, self._state.ledger.open(Purpose.CHECKPOINT, 0))
        self._runs.remove(run)
        return Checkpoint.of(position, snapshots, run.account)

    def _add_windows(self, leaves: list[Any], read: dict[str, mx.array], run: Run) -> None:
        """Add the entries of each leaf's window that are needed to those of the records before, which they continue.
        Entries that those have already are left out; those before the window only if they are more than half: a copy
        without them would take more memory for a moment."""
        for i, leaf in enumerate(leaves):
            if leaf is None:
                continue
            known = self._stretches.setdefault(i, [])
            for start, end, arrays in _parts(i, leaf, read):
                begin = start if 2 * (end - self._begin) >= end - start else self._begin
                at = max(start, begin, known[-1].end if known else 0)
                if known and start > known[-1].end:
                    known.clear()  # what this leaf needs begins here
                if at < end:
                    if at > start:
                        arrays = [own_bytes(a[..., at - start :, :]) for a in arrays]
                        device.evaluate(arrays)
                    known.append(run.add(arrays, at, end))


def _parts(i: int, leaf: dict[str, Any], read: dict[str, mx.array]) -> Iterator[tuple[int, int, list[mx.array]]]:
    """Yields keys and values of a leaf's window, with where they begin and end; takes them out of `read`."""
    end = int(leaf["end"])
    n = len(leaf["slots"]) // 2
    edges = leaf.get("runs") or [[end - read[f"state.{i}.0"].shape[2], end]]
    for r in range(n):
        arrays = [read.pop(f"state.{i}.{2 * r + j}") for j in range(2)]
        yield int(edges[r][0]), int(edges[r][1]), arrays


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
