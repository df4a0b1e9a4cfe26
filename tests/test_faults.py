"""Where every fault is caught: it is logged with its traceback once, and no bug passes as a cache miss."""

from __future__ import annotations

import logging

import pytest

from onefold import faults
from onefold.errors import IntegrityError
from onefold.faults import EVERY_FAULT, UNEXPECTED, FaultLog
from onefold.mlx_lm.reasons import Reasons


def failing(error: Exception) -> int:
    raise error


def test_the_drop_in_logs_the_first_traceback_as_a_warning_and_later_ones_at_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reasons = Reasons()
    with caplog.at_level(logging.DEBUG, "onefold"):
        assert [reasons.attempt(lambda: failing(KeyError("k")), 7) for _ in range(3)] == [7, 7, 7]
    assert reasons.counts == {"failed: KeyError": 3}
    assert [r.levelname for r in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
    assert all(r.exc_info is not None and r.exc_info[0] is KeyError for r in caplog.records)


def test_a_reason_without_a_fault_is_logged_once_and_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    reasons = Reasons()
    with caplog.at_level(logging.DEBUG, "onefold"):
        reasons.note("not tokens", "a string")
        reasons.note("not tokens", "a string")
    (record,) = caplog.records
    assert record.levelname == "WARNING" and not record.exc_info


@pytest.mark.parametrize("bug", [AssertionError("wrong"), IntegrityError(["wrong"])])
def test_tests_see_bugs_that_a_server_survives(bug: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(bug)):
        Reasons().attempt(lambda: failing(bug), 0)
    monkeypatch.setattr(faults, "NOT_CAUGHT", ())
    assert Reasons().attempt(lambda: failing(bug), 0) == 0


def test_the_engine_does_not_catch_bugs() -> None:
    assert not issubclass(AssertionError, UNEXPECTED) and not issubclass(IntegrityError, UNEXPECTED)
    assert issubclass(AssertionError, EVERY_FAULT)


def test_the_engine_logs_every_fault_and_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    found = FaultLog(logging.getLogger("onefold.engine"))
    with caplog.at_level(logging.DEBUG, "onefold.engine"):
        found.caught("a request failed", ValueError("v"))
        found.caught("a request failed", ValueError("w"))
        found.caught("a request failed", TypeError("t"))
    logged = [(r.levelname, r.getMessage(), bool(r.exc_info)) for r in caplog.records]
    assert logged == [
        ("WARNING", "a request failed", True),
        ("WARNING", "a request failed (ValueError: w)", False),
        ("DEBUG", "a request failed", True),
        ("WARNING", "a request failed", True),
    ]
