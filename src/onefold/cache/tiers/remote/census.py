"""The census: what a shared store holds, for its administrator. Lists names, and reads values to check them.

- A name says to which namespace its value belongs, by a tag. What lies below the prefix under a name of another form is
  a stranger: it is counted, and neither read nor removed.
- A value, also the description of a namespace, is believed if its seal agrees.
- Names are taken as the store lists them, and values are read several at a time. Kept are the counts of each namespace,
  and the names of bad values.
- A store may be looked at while machines write: a value that is gone when it is read does not count. Redis may list a
  name twice while its table grows, so that counts are then a little too high.

No MLX in this file.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from onefold.cache.tiers.remote.grid import ABOUT, HEAD_BYTES, PREFIX
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Store, StoreError
from onefold.cache.tiers.remote.values import Head, Sealing
from onefold.errors import RecordError

KV = "kv"
"""The kind of a record of KV, as `sharing` has it: that file imports MLX."""
AT_ONCE = 8
"""Values that are read or removed at the same time: at most 4 MiB each."""
RECENT = 1 << 13
"""Names of removed values that are remembered: Redis may list one again that was removed since it was asked."""
TRIES = 3
"""Of one value, where the store is slow or a connection breaks."""
_TAG = "[0-9a-f]{16}"
_NAME = re.compile(f"{re.escape(PREFIX)}({_TAG})/([0-9a-f]{{64}}|{ABOUT})")

T = TypeVar("T")


class Named(NamedTuple):
    """What a name says of its value."""

    tag: str
    address: bytes
    """What the value is sealed with."""
    is_about: bool
    """It describes the namespace."""


@dataclass
class Space:
    """A namespace."""

    tag: str
    values: int = 0
    n_bytes: int = 0
    about: Held | None = None
    """Its description, which is one of the values."""


@dataclass
class Census:
    spaces: dict[str, Space] = field(default_factory=dict)
    """By their tags."""
    strangers: int = 0

    @property
    def values(self) -> int:
        return sum(space.values for space in self.spaces.values())

    @property
    def n_bytes(self) -> int:
        return sum(space.n_bytes for space in self.spaces.values())


class About(NamedTuple):
    """What a namespace is."""

    said: Mapping[str, Any] = {}
    """Empty if that is not known."""
    problem: str = ""
    """Why it is not known: a `RemoteReason`; `GONE` if there is no description."""


class Bad(NamedTuple):
    """A value that cannot be used."""

    held: Held
    tag: str
    reason: str


@dataclass
class Checked:
    """What `verify` found."""

    values: int = 0
    n_bytes: int = 0
    vanished: int = 0
    strangers: int = 0
    bad: list[Bad] = field(default_factory=list)
    by_tag: dict[str, int] = field(default_factory=dict)
    """Values that were checked, of each namespace."""

    def all_bad(self) -> set[str]:
        """Returns the tags of namespaces of which every value is bad, and one at least by its seal: they may be whole,
        and of another secret."""
        bad: dict[str, int] = {}
        for one in self.bad:
            bad[one.tag] = bad.get(one.tag, 0) + 1
        seal = {one.tag for one in self.bad if one.reason == RemoteReason.SEAL}
        return {tag for tag in seal if bad[tag] == self.by_tag[tag]}


def prefix_of(tag: str | None) -> str:
    """Returns what the names of a namespace's values begin with; without a tag, those of all."""
    return PREFIX if tag is None else f"{PREFIX}{tag}/"


