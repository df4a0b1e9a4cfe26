"""Checkpoints: the state of every window and recurrent layer at one position, and which of them to keep.

- A checkpoint belongs to a point, a segment to a range. A checkpoint that holds only windows that are not full yet can
  be clamped to any earlier point; a recurrent state cannot.
- Windows that overlap share their bytes: the snapshots of two checkpoints refer to the same runs (`runs.py`), each of
  which is counted once.
- In memory they are bounded by their bytes, and while these are free all of them stay. When bytes are short, those go
  first that are surplus: more than `PER_PATH` on a path. The deepest stays, then points where the tree branches, then
  those whose loss would cost the most tokens. So they become sparser towards the start; but not by much, because what
  lies between two of them is evicted as a whole (docs/eviction.md).
- On disk at most `DISK_PER_PATH` stay on a path, by the same order, and the last `DISK_RECENT` of them; and all whose
  windows continue each other's, which take no more bytes than the tokens between them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from onefold.cache.memory.ledger import Account
from onefold.cache.memory.ranking import Ranking
from onefold.cache.memory.runs import Run
from onefold.cache.memory.tree import Node

PER_PATH = 4
DISK_PER_PATH, DISK_RECENT = 16, 8
"""The most checkpoints of a path on disk, and how many of its last ones always stay."""
POINTS_SHARE = 4
"""Checkpoints have a quarter of the budget."""
GRID = 8192


class Checkpoint:
    """One snapshot for each leaf; None where the leaf's state lies in the path's segments."""

    __slots__ = (
        "__weakref__",
        "_closing",
        "_holders",
        "account",
        "is_complete",
        "n_arrays",
        "passing",
        "position",
        "revisited",
        "runs",
        "snapshots",
    )

    def __init__(self, position: int, snapshots: list[Any], account: Account, *, is_complete: bool) -> None:
        self.position = position
        self.snapshots = snapshots
        self.account = account
        self.is_complete = is_complete
        """Every leaf has its snapshot here, and none needs the path's segments."""
        self.passing = False
        """It lies in the middle of a turn whose end has one, and only memory keeps it: states are large, and on disk
        there is at most one a turn."""
        self.revisited = False
        """A request ended here after others had gone on: the disk has it, and does not thin it, while memory does."""
        self.runs: tuple[Run, ...] = tuple(dict.fromkeys(run for s in snapshots if s is not None for run in s.runs))
        """The KV of windows that it shares with other checkpoints."""
        for run in self.runs:
            run.hold()
        self.n_arrays = len(self._own_arrays())
        """Its own arrays: so many buffers of the device."""
        self._holders = 0
        self._closing = False

    @classmethod
    def of(cls, position: int, snapshots: list[Any], account: Account) -> Checkpoint:
        """Makes a checkpoint that needs the path's segments only where a leaf has no snapshot."""
        return cls(position, snapshots, account, is_complete=all(s is not None for s in snapshots))

    @property
    def bytes(self) -> int:
        """The bytes of its own arrays, without those of its runs."""
        return sum(s.size for s in self.snapshots if s is not None)

    @property
    def frees(self) -> int:
        """The bytes that closing it would free."""
        return self.account.bytes + sum(run.account.bytes for run in self.runs if run.holders == 1)

    def array_ids(self) -> set[int]:
        return {id(a) for s in self.snapshots if s is not None for a in s.arrays if a is not None}

    def _own_arrays(self) -> set[int]:
        return {id(a) for s in self.snapshots if s is not None and not s.runs for a in s.arrays if a is not None}

    def hold(self) -> None:
        """Keep its bytes, and count them, until `release`: the tier is writing it, or a lease was restored from it."""
        self._holders += 1

    @property
    def is_held(self) -> bool:
        return self._holders > 0

    def release(self) -> None:
        self._holders -= 1
        if self._closing and not self._holders:
            self.close()

    def close(self) -> None:
        if self._holders:
            self._closing = True
            return
        for snapshot in self.snapshots:
            if snapshot is not None:
                snapshot.close()
        self.snapshots = []
        self.account.close()
        for run in self.runs:
            run.release()
        self.runs = ()

    @property
    def is_windows(self) -> bool:
        """Whether it consists of windows in runs."""
        return bool(self.runs) and all(s is None or s.runs for s in self.snapshots)

    @property
    def begin(self) -> int:
        """The position from which on its windows hold entries."""
        return min((s.begin for s in self.snapshots if s is not None and s.runs), default=self.position)

    def parted(self, since: int) -> bool:
        """Whether a record that has the entries of its windows from `since` on has several ranges of them, or not the
        whole windows."""
        return any(s.runs and (s.begin < since or len(s.edges(since)) > 1) for s in self.snapshots if s is not None)

    def arrays(self, since: int = 0) -> dict[str, mx.array]:
        """Returns its arrays by name, in a fixed order; of windows the entries from `since` on. With `describe` they
        are the whole checkpoint."""
        return {
            f"state.{i}.{j}": a
            for i, s in enumerate(self.snapshots)
            if s is not None
            for j, a in enumerate(s.entries(since) if s.runs else s.arrays)
            if a is not None
        }

    def describe(self, since: int = 0) -> str:
        """Returns everything but the arrays, as JSON. Raises ValueError or TypeError for a value that JSON does not
        have."""
        parted = self.parted(since)
        leaves = [
            None if s is None else s.describe_parts(since, parted=parted) if s.runs else s.describe()
            for s in self.snapshots
        ]
        return json.dumps({"position": self.position, "leaves": leaves}, separators=(",", ":"), allow_nan=False)


