"""Warming: an engine that has run requests of its own before the first one, and shows nothing of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from asking import ask, cold
from tiny import tiny, with_unknown_caches

from onefold.cache.memory import device
from onefold.cache.prefix_cache import PrefixCache, empty_twin
from onefold.cache.tiers.disk.tier import DiskSettings
from onefold.engine import warming
from onefold.engine.engine import Engine
from onefold.engine.limits import Limits
from onefold.engine.request import Sampling
from onefold.errors import ConfigError

WORDS = [(i * i * 31 + i * 7) % 90 for i in range(150)]


@pytest.fixture(scope="module")
def loaded(model: Path) -> tuple[Any, Any]:
    return mlx_lm.load(str(model))


class Forwards:
    """Rows and tokens of the forwards that warming runs; those that a cache runs to look at its model do not count."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: set[tuple[int, int]] = set()
        self.error: Exception | None = None
        """What a forward of two rows raises."""
        self._on = False
        original, twin = type(model).__call__, warming.empty_twin

        def call(model: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
            if self._on:
                self.shapes.add((inputs.shape[0], inputs.shape[1]))
                if self.error is not None and inputs.shape[0] == 2:
                    raise self.error
            return original(model, inputs, *args, **kwargs)

        def begin(cache: PrefixCache) -> PrefixCache:
            self._on = True
            return twin(cache)

        monkeypatch.setattr(type(model), "__call__", call)
        monkeypatch.setattr(warming, "empty_twin", begin)


@pytest.fixture
def forwards(loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> Forwards:
    return Forwards(loaded[0], monkeypatch)


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(r.levelno, r.getMessage()) for r in caplog.records if "warmed" in r.getMessage()]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0), Sampling(temperature=0.7, top_p=0.9, seed=7)])
def test_nothing_shows_of_it(
    loaded: tuple[Any, Any],
    forwards: Forwards,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    sampling: Sampling,
) -> None:
    caplog.set_level(logging.DEBUG, "onefold")
    stats = []
    for warm in (False, True):
        disk = DiskSettings(tmp_path / "disk", mode="through", budget="1GB")
        with Engine(*loaded, budget="256MB", warm=warm, defaults=sampling, disk=disk) as engine:
            stats.append(engine.stats())
            assert engine.cache.inventory.stored_bytes == engine.cache.inventory.held_bytes == 0
            assert engine.cache.flush(everything=True)
            assert not list(tmp_path.rglob("*.safetensors"))
            engine.check()
        assert forwards.shapes == ({(1, 95), (1, 1), (1, 16), (1, 12), (2, 1)} if warm else set())
    assert stats[0] == stats[1]
    assert [level for level, _ in said(caplog)] == [logging.INFO]
    assert not [r for r in caplog.records if r.levelno > logging.INFO]


def test_the_first_request_is_right_and_has_the_first_number(loaded: tuple[Any, Any]) -> None:
    with Engine(*loaded, budget="256MB", warm=True) as engine:
        answer = ask(engine, WORDS, 12)
        assert answer.tokens == cold(loaded[0], WORDS, 12)
        assert (answer.hit.matched, answer.hit.cached, answer.hit.reason) == (0, 0, "nothing known")
        assert (engine.stats().finished, engine.stats().cache.requests) == (1, 1)
        engine.check()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_by_default_only_a_gpu_is_warmed(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    warmed: list[Any] = []
    monkeypatch.setattr(warming, "warm", lambda *given: warmed.append(given))
    with monkeypatch.context() as pretended:
        pretended.setattr(device, "on_gpu", lambda: on_gpu)
        with Engine(*loaded, budget="256MB"):
            pass
    assert len(warmed) == on_gpu


@pytest.mark.parametrize("kind", ["qwen3_next", "gemma3", "unknown"])
def test_other_kinds_of_models(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "onefold")
    model = with_unknown_caches(monkeypatch) if kind == "unknown" else tiny(kind)
    with Engine(model, loaded[1], budget="256MB", warm=True) as engine:
        assert [level for level, _ in said(caplog)] == [logging.INFO], caplog.text
        assert engine.stats().cache.nodes == 0
        engine.check()
    noted = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(noted) == len(set(noted)) == (kind == "unknown"), "a limit of the model is said once"


def test_one_row_at_a_time(loaded: tuple[Any, Any], forwards: Forwards) -> None:
    with Engine(*loaded, budget="256MB", warm=True, limits=Limits(rows=1, queue_timeout_seconds=1e-9)):
        assert (1, 1) in forwards.shapes and (2, 1) not in forwards.shapes


def test_a_small_budget_or_context_is_not_warmed(
    loaded: tuple[Any, Any], caplog: pytest.LogCaptureFixture, forwards: Forwards
) -> None:
    caplog.set_level(logging.DEBUG, "onefold")
    with PrefixCache(loaded[0], "64MB") as cache:
        needed = cache.parts.need(200)
        warming.warm(cache, Limits(), loaded[1], 90, Sampling(), most_tokens=100)
    with Engine(*loaded, budget=needed, warm=True) as engine:
        assert engine.alive
    assert [level for level, _ in said(caplog)] == [logging.DEBUG] * 2
    assert not forwards.shapes


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RuntimeError("[metal] Command buffer execution failed"), "the device failed"),
        (RuntimeError("[malloc] Unable to allocate"), "the device failed"),
        (ValueError("not for me"), "could not be warmed"),
    ],
)
def test_a_failure_does_not_keep_the_engine_from_starting(
    loaded: tuple[Any, Any],
    forwards: Forwards,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    told: str,
) -> None:
    forwards.error = error
    engine = Engine(*loaded, budget="256MB", warm=True)
    with engine:
        ((level, message),) = said(caplog)
        assert level == logging.WARNING and told in message
        stats = engine.stats()
        assert stats.failed == stats.finished == 0 and stats.cache.reasons == {} and stats.cache.nodes == 0
        assert ask(engine, WORDS, 8).tokens == cold(loaded[0], WORDS, 8)
        engine.check()


def test_a_twin_of_a_closed_cache_is_refused(loaded: tuple[Any, Any]) -> None:
    with PrefixCache(loaded[0], "64MB", kv="8", max_kv_size=512, keep=8) as cache:
        with empty_twin(cache) as twin:
            assert (twin.kv, twin.max_kv_size, twin.keep) == ("8", 512, 8)
            assert twin.inventory.budget_bytes == cache.inventory.budget_bytes
            assert twin.parts.form == cache.parts.form
        assert not cache.closed
        cache.check()
    with pytest.raises(ConfigError, match="is closed"):
        empty_twin(cache)
