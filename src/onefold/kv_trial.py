"""Tries formats of stored KV on a model and a text: what they cost in bytes, time and quality.

The text's own tokens are fed in chunks. The KV of every chunk is stored in the format, and the next chunk reads it; the
same chunks with KV as the model makes it are the reference. No token is exempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp, inf, isfinite
from typing import Any

import mlx.core as mx

from onefold.cache.prefix_cache import PrefixCache

CHUNK = 512
DECODED = 16
"""Tokens of which the decode speed is measured."""
MOST_DIVERGENCE = 0.03
"""The mean KL up to which a format is recommended: about the share by which the perplexity rises, which varies more."""
_MOST_SURPRISE = 700.0
"""Above it, a perplexity is beyond what a float holds."""


class Fed:
    """One request on a cache, fed with given tokens."""

    def __init__(self, cache: PrefixCache, model: Any, tokens: Sequence[int]) -> None:
        self.lease, self._model = cache.lease(tokens), model
        self.seconds = 0.0

    def feed(self, tokens: Sequence[int]) -> mx.array:
        """Returns the log-probabilities of the tokens after each of these."""
        begun = time.perf_counter()
        logits = self._model(mx.array(list(tokens))[None], cache=self.lease.layers)[0].astype(mx.float32)
        found = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(found)
        self.seconds += time.perf_counter() - begun
        return found

    def close(self) -> None:
        self.lease.discard()


@dataclass
class Quality:
    """What a format was found to cost."""

    token_bytes: int = 0
    divergence: float = 0.0
    surprise: float = 0.0
    tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    def add(self, exact: mx.array, likely: mx.array, found: mx.array, following: Sequence[int]) -> None:
        """Add the distributions after some tokens (`likely`: the exponentials of `exact`), and the tokens that follow
        each of them."""
        n = len(following)
        if n:
            apart = mx.where(likely > 0, likely * (exact - found), 0)  # a token may be impossible in both
            self.divergence += float(apart[:n].sum())
            self.surprise -= float(mx.take_along_axis(found[:n], mx.array(list(following))[:, None], axis=-1).sum())
            self.tokens += n

    @property
    def mean_divergence(self) -> float:
        """The mean KL of the next-token distributions."""
        return self.divergence / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        surprise = self.surprise / max(1, self.tokens)
        return exp(surprise) if surprise < _MOST_SURPRISE else inf  # for NaN, too

    @property
    def is_finite(self) -> bool:
        """Whether all that was measured are numbers."""
        return isfinite(self.divergence) and isfinite(self.perplexity)

    def loss(self, exact: Quality) -> float:
        """Returns by how much the perplexity is higher than with KV as the model makes it, as a share."""
        return self.perplexity / exact.perplexity - 1


def chunks(tokens: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
    for at in range(0, len(tokens), CHUNK):
        yield at, tokens[at : at + CHUNK]


Tell = Callable[[int], None]
"""Is called after each chunk with the number of tokens that were fed so far."""


def compare(
    model: Any,
    caches: dict[str, PrefixCache],
    window: Sequence[int],
    found: dict[str, Quality],
    tell: Tell | None = None,
) -> None:
    """Feed a window to a cache of each format, "16" among them, and add what it costs to `found`."""
    with ExitStack() as stack:
        fed = {name: Fed(cache, model, [*window, *window[:DECODED]]) for name, cache in caches.items()}
        for one in fed.values():
            stack.callback(one.close)
        for at, tokens in chunks(window):
            following = window[at + 1 : at + 1 + len(tokens)]
            exact = fed["16"].feed(tokens)
            likely = mx.exp(exact)
            for name, one in fed.items():
                found[name].add(exact, likely, exact if name == "16" else one.feed(tokens), following)
            if tell is not None:
                tell(at + len(tokens))
        for name, one in fed.items():
            found[name].prefill_seconds, one.seconds = one.seconds, 0.0
            for token in window[:DECODED]:
                one.feed([token])
            found[name].decode_seconds = one.seconds / DECODED


def trial(
    model: Any, tokens: Sequence[int], names: Sequence[str], budget: int | str | None, tell: Tell | None = None
) -> dict[str, Quality]:
    """Returns what each format, "16" among them, costs on these tokens. Raises ConfigError for one that the model
    cannot take."""
    with ExitStack() as stack:
        caches: dict[str, PrefixCache] = {}
        for name in names:
            caches[name] = stack.enter_context(PrefixCache(model, budget, kv=name))
        found = {name: Quality(cache.state.store.token_bytes) for name, cache in caches.items()}
        compare(model, caches, tokens, found, tell)
    return found


def recommended(found: dict[str, Quality]) -> str:
    """Returns the format with the fewest bytes whose mean KL is at most `MOST_DIVERGENCE`."""
    good = [name for name, q in found.items() if q.is_finite and q.mean_divergence <= MOST_DIVERGENCE]
    return min(good, key=lambda name: found[name].token_bytes)
