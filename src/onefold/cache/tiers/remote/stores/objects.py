"""Values as objects of a bucket, or as files of a folder: S3, Google's storage, `file://`. Uses the package `obstore`.

- A bucket answers for one name at a time, so a chain is looked at in rounds: twice as many names in each, until one is
  missing.
- Nothing is removed by age: a bucket has rules for that, and `file://` is for tests and for one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

_AT_ONCE = 32
"""Questions to a bucket at the same time."""


class ObjectStore:
    def __init__(self, settings: StoreSettings, package: Any, opened: Any) -> None:
        """`package` is `obstore`, and `opened` one of its stores."""
        self._package, self._opened = package, opened
        self._shown = settings.address.shown
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="onefold-remote-look")

    def leading(self, names: Sequence[str]) -> int:
        known, n = 0, 4
        while known < len(names):
            part = names[known : known + n]
            there = list(self._threads.map(self._has, part))
            if not all(there):
                return known + there.index(False)
            known, n = known + len(part), 2 * n
        return known

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
    waiting = {"timeout": timedelta(seconds=settings.deadline), "connect_timeout": timedelta(seconds=settings.deadline)}
    options = {"client_options": waiting, "retry_config": {"max_retries": 0}}
    try:
        opened = make(obstore.store, settings.address.url, options)
    except (obstore.exceptions.BaseError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{settings.address.shown} cannot be used: {error}") from error
    return ObjectStore(settings, obstore, opened)


def open_bucket(settings: StoreSettings) -> Store:
    """Opens a bucket. What access needs comes from the environment, as other programs for it read it."""
    return _open(settings, lambda stores, url, options: stores.from_url(url, **options))


def open_folder(settings: StoreSettings) -> Store:
    path = Path(unquote(urlsplit(settings.address.url).path))
    if not path.is_absolute():
        raise ConfigError(f"{settings.address.shown}: name a folder by its whole path, as in file:///srv/onefold")
    return _open(settings, lambda stores, url, options: stores.LocalStore(path, automatic_cleanup=False, mkdir=True))
