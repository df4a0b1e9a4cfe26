"""Writes a JSON schema in the keywords that llguidance enforces, where that allows nothing that the schema forbids.

What is made of a schema accepts the same values, or fewer where a rule says so; a keyword that cannot be written
otherwise is left as it is, and llguidance refuses it, or, where it need not be enforced, leaves it out. Pure, but for
a line in the log.

Schemas come from clients: how deep and how far this looks is bounded, and no reference leaves the schema.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onefold.engine.guidance.schema_choices import condition, negation, one_of, unique_items
from onefold.engine.guidance.schema_facts import NOTES, TYPES, Place, conjuncts, place_of, types_of

log = logging.getLogger("onefold.engine")

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Those that llguidance 1.9 knows."""
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minContains")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLE = ("items", "additionalItems", "additionalProperties")
CONTAINING = frozenset({*MAPS, *LISTS, *SINGLE})
SAME_VALUE = ("allOf", "anyOf", "oneOf")
"""Keywords with schemas of the value itself, and not of a part of it."""
REWRITTEN = frozenset(
    {"unevaluatedProperties", "unevaluatedItems", "dependentRequired", "dependentSchemas", "dependencies"}
    | {"contains", "propertyNames", "not", "if", "uniqueItems"}
)
"""Keywords of the rules below."""
IN_PLACE = frozenset({"$dynamicRef", "$recursiveRef", "anyOf", "oneOf", "if", "dependentSchemas", "not"})
"""Keywords by which other schemas evaluate properties and items, too; beside allOf and $ref."""
MOST_DEPTH = 100
MOST_FORMS = 5000
"""Schemas that are written for arrays of distinct values."""
MOST_NAMES = 1000
"""Properties that schemas inside are told of."""
MOST_TOLD = 100

_told: set[str] = set()


def enforceable(schema: Any) -> Any:
    """Returns the schema in a form that llguidance enforces, as far as there is one."""
    if not isinstance(schema, Mapping):
        return schema
    forms = _Forms(narrow=True)
    made = forms.schema(schema, place_of(schema), 0)
    if forms.narrowed and forms.unproven:
        # llguidance would look for values that two branches of a oneOf share, in branches that allow fewer now
        made = _Forms(narrow=False).schema(schema, place_of(schema), 0)
    return made


class _Forms:
    def __init__(self, *, narrow: bool) -> None:
        """`narrow`: what is made may accept fewer values than the schema."""
        self._narrow = narrow
        self._left = MOST_FORMS
        self.narrowed = False
        """Whether some part accepts fewer values now."""
        self.unproven = False
        """Whether a oneOf is left."""

    def schema(self, given: Any, place: Place, depth: int) -> Any:
        if not isinstance(given, Mapping):
            return given
        if depth > MOST_DEPTH:
            self.unproven = True
            return given
        if depth and isinstance(given.get("id" if place.draft == 4 else "$id"), str):
            place = replace(place, root=given)
        made = dict(given)
        _same(made, place)
        if self._narrow and made.keys() & REWRITTEN:
            for rule in RULES:
                self.narrowed |= rule(made, place)
            self._unique(made, place)
        self._one_of(made, place)
        return self._inside(made, place, depth + 1) if made.keys() & CONTAINING else made

    def _inside(self, made: dict[str, Any], place: Place, depth: int) -> dict[str, Any]:
        """Writes the schemas inside. What is data, or a name, is left alone."""
        other = replace(place, types=TYPES, around={}) if place.around or place.types != TYPES else place
        same = _around(made, place) if made.keys() & {*SAME_VALUE} else place
        for word in MAPS:
            if isinstance(made.get(word), Mapping):
                made[word] = {name: self.schema(inner, other, depth) for name, inner in made[word].items()}
        for word in LISTS:
            if isinstance(made.get(word), list):
                where = same if word in SAME_VALUE else other
                made[word] = [self.schema(inner, where, depth) for inner in made[word]]
        for word in SINGLE:
            if isinstance(made.get(word), list):
                made[word] = [self.schema(inner, other, depth) for inner in made[word]]
            elif word in made:
                made[word] = self.schema(made[word], other, depth)
        return made

    def _unique(self, made: dict[str, Any], place: Place) -> None:
        if made.get("uniqueItems") is not True or self._left <= 0:
            return
        most = made.get("maxItems")
        if type(most) is int and most <= 1:
            del made["uniqueItems"]
            return
        parts = unique_items(made, place)
        if parts is not None:
            self._left -= sum(len(part.get("anyOf", ())) for part in parts)
            self.narrowed = True
            del made["uniqueItems"], made["items"]
            _also(made, parts)

    def _one_of(self, made: dict[str, Any], place: Place) -> None:
        if "oneOf" not in made:
            return
        rest = {word: made[word] for word in made if word != "oneOf"}
        where = replace(place, types=types_of(rest, place) & place.types)
        found = one_of(made["oneOf"], where, narrow=self._narrow)
        if found is None:
            self.unproven = True
            return
        del made["oneOf"]
        parts, narrowed = found
        self.narrowed |= narrowed
        if len(parts) == 1 and set(parts[0]) == {"anyOf"} and "anyOf" not in made:
            made.update(parts[0])
        else:
            _also(made, parts)


