"""mlx-lm's own server, in this process, on a prompt cache that is given to it.

    with serving(LRUPromptCache(), model=folder) as server:
        server.post("/v1/chat/completions", {"messages": [...], "max_tokens": 8})

Everything that serves is mlx-lm's: its arguments, its `ModelProvider`, its `ResponseGenerator`, its `APIHandler`. Two
things are added, neither of which changes what is computed. One says when the server is at rest: it answers before it
puts what it made into the prompt cache, so an answer alone does not tell that the cache is up to date. The other holds
requests back until all of them are there, so that a batch is a batch on a slow machine, too.
"""

from __future__ import annotations

import http.client
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
from mlx_lm import server as mlx_lm_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
WAIT = 120.0
"""Seconds after which something is wrong rather than slow."""


class ServerError(Exception):
    """An answer whose status is not 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


class WatchedGenerator(mlx_lm_server.ResponseGenerator):
    """Knows when it is at rest, and can be held."""

    def __init__(self, provider: mlx_lm_server.ModelProvider, cache: Any) -> None:
        self.at_rest = threading.Event()
        self.open = threading.Event()
        self.open.set()
        self.taken = 0
        super().__init__(provider, cache)

    def _run_generate(self) -> None:
        try:
            super()._run_generate()
        finally:
            mx.clear_streams()  # what MLX leaves of a thread's streams can abort the process when it exits

    def _next_request(self, timeout: float | None = None) -> Any:
        if timeout is not None:  # mlx-lm waits for a request only when it has nothing left to do
            self.at_rest.set()
        self.open.wait()
        request = super()._next_request(timeout)
        if request is not None:
            self.at_rest.clear()
            self.taken += 1
        return request


class QuietHandler(mlx_lm_server.APIHandler):
    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""


class Server:
    """A client of the running server, and the way to what is behind it."""

    def __init__(self, generator: WatchedGenerator, cache: Any, port: int) -> None:
        self.generator = generator
        self.cache = cache
        self.port = port

    def post(self, path: str, body: dict[str, Any], *, settle: bool = True) -> dict[str, Any]:
        """The answer, by default after what it leaves behind is in the prompt cache."""
        with self._send(path, body) as response:
            answer = json.loads(response.read())
        if settle:
            self.settle()
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer; closing the iterator early hangs up."""
        with self._send(path, {**body, "stream": True}) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if line.startswith(b"data: ") and data != "[DONE]":
                    yield json.loads(data)

    def together(self, path: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The answers to requests of which none is begun before all are there, in their order."""
        generator = self.generator
        generator.open.clear()
        before = generator.taken
        with ThreadPoolExecutor(len(bodies)) as pool:
            try:
                asked = [pool.submit(self.post, path, body, settle=False) for body in bodies]
                give_up = time.monotonic() + WAIT
                while generator.taken - before + generator.requests.qsize() < len(bodies):
                    if time.monotonic() > give_up or any(a.done() for a in asked):
                        break  # a request was refused: its result says why
                    time.sleep(0.001)
            finally:
                generator.open.set()
            answers = [a.result() for a in asked]
        self.settle()
        return answers

    def chat(self, content: str, *, system: str | None = None, **options: Any) -> str:
        """One turn: the text of the answer to it."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": content})
        return text_of(self.post(CHAT, {"messages": messages, **options}))

    def settle(self) -> None:
        """Returns when nothing is being generated and everything generated is stored."""
        assert self.generator.at_rest.wait(WAIT), "the server does not come to rest"
        assert self.generator.is_healthy, "the generation thread died"

    @contextmanager
    def _send(self, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(response.status, response.read().decode())
            yield response
        finally:
            connection.close()


def text_of(answer: dict[str, Any]) -> str:
    """The text of a whole answer, or of one event of a stream."""
    choice = answer["choices"][0]
    return choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def model_provider(flags: Sequence[str]) -> mlx_lm_server.ModelProvider:
    """What mlx-lm's command makes of these arguments, with its own defaults for the others."""
    with (
        mock.patch.object(sys, "argv", ["mlx_lm.server", *flags]),
        mock.patch.object(logging, "basicConfig"),
        mock.patch.object(mlx_lm_server, "run") as run,
    ):
        mlx_lm_server.main()
    _, _, provider = run.call_args.args
    return provider


@contextmanager
def serving(cache: Any, *, model: Path, draft: Path | None = None, flags: Sequence[str] = ()) -> Iterator[Server]:
    """Serves `model` on a free port of the loopback interface until the block is left."""
    chosen = ["--model", str(model), *(["--draft-model", str(draft)] if draft else []), *flags]
    generator = WatchedGenerator(model_provider(chosen), cache)
    fingerprint = mlx_lm_server.get_system_fingerprint()

    def handler(*args: Any) -> QuietHandler:
        return QuietHandler(generator, *args, system_fingerprint=fingerprint)

    try:
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
            thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                server = Server(generator, cache, httpd.server_port)
                server.settle()  # the model is loaded
                yield server
            finally:
                httpd.shutdown()
                thread.join()
    finally:
        generator.open.set()
        generator.stop_and_join()
