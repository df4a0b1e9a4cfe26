"""The format that a chat or a completion asks of its answer: OpenAI's field, and those of vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

from onefold.engine.constraint import Shape
from onefold.errors import BadRequest
from onefold.server import constraints
from onefold.server.openai.schemas import Common, FormatFields, ResponseFormat, StructuredOutputs


def shape(asked: Common) -> Shape | None:
    """Returns the shape of the answer; None if any text will do. Raises BadRequest if two are asked for."""
    given = asked.response_format
    own = [] if given is None or given.type == "text" else [_format(given)]
    return constraints.only_one([*own, *others(asked)])


def others(asked: FormatFields) -> Iterator[Shape]:
    """Yields the shapes that the fields of other servers ask for. Raises BadRequest for one that cannot be."""
    if asked.structured_outputs is not None:
        yield _structured(asked.structured_outputs)
    if asked.guided_json is not None:
        yield constraints.json_schema(asked.guided_json, "guided_json")
    if asked.guided_regex is not None:
        yield constraints.regex(asked.guided_regex, "guided_regex")
    if asked.guided_choice is not None:
        yield constraints.choice(asked.guided_choice, "guided_choice")
    if asked.guided_grammar is not None:
        yield constraints.grammar(asked.guided_grammar, "guided_grammar")
    if asked.grammar:
        yield constraints.grammar(asked.grammar, "grammar")
    if asked.json_schema is not None:
        yield constraints.json_schema(asked.json_schema, "json_schema")


def _format(given: ResponseFormat) -> Shape:
    """A schema may also be beside the type, as llama.cpp has it."""
    if given.type == "json_schema" and given.json_schema is not None and given.json_schema.schema_ is not None:
        return constraints.json_schema(given.json_schema.schema_, "response_format.json_schema.schema")
    if given.schema_ is not None:
        return constraints.json_schema(given.schema_, "response_format.schema")
    if given.type == "json_schema" and given.json_schema is None:
        raise BadRequest("This field is required.", where="response_format.json_schema")
    return constraints.json_schema(constraints.ANY_OBJECT, "response_format")


def _structured(given: StructuredOutputs) -> Shape:
    """Raises BadRequest unless exactly one of the fields is set."""
    where, found = "structured_outputs", list[Shape]()
    if given.json_ is not None:
        found.append(constraints.json_schema(given.json_, f"{where}.json"))
    if given.regex is not None:
        found.append(constraints.regex(given.regex, f"{where}.regex"))
    if given.choice is not None:
        found.append(constraints.choice(given.choice, f"{where}.choice"))
    if given.grammar is not None:
        found.append(constraints.grammar(given.grammar, f"{where}.grammar"))
    if given.json_object:
        found.append(constraints.json_schema(constraints.ANY_OBJECT, f"{where}.json_object"))
    shape = constraints.only_one(found)
    if shape is None:
        raise BadRequest("Give one of json, regex, choice, grammar and json_object.", where=where)
    return shape
