"""Replays a trace through the real cache, with stand-ins of the right sizes in place of KV.

The tree, the ledger, slabs, eviction, checkpoints, and opening and closing a request are the library's. Of the model
there is only what they ask: how many bytes a token, a state and a forward take. No array has content. Requests are
served one after the other, at the times of the trace.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
from trace_files import Request
from trace_tier import StandInDisk

from onefold.cache.config import CacheConfig
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.recount import recount
from onefold.cache.memory.runs import Stretch
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens, frozen
from onefold.cache.request import chunking, closing, forward, opening
from onefold.cache.request.hold import Hold
from onefold.errors import BudgetError

LAYERS, HEADS, DIM, GROUP = 32, 8, 128, 64
"""The shape of Llama-8B, and the group size of quantised KV."""
CHUNK, SHORT = 2048, 256
SCRATCH = 80 << 20
"""About what a forward of a chunk takes beyond KV."""


class Sizes(NamedTuple):
    """What a model takes, in bytes."""

    array: int
    """The largest array of a layer, per token."""
    arrays: int
    """The arrays of a layer, per token."""
    layers: int
    state: int = 0
    """Windows and recurrent states together; 0 if there are none."""
    recurrent: bool = False

    @property
    def token(self) -> int:
        return self.arrays * self.layers


def plain(bits: int) -> Sizes:
    """Returns the sizes of a Llama-8B whose KV has 16, 8 or 4 bits."""
    if bits == 16:
        return Sizes(HEADS * DIM * 2, 2 * HEADS * DIM * 2, LAYERS)
    packed = HEADS * DIM * bits // 8
    return Sizes(packed, 2 * (packed + 2 * HEADS * DIM // GROUP * 2), LAYERS)


def hybrid() -> Sizes:
    """Returns the sizes of a model of which every fourth layer attends, and the others have a recurrent state of
    2 MiB."""
    attending = LAYERS // 4
    return plain(16)._replace(layers=attending, state=(LAYERS - attending) * (2 << 20), recurrent=True)


def windowed() -> Sizes:
    """Returns the sizes of a model of which every sixth layer attends to everything, and the others to the last 1,024
    tokens."""
    sizes, attending = plain(16), LAYERS // 6
    return sizes._replace(layers=attending, state=(LAYERS - attending) * sizes.arrays * 1024)


class Traits:
    """What memory asks of a model."""

    contiguous = False

    def __init__(self, sizes: Sizes) -> None:
        self.specs = [LayerSpec((ArraySpec(1, 1, mx.uint8),))]
        self.bounds: list[int] = []
        self.needs_checkpoints = sizes.state > 0
        self.recurrent = sizes.recurrent
        self.window = 0

    def accepts(self, store: Store, snapshots: Sequence[Any], position: int) -> bool:
        """A window that is full can be restored only where it was taken."""
        return False

    def revive(
        self, described: str, arrays: dict[str, mx.array], windows: Mapping[int, tuple[Stretch, ...]]
    ) -> tuple[int, list[Any]]:
        raise ValueError("a stand-in has no checkpoints on disk")


class Snapshot:
    """The state of all layers that cannot be cut."""

    arrays: tuple[mx.array, ...] = ()
    runs: tuple[Any, ...] = ()

    def __init__(self, size: int) -> None:
        self.size = size

    def close(self) -> None: ...


class Leaf:
    """All layers that can be cut, as one, or all that cannot: those have a state of so many bytes."""

    shares_runs = False

    def __init__(self, state: int) -> None:
        self._state = state
        self.in_track = self.sliceable = state == 0
        self.offset = 0

    def snapshot(self, start: int) -> Snapshot:
        return Snapshot(self._state)

    def put_back(self, snapshot: Snapshot, point: int) -> bool:
        self.offset = point
        return True

    def live_arrays(self) -> list[mx.array]:
        return []

    def clear(self) -> None:
        self.offset = 0


class Model:
    """One model's forwards in a request: what a hold asks of its watcher, anatomy and records of what was fed."""

    bound, rotated, reached, is_watched = None, False, 0, False

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.anatomy = self.fed = self.rounds = self
        self.needs_checkpoints = sizes.state > 0
        self.position = 0
        self.most = CHUNK
        self.leaves = [Leaf(0), Leaf(sizes.state)] if sizes.state else []

    def scratch_bytes(self, n_tokens: int, total: int = 0, *, joins: bool = False) -> int:
        return SCRATCH * min(n_tokens, self.most) // CHUNK

    def point_bytes(self, start: int, n_tokens: int) -> int:
        return self.sizes.state

    def joins(self, n_tokens: int) -> bool:
        return False

    def bytes(self, leaves: list[Any]) -> int:
        return 0

    def begin_with(self, tokens: Tokens) -> None: ...
    def cut(self, to: int) -> None: ...
    def check_refused(self, position: int) -> None: ...
    def undo(self) -> None: ...
    def part(self) -> None: ...

    def move(self, to: int) -> None:
        self.position = to
        for leaf in self.leaves:
            leaf.offset = to


