"""Forbids tokens in the logits of a step: a mask for each row that has a guide, computed in parallel.

The masks are bits on the host. On the device they become 0 and minus infinity by looking up each byte in a table, which
is an ordinary operation of MLX on every backend.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

from onefold.cache.memory import device
from onefold.engine.guidance.guide import Guide, allow, only

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


def masked(logits: mx.array, guides: Sequence[Guide | None]) -> mx.array:
    """Returns the logits [rows, vocabulary] with minus infinity for each token that its row's guide forbids. A guide
    whose grammar fails here allows nothing more; its `check` raises then."""
    vocab = logits.shape[-1]
    bits = mx.array(_bits(guides, vocab).view(np.uint8))
    added = _table(logits.dtype)[bits].reshape(len(guides), -1)
    if added.shape[1] < vocab:
        raise ValueError(f"the model has logits for {vocab} tokens, and its tokenizer has {added.shape[1]}")
    return logits + added[:, :vocab]


def _bits(guides: Sequence[Guide | None], vocab: int) -> np.ndarray:
    """One row of bits for each guide: 1 is a token that may come."""
    size = max([vocab, *(guide.vocab for guide in guides if guide is not None)])
    bits = allocate_token_bitmask(len(guides), size)
    asked: list[tuple[Any, int]] = []
    for i, guide in enumerate(guides):
        if guide is None or guide.rests:
            continue
        if guide.forced:
            bits[i] = only(guide.forced[0], bits.shape[1])
        else:
            asked.append((guide.matcher, i))
    if len(asked) == 1:
        fill_next_token_bitmask(asked[0][0], bits, asked[0][1])
    elif asked:
        fill_next_token_bitmask_par(_threads(), asked, bits)
    for i, guide in enumerate(guides):
        if guide is not None and not guide.forced and guide.may_think is not None:
            allow(bits[i], guide.may_think)
    return bits


@functools.cache
def _threads() -> Any:
    return LLExecutor()


@functools.cache
def _table(dtype: mx.Dtype) -> mx.array:
    table = mx.where(mx.array(BITS) == 1, mx.array(0.0, dtype), mx.array(-float("inf"), dtype))
    device.evaluate(table)
    return table
