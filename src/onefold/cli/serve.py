"""`onefold serve MODEL`: the model behind OpenAI's and Anthropic's API.

This file alone turns the command line and the environment into the settings of the server and of the engine. An
invalid value gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import ipaddress
import logging
import math
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from onefold.cache.model.formats.names import NAMES
from onefold.cli.command_line import Parser, complain
from onefold.cli.key_file import read_keys
from onefold.cli.serve_ending import Ending
from onefold.errors import ConfigError, Unbounded
from onefold.sizes import show_size

if TYPE_CHECKING:
    from onefold.cache.tiers.disk.tier import DiskSettings
    from onefold.cache.tiers.remote.tier import RemoteSettings
    from onefold.engine.engine import Engine
    from onefold.server.settings import Settings

log = logging.getLogger("onefold")

HELP = "serve a model behind OpenAI's and Anthropic's API"

MAX_KV_SIZE = 131_072
KEEP = 4_096
AUTO_FOLDER = "a folder in the system's cache folder (./auto is a folder of that name)"
PACES = "remote.json"
"""In the system's cache folder: how quick shared stores are."""
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

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        told = self.help + (f" (default {self.default})" if self.default else "") + f" [{self.variable}]"
        given = os.environ.get(self.variable, "").strip()
        kind = partial(self._read, parser)
        if self.type is bool:
            on = given.lower() in ("1", "true", "yes", "on")
            parser.add_argument(f"--{self.name}", action=argparse.BooleanOptionalAction, default=on, help=told)
        elif self.many:
            parser.add_argument(f"--{self.name}", action="append", type=kind, metavar=self.metavar, help=told)
        else:
            default = _FromEnvironment(given) if given else self.default
            parser.add_argument(f"--{self.name}", type=kind, default=default, metavar=self.metavar, help=told)

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

FLAGS = (
    Flag("host", "address to listen on; a name stands for all its addresses", default="127.0.0.1", metavar="ADDRESS"),
    Flag("port", "port to listen on; 0 picks a free one", partial(count, most=65535), "8080", "PORT"),
    API_KEY,
    API_KEY_FILE,
    ALIAS,
    CORS_ORIGIN,
    ALLOWED_HOST,
    Flag("namespace-per-key", "share KV only among requests with the same API key", bool),
    Flag("budget", "memory for KV and activations: 8GB, 24GiB, 60%%; auto is four fifths of the device's memory less "
         "the weights, and less while the machine's memory is short", _budget, "auto", "SIZE"),
    Flag("disk", f"a folder that keeps conversations across restarts, or auto: {AUTO_FOLDER}; by default nothing is "
         "kept", _folder, None, "DIR"),
    Flag("disk-budget", "the most bytes in that folder: 100GB, 20%%; by default half of the free space, and at most "
         "100GB", size, None, "SIZE"),
    Flag("disk-mode", "back: write KV when it is evicted from memory and at the end; through: after every answer",
         _mode, "back", "MODE"),
    Flag("disk-daily-limit", "the most bytes written in a day: 20GB; by default no limit",
         partial(size, total_bytes=None), None, "SIZE"),
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
    Flag("kv", f"format of stored KV: {', '.join(NAMES)}; 4+2 is 4, with the first two and the last two layers as the "
         "model makes them", str, "16", "FORMAT"),
    Flag("max-kv-size", "the most tokens of a conversation; beyond that its middle is dropped; 0 is no bound; "
         f"by default {MAX_KV_SIZE}", count, None, "TOKENS"),
    Flag("keep", f"the first tokens of such a conversation, which always stay; by default {KEEP}, or half of "
         "--max-kv-size if that is less", count, None, "TOKENS"),
    Flag("ignore-context-length", "allow prompts and answers that are longer than the model's context", bool),
    Flag("max-batch", "the most requests that run at once", positive, "32", "REQUESTS"),
    Flag("max-queue", "the most requests that wait; more are refused with 503", positive, "128", "REQUESTS"),
    Flag("queue-timeout", "the longest time that a request waits", seconds, "600", "SECONDS"),
    Flag("prefill-chunk", "the most tokens of a prompt in one forward", positive, "2048", "TOKENS"),
    Flag("prefill-share", "the share of the time that prompts get while answers are streamed (0.01 to 0.99)", _share,
         "0.5", "SHARE"),
    Flag("max-tokens", "the most tokens of an answer if the request sets no limit; by default no limit", positive, None,
         "TOKENS"),
    Flag("temperature", "for requests that set none; by default what the model recommends",
         partial(_number, most=2), None, "T"),
    Flag("top-p", "for requests that set none", partial(_number, most=1, above=True), None, "P"),
    Flag("top-k", "for requests that set none", count, None, "K"),
    Flag("min-p", "for requests that set none", partial(_number, most=1), None, "P"),
    Flag("repetition-penalty", "for requests that set none", partial(_number, most=10, above=True), None, "X"),
    Flag("body-limit", "the largest request body", partial(size, total_bytes=None), "32MiB", "SIZE"),
    Flag("keep-alive", "send a keep-alive on a stream after this long without data", seconds, "5", "SECONDS"),
    Flag("send-timeout", "disconnect a client that does not read for this long", seconds, "60", "SECONDS"),
    Flag("grace", "time for running requests when the server stops", partial(_number, most=1e6), "5", "SECONDS"),
    Flag("log-level", f"{', '.join(LEVELS)}", _level, "info", "LEVEL"),
)  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="onefold serve",
        description="Serves one model at /v1/chat/completions, /v1/responses, /v1/completions and /v1/messages.",
        epilog="Each flag can also be set by the environment variable in brackets; the flag wins.",
    )
    model = os.environ.get("ONEFOLD_MODEL", "").strip() or None
    told = "a folder, a Hugging Face id, or demo [ONEFOLD_MODEL]"
    made.add_argument("model", metavar="MODEL", nargs="?", default=model, help=told)
    for flag in FLAGS:
        flag.add_to(made)
    return made


