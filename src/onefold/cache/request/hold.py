"""What one request holds: its path in the tree, its buffers, its checkpoints, and where its layers stand.

Plain data, and what follows from it. `opening` fills it, `forward` changes it before each forward of the model,
`closing` empties it; `Lease` is its public face. A structure test says which module may write which field.

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

from onefold.cache.memory.checkpoints import Checkpoint
from onefold.cache.memory.ledger import Account, Purpose
from onefold.cache.memory.reasons import Reason
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tokens import Tokens
from onefold.cache.memory.track import Track
from onefold.cache.memory.tree import Node
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
        """Of the tree: the caller's namespace and the model's format."""
        self.asked = asked
        """Positions where a later request will branch off."""
        self.matched = 0
        """How far the tree knows the tokens."""
        self.cached = 0
        """How far the state could be put back."""
        self.from_disk = 0
        """Of the cached tokens, those that were read from disk for this request."""
        self.reason = Reason.NONE
        """Why `cached` is less than it might be; empty for a whole hit."""
        self.closed = False
        self.track = Track(state.store, contiguous=state.model.contiguous)
        self.node: Node | None = None
        """The end of the path that it holds in the tree."""
        self.points: Account = state.ledger.open(Purpose.LIVE, 0)
        """What windows and states occupy."""
        self.watchers: list[Any] = []
        """One for each model (`Watcher`)."""
        self.uncached: list[Uncached] = []
        """Instead of watchers, for a model that runs uncached."""
        self.checkpoint: Checkpoint | None = None
        """That the layers were put back from."""
        self.taken: list[Checkpoint] = []
        """Checkpoints that this request took, and that no node has yet."""
        self.rotated_at = sys.maxsize
        """The first position that a ring, not the track, holds."""
        self.rewound = sys.maxsize
        """Below here the layers hold what the request was opened with."""
        self.unreserved = 0
        """Tokens of the prompt that room is made for at the first forward, and not before."""
        self.chunk = (0, 0.0)
        """The last forward's tokens, and when it began."""
        self.thread = threading.get_ident()
        """That used it last: forwards' scratch is reserved by thread."""
        self.unscheduled: threading.Thread | None = None
        """The thread of a forward that was not watched: what it wrote may be computable there alone."""
        self.running: Any = None
        """The watcher whose forward was the last."""
        self.handed = HandedOut()
        """The layers, as the caller has them."""
        self.target: weakref.ref[nn.Module] | None = None
        """The model, if it is known."""
        self.given_up = False
        """Nobody refers to the lease or to its layers any more: the cache closes it."""

    def is_of(self, model: nn.Module) -> bool:
        """Whether this is the model that its layers are of, or that is not known."""
        return self.target is None or self.target() is model

    def stop_at(self, position: int) -> None:
        """Another request will branch off here: a chunk ends at this position, with a checkpoint if one is needed."""
        self.asked |= {position}

    def refuse_closed(self) -> None:
        """Raises LeaseClosed if it is closed: by another thread, where the lock was let go in between."""
        if self.closed:
            raise LeaseClosed("this lease is closed; its layers hold nothing any more")

    @property
    def path(self) -> list[Node]:
        """The nodes that it holds, as they are now."""
        return [] if self.node is None else self.node.path()

    @property
    def offset(self) -> int:
        """Tokens that the layers hold now."""
        if self.uncached:
            return min(part.position for part in self.uncached)
        return min((w.position for w in self.watchers), default=0)

    @property
    def leaves(self) -> list[Any]:
        """The cache objects that hold state, of all models."""
        return [leaf for w in self.watchers for leaf in w.leaves]

    def empty_layers(self) -> None:
        """Have every layer hold nothing. What lies in the track stays there."""
        for leaf in self.leaves:
            leaf.clear()

    @property
    def uniform(self) -> bool:
        """Whether the layers of each model stand at one position."""
        return all(len({leaf.offset for leaf in w.leaves}) <= 1 for w in self.watchers)

    @property
    def spanless(self) -> bool:
        """No layer's state lies in the track (any more)."""
        return all(w.rotated for w in self.watchers)

    @property
    def last_checkpoint(self) -> int:
        """The deepest point that this conversation could be resumed at as it stands."""
        restored = self.checkpoint
        at = self.cached if restored is not None and restored.position == self.cached else 0
        return max([c.position for c in self.taken], default=at)

    # -- bytes of windows and states ---------------------------------------------------------------

    def point_bytes(self, watcher: Watcher, n_tokens: int) -> int:
        """What windows and states of a model will occupy after `n_tokens` more."""
        start = watcher.position
        total = watcher.anatomy.point_bytes(start, n_tokens)
        return total + watcher.anatomy.ring_bytes(start, n_tokens) if watcher.rotated else total

    def live_point_bytes(self) -> int:
        """What windows and states occupy now, beyond what they share with checkpoints."""
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
        """Bring the account of windows and states up to what they occupy (or will, after this forward)."""
        self.points.resize(max(self.live_point_bytes(), at_least))

    def snapshots(self) -> list[Any]:
        """Every leaf's own state, None where it lies in the track."""
        return [None if x.in_track else x.snapshot(0) for x in self.leaves]
