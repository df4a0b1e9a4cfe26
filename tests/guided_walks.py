"""Answers at random: each token is drawn from those that the guide allows, as a model without any sense would."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onefold.engine.answer import Answer
from onefold.engine.guidance.compiler import Guided
from onefold.engine.guidance.guide import Guide
from onefold.engine.guidance.masks import allowed_bits
from onefold.engine.request import Event, Request, Text, ToolCall


@dataclass
class Walk:
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, Text))

    @property
    def calls(self) -> list[ToolCall]:
        return [e for e in self.events if isinstance(e, ToolCall)]


def allowed(guide: Guide, vocab: int) -> np.ndarray:
    bits = np.unpackbits(allowed_bits([guide], vocab)[0].view(np.uint8), bitorder="little")[:vocab]
    return np.flatnonzero(bits)


def walk(
    tokenizer: Any, request: Request, guided: Guided, seed: int, *, closers: tuple[str, ...] = (), most: int = 600
) -> Walk:
    """`closers`: texts that are written as soon as they are allowed, after some tokens, so that a string ends."""
    draw, found = random.Random(seed), Walk()
    guide, answer = guided.guide, Answer(tokenizer, request, guided.calls)
    vocab, ends = len(tokenizer), set(tokenizer.eos_token_ids)
    queued: list[int] = []
    for _ in range(most):
        may = allowed(guide, vocab)
        guide.check()
        assert len(may), "nothing is allowed"
        if not queued and not guide.forced and draw.random() < 0.3:
            queued = _closing(tokenizer, guide, closers)
        if guide.forced:
            queued = []
        if queued:
            token = queued.pop(0)
        elif ends & set(may.tolist()) and draw.random() < 0.5:
            token = min(ends)
        else:
            token = int(draw.choice(may))
        assert token in may, (token, tokenizer.decode([token]))
        found.tokens.append(token)
        events, ended = answer.read(token)
        found.events += events
        if ended:
            found.ended = True
            break
        guide.read(token, answer.state, 10_000)
    found.events += answer.close(ended=found.ended)
    return found


def _closing(tokenizer: Any, guide: Guide, closers: tuple[str, ...]) -> list[int]:
    for closer in closers:
        tokens = tokenizer.encode(closer, add_special_tokens=False)
        if guide.matcher.validate_tokens(tokens) == len(tokens):
            return list(tokens)
    return []
