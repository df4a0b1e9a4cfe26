"""Kernels for rotated formats: one rotates keys and values and packs their codes into rows (`formats.turned`), one
rotates queries, or outputs back, and one unpacks rows.

In MLX's operations this is some twenty kernels for a layer, which take longer than a decode step saves by reading fewer
bytes. Only dimensions that are powers of two. Computes what `formats.rotated` and `formats.turbo` do.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx

from onefold.cache.memory import device
from onefold.cache.model.kernels import coding_source as source
from onefold.cache.model.kernels import cuda_header
from onefold.cache.model.kernels.coded_rows import DIMS, WARP, Coding, Turning
from onefold.cache.model.kernels.compiled import kernel


def takes(coding: Coding) -> bool:
    """Whether there is a kernel for it."""
    return coding.dtype in cuda_header.NAMES and coding.key_dim in DIMS and coding.value_dim in DIMS


def encode(
    coding: Coding, k: mx.array, v: mx.array, key_signs: mx.array, value_signs: mx.array, *, across: bool = False
) -> mx.array:
    """Returns the rows of keys and values, which are given as [rows, heads, tokens, dim], in any layout. `across`: of
    one token of each row, as [1, heads, rows, words]."""
    shape = (1, k.shape[1], k.shape[0]) if across else k.shape[:3]
    found = _encoder(coding, device.on_metal(), across)(
        inputs=[k, v, key_signs, value_signs],
        grid=(2 * shape[0] * shape[1] * shape[2] * WARP, 1, 1),
        threadgroup=(WARP, 1, 1),
        output_shapes=[(*shape, coding.row)],
        output_dtypes=[mx.uint32],
    )
    encoded: mx.array = found[0]
    return encoded


def turn(turning: Turning, x: mx.array, signs: mx.array) -> mx.array:
    """Returns the vectors along the last axis of four, in any layout, rotated."""
    found = _turner(turning, device.on_metal())(
        inputs=[x, signs],
        grid=(x.size // turning.dim * WARP, 1, 1),
        threadgroup=(WARP, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[turning.dtype],
    )
    turned: mx.array = found[0]
    return turned


def decode(coding: Coding, rows: mx.array) -> tuple[mx.array, mx.array]:
    """Returns keys and values, rotated, given their rows as [rows, heads, tokens, words], in any layout."""
    shape = rows.shape[:3]
    k, v = _decoder(coding, device.on_metal())(
        inputs=[rows],
        grid=(2 * shape[0] * shape[1] * shape[2] * WARP, 1, 1),
        threadgroup=(WARP, 1, 1),
        output_shapes=[(*shape, coding.key_dim), (*shape, coding.value_dim)],
        output_dtypes=[coding.dtype, coding.dtype],
    )
    return k, v


@functools.cache
def _encoder(coding: Coding, metal: bool, across: bool) -> Any:
    return kernel(source.encoder_source(coding, metal, across), metal=metal)


@functools.cache
def _turner(turning: Turning, metal: bool) -> Any:
    return kernel(source.turner_source(turning, metal), metal=metal)


@functools.cache
def _decoder(coding: Coding, metal: bool) -> Any:
    return kernel(source.decoder_source(coding, metal), metal=metal)
