"""The real server on real models, asked by OpenAI's and Anthropic's own Python clients, unmodified."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from listening import listening, wait_until
from local_model import write_model
from talking_model import ANSWER, CALL, PATTERN, THOUGHT, write_talking_model

import onefold
from onefold.engine.engine import Engine
from onefold.engine.limits import Limits
from onefold.engine.request import Sampling
from onefold.server.settings import Settings

SAID = "".join(ANSWER)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
OPENAI_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
ANTHROPIC_TOOL: Any = {"name": "get_weather", "description": "", "input_schema": SCHEMA}
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = "You are the keeper of a lighthouse. " * 20


class Served:
    def __init__(self, url: str, engine: Engine, name: str) -> None:
        import anthropic
        import openai

        self.url, self.engine, self.name = url, engine, name
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=60)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="any", max_retries=0, timeout=60)

    def close(self) -> None:
        self.openai.close()
        self.anthropic.close()

    def at_rest(self) -> None:
        """Nothing runs, and what is stored is sound."""
        wait_until(lambda: self.engine.stats().decoding + self.engine.stats().prefilling == 0, "still running")
        self.engine.check()


def served(folder: Path, settings: Settings | None = None, **options: Any) -> Iterator[Served]:
    greedy = Sampling(temperature=0)
    with Engine(*onefold.load(folder), model_id=str(folder), defaults=greedy, **options) as engine:
        with listening(engine, settings) as url:
            made = Served(url, engine, folder.name)
            try:
                yield made
            finally:
                made.close()
        if engine.alive:
            engine.check()


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Thinks and calls a tool if it has one, and otherwise says its sentence."""
    yield from served(write_talking_model(tmp_path_factory.mktemp("talker")), budget="64MB")


@pytest.fixture(scope="module")
def babbler(model: Path) -> Iterator[Served]:
    """Goes on for as long as it may."""
    yield from served(model, budget="128MB", limits=Limits(rows=8))


# -- OpenAI ----------------------------------------------------------------------------------------


def test_openai_chat(talker):
    answer = talker.openai.chat.completions.create(model=talker.name, messages=[QUESTION])
    assert answer.choices[0].message.content == SAID and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len(ANSWER) + 1  # and its end
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_openai_streaming(talker):
    stream = talker.openai.chat.completions.create(
        model="default", messages=[QUESTION], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ANSWER) + 1


def test_openai_tools_there_and_back(talker):
    """Reasoning, a call, its result, an answer; the second prompt goes on from the first."""
    ask = talker.openai.chat.completions.create
    first = ask(model=talker.name, messages=[QUESTION], tools=[OPENAI_TOOL])
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.reasoning_content == THOUGHT and not message.content
    (call,) = message.tool_calls
    assert call.function.name == CALL["name"] and json.loads(call.function.arguments) == CALL["arguments"]
    assert first.usage.completion_tokens_details.reasoning_tokens > 0
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [QUESTION, message.model_dump(exclude_none=True), result]
    second = ask(model=talker.name, messages=messages, tools=[OPENAI_TOOL])
    assert second.choices[0].message.content == SAID
    assert second.usage.prompt_tokens_details.cached_tokens > first.usage.prompt_tokens - 20


