"""The engine with a disk: answers after a restart are those of a cold run, and reading from disk holds nobody up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from asking import Pending, ask, ask_all, cold, prompt_of, request
from disk_caches import Held, files, flip, small_records
from listening import wait_until
from test_engine import words

from onefold.cache.tiers.disk.restoring import Restore
from onefold.cache.tiers.disk.tier import DiskSettings
from onefold.cache.tiers.pace import Pace
from onefold.cache.tiers.remote.fetching import RemoteFetch
from onefold.cache.tiers.remote.tier import RemoteSettings
from onefold.cli.serve_ending import Ending
from onefold.engine.engine import Engine
from onefold.engine.job import READS
from onefold.errors import FolderInUse
from onefold.server.app import make_app
from onefold.server.running import Server
from onefold.server.settings import Settings


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(model))


@pytest.fixture(autouse=True)
def always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models compute in no time."""
    monkeypatch.setattr(Pace, "estimate", lambda self, units: None)


def engine(loaded: tuple[Any, Any], folder: Path, mode: str = "back", budget: str = "256MB") -> Engine:
    made = Engine(*loaded, budget=budget, disk=DiskSettings(folder, "1GB", mode))
    assert made.cache.parts.tier is not None
    made.cache.parts.tier.spiller.jobs.record_tokens = min(40, made.cache.parts.tier.spiller.jobs.record_tokens)
    return made


def stored(loaded: tuple[Any, Any], folder: Path, tokens: list[int]) -> list[int]:
    """A prompt that another engine has had, and left on disk."""
    with engine(loaded, folder) as before:
        ask(before, tokens, 1)
    return tokens


