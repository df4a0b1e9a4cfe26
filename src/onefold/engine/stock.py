"""mlx-lm's public functions, as the engine uses them: choosing tokens and reading answers.

The one file of the engine that imports mlx_lm. Its internals are touched in `cache/stock.py` alone.
"""

from __future__ import annotations

from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.sample_utils import make_logits_processors, make_sampler

__all__ = ["TextStateMachine", "make_logits_processors", "make_sampler", "make_text_state_machine"]
