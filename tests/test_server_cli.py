"""`onefold serve`: flags and their variables, one line for what is wrong, and an end with exit code 0."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from effort import quick
from terminal import on_terminal
from tiny import tiny

import onefold
from onefold.cache.tiers.disk.tier import DiskStats
from onefold.cli import flags, main, serve
from onefold.server.running import Server

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = [{"role": "user", "content": "Go on."}]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ONEFOLD_") and name != "ONEFOLD_BLAS"]:
        monkeypatch.delenv(name)


def given(*arguments: str) -> Any:
    return serve.parser().parse_args(list(arguments))


def wrong(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that is said of arguments that cannot be used."""
    try:
        code = main(["serve", *arguments])
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


# -- flags -----------------------------------------------------------------------------------------


def test_defaults():
    settings = serve._settings(given("m"))
    assert (settings.host, settings.port, settings.body_limit) == ("127.0.0.1", 8080, 32 << 20)
    assert settings.api_keys == settings.cors_origins == settings.aliases == () and not settings.namespace_per_key
    assert dict(settings.sampling) == {} and settings.max_tokens is None
    assert (settings.keep_alive_seconds, settings.send_timeout_seconds, settings.grace_seconds) == (5, 60, 5)


def test_the_help_has_groups_and_spells_kv_out(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    at = [said.index(f" {title}: --") for title in flags.GROUPS]
    assert at == sorted(at) and said.startswith("usage: onefold serve MODEL [options] Serves")
    assert said.index("keys and values") < said.index("KV ", said.index("keys and values"))


def test_every_flag_has_a_variable_that_the_help_names(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serve", "--help"])
    assert end.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for flag in flags.FLAGS:
        assert f"--{flag.name}" in said and f"[{flag.variable}]" in said
    assert "[ONEFOLD_MODEL]" in said


def test_variables_and_flags_that_win(monkeypatch):
    monkeypatch.setenv("ONEFOLD_MODEL", "from/environment")
    monkeypatch.setenv("ONEFOLD_PORT", "9000")
    monkeypatch.setenv("ONEFOLD_API_KEY", "one, two")
    monkeypatch.setenv("ONEFOLD_NAMESPACE_PER_KEY", "1")
    monkeypatch.setenv("ONEFOLD_TEMPERATURE", "0.5")
    monkeypatch.setenv("ONEFOLD_MAX_TOKENS", "1,000")
    monkeypatch.setenv("ONEFOLD_CORS_ORIGIN", "")
    read = given()
    settings = serve._settings(read)
    assert read.model == "from/environment" and settings.port == 9000
    assert settings.api_keys == ("one", "two") and settings.namespace_per_key and settings.cors_origins == ()
    assert dict(settings.sampling) == {"temperature": 0.5} and settings.max_tokens == 1000
    keys = ["--api-key", "a,b", "--api-key", "c", "--no-namespace-per-key"]
    read = given("other", "--port", "1", *keys, "--top-p", "0.9")
    settings = serve._settings(read)
    assert read.model == "other" and settings.port == 1
    assert settings.api_keys == ("a,b", "c") and not settings.namespace_per_key
    assert dict(settings.sampling) == {"temperature": 0.5, "top_p": 0.9}


def test_keys_in_a_file(tmp_path, monkeypatch, caplog):
    file = tmp_path / "keys"
    file.write_text("# of the team\none\n\n  two \none\n")
    file.chmod(0o600)
    assert serve._settings(given("m", "--api-key-file", str(file))).api_keys == ("one", "two")
    assert serve._settings(given("m", "--api-key-file", str(file), "--api-key", "b")).api_keys == ("b", "one", "two")
    monkeypatch.setenv("ONEFOLD_API_KEY", "three")
    monkeypatch.setenv("ONEFOLD_API_KEY_FILE", str(file))
    assert serve._settings(given("m")).api_keys == ("three", "one", "two")
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert serve._settings(given("m")).api_keys == ("three", "one", "two")
    assert caplog.text == ""
    for mode in (0o640, 0o604):
        caplog.clear()
        file.chmod(mode)
        serve._settings(given("m"))
        assert "chmod 600" in caplog.text and "two" not in caplog.text


@pytest.mark.parametrize(
    "content, said", [(None, "No such file"), (b"\n# none\n", "no API key"), (b"\xff", "it is not text")]
)
def test_a_file_without_keys_is_one_line(tmp_path, capsys, content, said):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    told = wrong(capsys, "m", "--api-key-file", str(file))
    assert said in told and str(file) in told
    told = wrong(capsys, "m", "--api-key-file", str(tmp_path))
    assert f'cannot read the API keys in "{tmp_path}": Is a directory' in told
    told = wrong(capsys, "m", "--api-key-file", "~nobody-of-this-name/keys")
    assert 'cannot read the API keys in "~nobody-of-this-name/keys": No such file' in told


@pytest.mark.parametrize(
    "arguments, bound",
    [
        ([], (131072, 4096)),
        (["--max-kv-size", "0"], (None, 0)),
        (["--max-kv-size", "1000"], (1000, 500)),
        (["--max-kv-size", "1000", "--keep", "7"], (1000, 7)),
        (["--kv", "8"], (131072, 4096)),
        (["--kv", "4", "--max-kv-size", "1000"], (1000, 500)),
    ],
)
def test_what_the_engine_is_made_with(monkeypatch, arguments, bound):
    made: dict[str, Any] = {}
    monkeypatch.setattr("onefold.load", lambda model: ("model", "tokenizer"))
    monkeypatch.setattr("onefold.engine.engine.Engine", lambda *given, **options: made.update(options))
    serve._engine(given("m", "--budget", "1GB", "--max-batch", "3", "--max-queue", "5", *arguments))
    assert (made["max_kv_size"], made["keep"]) == bound
    assert made["model_id"] == "m" and made["budget"] == "1GB" and made["max_queue"] == 5
    assert made["limits"].rows == 3 and made["limits"].queue_timeout_seconds == 600


def test_a_model_that_takes_no_bound_is_served_without_the_default_one(monkeypatch, model, caplog):
    tokenizer = onefold.load(model)[1]
    own = tiny("deepseek_v41")
    monkeypatch.setattr("onefold.load", lambda model: (own, tokenizer))
    engine = serve._engine(given("m", "--budget", "64MB"))
    try:
        assert "running without --max-kv-size: max_kv_size=131072 cannot bound this model" in caplog.text
    finally:
        engine.stop()
    with pytest.raises(onefold.ConfigError, match="cache class LayerCache"):
        serve._engine(given("m", "--budget", "64MB", "--max-kv-size", "1000"))


# -- what is wrong ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "no model given"),
        (["m", "--port", "x"], "--port"),
        (["m", "--port", "70000"], "at most 65535"),
        (["m", "--budget", "much"], "cannot read 'much' as a size"),
        (["m", "--temperature", "3"], "--temperature"),
        (["m", "--top-p", "nan"], "--top-p"),
        (["m", "--max-batch", "0"], "--max-batch"),
        (["m", "--max-tokens", "-1"], "--max-tokens"),
        (["m", "--keep-alive", "0"], "--keep-alive"),
        (["m", "--log-level", "loud"], "debug, info, warning, error"),
        (["m", "--nonsense"], "unrecognized arguments: --nonsense; onefold serve --help lists all options"),
        (["m", "--bugdet", "8GB"], "did you mean --budget?"),
        (["m", "--port", "0", "--disk", "/proc/kept"], "--disk /proc/kept cannot be used"),
        (["m", "--port", "0", "--disk", "/dev/null/kept"], "/dev/null/kept cannot be a folder"),
        (["m", "another"], "another"),
        (["m", "--api-key", "ü"], "ASCII"),
        (["m", "--api-key", ""], "the value is empty: give a key"),
        (["m", "--api-key-file", ""], "the value is empty: give a file"),
        (["m", "--allowed-host", "http://box:80/"], "a name such as box.local"),
        (["m", "--allowed-host", "*.example"], "a name such as box.local"),
        (["m", "--prefill-share", "1"], "a number from 0.01 to 0.99 is needed, not '1'"),
        (["m", "--prefill-share", "nan"], "a number from 0.01 to 0.99"),
        (["m", "--prefill-share", "half"], "a number from 0.01 to 0.99"),
        (["m", "--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid"),
        (["no/such", "--port", "0", "--kv", "7"], "kv must be one of"),
        (["m", "--port", "0", "--remote-write", "all"], "--remote-write requires --remote URL"),
        (["m", "--port", "0", "--remote-insecure"], "--remote-insecure requires --remote URL"),
        (["m", "--port", "0", "--remote", "redis://10.0.0.1/0"], "--remote-secret-file"),
    ],
)
def test_nonsense_is_one_line(capsys, arguments, said):
    assert said in wrong(capsys, *arguments)


def test_a_variable_that_makes_no_sense(capsys, monkeypatch):
    monkeypatch.setenv("ONEFOLD_PORT", "many")
    assert "--port" in wrong(capsys, "m")


def test_a_port_that_is_taken(capsys, model):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"cannot listen on 127.0.0.1 port {port}" in wrong(capsys, str(model), "--port", port)


def test_a_model_that_is_not_there(capsys, tmp_path, model):
    assert "no folder" in wrong(capsys, str(tmp_path / "nothing"), "--port", "0")
    assert "config.json" in wrong(capsys, str(tmp_path), "--port", "0")
    assert "kv" in wrong(capsys, str(model), "--port", "0", "--kv", "7")


# -- what it says ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host, keys, warns",
    [
        ("127.0.0.1", (), False),
        ("localhost", (), False),
        ("::1", (), False),
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("k",), False),
        ("192.168.1.5", (), True),
        ("::", (), True),
        ("some.name", (), True),
    ],
)
def test_a_server_that_is_open_to_all_is_warned_about(capsys, host, keys, warns):
    disk = DiskStats(mode="back", folder="/f", used_bytes=5 * 10**9, budget_bytes=10**11)
    stats = SimpleNamespace(disk=disk, remote=DiskStats(mode="remote", folder="redis://127.0.0.1/0", record_tokens=88))
    stored_as = "{} bits, as the model makes it".format
    inventory = SimpleNamespace(budget_bytes=8 * 10**9, token_bytes=131_072, stored_as=stored_as)
    budget = SimpleNamespace(follows=False)
    cache = SimpleNamespace(inventory=inventory, budget=budget, kv="16", max_kv_size=None)
    cache.stats = lambda: stats
    engine: Any = SimpleNamespace(model_id="a/model", cache=cache, most_tokens=50_000, context_length=40960)
    settings = serve._settings(given("m", "--host", host, *(a for key in keys for a in ("--api-key", key))))
    port = greet(engine, settings)
    said = capsys.readouterr()
    assert "bound" not in said.out
    assert ("--api-key" in said.err) == warns
    disk = "/f: 5.0 GB of 100.0 GB; mode back: a kill or a power cut loses what memory alone holds"
    shown = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    tried, chat = (shlex.split(line) for line in said.out.splitlines()[-2:])  # commands to paste
    assert tried[:6] == ["to", "try", "it", "curl", "-N", f"{shown}/v1/chat/completions"]
    assert json.loads(tried[-1])["stream"] is True and ("authorization: Bearer $KEY" in tried) == bool(keys)
    assert chat[:5] == ["or", "onefold", "chat", "--url", shown]
    for part in ("a/model", f":{port}/v1", "8.0 GB", disk, "131.1 kB", "50,000 of them in one conversation", "40,960",
                 "redis://127.0.0.1/0, with other machines, in records of 88 tokens"):
        assert part in said.out


