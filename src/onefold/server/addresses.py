"""The addresses that the server listens on: all that its host's name stands for, and none that is in use."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from typing import Any, NamedTuple

TRIES = 16
"""A free port of one address may be in use at another one."""
CONNECT_SECONDS = 0.5
_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
"""What a system says of an address that it does not have, such as ::1 without IPv6."""


class Address(NamedTuple):
    family: int
    protocol: int
    at: tuple[Any, ...]
    """Host and port, and for IPv6 the flow and the scope."""

    def on(self, port: int) -> Address:
        return self._replace(at=(self.at[0], port, *self.at[2:]))


def bind(host: str, port: int) -> list[socket.socket]:
    """Binds every address of this host that the system has, all at one port, and does not listen yet: clients that
    connect before the server is ready are refused. Raises OSError if there is none, or if one is in use."""
    try:
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is empty or too long
        raise OSError(errno.EINVAL, f"{host!r} is not a name of a host") from error
    found = [Address(family, protocol, at) for family, _, protocol, _, at in known]
    found = list(dict.fromkeys(found))
    if port and any(is_answered(address) for address in found):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    for _ in range(TRIES - 1):
        with contextlib.suppress(_NotAll):
            return _bind_all(found, port)
    return _bind_all(found, port)


def is_answered(address: Address) -> bool:
    """Whether a program accepts connections at this address, or for every address, at the loopback address of this
    machine. Other addresses are not asked.

    Where a program listens on every address, BSD and macOS let another one bind a single address at the same port, and
    the reverse; clients then reach one or the other."""
    host = ipaddress.ip_address(str(address.at[0]).partition("%")[0])
    if host.is_unspecified:
        loopback = "127.0.0.1" if host.version == 4 else "::1"
        address = address._replace(at=(loopback, *address.at[1:]))
    elif not host.is_loopback:
        return False
    try:
        with socket.socket(address.family, socket.SOCK_STREAM, address.protocol) as asking:
            asking.settimeout(CONNECT_SECONDS)
            asking.connect(address.at)
            # with the port as its own, a socket connects to itself
            return bool(asking.getsockname() != asking.getpeername())
    except OSError:
        return False


class _NotAll(OSError):
    """The free port of one address is in use at another one."""


def _bind_all(addresses: list[Address], port: int) -> list[socket.socket]:
    """Raises OSError; `_NotAll` if the port was free to choose, and another one may do."""
    absent: OSError | None = None
    bound: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        for address in addresses:
            chosen = bound[0].getsockname()[1] if bound else port
            try:
                bound.append(undo.enter_context(_bind(address.on(chosen), only=len(addresses) > 1)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE and bound and port == 0:
                    raise _NotAll(error.errno, error.strerror) from error
                if error.errno not in _ABSENT:
                    raise
                absent = error
        if not bound:
            raise absent or OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        undo.pop_all()
    return bound


def _bind(address: Address, *, only: bool) -> socket.socket:
    """`only`: IPv6 does not take IPv4's connections too, as IPv4 has an address of its own. Raises OSError."""
    with contextlib.ExitStack() as undo:
        made = undo.enter_context(socket.socket(address.family, socket.SOCK_STREAM, address.protocol))
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if only and address.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address.at)
        undo.pop_all()
    return made
