"""Forbids tokens in the logits of a step: a mask for each row that has a guide, computed in parallel.

The masks are bits on the host. On the device they become 0 and minus infinity by looking up each byte in a table, which
is an ordinary operation of MLX on every backend.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask, fill_next_token_bitmask_par

from onefold.cache.memory import device
from onefold.engine.guidance.guide import Guide
from onefold.engine.guidance.limits import SLOW_SECONDS

BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")


def mask(guides: Sequence[Guide | None], vocab: int, dtype: mx.Dtype) -> mx.array:
    """Returns [rows, vocabulary] with minus infinity for each token that its row's guide forbids, else 0: what is added
    to logits. A guide whose grammar fails here allows nothing more; its `check` raises then."""
    bits = mx.array(allowed_bits(guides, vocab).view(np.uint8))
    added = _table(dtype)[bits].reshape(len(guides), -1)
    if added.shape[1] < vocab:
        raise ValueError(f"the model has logits for {vocab} tokens, and its tokenizer has {added.shape[1]}")
    return added[:, :vocab]


def allowed_bits(guides: Sequence[Guide | None], vocab: int) -> np.ndarray:
    """One row of bits for each guide: 1 is a token that may come."""
    size = max([vocab, *(guide.vocab for guide in guides if guide is not None)])
    bits = allocate_token_bitmask(len(guides), size)
    asked: list[tuple[Guide, int]] = []
    for i, guide in enumerate(guides):
        if guide is None or guide.free:
            continue
        if guide.rests:
            _forbid(bits[i], guide.forbidden)
        elif guide.forced:
            bits[i] = _only(guide.forced[0], bits.shape[1])
        else:
            asked.append((guide, i))
    _fill(asked, bits)
    for i, guide in enumerate(guides):
        if guide is not None and not guide.forced and guide.may_think is not None:
            _allow(bits[i], guide.may_think)
    return bits


def _fill(asked: Sequence[tuple[Guide, int]], bits: np.ndarray) -> None:
    """Computes masks, all of them in parallel. If that takes long, the next ones are computed one by one, to see whose
    they are; a guide that takes long several times fails at its next `check`."""
    suspects = [(guide, i) for guide, i in asked if guide.suspect or len(asked) == 1]
    for guide, i in suspects:
        begun = time.thread_time()
        fill_next_token_bitmask(guide.matcher, bits, i)
        guide.note_time(time.thread_time() - begun)
    others = [(guide, i) for guide, i in asked if (guide, i) not in suspects]
    if others:
        begun = time.perf_counter()
        fill_next_token_bitmask_par(_threads(), [(guide.matcher, i) for guide, i in others], bits)
        if time.perf_counter() - begun > SLOW_SECONDS:
            for guide, _ in others:
                guide.suspect = True


def _only(token: int, words: int) -> np.ndarray:
    """A mask that allows one token."""
    mask = np.zeros(words, np.int32)
    _allow(mask, token)
    return mask


def _allow(mask: np.ndarray, token: int) -> None:
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))


def _forbid(mask: np.ndarray, tokens: Iterable[int]) -> None:
    for token in tokens:
        mask.view(np.uint32)[token // 32] &= ~np.uint32(1 << (token % 32))


@functools.cache
def _threads() -> Any:
    return LLExecutor()


@functools.cache
def _table(dtype: mx.Dtype) -> mx.array:
    table = mx.where(mx.array(BITS) == 1, mx.array(0.0, dtype), mx.array(-float("inf"), dtype))
    device.evaluate(table)
    return table
