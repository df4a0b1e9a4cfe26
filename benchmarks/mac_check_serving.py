"""The checks of `make mac-check` that start servers: the quick start, and the first token after a pause."""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import onefold  # noqa: F401  first: it preloads a real BLAS

# isort: split
import httpx
from mac_check_report import Found, Given, Say, table
from serve import OURS, THEIRS, Served, both

from onefold.cache.memory import device
from onefold.engine import demo_model
from onefold.errors import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from local_model import Shape, write_model

LATER_SECONDS = 0.2
"""How much longer the very first request may wait than the second."""
SLOWER = 1.2
SLACK_SECONDS = 0.005
"""Below what a clock and a busy machine can tell apart."""
QUESTION = "Explain in a few sentences what a radix tree is and when it is useful."


@contextlib.contextmanager
def model_to_serve(given: Given, say: Say) -> Iterator[tuple[str, str]]:
    """Yields the name of a model for `onefold serve`, and its folder: the one that was given, the demo model, or with
    --quick, or where the demo model cannot be fetched, a generated one."""
    if given.model:
        yield given.model, given.model
        return
    with tempfile.TemporaryDirectory() as folder:
        if not given.quick:
            try:
                found = str(demo_model.folder())
            except ConfigError as error:
                say(f"a generated model takes the place of the demo model: {error}")
            else:
                yield "demo", found
                return
        generated = str(write_model(Path(folder) / "model", Shape(layers=4, heads=4, kv_heads=2, intermediate=512)))
        yield generated, generated


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": question}]


def demo(given: Given, say: Say) -> Found:
    """The quick start: two turns, a fresh run of the second, both loopback addresses, and the end."""
    tokens = 24 if given.quick else 64
    with model_to_serve(given, say) as (model, folder):
        say(f"starting onefold serve {'demo' if model == 'demo' else 'MODEL'} --host localhost")
        server = Served(OURS, model, folder, host="localhost")
        try:
            server.ready()
            first = server.ask(_messages(f"First: {QUESTION}"), tokens)
            other = server.ask(_messages(f"Other: {QUESTION}"), tokens)
            turn = [*_messages(f"First: {QUESTION}"), {"role": "assistant", "content": first.text}]
            turn.append({"role": "user", "content": "Say that in other words."})
            second = server.ask(turn, tokens)
            reached = _reached(server.port)
        finally:
            code = server.end()
        say(f"ended with {code}; a fresh server answers the second turn")
        fresh_server = Served(OURS, model, folder)
        try:
            fresh_server.ready()
            fresh = fresh_server.ask(turn, tokens)
        finally:
            fresh_server.end()
    faults = [] if second.cached else ["the second turn reused nothing"]
    if second.text != fresh.text:
        same = next((i for i, (a, b) in enumerate(zip(second.text, fresh.text, strict=False)) if a != b), 0)
        faults.append(f"the second turn differs from a fresh run's from character {same} on")
    faults += [] if code == 0 else [f"SIGTERM ended the server with {code}"]
    later = first.first_token_seconds - other.first_token_seconds
    if later > LATER_SECONDS and device.on_gpu():
        faults.append(f"the first request waited {later * 1e3:.0f} ms longer than the second")
    faults += [f"{address} does not answer: {why}" for address, why in reached.items() if why]
    rows = [
        ("first request, first token", f"{first.first_token_seconds * 1e3:.0f} ms"),
        ("second request (as long, not cached), first token", f"{other.first_token_seconds * 1e3:.0f} ms"),
        ("second turn, first token", f"{second.first_token_seconds * 1e3:.0f} ms, {second.cached} tokens reused"),
        ("the same on a fresh server, its first request", f"{fresh.first_token_seconds * 1e3:.0f} ms"),
        ("addresses of localhost", ", ".join(reached)),
        ("exit code after SIGTERM", str(code)),
    ]
    told = f"{second.cached} tokens reused, {'the same text' if second.text == fresh.text else 'another text'}, "
    told += f"first token {first.first_token_seconds * 1e3:.0f} ms, then {other.first_token_seconds * 1e3:.0f} ms"
    told += "" if device.on_gpu() else " (times are not judged on a CPU)"
    return Found(told, table(("", ""), rows), faults)


