"""What is not meaning is made the same; everything else is left alone."""

from __future__ import annotations

import json
import random
import time
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from onefold.server import normalise

HEADER = "x-anthropic-billing-header: cc_version=2.1.15.{}; cc_entrypoint=cli; cch={};"

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(item, rng) for item in value] if isinstance(value, list) else value


def test_a_billing_header_goes_wherever_the_prompt_begins_with_it():
    for a, b in (("a1", "00001"), ("b2", "fffff")):
        header = HEADER.format(a, b)
        assert normalise.without_billing(header) == ""
        assert normalise.without_billing(f"{header}\nYou are") == "You are"
        assert normalise.without_billing(f"{header}\n\nYou are") == "You are"
        assert normalise.without_billing(f"{header}\n{header}\nYou are") == "You are"


COUNTDOWN = "<total_tokens>{} tokens left</total_tokens>"


def test_a_countdown_goes_from_system_text_wherever_it_is_a_line():
    for left in ("15000000", "14,812,333", "7"):
        line = COUNTDOWN.format(left)
        assert normalise.system_text(line) == normalise.system_text(f"{line}\n") == ""
        assert normalise.system_text(f"Be brief.\n\n{line}") == "Be brief."
        assert normalise.system_text(f"{line}\nBe brief.") == "Be brief."
        assert normalise.system_text(f"a\n{line}\n\nb\n{line}\n") == "a\nb"
        assert normalise.system_text(f"{HEADER.format('a', 'b')}\n{line}\nBe brief.") == "Be brief."
        assert normalise.system_text(f"a\n<system-reminder>\n{line}\n</system-reminder>\nb") == "a\nb"


def test_a_countdown_of_the_clients_own_goes_from_user_text_and_one_that_is_quoted_stays():
    line = COUNTDOWN.format(200)
    reminder = f"<system-reminder>\n{line}\n</system-reminder>"
    assert normalise.user_text(line) == normalise.user_text(f"\n{line}\n") == normalise.user_text(reminder) == ""
    assert normalise.user_text(f"hi\n{reminder}") == "hi"
    for text in (f"What is {line}?", f"It says\n{line}", f"```\n{line}\n```", "<total_tokens>x</total_tokens>", "a\n"):
        assert normalise.user_text(text) == text


def test_long_text_takes_no_longer_than_it_is_long():
    for text in ("\n" * 1_000_000, "<system-reminder>" + " " * 1_000_000, "<total_tokens>1\n" * 100_000):
        began = time.thread_time()
        normalise.system_text(text), normalise.user_text(text)
        assert time.thread_time() - began < 2


def test_other_text_is_left_as_it_is():
    for text in ("", "\n You are\n", f"Of {HEADER}\nsay nothing", f"a\n{HEADER}\nb", "x-anthropic-other: 1\nb"):
        assert normalise.without_billing(text) == text


def test_tools_have_one_order_whatever_order_they_came_in():
    given = {
        "type": "function",
        "function": {
            "name": "write",
            "description": "Writes a file",
            "parameters": {
                "$schema": "x",
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "where"},
                    "content": {"type": "string"},
                    "mode": {"enum": ["b", "a"], "type": "string", "zeta": 1, "alpha": 2},
                },
                "required": ["path", "content"],
                "additionalProperties": False,
            },
        },
    }
    written = json.dumps(normalise.tool(given))
    rng = random.Random(0)
    for _ in range(20):
        assert json.dumps(normalise.tool(shuffled(given, rng))) == written
    made = normalise.tool(given)
    assert made == given
    assert list(made["function"]) == ["name", "description", "parameters"]
    schema = made["function"]["parameters"]
    assert list(schema) == ["type", "$schema", "properties", "required", "additionalProperties"]
    assert list(schema["properties"]) == ["path", "content", "mode"]
    assert list(schema["properties"]["mode"]) == ["type", "enum", "alpha", "zeta"]
    assert schema["properties"]["mode"]["enum"] == ["b", "a"]


def test_names_that_somebody_chose_are_not_words_of_json_schema():
    named = {"properties": {"type": {"type": "string"}, "a": {"type": "string"}, "properties": {"type": "object"}}}
    assert list(normalise.canonical(named)["properties"]) == ["a", "properties", "type"]


def test_what_instructs_an_api_is_not_for_the_model():
    function = {"name": "f", "description": None, "parameters": {"strict": 1}, "strict": True}
    given = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    assert normalise.tool(given) == {"type": "function", "function": {"name": "f", "parameters": {"strict": 1}}}


@given(JSON, st.randoms())
def test_any_value_stays_equal_and_has_one_order(value, rng):
    made = normalise.canonical(value)
    assert made == value
    assert json.dumps(normalise.canonical(shuffled(value, rng))) == json.dumps(made)
