"""The trial that every architecture stands: nine ways in which requests meet, warm against cold.

Each scenario has a cache of its own and asks for all of: logits and greedy tokens as in a cold run on the same calls;
the reuse that this model's kinds of layers promise, no less and no more; one offset in all layers; a ledger that equals
MLX's active memory less the weights; and, once the cache is closed, memory back at the weights.

A tenth looks at the trial itself: what one layer has in the cache is disturbed, layer by layer, and the trial must
notice. A model whose answers would be right on a wrong cache proves nothing.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from driving import GRID, forward, greedy, same
from mlx_lm.models.cache import make_prompt_cache

import onefold
from onefold.cache.memory.reach import readable_length, resume_point
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.stock import evaluate_kept
from onefold.cache.model.survey import survey

PROMPT = 40
"""Tokens of a first prompt: more than two of the tiny models' windows."""
LONG = 600
"""Tokens of the prefix that two readers share: more than the slabs that they open for their own tails."""
ROWS = (30, 14, 19)
"""Tokens of the rows of a batch: more than one of the tiny models' windows, and fewer, which becomes more."""
DECODED = 4

Logits = list[np.ndarray]


class Failed(Exception):
    """A scenario did not go as it must."""


def must(condition: bool, reason: str) -> None:
    if not condition:
        raise Failed(reason)


