"""Making prompts: what the template refuses, where the next turn branches off, and how a divergence is described."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx_lm
import numpy as np
import pytest
from asking import ask
from local_model import write_model
from talking_model import write_talking_model
from tiny import tiny

from onefold.engine.engine import Engine
from onefold.engine.prompt import PromptMaker, describe_divergence
from onefold.errors import PromptError

THINKS = (
    "{%- for m in messages %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last and m.reasoning_content %}"
    "{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{- m.content + '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(tmp_path_factory.mktemp("thinks"), THINKS)


def load(folder: Path, template: str | None) -> Any:
    write_talking_model(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"chat_template": template}
    path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return mlx_lm.load(str(folder))[1]


def maker(tokenizer: Any, *, checkpoints: bool = True) -> PromptMaker:
    return PromptMaker(tokenizer, vocab=128, checkpoints=checkpoints)


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}


def test_checkpoints_are_where_the_next_turn_and_another_conversation_branch_off(tokenizer):
    prompts = maker(tokenizer)
    prompt = prompts.chat([SYSTEM, USER])
    assert prompt.state == "reasoning"
    later = prompts.chat([SYSTEM, USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}])
    other = prompts.chat([SYSTEM, {"role": "user", "content": "Another question"}])

    def common(a: Any, b: Any) -> int:
        return next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)

    assert set(prompt.checkpoints) == {common(prompt, later), common(prompt, other)}
    assert len(prompt) - 1 in prompt.checkpoints  # the reasoning that begins here is gone in the next turn
    assert maker(tokenizer, checkpoints=False).chat([SYSTEM, USER]).checkpoints == ()


def test_a_hybrid_model_resumes_there_although_the_reasoning_is_gone(tokenizer):
    model = tiny("qwen3_next")
    with Engine(model, tokenizer, budget="256MB") as engine:
        messages = [{"role": "system", "content": "Be brief. " * 20}, {"role": "user", "content": "Hello? " * 20}]
        prompt = engine.chat(messages)
        answer = ask(engine, prompt, 90)
        messages += [{"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye."}]
        assert answer.hit.cached == 0
        hit = ask(engine, engine.chat(messages), 2).hit
        assert hit.cached == len(prompt) - 1
        another = [messages[0], {"role": "user", "content": "Something else"}]
        assert ask(engine, engine.chat(another), 2).hit.cached == min(prompt.checkpoints)


def test_an_unfinished_answer_is_continued(tokenizer):
    prompts = maker(tokenizer)
    text = tokenizer.decode(prompts.chat([USER, {"role": "assistant", "content": "Once upon"}]).tokens.tolist())
    assert text.endswith("<|im_start|>assistant\nOnce upon")


def test_what_is_given_is_not_changed(tokenizer):
    messages = [dict(SYSTEM), dict(USER)]
    maker(tokenizer).chat(messages)
    assert messages == [SYSTEM, USER]


def test_refusals_say_why(tokenizer, tmp_path):
    with pytest.raises(PromptError, match="at least one"):
        maker(tokenizer).chat([])
    with pytest.raises(PromptError, match="refuses this conversation"):
        maker(tokenizer).chat([{"role": "user", "content": 5}])
    strict = load(tmp_path / "strict", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(PromptError, match="roles must alternate"):
        maker(strict).chat([USER])
    with pytest.raises(PromptError, match="/v1/completions"):
        maker(load(tmp_path / "none", None)).chat([USER])
    with pytest.raises(PromptError, match="tokenised"):
        maker(tokenizer).chat([{"role": "user", "content": "\ud800"}])


def test_a_template_that_leaves_tools_out_is_warned_about_once(tmp_path, caplog, tokenizer):
    tool = {"type": "function", "function": {"name": "look"}}
    prompts = maker(tokenizer)
    for _ in range(2):
        prompts.chat([USER], tools=[tool])
    assert caplog.text.count("ignores tools") == 1
    write_talking_model(tmp_path / "talks")
    maker(mlx_lm.load(str(tmp_path / "talks"))[1]).chat([USER], tools=[tool])
    assert caplog.text.count("ignores tools") == 1


def test_template_options_reach_the_template(tmp_path):
    template = "{{ messages[0].content }}{% if shout %}!{% endif %}"
    prompts = maker(load(tmp_path / "m", template))
    assert len(prompts.chat([USER], options={"shout": True})) == len(prompts.chat([USER])) + 1


def test_divergence_is_described_by_part_and_by_text(tokenizer):
    prompt = maker(tokenizer).chat([SYSTEM, USER])
    at = len(tokenizer.encode("<|im_start|>system\nBe ", add_special_tokens=False))
    known = tokenizer.encode("quick, and polite", add_special_tokens=False)
    said = describe_divergence(prompt, at, known, tokenizer)
    assert said.startswith(f"token {at}, in messages[0] (system): known 'quick, and p', now 'brief.")
    assert describe_divergence(prompt, at, [], tokenizer) == ""
    assert describe_divergence(prompt, len(prompt) - 1, known, tokenizer) == ""


def test_where_a_long_conversation_diverged_is_found_without_decoding_all_of_it(tokenizer):
    """The engine's thread describes it, and streams wait for that."""
    messages = [SYSTEM]
    for i in range(40):
        messages += [{"role": "user", "content": f"Question {i}: " + "and why? " * 90}]
        messages += [{"role": "assistant", "content": f"Answer {i}."}]
    prompts, decoded = maker(tokenizer), []

    class Watched:
        def decode(self, tokens):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens)

    prompts.chat([*messages[:50], USER])  # what is known of an earlier turn is used for the next
    prompt = prompts.chat([*messages, USER])
    text = tokenizer.decode(prompt.tokens.tolist())
    assert len(text) > 30_000
    for i in (0, 3, 20, 39):
        at = len(tokenizer.encode(text[: text.index(f"Question {i}:") + 3], add_special_tokens=False))
        said = describe_divergence(prompt, at, [5, 6], Watched())
        assert said.startswith(f"token {at}, in messages[{1 + 2 * i}] (user): ")
    assert max(decoded) < 9000


def test_tokens_are_taken_as_they_are(tokenizer):
    assert maker(tokenizer).text([1, 2, 3]).tokens.tolist() == [1, 2, 3]
    assert maker(tokenizer).text("abc").tokens.dtype == np.int32


def test_write_model_has_a_template(tmp_path):
    _, tokenizer = mlx_lm.load(str(write_model(tmp_path / "plain")))
    assert maker(tokenizer).chat([SYSTEM, USER]).state == "normal"
