"""System messages in the middle: left where they are, or made text of a neighbour, and never moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from jinja2 import Environment, TemplateError

from onefold.engine.system_messages import SystemMessages, fold

IN_PLACE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise('System message must be at the beginning.') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
HOISTS = """{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}"""
DROPS = """{% for m in messages %}{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}
{%- endfor %}"""


def refuse(why: str) -> None:
    raise TemplateError(why)


def system_messages(template: str) -> SystemMessages:
    made = Environment().from_string(template)

    def render(messages: Sequence[Any]) -> str:
        return made.render({"messages": messages, "raise": refuse})

    return SystemMessages(render, (TemplateError,))


def said(*given: str) -> list[dict[str, str]]:
    """"u hi" is a message of the user."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[text[0]], "content": text[2:]} for text in given]


MIDDLE = said("s rules", "u one", "s note", "a two", "u three")


def test_a_template_that_takes_them_gets_them():
    assert system_messages(IN_PLACE).place(MIDDLE) == MIDDLE


@pytest.mark.parametrize("template", [STRICT, HOISTS, DROPS])
def test_a_template_that_refuses_moves_or_drops_them_gets_text(template):
    made = system_messages(template).place(MIDDLE)
    assert made == said("s rules", "u one\n\nnote", "a two", "u three")


@pytest.mark.parametrize("template", [IN_PLACE, STRICT, HOISTS, DROPS])
def test_one_at_the_start_is_left_alone(template):
    for messages in (said("s rules", "u one"), said("u one", "a two", "u three")):
        assert system_messages(template).place(messages) is messages


@pytest.mark.parametrize(
    "given, made",
    [
        (said("s a", "s b", "u c"), said("s a\n\nb", "u c")),
        (said("u a", "s b", "s c"), said("u a\n\nb\n\nc")),
        (said("u a", "a b", "s c", "u d"), said("u a", "a b", "u c\n\nd")),
        (said("u a", "a b", "s c"), said("u a", "a b", "u c")),
        (said("u a", "a b", "s c", "a d"), said("u a", "a b", "u c", "a d")),
        (said("u a", "a b", "t c", "s d", "a e"), said("u a", "a b", "t c\n\nd", "a e")),
        (said("u a", "a b", "s c", "t d", "u e"), said("u a", "a b", "t d\n\nc", "u e")),
        (said("s a", "u b", "s ", "a c"), said("s a", "u b", "a c")),
    ],
)
def test_text_of_the_neighbour(given, made):
    before = [dict(message) for message in given]
    assert fold(given) == made and given == before


def test_what_came_before_stays_as_it_was_when_a_conversation_grows():
    whole = said("s r", "u a", "s n", "a b", "t c", "s n", "a d", "s n", "u e", "s n", "a f")
    for cut in range(1, len(whole)):
        shorter, longer = (
            "".join(f"[{m['role']}]{m['content']}" for m in fold(part)) for part in (whole[:cut], whole)
        )
        if whole[cut - 1]["role"] != "system" or whole[cut]["role"] != "user":
            assert longer.startswith(shorter)
