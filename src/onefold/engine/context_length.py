"""How many positions a model was made for, by its config.json.

The number of the config, times what its rotary embeddings are stretched by, as mlx-lm applies that. A model that names
none (a recurrent one, say) has no such length. Knows nothing of MLX, and of no model by name.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("onefold.engine")

NAMES = (
    "model_max_length",  # where it is given it is the longer one, and meant
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "n_ctx",
)
INNER = ("text_config", "llm_config", "language_config")
"""Where models that take more than text have what is about text."""
STRETCHED = ("linear", "dynamic", "ntk")
"""Kinds of scaling with which a config keeps the length that the model had before. With llama3, longrope and su it is
the new length already."""
MOST = 1 << 40
"""Larger numbers are placeholders."""


def context_length(model: Any, tokenizer: Any) -> int | None:
    """Returns the length from the folder of the tokenizer, or else from the model's arguments; None if unknown."""
    config = _file(tokenizer)
    for name in ("args", "config"):
        config = config or _plain(getattr(model, name, None))
    return length_of(config)


def length_of(config: Mapping[str, Any]) -> int | None:
    """Returns the length that a config.json names, or None."""
    inner = [found for name in INNER if (found := _plain(config.get(name)))]
    for part in (*inner, config):
        said = next((n for name in NAMES if (n := _number(part.get(name)))), None)
        if said is not None:
            return _stretched(said, part)
    return None


def _stretched(length: int, config: Mapping[str, Any]) -> int:
    scaling = _plain(config.get("rope_scaling")) or _plain(config.get("rope_parameters"))
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor > 1:
        return length
    if isinstance(kind, str) and "yarn" in kind:
        before = _number(scaling.get("original_max_position_embeddings"))
        return max(length, round((before or length) * factor))
    some_layers_only = "rope_local_base_freq" in config
    return round(length * factor) if kind in STRETCHED and not some_layers_only else length


def _number(value: Any) -> int | None:
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < MOST
    return int(value) if usable else None


def _plain(value: Any) -> dict[str, Any]:
    """An object of a config, or a model's arguments, as a dict; empty if it is neither."""
    if isinstance(value, Mapping):
        return dict(value)
    return dict(vars(value)) if hasattr(value, "__dict__") else {}


def _file(tokenizer: Any) -> dict[str, Any]:
    folder = getattr(tokenizer, "name_or_path", None)
    path = Path(str(folder or "")) / "config.json"
    try:
        return _plain(json.loads(path.read_text())) if folder and path.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning("config.json cannot be read, so the model's context length is not known: %s", error)
        return {}
