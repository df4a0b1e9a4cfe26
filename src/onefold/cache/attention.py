"""Attention that reads KV where it lies.

- A layer that reads several pieces returns *handles* instead of arrays; `attention` is what the seam puts
  in mlx-lm's place. It dispatches on the keys it is given: a handle is attended here, anything else goes
  to the stock function, untouched.
- One decode step over pieces: scores against each piece's keys, one softmax over all of them, each slice
  of it times that piece's values, sum. Exact; K and V are read in place.
- A prefill chunk joins one layer's pieces for the length of that layer and takes the stock fused kernel.
- Rows of a batch are ragged. A piece that several rows share is read once, with the rows folded into
  the query dimension; short private tails are stacked, so that the number of operations does not grow
  with the rows.

Knows nothing of trees, leases or budgets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from onefold.cache import stock

PieceView = tuple[list[mx.array], int, int]
"""The arrays of one layer in one slab, and the range of indices to read."""

STACK_TOKENS = 512
"""Private pieces up to this long are stacked into one product for all rows."""


class Codec(Protocol):
    """How a layer's keys and values are kept in its arrays, and read without unpacking them."""

    plain: bool

    def scores(self, q: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def mix(self, p: mx.array, arrays: list[mx.array], lo: int, hi: int) -> mx.array: ...

    def n_keys(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for the keys, or the values, of some rows in a model's attention code."""

    rows: list[list[PieceView]]
    codec: Codec
    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    consumed: list[int]
    """Counts the attention calls that read it; the probe looks."""

    @property
    def ndim(self) -> int:
        return 4


def attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
    **options: Any,
) -> mx.array:
    """Stands in for mlx-lm's `scaled_dot_product_attention`."""
    if not isinstance(keys, Handle):
        return stock.stock_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks, **options)
    if not isinstance(values, Handle) or options:
        raise TypeError(f"attention over segments got values {type(values).__name__} and options {list(options)}")
    keys.consumed[0] += 1
    rows, codec = keys.rows, keys.codec
    if len(rows) == 1:
        return _attend_row(queries, rows[0], codec, scale, mask, sinks)
    if mask is None and queries.shape[2] == 1:
        return _attend_rows(queries, rows, codec, scale, sinks)
    parts = []
    for i, row in enumerate(rows):
        total = sum(hi - lo for _, lo, hi in row)
        own = mask[i : i + 1, ..., :total] if isinstance(mask, mx.array) and mask.ndim == 4 else mask
        parts.append(_attend_row(queries[i : i + 1], row, codec, scale, own, sinks))
    return mx.concatenate(parts, axis=0)


# -- one row --------------------------------------------------------------------------------


