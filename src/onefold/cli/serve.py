"""`onefold serve MODEL`: the model behind OpenAI's and Anthropic's API.

This file alone turns the command line and the environment into the settings of the server and of the engine. An
invalid value gives one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from onefold.cli.command_line import Parser, complain, ended_in_order, ending_signals
from onefold.cli.flags import (
    ALIAS,
    ALLOWED_HOST,
    API_KEY,
    CORS_ORIGIN,
    GROUPS,
    KEEP,
    MAX_KV_SIZE,
    Flag,
)
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
TRY = '{"messages": [{"role": "user", "content": "What is a radix tree?"}], "max_tokens": 100, "stream": true}'
LOST = {"back": "what memory alone holds", "through": "answers that are not written yet"}
"""What a process that is killed loses, by the mode of the disk."""
PACES = "remote.json"
"""In the system's cache folder: how quick shared stores are."""


def parser(prog: str = "onefold serve") -> argparse.ArgumentParser:
    made = Parser(
        prog=prog,
        usage="%(prog)s MODEL [options]",
        description="Serves one model at /v1/chat/completions, /v1/responses, /v1/completions and /v1/messages. It "
        "holds each token's KV once: the keys and values that the model computes for a token and reads for later ones.",
        epilog="Each flag can also be set by the environment variable in brackets; the flag wins.",
    )
    model = os.environ.get("ONEFOLD_MODEL", "").strip() or None
    told = "a folder, a Hugging Face id, or demo [ONEFOLD_MODEL]"
    made.add_argument("model", metavar="MODEL", nargs="?", default=model, help=told)
    for title, flags in GROUPS.items():
        group = made.add_argument_group(title)
        for flag in flags:
            flag.add_to(made, group)
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
    log.info("loading %s", given.model)  # at once: imports alone take seconds
    from onefold.server.addresses import bind  # takes seconds to import, as does the engine: not for --help

    try:
        bound = bind(settings.host, settings.port)
    except OSError as error:
        return _complain(_not_listening(settings, error))
    with contextlib.ExitStack() as held:
        for sock in bound:
            held.enter_context(sock)
        with ended_in_order():
            engine = _engine(given)
        ending = Ending(engine)
        try:
            return _listen(given, engine, settings, bound, ending.begin)
        finally:
            ending.stop()


def _settings(given: argparse.Namespace) -> Settings:
    """Returns the server's settings. Raises ConfigError."""
    from onefold.server.settings import SAMPLING, Settings
    from onefold.sizes import parse_size

    return Settings(
        host=given.host,
        port=given.port,
        api_keys=api_keys(given),
        aliases=ALIAS.listed(given),
        cors_origins=CORS_ORIGIN.listed(given),
        allowed_hosts=ALLOWED_HOST.listed(given),
        namespace_per_key=given.namespace_per_key,
        page=given.page,
        show_text=given.show_text,
        body_limit=parse_size(given.body_limit),
        keep_alive_seconds=given.keep_alive,
        send_timeout_seconds=given.send_timeout,
        grace_seconds=given.grace,
        sampling={name: value for name in SAMPLING if (value := getattr(given, name, None)) is not None},
        max_tokens=given.max_tokens,
    )


def api_keys(given: argparse.Namespace) -> tuple[str, ...]:
    """Returns the keys of the command line, the environment and the file. Raises ConfigError."""
    keys = read_keys(given.api_key_file) if given.api_key_file else ()
    return tuple(dict.fromkeys(API_KEY.listed(given) + keys))


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
    engine = make_engine(given, max_queue=given.max_queue, limits=limits, disk=disk, remote=remote)
    if disk is not None and (failed := engine.cache.stats().disk.failed):
        engine.stop()
        raise ConfigError(f"--disk {disk.folder} cannot be used: {failed}. Give another folder, or leave it out")
    return engine


def _remote(given: argparse.Namespace) -> RemoteSettings | None:
    """Returns the settings of the shared store, None without one. Raises ConfigError, before the model is loaded."""
    from onefold.cache.tiers.remote.tier import RemoteSettings, fault_of
    from onefold.cache_folder import cache_folder
    from onefold.cli.secret_file import read_secret

    if given.remote is None:
        for name, default in (("remote-secret-file", None), ("remote-insecure", False), ("remote-write", "shared")):
            told = getattr(given, name.replace("-", "_"))
            if told != default and not os.environ.get(Flag(name, "").variable):
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
    if fault := fault_of(settings):
        log.warning("%s; serving without it, and trying again", fault.removesuffix("."))
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

    try:
        Folder.make(disk.folder).unlock()
    except OSError as error:
        said = f"--disk {disk.folder} cannot be used: {error.strerror or error}. Give another folder, or leave it out"
        raise ConfigError(said) from error


