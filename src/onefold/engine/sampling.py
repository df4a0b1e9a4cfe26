"""Choosing tokens: one for each row of a step, all of them without waiting for the device.

- Filters and penalties are mlx-lm's own.
- A seed gives the same tokens alone and in a batch, and after a pause: its draw depends on the seed and on how many
  tokens were generated before, and on nothing else.
- Rows without a seed that are sampled alike are drawn together.
- Presence and frequency penalties look at what was generated, the repetition penalty at the prompt too.
"""

from __future__ import annotations

import functools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.memory import device
from onefold.engine import stock
from onefold.engine.guidance.guide import Guide
from onefold.engine.guidance.masks import mask
from onefold.engine.request import Sampling
from onefold.errors import PromptError

LEAST = 1e-5
"""Below this a temperature is greedy and top_p the likeliest token; 32 bits would make either of them noise."""
_ALL = 1 << 30
"""A context size that takes in everything that was generated."""


@dataclass
class Row:
    """How the tokens of one request are chosen."""

    sampling: Sampling
    vocab: int
    top_logprobs: int | None = None
    _over_all: list[Any] = field(init=False)
    _over_generated: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        s = self.sampling
        _check(s)
        self.greedy = s.temperature < LEAST
        penalty = None if s.repetition_penalty == 1 else s.repetition_penalty
        context = max(1, s.repetition_context)
        self._over_all = stock.make_logits_processors(dict(s.logit_bias) or None, penalty, context)
        self._over_generated = stock.make_logits_processors(
            presence_penalty=s.presence_penalty,
            presence_context_size=_ALL,
            frequency_penalty=s.frequency_penalty,
            frequency_context_size=_ALL,
        )
        self.processed = bool(self._over_all or self._over_generated)
        # mlx-lm refuses a top_k that filters nothing
        top_k = s.top_k if 0 < s.top_k < self.vocab else 0
        self.alike: Hashable = (s.temperature, s.top_p, s.min_p, top_k)
        self._filters = _filters(s, top_k)

    def process(self, logits: mx.array, tokens: Sequence[int], prompt_tokens: int, newest: mx.array | None) -> mx.array:
        """`newest` is a token that is chosen, but perhaps not computed yet."""
        tail = [] if newest is None else [newest.reshape(-1).astype(mx.int32)]

        def seen(known: Sequence[int]) -> mx.array:
            return mx.concatenate([mx.array(list(known), mx.int32), *tail])

        for processor in self._over_all:
            logits = processor(seen(tokens[-self.sampling.repetition_context :]), logits)
        for processor in self._over_generated:
            logits = processor(seen(tokens[prompt_tokens:]), logits)
        return logits

    def draw(self, scores: mx.array) -> mx.array:
        """Returns one token for each row of log probabilities. Its probability is not zero, unless all are.

        MLX draws from one row by a search in its cumulative sum. A GPU adds that up in parts, so it need not be
        ascending, and on CUDA a draw rarely returns a token whose probability is zero. The likeliest token replaces
        it."""
        if self.greedy:
            return mx.argmax(scores, axis=-1)
        for apply in self._filters:
            scores = apply(scores)
        drawn = stock.categorical_sampling(scores, self.sampling.temperature)
        found = mx.take_along_axis(scores, drawn[:, None], axis=-1)[:, 0]
        return mx.where(found == -math.inf, mx.argmax(scores, axis=-1).astype(drawn.dtype), drawn)


def _filters(s: Sampling, top_k: int) -> list[Callable[[mx.array], mx.array]]:
    """Returns mlx-lm's filters, in its order."""
    found: list[Callable[[mx.array], mx.array]] = []
    if s.top_p < 1:
        found.append(functools.partial(stock.apply_top_p, top_p=max(s.top_p, LEAST)))
    if s.min_p:
        found.append(functools.partial(stock.apply_min_p, min_p=s.min_p))
    if top_k:
        found.append(functools.partial(stock.apply_top_k, top_k=top_k))
    return found


def _check(s: Sampling) -> None:
    """Checks the settings at once: mlx-lm checks some of them only when it draws. Raises PromptError."""
    for name, low, high in (
        ("temperature", 0.0, math.inf),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("top_k", 0, math.inf),
        ("repetition_penalty", 0.0, math.inf),
        ("repetition_context", 0, math.inf),
        ("presence_penalty", -math.inf, math.inf),
        ("frequency_penalty", -math.inf, math.inf),
    ):
        value = getattr(s, name)
        if not (low <= value <= high and math.isfinite(value)) or (name == "repetition_penalty" and value == 0):
            raise PromptError(f"{name} must be from {low:g} to {high:g}, got {value}", where=name)
    if not all(math.isfinite(v) for v in s.logit_bias.values()):
        raise PromptError("a logit_bias must be finite", where="logit_bias")


