"""What an answer must keep to, as a request asks for it: plain data, which `engine/guidance/` makes into a grammar.

Knows nothing of MLX, of llguidance, or of any API's shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

CUSTOM_INPUT = "input"
"""The argument of a tool that takes text: the text."""


@dataclass(frozen=True)
class Shape:
    """What the text of an answer must be."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str
    """The schema as JSON; a regular expression; a JSON list of strings; a Lark or GBNF grammar."""
    where: str = ""
    """The field of the request that asks for it, for error messages."""


@dataclass(frozen=True, kw_only=True)
class ToolRule:
    """How the tools of a request may be called. Calls always name a tool that was offered, and can be parsed."""

    required: bool = False
    """The answer is a call, or several."""
    only: str | None = None
    """The one tool that must be called, once; implies `required`."""
    parallel: bool = True
    """The answer may have several calls."""
    strict: frozenset[str] = frozenset()
    """Tools whose schema must be enforced: if it cannot be, the request is refused. The schemas of others are enforced
    where that is possible."""
    grammars: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """For tools that take text in the argument `CUSTOM_INPUT`: the Lark grammar of that text."""
    regexes: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """The same, as a regular expression."""
    where: str = "tools"
    """The field of the request that has the tools, for error messages."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The answer is text of this shape, or calls of tools. With neither a shape nor a rule it is free."""

    shape: Shape | None = None
    tools: ToolRule | None = None
