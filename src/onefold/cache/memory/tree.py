"""The radix tree: token ids to nodes.

- A node is an edge: its `tokens` are [start, end) of every sequence below it.
- Children of a node differ in their first token; a root has no tokens.
- The payloads of a node (`span`, `checkpoint`, `below`) are opaque here; `payloads` has the types that a cache puts
  there. A span covers exactly its edge, and has a `cut` method for when the edge is split.
- Matching compares whole arrays, not single tokens, and touches no payload.
- A node counts its children that have something in memory, and notifies its watch of every change that may move it in
  an order of eviction. The setters of its attributes do both.

No MLX in this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from onefold.cache.memory.tokens import Tokens, common_length, is_frozen


class SpanPayload(Protocol):
    """A node's KV in memory."""

    def cut(self, at: int, upper: Any, lower: Any) -> tuple[Self, Self]:
        """Split the span with its node, at the `at`-th token. Returns the spans of `upper` and `lower`."""
        ...

    def join(self, upper: Self) -> None:
        """Take over the span of the node above, whose edge this span's node has taken over."""
        ...


S = TypeVar("S", bound=SpanPayload)
C = TypeVar("C")


class TierPayload(Protocol):
    """How much of a node the tier below memory has. Positions are those of the conversation."""

    @property
    def kv(self) -> int:
        """The tier has the node's KV up to here."""
        ...

    @property
    def fetchable(self) -> int:
        """The tier can read the node's KV up to here now."""
        ...

    @property
    def known(self) -> int:
        """The tier has the node's tokens up to here, with KV or without."""
        ...

    @property
    def readable(self) -> int:
        """The tier has everything that memory has of the node up to here."""
        ...

    @property
    def has_point(self) -> bool:
        """Whether the tier has, or is about to have, the checkpoint at the node's end."""
        ...

    @property
    def has_saved_point(self) -> bool:
        """Whether the tier has the checkpoint at the node's end."""
        ...

    @property
    def point_bytes(self) -> int:
        """The bytes of that checkpoint in the tier; 0 if it has none."""

    def reaches_beyond(self, lower: Node[Any, Any]) -> bool:
        """Whether a record of the node continues into another child than `lower`."""
        ...

    def cut(
        self, at: int, upper: Node[Any, Any], lower: Node[Any, Any]
    ) -> tuple[TierPayload | None, TierPayload | None]:
        """Split the payload with its node, at the `at`-th token. Returns the payloads of `upper` and `lower`."""
        ...

    def join(self, upper: TierPayload | None) -> None:
        """Take over the payload of the node above, whose edge this payload's node has taken over."""
        ...

    def moved(self, node: Node[Any, Any]) -> TierPayload:
        """Returns the payload for `node`, which has taken over the payload's node."""
        ...


class Watch(Protocol):
    """Is notified of changes of a tree, right after each."""

    def changed(self, node: Node[Any, Any]) -> None:
        """The node's last use, leases, pins or content in memory changed; or it was added to or removed from the
        tree."""

    def branched(self, node: Node[Any, Any]) -> None:
        """The node gained or lost a child."""


_numbers = itertools.count(1)


