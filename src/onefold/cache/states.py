"""What a checkpoint of a model is made of: every leaf's state, told in values that JSON has (see `tiers.layout`).

A window's and a chunk's arrays follow from their shapes and their size. What a recurrent layer, or a cache class of the
model's own, keeps is known from having seen it: each array as it was after the forwards of the survey. An axis that was
seen with several lengths may have any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx

from onefold.cache.memory.segment import ArraySpec
from onefold.cache.model.anatomy import Anatomy, Leaf
from onefold.cache.model.stock import SLICEABLE, Kind
from onefold.cache.tiers.records.layout import ENTRIES


def points_of(anatomies: Iterable[Anatomy]) -> list[dict[str, Any]]:
    """One entry for each leaf that has state, in the order of a checkpoint's snapshots."""
    return [_told(leaf, anatomy) for anatomy in anatomies for leaf in anatomy.leaves if leaf.used]


def _told(leaf: Leaf, anatomy: Anatomy) -> dict[str, Any]:
    if leaf.kind in SLICEABLE:
        told: dict[str, Any] = {"in_ranges": True, "slots": []}
        if anatomy.bound is not None and leaf.spec is not None:
            told |= _window(anatomy.bound.keep, anatomy.bound.max_size, leaf.spec.arrays)
        return told
    told = {"in_ranges": False}
    if leaf.kind is Kind.ROTATING:
        return told | _window(leaf.window[1], leaf.window[0], leaf.plain or ())
    if leaf.kind is Kind.CHUNKED:
        return told | {"chunk": leaf.window[0], "slots": [_entries(a) for a in leaf.plain or ()]}
    slots = {name: _forms(forms) for name, forms in leaf.seen.items()}
    return told | {"slots": slots if leaf.kind is Kind.OWN else list(slots.values())}


def _window(keep: int, size: int, arrays: Iterable[ArraySpec]) -> dict[str, Any]:
    return {"window": [keep, size], "slots": [_entries(a) for a in arrays]}


def _entries(a: ArraySpec) -> list[Any]:
    return [[_name(a.dtype), [1, a.heads, ENTRIES, a.dim]]]


def _forms(seen: Iterable[tuple[mx.Dtype, tuple[int, ...]] | None]) -> list[Any]:
    """By type and number of axes; null if it may be absent."""
    found: dict[tuple[str, int], list[Any]] = {}
    absent = False
    for one in seen:
        if one is None:
            absent = True
            continue
        dtype, shape = one
        known = found.setdefault((_name(dtype), len(shape)), list(shape))
        known[:] = [a if a == b else None for a, b in zip(known, shape, strict=True)]
    forms: list[Any] = [[dtype, shape] for (dtype, _), shape in found.items()]
    return [*forms, None] if absent else forms


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
