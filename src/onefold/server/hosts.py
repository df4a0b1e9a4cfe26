"""Checks a request's Host: it must be an address or a name that the server was given.

A web page can have its own name point at this machine (DNS rebinding), and then reads answers as its own, without an
`Origin`. The `Host` that a browser sends is the page's name, so it tells such a request from others.

    loopback       localhost and the loopback addresses
    --host         as it was given; where that is every address (0.0.0.0, ::), any address, as none is a name
    --allowed-host adds names to these; * is any

A request without a Host, or with an empty one, is let pass: a browser always sends the page's name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from onefold.server.errors import Problem
from onefold.server.limits import header
from onefold.server.respond import respond

SAID = (
    "Host not allowed. Use localhost or the server's address, or start the server "
    "with --allowed-host NAME."
)
_HOST = re.compile(r"(?:\[([^\[\]]+)\]|([^\[\]:@/]+))(?::[0-9]*)?")


class Names:
    """The hosts that a server may be asked by: `bound` is what it listens on, `allowed` what was added."""

    def __init__(self, bound: str, allowed: Iterable[str]) -> None:
        self._names = {"localhost", *(name_of(name) for name in (bound, *allowed))}
        at = _address(name_of(bound))
        self._any_address = at is not None and at.is_unspecified

    def allow(self, host: str) -> bool:
        """Whether a request with this Host is answered."""
        return not host or "*" in self._names or self.have(host)

    def have(self, host: str) -> bool:
        """Whether this host is the server's own: a name that it was given, or an address that it listens on. What only
        `*` allows is not: any web page can have its name point at this machine."""
        name = name_of(host)
        at = _address(name)
        return name in self._names or (at is not None and (at.is_loopback or self._any_address))


class Hosts:
    def __init__(self, app: ASGIApp, names: Names) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._names.allow(header(scope, b"host")):
            await respond(scope, Problem(403, SAID, "host_not_allowed"))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def name_of(host: str) -> str:
    """A Host without its port and without brackets, in lower case. What is no such thing stays as it is."""
    host = host.strip().lower()
    if _address(host) is not None:
        return host
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).rstrip(".") if found else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    at = _address(name_of(host))
    return name_of(host) == "localhost" if at is None else at.is_loopback


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None
