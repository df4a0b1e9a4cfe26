"""The shapes that a request may ask of its answer's text, made and checked for the engine. Knows no API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from onefold.engine.constraint import Constraint, Shape, ToolRule
from onefold.errors import BadRequest
from onefold.server.body import parse_json

MOST_BYTES = 1 << 20
"""Of a schema, an expression or a grammar. The engine has limits of its own."""
ANY_OBJECT = {"type": "object"}
"""The schema of `json_object`, and of a format that gives no schema."""


def json_schema(schema: Any, where: str) -> Shape:
    """Returns the shape of a JSON Schema, which may also be given as JSON text. Raises BadRequest if it is neither an
    object nor a boolean, or too large."""
    if isinstance(schema, str):
        _limit(schema, where)
        try:
            schema = parse_json(schema)
        except BadRequest:
            raise BadRequest("This text is not valid JSON: give a JSON Schema.", where=where) from None
    if not isinstance(schema, (dict, bool)):
        raise BadRequest("A JSON Schema must be an object or a boolean.", where=where)
    return _shape("json_schema", json.dumps(schema, ensure_ascii=False, separators=(",", ":")), where)


def regex(expression: str, where: str) -> Shape:
    """Returns the shape of text that matches the whole expression. Raises BadRequest if it is empty or too large."""
    if not expression:
        raise BadRequest("An expression must not be empty.", where=where)
    return _shape("regex", expression, where)


def grammar(text: str, where: str) -> Shape:
    """Returns the shape of text that follows a Lark or GBNF grammar. Raises BadRequest if it is empty or too large."""
    return _shape("grammar", grammar_text(text, where), where)


def choice(texts: Sequence[str], where: str) -> Shape:
    """Returns the shape of text that is one of these. Raises BadRequest if there are none, or one is empty."""
    if not texts or not all(texts):
        raise BadRequest("Give at least one text to choose, and no empty one.", where=where)
    return _shape("choice", json.dumps(list(texts), ensure_ascii=False), where)


def only_one(shapes: Iterable[Shape]) -> Shape | None:
    """Returns the shape, or None without any. Raises BadRequest if there are two."""
    found = list(shapes)
    if len(found) > 1:
        raise BadRequest(f"The answer has a format already, by {found[0].where}: give one only.", where=found[1].where)
    return found[0] if found else None


def constraint(shape: Shape | None, tools: ToolRule | None = None) -> Constraint | None:
    """Returns what the answer must keep to; None if it is free."""
    return None if shape is None and tools is None else Constraint(shape=shape, tools=tools)


def grammar_text(text: str, where: str) -> str:
    """Returns the text of a grammar as it is. Raises BadRequest if it is empty or too large."""
    if not text.strip():
        raise BadRequest("A grammar must not be empty.", where=where)
    _limit(text, where)
    return text


def _shape(kind: Literal["json_schema", "regex", "choice", "grammar"], text: str, where: str) -> Shape:
    _limit(text, where)
    return Shape(kind, text, where)


def _limit(text: str, where: str) -> None:
    if len(text) > MOST_BYTES or len(text.encode()) > MOST_BYTES:
        raise BadRequest(f"This is larger than {MOST_BYTES} bytes; send a smaller one.", where=where)
