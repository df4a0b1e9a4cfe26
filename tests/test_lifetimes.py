"""What keeps a cache alive, and what must not."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
from disk_caches import opened, turn
from fake import FakeModel, text

from onefold import PrefixCache


def test_a_cache_with_a_disk_goes_although_a_lease_of_it_was_dropped(tmp_path: Path) -> None:
    """The disk tier outlives its cache for a moment, and must not keep it alive."""
    model = FakeModel(("full",))
    cache = opened(model, tmp_path)
    turn(model, cache, text(50))
    lease = cache.lease(text(60, 3))
    known = weakref.ref(cache)
    del cache, lease
    for _ in range(3):
        gc.collect()
    assert known() is None
    with opened(model, tmp_path) as again:  # and the folder is free
        assert again.stats().disk.failed == ""


def test_a_restore_keeps_its_cache_alive(tmp_path: Path) -> None:
    model = FakeModel(("full",))
    with opened(model, tmp_path) as cache:
        said = turn(model, cache, text(100))
    restore = opened(model, tmp_path).restore([*said, 1])
    gc.collect()
    assert restore is not None
    while restore.step():
        pass
    assert restore.tokens == len(said)


def test_a_lease_is_not_open_while_memory_is_reclaimed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(("full",))
    with PrefixCache(model, "1MB") as cache:
        seen = []
        refill = cache.state.pool.refill
        monkeypatch.setattr(cache.state.pool, "refill", lambda: (seen.append(cache.inventory.open_leases), refill()))
        turn(model, cache, text(50))
    assert seen[0] == 0
