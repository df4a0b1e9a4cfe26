"""What a forward must respect on Metal, asked under a pretended Metal: nothing of this was run on a Mac."""

from __future__ import annotations

import threading
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from fake import FakeModel, Session, text
from tiny import tiny

import onefold
from onefold import PrefixCache
from onefold.cache.memory import device
from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import ArraySpec, LayerSpec
from onefold.cache.model import metal
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.fused import is_fused
from onefold.cache.model.survey import survey
from onefold.engine import engine
from onefold.errors import BudgetError

GIB = 1 << 30


@pytest.mark.parametrize(
    "info, emulated",
    [
        ({"architecture": "applegpu_g13g", "device_name": "Apple M1"}, True),
        ({"architecture": "applegpu_g13d", "device_name": "Apple M1 Ultra"}, True),
        ({"architecture": "applegpu_g14s", "device_name": "Apple M2 Pro"}, True),
        ({"architecture": "applegpu_g15g", "device_name": "Apple M3"}, False),
        ({"architecture": "applegpu_g16s", "device_name": "Apple M4 Max"}, False),
        ({"architecture": "applegpu_g17g", "device_name": "Apple M5"}, False),
        ({"architecture": "", "device_name": "Apple M1"}, True),
        ({"device_name": "Apple M2 Ultra"}, True),
        ({"device_name": "Apple M10"}, False),
        ({"device_name": "Apple M3"}, False),
        ({}, False),
    ],
)
def test_which_gpus_have_no_bf16(
    on_metal: None, monkeypatch: pytest.MonkeyPatch, info: dict[str, str], emulated: bool
) -> None:
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert device.emulates_bfloat16() == emulated
    monkeypatch.setattr(device, "on_metal", lambda: False)
    assert not device.emulates_bfloat16()


@pytest.fixture
def on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "on_metal", lambda: True)


@pytest.mark.parametrize(
    "queries, query_dim, value_dim, group, fused",
    [
        (1, 64, 64, 8, True),
        (1, 80, 80, 1, False),
        (1, 128, 128, 32, True),
        (2, 128, 128, 32, False),
        (8, 128, 128, 4, True),
        (8, 128, 128, 5, False),
        (1, 192, 128, 1, True),
        (1, 192, 192, 1, False),
        (1, 256, 256, 4, True),
        (1, 512, 512, 8, False),
        (1, 576, 512, 16, False),
        (9, 64, 64, 32, True),
        (9, 72, 72, 1, True),
        (9, 80, 80, 1, True),
        (2048, 128, 128, 8, True),
        (2048, 192, 128, 1, False),
        (2048, 192, 192, 1, False),
        (2048, 256, 256, 2, False),
        (2048, 112, 112, 1, False),
    ],
)
def test_which_shapes_are_fused(queries: int, query_dim: int, value_dim: int, group: int, fused: bool) -> None:
    assert metal.fuses(queries, query_dim, value_dim, group) is fused


def anatomy_of(name: str, *, head_dim: int, heads: int) -> Anatomy:
    """The anatomy of a model, as if its layers had heads of this dimension."""
    found = survey(tiny(name))
    for leaf in found.leaves:
        if leaf.plain is not None:
            k, v = leaf.plain
            leaf.plain = (k._replace(dim=head_dim), v._replace(dim=head_dim))
    found.heads = heads
    return found


def test_scores_are_reserved_where_metal_stores_them(on_metal: None) -> None:
    """16 heads of 256, a chunk of 2,048 at 65,536 tokens: three score arrays of 8 GiB each, not half a GiB."""
    wide, narrow = anatomy_of("llama", head_dim=256, heads=16), anatomy_of("llama", head_dim=128, heads=16)
    assert wide.scratch_bytes(2048, 65536, joins=False) > 3 * 16 * 2048 * 65536 * 4 == 24 * GIB
    assert narrow.scratch_bytes(2048, 65536, joins=False) < GIB
    assert wide.scratch_bytes(1, 65536, joins=False) == narrow.scratch_bytes(1, 65536, joins=False)


@pytest.mark.parametrize("head_dim, stored", [(64, False), (128, False), (192, True), (256, True)])
def test_scores_are_reserved_where_cuda_stores_them(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, stored: bool
) -> None:
    """As measured: `benchmarks/fused.py`."""
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    scratch = anatomy_of("llama", head_dim=head_dim, heads=16).scratch_bytes(2048, 65536, joins=False)
    assert (scratch > 16 * 2048 * 65536 * 4) == stored and (scratch < GIB) != stored
    assert is_fused(2048, 192, 128) is False


