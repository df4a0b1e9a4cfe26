"""The radix tree: token ids to nodes.

- A node is an edge: `tokens` spans exactly [start, end) of every sequence below it.
- Children of a node differ in their first token; a root has no tokens.
- What a node carries (`span`, `checkpoint`, `below`) is opaque here. A payload spans exactly its edge;
  `cut` is told how to cut it when an edge is split.
- Matching compares arrays; it never looks at tokens one by one, and touches no payload.
- A node counts the branches below it that have something in memory, and tells its watch of every change that may move
  it in an order of eviction. Both happen where an attribute is set, so that nobody has to remember it.

No MLX in this file.
"""

from __future__ import annotations

import array
import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from onefold.errors import TokenError

Tokens = npt.NDArray[np.int32]

NAMED = 1 << 30
"""Ids from here on are no vocabulary's: they name something else that a model was fed, such as an image."""


def unboxed(tokens: Any) -> Any:
    """A list of integers as an array, which is quicker so than by way of numpy; anything else as it is."""
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array.array("q", tokens), np.int64)
    return tokens


def as_tokens(tokens: Any) -> Tokens:
    """A one-dimensional int32 array of token ids, without a copy where it is one already."""
    if isinstance(tokens, (str, bytes)):
        raise TokenError("tokens are integers, and this is text: encode it first (tokenizer.encode)")
    if isinstance(tokens, (list, tuple)) and tokens and isinstance(tokens[0], Mapping):
        raise TokenError(
            "tokens are integers, and these are messages: apply the tokenizer's chat template first "
            "(tokenizer.apply_chat_template)"
        )
    if tokens is None:
        raise TokenError("tokens are a sequence of integers, and this is None")
    if isinstance(tokens, Mapping):
        raise TokenError("tokens are integers, and this is a mapping: pass the ids in it, such as its input_ids")
    try:
        found = np.asarray(unboxed(tokens))
    except (ValueError, TypeError) as error:
        raise TokenError(f"tokens must be a flat sequence of integers: {error}") from error
    if found.ndim != 1:
        raise TokenError(f"tokens must be one-dimensional, got shape {found.shape}")
    if found.size == 0:
        raise TokenError("tokens are empty: give at least one, such as the beginning-of-text token")
    if found.dtype.kind not in "iu":
        raise TokenError(f"tokens must be integers, got {found.dtype}")
    if found.dtype != np.int32:
        low, high = int(found.min()), int(found.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise TokenError(f"token ids must be from 0 to 2147483647, got {low if low < 0 else high}")
        found = found.astype(np.int32)
    elif int(found.min()) < 0:
        raise TokenError(f"token ids must not be negative, got {int(found.min())}")
    return found


def frozen(tokens: Tokens) -> Tokens:
    """The same tokens in an array that nobody can change: itself if it is one, else a copy."""
    if not is_frozen(tokens):
        tokens = tokens.copy()
        tokens.flags.writeable = False
    return tokens


def is_frozen(tokens: Tokens) -> bool:
    """Whether nobody can change these tokens: the array owns them, and is read-only."""
    return not tokens.flags.writeable and tokens.base is None


def as_tokens_or_none(tokens: Any) -> Tokens:
    """Like `as_tokens`, for a caller that may mean no tokens at all."""
    return as_tokens(tokens) if len(tokens) else np.empty(0, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """How many leading tokens agree."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n


class TierPayload(Protocol):
    """How much of a node the tier below memory has. Positions are those of the conversation."""

    @property
    def kv(self) -> int:
        """Up to here the tier has the node's KV."""
        ...

    @property
    def fetchable(self) -> int:
        """Up to here the tier can give the node's KV back now."""
        ...

    @property
    def known(self) -> int:
        """Up to here the tier has the node's tokens, with KV or without."""
        ...

    @property
    def readable(self) -> int:
        """Up to here the tier has what memory has of the node."""
        ...

    @property
    def has_point(self) -> bool:
        """Whether the tier has, or is about to have, the checkpoint at the node's end."""
        ...

    @property
    def has_saved_point(self) -> bool:
        """Whether the tier has the checkpoint at the node's end."""
        ...

    def reaches_beyond(self, lower: Node) -> bool:
        """Whether what the tier has of the node continues into another node than `lower`, its child."""
        ...

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[TierPayload | None, TierPayload | None]:
        """Split it with its node, at the `at`-th token. Returns the payloads of `upper` and `lower`."""
        ...

    def join(self, upper: TierPayload | None) -> None:
        """Take over the payload of the node above, whose edge this payload's node has taken over."""
        ...

    def moved(self, node: Node) -> TierPayload:
        """Returns the same for `node`, which has taken over the payload's own."""
        ...


class Watch(Protocol):
    """Told of changes, right after each."""

    def changed(self, node: Node) -> None:
        """Its use, its leases or pins, or what it has in memory changed; or it entered or left the tree."""

    def branched(self, node: Node) -> None:
        """It gained or lost a child."""


class Node:
    __slots__ = (
        "_below",
        "_checkpoint",
        "_last_use",
        "_leases",
        "_pins",
        "_span",
        "_watch",
        "children",
        "end",
        "held_below",
        "parent",
        "start",
        "tokens",
    )

    def __init__(self, tokens: Tokens, start: int, parent: Node | None, watch: Watch | None = None) -> None:
        self.tokens = tokens
        self.start = start
        self.end = start + len(tokens)
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.held_below = 0
        """Children that have something in memory, themselves or below them."""
        self._watch = watch
        self._span: Any = None
        self._checkpoint: Any = None
        self._below: TierPayload | None = None
        self._leases = 0
        self._pins = 0
        self._last_use = 0.0

    @property
    def span(self) -> Any:
        return self._span

    @span.setter
    def span(self, span: Any) -> None:
        held, self._span = self.in_memory, span
        self._payload_changed(held)

    @property
    def checkpoint(self) -> Any:
        return self._checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: Any) -> None:
        held, self._checkpoint = self.in_memory, checkpoint
        self._payload_changed(held, always=True)

    @property
    def below(self) -> TierPayload | None:
        """What the tier below memory has of the node; that may be all of it, with nothing in memory."""
        return self._below

    @below.setter
    def below(self, below: TierPayload | None) -> None:
        held, self._below = self.in_memory, below
        self._payload_changed(held)

    @property
    def leases(self) -> int:
        """Open leases whose path goes through here."""
        return self._leases

    @leases.setter
    def leases(self, n: int) -> None:
        idle, self._leases = self.idle, n
        if self.idle != idle:
            self._tell()

    @property
    def pins(self) -> int:
        """`pin()` calls that cover this node."""
        return self._pins

    @pins.setter
    def pins(self, n: int) -> None:
        idle, self._pins = self.idle, n
        if self.idle != idle:
            self._tell()

    @property
    def last_use(self) -> float:
        return self._last_use

    @last_use.setter
    def last_use(self, when: float) -> None:
        self._last_use = when
        if not self.held_below or self._checkpoint is not None:
            self._tell()

    def _tell(self) -> None:
        if self._watch is not None:
            self._watch.changed(self)

    def _payload_changed(self, held: bool, *, always: bool = False) -> None:
        """`held` says whether it had something in memory before."""
        if self.in_memory != held:
            if self.parent is not None and not self.held_below:
                self.parent.count_branch(-1 if held else 1)
            self._tell()
        elif always:
            self._tell()

    def count_branch(self, n: int) -> None:
        """So many more children have something in memory now; or fewer. Told upwards as far as it matters."""
        node: Node | None = self
        while node is not None and n:
            before = node.held_below
            node.held_below += n
            if bool(before) == bool(node.held_below):
                return
            node._tell()
            if node.in_memory:
                return
            node = node.parent

    @property
    def holds(self) -> bool:
        """Whether it has something in memory, or a node below it has."""
        return self.in_memory or self.held_below > 0

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def in_memory(self) -> bool:
        """Whether it has something in memory, or nothing anywhere."""
        return self._span is not None or self._checkpoint is not None or self._below is None

    @property
    def idle(self) -> bool:
        return self._leases == 0 and self._pins == 0

    @property
    def root(self) -> Node:
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def path(self) -> list[Node]:
        """From the first node below the root down to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def walk(self) -> Iterator[Node]:
        """This node's descendants, parents before children. Looks only at what is asked for; the tree must not change
        meanwhile."""
        stack = [reversed(self.children.values())]
        while stack:
            node = next(stack[-1], None)
            if node is None:
                stack.pop()
                continue
            yield node
            if node.children:
                stack.append(reversed(node.children.values()))


class Match(NamedTuple):
    path: list[Node]
    """Nodes that agree wholly, and last perhaps one that agrees in part."""
    matched: int
    """Tokens that agree."""


class Tree:
    """The nodes of one namespace. Not thread safe; the cache's lock guards it."""

    def __init__(self, watch: Watch | None = None) -> None:
        self._watch = watch
        self.root = Node(np.empty(0, np.int32), 0, None)
        self._version = 0
        """Counts the changes to which nodes there are."""
        self._last: tuple[Tokens, int, Match] | None = None
        """The last walk of frozen tokens, and the version that it is of."""

    def match(self, tokens: Tokens, above: Node | None = None) -> Match:
        """How far these tokens are known, from the root on or from the end of a node. The path must not be changed. A
        request asks several times before its first forward: with frozen tokens the tree is walked once."""
        if above is not None or not is_frozen(tokens):
            return self._walk(tokens, above or self.root)
        if self._last is None or self._last[0] is not tokens or self._last[1] != self._version:
            self._last = (tokens, self._version, self._walk(tokens, self.root))
        return self._last[2]

    def _walk(self, tokens: Tokens, node: Node) -> Match:
        at, path = 0, list[Node]()
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

    def children_first(self) -> Iterator[Node]:
        """Every node that is there when its parent is come to, children before parents. The tree may change meanwhile:
        a node may be gone when it is told."""
        above: list[Node] = []
        left = [list(self.root.children.values())]
        while left:
            if left[-1]:
                above.append(left[-1].pop())
                left.append(list(above[-1].children.values()))
            else:
                left.pop()
                if above:
                    yield above.pop()

    def reach(self, tokens: Tokens, above: Node | None = None) -> tuple[Node, int]:
        """The node that ends where these tokens stop being known, split there if need be; and how far that is."""
        above = above or self.root
        path, matched = self.match(tokens, above)
        node, end = path[-1] if path else above, above.end + matched
        return (self.split(node, end) if end < node.end else node), matched

    def add(self, parent: Node, tokens: Tokens) -> Node:
        """A new leaf below `parent`, which must have no child with the same first token."""
        first = int(tokens[0])
        if first in parent.children:
            raise ValueError(f"token {first} is a child of the node at {parent.end} already")
        node = Node(np.array(tokens, np.int32), parent.end, parent, self._watch)
        self._version += 1
        parent.children[first] = node
        parent.count_branch(1)
        self._tell(node)
        self._tell_branched(parent)
        return node

    def split(self, node: Node, at: int) -> Node:
        """Cut the edge at position `at`; returns the new upper node. `node` keeps its lower part,
        its children and its checkpoint, so that whoever holds it still holds the deeper end."""
        if not node.start < at < node.end or node.parent is None:
            raise ValueError(f"cannot split [{node.start}, {node.end}) at {at}")
        self._version += 1
        k, above, held = at - node.start, node.parent, node.holds
        upper = Node(node.tokens[:k].copy(), node.start, above, self._watch)
        above.children[int(upper.tokens[0])] = upper
        node.tokens, node.start, node.parent = node.tokens[k:].copy(), at, upper
        upper.children[int(node.tokens[0])] = node
        upper._leases, upper._pins, upper._last_use = node._leases, node._pins, node._last_use
        if node._span is not None:
            upper._span, node._span = node._span.cut(k, upper, node)
        if node._below is not None:
            upper._below, node._below = node._below.cut(k, upper, node)
        upper.held_below = int(node.holds)
        above.count_branch(upper.holds - held)
        self._tell(upper)
        self._tell(node)
        return upper

    def join(self, upper: Node, lower: Node) -> None:
        """The opposite of `split`: `lower`, the only child, takes over its parent's edge."""
        if upper.parent is None or upper.children != {int(lower.tokens[0]): lower}:
            raise ValueError(f"node [{upper.start}, {upper.end}) has more than one child")
        self._version += 1
        above, held = upper.parent, upper.holds
        if lower._span is not None:
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
        self._tell(upper)
        self._tell(lower)

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        if node.children or node.parent is None:
            raise ValueError(f"node [{node.start}, {node.end}) is not a leaf")
        self._version += 1
        above = node.parent
        del above.children[int(node.tokens[0])]
        node.parent = None
        above.count_branch(-int(node.holds))
        self._tell(node)
        self._tell_branched(above)

    def _tell(self, node: Node) -> None:
        if self._watch is not None:
            self._watch.changed(node)

    def _tell_branched(self, node: Node) -> None:
        if self._watch is not None:
            self._watch.branched(node)

    def index_bytes(self) -> int:
        """What the tree itself occupies: its tokens, and about 400 bytes of objects per node."""
        return sum(n.tokens.nbytes + 400 for n in self.root.walk())
