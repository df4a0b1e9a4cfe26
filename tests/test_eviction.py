"""Who goes first: a pure choice over nodes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onefold.cache.memory.eviction import IDLE_FACTOR, SMALLEST_CUT, Leaves, Victim, consider, leaves
from onefold.cache.memory.tree import Node, Tree

TOKEN_BYTES = 10
NOW = 100.0


def leaf(tree: Tree, first: int, n: int, *, last_use: int, parent: Node | None = None) -> Node:
    node = tree.add(parent or tree.root, np.array([first, *[0] * (n - 1)], np.int32))
    node.last_use = last_use
    return node


def whole(node: Node) -> int:
    return (node.end - node.start) * TOKEN_BYTES


def pick(tree: Tree, missing: int = 1, *, frees: dict[int, int] | None = None, may_cut: bool = False) -> Victim | None:
    def bytes_of(node: Node) -> int:
        return whole(node) if frees is None else frees.get(id(node), whole(node))

    return choose(order_of(tree), missing, bytes_of, may_cut=may_cut)


def choose(order: Leaves, missing: int, frees: Callable[[Node], int], *, may_cut: bool) -> Victim | None:
    """The next leaf to give up, as the shelf asks for it."""
    while (node := order.pop(NOW)) is not None:
        victim = consider(node, missing, frees(node), TOKEN_BYTES, may_cut=may_cut)
        if victim is not None:
            return victim
        order.pass_over(node)
    return None


def order_of(tree: Tree) -> Leaves:
    order = Leaves()
    for node in tree.root.walk():
        order.changed(node)
    assert order.check(tree.root.walk()) == []
    return order


def test_nothing_to_give_up() -> None:
    assert pick(Tree()) is None


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Tree()
    nodes = [leaf(tree, i, 10, last_use=use) for i, use in enumerate((5, 2, 9))]
    assert leaves(tree.root.walk(), NOW) == [nodes[1], nodes[0], nodes[2]]
    assert pick(tree) == Victim(nodes[1], 0)


def test_among_those_used_together_the_deeper_goes_first() -> None:
    tree = Tree()
    shallow, deep = leaf(tree, 1, 10, last_use=3), leaf(tree, 2, 50, last_use=3)
    assert leaves(tree.root.walk(), NOW) == [deep, shallow]


def test_what_comes_back_later_goes_first() -> None:
    """Between requests one was left alone for 20 s, the other for 50: it goes first, although it was used later."""
    tree = Tree()
    often, seldom = leaf(tree, 1, 10, last_use=90), leaf(tree, 2, 10, last_use=95)
    often.use(90.0, 20.0)
    seldom.use(95.0, 50.0)
    order = order_of(tree)
    assert leaves(tree.root.walk(), NOW) == [seldom, often]
    assert order.pop(NOW) is seldom and order.pop(NOW) is often and order.pop(NOW) is None


def test_what_has_been_idle_for_long_goes_first_whatever_was_expected() -> None:
    """After 26 s of idleness more than 50 are expected: twice as much as it has been idle."""
    tree = Tree()
    overdue, seldom = leaf(tree, 1, 10, last_use=90), leaf(tree, 2, 10, last_use=95)
    overdue.use(90.0, 1.0)
    seldom.use(95.0, 50.0)
    order = order_of(tree)
    turn = 90 + 50 / IDLE_FACTOR
    assert leaves(tree.root.walk(), turn - 1) == [seldom, overdue]
    assert leaves(tree.root.walk(), turn + 1) == [overdue, seldom]
    assert order.pop(turn + 1) is overdue


def test_of_those_with_one_pause_the_least_recently_used_goes_first() -> None:
    tree = Tree()
    nodes = [leaf(tree, i, 10, last_use=use) for i, use in enumerate((97, 95, 99))]
    for node in nodes:
        node.use(node.last_use, 60.0)
    assert leaves(tree.root.walk(), NOW) == [nodes[1], nodes[0], nodes[2]]
    assert pick(tree) == Victim(nodes[1], 0)


def test_a_part_of_a_node_is_expected_back_when_the_node_is() -> None:
    tree = Tree()
    node = leaf(tree, 1, 10, last_use=1)
    node.use(2.0, 30.0)
    upper = tree.split(node, 4)
    assert (upper.last_use, upper.pause) == (2.0, 30.0)


PAUSED = st.lists(st.tuples(st.integers(0, 100), st.integers(0, 80), st.integers(1, 50)), min_size=1, max_size=20)


@given(PAUSED, st.integers(100, 200))
def test_two_orders_give_the_one_order(found: list[tuple[int, int, int]], now: int) -> None:
    """The first of two sorted orders is the first of all leaves by what is expected of each at that time."""
    order = Leaves()
    tree = Tree(order)
    for i, (use, pause, n) in enumerate(found):
        leaf(tree, i, n, last_use=use).use(float(use), float(pause))

    def expected(node: Node) -> float:
        return max(node.pause, IDLE_FACTOR * (now - node.last_use))

    left = list(tree.root.walk())
    assert [expected(n) for n in leaves(left, now)] == sorted((expected(n) for n in left), reverse=True)
    while left:
        node = order.pop(now)
        assert node is not None and expected(node) == max(expected(n) for n in left)
        left.remove(node)
    assert order.pop(now) is None


def test_a_parent_goes_after_its_children() -> None:
    tree = Tree()
    parent = leaf(tree, 1, 10, last_use=1)
    child = leaf(tree, 2, 10, last_use=9, parent=parent)
    assert pick(tree) == Victim(child, 0)
    tree.remove(child)
    assert pick(tree) == Victim(parent, 0)


def test_leased_and_pinned_nodes_are_never_chosen() -> None:
    tree = Tree()
    leased, pinned = leaf(tree, 1, 10, last_use=1), leaf(tree, 2, 10, last_use=2)
    leased.leases, pinned.pins = 1, 1
    assert pick(tree) is None
    free = leaf(tree, 3, 10, last_use=99)
    assert pick(tree) == Victim(free, 0)


def test_what_would_free_nothing_is_passed_over() -> None:
    """A range whose buffer a lease still reads."""
    tree = Tree()
    read, other = leaf(tree, 1, 10, last_use=1), leaf(tree, 2, 10, last_use=2)
    assert pick(tree, frees={id(read): 0}) == Victim(other, 0)
    assert pick(tree, frees={id(read): 0, id(other): 0}) is None


def test_a_long_leaf_is_cut_where_that_is_enough() -> None:
    tree = Tree()
    node = leaf(tree, 1, 1000, last_use=1)
    assert pick(tree, 95, may_cut=True) == Victim(node, 990)  # ten tokens, rounded up
    assert pick(tree, 95) == Victim(node, 0)
    assert pick(tree, 10_000, may_cut=True) == Victim(node, 0)
    assert pick(tree, 99_999, may_cut=True) == Victim(node, 0)


def test_too_little_is_not_left_behind() -> None:
    tree = Tree()
    node = leaf(tree, 1, 1000, last_use=1)
    enough = (1000 - SMALLEST_CUT) * TOKEN_BYTES
    assert pick(tree, enough, may_cut=True) == Victim(node, SMALLEST_CUT)
    assert pick(tree, enough + 1, may_cut=True) == Victim(node, 0)


def test_a_checkpoint_goes_with_its_whole_leaf() -> None:
    tree = Tree()
    node = leaf(tree, 1, 1000, last_use=1)
    node.checkpoint = object()
    assert pick(tree, 95, may_cut=True) == Victim(node, 0)


USES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9), st.booleans()), min_size=1, max_size=30)


@given(USES)
def test_looked_through_once_they_go_as_if_looked_through_each_time(found: list[tuple[int, int, bool]]) -> None:
    """Some nodes have nothing in memory: they are on disk, and whatever is below them may be in memory."""
    order = Leaves()
    tree = Tree(order)
    nodes: list[Node] = [tree.root]
    for i, (parent, use, on_disk) in enumerate(found):
        node = leaf(tree, i, 3, last_use=use, parent=nodes[parent % len(nodes)])
        if on_disk:
            node.below = object()
        else:
            node.span = object()
        nodes.append(node)

    def oldest() -> Node | None:
        held = [n for n in nodes[1:] if n.span is not None]
        free = [n for n in held if not any(b.span is not None for b in n.walk())]
        return min(free, key=lambda n: (n.last_use, -n.end), default=None)

    while (node := order.pop(NOW)) is not None:
        best = oldest()
        assert best is not None and (node.last_use, node.end) == (best.last_use, best.end)
        assert not any(b.span is not None for b in node.walk())
        node.span, node.below = None, object()
        assert order.check(tree.root.walk()) == []
    assert oldest() is None


@dataclass(eq=False)
class Payload:
    """A payload as a node's, which can be cut and joined."""

    def cut(self, at: int, upper: Node, lower: Node) -> tuple[Payload | None, Payload | None]:
        return Payload(), Payload()

    def join(self, upper: Payload | None) -> None: ...

    def moved(self, node: Node) -> Payload:
        return Payload()


CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 9)), max_size=60)


@given(CHANGES)
def test_every_change_of_a_tree_is_heard(changes: list[tuple[int, int, int]]) -> None:
    """Whatever is done to nodes in whatever order, the order of eviction is that of a look through all of them."""
    order = Leaves()
    tree = Tree(order)
    for i, (what, which, n) in enumerate(changes):
        nodes = list(tree.root.walk())
        node = nodes[which % len(nodes)] if nodes else tree.root
        if what == 0 or not nodes:
            leaf(tree, 1000 + i, 2 + n, last_use=n, parent=node if n % 3 else tree.root)
        elif what == 1 and len(node.tokens) > 1:
            tree.split(node, node.start + 1 + n % (len(node.tokens) - 1))
        elif what == 2 and len(node.children) == 1 and node.checkpoint is None:
            (below,) = node.children.values()
            below.span = Payload() if node.span is not None else None
            tree.join(node, below)
        elif what == 3 and not node.children:
            tree.remove(node)
        elif what == 4:
            node.leases = n % 2
        elif what == 5:
            node.pins = n % 2
        elif what == 6:
            node.span = Payload() if n % 2 else None
        elif what == 7:
            node.below = Payload() if n % 2 else None
        elif what == 8:
            node.checkpoint = Payload() if n % 2 else None
        elif which % 2:
            node.use(float(n), float(which))
        else:
            node.last_use = n
        assert order.check(tree.root.walk()) == []