def _around(made: Mapping[str, Any], place: Place) -> Place:
    mine = made.get("properties")
    known = mine if isinstance(mine, Mapping) and len(mine) <= MOST_NAMES else {}
    around = {**place.around, **known} if len(place.around) <= MOST_NAMES else known
    return replace(place, types=types_of(made, place) & place.types, around=around)


def _also(made: dict[str, Any], parts: list[Any]) -> None:
    """Adds schemas that must hold, too."""
    if parts:
        before = made.get("allOf")
        made["allOf"] = [*(before if isinstance(before, list) else ()), *parts]


def _same(made: dict[str, Any], place: Place) -> None:
    """What changes nothing: 2.0 is 2, and some keywords forbid nothing."""
    known = made.get("format")
    if isinstance(known, str) and known not in FORMATS:
        del made["format"]
        if known not in _told and len(_told) < MOST_TOLD:
            _told.add(known)
            log.info("a format of schemas is not known, and not enforced: %r", known[:40])
    for word in COUNTS:
        if isinstance(made.get(word), float) and made[word].is_integer():
            made[word] = int(made[word])
    if made.get("uniqueItems") is False:
        del made["uniqueItems"]
    if "contains" not in made:
        made.pop("minContains", None)
        made.pop("maxContains", None)
    elif made.get("minContains") == 0 and "maxContains" not in made and place.draft >= 2019:
        del made["contains"], made["minContains"]
    if "if" not in made or not made.keys() & {"then", "else"}:
        for word in ("if", "then", "else"):
            made.pop(word, None)
    names = made.get("propertyNames")
    if names is True or (isinstance(names, Mapping) and {*names} - NOTES <= {"type"} and _may_be_text(names)):
        del made["propertyNames"]
    for word in ("unevaluatedProperties", "unevaluatedItems"):
        if made.get(word) in (True, {}):
            del made[word]


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    named = schema.get("type", "string")
    return named == "string" or (isinstance(named, list) and "string" in named)


# -- rules: each changes a schema, and says whether it may accept fewer values now ------------------


def _unevaluated(made: dict[str, Any], place: Place) -> bool:
    properties, items = "unevaluatedProperties" in made, "unevaluatedItems" in made
    if properties and not made.keys() & IN_PLACE:
        inner = made.pop("unevaluatedProperties")
        named = _names_of_parts(made, place)
        if named and "additionalProperties" not in made:
            made["properties"] = {**named, **(made.get("properties") or {})}
        made.setdefault("additionalProperties", inner)
    if items and not made.keys() & {*IN_PLACE, "allOf", "$ref"}:
        inner = made.pop("unevaluatedItems")
        if "contains" in made and place.draft >= 2020:  # all items will keep to it, which evaluates them
            made["unevaluatedItems"] = inner
            if "maxContains" not in made:
                del made["unevaluatedItems"]
        elif isinstance(made.get("items"), list):
            made.setdefault("additionalItems", inner)
        else:
            made.setdefault("items", inner)
    return properties or items


