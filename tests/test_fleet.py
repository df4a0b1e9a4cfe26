"""`examples/fleet`: two servers and Redis behind nginx, with the example's own configuration and other ports.

The first half has nginx before two upstreams that answer what a test says, the second half before `onefold serve`.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from redis_server import DEADLINE, RedisServer, free_port

import onefold
from onefold.engine.engine import Engine
from onefold.engine.request import Request, Sampling, Text

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "fleet" / "run.py")))
CHAT = "/v1/chat/completions"
NAMES = [f"conversation {i}" for i in range(64)]
"""As many that it is certain that each server has some of them."""

needs_nginx = pytest.mark.system("nginx")
needs_all = pytest.mark.system("nginx", "redis-server")


def until(true: Callable[[], Any], otherwise: str) -> Any:
    """Returns what `true` returns when it is true."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if found := true():
            return found
        time.sleep(0.02)
    raise AssertionError(otherwise)


@contextmanager
def behind_nginx(folder: Path, servers: list[int]) -> Iterator[httpx.Client]:
    """nginx with the example's configuration before servers at these ports, and a client of it."""
    folder.mkdir(exist_ok=True)
    port = free_port()
    (folder / "nginx.conf").write_text(EXAMPLE.configuration(port, servers))
    nginx = EXAMPLE.Running("nginx", EXAMPLE.nginx_command(folder), folder, port=port)
    with EXAMPLE.running(nginx), httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE) as client:
        nginx.wait()
        yield client


def servers_of(answer: httpx.Response) -> list[int]:
    """The ports of the servers that were tried, in their order."""
    return [int(address.rpartition(":")[2]) for address in answer.headers["x-fleet-server"].split(", ")]


def server_of(answer: httpx.Response) -> int:
    """The port of the server that answered, and that was the only one asked."""
    (port,) = servers_of(answer)
    return port


# -- what nginx does, before upstreams that do as they are told ------------------------------------