@dataclass(frozen=True)
class Turn:
    """One row at one step."""

    row: Row
    tokens: Sequence[int]
    prompt_tokens: int
    generated: int
    """Tokens that were chosen for this request before."""
    newest: mx.array | None
    """The one among them that is not in `tokens` yet; with a guide there is none."""
    guide: Guide | None = None
    """Which tokens may be chosen; it has read all of `tokens`."""


@dataclass
class Chosen:
    """The tokens of one step, by row; not computed yet when it is made."""

    tokens: mx.array
    logprobs: dict[int, tuple[mx.array, mx.array | None, mx.array | None]]
    """For rows that asked: the chosen token's, and the most likely tokens with theirs."""
    _read: list[int] | None = None

    def start(self) -> None:
        """Starts the computation on the device. Does not wait for it."""
        extra = [a for given in self.logprobs.values() for a in given if a is not None]
        mx.async_eval(self.tokens, *extra)

    def wait(self) -> None:
        """Returns when the device has computed it."""
        device.evaluate(self.tokens)

    def read(self, seat: int) -> int:
        found = self._read
        if found is None:
            found = self._read = np.array(self.tokens).tolist()
        return found[seat]

    def logprob(self, seat: int) -> tuple[float, list[tuple[int, float]]] | None:
        if seat not in self.logprobs:
            return None
        chosen, which, values = self.logprobs[seat]
        if which is None or values is None:
            return float(np.array(chosen)), []
        ids, scores = np.array(which), np.array(values)
        return float(np.array(chosen)), [(int(ids[i]), float(scores[i])) for i in np.argsort(-scores)]


class Chooser:
    def __init__(self) -> None:
        self._draws = random.SystemRandom()

    def choose(self, logits: mx.array, turns: Sequence[Turn]) -> Chosen:
        """One token per row of `logits`. While masks are computed, the device computes the logits."""
        chosen = self._tokens(logits, _mask(logits, turns), turns)
        logprobs = {i: _logprobs(logits[i], chosen[i], t.row) for i, t in enumerate(turns) if _asks(t.row)}
        return Chosen(chosen, logprobs)

    def _tokens(self, logits: mx.array, forbids: mx.array | None, turns: Sequence[Turn]) -> mx.array:
        if all(t.row.greedy and not t.row.processed for t in turns):
            return mx.argmax(logits if forbids is None else logits + forbids, axis=-1)
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for i, turn in enumerate(turns):
            seeded = turn.row.sampling.seed is not None and not turn.row.greedy
            groups[i if seeded else (turn.row.alike,)].append(i)
        parts = []
        for members in groups.values():
            first = turns[members[0]]
            rows = mx.concatenate([_scores(logits, forbids, i, turns[i]) for i in members])
            if not first.row.greedy:
                seed = first.row.sampling.seed
                mx.random.seed(self._draws.getrandbits(63) if seed is None else _mix(seed, first.generated))
            parts.append(first.row.draw(rows))
        order = [i for members in groups.values() for i in members]
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.concatenate(parts)[mx.array(back)]


def _mask(logits: mx.array, turns: Sequence[Turn]) -> mx.array | None:
    """Returns what is added to the logits to forbid tokens; None if no row forbids any."""
    guides = [turn.guide for turn in turns]
    if all(guide is None or guide.free for guide in guides):
        return None
    mx.async_eval(logits)
    return mask(guides, logits.shape[-1], logits.dtype)


def _scores(logits: mx.array, forbids: mx.array | None, i: int, turn: Turn) -> mx.array:
    """Returns the log probabilities of row `i` in 32 bits, after bias and penalties. The mask comes last, so that
    neither can allow a forbidden token."""
    row = logits[i : i + 1].astype(mx.float32)
    if turn.row.processed:
        row = turn.row.process(row, turn.tokens, turn.prompt_tokens, turn.newest)
    if forbids is not None:
        row = row + forbids[i : i + 1]
    return row - mx.logsumexp(row, axis=-1, keepdims=True)


def _asks(row: Row) -> bool:
    return row.top_logprobs is not None


def _logprobs(logits: mx.array, token: mx.array, row: Row) -> tuple[mx.array, mx.array | None, mx.array | None]:
    """Returns log probabilities of the model's own distribution, before temperature and filters."""
    logits = logits.astype(mx.float32)
    found = logits - mx.logsumexp(logits)
    n = min(row.top_logprobs or 0, row.vocab)
    if n == 0:
        return found[token], None, None
    which = mx.argpartition(-found, kth=n - 1)[:n]
    return found[token], which, found[which]


def _mix(seed: int, index: int) -> int:
    """A seed of its own for each token: splitmix64, so that neighbouring seeds and indices are far apart."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
