"""KV of a cache's model that is in its folder and is not read, because it was stored in another format or with another
bound: a warning when the folder is opened.

Each `about.json` is read once. It may be damaged, and then what it describes is missing here; nothing else follows from
it.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections import Counter
from typing import Any

from onefold.cache.tiers.disk.naming import name_of
from onefold.cache.tiers.identity import Identity, salt_of
from onefold.cache.tiers.records.catalog import Catalog
from onefold.cache.tiers.records.entry import on_disk
from onefold.sizes import show_size

log = logging.getLogger("onefold")

SETTINGS = {"kv", "layout", "bound"}
"""What differs between namespaces of one model that were stored with other settings."""
MOST = 5
"""Settings that a warning names, and namespaces of each."""
DIGITS = 8
"""Of a namespace's name."""


class Other:
    """What was stored with other settings."""

    def __init__(self, settings: str, is_bound_otherwise: bool) -> None:
        self.size, self.is_bound_otherwise = 0, is_bound_otherwise
        self._settings, self._names = settings, list[str]()

    def add(self, name: str, size: int) -> None:
        self.size += size
        self._names.append(name)

    def __str__(self) -> str:
        noun = "namespace" if len(self._names) == 1 else "namespaces"
        names = _first([name[:DIGITS] for name in self._names], ", ")
        return f"{show_size(self.size)} with {self._settings} ({noun} {names})"


def log_others(catalog: Catalog, identity: Identity) -> None:
    """Log how much KV of this model is not read, and what to do about it."""
    mine = json.loads(json.dumps(identity.about))
    found = _others(catalog, identity, mine)
    if not found:
        return
    has = _kv(mine, identity) + (_bound(mine) if any(other.is_bound_otherwise for other in found) else "")
    log.warning(
        "%s has KV of this model that is not used, because this cache has %s: %s. It counts in the disk budget until "
        "it is evicted. To use it, start with the settings that it was stored with. To delete it, stop all processes "
        "that use the folder, and run `onefold cache clear --disk %s --namespace ID`",
        catalog.folder.path,
        has,
        _first([str(other) for other in sorted(found, key=lambda other: -other.size)], "; "),
        shlex.quote(str(catalog.folder.path)),
    )


def _others(catalog: Catalog, identity: Identity, mine: dict[str, Any]) -> list[Other]:
    sizes = Counter[str]()
    for record in catalog.records():
        sizes[record.namespace] += on_disk(record.size)
    salt = salt_of("")
    assert salt is not None
    del sizes[name_of(identity.about, salt)]  # it is read, whatever its `about.json` says
    found = dict[str, Other]()
    for name, size in sizes.items():
        about = catalog.folder.about(name)
        ours = about.keys() >= mine.keys() and all(about[key] == mine[key] for key in mine.keys() - SETTINGS)
        if ours and (about["kv"], about["bound"]) != (mine["kv"], mine["bound"]):
            otherwise = about["bound"] != mine["bound"]
            settings = _kv(about, identity) + (_bound(about) if otherwise else "")
            found.setdefault(settings, Other(settings, otherwise)).add(name, size)
    return list(found.values())


def _kv(about: dict[str, Any], identity: Identity) -> str:
    kv = identity.kv_of(about["kv"])
    return f"kv='{kv}'" if kv else "a format that no kv of this version reads"


def _bound(about: dict[str, Any]) -> str:
    match about["bound"]:
        case None:
            return " and no max_kv_size"
        case [int(size), int(keep)]:
            return f", max_kv_size={size}, keep={keep}"
        case _:
            return " and a bound that this version does not know"


def _first(parts: list[str], between: str) -> str:
    more = len(parts) - MOST
    return between.join(parts[:MOST]) + (f"{between}and {more} more" if more > 0 else "")
