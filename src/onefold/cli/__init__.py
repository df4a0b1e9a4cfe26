"""The `onefold` command."""

from __future__ import annotations

import argparse
import sys

import onefold
from onefold.cli import cache, chat, demo, doctor, mlx_lm_server, serve
from onefold.cli.command_line import INTERRUPTED, complain, write_no_more
from onefold.errors import NoBackend

COMMANDS = {
    "serve": serve,
    "chat": chat,
    "demo": demo,
    "cache": cache,
    "doctor": doctor,
    "mlx-lm-server": mlx_lm_server,
}


def main(argv: list[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    does = "Runs language models, and holds the KV (keys and values) of every token once."
    parser = argparse.ArgumentParser(prog="onefold", description=does)
    parser.add_argument("--version", action="version", version=f"onefold {onefold.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.HELP, add_help=False)
    chosen, rest = parser.parse_known_args(arguments[:1]), arguments[1:]
    name = chosen[0].command
    try:
        return COMMANDS[name].run(rest)
    except NoBackend as error:
        return complain(f"onefold {name}", str(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe
        write_no_more()
        return 1
