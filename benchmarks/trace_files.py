"""Traces of real traffic: which tokens each request shares with earlier ones, and when it came. No text.

Two formats, both of one JSON object a line:

- Sessions of agents: `{"block_size": 64, "reqs": [[t, in, out, think, api, stop, sub, ref, keep, new], ...]}`. A
  prompt is a chain of blocks: the first `keep` blocks of request `ref` of the same session (-1: none), then `new` ones
  of its own. `t` and `api` are seconds: when the request came, and how long it took. `stop` is why the answer ended.
- Requests: `{"timestamp": ms, "input_length": n, "hash_ids": [...]}`: hashes of the prompt's prefixes, one for each
  512 tokens.

Sessions are interleaved: so many users at a time, each of whom begins the next session 60 s after the last one ended.
Only whole blocks count: what is behind the last one is not known.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HASHED = 512
"""Tokens of a block of the second format."""
BETWEEN = 60.0
"""Seconds between two sessions of a user."""
LONGEST_PAUSE = 1800.0
"""Seconds. A longer pause within a session counts as this one."""


@dataclass(frozen=True)
class Request:
    time: float
    """Seconds since the beginning of the trace."""
    blocks: list[int]
    """An id for each prefix of the prompt that ends with a block: two requests have the same id where all tokens up to
    there are the same."""
    block_tokens: int
    ended: bool | None = None
    """Whether the answer ended the turn, so that a person is next; False if a tool is; None if that is not known."""

    @property
    def n_tokens(self) -> int:
        return len(self.blocks) * self.block_tokens

    def tokens(self) -> npt.NDArray[np.int32]:
        """Returns made-up tokens that are the same where the prompts were."""
        return np.repeat(np.array(self.blocks, np.int32), self.block_tokens)

    def coarse(self, block_tokens: int) -> list[int]:
        """Returns the ids of larger blocks, whole ones only."""
        step = block_tokens // self.block_tokens
        return self.blocks[step - 1 :: step]


def load(
    path: Path, *, users: int = 8, sessions: int | None = 160, most_tokens: int = 200_000, half: int | None = None
) -> list[Request]:
    """Returns the requests of a file, in the order of time. Of sessions it takes those of at most `most_tokens`, in a
    shuffled order that is always the same: the first `sessions` of them, or with `half` (0 or 1) every second one.
    Raises ValueError for a file of another format."""
    found = [json.loads(line) for line in path.read_text().splitlines() if line]
    if found and all("hash_ids" in x for x in found):
        return [_hashed(x) for x in found]
    if not found or not all("reqs" in x for x in found):
        raise ValueError(f'{path} is not a trace: each line must be an object with "reqs" or "hash_ids"')
    chosen = [x for x in found if max(r[1] for r in x["reqs"]) <= most_tokens]
    random.Random(0).shuffle(chosen)
    return _interleaved(chosen[:sessions] if half is None else chosen[half::2], users)


def _hashed(line: dict[str, Any]) -> Request:
    whole = line["input_length"] // HASHED
    return Request(line["timestamp"] / 1000, line["hash_ids"][:whole], HASHED)


def _interleaved(sessions: Iterable[dict[str, Any]], users: int) -> list[Request]:
    free, made, first_id = [0.0] * users, list[Request](), 0
    for session in sessions:
        chains, first_id = _chains(session, first_id)
        user = free.index(min(free))
        now, before = free[user], session["reqs"][0][0]
        for request, blocks in zip(session["reqs"], chains, strict=True):
            now += min(max(0.0, request[0] - before), LONGEST_PAUSE)
            before, stop = request[0], request[5]
            ended = None if stop not in ("tool_use", "end_turn") else stop == "end_turn"
            made.append(Request(now, blocks, session["block_size"], ended))
        free[user] = now + session["reqs"][-1][4] + BETWEEN
    return sorted(made, key=lambda r: r.time)


def _chains(session: dict[str, Any], first_id: int) -> tuple[list[list[int]], int]:
    """Returns the blocks of each prompt, with ids from `first_id` on, and the first id that is free."""
    chains: list[list[int]] = []
    for *_, ref, keep, new in session["reqs"]:
        known = chains[ref][:keep] if ref >= 0 else []
        chains.append(known + list(range(first_id, first_id + new)))
        first_id += new
    return chains, first_id
