"""The names of the formats of stored KV, for command lines: no MLX in this file. `registry` has the formats."""

from __future__ import annotations

NAMES = ("16", "8", "k8v4", "4", "affine8", "affine4", "turbo4", "turbo3")
_OF_TAGS = {"8": "affine8", "8s": "affine8", "4": "affine4", "4s": "affine4", "r8r8": "8", "r8g4": "k8v4", "r5r4": "4"}


def name_of(tag: object) -> str:
    """Returns the name of a format, given what a namespace calls it; the tag itself if it is not known."""
    base, plus, edges = str(tag).partition("+")
    return _OF_TAGS.get(base, base) + plus + edges
