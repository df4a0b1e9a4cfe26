"""The drop-in behind mlx-lm's own server, over HTTP: what it holds, and that the server lives."""

from __future__ import annotations

import functools
import gc
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from local_model import DRAFT, Shape, write_model
from mlx_lm import server as mlx_lm_server
from serving import CHAT, TEXT, cached_tokens, serving, text_of

from onefold.cli import main
from onefold.errors import Unbounded
from onefold.mlx_lm import LRUPromptCache

DEEP = Shape(layers=32, heads=1, kv_heads=1, intermediate=64)
STEPS = ["--prefill-step-size", "128"]  # small ones are quicker on a CPU
PATHS: dict[str, dict[str, Any]] = {"single": {"seed": 1}, "batched": {}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KV outweighs all else, and one layer's share of it is small."""
    return write_model(tmp_path_factory.mktemp("deep"), DEEP)


def active() -> int:
    gc.collect()
    mx.clear_cache()
    return int(mx.get_active_memory())


def text(n: int, seed: int = 0) -> str:
    words = ["the", "of", "a", "to", "in", "is", "it", "you", "that", "was", "for", "on", "are"]
    return " ".join(words[(i * i + 7 * seed + i // 5) % len(words)] for i in range(n))[:n]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "most"), [("single", 1.10), ("draft", 1.10), ("batched", 1.25)])
def test_continuing_holds_the_conversation_once(path: str, most: float, deep: Path, draft: Path) -> None:
    """Peak after the first token, less weights and the activations of a short turn, over what was stored."""
    options = {"max_tokens": 8, **PATHS.get(path, {})}
    with serving(LRUPromptCache(), model=deep, draft=draft if path == "draft" else None, flags=STEPS) as server:
        weights = active()
        messages = [{"role": "user", "content": text(4200)}]
        first = server.post(CHAT, {"messages": messages, **options})
        messages += [{"role": "assistant", "content": text_of(first)}, {"role": "user", "content": "and?"}]
        shape_bytes = DEEP.token_bytes + (DRAFT.token_bytes if path == "draft" else 0)
        entry = first["usage"]["total_tokens"] * shape_bytes
        active()
        mx.reset_peak_memory()
        events = server.stream(CHAT, {"messages": messages, **options})
        while not text_of(next(events)):
            pass
        peak = mx.get_peak_memory() - weights
        assert list(events)
        server.settle()
    assert peak / entry <= most, f"{peak / entry:.2f}"


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_reported_is_what_is_held(shared: bool, deep: Path) -> None:
    system = [{"role": "system", "content": text(900)}] if shared else []
    bodies = [
        {"messages": [*system, {"role": "user", "content": text(200 + 37 * i, i)}], "max_tokens": 4 + 5 * i}
        for i in range(6)
    ]
    with serving(LRUPromptCache(), model=deep, flags=STEPS) as server:
        weights = active()
        answers = server.together(CHAT, bodies)
        held, reported = active() - weights, server.cache.nbytes
        assert held / reported <= 1.02
        tokens = sum(a["usage"]["total_tokens"] for a in answers)
        if shared:
            assert held < 0.6 * tokens * DEEP.token_bytes  # 900 of about 1,250 tokens are the same


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_byte_limit_holds(path: str, deep: Path) -> None:
    limit = 1500 * DEEP.token_bytes
    with serving(LRUPromptCache(max_bytes=limit), model=deep, flags=STEPS) as server:
        server.post(TEXT, {"prompt": "warm", "max_tokens": 2, **PATHS[path]})
        weights = active() - server.cache.nbytes
        for i in range(8):
            server.post(TEXT, {"prompt": text(400, i), "max_tokens": 4, **PATHS[path]})
            assert server.cache.nbytes <= limit
            assert active() - weights <= 1.02 * limit
        assert 2 <= len(server.cache) < 8
        known = cached_tokens(server.post(TEXT, {"prompt": text(400, 7) + "!", "max_tokens": 2, **PATHS[path]}))
        assert known >= 399
        before = len(server.cache)
        server.post(TEXT, {"prompt": text(3000, 3), "max_tokens": 2, **PATHS[path]})  # larger than the limit
        assert len(server.cache) >= before - 1 and server.cache.nbytes <= limit
        assert server.cache.reasons["larger than the limit"]


@pytest.mark.parametrize("path", [*PATHS, "draft"])
def test_an_exact_hit_does_not_kill_the_generation_thread(path: str, model: Path, draft: Path) -> None:
    """The same prompt again, and an earlier prompt with its own output: mlx-lm's thread dies of it."""
    options = {"max_tokens": 9, **PATHS.get(path, {})}
    with serving(LRUPromptCache(), model=model, draft=draft if path == "draft" else None) as server:
        prompt = text(60)
        first = server.post(TEXT, {"prompt": prompt, **options})
        again = server.post(TEXT, {"prompt": prompt, **options})
        assert text_of(again) == text_of(first) and cached_tokens(again) == 59
        longer = server.post(TEXT, {"prompt": prompt + text_of(first), **options})
        assert cached_tokens(longer) >= 67
        with serving(LRUPromptCache(), model=model) as other:
            expected = other.post(TEXT, {"prompt": prompt + text_of(first), **options})
        assert text_of(longer) == text_of(expected)
        assert server.generator.is_healthy


def test_quantised_kv_is_taken_over_and_continued(model: Path) -> None:
    flags = ["--kv-bits", "4", "--quantized-kv-start", "32"]
    answers = []
    for cache in (LRUPromptCache(), LRUPromptCache(max_size=1, max_bytes=1)):  # the second keeps nothing
        with serving(cache, model=model, flags=flags) as server:
            first = server.post(TEXT, {"prompt": text(120), "max_tokens": 6})
            second = server.post(TEXT, {"prompt": text(120) + text_of(first) + " so", "max_tokens": 6})
            short = server.post(TEXT, {"prompt": "a", "max_tokens": 3})
            longer = server.post(TEXT, {"prompt": "a" + text_of(short) + text(60), "max_tokens": 6})
            answers.append([text_of(a) for a in (first, second, short, longer)])
            if cache.max_size > 1:
                assert cached_tokens(second) == 126 and cached_tokens(longer) >= 3
    assert answers[0] == answers[1]


def test_the_command_passes_its_arguments_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, Shape(layers=3))
    seen: dict[str, Any] = {}

    class Generator(mlx_lm_server.ResponseGenerator):
        def __init__(self, provider: Any, cache: Any) -> None:
            provider.load_default()  # as its thread does
            seen.update(cache=cache)

    monkeypatch.setattr(mlx_lm_server, "ResponseGenerator", Generator)
    monkeypatch.setattr(mlx_lm_server, "_run_http_server", lambda host, port, *_: seen.update(at=(host, port)))
    before = (mlx_lm_server.run, mlx_lm_server.LRUPromptCache, list(sys.argv))
    flags = ["--model", str(model), "--port", "0", "--prompt-cache-bytes", "5MB", "--prompt-cache-size", "7"]
    ours = ["--max-kv-size", "4096", "--keep", "8", "--device-limit", "1GB", "--kv", "k8v4+1"]
    assert main(["mlx-lm-server", *flags, *ours]) == 0
    assert isinstance(seen["cache"], LRUPromptCache)
    assert (seen["cache"].max_size, seen["cache"].max_bytes) == (7, 5_000_000)
    assert (seen["cache"].max_kv_size, seen["cache"].keep, seen["cache"].device_limit) == (4096, 8, 10**9)
    assert seen["cache"].kv == "k8v4+1"
    assert seen["at"] == ("127.0.0.1", 0)
    assert (mlx_lm_server.run, mlx_lm_server.LRUPromptCache, list(sys.argv)) == before
    seen["cache"].close()  # the class above is a cycle that holds it


@pytest.mark.parametrize("given", [["--model", "demo"], ["--model=demo"]])
def test_the_command_knows_the_demo_model(model: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]) -> None:
    seen: list[str] = []
    monkeypatch.setattr("onefold.engine.demo_model.folder", lambda: model)
    monkeypatch.setattr("onefold.mlx_lm.serve", lambda **_: seen.extend(sys.argv[1:]))
    assert main(["mlx-lm-server", *given, "--host", "demo"]) == 0
    assert seen == ["--host", "demo", "--model", str(model)]


def test_a_model_that_cannot_have_the_format_ends_the_command(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = (mlx_lm_server.run, mlx_lm_server._run_http_server, mlx_lm_server.ResponseGenerator._run_generate)
    assert main(["mlx-lm-server", "--model", str(model), "--port", "0", "--kv", "8+99"]) == 2
    assert "onefold mlx-lm-server: kv='8+99' leaves no layer in format 8: this model has" in capfd.readouterr().err
    after = (mlx_lm_server.run, mlx_lm_server._run_http_server, mlx_lm_server.ResponseGenerator._run_generate)
    assert after == before


@pytest.mark.parametrize("fault", [RuntimeError, Unbounded])
def test_a_fault_of_the_check_is_left_to_requests(
    fault: type[Exception], model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alive: list[bool] = []

    def fail(*_: Any, **__: Any) -> None:
        raise fault("not ours")

    def listen(_host: str, _port: int, generator: Any) -> None:
        alive.append(generator.generation_available())
        generator.stop_and_join()

    monkeypatch.setattr("onefold.mlx_lm.installing.survey", fail)
    monkeypatch.setattr(mlx_lm_server, "_run_http_server", listen)
    assert main(["mlx-lm-server", "--model", str(model), "--port", "0", "--kv", "8"]) == 0
    assert alive == [True] and "not ours" in caplog.text


def test_a_model_that_cannot_be_loaded_is_reported_as_mlx_lm_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    listening: list[bool] = []
    monkeypatch.setattr(mlx_lm_server, "_run_http_server", lambda _, __, g: listening.append(g.generation_available()))
    assert main(["mlx-lm-server", "--model", str(tmp_path), "--port", "0", "--kv", "8"]) == 0
    assert "generation thread died" in caplog.text and len(listening) == 1


@pytest.mark.parametrize("ours, told", [([], signal.SIGINT), (["--kv", "affine8"], signal.SIGHUP)], ids=["16", "8"])
def test_the_command_serves_and_ends_as_it_is_told(model: Path, ours: list[str], told: signal.Signals) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "onefold", "mlx-lm-server", "--model", str(model), "--port", str(port)]
    command += ours
    interruptible = functools.partial(signal.signal, told, signal.SIG_DFL)  # a job in the background is not
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=interruptible
    )
    try:
        ask(port, "warm")
        assert ask(port, text(80)) == 0
        assert ask(port, text(80) + "?") >= 80
        process.send_signal(told)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    finally:
        process.kill()
        process.communicate()


def ask(port: int, prompt: str) -> int:
    """Post to a server that may be starting; how much of the prompt was cached."""
    body = json.dumps({"prompt": prompt, "max_tokens": 2}).encode()
    give_up = time.monotonic() + 120
    while True:
        try:
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}{TEXT}", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                return cached_tokens(json.load(response))
        except OSError:
            if time.monotonic() > give_up:
                raise
            time.sleep(0.2)


@pytest.mark.parametrize(("given", "n_bytes"), [("1GiB", 1 << 30), ("1.5G", 1_500_000_000), ("0", 0)])
def test_the_command_takes_its_sizes_for_mlx_lm_s_limit_too(monkeypatch, given: str, n_bytes: int) -> None:
    seen: list[str] = []
    monkeypatch.setattr("onefold.mlx_lm.serve", lambda **options: seen.extend(sys.argv))
    assert main(["mlx-lm-server", "--port", "0", "--prompt-cache-bytes", given]) == 0
    assert seen[1:] == ["--port", "0", "--prompt-cache-bytes", str(n_bytes)]


def test_a_limit_that_is_no_size_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["mlx-lm-server", "--prompt-cache-bytes", "lots"])
    assert left.value.code == 2
    assert "--prompt-cache-bytes: cannot read 'lots' as a size" in capsys.readouterr().err


def test_nonsense_on_the_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["nonsense"], ["mlx-lm-server", "--no-such-flag"], ["mlx-lm-server", "--keep", "x"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
    both = ["--max-kv-size", "64", "--kv-bits"]
    formats = [["--kv", "16", "--kv-bits"], ["--kv", "4", "--kv-bits"], ["--kv", ""]]
    for wrong in (["--max-kv-size", "4", "--keep", "4"], ["--device-limit", "a lot"], both, *formats):
        assert main(["mlx-lm-server", *wrong]) == 2
        assert wrong[-1] in capsys.readouterr().err
