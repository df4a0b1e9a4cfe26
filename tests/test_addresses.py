"""Which addresses the server binds: all that a name has, at one port, and none at which another program answers."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from listening import wait_until
from scripted_engine import ScriptedEngine

from onefold.cli import main
from onefold.server import addresses
from onefold.server.addresses import Address, bind, is_answered
from onefold.server.app import make_app
from onefold.server.running import Server
from onefold.server.settings import Settings

V4, V6 = "127.0.0.1", "::1"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as made:
            made.bind((V6, 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")


@contextmanager
def bound(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    with ExitStack() as held:
        yield [held.enter_context(sock) for sock in bind(host, port)]


@contextmanager
def another(host: str = V4, family: int = socket.AF_INET, **options: bool) -> Iterator[int]:
    """Another program that listens; where."""
    with socket.socket(family) as other:
        if options.get("shared"):
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind((host, 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that has both addresses, and one of them twice."""

    original = socket.getaddrinfo

    def found(host: Any, port: Any, family: int = 0, type: int = 0, *more: Any, **others: Any) -> list[Any]:
        if host != "localhost":  # a client
            return original(host, port, family, type, *more, **others)
        six = (socket.AF_INET6, type, socket.IPPROTO_TCP, "", (V6, port, 0, 0))
        return [six, (socket.AF_INET, type, socket.IPPROTO_TCP, "", (V4, port)), six]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", found)


@needs_ipv6
def test_every_address_of_a_name_is_served_at_one_port(localhost: None) -> None:
    engine, settings = ScriptedEngine(), Settings(host="localhost", grace_seconds=1.0)
    server = Server(make_app(engine, settings), engine, settings)  # type: ignore[arg-type]
    with bound("localhost") as socks:
        assert [sock.getsockname()[0] for sock in socks] == [V6, V4]
        (port,) = {sock.getsockname()[1] for sock in socks}
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(socks)))
        thread.start()
        try:
            wait_until(lambda: server.started or not thread.is_alive(), "the server does not start")
            for host in (V4, f"[{V6}]"):
                assert httpx.get(f"http://{host}:{port}/health").json()["status"] == "ok"
        finally:
            server.should_exit = True
            thread.join(60)


@needs_ipv6
def test_a_free_port_is_free_at_every_address(localhost: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original, tried = addresses._bind, list[Address]()

    def taken(address: Address, *, only: bool) -> socket.socket:
        tried.append(address)
        if len(tried) in (2, 4):
            raise OSError(errno.EADDRINUSE, "in use")
        return original(address, only=only)

    monkeypatch.setattr(addresses, "_bind", taken)
    with bound("localhost") as socks:
        assert len(tried) == 6 and len({sock.getsockname()[1] for sock in socks}) == 1


@needs_ipv6
def test_one_address_in_use_is_enough_to_refuse(localhost: None) -> None:
    for host, family in ((V4, socket.AF_INET), (V6, socket.AF_INET6)):
        with another(host, family) as port, pytest.raises(OSError) as refused:
            bind("localhost", port)
        assert refused.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize("why", [errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT])
def test_a_system_without_ipv6(localhost: None, monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    original = addresses._bind
    absent = {socket.AF_INET6}

    def bind_(address: Address, *, only: bool) -> socket.socket:
        if address.family in absent:
            raise OSError(why, "not here")
        return original(address, only=only)

    monkeypatch.setattr(addresses, "_bind", bind_)
    with bound("localhost") as (sock,):
        assert sock.getsockname()[0] == V4
    absent.add(socket.AF_INET)
    with pytest.raises(OSError, match="not here"):
        bind("localhost", 0)


def test_a_listener_is_noticed_at_its_address_and_at_every_address() -> None:
    tcp = socket.IPPROTO_TCP
    for host in (V4, "0.0.0.0"):
        with another(host, shared=True) as port:
            assert is_answered(Address(socket.AF_INET, tcp, (V4, port)))
            assert is_answered(Address(socket.AF_INET, tcp, ("0.0.0.0", port)))
            assert not is_answered(Address(socket.AF_INET, tcp, ("192.0.2.1", port))), "no packet leaves this machine"
        assert not is_answered(Address(socket.AF_INET, tcp, (V4, port)))


def test_a_port_that_another_program_has_on_every_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the system itself would allow it, as macOS does: what binds it here is not asked."""
    monkeypatch.setattr(addresses, "_bind", lambda *_, **__: pytest.fail("bound although it is in use"))
    with another("0.0.0.0", shared=True) as port:
        assert main(["serve", "m", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on {V4} port {port}: Address already in use. Choose another with --port" in said


def test_a_port_that_is_bound_and_not_listened_to_is_no_answer() -> None:
    with bound(V4) as (sock,):
        assert not is_answered(Address(socket.AF_INET, socket.IPPROTO_TCP, sock.getsockname()))
