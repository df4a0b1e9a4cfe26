"""The contract of kinds/base.py, one suite over every kind of layer.

The points are those of ollama's cache.go: d1 snapshot, d2 rewind, d3 restore, d4 merge and split, d5 order,
d6 free. The oracle is a layer that was never snapshotted and was fed the same tokens, and for windows also
mlx-lm's own ring. A token's keys and values depend on its position alone.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from onefold.cache.memory.ledger import Ledger
from onefold.cache.memory.segment import Store
from onefold.cache.memory.shapes import ArraySpec
from onefold.cache.memory.track import Track
from onefold.cache.model.formats.plain import PlainCodec
from onefold.cache.model.formats.registry import KvFormat
from onefold.cache.model.kinds.base import Snapshot
from onefold.cache.model.kinds.bound import Bound
from onefold.cache.model.kinds.chunked import ChunkedLayer
from onefold.cache.model.kinds.composite import CompositeLayer
from onefold.cache.model.kinds.full import SegmentedLayer
from onefold.cache.model.kinds.own import OwnLayer
from onefold.cache.model.kinds.recurrent import RecurrentLayer
from onefold.cache.model.kinds.rotating import RotatingLayer
from onefold.errors import BudgetError

HEADS, DIM = 2, 64
WINDOW, KEEP = 16, 4
SPEC = ArraySpec(HEADS, DIM, mx.float32)
TAIL = 3
"""What a recurrent layer keeps of its last tokens, as a convolution does."""

Make = Callable[[int], Any]
"""Makes an empty layer whose window, chunk or bound is so many tokens."""


def kv(start: int, n: int) -> tuple[mx.array, mx.array]:
    """Keys and values of the tokens at [start, start + n): their first channel is the position."""
    position = mx.arange(start, start + n, dtype=mx.float32)[None, None, :, None]
    channel = mx.arange(DIM, dtype=mx.float32) % 8
    head = mx.arange(HEADS, dtype=mx.float32)[None, :, None, None]
    keys = position + channel * (1 + head)
    return keys, -keys - 1


def codec_of(kv: str) -> Any:
    return KvFormat(kv).codec(SPEC, SPEC)


def segmented(codec: Any = None, n_layers: int = 1, budget: int = 1 << 40, **options: Any) -> list[SegmentedLayer]:
    codec = codec or PlainCodec()
    track = Track(Store([codec.spec(SPEC, SPEC)] * n_layers, Ledger(budget)))
    return [SegmentedLayer(track, i, codec, **options) for i in range(n_layers)]


class Keeper:
    """A cache class such as a model brings along: a tail that is replaced, and a sum that is written in place."""

    def __init__(self) -> None:
        self.offset = 0
        self.tail: mx.array | None = None
        self.total: mx.array | None = None

    def take(self, activations: mx.array) -> None:
        if self.total is None:
            self.total = mx.zeros((1, HEADS, 4, DIM))
        self.total[:, :, self.offset % 4, :] += activations.sum(axis=2)
        tail = activations if self.tail is None else mx.concatenate([self.tail, activations], axis=2)
        self.tail = tail[..., -TAIL:, :]
        self.offset += activations.shape[2]

    @property
    def state(self) -> Any:
        return self.tail, self.total


@dataclass(frozen=True)
class Case:
    name: str
    make: Make
    splits: bool = False
    """A snapshot is a range: it can be cut, clamped and joined anywhere."""
    window: bool = False
    recurrent: bool = False
    chunked: bool = False

    def fresh(self, *chunks: int, window: int = WINDOW) -> Any:
        return feed(self.make(window), *chunks)


CASES = [
    Case("full", lambda w: segmented()[0], splits=True),
    *(Case(f"quantised_{kv}", lambda w, kv=kv: segmented(codec_of(kv))[0], splits=True) for kv in ("8", "4", "turbo3")),
    Case("rotating", RotatingLayer, window=True),
    Case("rotating_keep", lambda w: RotatingLayer(w, KEEP), window=True),
    Case("chunked", ChunkedLayer, chunked=True),
    Case("recurrent", lambda w: RecurrentLayer(2), recurrent=True),
    Case("own", lambda w: OwnLayer.like(Keeper()), recurrent=True),
    Case("composite_kv_kv", lambda w: CompositeLayer(*segmented(n_layers=2)), splits=True),
    Case("composite_arrays_kv", lambda w: CompositeLayer(RecurrentLayer(2), segmented()[0]), recurrent=True),
    Case("bounded_unrotated", lambda w: segmented(bound=Bound(1 << 20, KEEP))[0], splits=True),
    Case("bounded_rotated", lambda w: segmented(bound=Bound(w, KEEP))[0], window=True),
    Case("bounded_rotated_8", lambda w: segmented(codec_of("8"), bound=Bound(w, KEEP))[0], window=True),
]
RANGES = [c for c in CASES if c.splits]
WINDOWS = [c for c in CASES if c.window]
POINTS = [c for c in CASES if c.recurrent or c.window or c.chunked]
WHOLE = [c for c in POINTS if not c.name.startswith("composite")]
"""Kinds whose snapshot is the whole state."""


def over(cases: Iterable[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(cases), ids=lambda c: c.name)


def feed(layer: Any, *chunks: int) -> Any:
    for n in chunks:
        _update(layer, layer.offset, n)
    return layer


def _update(layer: Any, start: int, n: int) -> Any:
    if isinstance(layer, CompositeLayer):
        return [_update(member, start, n) for member in layer.caches]
    if isinstance(layer, OwnLayer):
        return layer.take(kv(start, n)[0])  # type: ignore[attr-defined]
    if isinstance(layer, RecurrentLayer):
        activations, _ = kv(start, n)
        before = layer[0]
        if before is not None:
            activations = mx.concatenate([before, activations], axis=2)
        layer[0] = activations[..., -TAIL:, :]
        total, weight = layer[1], mx.arange(1, n + 1, dtype=mx.float32)[None, None, :, None]
        new = (activations[..., -n:, :] * weight).sum(axis=2)
        layer[1] = new if total is None else total + new
        return layer.advance(n)
    if isinstance(layer, (ChunkedLayer, ChunkedKVCache)):
        layer.maybe_trim_front()
    return layer.update_and_fetch(*kv(start, n))


def by_position(array: mx.array) -> np.ndarray:
    """A ring's entries, oldest first, wherever they lie."""
    found = np.array(array)
    return found[:, :, np.argsort(np.abs(found[0, 0, :, 0]), kind="stable"), :]


