"""`onefold chat`: what is answered and told, commands, Ctrl-C and Ctrl-D, and what is said of what cannot be used."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from listening import listening, wait_until
from talking_model import THOUGHT, write_talking_model
from terminal import on_terminal, piped

import onefold
from onefold.cli import main
from onefold.cli.client import Client
from onefold.cli.conversation import Conversation, Turn
from onefold.cli.interrupts import Interrupts
from onefold.cli.lines import Lines
from onefold.cli.reading import Reading
from onefold.cli.screen import Screen
from onefold.engine.engine import Engine
from onefold.engine.request import Done, Hit, Reasoning, Started, Text
from onefold.errors import ConfigError, ServerError
from onefold.server.settings import Settings

GREEDY = ("--temperature", "0", "--max-tokens", "9")


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ONEFOLD_") and name != "ONEFOLD_BLAS"]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It thinks aloud, also without tools."""
    folder = write_talking_model(tmp_path_factory.mktemp("talking"))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("{{ '<|says|>' }}", "{{ '<|calls|>' }}"))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine(*onefold.load(model), model_id="tiny", budget="200MB") as made:
        yield made


class Said:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.answers = out.splitlines()
        self.told = err.splitlines()

    def reused(self) -> list[tuple[int, int]]:
        """Of each question: prompt tokens, and how many of them were reused."""
        found = [re.match(r"([\d,]+) prompt tokens, ([\d,]+) reused", line) for line in self.told]
        return [tuple(int(n.replace(",", "")) for n in m.groups()) for m in found if m]  # type: ignore[misc]


