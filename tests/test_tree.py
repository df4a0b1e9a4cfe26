"""Token ids in, nodes out: against a naive oracle that keeps whole sequences."""

from __future__ import annotations

import tracemalloc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onefold.cache.memory.tokens import Tokens, as_tokens, common_length, frozen
from onefold.cache.memory.tree import Match, Node, Tree
from onefold.errors import OnefoldError, TokenError

# -- as_tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 1, 2],
        (3, 1, 2),
        range(3, 6),
        [np.int64(3), np.int32(4)],
        np.array([3, 1, 2]),
        np.array([3, 1, 2], np.uint8),
        np.array([3, 1, 2], ">i4"),
        np.arange(12, dtype=np.int32)[::3],
        mx.array([3, 1, 2]),
        mx.array([3, 1, 2], mx.uint32),
        mx.array([3, 1, 2])[1:],
        [0, 2**31 - 1],
    ],
    ids=lambda t: type(t).__name__,
)
def test_as_tokens_takes_what_holds_integers(tokens: Any) -> None:
    found = as_tokens(tokens)
    assert found.dtype == np.int32 and found.dtype.isnative and found.ndim == 1
    assert found.tolist() == [int(t) for t in tokens]


def test_as_tokens_does_not_copy_what_is_right_already() -> None:
    tokens = np.arange(5, dtype=np.int32)
    assert as_tokens(tokens) is tokens


@pytest.mark.parametrize(
    "tokens",
    [
        [],
        (),
        range(0),
        np.empty(0, np.int32),
        mx.array([], mx.int32),
        [1.0, 2.0],
        [1, 2.5],
        [float("nan")],
        np.array([1.0]),
        mx.array([1.0]),
        mx.array([1.0]).astype(mx.bfloat16),
        "abc",
        "12",
        b"12",
        ["1", "2"],
        [1, "2"],
        [True, False],
        np.array([True]),
        mx.array([True]),
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [[]],
        mx.array([[1, 2]]),
        np.array(3),
        3,
        None,
        [None],
        [1, None],
        [1j],
        {1, 2},
        {1: 2},
        iter([1, 2]),
        object(),
        [-1],
        [5, -1],
        np.array([-1], np.int32),
        np.array([-1], np.int64),
        mx.array([1, -1]),
        [2**31],
        [2**32 + 1],
        [2**63],
        [2**70],
        np.array([2**32 - 1], np.uint32),
        mx.array([2**32 - 1], mx.uint32),
        np.array(["2020-01-01"], "datetime64[D]"),
    ],
    ids=lambda t: type(t).__name__,
)
def test_as_tokens_refuses_everything_else(tokens: Any) -> None:
    with pytest.raises(TokenError) as caught:
        as_tokens(tokens)
    assert str(caught.value) and isinstance(caught.value, (OnefoldError, ValueError))


def test_as_tokens_names_the_id_that_is_out_of_range() -> None:
    with pytest.raises(TokenError, match="-7"):
        as_tokens([1, -7, 3])
    with pytest.raises(TokenError, match="4294967295"):
        as_tokens([1, 2**32 - 1])


few = st.integers(0, 3)
sequences = st.lists(few, min_size=1, max_size=12)


@given(a=st.lists(few, max_size=12), b=st.lists(few, max_size=12))
def test_common_length(a: list[int], b: list[int]) -> None:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    assert common_length(np.array(a, np.int32), np.array(b, np.int32)) == n


# -- the tree against whole sequences ------------------------------------------------------------