def words(n: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


def settles(right: Callable[[int], bool]) -> int:
    """Bytes that arrays hold, less the pool's. If that is not right yet, cycles of Python objects may hold some."""
    mx.clear_cache()
    if not right(int(mx.get_active_memory())):
        gc.collect()
        mx.clear_cache()
    return int(mx.get_active_memory())


def slabs(cache: onefold.PrefixCache) -> int:
    """Bytes of KV in slabs, by the ledger's accounts."""
    return sum(slab.bytes for slab in cache.state.store.slabs)


@dataclass(frozen=True)
class Outcome:
    scenario: str
    failure: str = ""
    """Why it failed; empty if it passed."""


@dataclass
class Report:
    """What is known about one architecture."""

    kinds: str
    reuse: str
    """How its state is reused: shared in place, moved, checkpointed; or uncached."""
    uncached: str = ""
    """Why nothing is reused; empty if it is."""
    defect: str = ""
    """What is wrong with the model itself, so that no cache of it can be right."""
    outcomes: list[Outcome] = field(default_factory=list)
    batched: str = ""
    """How rows at different positions are stepped; empty if that is wrong, or nothing is reused."""

    @property
    def failures(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.failure]


def kinds(anatomy: Anatomy) -> str:
    """The layers' kinds, counted: "2 rotating, 2 full", or for layers of several "4 (recurrent + full)"."""
    layers: list[str] = []
    for i in range(anatomy.n_layers):
        leaves = [leaf for leaf in anatomy.leaves if leaf.path[0] == i]
        names = [leaf.kind if leaf.used else "unused" for leaf in leaves]
        layers.append(names[0] if len(leaves[0].path) == 1 else f"({' + '.join(names)})")
    return ", ".join(f"{layers.count(name)} {name}" for name in dict.fromkeys(layers))


def reuse(anatomy: Anatomy) -> str:
    """In words; the scenarios hold the model to them."""
    if anatomy.reason:
        return "uncached"
    ways = []
    if anatomy.sliceable:
        ways.append("moved" if anatomy.contiguous else "shared in place")
    if anatomy.needs_checkpoints:
        ways.append("checkpointed")
    return ", ".join(ways)


class Trial:
    """One model's trial. Cold runs are kept, since scenarios ask for the same ones."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.anatomy = survey(model)
        self._cold: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[list[int], Logits]] = {}
        self._calls: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.weights = 0

    def run(self) -> Report:
        report = Report(kinds(self.anatomy), reuse(self.anatomy), self.anatomy.reason)
        if self.anatomy.reason:
            if not self.attempt(lambda: self.reference(words(PROMPT))):  # it runs in mlx-lm at all
                report.outcomes.append(Outcome("uncached", self.attempt(self.uncached)))
            return report
        if not self.causal():
            report.defect = NOT_CAUSAL
        scenarios: dict[str, Callable[[], None]] = {
            "cold": self.cold,
            "continue": self.continued,
            "branch": self.branched,
            "rewind": self.rewound,
            "repeat": self.repeated,
            "two readers": self.shared,
            "batch": self.batched,
            "eviction": self.evicted,
            "retry": self.retried,
            "notices": self.notices,
        }
        for name, scenario in scenarios.items():
            report.outcomes.append(Outcome(name, self.attempt(scenario)))
        if "batch" not in (o.scenario for o in report.failures):
            report.batched = self.way_of_batching
        return report

    @property
    def way_of_batching(self) -> str:
        return "together" if self.anatomy.ragged else "singly"

    def attempt(self, scenario: Callable[[], Any]) -> str:
        """Why the scenario failed, or nothing."""
        try:
            scenario()
        except Exception as error:  # whatever goes wrong here is a line of the table
            gc.collect()
            return str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}"
        return ""

    def causal(self) -> bool:
        """Whether a token's logits are the same whatever comes after it in its chunk."""
        tokens = words(PROMPT)
        seen = []
        for last in (91, 92):
            logits = self.model(mx.array([[*tokens, last]]), cache=make_prompt_cache(self.model))
            seen.append(_plain(logits[:, :-1]))
        scale = np.abs(seen[0]).max()
        return bool(np.abs(seen[0] - seen[1]).max() <= 1e-4 * scale)

    # -- the scenarios ---------------------------------------------------------------------

    def cold(self) -> None:
        with self.opened() as cache:
            lease, _ = self.turn(cache, words(PROMPT))
            must(lease.cached == lease.matched == 0, f"{lease.cached} tokens known to an empty cache")
            must(lease.reason == "nothing known", f"the reason is {lease.reason!r}")
        self.back_to_weights()

    def continued(self, tamper: tuple[int, int] | None = None) -> None:
        """Turn by turn, one of them longer than a window. `tamper` names a layer and how much of it to disturb."""
        with self.opened() as cache:
            _, known = self.turn(cache, words(PROMPT))
            if tamper is not None:
                self.disturb(cache, known, *tamper)
            for i, n in enumerate((1, 5, 20)):
                before = known
                lease, known = self.turn(cache, known + words(n, seed=i + 1))
                self.reused(lease, len(before))
            moves = cache.stats().moves if self.anatomy.sliceable else 3
            must(moves == 3, f"{moves} of 3 turns were continued in place")
        self.back_to_weights()

    def branched(self) -> None:
        with self.opened() as cache:
            _, known = self.turn(cache, words(PROMPT))
            self.turn(cache, known + words(9, seed=1))
            lease, other = self.turn(cache, [*known, 91, 92])
            self.reused(lease, len(known))
            lease, _ = self.turn(cache, [*other, 3])
            self.reused(lease, len(other))
        self.back_to_weights()

    def rewound(self) -> None:
        """To where no checkpoint is, and to behind one. Sliceable layers need none."""
        anywhere = not self.anatomy.needs_checkpoints
        with self.opened() as cache:
            self.turn(cache, words(PROMPT))
            lease, _ = self.turn(cache, [*words(PROMPT)[:21], 91, 92, 93])
            self.reused(lease, 21 if anywhere else 0, matched=21)
            prompt = words(PROMPT, seed=1)
            self.turn(cache, prompt, checkpoints=[3 * GRID])
            lease, _ = self.turn(cache, [*prompt[:30], 91, 92])
            self.reused(lease, 30 if anywhere else 3 * GRID, matched=30)
        self.back_to_weights()

    def repeated(self) -> None:
        with self.opened() as cache:
            self.turn(cache, words(PROMPT))
            for _ in range(2):
                lease, _ = self.turn(cache, words(PROMPT))
                self.reused(lease, PROMPT - 1, matched=PROMPT)  # one token is held back for the model to run on
        self.back_to_weights()

    def shared(self) -> None:
        """Two leases on one long prefix, prefilling and decoding in turn."""
        with self.opened() as cache:
            prefix = words(LONG)
            self.reference(prefix, grid=LONG // 4)
            with cache.lease(prefix) as lease:
                forward(self.model, lease.layers, prefix, 0, LONG // 4)
                lease.commit(prefix)
            self.ledger_true(cache)
            before = slabs(cache)
            prompts = [[*prefix, 91 + i, *words(2 + i, seed=i)] for i in range(2)]
            leases = [cache.lease(p) for p in prompts]
            for lease in leases:
                self.reused(lease, LONG)
            seen = [
                [forward(self.model, lease.layers, p, lease.cached)] for lease, p in zip(leases, prompts, strict=True)
            ]
            for _ in range(DECODED):
                for lease, logits in zip(leases, seen, strict=True):
                    logits.extend(greedy(self.model, lease.layers, logits[-1], 1)[1][1:])
            rows = [[_plain(x) for x in logits] for logits in seen]
            del seen, logits
            mx.eval([layer.state for lease in leases for layer in lease.layers])
            self.ledger_true(cache)
            if self.anatomy.sliceable:
                copied = slabs(cache) - before >= LONG * cache.state.store.token_bytes
                must(copied == self.anatomy.contiguous, "the prefix is held twice" if copied else "no copy was made")
            for lease, prompt, row in zip(leases, prompts, rows, strict=True):
                out, reference = self.reference(prompt, LONG)
                self.equal(row, reference)
                self.uniform(lease, len(prompt) + DECODED)
                lease.commit([*prompt, *out])
            cache.check()
            for prompt in prompts:
                lease = cache.lease([*prompt, *self.reference(prompt, LONG)[0], 5])
                self.reused(lease, len(prompt) + DECODED)
                lease.cancel()
            del lease, leases
            self.ledger_true(cache)
        self.back_to_weights()

    def batched(self) -> None:
        """Rows at different positions, decoding together: each answers as it does alone on mlx-lm's caches. They are
        fed the same tokens, so that no near tie ends the comparison."""
        with self.opened() as cache:
            prompts = [words(n, seed=i) for i, n in enumerate(ROWS)]
            alone = [self.reference(prompt) for prompt in prompts]
            leases = [cache.lease(prompt) for prompt in prompts]
            for lease, prompt in zip(leases, prompts, strict=True):
                forward(self.model, lease.layers, prompt, 0)
            batch = cache.batch(leases)
            must(batch.ragged == self.anatomy.ragged, "the batch is stepped otherwise than the survey says")
            steps = [_plain(batch.step(list(tokens))) for tokens in zip(*(out for out, _ in alone), strict=True)]
            mx.eval([layer.state for lease in leases for layer in lease.layers])
            self.ledger_true(cache)
            for i, (lease, prompt, (out, reference)) in enumerate(zip(leases, prompts, alone, strict=True)):
                pairs = zip((step[i : i + 1] for step in steps), reference[1:], strict=True)
                must(all(np.abs(a - b).max() <= 1e-4 * np.abs(b).max() for a, b in pairs), DIFFERS)
                self.uniform(lease, len(prompt) + DECODED)
                lease.commit([*prompt, *out])
            del batch, lease, leases
            self.ledger_true(cache)
        self.back_to_weights()

    def evicted(self) -> None:
        """Under a budget that has room for a few conversations, one is pushed out and comes back."""
        with self.opened() as cache:
            self.turn(cache, words(PROMPT))
            stats = cache.stats()
            entry = stats.bytes["stored"] + stats.bytes["checkpoint"]
            budget = int((stats.peak_bytes - stats.bytes["pool"] + 2 * entry) * 16 / 15) + 4096
        with self.opened(budget) as cache:
            _, known = self.turn(cache, words(PROMPT))
            others = 0
            while self.resumable(cache, known) >= len(known) and others < 64:
                others += 1
                other = words(PROMPT, seed=100 + others)
                with cache.lease(other) as lease:
                    forward(self.model, lease.layers, other, 0)
                    lease.commit(other)
            must(others < 64, "64 other conversations, and it was still there")
            lease, back = self.turn(cache, known)
            must(lease.cached < len(known) - 1, f"{lease.cached} tokens were reused of a conversation that was evicted")
            lease, _ = self.turn(cache, [*back, 7])
            self.reused(lease, len(back))
        self.back_to_weights()

    def retried(self) -> None:
        """A request is cancelled in the middle of its prompt, and made again."""
        with self.opened() as cache:
            prompt = words(PROMPT)
            self.reference(prompt[:24])
            with cache.lease(prompt) as lease:
                forward(self.model, lease.layers, prompt[:24], 0)
            del lease
            self.ledger_true(cache)
            lease, _ = self.turn(cache, prompt)
            self.reused(lease, 24)
        self.back_to_weights()

    def uncached(self) -> None:
        """Nothing is kept, nothing is wrong."""
        with self.opened() as cache:
            for _ in range(2):
                with cache.lease(words(PROMPT)) as lease:
                    must(lease.cached == 0 and lease.reason == "unknown cache", f"the reason is {lease.reason!r}")
                    logits = forward(self.model, lease.layers, words(PROMPT), 0)
                    out, seen = greedy(self.model, lease.layers, logits, DECODED)
                    self.equal([_plain(x) for x in seen], self.reference(words(PROMPT))[1])
                    del logits, seen
                    lease.commit(words(PROMPT) + out)
            del lease
        self.back_to_weights()

    def notices(self) -> None:
        """Whatever a layer keeps, disturbing it must make the trial fail. Its first positions should do; a layer that
        keeps all but looks only at the last ones is disturbed everywhere."""
        for leaf in range(sum(leaf.used for leaf in self.anatomy.leaves)):
            failure = ""
            for first in (GRID, LONG):
                failure = failure or self.attempt(lambda at=(leaf, first): self.continued(tamper=at))
            must(
                failure == DIFFERS,
                f"what layer {leaf} keeps was disturbed, and the trial said {failure or 'nothing'!r}",
            )

    # -- what each of them asks for ----------------------------------------------------------

    def opened(self, budget: int | str = "256MB") -> onefold.PrefixCache:
        if not self.weights:
            self.reference(words(PROMPT))  # some models keep tables that they make in their first forward
            evaluate_kept(self.model)  # or lazy ones, which a cache evaluates
            self.weights = settles(lambda _: False)
        cache = onefold.PrefixCache(self.model, budget, min_checkpoint_tokens=1)
        self._calls = {}
        mx.set_cache_limit(0)  # a buffer from the pool may be larger than what was asked for
        return cache

    def turn(
        self, cache: onefold.PrefixCache, tokens: list[int], checkpoints: list[int] | None = None
    ) -> tuple[onefold.Lease, list[int]]:
        """One request, warm, compared with a cold one; committed. Returns the lease and all tokens."""
        with cache.lease(tokens, checkpoints=checkpoints or ()) as lease:
            logits = forward(self.model, lease.layers, tokens, lease.cached)
            out, seen = greedy(self.model, lease.layers, logits, DECODED)
            plain = [_plain(x) for x in seen]
            del logits, seen
            self.uniform(lease, len(tokens) + DECODED)
            mx.eval([layer.state for layer in lease.layers])  # what the last step left to do pins its activations
            self.ledger_true(cache)
            self.equal(plain, self.reference(tokens, lease.cached)[1])
            lease.commit(tokens + out)
        self.ledger_true(cache)
        return lease, tokens + out

    def reference(self, tokens: list[int], cached: int = 0, grid: int = GRID) -> tuple[list[int], Logits]:
        """A cold run on the calls of a warm one: those that made the first `cached` positions, then those on the grid.
        To most models it is all one how tokens are cut into calls, but not to all."""
        calls = self._calls.get(tuple(tokens[:cached])) or _stops(0, cached, grid)
        calls += (*_stops(cached, len(tokens) - 1, grid), len(tokens))
        key = (tuple(tokens), calls)
        if key not in self._cold:
            layers = make_prompt_cache(self.model)
            for start, stop in itertools.pairwise((0, *calls)):
                logits = self.model(mx.array([tokens[start:stop]]), cache=layers)[:, -1, :]
                mx.eval(logits, [layer.state for layer in layers])
            out, seen = greedy(self.model, layers, logits, DECODED)
            self._cold[key] = out, [_plain(x) for x in seen]
        out, _ = self._cold[key]
        made = (*calls, *range(len(tokens) + 1, len(tokens) + DECODED + 1))
        for n, stop in enumerate(made):
            if stop > cached:
                self._calls[tuple([*tokens, *out][:stop])] = made[: n + 1]
        return self._cold[key]

    def equal(self, warm: Logits, reference: Logits) -> None:
        must(all(np.isfinite(x).all() for x in reference), "the model's own logits are not finite")
        must(same([mx.array(x) for x in warm], [mx.array(x) for x in reference]), DIFFERS)

    def reused(self, lease: onefold.Lease, cached: int, matched: int | None = None) -> None:
        must(
            lease.cached == cached,
            f"{lease.cached} tokens were reused and not {cached} ({lease.reason or 'no reason'})",
        )
        expected = cached if matched is None else matched
        must(lease.matched == expected, f"{lease.matched} tokens were matched and not {expected}")
        whole = cached == min(expected, len(lease.tokens) - 1)
        must(lease.reason == ("" if whole else "no checkpoint"), f"the reason is {lease.reason!r}")

    def resumable(self, cache: onefold.PrefixCache, tokens: list[int]) -> int:
        """How much of a conversation a request would reuse. Asking as a request would make it the last used."""
        path, matched = cache.state.nodes.tree(cache.parts.key("")).match(np.array(tokens, np.int32))
        readable, _ = readable_length(cache.state, path, matched)
        return resume_point(cache.state, path, readable, matched)[0]

    def uniform(self, lease: onefold.Lease, at: int) -> None:
        offsets = {leaf.offset for beat in lease.hold.watchers for leaf in beat.leaves}
        must(offsets == {at}, f"layers stand at {sorted(offsets)} after {at} tokens")

    def ledger_true(self, cache: onefold.PrefixCache) -> None:
        """Everything adds up, and to what MLX says is there."""
        cache.check()
        stats = cache.stats()
        must(stats.used_bytes <= stats.budget_bytes, "the ledger is over its budget")
        ours = sum(stats.bytes[p] for p in ("live", "stored", "checkpoint"))

        def right(n: int) -> bool:
            return abs(ours - (n - self.weights)) <= max(0.01 * (n - self.weights), 1024)

        real = settles(right)
        must(right(real), f"the ledger says {ours} bytes, MLX {real - self.weights}")

    def back_to_weights(self) -> None:
        left = settles(lambda n: n - self.weights < 4096) - self.weights
        must(left < 4096, f"{left} bytes were left behind")

    def disturb(self, cache: onefold.PrefixCache, tokens: list[int], leaf: int, first: int) -> None:
        """Change what one layer has in the cache: its first positions, or its window or state."""
        used = [x for x in self.anatomy.leaves if x.used]
        path, _ = cache.state.nodes.tree(cache.parts.key("")).match(np.array(tokens, np.int32))
        for node in path:
            if used[leaf].sliceable:
                assert node.span is not None
                arrays = node.span.slab.arrays(used[leaf].index)
                arrays[:] = [_disturbed(a, node.span.lo + first) for a in arrays]
            elif node.checkpoint is not None:
                snapshot = node.checkpoint.snapshots[leaf]
                if snapshot.runs:
                    for run, at, _, _ in snapshot.stretches:
                        run.arrays[at : at + 2] = [_disturbed(a) for a in run.arrays[at : at + 2]]
                else:
                    snapshot.arrays = [None if a is None else _disturbed(a) for a in snapshot.arrays]


DIFFERS = "warm logits differ from cold ones"
NOT_CAUSAL = (
    "In mlx-lm itself a token sees later ones of its chunk, so what is cached depends on what came after it: right "
    "while conversations go on or part between calls, wrong where one parts inside a chunk."
)


def _stops(start: int, end: int, grid: int) -> tuple[int, ...]:
    """Where calls end that go from `start` to `end` in chunks that end on the grid."""
    return tuple(dict.fromkeys([*range((start // grid + 1) * grid, end, grid), *[end] * (end > start)]))


def _plain(logits: mx.array) -> np.ndarray:
    """Off the device, so that it does not count as active memory; ids that a model rules out are 0."""
    found = np.array(logits.astype(mx.float32))
    return np.where(np.isneginf(found), 0.0, found)


def _disturbed(array: mx.array, first: int | None = None) -> mx.array:
    """Other values, in the first positions or everywhere."""
    if mx.issubdtype(array.dtype, mx.floating):
        other = array + 3.0 * mx.random.normal(array.shape, array.dtype, key=mx.random.key(1))
    else:
        other = (array + 1) % 90
    if first is not None:
        other = mx.concatenate([other[..., :first, :], array[..., first:, :]], axis=2)
    mx.eval(other)
    return other
