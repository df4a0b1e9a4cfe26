"""The settings of `onefold serve`, as flags and as environment variables, and how their values are read.

Other commands have some of these flags too. An invalid value is an `argparse.ArgumentTypeError` with a sentence.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from onefold.cache.model.formats.names import NAMES

MAX_KV_SIZE = 131_072
KEEP = 4_096
AUTO_FOLDER = "a folder in the system's cache folder (./auto is a folder of that name)"
LEVELS = ("debug", "info", "warning", "error")


def _number(text: str, kind: type = float, least: float = 0, most: float = 1e15, above: bool = False) -> Any:
    """`above`: `least` itself is too little."""
    try:
        found = kind(text.replace(",", ""))
    except ValueError:
        found = None
    if found is None or not least <= found <= most or (above and found == least):
        what = {int: "a whole number", float: "a number"}[kind]
        bounds = f"{'above' if above else 'of at least'} {least}" + (f" and at most {most:g}" if most < 1e15 else "")
        raise argparse.ArgumentTypeError(f"{what} {bounds} is needed, not {text!r}")
    return found


def _share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.01 <= found <= 0.99:
        raise argparse.ArgumentTypeError(f"a number from 0.01 to 0.99 is needed, not {text!r}")
    return found


def _name(text: str) -> str:
    """A host's name or address, or *."""
    if text != "*" and (not text.strip() or set(text) & set("/*@?# ")):
        raise argparse.ArgumentTypeError(f"a name such as box.local, or * for any, is needed, not {text!r}")
    return text


def _not_empty(text: str, wanted: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"the value is empty: give {wanted}, or leave the option out")
    return text


def size(text: str, total_bytes: int | None = 1 << 40) -> str:
    """Checks that the text is a size. Without `total_bytes` a share, such as 60%, is an error."""
    from onefold.sizes import parse_size

    try:
        parse_size(text, total_bytes=total_bytes)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _budget(text: str) -> str:
    return text if text == "auto" else size(text)


