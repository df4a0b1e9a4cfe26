"""Queries of servers, in addition to leases: how many tokens are known, what is held, what would fit.

The engine and the drop-in use it as `PrefixCache.inventory`. A query does not count as a use of the nodes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Hashable
from typing import Any

import mlx.nn as nn

from onefold.cache.leasing import Leasing
from onefold.cache.memory.ledger import Purpose
from onefold.cache.memory.lock import Work
from onefold.cache.memory.reach import readable_length
from onefold.cache.memory.segment import STEP, Slab, round_up
from onefold.cache.memory.tier import Written
from onefold.cache.memory.tokens import Tokens, as_tokens, frozen
from onefold.cache.model.fingerprint import model_digest
from onefold.cache.model.formats.registry import KvFormat
from onefold.cache.parts import Parts
from onefold.cache.request import adopting
from onefold.errors import ConfigError


class Inventory:
    def __init__(self, parts: Parts, leasing: Leasing) -> None:
        self._parts = parts
        self._state = parts.state
        self._leasing = leasing

    def rebind(self, *models: nn.Module) -> bool:
        """Use other model objects with the same weights (a model that was unloaded and loaded again). Returns False,
        and changes nothing, if the weights differ or a request is running."""
        with self._state.lock:
            self._state.sweep()
            if self._state.leases or [*map(type, models)] != self._parts.watched:
                return False
            if not isinstance(self._parts.form, tuple) or model_digest(*models) != self._parts.form[0]:
                return False
            self._parts.refs = [weakref.ref(m) for m in models]
            return True

    @property
    def held_bytes(self) -> int:
        """The bytes of KV and states that the cache holds now: live, stored and in checkpoints."""
        with self._state.lock:
            self._state.sweep()
            for lease in self._state.leases:
                lease.usage.recount()
            return self._state.ledger.held_bytes

    @property
    def open_leases(self) -> int:
        self._state.sweep()
        return len(self._state.leases)

    @property
    def budget_bytes(self) -> int:
        return self._state.ledger.budget_bytes

    @property
    def token_bytes(self) -> int:
        """The bytes of one more token of a conversation."""
        return self._state.store.token_bytes

    @property
    def step_bytes(self) -> int:
        """The bytes by which a conversation's buffer grows at a time, with the copy of one layer."""
        return STEP * (self._state.store.token_bytes + self._state.store.layer_token_bytes)

    @property
    def unallocated_bytes(self) -> int:
        """The bytes that the prompts of open leases will allocate at their first forward."""
        with self._state.lock:
            return sum(round_up(lease.hold.unreserved) for lease in self._state.leases) * self._state.store.token_bytes

    def prompt_bytes(self, tokens: Any) -> int:
        """Returns the bytes that a request for these tokens would allocate for its prompt: KV that the tree does not
        have, and states."""
        found = as_tokens(tokens)
        most = max(self._parts.models.bounds, default=len(found))
        points = sum(a.point_bytes(len(found), 1) for a in self._parts.models.anatomies)
        return round_up(max(0, min(len(found), most) - self.matched(found))) * self._state.store.token_bytes + points

    @property
    def written(self) -> Written:
        """The bytes that this cache has written below memory. Does not wait for the lock."""
        return Written() if self._parts.tier is None else self._parts.tier.written

    @property
    def evicted_tokens(self) -> int:
        return self._state.nodes.counts["evicted_tokens"]

    def fits(self, layers: list[Any]) -> bool:
        """Whether these caches of mlx-lm's have the kinds and shapes of this model's."""
        return adopting.fits(layers, self._parts.models.anatomies)

    @property
    def stored_bytes(self) -> int:
        """The bytes that no request is using."""
        return self.held_bytes - self._state.ledger.by_purpose()[Purpose.LIVE.value]

    def in_memory(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """Returns how many of these tokens, from the first on, have readable KV in memory."""
        with self._state.lock:
            path, matched = self._parts.tree(namespace).match(as_tokens(tokens))
            return readable_length(self._state, path, matched)[0]

    def matched(self, tokens: Any, *, namespace: Hashable = "") -> int:
        """Returns how many of these tokens, from the first on, the tree knows."""
        with self._state.lock:
            return self._parts.tree(namespace).match(as_tokens(tokens)).matched

    def continuation(self, tokens: Any, *, most: int = 32, namespace: Hashable = "") -> Tokens:
        """Returns up to `most` tokens that follow the known prefix of these tokens in the tree, in the conversation
        that was used last."""
        with self._state.lock:
            tree = self._parts.tree(namespace)
            path, matched = tree.match(as_tokens(tokens))
            node = path[-1] if path else tree.root
            if matched < node.end:
                return node.tokens[matched - node.start :][:most].copy()
            latest = max(node.children.values(), key=lambda n: n.last_use, default=None)
            return (node.tokens[:0] if latest is None else latest.tokens[:most]).copy()

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a conversation can be resumed at any of its tokens, and not only at a checkpoint."""
        return not self._state.model.needs_checkpoints

    def stored_as(self, kv: str) -> str:
        """Returns what this format stores, in words, and its share of the bytes that the model makes."""
        anatomy = self._parts.models.anatomies[0]
        made = [(leaf.token_bytes, sum(a.token_bytes for a in leaf.plain)) for leaf in anatomy.sliceable if leaf.plain]
        stored, whole = (sum(each) for each in zip(*made, strict=True)) if made else (1, 1)
        return KvFormat.parse(kv).stored(anatomy.made_type, stored / whole)

    def need(self, n_tokens: int) -> int:
        """Returns the bytes that one conversation of `n_tokens` needs, with a forward of one token."""
        return self._parts.need(n_tokens)

    def most_tokens(self) -> int:
        """Returns the length of the longest conversation that fits in the whole budget, MLX's pool included."""
        if self._state.uncached_reason:
            return sys.maxsize  # the size of an unrecognised cache is not known
        free = self._state.ledger.budget_bytes - (self._state.pool.bytes if self._state.ledger.elastic else 0)
        bounds = self._parts.models.bounds
        if bounds and self._parts.need(max(bounds) + 512) <= free:
            return sys.maxsize  # it rotates at the bound, and does not grow any more
        low, high = 0, free // max(1, self._state.store.token_bytes) + 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._parts.need(middle) <= free else (low, middle - 1)
        return low

    def forget(self, tokens: Any, keep: int, *, namespace: Hashable = "") -> None:
        """Drop the nodes of `tokens` from position `keep` on, except those that other conversations share and those
        that a lease or a pin holds."""
        if not isinstance(keep, int) or keep < 0:
            raise ConfigError(f"keep is the number of tokens that stay, at least 0, got {keep!r}")
        self._state.lock.run(self._forgetting(as_tokens(tokens), keep, namespace))

    def _forgetting(self, tokens: Tokens, keep: int, namespace: Hashable) -> Work[None]:
        tree = self._parts.tree(namespace)
        path, matched = tree.match(tokens)
        slabs: dict[Slab, None] = {}
        for node in reversed(path):
            if node.children or not node.idle or node.end > matched or node.end <= keep:
                break
            if node.start < keep:
                tree.split(node, keep)
            self._state.totals["discarded_tokens"] += node.end - node.start
            if node.span is not None:
                node.span.slab.finish_copy()
                slabs[node.span.slab] = None
            self._state.nodes.drop(tree, node)
        for slab in slabs:
            yield from self._state.placement.trimming_slack(slab)

    def shrink(self, n_bytes: int) -> None:
        """Evict until at most `n_bytes` are stored, or nothing more can be evicted. Releases the lock in between."""
        self._state.reclaim(lambda: min(self.stored_bytes - n_bytes, self._state.reclaiming.reclaimable_bytes()))

    def adopt(self, tokens: Any, layers: list[Any]) -> tuple[int, str]:
        """Store the KV of `tokens` from a list of mlx-lm's own caches. Returns how many of the tokens were stored, and
        the reason why not all. Buffers of the right capacity are moved, not copied."""
        found = as_tokens(tokens)
        with self._state.lock:
            anatomies = self._parts.models.anatomies
            kept, reason = adopting.sound_length(layers, anatomies, len(found))
            if kept == 0:
                return 0, reason
            with self._leasing.lease(frozen(found[:kept])) as lease:
                if lease.matched < kept or self._state.model.needs_checkpoints:
                    adopting.fill(lease.hold, layers, kept)
                    lease.commit(found[:kept])
            return kept, reason
