"""Values as objects of a bucket (S3, Google's storage; uses the package `obstore`), or as files of a folder (`file://`).

- A bucket answers for one name at a time. A reader asks for some names of a chain at once, then for some between the
  last that is there and the first that is not: two or three round trips for a thousand names. If one between them is
  missing, the reader learns that when it reads it. The writer, who fills such a gap, asks for all.
- Nothing is removed by age: a bucket has rules for that, and `file://` is for tests and for one machine.
- Folders that are made for `file://` are 0700, and files are 0600 before anything is in them. In a folder that its
  owner has given to a group, with `chmod 2770`, they are 2770 and 0640. The mode of what is there is left alone.
- Below that folder no symbolic link is followed, and only regular files are read.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from onefold.cache.tiers.records.directory import NEW, Directory, absent_is_empty
from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Look, Point, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

_AT_ONCE = 32
"""Questions to a bucket at the same time."""
_POINTS_AT_ONCE = 8
_SHARE = 0.8
"""Of the deadline: after it a reader makes do with what it knows."""
_GROUPS = stat.S_ISGID | stat.S_IWGRP
"""In the mode of a folder that a group shares."""
_STAGED = "#"
"""In the name of a file that is being written."""
_STAGED_SECONDS = 60
"""An older one was left by a writer that ended; listing the store removes it."""
_REASONS = {
    errno.ENOSPC: RemoteReason.FULL, errno.EDQUOT: RemoteReason.FULL, errno.EROFS: RemoteReason.REFUSED,
    errno.EACCES: RemoteReason.REFUSED, errno.EPERM: RemoteReason.REFUSED,
}  # fmt: skip


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


class FolderStore:
    def __init__(self, settings: StoreSettings, path: Path) -> None:
        """Makes the folder if there is none. Raises OSError."""
        self._shown, self._path = settings.address.shown, path
        for missing in [p for p in reversed((path, *path.parents)) if not p.exists()]:
            missing.mkdir(0o700, exist_ok=True)
        with Directory.at(path) as top:
            self._is_a_groups = top.stat().st_mode & _GROUPS == _GROUPS

    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        if patient:
            leading = next((i for i, name in enumerate(names) if not self._has(name)), len(names))
        else:
            leading = bisect_left(names, True, key=lambda name: not self._has(name))
        usable = (i for i in reversed(range(len(points))) if points[i].needs <= leading)
        return Look(leading, next((i for i in usable if self._has(points[i].name)), -1))

    def _has(self, name: str) -> bool:
        with self._translated(), absent_is_empty(), self._in_folder(name) as (folder, last):
            return folder.has(last)
        return False

    def get(self, name: str) -> bytes | None:
        with self._translated(), absent_is_empty(), self._in_folder(name) as (folder, last):
            found = folder.stat(last)
            if not stat.S_ISREG(found.st_mode):
                raise RecordError(RemoteReason.OTHER_FORMAT)
            if found.st_size > VALUE_BYTES:
                raise RecordError(RemoteReason.TOO_LARGE)
            with open(folder.open(last), "rb", buffering=0) as file:
                return file.read(VALUE_BYTES)
        return None

    def add(self, name: str, value: bytes) -> bool:
        with self._translated(), self._in_folder(name, make=True) as (folder, last):
            if folder.has(last):
                return False
            staged, path = f"{last}{_STAGED}{secrets.token_hex(8)}", self._path / name
            try:
                with open(folder.open(staged, NEW), "wb") as file:
                    if self._is_a_groups:
                        os.fchmod(file.fileno(), 0o640)
                    file.write(value)
                os.link(path.with_name(staged), path)
            except FileExistsError:
                return False
            finally:
                folder.remove(staged)
        return True

    def remove(self, name: str) -> None:
        with self._translated(), absent_is_empty(), self._in_folder(name) as (folder, last):
            folder.remove(last)

    def names(self, prefix: str) -> Iterator[Held]:
        above = prefix.rpartition("/")[0]
        with self._translated(), absent_is_empty():
            yield from (held for held in self._below(f"{above}/" if above else "") if held.name.startswith(prefix))

    def _below(self, begin: str) -> Iterator[Held]:
        with self._in_folder(begin) as (folder, _):
            for entry in list(folder.entries()):  # values are removed while they are listed
                with absent_is_empty():
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._below(f"{begin}{entry.name}/")
                    elif _STAGED not in entry.name:
                        yield Held(begin + entry.name, folder.stat(entry.name).st_size)
                    elif folder.stat(entry.name).st_mtime < time.time() - _STAGED_SECONDS:
                        folder.remove(entry.name)

    def close(self) -> None: ...

    @contextmanager
    def _in_folder(self, name: str, *, make: bool = False) -> Iterator[tuple[Directory, str]]:
        """Opens the folder of a name. Yields it, and the last part of the name. Raises OSError."""
        *folders, last = name.split("/")
        with ExitStack() as held:
            at, path = held.enter_context(Directory.at(self._path)), self._path
            for folder in folders:
                path /= folder
                if make and at.make(folder) and self._is_a_groups:
                    path.chmod(0o2770)
                at = held.enter_context(at.below(folder))
            yield at, last

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns errors of the file system into ours."""
        try:
            yield
        except OSError as error:
            reason = _REASONS.get(error.errno or 0, RemoteReason.UNREACHABLE)
            raise StoreError(reason, f"{self._shown} failed: {error}") from error


def open_bucket(settings: StoreSettings) -> Store:
    """Opens a bucket. What access needs comes from the environment, as other programs for it read it."""
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
    options: dict[str, Any] = {
        "client_options": {"timeout": deadline, "connect_timeout": deadline, "allow_http": plain},
        "retry_config": {"max_retries": 0},
    }
    try:
        opened = obstore.store.from_url(settings.address.url, **options)
    except (obstore.exceptions.BaseError, OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{settings.address.shown} cannot be used: {error}") from error
    return ObjectStore(settings, obstore, opened)


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
    try:
        return FolderStore(settings, path)
    except OSError as error:
        raise ConfigError(f"{settings.address.shown} cannot be used: {error}") from error