def parsed(name: str) -> Named | None:
    """Returns what a name says; None for a stranger's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    tag, last = found.groups()
    return Named(tag, tag.encode(), True) if last == ABOUT else Named(tag, bytes.fromhex(last), False)


# -- looking -----------------------------------------------------------------------------------------


def take(store: Store, prefix: str = PREFIX) -> Census:
    """Counts what lies under names that begin so. Raises StoreError."""
    found = Census()
    for held in store.names(prefix):
        named = parsed(held.name)
        if named is None:
            found.strangers += 1
            continue
        space = found.spaces.setdefault(named.tag, Space(named.tag))
        space.values += 1
        space.n_bytes += held.size
        if named.is_about:
            space.about = held
    return found


def values(store: Store, tag: str | None = None) -> Iterator[Held]:
    """Yields the values of a namespace, without a tag of all, as the store lists them. Raises StoreError."""
    return (held for held in store.names(prefix_of(tag)) if parsed(held.name) is not None)


def describe(store: Store, sealing: Sealing, spaces: Iterable[Space]) -> dict[str, About]:
    """Returns what each namespace is, by its tag. Raises StoreError."""
    return {space.tag: about for space, about in _each(lambda space: _about(store, sealing, space), spaces)}


def _about(store: Store, sealing: Sealing, space: Space) -> About:
    held = space.about
    if held is None:
        return About(problem=RemoteReason.GONE)
    if held.size > HEAD_BYTES:
        return About(problem=RemoteReason.TOO_LARGE)
    try:
        value = _again(lambda: store.get(held.name))
        return About(problem=RemoteReason.GONE) if value is None else About(_said(sealing, space.tag.encode(), value))
    except RecordError as error:
        return About(problem=str(error))


def _said(sealing: Sealing, address: bytes, value: bytes) -> dict[str, Any]:
    """Returns what a description says. Raises RecordError."""
    _, payload = sealing.open(address, value, {"kind": ABOUT})
    try:
        said = json.loads(bytes(payload))
    except (ValueError, RecursionError) as error:
        raise RecordError(RemoteReason.OTHER_FORMAT) from error
    if not isinstance(said, dict):
        raise RecordError(RemoteReason.OTHER_FORMAT)
    return said


# -- checking ----------------------------------------------------------------------------------------


def verify(
    store: Store, sealing: Sealing, prefix: str, token_bytes: Mapping[str, int], advance: Callable[[int], None]
) -> Checked:
    """Reads every value whose name begins so, and returns which are bad. `token_bytes` is the KV of a token, by tag:
    records of other namespaces are not compared with it. `advance` is told of bytes that were read. Raises
    StoreError."""
    found = Checked()

    def ours() -> Iterator[tuple[Held, Named]]:
        for held in store.names(prefix):
            named = parsed(held.name)
            if named is None:
                found.strangers += 1
            else:
                yield held, named

    def fault(one: tuple[Held, Named]) -> str | None:
        held, named = one
        return _fault(store, sealing, held, named, token_bytes.get(named.tag))

    for (held, named), reason in _each(fault, ours()):
        advance(held.size)
        if reason is None:
            found.vanished += 1
            continue
        found.values += 1
        found.n_bytes += held.size
        found.by_tag[named.tag] = found.by_tag.get(named.tag, 0) + 1
        if reason:
            found.bad.append(Bad(held, named.tag, reason))
    return found


def _fault(store: Store, sealing: Sealing, held: Held, named: Named, token_bytes: int | None) -> str | None:
    """Returns what is wrong with a value, "" if nothing is, None if it is gone. Raises StoreError."""
    try:
        value = _again(lambda: store.get(held.name))
        if value is None:
            return None
        if named.is_about:
            _said(sealing, named.address, value)
        else:
            _require(*sealing.open(named.address, value, {}), token_bytes)
    except RecordError as error:
        return str(error)
    return ""


def _require(head: Head, payload: memoryview, token_bytes: int | None) -> None:
    """Raises RecordError if the payload does not have the size that its head says."""
    if head.get("kind") == ABOUT:
        raise RecordError(RemoteReason.OTHER_LAYOUT)
    tokens = head.get("tokens")
    if head.get("kind") != KV or token_bytes is None or not isinstance(tokens, int):
        return
    if len(payload) != tokens * token_bytes:
        raise RecordError(RemoteReason.OTHER_LAYOUT)


# -- removing ----------------------------------------------------------------------------------------


def remove(store: Store, held: Iterable[Held]) -> tuple[int, int]:
    """Removes these values, and returns how many they were, and how many bytes. Raises StoreError."""
    removed = n_bytes = 0
    recent: dict[str, None] = {}

    def once() -> Iterator[Held]:
        for one in held:
            if one.name not in recent:
                recent[one.name] = None
                if len(recent) > RECENT:
                    del recent[next(iter(recent))]
                yield one

    for one, _ in _each(lambda one: _again(lambda: store.remove(one.name)), once()):
        removed += 1
        n_bytes += one.size
    return removed, n_bytes


# -- several at a time -------------------------------------------------------------------------------


def _each(work: Callable[[Any], T], given: Iterable[Any]) -> Iterator[tuple[Any, T]]:
    """Yields each with what `work` returns for it, in their order; raises what it raises. Takes few in advance."""
    waiting: deque[tuple[Any, Future[T]]] = deque()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="onefold-census") as threads:
        try:
            for one in given:
                waiting.append((one, threads.submit(work, one)))
                if len(waiting) > 2 * AT_ONCE:
                    first, done = waiting.popleft()
                    yield first, done.result()
            while waiting:
                first, done = waiting.popleft()
                yield first, done.result()
        finally:
            for _, left in waiting:
                left.cancel()


def _again(call: Callable[[], T]) -> T:
    """Returns what `call` returns, at the last of several tries. Raises StoreError."""
    for _ in range(TRIES - 1):
        try:
            return call()
        except StoreError as error:
            if error.reason not in (RemoteReason.SLOW, RemoteReason.UNREACHABLE):
                raise
    return call()
