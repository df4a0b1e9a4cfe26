"""Conversations survive a restart: for every kind of layer, in both modes, and what comes back equals a stock run.

A restart here is a cache that is closed, and a new one on the same folder with the same weights. `fake.Session` compares
every call's logits and every layer's tokens with a stock run beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake import FakeModel, Session, settled, text
from test_scenarios_fake import CASES, Case

from onefold import PrefixCache

BUDGET = 40_000_000
MODES = ("back", "through")


def model_of(case: Case) -> FakeModel:
    options = {k: v for k, v in case.options.items() if k in ("dim", "advances")}
    return FakeModel(case.kinds, **options)


def opened(model: FakeModel, folder: Path, **options: Any) -> PrefixCache:
    options = {"budget": BUDGET, "min_checkpoint_tokens": 1, "disk": folder, "disk_budget": "1GB", **options}
    return PrefixCache(model, **options)


def kv(case: Case) -> dict[str, Any]:
    return {"kv": str(case.bits)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_a_conversation_goes_on_after_a_restart(name: str, mode: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = model_of(case)
    prompt = text(90)
    with opened(model, tmp_path, disk_mode=mode, **kv(case)) as cache:
        first = Session(model, cache, prompt, bits=case.bits).prefill().decode(6).commit()
        if mode == "through":
            assert cache.flush(30)
            assert cache.durable(first) == len(first)
    with opened(model, tmp_path, disk_mode=mode, **kv(case)) as cache:
        again = Session(model, cache, [*first, *text(20, 1)], bits=case.bits)
        assert again.cached == len(first), again.lease.reason
        assert again.lease.restored == again.cached
        again.prefill().decode(4).commit()
        stats = cache.stats()
        assert stats.tokens_from_disk == len(first) == stats.disk.restored_tokens
        assert stats.disk.rejected_records == 0
        settled(cache)
