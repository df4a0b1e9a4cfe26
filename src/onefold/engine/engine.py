"""The engine as a server sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onefold.engine.request import Event, Prompt, Request, Sampling


class Engine:
    """Made with `Engine(model, tokenizer, model_id=..., budget=..., ...)`. Its methods may be called from any thread.

    A request is answered through `deliver`, which is called on the engine's thread with the events of one step, in
    order, and must return at once and not raise.
    """

    model_id: str
    defaults: Sampling
    """What the model's generation_config.json recommends."""

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_options: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render a conversation (as OpenAI writes one; content is text) and tokenise it. Blocks for a moment: not for
        an event loop. Raises PromptError."""
        raise NotImplementedError

    def text(self, prompt: str | Sequence[int]) -> Prompt:
        """Tokenise plain text (tokens are taken as they are). Raises PromptError."""
        raise NotImplementedError

    def submit(self, request: Request, deliver: Callable[[list[Event]], None]) -> int:
        """Queue a request; the number names it for `cancel`. Raises Busy, TooLong, PromptError or EngineStopped."""
        raise NotImplementedError

    def cancel(self, number: int) -> None:
        """Free its row at the next step; what was prefilled is kept. Nothing more is delivered. Harmless if it is over."""
        raise NotImplementedError

    def stats(self) -> Any:
        """`EngineStats`: queued, prefilling, decoding, totals, and the cache's own `Stats` as `.cache`."""
        raise NotImplementedError

    def clear(self) -> int:
        """Drop everything that no running request holds; bytes freed."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError
