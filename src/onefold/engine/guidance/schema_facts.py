"""What is certain about a JSON schema: types and values that it may have at most, names that it requires. Pure.

All of it is a bound: a schema has no more types and values than these functions say, and may have fewer. Schemas come
from clients, so every function has a bound of its own, and says "not known" beyond it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
"""An integer is a number."""
NOTES = frozenset(
    {"title", "description", "$comment", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id"}
)
"""Keywords that forbid nothing."""
MOST_VALUES = 400
MOST_DEPTH = 8
MOST_STEPS = 50_000
"""Schemas that are looked at for one whole schema: 0.3 s. Beyond that nothing is certain."""
_DRAFT = re.compile(r"https?://json-schema\.org/draft(?:-0([3-7])|/(\d{4})-\d\d)/schema#?")


@dataclass(frozen=True)
class Place:
    """Where a schema stands."""

    root: Mapping[str, Any]
    """What local references are relative to."""
    draft: int
    """4, 6, 7, 2019 or 2020."""
    types: frozenset[str] = TYPES
    """What the schemas around this one allow for the same value."""
    around: Mapping[str, Any] = field(default_factory=dict)
    """Properties that the schemas around this one name for the same value."""
    left: list[int] = field(default_factory=lambda: [MOST_STEPS])
    """Schemas that may still be looked at."""


def place_of(root: Mapping[str, Any]) -> Place:
    found = _DRAFT.fullmatch(str(root.get("$schema", "")))
    return Place(root, int(found[1] or found[2]) if found else 2020)


def key(value: Any) -> str:
    """The same text for values, neither lists nor objects, that JSON schema takes for equal."""
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def type_of(value: Any) -> str:
    kinds = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def followed(schema: Any, place: Place) -> Any:
    """What a local reference without other keywords names, through others; the schema itself if it is none."""
    for _ in range(MOST_DEPTH):
        if not isinstance(schema, Mapping) or set(schema) - NOTES != {"$ref"}:
            return schema
        found = _target(schema, place)
        if found is None:
            return schema
        schema = found
    return schema


def _target(schema: Mapping[str, Any], place: Place) -> Any:
    reference = schema["$ref"]
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
    found = place.root.get(match[1]) if match else None
    target = found.get(match[2]) if match and isinstance(found, Mapping) else None
    return None if isinstance(target, Mapping) and target.keys() & {"$id", "id"} else target


def conjuncts(schema: Any, place: Place, depth: int = 0) -> Iterator[Any]:
    """Schemas that all hold where this one does: its own keywords, what it refers to, and the parts of its allOf."""
    place.left[0] -= 1
    if place.left[0] < 0:
        return
    if not isinstance(schema, Mapping):
        yield schema
        return
    if "$ref" in schema:
        target = _target(schema, place) if depth < MOST_DEPTH else None
        if target is not None:
            yield from conjuncts(target, place, depth + 1)
        if place.draft < 2019:  # the other keywords do not count
            return
    yield schema
    parts = schema.get("allOf")
    if isinstance(parts, list) and depth < MOST_DEPTH:
        for part in parts[:64]:
            yield from conjuncts(part, place, depth + 1)


def types_of(schema: Any, place: Place, depth: int = 0) -> frozenset[str]:
    """The types that a schema allows at most."""
    found = TYPES
    for part in conjuncts(schema, place, depth):
        if not isinstance(part, Mapping):
            found &= TYPES if part is True else frozenset()
            continue
        named = part.get("type")
        if isinstance(named, str | list):
            names = [named] if isinstance(named, str) else [name for name in named if isinstance(name, str)]
            found &= frozenset("number" if name == "integer" else name for name in names)
        listed = _listed(part, place)
        if listed is not None:
            found &= frozenset(map(type_of, listed))
        for word in ("anyOf", "oneOf"):
            options = part.get(word)
            if isinstance(options, list) and options and depth < MOST_DEPTH // 2:
                found &= frozenset().union(*(types_of(option, place, depth + 1) for option in options[:100]))
                found = TYPES if len(options) > 100 else found
    return found


def values_of(schema: Any, place: Place, depth: int = 0) -> list[Any] | None:
    """The values that a schema allows at most, in its order and without repetition; None: they are not known."""
    found: dict[str, Any] | None = None
    for part in conjuncts(schema, place, depth):
        if part is False:
            return []
        values = _values(part, place, depth) if isinstance(part, Mapping) else None
        if values is not None:
            keyed = {key(value): value for value in values}
            found = keyed if found is None else {k: v for k, v in found.items() if k in keyed}
    if found is None:
        return None
    types = types_of(schema, place, depth)
    return [value for value in found.values() if type_of(value) in types]


def _values(schema: Mapping[str, Any], place: Place, depth: int) -> list[Any] | None:
    listed = _listed(schema, place)
    if listed is not None:
        return listed if all(not isinstance(value, list | Mapping) for value in listed) else None
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    low, high = schema.get("minimum"), schema.get("maximum")
    made: list[Any] = []
    for name in names:
        if name == "boolean":
            made += [False, True]
        elif name == "null":
            made.append(None)
        elif name == "integer" and type(low) is int and type(high) is int and 0 <= high - low < MOST_VALUES:
            made += range(low, high + 1)
        else:
            break
    else:
        return made
    for word in ("anyOf", "oneOf"):
        options = schema.get(word)
        if isinstance(options, list) and depth < MOST_DEPTH // 2 and len(options) <= 100:
            each = [values_of(option, place, depth + 1) for option in options]
            if all(values is not None for values in each):
                return [value for values in each for value in values or ()]
    return None


def _listed(schema: Mapping[str, Any], place: Place) -> list[Any] | None:
    if "const" in schema and place.draft > 4:
        return [schema["const"]]
    found = schema.get("enum")
    return found if isinstance(found, list) and len(found) <= MOST_VALUES else None


def required_of(schema: Any, place: Place) -> set[str]:
    """Names that an object of this schema has for certain."""
    found: set[str] = set()
    for part in conjuncts(schema, place):
        names = part.get("required") if isinstance(part, Mapping) else None
        place.left[0] -= len(names) if isinstance(names, list) else 0
        found |= {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()
    return found


def property_of(schema: Any, name: str, place: Place) -> list[Any]:
    """Schemas that all hold for a property."""
    found = []
    for part in conjuncts(schema, place):
        if not isinstance(part, Mapping):
            continue
        named = part.get("properties")
        if isinstance(named, Mapping) and name in named:
            found.append(named[name])
        elif "additionalProperties" in part and not part.get("patternProperties"):
            found.append(part["additionalProperties"])
    return found


def disjoint(one: Any, other: Any, place: Place, depth: int = 0) -> bool:
    """Whether it is certain that no value keeps to both schemas."""
    common = types_of(one, place) & types_of(other, place) & (place.types if depth == 0 else TYPES)
    if not common:
        return True
    first, second = values_of(one, place), values_of(other, place)
    if first is not None and second is not None and not {*map(key, first)} & {*map(key, second)}:
        return True
    if common != {"object"} or depth >= 3:
        return False
    for name in sorted(required_of(one, place) | required_of(other, place))[:100]:
        here, there = property_of(one, name, place), property_of(other, name, place)
        if False in [x for x in (*here, *there) if isinstance(x, bool)]:
            return True
        if any(disjoint(x, y, place, depth + 1) for x in here[:4] for y in there[:4]):
            return True
    return False