def _reached(port: int) -> dict[str, str]:
    """The addresses of localhost, each with the reason why it does not answer."""
    found: dict[str, str] = {}
    for family, *_, at in socket.getaddrinfo("localhost", port, type=socket.SOCK_STREAM):
        host = str(at[0])
        url = f"http://[{host}]:{port}/health" if family == socket.AF_INET6 else f"http://{host}:{port}/health"
        try:
            status = httpx.get(url, trust_env=False, timeout=10).status_code
            found[host] = "" if status == 200 else f"status {status}"
        except httpx.TransportError as error:
            found[host] = str(error) or type(error).__name__
    return found


# -- after a pause ---------------------------------------------------------------------------------------


def _first_token(server: Served) -> float:
    """Seconds from a request whose prompt is known to its first token."""
    return server.ask(_messages(QUESTION), 4).first_token_seconds


def idle(given: Given, say: Say) -> Found:
    """The first token after a pause against the first token of a busy server, ours and mlx-lm's in turns."""
    pauses, rounds = ((1.0,), 3) if given.quick else ((1.0, 5.0, 10.0), 3)
    busy: dict[str, list[float]] = {OURS: [], THEIRS: []}
    gaps: dict[str, list[float]] = {OURS: [], THEIRS: []}
    after: dict[tuple[str, float], list[float]] = {}
    with model_to_serve(given, say) as (model, folder), both(model, folder) as servers:
        for server in servers:  # both have the prompt, and their kernels
            _first_token(server)
        for number in range(rounds):
            order = servers if number % 2 else servers[::-1]
            for server in order:
                stream = server.ask([{"role": "user", "content": "Tell a long story."}], 48)
                gaps[server.name] += [b - a for a, b in zip(stream.times, stream.times[1:], strict=False)]
                busy[server.name].append(_first_token(server))
            for pause in pauses:
                say(f"round {number + 1} of {rounds}: {pause:.0f} s without a request")
                for server in order:
                    server.ask([{"role": "user", "content": "Tell a long story."}], 8)
                    time.sleep(pause)
                    after.setdefault((server.name, pause), []).append(_first_token(server))
    faults: list[str] = []
    rows: list[tuple[str, ...]] = []
    median = statistics.median
    for pause in pauses:
        ours, theirs = (median(after[name, pause]) for name in (OURS, THEIRS))
        slower = {OURS: ours / median(busy[OURS]), THEIRS: theirs / median(busy[THEIRS])}
        rows.append((f"{pause:.0f} s", _ms(ours), f"{slower[OURS]:.2f}", _ms(theirs), f"{slower[THEIRS]:.2f}"))
        if device.on_gpu() and ours > SLOWER * slower[THEIRS] * median(busy[OURS]) + SLACK_SECONDS:
            faults.append(f"after {pause:.0f} s: {slower[OURS]:.2f} times the busy time, mlx-lm {slower[THEIRS]:.2f}")
    rows.insert(0, ("none", _ms(median(busy[OURS])), "1", _ms(median(busy[THEIRS])), "1"))
    rows.append(("gap of a stream", *(x for n in (OURS, THEIRS) for x in (_ms(median(gaps[n] or [0.0])), ""))))
    told = "; ".join(f"after {row[0]}: {row[2]} times, mlx-lm {row[4]}" for row in rows[1:-1])
    header = ("pause", "Onefold, first token", "times busy", "mlx-lm, first token", "times busy")
    return Found(told, table(header, rows), faults, "" if device.on_gpu() else "times are not judged on a CPU")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