def test_a_shared_store_that_does_not_answer_is_said_at_the_start(caplog):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}/0"
        assert serve._remote(given("m", "--remote", url)).url == url
    assert f"{url} cannot be reached" in caplog.text and "serving without it, and trying again" in caplog.text


def greet(engine: Any, settings: Any) -> int:
    """Print the banner; returns the port that it names."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        serve._greet(engine, settings, sock)
        return int(sock.getsockname()[1])


def test_the_banner_names_the_format_and_the_bound_and_has_no_trailing_spaces(capsys):
    with onefold.PrefixCache(tiny("llama_q"), "16MB", kv="8", max_kv_size=4096, keep=8) as cache:
        engine = SimpleNamespace(model_id="m", cache=cache, most_tokens=sys.maxsize, context_length=None)
        greet(engine, serve._settings(given("m")))
    lines = capsys.readouterr().out.splitlines()
    (stored,) = [line for line in lines if line.startswith("one token")]
    assert stored.endswith(" of KV; 8 bits, rotated: 0.27 of the model's own 32 bits")
    assert "bound      4,096 tokens a conversation, its first 8 kept" in lines
    assert lines == [line.rstrip() for line in lines]


def test_the_help_states_what_keep_is_by_default(capsys):
    with pytest.raises(SystemExit):
        serve.run(["--help"])
    assert "by default 4096, or half of --max-kv-size if that is less" in " ".join(capsys.readouterr().out.split())


# -- from start to end -----------------------------------------------------------------------------


@contextmanager
def running(*arguments: str, begin: str = "") -> Iterator[tuple[Popen[str], str]]:
    """The command in a process of its own, which runs `begin` first, and where it listens."""
    code = f"{begin}\nimport sys; from onefold.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "serve", "--port", "0", "--budget", "64MB", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"}
    with Popen(command, env=environment, cwd=ROOT, text=True, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        try:
            for line in process.stdout or ():
                if found := re.search(r"OpenAI +(http://\S+)/v1", line):
                    yield process, found[1]
                    break
            else:
                raise AssertionError(f"it did not start: {process.stderr and process.stderr.read()}")
        finally:
            if process.poll() is None:
                process.kill()


@contextmanager
def ready(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as client:  # the address is printed when it listens
        assert client.get("/health").json()["status"] == "ok"
        yield client


def ends_while_it_streams(process: Any, client: httpx.Client, press: Callable[[], None], seconds: float) -> str:
    """The stream is told, and the process ends in time and in order; returns what it said."""
    body = {"messages": MESSAGES, "max_tokens": 1_000_000, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
        press()
        last = [line for line in lines if line][-1]
    assert process.wait(seconds) == 0
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_stopped"
    assert process.stderr is not None
    said: str = process.stderr.read()
    assert "Traceback" not in said and "ERROR" not in said
    assert "1 request may take" in said
    return said


@pytest.mark.parametrize("how", quick(["SIGINT", "SIGTERM", "SIGHUP"], "SIGINT"))
def test_a_signal_in_the_moment_before_the_port_listens_is_not_lost(model, how):
    code = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        "from onefold.cli import main; from onefold.server import running; real = "
        f"running.Server.run; running.Server.run = lambda self, s: (os.kill(os.getpid(), signal.{how}), real(self, s))"
        "; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "serve", str(model), "--port", "0", "--budget", "64MB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr


def test_ctrl_c_while_it_loads_is_no_traceback(model, monkeypatch, capsys):
    monkeypatch.setattr(onefold, "load", lambda name: signal.raise_signal(signal.SIGINT), raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["serve", str(model), "--port", "0"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("stdin", [None, "closed", "/dev/null"])
def test_a_standard_input_that_is_gone_has_ended(monkeypatch, stdin):
    ended = []

    def select(*_):
        if stdin == "closed":
            raise OSError(9, "Bad file descriptor")
        return True

    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("select.select", select)
    monkeypatch.setattr("os.read", lambda *_: b"")
    serve._await_eof(lambda: ended.append(stdin))
    assert ended == [stdin]


def test_a_terminal_that_closes_leaves_running_requests_their_time():
    """SIGHUP comes twice: from the terminal, and from the shell in it."""
    server = Server(None, SimpleNamespace(lost=None), serve._settings(given("m")))
    for number, hurried in ((signal.SIGHUP, False), (signal.SIGHUP, False), (signal.SIGINT, True)):
        server.handle_exit(number, None)
        assert server.should_exit and server._hurried == hurried


@pytest.mark.parametrize("presses", quick([2, 3], 2))
def test_an_impatient_interrupt_ends_the_grace_and_nothing_else(model, tmp_path, presses):
    """The stream is told, what is in memory is written, and there are no tracebacks."""
    arguments = ("--grace", "60", "--temperature", "0", "--disk", str(tmp_path / "kept"))  # an answer drawn may end
    with running(str(model), *arguments) as (process, url), ready(url) as client:

        def press() -> None:
            for _ in range(presses):
                process.send_signal(signal.SIGINT)
                time.sleep(0.5)  # or the second may be taken for the first, on a machine that is busy

        ends_while_it_streams(process, client, press, 30)
    if presses == 2:
        assert [*(tmp_path / "kept").glob("*/*.safetensors")]


def test_what_memory_holds_is_written_when_the_terminal_closes(model, tmp_path):
    with on_terminal("serve", str(model), "--port", "0", "--budget", "64MB", "--disk", str(tmp_path)) as terminal:
        url = re.findall(r"OpenAI +(http://\S+)/v1", terminal.wait_for(r"OpenAI +http://\S+/v1"))[0]
        with ready(url) as client:
            client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 4}).raise_for_status()
        assert not [*tmp_path.glob("*/*.safetensors")]
        terminal.close()
        assert terminal.process.wait(60) == 0
    assert [*tmp_path.glob("*/*.safetensors")]


def test_nohup_outlives_its_terminal(model):
    with running(str(model), "--until-eof", begin="import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)") as (
        process,
        url,
    ):
        process.send_signal(signal.SIGHUP)
        with ready(url) as client:
            assert client.get("/v1/models").status_code == 200
        process.stdin.close()  # and a server whose parent has ended ends
        assert process.wait(60) == 0


@pytest.mark.parametrize("how", quick([signal.SIGINT, signal.SIGTERM], signal.SIGTERM))
def test_it_serves_and_ends_cleanly_while_it_is_asked(model, how):
    with running(str(model), "--grace", "0.3", "--temperature", "0") as (process, url), ready(url) as client:
        answer = client.post("/v1/chat/completions", json={"model": model.name, "messages": MESSAGES, "max_tokens": 4})
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
        said = ends_while_it_streams(process, client, lambda: process.send_signal(how), 60)
    of_requests = [line for line in said.splitlines() if "onefold.server" in line and "POST" in line]
    assert len(of_requests) == 2 and "finish=failed" in of_requests[1]
    assert int(re.findall(r" generated=(\d+) ", of_requests[1])[0]) > 1
