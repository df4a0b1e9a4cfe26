"""Preparing a prompt holds up nobody: long ones do not block short ones, and what is too long is given up early."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from listening import listening, wait_until
from local_model import Shape, write_model

import onefold
from onefold.engine.engine import Engine
from onefold.server import body
from onefold.server.body import parse
from onefold.server.openai.schemas import ChatRequest, CompletionRequest

SHORT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
LONG = {"messages": [{"role": "user", "content": "hello world " * 80_000}], "max_tokens": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), Shape(layers=1))


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    with Engine(*onefold.load(model), model_id="tiny", budget="64MB") as engine:
        yield engine


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    """The lengths of the texts that the tokenizer was given."""
    seen: list[int] = []
    tokenizer: Any = engine._prompts._tokeniser

    class Watched:
        def encode(self, text: str, **options: Any) -> Any:
            seen.append(len(text))
            return engine.tokenizer.encode(text, **options)

    monkeypatch.setattr(tokenizer, "_tokenizer", Watched())
    return seen


def post(url: str, path: str, content: Any) -> httpx.Response:
    return httpx.post(url + path, json=content, timeout=120)


def test_a_short_chat_does_not_wait_for_a_long_count(engine: Engine, pieces: list[int]) -> None:
    ends: dict[str, float] = {}

    def timed(name: str, path: str, content: Any) -> httpx.Response:
        found = post(url, path, content)
        ends[name] = time.monotonic()
        return found

    with listening(engine) as url, ThreadPoolExecutor(4) as pool:
        assert post(url, "/v1/chat/completions", SHORT).status_code == 200
        pieces.clear()
        counts = [pool.submit(timed, f"count {i}", "/v1/messages/count_tokens", LONG) for i in range(3)]
        while len(pieces) < 3:
            time.sleep(0.005)
        for _ in range(3):
            assert timed("short", "/v1/chat/completions", SHORT).status_code == 200
            assert httpx.get(url + "/health").status_code == 200
        for count in counts:
            assert count.result().json()["input_tokens"] > 900_000
    assert ends["short"] < min(end for name, end in ends.items() if name != "short")
    assert max(pieces) <= 8192


def test_a_prompt_that_is_far_too_long_is_not_tokenised_to_its_end(engine: Engine, pieces: list[int]) -> None:
    most = min(engine.most_tokens, engine.context_length or engine.most_tokens)
    assert 4 * most < 900_000
    with listening(engine) as url:
        refused = post(url, "/v1/chat/completions", LONG)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        assert f" {most} tokens" in refused.json()["error"]["message"].replace(",", "")
        refused = post(url, "/v1/messages", LONG)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].endswith(f"> {most} maximum")
        refused = post(url, "/v1/completions", {"prompt": "hello world " * 80_000})
        assert refused.status_code == 400
    assert sum(pieces) < 3 * (4 * most + 20_000) < 3 * 960_000


def test_a_server_that_ends_does_not_tokenise_to_the_end(engine: Engine, pieces: list[int]) -> None:
    content = {"messages": [{"role": "user", "content": "hello world " * 1_000_000}]}
    answers = []
    with listening(engine) as url:
        asking = threading.Thread(
            target=lambda: answers.append(post(url, "/v1/messages/count_tokens", content))
        )
        asking.start()
        while len(pieces) < 3:
            time.sleep(0.005)
    asking.join(60)
    assert sum(pieces) < 12_000_000
    assert answers[0].status_code == 503


def test_the_prompt_of_a_client_that_hung_up_is_not_tokenised_to_the_end(engine: Engine, pieces: list[int]) -> None:
    content = {"messages": [{"role": "user", "content": "hello world " * 1_000_000}]}
    with listening(engine) as url:
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        connection.request("POST", "/v1/messages/count_tokens", json.dumps(content))
        wait_until(lambda: len(pieces) >= 3, "it is not tokenised")
        connection.close()
        before = -1
        while before != sum(pieces):
            before = sum(pieces)
            time.sleep(0.3)
        assert 0 < before < 11_000_000
        assert post(url, "/v1/chat/completions", SHORT).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        {"messages": [{}] * (body.MOST_ITEMS + 1)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (body.MOST_ITEMS + 1)}]},
        {"messages": [{"role": "user", "content": "x"}], "tools": [{f"k{i}": 1 for i in range(body.MOST_ITEMS + 1)}]},
        {"messages": [{"role": "user", "content": [{}] * 2000} for _ in range(100)]},
        {"messages": [1, *[{}] * body.MOST_ITEMS, 1]},
        {"messages": [1, [[]] * (body.MOST_ITEMS + 1), 1]},
    ],
    ids=["messages", "parts", "keys", "all", "between numbers", "in a list between numbers"],
)
def test_more_values_than_can_be_checked_in_a_moment(content: Any) -> None:
    given = json.dumps(content).encode()
    with pytest.raises(onefold.errors.BadRequest, match=r"at most|send fewer"):
        parse(given, ChatRequest)


def test_what_is_wrong_with_many_values_is_found_in_a_moment() -> None:
    given = json.dumps({"messages": [{"role": "user", "content": [{}] * body.MOST_ITEMS}]}).encode()
    began = time.process_time()
    with pytest.raises(onefold.errors.BadRequest, match="required"):
        parse(given, ChatRequest)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    "given",
    [b'{"x":[' + b"[]," * 1_000_001 + b"[]]}", b'{"x":{' + b'"a":1,' * 1_000_001 + b'"b":1}}'],
    ids=["lists", "fields"],
)
def test_so_many_lists_or_fields_are_not_even_parsed(given: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "from_json", None)
    with pytest.raises(onefold.errors.BadRequest, match=r"at most|send fewer"):
        parse(given, ChatRequest)
    assert body.parse_arguments(given.decode()) == given.decode()


def test_a_prompt_of_many_tokens_is_no_list_of_many_values() -> None:
    assert parse(json.dumps({"prompt": [1] * 60_000}).encode(), CompletionRequest).prompt == [1] * 60_000
    with pytest.raises(onefold.errors.BadRequest, match=r"at most|send fewer"):
        parse(json.dumps({"prompt": [1] * (body.MOST_NUMBERS + 1)}).encode(), CompletionRequest)
