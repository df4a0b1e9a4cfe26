"""Token ids, as one-dimensional int32 arrays.

No MLX in this file.
"""

from __future__ import annotations

import array
import contextlib
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from onefold.errors import TokenError

Tokens = npt.NDArray[np.int32]

NAMED = 1 << 30
"""Ids from here on are not in any vocabulary: the caller uses them to name other inputs of a model, such as images."""


def unboxed(tokens: Any) -> Any:
    """Returns a list of integers as an array, which is quicker than `np.asarray`; anything else unchanged."""
    if isinstance(tokens, list) and tokens and type(tokens[0]) is int:
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array.array("q", tokens), np.int64)
    return tokens


def as_tokens(tokens: Any) -> Tokens:
    """Returns the tokens as a one-dimensional int32 array, without a copy if they are one. Raises TokenError if they
    are empty, or not integers from 0 to 2147483647."""
    if isinstance(tokens, (str, bytes)):
        raise TokenError("tokens must be integers, got text: encode it first (tokenizer.encode)")
    if isinstance(tokens, (list, tuple)) and tokens and isinstance(tokens[0], Mapping):
        raise TokenError(
            "tokens must be integers, got messages: apply the tokenizer's chat template first "
            "(tokenizer.apply_chat_template)"
        )
    if tokens is None:
        raise TokenError("tokens must be a sequence of integers, got None")
    if isinstance(tokens, Mapping):
        raise TokenError("tokens must be integers, got a mapping: pass the ids in it, such as its input_ids")
    try:
        found = np.asarray(unboxed(tokens))
    except (ValueError, TypeError) as error:
        raise TokenError(f"tokens must be a flat sequence of integers: {error}") from error
    if found.ndim != 1:
        raise TokenError(f"tokens must be one-dimensional, got shape {found.shape}")
    if found.size == 0:
        raise TokenError("tokens are empty: give at least one, such as the beginning-of-text token")
    if found.dtype.kind not in "iu":
        raise TokenError(f"tokens must be integers, got {found.dtype}")
    if found.dtype != np.int32:
        low, high = int(found.min()), int(found.max())
        if low < 0 or high > np.iinfo(np.int32).max:
            raise TokenError(f"token ids must be from 0 to 2147483647, got {low if low < 0 else high}")
        found = found.astype(np.int32)
    elif int(found.min()) < 0:
        raise TokenError(f"token ids must not be negative, got {int(found.min())}")
    return found


_frozen: weakref.WeakValueDictionary[int, Tokens] = weakref.WeakValueDictionary()
"""The arrays that `frozen` has made, by id. A caller's own read-only array may be changed: through a view that was made
before, or after the flag was set back."""


def frozen(tokens: Tokens) -> Tokens:
    """Returns the tokens in an array that nobody changes: the same array if `is_frozen`, else a copy."""
    if is_frozen(tokens):
        return tokens
    copy = tokens.copy()
    copy.flags.writeable = False
    _frozen[id(copy)] = copy
    return copy


def is_frozen(tokens: Tokens) -> bool:
    """Whether `frozen` has made this array."""
    return _frozen.get(id(tokens)) is tokens


def as_tokens_or_none(tokens: Any) -> Tokens:
    """Like `as_tokens`, but accepts an empty sequence."""
    return as_tokens(tokens) if len(tokens) else np.empty(0, np.int32)


def common_length(a: Tokens, b: Tokens) -> int:
    """Returns how many leading tokens of `a` and `b` are equal."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    first = int(differ.argmax()) if n else 0
    return first if n and differ[first] else n
