"""The app over real connections, on an engine that says what a test wrote down: who may ask, what comes back, who is
hung up on, and that nothing keeps running for nobody."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from listening import listening, wait_until
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import HIT, ScriptedEngine, says

from onefold.engine.request import Done, Failed, Generated, Progress, Started, Text
from onefold.errors import BudgetError, Busy, ConfigError, DeviceError, EngineStopped, PromptError, TooLong
from onefold.server.settings import Settings

USER = {"role": "user", "content": "hi"}
CHAT = ("/v1/chat/completions", {"messages": [USER]})
TEXT = ("/v1/completions", {"prompt": "so"})
TALK = ("/v1/messages", {"messages": [USER], "max_tokens": 9})
RESPOND = ("/v1/responses", {"input": "hi"})
ALL = [CHAT, TEXT, TALK, RESPOND]
EACH = pytest.mark.parametrize("path, body", ALL, ids=["chat", "text", "messages", "responses"])


@pytest.fixture
def engine(scripted_engine: ScriptedEngine) -> ScriptedEngine:
    return scripted_engine


@pytest.fixture
def client(scripted_server: tuple[str, ScriptedEngine], engine: ScriptedEngine) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=scripted_server[0], timeout=30) as made:
        yield made


def raw_request(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on it, and nobody who reads."""
    at = urlsplit(url)
    sent = json.dumps(body).encode()
    sock = socket.create_connection((at.hostname, at.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n".encode() + sent)
    return sock


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Checks the shape, whichever API's it is."""
    body = response.json()
    if "type" in body:
        assert body["type"] == "error" and set(body["error"]) == {"type", "message"}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


# -- what comes back -------------------------------------------------------------------------------


@EACH
def test_an_answer_with_its_headers(client, engine, path, body):
    response = client.post(path, json=body)
    assert response.status_code == 200 and "hello" in response.text
    assert response.headers["x-onefold-prompt-tokens"] == "10"
    assert response.headers["x-onefold-matched-tokens"] == "7"
    assert response.headers["x-onefold-cached-tokens"] == "6"
    assert response.headers["x-onefold-reason"] == "short"
    assert response.headers["x-onefold-diverged"] == "token 7: known 'a', now '%C3%A9%0A%25'"
    assert response.headers["x-request-id"] == response.headers["request-id"]
    streamed = client.post(path, json={**body, "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    assert streamed.headers["x-onefold-cached-tokens"] == "6" and "hello" in streamed.text
    assert engine.cancelled == []


def test_sampling_comes_from_the_request_then_the_settings_then_the_model(engine):
    with listening(engine, Settings(sampling={"temperature": 0.3, "top_p": 0.5}, max_tokens=77)) as url:
        httpx.post(url + CHAT[0], json={**CHAT[1], "top_p": 0.1, "seed": 3, "stop": ["x"]})
        httpx.post(url + TEXT[0], json=TEXT[1])
        httpx.post(url + TALK[0], json=TALK[1])
    chat, text, talk = engine.requests
    assert (chat.sampling.temperature, chat.sampling.top_p, chat.sampling.top_k) == (0.3, 0.1, 20)
    assert chat.sampling.seed == 3 and chat.stop == ("x",) and chat.max_tokens == 77 and not chat.plain
    assert text.max_tokens == 77 and text.plain
    assert talk.max_tokens == 9


def test_max_tokens_if_nobody_says(client, engine):
    client.post(CHAT[0], json=CHAT[1])
    client.post(CHAT[0], json={**CHAT[1], "max_tokens": 5, "max_completion_tokens": 6})
    client.post(CHAT[0], json={**CHAT[1], "max_tokens": 10**30})
    client.post(TEXT[0], json=TEXT[1])
    assert [r.max_tokens for r in engine.requests] == [None, 6, 1 << 20, 16]


def test_choices_are_requests_of_their_own(client, engine):
    engine.script = lambda request: says(f"seed {request.sampling.seed}")
    answer = client.post(CHAT[0], json={**CHAT[1], "n": 3, "seed": 5}).json()
    assert [c["message"]["content"] for c in answer["choices"]] == ["seed 5", "seed 6", "seed 7"]
    assert answer["usage"]["prompt_tokens"] == 10 and len(engine.chats) == 1
    answer = client.post(TEXT[0], json={"prompt": ["a", "bc"], "n": 2, "echo": True}).json()
    assert [c["text"] for c in answer["choices"]] == ["aseed None"] * 2 + ["bcseed None"] * 2
    assert answer["usage"]["prompt_tokens"] == 20


def test_prompts_as_tokens(client, engine):
    assert client.post(TEXT[0], json={"prompt": [1, 2, 3]}).status_code == 200
    assert client.post(TEXT[0], json={"prompt": [[1, 2], [3]]}).status_code == 200
    assert [len(r.prompt) for r in engine.requests] == [3, 2, 1]
    for body in ({"prompt": []}, {"prompt": [1, "a"]}, {"prompt": [[1], "a"]}, {"prompt": {}}, {"prompt": [True]}):
        assert error_of(client.post(TEXT[0], json=body))["param"].startswith("prompt")
    for extra in ({"suffix": "x"}, {"echo": True, "logprobs": 1}, {"best_of": 2}, {"prompt": ["x"] * 65}):
        assert error_of(client.post(TEXT[0], json={**TEXT[1], **extra}))["param"] in extra
    assert error_of(client.post(TEXT[0], json={"prompt": [1], "echo": True}))["param"] == "echo"


@pytest.mark.parametrize("name", [None, "default", "some/folder/scripted", "scripted", ""])
def test_names_of_the_model(client, name):
    for path, body in (CHAT, TEXT, TALK):
        assert client.post(path, json={**body, "model": name}).status_code == 200


@pytest.mark.parametrize("name", ["foo", "/home/me/models/foo", "/home/me/models/foo/", "~/models/foo", "./foo"])
def test_a_folder_may_still_be_named_by_its_path(client, engine, name):
    engine.model_id = "foo"
    assert client.get(f"/v1/models/{name}").json()["id"] == "foo"
    said = client.post(CHAT[0], json={**CHAT[1], "model": f"{name}bar"})
    assert said.status_code == 404 and error_of(said)["message"].endswith("is not served here; use 'foo'.")


@EACH
def test_another_model_is_not_served(client, path, body):
    response = client.post(path, json={**body, "model": "gpt-5"})
    assert response.status_code == 404 and "some/folder/scripted" in error_of(response)["message"]


def test_what_was_loaded_is_left_out_of_garbage_collections_while_it_listens(engine):
    gc.unfreeze()  # another server of this module may have done it
    with listening(engine):
        wait_until(lambda: gc.get_freeze_count() > 1000, "nothing is left out")
    assert gc.get_freeze_count() == 0


def test_aliases(engine):
    with listening(engine, Settings(aliases=("claude-x",))) as url:
        assert httpx.post(url + TALK[0], json={**TALK[1], "model": "claude-x"}).status_code == 200
        assert httpx.post(url + TALK[0], json={**TALK[1], "model": "claude-y"}).status_code == 404
    with listening(engine, Settings(aliases=("*",))) as url:
        assert httpx.post(url + TALK[0], json={**TALK[1], "model": "claude-y"}).status_code == 200


def test_what_there_is_to_look_at(client, engine):
    listed = client.get("/v1/models").json()
    assert listed["data"][0]["id"] == "some/folder/scripted"
    assert client.get("/v1/models/some/folder/scripted").json()["object"] == "model"
    assert client.get("/v1/models/other").status_code == 404
    assert client.get("/health").json() == {"status": "ok", "model": "some/folder/scripted"}
    assert client.get("/v1/cache").json()["cache"]["budget_bytes"] == 100
    assert client.delete("/v1/cache").json() == {"freed_bytes": 12, "freed_disk_bytes": 34}
    counted = client.post("/v1/messages/count_tokens", json={"messages": [USER]})
    assert counted.json() == {"input_tokens": 10}
    engine.alive = False
    assert client.get("/health").status_code == 503
    assert client.post(CHAT[0], json=CHAT[1]).status_code == 503


def test_metrics(engine):
    with listening(engine) as url, httpx.Client(base_url=url) as client:
        client.post(CHAT[0], json=CHAT[1])
        client.post(CHAT[0], json={"messages": []})
        client.get("/whatever/you/like")
        client.get("/v1/models/some/folder/scripted")
        page = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}

    def value(family: str, **labels: str) -> float:
        found = [s for s in families[family].samples if labels.items() <= s.labels.items() and "created" not in s.name]
        return found[0].value

    assert value("onefold_requests", endpoint="/v1/chat/completions", status="200") == 1
    assert value("onefold_requests", endpoint="/v1/chat/completions", status="400") == 1
    assert value("onefold_requests", endpoint="other", status="404") == 1
    assert value("onefold_requests", endpoint="/v1/models", status="200") == 1
    assert value("onefold_prompt_tokens") == 10 and value("onefold_cached_tokens") == 6
    assert value("onefold_queued_requests") == 2 and value("onefold_ledger_bytes", purpose="stored") == 7
    assert value("onefold_budget_bytes") == 100
    assert "onefold_time_to_first_token_seconds" in families and "onefold_inter_token_seconds" in families
    assert "whatever" not in page


def test_the_log_has_one_line_for_each_request_and_of_what_was_said_only_where_it_diverged(client, engine, caplog):
    engine.script = lambda request: says("TOP SECRET ANSWER")
    with caplog.at_level(logging.INFO):
        client.post(CHAT[0], json={"messages": [{"role": "user", "content": "TOP SECRET QUESTION"}]})
        client.post(CHAT[0], json={"messages": [{"role": "TOP SECRET"}]})
        client.get("/health")
        wait_until(lambda: len([r for r in caplog.records if r.name == "onefold.server"]) >= 2, "no lines")
    answered, refused = [r.getMessage() for r in caplog.records if r.name == "onefold.server"]
    assert "POST /v1/chat/completions 200" in answered and "prompt=10 matched=7 cached=6" in answered
    assert "finish=stop" in answered and "first_token=" in answered and 'reason="short"' in answered
    assert "400" in refused and "error=BadRequest" in refused
    assert "SECRET" not in caplog.text and "diverged=\"token 7: known 'a', now" in answered


def test_the_log_names_a_path_that_is_not_there_in_one_short_line(client, caplog):
    asked = {
        "/api/tags?key=TOP-SECRET": "GET /api/tags 404 ",
        "/v1/models/no?key=TOP-SECRET": "GET /v1/models/no 404 ",
        "/a%0Aroot%20200%1B%25/é": "GET /a%0Aroot%20200%1B%25/%C3%A9 404 ",
        f"/{'long' * 999}": f"GET /{'long' * 49}... 404 ",
    }
    with caplog.at_level(logging.INFO, "onefold.server"):
        for path in asked:
            client.get(path)
        assert client.request("LONG" * 999, "/health").status_code == 405
        wait_until(lambda: len(caplog.records) == len(asked) + 1, f"not all lines: {caplog.text}")
    lines = [record.getMessage() for record in caplog.records]
    for line, begin in zip(lines, asked.values(), strict=False):
        assert line.startswith(begin)
    assert "SECRET" not in caplog.text and all(len(line) < 400 for line in lines)


def test_fields_that_no_api_has_are_one_line_of_the_log(client, caplog):
    with caplog.at_level(logging.DEBUG, "onefold.server"):
        client.post(CHAT[0], json={**CHAT[1], "a\n2026 ERROR root: \x1b": 1, "long" * 999: 1})
    (line,) = [record.getMessage() for record in caplog.records if "unknown" in record.getMessage()]
    assert line.startswith("ignored unknown fields: a%0A2026 ERROR root: %1B, long") and len(line) < 300


def test_health_can_be_asked_for_its_headers_alone(client):
    assert client.head("/health").status_code == 200


def test_a_refusal_names_the_field_in_its_sentence(client):
    body = {"messages": [{"role": "user", "content": "x"}], "n": 9}
    assert client.post(CHAT[0], json=body).json()["error"]["message"].startswith("n: ")


def test_a_connection_that_never_asks_is_dropped(client, monkeypatch):
    monkeypatch.setattr("onefold.server.hang_up.FIRST_REQUEST_SECONDS", 0.2)
    with socket.create_connection((client.base_url.host, client.base_url.port), timeout=20) as silent:
        silent.sendall(b"POST /v1/chat")
        assert silent.recv(100) == b""


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status",
    [
        (Busy("come again", retry_after=7), 503),
        (TooLong("too long", tokens=9, most=5), 400),
        (PromptError("no", where="messages"), 400),
        (EngineStopped("stopped"), 503),
        (BudgetError("full", needed_bytes=2, available_bytes=1), 503),
        (DeviceError("burnt"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@EACH
def test_errors_before_the_start_are_real_ones(client, engine, path, body, stream, error, status):
    """Whether the engine refuses the request, or fails it before it has begun."""
    engine.refuses = error
    refused = client.post(path, json={**body, "stream": stream})
    engine.refuses, engine.script = None, lambda request: [Failed(error)]
    failed = client.post(path, json={**body, "stream": stream})
    for response in (refused, failed):
        assert response.status_code == status
        error_of(response)
        assert (response.headers.get("retry-after") == "7") == isinstance(error, Busy)


@EACH
def test_an_error_after_the_start_ends_the_stream(client, engine, path, body):
    engine.script = lambda request: [Started(HIT), Text("he"), 0.3, Failed(Busy("gone", retry_after=1))]
    response = client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    if path == TALK[0]:
        assert last.startswith("event: error\n") and '"overloaded_error"' in last
    elif path == RESPOND[0]:
        assert last.startswith("event: response.failed\n") and '"rate_limit_exceeded"' in last
    else:
        assert json.loads(last.removeprefix("data: "))["error"]["message"] == "gone"
    assert "[DONE]" not in response.text and "message_stop" not in response.text
    assert client.post(path, json=body).status_code == 503  # whole answers can still be real errors


def test_a_bug_is_an_error_of_the_apis_shape_that_tells_nothing(client, engine, caplog):
    def broken(request: Any) -> Any:
        raise RuntimeError("TOP SECRET")

    engine.script = broken
    with caplog.at_level(logging.CRITICAL, "uvicorn.error"):
        for path, body in (CHAT, TALK, RESPOND):
            response = client.post(path, json=body)
            assert response.status_code == 500 and "SECRET" not in error_of(response)["message"]
            assert response.headers["connection"] == "close"


def test_when_one_of_several_choices_is_refused_the_others_are_cancelled(client, engine):
    def third_is_refused(request: Any) -> Any:
        if len(engine.requests) == 3:
            raise Busy("full", retry_after=1)
        return [Started(HIT), threading.Event()]

    engine.script = third_is_refused
    assert client.post(CHAT[0], json={**CHAT[1], "n": 4}).status_code == 503
    assert sorted(engine.cancelled) == [1, 2]


@pytest.mark.parametrize("path", ["/nothing", "/v1/messages/nothing", "/v1/chat", "/chat", "/docs"])
def test_paths_that_are_not_there(client, path):
    for response in (client.get(path), client.post(path, json={})):
        assert response.status_code == 404
        assert ("type" in response.json()) == path.startswith("/v1/messages")
        error_of(response)


@pytest.mark.parametrize(
    "method, path, said",
    [
        ("POST", "/api/chat", "set the client to OpenAI's API, with a base URL that ends in /v1"),
        ("POST", "/api/generate", "Ollama's"),
        ("GET", "/api/tags", "Ollama's"),
        ("POST", "/v1beta/models/gemini-3-pro:generateContent", "Google's"),
        ("POST", "/v1/embeddings", "only writes text"),
        ("POST", "/embeddings", "only writes text"),
        ("POST", "/v1/v1/embeddings", "only writes text"),
        ("POST", "/v1/audio/transcriptions", "only writes text"),
        ("POST", "/v1/images/generations", "only writes text"),
        ("POST", "/v1/moderations", "only writes text"),
        ("POST", "/rerank", "only writes text"),
        ("GET", "/v1/files", "POST /v1/chat/completions"),
        ("DELETE", "/v1/files/file-1/content", "stores no files"),
        ("POST", "/v1/batches", "runs no jobs"),
        ("POST", "/v1/messages/batches", "POST /v1/messages"),
        ("POST", "/v1/threads/thread_1/runs", "whole conversation"),
        ("POST", "/v1/assistants", "whole conversation"),
        ("GET", "/v1/responses/resp_1", "whole conversation"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages", "whole conversation"),
        ("GET", "/v1/filesystem", "There is nothing at"),
        ("GET", "/apis", "There is nothing at"),
    ],
)
def test_a_path_of_another_api_says_what_there_is_instead_in_its_shape(client, method, path, said):
    response = client.request(method, path)
    assert response.status_code == 404
    error = response.json()["error"]
    if path.startswith("/api/"):
        assert said in error
    elif path.startswith("/v1beta/"):
        assert response.json() == {"error": {"code": 404, "status": "NOT_FOUND", "message": error["message"]}}
        assert said in error["message"]
    else:
        assert said in error_of(response)["message"]


def test_a_path_that_is_not_there_is_repeated_as_it_was_asked_for(client):
    assert "'/a\\nb?c'" in error_of(client.get("/a%0Ab%3Fc"))["message"]


def test_other_apis_get_refusals_in_their_shapes(engine):
    with listening(engine, Settings(api_keys=("one",))) as url:
        assert "API key" in httpx.post(f"{url}/api/chat").json()["error"]
        google = httpx.post(f"{url}/v1beta/models/gemini-3-pro:generateContent").json()["error"]
    assert google["code"] == 401 and google["status"] == "UNAUTHENTICATED" and "API key" in google["message"]


@pytest.mark.parametrize(
    "path, wrong, right",
    [
        (CHAT[0], "GET", "POST"),
        (TALK[0], "PUT", "POST"),
        ("/v1/models", "POST", "GET or HEAD"),
        ("/v1/models/default", "DELETE", "GET or HEAD"),
        ("/health", "DELETE", "GET or HEAD"),
        ("/cache", "POST", "DELETE, GET or HEAD"),
        ("/openapi.json", "POST", "GET or HEAD"),
    ],
)
def test_a_method_that_is_not_there_names_those_that_are(client, path, wrong, right):
    response = client.request(wrong, path)
    assert response.status_code == 405 and response.headers["allow"] == right.replace(" or ", ", ")
    assert error_of(response)["message"].endswith(f" does not take {wrong}: use {right}.")


@EACH
@pytest.mark.parametrize("sent", [b"", b"{", b"null", b'{"a": NaN}', b"\xff\xfe", b'{"x":' * 5000, b'{"a":"\\udfff"}'])
def test_bodies_that_are_no_json(client, path, body, sent):
    response = client.post(path, content=sent, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


def test_a_template_that_goes_too_deep_is_the_requests_fault(client, engine):
    def chat(*args: Any, **kwargs: Any) -> Any:
        raise RecursionError

    engine.chat = chat
    response = client.post(CHAT[0], json=CHAT[1])
    assert response.status_code == 400 and "nested" in error_of(response)["message"]


def test_any_content_type_will_do(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-8"):
        sent = client.post(CHAT[0], content=json.dumps(CHAT[1]), headers={"content-type": kind})
        assert sent.status_code == 200


# -- who may ask -----------------------------------------------------------------------------------


def test_keys(engine):
    with listening(engine, Settings(api_keys=("one", "two"))) as url, httpx.Client(base_url=url) as client:
        for path in ("/v1/models", "/metrics", "/v1/cache", "/openapi.json", "/nothing"):
            assert client.get(path).status_code == 401
        assert client.delete("/v1/cache").status_code == 401
        assert client.get("/health").status_code == 200
        both = {"authorization": "Bearer undefined", "x-api-key": "two"}
        for headers in ({"authorization": "Bearer one"}, {"x-api-key": "two"}, {"authorization": "bearer two"}, both):
            assert client.get("/v1/models", headers=headers).status_code == 200
            assert client.get("/metrics", headers=headers).status_code == 200
        for key in ("on", "onee", "ONE", "", "two,one", "ü"):
            response = client.post(TALK[0], json=TALK[1], headers=[(b"x-api-key", key.encode())])
            assert response.status_code == 401 and error_of(response)["type"] == "authentication_error"
        response = client.post(CHAT[0], json=CHAT[1], headers={"authorization": "Basic one"})
        assert error_of(response)["code"] == "invalid_api_key"
    assert engine.requests == []


@pytest.mark.parametrize("apart", [False, True])
def test_namespaces(engine, apart):
    settings = Settings(api_keys=("one", "two"), namespace_per_key=apart)
    with listening(engine, settings) as url:
        for key in ("one", "two", "one"):
            response = httpx.post(url + CHAT[0], json=CHAT[1], headers={"x-api-key": key})
            # what is stored may be somebody else's, unless it is kept apart
            assert ("known 'a'" in response.headers["x-onefold-diverged"]) == apart
            assert response.headers["x-onefold-diverged"].startswith("token 7")
    a, b, c = [r.namespace for r in engine.requests]
    assert a == c and (a != b) == apart and (a == "") != apart
    assert "one" not in str(a)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/models/default", "/v1/cache", "/metrics", "/models"])
def test_what_can_be_read_can_be_asked_for_without_its_body(client, path):
    head, whole = client.head(path), client.get(path)
    assert head.status_code == whole.status_code == 200 and head.content == b"" and whole.content
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_a_client_that_looks_whether_somebody_is_there_needs_no_key(engine):
    with listening(engine, Settings(api_keys=("one",))) as url:
        assert httpx.head(url).status_code == 200 and httpx.get(url).json() == {"server": "onefold"}
        assert httpx.head(f"{url}/models").status_code == 401


@EACH
def test_paths_with_and_without_their_version(client, caplog, path, body):
    bare = path.removeprefix("/v1")
    with caplog.at_level("INFO", "onefold.server"):
        for name in (bare, path, f"/v1{path}"):
            assert client.post(name, json=body).status_code == 200
        wait_until(lambda: caplog.text.count(f"POST {path} 200") == 3, "they are not one endpoint")
    refused = client.post(bare, json={})
    assert refused.status_code == 400 and refused.json().keys() == client.post(path, json={}).json().keys()
    assert client.get("/models/default").json() == client.get("/v1/models/default").json()
    assert client.post("/messages/count_tokens", json={"messages": [USER]}).json() == {"input_tokens": 10}
    for nothing in ("/v2/models", "/chat", "/v1", "/v1/health"):
        assert client.get(nothing).status_code == 404


@EACH
def test_what_was_generated_is_logged_of_answers_that_never_ended(client, engine, caplog, path, body):
    begun = [Started(HIT), Text("a"), Generated(4)]
    never = threading.Event()
    with caplog.at_level("INFO", "onefold.server"):
        engine.script = lambda request: [*begun, 0.1, Failed(EngineStopped("it stopped"))]
        client.post(path, json={**body, "stream": True})
        wait_until(lambda: "generated=4 finish=failed" in caplog.text, "the failed one is not counted")
        engine.script = lambda request: [*begun, Text("zebra"), never]
        with client.stream("POST", path, json={**body, "stream": True}) as stream:
            seen = b""
            for piece in stream.iter_bytes():  # what comes after the count has been sent
                seen += piece
                if b"zebra" in seen:
                    break
        wait_until(lambda: "generated=4 finish=cancelled" in caplog.text, "the one that was hung up on is not counted")
    never.set()


HOSTS_OF_LOOPBACK = ["localhost", "LOCALHOST.:1", "127.0.0.1", "127.0.0.1:99", "127.8.9.1", "[::1]", "[::1]:8080"]
READABLE = ["/", "/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/default", "/v1/cache", "/nothing"]


@pytest.mark.parametrize("path", READABLE)
def test_a_page_whose_name_points_here_can_read_nothing(client, path):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "192.168.1.5"):
        response = client.get(path, headers={"host": host})
        assert response.status_code == 403 and "--allowed-host" in response.text
        assert error_of(response)["code"] == "host_not_allowed"
    for host in HOSTS_OF_LOOPBACK:
        assert client.get(path, headers={"host": host}).status_code != 403


@EACH
def test_a_page_whose_name_points_here_can_ask_for_nothing(client, engine, path, body):
    response = client.post(path, json=body, headers={"host": "evil.example"})
    assert response.status_code == 403 and error_of(response)["message"] and engine.requests == []
    preflight = client.options(path, headers={"host": "evil.example", "access-control-request-method": "POST"})
    assert preflight.status_code == 403


@pytest.mark.parametrize(
    "bound, allowed, ours, foreign",
    [
        ("127.0.0.1", (), HOSTS_OF_LOOPBACK, ["box.lan", "10.0.0.1", "[2001:db8::1]"]),
        ("127.0.0.1", ("Box.lan", "proxy:443"), ["box.lan", "box.lan:80", "proxy"], ["other.lan"]),
        ("127.0.0.1", ("*",), ["anything.example"], []),
        ("0.0.0.0", (), ["10.0.0.1:8080", "[2001:db8::1]:1", *HOSTS_OF_LOOPBACK], ["box.lan", "10.0.0.1.evil.example"]),
        ("::", (), ["10.0.0.1", "[2001:db8::1]"], ["box.lan"]),
        ("10.0.0.1", (), ["10.0.0.1", "localhost"], ["10.0.0.2", "box.lan"]),
        ("box.lan", (), ["box.lan:8080"], ["box.lan.evil.example"]),
        ("127.0.0.1", (), [], ["localhost:1@evil.example", "127.0.0.1:x.evil.example", "[::1].evil.example", "."]),
    ],
)
def test_names_that_a_server_goes_by(engine, bound, allowed, ours, foreign):
    with listening(engine, Settings(host=bound, allowed_hosts=allowed)) as url:
        assert [httpx.get(f"{url}/health", headers={"host": host}).status_code for host in ours] == [200] * len(ours)
        found = [httpx.get(f"{url}/health", headers={"host": host}).status_code for host in foreign]
        assert found == [403] * len(foreign)


def test_http_1_0_has_no_host(scripted_server):
    at = urlsplit(scripted_server[0])
    with socket.create_connection((at.hostname, at.port), timeout=30) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_pages_of_other_origins_are_refused(client, engine):
    for origin in ("https://evil.example", "null"):
        response = client.post(CHAT[0], json=CHAT[1], headers={"origin": origin})
        assert response.status_code == 403
        error_of(response)
    assert engine.requests == []


def test_cors(engine):
    settings = Settings(cors_origins=("https://good.example",), api_keys=("one",))
    with listening(engine, settings) as url, httpx.Client(base_url=url) as client:
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        good, bad = {"origin": "https://good.example"}, {"origin": "https://bad.example"}
        ahead = client.options(CHAT[0], headers={**good, **asked})
        assert ahead.status_code == 200 and ahead.headers["access-control-allow-origin"] == "https://good.example"
        assert client.options(CHAT[0], headers={**bad, **asked}).status_code == 400
        answer = client.post(CHAT[0], json=CHAT[1], headers={**good, "authorization": "Bearer one"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == "https://good.example"
        refused = client.post(CHAT[0], json=CHAT[1], headers=good)
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://good.example"
        assert client.post(CHAT[0], json=CHAT[1], headers={**bad, "x-api-key": "one"}).status_code == 403


def test_settings_that_make_no_sense():
    for wrong in (
        {"port": 70000},
        {"body_limit": 0},
        {"keep_alive_seconds": 0},
        {"max_tokens": 0},
        {"api_keys": ("",)},
        {"api_keys": (" a",)},
        {"sampling": {"seed": 1}},
        {"grace_seconds": -1},
    ):
        with pytest.raises(ConfigError):
            Settings(**wrong)


# -- how much they may send ------------------------------------------------------------------------


def chunks(n: int) -> Iterator[bytes]:
    for _ in range(n):
        yield b" " * (1 << 16)


def test_a_body_that_is_too_large(engine):
    with listening(engine, Settings(body_limit=100_000)) as url, httpx.Client(base_url=url, timeout=30) as client:
        for path, _ in (CHAT, TALK):
            for content in (b" " * 100_001, b" " * 40_000_000, chunks(2), chunks(200)):
                response = client.post(path, content=content)
                assert response.status_code == 413
                error_of(response)
        fits = json.dumps({"messages": [{"role": "user", "content": "x" * 90_000}]})
        assert client.post(CHAT[0], content=fits).status_code == 200


def test_a_body_that_says_it_is_larger_is_not_waited_for_if_the_client_asks_first(engine):
    with listening(engine, Settings(body_limit=1000)) as url:
        at = urlsplit(url)
        with socket.create_connection((at.hostname, at.port), timeout=10) as sock:
            sock.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999\r\n")
            sock.sendall(b"Expect: 100-continue\r\n\r\n")
            assert sock.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come(engine):
    with listening(engine, Settings(send_timeout_seconds=0.2)) as url:
        at = urlsplit(url)
        with socket.create_connection((at.hostname, at.port), timeout=10) as sock:
            sock.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{")
            assert sock.recv(1000).startswith(b"HTTP/1.1 408")


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path, body, alive", [(*CHAT, b": keep-alive\n\n"), (*TEXT, b": keep-alive\n\n"), (*TALK, b"event: ping\n")]
)
def test_a_stream_that_is_silent_says_that_it_is_alive(engine, path, body, alive):
    """Also if the engine says something that is not for the client, such as how far a prompt is."""
    go_on = threading.Event()

    def script(request: Any) -> Any:
        yield Started(HIT)
        while not go_on.is_set():
            yield Progress(1, 2)
            yield 0.02
        yield from (Text("at last"), Done("stop", 1, HIT))

    engine.script = script
    asked = {**body, "stream": True}
    with (
        listening(engine, Settings(keep_alive_seconds=0.05)) as url,
        httpx.stream("POST", url + path, json=asked) as response,
    ):
        assert response.headers["x-onefold-prompt-tokens"] == "10"
        seen = b""
        for chunk in response.iter_bytes():
            seen += chunk
            if seen.count(alive) >= 4:
                go_on.set()
    assert b"at last" in seen


def test_nothing_is_sent_before_the_engine_begins(client, engine):
    admitted = threading.Event()
    engine.script = lambda request: [admitted, *says("x")]
    url = urlsplit(str(client.base_url))
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    connection.request("POST", CHAT[0], json.dumps({**CHAT[1], "stream": True}))
    wait_until(lambda: engine.requests, "the request does not arrive")
    connection.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.sock.recv(1)
    admitted.set()
    connection.sock.settimeout(30)
    assert connection.getresponse().status == 200
    connection.close()


def test_others_are_served_meanwhile(client, engine):
    never = threading.Event()
    engine.script = lambda request: [never, *says("x")] if len(engine.requests) == 1 else says("x")
    with raw_request(str(client.base_url), *CHAT):
        wait_until(lambda: engine.requests, "the request does not arrive")
        assert client.post(CHAT[0], json=CHAT[1]).status_code == 200
        assert client.get("/health").status_code == 200
    wait_until(lambda: engine.cancelled == [1], "not cancelled")  # or the next test may be the one that sees it
    never.set()


# -- hanging up ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
@EACH
def test_whoever_hangs_up_is_cancelled(client, engine, path, body, stream, started):
    never = threading.Event()
    engine.script = lambda request: [*([Started(HIT), Text("a")] if started else []), never]
    sock = raw_request(str(client.base_url), path, {**body, "stream": stream})
    wait_until(lambda: engine.requests, "the request does not arrive")
    if stream and started:
        assert sock.recv(1000)
    else:
        time.sleep(0.05)
    assert engine.cancelled == []
    sock.close()
    wait_until(lambda: engine.cancelled == [1], "not cancelled")
    never.set()


def test_hanging_up_cancels_every_choice(client, engine):
    never = threading.Event()
    engine.script = lambda request: [Started(HIT), never]
    sock = raw_request(str(client.base_url), CHAT[0], {**CHAT[1], "n": 3})
    wait_until(lambda: len(engine.requests) == 3, "the requests do not arrive")
    sock.close()
    wait_until(lambda: sorted(engine.cancelled) == [1, 2, 3], "not cancelled")
    never.set()


def hold_up(engine: Any, method: str) -> tuple[threading.Event, threading.Event]:
    """Calls of this method wait. The first event says that one does, the second lets them go on."""
    called, go_on = threading.Event(), threading.Event()
    original = getattr(engine, method)

    def slowly(*args: Any, **kwargs: Any) -> Any:
        called.set()
        go_on.wait(30)
        return original(*args, **kwargs)

    setattr(engine, method, slowly)
    return called, go_on


def test_whoever_hangs_up_while_the_prompt_is_made_never_reaches_the_engine(client, engine, caplog):
    chat = engine.chat
    making, go_on = hold_up(engine, "chat")
    with caplog.at_level("INFO", "onefold.server"):
        sock = raw_request(str(client.base_url), *CHAT)
        assert making.wait(30)
        sock.close()
        wait_until(lambda: "hung up" in caplog.text, "it was not noticed")
    go_on.set()
    engine.chat = chat
    assert client.post(CHAT[0], json=CHAT[1]).status_code == 200  # the thread for prompts is free again
    assert len(engine.requests) == 1


def test_whoever_hangs_up_while_a_request_is_handed_over_is_cancelled(client, engine, caplog):
    handing, go_on = hold_up(engine, "submit")
    with caplog.at_level("INFO", "onefold.server"):
        sock = raw_request(str(client.base_url), CHAT[0], {**CHAT[1], "n": 3})
        assert handing.wait(30)
        sock.close()
        wait_until(lambda: "hung up" in caplog.text, "it was not noticed")
    go_on.set()
    wait_until(lambda: engine.cancelled == [1], "not cancelled")
    assert len(engine.requests) == 1


def test_too_many_requests_that_wait_to_be_read(client, engine, monkeypatch):
    monkeypatch.setattr("onefold.server.service.MOST_PREPARING", 1)
    making, go_on = hold_up(engine, "chat")
    with raw_request(str(client.base_url), *CHAT) as sock:
        assert making.wait(30)
        response = client.post(TALK[0], json=TALK[1])
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        go_on.set()
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_whoever_hangs_up_counts_until_the_thread_is_free(client, engine, monkeypatch):
    monkeypatch.setattr("onefold.server.service.MOST_PREPARING", 1)
    making, go_on = hold_up(engine, "chat")
    sock = raw_request(str(client.base_url), *CHAT)
    assert making.wait(30)
    sock.close()
    time.sleep(0.2)
    assert client.post(TALK[0], json=TALK[1]).status_code == 503
    go_on.set()
    wait_until(lambda: client.post(TALK[0], json=TALK[1]).status_code == 200, "the thread is not free again")


def test_a_client_that_does_not_read_is_hung_up_on(engine, caplog):
    def torrent(request: Any) -> Any:
        yield Started(HIT)
        while not engine.cancelled:
            yield Text("x" * 100_000)
            yield 0.001

    engine.script = torrent
    with listening(engine, Settings(send_timeout_seconds=0.3)) as url, caplog.at_level(logging.INFO):
        with raw_request(url, CHAT[0], {**CHAT[1], "stream": True}) as sock:
            wait_until(lambda: engine.cancelled == [1], "not cancelled")
            with pytest.raises((ConnectionError, TimeoutError)):  # what was still to be sent is not waited for
                while True:
                    if not sock.recv(1 << 20):
                        raise ConnectionResetError
        assert httpx.get(url + "/health").status_code == 200
    wait_until(lambda: "finish=cancelled" in caplog.text, "no line")
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_an_iterator_that_is_slow_but_read_is_not_hung_up_on(engine):
    slow = [step for _ in range(5) for step in (0.2, Text("a"))]
    engine.script = lambda request: [Started(HIT), *slow, Done("stop", 5, HIT)]
    with listening(engine, Settings(send_timeout_seconds=0.3)) as url:
        response = httpx.post(url + CHAT[0], json=CHAT[1], timeout=30)
    assert response.json()["choices"][0]["message"]["content"] == "aaaaa" and engine.cancelled == []


def test_connections_are_used_again(client, engine):
    for _ in range(5):
        assert client.post(CHAT[0], json=CHAT[1]).status_code == 200
        assert "[DONE]" in client.post(CHAT[0], json={**CHAT[1], "stream": True}).text
    time.sleep(0.05)
    assert engine.cancelled == []


# -- the end ---------------------------------------------------------------------------------------


def test_running_requests_are_given_time_to_end():
    engine = ScriptedEngine(lambda request: [Started(HIT), 0.5, Text("done"), Done("stop", 1, HIT)])
    answers: list[httpx.Response] = []
    with listening(engine, Settings(grace_seconds=20)) as url:
        asking = threading.Thread(target=lambda: answers.append(httpx.post(url + CHAT[0], json=CHAT[1], timeout=60)))
        asking.start()
        wait_until(lambda: engine.requests, "the request does not arrive")
    asking.join(30)
    assert "done" in answers[0].text and engine.cancelled == []


def test_requests_that_do_not_end_in_time_are_told_so():
    class Stopping(ScriptedEngine):
        """Tells those who wait, as the real one does."""

        def __init__(self) -> None:
            self.stopped = threading.Event()
            super().__init__(lambda request: [Started(HIT), Text("a"), self.stopped, Failed(EngineStopped("stopped"))])

        def stop(self, timeout_seconds: float | None = None) -> None:
            super().stop(timeout_seconds)
            self.stopped.set()

    engine = Stopping()
    answers: list[httpx.Response] = []

    def ask(stream: bool) -> None:
        answers.append(httpx.post(url + CHAT[0], json={**CHAT[1], "stream": stream}, timeout=30))

    with listening(engine, Settings(grace_seconds=0.2)) as url:
        asking = [threading.Thread(target=ask, args=(stream,)) for stream in (True, False)]
        for thread in asking:
            thread.start()
        wait_until(lambda: len(engine.requests) == 2, "the requests do not arrive")
    for thread in asking:
        thread.join(30)
    by_status = {answer.status_code: answer for answer in answers}
    assert '"engine_stopped"' in by_status[200].text and error_of(by_status[503])["code"] == "engine_stopped"


def test_the_name_of_a_conversation_is_repeated_and_logged(client, caplog):
    caplog.set_level(logging.INFO)
    body = {"messages": [{"role": "user", "content": "hi"}]}
    name = {"x-onefold-conversation": 'tea "for" two\tand caf\u00e9'.encode("latin-1")}
    found = client.post("/v1/chat/completions", json=body, headers=name)
    assert found.headers["x-onefold-conversation"] == 'tea "for" two%09and caf%C3%A9'
    assert 'conversation="tea %22for%22 two%09and' in caplog.text
    assert "x-onefold-conversation" not in client.post("/v1/chat/completions", json=body).headers
    assert found.headers["x-onefold-remote-tokens"] == "0"
