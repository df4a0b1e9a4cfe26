"""The disk tier of a cache: its folder, its namespaces, and how records and nodes find each other.

- A namespace's records are read into its tree when the namespace is first used: their names and tokens, not their KV.
- A record that is given up, for whatever reason, is taken from its nodes, with every record that goes on from it.
- Spilling and restoring are elsewhere; what they share is here. All methods are called with the cache's lock held.
"""

from __future__ import annotations

import concurrent.futures
import json
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onefold.cache.checkpoints import superfluous
from onefold.cache.fingerprint import name_of, salt_of
from onefold.cache.gate import Gate
from onefold.cache.ondisk import OnDisk
from onefold.cache.pace import Pace
from onefold.cache.restoring import AHEAD
from onefold.cache.shelf import Shelf
from onefold.cache.spilling import Spiller
from onefold.cache.tiers.folder import Folder
from onefold.cache.tiers.layout import Layout
from onefold.cache.tiers.order import below
from onefold.cache.tiers.record import What
from onefold.cache.tiers.vault import Loaded, Record, Vault
from onefold.cache.tree import Node, Tree
from onefold.collecting import paused
from onefold.errors import ConfigError, OnefoldError
from onefold.sizes import parse_size, show_size

log = logging.getLogger("onefold")

MODES = ("back", "through")
ABANDONED_SECONDS = 30.0
DEFAULT_MOST = 100 * 1000**3


@dataclass(frozen=True)
class DiskSettings:
    folder: str | os.PathLike[str]
    budget: int | float | str | None = None
    """By default half of what is free there, and at most 100 GB."""
    mode: str = "back"
    daily_limit: int | float | str | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"a disk mode is 'back' or 'through', not {self.mode!r}")
        if not isinstance(self.folder, (str, os.PathLike)) or not os.fspath(self.folder):
            raise ConfigError(f"disk is a folder, not {self.folder!r}")
        if self.budget is not None:
            parse_size(self.budget, total_bytes=1 << 60)
        if isinstance(self.daily_limit, str) and "%" in self.daily_limit:
            raise ConfigError(f"a daily limit is a size such as '20GB', not a share: {self.daily_limit!r}")
        if self.daily_limit is not None:
            parse_size(self.daily_limit)


@dataclass(frozen=True)
class DiskStats:
    """The disk tier at a moment. Counts are since the cache was made, unless they say otherwise."""

    mode: str = "off"
    """off, back or through."""
    folder: str = ""
    failed: str = ""
    """Why nothing is written any more, or was from the start."""
    budget_bytes: int = 0
    used_bytes: int = 0
    """In blocks of 4,096."""
    records: int = 0
    written_bytes: int = 0
    written_today_bytes: int = 0
    written_ever_bytes: int = 0
    """To this folder, by whatever process."""
    daily_limit_bytes: int = 0
    """0 is none."""
    pending: bool = False
    """Something is being written, or waits for it."""
    spilled_tokens: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    skipped_tokens: int = 0
    """On disk, and not read because computing them is quicker."""
    rejected_records: int = 0
    evicted_records: int = 0
    left_tokens: int = 0
    """In memory and not on disk, when the cache was closed."""


