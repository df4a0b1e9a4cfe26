"""mlx-lm's `BatchGenerator`, driven the way its server drives it, on token ids and without HTTP.

Any tiny model can be served so, whether it has a tokenizer or not.
"""

from __future__ import annotations

from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator

KEY = ("model", None, None)
TAIL = 5
"""Tokens of a prompt that make a segment of their own, as a template's generation prompt does."""


class Loop:
    def __init__(self, model: nn.Module, cache: Any, *, step: int = 64) -> None:
        self.cache = cache
        self.batches = BatchGenerator(model, prefill_step_size=step)
        self.answers: dict[int, list[int]] = {}
        self._pending: dict[int, list[str]] = {}

    def ask(self, prompt: list[int], max_tokens: int) -> tuple[int, int]:
        """Add a request; its number, and how much of its prompt was cached."""
        layers, rest = self.cache.fetch_nearest_cache(KEY, prompt)
        known, end = len(prompt) - len(rest), len(prompt) - TAIL
        segments = [prompt[known:end], prompt[max(known, end) :]]
        (uid,) = self.batches.insert_segments(
            segments=[[s for s in segments if s]], max_tokens=[max_tokens], caches=[layers], all_tokens=[prompt[:known]]
        )
        self.answers[uid], self._pending[uid] = [], ["user"]
        return uid, known

    def step(self) -> None:
        """One round: a token for every row that decodes, a chunk for every one that does not yet."""
        prompts, generated = self.batches.next()
        ended = [r.uid for r in prompts if r.end_of_segment and not r.end_of_prompt and self._pending[r.uid]]
        for uid, (layers, tokens) in self.batches.extract_cache(ended).items():
            self.cache.insert_cache(KEY, tokens[:], layers, cache_type=self._pending[uid].pop())
        for r in generated:
            self.answers[r.uid].append(r.token)
            if r.finish_reason is not None:
                del self._pending[r.uid]
                self.cache.insert_cache(KEY, r.all_tokens[:], r.prompt_cache)

    def cancel(self, uid: int) -> None:
        self.batches.remove([uid])
        del self._pending[uid]

    def run(self) -> None:
        while self._pending:
            self.step()

    def serve(self, prompts: list[list[int]], max_tokens: int = 6) -> tuple[list[list[int]], list[int]]:
        """Answers to prompts that come together, and what was cached of each."""
        asked = [self.ask(prompt, max_tokens) for prompt in prompts]
        self.run()
        return [self.answers[uid] for uid, _ in asked], [known for _, known in asked]
