"""`onefold demo`: runs a real server and several agents on one system prompt, and shows time and memory.

Starts the server as anybody would, talks with it over HTTP, shows what was measured, and ends it. However this ends,
the server ends too.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from onefold.cli import flags, serve
from onefold.cli.command_line import Parser, complain, ended_in_order

if TYPE_CHECKING:
    from rich.console import Console

    from onefold.cli.server_process import ServerProcess

HELP = "run a demo: a server, and agents that share a system prompt"
NAME = "onefold demo"
SILENCE_SECONDS = 300.0
"""A server that sends nothing for so long has failed."""


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog=NAME,
        description="Starts a server, runs agents against it over HTTP, and shows the cost.",
        epilog="Takes the options of `onefold serve`, too, such as --port, --budget and --kv.",
        allow_abbrev=False,
    )
    made.add_argument("--agents", type=partial(flags.positive, most=32), default=4, metavar="N", help="default 4")
    made.add_argument("--turns", type=partial(flags.positive, most=32), default=3, metavar="N", help="default 3")
    told = 'a folder, a Hugging Face id, or "demo": a small model, fetched once (93 MB). That is the default'
    made.add_argument("--model", default="demo", metavar="MODEL", help=told)
    told = "keep the server, with its page, running until Ctrl-C"
    made.add_argument("--keep", "--keep-running", action="store_true", help=told)
    return made


def run(arguments: list[str]) -> int:
    given, options = parser().parse_known_args(arguments)
    for flag in flags.FLAGS:
        os.environ.pop(flag.variable, None)  # the demo's server has the options of the command line alone
    of_serve = serve.parser(NAME).parse_args([given.model, *options])
    if of_serve.host != "127.0.0.1":
        return complain(NAME, "the demo listens on 127.0.0.1: leave --host out")
    from onefold.errors import ConfigError

    try:
        keys = serve.api_keys(of_serve)
        with ended_in_order():
            return _show(given, options, keys[0] if keys else "")
    except ConfigError as error:
        return complain(NAME, str(error), 1)


def _show(given: argparse.Namespace, options: list[str], api_key: str) -> int:
    """Starts the server with these options of its own, runs the demo and stops the server. Raises ConfigError."""
    from onefold.cli import demo_report
    from onefold.cli.server_process import ServerProcess
    from onefold.engine import demo_model
    from onefold.engine.loading import DEMO
    from onefold.errors import ServerError

    screen = demo_report.console()
    if given.model == DEMO:
        demo_model.folder()  # here rather than in the server, so that its progress is seen
    server = ServerProcess(given.model, options)
    try:
        _with(server, given, screen, api_key)
    except ServerError as error:
        said = server.last_lines()
        code = complain(NAME, str(error).rstrip(".") + ("; its last output:" if said else ""), 1)
        for line in said:
            print(f"    {line}", file=sys.stderr, flush=True)
        return code
    finally:
        screen.print(f"\nStopping the server (process {server.pid}).")
        server.stop()
    screen.print("The server is stopped.")
    return 0


def _with(server: ServerProcess, given: argparse.Namespace, screen: Console, api_key: str) -> None:
    """Runs the agents against the server and prints the report. Raises ServerError."""
    from onefold.cli import demo_agents, demo_report
    from onefold.cli.client import Client
    from onefold.cli.demo_script import role

    with demo_report.waiting(screen, f"Starting onefold serve {given.model}") as show:
        server.wait_until_up(show)
    screen.print(f"The server is up at {server.url}, process {server.pid}.", soft_wrap=True)
    screen.print(f"Its page, which shows what is held and by whom: {server.url}/", soft_wrap=True)
    screen.print(_plan(given))
    client = Client(server.url, api_key=api_key, silence_seconds=SILENCE_SECONDS)
    names = [role(number).desk for number in range(given.agents)]
    with demo_report.stage(screen, names, given.turns) as hear:
        played = demo_agents.play(client, given.agents, given.turns, hear)
    demo_report.report(screen, played, client.get("/v1/cache"))
    if given.keep:
        _keep(server, screen)


def _plan(given: argparse.Namespace) -> str:
    return (
        f"Agents at a library's evening desk: {given.agents}. Questions to each: {given.turns}. Every request begins "
        "with the same house rules. The first request runs alone and computes them; then all agents run at once and "
        "reuse them."
    )


def _keep(server: ServerProcess, screen: Console) -> None:
    """Keeps the server running until Ctrl-C. Raises ServerError if the server ends by itself."""
    question = '\'{"messages": [{"role": "user", "content": "What is a bicycle?"}], "max_tokens": 32}\''
    screen.print(f"\nThe server keeps running at {server.url}. Press Ctrl-C here to stop it.\n", soft_wrap=True)
    for line in (
        f"curl {server.url}/v1/chat/completions -H 'Content-Type: application/json' -d {question}",
        f"curl {server.url}/v1/messages -H 'Content-Type: application/json' -d {question}",
        f"curl {server.url}/v1/cache",
        f"onefold chat --url {server.url}",
    ):
        screen.print(f"  {line}", soft_wrap=True, markup=False)
    with suppress(KeyboardInterrupt):
        server.wait()