class Disk:
    def __init__(
        self,
        settings: DiskSettings,
        shelf: Shelf,
        gate: Gate,
        about: dict[str, Any],
        points: list[dict[str, Any]],
        *,
        label: str,
        high_water: float,
        computing: Callable[[], bool],
    ) -> None:
        """`about` is everything that changes the bytes, `points` what checkpoints are made of, `label` for people.
        Raises OSError if the folder cannot be used."""
        self.mode = settings.mode
        folder = Folder.make(settings.folder)
        try:
            self.vault = Vault(
                folder,
                _budget(settings.budget, folder),
                daily_bytes=None if settings.daily_limit is None else parse_size(settings.daily_limit),
            )
            self.counts: Counter[str] = Counter()
            self.reasons: Counter[str] = Counter()
            self.read_pace = Pace()
            """Seconds a byte takes to restore."""
            self.prefill_pace = Pace()
            """Seconds a token takes to compute."""
            self._about, self._label, self._gate = about, label, gate
            self._points = points
            self.layout = Layout(about["layout"], points)
            """What this model's records are made of."""
            self._shelf = shelf
            self._spaces: dict[Node, str | None] = {}
            self.spiller = Spiller(
                shelf.store,
                shelf.nodes,
                self.vault,
                gate,
                shelf.ledger,
                self.layout,
                through=settings.mode == "through",
                high_water=high_water,
                gone=self.take_from_nodes,
                forget=self.forget,
                thin=self._thin,
                space_of=self.space_of,
                computing=computing,
            )
        except (OSError, OnefoldError):
            folder.unlock()
            raise
        self.reader = concurrent.futures.ThreadPoolExecutor(AHEAD, "onefold-read")
        """Reads the next records while one is being looked at. Its threads are made when they are first used."""
        if self.vault.budget_bytes < 2 * self.spiller.record_bytes:
            log.warning(
                "a disk budget of %s is next to nothing: a record takes up to %s",
                show_size(self.vault.budget_bytes),
                show_size(self.spiller.record_bytes),
            )

    # -- namespaces ------------------------------------------------------------------------------------

    def attach(self, tree: Tree, namespace: Hashable) -> None:
        """The tree of a caller's namespace is used: it learns what is on disk of it. What could not be read then is
        tried again at a later use."""
        if tree.root in self._spaces:
            known = self._spaces[tree.root]
            if known is not None and (found := self.vault.load_again(known)):
                _grow(tree, found)
            return
        salt = salt_of(namespace)
        if salt is None:
            log.warning("the namespace %r stays in memory: it has no name that another process would know", namespace)
            self._spaces[tree.root] = None
            return
        space = name_of(self._about, salt)
        self._spaces[tree.root] = space
        salted = namespace not in ("", None)
        told = {"label": self._label} | self._about | {"points": self._points, "salted": salted}
        self.vault.folder.describe(space, told)
        with paused():
            _grow(tree, self.vault.load(space))

    def space_of(self, node: Node) -> str | None:
        return self._spaces.get(node.root)

    # -- records and nodes --------------------------------------------------------------------------------

    def forget(self, records: Iterable[Record]) -> list[Record]:
        """Give up these records, and all that go on from them; returns them all."""
        gone = sorted(below(self.vault.records(), records), key=lambda r: -r.start)
        for record in gone:
            self.take_from_nodes(record)
            if record.ready:
                self.vault.drop(record)
        return gone

    def reject(self, record: Record, reason: str) -> None:
        """It is not what it should be; then what goes on from it is an orphan."""
        tails = [tail for tail in self.forget([record]) if tail is not record]
        self.vault.count_rejected(record, reason, tails)

    def set_apart(self, record: Record, error: Exception) -> None:
        """The record cannot be read now. Takes it and its descendants from their nodes, so that what memory has of
        them is dirty again; the files stay, and are tried again later. A record that was given up meanwhile, or is
        being written again, is left alone."""
        if self.vault.find(record.namespace, record.address) is not record or not record.ready:
            return
        tails = sorted(below(self.vault.records(), [record]), key=lambda r: -r.start)
        nodes = {node for tail in tails for node in tail.nodes}
        for tail in tails:
            self.take_from_nodes(tail)
        self.vault.set_apart(record, tails, error)
        for node in nodes:
            if node.parent is not None and (node.span is not None or node.checkpoint is not None):
                self.spiller.committed(node)

    def clear(self) -> None:
        """Everything of this model's that no node has, in whatever namespace, but for what is on its way."""
        told = json.loads(json.dumps(self._about))
        ours = {s for s in self._spaces.values() if s is not None}
        unused = [r for r in self.vault.records() if not r.nodes]
        for space in {r.namespace for r in unused} - ours:
            about = self.vault.folder.about(space)
            if {k: about.get(k) for k in told} == told:
                ours.add(space)
        self.forget([r for r in unused if r.namespace in ours])

    def take_from_nodes(self, record: Record) -> None:
        nodes = sorted(record.nodes, key=lambda n: -n.start)
        for node in nodes:
            node.disk.lose(record)
        for node in nodes:
            self._fall_back(node)
            if not node.disk.all:
                node.disk = None
            self.prune(node)

    def _fall_back(self, node: Node) -> None:
        """A record has gone; others with the same tokens count instead, if its checkpoint or something below goes on
        from them."""
        disk: OnDisk = node.disk
        if disk.reaches >= node.end:
            return
        firsts = [n.disk.records[0] for n in node.children.values() if n.disk is not None and n.disk.records]
        for first in [*([] if disk.point is None else [disk.point.parent]), *firsts]:
            found: list[Record] = []
            at: Record | None = first
            while at is not None and self.vault.find(at.namespace, at.address) is at:
                found.insert(0, at)
                if at.start <= disk.reaches:
                    for record in found:
                        if record.start < node.end:
                            disk.add(record)
                    return
                at = at.parent

    def give_up_below(self, node: Node) -> None:
        """What is on disk below a node that leaves without being there itself: nothing leads to it any more."""
        self.forget({r for n in node.walk() if n.disk is not None for r in n.disk.all})

    def prune(self, node: Node) -> None:
        """A node that has nothing anywhere, and nothing below it, goes."""
        if (
            node.span is None
            and node.checkpoint is None
            and not node.children
            and node.idle
            and node.parent is not None
        ):
            if node.disk is not None and node.disk.readable >= node.end:
                return
            above = node.parent
            if node.disk is not None and node.disk.covered > node.start:
                above = self._shelf.tree_of(node).split(node, node.disk.covered)
            for record in [] if node.disk is None else node.disk.all:
                record.nodes.discard(node)
            node.disk = None
            self._shelf.tree_of(node).remove(node)
            if above.span is None and above.checkpoint is None and above.disk is None and above.parent is not None:
                self.prune(above)

    def leave(self, node: Node) -> None:
        """The node is going from the tree: nobody relies on its records through it."""
        self.spiller.bequeath(node)
        if node.disk is not None:
            disk, node.disk = node.disk, None
            for record in reversed(disk.all):
                record.nodes.discard(node)
                self.spiller.let_go(record)

    def _thin(self, node: Node) -> None:
        """Keep the best few checkpoints of a path on disk, as in memory."""
        held = [n for n in node.path() if n.disk is not None and n.disk.point is not None and n.disk.point.ready]
        for n in superfluous(held):
            record = n.disk.point
            if not record.pins:  # a restore is about to read it; the next checkpoint that arrives thins again
                n.disk.lose(record)
                self.spiller.let_go(record)

    def touch(self, path: list[Node], used: float) -> None:
        for node in path:
            if node.disk is not None:
                self.vault.touch(node.disk.all, used)

    def abandon(self) -> None:
        """The cache is gone, or Python ends, without `close`. What was to be written through is; the rest is said to be
        lost. Without the lock."""
        if self._gate.is_elsewhere:
            return
        if self.spiller.writes_here:  # the collector came by on the thread that would be waited for
            threading.Thread(target=self.abandon, name="onefold-abandon").start()
            return
        with self._gate:
            lost = self.spiller.left(time.monotonic() + ABANDONED_SECONDS)
        if lost:
            log.warning("the cache was not closed: %d tokens are not on disk; use `with`, or close()", lost)
        self.spiller.stop()
        self.reader.shutdown(wait=False)
        self.vault.folder.unlock()

    # -- the whole of it ------------------------------------------------------------------------------------

    def close(self) -> None:
        """After `spiller.stop`, and not before."""
        self.reader.shutdown()
        if not self.spiller.writes:  # else a record is still being written, and files are that thread's
            self.vault.empty_bin()
            self.vault.note(self.vault.take_touched(force=True), force=True)
            self.vault.refresh_indexes()
        self.vault.folder.unlock()

    def stats(self) -> DiskStats:
        vault, spiller = self.vault, self.spiller
        return DiskStats(
            mode=self.mode,
            folder=str(vault.folder.path),
            failed=vault.failed,
            budget_bytes=vault.budget_bytes,
            used_bytes=vault.total_bytes,
            records=vault.n_records,
            written_bytes=vault.counts["written_bytes"],
            written_today_bytes=vault.written_today,
            written_ever_bytes=vault.written_ever,
            daily_limit_bytes=vault.daily_bytes or 0,
            pending=spiller.pending,
            spilled_tokens=spiller.counts["spilled_tokens"],
            restored_tokens=self.counts["restored_tokens"],
            restored_bytes=self.counts["restored_bytes"],
            skipped_tokens=self.counts["skipped_tokens"],
            rejected_records=vault.counts["rejected_records"],
            evicted_records=vault.counts["evicted_records"],
            left_tokens=self.counts["left_tokens"],
        )

    def all_reasons(self) -> Counter[str]:
        found = self.vault.reasons + self.spiller.reasons + self.reasons
        return Counter({f"disk: {reason}": n for reason, n in found.items()})


