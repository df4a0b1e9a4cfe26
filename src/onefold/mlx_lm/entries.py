"""The entries of a prompt cache, as mlx-lm has them: which sequences were put in, as what, and their last use.

- One radix tree per model key; an entry sits at the node where its tokens end. Finding one never looks at tokens one by
  one.
- Entries are evicted in mlx-lm's order: of "assistant", "user" and "system" the first kind that has at least as many
  entries as the next, its least recently used.

Holds no KV, but for objects that are kept whole (`whole`). No MLX in this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.tree import Node, Tree

TYPES = ("assistant", "user", "system")


@dataclass(eq=False, slots=True)
class Entry:
    key: Hashable
    node: Node
    cache_type: str
    whole: list[Any] | None = None
    """Objects that cannot be cut by position; None if the KV lies in a cache of ours."""
    nbytes: int = 0
    """The bytes of the objects that are kept whole."""

    @property
    def is_trimmable(self) -> bool:
        return self.whole is None or all(layer.is_trimmable() for layer in self.whole)

    @property
    def tokens(self) -> Tokens:
        parts = [n.tokens for n in self.node.path()]
        return np.concatenate(parts) if parts else np.empty(0, np.int32)


class Nearest(NamedTuple):
    exact: Entry | None
    shorter: Entry | None
    """The longest entry that the tokens continue."""
    longer: Entry | None
    """The shortest entry that continues the common part."""
    common: int
    """How many tokens some entry has in common with these."""


class Entries:
    def __init__(self) -> None:
        self._trees: dict[Hashable, Tree] = {}
        self._at: dict[Node, Entry] = {}
        self._orders: dict[str, dict[Entry, None]] = {t: {} for t in TYPES}

    def clear(self) -> None:
        self._trees.clear()
        self._at.clear()
        self._orders = {t: {} for t in TYPES}

    def __len__(self) -> int:
        return len(self._at)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._at.values()))

    def of_type(self, cache_type: str) -> list[Entry]:
        return list(self._orders[cache_type])

    def add(
        self, key: Hashable, tokens: Tokens, cache_type: str, whole: list[Any] | None = None, nbytes: int = 0
    ) -> Entry:
        """Adds and returns the newest entry of its type. It replaces an entry with the same tokens."""
        tree = self._trees.setdefault(key, Tree())
        node, matched = tree.reach(tokens)
        if matched < len(tokens):
            node = tree.add(node, tokens[matched:])
        if node in self._at:
            self._orders[self._at[node].cache_type].pop(self._at[node])
        entry = self._at[node] = Entry(key, node, cache_type, whole, nbytes)
        self._orders[cache_type][entry] = None
        return entry

    def remove(self, entry: Entry) -> None:
        del self._at[entry.node]
        del self._orders[entry.cache_type][entry]
        tree, node = self._trees[entry.key], entry.node
        while node.parent is not None and not node.children and node not in self._at:
            parent = node.parent
            tree.remove(node)
            node = parent
        if not tree.root.children and tree.root not in self._at:
            del self._trees[entry.key]

    def shorten(self, entry: Entry, length: int) -> None:
        """Cuts an entry to `length`; it keeps its place in the order. Removes it if another entry has the rest."""
        tokens, cache_type = entry.tokens[:length], entry.cache_type
        place = list(self._orders[cache_type]).index(entry)
        self.remove(entry)
        if length > self.common(entry.key, tokens):
            shorter = self.add(entry.key, tokens, cache_type, entry.whole, entry.nbytes)
            order = [e for e in self._orders[cache_type] if e is not shorter]
            order.insert(place, shorter)
            self._orders[cache_type] = dict.fromkeys(order)

    def oldest(self) -> Entry:
        """Returns the entry to evict first."""
        for this, following in itertools.pairwise(TYPES):
            if self._orders[this] and len(self._orders[this]) >= len(self._orders[following]):
                return next(iter(self._orders[this]))
        return next(iter(self._orders[TYPES[-1]] or self._orders[TYPES[-2]]))

    def touch(self, entry: Entry) -> None:
        order = self._orders[entry.cache_type]
        order[entry] = order.pop(entry)

    def prefixes(self, entry: Entry) -> list[Entry]:
        """Returns the entries that this one continues."""
        nodes = [self._trees[entry.key].root, *entry.node.path()[:-1]]
        return [self._at[n] for n in nodes if n in self._at and n is not entry.node]

    def common(self, key: Hashable, tokens: Tokens) -> int:
        """Returns how many of these tokens, from the first, some entry has."""
        return self._trees[key].match(tokens).matched if key in self._trees else 0

    def nearest(self, key: Hashable, tokens: Tokens) -> Nearest:
        tree = self._trees.get(key)
        if tree is None:
            return Nearest(None, None, None, 0)
        path, common = tree.match(tokens)
        if common == len(tokens):
            end = path[-1] if path else tree.root
            if end.end == common and end in self._at:
                return Nearest(self._at[end], None, None, common)
        on_path = [self._at[n] for n in path if n.end <= common and n in self._at]
        longer = None
        if common:
            below = [path[-1], *path[-1].walk()] if path[-1].end > common else list(path[-1].walk())
            ends = [n for n in below if n in self._at]
            longer = self._at[min(ends, key=lambda n: n.end)] if ends else None
        return Nearest(None, on_path[-1] if on_path else None, longer, common)

    def own_tokens(self) -> dict[Hashable, dict[str, int]]:
        """Returns the number of tokens by key and type, each token counted once."""
        counted: dict[Hashable, dict[str, int]] = {}
        seen: set[Node] = set()
        for entry in self:
            by_type = counted.setdefault(entry.key, dict.fromkeys(TYPES, 0))
            new = [n for n in entry.node.path() if n not in seen]
            seen.update(new)
            by_type[entry.cache_type] += sum(n.end - n.start for n in new)
        return counted