class Place(NamedTuple):
    """A checkpoint on a path, reduced to what decides whether it is kept."""

    position: int
    branches: bool
    """Another conversation branches off here."""


def surplus(places: list[Place], limit: int = PER_PATH, recent: int = 1) -> list[int]:
    """Returns the positions of the checkpoints to drop, the first to be dropped first, for a path whose checkpoints are
    `places`. The last `recent` of them stay."""
    return list(_dropped(places, limit, recent))


def _dropped(places: list[Place], limit: int, recent: int) -> Iterator[int]:
    """Yields these positions. Each takes time in proportion to the path's checkpoints."""
    kept = sorted(places)
    while len(kept) > max(limit, recent):
        end = kept[-1].position

        def worth(i: int, kept: list[Place] = kept, end: int = end) -> tuple[bool, float]:
            before = kept[i - 1].position if i else 0
            lost = kept[i].position - before  # tokens to prefill again if this one is dropped
            return kept[i].branches, lost / (end - kept[i].position + GRID)

        yield kept.pop(min(range(len(kept) - recent), key=worth)).position


def superfluous(held: list[Node], limit: int = PER_PATH, recent: int = 1) -> Iterator[Node]:
    """Yields the nodes whose checkpoint is to be dropped, the first to be dropped first. `held` are the nodes of a path
    that have one."""
    nodes = {n.end: n for n in held}
    for end in _dropped([Place(n.end, len(n.children) > 1) for n in held], limit, recent):
        yield nodes[end]


def conversation(node: Node) -> list[Node]:
    """Returns the nodes of its path, and those below it up to where others branch off."""
    end = node
    while len(end.children) == 1:
        (end,) = end.children.values()
    return list(end.path())


def missed_least(node: Node) -> Node:
    """Returns the node, of the conversation of this one, whose checkpoint is missed least of those that may be dropped.
    `node` has one that may be; it is the answer if no deeper checkpoint replaces it: then others of its path are
    shared, or are used more."""
    if not _is_replaced(node):
        return node
    held = [n for n in conversation(node) if n.checkpoint is not None]
    return next((n for n in superfluous(held, limit=1) if may_drop(n) and _is_replaced(n)), node)


def may_drop(node: Node) -> bool:
    """Whether the node has a checkpoint that may be dropped: nothing holds the node, or only leases do that were not
    restored from it, and a deeper one replaces it."""
    if node.checkpoint is None:
        return False
    return node.idle or (not node.pins and not node.checkpoint.is_held and _is_replaced(node))


class _Counted(NamedTuple):
    """What a node's checkpoint was counted as."""

    checkpoint: Any
    n_bytes: int
    n_arrays: int
    runs: tuple[tuple[Run, int, int], ...]
    """With the bytes and the arrays of each."""


def _counted(checkpoint: Any) -> _Counted:
    runs = tuple((run, run.account.bytes, len(run.arrays)) for run in checkpoint.runs)
    return _Counted(checkpoint, checkpoint.account.bytes, checkpoint.n_arrays, runs)