def _budget(given: int | float | str | None, folder: Folder) -> int:
    usage = shutil.disk_usage(folder.path)
    if given is not None:
        return parse_size(given, total_bytes=usage.total)
    if usage.free >= 2 * DEFAULT_MOST:
        return DEFAULT_MOST  # whatever the records take, which need not be listed for this
    return max(1, min(DEFAULT_MOST, (usage.free + folder.bytes()) // 2))


def _grow(tree: Tree, loaded: list[Loaded]) -> None:
    """Give a tree the nodes that these records are of. Records may have tokens in common: what was forgotten in
    part, and came again, has been written again. The nodes keep the first, and one with KV before a hollow one. Nodes
    that are in memory alone get the records that they are on disk with."""
    members = {found.record for found in loaded}
    following: dict[Record | None, list[Loaded]] = {}
    for found in loaded:
        following.setdefault(found.record.parent, []).append(found)
    ends: dict[Record, Node] = {}
    points: list[Record] = []
    todo = list[Loaded]()
    for above, after in following.items():
        if above is None:
            todo += after
        elif above not in members and above.nodes:
            ends[above] = max(above.nodes, key=lambda n: n.end)
            todo += after
    hollow: list[Loaded] = []
    while todo or hollow:
        found = todo.pop() if todo else hollow.pop()
        if found.record.hollow and todo:
            hollow.append(found)
            continue
        if found.record.what is What.POINT:
            points.append(found.record)
            continue
        chain = [found]
        while _continues(chain[-1].record, after := following.get(chain[-1].record, [])):
            chain.append(after[0])
        tokens = np.concatenate([c.tokens for c in chain]) if len(chain) > 1 else found.tokens
        node, known = tree.reach(tokens, _node_at(tree, ends, found.record))
        used = max(c.record.used for c in chain)
        if known:
            _claim(node, [member.record for member in chain])
        if known < len(tokens):
            node = tree.add(node, tokens[known:])
            node.disk = OnDisk(node)
            for member in chain:
                if member.record.end > node.start:
                    node.disk.add(member.record)
        node.last_use = max(node.last_use, used)
        ends |= dict.fromkeys((member.record for member in chain), node)
        todo += following.get(chain[-1].record, ())
    for record in points:
        node = _node_at(tree, ends, record)
        if node.parent is not None and node.disk is not None and node.disk.point is None:
            node.disk.set_point(record)


def _claim(node: Node, records: list[Record]) -> None:
    """Give these records, which go on from each other, to the nodes down to this one that lack them."""
    nodes: list[Node] = []
    while node.parent is not None and node.end > records[0].start:
        nodes.append(node)
        node = node.parent
    for n in reversed(nodes):
        for record in records:
            at = n.start if n.disk is None else n.disk.reaches
            if record.start <= at < min(n.end, record.end):
                if n.disk is None:
                    n.disk = OnDisk(n)
                n.disk.add(record)


def _continues(record: Record, after: list[Loaded]) -> bool:
    """Whether one range goes on from its end, and nothing else from anywhere in it."""
    if len(after) != 1 or after[0].record.what is not What.RANGE:
        return False
    return after[0].record.start == record.end and after[0].record.hollow == record.hollow


def _node_at(tree: Tree, ends: dict[Record, Node], record: Record) -> Node:
    """The node that ends where this record begins."""
    if record.parent is None:
        return tree.root
    node = ends[record.parent]
    while node.start >= record.start and node.parent is not None:
        node = node.parent
    return tree.split(node, record.start) if record.start < node.end else node