class Edge:
    """A span as the tree sees it: it knows its own tokens, so a payload that leaves its edge shows."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[Edge, Edge]:
        first, self.tokens = Edge(self.tokens[:at]), self.tokens[at:]
        return first, self

    def join(self, upper: Edge) -> None:
        self.tokens = upper.tokens + self.tokens


def put(tree: Tree, tokens: list[int]) -> Node:
    """As the shelf does it: what is there stays, the rest is a new leaf."""
    found = as_tokens(tokens)
    path, matched = tree.match(found)
    node = path[-1] if path else tree.root
    if matched < node.end:
        node = tree.split(node, matched)
    if matched < len(tokens):
        node = tree.add(node, found[matched:])
        node.span = Edge(tokens[matched:])
    return node


def spelled(node: Node) -> list[int]:
    return [int(t) for n in node.path() for t in n.tokens]


def prefixes(tree: Tree) -> set[tuple[int, ...]]:
    """Every prefix that the tree holds."""
    held = set()
    for node in tree.root.walk():
        whole = spelled(node)
        held |= {tuple(whole[:i]) for i in range(node.start + 1, node.end + 1)}
    return held


def check(tree: Tree) -> None:
    assert len(tree.root.tokens) == 0 and tree.root.is_root
    for node in tree.root.walk():
        assert node.parent is not None and not node.is_root
        assert node.start == node.parent.end and node.end == node.start + len(node.tokens) > node.start
        assert node.parent.children[int(node.tokens[0])] is node
        assert node.tokens.dtype == np.int32 and node.tokens.base is None  # pins nothing but itself
        assert node.span.tokens == node.tokens.tolist()


operations = st.lists(
    st.tuples(st.sampled_from(["put", "put", "split", "join", "remove"]), sequences, st.integers(0, 99)),
    max_size=25,
)


@given(operations=operations, queries=st.lists(sequences, min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_match_split_join_remove_against_whole_sequences(
    operations: list[tuple[str, list[int], int]], queries: list[list[int]]
) -> None:
    tree, oracle = Tree(), set[tuple[int, ...]]()
    for what, tokens, pick in operations:
        nodes = sorted(tree.root.walk(), key=spelled)
        node = nodes[pick % len(nodes)] if nodes else None
        if what == "put":
            assert spelled(put(tree, tokens)) == tokens
            oracle |= {tuple(tokens[:i]) for i in range(1, len(tokens) + 1)}
        elif what == "split" and node is not None and node.end - node.start > 1:
            node.leases, node.pins, node.last_use, node.checkpoint = 2, 1, pick, "deep"
            end, children = node.end, node.children
            upper = tree.split(node, node.start + 1 + pick % (node.end - node.start - 1))
            assert node.parent is upper and node.end == end and node.children is children
            assert (upper.leases, upper.pins, upper.last_use) == (2, 1, pick)
            assert node.checkpoint == "deep" and upper.checkpoint is None
            node.leases = node.pins = upper.leases = upper.pins = 0
        elif what == "join" and node is not None and len(node.children) == 1:
            (lower,) = node.children.values()
            start = node.start
            tree.join(node, lower)
            assert lower.start == start and node.parent is None and node.span is None
        elif what == "remove" and node is not None and not node.children:
            gone = spelled(node)
            tree.remove(node)
            oracle -= {tuple(gone[:i]) for i in range(node.start + 1, node.end + 1)}
        check(tree)
        assert prefixes(tree) == oracle
    for query in queries:
        path, matched = tree.match(as_tokens(query))
        assert matched == max(i for i in range(len(query) + 1) if i == 0 or tuple(query[:i]) in oracle)
        assert [n.end for n in path[:-1]] == [n.start for n in path[1:]]
        if path:
            assert path == path[-1].path() and path[-1].start < matched <= path[-1].end
            assert spelled(path[-1])[:matched] == query[:matched]


def test_match_touches_nothing() -> None:
    tree = Tree()
    put(tree, [1, 2, 3, 4])
    node = put(tree, [1, 2, 9])
    before = [(n.start, n.end, n.last_use, n.leases) for n in tree.root.walk()]
    assert tree.match(as_tokens([1, 2, 9, 9])) == (node.path(), 3)
    assert tree.match(as_tokens([7])) == ([], 0)
    assert [(n.start, n.end, n.last_use, n.leases) for n in tree.root.walk()] == before


def test_refused_operations_change_nothing() -> None:
    tree = Tree()
    put(tree, [1, 2, 3, 4])
    put(tree, [1, 2, 9])
    upper = tree.root.children[1]
    leaf = upper.children[9]
    with pytest.raises(ValueError, match="already"):
        tree.add(upper, as_tokens([9, 9]))
    for node, at in ((upper, 0), (upper, 2), (upper, 3), (tree.root, 0), (leaf, 2)):
        with pytest.raises(ValueError, match="cannot split"):
            tree.split(node, at)
    with pytest.raises(ValueError, match="more than one child"):
        tree.join(upper, leaf)
    for node in (upper, tree.root):
        with pytest.raises(ValueError, match="not a leaf"):
            tree.remove(node)
    check(tree)
    assert prefixes(tree) == {(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 2, 9)}


def test_nodes_of_which_only_one_has_kv_are_not_joined() -> None:
    tree = Tree()
    lower = tree.add(tree.root, as_tokens([1, 2, 3]))
    upper = tree.split(lower, 2)
    upper.span = Edge([1, 2])
    with pytest.raises(ValueError, match="only one of the nodes that meet at 2 has KV in memory"):
        tree.join(upper, lower)
    assert upper.span is not None and lower.start == 2
    lower.span = Edge([3])
    tree.join(upper, lower)
    assert lower.span.tokens == [1, 2, 3]


def test_a_node_owns_its_tokens() -> None:
    tree, tokens = Tree(), np.arange(10, dtype=np.int32)
    node = tree.add(tree.root, tokens)
    tokens[:] = 7
    assert node.tokens.tolist() == list(range(10))


# -- bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("turn", [131072, 2048, 128])
def test_index_bytes_per_token(turn: int) -> None:
    """131,072 tokens in one node, or in one per turn: what is said, and what is really there."""
    n, tree = 131072, Tree()
    tokens = np.random.default_rng(0).integers(0, 150_000, n, dtype=np.int32)
    tracemalloc.start()
    node = tree.root
    for start in range(0, n, turn):
        node = tree.add(node, tokens[start : start + turn])
    real, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tree.index_bytes() <= 16 * n
    assert real <= 16 * n
    assert real <= tree.index_bytes() * 1.5 + 4096
    assert tree.match(tokens).matched == n


def test_frozen_tokens_are_walked_once_until_the_tree_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    walks, walk = [], Tree._walk

    def counted(tree: Tree, tokens: Tokens, node: Node) -> Match:
        walks.append(len(tokens))
        return walk(tree, tokens, node)

    monkeypatch.setattr(Tree, "_walk", counted)
    tree = Tree()
    first = tree.add(tree.root, np.arange(1, 9, dtype=np.int32))
    asked = frozen(np.array([1, 2, 3, 9], np.int32))
    assert tree.match(asked) == Match([first], 3) and tree.match(asked).matched == 3 and len(walks) == 1
    assert tree.match(asked.copy()).matched == 3 and len(walks) == 2  # it could be changed by its owner
    upper = tree.split(first, 3)
    assert tree.match(asked) == Match([upper], 3) and len(walks) == 3
    leaf = tree.add(upper, np.array([9], np.int32))
    assert tree.match(asked) == Match([upper, leaf], 4)
    tree.remove(leaf)
    assert tree.match(asked) == Match([upper], 3)
    tree.join(upper, first)
    assert tree.match(asked) == Match([first], 3) and len(walks) == 6
    other = frozen(np.array([1, 5], np.int32))
    assert tree.match(other).matched == 1 and tree.match(asked).matched == 3 and len(walks) == 8


def test_what_is_frozen_cannot_be_changed_and_is_not_copied_again() -> None:
    own = np.array([1, 2], np.int32)
    kept = frozen(own)
    own[0] = 7
    assert kept.tolist() == [1, 2] and frozen(kept) is kept
    view = own[:]
    view.flags.writeable = False  # its owner can still change it
    assert frozen(view) is not view
    own.flags.writeable = False  # so can the owner itself, through the view or after setting the flag back
    assert frozen(own) is not own
