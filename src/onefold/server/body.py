"""Parses the bytes of a request into a checked schema, or into a sentence that names what is wrong.

Takes JSON as its standard has it: no NaN, no half of a surrogate pair, no more than 200 levels. The number of values is
bounded before they are checked, which no other thread can interrupt. Knows no API.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from onefold.errors import BadRequest
from onefold.server.record import header_text

log = logging.getLogger("onefold.server")

MOST_ITEMS = 10_000
"""The most items of a list or an object."""
MOST_NUMBERS = 1 << 18
"""The most items of a list of numbers: the tokens of a prompt."""
MOST_BRACKETS = 1_000_000
"""Opening brackets and field names in the text of a body. Other threads wait while it is parsed."""
MOST_VALUES = 100_000
"""The most values of a whole body; a list of numbers counts as one."""


def _never(_: Any) -> bool:
    return False


@dataclass(frozen=True)
class Refusal:
    """Why a field is refused: ignoring it would change what the request means."""

    message: str
    unless: Callable[[Any], bool] = _never
    """Whether a value asks for nothing, as null does."""
    details: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Details for programs, for an API that has a field for them."""


@dataclass(frozen=True)
class Kinds:
    """The allowed values of an object's `type`. `otherwise` is the message for any other; "{}" is replaced by it."""

    taken: frozenset[str]
    otherwise: str


class Fields(BaseModel):
    """A JSON object. Types are taken as written (a "1" is no number).

    The fields of the API that it is from are honoured (those of the class), known and harmless to ignore (`ignored`),
    or refused (`refused`, and `kinds` for its `type`). Fields that the API does not have are let pass."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = MappingProxyType({})
    kinds: ClassVar[Kinds | None] = None


Schema = TypeVar("Schema", bound=Fields)


def parse(body: bytes, schema: type[Schema]) -> Schema:
    """Parses it. Raises BadRequest."""
    given = parse_json(body)
    if not isinstance(given, dict):
        raise BadRequest(f"The body must be a JSON object, not {_kind(given)}.")
    _bound(given)
    try:
        found = schema.model_validate(given)
    except ValidationError as error:
        raise explain(error, given) from None
    refuse(found)
    if unknown := set(found.model_extra or ()) - found.ignored:
        log.debug("ignored unknown fields: %s", header_text(", ".join(sorted(unknown))))
    return found


def _bound(given: Any) -> None:
    """Limits the number of values, so that checking them takes a moment only. Raises BadRequest."""
    left: list[tuple[tuple[str, ...], Any]] = [((), given)]
    seen = 0
    while left:
        where, value = left.pop()
        if not isinstance(value, (dict, list)) or not value:
            continue
        numbers = isinstance(value, list) and all(type(item) is int for item in value)
        most = MOST_NUMBERS if numbers else MOST_ITEMS
        if len(value) > most:
            raise BadRequest(f"This has {len(value)} items; at most {most} are allowed.", where=".".join(where))
        if not numbers:
            seen += len(value)
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            left += [((*where, str(name)), item) for name, item in inner]
        if seen > MOST_VALUES:
            raise BadRequest(f"The body has more than {MOST_VALUES} values; send fewer.")


def refuse(found: Fields) -> None:
    """Raises BadRequest for the first field, here or further in, that the schema refuses."""
    for where, inside in _objects(found, ()):
        if inside.kinds is not None:
            kind = getattr(inside, "type", None)
            if kind is not None and kind not in inside.kinds.taken:
                said = inside.kinds.otherwise.format(repr(kind[:40]))
                raise BadRequest(said, where=".".join((*where, "type")))
        for name, value in (inside.model_extra or {}).items():
            refusal = inside.refused.get(name)
            if refusal is not None and value is not None and not refusal.unless(value):
                raise BadRequest(refusal.message, where=".".join((*where, name)), details=refusal.details)


def _objects(found: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Fields]]:
    if isinstance(found, Fields):
        yield where, found
        for name in type(found).model_fields:
            yield from _objects(getattr(found, name), (*where, name))
    elif isinstance(found, list):
        for i, item in enumerate(found):
            yield from _objects(item, (*where, str(i)))


def parse_json(text: bytes | str) -> Any:
    """Parses it. Raises BadRequest."""
    if _brackets(text) > MOST_BRACKETS:
        raise BadRequest(f"The body has more than {MOST_BRACKETS} lists, objects and fields; send fewer.")
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        hint = ""
        if "recursion" in str(error):
            hint = " (200 levels of nesting is the most)"
        elif "hex escape" in str(error) or "surrogate" in str(error):
            hint = " (a \\u escape is not a character: is it half of a surrogate pair?)"
        elif "unicode" in str(error):
            hint = " (it must be UTF-8)"
        raise BadRequest(f"The body is not valid JSON: {error}{hint}.") from None


def _brackets(text: bytes | str) -> int:
    """About how many lists, objects and fields; at least so many, as those in strings count too."""
    if isinstance(text, str):
        return text.count("[") + text.count("{") + text.count('":')
    return text.count(b"[") + text.count(b"{") + text.count(b'":')


def parse_arguments(given: str | Mapping[str, Any] | None) -> Any:
    """Those of a tool's call as an object, which is what templates go through. Text that is none (a model may have
    written it) stays text."""
    if given is None or given == "":
        return {}
    if not isinstance(given, str) or _brackets(given) > MOST_VALUES:
        return given
    try:
        found = from_json(given, allow_inf_nan=False)
    except ValueError:
        return given
    return found if isinstance(found, dict) else given


_PYTHON = re.compile(r"a valid dictionary or instance of \w+")


def explain(error: ValidationError, given: Any) -> BadRequest:
    """One sentence about the most specific thing that is wrong."""
    found = [(_path(detail, given), detail) for detail in error.errors(include_url=False, include_input=False)]
    deepest = max(len(path) for path, _ in found)
    where, first = next((path, detail) for path, detail in found if len(path) == deepest)
    if first["type"] == "missing":
        return BadRequest("This field is required.", where=".".join(where))
    wanted = dict.fromkeys(
        detail["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        for path, detail in found
        if path == where
    )
    told = _PYTHON.sub("an object", " or ".join(wanted))
    told = f"this should be {told}" if first["msg"].startswith("Input should be ") else told
    return BadRequest(f"{told[:1].upper()}{told[1:]}.", where=".".join(where))


def _path(detail: ErrorDetails, given: Any) -> tuple[str, ...]:
    """Where in the body it is. Pydantic also names the member of a union that it tried; the body has no such place."""
    path, here = [], given
    for step in detail["loc"]:
        if isinstance(here, dict):
            inside = step in here
        else:  # not `step in range(n)`, which compares a string with all n numbers
            inside = isinstance(here, list) and isinstance(step, int) and 0 <= step < len(here)
        if inside:
            here = here[step]
        elif not (detail["type"] == "missing" and step == detail["loc"][-1]):
            continue
        path.append(str(step))
    return tuple(path)


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
