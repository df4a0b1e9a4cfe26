"""A command of the device fails, and MLX reports it to another request than the one whose work it spoilt.

MLX on Metal does so: the error of a command is thrown once, to the next caller that encodes anything. Here the error is
injected where arrays are scheduled or waited for, on the backend that the tests run on.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from asking import Pending, ask, cold, request

import onefold
from onefold.cache import budget
from onefold.cache.memory import device
from onefold.cache.model import metal, seam
from onefold.engine import recovery
from onefold.engine.engine import Engine
from onefold.errors import DeviceError, EngineStopped
from onefold.machine import Level, Reading

FAILED = "[METAL] Command buffer execution failed: Internal Error (0000000e:Internal Error)"


def words(n: int, seed: int = 0) -> list[int]:
    return [(i * i * 31 + i * 7 + seed * 13) % 90 for i in range(n)]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(model))


class Failing:
    """Raises once, when what a forward of enough tokens wrote is scheduled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.from_tokens = sys.maxsize
        schedule, forward, n_tokens = seam.schedule, type(model).__call__, [0]

        def call(model: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            n_tokens[0] = inputs.shape[1]
            return forward(model, inputs, *args, **kwargs)

        def failing(arrays: list[mx.array]) -> None:
            if n_tokens[0] >= self.from_tokens:
                self.from_tokens = sys.maxsize
                raise RuntimeError(FAILED)
            schedule(arrays)

        monkeypatch.setattr(type(model), "__call__", call)
        monkeypatch.setattr(seam, "schedule", failing)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, loaded: tuple[Any, Any]) -> Failing:
    return Failing(monkeypatch, loaded[0])


@pytest.fixture
def engine(loaded: tuple[Any, Any], failing: Failing) -> Iterator[Engine]:
    with Engine(*loaded, budget="256MB") as made:
        yield made
        if made.alive:
            made.check()


# -- the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("told", ["the newcomer", "the batch"])
def test_every_running_request_fails_and_nothing_that_it_wrote_is_stored(engine, loaded, failing, told):
    """Whether the error is reported to the prefill of a third request, or to the decode step of the others."""
    kept = ask(engine, words(80, seed=7), 4)
    running = [Pending(engine, request(words(60, seed=i), 5000)) for i in (1, 2)]
    for pending in running:
        pending.wait_for_text(2)
    failing.from_tokens = 20 if told == "the newcomer" else 1
    if told == "the newcomer":
        running.append(Pending(engine, request(words(90, seed=3), 5)))
    for pending in running:
        error = pending.wait().error
        assert isinstance(error, DeviceError) and "Command buffer" in str(error)
    assert engine.alive
    engine.check()
    for seed in (1, 2):
        again = ask(engine, words(60, seed=seed), 6)
        assert again.hit.cached == 0 and again.tokens == cold(loaded[0], words(60, seed=seed), 6)
    onward = ask(engine, [*words(80, seed=7), *kept.tokens], 4)
    assert onward.hit.cached == 83 and onward.tokens == cold(loaded[0], [*words(80, seed=7), *kept.tokens], 4)


def test_a_failure_that_is_noticed_at_a_commit_fails_all(engine, loaded, monkeypatch):
    running = Pending(engine, request(words(60, seed=1), 5000))
    running.wait_for_text(2)
    clean, failures = device.require_clean, [RuntimeError(FAILED)]

    def require_clean() -> None:
        if failures:
            raise failures.pop()
        clean()

    monkeypatch.setattr(device, "require_clean", require_clean)
    assert isinstance(ask(engine, words(40, seed=2), 3).error, DeviceError)
    assert isinstance(running.wait().error, DeviceError)
    for seed, n in ((1, 60), (2, 40)):
        again = ask(engine, words(n, seed=seed), 6)
        assert again.hit.cached == 0 and again.tokens == cold(loaded[0], words(n, seed=seed), 6)


def test_a_device_that_does_not_recover_ends_the_engine(loaded, failing, monkeypatch):
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 0.0)
    with Engine(*loaded, budget="256MB") as engine:
        running = Pending(engine, request(words(60, seed=1), 5000))
        running.wait_for_text(2)
        lost = RuntimeError("[METAL] Command buffer execution failed: Ignored (00000004:SubmissionsIgnored)")

        def require_clean() -> None:
            raise lost

        monkeypatch.setattr(device, "require_clean", require_clean)
        failing.from_tokens = 1
        assert isinstance(running.wait().error, DeviceError)
        engine._thread.wait(20)
        assert not engine.alive and "SubmissionsIgnored" in str(engine.lost)
        with pytest.raises(EngineStopped):
            ask(engine, words(10), 1)


