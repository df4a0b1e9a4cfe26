"""The soak in small: the real server over HTTP, more clients than memory, every answer that of a cold run."""

from __future__ import annotations

from pathlib import Path

import pytest

import onefold

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]


def test_many_clients_on_little_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import soak

    loaded, tokenizer = onefold.load(model)
    asks, tokens, _ = soak.prepare(loaded, tokenizer, 50, seed=3)
    with onefold.PrefixCache(loaded, "1GB") as cache:
        needed = tokens * cache.inventory.token_bytes
    for _ in range(3):  # whether rows meet at the limit depends on how the clients' requests interleave
        result = soak.run(loaded, tokenizer, asks, needed // 5, needed, clients=12)
        assert result.faults() == []
        assert result.answers + result.cancelled == 50 and result.cancelled > 0
        assert result.cached > 0
        if result.preemptions > 0:
            return
    pytest.fail("there was memory enough, and nothing was tried")
