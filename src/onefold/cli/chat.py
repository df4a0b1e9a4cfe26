"""`onefold chat`: chat with a model in the terminal, one that is started here or one behind a server.

This file parses the command line and makes a source of answers. chat_loop.py is the chat itself. A model or a URL that
cannot be used gives one line on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from onefold.cli import flags, serve
from onefold.cli.command_line import Parser, complain, ended_in_order
from onefold.cli.key_file import read_keys

if TYPE_CHECKING:
    from onefold.cli.answering import Source

HELP = "chat with a model in the terminal"
NAME = "onefold chat"

OF_SERVE = {flag.name: flag for flag in flags.FLAGS}
"""The flags of `onefold serve`, which this command shares."""

ENGINE = tuple(OF_SERVE[name] for name in ("budget", "kv", "max-kv-size", "keep", "ignore-context-length"))
ANSWER = (
    replace(OF_SERVE["max-tokens"], help="the most tokens of an answer", default="4096"),
    replace(OF_SERVE["temperature"], help="0 always picks the likeliest token; by default what the model recommends"),
    OF_SERVE["top-p"],
)
API_KEY = flags.Flag("api-key", "the server's API key", metavar="KEY")
API_KEY_FILE = flags.Flag("api-key-file", "a file with the API key in its first line", metavar="FILE")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog=NAME,
        description="Chats with a model, either started here or behind a server.",
        epilog="Each flag can also be set by the environment variable in brackets; the flag wins.",
        allow_abbrev=False,
    )
    told = 'a folder, a Hugging Face id, or "demo" (default); with --url the name of the model there '
    made.add_argument("model", metavar="MODEL", nargs="?", help=told + "[ONEFOLD_MODEL, without --url]")
    made.add_argument("--url", metavar="URL", help="chat with the server at this URL, such as http://127.0.0.1:8080")
    for flag in (API_KEY, API_KEY_FILE, *ENGINE, *ANSWER):
        flag.add_to(made)
    made.add_argument("--seed", type=flags.count, metavar="N", help="the same seed gives the same answers")
    made.add_argument("--system", metavar="TEXT", default="", help="the system prompt")
    return made


def run(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    if given.url is not None:
        typed = {argument.split("=")[0] for argument in arguments}
        if wrong := [f"--{flag.name}" for flag in ENGINE if f"--{flag.name}" in typed]:
            return complain(NAME, f"{' and '.join(wrong)} cannot be used with --url: the server has its own settings")
    with ended_in_order():
        return _talk(given)


def _talk(given: argparse.Namespace) -> int:
    from onefold.cli.chat_loop import Chat  # takes seconds to import, with all that it needs: not for --help
    from onefold.cli.conversation import Conversation
    from onefold.cli.lines import Lines
    from onefold.cli.screen import Screen
    from onefold.errors import ConfigError, OnefoldError

    lines, screen = Lines(), Screen()
    try:
        source = _source(given, screen.note if lines.typed else lambda _: None)
    except ConfigError as error:
        return complain(NAME, str(error))
    except OnefoldError as error:
        return complain(NAME, str(error), 1)
    with contextlib.closing(source):
        return Chat(source, lines, screen, Conversation(given.system), given.max_tokens).run()


def _source(given: argparse.Namespace, note: Callable[[str], None]) -> Source:
    """Returns the source of answers. Raises ConfigError and ServerError."""
    from onefold.cli.answering import Here, There, Wishes
    from onefold.cli.client import Client

    wishes = Wishes(max_tokens=given.max_tokens, temperature=given.temperature, top_p=given.top_p, seed=given.seed)
    if given.url is not None:
        key = (given.api_key or "").split(",")[0].strip()  # for a server the variable may list several
        if not key and given.api_key_file:
            key = read_keys(given.api_key_file)[0]
        return There(Client(given.url, api_key=key), wishes, given.model or "")
    given.model = given.model or os.environ.get("ONEFOLD_MODEL", "").strip() or "demo"
    note(f"loading {given.model}")
    return Here(serve.make_engine(given), wishes)
