"""What a forward must respect on Metal, asked under a pretended Metal: nothing of this was run on a Mac."""

from __future__ import annotations

import mlx.core as mx
import pytest
from tiny import tiny

import onefold
from onefold.cache.memory import device
from onefold.cache.model import metal
from onefold.cache.model.anatomy import Anatomy
from onefold.cache.model.survey import survey

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


def test_other_gpus_are_counted_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "on_gpu", lambda: True)
    wide = anatomy_of("llama", head_dim=256, heads=16)
    assert wide.scratch_bytes(2048, 65536, joins=False) < GIB


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