class Node(Generic[S, C]):
    __slots__ = (
        "__weakref__",
        "_below",
        "_checkpoint",
        "_last_use",
        "_leases",
        "_pause",
        "_pins",
        "_span",
        "_watch",
        "children",
        "end",
        "held_below",
        "number",
        "parent",
        "start",
        "tokens",
    )

    def __init__(self, tokens: Tokens, start: int, parent: Node[S, C] | None, watch: Watch | None = None) -> None:
        self.tokens = tokens
        self.start = start
        self.end = start + len(tokens)
        self.parent = parent
        self.children: dict[int, Node[S, C]] = {}
        self.number = next(_numbers)
        """Tells it from all other nodes of this process. When a node is split, the lower part keeps it."""
        self.held_below = 0
        """How many children have something in memory, or a descendant that has."""
        self._watch = watch
        self._span: S | None = None
        self._checkpoint: C | None = None
        self._below: TierPayload | None = None
        self._leases = 0
        self._pins = 0
        self._last_use = 0.0
        self._pause = 0.0

    @property
    def span(self) -> S | None:
        """The node's KV in memory; None if it has none there."""
        return self._span

    @span.setter
    def span(self, span: S | None) -> None:
        held, self._span = self.in_memory, span
        self._payload_changed(held)

    @property
    def checkpoint(self) -> C | None:
        """The state at the node's end in memory; None if it has none there."""
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: C | None) -> None:
        held, self._checkpoint = self.in_memory, checkpoint
        self._payload_changed(held, always=True)

    @property
    def below(self) -> TierPayload | None:
        """What the tier has of the node, whether or not it is in memory too; None if nothing."""
        return self._below

    @below.setter
    def below(self, below: TierPayload | None) -> None:
        held, self._below = self.in_memory, below
        self._payload_changed(held)

    @property
    def leases(self) -> int:
        """The number of open leases whose path includes this node."""
        return self._leases

    @leases.setter
    def leases(self, n: int) -> None:
        idle, self._leases = self.idle, n
        if self.idle != idle:
            self._notify()

    @property
    def pins(self) -> int:
        """The number of pins that cover this node."""
        return self._pins

    @pins.setter
    def pins(self, n: int) -> None:
        idle, self._pins = self.idle, n
        if self.idle != idle:
            self._notify()

    @property
    def last_use(self) -> float:
        return self._last_use

    @last_use.setter
    def last_use(self, when: float) -> None:
        self._last_use = when
        if not self.held_below or self._checkpoint is not None:
            self._notify()

    @property
    def pause(self) -> float:
        """Seconds for which it is probably left alone after its last use; 0 if nothing is known."""
        return self._pause

    def use(self, when: float, pause: float) -> None:
        """Set the last use and the pause that is expected after it."""
        self._pause = pause
        self.last_use = when

    def _notify(self) -> None:
        if self._watch is not None:
            self._watch.changed(self)

    def _payload_changed(self, held: bool, *, always: bool = False) -> None:
        """Update counts and notify the watch. `held`: whether the node had something in memory before."""
        if self.in_memory != held:
            if self.parent is not None and not self.held_below:
                self.parent.count_branch(-1 if held else 1)
            self._notify()
        elif always:
            self._notify()

    def count_branch(self, n: int) -> None:
        """Add `n` to the number of children that have something in memory, and update ancestors as far as needed."""
        node: Node[S, C] | None = self
        while node is not None and n:
            before = node.held_below
            node.held_below += n
            if bool(before) == bool(node.held_below):
                return
            node._notify()
            if node.in_memory:
                return
            node = node.parent

    @property
    def holds(self) -> bool:
        """Whether the node or a descendant has something in memory."""
        return self.in_memory or self.held_below > 0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def in_memory(self) -> bool:
        """Whether the node has something in memory, or nothing in memory and nothing in the tier."""
        return self._span is not None or self._checkpoint is not None or self._below is None

    @property
    def idle(self) -> bool:
        return self._leases == 0 and self._pins == 0

    @property
    def root(self) -> Node[S, C]:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> list[Node[S, C]]:
        """Returns the nodes from the first below the root down to this one."""
        nodes: list[Node[S, C]] = []
        node: Node[S, C] | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def walk(self) -> Iterator[Node[S, C]]:
        """Yields this node's descendants, parents before children. Lazy: the tree must not change meanwhile."""
        stack = [reversed(self.children.values())]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            yield node
            if node.children:
                stack.append(reversed(node.children.values()))


class Match(NamedTuple, Generic[S, C]):
    path: list[Node[S, C]]
    """Fully matched nodes; the last one may be matched only partially."""
    matched: int
    """The number of matched tokens."""


