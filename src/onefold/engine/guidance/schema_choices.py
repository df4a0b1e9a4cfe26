"""Writes `oneOf`, `not`, `if` and `uniqueItems` without them, where that allows nothing that they forbid. Pure.

Each function returns the schemas that all must hold in place of the keyword, or None: it cannot be written otherwise.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from onefold.engine.guidance.schema_facts import (
    NOTES,
    Place,
    disjoint,
    followed,
    key,
    property_of,
    required_of,
    types_of,
    values_of,
)

MOST_BRANCHES = 100
MOST_UNIQUE = 12
"""Values that the items of an array of distinct ones may have."""
MOST_FORMS = 80
"""Alternatives for arrays of one length."""
MOST_UNIQUE_BYTES = 2000


def one_of(branches: Any, place: Place, *, narrow: bool) -> tuple[list[Any], bool] | None:
    """Branches of which no value keeps to two are an anyOf. `narrow`: others may be made so, by forbidding an object of
    one branch a name that the other requires. Also returns whether that was done."""
    if not isinstance(branches, list) or not 0 < len(branches) <= MOST_BRANCHES:
        return None
    needed = [required_of(branch, place) for branch in branches]
    absent: list[set[str]] = [set() for _ in branches]
    for i, j in itertools.combinations(range(len(branches)), 2):
        if disjoint(branches[i], branches[j], place):
            continue
        for one, other in ((i, j), (j, i)):
            name = _excluding(branches[one], sorted(needed[other] - needed[one]), place) if narrow else None
            if name is None:
                return None
            absent[one].add(name)
    made = [
        {"allOf": [branch, {"type": "object", "properties": dict.fromkeys(sorted(names), False)}]} if names else branch
        for branch, names in zip(branches, absent, strict=True)
    ]
    return [{"anyOf": made}], any(absent)


def _excluding(branch: Any, names: list[str], place: Place) -> str | None:
    """Of these names the one to forbid in a branch: one that it does not speak of, if there is one."""
    return min(names, key=lambda name: len(property_of(branch, name, place)), default=None)


def negation(inner: Any, schema: Mapping[str, Any], place: Place, depth: int = 0) -> list[Any] | None:
    """`schema`: the one that has the `not`."""
    if isinstance(inner, bool):
        return [False] if inner else []
    if not isinstance(inner, Mapping) or depth > 4:
        return None
    words = set(inner) - NOTES
    if not words:
        return [False]
    if words == {"not"}:
        return [inner["not"]]
    if words == {"anyOf"} and isinstance(inner["anyOf"], list) and len(inner["anyOf"]) <= MOST_BRANCHES:
        each = [negation(option, schema, place, depth + 1) for option in inner["anyOf"]]
        return None if None in each else [part for parts in each for part in parts or ()]
    if words == {"type"}:
        return _other_types(inner["type"], schema, place)
    if words <= {"const", "enum", "type"}:
        return _other_values(inner, schema, place)
    ways = denied(inner, schema, place)
    return [{"anyOf": ways}] if ways else None


def _other_types(named: Any, schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    names = named if isinstance(named, list) else [named]
    mine = types_of({word: schema[word] for word in schema if word != "not"}, place) & place.types
    left = mine - {"number" if name == "integer" else str(name) for name in names}
    return [{"type": sorted(left)}] if left else None


def _other_values(inner: Mapping[str, Any], schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    not_these = values_of(inner, place)
    rest = {word: schema[word] for word in schema if word != "not"}
    mine = values_of(rest, place)
    if not_these is None:
        return None
    if mine is None:
        text = types_of(rest, place) & place.types == {"string"} and not_these == [""]
        return [{"minLength": 1}] if text else None
    left = _without(mine, not_these)
    return [{"enum": left}] if left else None


def _without(values: list[Any], others: list[Any]) -> list[Any]:
    gone = {*map(key, others)}
    return [value for value in values if key(value) not in gone]


def condition(test: Any, then: Any, other: Any, schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    """`schema`: the one that has the `if`. Either the test holds, and `then`; or it certainly does not, and `other`."""
    while isinstance(test, Mapping) and set(test) - NOTES == {"not"}:
        test, then, other = test["not"], other, then
    if isinstance(test, bool):
        return [then if test else other]
    ways = denied(test, schema, place)
    if ways is None:
        return None
    made: list[Any] = [] if then is False else [{"allOf": [test, then]}]
    made += [] if other is False else [{"allOf": [way, other]} for way in ways]
    return [{"anyOf": made}] if made else None


def denied(test: Any, schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    """Ways in which a value certainly fails a test of an object's properties: one has another of its values, or is
    absent. None: the test is of another kind, or not all ways are known."""
    if not _only(test, {"properties", "required", "type"}) or test.get("type", "object") != "object":
        return None
    tested, names = test.get("properties", {}), test.get("required", [])
    if not isinstance(tested, Mapping) or not isinstance(names, list):
        return None
    mine = schema.get("properties")
    made: list[Any] = []
    for name, inner in tested.items():
        if inner is True or inner == {}:
            continue
        about = [found[name] for found in (mine, place.around) if isinstance(found, Mapping) and name in found]
        not_these, all_of_them = values_of(inner, place), values_of({"allOf": about}, place)
        if not_these is None or all_of_them is None:
            return None
        left = _without(all_of_them, not_these)
        made += [{"type": "object", "properties": {name: {"enum": left}}, "required": [name]}] if left else []
    made += [{"type": "object", "properties": {name: False}} for name in names if isinstance(name, str)]
    others = types_of(schema, place) & place.types - {"object"}
    return [*made, {"type": sorted(others)}] if others and "type" in test else made


def unique_items(schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    """Distinct values, in the order in which the schema lists them. The returned schemas leave out `items`."""
    items = followed(schema.get("items"), place)
    values = values_of(items, place)
    if values is None or not 0 < len(values) <= MOST_UNIQUE or "prefixItems" in schema:
        return None
    if len(json.dumps(values)) > MOST_UNIQUE_BYTES:
        return None
    low, high = schema.get("minItems", 0), schema.get("maxItems", len(values))
    if type(low) is not int or type(high) is not int:
        return None
    forms: list[Any] = [] if low > 0 else [{"maxItems": 0}]
    for length in range(max(low, 1), min(high, len(values)) + 1):
        forms += [_in_order(values, cuts, place) for cuts in _cuts(len(values), length)]
    listed = _only(items, {"enum", "const", "type"})
    return ([] if listed else [{"items": items}]) + [{"anyOf": forms}] if forms else None


def _cuts(size: int, length: int) -> list[tuple[int, ...]]:
    """Where a list is cut, so that each part gives one item: in all ways, or in one if there are too many."""
    found = list(itertools.islice(itertools.combinations(range(1, size), length - 1), MOST_FORMS + 1))
    return found if len(found) <= MOST_FORMS else [tuple(size * i // length for i in range(1, length))]


def _in_order(values: list[Any], cuts: tuple[int, ...], place: Place) -> dict[str, Any]:
    bounds = [0, *cuts, len(values)]
    parts = [{"enum": values[begin:end]} for begin, end in itertools.pairwise(bounds)]
    first, rest = ("prefixItems", "items") if place.draft >= 2020 else ("items", "additionalItems")
    return {first: parts, rest: False, "minItems": len(parts), "maxItems": len(parts)}


def _only(schema: Any, words: set[str]) -> bool:
    return isinstance(schema, Mapping) and set(schema) - NOTES <= words
