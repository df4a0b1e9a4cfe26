"""The state of one request: its path in the tree, its buffers, its checkpoints, and the positions of its layers.

Plain data, and values computed from it. `opening` fills it, `forward` changes it before each forward of the model,
`closing` empties it; `Lease` is the public class. A structure test lists which module may write which field.

    tokens   |<------ cached ------>|<-- prefilled -->|<-- generated -->|
    layers   |<-- tree's, read in place -->|<---- this request's own ---->|
                                           floor of the track (matched)
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any, Protocol

import mlx.nn as nn

from onefold.cache.memory import device
from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.payloads import Node
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.runs import Run
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.uncached import Uncached
from onefold.cache.request.fed import Fed
from onefold.cache.request.handed_out import HandedOut
from onefold.cache.request.held_leaves import HeldLeaves
from onefold.cache.request.rounds import Rounds
from onefold.errors import LeaseClosed


class Watcher(Protocol):
    """One model's forwards, as a hold sees them: see `watcher.ForwardWatcher`."""

    anatomy: Anatomy
    fed: Fed
    rounds: Rounds
    held: HeldLeaves
    rotated: bool
    reached: int

    @property
    def leaves(self) -> list[Any]: ...
    @property
    def position(self) -> int: ...
    @property
    def is_watched(self) -> bool: ...
    def undo(self) -> None: ...
    def part(self) -> None: ...
    def scratch_bytes(self, n_tokens: int) -> int: ...
    def joins(self, n_tokens: int) -> bool: ...


