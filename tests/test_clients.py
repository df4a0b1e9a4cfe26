"""`clients/`: the model that says scripts, through the real engine, and what docs/clients.md says of versions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import onefold
from onefold.engine.constraint import Constraint, ToolRule
from onefold.engine.engine import Engine
from onefold.engine.request import Done, Request, Sampling, Text, ToolCall

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "clients"
sys.path.insert(0, str(CLIENTS))

from model import OTHERWISE, Script, write_scripted_model  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {"path": {"enum": ["/here.txt", "/somewhere/note.txt"]}, "lines": {"enum": [2, 4]}},
    "required": ["path", "lines"],
}
TOOL = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
CALL = ("write", {"path": "/somewhere/note.txt", "lines": 4})


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    scripts = [Script("note", "The note was written.", CALL), Script("again", "There you go again, friend.")]
    folder = write_scripted_model(tmp_path_factory.mktemp("scripted"), scripts)
    with Engine(*onefold.load(folder), budget="64MB", defaults=Sampling(temperature=0)) as made:
        yield made


def answer(engine: Engine, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> tuple[list[Any], Done]:
    prompt = engine.chat(messages, tools=tools)
    asked = Request(prompt=prompt, max_tokens=50, tools=tools, sampling=Sampling(temperature=0))
    *events, done = engine.ask(asked)
    assert isinstance(done, Done)
    return [event for event in events if isinstance(event, Text | ToolCall)], done


def test_a_script_is_said_turn_by_turn_and_all_of_it_is_found_again(engine: Engine) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Please follow the script note"}]
    (call,), first = answer(engine, messages, [TOOL])
    assert (call.name, json.loads(call.arguments)) == CALL
    function = {"name": call.name, "arguments": json.loads(call.arguments)}
    messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]})
    messages.append({"role": "tool", "content": "done"})
    said, second = answer(engine, messages, [TOOL])
    assert "".join(event.text for event in said) == "The note was written."
    assert second.hit.cached == first.hit.prompt_tokens + first.completion_tokens
    messages.append({"role": "assistant", "content": "The note was written."})
    messages.append({"role": "user", "content": "Now the script again"})
    said, third = answer(engine, messages, [TOOL])
    assert "".join(event.text for event in said) == "There you go again, friend." and len(said) > 1
    assert third.hit.cached == second.hit.prompt_tokens + second.completion_tokens


@pytest.mark.parametrize("rule, script", [(ToolRule(), "note"), (ToolRule(required=True), "again")])
def test_a_call_can_be_made_where_its_tag_is_an_added_token_that_is_not_special(
    engine: Engine, rule: ToolRule, script: str
) -> None:
    """As in the tokenizers of Qwen: a grammar that writes the tag as text allows no token for it, or breaks off."""
    prompt = engine.chat([{"role": "user", "content": f"Please follow the script {script}"}], tools=[TOOL])
    asked = Request(prompt=prompt, max_tokens=200, tools=[TOOL], constraint=Constraint(tools=rule))
    *events, done = engine.ask(asked)
    assert isinstance(done, Done), done
    (call,) = (event for event in events if isinstance(event, ToolCall))
    assert call.name == "write"
    if script == "note":
        assert json.loads(call.arguments) == CALL[1]


def test_without_tools_or_a_script_it_says_that_there_is_nothing_to_do(engine: Engine) -> None:
    for content in ("Please follow the script note", "Hello"):
        said, _ = answer(engine, [{"role": "user", "content": content}])
        assert "".join(event.text for event in said) == OTHERWISE


def test_scripts_that_cannot_be_said_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is followed by"):
        write_scripted_model(tmp_path, [Script("one", "All is well here."), Script("two", "All is well there.")])


def test_the_page_has_the_versions_that_are_installed() -> None:
    page = (ROOT / "docs" / "clients.md").read_text()
    shown = dict(re.findall(r"^\| ([\w. ()-]+) \| (\d[\w.]*) \|", page, re.MULTILINE))
    wanted = (CLIENTS / "requirements.txt").read_text()
    python = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==(\S+)$", wanted, re.MULTILINE))
    manifests = [json.loads((CLIENTS / name).read_text()) for name in ("package.json", "agents/package.json")]
    npm, agents = (manifest["dependencies"] for manifest in manifests)
    assert shown == {
        "openai (Python)": python["openai"],
        "anthropic": python["anthropic"],
        "litellm": python["litellm"],
        "langchain-openai": python["langchain-openai"],
        "instructor": python["instructor"],
        "pydantic-ai": python["pydantic-ai-slim"],
        "llm": python["llm"],
        "openai (npm)": npm["openai"],
        "ai (npm)": npm["ai"],
        "Claude Code": agents["@anthropic-ai/claude-code"],
        "Codex": agents["@openai/codex"],
        "opencode": agents["opencode-ai"],
        "Qwen Code": agents["@qwen-code/qwen-code"],
    }
    assert all(re.fullmatch(r"[\d.]+", version) for version in (npm | agents).values())
