"""Writes grammars in llguidance's dialect of Lark. Knows nothing of tools or of any API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance import regex_to_lark

from onefold.engine.guidance.vocabulary import Vocabulary

ANY_TEXT = r"/(.|\n)*/"
SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How JSON is written: as Python's `json` and most chat templates write it. So the next turn's prompt, which a template
renders, has the tokens that were generated; many tokens are forced; and no answer ends in a loop of line breaks."""
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}


Convert = Callable[[str], tuple[str, str]]
"""Returns a Lark or GBNF grammar as Lark, and why it cannot be."""


class Rules:
    """The rules of one grammar; `start` is the first."""

    def __init__(self, vocabulary: Vocabulary, convert: Convert) -> None:
        self._vocabulary = vocabulary
        self.convert = convert
        self._rules: dict[str, str] = {}
        self.slots: dict[str, str] = {}
        """Characters of literals that stand for a regular expression."""

    def add(self, name: str, body: str, *, lazy: bool = False) -> str:
        """Adds a rule, and returns the name to use it by. `lazy`: it ends as early as it can."""
        self._rules[f"{name}[lazy]" if lazy else name] = body or '""'
        return name

    def literal(self, text: str) -> str:
        """Text as it is. Special tokens in it are tokens: a model writes them as one."""
        for slot, pattern in self.slots.items():
            if slot in text:
                return f" /{pattern}/ ".join(self.literal(part) for part in text.split(slot))
        return _written(self._vocabulary.pieces(text))

    def until(self, name: str, end: str) -> str:
        """Any text up to the first `end`, and that."""
        pieces = self._vocabulary.pieces(end)
        if isinstance(pieces[0], int):  # no text contains a special token
            return f"{ANY_TEXT} {self.literal(end)}"
        self.add(name, f"{ANY_TEXT} {quoted(pieces[0])}", lazy=True)
        return f"{name} {_written(pieces[1:])}".rstrip()

    def nested(self, name: str, grammar: str) -> str:
        """A whole Lark grammar with names of its own."""
        return self.add(name, f"%lark {{\n{grammar}\n}}")

    def text(self, start: str) -> str:
        rules = "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())])
        # where text must have the name of a special token, llguidance would force that token, and then refuse it
        named = any(name in rules for name in self._vocabulary.special)
        return f"%llguidance {json.dumps({'no_forcing': True} if named else {})}\n{rules}"


def _written(pieces: Sequence[str | int]) -> str:
    return " ".join(f"<[{piece}]>" if isinstance(piece, int) else quoted(piece) for piece in pieces)


def expression(regex: str) -> str:
    """A regular expression. Digits and words are those of ASCII."""
    return f"/{regex_to_lark(regex, 'dw')}/"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_value(schema: Any, style: Mapping[str, Any], *, lenient: bool = False) -> str:
    """JSON that keeps to a schema. `lenient`: what llguidance cannot enforce is not enforced."""
    if schema is True:
        schema = {}
    if schema is False:
        schema = {"allOf": [False]}
    options = {**style, "lenient": True, "coerce_one_of": True} if lenient else dict(style)
    own = schema.get("x-guidance")
    return "%json " + json.dumps(
        {**schema, "x-guidance": {**options, **(own if isinstance(own, Mapping) else {})}}, ensure_ascii=False
    )