def test_openai_tools_streamed_by_the_clients_own_helper(talker):
    with talker.openai.chat.completions.stream(model=talker.name, messages=[QUESTION], tools=[OPENAI_TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    (call,) = final.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == CALL["arguments"]
    assert final.choices[0].finish_reason == "tool_calls"


def test_openai_custom_tools_there_and_back(talker):
    """The model calls a function; the client hears of a custom tool, and gives its result as one's."""
    ask = talker.openai.chat.completions.create
    tool: Any = {"type": "custom", "custom": {"name": "get_weather", "description": "Tells the weather."}}
    first = ask(model=talker.name, messages=[QUESTION], tools=[tool])
    (call,) = first.choices[0].message.tool_calls
    assert call.type == "custom" and call.custom.name == CALL["name"]
    assert call.custom.input == PATTERN
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [QUESTION, first.choices[0].message.model_dump(exclude_none=True), result]
    assert ask(model=talker.name, messages=messages, tools=[tool]).choices[0].message.content == SAID


@pytest.mark.parametrize("stream", [False, True])
def test_openai_functions_as_before_there_were_tools(talker, stream):
    ask = talker.openai.chat.completions.create
    asked: dict[str, Any] = {"model": talker.name, "functions": [OPENAI_TOOL["function"]], "function_call": "auto"}
    if stream:
        deltas = [chunk.choices[0] for chunk in ask(messages=[QUESTION], stream=True, **asked)]
        called = [d.delta.function_call for d in deltas if d.delta.function_call]
        name, arguments = called[0].name, "".join(c.arguments or "" for c in called)
        assert deltas[-1].finish_reason == "function_call" and len(called) == 2
    else:
        (choice,) = ask(messages=[QUESTION], **asked).choices
        assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
        name, arguments = choice.message.function_call.name, choice.message.function_call.arguments
    assert name == CALL["name"] and json.loads(arguments) == CALL["arguments"]
    call: Any = {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}
    result: Any = {"role": "function", "name": name, "content": "sunny"}
    second = ask(messages=[QUESTION, call, result], **asked)
    assert second.choices[0].message.content == SAID
    none = ask(messages=[QUESTION], **{**asked, "function_call": "none"})
    assert none.choices[0].message.content == SAID


RESPONSES_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}


@pytest.mark.parametrize("stream", [False, True])
def test_responses_tools_there_and_back(talker, stream):
    """The output, sent back as it is, renders what the model generated: the second prompt goes on from the first."""

    def ask(given: Any) -> Any:
        asked: Any = {"model": talker.name, "input": given, "tools": [RESPONSES_TOOL], "store": False}
        if not stream:
            return talker.openai.responses.create(**asked)
        with talker.openai.responses.stream(**asked) as events:
            return events.get_final_response()

    first = ask([QUESTION])
    thought, call = first.output
    assert thought.content[0].text == THOUGHT and call.name == CALL["name"]
    assert json.loads(call.arguments) == CALL["arguments"] and first.usage.output_tokens_details.reasoning_tokens > 0
    sent_back = [item.model_dump(include={*type(item).model_fields} - {"parsed_arguments"}) for item in first.output]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = ask([QUESTION, *[{k: v for k, v in item.items() if v is not None} for item in sent_back], result])
    assert second.output_text == SAID and second.status == "completed"
    # of the call, too, tests/test_clients.py: this tokenizer has one token for what a grammar writes in many
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_openai_without_the_tools_that_it_may_not_use(talker):
    ask = talker.openai.chat.completions.create
    answer = ask(model=talker.name, messages=[QUESTION], tools=[OPENAI_TOOL], tool_choice="none")
    assert answer.choices[0].message.content == SAID and answer.choices[0].message.tool_calls is None


def test_openai_conversation_goes_on_from_what_is_known(babbler):
    ask = babbler.openai.chat.completions.with_raw_response.create
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    known = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Turn {turn}: and then?"})
        raw = ask(model=babbler.name, messages=messages, max_tokens=20)
        answer = raw.parse()
        assert int(raw.headers["x-onefold-cached-tokens"]) == answer.usage.prompt_tokens_details.cached_tokens
        assert int(raw.headers["x-onefold-prompt-tokens"]) == answer.usage.prompt_tokens
        assert answer.usage.prompt_tokens_details.cached_tokens >= known - 1
        assert "x-onefold-diverged" not in raw.headers
        known = answer.usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    babbler.at_rest()


def test_openai_says_where_a_prompt_diverged(babbler):
    ask = babbler.openai.chat.completions.with_raw_response.create
    for name in ("Ada", "Ben"):
        messages = [{"role": "system", "content": SYSTEM + f"Your name is {name}."}, QUESTION]
        raw = ask(model=babbler.name, messages=messages, max_tokens=1)
    assert "messages[0] (system)" in raw.headers["x-onefold-diverged"]
    assert "'Ben." in raw.headers["x-onefold-diverged"]


def test_openai_several_choices_are_prefilled_once(babbler):
    before = babbler.engine.stats().prefilled_tokens
    text = "Choose one of many. " * 30
    answer = babbler.openai.chat.completions.create(
        model=babbler.name, messages=[{"role": "user", "content": text}], n=4, max_tokens=8, temperature=1, seed=1
    )
    assert len({c.message.content for c in answer.choices}) > 1
    assert answer.usage.completion_tokens == 4 * 8
    assert babbler.engine.stats().prefilled_tokens - before < 1.3 * len(text)
    stream = babbler.openai.chat.completions.create(
        model=babbler.name, messages=[QUESTION], n=3, max_tokens=5, temperature=1, seed=1, stream=True
    )
    texts = dict.fromkeys(range(3), "")
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert all(len(text) >= 5 for text in texts.values())


def test_openai_sampling_is_the_requests(babbler):
    def ask(**options: Any) -> str:
        answer = babbler.openai.chat.completions.create(
            model=babbler.name, messages=[QUESTION], max_tokens=12, **options
        )
        return answer.choices[0].message.content

    assert ask() == ask() == ask(temperature=0) == ask(temperature=1, top_p=0)
    assert ask() == ask(temperature=1, extra_body={"top_k": 1})
    assert ask(temperature=1, seed=5) == ask(temperature=1, seed=5) != ask(temperature=1, seed=6)
    assert set(ask(logit_bias={"5": 100})) == {"&"}
    assert ask(frequency_penalty=2, presence_penalty=2, extra_body={"repetition_penalty": 1.3, "min_p": 0.1})


def test_openai_stops(talker):
    ask = talker.openai.chat.completions.create
    answer = ask(model=talker.name, messages=[QUESTION], stop=["nowhere", " Par"])
    assert answer.choices[0].message.content == "It is sunny in" and answer.choices[0].finish_reason == "stop"
    answer = ask(model=talker.name, messages=[QUESTION], max_completion_tokens=2)
    assert answer.choices[0].message.content == "It is sunny" and answer.choices[0].finish_reason == "length"


def test_openai_logprobs(babbler):
    answer = babbler.openai.chat.completions.create(
        model=babbler.name, messages=[QUESTION], max_tokens=4, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs.content
    assert "".join(t.token for t in found) == answer.choices[0].message.content and len(found) == 4
    assert all(len(t.top_logprobs) == 3 and t.top_logprobs[0].logprob >= t.logprob for t in found)


def test_openai_completions(babbler):
    ask = babbler.openai.completions.create
    answer = ask(model=babbler.name, prompt="Once upon", max_tokens=6, logprobs=2, echo=False)
    assert len(answer.choices[0].text) == 6 and len(answer.choices[0].logprobs.tokens) == 6
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    tokens = [ord(c) - 33 for c in "Once"]
    same = ask(model=babbler.name, prompt=["Once", "Once"], max_tokens=6)
    as_tokens = ask(model=babbler.name, prompt=tokens, max_tokens=6)
    assert same.choices[0].text == same.choices[1].text == as_tokens.choices[0].text
    chunks = list(ask(model=babbler.name, prompt="Once", max_tokens=6, stream=True, echo=True))
    assert "".join(c.choices[0].text for c in chunks) == "Once" + same.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_openai_errors(babbler):
    import openai

    ask = babbler.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-5", messages=[QUESTION])
    assert missing.value.code == "model_not_found" and babbler.name in missing.value.message
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=babbler.name, messages=[])
    assert bad.value.param == "messages"
    with pytest.raises(openai.BadRequestError) as long:
        ask(model=babbler.name, messages=[{"role": "user", "content": "x" * 400_000}], stream=True)
    assert long.value.code == "context_length_exceeded"
    for broken in ({"logit_bias": {"100000": 1}}, {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}):
        with pytest.raises(openai.BadRequestError):
            ask(model=babbler.name, messages=[QUESTION], **broken)
    with pytest.raises(openai.BadRequestError):
        babbler.openai.completions.create(model=babbler.name, prompt=[5, 10**20])
    with pytest.raises(openai.BadRequestError):
        babbler.openai.completions.create(model=babbler.name, prompt=[5, 100_000])
    with pytest.raises(openai.BadRequestError):
        babbler.openai.completions.create(model=babbler.name, prompt="")
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="text only"):
        ask(model=babbler.name, messages=[{"role": "user", "content": [image]}])


