"""Compares the kernels that rotate and encode with plain operations. Runs in a process of its own (`trial`)."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from onefold.cache.model.formats.packing import unpack
from onefold.cache.model.formats.rotated import Rotated
from onefold.cache.model.formats.turbo import Turbo
from onefold.cache.model.formats.turned import TurnedSides, turned_sides
from onefold.cache.model.kernels import coding
from onefold.cache.model.kernels.coded_rows import Coding, Turning

SHAPES = (1, 1, 1), (1, 8, 1), (3, 2, 1), (8, 4, 1), (1, 3, 7), (2, 5, 130)
"""Rows, heads and tokens."""
MOST_OTHER = 2e-3
"""Values may have another code where they lie at the edge of one, since sums are rounded in another order: so many of
them, and the next code only."""
SCALES = 1e-2
"""How far a scale may be from the one that was computed in 32 bits, as a share of it."""
AS_GOOD = 1.02
"""Of two steps that are about as good for a vector, either may be stored: how much larger its squared error may be."""
TURNED = 3e-2

Encode = Callable[..., mx.array]
Turn = Callable[..., mx.array]
Decode = Callable[..., tuple[mx.array, mx.array]]


def compare(
    how: Coding, encode: Encode = coding.encode, turn: Turn = coding.turn, decode: Decode = coding.decode
) -> str:
    """Returns why the kernels are wrong; empty if they are right. Raises RuntimeError if the device cannot compile or
    run them."""
    mx.random.seed(0)
    codec = turned_sides(how, turns=False)
    sides = codec.keys, codec.values
    shares = how.value_groups if how.value_groups > 1 else 0  # bytes behind the codes
    for i, shape in enumerate(SHAPES):
        given = [_vectors(shape, side.dim, how.dtype, across=i % 2 == 1) for side in sides]
        signs = [side.signs for side in sides]
        rows = encode(how, *given, *signs)
        if rows.shape != (*shape, how.row) or rows.dtype != mx.uint32:
            return f"rows of {rows.shape} for {shape}"
        if mx.any(rows[..., how.key_words + how.value_words : -1].view(mx.uint8)[..., shares:]).item():
            return f"rows of {shape} are not zero where nothing is stored"
        if shape[2] == 1:
            across = encode(how, *given, *signs, across=True)
            if not mx.array_equal(across, rows.transpose(2, 1, 0, 3)):
                return f"rows of {shape} differ, across"
        for side, x, name, parts in zip(sides, given, ("keys", "values"), codec.parts(rows), strict=True):
            reason = _differs(side, x, parts)
            if reason:
                return f"{name} of {shape}: {reason}"
        reason = _unpacks(codec, how, rows, decode)
        if reason:
            return f"rows of {shape}: {reason}"
        for side, x, back in (sides[0], given[0], False), (sides[1], given[1], True):
            wanted = (side.turn_back if back else side.turn)(x.astype(mx.float32))
            turned = turn(Turning(side.dim, how.dtype, back), x, side.signs)
            difference = mx.abs(turned.astype(mx.float32) - wanted).max() / mx.abs(wanted).max()
            if not float(difference) <= TURNED:  # also NaN
                return f"vectors of {shape}, turned {'back' if back else 'there'}, differ by {float(difference):.2g}"
    return ""


def _vectors(shape: tuple[int, int, int], dim: int, dtype: mx.Dtype, *, across: bool) -> mx.array:
    """Returns random vectors: one has a channel that is much larger, one is zero. `across`: not in order."""
    rows, heads, tokens = shape
    x = mx.random.normal((rows, tokens, heads, dim) if across else (rows, heads, tokens, dim))
    x[0, 0, 0, 3] = 60.0
    if rows * heads * tokens > 2:
        x[-1, -1, -1] = 0.0
    x = x.astype(dtype)
    return x.transpose(0, 2, 1, 3) if across else x


def _differs(side: Rotated | Turbo, x: mx.array, stored: list[mx.array]) -> str:
    wanted = list(side.encode(x))
    codes, others = (unpack(a[0], side.bits).astype(mx.int32) for a in (stored, wanted))
    size, wanted_size = (mx.abs(side.scales(a, mx.float32)) for a in (stored, wanted))
    groups = (*size.shape, side.dim // size.shape[-1])
    near = mx.abs(size - wanted_size) <= SCALES * wanted_size + 1e-6
    turned = side.turn(x.astype(mx.float32))
    error, least = (
        mx.square(side.decode(a, mx.float32) - turned).reshape(groups).sum(axis=-1) for a in (stored, wanted)
    )
    if not bool((near | (error <= AS_GOOD * least)).all()):
        return f"scales differ by up to {float(mx.abs(size - wanted_size).max()):.2g}"
    apart = mx.abs(codes - others).reshape(groups)
    apart = mx.where((near & (wanted_size > 0))[..., None], apart, 0)  # of zeros, all codes mean the same
    if float(apart.max()) > 1 or float((apart > 0).astype(mx.float32).mean()) > MOST_OTHER:
        return f"{float((apart > 0).astype(mx.float32).mean()):.2%} of the codes differ, by up to {int(apart.max())}"
    return ""


def _unpacks(codec: TurnedSides, how: Coding, rows: mx.array, decode: Decode) -> str:
    """Compares all tokens but the first, so that the array is a slice."""
    if rows.shape[2] > 1:
        rows = rows[:, :, 1:]
    k, v = codec.parts(rows)
    plain = codec.keys.decode(k, mx.float32), codec.values.decode(v, mx.float32)
    for name, decoded, wanted in zip(("keys", "values"), decode(how, rows), plain, strict=True):
        difference = float(mx.abs(decoded.astype(mx.float32) - wanted).max() / mx.maximum(mx.abs(wanted).max(), 1e-6))
        if not difference <= TURNED:  # also NaN
            return f"{name}, decoded, differ by {difference:.2g}"
    return ""
