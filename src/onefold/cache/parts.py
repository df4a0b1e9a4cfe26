"""The parts of one cache: its models, its state, and the tier below memory.

`PrefixCache` is the public class. `Leasing`, `Inventory`, `Clearing` and `Ending` share these parts.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Hashable

import mlx.nn as nn

from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.lock import CacheLock
from onefold.cache.memory.payloads import Tree
from onefold.cache.memory.state import CacheState
from onefold.cache.memory.tier import Tier, TierStats
from onefold.cache.model import linear, seam, stock
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.attention import attention
from onefold.cache.model.models import Models
from onefold.cache.model.survey import look_uncached
from onefold.cache.tiers.identity import typed
from onefold.errors import ConfigError

log = logging.getLogger("onefold")


class Parts:
    def __init__(
        self, models: list[nn.Module], anatomies: list[Anatomy], ledger: Ledger, form: Hashable, lock: CacheLock
    ) -> None:
        """`models` may be fewer than `anatomies`, because layers can come without a model. `form` identifies the models
        and the KV format, and is part of each tree's namespace."""
        stock.evaluate_kept(anatomies)
        self.refs = [weakref.ref(m) for m in models]
        self.models = Models(anatomies)
        self.state = CacheState(self.models, ledger, lock)
        self.form = form
        self.tier: Tier | None = None
        """The tier below memory; None if there is none."""
        self.no_tier = TierStats()
        """The statistics that are reported without a tier, with the reason if it could not be opened."""
        self.seam = [name for m in models for name in seam.install(m, attention)]
        self.watched = [seam.watch(m) for m in models]
        self.linear = linear.install(models)
        stock.hook_saving()
        self.state.uncached_reason = next((a.reason for a in anatomies if a.reason), "")
        if self.state.uncached_reason and models:
            for anatomy, model in zip(anatomies, models, strict=True):
                look_uncached(anatomy, model)

    def log_limits(self) -> None:
        """Log what is not cached of these models, and why."""
        for anatomy in self.models.anatomies:
            for note in anatomy.notes:
                log.warning("%s", note)
        if self.state.uncached_reason and self.refs:
            log.warning("this model runs uncached: %s", self.state.uncached_reason)

    def key(self, namespace: Hashable) -> Hashable:
        """Returns what names the tree of a caller's namespace. Namespaces that are equal in Python, such as 1, True and
        1.0, are told apart as they are on disk."""
        return namespace, self.form, typed(namespace)

    def tree(self, namespace: Hashable) -> Tree:
        """Returns the tree of a caller's namespace, with the nodes that the tier has."""
        tree = self.state.nodes.tree(self.key(namespace))
        if self.tier is not None:
            self.tier.attach(tree, namespace)
        return tree

    def refuse_closed(self) -> None:
        """Raises ConfigError if the cache is closed."""
        if self.state.closing:
            raise ConfigError("this cache is closed: make another one")

    def need(self, n_tokens: int, *, states: int = 3, chunk: int = 1) -> int:
        """Returns the bytes that one conversation of `n_tokens` needs, with a forward of `chunk` tokens. Includes the
        copy of one array, for growing, if it must lie in one buffer; and `states` states of windows and recurrent
        layers: a live one, a stored one, and one that is being made."""
        store = self.state.store
        copied = store.array_token_bytes if self.state.model.contiguous else 0
        slab = n_tokens * (store.token_bytes + copied)
        scratch = sum(a.scratch_bytes(chunk, n_tokens) for a in self.models.anatomies)
        points = sum(a.point_bytes(n_tokens, 1) for a in self.models.anatomies)
        return slab + scratch + states * points