@dataclass
class Settings:
    sizes: Sizes
    budget: int
    """Bytes."""
    low_water: float = CacheConfig.low_water
    high_water: float = CacheConfig.high_water
    hints: bool = True
    """Whether the cache is told that an answer ended the turn."""
    disk: int = 0
    """Bytes of the disk below memory; 0: there is none."""
    through: bool = False
    """Whether each commit is written to the disk, instead of what is evicted."""


class Replay:
    """A cache without a model, which a trace is replayed through."""

    def __init__(self, settings: Settings) -> None:
        lock = CacheLock()
        self.sizes, self._hints = settings.sizes, settings.hints
        self.ledger = Ledger(settings.budget, lock.inner)
        self.state = CacheState(Traits(settings.sizes), self.ledger, lock)
        self.state.water = (settings.low_water, settings.high_water)
        self.state.min_checkpoint_tokens = CacheConfig.min_checkpoint_tokens
        store = self.state.store
        store.token_bytes, store.layer_token_bytes = self.sizes.token, self.sizes.arrays
        store.array_token_bytes = self.sizes.array
        self.now = 0.0
        self.state.nodes.time = lambda: self.now
        self.counts: Counter[str] = Counter()
        self.disk = StandInDisk(self.state, settings.disk, through=settings.through) if settings.disk else None
        self.state.nodes.tier = self.disk

    def run(self, requests: Iterable[Request]) -> Counter[str]:
        """Serve these requests. Returns the sums: tokens that were asked for and found, requests refused, and the
        tokens stored and bytes used after each request."""
        for request in requests:
            self.now = request.time
            self._serve(request)
            self.counts["requests"] += 1
            self.counts["stored"] += self.state.store.owned
            self.counts["room"] += self.state.store.capacity - self.state.store.owned
            self.counts["used"] += self.ledger.used_bytes
            if self.disk is not None:
                self.disk.write_ahead()
        self.counts["written"] = 0 if self.disk is None else self.disk.put
        return self.counts

    def _serve(self, request: Request) -> None:
        tokens = frozen(request.tokens())
        self.counts["asked"] += len(tokens)
        before = self._fetch(tokens)
        hold = Hold(self.state, tokens, "", frozenset())
        hold.watchers.append(Model(self.sizes))
        try:
            with self.state.lock:
                opening.begin(hold)
            self.state.lock.run(opening.giving_room(hold, 0))
            self.counts["found"] += hold.cached
            self.counts["from_disk"] += 0 if before is None else max(0, hold.cached - before)
            self._prefill(hold)
        except BudgetError:
            self.counts["refused"] += 1
        closing.settle(hold, tokens[: hold.offset], close=True, turn_over=bool(request.ended and self._hints))

    def _fetch(self, tokens: Tokens) -> int | None:
        """Read what the disk has of the tokens. Returns how many were in memory; None if nothing was read."""
        if self.disk is None:
            return None
        with contextlib.suppress(BudgetError), self.state.lock:
            read = self.state.lock.run_held(self.disk.planning(self.state.nodes.tree(""), tokens, 0))
            return None if read is None else read.before
        return None

    def _prefill(self, hold: Hold) -> None:
        model = hold.watchers[0]
        model.move(hold.cached)
        while hold.offset < len(hold.tokens):
            model.most = chunking.chunk_limit(hold, CHUNK)
            n = len(hold.tokens) - hold.offset  # as one forward of the longest chunks: nothing else depends on chunks
            if self.sizes.state:  # but for checkpoints, which are taken between them
                n = max(1, len(chunking.next_chunk(hold, hold.offset, CHUNK)))
            forward.begin(hold, model)
            forward.reserve_step(hold, model, n)
            model.move(hold.offset + n)
            self.counts["short_chunks"] += n if model.most < SHORT else 0

    def check(self) -> list[str]:
        """Recounts everything; returns a sentence for each finding."""
        with self.state.lock:
            return recount(self.state)

    def close(self) -> None:
        self.state.pool.close()


def replayed(settings: Settings, requests: Iterable[Request]) -> Counter[str]:
    """Replays a trace through a new cache; returns what `Replay.run` does."""
    with contextlib.closing(Replay(settings)) as replay:
        return replay.run(requests)
