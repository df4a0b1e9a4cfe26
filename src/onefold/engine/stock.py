"""The engine's one seam into mlx-lm: the public functions of it that the engine uses.

What it needs of mlx-lm's internals is in `onefold.cache.stock`. Nothing else in the engine imports `mlx_lm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
import mlx_lm


def load(
    folder_or_id: str,
    *,
    adapter_path: str | None = None,
    revision: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """mlx-lm's own, its own errors included. `trust_remote_code` is for the code of a model and of a tokenizer."""
    settings = {"trust_remote_code": True} if trust_remote_code else {}
    model, tokenizer, *_ = mlx_lm.load(
        folder_or_id,
        tokenizer_config=settings | dict(tokenizer_config or {}),
        adapter_path=adapter_path,
        revision=revision,
        trust_remote_code=trust_remote_code,
    )
    return model, tokenizer
