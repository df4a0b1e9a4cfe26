"""Which checkpoints are kept on a path, and where one is wanted."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onefold.cache.memory.checkpoints import GRID, PER_PATH, Checkpoint, Place, surplus, wanted
from onefold.cache.memory.ledger import Ledger, Purpose
from onefold.cache.model.kinds.base import Snapshot

NOTHING: frozenset[int] = frozenset()


def places(*positions: int, branches: tuple[int, ...] = ()) -> list[Place]:
    return [Place(p, p in branches) for p in positions]


def kept(found: list[Place], limit: int = PER_PATH) -> list[int]:
    gone = surplus(found, limit)
    return [p.position for p in found if p.position not in gone]


def test_up_to_four_stay() -> None:
    assert PER_PATH == 4
    assert surplus([]) == []
    assert surplus(places(10, 20, 30, 40)) == []
    assert len(surplus(places(10, 20, 30, 40, 50))) == 1


@given(st.lists(st.tuples(st.integers(1, 200_000), st.booleans()), unique_by=lambda p: p[0], max_size=30))
def test_at_most_four_stay_and_always_the_deepest(found: list[tuple[int, bool]]) -> None:
    path = sorted(Place(*p) for p in found)
    gone = surplus(path)
    assert len(gone) == len(set(gone)) == max(0, len(path) - PER_PATH)
    assert set(gone) <= {p.position for p in path}
    assert not path or path[-1].position not in gone
    assert surplus([p for p in path if p.position not in gone]) == []  # settled
    assert set(surplus(path[::-1])) == set(gone)  # in whatever order they come


def test_the_deepest_stays_even_alone() -> None:
    assert kept(places(10, 5000, 100_000, branches=(10, 5000)), limit=1) == [100_000]


def test_a_branch_point_is_preferred() -> None:
    grid = tuple(range(1000, 9000, 1000))
    assert kept(places(*grid)) == [2000, 4000, 6000, 8000]
    for branch in grid:
        assert branch in kept(places(*grid, branches=(branch,)))


def test_a_grid_is_thinned_towards_the_start() -> None:
    """Within a conversation of some thousand tokens evenly: what lies between two checkpoints is evicted as a whole."""
    assert kept(places(*range(1, 65))) == [16, 32, 48, 64]
    ends = [GRID * i for i in range(1, 65)]
    path: list[Place] = []
    for end in ends:  # as a conversation grows, one more at a time
        path.append(Place(end, False))
        gone = surplus(path)
        path = [p for p in path if p.position not in gone]
    left = [p.position for p in path]
    assert len(left) == PER_PATH and left[-1] == ends[-1]
    away = [ends[-1] - p for p in left]  # distances from the end
    assert all(far >= 1.5 * near for far, near in itertools.pairwise(away))
    assert away[-2] <= ends[-1] // 8  # something is near the end


# -- wanted ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "last", "prompt", "asked", "is_wanted"),
    [
        (0, 0, 100, NOTHING, False),
        (50, 0, 100, NOTHING, False),  # in the middle of a prompt
        (50, 0, 100, frozenset({50}), True),  # where the next turn will branch off
        (50, 50, 100, frozenset({50}), False),  # it is there already
        (40, 50, 100, frozenset({40}), False),  # behind the last one
        (99, 0, 100, NOTHING, True),  # the prompt's end, but for the token that is held back
        (100, 0, 100, NOTHING, True),
        (100, 99, 100, NOTHING, False),  # once
        (101, 99, 100, NOTHING, False),
        (130, 50, 100, NOTHING, True),  # a chunk went over the prompt's end
        (GRID - 1, 0, 10**6, NOTHING, False),
        (GRID, 0, 10**6, NOTHING, True),
        (GRID + 5, 0, 10**6, NOTHING, True),  # the first boundary behind a grid point
        (GRID + 5, GRID, 10**6, NOTHING, False),
        (2 * GRID, GRID, 10**6, NOTHING, True),
        (3 * GRID + 1, 2 * GRID + 7, 100, NOTHING, True),  # also while generating
    ],
)
def test_wanted(position: int, last: int, prompt: int, asked: frozenset[int], is_wanted: bool) -> None:
    assert wanted(position, last, prompt, asked) is is_wanted


# -- a checkpoint -------------------------------------------------------------------------------


def test_a_checkpoint_is_closed_once_with_all_it_holds() -> None:
    ledger = Ledger(1 << 20)
    arrays = [mx.zeros((1, 8)), mx.zeros((1, 4)), None]
    snapshots = [Snapshot(arrays[:1], 0, 9), None, Snapshot(arrays[1:], 0, 9)]
    checkpoint = Checkpoint(9, list(snapshots), ledger.open(Purpose.CHECKPOINT, 48), is_complete=False)
    assert checkpoint.bytes == 48 == ledger.used_bytes
    assert checkpoint.array_ids() == {id(arrays[0]), id(arrays[1])}
    checkpoint.close()
    assert ledger.used_bytes == 0 and checkpoint.bytes == 0
    assert all(s is None or s.closed for s in snapshots)
    with pytest.raises(RuntimeError, match="exactly once"):
        checkpoint.close()
