"""The sampling settings that a model's authors recommend in generation_config.json.

A file that is not there, or says nothing that makes sense, is no recommendation: then it is the model's distribution as
it is. Knows nothing of MLX.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from onefold.engine.request import Sampling

log = logging.getLogger("onefold.engine")

BOUNDS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.001, 1.0),
    "top_k": (0, 1 << 20),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
}


def recommended(tokenizer: Any) -> Sampling:
    """Returns the recommended settings from the folder of the tokenizer."""
    folder = getattr(tokenizer, "name_or_path", None)
    path = Path(str(folder or "")) / "generation_config.json"
    try:
        found = json.loads(path.read_text()) if folder and path.is_file() else {}
    except (OSError, ValueError) as error:
        log.warning("generation_config.json cannot be read: %s", error)
        return Sampling()
    said: dict[str, Any] = {name: found.get(name) for name in BOUNDS} if isinstance(found, dict) else {}
    return Sampling(**{name: value for name, value in said.items() if _sensible(name, value)})


def _sensible(name: str, value: Any) -> bool:
    low, high = BOUNDS[name]
    kind = int if name == "top_k" else (int, float)
    good = isinstance(value, kind) and not isinstance(value, bool) and low <= value <= high
    if value is not None and not good:
        log.warning("generation_config.json recommends a %s of %r, which is out of range and ignored", name, value)
    return good
