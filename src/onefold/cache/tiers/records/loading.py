"""Reading the heads of a namespace's records: which tokens each has, and which record it continues.

- A record comes after the one that it continues. One that cannot be understood, or continues no record, is rejected.
- A record that cannot be read now stays set apart, with all that continue it, until a later use of the namespace.
- Records of another format version are kept, and not linked to each other, while only room is made on the disk.

Not thread safe: the cache's lock guards it. No MLX in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from onefold.cache.tiers.records.cleanup import Cleanup
from onefold.cache.tiers.records.entry import Loaded, Record
from onefold.cache.tiers.records.faults import is_passing, reason_of
from onefold.cache.tiers.records.folder import Folder
from onefold.cache.tiers.records.heads import Wanted, read_heads
from onefold.cache.tiers.records.index import NO_STAMP, Index, Indexed, Said, pack
from onefold.cache.tiers.records.reasons import DiskReason
from onefold.cache.tiers.records.record import OTHER_FORMAT, What
from onefold.cache.tiers.records.table import RecordTable
from onefold.cache.tiers.records.unread import SetApart


class Loader:
    def __init__(
        self,
        folder: Folder,
        table: RecordTable,
        apart: SetApart,
        cleanup: Cleanup,
        reject: Callable[[Record, str], None],
    ) -> None:
        """Calls `reject` with each record that cannot be used, and the reason."""
        self._folder, self._table, self._apart, self._cleanup, self._reject = folder, table, apart, cleanup, reject
        self.linked: set[str] = set()
        """Namespaces whose records know which record they continue."""

    def load(self, namespace: str) -> list[Loaded]:
        """Returns the records of a namespace with their tokens, parents first; sets apart those that cannot be read."""
        self.linked.discard(namespace)
        index = self.index_of(namespace)
        found = list(self._link(namespace, ours=True, index=index))
        if index.is_stale(len(found)):
            self._cleanup.write_index(namespace, pack(namespace, map(_indexed, found)))
        for record, _ in found:
            record.stamp = NO_STAMP  # from now on it is used, and its file written
        self._apart.retry_soon(namespace)
        return found

    def load_again(self, namespace: str) -> list[Loaded]:
        """Returns the records that could not be read before and can be now, with their descendants, parents first;
        none before it is time to try."""
        due = self._apart.due(namespace)
        if due is None:
            return []
        found = list(self._read(namespace, due, ours=True, index=Index(namespace)))
        self._apart.retry_later(namespace, in_vain=not found)
        return found

    def link_all(self) -> None:
        """Read the heads of the namespaces that were not used yet, before any of their records is removed."""
        for namespace in self._table.namespaces():
            if namespace not in self.linked:
                for _ in self._link(namespace, ours=False, index=self.index_of(namespace)):
                    pass

    def index_of(self, namespace: str) -> Index:
        """Returns a namespace's index; an empty one if it has none."""
        return Index(namespace, self._folder.indexes.read(namespace))

    def _link(self, namespace: str, *, ours: bool, index: Index) -> Iterator[Loaded]:
        """Read the heads of all records of a namespace, and yield them, parents first. With `ours`, records of another
        format version are rejected."""
        self.linked.add(namespace)
        held = self._table.of(namespace)
        for record in held.values():
            record.parent, record.after, record.children = None, None, 0
        self._apart.begin(namespace, held.values())
        yield from self._read(namespace, sorted(held.values(), key=lambda r: r.start), ours=ours, index=index)

    def _read(self, namespace: str, there: list[Record], *, ours: bool, index: Index) -> Iterator[Loaded]:
        """Read the heads of these records, and yield those that are no longer set apart: their own head and the heads
        of all that they continue were read."""
        held, apart = self._table.of(namespace), self._apart.of(namespace)
        heads = read_heads(self._folder, namespace, (Wanted(r.named, r.size, r.stamp) for r in there), index)
        for record, head in zip(there, heads, strict=True):
            if not isinstance(head, Said):
                if is_passing(head):
                    if any(held.get(above.address) is not above for above in record.above):
                        record.link(None, record.end)  # one of them was removed: an orphan, once it can be read
                    self._apart.note_unread(record, head)
                elif ours or str(head) != OTHER_FORMAT:
                    self._reject(record, reason_of(head))
                else:
                    apart.discard(record)
                continue
            parent = held.get(head.parent) if head.parent else None
            after = held.get(record.after_address) if record.after_address else None
            waits = any(r is not None and r in apart and r.start < record.start for r in (parent, after))
            orphan = not record.continues(parent) if parent is not None else head.parent or record.start
            if (not waits and orphan) or not _follows(record, after):
                self._reject(record, DiskReason.ORPHAN)
                continue
            record.link(parent, record.start + len(head.tokens), after)
            if record.in_doubt:
                continue
            record.unread = False
            record.hollow = head.hollow
            if not waits:
                apart.discard(record)
                yield Loaded(record, head.tokens)


def _follows(record: Record, after: Record | None) -> bool:
    """Whether `after`, the record of the point whose windows this one's continue, is there if it must be."""
    if after is None:
        return not record.after_address
    return after.what is What.POINT and after.start < record.start


def _indexed(loaded: Loaded) -> Indexed:
    record, above = loaded.record, loaded.record.parent
    parent = b"" if above is None else above.address
    return Indexed(record.address, record.start, record.stamp, parent, loaded.tokens, record.hollow)
