"""Shares the device's time between prompts and the streams that are running.

- While streams run, prompts get `share` of the time. Streams earn time for prompts as they run, a chunk spends it, and
  the next one waits until there is enough again. So the share comes out whatever a single chunk took.
- A chunk is worth a few decode steps: long enough to be efficient, short enough to be no more than a hitch.
- A chunk costs something whatever its length: the weights are read once, and on a fast GPU most of it is the time to
  start its kernels. A chunk that is so short that this is most of it is made longer.
- While no stream runs, nothing is accounted, and a chunk is as long as it may be.

Knows nothing of MLX, of requests or of memory.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque

CHUNK_STEPS = 2.4
"""Decode steps that a chunk may cost, if the share is not larger than that. At a share of a half fewer than half of the
tokens then wait for a chunk."""
CATCH_UP = 1.5
"""Times what streams earn in one step, that a chunk takes at least: at most one chunk runs between two steps, so one
that took no more than was earned could never make up for a step that was shorter than usual."""
MOST_STEPS = 8.0
"""Decode steps that a chunk may cost where most of it does not depend on its length."""
OVER_FIXED = 1.25
"""Times its fixed cost, that such a chunk may take in any case: with less it would have hardly any token."""
LEAST_TOKENS = 8
"""The shortest chunk, however slow it is."""
FIRST_TOKENS = 64
"""The length of a chunk while streams run and no speed is known."""
ALONE_SECONDS = 1.0
"""What a chunk may take when no stream runs: a newcomer has to wait for it."""
LEAST_TOKENS_ALONE = 512
DEBT_CHUNKS = 2.0
"""Chunks that short prompts may be ahead of their share."""
DEPTHS = 4
"""Speeds that are kept for each doubling of the position."""
DEBT_MOST = 20.0
"""Chunks that a single stall, of the disk say, can cost the prompts after it."""
WEIGHT = 0.2
"""The weight of the newest figure in a mean."""
FIXED_OF, FIXED_RATIO = 16, 1.9
"""How many of the latest chunks are compared, with those about as far into a conversation, and the least ratio of their
lengths. Most are of one length: the others are the last ones of their prompts."""
LEAST_USEFUL = 0.1
"""The least share of a chunk's time that is taken to depend on its length."""
WEIGHT_WARNING = 0.6
"""The weight of a figure that makes chunks shorter: a chunk that takes too long delays every stream, one that is too
short costs little."""


class Speed:
    """Prompt tokens a second, of late, by how far into a conversation they are: attention makes later ones slower. What
    a chunk costs whatever its length is left out."""

    def __init__(self) -> None:
        self._rates: dict[int, float] = {}

    def note(self, position: int, n_tokens: int, seconds: float) -> None:
        depth = _depth(position)
        self._rates[depth] = _cautious(self._rates.get(depth, 0.0), n_tokens / max(seconds, 1e-6))

    def at(self, position: int) -> float:
        """Returns the speed there, 0 if nothing is known. Where only earlier tokens were timed, each doubling of
        the position is taken to halve the speed; where only later ones were, their speed is used."""
        depth = _depth(position)
        earlier = max((d for d in self._rates if d <= depth), default=None)
        if earlier is not None:
            return self._rates[earlier] * 2 ** ((earlier - depth) / DEPTHS)
        return self._rates[min(self._rates)] if self._rates else 0.0


class FixedCost:
    """What a chunk costs whatever its length: what is left of the latest ones without what each token costs."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float, int]] = deque(maxlen=FIXED_OF)
        """Lengths, seconds and depths."""
        self.seconds = 0.0
        """0 until chunks of different length were timed; then the latest figure that they gave."""

    def note(self, position: int, n_tokens: int, seconds: float) -> None:
        self._latest.append((n_tokens, seconds, _depth(position)))
        ordered = itertools.combinations(sorted(self._latest), 2)
        pairs = [(a, b) for a, b in ordered if b[0] >= FIXED_RATIO * a[0] and abs(a[2] - b[2]) <= 1]
        if pairs:  # medians, because the first use of a kernel may take ten times as long
            slope = max(0.0, statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs))
            compared = {id(chunk): chunk for pair in pairs for chunk in pair}.values()
            self.seconds = max(0.0, statistics.median(took - slope * n for n, took, _ in compared))


class Share:
    def __init__(self, share: float, most_tokens: int) -> None:
        """`most_tokens`: of any chunk."""
        self._earned_per_second = share / (1 - share)
        self._most_tokens = most_tokens
        self._speed = Speed()
        self._fixed = FixedCost()
        self._step_seconds = 0.0
        self._credit_seconds = 0.0

    @property
    def chunk_seconds(self) -> float:
        """How long a chunk should take while streams run."""
        return self._step_seconds * max(CHUNK_STEPS, CATCH_UP * self._earned_per_second)

    @property
    def due(self) -> bool:
        """Whether streams have earned a chunk by now."""
        return self._credit_seconds >= self.chunk_seconds

    @property
    def tolerates(self) -> bool:
        """Whether a prompt that is about as short as a step may be done before there is time for it."""
        return self._credit_seconds > -DEBT_CHUNKS * self.chunk_seconds

    def streamed(self, seconds: float) -> None:
        """Notes that one decode step took so long."""
        self._step_seconds = _cautious(self._step_seconds, seconds)
        earned = seconds * self._earned_per_second
        self._credit_seconds = min(self._credit_seconds + earned, max(earned, 2 * self.chunk_seconds))

    def prefilled(self, seconds: float) -> None:
        """Notes that prompts delayed streams for so long."""
        self._credit_seconds = max(self._credit_seconds - seconds, -DEBT_MOST * self.chunk_seconds)

    def rested(self) -> None:
        """Notes that no stream runs, and clears what prompts took beyond their share."""
        self._credit_seconds = max(self._credit_seconds, 0.0)

    def timed(self, position: int, n_tokens: int, seconds: float) -> None:
        """Notes that a chunk that began at `position` took so long."""
        self._fixed.note(position, n_tokens, seconds)
        self._speed.note(position, n_tokens, self._useful(seconds))

    def chunk(self, position: int, *, streams: bool) -> int:
        """Returns how many tokens of a prompt to compute at once, from `position` on."""
        rate = self._speed.at(position)
        if streams:
            fixed = self._fixed.seconds
            longest = max(self.chunk_seconds, min(2 * fixed, max(OVER_FIXED * fixed, MOST_STEPS * self._step_seconds)))
            wanted = int(rate * self._useful(longest)) if rate and longest else FIRST_TOKENS
            least = LEAST_TOKENS
        else:
            wanted = int(rate * self._useful(ALONE_SECONDS)) if rate else self._most_tokens
            least = LEAST_TOKENS_ALONE
        return min(self._most_tokens, max(least, _rounded(wanted)))

    def _useful(self, seconds: float) -> float:
        """Returns how much of a chunk's time depends on its length."""
        return max(LEAST_USEFUL * seconds, seconds - self._fixed.seconds)


def _rounded(n_tokens: int) -> int:
    """Returns one of four lengths between two powers of two, at most `n_tokens`: CUDA prepares its kernels for each
    length that is new, which takes longer than a decode step."""
    step = max(4, 1 << max(0, n_tokens.bit_length() - 3))
    return n_tokens // step * step


def _depth(position: int) -> int:
    return int(DEPTHS * math.log2(1 + position / 512))


def _cautious(before: float, now: float) -> float:
    """A running mean that leans towards the lower figures."""
    weight = WEIGHT_WARNING if now < before else WEIGHT
    return now if not before else (1 - weight) * before + weight * now
