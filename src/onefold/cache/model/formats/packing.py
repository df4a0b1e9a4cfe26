"""Codes of a few bits each, packed into words of 32 bits as MLX does: a stream, the first code in the lowest bits.

Eight codes of b bits are b bytes. Each byte, and each code, is computed for all groups of eight at once, so nothing
larger than the result is made on the way.
"""

from __future__ import annotations

import functools
import operator

import mlx.core as mx

WORD = 32
_BYTE = 8
FEW = 1 << 14
"""Codes of a decode step, not of a prompt: the time goes into operations, not into what they compute."""


def words_of(dim: int, bits: int) -> int:
    """Returns how many words `dim` codes take; `dim` is a multiple of 32."""
    return dim * bits // WORD


def pack(codes: mx.array, bits: int) -> mx.array:
    """Returns the words of codes (below 2 ** bits, of at most 8) along the last axis."""
    *shape, dim = codes.shape
    if bits == _BYTE:
        return codes.astype(mx.uint8).view(mx.uint32)
    if codes.size <= FEW:
        return _packed_bit_by_bit(codes.astype(mx.uint8), bits)
    groups = codes.astype(mx.uint16).reshape(*shape, dim // _BYTE, _BYTE)
    each = [groups[..., i] for i in range(_BYTE)]
    made = []
    for byte in range(bits):
        first, last = byte * _BYTE // bits, ((byte + 1) * _BYTE - 1) // bits
        parts = [_shifted(each[i], i * bits - byte * _BYTE) for i in range(first, last + 1)]
        made.append(functools.reduce(operator.or_, parts).astype(mx.uint8))
    return mx.stack(made, axis=-1).reshape(*shape, dim * bits // _BYTE).view(mx.uint32)


def _packed_bit_by_bit(codes: mx.array, bits: int) -> mx.array:
    """Returns the words of a few codes, with a third of the operations, and eight times the memory on the way."""
    *shape, dim = codes.shape
    stream = ((codes[..., None] >> mx.arange(bits, dtype=mx.uint8)) & 1).reshape(*shape, dim * bits // _BYTE, _BYTE)
    made = (stream << mx.arange(_BYTE, dtype=mx.uint8)).sum(axis=-1)
    return made.astype(mx.uint8).view(mx.uint32)


def unpack(words: mx.array, bits: int) -> mx.array:
    """Returns the codes (uint8) of words along the last axis."""
    *shape, n = words.shape
    stream = words.view(mx.uint8)
    if bits == _BYTE:
        return stream
    groups = stream.reshape(*shape, n * 4 // bits, bits)
    each = [groups[..., i] for i in range(bits)]
    made = []
    for code in range(_BYTE):
        byte, at = divmod(code * bits, _BYTE)
        found = each[byte] >> at if at else each[byte]
        if at + bits > _BYTE:  # the rest is in the next byte
            found = found | (each[byte + 1] << (_BYTE - at))
        made.append(found & ((1 << bits) - 1))
    return mx.stack(made, axis=-1).reshape(*shape, n * WORD // bits)


def _shifted(x: mx.array, up: int) -> mx.array:
    """Returns `x` shifted up by so many bits, or down if they are negative."""
    if up == 0:
        return x
    return x << up if up > 0 else x >> -up
