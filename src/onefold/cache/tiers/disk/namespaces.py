"""The namespaces of a cache on disk: which name a tree's records have there, and what the tree learns from them.

A namespace's records are read into its tree when the namespace is first used: their names and tokens, not their KV.
Records that could not be read then are tried again at a later use. Called with the cache's lock held.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Iterable

from onefold.cache.memory.payloads import Node, Tree
from onefold.cache.tiers.disk.growing import grow
from onefold.cache.tiers.disk.naming import name_of
from onefold.cache.tiers.identity import Identity, salt_of
from onefold.cache.tiers.records.catalog import Catalog
from onefold.collecting import paused

log = logging.getLogger("onefold")


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
        about = json.loads(json.dumps(self._identity.about))
        found = {name for name in self._names.values() if name is not None}
        for name in set(names) - found:
            described = self._catalog.folder.about(name)
            if {key: described.get(key) for key in about} == about:
                found.add(name)
        return found
