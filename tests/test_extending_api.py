"""docs/extending.md, "A new HTTP API": a folder, which is a file here, and one line make an API like the others."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from example_api import SAY
from listening import listening
from scripted_engine import HIT, ScriptedEngine

from onefold.engine.request import Failed, Started
from onefold.errors import Busy
from onefold.server import registry


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def client(engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(registry, "APIS", (*registry.APIS, SAY))
    with listening(engine) as url, httpx.Client(base_url=url, timeout=30) as made:
        yield made


def test_its_paths_answer_whole_and_streamed_with_and_without_their_version(client, engine):
    assert client.post("/v1/say", json={"words": "so"}).json() == {"said": "hello", "tokens": 11}
    streamed = client.post("/say", json={"words": "so", "stream": True, "most": 3})
    assert streamed.text == 'data: {"more":"hello"}\n\ndata: {"end":"stop"}\n\n'
    assert streamed.headers["x-onefold-cached-tokens"] == "6"
    assert engine.requests[-1].max_tokens == 3
    assert client.post("/v1/say/length", json={"words": "four"}).json() == {"tokens": 4}


def test_its_errors_have_its_shape_wherever_they_come_from(client, engine):
    assert client.post("/v1/say", json={}).json() == {"sorry": "words: This field is required."}
    refused = client.post("/v1/say", json={"words": "", "loudly": True})
    assert refused.status_code == 400 and "no voice" in refused.json()["sorry"]
    for path, headers in (("/v1/say/nothing", {}), ("/nothing", {"x-say": "1"})):
        assert client.get(path, headers=headers).json() == {"sorry": f"There is nothing at {path!r}."}
    assert client.get("/v1/say", headers={"host": "evil.example"}).json()["sorry"].startswith("Host not allowed")
    assert set(client.get("/nothing").json()) == {"error"}
    engine.script = lambda request: [Started(HIT), 0.3, Failed(Busy("later", retry_after=1))]
    assert client.post("/v1/say", json={"words": "", "stream": True}).text == 'data: {"sorry":"later"}\n\n'


def test_it_is_in_the_document_and_in_the_metrics(client):
    document = client.get("/openapi.json").json()
    assert "requestBody" in document["paths"]["/v1/say"]["post"] and "SayRequest" in document["components"]["schemas"]
    client.post("/v1/say", json={"words": "so"})
    assert 'onefold_requests_total{endpoint="/v1/say",status="200"} 1.0' in client.get("/metrics").text
