"""Makes of a grammar of some text the grammar of the same text inside a JSON string.

A custom tool takes text in the argument `input`. Where a model writes arguments as JSON, what its grammar calls a line
break is the two characters of an escape there. Literals are escaped one by one, and so is each character of a regular
expression. Knows nothing of tools.
"""

from __future__ import annotations

import functools
import json
import re

from onefold.errors import PromptError

ESCAPES = {'"': r"\"", "\\": r"\\", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
"""Characters that a JSON string has in another form. Other control characters are left out."""
SAFE = r'[^"\\\x00-\x1f]'
"""Characters that a JSON string has as they are."""
COMMON = {"LF": '"\\n"', "CR": '"\\r"', "NEWLINE": r"/(\r?\n)+/", "WS": r"/[ \t\f\r\n]+/", "WS_INLINE": r"/[ \t]+/"}
"""What Lark's library has of these names."""

_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    | "(?P<low>[^"\\\n])"\s*\.\.\s*"(?P<high>[^"\\\n])"
    | (?P<string>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
    | (?P<regex>/(?:\\.|\[(?:\\.|[^\]\\])*\]|[^/\\\n])+/)(?P<flags>[imslux]*)
    | (?P<nested>%(?:json|lark|regex|llguidance)\b)
    | %import\s+common\.(?P<name>\w+)
    | %import\s+common\s*\((?P<names>[^)]*)\)""",
    re.VERBOSE,
)
_REGEX = re.compile(
    r"\\(?:x(?=[0-9a-fA-F{])|u(?=[0-9a-fA-F{]))(?P<number>[0-9a-fA-F]{4}|[0-9a-fA-F]{2}|\{[0-9a-fA-F]+\})"
    r"|\\(?P<escape>.)|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<group>\(\?[^)]*?[:>])|(?P<other>.)", re.DOTALL
)


def escaped_grammar(grammar: str) -> str:
    """Returns the Lark grammar of the escaped text. Raises PromptError for what cannot be escaped."""
    return _TOKEN.sub(_token, grammar)


def _token(found: re.Match[str]) -> str:
    if found["comment"]:
        return ""
    if found["nested"]:
        raise PromptError(f"a custom tool's grammar cannot contain {found['nested']}: write it as plain Lark")
    if found["low"]:
        low, high = re.escape(found["low"]), re.escape(found["high"])
        return f"/{_set(f'[{low}-{high}]')}/"
    if found["string"]:
        text = _unquoted(found["string"])
        if found["fold"] and any(character in text for character in ESCAPES):
            raise PromptError('a string of a custom tool\'s grammar cannot have the flag "i" and an escape: split it')
        return _quoted(text) + found["fold"]
    if found["regex"]:
        flags = found["flags"]
        return f"/{escaped_regex(found['regex'][1:-1], dot_all='s' in flags)}/{flags.replace('s', '')}"
    names = [found["name"]] if found["name"] else [name.strip() for name in found["names"].split(",")]
    return "\n".join(
        f"{name}: {escaped_grammar(COMMON[name])}" if name in COMMON else f"%import common.{name}" for name in names
    )


def _unquoted(text: str) -> str:
    try:
        read: str = json.loads(re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", text), strict=False)
    except ValueError as error:
        raise PromptError(f"a string of a custom tool's grammar cannot be read: {text[:40]}") from error
    return read


def _quoted(text: str) -> str:
    """A literal of Lark that stands for the text as a JSON string has it."""
    return json.dumps("".join(_escaped(c) for c in text), ensure_ascii=False)


def _escaped(character: str) -> str:
    """One character as a JSON string has it."""
    return ESCAPES.get(character, character if character >= " " else f"\\u{ord(character):04x}")


def escaped_regex(regex: str, *, dot_all: bool = False) -> str:
    """Returns the regular expression of the escaped text. `dot_all`: "." is every character. Raises PromptError."""
    return _REGEX.sub(functools.partial(_regex_part, dot_all), regex)


def _regex_part(dot_all: bool, found: re.Match[str]) -> str:
    if found["number"]:
        return _character(chr(int(found["number"].strip("{}"), 16)))
    if found["escape"]:
        escape = found["escape"]
        if escape in "dw":
            return found[0]
        if escape in "sSDW":
            return _set(f"\\{escape}")
        if escape.isalnum() and escape not in "nrt":
            raise PromptError(rf"a custom tool's grammar cannot contain \{escape}: write it in another way")
        return _character({"n": "\n", "r": "\r", "t": "\t"}.get(escape, escape))
    if found["set"]:
        return _set(found["set"])
    if found["group"]:
        return found[0]
    if found["other"] == ".":
        return _set(r"[\s\S]" if dot_all else r"[^\n]")
    if found["other"] in "^$":
        return ""
    return found["other"] if found["other"] in "()|?*+{}," or found["other"].isalnum() else _character(found["other"])


def _character(character: str) -> str:
    """One character as the escaped text has it, in a regular expression between slashes. What may follow it, such as a
    star, is about all of it."""
    made = "".join(rf"\{c}" if c in r'\/.^$*+?()[]{}|"' else c for c in _escaped(character))
    return f"(?:{made})" if character in ESCAPES or character < " " else made


def _set(text: str) -> str:
    """A set of characters: those that are safe, and the escapes of the others that it has."""
    if "[:" in text or "&&" in text or "--" in text or re.search(r"\\[pPxuU]", text):
        raise PromptError(f"a set of a custom tool's grammar cannot be read: {text[:40]}; list its characters")
    try:
        others = [escape for character, escape in ESCAPES.items() if re.fullmatch(text, character)]
    except re.error as error:
        raise PromptError(f"a set of a custom tool's grammar cannot be read: {text[:40]}") from error
    inside = text if text.startswith("[") else f"[{text}]"
    made = [f"[{inside}&&{SAFE}]"]
    made += ["".join(rf"\{c}" if c in r'\"' else c for c in escape) for escape in others]
    return f"(?:{'|'.join(made)})"
