"""The layers that a server puts back: whose they are, and whether their request has ended."""

from __future__ import annotations

import copy
from typing import Any

from onefold.cache.request.lease import Lease
from onefold.mlx_lm.stand_ins import StandIn


def lease_of(layers: list[Any]) -> tuple[Lease | None, bool]:
    """Returns the lease that all of these layers belong to, or None, and whether its request has ended."""
    first: Any = layers[0] if layers else None
    if isinstance(first, StandIn):
        row = first.rows[0]
        whole = len(layers) == len(row.lease.layers)
        same = all(isinstance(x, StandIn) and x.rows == [row] for x in layers)
        return (row.lease, row.seats == 0 and not first.is_copy) if whole and same else (None, False)
    watchers = first.watchers() if is_ours(first) else []
    if not watchers or watchers[0].is_closed:
        return None, False
    lease = watchers[0].lease
    return (lease, True) if lease.hold.handed.are(layers) else (None, False)


def is_ours(layer: Any) -> bool:
    """Whether Onefold made this layer."""
    return isinstance(layer, StandIn) or hasattr(layer, "watchers")


def is_settled(layer: Any) -> bool:
    """Whether a layer belongs to a lease that was put back already."""
    watchers = [] if isinstance(layer, StandIn) else layer.watchers()
    return bool(watchers) and bool(watchers[0].is_closed)


def copied(whole: list[Any], length: int, common: int, tokens: list[int]) -> tuple[list[Any], list[int]]:
    """Returns a trimmed copy of layers that are kept whole, and the tokens that are left, as mlx-lm does. There is no
    KV in such layers."""
    layers = copy.deepcopy(whole)
    if length <= common:
        return layers, tokens[length:]
    at = min(len(tokens) - 1, common)
    for layer in layers:
        layer.trim(length - at)
    return layers, tokens[at:]
