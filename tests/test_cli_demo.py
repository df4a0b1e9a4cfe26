"""`onefold demo`: its figures are the server's, and however it ends, its server ends too."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from listening import listening, wait_until
from rich.console import Console
from terminal import piped

import onefold
from onefold.cli import demo_agents, demo_report, main, server_process
from onefold.cli.client import Client
from onefold.cli.demo_script import ROLES, RULES, role
from onefold.cli.reading import Reading
from onefold.engine.engine import Engine
from onefold.engine.request import Hit, Started
from onefold.errors import ServerError

NUMBER = r"([\d,]+)"


def numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern.replace("N", NUMBER), text)
    assert found, f"no {pattern!r} in {text}"
    return [int(n.replace(",", "")) for n in found.groups()]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


# -- what it shows ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_of_it_with_the_servers_own_figures(model: Path) -> None:
    arguments = ("demo", "--model", str(model), "--agents", "3", "--turns", "2", "--keep")
    with piped(*arguments) as process:
        assert process.stdout is not None
        shown = ""
        while "onefold chat --url" not in shown:
            line = process.stdout.readline()
            assert line, f"it ended: {shown}"
            shown += line
        (pid,) = numbers("process N", shown)
        (url,) = set(re.findall(r"http://127\.0\.0\.1:\d+", shown))
        stats = httpx.get(f"{url}/v1/cache").json()
        cache = stats["cache"]
        # the row has three columns: what it is, cold, warm
        row = "│ prompt tokens reused +│ +N of N \\(0%\\) │ +N of N \\(\\d+%\\) │"
        cold_cached, cold_prompt, warm_cached, warm_prompt = numbers(row, shown)
        warm_up = cache["tokens_requested"] - cold_prompt - warm_prompt
        assert cold_cached == 0 and 0 < warm_up < 50 and cache["tokens_cached"] == warm_cached
        assert stats["finished"] == 1 + 3 * 2 and warm_cached > 0.95 * warm_prompt
        computed = numbers("│ prompt tokens computed +│ +N │ +N │", shown)
        assert computed == [cold_prompt, warm_prompt - warm_cached]
        assert stats["prefilled_tokens"] == pytest.approx(warm_up + sum(computed), abs=7), "but for each last token"
        assert numbers("N tokens, each once", shown) == [cache["stored_tokens"]]
        held, copies = re.findall(r"(?:held by Onefold|a copy for each conversation) +│ +([\d.]+) MB", shown)
        assert float(held) == round(sum(cache["bytes"][n] for n in ("live", "stored", "checkpoint")) / 1e6, 1)
        (tokens,) = numbers("conversations: 3, with N tokens", shown)
        assert float(copies) == round(tokens * cache["token_bytes"] / 1e6, 1)
        assert re.search(r"so a copy each is +│ +([\d.]+) times", shown)
        assert len(re.findall(r"^(maps|sky|body): Hello", shown, re.MULTILINE)) == 3
        assert not gone(pid)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
        assert process.returncode == 0 and err == "" and f"(process {pid}).\nThe server is stopped." in rest
        assert gone(pid)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(*onefold.load(model), budget="200MB") as made:
        yield made


def test_one_alone_then_all_at_once(engine: Engine) -> None:
    news: list[demo_agents.News] = []
    with listening(engine) as url:
        played = demo_agents.play(Client(url), 3, 2, news.append)
    assert played.cold.cached_tokens == 0 and played.cold.agent == "maps" and len(played.warm) == 5
    done = [n for n in news if isinstance(n, demo_agents.Asked)]
    assert [played.cold, *played.warm] == done
    heard = {(n.agent, n.turn): "" for n in done}
    for n in news:
        if isinstance(n, demo_agents.Heard):
            heard[n.agent, n.turn] += n.text
    assert all(heard[n.agent, n.turn] == n.reading.text for n in done)
    assert all(n.reading.completion_tokens == demo_agents.ANSWER_TOKENS for n in done)
    assert {(n.agent, n.turn) for n in done} == {(r.desk, t) for r in ROLES[:3] for t in range(2)}
    assert [(n.agent, n.turn) for n in sorted(played.last, key=lambda n: n.agent)] == [
        (name, 1) for name in ("body", "maps", "sky")
    ]
    rules = len(RULES)  # a token is a character here
    assert all(n.cached_tokens > rules for n in played.warm)
    for n in played.warm:
        if n.turn:
            assert n.cached_tokens > rules + demo_agents.ANSWER_TOKENS, "its own answer, too"


def test_the_first_of_all_may_be_the_only_one(engine: Engine) -> None:
    screen = demo_report.console()
    with listening(engine) as url, screen.capture() as shown:
        played = demo_agents.play(Client(url), 1, 1, lambda _: None)
        demo_report.report(screen, played, Client(url).get("/v1/cache"))
    assert played.warm == () and "conversations: 1, " in shown.get()


def test_there_is_a_role_and_a_question_for_everyone() -> None:
    assert len({role(n).desk for n in range(32)}) == 32
    assert len({role(0).question(t) for t in range(6)}) == 6


def test_a_terminal_shows_who_says_what() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    reading = Reading()
    reading.add(Started(Hit(90, 80, 80)))
    with demo_report.stage(screen, ["maps", "sky"], 3) as hear:
        for piece in ("The capital\x1b[2J", " is Paris."):
            hear(demo_agents.Heard("maps", 1, piece))
        hear(demo_agents.Asked("sky", 0, "Why?", reading))
    shown = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "turn 2 of 3: The capital[2J is Paris." in shown
    assert "turn 1 of 3: 80 of 90 prompt tokens reused" in shown


# -- how it ends -----------------------------------------------------------------------------------

STUB = """#!{python} -S
import http.server, os, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{{"status": "ok"}}'
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        {post}
    def log_message(self, *_):
        pass
