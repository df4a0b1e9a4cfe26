"""What llguidance's messages mean, in one line for a client. Pure."""

from __future__ import annotations

import re

_PLACES = re.compile(r"^((at )?\d+\(\d+\): )*(failed to compile JSON schema: )?")
_MEANINGS = {
    "NoExtensionBias": "nothing can satisfy it",
    "NoExtension": "nothing can satisfy it",
    "Enable 'coerce_one_of' option to approximate": 'Give the schema "x-guidance": {"coerce_one_of": true} to replace',
}
WORDS = {
    "uniqueItems": "uniqueItems can be enforced only for items of at most 12 listed values, or with maxItems of 1",
    "not": "`not` can be enforced only for types, required names, and values beside an enum",
    "if": "if/then/else can be enforced only where `if` tests for required names, or for values of properties that "
    "list theirs in an enum",
    "contains": "`contains` cannot be enforced with maxContains",
    "propertyNames": "propertyNames can be enforced only as an enum, as lengths, or as the pattern of an object "
    "without other properties",
    "unevaluatedProperties": "unevaluatedProperties cannot be enforced beside anyOf, oneOf, if or dependentSchemas",
    "unevaluatedItems": "unevaluatedItems cannot be enforced beside schemas of the same array: use items",
}
"""Why a keyword of a schema is refused."""


def explained(message: str) -> str:
    """Returns what a message says, without places in a grammar that no client wrote."""
    lines = [line.strip() for line in message.replace("<non-verbose/>", "").splitlines() if line.strip()]
    first = _PLACES.sub("", lines[0]) if lines else "it cannot be compiled"
    reason = next((line for line in lines[1:] if line.startswith("error:")), "")
    for said, meant in _MEANINGS.items():
        first = first.replace(said, meant)
    return f"{_keywords(first).removesuffix('regex parse error:').rstrip()} {reason}".strip()[:300]


def _keywords(error: str) -> str:
    found = re.fullmatch(r"Unimplemented keys: \[(.*)\]", error)
    words = [WORDS[word] for word in WORDS if found and f'"{word}"' in found[1]]
    return "; ".join(words) if words else error
