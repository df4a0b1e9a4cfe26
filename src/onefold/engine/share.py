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

import math

CHUNK_STEPS = 2.4
"""Decode steps that a chunk may cost, if the share is not larger than that. At a share of a half fewer than half of the
tokens then wait for a chunk."""
CATCH_UP = 1.5
"""Times what streams earn in one step, that a chunk takes at least: at most one chunk runs between two steps, so one
that took no more than was earned could never make up for a step that was shorter than usual."""
MOST_STEPS = 8.0
"""Decode steps that a chunk may cost where most of it does not depend on its length."""
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
"""How many of the latest chunks are compared, and the least ratio of their lengths. Most are of one length: the others
are the last ones of their prompts."""
WEIGHT_WARNING = 0.6
"""The weight of a figure that makes chunks shorter: a chunk that takes too long delays every stream, one that is too
short costs little."""


class Speed:
    """Prompt tokens a second, of late, by how far into a conversation they are: attention makes later ones slower."""

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
    """What a chunk costs whatever its length, of late: what is left if two chunks of different length are compared."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[int, int, float]] = {}
        """The latest chunk of each power of two: how many were before it, its length, and its seconds."""
        self._count = 0

    def note(self, n_tokens: int, seconds: float) -> None:
        self._latest[n_tokens.bit_length()] = self._count, n_tokens, seconds
        self._count += 1

    @property
    def seconds(self) -> float:
        """Returns 0 if the latest chunks are too much alike to tell."""
        latest = [(n, took) for at, n, took in self._latest.values() if at >= self._count - FIXED_OF]
        short, long = min(latest, default=(0, 0.0)), max(latest, default=(0, 0.0))
        if long[0] < FIXED_RATIO * short[0] or len(latest) < 2:
            return 0.0
        per_token = max(0.0, long[1] - short[1]) / (long[0] - short[0])
        return max(0.0, short[1] - per_token * short[0])


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
        self._fixed.note(n_tokens, seconds)
        self._speed.note(position, n_tokens, seconds)

    def chunk(self, position: int, *, streams: bool) -> int:
        """Returns how many tokens of a prompt to compute at once, from `position` on."""
        rate = self._speed.at(position)
        if streams:
            longest = max(self.chunk_seconds, min(2 * self._fixed.seconds, MOST_STEPS * self._step_seconds))
            wanted = int(rate * longest) if rate else FIRST_TOKENS
            least = LEAST_TOKENS
        else:
            wanted = int(rate * ALONE_SECONDS) if rate else self._most_tokens
            least = LEAST_TOKENS_ALONE
        return min(self._most_tokens, max(least, _rounded(wanted)))


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