def run(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    if given.model is None:
        return _complain("no model given: give a folder, a Hugging Face id or demo, or set ONEFOLD_MODEL")
    from onefold.errors import OnefoldError

    try:
        return _serve(given)
    except OnefoldError as error:
        return _complain(str(error))


def _serve(given: argparse.Namespace) -> int:
    """Runs the server to its end and returns the exit code. Raises ConfigError."""
    logging.basicConfig(level=given.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for chatty in ("uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.getLogger().level, logging.WARNING))
    settings = _settings(given)
    from onefold.server.addresses import bind  # takes seconds to import, as does the engine: not for --help

    try:
        bound = bind(settings.host, settings.port)
    except OSError as error:
        return _complain(_not_listening(settings, error))
    with contextlib.ExitStack() as held:
        for sock in bound:
            held.enter_context(sock)
        engine = _engine(given)
        ending = Ending(engine)
        try:
            return _listen(engine, settings, bound, ending.begin)
        finally:
            ending.stop()


def _settings(given: argparse.Namespace) -> Settings:
    """Returns the server's settings. Raises ConfigError."""
    from onefold.server.settings import SAMPLING, Settings
    from onefold.sizes import parse_size

    keys = read_keys(given.api_key_file) if given.api_key_file else ()
    return Settings(
        host=given.host,
        port=given.port,
        api_keys=tuple(dict.fromkeys(API_KEY.listed(given) + keys)),
        aliases=ALIAS.listed(given),
        cors_origins=CORS_ORIGIN.listed(given),
        allowed_hosts=ALLOWED_HOST.listed(given),
        namespace_per_key=given.namespace_per_key,
        body_limit=parse_size(given.body_limit),
        keep_alive_seconds=given.keep_alive,
        send_timeout_seconds=given.send_timeout,
        grace_seconds=given.grace,
        sampling={name: value for name in SAMPLING if (value := getattr(given, name, None)) is not None},
        max_tokens=given.max_tokens,
    )


def _engine(given: argparse.Namespace) -> Engine:
    from onefold.engine.limits import Limits

    limits = Limits(
        rows=given.max_batch,
        prefill_chunk=given.prefill_chunk,
        prefill_share=given.prefill_share,
        queue_timeout_seconds=given.queue_timeout,
    )
    disk, remote = _disk(given), _remote(given)
    if disk is not None:
        _try_folder(disk)
    return make_engine(given, max_queue=given.max_queue, limits=limits, disk=disk, remote=remote)


def _remote(given: argparse.Namespace) -> RemoteSettings | None:
    """Returns the settings of the shared store, None without one. Raises ConfigError, before the model is loaded."""
    from onefold.cache.tiers.remote.tier import RemoteSettings, check_store
    from onefold.cache_folder import cache_folder
    from onefold.cli.secret_file import read_secret

    if given.remote is None:
        for name in ("remote-secret-file", "remote-insecure"):
            if getattr(given, name.replace("-", "_")) and not os.environ.get(Flag(name, "").variable):
                raise ConfigError(f"--{name} requires --remote URL")
        return None
    settings = RemoteSettings(
        given.remote,
        read_secret(given.remote_secret_file) if given.remote_secret_file else b"",
        insecure=given.remote_insecure,
        ttl=max(1, int(given.remote_ttl)),
        deadline=given.remote_deadline,
        write=given.remote_write,
        paces=cache_folder() / PACES,
    )
    check_store(settings)
    return settings


def _disk(given: argparse.Namespace) -> DiskSettings | None:
    from onefold.cache.tiers.disk.tier import DiskSettings

    if given.disk is None:
        for name, default in (("disk-budget", None), ("disk-daily-limit", None), ("disk-mode", "back")):
            told = getattr(given, name.replace("-", "_"))
            if told != default and not os.environ.get(Flag(name, "").variable):
                raise ConfigError(f"--{name} requires --disk DIR")
        return None
    return DiskSettings(given.disk, given.disk_budget, given.disk_mode, given.disk_daily_limit)


def _try_folder(disk: DiskSettings) -> None:
    """Checks the folder before the model is loaded. Raises ConfigError."""
    from onefold.cache.tiers.records.folder import Folder

    with contextlib.suppress(OSError):  # the cache reports it, and runs without a disk
        Folder.make(disk.folder).unlock()


def make_engine(given: argparse.Namespace, **more: Any) -> Engine:
    """Makes the engine for the given model and memory; `chat` has these flags too. Raises ConfigError."""
    import onefold
    from onefold.engine.engine import Engine
    from onefold.engine.recommended import recommended

    max_kv_size = given.max_kv_size
    if max_kv_size is None:
        max_kv_size = MAX_KV_SIZE
    keep = min(KEEP, max_kv_size // 2) if given.keep is None else given.keep
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of prompts that it thinks too long
    model, tokenizer = onefold.load(given.model)
    options = more | {"model_id": given.model, "budget": given.budget, "kv": given.kv}
    options |= {"defaults": recommended(tokenizer), "ignore_context_length": given.ignore_context_length}
    try:
        return Engine(model, tokenizer, max_kv_size=max_kv_size or None, keep=keep, **options)
    except Unbounded as error:
        if given.max_kv_size is not None:
            raise
        log.warning("running without --max-kv-size: %s", error)
        return Engine(model, tokenizer, **options)


def _listen(engine: Engine, settings: Settings, bound: list[socket.socket], ending: Callable[[], None]) -> int:
    from onefold.server.app import make_app
    from onefold.server.running import Server

    ready = partial(_greet, engine, settings, bound[0])
    server = Server(make_app(engine, settings), engine, settings, ready, ending)
    # A signal may come before uvicorn has installed its handlers. When uvicorn has ended, it raises the signal again
    # for the handlers that were there before: to end twice does no harm.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.end())
    try:
        server.run(bound)
    except OSError as error:  # two servers took the address before one of them listened
        return _complain(_not_listening(settings, error))
    return 0 if engine.lost is None else os.EX_TEMPFAIL


def _greet(engine: Engine, settings: Settings, sock: socket.socket) -> None:
    from rich.console import Console
    from rich.text import Text

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    rows = [
        ("model", engine.model_id),
        ("OpenAI", f"{url}/v1"),
        ("Anthropic", url),
        ("budget", _budget_line(engine)),
        ("disk", _disk_line(engine)),
        *_remote_lines(engine),
        ("one token", f"{show_size(engine.cache.inventory.token_bytes)} of KV{_format(engine)}"),
        ("room for", _room(engine)),
    ]
    if engine.context_length is not None:
        rows.append(("context", f"{engine.context_length:,} tokens, prompt and answer together"))
    most = engine.cache.max_kv_size
    if most is not None and (engine.context_length is None or most < engine.context_length):
        rows.append(("bound", f"{most:,} tokens a conversation, its first {engine.cache.keep:,} kept"))
    console = Console(highlight=False)
    for name, value in rows:
        console.print(Text(f"{name:<11}{value}"), soft_wrap=True)
    if not _loopback(settings.host) and not settings.api_keys:
        warning = f"Warning: anyone who can reach {host} can use this server. Set --api-key-file."
        Console(stderr=True).print(Text(warning, "bold"), soft_wrap=True)


def _budget_line(engine: Engine) -> str:
    follows = ", less while this machine's memory is short" if engine.cache.budget.follows else ""
    return show_size(engine.cache.inventory.budget_bytes) + follows


def _disk_line(engine: Engine) -> str:
    disk = engine.cache.stats().disk
    if disk.mode == "off":
        return f"OFF: {disk.folder}: {disk.failed}" if disk.failed else "none: memory only"
    limit = f", at most {show_size(disk.daily_limit_bytes)} a day" if disk.daily_limit_bytes else ""
    return f"{disk.folder}: {show_size(disk.used_bytes)} of {show_size(disk.budget_bytes)}, mode {disk.mode}{limit}"


def _remote_lines(engine: Engine) -> list[tuple[str, str]]:
    """Returns the line about the shared store, if there is one."""
    remote = engine.cache.stats().remote
    if remote.mode == "off":
        return []
    return [("shared", f"OFF: {remote.failed}" if remote.failed else f"{remote.folder}, with other machines")]


def _format(engine: Engine) -> str:
    return "" if engine.cache.kv == "16" else f", in format {engine.cache.kv}"


def _room(engine: Engine) -> str:
    """Returns how many tokens fit, in all conversations together and in one, as text."""
    total = f"about {engine.cache.inventory.budget_bytes // max(1, engine.cache.inventory.token_bytes):,} tokens"
    if engine.most_tokens >= sys.maxsize:
        return total
    return f"{total}, {engine.most_tokens:,} of them in one conversation"


def _not_listening(settings: Settings, error: OSError) -> str:
    said = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
    return f"{said}. Choose another with --port" if error.errno == errno.EADDRINUSE else said


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_complain = partial(complain, "onefold serve")
