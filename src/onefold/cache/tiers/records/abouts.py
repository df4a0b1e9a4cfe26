"""The `about.json` of each namespace, which says for people what the namespace's records belong to.

It is written with the namespace's first record. One that an earlier version wrote with fewer keys is completed with the
next record; one that no cache wrote is left alone. No MLX in this file.
"""

from __future__ import annotations

import contextlib
from typing import Any

from onefold.cache.tiers.records.directory import Directory
from onefold.cache.tiers.records.files import read_json, write_json
from onefold.cache.tiers.records.listing import ABOUT, is_our_about


class Abouts:
    def __init__(self) -> None:
        self._given: dict[str, dict[str, Any]] = {}
        self._checked: set[str] = set()
        """Namespaces whose `about.json` was read, to see whether it is complete."""

    def set(self, namespace: str, about: dict[str, Any]) -> None:
        """Keep what a namespace's `about.json` is to say, until its next record is written."""
        self._given[namespace] = {"namespace": namespace} | about

    def write_if_due(self, inside: Directory, namespace: str) -> None:
        """Write the `about.json` of a namespace, whose folder is open, if it is missing or incomplete. Raises
        OSError."""
        if namespace in self._given and self._is_due(inside, namespace):
            with contextlib.suppress(FileExistsError):  # a folder has the temporary name: it is left there
                write_json(inside, ABOUT, self._given[namespace])

    def _is_due(self, inside: Directory, namespace: str) -> bool:
        if not inside.has(ABOUT):
            return True
        if namespace in self._checked:
            return False
        self._checked.add(namespace)
        found = read_json(inside, ABOUT)
        return is_our_about(found, namespace) and not found.keys() >= self._given[namespace].keys()


def read_about(inside: Directory) -> dict[str, Any]:
    """Returns what a namespace's `about.json` says; nothing if it cannot be read or understood."""
    return {key: value for key, value in read_json(inside, ABOUT).items() if key != "namespace"}