class Tree(Generic[S, C]):
    """The nodes of one namespace. Not thread safe; the cache's lock guards it."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self.root: Node[S, C] = Node(np.empty(0, np.int32), 0, None)
        self.size = 0
        """How many nodes there are, without the root."""
        self._version = 0
        """Counts the changes to which nodes there are."""
        self._last: tuple[Tokens, int, Match[S, C]] | None = None
        """The last walk of frozen tokens, and the version that it is of."""

    def match(self, tokens: Tokens, above: Node[S, C] | None = None) -> Match[S, C]:
        """Returns the longest known prefix of these tokens, from the root on or from the end of `above`. The path must
        not be changed. A request asks several times before its first forward: frozen tokens are walked once."""
        if above is not None or not is_frozen(tokens):
            return self._walk(tokens, above or self.root)
        if self._last is None or self._last[0] is not tokens or self._last[1] != self._version:
            self._last = (tokens, self._version, self._walk(tokens, self.root))
        return self._last[2]

    def _walk(self, tokens: Tokens, node: Node[S, C]) -> Match[S, C]:
        at = 0
        path: list[Node[S, C]] = []
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            same = common_length(child.tokens, tokens[at : at + len(child.tokens)])
            path.append(child)
            at += same
            if same < len(child.tokens):
                break
            node = child
        return Match(path, at)

    def children_first(self) -> Iterator[Node[S, C]]:
        """Yields every node, children before parents. The tree may change meanwhile: nodes that are added below a node
        already visited are left out, and a node may have been removed when it is yielded."""
        above: list[Node[S, C]] = []
        left = [list(self.root.children.values())]
        while left:
            if left[-1]:
                above.append(left[-1].pop())
                left.append(list(above[-1].children.values()))
            else:
                left.pop()
                if above:
                    yield above.pop()

    def reach(self, tokens: Tokens, above: Node[S, C] | None = None) -> tuple[Node[S, C], int]:
        """Returns the node that ends where the known prefix of these tokens ends, and the length of that prefix. Splits
        a node if necessary."""
        above = above or self.root
        path, matched = self.match(tokens, above)
        node, end = path[-1] if path else above, above.end + matched
        return (self.split(node, end) if end < node.end else node), matched

    def add(self, parent: Node[S, C], tokens: Tokens) -> Node[S, C]:
        """Adds a leaf below `parent`, and returns it. Raises ValueError if `parent` has a child with the same first
        token."""
        first = int(tokens[0])
        if first in parent.children:
            raise ValueError(f"the node that ends at {parent.end} already has a child that begins with token {first}")
        node = Node(np.array(tokens, np.int32), parent.end, parent, self._watch)
        self._version += 1
        self.size += 1
        parent.children[first] = node
        parent.count_branch(1)
        self._notify(node)
        self._notify_branched(parent)
        return node

    def split(self, node: Node[S, C], at: int) -> Node[S, C]:
        """Cut the edge at position `at`. Returns the new upper node. `node` keeps the lower part, its children and its
        checkpoint, so that a lease that holds it still holds the deeper end. Raises ValueError if `at` is not inside
        the edge."""
        if not node.start < at < node.end or node.parent is None:
            raise ValueError(f"cannot split [{node.start}, {node.end}) at {at}")
        self._version += 1
        self.size += 1
        k, above, held = at - node.start, node.parent, node.holds
        upper = Node(node.tokens[:k].copy(), node.start, above, self._watch)
        above.children[int(upper.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[k:].copy(), at, upper
        upper.children[int(node.tokens[0])] = node
        upper._leases, upper._pins = node._leases, node._pins
        upper._last_use, upper._pause = node._last_use, node._pause
        if node._span is not None:
            upper._span, node._span = node._span.cut(k, upper, node)
        if node._below is not None:
            upper._below, node._below = node._below.cut(k, upper, node)
        upper.held_below = int(node.holds)
        above.count_branch(upper.holds - held)
        self._notify(upper)
        self._notify(node)
        return upper

    def join(self, upper: Node[S, C], lower: Node[S, C]) -> None:
        """The opposite of `split`: `lower`, the only child of `upper`, takes over its parent's edge. Raises ValueError
        if there is another child, or if only one of the two has a span."""
        if upper.parent is None or upper.children != {int(lower.tokens[0]): lower}:
            raise ValueError(f"node [{upper.start}, {upper.end}) has more than one child")
        if (upper._span is None) != (lower._span is None):
            raise ValueError(f"only one of the nodes that meet at {upper.end} has KV in memory")
        self._version += 1
        self.size -= 1
        above, held = upper.parent, upper.holds
        if lower._span is not None and upper._span is not None:
            lower._span.join(upper._span)
        if lower._below is not None:
            lower._below.join(upper._below)
        elif upper._below is not None:
            lower._below = upper._below.moved(lower)
        lower.tokens = np.concatenate([upper.tokens, lower.tokens])
        lower.start, lower.parent = upper.start, above
        lower._last_use = max(lower._last_use, upper._last_use)
        above.children[int(lower.tokens[0])] = lower
        upper.parent, upper._span, upper._below, upper.children, upper.held_below = None, None, None, {}, 0
        above.count_branch(lower.holds - held)
        self._notify(upper)
        self._notify(lower)

    def remove(self, node: Node[S, C]) -> None:
        """Remove a leaf from the tree. Raises ValueError if the node has children."""
        if node.children or node.parent is None:
            raise ValueError(f"node [{node.start}, {node.end}) is not a leaf")
        self._version += 1
        self.size -= 1
        above = node.parent
        del above.children[int(node.tokens[0])]
        node.parent = None
        above.count_branch(-int(node.holds))
        self._notify(node)
        self._notify_branched(above)

    def _notify(self, node: Node[S, C]) -> None:
        if self._watch is not None:
            self._watch.changed(node)

    def _notify_branched(self, node: Node[S, C]) -> None:
        if self._watch is not None:
            self._watch.branched(node)

    def index_bytes(self) -> int:
        """Returns about how many bytes the tree itself occupies: its tokens, and 400 bytes of objects per node."""
        return sum(n.tokens.nbytes + 400 for n in self.root.walk())