def test_choosing_looks_at_no_more_leaves_than_it_gives_up() -> None:
    """However many there are."""
    order, looked = Leaves(), 0
    tree = Tree(order)
    for i in range(5000):
        leaf(tree, i, 4, last_use=i)

    def frees(node: Node) -> int:
        nonlocal looked
        looked += 1
        return whole(node)

    for _ in range(10):
        victim = choose(order, 1, frees, may_cut=False)
        assert victim is not None
        tree.remove(victim.node)
    assert looked == 10


def test_a_walk_looks_only_at_what_is_asked_for() -> None:
    class Counted(dict[int, Node]):
        looks = 0

        def values(self):  # type: ignore[no-untyped-def]
            node = self

            class View:
                def __iter__(self) -> Iterator[Node]:
                    for n in list(dict.values(node)):
                        Counted.looks += 1
                        yield n

                def __reversed__(self) -> Iterator[Node]:
                    for n in reversed(list(dict.values(node))):
                        Counted.looks += 1
                        yield n

            return View()

    tree = Tree()
    parent = leaf(tree, 1, 4, last_use=1)
    for i in range(500):
        leaf(tree, i, 4, last_use=1, parent=parent)
    parent.children = Counted(parent.children)
    assert len(list(itertools.islice(parent.walk(), 16))) == 16
    assert Counted.looks == 16


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 9), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4000),
    st.booleans(),
)
def test_the_choice_is_idle_useful_and_the_oldest_such(
    found: list[tuple[int, int, bool, bool]], missing: int, may_cut: bool
) -> None:
    tree, frees = Tree(), dict[int, int]()
    nodes = []
    for i, (n, use, leased, read) in enumerate(found):
        node = leaf(tree, i, n, last_use=use)
        node.leases = int(leased)
        frees[id(node)] = 0 if read else whole(node)
        nodes.append(node)
    able = [n for n in nodes if n.idle and frees[id(n)] > 0]
    victim = pick(tree, missing, frees=frees, may_cut=may_cut)
    if victim is None:
        assert not able
        return
    node, keep = victim
    assert node in able and all((node.last_use, -node.end) <= (n.last_use, -n.end) for n in able)
    assert 0 <= keep < node.end - node.start
    if keep:
        assert may_cut and keep >= SMALLEST_CUT
        assert missing <= (node.end - node.start - keep) * TOKEN_BYTES < missing + TOKEN_BYTES
