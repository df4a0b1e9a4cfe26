"""The page without HTTP: the list of requests, hit rates, boxes, what changes, viewers."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.cache.memory.outline import NodeFacts, Outline
from onefold.engine.request import Done, Hit, Started, Text
from onefold.errors import Busy, EngineStopped
from onefold.page.changes import Picture, changes
from onefold.page.history import MOST_ENDED, History, HitRates
from onefold.page.icicle import MOST_BOXES, boxes
from onefold.page.viewers import BACKLOG, MOST_VIEWERS, Viewers
from onefold.server.record import Record

# -- requests ----------------------------------------------------------------------------------------


def record(now: list[float], prompt: int = 100, cached: int = 60, status: int = 200) -> Record:
    made = Record("POST", "/v1/messages", now=lambda: now[0])
    made.status = status
    made.note(0, Started(Hit(prompt, cached, cached)))
    return made


def test_a_request_is_live_until_it_ends() -> None:
    now, history = [0.0], History()
    one = record(now)
    history.began(one)
    assert history.known() == ([one], [])
    now[0] = 2.0
    one.note(0, Text("a"))
    one.note(0, Done("stop", 3, Hit(100, 60, 60)))
    now[0] = 3.0
    history.ended(one)
    live, (ended,) = history.known()
    assert live == [] and ended.request is one and ended.seconds == 3.0
    assert history.typical() == (2.0, 103)
    assert history.rates(60.0) == [0.6]


def test_only_the_last_are_kept_and_those_that_came_to_nothing_are_not() -> None:
    history, quiet = History(), Record("POST", "/v1/messages/count_tokens")
    quiet.status = 200
    history.ended(quiet)
    assert history.known() == ([], []) and history.typical() == (None, None) and history.rates(60.0) == [None]
    for _ in range(MOST_ENDED + 5):
        history.ended(record([0.0]))
    assert len(history.known()[1]) == MOST_ENDED


def test_refusals_are_counted() -> None:
    history = History()
    for status in (200, 503, 429, 400):
        refused = Record("POST", "/v1/messages")
        refused.status = status
        history.ended(refused)
    assert history.refused == 2 and len(history.known()[1]) == 3


def test_failures_do_not_take_the_place_of_what_medians_are_of() -> None:
    now, history = [0.0], History()
    one = record(now)
    now[0] = 2.0
    one.note(0, Text("a"))
    history.ended(one)
    for _ in range(MOST_ENDED):
        history.ended(record_of_a_failure())
    assert history.typical() == (2.0, 100)


def test_hit_rates_forget_what_is_older() -> None:
    now = [1000.0]
    rates = HitRates(lambda: now[0])
    assert rates.share(60) is None
    rates.add(100, 100)
    now[0] += 120
    rates.add(100, 0)
    assert rates.share(60) == 0.0 and rates.share(300) == 0.5
    now[0] += 850
    assert rates.share(900) == 0.0, "the first is older"
    now[0] += 100
    assert rates.share(900) is None
    rates.add(50, 25)
    assert rates.share(900) == 0.5


def record_of_a_failure() -> Record:
    made = Record("POST", "/v1/messages")
    made.status = 400
    return made


# -- boxes -------------------------------------------------------------------------------------------


def facts(number: int, above: int, n_bytes: int, space: int = 0, **more: Any) -> NodeFacts:
    given: dict[str, Any] = {"start": 0, "end": 10, "checkpoint_bytes": 0, "in_memory": True, "stored_below": 0}
    given |= {"is_below": False, "point_below_bytes": 0, "last_use": float(number), "pause": 0.0}
    given |= {"readers": 0, "pins": 0, "node": lambda: None} | more
    return NodeFacts(number=number, above=above, space=space, kv_bytes=n_bytes, **given)


def test_boxes_have_their_own_bytes_and_those_of_all_below() -> None:
    outline = Outline([""], [facts(1, 0, 500), facts(2, 1, 300), facts(3, 1, 200, readers=2), facts(4, 0, 1000)], 10.0)
    made = boxes(outline, 1)
    assert {name: (b["above"], b["bytes"], b["total"]) for name, b in made.items()} == {
        "1": ("", 500, 1000), "2": ("1", 300, 300), "3": ("1", 200, 200), "4": ("", 1000, 1000)
    }  # fmt: skip
    assert made["3"]["turn"] is None and made["1"]["turn"] is None, "it is above a node that is read"
    assert {made["2"]["turn"], made["4"]["turn"]} == {1, 2}


def test_what_is_narrow_is_merged_with_its_siblings() -> None:
    small = [facts(10 + i, 1, 3) for i in range(50)]
    below = [facts(100 + i, 10 + i, 2) for i in range(50)]
    others = [facts(200 + i, 0, 1, space=1) for i in range(7)]
    made = boxes(Outline(["", "other"], [facts(1, 0, 100_000), *small, *below, *others], 1000.0), 1)
    assert set(made) == {"1", "+1", "+s1"}
    assert made["+1"]["merged"] == 100 and not made["+1"]["crowded"]
    assert made["+1"]["total"] == 250 and made["+1"]["above"] == "1"
    assert made["+s1"]["merged"] == 7 and made["+s1"]["above"] == ""
    assert made["1"]["total"] == 100_250


def test_five_thousand_nodes_are_at_most_some_hundred_boxes() -> None:
    nodes = [facts(1, 0, 1000)] + [facts(i, 1, 100 + i % 7) for i in range(2, 5000)]
    assert len(boxes(Outline([""], nodes, 0.0), 1)) == 2
    wide = [facts(i, 0, 1000) for i in range(1, 900)]
    assert len(boxes(Outline([""], wide, 0.0), 1)) == 899


def test_a_deep_tree_has_no_more_boxes_than_a_browser_can_show() -> None:
    nodes = [facts(100 * i + j, 0 if j == 1 else 100 * i + j - 1, 10) for i in range(50) for j in range(1, 101)]
    made = boxes(Outline([""], nodes, 0.0), 1)
    assert 100 < len(made) <= 2 * MOST_BOXES
    assert sum(b["total"] for b in made.values() if not b["above"]) == 50_000


def chain(length: int, first: int = 1, above: int = 0, n_bytes: int = 10) -> list[NodeFacts]:
    return [facts(first + i, first + i - 1 if i else above, n_bytes) for i in range(length)]


def branches(number: int, length: int) -> list[NodeFacts]:
    return [n for i in range(number) for n in chain(length, 1000 * (i + 1))]


@pytest.mark.parametrize(
    "nodes",
    [
        branches(70, 70), chain(5001), [facts(i, 0, 10) for i in range(1, 1001)], branches(2, 900), branches(999, 2),
        branches(90, 12),
    ],
    ids=["70 x 70", "chain", "siblings", "two deep", "many short", "just too many"],
)  # fmt: skip
def test_what_is_too_many_leaves_the_thousand_widest(nodes: list[NodeFacts]) -> None:
    made = boxes(Outline([""], nodes, 0.0), 1)
    own = [b for b in made.values() if "merged" not in b]
    several = [b for b in made.values() if "merged" in b]
    assert MOST_BOXES - 10 <= len(own) <= MOST_BOXES
    assert sum(b["merged"] for b in several) == len(nodes) - len(own), "every node is in one box"
    assert all(b["crowded"] or b["total"] < len(nodes) / 100 for b in several) and len(several) <= len(own)
    assert sum(b["bytes"] for b in own) + sum(b["total"] for b in several) == 10 * len(nodes)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3) | st.integers(0, 10**5)), max_size=60))
def test_every_node_is_in_one_box(drawn: list[tuple[int, int]]) -> None:
    nodes = [facts(i, above % i, n_bytes) for i, (above, n_bytes) in enumerate(drawn, 1)]
    made = boxes(Outline([""], nodes, 0.0), 1)
    own = {name: b for name, b in made.items() if "merged" not in b}
    assert len(own) + sum(b.get("merged", 0) for b in made.values()) == len(nodes)
    assert all(b["above"] in {"", *own} for b in made.values()), "what is above a box has one"
    whole = sum(n.kv_bytes for n in nodes)
    assert sum(b["bytes"] + (b["total"] if "merged" in b else 0) for b in made.values()) == whole
    assert sum(b["total"] for b in made.values() if not b["above"]) == whole


def test_nodes_without_bytes_are_drawn_and_lie_where_the_tier_says() -> None:
    nodes = [facts(i, 0, 0, in_memory=False, is_below=i % 2 == 1) for i in range(1, 3001)]
    made = boxes(Outline([""], nodes, 0.0), 0)
    assert len(made) == MOST_BOXES + 1 and made["+s0"]["merged"] == 2000 and made["+s0"]["crowded"]
    assert made["1"]["where"] == "d"
    point = facts(1, 0, 0, in_memory=False, is_below=True, point_below_bytes=700)
    assert boxes(Outline([""], [point], 0.0), 0)["1"]["total"] == 700


def test_what_a_shared_store_has_is_asked_for_the_deepest_boxes_alone() -> None:
    nodes = [facts(1, 0, 100, end=10), facts(2, 1, 100, start=10, end=20), facts(3, 1, 100, start=10, end=30)]
    asked: list[int] = []

    def shared(n: NodeFacts) -> int:
        asked.append(n.number)
        return {2: 4, 3: 16}[n.number]

    made = boxes(Outline([""], nodes, 0.0), 1, shared)
    assert sorted(asked) == [2, 3] and {name: b["shared"] for name, b in made.items()} == {"1": 10, "2": 0, "3": 6}


def test_nothing_has_no_boxes() -> None:
    assert boxes(Outline([], [], 0.0), 1) == {}


# -- changes -----------------------------------------------------------------------------------------

SECTION = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 2) | st.lists(st.integers(0, 1), max_size=1))
PICTURE = st.fixed_dictionaries({"tree": SECTION, "now": SECTION})


def apply(picture: Picture, changed: dict[str, Any]) -> Picture:
    """As `feed.js` does it."""
    made = copy.deepcopy(picture)
    for section, names in changed["gone"].items():
        for name in names:
            del made[section][name]
    for section, values in changed["set"].items():
        made[section].update(values)
    return made


@given(PICTURE, PICTURE)
def test_changes_make_the_one_picture_into_the_other(before: Picture, after: Picture) -> None:
    changed = changes(before, after)
    assert apply(before, changed) == after
    assert all(value != before[s].get(n, object()) for s, found in changed["set"].items() for n, value in found.items())
    if before == after:
        assert changed == {"set": {}, "gone": {}}


# -- viewers -----------------------------------------------------------------------------------------


class Drawn:
    """A page whose pictures are numbers."""

    def __init__(self) -> None:
        self.n = self.rests = 0
        self.fails: Exception | None = None
        self.threads: set[str] = set()

    def picture(self) -> Picture:
        if self.fails is not None:
            raise self.fails
        self.n += 1
        self.threads.add(threading.current_thread().name)
        return {"now": {"n": self.n, "same": 0}}

    def rest(self) -> None:
        self.rests += 1


def read(event: bytes) -> tuple[str, Any]:
    name, data, *_ = event.decode().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def viewers(page: Drawn, over: Any = lambda: False) -> Viewers:
    return Viewers(page, over, every_seconds=0.01)  # type: ignore[arg-type]


def test_a_viewer_gets_a_picture_and_then_what_changes() -> None:
    async def look() -> None:
        page = Drawn()
        seen = viewers(page)
        events = seen.events()
        assert (await anext(events)).startswith(b":")
        name, drawn = read(await anext(events))
        assert name == "picture" and drawn["now"]["same"] == 0
        at = drawn["now"]["n"]
        for _ in range(3):
            name, changed = read(await anext(events))
            assert name == "changes" and changed == {"set": {"now": {"n": at + 1}}, "gone": {}}
            at += 1
        late = seen.events()
        await anext(late)
        assert read(await anext(late))[0] == "picture", "one that comes later gets a whole one, too"
        assert seen.count == 2
        await events.aclose()
        await late.aclose()
        assert seen.count == 0
        while page.rests == 0:
            await asyncio.sleep(0.01)
        drawn_so_far = page.n
        await asyncio.sleep(0.1)
        assert page.n == drawn_so_far, "nothing is drawn when nobody looks"
        assert threading.current_thread().name not in page.threads
        again = seen.events()
        await anext(again)
        assert read(await anext(again))[0] == "picture"
        await again.aclose()

    asyncio.run(look())


def test_a_picture_that_is_drawn_before_a_viewer_reads_comes_after_its_first() -> None:
    async def look() -> None:
        page = Drawn()
        seen = viewers(page)
        first = seen.events()
        await anext(first)
        await anext(first)
        late = seen.events()
        await anext(late)
        at = page.n
        while page.n < at + 2:
            await anext(first)
        assert read(await anext(late))[0] == "picture"
        assert read(await anext(late))[0] == "changes"
        await late.aclose()
        await first.aclose()

    asyncio.run(look())


def test_a_viewer_that_does_not_read_gets_a_new_picture() -> None:
    async def look() -> None:
        page = Drawn()
        seen = viewers(page)
        slow, quick = seen.events(), seen.events()
        await anext(slow)
        await anext(quick)
        while page.n < BACKLOG + 3:
            await anext(quick)
        got = read(await anext(slow))
        assert got[0] == "picture" and got[1]["now"]["n"] > 1
        await slow.aclose()
        await quick.aclose()

    asyncio.run(look())


def test_streams_end_with_the_server() -> None:
    async def look(page: Drawn, over: Any) -> list[bytes]:
        return [event async for event in viewers(page, over).events()]

    page = Drawn()
    assert len(asyncio.run(look(page, lambda: page.n >= 3))) == 4
    broken = Drawn()
    broken.fails = EngineStopped("gone")
    assert len(asyncio.run(look(broken, lambda: False))) == 1 and broken.rests == 1


def test_viewers_beyond_the_limit_are_refused() -> None:
    async def look() -> None:
        seen = viewers(Drawn())
        events = [seen.events() for _ in range(MOST_VIEWERS)]
        for each in events:
            await anext(each)
        with pytest.raises(Busy, match="viewers"):
            await anext(seen.events())
        for each in events:
            await each.aclose()
        assert seen.count == 0

    asyncio.run(look())