SERVER = """
import sys, threading, urllib.request, json
import onefold
from onefold.cache.memory import device
from onefold.cache.model import seam
from onefold.cli import main

def lose(url):
    def refuse(*_):
        raise RuntimeError("[METAL] Command buffer execution failed: Ignored (00000004:SubmissionsIgnored)")
    seam.schedule = device.require_clean = refuse
    body = json.dumps({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}).encode()
    try:
        urllib.request.urlopen(urllib.request.Request(url, body, {"content-type": "application/json"}), timeout=60)
    except OSError as error:
        print("answer", getattr(error, "code", None), flush=True)

def listen(said):
    for line in said:
        if line.startswith("OpenAI"):
            lose(line.split()[1] + "/chat/completions")

import os
r, w = os.pipe()
threading.Thread(target=listen, args=(os.fdopen(r),), daemon=True).start()
sys.stdout = os.fdopen(w, "w", buffering=1)
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--budget", "256MB"]))
"""


def test_a_server_whose_device_is_lost_exits_with_a_code_to_restart_on(model: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", SERVER, str(model)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == os.EX_TEMPFAIL, ran.stderr
    assert "the engine ends: the device does not recover" in ran.stderr


# -- leases --------------------------------------------------------------------------------------


def test_a_lease_that_was_open_when_the_device_failed_stores_nothing(loaded, failing):
    model = loaded[0]
    with onefold.PrefixCache(model, "64MB") as cache:
        first, second = cache.lease(words(50, seed=1)), cache.lease(words(50, seed=2))
        mx.eval(model(mx.array(first.rest)[None], cache=first.layers))
        failing.from_tokens = 1
        with pytest.raises(RuntimeError, match="Command buffer"):
            model(mx.array(second.rest)[None], cache=second.layers)
        with pytest.raises(DeviceError, match="while this lease was open"):
            first.commit()
        assert first.closed and second.closed
        cache.check()
        assert cache.inventory.matched(words(50, seed=1)) == cache.inventory.matched(words(50, seed=2)) == 0
        with cache.lease(words(50, seed=1)) as third:
            mx.eval(model(mx.array(third.rest)[None], cache=third.layers))
            third.commit()
        assert cache.inventory.matched(words(50, seed=1)) == 50


def test_an_allocation_that_fails_concerns_its_lease_alone(loaded, monkeypatch):
    model = loaded[0]
    with onefold.PrefixCache(model, "64MB") as cache:
        first, second = cache.lease(words(50, seed=1)), cache.lease(words(50, seed=2))
        mx.eval(model(mx.array(first.rest)[None], cache=first.layers))

        def schedule(arrays: list[mx.array]) -> None:
            raise RuntimeError("[malloc] Unable to allocate 1 bytes")

        with monkeypatch.context() as patch:
            patch.setattr(seam, "schedule", schedule)
            with pytest.raises(RuntimeError, match="malloc"):
                model(mx.array(second.rest)[None], cache=second.layers)
        first.commit()
        assert second.closed and cache.inventory.matched(words(50, seed=1)) == 50


# -- what is said ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "[METAL] Command buffer execution failed: Impacting Interactivity (0000000e)",
            "AGX_RELAX_CDM_CTXSTORE_TIMEOUT=1",
        ),
        ("[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002)", "--prefill-chunk"),
        ("[METAL] Command buffer execution failed: Ignored (00000004:SubmissionsIgnored)", "start it again"),
    ],
)
def test_what_can_be_done_about_an_error_of_metal_is_said(text, said):
    assert said in metal.hint(RuntimeError(text))
    assert metal.hint(RuntimeError("[matmul] shapes")) == ""


# -- failures that are told to work that is for no request, or to a caller's own evaluation -----------


