"""The kinds of shared stores, by the scheme of their URL. To add one, add a file here and a line in `STORES`."""

from __future__ import annotations

import ipaddress
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit, urlunsplit

from onefold.cache.tiers.remote.stores.objects import open_bucket, open_folder
from onefold.cache.tiers.remote.stores.redis import open_redis
from onefold.cache.tiers.remote.stores.store import Address, Bounded, Opener, Store, StoreError, StoreSettings
from onefold.errors import ConfigError


class Kind(NamedTuple):
    opener: Opener
    example: str
    host_is_a_machine: bool
    """Whether what comes after // is a machine, and no bucket."""


STORES: dict[str, Kind] = {
    "redis": Kind(open_redis, "redis://127.0.0.1:6379/0", True),
    "rediss": Kind(open_redis, "rediss://:password@cache.example:6380/0", True),
    "s3": Kind(open_bucket, "s3://bucket/folder", False),
    "gs": Kind(open_bucket, "gs://bucket/folder", False),
    "file": Kind(open_folder, "file:///srv/onefold", True),
}


def address_of(url: str) -> Address:
    """Returns what a URL says of a store. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError(
            "remote is no URL: a port is a number, an address with colons is in brackets, as in redis://[::1]:6379/0, "
            "and / # ? @ : [ ] in a password are %2F %23 %3F %40 %3A %5B %5D"
        ) from None  # the error's own text may have a part of the password
    kind = STORES.get(parts.scheme)
    if kind is None:
        examples = ", ".join(kind.example for kind in STORES.values())
        raise ConfigError(f"remote must be the URL of a shared store, such as {examples}")
    if parts.scheme != "file" and not parts.hostname:
        what = "machine" if kind.host_is_a_machine else "bucket"
        raise ConfigError(f"remote names no {what}: give one, as in {kind.example}")
    return Address(url, _without_password(parts, port), kind.host_is_a_machine and _is_this_machine(parts.hostname))


def open_store(settings: StoreSettings) -> Store:
    """Open the store of these settings, without connecting. Raises ConfigError."""
    try:
        return Bounded(settings, STORES[urlsplit(settings.address.url).scheme].opener)
    except StoreError as error:
        raise ConfigError(f"{error}: see whether its file system is mounted and answers") from error


def _without_password(parts: SplitResult, port: int | None) -> str:
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname or ""
    return urlunsplit((parts.scheme, f"{host}{'' if port is None else f':{port}'}", parts.path, "", ""))


def _is_this_machine(host: str | None) -> bool:
    if not host or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
