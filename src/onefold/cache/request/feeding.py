"""Checks what a forward is fed: the right model, with all its layers, and the tokens with which the lease was opened.

Functions that read a hold, and change nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from onefold.cache.memory.arrays import own_name
from onefold.cache.memory.tokens import NAMED, Tokens, common_length
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.request.hold import Hold
from onefold.errors import LeaseError

Recorded = tuple[mx.array | Tokens, int] | None
"""Tokens of a forward, and the row of them that a lease was fed; None if they are not known."""


def require_model(anatomy: Anatomy, own: weakref.ref[nn.Module] | None, model: Any, n_layers: int) -> None:
    """Raises LeaseError for a forward of another model than `own`, or with too few layers."""
    if n_layers < anatomy.n_layers:
        raise LeaseError(
            f"this model has {anatomy.n_layers} layers with a cache, but was given {n_layers}: pass all of them. "
            "(mlx-lm's speculative_generate_step cuts prompt_cache at len(model.layers), which is wrong for a model "
            "whose layers share their KV.)"
        )
    if own is not None and model is not own():  # its KV would be stored as the other's
        raise LeaseError("the layers of this lease belong to another model: call the model of the cache")


def is_prompt(hold: Hold, start: int, reached: int) -> bool:
    """Whether a forward at `start`, after others up to `reached`, is fed tokens of the prompt."""
    return reached <= start < min(len(hold.tokens), hold.rewound)


def recorded(
    hold: Hold, start: int, reached: int, inputs: mx.array | None, row: int, embedded: bool
) -> tuple[mx.array | Tokens, int] | None:
    """Returns the tokens of a forward that begins at `start`, as they are recorded; None if they are not known. Raises
    LeaseError for other tokens than those with which the lease was opened: their KV would be stored under the wrong
    tokens."""
    if embedded or inputs is None:
        if inputs is not None and (hold.tokens >= NAMED).any():  # ids with which the caller names its embeddings
            return _named(hold.tokens, start, np.array(inputs)[row]), 0
        return None
    end = min(len(hold.tokens), hold.rewound)
    if not is_prompt(hold, start, reached):
        return own_name(inputs), row  # the caller may write into its own array
    fed = np.array(inputs)[row].astype(np.int32)
    same = common_length(fed, hold.tokens[start:end])
    if same < min(len(fed), end - start):
        raise LeaseError(
            f"token {int(fed[same])} was fed at position {start + same} of the layers, where the lease was opened with "
            f"{int(hold.tokens[start + same])}: feed lease.rest, or after a rewind lease.tokens[{start}:]"
        )
    return fed, 0


def _named(leased: Tokens, start: int, inputs: Any) -> Tokens:
    """Returns the tokens of a forward on embeddings, with the caller's id wherever the lease was opened with one."""
    found = inputs.astype(np.int32)
    own = leased[start : start + len(found)]
    found[: len(own)] = np.where(own >= NAMED, own, found[: len(own)])
    return found
