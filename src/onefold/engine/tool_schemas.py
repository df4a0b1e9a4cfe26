"""The schemas of tools, as mlx-lm's parsers and our grammars need them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

DEFINITIONS = ("$defs", "definitions")
OTHERS = ("array", "string", "number", "integer", "boolean", "null")


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the schema of a tool's arguments: an object, of no other properties than it names, if it names any."""
    given = function.get("parameters")
    schema = dict(given) if isinstance(given, Mapping) else {}
    if schema.setdefault("type", "object") in (*OTHERS, [*OTHERS]):  # arguments are an object, whatever it says
        schema = {"type": "object"}
    if "properties" in schema and "additionalProperties" not in schema and "patternProperties" not in schema:
        schema["additionalProperties"] = False
    return schema


def definition(reference: Any, root: Mapping[str, Any]) -> Any:
    """Returns what a reference such as "#/$defs/point" names in a schema; None if it is of another form."""
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/]+)", reference) if isinstance(reference, str) else None
    found = root.get(match[1]) if match else None
    return found.get(match[2]) if match and isinstance(found, Mapping) else None


def for_parsers(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the tools with the references of their arguments replaced: parsers look for an argument's type, to know
    whether what a model wrote is text or a number, and follow no reference."""
    return [{**tool, "function": _followed(tool["function"])} if "function" in tool else dict(tool) for tool in tools]


def _typed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with the type of its listed values, if it says none."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    kinds = {type(value) for value in values} if isinstance(values, list) else set()
    named = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    if "type" in schema or len(kinds) != 1 or not kinds <= named.keys():
        return schema
    return {**schema, "type": named[kinds.pop()]}


def _followed(function: Mapping[str, Any]) -> dict[str, Any]:
    schema = function.get("parameters")
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping):
        return dict(function)
    made = {}
    for name, inside in schema["properties"].items():
        found = definition(inside.get("$ref"), schema) if isinstance(inside, Mapping) else None
        made[name] = _typed(found if isinstance(found, Mapping) else inside if isinstance(inside, Mapping) else {})
    return {**function, "parameters": {**schema, "properties": made}}
