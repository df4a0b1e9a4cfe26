"""Traffic as agents make it, with the answers that a cold run gives: new conversations on a few system prompts, turns
that go on, turns that branch off an earlier one, exact repeats, and clients that go away in mid-answer.

The plan is made before anything is served: answers come from mlx-lm's own caches, one request at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onefold.cache.memory.tree import Tree

Message = dict[str, str]
WORDS = ["one", "two", "three", "stone", "river", "fox", "letter", "small", "green", "answer", "tool", "file", "error"]


@dataclass(frozen=True)
class Ask:
    messages: tuple[Message, ...]
    max_tokens: int
    expected: str
    """What a cold run answers."""
    cancel_after: int | None = None
    """Pieces of text after which the client goes away."""


@dataclass(frozen=True)
class Shape:
    system_words: tuple[int, int] = (40, 160)
    user_words: tuple[int, int] = (4, 70)
    answer_tokens: tuple[int, int] = (1, 60)
    systems: int = 3
    cancels: float = 0.12


Cold = Callable[[list[Message], int], str]


USUAL = Shape()


def plan(cold: Cold, n: int, *, seed: int = 0, shape: Shape = USUAL) -> list[Ask]:
    rng = random.Random(seed)

    def words(between: tuple[int, int]) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(*between)))

    systems = [{"role": "system", "content": words(shape.system_words)} for _ in range(shape.systems)]
    asks: list[Ask] = []
    while len(asks) < n:
        user = {"role": "user", "content": words(shape.user_words)}
        what = rng.random()
        before = rng.choice(asks) if asks else None
        if before is None or what < 0.3:
            messages = [rng.choice(systems), user]
        elif what < 0.65:
            messages = [*before.messages, {"role": "assistant", "content": before.expected}, user]
        elif what < 0.85:
            at = rng.randrange(1, len(before.messages), 2)
            messages = [*before.messages[:at], user]
        else:
            messages = list(before.messages)
        most = rng.randint(*shape.answer_tokens)
        cancel_after = rng.randint(1, 8) if rng.random() < shape.cancels else None
        asks.append(Ask(tuple(messages), most, cold(messages, most), cancel_after))
    return asks


def unique_tokens(conversations: list[np.ndarray]) -> int:
    """How many tokens a tree of all of them holds."""
    tree = Tree()
    for tokens in conversations:
        node, matched = tree.reach(tokens)
        if matched < len(tokens):
            tree.add(node, tokens[matched:])
    return sum(len(n.tokens) for n in tree.root.walk())


def longest(conversations: list[Any]) -> int:
    return max(len(c) for c in conversations)
