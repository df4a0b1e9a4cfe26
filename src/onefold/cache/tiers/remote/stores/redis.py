"""Values in Redis, or in what speaks its protocol: Valkey, Dragonfly. Uses the package `redis`.

- The look at a chain is one pipeline of EXPIRE, which says whether a value is there, and begins its time anew: what
  machines have in memory and never read again must not be forgotten before what continues it.
- A value is read with GETRANGE, so that no more than a value is fetched, and EXPIRE, which begins its time anew.
- It is written with SET NX EX: machines that compute the same at the same time write it once.
- A connection is used by one thread at a time; the package keeps them in a pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onefold.cache.tiers.remote.grid import VALUE_BYTES
from onefold.cache.tiers.remote.reasons import RemoteReason
from onefold.cache.tiers.remote.stores.store import Held, Look, Point, Store, StoreError, StoreSettings
from onefold.errors import ConfigError, RecordError

_LISTED = 500
"""Names of one round trip while all are listed."""


class RedisStore:
    def __init__(self, settings: StoreSettings, client: Any, errors: Any) -> None:
        """`client` is a `redis.Redis`, and `errors` the module of its exceptions."""
        self._client, self._errors = client, errors
        self._shown, self._ttl = settings.address.shown, settings.ttl

    def look(self, names: Sequence[str], points: Sequence[Point] = (), *, patient: bool = False) -> Look:
        if not names and not points:
            return Look(0)
        with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            for name in (*names, *(p.name for p in points)):
                self._ask(pipeline, name)
            found = pipeline.execute()
        leading = next((i for i, there in enumerate(found[: len(names)]) if not there), len(names))
        usable = (i for i, p in enumerate(points) if p.needs <= leading and found[len(names) + i])
        return Look(leading, max(usable, default=-1))

    def _ask(self, pipeline: Any, name: str) -> None:
        """Ask whether there is a value. Its time begins anew, unless this process only looks."""
        if self._ttl:
            pipeline.expire(name, self._ttl)
        else:
            pipeline.exists(name)

    def get(self, name: str) -> bytes | None:
        with self._translated(), self._client.pipeline(transaction=False) as pipeline:
            pipeline.getrange(name, 0, VALUE_BYTES)  # one byte more than a value has
            self._ask(pipeline, name)
            value, there = pipeline.execute(raise_on_error=False)
            if isinstance(value, self._errors.ResponseError) and "WRONGTYPE" in str(value):
                raise RecordError(RemoteReason.OTHER_FORMAT)
            for found in (value, there):
                if isinstance(found, self._errors.RedisError):
                    raise found
        if not there:
            return None
        if len(value) > VALUE_BYTES:
            raise RecordError(RemoteReason.TOO_LARGE)
        return bytes(value)

    def add(self, name: str, value: bytes) -> bool:
        with self._translated():
            return bool(self._client.set(name, value, nx=True, ex=self._ttl or None))

    def remove(self, name: str) -> None:
        with self._translated():
            self._client.unlink(name)

    def names(self, prefix: str) -> Iterator[Held]:
        at = 0
        while True:
            with self._translated():
                at, found = self._client.scan(at, match=_literally(prefix) + "*", count=_LISTED)
                with self._client.pipeline(transaction=False) as pipeline:
                    for name in found:
                        pipeline.strlen(name)
                    sizes = pipeline.execute(raise_on_error=False)
            for name, size in zip(found, sizes, strict=True):
                n_bytes = size if isinstance(size, int) else 0  # of what is no value
                yield Held(name.decode(errors="replace"), n_bytes)
            if not at:
                return

    def close(self) -> None:
        self._client.close()

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


def _again_on_a_new_connection(redis: Any) -> Any:
    """Returns the rule for a connection of the pool that the server has closed: once more. A call that took too long is
    not repeated."""
    return redis.retry.Retry(redis.backoff.NoBackoff(), 1, supported_errors=(redis.exceptions.ConnectionError,))


def open_redis(settings: StoreSettings) -> Store:
    try:
        import redis
        import redis.backoff
        import redis.retry
    except ModuleNotFoundError as error:
        raise ConfigError(f"{settings.address.shown} needs the package redis: pip install 'onefold[remote]'") from error
    try:
        client = redis.Redis.from_url(
            settings.address.url,
            socket_timeout=settings.deadline,
            socket_connect_timeout=settings.deadline,
            retry=_again_on_a_new_connection(redis),
            protocol=2,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{settings.address.shown} is no URL of a Redis server: {error}") from error
    return RedisStore(settings, client, redis.exceptions)