class ToldOnce:
    """A command fails; MLX reports it once, to the next caller that evaluates anything."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed, evaluate = False, mx.eval

        def told(*arrays: Any) -> None:
            if self.armed:
                self.armed = False
                raise RuntimeError(FAILED)
            evaluate(*arrays)

        monkeypatch.setattr(mx, "eval", told)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldOnce:
    return ToldOnce(monkeypatch)


def stored(cache: onefold.PrefixCache, model: Any, tokens: list[int]) -> None:
    with cache.lease(tokens) as lease:
        device.evaluate(model(mx.array(lease.rest)[None], cache=lease.layers))
        lease.commit(tokens)


@pytest.mark.parametrize("work", ["compaction", "a checkpoint from disk", "another lease"])
def test_what_an_open_lease_wrote_is_lost_though_others_are_told(loaded, told, tmp_path, work):
    model, tokens = loaded[0], words(120, seed=1)
    with onefold.PrefixCache(model, "256MB", disk=tmp_path, disk_mode="through") as cache:
        stored(cache, model, words(200, seed=2))
        assert cache.flush()
        if work == "a checkpoint from disk":
            cache.clear(disk=False)
        lease = cache.lease(tokens)
        device.evaluate(model(mx.array(tokens)[None], cache=lease.layers))
        before, told.armed = device.failures(), True
        if work == "compaction":
            cache.state.lock.run(cache.state.reclaiming.releasing_room())
        elif work == "another lease":
            with pytest.raises(DeviceError), cache.lease(words(50, seed=3)) as other:
                other.commit(words(50, seed=3)[: other.offset])
        else:
            with cache.lease([*words(200, seed=2), 1]):
                pass
        assert not told.armed and device.failures() > before
        with pytest.raises(DeviceError):
            lease.commit(tokens)
        assert cache.inventory.matched(tokens) == 0
        cache.check()


def test_a_callers_own_evaluation_may_be_told(loaded):
    model, tokens = loaded[0], words(120, seed=1)
    with onefold.PrefixCache(model, "64MB") as cache:
        with pytest.raises(RuntimeError, match="METAL"), cache.lease(tokens) as lease:
            device.evaluate(model(mx.array(tokens)[None], cache=lease.layers))
            raise RuntimeError(FAILED)
        assert cache.inventory.matched(tokens) == 0
        with pytest.raises(RuntimeError, match="of its own"), cache.lease(tokens) as lease:
            device.evaluate(model(mx.array(tokens)[None], cache=lease.layers))
            raise RuntimeError("a fault of its own")
        assert cache.inventory.matched(tokens) == len(tokens), "a fault of the caller's own spoils nothing"


def test_generating_may_be_told(loaded, monkeypatch):
    model, tokenizer = loaded
    tokens, prefill = words(120, seed=1), [0]
    evaluate = mx.eval

    def told(*arrays: Any) -> None:
        if sys._getframe(2).f_globals["__name__"] == "onefold.generation":
            prefill[0] += 1
            raise RuntimeError(FAILED)
        evaluate(*arrays)

    monkeypatch.setattr(mx, "eval", told)
    with onefold.PrefixCache(model, "64MB") as cache:
        with pytest.raises(RuntimeError, match="METAL"):
            onefold.generate(model, tokenizer, prompt=tokens, cache=cache, max_tokens=4)
        assert prefill[0] and cache.inventory.matched(tokens) == 0


def test_a_copy_of_stored_kv_that_may_have_failed_is_dropped(loaded, monkeypatch):
    """The failure of a compaction's last copy would be told to the next command: so one is encoded."""
    model, tokens = loaded[0], words(120, seed=1)
    with onefold.PrefixCache(model, "64MB") as cache:
        stored(cache, model, tokens)

        def failing() -> None:
            device.note_failure(error := RuntimeError(FAILED))
            raise error

        monkeypatch.setattr(device, "require_clean", failing)
        cache.state.lock.run(cache.state.reclaiming.releasing_room())
        assert cache.inventory.matched(tokens) == 0
        cache.check()


def test_an_engine_fails_its_requests_when_other_work_is_told(engine, loaded, monkeypatch):
    running = Pending(engine, request(words(60, seed=1), 5000))
    running.wait_for_text(2)
    device.note_failure(RuntimeError(FAILED))
    assert isinstance(running.wait().error, DeviceError)
    assert ask(engine, words(60, seed=1), 6).hit.cached == 0 and engine.alive


def test_memory_that_is_short_does_not_end_the_engine(loaded, monkeypatch):
    """Neither a reading that fails nor a compaction that gets no memory."""
    readings = iter([Reading(Level.WARN, "as the test says"), OSError("no such file")])

    def gauge() -> Reading:
        found = next(readings)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr(device, "gauge", lambda: gauge)
    monkeypatch.setattr(budget, "LOOK_SECONDS", 0.01)
    with Engine(*loaded) as made:
        deadline = time.monotonic() + 20
        while made.cache.budget.follows and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not made.cache.budget.follows and made.alive
        assert ask(made, words(60), 4).tokens == cold(loaded[0], words(60), 4)


@pytest.mark.parametrize("error, alone", [
    (RuntimeError("[metal::malloc] Unable to allocate 123 bytes."), True),
    (RuntimeError("[metal::malloc] Resource limit (499000) exceeded."), True),
    (RuntimeError("cudaMallocAsync(&data, size, stream) failed: out of memory"), True),
    (RuntimeError("There is no Stream(gpu, 0) in current thread."), True),
    (RecursionError("maximum recursion depth exceeded"), True),
    (MemoryError(), True),
    (ValueError("shapes"), True),
    (RuntimeError("cudaMallocAsync(&data, size, stream) failed: an illegal memory access was encountered"), False),
    (RuntimeError(FAILED), False),
    (DeviceError(f"the device could not compute the layers' state: {FAILED}"), False),
    (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008:"
                  "kIOGPUCommandBufferCallbackErrorOutOfMemory)"), False),
])  # fmt: skip
def test_which_errors_concern_one_request_alone(error: Exception, alone: bool) -> None:
    before = device.failures()
    assert device.names_its_cause(error) == alone
    device.note_failure(error)
    assert device.failures() - before == (not alone)
