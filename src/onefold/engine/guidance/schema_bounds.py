"""Bounds what a schema leaves unbounded and no program expects to be long: whole numbers, and texts of a format.

A small model that has begun to repeat itself writes digits until its limit of tokens. What is made here accepts fewer
values than the schema: whole numbers of 64 bits, and addresses and dates as long as their standards allow. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

LARGEST = 2**63 - 1024
"""Of whole numbers, with either sign: the largest double in 64 bits, for llguidance reads bounds as doubles."""
LENGTHS = {"email": 254, "hostname": 253, "uri": 2048, "date-time": 40, "time": 40, "duration": 40}
"""Characters of texts of these formats."""
MOST_DEPTH = 100
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
NAMED, LISTED = ("properties", "patternProperties", "$defs", "definitions"), ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")


def bounded(schema: Any) -> Any:
    """Returns the schema with bounds for what has none; as it is if some of its numbers lie beyond them."""
    beyond = any(_beyond(part) for part in _parts(schema))
    return schema if beyond else _bounded(schema, 0)


def _bounded(schema: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return schema
    made = dict(schema)
    for word, inner in schema.items():
        if word in NAMED and isinstance(inner, Mapping):
            made[word] = {name: _bounded(one, depth + 1) for name, one in inner.items()}
        elif isinstance(inner, list) and word in (*LISTED, *SINGLE):
            made[word] = [_bounded(one, depth + 1) for one in inner]
        elif word in SINGLE:
            made[word] = _bounded(inner, depth + 1)
    if made.keys().isdisjoint({"enum", "const"}):
        _bound_number(made)
        _bound_text(made)
    return made


def _bound_number(made: dict[str, Any]) -> None:
    named = made.get("type")
    types = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    if "integer" not in types or "number" in types or "multipleOf" in made:
        return
    if made.keys().isdisjoint(LOWER):
        made["minimum"] = -LARGEST
    if made.keys().isdisjoint(UPPER):
        made["maximum"] = LARGEST


def _bound_text(made: dict[str, Any]) -> None:
    format_ = made.get("format")
    most = LENGTHS.get(format_) if isinstance(format_, str) else None
    least = made.get("minLength", 0)
    if most is not None and "maxLength" not in made and type(least) is int and least <= most:
        made["maxLength"] = most


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings in it."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            yield one
            left += one.values()
        elif isinstance(one, list):
            left += one


def _beyond(part: Mapping[str, Any]) -> bool:
    given = [part.get(word) for word in (*LOWER, *UPPER)]
    return any(isinstance(one, int | float) and not abs(one) <= LARGEST for one in given)