def test_what_came_before_a_damaged_record_is_told_as_restored(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    tokens = stored(loaded, tmp_path, words(200))
    flip(files(tmp_path)[2], -5)
    with engine(loaded, tmp_path) as second:
        again = ask(second, [*tokens, 5], 3)
        assert again.tokens == cold(loaded[0], [*tokens, 5], 3)
        assert again.hit.restored == again.hit.cached == 80
        assert again.hit.reason == "damaged on disk"
        second.check()


def test_an_error_on_the_engines_thread_is_the_callers(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with engine(loaded, tmp_path) as running:

        def fails() -> None:
            raise FileNotFoundError("gone")

        with pytest.raises(FileNotFoundError):
            running._do(fails)
        assert ask(running, words(20), 2).done.completion_tokens == 2


@pytest.mark.parametrize("mode", ["back", "through"])
def test_a_conversation_goes_on_after_a_restart(mode: str, loaded: tuple[Any, Any], tmp_path: Path) -> None:
    tokens = words(150)
    with engine(loaded, tmp_path, mode) as first:
        answer = ask(first, tokens, 20)
    longer = [*tokens, *answer.tokens, *words(10, 3)]
    with engine(loaded, tmp_path, mode) as second:
        again = ask(second, longer, 12)
        assert again.tokens == cold(loaded[0], longer, 12)
        assert again.hit.cached == again.hit.restored == 169
        warm = ask(second, [*longer, *again.tokens, 1], 3)
        assert warm.hit.restored == 0 and warm.hit.cached > 169
        stats = second.stats().cache
        assert stats.tokens_from_disk == stats.disk.restored_tokens == 169
        second.check()


def test_agents_that_share_a_prompt_read_it_once(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    common = stored(loaded, tmp_path, words(200))
    with engine(loaded, tmp_path) as second:
        prompts = [[*common, i, *words(8, i)] for i in range(5)]
        answers = ask_all(second, [request(prompt_of(p), 8) for p in prompts])
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.tokens == cold(loaded[0], prompt, 8)
            assert answer.hit.cached >= 199
        assert second.stats().cache.disk.restored_tokens <= 201
        second.check()


def test_reading_from_disk_holds_no_stream_up(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While somebody is being answered there is at most one record between two steps, if records are slow."""
    tokens = stored(loaded, tmp_path, words(400))
    with engine(loaded, tmp_path) as second:
        order: list[str] = []
        step, decode = Restore.step, second._scheduler._decode._step

        def slow(self: Restore, seconds: float = 0.0) -> bool:
            order.append("record")
            return step(self)

        def noted(rows: Any) -> None:
            order.append("step")
            return decode(rows)

        monkeypatch.setattr("onefold.engine.admission.READ_SECONDS", -1.0)
        monkeypatch.setattr(Restore, "step", slow)
        monkeypatch.setattr(second._scheduler._decode, "_step", noted)
        running = second.ask(request(prompt_of(words(20, 9)), 300))
        events = [next(running), next(running)]
        late = ask(second, [*tokens, 5], 3)
        events += list(running)
        assert late.hit.restored >= 400 and late.tokens == cold(loaded[0], [*tokens, 5], 3)
        assert order.count("record") >= 8
        assert "record record" not in " ".join(order)


@pytest.mark.parametrize("times", [1, 100])
def test_what_was_evicted_before_there_was_a_row_for_it_is_read_again(
    times: int, loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ever."""
    tokens = stored(loaded, tmp_path, words(200))
    with engine(loaded, tmp_path) as second:
        step, reads = Restore.step, 0

        def evicted(self: Restore, seconds: float = 0.0) -> bool:
            nonlocal reads
            more = step(self)
            if not more:
                reads += 1
                if reads <= times:
                    second.cache.inventory.shrink(0)
            return more

        monkeypatch.setattr(Restore, "step", evicted)
        answer = ask(second, [*tokens, 5], 3)
        assert answer.tokens == cold(loaded[0], [*tokens, 5], 3)
        assert (reads, answer.hit.cached) == ((2, 200) if times == 1 else (READS + 1, 0))
        second.check()


def test_a_request_that_is_cancelled_while_it_is_read_leaves_nothing_behind(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = stored(loaded, tmp_path, words(400))
    with engine(loaded, tmp_path) as second:
        monkeypatch.setattr("onefold.engine.admission.READ_SECONDS_ALONE", -1.0)
        number = second.submit(request(prompt_of([*tokens, 5]), 5), lambda events: None)
        second.cancel(number)
        second.check()
        assert second.stats().cache.open_leases == 0 and not second.cache.state.restores
        assert ask(second, [*tokens, 5], 3).tokens == cold(loaded[0], [*tokens, 5], 3)


@pytest.mark.parametrize("mode", ["back", "through"])
def test_under_pressure_everything_comes_back(mode: str, loaded: tuple[Any, Any], tmp_path: Path) -> None:
    """Many conversations on a budget for a few, several at a time: what made way is read again, not computed."""
    with engine(loaded, tmp_path, mode, budget="5MB") as made:
        prompts = [[i, *words(150, i)] for i in range(12)]
        first = [ask(made, p, 6).tokens for p in prompts]
        before = made.stats().prefilled_tokens
        longer = [[*p, *a, 3] for p, a in zip(prompts, first, strict=True)]
        answers = ask_all(made, [request(prompt_of(p), 4) for p in longer])
        for prompt, answer in zip(longer, answers, strict=True):
            assert answer.tokens == cold(loaded[0], prompt, 4)
        stats = made.stats()
        assert stats.cache.evicted_tokens > 0 and stats.cache.tokens_from_disk > 0
        assert stats.prefilled_tokens - before < 12 * 60
        made.check()


def test_a_second_engine_on_the_folder_is_refused(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with engine(loaded, tmp_path), pytest.raises(FolderInUse, match="in use by process"):
        engine(loaded, tmp_path)


def test_clearing_reaches_the_disk(loaded: tuple[Any, Any], tmp_path: Path) -> None:
    with engine(loaded, tmp_path, "through") as made:
        ask(made, words(200), 3)
        assert made.cache.flush(10)
        memory, disk = made.clear()
        assert memory > 0 and disk > 0 and not list(tmp_path.glob("*/*.safetensors"))
        assert ask(made, words(200), 3).hit.cached == 0


@pytest.mark.parametrize("told", [False, True], ids=["and not before", "when it has been told to end"])
def test_an_interrupt_while_the_end_is_written_leaves_that(
    told: bool,
    loaded: tuple[Any, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a disk that takes for ever; the engine's thread has ended all the same, and what is lost is said."""
    caplog.set_level("INFO", "onefold")
    running = engine(loaded, tmp_path)
    small_records(running.cache)  # the first one is held, and the others are left
    ask(running, words(200), 1)
    disk = Held(running.cache)
    if told:
        running.stop(timeout_seconds=0)
        assert disk.begun.wait(60)
    left, close_soon = threading.Event(), running.cache.ending.hurry

    def leave() -> None:
        close_soon()
        left.set()

    def press() -> None:
        wait_until(lambda: "interrupt again to skip it" in caplog.text, "it does not write")
        disk.begun.wait(60)
        time.sleep(0.2)  # it waits for the disk by now
        os.kill(os.getpid(), signal.SIGINT)
        left.wait(60)
        disk.go()

    monkeypatch.setattr(running.cache.ending, "hurry", leave)
    handler = signal.getsignal(signal.SIGINT)
    pressing = threading.Thread(target=press)
    pressing.start()
    try:
        Ending(running).stop()
    finally:
        signal.signal(signal.SIGINT, handler)
        pressing.join()
    assert not running._thread.working
    assert "interrupt again to skip it" in caplog.text
    assert "tokens were not written: interrupted" in caplog.text


def test_what_was_written_while_the_server_ended_is_said(
    loaded: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what was written before the caller of the server came to stop the engine."""
    caplog.set_level("INFO", "onefold")
    running = engine(loaded, tmp_path)
    ask(running, words(200), 4)
    ending, handler = Ending(running), signal.getsignal(signal.SIGINT)
    server = Server(make_app(running, Settings()), running, Settings(grace_seconds=0.0), ending=ending.begin)
    asyncio.run(server._stop_engine())
    assert running._thread.wait(60)
    try:
        ending.stop()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert "were written in" in caplog.text and "nothing had to be written" not in caplog.text


@pytest.mark.parametrize("with_disk", [False, True])
def test_what_was_written_to_a_shared_store_while_the_server_ended_is_said(
    with_disk: bool, loaded: tuple[Any, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "onefold")
    url = f"file://{tmp_path}/store"
    disk = DiskSettings(tmp_path / "disk", "1GB") if with_disk else None
    handler = signal.getsignal(signal.SIGINT)
    for tokens, said in ((words(700), " were written to "), (words(700), "nothing had to be written to ")):
        running = Engine(*loaded, budget="256MB", disk=disk, remote=RemoteSettings(url, deadline=60.0))
        ask(running, tokens, 1)
        caplog.clear()
        try:
            Ending(running).stop()
        finally:
            signal.signal(signal.SIGINT, handler)
        assert said + url in caplog.text and "-" not in caplog.text.split(said)[0].split()[-1]
        assert ("are on disk" in caplog.text) == with_disk
        where = "disk and the shared store" if with_disk else "the shared store"
        assert f"writing to {where} what is not there yet" in caplog.text


def test_a_slow_store_holds_no_stream_up(
    loaded: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RemoteSettings(f"file://{tmp_path}/store", deadline=60.0, write="all")
    prompt = words(700)
    with Engine(*loaded, budget="256MB", remote=settings) as first:
        ask(first, prompt, 1)
        assert first.cache.flush(60)
    waited: list[tuple[bool, float]] = []
    go = threading.Event()
    with Engine(*loaded, budget="256MB", remote=settings) as second:
        tier = second.cache.parts.tier
        get, step = tier._shared.store.get, RemoteFetch.step  # type: ignore[union-attr]

        def held_up(name: str) -> bytes | None:
            go.wait(60)
            found: bytes | None = get(name)
            return found

        def stepping(fetch: RemoteFetch, seconds: float = 1.0) -> bool:
            waited.append((second.stats().decoding > 0, seconds))
            return step(fetch, seconds)

        tier._shared.store.get = held_up  # type: ignore[union-attr]
        monkeypatch.setattr(RemoteFetch, "step", stepping)
        later = None
        for seen, _ in enumerate(second.ask(request(prompt_of(words(20, 9)), 400))):
            if seen == 20:
                later = Pending(second, request(prompt_of([*prompt, 1]), 3))
            if seen == 200:
                go.set()
        assert later is not None and later.wait().hit.remote > 400
        assert any(is_live for is_live, _ in waited)
        assert all(seconds == 0.0 for is_live, seconds in waited if is_live)
        second.check()
