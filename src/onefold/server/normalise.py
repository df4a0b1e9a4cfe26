"""Removes from a request what changes without changing its meaning, so that its prompt stays the same.

Pure functions. Lists keep their order, text keeps every character but for the lines named here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")
"""Claude Code begins its system prompt with such a line, which differs from request to request."""

_COUNTDOWN = r"<total_tokens>\s*[\d,._]+ tokens left\s*</total_tokens>"
COUNTDOWN = re.compile(rf"(?:\A|(?<=\n))[ \t]*{_COUNTDOWN}[ \t]*(?:\n+|\Z)")
"""Claude Code says so in system text, with another number in each request: lines that are nothing else."""
REMINDER = re.compile(rf"(?:\A|(?<=\n))[ \t]*<system-reminder>\s*{_COUNTDOWN}\s*</system-reminder>[ \t]*(?:\n+|\Z)")
"""The same as it may be in a message of the user."""

# fmt: off
USUAL = (
    "type", "function", "name", "description", "parameters",
    "$schema", "$id", "$ref", "title", "properties", "required", "additionalProperties", "items", "enum", "const",
    "default", "format", "pattern", "minimum", "maximum", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "$defs",
)
# fmt: on
_RANK = {key: rank for rank, key in enumerate(USUAL)}

NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Objects whose keys are names that a client chose, not words of JSON Schema."""

NOT_FOR_THE_MODEL = frozenset({"cache_control", "strict"})
"""Fields of a tool that instruct an API."""


def without_billing(text: str) -> str:
    """A system prompt without the billing header that it may begin with."""
    return BILLING.sub("", text)


def system_text(text: str) -> str:
    """What a system message says, without the lines that count requests and tokens."""
    return _without(COUNTDOWN, _without(REMINDER, without_billing(text)))


def user_text(text: str) -> str:
    """A text or block of the user's without a countdown that the client added: one that is all there is, or a reminder
    of nothing else. One that is quoted stays."""
    return "" if COUNTDOWN.fullmatch(text.strip()) else _without(REMINDER, text)


def _without(pattern: re.Pattern[str], text: str) -> str:
    """If something was cut out, what is left does not end in the line breaks that led to it."""
    left = pattern.sub("", text) if "<total_tokens>" in text else text
    return text if left == text else left.rstrip("\n")


def tool(given: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as OpenAI writes one, keys in one order, without what is not for the model and without nulls."""
    kept = {key: value for key, value in given.items() if key not in NOT_FOR_THE_MODEL and value is not None}
    function = kept.get("function")
    if isinstance(function, Mapping):
        kept["function"] = {k: v for k, v in function.items() if k not in NOT_FOR_THE_MODEL and v is not None}
    return canonical(kept)


def canonical(value: Any) -> Any:
    """The same value with the keys of every object in one order: usual ones as people write them, then the others by
    name. The names of properties go as `required` lists them, then by name."""
    if isinstance(value, Mapping):
        made = {}
        for key in sorted(value, key=lambda k: (_RANK.get(k, len(_RANK)), k)):
            inside = value[key]
            if key in NAMED and isinstance(inside, Mapping):
                required = value.get("required") if key == "properties" else None
                made[key] = {name: canonical(inside[name]) for name in _names(inside, required)}
            else:
                made[key] = canonical(inside)
        return made
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [canonical(item) for item in value]
    return value


def _names(named: Mapping[str, Any], required: Any) -> list[str]:
    first = [name for name in required if isinstance(name, str)] if isinstance(required, Sequence) else []
    rank = {name: i for i, name in reversed([*enumerate(first)])}
    return sorted(named, key=lambda name: (rank.get(name, len(rank)), name))
