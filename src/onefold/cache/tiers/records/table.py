"""The table of a folder's records: by namespace and address, with the bytes that they take.

Not thread safe: the cache's lock guards it. No MLX in this file, and no file is touched.
"""

from __future__ import annotations

from collections import Counter

from onefold.cache.tiers.records.entry import Record, on_disk


class RecordTable:
    def __init__(self) -> None:
        self._records: dict[str, dict[bytes, Record]] = {}
        self.total_bytes = 0
        """The bytes of all records, in blocks of the disk; those that are being written included."""
        self.state_bytes = 0
        """Those of points that are whole."""

    def __len__(self) -> int:
        return sum(len(held) for held in self._records.values())

    def all(self) -> list[Record]:
        """Returns every record."""
        return [r for held in self._records.values() for r in held.values()]

    def namespaces(self) -> list[str]:
        """Returns the namespaces that have, or had, records."""
        return list(self._records)

    def of(self, namespace: str) -> dict[bytes, Record]:
        """Returns the records of a namespace by address. The caller does not change them."""
        return self._records.get(namespace, {})

    def find(self, namespace: str, at: bytes) -> Record | None:
        """Returns the record of this address, None if there is none."""
        return self._records.get(namespace, {}).get(at)

    def add(self, record: Record) -> None:
        """Add a record, and count its bytes."""
        self._records.setdefault(record.namespace, {})[record.address] = record
        self._count(record, on_disk(record.size))

    def remove(self, record: Record) -> bool:
        """Remove a record. Returns False if the table does not have it."""
        held = self._records[record.namespace]
        if held.get(record.address) is not record:
            return False
        del held[record.address]
        self._count(record, -on_disk(record.size))
        for above in record.above:
            above.children -= 1
        return True

    def _count(self, record: Record, n_bytes: int) -> None:
        self.total_bytes += n_bytes
        self.state_bytes += n_bytes if record.is_state else 0

    def check(self) -> list[str]:
        """Recount. Returns a sentence for each thing that is wrong."""
        found = []
        known = set(self.all())
        total = sum(on_disk(r.size) for r in known)
        if total != self.total_bytes:
            found.append(f"the catalog counts {self.total_bytes} bytes, its records sum to {total}")
        states = sum(on_disk(r.size) for r in known if r.is_state)
        if states != self.state_bytes:
            found.append(f"the catalog counts {self.state_bytes} bytes of states, its records sum to {states}")
        children = Counter(above for r in known for above in r.above)
        found += [f"{r} counts {r.children} children" for r in known if r.children != children[r]]
        linked = [r for r in known if r.ready]
        found += [f"{r} continues a record that was removed" for r in linked if not known.issuperset(r.above)]
        return found
