"""What the engine is asked, and what it answers: tokens in, events out.

    Started ── (Text | Reasoning | ToolCall | Generated)* ── Done
       └────────────── or, at any point ──────────────────── Failed

Knows nothing of MLX, of HTTP, or of any API's shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from onefold.cache.memory.tokens import frozen
from onefold.engine.constraint import Constraint
from onefold.errors import OnefoldError

Place = weakref.ref[Any]
"""A node of the cache's tree, for `PrefixCache.view`."""
Finish = Literal["stop", "length", "tool_calls"]
"""`stop`: the model ended, or a stop string came. `length`: max_tokens was reached, or memory ran out."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen; the defaults are the model's distribution as it is. A temperature of 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int | None = None


@dataclass(frozen=True)
class Prompt:
    """Rendered and tokenised: see `prompt.PromptMaker`."""

    tokens: np.ndarray
    checkpoints: tuple[int, ...] = ()
    """Positions at which a later request is expected to branch off."""
    state: str = "normal"
    """What the answer begins in: the prompt may end inside the model's reasoning."""
    parts: tuple[tuple[int, str], ...] = ()
    """Where each part begins, in characters of the decoded prompt, and what it is: "messages[3] (user)"."""
    pieces: tuple[tuple[int, int], ...] = ()
    """Some places of the prompt, in characters and in tokens."""

    def __post_init__(self) -> None:
        if self.tokens.dtype == np.int32:  # the form that the cache has them in: it walks its tree once for them
            object.__setattr__(self, "tokens", frozen(self.tokens))

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: Prompt
    max_tokens: int | None = None
    """None: until the model ends."""
    stop: tuple[str, ...] = ()
    sampling: Sampling = Sampling()
    top_logprobs: int | None = None
    """How many alternatives to report for each token; None: no logprobs at all."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """As OpenAI writes them; parsers of tool calls take types from their schemas."""
    plain: bool = False
    """Text as it comes: no reasoning and no tool calls are looked for."""
    constraint: Constraint | None = None
    """What the answer must keep to."""
    namespace: Hashable = ""


@dataclass(frozen=True)
class Hit:
    """How much of a prompt was matched and reused."""

    prompt_tokens: int
    matched: int
    cached: int
    reason: str = ""
    """Why fewer were cached than matched, or fewer matched than might have been; empty for a whole hit."""
    diverged: str = ""
    """Where the prompt left what was known, and how: "token 812, in messages[0] (system): known '...', now '...'".
    Empty if the prompt only continues it."""
    restored: int = 0
    """How many of the cached tokens were read from disk."""
    remote: int = 0
    """How many of them came from a store that machines share."""


@dataclass(frozen=True)
class Logprob:
    token: int
    text: str
    logprob: float
    top: tuple[tuple[int, str, float], ...] = ()
    """Token, its text, its log probability; most likely first."""


@dataclass(frozen=True)
class Started:
    """Admitted: memory is reserved and prefill begins. Nothing was sent to the client before this."""

    hit: Hit
    place: Place | None = field(default=None, compare=False, repr=False)
    """Where its path in the tree ends; None if it has none."""


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that are computed so far, while others are left."""

    done: int
    total: int


@dataclass(frozen=True)
class Generated:
    """Tokens of the answer so far, also of an answer that never ends."""

    tokens: int


@dataclass(frozen=True)
class Text:
    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class Reasoning:
    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A whole call; `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Done:
    finish: Finish
    completion_tokens: int
    hit: Hit
    stop_sequence: str | None = None
    """The stop string that ended it."""
    reasoning_tokens: int = 0
    place: Place | None = field(default=None, compare=False, repr=False)
    """Where what is kept of it ends in the tree; None if nothing is."""


@dataclass(frozen=True)
class Failed:
    error: OnefoldError


Event = Started | Progress | Generated | Text | Reasoning | ToolCall | Done | Failed