def _names_of_parts(made: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Properties that an allOf and a reference evaluate; what they must be is said there."""
    found: dict[str, Any] = {}
    for part in conjuncts(made, place):
        named = part.get("properties") if isinstance(part, Mapping) else None
        if isinstance(named, Mapping):
            found |= dict.fromkeys(named, True)
    return found


def _dependencies(made: dict[str, Any], _: Place) -> bool:
    """What may depend on a property is so in any case."""
    found: list[tuple[str, Any]] = []
    for word in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(made.get(word), Mapping):
            found += made.pop(word).items()
    for name, inner in found:
        if isinstance(inner, str):  # as draft 3 has it
            inner = [inner]
        if inner is False:
            _also(made, [{"properties": {name: False}}])
        elif inner is not True and _may_occur(made, name):
            _also(made, [{"required": inner} if isinstance(inner, list) else inner])
    return bool(found)


def _may_occur(made: Mapping[str, Any], name: str) -> bool:
    named = made.get("properties")
    if isinstance(named, Mapping) and name in named:
        return named[name] is not False
    return made.get("additionalProperties") is not False or bool(made.get("patternProperties"))


def _contains(made: dict[str, Any], place: Place) -> bool:
    """All items are what some must be."""
    least = made.get("minContains", 1) if place.draft >= 2019 else 1
    if "contains" not in made or ("maxContains" in made and place.draft >= 2019) or type(least) is not int:
        return False
    made.pop("minContains", None)
    _also(made, [{"items": made.pop("contains"), "minItems": least}])
    return True


def _property_names(made: dict[str, Any], _: Place) -> bool:
    names, rest = made.get("propertyNames"), made.get("additionalProperties", True)
    mine = made.get("properties", {})
    if names is False:
        made.pop("propertyNames")
        made["maxProperties"] = 0
        return True
    if not isinstance(names, Mapping) or made.get("patternProperties") or not isinstance(mine, Mapping):
        return False
    words = set(names) - NOTES - {"type"}
    if not _may_be_text(names):
        return False
    if words and words <= {"enum", "const"}:
        listed = [names["const"]] if "const" in names else names["enum"]
        texts = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
        made["properties"] = {**dict.fromkeys(mine, False), **{name: mine.get(name, rest) for name in texts}}
        made["additionalProperties"] = False
    elif words and words <= {"minLength", "maxLength"}:
        low, high = names.get("minLength", 0), names.get("maxLength")
        if type(low) is not int or (high is not None and (type(high) is not int or high < low)):
            return False
        made["properties"] = {
            name: inner if low <= len(name) and (high is None or len(name) <= high) else False
            for name, inner in mine.items()
        }
        made["patternProperties"] = {rf"^[\s\S]{{{low},{'' if high is None else high}}}$": rest}
        made["additionalProperties"] = False
    elif words == {"pattern"} and not mine and isinstance(names["pattern"], str):
        made["patternProperties"] = {names["pattern"]: rest}
        made["additionalProperties"] = False
    else:
        return False
    del made["propertyNames"]
    return True


def _not(made: dict[str, Any], place: Place) -> bool:
    parts = negation(made["not"], made, place) if "not" in made else None
    if parts is None:
        return False
    del made["not"]
    _also(made, parts)
    return True


def _if(made: dict[str, Any], place: Place) -> bool:
    if "if" not in made:
        return False
    rest = {word: made[word] for word in made if word not in ("if", "then", "else")}
    parts = condition(made["if"], made.get("then", True), made.get("else", True), rest, place)
    if parts is None:
        return False
    made.clear()
    made.update(rest)
    _also(made, parts)
    return True


RULES: tuple[Callable[[dict[str, Any], Place], bool], ...] = (
    _unevaluated,
    _dependencies,
    _contains,
    _property_names,
    _not,
    _if,
)
