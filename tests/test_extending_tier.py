"""A new tier is one file and one line: the example of docs/extending.md serves a conversation that memory evicted."""

from __future__ import annotations

from pathlib import Path

import pytest
from example_tier import KeptSettings, KeptTier, open_kept
from fake import FakeModel, Session, settled, text

from onefold import PrefixCache
from onefold.cache.tiers import registry
from onefold.errors import ConfigError

BUDGET = 800_000
"""Room for a few of the conversations, and the scratch of a forward."""


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPENERS, KeptSettings, open_kept)


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(("full", "full"))


def talk(model: FakeModel, cache: PrefixCache, n: int) -> list[list[int]]:
    return [Session(model, cache, text(300, seed)).prefill(20).decode(3).commit() for seed in range(n)]


@pytest.mark.parametrize("keeps", [False, True])
def test_what_memory_evicted_comes_back_with_the_same_tokens(model: FakeModel, keeps: bool) -> None:
    options = {"disk": KeptSettings("100MB")} if keeps else {}
    with PrefixCache(model, BUDGET, **options) as cache, PrefixCache(model, "50MB") as ample:
        said = talk(model, cache, 7)
        assert cache.stats().evicted_tokens > 0
        cached = []
        for tokens in said:
            session = Session(model, cache, [*tokens, 5, 6])
            cached.append(session.cached)
            again = session.prefill(20).decode(4).commit()  # compares every layer, and the logits with a stock run
            assert Session(model, ample, [*tokens, 5, 6]).prefill(20).decode(4).commit() == again
            settled(cache)
        stats = cache.stats()
        if not keeps:
            assert min(cached) == 0
            return
        assert cached == [len(tokens) for tokens in said]
        assert isinstance(cache.parts.tier, KeptTier) and stats.discarded_tokens == 0
        assert stats.tokens_from_disk > 0 and stats.disk.restored_tokens >= stats.tokens_from_disk


def test_a_branch_of_an_evicted_conversation_comes_back(model: FakeModel) -> None:
    """The node is split while the tier has it."""
    with PrefixCache(model, BUDGET, disk=KeptSettings("100MB")) as cache:
        first = talk(model, cache, 7)[0]
        session = Session(model, cache, [*first[:150], 7, 8])
        assert session.cached == 150
        session.prefill(20).decode(3).commit()
        settled(cache)
        assert Session(model, cache, [*first, 9]).cached == len(first)


def test_a_tier_that_is_full_loses_what_it_cannot_take(model: FakeModel) -> None:
    with PrefixCache(model, BUDGET, disk=KeptSettings(200_000)) as cache:
        talk(model, cache, 7)
        settled(cache)
        assert 0 < cache.stats().disk.used_bytes <= 200_000 and cache.stats().discarded_tokens > 0


def test_settings_of_no_tier_are_refused(model: FakeModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="disk is a folder"):
        PrefixCache(model, "50MB", disk=42)
