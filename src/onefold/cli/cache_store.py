"""The actions of `onefold cache --remote`: each returns its report on a shared store, in values that JSON has.

Sizes are those of values as they are stored. Nothing has a moment: a store does not say when a value was used.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from onefold.cache.model.formats.names import name_of
from onefold.cache.tiers.remote import census
from onefold.cache.tiers.remote.census import About, Census, Space
from onefold.cache.tiers.remote.grid import PREFIX
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.registry import address_of, open_store
from onefold.cache.tiers.remote.stores.store import Address, Held, Store, StoreSettings
from onefold.cache.tiers.remote.values import Sealing
from onefold.cli.cache_actions import Progress, short_ids
from onefold.cli.secret_file import read_secret
from onefold.errors import ConfigError
from onefold.sizes import show_size

DEADLINE = 10.0
"""Seconds that a store may take to answer: nobody waits for a first token here."""


class Shared(NamedTuple):
    """A store that is open, and what its values are checked with."""

    store: Store
    sealing: Sealing
    shown: str
    """Its URL without a password."""


@contextmanager
def opened(url: str, secret_file: str | None) -> Iterator[Shared]:
    """Opens the store for the block. Raises ConfigError; whether the store answers is not known then."""
    address = _address(url)
    sealing = Sealing(read_secret(secret_file) if secret_file else b"")
    store = open_store(StoreSettings(address, DEADLINE, ttl=0))
    try:
        yield Shared(store, sealing, address.shown)
    finally:
        store.close()


def _address(url: str) -> Address:
    """Returns where the store is. Raises ConfigError, also if it is a folder that is not there: it is not made."""
    address = address_of(url)
    if urlsplit(url).scheme == "file" and not os.path.isdir(path := unquote(urlsplit(url).path)):
        raise ConfigError(f"there is no folder {path}")
    return address


def _chosen(shared: Shared, given: str | None) -> tuple[str | None, Census]:
    """Returns the tag of the one namespace that begins with `given`, and what it has; without `given`, None and what
    the store has. Raises ConfigError and StoreError."""
    if given is None:
        return None, census.take(shared.store)
    begin = given.lower()
    found = census.take(shared.store, PREFIX + begin) if re.fullmatch("[0-9a-f]+", begin) else Census()
    if not found.spaces:
        raise ConfigError(f"there is no namespace {given!r} in {shared.shown}")
    if len(found.spaces) > 1:
        some = ", ".join(sorted(found.spaces)[:3])
        raise ConfigError(f"{len(found.spaces)} namespaces begin with {given!r}: {some}; give more digits")
    (tag,) = found.spaces
    return tag, found


# -- looking -----------------------------------------------------------------------------------------


def ls(shared: Shared, namespace: str | None, most: int | None) -> dict[str, Any]:
    """Lists the namespaces; or of one the first `most` values by name, all without `most`."""
    tag, found = _chosen(shared, namespace)
    abouts = census.describe(shared.store, shared.sealing, found.spaces.values())
    short = short_ids(found.spaces)
    sealed = "another secret" if shared.sealing.has_secret else "sealed: give --remote-secret-file"
    spaces = [_space(space, abouts[space.tag], short, sealed) for space in found.spaces.values()]
    told: dict[str, Any] = {"store": shared.shown, "strangers": found.strangers}
    if tag is None:
        return told | {"namespaces": sorted(spaces, key=lambda s: (-s["bytes"], s["id"]))}
    listed = census.values(shared.store, tag)
    held = sorted(listed) if most is None else heapq.nsmallest(most, listed)
    return told | {"namespace": spaces[0], "values": [_value(one) for one in held]}


def _value(held: Held) -> dict[str, Any]:
    return {"name": held.name, "bytes": held.size}


def _space(space: Space, about: About, short: dict[str, str], sealed: str) -> dict[str, Any]:
    """Returns what is known of a namespace; `sealed` says why a seal does not agree."""
    said = about.said
    texts = {name: said[name] if isinstance(said.get(name), str) else None for name in ("model", "adapter", "device")}
    return {
        "id": space.tag,
        "short": short[space.tag],
        **texts,
        "kv": None if said.get("kv") is None else name_of(said["kv"]),
        "tokens": _count(said, "tokens"),
        "token_bytes": _count(said, "token_bytes"),
        "values": space.values,
        "bytes": space.n_bytes,
        "unknown": _unknown(about, sealed),
    }


def _count(said: Any, name: str) -> int | None:
    found = said.get(name)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None


def _unknown(about: About, sealed: str) -> str:
    """Returns why it is not known what a namespace is; "" if it is."""
    if about.problem == RemoteReason.SEAL:
        return sealed
    return "not described" if about.problem == RemoteReason.GONE else about.problem


def stat(shared: Shared) -> dict[str, Any]:
    found = census.take(shared.store)
    return {
        "store": shared.shown,
        "namespaces": len(found.spaces),
        "values": found.values,
        "bytes": found.n_bytes,
        "strangers": found.strangers,
    }


# -- checking ----------------------------------------------------------------------------------------


def verify(shared: Shared, namespace: str | None, remove: bool, progress: Progress) -> dict[str, Any]:
    """Checks every value. Without `namespace`, one of which all values are bad is left there: it may be whole, and of
    another secret."""
    store = shared.store
    tag, there = _chosen(shared, namespace)
    abouts = census.describe(store, shared.sealing, there.spaces.values())
    token_bytes = {t: n for t, about in abouts.items() if (n := _count(about.said, "token_bytes")) is not None}
    progress.begin(there.n_bytes)
    found = census.verify(store, shared.sealing, census.prefix_of(tag), token_bytes, progress.advance)
    all_bad = found.all_bad()
    gone = [one.held for one in found.bad if tag is not None or one.tag not in all_bad]
    removed, removed_bytes = census.remove(store, gone) if remove else (0, 0)
    return {
        "store": shared.shown,
        "has_secret": shared.sealing.has_secret,
        "namespace": tag,
        "values": found.values,
        "bytes": found.n_bytes,
        "vanished": found.vanished,
        "bad": [_value(one.held) | {"namespace": one.tag, "reason": one.reason} for one in found.bad],
        "all_bad": {t: found.by_tag[t] for t in sorted(all_bad)},
        "removed_values": removed,
        "removed_bytes": removed_bytes,
        "removable_values": 0 if remove else len(gone),
        "removable_bytes": 0 if remove else sum(held.size for held in gone),
        "strangers": found.strangers,
    }


# -- deleting ----------------------------------------------------------------------------------------


def clear(shared: Shared, namespace: str | None, agreed: Callable[[str], bool]) -> dict[str, Any]:
    """Deletes all values if `agreed` returns True. Raises what `agreed` raises."""
    tag, found = _chosen(shared, namespace)
    where = shared.shown if tag is None else f"namespace {tag} of {shared.shown}"
    told = {"store": shared.shown, "namespace": tag, "strangers": found.strangers}
    if not agreed(f"delete {found.values:,} values, {show_size(found.n_bytes)}, in {where}?"):
        left = {"left_values": found.values, "left_bytes": found.n_bytes}
        return told | {"agreed": False, "values": 0, "bytes": 0} | left
    removed, n_bytes = census.remove(shared.store, census.values(shared.store, tag))
    return told | {"agreed": True, "values": removed, "bytes": n_bytes, "left_values": 0, "left_bytes": 0}
