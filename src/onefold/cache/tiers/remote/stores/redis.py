"""Values in Redis, or in what speaks its protocol: Valkey, Dragonfly. Uses the package `redis`.

- The look at a chain is one pipeline of EXPIRE, which says whether a value is there, and begins its time anew: what
  machines have in memory and never read again must not be forgotten before what continues it.
- A value is read with GETRANGE, so that no more than a value is fetched, and EXPIRE, which begins its time anew.
- It is written with SET NX EX: machines that compute the same at the same time write it once.
- A connection is used by one thread at a time; the package keeps them in a pool. A call ends by the deadline, and one
  that failed because the server had closed a connection of the pool is made once more.
- A server that cannot be written to, a replica, is read without EXPIRE.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Look, Point, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

_LISTED = 500
"""Names of one round trip while all are listed."""
_REPLICA_SECONDS = 600.0
"""How long a server that could not be written to is taken for a replica."""
_OURS = ("socket_timeout", "socket_connect_timeout", "socket_read_size", "timeout", "max_connections")
"""Options that a URL must not set: the deadline and the number of threads are settings of the tier."""

Answer = TypeVar("Answer")


class RedisStore:
    def __init__(self, settings: StoreSettings, client: Any, errors: Any) -> None:
        """`client` is a `redis.Redis`, and `errors` the module of its exceptions."""
        self._client, self._errors = client, errors
        self._shown, self._ttl = settings.address.shown, settings.ttl
        self._replica_until = float("-inf")
        self._closed = False

    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        if not names and not points:
            return Look(0)
        found = self._reading(lambda: self._looked([*names, *(p.name for p in points)]))
        leading = next((i for i, there in enumerate(found[: len(names)]) if not there), len(names))
        usable = (i for i, p in enumerate(points) if p.needs <= leading and found[len(names) + i])
        return Look(leading, max(usable, default=-1))

    def _looked(self, names: list[str]) -> list[Any]:
        with self._client.pipeline(transaction=False) as pipeline:
            for name in names:
                self._ask(pipeline, name)
            found: list[Any] = pipeline.execute()
        return found

    def _ask(self, pipeline: Any, name: str) -> None:
        """Ask whether there is a value. Its time begins anew, unless this process only looks."""
        if self._ttl and time.monotonic() >= self._replica_until:
            pipeline.expire(name, self._ttl)
        else:
            pipeline.exists(name)

    def get(self, name: str) -> bytes | None:
        value, there = self._reading(lambda: self._got(name))
        if isinstance(value, self._errors.ResponseError) and "WRONGTYPE" in str(value):
            raise RecordError(RemoteReason.OTHER_FORMAT)
        if not there:
            return None
        if len(value) > VALUE_BYTES:
            raise RecordError(RemoteReason.TOO_LARGE)
        return bytes(value)

    def _got(self, name: str) -> tuple[Any, Any]:
        """Returns the value, or the error that there is none of ours, and whether there is one."""
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.getrange(name, 0, VALUE_BYTES)  # one byte more than a value has
            self._ask(pipeline, name)
            value, there = pipeline.execute(raise_on_error=False)
        for found in (value, there):
            if isinstance(found, self._errors.RedisError) and "WRONGTYPE" not in str(found):
                raise found
        return value, there

    def add(self, name: str, value: bytes) -> bool:
        return self._called(lambda: bool(self._client.set(name, value, nx=True, ex=self._ttl or None)))

    def remove(self, name: str) -> None:
        self._called(lambda: self._client.unlink(name))

    def names(self, prefix: str) -> Iterator[Held]:
        at = 0
        while True:
            at, found, sizes = self._called(lambda at=at: self._listed(prefix, at))  # type: ignore[misc]
            for name, size in zip(found, sizes, strict=True):
                n_bytes = size if isinstance(size, int) else 0  # of what is no value
                yield Held(name.decode(errors="replace"), n_bytes)
            if not at:
                return

    def _listed(self, prefix: str, at: int) -> tuple[int, list[bytes], list[Any]]:
        """Returns where the next names begin, some names, and how long their values are."""
        at, found = self._client.scan(at, match=_literally(prefix) + "*", count=_LISTED)
        with self._client.pipeline(transaction=False) as pipeline:
            for name in found:
                pipeline.strlen(name)
            sizes = pipeline.execute(raise_on_error=False)
        return at, found, sizes

    def close(self) -> None:
        self._closed = True
        self._client.connection_pool.disconnect()

    def _reading(self, act: Callable[[], Answer]) -> Answer:
        """As `_called`; once more, without EXPIRE, if the server is a replica."""
        with self._translated():
            try:
                return self._repeated(act)
            except self._errors.ReadOnlyError:
                self._replica_until = time.monotonic() + _REPLICA_SECONDS
                return self._repeated(act)

    def _called(self, act: Callable[[], Answer]) -> Answer:
        """Returns what the server answers. Raises StoreError."""
        with self._translated():
            return self._repeated(act)

    def _repeated(self, act: Callable[[], Answer]) -> Answer:
        """Once more if the server had closed a connection of the pool. A call that took too long is not repeated."""
        try:
            return act()
        except self._errors.TimeoutError:
            raise
        except self._errors.ConnectionError:
            if self._closed:
                raise
            return act()
        finally:
            if self._closed:  # meanwhile: no connection that was made since stays open
                self._client.connection_pool.disconnect()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Turns the package's exceptions into ours."""
        try:
            yield
        except self._errors.TimeoutError as error:
            raise StoreError(RemoteReason.SLOW, f"{self._shown} did not answer in time: {error}") from error
        except self._errors.AuthenticationError as error:
            raise StoreError(RemoteReason.REFUSED, f"{self._shown} refuses the password: {error}") from error
        except self._errors.ConnectionError as error:
            raise StoreError(RemoteReason.UNREACHABLE, f"{self._shown} cannot be reached: {error}") from error
        except (ValueError, TypeError) as error:  # an answer that is none
            raise StoreError(RemoteReason.REFUSED, f"{self._shown} answers nonsense: {error}") from error
        except self._errors.RedisError as error:
            full = isinstance(error, self._errors.OutOfMemoryError)
            reason = RemoteReason.FULL if full else RemoteReason.REFUSED
            raise StoreError(reason, f"{self._shown} refuses: {error}") from error


