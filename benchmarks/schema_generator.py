"""Schemas such as clients send, drawn at random: those of pydantic's models, of strict answers, and by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words(
    "name title city email status price quantity tags author address start_date end_date summary score items "
    "notes category language owner country phone url id version priority weight color size rating comment "
    "ingredients steps temperature unit currency total due_date assignee labels source target reason confidence "
    "events symptoms "
)
WORDS = _words(
    "low medium high urgent open closed red green blue draft review done cat dog bird north south USD EUR GBP "
)
PATTERNS = (
    r"^[A-Z]{2,5}-[0-9]{1,4}$",
    r"^\d{4}-\d{2}$",
    r"^[a-z][a-z0-9_]*$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(?:\+\d{1,3} )?\d{3,4}-\d{4}$",
    r"[a-z]+",
    r"^\w{3,12}$",
    r"^v?\d+\.\d+(\.\d+)?$",
)
FORMATS = ("date", "date-time", "time", "email", "uri", "uuid", "ipv4", "hostname", "phone", "uri-reference", "int32")
Schema = dict[str, Any]


def generated(seed: int, count: int) -> Iterator[Schema]:
    for i in range(count):
        yield _Generator(random.Random(f"{seed} {i}")).root()


class _Generator:
    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._definitions: dict[str, Schema] = {}
        self._old = draw.random() < 0.15
        """As draft 7 has it."""
        self._strict = draw.random() < 0.45
        """All properties are required, and no others allowed."""
        self._notes = draw.random() < 0.5
        """With titles and descriptions."""

    @property
    def _shelf(self) -> str:
        return "definitions" if self._old else "$defs"

    def root(self) -> Schema:
        kinds: list[tuple[float, Callable[[int], Schema]]] = [
            (0.72, self._object),
            (0.08, self._conditional),
            (0.06, self._tree),
            (0.05, self._list),
            (0.05, self._union),
            (0.04, self._scalar),
        ]
        made = self._pick(kinds)(0)
        if self._old:
            made = {"$schema": "http://json-schema.org/draft-07/schema#", **made}
        return {**made, **({self._shelf: self._definitions} if self._definitions else {})}

    def _pick(self, kinds: list[tuple[float, Callable[[int], Schema]]]) -> Callable[[int], Schema]:
        return self._draw.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]

    def _value(self, depth: int) -> Schema:
        flat: list[tuple[float, Callable[[int], Schema]]] = [
            (0.30, self._text),
            (0.16, self._number),
            (0.10, lambda _: {"type": "boolean"}),
            (0.12, self._enum),
            (0.02, lambda _: {"const": self._draw.choice(WORDS)}),
        ]
        deep: list[tuple[float, Callable[[int], Schema]]] = [
            (0.12, self._list),
            (0.08, self._object),
            (0.06, self._nullable),
            (0.07, self._reference),
            (0.03, self._union),
            (0.02, self._map),
            (0.02, self._pair),
            (0.02, self._rare),
        ]
        made = self._pick(flat if depth > 2 else flat + deep)(depth)
        if self._notes and "$ref" not in made:
            made = {"description": f"The {self._draw.choice(NOUNS)}.", **made}
        return made

    def _scalar(self, depth: int) -> Schema:
        return self._pick([(1, self._text), (1, self._number), (1, self._enum)])(depth)

    def _text(self, _: int) -> Schema:
        draw, made = self._draw, {"type": "string"}
        kind = draw.random()
        if kind < 0.4:
            return made
        if kind < 0.65:
            return (
                made | {"maxLength": draw.choice([8, 20, 40, 80])} | ({"minLength": 1} if draw.random() < 0.5 else {})
            )
        if kind < 0.82:
            return made | {"pattern": draw.choice(PATTERNS)}
        return made | {"format": draw.choice(FORMATS)}

    def _number(self, _: int) -> Schema:
        draw = self._draw
        if draw.random() < 0.65:
            low = draw.choice([0, 1, -10, 100])
            return {"type": "integer"} | draw.choice(
                [
                    {},
                    {"minimum": low},
                    {"minimum": low, "maximum": low + draw.randint(1, 900)},
                    {"exclusiveMinimum": low},
                ]
            )
        return {"type": "number"} | draw.choice(
            [{}, {"minimum": 0, "maximum": 1}, {"minimum": 0}, {"multipleOf": 0.01, "minimum": 0}, {"maximum": 99.5}]
        )

    def _enum(self, _: int) -> Schema:
        draw = self._draw
        if draw.random() < 0.15:
            return {"enum": draw.sample([1, 2, 3, 5, 8, 13, None, True], draw.randint(2, 5))}
        return {"type": "string", "enum": draw.sample(WORDS, draw.randint(2, 7))}

    def _nullable(self, depth: int) -> Schema:
        inner = self._pick([(2, self._text), (1, self._number), (1, self._reference)])(depth + 1)
        if self._draw.random() < 0.4 and isinstance(inner.get("type"), str) and "enum" not in inner:
            return {**inner, "type": [inner["type"], "null"]}
        return {"anyOf": [inner, {"type": "null"}], **({"default": None} if self._draw.random() < 0.5 else {})}

    def _list(self, depth: int) -> Schema:
        draw = self._draw
        made: Schema = {"type": "array", "items": self._value(depth + 1)}
        bounds = draw.random()
        if bounds < 0.3:
            made["maxItems"] = draw.randint(2, 6)
        elif bounds < 0.5:
            made["minItems"] = draw.randint(1, 3)
        elif bounds < 0.6:
            made |= {"minItems": 1, "maxItems": 4.0 if draw.random() < 0.2 else 4}
        listed = "enum" in made["items"] or made["items"].get("type") == "boolean"
        if draw.random() < (0.4 if listed and "minItems" not in made else 0.03):
            made["uniqueItems"] = True
        return made

    def _object(self, depth: int) -> Schema:
        draw = self._draw
        names = draw.sample(NOUNS, draw.randint(2, 7 if depth == 0 else 4))
        properties = {name: self._value(depth + 1) for name in names}
        needed = names if self._strict else [name for name in names if draw.random() < 0.6]
        made: Schema = {"type": "object", "properties": properties}
        made |= {"required": needed} if needed else {}
        if self._strict or draw.random() < 0.5:
            made["additionalProperties"] = False
        if self._notes and draw.random() < 0.4:
            made = {"title": draw.choice(NOUNS).title(), **made}
        if not self._strict and draw.random() < 0.04:
            word = "dependencies" if self._old else "dependentRequired"
            made[word] = {names[0]: [names[-1]]}
        return made

    def _map(self, depth: int) -> Schema:
        made: Schema = {"type": "object", "additionalProperties": self._scalar(depth + 1)}
        extra: Schema = self._draw.choice([{}, {"propertyNames": {"pattern": "^[a-z]{1,8}$"}}, {"maxProperties": 3}])
        return made | extra

    def _pair(self, depth: int) -> Schema:
        items = [self._scalar(depth + 1) for _ in range(self._draw.randint(2, 3))]
        first, rest = ("items", "additionalItems") if self._old else ("prefixItems", "items")
        return {"type": "array", first: items, rest: False, "minItems": len(items), "maxItems": len(items)}

    def _reference(self, depth: int) -> Schema:
        name = self._draw.choice(["Person", "Place", "Item", "Money", "Status"])
        if name not in self._definitions:
            self._definitions[name] = {}  # what it contains may refer to it
            inner = self._enum(depth) if name == "Status" else self._object(max(depth, 2) + 1)
            self._definitions[name] = {"title": name, **inner}
        made = {"$ref": f"#/{self._shelf}/{name}"}
        return {"allOf": [made]} if self._draw.random() < 0.15 else made

    def _union(self, depth: int) -> Schema:
        """Objects that a property tells apart."""
        word = self._draw.choice(["anyOf", "oneOf"])
        options = []
        for kind in self._draw.sample(WORDS, self._draw.randint(2, 4)):
            one = self._object(depth + 2)
            one["properties"] = {"kind": {"const": kind}, **one["properties"]}
            one["required"] = ["kind", *one.get("required", [])]
            if self._draw.random() < 0.5:
                self._definitions[kind.title()] = one
                one = {"$ref": f"#/{self._shelf}/{kind.title()}"}
            options.append(one)
        return {word: options}

    def _tree(self, _: int) -> Schema:
        node = self._object(2)
        more = {"children": {"type": "array", "items": {"$ref": f"#/{self._shelf}/Node"}, "maxItems": 3}}
        node["properties"] |= self._draw.choice(
            [more, {"next": {"anyOf": [{"$ref": f"#/{self._shelf}/Node"}, {"type": "null"}]}}]
        )
        self._definitions["Node"] = node
        made: Schema = {"type": "object", "properties": {"root": {"$ref": f"#/{self._shelf}/Node"}}}
        return made | {"required": ["root"], "additionalProperties": False}

    def _conditional(self, depth: int) -> Schema:
        made = self._object(depth + 1)
        words = self._draw.sample(WORDS, 3)
        made["properties"] = {"mode": {"enum": words}, **made["properties"]}
        made["required"] = ["mode", *made.get("required", [])]
        name = self._draw.choice([*made["properties"]][1:])
        test = {"properties": {"mode": {"const": words[0]}}, "required": ["mode"]}
        return (
            made | {"if": test, "then": {"required": [name]}} | self._draw.choice([{}, {"else": {"minProperties": 2}}])
        )

    def _rare(self, depth: int) -> Schema:
        text: Schema = {"type": "string"}
        return self._draw.choice(
            [
                {"type": "array", "items": text, "uniqueItems": True},
                {"type": "array", "items": self._number(depth), "contains": {"minimum": 5}},
                {**text, "not": {"const": ""}},
                {**text, "not": {"pattern": "^x"}},
                {**text, "pattern": r"^(?=.*\d)[a-z\d]{4,12}$"},
                {"enum": WORDS[:5], "not": {"enum": WORDS[:2]}},
                {
                    "type": "object",
                    "properties": {"a": text, "b": text},
                    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
                },
                {"type": "object", "properties": {"a": text}, "unevaluatedProperties": False},
                {
                    "type": "object",
                    "patternProperties": {"^x_[a-z]{1,5}$": {"type": "integer"}},
                    "additionalProperties": False,
                },
                {},
            ]
        )