class Points:
    """The nodes that have a checkpoint, in the order in which conversations lose one when their share of the budget is
    used up: first those where a deeper one replaces it, then the least recently used. A watch of the trees, like
    `eviction.Leaves`."""

    def __init__(self) -> None:
        self.bytes = 0
        """The bytes of all checkpoints in the trees; a run that several share is counted once."""
        self.arrays = 0
        """The arrays of all of them: so many buffers of the device."""
        self._held: dict[Node, _Counted] = {}
        self._runs: Counter[Run] = Counter()
        """How many of these checkpoints refer to each run."""
        self._order: Ranking[Node] = Ranking()
        self.crowded: dict[Node, None] = {}
        """The ends of paths with surplus checkpoints, those that were committed first before the others."""

    @property
    def count(self) -> int:
        """How many checkpoints there are."""
        return len(self._held)

    def crowd(self, end: Node) -> None:
        """Note whether the path that ends at this node has surplus checkpoints."""
        held = 0
        for node in end.path():
            held += node.checkpoint is not None
            self.crowded.pop(node, None)
        if held > PER_PATH:
            self.crowded[end] = None

    def changed(self, node: Node) -> None:
        if node.parent is None:
            self.crowded.pop(node, None)
        checkpoint = node.checkpoint if node.parent is not None else None
        held = self._held.get(node)
        counted = None if held is None else held.checkpoint
        if checkpoint is not counted:
            if held is not None:
                self._count(self._held.pop(node), -1)
            if checkpoint is not None:
                self._held[node] = _counted(checkpoint)
                self._count(self._held[node], 1)
        if checkpoint is not None:
            self._order.place(node, _drop_rank(node))
        elif counted is not None:
            self._order.remove(node)
        if (checkpoint is None) != (counted is None) and node.parent is not None:
            self.branched(node.parent)

    def _count(self, counted: _Counted, sign: int) -> None:
        _, n_bytes, n_arrays, runs = counted
        for run, run_bytes, run_arrays in runs:
            self._runs[run] += sign
            if self._runs[run] == (1 if sign > 0 else 0):
                n_bytes, n_arrays = n_bytes + run_bytes, n_arrays + run_arrays
            if not self._runs[run]:
                del self._runs[run]
        self.bytes, self.arrays = self.bytes + sign * n_bytes, self.arrays + sign * n_arrays

    def held_bytes(self, nodes: Iterable[Node]) -> int:
        """Returns the bytes of the checkpoints of these nodes, each run once."""
        found = [n.checkpoint for n in nodes if n.checkpoint is not None]
        runs = {run for checkpoint in found for run in checkpoint.runs}
        return sum(c.account.bytes for c in found) + sum(run.account.bytes for run in runs)

    def branched(self, node: Node) -> None:
        """Rank the nearest checkpoint at or above this node again: whether a deeper one replaces it may have
        changed."""
        at: Node | None = node if self._held else None
        while at is not None and at.checkpoint is None:
            at = at.parent
        if at is not None and at in self._held:
            self._order.place(at, _drop_rank(at))

    def pop(self) -> Node | None:
        """Remove and return the node whose checkpoint is dropped next; None if there is none. `changed` adds the node
        to the order again."""
        return self._order.pop()

    def pass_over(self, node: Node) -> None:
        """Keep the checkpoint of a node that `pop` returned, and leave it out of the order until `put_back`."""
        self._order.pass_over(node, _drop_rank(node))

    def put_back(self) -> None:
        """Add the nodes that were passed over to the order again."""
        self._order.put_back()

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """Recounts from all nodes; returns a sentence for each difference."""
        held = {n: _counted(c) for n in nodes if (c := n.checkpoint) is not None}
        runs = Counter(run for counted in held.values() for run, _, _ in counted.runs)
        found = []
        if (self._held, self._runs, self.bytes) != (held, runs, self.held_bytes(held)):
            found.append(f"the checkpoints are counted as {self.bytes} bytes, and have another size")
        if self.arrays != sum(c.n_arrays for c in held.values()) + sum(len(run.arrays) for run in runs):
            found.append(f"the checkpoints are counted as {self.arrays} arrays, and have another number")
        for run, n in runs.items():
            if run.holders < n or run.is_closed or run.bytes != run.account.bytes:
                found.append(f"a run of {run.bytes} bytes counts {run.account.bytes}, and {run.holders} holders")
        if self._order.keys() != {n: _drop_rank(n) for n in held}:
            found.append("the order in which checkpoints are dropped does not match the tree")
        return found


def _drop_rank(node: Node) -> tuple[bool, float, int]:
    return not _is_replaced(node), node.last_use, node.end


def _is_replaced(node: Node) -> bool:
    """Whether every continuation of the node leads to one deeper checkpoint."""
    while len(node.children) == 1:
        (node,) = node.children.values()
        if node.checkpoint is not None:
            return True
    return False


def wanted(position: int, last: int, prompt_tokens: int, asked: frozenset[int]) -> bool:
    """Whether to take a checkpoint at a forward boundary at `position`, if the last one is at `last`."""
    if position <= last:
        return False
    if position in asked:
        return True
    if position >= prompt_tokens - 1 > last:
        return True
    return position // GRID > last // GRID