def _folder(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError(f"a folder is needed, not {text!r}")
    return text


def _mode(text: str) -> str:
    if text not in ("back", "through"):
        raise argparse.ArgumentTypeError(f"must be back or through, got {text!r}")
    return text


def _write(text: str) -> str:
    if text not in ("shared", "all", "none"):
        raise argparse.ArgumentTypeError(f"must be shared, all or none, got {text!r}")
    return text


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def age(text: str) -> float:
    """Returns the seconds of an age such as 30m, 1.5h or 7d."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", text.lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"an age is a number of s, m, h, d or w: 30m, 1.5h, 7d or 2w, not {text!r}")
    return float(found[1]) * _SECONDS[found[2]]


def _level(text: str) -> str:
    if text.lower() not in LEVELS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(LEVELS)}, got {text!r}")
    return text.lower()


count = partial(_number, kind=int)
positive = partial(_number, kind=int, least=1)
seconds = partial(_number, above=True, most=1e6)


class _FromEnvironment(str):
    """A value from an environment variable, so that an error names the variable and not the flag."""


@dataclass(frozen=True)
class Flag:
    """One setting: `--name`, or its environment variable."""

    name: str
    help: str
    type: Callable[[str], Any] = str
    default: str | None = None
    metavar: str | None = None
    many: bool = False
    """It can be repeated; in the environment it is a list with commas."""

    @property
    def variable(self) -> str:
        return "ONEFOLD_" + self.name.upper().replace("-", "_")

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def from_environment(self) -> str | None:
        """What its environment variable says; None if that is not set or empty."""
        return os.environ.get(self.variable, "").strip() or None

    def add_to(self, parser: argparse.ArgumentParser, group: Any = None) -> None:
        """Add it to a parser, in a group of its help if that is given."""
        within = group or parser
        told = self.help + (f" (default {self.default})" if self.default else "") + f" [{self.variable}]"
        given = self.from_environment
        kind = partial(self._read, parser)
        if self.type is bool:
            on = (given or self.default or "").lower() in ("1", "true", "yes", "on")
            within.add_argument(f"--{self.name}", action=argparse.BooleanOptionalAction, default=on, help=told)
        elif self.many:
            within.add_argument(f"--{self.name}", action="append", type=kind, metavar=self.metavar, help=told)
        else:
            default = _FromEnvironment(given) if given else self.default
            within.add_argument(f"--{self.name}", type=kind, default=default, metavar=self.metavar, help=told)

    def _read(self, parser: argparse.ArgumentParser, text: str) -> Any:
        try:
            return self.type(text)
        except argparse.ArgumentTypeError as error:
            if isinstance(text, _FromEnvironment):
                parser.error(f"environment variable {self.variable} (--{self.name}): {error}")
            raise

    def listed(self, given: argparse.Namespace) -> tuple[str, ...]:
        """Returns the values of a repeatable flag from the command line, or else from the environment."""
        there = getattr(given, self.dest) or os.environ.get(self.variable, "").split(",")
        return tuple(part.strip() for part in there if part.strip())


API_KEY = Flag("api-key", "a key that clients must send; can be repeated. The process list shows command lines to "
               "other users: prefer --api-key-file or the variable", partial(_not_empty, wanted="a key"),
               metavar="KEY", many=True)  # fmt: skip
API_KEY_FILE = Flag("api-key-file", "a file with API keys, one per line",
                    partial(_not_empty, wanted="a file with one key per line"), metavar="FILE")  # fmt: skip
ALIAS = Flag("alias", "another name for the model in requests, * for any; can be repeated", metavar="NAME", many=True)
CORS_ORIGIN = Flag("cors-origin", "an allowed web origin, * for any; can be repeated", metavar="ORIGIN", many=True)
ALLOWED_HOST = Flag("allowed-host", "a host name that clients may use besides localhost and the server's addresses, "
                    "* for any; can be repeated", _name, metavar="NAME", many=True)  # fmt: skip

REMOTE = Flag("remote", "a store that several machines share: redis://, rediss://, s3://, gs:// or file://",
              partial(_not_empty, wanted="the URL of a store"), metavar="URL")  # fmt: skip
REMOTE_SECRET = Flag("remote-secret-file", "a file with a secret of at least 16 bytes that all these machines have: "
                     "only what was sealed with it is used", partial(_not_empty, wanted="a file"),
                     metavar="FILE")  # fmt: skip

LISTENING = (
    Flag("host", "address to listen on; a name stands for all its addresses", default="127.0.0.1", metavar="ADDRESS"),
    Flag("port", "port to listen on; 0 picks a free one", partial(count, most=65535), "8080", "PORT"),
    ALIAS,
    CORS_ORIGIN,
    ALLOWED_HOST,
    Flag("page", "a page at / that shows what is held, by whom, and what is evicted next", bool, "yes"),
    Flag("show-text", "show on that page what prompts say, to everyone who may see it", bool),
)  # fmt: skip
ACCESS = (
    API_KEY,
    API_KEY_FILE,
    Flag("namespace-per-key", "share KV only among requests with the same API key", bool),
)  # fmt: skip
MEMORY = (
    Flag("budget", "memory for KV and for what is being computed, beside the weights: 8GB, 24GiB, 60%%; auto is "
         "four fifths of the device's memory less the weights, and less while the machine's memory is short", _budget,
         "auto", "SIZE"),
    Flag("kv", f"format of stored KV: {', '.join(NAMES)}; 16 is as the model makes it, the others have about so many "
         "bits; 4+2 is 4, with the first two and the last two layers as the model makes them", str, "16", "FORMAT"),
    Flag("max-kv-size", "the most tokens of a conversation; beyond that its middle is dropped; 0 is no bound; "
         f"by default {MAX_KV_SIZE}", count, None, "TOKENS"),
    Flag("keep", f"the first tokens of such a conversation, which always stay; by default {KEEP}, or half of "
         "--max-kv-size if that is less", count, None, "TOKENS"),
)  # fmt: skip
DISK = (
    Flag("disk", f"a folder that keeps conversations across restarts, or auto: {AUTO_FOLDER}; by default nothing is "
         "kept", _folder, None, "DIR"),
    Flag("disk-budget", "the most bytes in that folder: 100GB, 20%%; by default half of the free space, and at most "
         "100GB", size, None, "SIZE"),
    Flag("disk-mode", "back: write KV when it is evicted from memory and at the end; through: after every answer",
         _mode, "back", "MODE"),
    Flag("disk-daily-limit", "the most bytes written in a day: 20GB; by default no limit",
         partial(size, total_bytes=None), None, "SIZE"),
)  # fmt: skip
SHARED = (
    REMOTE,
    REMOTE_SECRET,
    Flag("remote-write", "what is written there: shared, what two conversations have in common, at once, and the ends "
         "of turns after 30 s; all, at once; none", _write, "shared", "WHAT"),
    Flag("remote-ttl", "forget what was not used there for this long: 12h, 30d; a bucket has rules of its own", age,
         "30d", "AGE"),
    Flag("remote-deadline", "the longest time that the store may take to answer", partial(_number, above=True, most=60),
         "1", "SECONDS"),
    Flag("remote-insecure", "use a store of another machine without a secret: who can write there can change answers",
         bool),
)  # fmt: skip
QUEUE = (
    Flag("max-batch", "the most requests that run at once", positive, "32", "REQUESTS"),
    Flag("max-queue", "the most requests that wait; more are refused with 503", positive, "128", "REQUESTS"),
    Flag("queue-timeout", "the longest time that a request waits", seconds, "600", "SECONDS"),
    Flag("prefill-chunk", "the most tokens of a prompt in one forward", positive, "2048", "TOKENS"),
    Flag("prefill-share", "the share of the time that prompts get while answers are streamed (0.01 to 0.99)", _share,
         "0.5", "SHARE"),
    Flag("body-limit", "the largest request body", partial(size, total_bytes=None), "32MiB", "SIZE"),
    Flag("keep-alive", "send a keep-alive on a stream after this long without data", seconds, "5", "SECONDS"),
    Flag("send-timeout", "disconnect a client that does not read for this long", seconds, "60", "SECONDS"),
)  # fmt: skip
ANSWERS = (
    Flag("max-tokens", "the most tokens of an answer if the request sets no limit; by default no limit", positive, None,
         "TOKENS"),
    Flag("temperature", "for requests that set none; by default what the model recommends",
         partial(_number, most=2), None, "T"),
    Flag("top-p", "for requests that set none", partial(_number, most=1, above=True), None, "P"),
    Flag("top-k", "for requests that set none", count, None, "K"),
    Flag("min-p", "for requests that set none", partial(_number, most=1), None, "P"),
    Flag("repetition-penalty", "for requests that set none", partial(_number, most=10, above=True), None, "X"),
    Flag("ignore-context-length", "allow prompts and answers that are longer than the model's context", bool),
)  # fmt: skip
PROCESS = (
    Flag("grace", "time for running requests when the server stops", partial(_number, most=1e6), "5", "SECONDS"),
    Flag("until-eof", "end when standard input ends, for a program that starts this server", bool),
    Flag("log-level", f"{', '.join(LEVELS)}", _level, "info", "LEVEL"),
)  # fmt: skip
GROUPS = {
    "where it listens": LISTENING,
    "who may use it": ACCESS,
    "memory for KV": MEMORY,
    "KV on disk": DISK,
    "KV that several machines share": SHARED,
    "requests and their order": QUEUE,
    "answers, where a request does not say": ANSWERS,
    "the process": PROCESS,
}
"""Those of `onefold serve`, in the groups of its help."""
FLAGS = tuple(flag for group in GROUPS.values() for flag in group)
