"""Every exception that Onefold raises, in one tree.

    OnefoldError
    ├── ConfigError (ValueError)     a size, option or model that cannot be used as given
    │   ├── FolderInUse              ... a cache folder that another process writes to
    │   ├── Unbounded                ... max_kv_size for a model with a cache class that takes no bound
    │   └── Unstorable               ... a format of stored KV for a model whose KV it cannot store
    ├── NoBackend (ImportError)      MLX is installed without a backend; names what to install
    ├── TokenError (ValueError)      tokens that are empty, not integers, or out of range
    ├── BudgetError                  the budget (or the device) does not have the bytes that were requested
    ├── DeviceError                  the device failed; what was being computed or copied is lost
    │   └── DeviceLost               ... and does not recover: only a new process can use it
    ├── LeaseError                   a lease used against its rules
    │   ├── LeaseClosed              ... after it was settled
    │   ├── WrongThread              ... from another thread than the one that opened it
    │   └── CommitError              ... committed with tokens that its layers do not hold
    ├── RequestError                 a request that will not be run
    │   ├── BadRequest (ValueError)  ... because it is not one: says which field is wrong, and how
    │   ├── UnknownModel             ... because it is for another model than the one that is served
    │   ├── UnknownNode              ... because it names a prefix that is not held
    │   ├── PromptError (ValueError) ... because its messages cannot be made into a prompt
    │   ├── TooLong                  ... because its prompt can never fit; says how many tokens would
    │   └── Busy                     ... now: the queue is full, or it waited too long; says when to try again
    ├── RecordError                  a record on disk that cannot be used; says why, and is a miss
    ├── EngineStopped                the engine has been stopped, or has failed
    ├── ServerError                  a server cannot be reached, or answers with an error
    └── IntegrityError               check() found a broken invariant; always a bug

A miss is a value, not an exception: see `Lease.reason` and `Stats.reasons`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any


class OnefoldError(Exception):
    """The root: `except OnefoldError` catches every exception of Onefold."""


class AddedTo:
    """A block that closes something. An exception in it is added to the notes of `error`, which is being raised
    already, and does not replace it. It is raised if there is no such error, or a generator is merely being closed."""

    def __init__(self, error: BaseException | None) -> None:
        self._error = None if isinstance(error, GeneratorExit) else error

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, later: BaseException | None, trace: object) -> bool:
        if self._error is None or not isinstance(later, Exception):
            return False
        if later is not self._error:
            with contextlib.suppress(AttributeError, TypeError):  # a frozen exception takes no notes
                self._error.add_note(f"After this error, closing failed too: {type(later).__name__}: {later}")
        return True


class ConfigError(OnefoldError, ValueError):
    pass


class FolderInUse(ConfigError):
    pass


class Unbounded(ConfigError):
    pass


class Unstorable(ConfigError):
    pass


class NoBackend(OnefoldError, ImportError):
    pass


class TokenError(OnefoldError, ValueError):
    pass


class BudgetError(OnefoldError):
    """A reservation was refused. Nothing was allocated; what was stored is untouched."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int, advice: str = "") -> None:
        super().__init__(f"{message}; {advice}" if advice else message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.advice = advice
        """What the caller can do."""

    def advised(self, advice: str) -> BudgetError:
        """Returns the same refusal with advice. Advice that it already has stays."""
        if self.advice:
            return self
        return BudgetError(
            str(self), needed_bytes=self.needed_bytes, available_bytes=self.available_bytes, advice=advice
        )


class DeviceError(OnefoldError):
    """The data that was being computed or copied is lost; the cache drops it, and it is a miss from then on."""


class DeviceLost(DeviceError):
    """The device refuses every command of this process."""


class LeaseError(OnefoldError):
    pass


class LeaseClosed(LeaseError):
    pass


class WrongThread(LeaseError):
    pass


class CommitError(LeaseError):
    pass


class RequestError(OnefoldError):
    pass


class BadRequest(RequestError, ValueError):
    """`where` is the field that is wrong, such as "messages.0.role", if it is one. `details` is for a program that
    wants to know more."""

    def __init__(self, message: str, *, where: str = "", details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.where = where
        self.details = dict(details or {})


class UnknownModel(RequestError):
    pass


class UnknownNode(RequestError):
    pass


class PromptError(RequestError, ValueError):
    """`where` is the part of the request that is wrong, such as "messages.0.content", if that is known."""

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class TooLong(RequestError):
    def __init__(self, message: str, *, tokens: int, most: int) -> None:
        super().__init__(message)
        self.tokens = tokens
        self.most = most


class Busy(RequestError):
    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds."""


class RecordError(OnefoldError):
    pass


class EngineStopped(OnefoldError):
    pass


class ServerError(OnefoldError):
    pass


class IntegrityError(OnefoldError):
    """Carries every finding, so that one run of `check()` tells the whole story."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__("; ".join(findings))
        self.findings = findings