class Upstream(ThreadingHTTPServer):
    """Answers each request with `status`, and counts them. The status 0 is no answer, 1 one that breaks off."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.asked, self.port = 200, 0, int(self.server_address[1])
        self.received = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()


class Handler(BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """No line for each request."""

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        assert len(self.rfile.read(length)) == length
        self.server.asked += 1
        self.close_connection = True
        if self.server.status == 0:
            return
        self.send_response(max(200, self.server.status))
        self.send_header("retry-after", "7")
        self.send_header("seen-host", self.headers["host"])
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        with suppress(ConnectionError):  # nginx closes the connection if it repeats the request
            self.wfile.write(b"5\r\nfirst\r\n")
            if self.server.status != 1:
                self.server.go_on.wait(DEADLINE)
                self.wfile.write(b"0\r\n\r\n")


@pytest.fixture
def upstreams() -> Iterator[list[Upstream]]:
    made = [Upstream(), Upstream()]
    threads = [threading.Thread(target=one.serve_forever, args=(0.01,)) for one in made]
    for thread in threads:
        thread.start()
    yield made
    for one, thread in zip(made, threads, strict=True):
        one.shutdown()
        thread.join()
        one.server_close()


@pytest.fixture
def proxy(tmp_path: Path, upstreams: list[Upstream]) -> Iterator[httpx.Client]:
    with behind_nginx(tmp_path / "nginx", [one.port for one in upstreams]) as client:
        yield client


@pytest.fixture
def home(proxy: httpx.Client, upstreams: list[Upstream]) -> tuple[Upstream, Upstream]:
    """The upstream that has the conversation of an empty request, and the other one."""
    port = server_of(proxy.post(CHAT, json={}))
    for one in upstreams:
        one.asked = 0
    own, other = sorted(upstreams, key=lambda one: one.port != port)
    return own, other


def in_header(name: str) -> dict[str, Any]:
    return {"headers": {"x-onefold-conversation": name}, "json": {"user": "the same"}}


def in_body(field: str) -> Callable[[str], dict[str, Any]]:
    return lambda name: {"json": {"messages": ["hi"], field: name}}


def claude(name: str) -> dict[str, Any]:
    """`metadata` as Claude Code fills it: a text that is JSON itself, of which only the end differs."""
    about = json.dumps({"device_id": "d" * 64, "session_id": name})
    return {"json": {"messages": [{"role": "user", "content": "hi"}], "metadata": {"user_id": about}}}


def long(name: str) -> dict[str, Any]:
    return {"json": {"messages": ["x" * 1_000_000], "prompt_cache_key": name}}


def chunked(name: str) -> dict[str, Any]:
    return {"content": iter([b'{"messages": ["', b"x" * 100_000, b'"], "user": ', json.dumps(name).encode(), b"}"])}


def with_key(name: str) -> dict[str, Any]:
    return {"json": {}, "headers": {"authorization": f"Bearer {name}"}}


WAYS = {
    "header": in_header,
    "prompt_cache_key": in_body("prompt_cache_key"),
    "user": in_body("user"),
    "metadata": claude,
    "long": long,
    "chunked": chunked,
    "API key": with_key,
}


@needs_nginx
@pytest.mark.parametrize("way", WAYS)
def test_what_names_a_conversation_keeps_it_on_one_server(way: str, proxy: httpx.Client) -> None:
    names = NAMES[:24] if way == "long" else NAMES
    first, again = ([server_of(proxy.post(CHAT, **WAYS[way](name))) for name in names] for _ in range(2))
    assert first == again
    assert len(set(first)) == 2


@needs_nginx
def test_the_first_name_counts_wherever_it_is(proxy: httpx.Client) -> None:
    def at(**body: Any) -> list[int]:
        return [server_of(proxy.post(CHAT, json={k: v.format(name) for k, v in body.items()})) for name in NAMES]

    assert at(prompt_cache_key="{}") == at(user="u", prompt_cache_key="{}") == at(prompt_cache_key="{}", user="x {}")


@needs_nginx
def test_text_that_quotes_a_name_and_roles_are_none(proxy: httpx.Client) -> None:
    def said(name: str) -> dict[str, Any]:
        quoted = json.dumps({"user": name, "prompt_cache_key": name, "metadata": {"user_id": name}})
        return {"messages": [{"role": "user", "content": quoted}], "tools": [{"properties": {"user": {"type": name}}}]}

    assert len({server_of(proxy.post(CHAT, json=said(name))) for name in NAMES}) == 1


@needs_nginx
def test_the_servers_see_the_host_that_the_client_named(proxy: httpx.Client) -> None:
    assert proxy.post(CHAT, json={}, headers={"host": "fleet.example"}).headers["seen-host"] == "fleet.example"


@needs_nginx
@pytest.mark.parametrize("status", [503, 0])
def test_a_request_that_was_not_answered_is_repeated_once(
    status: int, proxy: httpx.Client, home: tuple[Upstream, Upstream]
) -> None:
    home[0].status = status
    for _ in range(3):
        answer = proxy.post(CHAT, json={})
        assert answer.status_code == 200 and servers_of(answer) == [one.port for one in home]
    assert [one.asked for one in home] == [3, 3]
    assert server_of(proxy.post(CHAT, json={})) == home[1].port  # the first one is left alone for a while


@needs_nginx
def test_if_both_servers_are_full_the_client_is_told_by_one(
    proxy: httpx.Client, home: tuple[Upstream, Upstream]
) -> None:
    for one in home:
        one.status = 503
    answer = proxy.post(CHAT, json={})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "7" and answer.text == "first"
    assert [one.asked for one in home] == [1, 1]


@needs_nginx
def test_without_a_server_nginx_says_so_in_json(proxy: httpx.Client, home: tuple[Upstream, Upstream]) -> None:
    for one in home:
        one.status = 0
    answer = proxy.post(CHAT, json={})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "no_server"
    assert [one.asked for one in home] == [1, 1]


@needs_nginx
@pytest.mark.parametrize("status", [400, 401, 404, 413, 429, 500])
def test_other_answers_are_the_client_s(status: int, proxy: httpx.Client, home: tuple[Upstream, Upstream]) -> None:
    home[0].status = status
    for _ in range(3):  # nor is the server taken for a dead one
        answer = proxy.post(CHAT, json={})
        assert answer.status_code == status and answer.text == "first" and server_of(answer) == home[0].port
    assert [one.asked for one in home] == [3, 0]


@needs_nginx
def test_an_answer_that_has_begun_is_not_repeated(proxy: httpx.Client, home: tuple[Upstream, Upstream]) -> None:
    home[0].status = 1
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.post(CHAT, json={})
    assert [one.asked for one in home] == [1, 0]


@needs_nginx
def test_a_stream_is_passed_on_as_it_comes(proxy: httpx.Client, home: tuple[Upstream, Upstream]) -> None:
    home[0].go_on.clear()
    with proxy.stream("POST", CHAT, json={}) as stream:
        chunks = stream.iter_bytes()
        assert next(chunks) == b"first"  # the upstream has not ended yet
        home[0].go_on.set()
        assert [*chunks] == []


@needs_nginx
def test_a_body_beyond_the_limit_reaches_no_server(proxy: httpx.Client, home: tuple[Upstream, Upstream]) -> None:
    assert proxy.post(CHAT, content=b" " * ((32 << 20) + 1)).status_code == 413
    assert [one.asked for one in home] == [0, 0]


def test_the_recipe_must_have_the_ports_that_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = EXAMPLE.configuration(8082, [8080, 8081])  # none is replaced twice
    assert re.findall(r"127\.0\.0\.1:(\d+)", text) == ["8080", "8081", "8082"]
    other = tmp_path / "nginx.conf"
    other.write_text(text + "listen 127.0.0.1:8080;")
    monkeypatch.setitem(EXAMPLE.configuration.__globals__, "RECIPE", other)
    with pytest.raises(ValueError, match=r"nginx\.conf must have each"):
        EXAMPLE.configuration(1, [2, 3])


# -- two servers and a store -----------------------------------------------------------------------


class Fleet:
    """A Redis, two servers and nginx. Processes that were killed are started again by `whole`."""

    def __init__(self, folder: Path, model: Path, held: ExitStack) -> None:
        self.redis = RedisServer(folder)
        held.callback(lambda: self.redis.stop())
        self._folder = folder
        options = ["--budget", "64MB", "--temperature", "0", "--remote-deadline", "30", "--max-tokens", "8"]
        self._servers = {}
        for port in EXAMPLE.free_ports(2):
            command = EXAMPLE.server_command(str(model), port, self.redis.url, *options)
            server = EXAMPLE.Running(f"server {port}", command, folder, f"http://127.0.0.1:{port}")
            self._servers[port] = held.enter_context(EXAMPLE.running(server))
        for server in self._servers.values():
            server.wait()
        self.client = held.enter_context(behind_nginx(folder / "nginx", list(self._servers)))

    @property
    def ports(self) -> set[int]:
        return set(self._servers)

    def ask(self, name: str, messages: list[dict[str, str]], **options: Any) -> httpx.Response:
        answer = self.client.post(CHAT, headers={"x-onefold-conversation": name}, json={"messages": messages} | options)
        assert answer.status_code == 200, answer.text
        return answer

    def stats(self, port: int) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"http://127.0.0.1:{port}/v1/cache", timeout=DEADLINE).json()
        return found

    def wait_written(self, port: int) -> None:
        def written() -> bool:
            remote = self.stats(port)["cache"]["remote"]
            return bool(remote["spilled_tokens"] and not remote["pending"])

        until(written, "nothing was written to the store")

    def kill(self, port: int) -> None:
        process = self._servers[port].process
        process.kill()
        process.wait(DEADLINE)

    def start(self, port: int) -> None:
        self._servers[port].start()
        self._servers[port].wait()

    def whole(self) -> None:
        """Starts what is dead, and waits until nginx uses it."""
        if self.redis.process.poll() is not None:
            self.redis = RedisServer(self._folder, port=self.redis.port)
        for port, server in self._servers.items():
            if server.process.poll() is not None:
                self.start(port)
        until(self._uses_all, "nginx does not use both servers")

    def _uses_all(self) -> bool:
        asked = (self.ask(name, [said("hi")], max_tokens=1) for name in NAMES)
        return {tuple(servers_of(answer)) for answer in asked} == {(port,) for port in self.ports}


def said(text: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": text}


def question(name: str) -> dict[str, str]:
    """Longer than three records, and different from its first character on."""
    return said(f"{name}: " + "one two three four five six seven eight nine ten " * 18)


def text_of(answer: httpx.Response) -> str:
    found: str = answer.json()["choices"][0]["message"]["content"]
    return found


def remote_tokens(answer: httpx.Response) -> int:
    return int(answer.headers["x-onefold-remote-tokens"])


@pytest.fixture(scope="module")
def running_fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with pytest.MonkeyPatch.context() as patched, ExitStack() as held:
        for name in [name for name in os.environ if name.startswith("ONEFOLD_") and name != "ONEFOLD_BLAS"]:
            patched.delenv(name)
        patched.setenv("ONEFOLD_CACHE_DIR", str(folder / "cache"))
        patched.setenv("MLX_DISABLE_COMPILE", "1")  # as in conftest.py
        yield Fleet(folder, model, held)


@pytest.fixture
def fleet(running_fleet: Fleet) -> Fleet:
    running_fleet.whole()
    return running_fleet


@pytest.fixture(scope="module")
def alone(model: Path) -> Iterator[Callable[..., str]]:
    """What a single server without a store says."""
    with Engine(*onefold.load(model), budget="64MB", defaults=Sampling(temperature=0)) as engine:

        def answer(messages: list[dict[str, str]], max_tokens: int = 8) -> str:
            asked = Request(prompt=engine.chat(messages), max_tokens=max_tokens, sampling=Sampling(temperature=0))
            return "".join(event.text for event in engine.ask(asked) if isinstance(event, Text))

        yield answer


@needs_all
@pytest.mark.slow
def test_turns_of_a_conversation_meet_their_own_server(fleet: Fleet) -> None:
    seen = set()
    for name in NAMES:
        first = fleet.ask(name, [question(name)])
        turn = [question(name), said(text_of(first), "assistant"), said("And then?")]
        second = fleet.ask(name, turn)
        assert server_of(second) == server_of(first)
        assert int(second.headers["x-onefold-cached-tokens"]) >= first.json()["usage"]["prompt_tokens"]
        assert remote_tokens(second) == 0
        seen.add(server_of(first))
        if seen == fleet.ports:
            return
    raise AssertionError(f"all conversations went to {seen}")


@needs_all
@pytest.mark.slow
def test_a_client_that_hangs_up_frees_its_row(fleet: Fleet) -> None:
    body = {"messages": [question("gone")], "max_tokens": 1_000_000, "stream": True}
    with fleet.client.stream("POST", CHAT, json=body) as stream:
        own = server_of(stream)
        until(lambda: fleet.stats(own)["decoding"], "it does not decode")
    until(lambda: not fleet.stats(own)["decoding"], "the server still computes the answer")


@needs_all
@pytest.mark.slow
def test_a_conversation_outlives_its_server(fleet: Fleet, alone: Callable[..., str]) -> None:
    name = "a conversation whose server is killed"
    turns = [question(name)]
    first = fleet.ask(name, turns)
    own = server_of(first)
    (other,) = fleet.ports - {own}
    fleet.wait_written(own)
    turns += [said(text_of(first), "assistant"), said("And then?")]
    body = {"messages": turns, "max_tokens": 1_000_000, "stream": True}
    headers = {"x-onefold-conversation": name}
    with (
        pytest.raises(httpx.RemoteProtocolError),  # the answer that it was giving is lost
        fleet.client.stream("POST", CHAT, headers=headers, json=body) as stream,
    ):
        assert server_of(stream) == own
        for i, _ in enumerate(stream.iter_lines()):
            if i == 6:
                fleet.kill(own)
    second = fleet.ask(name, turns)  # and the next request is answered, by the other server
    assert servers_of(second)[-1] == other
    assert remote_tokens(second) >= 496 and text_of(second) == alone(turns)
    turns += [said(text_of(second), "assistant"), said("And after that?")]
    third = fleet.ask(name, turns)
    assert servers_of(third)[-1] == other and text_of(third) == alone(turns)
    assert int(third.headers["x-onefold-cached-tokens"]) >= second.json()["usage"]["prompt_tokens"]
    fleet.wait_written(other)

    fleet.start(own)
    turns += [said(text_of(third), "assistant"), said("In short?")]
    back = until(lambda: servers_of(a := fleet.ask(name, turns)) == [own] and a, "its server is not used again")
    assert text_of(back) == alone(turns)
    assert remote_tokens(back) >= 496


@needs_all
@pytest.mark.slow
def test_without_the_store_every_request_is_still_answered(fleet: Fleet, alone: Callable[..., str]) -> None:
    fleet.redis.stop()
    seen = set()
    for name in ("the store is gone " + name for name in NAMES):
        answer = fleet.ask(name, [question(name)])
        assert text_of(answer) == alone([question(name)])
        seen.add(server_of(answer))
        if seen == fleet.ports:
            return
    raise AssertionError(f"all conversations went to {seen}")


@needs_all
@pytest.mark.slow
def test_a_whole_answer_that_a_killed_server_owes_is_given_by_the_other(
    fleet: Fleet, alone: Callable[..., str]
) -> None:
    name = "a conversation whose answer takes long"
    own = server_of(fleet.ask(name, [said("hi")], max_tokens=1))
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(fleet.ask(name, [question(name)], max_tokens=300)))
    asking.start()
    until(lambda: fleet.stats(own)["decoding"], "it does not decode")
    fleet.kill(own)
    asking.join(DEADLINE)
    (answer,) = answers
    assert servers_of(answer) == [own, *(fleet.ports - {own})]
    assert text_of(answer) == alone([question(name)], 300)


# -- the program -----------------------------------------------------------------------------------


@needs_all
@pytest.mark.slow
def test_the_program_starts_all_of_it_and_ends_it(model: Path, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "fleet" / "run.py"), str(model), "--port", str(port)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "src"), "MLX_DISABLE_COMPILE": "1"}
    with subprocess.Popen(
        [*command, "--budget", "64MB"], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            shown = [process.stdout.readline() for _ in range(5)]
            assert f"http://127.0.0.1:{port}/v1" in shown[0], process.stderr.read()
            found = [re.fullmatch(r"server-\d  (\S+)  process (\d+)\n", line) for line in shown[3:]]
            (one, first), (two, second) = [(match[1], int(match[2])) for match in found if match]
            body = {"messages": [said("hi")], "max_tokens": 2}
            answer = httpx.post(f"http://127.0.0.1:{port}{CHAT}", json=body, timeout=DEADLINE)
            assert answer.status_code == 200 and f"http://{answer.headers['x-fleet-server']}" in (one, two)
            os.kill(first, signal.SIGKILL)
            assert process.stdout.readline() == "server-1 has ended and is started again\n"
            assert one in process.stdout.readline()
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0
            assert process.stderr.read() == ""
            for url in (one, two, f"http://127.0.0.1:{port}"):
                with pytest.raises(httpx.ConnectError):
                    httpx.get(f"{url}/health")
            with pytest.raises(ProcessLookupError):
                os.kill(second, 0)
            assert not [*tmp_path.iterdir()]
        finally:
            if process.poll() is None:
                process.terminate()