def _attend_row(
    q: mx.array, row: list[PieceView], codec: Codec, scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    n_q, length = q.shape[1], q.shape[2]
    n_kv = row[0][0][0].shape[1]
    if codec.plain:
        widths = sum(a.shape[1] * a.shape[3] * a.dtype.size for a in row[0][0])
        if length * n_q * 8 > widths:
            return _attend_joined(q, row, scale, mask, sinks)
    total = sum(hi - lo for _, lo, hi in row)
    folded = (q * scale).reshape(1, n_kv, n_q // n_kv * length, q.shape[3])
    scores = _cat([codec.scores(folded, arrays, lo, hi) for arrays, lo, hi in row])
    scores = scores.reshape(1, n_kv, n_q // n_kv, length, total)
    scores = _masked(scores, mask)
    probs = _softmax(scores, sinks).reshape(1, n_kv, n_q // n_kv * length, total)
    out, at = None, 0
    for arrays, lo, hi in row:
        part = codec.mix(probs[..., at : at + hi - lo], arrays, lo, hi)
        out = part if out is None else out + part
        at += hi - lo
    assert out is not None
    return out.reshape(1, n_q, length, out.shape[-1]).astype(q.dtype)


def _attend_joined(
    q: mx.array, row: list[PieceView], scale: float, mask: Any, sinks: mx.array | None
) -> mx.array:
    """A prefill chunk: this layer's pieces side by side, for the length of this layer."""
    k = _cat([a[0][..., lo:hi, :] for a, lo, hi in row], axis=2)
    v = _cat([a[1][..., lo:hi, :] for a, lo, hi in row], axis=2)
    out = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if len(row) > 1:
        mx.eval(out)  # or the device runs ahead and holds several layers' copies
    return out


def _masked(scores: mx.array, mask: Any) -> mx.array:
    """`scores` is [rows, kv heads, repeats, queries, keys]."""
    if mask is None:
        return scores
    rows, n_kv, repeats, length, total = scores.shape
    if isinstance(mask, str):
        first = total - length
        mask = mx.arange(first, total)[:, None] >= mx.arange(total)[None]
    if mask.ndim == 4:
        heads = mask.shape[1]
        shape = (n_kv, repeats) if heads > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *shape, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    return scores + mask


def _softmax(scores: mx.array, sinks: mx.array | None) -> mx.array:
    """Over the last axis; a sink takes its share of the sum and has no value."""
    if sinks is None:
        return mx.softmax(scores, axis=-1, precise=True)
    rows, n_kv, repeats, length, total = scores.shape
    column = sinks.astype(scores.dtype).reshape(1, n_kv, repeats, 1, 1)
    column = mx.broadcast_to(column, (rows, n_kv, repeats, length, 1))
    both = mx.concatenate([scores, column], axis=-1)
    return mx.softmax(both, axis=-1, precise=True)[..., :total]


def _cat(parts: list[mx.array], axis: int = -1) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


# -- a ragged batch, one query each ------------------------------------------------------------


@dataclass(slots=True)
class _Plan:
    """Which pieces are read for all rows at once, and what is each row's own."""

    shared: list[tuple[PieceView, list[int]]]
    own: list[list[PieceView]]


def _plan(rows: list[list[PieceView]]) -> _Plan:
    readers: dict[tuple[int, int, int], tuple[PieceView, list[int]]] = {}
    for i, row in enumerate(rows):
        for view in row:
            readers.setdefault((id(view[0]), view[1], view[2]), (view, []))[1].append(i)
    shared = {key: found for key, found in readers.items() if len(found[1]) > 1}
    own = [[v for v in row if (id(v[0]), v[1], v[2]) not in shared] for row in rows]
    return _Plan(list(shared.values()), own)


def _attend_rows(
    q: mx.array, rows: list[list[PieceView]], codec: Codec, scale: float, sinks: mx.array | None
) -> mx.array:
    n_rows, n_q = q.shape[0], q.shape[1]
    n_kv = rows[0][0][0][0].shape[1]
    repeats, dim = n_q // n_kv, q.shape[3]
    plan = _plan(rows)
    grouped = (q * scale).reshape(n_rows, n_kv, repeats, dim)
    low = mx.finfo(q.dtype).min

    blocks: list[mx.array] = []  # each [rows, kv heads, repeats, width]
    readers: list[tuple[Any, ...]] = []
    for view, who in plan.shared:
        picked = grouped if len(who) == n_rows else grouped[mx.array(who)]
        folded = picked.transpose(1, 0, 2, 3).reshape(1, n_kv, len(who) * repeats, dim)
        s = codec.scores(folded, *view).reshape(n_kv, len(who), repeats, -1).transpose(1, 0, 2, 3)
        if len(who) < n_rows:
            slot = [who.index(i) if i in who else 0 for i in range(n_rows)]
            member = mx.array([i in who for i in range(n_rows)])[:, None, None, None]
            s = mx.where(member, s[mx.array(slot)], mx.array(low, s.dtype))
        blocks.append(s)
        readers.append(("shared", view, who))
    stacked, single = _split_own(plan.own)
    if stacked is not None:
        arrays, width, used = stacked
        s = codec.scores(grouped, arrays, 0, width)
        seen = mx.arange(width)[None] < mx.array(used)[:, None]
        blocks.append(mx.where(seen[:, None, None, :], s, mx.array(low, s.dtype)))
        readers.append(("stacked", arrays, width))
    for i, view in single:
        s = codec.scores(grouped[i : i + 1], *view)
        above = mx.full((i, n_kv, repeats, s.shape[-1]), low, s.dtype)
        below = mx.full((n_rows - i - 1, n_kv, repeats, s.shape[-1]), low, s.dtype)
        blocks.append(mx.concatenate([above, s, below], axis=0))
        readers.append(("single", view, i))

    scores = _cat(blocks)[:, :, :, None, :]
    probs = _softmax(scores, sinks)[:, :, :, 0, :]
    out, at = None, 0
    for block, (how, *what) in zip(blocks, readers, strict=True):
        p = probs[..., at : at + block.shape[-1]]
        at += block.shape[-1]
        if how == "shared":
            folded = p.transpose(1, 0, 2, 3).reshape(1, n_kv, n_rows * repeats, -1)
            part = codec.mix(folded, *what[0]).reshape(n_kv, n_rows, repeats, -1).transpose(1, 0, 2, 3)
        elif how == "stacked":
            part = codec.mix(p, what[0], 0, what[1])
        else:
            i = what[1]
            one = codec.mix(p[i : i + 1], *what[0])
            part = mx.pad(one, [(i, n_rows - i - 1), (0, 0), (0, 0), (0, 0)])
        out = part if out is None else out + part
    assert out is not None
    return out.reshape(n_rows, n_q, 1, out.shape[-1]).astype(q.dtype)


def _split_own(
    own: list[list[PieceView]],
) -> tuple[tuple[list[mx.array], int, list[int]] | None, list[tuple[int, PieceView]]]:
    """Each row's last short piece goes into one stack `[rows, heads, width, dim]`; the rest stay single."""
    tails: list[PieceView | None] = []
    single: list[tuple[int, PieceView]] = []
    for i, views in enumerate(own):
        tail = views[-1] if views and views[-1][2] - views[-1][1] <= STACK_TOKENS else None
        tails.append(tail)
        single.extend((i, v) for v in (views[:-1] if tail is not None else views))
    found = [t for t in tails if t is not None]
    if len(found) < 2:
        single.extend((i, t) for i, t in enumerate(tails) if t is not None)
        return None, single
    width = max(hi - lo for _, lo, hi in found)
    width = min((a[0].shape[2] - lo for a, lo, _ in found if a[0].shape[2] - lo >= width), default=width)
    stack = []
    for j, like in enumerate(found[0][0]):
        parts = []
        for tail in tails:
            if tail is None:
                parts.append(mx.zeros((1, like.shape[1], width, like.shape[3]), like.dtype))
                continue
            arrays, lo, _ = tail
            part = arrays[j] if lo == 0 and arrays[j].shape[2] == width else arrays[j][..., lo : lo + width, :]
            if part.shape[2] < width:
                part = mx.pad(part, [(0, 0), (0, 0), (0, width - part.shape[2]), (0, 0)])
            parts.append(part)
        stack.append(mx.concatenate(parts, axis=0))
    used = [0 if t is None else t[2] - t[1] for t in tails]
    return (stack, width, used), single
