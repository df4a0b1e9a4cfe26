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
    result = soak.run(loaded, tokenizer, asks, needed // 5, needed, clients=12)
    assert result.faults() == []
    assert result.answers + result.cancelled == 50 and result.cancelled > 0
    assert result.preemptions > 0, "there was memory enough, and nothing was tried"
    assert result.cached > 0