class Chatting:
    """`chat` with these lines on stdin, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, lines: tuple[str, ...] = ("hi",)) -> Said:
        self._monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        try:
            code = main(["chat", *arguments])
        except SystemExit as end:
            code = end.code  # type: ignore[assignment]
        return Said(code, *self._capsys.readouterr())


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chatting:
    return Chatting(monkeypatch, capsys)


# -- turns -----------------------------------------------------------------------------------------


def test_a_line_is_a_turn_and_stdout_has_the_answers_alone(chat: Chatting, model: Path, engine: Engine) -> None:
    lines = ("Who are you?", "", "And then?", "Why?")
    said = chat(str(model), "--budget", "100MB", "--system", "Be brief.", *GREEDY, lines=lines)
    assert said.code == 0 and len(said.out) == 3 * len("123456789\n")
    first, second, third = said.reused()
    assert first[1] == 0
    # a token is a character here: the prompt before and the answer, but for its last token, which was never run
    assert [second[1], third[1]] == [first[0] + 8, second[0] + 8]
    for line in said.told:
        assert re.search(r"first token after [\d.]+ s · 9 tokens, [\d.]+ per second · cut off by --max-tokens · ", line)
        assert re.search(r"KV [\d.]+ kB of 100\.0 MB$", line)
    with listening(engine) as url:
        there = chat("--url", url, "--system", "Be brief.", *GREEDY, lines=lines)
    assert there.code == 0 and there.out == said.out and there.reused() == said.reused()
    assert all(line.endswith("of 200.0 MB") for line in there.told)


@pytest.mark.parametrize("where", ["here", "there"])
def test_a_turn_that_is_taken_back_is_branched_off_from(
    chat: Chatting, model: Path, engine: Engine, where: str
) -> None:
    lines = ("/undo", "What is a tree?", "And a leaf?", "/undo", "And a root?", "/new", "What is a tree?")
    if where == "here":
        said = chat(str(model), *GREEDY, lines=lines)
    else:
        engine.clear()
        with listening(engine) as url:
            said = chat("--url", url + "/v1/", *GREEDY, lines=lines)
    assert said.code == 0 and said.answers[0] == said.answers[3]
    first, second, third, again = said.reused()
    assert second[1] == first[0] + 8
    assert third[1] == second[0] - len("leaf?]\n[assistant\n"), "up to the word that is another one"
    assert again == (first[0], first[0] - 1), "all but the token that an answer begins with"
    assert said.told[0] == "nothing to undo" and "undone: And a leaf?" in said.told
    assert "a new conversation" in said.told
    (branched,) = [line for line in said.told if "new from" in line]
    assert f"{third[1]} reused: new from token {third[1]}, in messages[2] (user) · " in branched


def test_commands(chat: Chatting, model: Path) -> None:
    lines = (
        "/help",
        "/nope at all",
        "/system",
        "/system You are a cat.",
        "/system",
        "hi",
        "/stats",
        "/quit",
        "unheard",
    )
    said = chat(str(model), *GREEDY, lines=lines)
    assert said.code == 0 and len(said.answers) == 1
    told = "\n".join(said.told)
    for name in ("new", "undo", "system", "stats", "help", "quit"):
        assert f"/{name}: " in told
    assert "unknown command /nope; /help lists" in told and "no system prompt is set" in told
    assert told.count("system prompt: You are a cat.") == 2
    (prompt, _), *_ = said.reused()
    assert prompt == len("[system\nYou are a cat.]\n[user\nhi]\n[assistant\n")  # a bracket is one token
    assert "generated tokens: 9" in told and f"prompt tokens: {prompt}, 0 of them reused" in told


def test_a_backslash_goes_on_and_a_path_is_no_command(chat: Chatting, model: Path) -> None:
    whole = chat(
        str(model),
        *GREEDY,
        lines=(
            "one\\",
            "two",
        ),
    ).reused()
    assert whole == [(len("[user\none\ntwo]\n[assistant\n"), 0)]
    unfinished = chat(str(model), *GREEDY, lines=("one\\",))
    assert unfinished.reused() == [(len("[user\none]\n[assistant\n"), 0)] and unfinished.code == 0
    path = chat(str(model), *GREEDY, lines=("/etc/hosts is what?",))
    assert path.reused() == [(len("[user\n/etc/hosts is what?]\n[assistant\n"), 0)]


def test_thoughts_are_no_part_of_what_a_pipe_gets(chat: Chatting, talking: Path) -> None:
    said = chat(str(talking), "--temperature", "0")
    assert THOUGHT in said.told and not any(THOUGHT in answer for answer in said.answers)
    assert said.answers[0].startswith("<tool_call>"), "no tools were offered, so it is only text"


def test_a_seed_says_the_same_again(chat: Chatting, model: Path) -> None:
    warm = ("--temperature", "1", "--max-tokens", "12")
    one, same, other = (chat(str(model), *warm, "--seed", seed).answers for seed in ("1", "1", "2"))
    assert one == same != other


def test_the_variables_of_serve(chat: Chatting, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": str(model), "BUDGET": "50MB", "MAX_TOKENS": "5", "TEMPERATURE": "0"}.items():
        monkeypatch.setenv(f"ONEFOLD_{name}", value)
    said = chat()
    assert said.code == 0 and len(said.answers[0]) == 5 and said.told[0].endswith(" of 50.0 MB")


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        (["/nowhere/at/all"], 2, 'there is no folder "/nowhere/at/all"'),
        (["demo", "--kv", "7"], 2, "kv must be"),
        (["demo", "--budget", "much"], 2, "argument --budget"),
        (["--temperature", "3"], 2, "at most 2"),
        (["--url", "nonsense"], 2, "http://127.0.0.1:8080"),
        (["--url", "http://127.0.0.1:99999"], 2, "not a valid server URL"),
        (["--url", "http://127.0.0.1:1", "--budget=1GB", "--kv", "8"], 2, "--budget and --kv"),
        (["--url", "http://127.0.0.1:1"], 1, "nothing listens at http://127.0.0.1:1"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    chat: Chatting, model: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, told: str
) -> None:
    monkeypatch.setattr("onefold.engine.demo_model.folder", lambda: model)
    said = chat(*arguments)
    assert said.code == code and said.answers == []
    (line,) = said.told
    assert line.startswith("onefold chat: ") and told in line


def test_a_server_that_wants_a_key(
    chat: Chatting, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with listening(engine, Settings(api_keys=("good",), grace_seconds=1.0)) as url:
        for key in ((), ("--api-key", "bad")):
            said = chat("--url", url, *key)
            assert said.code == 1 and len(said.told) == 1 and "(401)" in said.told[0]
        assert chat("--url", url, "--api-key", "good", *GREEDY).code == 0
        (tmp_path / "key").write_text("good\n")
        assert chat("--url", url, "--api-key-file", str(tmp_path / "key"), *GREEDY).code == 0
        monkeypatch.setenv("ONEFOLD_API_KEY", "good, another")
        assert chat("--url", url, *GREEDY).code == 0
        wrong = chat("--url", url, "another-model", *GREEDY)
        assert wrong.code == 1 and "another-model" in wrong.told[0] and "(404)" in wrong.told[0]


def test_a_question_that_fails_leaves_the_conversation_as_it_was(chat: Chatting, model: Path) -> None:
    lines = ("hello", "x" * 9000, "and?")
    said = chat(str(model), "--budget", "12MB", "--max-kv-size", "0", *GREEDY, lines=lines)
    assert said.code == 1 and len(said.answers) == 2
    assert any("has room for" in line for line in said.told)
    (first, _), last = said.reused()
    assert last == (len("[user\nhello]\n[assistant\n123456789]\n[user\nand?]\n[assistant\n"), first + 8)


# -- Ctrl-C and Ctrl-D -----------------------------------------------------------------------------


def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(model: Path) -> None:
    """With a seed: an answer by chance may begin with a token that its text would not be cut into again."""
    with on_terminal("chat", str(model), "--max-tokens", "1000000", "--budget", "200MB", "--seed", "1") as terminal:
        terminal.wait_for("Ctrl-D leaves")
        terminal.wait_for("> ")
        terminal.type("Tell me\\\n")
        terminal.wait_for(r"\. ")
        terminal.type("everything.\n")
        terminal.wait_for(r"\x1b\[2K[^\x1b]{20}")  # the answer has begun, where a sign of waiting was
        terminal.type("Zugzwang\n")  # is neither shown nor asked
        terminal.type("\x03")
        line = terminal.wait_for("stopped · KV .* of 200.0 MB")
        prompt = len("[user\nTell me\neverything.]\n[assistant\n")
        assert re.search(rf"\x1b\[2m{prompt} prompt tokens, 0 reused", line)
        terminal.wait_for("> ")
        terminal.type("Go on.\n")
        terminal.wait_for(r"\x1b\[2K[^\x1b]{20}")
        terminal.type("\x03")
        reused = re.search(r"([\d,]+) reused", terminal.wait_for("stopped · KV"))
        assert reused and int(reused[1].replace(",", "")) > prompt, "what was said was kept, and is known"
        assert "Zug" not in terminal.seen
        terminal.wait_for("> ")
        terminal.type("\x04")
        assert terminal.end() == 0


def test_a_terminal_that_closes_ends_the_chat_in_order(model: Path) -> None:
    with on_terminal("chat", str(model), "--max-tokens", "1000000", "--budget", "200MB") as terminal:
        terminal.wait_for("> ")
        terminal.type("Tell me everything.\n")
        terminal.wait_for(r"\x1b\[2K[^\x1b]{20}")
        terminal.close()
        assert terminal.process.wait(60) == 128 + signal.SIGHUP  # its own exit code, with the engine stopped before


@pytest.mark.parametrize("typed, code", [(True, 0), (False, 130)])
def test_an_interrupt_where_there_is_nothing_to_stop(
    chat: Chatting, model: Path, monkeypatch: pytest.MonkeyPatch, typed: bool, code: int
) -> None:
    """At a prompt it drops what was typed. On a pipe, where nobody is asked, it ends the chat."""
    lines = iter([KeyboardInterrupt(), "hi", None])

    def next_line(self: Lines) -> str | None:
        self.typed = typed
        line = next(lines)
        if isinstance(line, KeyboardInterrupt):
            raise line
        return line

    monkeypatch.setattr(Lines, "next", next_line)
    said = chat(str(model), *GREEDY)
    assert said.code == code and len(said.answers) == typed and ("Ctrl-D leaves" in said.told) == typed


def test_an_interrupt_is_heard_between_two_events() -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are heard on the main thread only")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    heard = []
    try:
        with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts:
            for event in interrupts.between(Text(word) for word in "abc"):
                heard.append(event)
                if event == Text("b"):
                    signal.raise_signal(signal.SIGINT)
                heard.append(event)
        assert heard == [Text(word) for word in "aabb"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_on_pipes_an_interrupt_stops_the_answer_that_a_server_gives(engine: Engine) -> None:
    before = engine.stats().cancelled
    with listening(engine) as url, piped("chat", "--url", url, "--max-tokens", "1000000") as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write("Tell me everything.\n")
        process.stdin.flush()
        assert len(process.stdout.read(20)) == 20
        process.send_signal(signal.SIGINT)
        told = process.stderr.readline()
        assert " · stopped · KV " in told
        wait_until(lambda: engine.stats().cancelled > before, "the server was not told")
        _, err = process.communicate("/stats\n", timeout=60)
        assert process.returncode == 0 and "model: tiny" in err


# -- parts -----------------------------------------------------------------------------------------


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_thoughts_are_dim_and_control_characters_never_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = FakeTerminal()
    monkeypatch.setattr("sys.stdout", shown)
    screen = Screen()
    screen.thought("hmm\x1b[2J")
    screen.answer("well\x07\x9b31m, \tyes\n")
    screen.end_answer()
    screen.note("dim \x1b]0;title\x07")
    screen.rows([("a", "[bold]b[/bold]\x1b[1m")])
    text = shown.getvalue()
    assert "\x1b[2;3mhmm[2J\x1b[0m\n" in text and re.search(r"well31m, +yes\n", text)
    assert "\x1b[2mdim ]0;title\x1b[0m" in text and "[bold]b[/bold][1m" in text
    assert "\x07" not in text and "\x9b" not in text and "\x1b[2J" not in text


def test_a_conversation_is_what_its_turns_are() -> None:
    talk = Conversation("Be brief.")
    talk.turns += [Turn("a", "b"), Turn("c", "d", "hm")]
    roles = [(m["role"], m["content"]) for m in talk.messages("e")]
    assert roles == [("system", "Be brief."), *zip(("user", "assistant") * 2, "abcd", strict=True), ("user", "e")]
    assert talk.messages("e")[4]["reasoning_content"] == "hm" and "reasoning_content" not in talk.messages("e")[2]
    assert talk.undo() == Turn("c", "d", "hm") and talk.undo() == Turn("a", "b") and talk.undo() is None
    assert talk.messages("e")[1:] == [{"role": "user", "content": "e"}]


def test_a_reading_counts_from_when_it_asked() -> None:
    times = iter([10.0, 10.5, 11.0, 12.5])
    reading, hit = Reading(lambda: next(times)), Hit(7, 3, 3)
    for event in (Started(hit), Reasoning("h"), Text("a"), Text("b"), Done("stop", 5, hit)):
        reading.add(event)
    assert (reading.text, reading.reasoning, reading.hit) == ("ab", "h", hit)
    assert reading.seconds_to_first == 0.5 and reading.tokens_per_second == 2.0 and reading.completion_tokens == 5
    stopped = Reading()
    stopped.add(Started(hit))
    assert stopped.seconds_to_first is None and stopped.tokens_per_second is None and stopped.completion_tokens == 0


# -- servers that are not ours, or not well --------------------------------------------------------


class Stub(BaseHTTPRequestHandler):
    status, body = 200, b""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = lambda self: self.send_error(404)  # noqa: E731

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[tuple[type[Stub], Client]]:
    handler = type("Handler", (Stub,), {})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield handler, Client(f"http://127.0.0.1:{server.server_port}", silence_seconds=30)
        server.shutdown()
        thread.join()


def sse(*chunks: Any) -> bytes:
    return b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks)


def delta(finish: str | None = None, **said: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def test_a_server_of_another_kind(stub: tuple[type[Stub], Client]) -> None:
    handler, client = stub
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    handler.body = b": hello\n\n" + sse(delta(reasoning="hm"), delta(content="a"), delta("stop"), {"usage": usage})
    found = list(client.chat({"messages": []}))
    assert found == [Reasoning("hm"), Text("a"), Done("stop", 2, Hit(9, 4, 4))]


@pytest.mark.parametrize(
    "status, body, told",
    [
        (200, sse(delta(content="a")), "closed the connection during the answer"),
        (200, sse(delta(content="a"), {"error": {"message": "no memory"}}), "no memory"),
        (200, b"data: {nonsense\n\n", "not JSON"),
        (503, b'{"error": {"message": "come again"}}', r"\(503\): come again"),
        (500, b"<html>", r"\(500\): <html>"),
        (500, b"", "does not say why"),
    ],
)
def test_a_server_that_fails(stub: tuple[type[Stub], Client], status: int, body: bytes, told: str) -> None:
    handler, client = stub
    handler.status, handler.body = status, body
    with pytest.raises(ServerError, match=told):
        list(client.chat({"messages": []}))
    with pytest.raises(ServerError, match=r"\(404\)"):
        client.get("/v1/cache")


def test_a_server_that_says_nothing_or_something_else() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(ServerError, match="does not respond"):
            Client(f"http://127.0.0.1:{silent.getsockname()[1]}", silence_seconds=0.1).get("/health")

        def greet() -> None:
            for _ in range(2):
                connection, _address = silent.accept()
                with connection:
                    connection.sendall(b"SSH-2.0\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(ServerError, match="invalid HTTP response"):
            Client(f"http://127.0.0.1:{silent.getsockname()[1]}", silence_seconds=10).get("/health")
        thread.join()


@pytest.mark.parametrize("url", ["", "127.0.0.1:8080", "ftp://127.0.0.1", "http://", "http://a:b@c", "http://h:x"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError):
        Client(url)
    with pytest.raises(ConfigError):
        Client("http://127.0.0.1:1", api_key="two\nlines")
