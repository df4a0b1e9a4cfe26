"""What a cache shows of itself: outlines, places in the order of eviction, one node, pins, forgetting."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
from fake import FakeModel, Session, settled, text

import onefold
from onefold import PrefixCache
from onefold.cache.memory.lock import run_through
from onefold.cache.memory.outline import NODES_PER_STEP, NodeFacts, Outline, outlining
from onefold.errors import BudgetError, ConfigError, UnknownNode
from onefold.page.icicle import boxes, evictions

MODEL = FakeModel(("full", "full"))


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(MODEL, "50MB") as made:
        yield made


def held(cache: PrefixCache, tokens: list[int], namespace: str = "") -> None:
    Session(MODEL, cache, tokens, namespace=namespace).prefill().commit()


def branches(cache: PrefixCache) -> None:
    """Three conversations on one beginning, and one apart."""
    start = text(40, 1)
    for seed in (2, 3, 4):
        held(cache, [*start, seed, *text(20, seed)])
    held(cache, [63, *text(30, 9)])


def find(outline: Outline, start: int, end: int) -> NodeFacts:
    return next(n for n in outline.nodes if (n.start, n.end) == (start, end))


def test_an_outline_has_every_byte_once(cache: PrefixCache) -> None:
    assert cache.view.outline().nodes == []
    branches(cache)
    held(cache, text(25, 5), namespace="other")
    outline = cache.view.outline()
    assert outline.spaces == ["", "other"]
    assert [n.space for n in outline.nodes].count(1) == 1
    stats = cache.stats()
    assert len(outline.nodes) == stats.nodes
    assert sum(n.kv_bytes for n in outline.nodes) == stats.stored_tokens * stats.token_bytes
    assert sum(n.end - n.start for n in outline.nodes) == stats.stored_tokens
    seen = {0}
    for n in outline.nodes:
        assert n.above in seen, "parents come before children"
        assert n.in_memory and n.readers == n.pins == n.stored_below == 0
        seen.add(n.number)
    assert outline.now >= max(n.last_use for n in outline.nodes)


def test_a_reader_a_pin_and_a_checkpoint_are_shown() -> None:
    model = FakeModel(("full", "recurrent"))
    with PrefixCache(model, "50MB", min_checkpoint_tokens=8) as cache:
        Session(model, cache, text(40, 1)).prefill().decode(1).commit()
        nodes = cache.view.outline().nodes
        assert nodes[0].checkpoint_bytes > 0 and all(n.readers == 0 for n in nodes)
        readers = [cache.lease([*text(40, 1), 5, seed]) for seed in (6, 7)]
        assert cache.view.outline().nodes[0].readers == 2
        for lease in readers:
            lease.cancel()
        assert cache.view.outline().nodes[0].readers == 0
        pin = cache.pin(text(40, 1))
        assert cache.view.outline().nodes[0].pins == 1
        pin.release()


def test_the_places_are_the_order_in_which_nodes_are_evicted(cache: PrefixCache) -> None:
    branches(cache)
    held(cache, [*text(40, 1), 3, *text(20, 3), 7, 7, 7])
    outline = cache.view.outline()
    places = evictions(outline)
    assert sorted(places.values()) == list(range(1, len(outline.nodes) + 1))
    by_place = sorted(outline.nodes, key=lambda n: places[n.number])
    cache.state.nodes.time = lambda: outline.now
    gone: list[int] = []
    while (before := cache.view.outline()).nodes:
        cache.inventory.shrink(cache.inventory.stored_bytes - 1)
        left = {n.number for n in cache.view.outline().nodes}
        gone += [n.number for n in before.nodes if n.number not in left]
        assert gone == [n.number for n in by_place[: len(gone)]]
    assert len(gone) == len(by_place)


def test_what_is_held_is_not_in_the_order(cache: PrefixCache) -> None:
    branches(cache)
    lease = cache.lease([*text(40, 1), 2, *text(20, 2), 1])
    outline = cache.view.outline()
    places = evictions(outline)
    held_now = {n.number for n in outline.nodes if n.readers}
    assert held_now and not held_now & set(places) and len(places) == len(outline.nodes) - len(held_now)
    lease.cancel()


def test_a_pin_keeps_a_node_and_what_is_above_it(cache: PrefixCache) -> None:
    branches(cache)
    node = find(cache.view.outline(), 40, 61)
    pin = cache.view.pin(node.number, cache)
    cache.inventory.shrink(0)
    left = cache.view.outline().nodes
    assert {n.number for n in left} == {node.number, node.above} and all(n.pins == 1 for n in left)
    pin.release()
    cache.inventory.shrink(0)
    assert cache.view.outline().nodes == []


def test_forgetting_takes_a_node_and_all_below(cache: PrefixCache) -> None:
    branches(cache)
    outline = cache.view.outline()
    start = find(outline, 0, 40)
    assert cache.view.forget(start.number) == 40 + 3 * 21
    settled(cache)
    assert [(n.start, n.end) for n in cache.view.outline().nodes] == [(0, 31)]
    with pytest.raises(UnknownNode, match="not held any more"):
        cache.view.forget(start.number)
    with pytest.raises(UnknownNode):
        cache.view.path(start.number)
    with pytest.raises(UnknownNode):
        cache.view.pin(10**12, cache)


def test_forgetting_leaves_what_a_request_reads(cache: PrefixCache) -> None:
    branches(cache)
    lease = cache.lease([*text(40, 1), 2, *text(20, 2), 1])
    start = find(cache.view.outline(), 0, 40)
    assert cache.view.forget(start.number) == 2 * 21
    settled(cache)
    assert lease.cached == 61
    lease.cancel()


def test_a_path_has_its_tokens_and_a_split_node_keeps_its_end(cache: PrefixCache) -> None:
    tokens = text(50, 1)
    held(cache, tokens)
    (node,) = cache.view.outline().nodes
    path = cache.view.path(node.number)
    assert (path.start, path.end, path.space, path.shared_tokens) == (0, 50, "", 0)
    assert path.tokens.tolist() == tokens
    held(cache, [*tokens[:20], 1, 2, 3])
    path = cache.view.path(node.number)
    assert (path.start, path.end) == (20, 50) and path.tokens.tolist() == tokens


def test_which_paths_pass_through_a_node(cache: PrefixCache) -> None:
    ends = []
    start = text(40, 1)
    for seed in (2, 3):
        lease = Session(MODEL, cache, [*start, seed, *text(20, seed)]).prefill().lease
        assert lease.hold.place is None or lease.hold.place() is not None
        lease.commit()
        ends.append(lease.hold.place)
    outline = cache.view.outline()
    shared, one = find(outline, 0, 40), find(outline, 40, 61)
    assert cache.view.through(shared.number, [*ends, None]) == [True, True, False]
    through = cache.view.through(one.number, ends)
    assert sorted(through) == [False, True]
    cache.clear()
    gc.collect()
    held(cache, start)
    (node,) = cache.view.outline().nodes
    assert cache.view.through(node.number, ends) == [False, False], "what was forgotten is not kept by a request"


def chain(cache: PrefixCache, length: int) -> Outline:
    """One path of so many nodes."""
    held(cache, text(length, 1))
    with cache.state.lock:
        (tree,) = cache.state.nodes.trees.values()
        (node,) = tree.root.walk()
        for at in range(1, length):
            tree.split(node, at)
    return cache.view.outline()


def test_a_long_path_is_looked_at_in_steps(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    outline = chain(cache, 2000)
    monkeypatch.setattr("onefold.cache.view.STRETCH_SECONDS", 0.0)
    first, last = find(outline, 0, 1), find(outline, 1999, 2000)
    pin = cache.view.pin(last.number, cache)
    lets_go: list[float] = []
    monkeypatch.setattr(cache.state.lock, "between", lets_go.append)
    for look in (
        lambda: cache.view.path(last.number),
        lambda: cache.view.through(first.number, [last.node] * 200),
        cache.view.purposes,
    ):
        lets_go.clear()
        look()
        assert len(lets_go) >= 5, "the lock is released in between"
    assert len(lets_go) < 40
    assert cache.view.through(first.number, [last.node, first.node]) == [True, True]
    assert cache.view.through(last.number, [last.node, first.node]) == [True, False]
    assert cache.view.path(last.number).tokens.tolist() == text(2000, 1)
    assert cache.view.purposes().pinned_bytes == 2000 * cache.inventory.token_bytes
    pin.release()
    assert cache.view.purposes().pinned_bytes == 0


def test_a_path_may_change_while_it_is_looked_at(cache: PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    outline = chain(cache, 2000)
    monkeypatch.setattr("onefold.cache.view.STRETCH_SECONDS", 0.0)
    last = find(outline, 1999, 2000)
    times: list[int] = []

    def join(_: float) -> None:
        """Other nodes of the path are joined each time that the lock is released."""
        times.append(1)
        with cache.state.lock:
            (tree,) = cache.state.nodes.trees.values()
            nodes = list(tree.root.walk())
            for upper, lower in list(zip(nodes[::2], nodes[1::2], strict=False))[: 40 * len(times)]:
                tree.join(upper, lower)

    monkeypatch.setattr(cache.state.lock, "between", join)
    path = cache.view.path(last.number)
    assert path.tokens.tolist() == text(2000, 1) and path.end == 2000 and times
    cache.check()


def test_purposes_add_up(cache: PrefixCache) -> None:
    branches(cache)
    found, stats = cache.view.purposes(), cache.stats()
    assert found.by_purpose == stats.bytes and found.used_bytes == stats.used_bytes == sum(stats.bytes.values())
    kv = stats.stored_tokens * stats.token_bytes
    assert found.by_purpose["stored"] == kv + found.room_bytes and found.room_bytes >= 0
    assert found.evictable_bytes >= kv and found.weight_bytes == MODEL.lm_head.weight.nbytes
    lease = cache.lease([*text(40, 1), 2, *text(20, 2), 1])
    assert cache.view.purposes().evictable_bytes < found.evictable_bytes
    lease.cancel()


def test_trees_may_change_in_the_middle_of_an_outline(cache: PrefixCache) -> None:
    """Splits, joins and removals between two steps: no error, no node twice, and no parent that is not there."""
    for seed in range(3 * NODES_PER_STEP):
        held(cache, [seed % 60, seed // 60, *text(10, seed)])
    turn = 0
    work = outlining(cache.state.nodes)
    while True:
        try:
            next(work)
        except StopIteration as end:
            found: Outline = end.value
            break
        turn += 1
        held(cache, [turn, 0, *text(4, turn), 63, 62, 61])
        cache.inventory.forget([30 + turn, 0, *text(10, 30 + turn)], 0)
    assert turn >= 3, "an outline has a step for every few nodes"
    numbers = [n.number for n in found.nodes]
    assert len(numbers) == len(set(numbers)) > 2 * NODES_PER_STEP
    assert {n.above for n in found.nodes} <= {0, *numbers}
    assert len(run_through(outlining(cache.state.nodes)).nodes) == cache.stats().nodes
    settled(cache)


def test_on_disk_only(tmp_path) -> None:
    with PrefixCache(MODEL, "50MB", disk=tmp_path, disk_mode="through") as cache:
        held(cache, text(50, 1))
        assert cache.flush(60)
        (node,) = cache.view.outline().nodes
        assert node.in_memory and node.stored_below == 50
        cache.inventory.shrink(0)
        (node,) = cache.view.outline().nodes
        assert not node.in_memory and node.kv_bytes == 0 and node.stored_below == 50
        (box,) = boxes(cache.view.outline(), cache.inventory.token_bytes).values()
        assert box["where"] == "d" and box["total"] == 50 * cache.inventory.token_bytes and box["turn"] is None
        with pytest.raises(ConfigError, match="not whole in memory"):
            cache.view.pin(node.number, cache)
        assert node.is_below and node.point_below_bytes == 0
        assert cache.view.tiers().records > 0
        assert cache.view.forget(node.number) == 50
        assert cache.view.outline().nodes == []


def test_a_state_on_disk_has_a_width(tmp_path) -> None:
    model = FakeModel(("recurrent", "recurrent"))
    with PrefixCache(model, "50MB", disk=tmp_path, disk_mode="through", min_checkpoint_tokens=8) as cache:
        Session(model, cache, text(40, 1)).prefill().decode(1).commit()
        assert cache.flush(60) and cache.inventory.token_bytes == 0
        cache.inventory.shrink(0)
        made = boxes(cache.view.outline(), 0).values()
        assert made and all("d" in box["where"] for box in made)
        assert sum(box["bytes"] for box in made) > 0


def test_a_closed_cache(cache: PrefixCache) -> None:
    branches(cache)
    number = cache.view.outline().nodes[0].number
    cache.close()
    with pytest.raises(ConfigError, match="closed"):
        cache.view.forget(number)
    with pytest.raises(ConfigError, match="closed"):
        cache.view.pin(number, cache)


def test_what_was_pinned_is_not_taken_for_another_request() -> None:
    with PrefixCache(MODEL, 400_000) as cache:
        held(cache, text(300, 1))
        pin = cache.view.pin(cache.view.outline().nodes[0].number, cache)
        with pytest.raises(BudgetError):
            for seed in range(2, 99):
                held(cache, text(3000, seed))
        assert cache.inventory.matched(np.array(text(300, 1))) == 300
        pin.release()


def test_numbers_are_new_in_each_cache() -> None:
    with onefold.PrefixCache(MODEL, "50MB") as one, onefold.PrefixCache(MODEL, "50MB") as other:
        held(one, text(20, 1))
        held(other, text(20, 1))
        numbers = [cache.view.outline().nodes[0].number for cache in (one, other)]
        assert numbers[0] != numbers[1]
        with pytest.raises(UnknownNode):
            one.view.path(numbers[1])
