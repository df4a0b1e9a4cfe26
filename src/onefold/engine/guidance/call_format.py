"""How a model writes calls of tools, read off its chat template.

The template renders a conversation in which the assistant has called a tool with known names and values; what stands
around them is the format. Two families are recognised: the arguments are one JSON object, or each argument is written
by itself. A format is used only if mlx-lm's parser of this model reads a sample of it back; so no template and no
parser is known by name here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jinja2 import TemplateError

from onefold.engine.guidance.lark import COMPACT, SPACED
from onefold.faults import UNEXPECTED

NAME, OTHER = "probefn", "otherfn"
KEY, SECOND, TEXT = "probekey", "secondkey", "probetext"
SLOT = "\x00"
"""Stands in a format for what differs from call to call: an id, or a number of it."""


class Ids(NamedTuple):
    """Ids of two calls, what of them differs from call to call, and how that is written."""

    ids: tuple[str, str]
    changing: tuple[str, str]
    pattern: str


IDS = (
    Ids(("abcdefgh1", "abcdefgh2"), ("abcdefgh1", "abcdefgh2"), "[a-zA-Z0-9]{9}"),
    Ids((f"functions.{NAME}:7731", f"functions.{OTHER}:7732"), ("7731", "7732"), "[0-9]{1,3}"),
)
"""Some templates take nine letters and digits only, and some print the name as part of the id."""
VALUES: dict[str, Any] = {"string": TEXT, "integer": 731, "boolean": True, "array": [731], "object": {"x": 731}}


@dataclass(frozen=True)
class CallFormat:
    """The text of a call, between the markers that mlx-lm's parser has for this model."""

    start: str
    end: str
    head: str
    """From the first marker to the tool's name."""
    between: str | None
    """From the end of one call to the name of the next; None: an answer has one call."""
    close: str
    """From the end of the last call to the last marker."""
    slot: str
    """The regular expression of what stands in a `SLOT`."""
    calls: Callable[[str], list[tuple[str, Any]]]
    """Parses the text between the markers; raises what mlx-lm's parser raises."""

    def parses(self, name: str) -> bool:
        """Whether a call of a tool of this name can be read back."""
        if not name or any(mark in name for mark in (self.start, self.end) if mark):
            return False
        try:
            return self.calls(filled(self.sample(name, {}))) == [(name, {})]
        except UNEXPECTED:  # broad on purpose: parsers are not ours
            return False

    def sample(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns what the model writes between the markers for one call."""
        return f"{self.head}{self.body(name, arguments)}{self.close}"

    def body(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Returns the call from its name to its end."""
        raise NotImplementedError


@dataclass(frozen=True)
class JsonCalls(CallFormat):
    """Arguments are one JSON object."""

    middle: str
    tail: str
    style: Mapping[str, Any]

    def body(self, name: str, arguments: Mapping[str, Any]) -> str:
        separators = (self.style["item_separator"], self.style["key_separator"])
        written = json.dumps(arguments, ensure_ascii=False, separators=separators)
        return f"{name}{self.middle}{written}{self.tail}"


@dataclass(frozen=True)
class ListedCalls(CallFormat):
    """Each argument is written by itself. What stands around a value depends on its type."""

    empty: str
    """After the name, in a call without arguments."""
    middle: str
    """From the name to the first argument's."""
    links: Mapping[str, str]
    """From an argument's name to its value, by the value's type."""
    glue: Mapping[str, str]
    """From a value to the next argument's name."""
    tails: Mapping[str, str]
    """From the last value to the end."""

    def body(self, name: str, arguments: Mapping[str, Any]) -> str:
        if not arguments:
            return f"{name}{self.empty}"
        made, before = name, self.middle
        kind = ""
        for key, value in arguments.items():
            kind = type_of(value)
            made += f"{before}{key}{self.links[kind]}{value if kind == 'string' else json.dumps(value)}"
            before = self.glue[kind]
        return made + self.tails[kind]


PLAIN = '{"name": "'
"""How calls begin where a model has no format of its own: the whole answer is JSON."""


def plain_calls() -> JsonCalls:
    """The format for models that have none: the answer is one call, a JSON object."""
    return JsonCalls("", "", PLAIN, None, "", "", parse_plain, '", "arguments": ', "}", SPACED)


def filled(text: str) -> str:
    """A sample with something in its slots. Nine digits are an id, and the number of one."""
    return text.replace(SLOT, "123456789")


def parse_plain(text: str) -> list[tuple[str, Any]]:
    """Raises ValueError, KeyError or TypeError for text that is no call."""
    call = json.loads(text)
    return [(call["name"], call["arguments"])]


def type_of(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "integer", list: "array", dict: "object"}
    return kinds.get(type(value), "string")


def learn(tokenizer: Any) -> CallFormat | None:
    """Returns the format of this model's calls; None if it has no parser, or the template shows no format that the
    parser reads."""
    if not tokenizer.has_tool_calling or not tokenizer.has_chat_template:
        return None
    for ids in IDS:
        try:
            found = _Probe(tokenizer, ids).learn()
        except (TemplateError, *UNEXPECTED):  # broad on purpose: templates and parsers are not ours
            found = None
        if found is not None:
            return found
    return None


class _Probe:
    def __init__(self, tokenizer: Any, ids: Ids) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._start: str = tokenizer.tool_call_start
        self._end: str = tokenizer.tool_call_end

    def learn(self) -> CallFormat | None:
        """Raises what templates and parsers raise."""
        for read in (self._json, self._listed):
            found = read()
            if found is not None and _agrees(found):
                return found
        return None

    def _json(self) -> JsonCalls | None:
        inside = self._inside({KEY: TEXT})
        head, name, rest = inside.partition(NAME)
        for style in (SPACED, COMPACT):
            written = json.dumps({KEY: TEXT}, separators=(style["item_separator"], style["key_separator"]))  # type: ignore[arg-type]
            middle, found, tail = rest.partition(written)
            if name and found:
                between, close = self._between(middle, written, tail)
                tail = tail.removesuffix(close)
                common = (self._start, self._end, head, between, close, self._ids.pattern, self._parse)
                return JsonCalls(*common, middle, tail, style)
        return None

    def _listed(self) -> ListedCalls | None:
        empty = self._inside({}).partition(NAME)[2]
        links, glue, tails, middles = {}, {}, {}, set()
        head = ""
        for kind, value in VALUES.items():
            written = value if kind == "string" else json.dumps(value)
            head, _, rest = self._inside({KEY: value}).partition(NAME)
            middle, key, rest = rest.partition(KEY)
            links[kind], found, tails[kind] = rest.partition(written)
            after = self._inside({KEY: value, SECOND: TEXT}).partition(written)[2]
            glue[kind], second, _ = after.partition(SECOND)
            middles.add(middle)
            if not (key and found and second):
                return None
        middle = middles.pop()
        between, close = self._between(f"{middle}{KEY}{links['string']}", TEXT, tails["string"])
        if middles or not all(text.endswith(close) for text in (empty, *tails.values())):
            return None
        tails, empty = {kind: text.removesuffix(close) for kind, text in tails.items()}, empty.removesuffix(close)
        common = (self._start, self._end, head, between, close, self._ids.pattern, self._parse)
        return ListedCalls(*common, empty, middle, links, glue, tails)

    def _inside(self, arguments: Mapping[str, Any]) -> str:
        """The text between the markers of the only call."""
        text = self._rendered([(NAME, arguments)]).partition(self._start)[2]
        return text.partition(self._end)[0] if self._end else self._without_end(text)

    def _between(self, middle: str, value: str, tail: str) -> tuple[str | None, str]:
        """Returns what stands between two calls, and what stands behind the last one and not behind others. `middle`,
        `value`, `tail`: of a call with one argument, from its name on."""
        text = self._rendered([(NAME, {KEY: TEXT}), (OTHER, {KEY: TEXT})]).partition(self._start)[2]
        after = text.partition(f"{middle}{value}")[2]
        gap, found, second = after.partition(OTHER)
        if not found or not second.startswith(f"{middle}{value}{tail}"):
            return None, ""
        same = next(n for n in range(min(len(gap), len(tail)), -1, -1) if gap[:n] == tail[:n])
        return gap[same:], tail[same:]

    def _rendered(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """The assistant's turn. The tools are not rendered: their description has the markers, too."""
        said = [
            {"id": self._ids.ids[i], "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": said},
            *({"role": "tool", "tool_call_id": one["id"], "name": NAME, "content": "y"} for one in said),
        ]
        text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        for changing in self._ids.changing:
            text = text.replace(changing, SLOT)
        return text

    def _without_end(self, text: str) -> str:
        ends = [self._tokenizer.decode([token]) for token in self._tokenizer.eos_token_ids]
        at = min((text.find(end) for end in ends if end and end in text), default=len(text))
        return text[:at]

    def _parse(self, text: str) -> list[tuple[str, Any]]:
        tools = [{"type": "function", "function": {"name": name, "parameters": _SCHEMA}} for name in (NAME, OTHER)]
        parsed = self._tokenizer.tool_parser(text, tools)
        return [(call["name"], call["arguments"]) for call in (parsed if isinstance(parsed, list) else [parsed])]


_SCHEMA = {"type": "object", "properties": {f"a{i}": {"type": kind} for i, kind in enumerate(VALUES)}}


def _agrees(found: CallFormat) -> bool:
    """Whether the parser reads samples of the format back, with no argument and with one of each type."""
    everything = {f"a{i}": value for i, value in enumerate(VALUES.values())}
    for arguments in ({}, {"a0": TEXT}, everything):
        if found.calls(filled(found.sample(NAME, arguments))) != [(NAME, arguments)]:
            return False
    return True

