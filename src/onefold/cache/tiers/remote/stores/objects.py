"""Values as objects of a bucket, or as files of a folder: S3, Google's storage, `file://`. Uses the package `obstore`.

- A bucket answers for one name at a time. A reader asks for some names of a chain at once, then for some between the
  last that is there and the first that is not: two or three round trips for a thousand names. If one between them is
  missing, the reader learns that when it reads it. The writer, who fills such a gap, asks for all.
- Nothing is removed by age: a bucket has rules for that, and `file://` is for tests and for one machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Look, Point, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

_AT_ONCE = 32
"""Questions to a bucket at the same time."""
_POINTS_AT_ONCE = 8
_SHARE = 0.8
"""Of the deadline: after it a reader makes do with what it knows."""


class ObjectStore:
    def __init__(self, settings: StoreSettings, package: Any, opened: Any) -> None:
        """`package` is `obstore`, and `opened` one of its stores."""
        self._package, self._opened = package, opened
        self._shown, self._deadline = settings.address.shown, settings.deadline
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="onefold-remote-look")

    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        until = float("inf") if patient else time.monotonic() + _SHARE * self._deadline
        leading = self._scanned(names) if patient else self._searched(names, until)
        usable = [i for i, p in enumerate(points) if p.needs <= leading]
        while usable and time.monotonic() < until:  # the last ones first: one of them is likely to be there
            part, usable = usable[-_POINTS_AT_ONCE:], usable[:-_POINTS_AT_ONCE]
            there = self._threads.map(self._has, [points[i].name for i in part])
            found = [i for i, is_there in zip(part, there, strict=True) if is_there]
            if found:
                return Look(leading, found[-1])
        return Look(leading)

    def _searched(self, names: Sequence[str], until: float) -> int:
        """Returns how many of the names are there, if there are none behind the first that is missing; fewer when time
        is up."""
        known, missing = 0, len(names)
        while known < missing and time.monotonic() < until:
            step = max(1, -(-(missing - known) // _AT_ONCE))
            asked = list(range(known, missing, step)) if known else [0]  # most prompts are not there at all
            there = list(self._threads.map(self._has, [names[i] for i in asked]))
            gap = there.index(False) if not all(there) else len(asked)
            if gap:
                known = asked[gap - 1] + 1
            if gap < len(asked):
                missing = asked[gap]
        return known

    def _scanned(self, names: Sequence[str]) -> int:
        for begin in range(0, len(names), _AT_ONCE):
            there = list(self._threads.map(self._has, names[begin : begin + _AT_ONCE]))
            if not all(there):
                return begin + there.index(False)
        return len(names)

    def _has(self, name: str) -> bool:
        with self._translated():
            try:
                self._package.head(self._opened, name)
            except FileNotFoundError:
                return False
        return True

    def get(self, name: str) -> bytes | None:
        with self._translated():
            try:
                found = self._package.get(self._opened, name)
            except FileNotFoundError:
                return None
            if found.meta["size"] > VALUE_BYTES:
                raise RecordError(RemoteReason.TOO_LARGE)
            return bytes(found.bytes())

    def add(self, name: str, value: bytes) -> bool:
        with self._translated():
            try:
                self._package.put(self._opened, name, value, mode="create", use_multipart=False)
            except self._package.exceptions.AlreadyExistsError:
                return False
        return True

    def remove(self, name: str) -> None:
        with self._translated():
            try:
                self._package.delete(self._opened, name)
            except FileNotFoundError:
                return

    def names(self, prefix: str) -> Iterator[Held]:
        folder, _, begin = prefix.rpartition("/")
        with self._translated():
            for found in self._package.list(self._opened, prefix=folder or None):
                for one in found:
                    if one["path"].removeprefix(f"{folder}/" if folder else "").startswith(begin):
                        yield Held(one["path"], one["size"])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the package's exceptions into ours."""
        wrong = self._package.exceptions
        try:
            yield
        except (wrong.PermissionDeniedError, wrong.UnauthenticatedError) as error:
            raise StoreError(RemoteReason.REFUSED, f"{self._shown} refuses access: {error}") from error
        except (wrong.BaseError, OSError) as error:
            text = str(error)
            slow = "timed out" in text or "deadline" in text
            full = "No space left" in text or "QuotaExceeded" in text
            reason = RemoteReason.SLOW if slow else RemoteReason.FULL if full else RemoteReason.UNREACHABLE
            raise StoreError(reason, f"{self._shown} failed: {text}") from error


def _open(settings: StoreSettings, make: Callable[[Any, str, dict[str, Any]], Any]) -> Store:
    try:
        import obstore
        import obstore.store
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{settings.address.shown} needs the package obstore: pip install 'onefold[remote]'"
        ) from error
    deadline = timedelta(seconds=settings.deadline)
    # options that are given replace those of the environment
    plain = os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true", "yes")
    options = {
        "client_options": {"timeout": deadline, "connect_timeout": deadline, "allow_http": plain},
        "retry_config": {"max_retries": 0},
    }
    try:
        opened = make(obstore.store, settings.address.url, options)
    except (obstore.exceptions.BaseError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{settings.address.shown} cannot be used: {error}") from error
    return ObjectStore(settings, obstore, opened)


def open_bucket(settings: StoreSettings) -> Store:
    """Opens a bucket. What access needs comes from the environment, as other programs for it read it."""
    return _open(settings, lambda stores, url, options: stores.from_url(url, **options))


def open_folder(settings: StoreSettings) -> Store:
    parts = urlsplit(settings.address.url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise ConfigError(
            f"{settings.address.shown}: a folder is named by file:// and its whole path on this machine, as in "
            "file:///srv/onefold; ? and # in a name are %3F and %23"
        )
    if not path.is_absolute():
        raise ConfigError(f"{settings.address.shown}: name a folder by its whole path, as in file:///srv/onefold")
    return _open(settings, lambda stores, url, options: stores.LocalStore(path, automatic_cleanup=False, mkdir=True))