class Hold:
    def __init__(self, state: CacheState, tokens: Tokens, namespace: Any, asked: frozenset[int]) -> None:
        self.state = state
        self.tokens = tokens
        self.namespace = namespace
        """The tree's namespace: the caller's, and the model's format."""
        self.asked = asked
        """Positions where a later request will branch off."""
        self.matched = 0
        """How many of the tokens, from the first on, the tree knows."""
        self.cached = 0
        """The position to which all layers were restored."""
        self.from_disk = 0
        """How many of the cached tokens were read from disk for this request."""
        self.from_remote = 0
        """How many of them came from a store that machines share."""
        self.grid = 0
        """The tier below wants checkpoints at multiples of so many tokens; 0 if it wants none."""
        self.reason = Reason.NONE
        """Why `cached` is less than possible; empty for a full hit."""
        self.failures_before = device.failures()
        """Failures of the device before the lease was opened."""
        self.closed = False
        self.track = Track(state.store, contiguous=state.model.contiguous)
        self.node: Node | None = None
        """The last node of the path that it holds in the tree."""
        self.ended_at: weakref.ref[Node] | None = None
        """The last node of its path when it was closed."""
        self.points: Account = state.ledger.open(Purpose.LIVE, 0)
        """The account of windows and states."""
        self.watchers: list[Any] = []
        """One for each model (`Watcher`)."""
        self.uncached: list[Uncached] = []
        """One for each model that runs uncached, instead of watchers."""
        self.checkpoint: Checkpoint | None = None
        """The checkpoint from which the layers were restored."""
        self.taken: list[Checkpoint] = []
        """Checkpoints that this request took and that are not stored in the tree yet."""
        self.rotated_at = sys.maxsize
        """The first position that a ring, not the track, holds."""
        self.rewound = sys.maxsize
        """Below this position the layers hold the tokens with which the request was opened."""
        self.unreserved = 0
        """Tokens of the prompt for which the first forward makes room."""
        self.chunk = (0, 0.0)
        """The number of tokens of the last forward, and the time when it began."""
        self.thread = threading.get_ident()
        """The thread that used it last: scratch is reserved by thread."""
        self.unscheduled: threading.Thread | None = None
        """The thread of a forward that was not watched: maybe only this thread can compute what it wrote."""
        self.running: Any = None
        """The watcher of the last forward."""
        self.handed = HandedOut()
        """The layers that the caller has."""
        self.target: weakref.ref[nn.Module] | None = None
        """The model, if it is known."""
        self.given_up = False
        """The caller refers neither to the lease nor to its layers any more: the cache closes it."""

    def restore_from(self, checkpoint: Checkpoint | None) -> None:
        """Note the checkpoint from which the layers are restored. It is not dropped while they may share its arrays."""
        before, self.checkpoint = self.checkpoint, checkpoint
        if checkpoint is not None:
            checkpoint.hold()
        if before is not None:
            before.release()

    @property
    def edges(self) -> set[int]:
        """Where the tier below wants checkpoints of the prompt: at the last edges of its grid before the prompt's end,
        and before each position where a later request will branch off."""
        ends = {len(self.tokens) - 1, *self.asked} if self.grid and self.state.model.needs_checkpoints else set[int]()
        return {end // self.grid * self.grid for end in ends if self.grid <= end <= len(self.tokens)}

    def is_of(self, model: nn.Module) -> bool:
        """Whether its layers are for this model; True if their model is not known."""
        return self.target is None or self.target() is model

    def stop_at(self, position: int) -> None:
        """End a chunk at this position, with a checkpoint if one is needed, because another request will branch off
        there."""
        self.asked |= {position}

    def refuse_closed(self) -> None:
        """Raises LeaseClosed if the lease is closed. Another thread may close it whenever the lock is released."""
        if self.closed:
            raise LeaseClosed("this lease is closed, and its layers are empty: open another one")

    @property
    def place(self) -> weakref.ref[Node] | None:
        """The node at which its path in the tree ends, or ended when it was closed."""
        return self.ended_at if self.node is None else weakref.ref(self.node)

    @property
    def path(self) -> list[Node]:
        """The nodes that it holds now."""
        return [] if self.node is None else self.node.path()

    @property
    def offset(self) -> int:
        """The number of tokens that the layers hold now."""
        if self.uncached:
            return min(part.position for part in self.uncached)
        return min((w.position for w in self.watchers), default=0)

    @property
    def leaves(self) -> list[Any]:
        """The cache objects that hold state, of all models."""
        return [leaf for w in self.watchers for leaf in w.leaves]

    def empty_layers(self) -> None:
        """Empty every layer. The track is unchanged."""
        for leaf in self.leaves:
            leaf.clear()

    @property
    def uniform(self) -> bool:
        """Whether the layers of each model are at one position."""
        return all(len({leaf.offset for leaf in w.leaves}) <= 1 for w in self.watchers)

    @property
    def is_outside_track(self) -> bool:
        """Whether no layer's state lies in the track."""
        return all(w.rotated for w in self.watchers)

    @property
    def last_checkpoint(self) -> int:
        """The deepest position at which this conversation could be resumed now."""
        restored = self.checkpoint
        at = self.cached if restored is not None and restored.position == self.cached else 0
        return max([c.position for c in self.taken], default=at)

    # -- bytes of windows and states ---------------------------------------------------------------

    @property
    def has_points(self) -> bool:
        """Whether some layer may have state outside of the track."""
        anatomies = [w.anatomy for w in self.watchers]
        return bool(self.uncached) or any(a.needs_checkpoints or a.bound is not None for a in anatomies)

    def point_bytes(self, watcher: Watcher, n_tokens: int) -> int:
        """Returns the bytes that windows and states of a model may occupy after `n_tokens` more."""
        start = watcher.position
        total = watcher.anatomy.point_bytes(start, n_tokens)
        return total + watcher.anatomy.ring_bytes(start, n_tokens) if watcher.rotated else total

    def live_point_bytes(self) -> int:
        """Returns the bytes that windows and states occupy now and do not share with checkpoints."""
        shared: set[int] = set()
        for checkpoint in [self.checkpoint, *self.taken]:
            if checkpoint is not None:
                shared |= checkpoint.array_ids()
        total = sum(part.nbytes for part in self.uncached)
        for watcher in self.watchers:
            for leaf in watcher.leaves:
                if not leaf.in_track:
                    total += sum(a.nbytes for a in leaf.live_arrays() if id(a) not in shared)
            total += watcher.rounds.bytes(watcher.leaves)
        return total

    def count_points(self, at_least: int = 0) -> None:
        """Set the account of windows and states to what they occupy, or to `at_least`. Raises BudgetError."""
        self.points.resize(max(self.live_point_bytes(), at_least))

    @property
    def shares_windows(self) -> bool:
        """Whether all state outside of the track is windows whose snapshots share runs."""
        outside = [x for x in self.leaves if not x.in_track]
        return bool(outside) and self.state.model.window > 0 and all(x.shares_runs for x in outside)

    def snapshots(self, run: Run) -> list[Any]:
        """Returns a snapshot of every leaf; None where its state lies in the track. What windows do not share is copied
        into `run`, if `shares_windows`."""
        shares = self.shares_windows
        return [None if x.in_track else x.share(run) if shares else x.snapshot(0) for x in self.leaves]