def test_chunks_shorten_as_the_context_grows() -> None:
    assert metal.longest_chunk(2048) >= 2048
    assert metal.longest_chunk(32768) == 2048
    assert metal.longest_chunk(131072) == 512
    assert metal.longest_chunk(1 << 30) == metal.SHORTEST_CHUNK
    assert all(metal.longest_chunk(n) * n <= metal.CHUNK_TIMES_CONTEXT for n in range(2048, 1 << 20, 4097))


def test_a_prompt_is_cut_into_shorter_chunks(on_metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metal, "CHUNK_TIMES_CONTEXT", 1 << 14)
    tokens = [1 + i % 50 for i in range(600)]
    with onefold.PrefixCache(tiny("llama"), "64MB") as cache, cache.lease(tokens) as lease:
        sizes = []
        for chunk in lease.chunks(256):
            sizes.append(len(chunk))
            for leaf in lease.hold.leaves:  # stands in for the forward
                leaf.offset += len(chunk)
        assert sum(sizes) == 599
        assert sizes[0] == 64 and sizes == sorted(sizes, reverse=True) and min(sizes[:-1]) == metal.SHORTEST_CHUNK


def test_the_pool_is_large_enough_on_metal(on_metal: None) -> None:
    assert device.pool_bytes(1 << 30) == 256 << 20
    assert device.pool_bytes(512 << 20) == 128 << 20
    assert device.pool_bytes(64 << 30) == 1 << 30


# -- residency ---------------------------------------------------------------------------------------


def test_the_wired_limit_is_set_before_the_engine_computes_anything(
    monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """It must not change during an evaluation. mlx-lm's own function decides how much, and on which systems."""
    threads: list[list[str]] = []
    monkeypatch.setattr(
        engine, "maybe_set_recommended_wired_limit", lambda: threads.append([t.name for t in threading.enumerate()])
    )
    with engine.Engine(*mlx_lm.load(str(model)), budget="64MB"):
        assert len(threads) == 1 and "onefold-engine" not in threads[0]
        assert "onefold-engine" in {t.name for t in threading.enumerate()}


# -- buffers ---------------------------------------------------------------------------------------


def test_padding_is_the_most_that_pages_cost() -> None:
    """Each array of a slab is rounded up to whole pages, whatever the slab's capacity: the books count the worst."""
    spec = LayerSpec((ArraySpec(2, 64, mx.float16), ArraySpec(2, 1, mx.float16)))
    store = Store([spec] * 3, Ledger(1 << 30), page_bytes=device.METAL_PAGE)
    for capacity in range(8, 5000, 8):
        real = 3 * sum(-(a.token_bytes * capacity) % device.METAL_PAGE for a in spec.arrays)
        assert real <= store.padding_bytes
    assert Store([spec] * 3, Ledger(1 << 30)).padding_bytes == 0
    assert Store([LayerSpec((ArraySpec(8, 128, mx.float16),))], Ledger(1 << 30), page_bytes=16384).padding_bytes == 0


def test_padding_is_reserved_with_a_slab_and_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "page_bytes", lambda: device.METAL_PAGE)
    model = FakeModel(("full",) * 3)
    with PrefixCache(model, "64MB") as cache:
        each = cache.state.store.padding_bytes
        assert each > 6 * device.METAL_PAGE // 2
        for seed in range(4):
            Session(model, cache, text(40, seed)).prefill().commit()
        assert cache.stats().bytes["padding"] == len(cache.state.store.slabs) * each > 0
        cache.check()
        cache.clear()
        assert cache.stats().bytes["padding"] == 0
    room = Ledger(3 * each)
    with pytest.raises(BudgetError):
        Store(cache.state.store.specs, room, device.METAL_PAGE).slab(1 << 20)
    assert room.used_bytes == 0


@pytest.mark.parametrize("kinds", [("full",) * 4, ("full", "recurrent")])
def test_buffers_are_evicted_before_the_device_has_no_more(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]
) -> None:
    model, limit = FakeModel(kinds), 100
    monkeypatch.setattr(device, "buffer_limit", lambda: limit)
    with PrefixCache(model, "256MB", min_checkpoint_tokens=1) as cache:
        seen = []
        for seed in range(60):
            tokens = [seed, *text(20, seed)]
            Session(model, cache, tokens).prefill().commit()
            seen.append(cache.stats().buffers)
            assert cache.inventory.matched(tokens) == len(tokens), "the conversation that was just used stays"
        assert limit / 2 < max(seen) <= 0.8 * limit
        assert cache.stats().evicted_tokens > 0
        cache.check()