def test_openai_models(talker):
    assert [m.id for m in talker.openai.models.list()] == [talker.name] == [talker.engine.model_id]
    assert talker.openai.models.retrieve(f"/a/folder/{talker.name}").id == talker.name


# -- Anthropic -------------------------------------------------------------------------------------


def test_anthropic_message(talker):
    answer = talker.anthropic.messages.create(model=talker.name, max_tokens=50, messages=[QUESTION], system="Be brief.")
    assert [block.text for block in answer.content] == [SAID] and answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == len(ANSWER) + 1
    again = talker.anthropic.messages.create(model=talker.name, max_tokens=50, messages=[QUESTION], system="Be brief.")
    total = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert again.usage.cache_read_input_tokens == total - 1 and again.usage.input_tokens == 1
    assert again.usage.cache_creation_input_tokens == 0
    counted = talker.anthropic.messages.count_tokens(model=talker.name, messages=[QUESTION], system="Be brief.")
    assert counted.input_tokens == total


def test_anthropic_streaming(talker):
    with talker.anthropic.messages.stream(model=talker.name, max_tokens=50, messages=[QUESTION]) as stream:
        assert "".join(stream.text_stream) == SAID
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.usage.output_tokens == len(ANSWER) + 1


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tools_there_and_back(talker, stream):
    asked: dict[str, Any] = {"model": talker.name, "max_tokens": 200, "tools": [ANTHROPIC_TOOL]}
    asked["thinking"] = {"type": "enabled", "budget_tokens": 1024}

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return talker.anthropic.messages.create(messages=messages, **asked)
        with talker.anthropic.messages.stream(messages=messages, **asked) as streamed:
            return streamed.get_final_message()

    first = ask([QUESTION])
    assert first.stop_reason == "tool_use"
    thinking, call = first.content
    assert thinking.type == "thinking" and thinking.thinking == THOUGHT and thinking.signature
    assert call.type == "tool_use" and call.name == CALL["name"] and call.input == CALL["arguments"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    second = ask([QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}])
    assert second.content[0].text == SAID and second.stop_reason == "end_turn"
    assert second.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_tool_runner_goes_on_with_the_whole_conversation(talker, stream):
    """It asks the server to hold the conversation as a thread; told that there are none, it sends all of it."""
    import anthropic


    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Tells the weather."""
        return f"sunny in {city} for {days} days"

    long: Any = {"role": "user", "content": "What is the weather in Paris? " * 10}
    asked: dict[str, Any] = {"model": talker.name, "max_tokens": 200, "messages": [long], "tools": [get_weather]}
    runner = talker.anthropic.beta.messages.tool_runner(stream=stream, **asked)
    turns = [turn.get_final_message() if stream else turn for turn in runner]
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[1].content[0].text == SAID
    first, second = (turn.usage.input_tokens + turn.usage.cache_read_input_tokens for turn in turns)
    assert second > first > len(long["content"])


def test_anthropic_a_thread_is_refused_with_the_code_that_its_client_looks_for(talker):
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="send all messages") as refused:
        talker.anthropic.beta.messages.create(
            model=talker.name,
            max_tokens=5,
            messages=[QUESTION],
            thread={"type": "continue", "previous_message_id": "msg_1"},
        )
    assert refused.value.error_code == "thread_unsupported_request"


def test_anthropic_stops(talker):
    ask = talker.anthropic.messages.create
    answer = ask(model=talker.name, max_tokens=50, messages=[QUESTION], stop_sequences=[" in"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " in")
    assert answer.content[0].text == "It is sunny"
    assert ask(model=talker.name, max_tokens=2, messages=[QUESTION]).stop_reason == "max_tokens"


def test_anthropic_headers_that_change_are_not_part_of_the_prompt(babbler):
    """As Claude Code sends them: a billing header, cache_control, tools in any order of keys."""
    read = []
    for i in range(3):
        blocks: list[Any] = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{i}; cch={i}{i}{i};"},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
        ]
        answer = babbler.anthropic.messages.create(model="default", max_tokens=1, system=blocks, messages=[QUESTION])
        read.append(answer.usage.input_tokens)
    assert read[1:] == [1, 1]


STRICT = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HOISTS = """{{ '<|im_start|>system\\n' }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}
{%- for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module", params=["in place", "strict", "hoists"])
def claude_codes(request, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Models whose templates put system messages in their place, refuse them in the middle, or move them."""
    folder = write_model(tmp_path_factory.mktemp("templates"))
    if request.param != "in place":
        config = folder / "tokenizer_config.json"
        template = {"strict": STRICT, "hoists": HOISTS}[request.param]
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    yield from served(folder, budget="64MB")


def test_anthropic_turns_of_claude_code_go_on_from_what_is_known(claude_codes):
    """It counts tokens down in its system prompt and behind each turn, and sends system messages in the middle."""
    ask = claude_codes.anthropic.messages.with_raw_response.create
    messages: list[Any] = []
    known = 0
    for turn in range(5):
        left = 15_000_000 - 1234 * turn
        countdown = {"type": "text", "text": f"<total_tokens>{left} tokens left</total_tokens>"}
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.280.{turn}; cch={turn}f;"},
            {"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}},
            countdown,
        ]
        question = [{"type": "text", "text": f"Turn {turn}: and then?"}]
        messages.append({"role": "user", "content": [*question, countdown] if turn % 2 else question})
        messages.append({"role": "system", "content": [countdown]})
        if turn in (1, 3):
            note = f"The task tools haven't been used recently ({turn})."
            messages.append({"role": "system", "content": [{"type": "text", "text": note}]})
        raw = ask(model="default", max_tokens=12, system=system, messages=messages)
        answer = raw.parse()
        prompt = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
        assert answer.usage.cache_read_input_tokens >= known - 1 and "x-onefold-diverged" not in raw.headers
        known = prompt + answer.usage.output_tokens
        messages.append({"role": "assistant", "content": answer.content[0].text})
        for message in messages:  # as it may come back: the numbers of earlier turns are not all kept
            if isinstance(message["content"], list):
                message["content"] = [b for b in message["content"] if b is not countdown] or message["content"]
    assert known > 5 * 12


def test_openai_system_messages_in_the_middle_keep_what_is_before_them(claude_codes):
    ask = claude_codes.openai.chat.completions.create
    messages: list[Any] = [{"role": "system", "content": SYSTEM + "OpenAI."}]
    known = 0
    for turn in range(4):
        messages.append({"role": "user", "content": f"Turn {turn}"})
        if turn % 2:
            messages.append({"role": "developer", "content": f"Note {turn}"})
        messages.append({"role": "system", "content": f"<total_tokens>{900 - turn} tokens left</total_tokens>"})
        usage = ask(model="default", max_tokens=8, messages=messages)
        assert usage.usage.prompt_tokens_details.cached_tokens >= known - 1
        known = usage.usage.total_tokens
        messages[-1] = {"role": "assistant", "content": usage.choices[0].message.content}


def test_anthropic_an_answer_that_is_begun_goes_on(babbler):
    begun: list[Any] = [QUESTION, {"role": "assistant", "content": "It is"}]
    answer = babbler.anthropic.messages.create(model="default", max_tokens=3, messages=begun)
    assert len(answer.content[0].text) == 3
    counted = babbler.anthropic.messages.count_tokens(model="default", messages=begun)
    whole = babbler.anthropic.messages.count_tokens(model="default", messages=[QUESTION])
    assert counted.input_tokens == whole.input_tokens + len("It is")


def test_anthropic_errors(babbler):
    import anthropic

    ask = babbler.anthropic.messages.create
    with pytest.raises(anthropic.NotFoundError) as missing:
        ask(model="claude-opus", max_tokens=5, messages=[QUESTION])
    assert missing.value.body["error"]["type"] == "not_found_error" and missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        ask(model="default", max_tokens=5, messages=[{"role": "user", "content": "x" * 400_000}])
    with pytest.raises(anthropic.BadRequestError, match="text only"):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
        ask(model="default", max_tokens=5, messages=[{"role": "user", "content": [image]}])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        ask(model="default", max_tokens=0, messages=[QUESTION])


def test_anthropic_models(talker):
    assert [m.id for m in talker.anthropic.models.list()] == [talker.engine.model_id]


# -- both ------------------------------------------------------------------------------------------


def test_the_two_apis_share_what_is_known(babbler):
    messages = [{"role": "user", "content": "Shared between two APIs. " * 10}]
    first = babbler.openai.chat.completions.create(model="default", messages=messages, max_tokens=1)
    second = babbler.anthropic.messages.create(model="default", messages=messages, max_tokens=1)
    assert second.usage.cache_read_input_tokens == first.usage.prompt_tokens - 1


def test_responses_and_chat_share_what_is_known(babbler):
    system = "You are a baker. " * 20
    chat = babbler.openai.chat.completions.create(
        model="default", messages=[{"role": "system", "content": system}, QUESTION], max_tokens=2
    )
    made = babbler.openai.responses.create(model="default", instructions=system, input=[QUESTION], max_output_tokens=3)
    assert made.usage.input_tokens == chat.usage.prompt_tokens and made.status == "incomplete"
    assert made.usage.input_tokens_details.cached_tokens >= chat.usage.prompt_tokens - 1
    counted = babbler.openai.responses.input_tokens.count(model="default", instructions=system, input=[QUESTION])
    assert counted.input_tokens == made.usage.input_tokens


def test_responses_an_empty_input_is_answered(babbler):
    made = babbler.openai.responses.create(model="default", input="", max_output_tokens=1)
    assert made.status == "incomplete" and made.usage.output_tokens == 1


def test_whoever_goes_away_frees_the_row(babbler):
    stats = babbler.engine.stats
    before = stats().cancelled
    for api in (babbler.openai.chat.completions, babbler.anthropic.messages):
        stream = api.create(model="default", messages=[QUESTION], max_tokens=100_000, stream=True)
        for _, _ in zip(range(5), stream, strict=False):
            pass
        assert stats().decoding == 1
        stream.close()
        babbler.at_rest()
    assert stats().cancelled == before + 2


def test_whoever_stops_waiting_for_a_whole_answer_frees_the_row(babbler):
    import openai

    stats = babbler.engine.stats
    before = stats().cancelled
    for seconds in (0.5, 3, 20):  # a busy machine may not have begun it in half a second
        impatient = babbler.openai.with_options(timeout=seconds)
        with pytest.raises(openai.APITimeoutError):
            impatient.chat.completions.create(model="default", messages=[QUESTION], max_tokens=100_000)
        babbler.at_rest()
        if stats().cancelled > before:
            break
    assert stats().cancelled == before + 1


def test_many_at_once_answer_as_they_do_alone(babbler):
    import openai

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{babbler.url}/v1", api_key="any", max_retries=0) as client:

            async def ask(i: int) -> str:
                messages: Any = [{"role": "user", "content": f"{SYSTEM[:100]} Question {i}"}]
                stream = await client.chat.completions.create(
                    model="default", messages=messages, max_tokens=20, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*map(ask, range(12)))

    together = asyncio.run(ask_all())
    for i in (0, 5, 11):
        messages: Any = [{"role": "user", "content": f"{SYSTEM[:100]} Question {i}"}]
        alone = babbler.openai.chat.completions.create(model="default", messages=messages, max_tokens=20)
        assert alone.choices[0].message.content == together[i]
    babbler.at_rest()


def test_a_full_queue_is_said_with_a_time(model):
    serving = served(model, budget="64MB", max_queue=1, limits=Limits(rows=1))
    busy = next(serving)
    try:
        running = busy.openai.chat.completions.create(
            model="default", messages=[QUESTION], max_tokens=100_000, stream=True
        )
        next(iter(running))
        body = {"messages": [QUESTION], "max_tokens": 1}
        patience = httpx.Timeout(60, read=0.5)
        with httpx.Client(base_url=busy.url, timeout=patience) as client, pytest.raises(httpx.ReadTimeout):
            client.post("/v1/chat/completions", json=body)
        wait_until(lambda: busy.engine.stats().queued == 0, "still queued")  # it was cancelled while it waited
        answer = httpx.post(f"{busy.url}/v1/chat/completions", json={**body, "n": 2}, timeout=30)
        assert answer.status_code == 503 and int(answer.headers["retry-after"]) >= 1
        wait_until(lambda: busy.engine.stats().queued == 0, "the first choice of the refused request is still queued")
        running.close()
    finally:
        serving.close()


def test_the_cache_can_be_looked_at_and_cleared(babbler):
    babbler.openai.chat.completions.create(model="default", messages=[QUESTION], max_tokens=1)
    babbler.at_rest()
    with httpx.Client(base_url=babbler.url) as client:
        held = client.get("/v1/cache").json()
        assert held["cache"]["stored_tokens"] > 0 and held["finished"] > 0
        assert client.delete("/v1/cache").json()["freed_bytes"] > 0
        assert client.get("/v1/cache").json()["cache"]["stored_tokens"] == 0
        assert 'onefold_ledger_bytes{purpose="stored"} 0.0' in client.get("/metrics").text
