"""Any sequence of requests, cancels and trims under mlx-lm's batches: answers as of cold runs, bytes as reported."""

from __future__ import annotations

import gc
import random

import pytest
from batching import Loop
from driving import cold
from effort import effort
from tiny import tiny

from onefold.cache.memory import device
from onefold.mlx_lm import UNLIMITED, LRUPromptCache


def words(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(90), k=n)


class Fuzz:
    def __init__(self, family: str, seed: int) -> None:
        self.model = tiny(family)
        self.random = random.Random(seed)
        limit = self.random.choice([UNLIMITED, UNLIMITED, 200_000, 600_000, 20_000])
        self.cache = LRUPromptCache(max_size=self.random.choice([10, 3, 1, 0]), max_bytes=limit)
        self.loop = Loop(self.model, self.cache, step=self.random.choice([16, 64, 2048]))
        self.loop.batches.prefill_batch_size = self.random.choice([1, 2, 8])
        self.known = [words(self.random.randint(6, 120), s) for s in range(3)]
        self.running: dict[int, tuple[list[int], int]] = {}

    def ask(self) -> None:
        """Something known, its beginning, or what goes on from it: branches, rewinds and exact repeats among them."""
        prompt, how = list(self.random.choice(self.known)), self.random.random()
        if how < 0.3:
            prompt = prompt[: max(6, self.random.randint(1, len(prompt)))]
        elif how < 0.7:
            prompt += words(self.random.randint(1, 30), self.random.randint(0, 3))
        n = self.random.choice([1, 2, 5, 12])
        uid, cached = self.loop.ask(prompt, n)
        assert cached < len(prompt)
        self.running[uid] = (prompt, n)

    def act(self) -> None:
        what = self.random.random()
        if what < 0.35 and len(self.running) < 5:
            self.ask()
        elif what < 0.45 and self.running:
            uid = self.random.choice(list(self.running))
            self.loop.cancel(uid)
            del self.running[uid]
        elif what < 0.50:
            gc.collect()
        elif what < 0.53:
            self.cache.trim_to(n_bytes=self.random.choice([0, 50_000, 1 << 30]))
        elif what < 0.55:
            self.cache.trim_to(n_sequences=self.random.choice([0, 1, 5]))
        else:
            self.loop.step()
        self.look()

    def look(self) -> None:
        for uid in [u for u in self.running if u not in self.loop._pending]:
            prompt, n = self.running.pop(uid)
            answer, (tokens, logits) = self.loop.answers[uid], cold(self.model, prompt, n)
            at = next((i for i, (a, b) in enumerate(zip(answer, tokens, strict=True)) if a != b), None)
            if at is not None:  # only where two tokens are all but equally good
                best = logits[at][0].max()
                assert (best - logits[at][0, answer[at]]).item() < 1e-3 * abs(best).item(), (answer, tokens)
            self.known.append(prompt + answer)
        assert len(self.cache) <= self.cache.max_size

    def end(self) -> None:
        self.loop.run()
        self.look()
        del self.loop
        gc.collect()
        for store in self.cache._stores.all():
            store.cache.check()
            assert store.cache.inventory.open_leases == 0
        by_type = self.cache.stats_by_type()
        assert sum(s["n_bytes"] for s in by_type.values()) == self.cache.nbytes <= self.cache.max_bytes
        stored = sum(s.cache.stats().stored_tokens for s in self.cache._stores.all())
        assert stored <= sum(sum(t.values()) for t in self.cache._entries.own_tokens().values())
        assert set(self.cache.reasons) <= {"larger than the limit"}
        self.cache.close()


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "deepseek_v3"])
def test_any_sequence(family: str, pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: pooled)  # tails in one slab, as on a GPU
    for seed in range(effort(1, 5)):
        fuzz = Fuzz(family, seed)
        for _ in range(35):
            fuzz.act()
        fuzz.end()
