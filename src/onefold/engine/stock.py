"""The engine's one seam into mlx-lm: the public functions of it that load models, choose tokens and read answers.

What is needed of mlx-lm's internals is in `cache/model/stock.py`. Nothing else in the engine imports `mlx_lm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import (
    GenerationResponse,
    TextStateMachine,
    generation_stream,
    make_text_state_machine,
    stream_generate,
    wired_limit,
)
from mlx_lm.models import llama
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, categorical_sampling, make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import maybe_set_recommended_wired_limit

__all__ = [
    "GenerationResponse",
    "TextStateMachine",
    "TokenizerWrapper",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "categorical_sampling",
    "generation_stream",
    "load",
    "make_logits_processors",
    "make_text_state_machine",
    "maybe_set_recommended_wired_limit",
    "random_llama",
    "stream_generate",
    "wired_limit",
]


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


def random_llama(config: Mapping[str, Any]) -> nn.Module:
    """A llama of this configuration, with random weights of 32 bits. Raises TypeError if a field is missing."""
    return llama.Model(llama.ModelArgs.from_dict({"model_type": "llama", **config}))