def _literally(prefix: str) -> str:
    """Returns a pattern that matches this text alone."""
    return "".join(f"\\{c}" if c in "*?[]^\\-" else c for c in prefix)


def open_redis(settings: StoreSettings) -> Store:
    shown = settings.address.shown
    try:
        import redis
        import redis.backoff
        import redis.retry
        from redis.connection import ConnectionPool, parse_url

        from onefold.cache.tiers.remote.stores.redis_connection import BoundedConnection, BoundedSslConnection
    except ModuleNotFoundError as error:
        raise ConfigError(f"{shown} needs the package redis: pip install 'onefold[remote]'") from error
    parts = urlsplit(settings.address.url)
    refused = [name for name in parse_qs(parts.query, keep_blank_values=True) if name in _OURS]
    if refused:
        raise ConfigError(
            f"the URL of {shown} cannot set {refused[0]}: leave it out; deadline= (--remote-deadline) says how long a "
            "call may take"
        )
    kind = BoundedSslConnection if parts.scheme == "rediss" else BoundedConnection
    try:
        options = parse_url(settings.address.url)
        options.pop("connection_class", None)
        options |= {
            "socket_timeout": settings.deadline,
            "socket_connect_timeout": settings.deadline,
            "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            "protocol": 2,
        }
        kind(**options)  # does not connect; finds options that there are not
        pool = ConnectionPool(connection_class=kind, **options)
    except (ValueError, TypeError, redis.exceptions.RedisError) as error:
        raise ConfigError(f"{shown} is no URL of a Redis server: {error}") from error
    return RedisStore(settings, redis.Redis(connection_pool=pool), redis.exceptions)