def decoded(layer: Any, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """A bounded layer is compared by its entries' values, whatever it has become."""
    codec = layer.codec if isinstance(layer, SegmentedLayer) else PlainCodec()
    if codec.plain:
        return arrays
    parts = [mx.array(a) for a in arrays]
    return [np.array(a) for a in codec.as_made(parts, mx.float32)]


def unpacked(ring: Any) -> list[mx.array]:
    """A ring's keys and values where they lie, dequantised if they are packed."""
    keys, values = ring.keys_and_values()
    if isinstance(keys, mx.array):
        return [keys, values]
    ((view,),) = keys.rows
    arrays = [a[..., view.lo : view.hi, :] for a in view.arrays]
    return list(ring.codec.as_made(arrays, mx.float32))


def held(layer: Any) -> list[np.ndarray]:
    """Everything that a layer's future depends on."""
    if isinstance(layer, CompositeLayer):
        return [a for member in layer.caches for a in held(member)]
    if isinstance(layer, OwnLayer):
        return [np.array(a) for a in layer.live_arrays()]
    if isinstance(layer, RecurrentLayer):
        return [np.array(a) for a in layer.cache if a is not None]
    if layer.offset == 0:
        return []
    if isinstance(layer, ChunkedLayer):
        end = layer.offset - layer.start_position
        start = max(0, end - layer.chunk_size)
        return [np.array(a[..., start:end, :]) for a in (layer.keys, layer.values)]
    if isinstance(layer, SegmentedLayer) and layer.ring is None:
        views = layer.track.read(layer.index, layer.offset)
        parts = [[np.array(a[..., lo:hi, :]) for a in arrays] for arrays, lo, hi, *_ in views]
        joined = [np.concatenate(column, axis=2) for column in zip(*parts, strict=True)]
        return joined if layer.bound is None else decoded(layer, joined)
    ring = layer.ring if isinstance(layer, SegmentedLayer) else layer
    entries = [by_position(a) for a in unpacked(ring)]
    n, keep = min(ring.offset, ring.max_size), ring.keep
    return [np.concatenate([e[:, :, :keep], e[:, :, keep:][:, :, e.shape[2] - n :]], axis=2) for e in entries]


def same(a: Any, b: Any) -> bool:
    left, right = held(a), held(b)
    return a.offset == b.offset and len(left) == len(right) and all(map(np.array_equal, left, right))


def same_future(a: Any, b: Any) -> bool:
    """Not only the same state, but the same state after more tokens, in chunks and one by one."""
    return same(a, b) and all(same(feed(a, n), feed(b, n)) for n in (1, 5, 1, 20, 1))


def values_of(snapshot: Any) -> list[np.ndarray]:
    if not isinstance(snapshot, Snapshot):
        return [a for m in snapshot.members if m is not None for a in values_of(m)]
    return [np.array(a) for a in snapshot.arrays if a is not None]


@pytest.fixture(autouse=True)
def no_pool() -> Iterator[None]:
    """A buffer from MLX's pool may be larger than what was asked for; here bytes are counted exactly."""
    before = mx.set_cache_limit(0)
    mx.clear_cache()
    yield
    mx.set_cache_limit(before)


def active() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


# -- d1: snapshot ----------------------------------------------------------------------------


@over(CASES)
@pytest.mark.parametrize(("chunks", "start"), [((10,), -3), ((16,), 0), ((10, 15), 7), ((25, 1, 1), 0), ((1,) * 20, 7)])
def test_d1_snapshot_leaves_live_state_unchanged(case: Case, chunks: tuple[int, ...], start: int) -> None:
    layer = case.fresh(*chunks)
    snapshot = layer.snapshot(start)
    assert snapshot.start == max(0, start) and snapshot.end == layer.offset == sum(chunks)
    assert same_future(layer, case.fresh(*chunks))


@over(CASES)
@pytest.mark.parametrize("chunks", [(10,), (16,), (10, 15), (1,) * 20], ids=str)
@pytest.mark.parametrize("more", [(1,) * 20, (9, 1, 9)], ids=str)
def test_d1_snapshot_keeps_its_values_while_the_layer_goes_on(
    case: Case, chunks: tuple[int, ...], more: tuple[int, ...]
) -> None:
    layer = case.fresh(*chunks)
    snapshot = layer.snapshot()
    before = values_of(snapshot)
    feed(layer, *more)
    held(layer)
    assert all(map(np.array_equal, values_of(snapshot), before))


@over(CASES)
@pytest.mark.parametrize("more", [(1,), (1, 1), (9,)], ids=str)
@pytest.mark.parametrize("at", [10, 15, 16, 17, 25])
def test_d1_snapshot_keeps_its_values_after_it_was_restored(case: Case, at: int, more: tuple[int, ...]) -> None:
    """Item assignment shows in every holder of a Python object: a restored layer must not write into it."""
    snapshot = case.fresh(at).snapshot()
    before = values_of(snapshot)
    for _ in range(2):
        layer = case.make(WINDOW)
        assert layer.restore(snapshot, at)
        assert same(feed(layer, *more), case.fresh(at, *more))
        assert all(map(np.array_equal, values_of(snapshot), before))


@over(c for c in CASES if not c.recurrent)
@pytest.mark.parametrize("target", [6, 9])
def test_d1_snapshot_keeps_its_values_after_it_was_clamped(case: Case, target: int) -> None:
    snapshot = case.fresh(10).snapshot()
    before = values_of(snapshot)
    for _ in range(2):
        layer = case.make(WINDOW)
        assert layer.restore(snapshot, target)
        other = case.fresh(target)
        for goes_on in (layer, other):
            _update(goes_on, 500, 1)  # another token than the snapshot has there
        assert same(layer, other)
        assert all(map(np.array_equal, values_of(snapshot), before))


@over(c for c in CASES if not c.recurrent)
@pytest.mark.parametrize("at", [12, 16, 256])
def test_d1_snapshot_keeps_its_values_after_the_layer_took_another_branch(case: Case, at: int) -> None:
    layer = case.fresh(at, window=256)
    snapshot = layer.snapshot()
    before = values_of(snapshot)
    assert layer.restore(None, at - 7)
    _update(layer, 500, 3)
    held(layer)
    assert all(map(np.array_equal, values_of(snapshot), before))


@over(CASES)
def test_d1_nothing_new_gives_none(case: Case) -> None:
    assert case.make(WINDOW).snapshot() is None
    for chunks in ((10,), (20, 5)):
        layer = case.fresh(*chunks)
        assert layer.snapshot(layer.offset) is None
        assert layer.snapshot(layer.offset + 7) is None
        assert layer.snapshot(layer.offset - 1) is not None


@over(RANGES)
def test_d1_a_range_has_the_bytes_of_its_tokens(case: Case) -> None:
    layer = case.fresh(300)
    whole, part = layer.snapshot(), layer.snapshot(270)
    assert part.size * 10 == whole.size
    assert (part.start, part.end) == (270, 300)


@over(WINDOWS)
@pytest.mark.parametrize("chunks", [(5,), (15,), (16,), (17,), (40,), (1,) * 40, (3, 1, 30, 1)], ids=str)
def test_d1_a_window_has_exactly_its_entries_in_order(case: Case, chunks: tuple[int, ...]) -> None:
    layer = case.fresh(*chunks)
    keys, values = decoded(layer, values_of(layer.snapshot()))
    n, total = min(sum(chunks), WINDOW), sum(chunks)
    keep = 0 if case.name == "rotating" else KEEP
    first = list(range(min(keep, n)))
    assert np.rint(keys[0, 0, :, 0]).tolist() == first + list(range(total - (n - len(first)), total))
    assert values.shape == keys.shape


@over(CASES)
def test_d1_snapshot_pins_only_its_own_bytes(case: Case) -> None:
    before = active()
    layer = case.fresh(4096, window=64)
    mx.eval(layer.live_arrays())
    snapshot = layer.snapshot(4032)
    layer.free()
    del layer
    assert snapshot.size < 256 << 10
    assert abs(active() - before - snapshot.size) < 4096
    snapshot.close()
    assert active() - before < 4096


@over(CASES)
def test_d1_snapshot_is_evaluated(case: Case) -> None:
    """Evaluated arrays cross threads; lazy ones do not."""
    snapshot = case.fresh(10).snapshot()
    seen: list[list[np.ndarray]] = []
    thread = threading.Thread(target=lambda: seen.append(values_of(snapshot)))
    thread.start()
    thread.join()
    assert len(seen) == 1


# -- d2: rewind ------------------------------------------------------------------------------


@over(c for c in CASES if not c.recurrent)
@pytest.mark.parametrize("chunks", [(12,), (1,) * 12, (5, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("target", [0, 1, 7, 11, 12])
def test_d2_rewinds_what_has_not_wrapped(case: Case, chunks: tuple[int, ...], target: int) -> None:
    layer = case.fresh(*chunks)
    assert layer.restore(None, target)
    assert layer.offset == target
    assert same_future(layer, case.fresh(target) if target else case.make(WINDOW))


@over(CASES)
@pytest.mark.parametrize("chunks", [(12,), (20, 5), (20, 1, 1)], ids=str)
def test_d2_unreachable_targets_are_refused_and_leave_the_state(case: Case, chunks: tuple[int, ...]) -> None:
    layer = case.fresh(*chunks)
    for target in (-1, -100, layer.offset + 1, layer.offset + 1000):
        assert not layer.can_restore(None, target)
        assert not layer.restore(None, target)
    assert same_future(layer, case.fresh(*chunks))


@over(CASES)
def test_d2_the_offset_itself_is_always_reachable(case: Case) -> None:
    for chunks in ((12,), (20, 5), (20, 1)):
        layer = case.fresh(*chunks)
        assert layer.restore(None, layer.offset)
        assert same_future(layer, case.fresh(*chunks))


@over(WINDOWS)
@pytest.mark.parametrize("chunks", [(1,) * 17, (20, 1, 1), (20, 16, 1)], ids=str)
def test_d2_a_wrapped_window_refuses_to_rewind(case: Case, chunks: tuple[int, ...]) -> None:
    layer = case.fresh(*chunks)
    for target in (0, 1, 5, layer.offset - 1):
        assert not layer.restore(None, target)
    assert layer.trim(1) == 0 and not layer.is_trimmable()
    assert same_future(layer, case.fresh(*chunks))


@over(WINDOWS)
@pytest.mark.parametrize("chunks", [(17,), (20, 5), (20, 1, 4)], ids=str)
def test_d2_a_wrapped_window_rewinds_within_its_last_forward(case: Case, chunks: tuple[int, ...]) -> None:
    """A forward of several tokens leaves more entries than the window has; the last of them can be taken back."""
    for back in range(1, chunks[-1]):
        layer = case.fresh(*chunks)
        assert layer.is_trimmable() and layer.trim(back) == back
        assert layer.offset == sum(chunks) - back
        assert same_future(layer, case.fresh(*chunks[:-1], chunks[-1] - back))
    layer = case.fresh(*chunks)
    if len(chunks) > 1:
        assert not layer.restore(None, layer.offset - chunks[-1] - 1)
    assert not layer.restore(None, 0)
    assert same_future(layer, case.fresh(*chunks))


@over(WINDOWS)
def test_d2_a_full_window_that_lost_nothing_rewinds(case: Case) -> None:
    for chunks in ((16,), (1,) * 16, (9, 7)):
        layer = case.fresh(*chunks)
        assert layer.restore(None, 15)
        assert same_future(layer, case.fresh(15))


@over(c for c in CASES if c.recurrent)
def test_d2_a_recurrent_state_refuses_to_rewind(case: Case) -> None:
    layer = case.fresh(12)
    for target in (0, 5, 11):
        assert not layer.restore(None, target)
    assert same_future(layer, case.fresh(12))


def test_d2_a_chunk_rewinds_to_where_its_start_is_still_there() -> None:
    layer = feed(ChunkedLayer(WINDOW), 20, 5, 1)  # the front was trimmed to 16 tokens before the last two
    assert layer.start_position == 9
    for target in (0, 8, 9, 15):
        assert not layer.restore(None, target)  # its chunk began at 0
    assert layer.trim(20) == 0
    assert same(layer, feed(ChunkedLayer(WINDOW), 20, 5, 1))
    assert layer.restore(None, 18)
    keys, _ = layer.update_and_fetch(*kv(18, 1))
    assert np.array(keys)[0, 0, -3:, 0].tolist() == [16, 17, 18]


@over(RANGES)
def test_d2_trim_is_a_rewind(case: Case) -> None:
    layer = case.fresh(300)
    assert layer.is_trimmable() and layer.trim(45) == 45
    assert same_future(layer, case.fresh(255))


# -- d3: restore -----------------------------------------------------------------------------


@over(CASES)
@pytest.mark.parametrize("chunks", [(15,), (16,), (17,), (25, 1, 1), (1,) * 30], ids=str)
@pytest.mark.parametrize("live", ["same", "further", "freed", "other"])
def test_d3_restore_puts_the_state_back(case: Case, chunks: tuple[int, ...], live: str) -> None:
    layer = case.fresh(*chunks)
    snapshot = layer.snapshot()
    if live == "further":
        feed(layer, 1, 30, 1)
    elif live == "freed":
        layer.free()
    elif live == "other":
        layer = case.make(WINDOW)
    assert layer.can_restore(snapshot, sum(chunks))
    assert layer.restore(snapshot, sum(chunks))
    assert same_future(layer, case.fresh(*chunks))
    assert not snapshot.closed


@over(c for c in CASES if not c.recurrent)
@pytest.mark.parametrize("target", [0, 1, 6, 11, 12])
def test_d3_restore_clamps(case: Case, target: int) -> None:
    snapshot = case.fresh(12).snapshot()
    layer = case.fresh(3)
    assert layer.restore(snapshot, target)
    assert same_future(layer, case.fresh(target) if target else case.make(WINDOW))


@over(RANGES)
@pytest.mark.parametrize("target", [2, 5, 7, 12])
def test_d3_a_range_goes_on_top_of_what_the_layer_holds(case: Case, target: int) -> None:
    snapshot = case.fresh(12).snapshot(5)
    for live in (5, 9, 30):
        layer = case.fresh(live)
        assert layer.restore(snapshot, target)
        assert same_future(layer, case.fresh(target))


@over(CASES)
@pytest.mark.parametrize("at", [12, 25])
def test_d3_refused_beyond_the_snapshot(case: Case, at: int) -> None:
    snapshot = case.fresh(at).snapshot()
    layer = case.fresh(40)
    for target in (at + 1, 40, 1000, -1):
        assert not layer.can_restore(snapshot, target)
        assert not layer.restore(snapshot, target)
    assert same_future(layer, case.fresh(40))


@over(c for c in CASES if c not in WHOLE)
@pytest.mark.parametrize("live", [0, 10, 19])
def test_d3_refused_if_the_live_state_ends_before_the_snapshot_begins(case: Case, live: int) -> None:
    snapshot = case.fresh(25).snapshot(20)
    layer = case.fresh(live) if live else case.make(WINDOW)
    for target in (25, 22, 3):
        assert not layer.restore(snapshot, target)
    assert same_future(layer, case.fresh(live) if live else case.make(WINDOW))


@over(WHOLE)
def test_d3_a_point_is_the_whole_state_and_needs_no_live_state(case: Case) -> None:
    snapshot = case.fresh(25).snapshot(20)
    layer = case.make(WINDOW)
    assert layer.restore(snapshot, 25)
    assert same_future(layer, case.fresh(25))


@over(WINDOWS)
@pytest.mark.parametrize("at", [17, 25])
def test_d3_refused_if_clamping_leaves_an_incomplete_window(case: Case, at: int) -> None:
    snapshot = case.fresh(at).snapshot()
    layer = case.fresh(3)
    for target in (at - 1, 10, 3, 0):
        assert not layer.restore(snapshot, target)
    assert same_future(layer, case.fresh(3))


@over(c for c in CASES if c.recurrent)
def test_d3_a_recurrent_state_is_not_clamped(case: Case) -> None:
    snapshot = case.fresh(12).snapshot()
    layer = case.fresh(3)
    for target in (0, 3, 11):
        assert not layer.restore(snapshot, target)
    assert same_future(layer, case.fresh(3))


def test_d3_a_chunk_is_clamped_to_where_its_start_is_still_there() -> None:
    snapshot = feed(ChunkedLayer(WINDOW), 20, 5).snapshot()  # holds [9, 25)
    layer = feed(ChunkedLayer(WINDOW), 3)
    for target in (0, 3, 9, 15):
        assert not layer.restore(snapshot, target)
    assert same(layer, feed(ChunkedLayer(WINDOW), 3))
    assert layer.restore(snapshot, 17)
    keys, _ = layer.update_and_fetch(*kv(17, 1))
    assert np.array(keys)[0, 0, -2:, 0].tolist() == [16, 17]


def test_d3_a_window_of_another_size_is_refused() -> None:
    for at in (10, 20):
        snapshot = feed(RotatingLayer(WINDOW, KEEP), at).snapshot()
        others = [RotatingLayer(WINDOW), RotatingLayer(32, KEEP), segmented(bound=Bound(32, KEEP))[0]]
        assert not any(layer.restore(snapshot, at) for layer in others)
        assert all(layer.offset == 0 for layer in others)
    assert not ChunkedLayer(32).restore(feed(ChunkedLayer(WINDOW), 20).snapshot(), 20)


def test_d3_a_composite_restores_all_members_or_none() -> None:
    """The recurrent member could; the range does not reach."""
    layer = CompositeLayer(feed(RecurrentLayer(2), 12), feed(segmented()[0], 3))
    snapshot = feed(CompositeLayer(RecurrentLayer(2), segmented()[0]), 12).snapshot(8)
    before = held(layer)
    assert not layer.restore(snapshot, 12)
    assert all(map(np.array_equal, held(layer), before)) and [c.offset for c in layer.caches] == [12, 3]


def test_d3_a_restore_that_has_no_room_leaves_the_state() -> None:
    snapshot = feed(segmented()[0], 2000).snapshot()
    token_bytes = 2 * SPEC.token_bytes
    layer = feed(segmented(budget=512 * token_bytes)[0], 200)
    with pytest.raises(BudgetError):
        layer.restore(snapshot, 2000)
    assert same_future(layer, feed(segmented()[0], 200))


def test_d3_a_bounded_layer_takes_snapshots_from_both_sides_of_its_rotation() -> None:
    bound = Bound(WINDOW, KEEP)
    layer = feed(segmented(bound=bound)[0], 10)
    before = layer.snapshot()
    part = layer.snapshot(5)
    feed(layer, 20)
    after = layer.snapshot()
    assert layer.ring is not None
    assert not layer.restore(part, 10)  # the five tokens before it are gone
    assert same(layer, feed(segmented(bound=bound)[0], 10, 20))
    for target in (10, 7):
        assert layer.restore(before, target)
        assert same_future(layer, feed(segmented(bound=bound)[0], target))
    assert layer.restore(after, 30)
    assert same_future(layer, feed(segmented(bound=bound)[0], 10, 20))
    unrotated = feed(segmented(bound=bound)[0], 4)
    assert unrotated.restore(after, 30)
    assert unrotated.track.store.ledger.used_bytes == 0  # the ring has its own arrays
    assert same_future(unrotated, feed(segmented(bound=bound)[0], 10, 20))


RINGS = {
    "rotating": lambda size, keep: RotatingLayer(size, keep),
    "bounded": lambda size, keep: segmented(bound=Bound(size, keep))[0],
}


def _same_call(layer: Any, stock: Any, n: int, window: int | None = None) -> None:
    """One forward on both: queries see the same tokens, and in the same order where more than one is new."""
    start = stock.offset
    masks = [c.make_mask(n, window_size=window) for c in (layer, stock)]
    got, want = [c.update_and_fetch(*kv(start, n)) for c in (layer, stock)]
    assert layer.offset == stock.offset == start + n
    if n > 1:
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert type(masks[0]) is type(masks[1])
        assert masks[0] == masks[1] if isinstance(masks[0], str) else np.array_equal(masks[0], masks[1])
        return
    seen = []
    for fetched, mask in zip((got, want), masks, strict=True):
        visible = np.ones(fetched[0].shape[2], bool) if mask is None else np.array(mask).reshape(-1)
        seen.append([by_position(mx.array(np.array(a)[:, :, visible])) for a in fetched])
    assert all(map(np.array_equal, *seen))


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("keep", [0, KEEP])
@pytest.mark.parametrize("at", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
@pytest.mark.parametrize("how", ["chunk", "mixed"])
@pytest.mark.parametrize("calls", [(1,) * 20, (1, 9, 1, 1), (9, 1, 1, 9)], ids=str)
def test_d3_the_write_position_comes_back(ring: str, keep: int, at: int, how: str, calls: tuple[int, ...]) -> None:
    before = {"chunk": (at,), "mixed": (5, at - 9, *(1,) * 4)}[how]
    snapshot = feed(RINGS[ring](WINDOW, keep), *before).snapshot()
    layer = RINGS[ring](WINDOW, keep)
    assert layer.restore(snapshot, at)
    stock = feed(RotatingKVCache(WINDOW, keep), *before)
    for n in calls:
        _same_call(layer, stock, n)


@pytest.mark.parametrize("at", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
@pytest.mark.parametrize("calls", [(1,) * 20, (1, 9, 1, 1)], ids=str)
def test_d3_masks_follow_the_write_position(at: int, calls: tuple[int, ...]) -> None:
    """A window smaller than the ring is told by where the ring writes next."""
    snapshot = feed(RotatingLayer(WINDOW), *(1,) * at).snapshot()
    layer, stock = RotatingLayer(WINDOW), feed(RotatingKVCache(WINDOW), *(1,) * at)
    assert layer.restore(snapshot, at)
    for n in calls:
        _same_call(layer, stock, n, window=8)


# -- d4: merge and split ---------------------------------------------------------------------


def closed_once(snapshot: Any) -> bool:
    """Whether it was closed already; closing it again must raise."""
    if not snapshot.closed:
        return False
    with pytest.raises(RuntimeError, match="closed already"):
        snapshot.close()
    return True


@over(CASES)
def test_d4_a_snapshot_is_closed_exactly_once(case: Case) -> None:
    snapshot = case.fresh(10).snapshot()
    assert snapshot.size > 0
    snapshot.close()
    assert snapshot.size == 0 and closed_once(snapshot)


@over(RANGES)
def test_d4_merge_joins_ranges_and_consumes_them(case: Case) -> None:
    parent, child = case.fresh(10).snapshot(3), case.fresh(25).snapshot(10)
    size = parent.size + child.size
    merged = case.make(WINDOW).join(parent, child)
    assert (merged.start, merged.end, merged.size) == (3, 25, size)
    assert closed_once(parent) and closed_once(child)
    layer = case.fresh(3)
    assert layer.restore(merged, 25) and same_future(layer, case.fresh(25))
    merged.close()


@over(POINTS)
def test_d4_child_supersedes_parent_on_merge(case: Case) -> None:
    parent, child = case.fresh(10).snapshot(), case.fresh(10, 15).snapshot(10)
    layer = case.fresh(10)
    merged = layer.join(parent, child)
    assert closed_once(parent) and not merged.closed
    assert layer.restore(merged, 25) and same_future(layer, case.fresh(10, 15))
    merged.close()
    assert closed_once(merged)


@over(CASES)
def test_d4_merge_with_nothing_consumes_too(case: Case) -> None:
    layer = case.make(WINDOW)
    assert layer.join(None, None) is None
    parent = case.fresh(25).snapshot()
    assert layer.join(parent, None) is None and closed_once(parent)
    child = case.fresh(25).snapshot()
    merged = layer.join(None, child)
    if case in WHOLE:
        assert merged is child and not child.closed
    else:
        assert merged is None and closed_once(child)  # a range without what goes before it


@over(RANGES)
@pytest.mark.parametrize("at", [4, 10, 24])
def test_d4_split_cuts_a_range_and_consumes_it(case: Case, at: int) -> None:
    snapshot = case.fresh(25).snapshot(3)
    size = snapshot.size
    upper, lower = case.make(WINDOW).split(snapshot, at)
    assert closed_once(snapshot)
    assert (upper.start, upper.end, lower.start, lower.end) == (3, at, at, 25)
    assert upper.size + lower.size == size
    layer = case.fresh(3)
    assert layer.restore(upper, at) and same(layer, case.fresh(at))
    assert layer.restore(lower, 25) and same_future(layer, case.fresh(25))


@over(RANGES)
def test_d4_a_split_off_half_pins_only_its_own_bytes(case: Case) -> None:
    before = active()
    layer = case.fresh(4096)
    upper, lower = layer.split(layer.snapshot(), 64)
    layer.free()
    lower.close()
    assert abs(active() - before - upper.size) < 4096
    assert case.fresh(64).snapshot().size == upper.size


@over(CASES)
@pytest.mark.parametrize("at", [-5, 0, 25, 26, 1000])
def test_d4_split_at_or_outside_the_edges_gives_one_side(case: Case, at: int) -> None:
    snapshot = case.fresh(25).snapshot()
    size = snapshot.size
    upper, lower = case.make(WINDOW).split(snapshot, at)
    assert (upper is None) != (lower is None)
    whole = upper if lower is None else lower
    if case in WHOLE:
        assert whole is lower
    else:
        assert whole is (lower if at <= 0 else upper)
    assert whole.size == size and not whole.closed
    layer = case.make(WINDOW)
    assert layer.restore(whole, 25) and same_future(layer, case.fresh(25))
    whole.close()
    assert closed_once(whole)


@over(CASES)
def test_d4_split_of_nothing(case: Case) -> None:
    assert case.make(WINDOW).split(None, 5) == (None, None)


@over(WHOLE)
def test_d4_what_cannot_be_split_stays_with_the_child(case: Case) -> None:
    for n in (25,) if case.name.startswith("bounded_rotated") else (10, 25):  # before it rotates it is a range
        snapshot = case.fresh(n).snapshot()
        upper, lower = case.make(WINDOW).split(snapshot, 5)
        assert upper is None and lower is snapshot and not snapshot.closed


def test_d4_a_composite_splits_what_can_be_split() -> None:
    case = next(c for c in CASES if c.name == "composite_arrays_kv")
    snapshot = case.fresh(12).snapshot()
    upper, lower = case.make(WINDOW).split(snapshot, 8)
    assert closed_once(snapshot)
    assert upper.members[0] is None and (upper.start, upper.end) == (0, 8)
    assert [m is not None for m in lower.members] == [True, True]
    assert not case.make(WINDOW).restore(upper, 8)  # there is no recurrent state at 8
    merged = case.make(WINDOW).join(upper, lower)
    layer = case.make(WINDOW)
    assert layer.restore(merged, 12) and same_future(layer, case.fresh(12))
    merged.close()


# -- d5: rotation ----------------------------------------------------------------------------


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("keep", [0, KEEP])
@given(calls=st.lists(st.one_of(st.just(1), st.integers(2, 40)), min_size=1, max_size=25))
@settings(max_examples=40, deadline=None)
def test_d5_alternating_updates_are_as_in_stock(ring: str, keep: int, calls: list[int]) -> None:
    layer, stock = RINGS[ring](WINDOW, keep), RotatingKVCache(WINDOW, keep)
    for n in calls:
        _same_call(layer, stock, n)


@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("keep", [0, KEEP])
@pytest.mark.parametrize("prompt", [1, 250, 299, 300, 301])
def test_d5_growth_up_to_a_window_larger_than_a_step(ring: str, keep: int, prompt: int) -> None:
    layer, stock = RINGS[ring](300, keep), RotatingKVCache(300, keep)
    for n in (prompt, *(1,) * 8, 45, *(1,) * 8):
        _same_call(layer, stock, n)


@given(
    calls=st.lists(
        st.tuples(st.sampled_from(["step", "chunk", "rewind", "snapshot", "restore"]), st.integers(1, 20)),
        max_size=30,
    ),
    keep=st.sampled_from([0, KEEP]),
    ring=st.sampled_from(sorted(RINGS)),
)
@settings(max_examples=80, deadline=None)
def test_d5_any_sequence_of_calls_holds_the_last_tokens(calls: list[tuple[str, int]], keep: int, ring: str) -> None:
    """The oracle is arithmetic: the head, and the newest of what was written."""
    layer: Any = RINGS[ring](WINDOW, keep)
    kept: list[Any] = []
    have = 0  # entries: after a forward of several tokens they are more than the window
    for what, n in calls:
        if what in ("step", "chunk"):
            feed(layer, 1 if what == "step" else n + 1)
            have = min(have + 1, WINDOW) if what == "step" else min(have, WINDOW - 1) + n + 1
        elif what == "snapshot" and layer.offset:
            kept.append(layer.snapshot())
        elif what == "rewind":
            target = max(0, layer.offset - n)
            left = target if layer.offset <= WINDOW else have - (layer.offset - target)
            can = target == layer.offset or layer.offset <= WINDOW or (target > 0 and left >= min(target, WINDOW))
            assert layer.restore(None, target) == can
            have = left if can else have
        elif what == "restore" and kept:
            snapshot = kept[n % len(kept)]
            assert layer.restore(snapshot, snapshot.end)
            assert layer.offset == snapshot.end
            have = min(snapshot.end, WINDOW)
        entries = min(layer.offset, WINDOW)
        head = min(keep, entries)
        want = [*range(head), *range(layer.offset - (entries - head), layer.offset)]
        if layer.offset:
            assert held(layer)[0][0, 0, :, 0].tolist() == want


@given(calls=st.lists(st.one_of(st.just(1), st.integers(2, 40)), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_d5_chunked_updates_are_as_in_stock(calls: list[int]) -> None:
    layer, stock = ChunkedLayer(WINDOW), ChunkedKVCache(WINDOW)
    for n in calls:
        got, want = _update(layer, stock.offset, n), _update(stock, stock.offset, n)
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
        assert (layer.offset, layer.start_position) == (stock.offset, stock.start_position)


@over(RANGES)
@given(calls=st.lists(st.one_of(st.just(1), st.integers(2, 300)), min_size=1, max_size=8))
@settings(max_examples=10, deadline=None)
def test_d5_the_order_of_tokens_does_not_depend_on_the_cuts(case: Case, calls: list[int]) -> None:
    assert same(case.fresh(*calls), case.fresh(sum(calls)))


# -- d6: free --------------------------------------------------------------------------------


@over(CASES)
@pytest.mark.parametrize("chunks", [(12,), (4096,), (2000, 1, 1)], ids=str)
def test_d6_free_releases_everything(case: Case, chunks: tuple[int, ...]) -> None:
    before = active()
    layer = case.fresh(*chunks)
    mx.eval(layer.live_arrays())
    assert active() > before
    layer.free()
    assert layer.offset == 0 and layer.live_arrays() == []
    assert active() - before < 4096
    for member in getattr(layer, "caches", [layer]):
        if isinstance(member, SegmentedLayer):
            assert member.track.store.ledger.used_bytes == 0
    assert same_future(layer, case.make(WINDOW))


# -- what a layer pins, and how a failed forward is undone ------------------------------------


@pytest.mark.parametrize("n_tokens", [4096, 1])
def test_a_recurrent_state_does_not_pin_the_activations_it_is_a_slice_of(n_tokens: int) -> None:
    """Not even those of one token, which `mx.contiguous` alone would leave behind it."""
    before = active()
    layer = RecurrentLayer(1)
    activations = mx.ones((1, TAIL + n_tokens, 1024))
    mx.eval(activations)
    layer[0] = activations[:, -TAIL:, :]
    mx.eval(layer.live_arrays())
    del activations
    size = sum(a.nbytes for a in layer.live_arrays())
    assert size == TAIL * 4096 and abs(active() - before - size) < 2048


def test_a_recurrent_snapshot_is_a_second_reference() -> None:
    layer = feed(RecurrentLayer(2), 12)
    layer[1] = mx.ones((1, 512, 512))
    mx.eval(layer.live_arrays())
    before = active()
    snapshot = layer.snapshot()
    assert snapshot.size > 1 << 20 and active() - before < 4096


def test_a_restored_window_costs_nothing_until_it_is_written() -> None:
    snapshot = feed(RotatingLayer(1024), 1024).snapshot()
    before = active()
    layer = RotatingLayer(1024)
    layer.restore(snapshot, 1024)
    mx.eval(layer.live_arrays())
    assert active() - before < 4096
    assert {id(a) for a in layer.live_arrays()} == {id(a) for a in snapshot.arrays}
    feed(layer, 1)
    mx.eval(layer.live_arrays())
    assert abs(active() - before - snapshot.size) < 4096
    assert not {id(a) for a in layer.live_arrays()} & {id(a) for a in snapshot.arrays}


def test_a_ring_is_written_in_place() -> None:
    layer = feed(RotatingLayer(4096), 4096, 1)
    mx.eval(layer.live_arrays())
    gc.collect()
    before = active()
    mx.reset_peak_memory()
    for _ in range(3):
        feed(layer, 1)
        mx.eval(layer.live_arrays())
    assert mx.get_peak_memory() - before < sum(a.nbytes for a in layer.live_arrays()) // 8


@over(c for c in CASES if not c.name.startswith("composite"))
@pytest.mark.parametrize("chunks", [(10,), (16,), (25,), (25, 1), (1,) * 20], ids=str)
@pytest.mark.parametrize("failed", [1, 9])
def test_reset_undoes_a_forward(case: Case, chunks: tuple[int, ...], failed: int) -> None:
    layer = case.fresh(*chunks)
    if isinstance(layer, SegmentedLayer) and layer.outgrows(failed):
        layer.rotate()  # its owner does, before the forward that is undone
        layer.track.free()
    mark = layer.mark()
    feed(layer, failed)
    mx.eval(layer.live_arrays())
    layer.reset(mark)
    assert same_future(layer, case.fresh(*chunks))