print("begun with", *sys.argv[1:], os.environ.get("ONEFOLD_API_KEY"), flush=True)
{begin}
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"OpenAI http://127.0.0.1:{{server.server_port}}/v1", flush=True)
server.serve_forever()
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Another program in the place of our server: much quicker to start, and it fails as it is told to."""

    def write(begin: str = "", post: str = "pass") -> None:
        file = tmp_path / "server"
        file.write_text(STUB.format(python=sys.executable, begin=begin, post=post))
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))

    return write


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ids of those that were started."""
    started: list[int] = []
    begin = server_process.ServerProcess.__init__

    def noted(self: Any, *given: Any) -> None:
        begin(self, *given)
        started.append(self.pid)

    monkeypatch.setattr(server_process.ServerProcess, "__init__", noted)
    return started


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--model", "/nowhere/at/all"]) == 1
    said = capsys.readouterr().err
    assert "ended before it was ready (exit code 2)" in said and 'there is no folder "/nowhere/at/all"' in said


@pytest.mark.parametrize(
    "how, told",
    [
        ({"begin": "print('last words'); sys.exit(3)"}, r"ended before it was ready \(exit code 3\)(.|\n)*last words"),
        ({"begin": "print('soon', flush=True); time.sleep(600)"}, "did not start within 1 seconds"),
        ({"post": "print('a bug', flush=True); os._exit(4)"}, "a bug"),
        ({"post": "self.send_error(500)"}, r"\(500\)"),
    ],
)
def test_a_server_that_fails(
    stub: Callable[..., None],
    servers: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    how: dict[str, str],
    told: str,
) -> None:
    stub(**how)
    if "soon" in how.get("begin", ""):
        monkeypatch.setattr(server_process, "START_SECONDS", 1.0)
    monkeypatch.setenv("ONEFOLD_API_KEY", "secret")
    assert main(["demo", "--model", "m"]) == 1
    said = capsys.readouterr().err
    assert re.search(told, said) and said.startswith("onefold demo: ")
    assert "begun with -m onefold serve m --host 127.0.0.1 --port 0 --grace 1 --until-eof None" in said
    assert len(servers) == 1 and gone(servers[0])


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_both(stub: Callable[..., None], servers: list[int], number: int, code: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are heard on the main thread only")
    stub(post="open(sys.argv[0] + '.asked', 'w').close(); time.sleep(600)")
    asked = Path(sys.executable + ".asked")

    def interrupt() -> None:
        wait_until(asked.exists, "nobody asked")
        os.kill(os.getpid(), number)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` and CI may have it ignored
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        found = main(["demo", "--model", "m"])
    except SystemExit as end:
        found = end.code  # type: ignore[assignment]
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)
        after = signal.signal(signal.SIGHUP, ignored)
    assert found == code and gone(servers[0])
    assert signal.getsignal(signal.SIGTERM) == after == signal.SIG_DFL


def test_the_options_of_serve_are_for_its_server(
    stub: Callable[..., None],
    servers: list[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub(begin="sys.exit(3)")
    monkeypatch.setenv("ONEFOLD_HOST", "0.0.0.0")  # its server has none of the environment
    assert main(["demo", "--model", "m", "--agents", "2", "--port", "8123", "--budget", "1GB"]) == 1
    assert "--grace 1 --until-eof --port 8123 --budget 1GB None" in capsys.readouterr().err
    assert main(["demo", "--host", "0.0.0.0"]) == 2 and "leave --host out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--bugdet", "1GB"])
    assert "onefold demo: " in (said := capsys.readouterr().err) and "did you mean --budget?" in said
    assert len(servers) == 1


def test_a_server_that_does_not_listen_to_reason_is_killed(
    stub: Callable[..., None], servers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(begin="import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", post="self.send_error(500)")
    monkeypatch.setattr(server_process, "STOP_SECONDS", 0.3)
    server = server_process.ServerProcess("m")
    server.wait_until_up(lambda _: None)
    server.stop()
    assert gone(server.pid) and server.pid == servers[0]
    with pytest.raises(ServerError, match="exit code -9"):
        server.wait()


@pytest.mark.parametrize("arguments", [["--agents", "0"], ["--turns", "many"], ["--agents", "33"], ["--nonsense"]])
def test_nonsense_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", *arguments])
    said = capsys.readouterr()
    assert end.value.code == 2 and said.out == "" and said.err.count("\n") == 1