def make_engine(given: argparse.Namespace, **more: Any) -> Engine:
    """Makes the engine for the given model and memory; `chat` has these flags too. Raises ConfigError."""
    import onefold
    from onefold.cache.model.formats.registry import KvFormat
    from onefold.engine.engine import Engine
    from onefold.engine.recommended import recommended

    max_kv_size = given.max_kv_size
    if max_kv_size is None:
        max_kv_size = MAX_KV_SIZE
    keep = min(KEEP, max_kv_size // 2) if given.keep is None else given.keep
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of prompts that it thinks too long
    KvFormat.parse(given.kv)  # before the model is fetched
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


def _listen(
    given: argparse.Namespace,
    engine: Engine,
    settings: Settings,
    bound: list[socket.socket],
    ending: Callable[[], None],
) -> int:
    from onefold.server.app import make_app
    from onefold.server.running import Server

    ready = partial(_greet, engine, settings, bound[0])
    leaving = threading.Event()
    server = Server(make_app(engine, settings, leaving), engine, settings, ready, ending, leaving.set)
    # A signal may come before uvicorn has installed its handlers. When uvicorn has ended, it raises the signal again
    # for the handlers that were there before: to end twice does no harm.
    for number in (signal.SIGINT, *ending_signals()):
        signal.signal(number, lambda number, frame: server.handle_exit(number, frame))
    if given.until_eof:
        threading.Thread(target=_await_eof, args=(server.end,), name="onefold-stdin", daemon=True).start()
    try:
        server.run(bound)
    except OSError as error:  # two servers took the address before one of them listened
        return _complain(_not_listening(settings, error))
    return 0 if engine.lost is None else os.EX_TEMPFAIL


def _await_eof(end: Callable[[], None]) -> None:
    """Calls `end` when standard input ends, or is gone."""
    with contextlib.suppress(OSError):
        while sys.stdin is not None and select.select([0], [], []) and os.read(0, 1 << 16):
            pass
    end()


def _greet(engine: Engine, settings: Settings, sock: socket.socket) -> None:
    from rich.console import Console
    from rich.text import Text

    from onefold.server.hosts import is_loopback

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    stored = engine.cache.inventory
    rows = [
        ("model", engine.model_id),
        ("OpenAI", f"{url}/v1"),
        ("Anthropic", url),
        *([("page", f"{url}/")] if settings.page else []),
        ("budget", _budget_line(engine)),
        ("disk", _disk_line(engine)),
        *_remote_lines(engine),
        ("one token", f"{show_size(stored.token_bytes)} of KV; {stored.stored_as(engine.cache.kv)}"),
        ("room for", _room(engine)),
    ]
    if engine.context_length is not None:
        rows.append(("context", f"{engine.context_length:,} tokens, prompt and answer together"))
    most = engine.cache.max_kv_size
    if most is not None and (engine.context_length is None or most < engine.context_length):
        rows.append(("bound", f"{most:,} tokens a conversation, its first {engine.cache.keep:,} kept"))
    key = ' -H "authorization: Bearer $KEY"' if settings.api_keys else ""
    rows.append(("to try it", f"curl -N {url}/v1/chat/completions{key} -H 'content-type: application/json' -d '{TRY}'"))
    rows.append(("or", f"onefold chat --url {url}" + (" --api-key KEY" if settings.api_keys else "")))
    console = Console(highlight=False)
    for name, value in rows:
        console.print(Text(f"{name:<11}{value}"), soft_wrap=True)
    if not is_loopback(settings.host) and not settings.api_keys:
        warning = f"Warning: anyone who can reach {host} can use this server. Set --api-key-file."
        Console(stderr=True).print(Text(warning, "bold"), soft_wrap=True)


def _budget_line(engine: Engine) -> str:
    follows = ", less while this machine's memory is short" if engine.cache.budget.follows else ""
    return show_size(engine.cache.inventory.budget_bytes) + follows


def _disk_line(engine: Engine) -> str:
    disk = engine.cache.stats().disk
    if disk.mode == "off":
        kept = "none: conversations are lost when the server ends; --disk auto keeps them"
        return f"OFF: {disk.folder}: {disk.failed}" if disk.failed else kept
    limit = f", at most {show_size(disk.daily_limit_bytes)} a day" if disk.daily_limit_bytes else ""
    used = f"{disk.folder}: {show_size(disk.used_bytes)} of {show_size(disk.budget_bytes)}{limit}"
    return f"{used}; mode {disk.mode}: a kill or a power cut loses {LOST[disk.mode]}"


def _remote_lines(engine: Engine) -> list[tuple[str, str]]:
    """Returns the line about the shared store, if there is one."""
    remote = engine.cache.stats().remote
    if remote.mode == "off":
        return []
    if remote.failed:
        return [("shared", f"OFF: {remote.failed}")]
    return [("shared", f"{remote.folder}, with other machines, in records of {remote.record_tokens} tokens")]


def _room(engine: Engine) -> str:
    """Returns how many tokens fit, in all conversations together and in one, as text."""
    total = f"about {engine.cache.inventory.budget_bytes // max(1, engine.cache.inventory.token_bytes):,} tokens"
    if engine.most_tokens >= sys.maxsize:
        return total
    return f"{total}, {engine.most_tokens:,} of them in one conversation"


def _not_listening(settings: Settings, error: OSError) -> str:
    said = f"cannot listen on {settings.host} port {settings.port}: {error.strerror or error}"
    return f"{said}. Choose another with --port" if error.errno == errno.EADDRINUSE else said


_complain = partial(complain, "onefold serve")
