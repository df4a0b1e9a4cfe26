"""The length that a model was made for: read off config.json, said, and held to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import mlx.core as mx
import pytest
import tiny_gguf
from listening import listening
from local_model import write_model

import onefold
from onefold.cli import serve
from onefold.engine import gguf
from onefold.engine.context_length import context_length, length_of
from onefold.engine.engine import Engine
from onefold.engine.request import Done, Request, Sampling
from onefold.errors import TooLong

LENGTH = 200


@pytest.mark.parametrize(
    "config, length",
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096.0}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"text_config": {"max_position_embeddings": 32768}, "max_position_embeddings": 7}, 32768),
        ({"text_config": {"hidden_size": 5}, "max_position_embeddings": 77}, 77),
        ({"hidden_size": 5}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": "many"}, None),
        ({"max_position_embeddings": True}, None),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": 10**30}, None),
        ({}, None),
    ],
)
def test_by_the_config(config: dict[str, Any], length: int | None) -> None:
    assert length_of(config) == length


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    "scaling, length",
    [
        (None, 40960),
        ({"rope_type": "default"}, 40960),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 40960),
        ({"type": "longrope", "original_max_position_embeddings": 4096}, 40960),
        ({"type": "linear", "factor": 2.0}, 81920),
        ({"rope_type": "dynamic", "factor": 2}, 81920),
        ({"type": "yarn", **YARN}, 131072),
        ({"rope_type": "yarn", "factor": 2.0}, 81920),
        ({"type": "deepseek_yarn", "factor": 40, "original_max_position_embeddings": 1024}, 40960),
        ({"type": "mrope", "mrope_section": [1, 2]}, 40960),
        ({"type": "linear", "factor": "two"}, 40960),
        ("linear", 40960),
    ],
)
def test_stretched_by_what_the_rotary_embeddings_are(scaling: Any, length: int) -> None:
    config = {"max_position_embeddings": 40960, "rope_scaling": scaling}
    assert length_of(config) == length_of({"text_config": config}) == length
    if isinstance(scaling, dict) and scaling:
        assert length_of({"max_position_embeddings": 40960, "rope_parameters": scaling}) == length


def test_a_factor_of_some_layers_alone_does_not_count() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    config = {"max_position_embeddings": 131072, "rope_scaling": scaling, "rope_local_base_freq": 10000}
    assert length_of(config) == 131072


def test_the_file_comes_before_the_arguments_and_may_be_broken(tmp_path: Path, caplog: Any) -> None:
    model, tokenizer = SimpleNamespace(args=SimpleNamespace(max_position_embeddings=5)), SimpleNamespace()
    assert context_length(model, tokenizer) == 5 and context_length(object(), object()) is None
    tokenizer.name_or_path = str(tmp_path)
    assert context_length(model, tokenizer) == 5
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 9}')
    assert context_length(model, tokenizer) == 9
    (tmp_path / "config.json").write_text("{")
    assert context_length(model, tokenizer) == 5 and "config.json cannot be read" in caplog.text


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("short"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LENGTH}))
    return folder


def engine_of(folder: Path, **options: Any) -> Engine:
    return Engine(*onefold.load(folder), model_id="short", budget="64MB", defaults=Sampling(temperature=0), **options)


@pytest.fixture(scope="module")
def engine(short: Path) -> Iterator[Engine]:
    with engine_of(short) as made:
        yield made


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with listening(engine) as at:
        yield at


def done(engine: Engine, tokens: int, max_tokens: int | None) -> Done:
    endless = Sampling(temperature=0, logit_bias=dict.fromkeys(engine.tokenizer.eos_token_ids, -1e9))
    events = list(engine.ask(Request(prompt=engine.text([5] * tokens), max_tokens=max_tokens, sampling=endless)))
    assert isinstance(events[-1], Done)
    return events[-1]


def test_the_engine_ends_an_answer_where_the_context_does(engine: Engine) -> None:
    for tokens, asked, made in ((150, None, 50), (150, 1000, 50), (150, 7, 7), (LENGTH - 1, None, 1), (LENGTH, 9, 1)):
        found = done(engine, tokens, asked)
        assert (found.finish, found.completion_tokens) == ("length", made)
    with pytest.raises(TooLong, match="made for 200") as long:
        done(engine, LENGTH + 1, 1)
    assert (long.value.tokens, long.value.most) == (LENGTH + 1, LENGTH)


@pytest.mark.parametrize("options", [{}, {"max_kv_size": 64, "keep": 4}])
def test_a_bound_does_not_make_the_context_longer_and_a_flag_ignores_it(short: Path, options: dict[str, Any]) -> None:
    with engine_of(short, **options) as held, pytest.raises(TooLong):
        done(held, LENGTH + 1, 1)
    with engine_of(short, ignore_context_length=True, **options) as free:
        assert free.context_length is None
        assert done(free, LENGTH + 1, 9).completion_tokens == 9


def test_openai_is_told_in_its_own_words(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as long:
                client.chat.completions.create(
                    model="short", messages=[{"role": "user", "content": "x" * LENGTH}], stream=stream
                )
            assert long.value.code == "context_length_exceeded" and long.value.type == "invalid_request_error"
            assert "maximum context length is 200 tokens. However, your messages resulted in 2" in long.value.message
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.completions.create(model="short", prompt="x" * (LENGTH + 1))
        cut = client.completions.create(model="short", prompt="x" * (LENGTH - 3), max_tokens=100)
        assert cut.choices[0].finish_reason == "length" and cut.usage and cut.usage.total_tokens == LENGTH


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_is_told_in_its_own_words(url: str, stream: bool) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:

        def ask(length: int, max_tokens: int) -> Any:
            asked: dict[str, Any] = {"model": "short", "max_tokens": max_tokens}
            asked["messages"] = [{"role": "user", "content": "x" * length}]
            if not stream:
                return client.messages.create(**asked)
            with client.messages.stream(**asked) as streamed:
                return streamed.get_final_message()

        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 2\d\d tokens > 200 maximum") as long:
            ask(LENGTH, 5)
        assert long.value.type == "invalid_request_error"
        assert ask(100, 1000).stop_reason == "model_context_window_exceeded"
        assert ask(100, 3).stop_reason == "max_tokens"
        counted = client.messages.count_tokens(model="short", messages=[{"role": "user", "content": "x" * LENGTH}])
        assert counted.input_tokens > LENGTH


def test_models_and_banner_say_it(engine: Engine, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    (listed,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert (listed["context_length"], listed["max_model_len"], listed["max_input_tokens"]) == (LENGTH,) * 3
    assert httpx.get(f"{url}/v1/models/short").json()["context_length"] == LENGTH
    sock: Any = SimpleNamespace(getsockname=lambda: ("127.0.0.1", 1))
    serve._greet(engine, serve._settings(serve.parser().parse_args(["m"])), sock)
    assert "context    200 tokens" in capsys.readouterr().out


def test_a_model_that_was_a_gguf_file_says_it(tmp_path: Path) -> None:
    """As the demo model was."""
    file = tiny_gguf.write(tmp_path / "a.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), tiny_gguf.facts())
    made = tmp_path / "made"
    made.mkdir()
    gguf.convert(file, made, mx.float32)
    assert context_length(*onefold.load(made)) == 512
