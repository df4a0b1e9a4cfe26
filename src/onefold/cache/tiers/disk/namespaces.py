"""The namespaces of a cache on disk: which name a tree's records have there, and what the tree learns from them.

A namespace's records are read into its tree when the namespace is first used: their names and tokens, not their KV.
Records that could not be read then are tried again at a later use. Called with the cache's lock held.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.tiers.disk.growing import grow
from onefold.cache.tiers.disk.naming import name_of
from onefold.cache.tiers.identity import Identity, salt_of
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import on_disk
from onefold.collecting import paused
from onefold.sizes import show_size

log = logging.getLogger("onefold")

MOST_FORMATS = 5
"""That one warning names."""
FORMAT_KEYS = {"kv", "layout"}
"""What differs between namespaces of one model whose KV has different formats."""


class Namespaces:
    def __init__(self, catalog: Catalog, identity: Identity) -> None:
        self._catalog, self._identity = catalog, identity
        self._names: dict[Node, str | None] = {}
        """By root; None for a namespace that has no name on disk."""

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """Give the tree of a caller's namespace the nodes that are on disk."""
        if tree.root in self._names:
            known = self._names[tree.root]
            if known is not None and (found := self._catalog.load_again(known)):
                grow(tree, found)
            return
        salt = salt_of(namespace)
        if salt is None:
            log.warning(
                "the namespace %r stays in memory: another process could not name it. Use a string, bytes, a number, "
                "or a tuple of these",
                namespace,
            )
            self._names[tree.root] = None
            return
        about, points, label, _ = self._identity
        name = self._names[tree.root] = name_of(about, salt)
        salted = namespace not in ("", None)
        self._catalog.folder.describe(name, {"label": label} | about | {"points": points, "salted": salted})
        with paused():
            grow(tree, self._catalog.load(name))

    def name_of(self, node: Node) -> str | None:
        """Returns the name on disk of a node's namespace, None if it has none."""
        return self._names.get(node.root)

    def ours(self, names: Iterable[str]) -> set[str]:
        """Returns those of these namespaces that belong to this model, and all that are used here."""
        about = self._about()
        found = {name for name in self._names.values() if name is not None}
        for name in set(names) - found:
            described = self._catalog.folder.about(name)
            if {key: described.get(key) for key in about} == about:
                found.add(name)
        return found

    def log_other_formats(self) -> None:
        """Log how much KV of this model is not read, because it has another format."""
        sizes = self._in_other_formats()
        if not sizes:
            return
        parts = [
            f"{show_size(size)} stored with kv='{kv}'" if kv else f"{show_size(size)} that no kv of this version reads"
            for kv, size in sizes.most_common(MOST_FORMATS)
        ]
        folder = self._catalog.folder.path
        log.warning(
            "%s has KV of this model that is not used, because the cache has kv='%s': %s%s. It counts in the disk "
            "budget until it is evicted. `onefold cache --disk %s ls` lists it; `clear --namespace ID` in place of "
            "`ls` deletes it when no process uses the folder",
            folder,
            self._identity.kv_of(self._identity.about["kv"]),
            ", ".join(parts),
            "" if len(sizes) <= MOST_FORMATS else f" and {len(sizes) - MOST_FORMATS} more formats",
            folder,
        )

    def _in_other_formats(self) -> Counter[str]:
        """Returns the bytes of this model's KV that is not read because it has another format, by the `kv` that reads
        it; under "" that which none reads. What a damaged `about.json` says may be missing."""
        sizes, found = Counter[str](), Counter[str]()
        for record in self._catalog.records():
            sizes[record.namespace] += on_disk(record.size)
        salt = salt_of("")
        assert salt is not None
        del sizes[name_of(self._identity.about, salt)]  # it is read, whatever its `about.json` says
        about = self._about()
        same = about.keys() - FORMAT_KEYS
        for name, size in sizes.items():
            described = self._catalog.folder.about(name)
            other = described.get("kv", about["kv"])
            if other != about["kv"] and all(described.get(key) == about[key] for key in same):
                found[self._identity.kv_of(other)] += size
        return found

    def _about(self) -> dict[str, Any]:
        """Returns what every namespace of this model says, as it is read from a file."""
        made: dict[str, Any] = json.loads(json.dumps(self._identity.about))
        return made
