"""A client of a running server, on the standard library: its JSON, and an answer as the events that the engine gives.

- Whatever goes wrong is a ServerError that says in a sentence what and where.
- Closing an answer before its end closes the connection, which stops the answer on the server.

Servers that are not ours say less: then a hit is what `usage` tells of it.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

from onefold.engine.request import Done, Event, Finish, Hit, Reasoning, Started, Text
from onefold.errors import ConfigError, ServerError

CONNECT_SECONDS = 10.0
CHAT = "/v1/chat/completions"
FINISHES: Mapping[str, Finish] = {"stop": "stop", "length": "length", "tool_calls": "tool_calls"}


class Client:
    def __init__(self, url: str, *, api_key: str = "", silence_seconds: float | None = None) -> None:
        """`silence_seconds`: how long a server may send nothing; None is no limit. Raises
        ConfigError."""
        self.url = url.rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(self.url)
            self._port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a valid server URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ConfigError(f"a server URL looks like http://127.0.0.1:8080, got {url!r}")
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("an API key must be printable ASCII")
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._path = parts.path
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._silence_seconds = silence_seconds

    def get(self, path: str) -> dict[str, Any]:
        return self._call("GET", path)

    def delete(self, path: str) -> dict[str, Any]:
        return self._call("DELETE", path)

    def _call(self, method: str, path: str) -> dict[str, Any]:
        with self._send(method, path, None) as response:
            found = _json(response.read())
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}{path} did not answer with a JSON object")
        return found

    def chat(self, body: Mapping[str, Any]) -> Generator[Event, None, None]:
        """Yields Started, pieces and Done. Raises ServerError if the answer does not end."""
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        with self._send("POST", CHAT, json.dumps(asked).encode()) as response:
            hit = _hit(response.headers)
            if hit is not None:
                yield Started(hit)
            finish: str | None = None
            usage: Mapping[str, Any] = {}
            for chunk in _chunks(response):
                if error := chunk.get("error"):
                    raise ServerError(f"the server failed during the answer: {_said(error)}")
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices") or ():
                    yield from _pieces(choice.get("delta") or {})
                    finish = choice.get("finish_reason") or finish
        if finish is None:
            raise ServerError(f"{self.url} closed the connection during the answer")
        yield _done(finish, usage, hit)

    @contextmanager
    def _send(self, method: str, path: str, body: bytes | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(self._silence_seconds)
            connection.request(method, self._path + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(f"{self.url} refused the request ({response.status}): {_refusal(response.read())}")
            yield response
        except TimeoutError:
            raise ServerError(f"{self.url} does not respond") from None
        except ssl.SSLError as error:
            raise ServerError(f"TLS connection to {self.url} failed: {error.reason or error}") from None
        except ConnectionRefusedError:
            raise ServerError(f"nothing listens at {self.url}") from None
        except OSError as error:
            raise ServerError(f"{self.url} cannot be reached: {error.strerror or error}") from None
        except http.client.HTTPException as error:
            raise ServerError(f"{self.url} sent an invalid HTTP response: {type(error).__name__}") from None
        finally:
            connection.close()


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects of a stream of events. Skips comments, which keep the stream alive."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        found = _json(data)
        if isinstance(found, dict):
            yield found


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(f"the server's answer is not JSON: {data[:80]!r}") from None


def _pieces(delta: Mapping[str, Any]) -> Iterator[Event]:
    if thought := delta.get("reasoning_content") or delta.get("reasoning"):
        yield Reasoning(str(thought))
    if text := delta.get("content"):
        yield Text(str(text))


def _hit(headers: http.client.HTTPMessage) -> Hit | None:
    """Returns the hit from the headers; None if the server is not Onefold."""
    numbers = [headers.get(f"x-onefold-{name}-tokens", "") for name in ("prompt", "matched", "cached")]
    if not all(number.isdigit() for number in numbers):
        return None
    prompt, matched, cached = map(int, numbers)
    reason, diverged = (unquote(headers.get(f"x-onefold-{name}", "")) for name in ("reason", "diverged"))
    return Hit(prompt, matched, cached, reason, diverged)


def _done(finish: str, usage: Mapping[str, Any], hit: Hit | None) -> Done:
    prompt, completion = (int(usage.get(f"{name}_tokens") or 0) for name in ("prompt", "completion"))
    cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    thought = int((usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0)
    found = hit or Hit(prompt, cached, cached)
    return Done(FINISHES.get(finish, "stop"), completion, found, reasoning_tokens=thought)


def _refusal(body: bytes) -> str:
    try:
        return _said(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace").strip() or "it does not say why"


def _said(error: Any) -> str:
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)
