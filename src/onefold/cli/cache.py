"""`onefold cache`: lists, checks and deletes the records in the folder of a disk cache, or the values in a store.

This file parses the command line. cache_actions.py and cache_store.py do the work, cache_report.py prints the result. A
folder or store that cannot be used is one line on stderr and exit code 2. Looking needs no lock; what deletes from a
folder takes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from onefold.cli.command_line import Parser, complain, write_no_more
from onefold.cli.flags import AUTO_FOLDER, REMOTE, REMOTE_SECRET, Flag, age, size

HELP = "manage the folder of a disk cache, or a shared store: ls, stat, verify, prune, clear"
NAME = "onefold cache"

DISK = Flag("disk", f"the folder, or auto: {AUTO_FOLDER}", metavar="DIR")


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog=NAME,
        description="Manages the folder of a disk cache, or a store that several machines share. It holds KV (keys and "
        "values) by namespace: a model with its settings, and an API key or tenant that has KV of its own.",
        allow_abbrev=False,
    )
    for flag in (DISK, REMOTE, REMOTE_SECRET):
        flag.add_to(made)
    made.set_defaults(**{flag.dest: None for flag in (DISK, REMOTE, REMOTE_SECRET)})  # `_place` reads the variables
    actions = made.add_subparsers(dest="action", metavar="ACTION", required=True)

    def action(name: str, told: str, codes: str = "", more: str = "") -> argparse.ArgumentParser:
        described = told[0].upper() + told[1:] + "." + more
        epilog = f"Exit codes: 0 {codes}; 2 the command failed." if codes else None
        added = actions.add_parser(name, help=told, description=described, epilog=epilog, allow_abbrev=False)
        for flag, what in ((DISK, "the folder, or auto"), (REMOTE, "the store"), (REMOTE_SECRET, "its secret")):
            where = f"{what}; here or before {name} [{flag.variable}]"
            options: dict[str, Any] = {"type": flag.type, "metavar": flag.metavar, "default": argparse.SUPPRESS}
            added.add_argument(f"--{flag.name}", help=where, **options)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        return added

    def namespace(to: argparse.ArgumentParser) -> None:
        to.add_argument("--namespace", metavar="ID", help="only this namespace; a unique beginning of its id is enough")

    ls = action("ls", "list the namespaces, or the records of one")
    ls.add_argument("namespace", metavar="ID", nargs="?", help="a namespace; a unique beginning of its id is enough")
    ls.add_argument("--all", action="store_true", help="list all records")
    action("stat", "summarise the folder: size, bytes written, and the process that uses it; or the store")
    codes = "all records are good; 1 a bad record was found, removed or not"
    more = " In a store, without the secret of its values all of them are bad."
    verify = action("verify", "read every record whole and check it", codes, more)
    namespace(verify)
    verify.add_argument("--remove", action="store_true", help="delete bad records and their descendants")
    more = " Reads only the headers of records; use verify to find damage in their data. Not for a store."
    prune = action("prune", "delete old records, and always records that no cache can use", more=more)
    namespace(prune)
    told = "delete the least recently used records until this size is left: 20GB, 10%% of the file system"
    prune.add_argument("--budget", type=size, metavar="SIZE", help=told)
    told = "delete records that were not used for this long, in s, m, h, d or w: 30m, 1.5h, 7d, 2w"
    prune.add_argument("--older-than", type=age, metavar="AGE", help=told)
    prune.add_argument("--dry-run", action="store_true", help="show which records would be deleted, and delete none")
    clear = action("clear", "delete all records", "the records are deleted; 1 you answered no")
    namespace(clear)
    clear.add_argument("--yes", action="store_true", help="do not ask")
    return made


def run(arguments: list[str]) -> int:
    given = parser().parse_args(arguments)
    name = f"{NAME} {given.action}"
    if wrong := _place(given):
        return complain(name, wrong)
    from onefold.collecting import paused
    from onefold.errors import FolderInUse, OnefoldError

    told: dict[str, Any] | None = None
    try:
        if given.remote is not None:
            code, told = _do_in_store(given)
        else:
            with paused():
                code, told = _do(given)
        _tell(given, told)
        return code
    except FolderInUse as error:
        ask = "" if given.action == "verify" else ", or send the server DELETE /v1/cache to drop the KV that it serves"
        return complain(name, f"{error}{ask}")
    except OnefoldError as error:
        from onefold.cli.cache_report import plain

        return complain(name, plain(error))  # it may say what a store has answered
    except BrokenPipeError:  # no fault of the folder: the command ends quietly
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if told is not None:  # it was done, and could not be told
            write_no_more()
            return complain(name, f"the output could not be written: {why}")
        where = error.filename or given.disk
        return complain(name, f"{os.fsdecode(where)}: {why}" if where else why)


def _place(given: argparse.Namespace) -> str:
    """Sets either the folder or the store, from the environment if the command line has neither. Returns what is wrong,
    or ""."""
    secret_given = given.remote_secret_file is not None
    if given.disk is None and given.remote is None:
        given.disk, given.remote = DISK.from_environment, REMOTE.from_environment
        if given.disk and given.remote:
            return f"{DISK.variable} and {REMOTE.variable} are both set: give --disk DIR or --remote URL"
    elif given.disk is not None and given.remote is not None:
        return "--disk and --remote cannot be given together: give the folder or the store"
    if given.remote is None:
        if not given.disk:
            return f"no folder given: give --disk DIR, or set {DISK.variable}; for a shared store, --remote URL"
        return "--remote-secret-file requires --remote URL" if secret_given else ""
    if given.action == "prune":
        return (
            "prune is not offered for a shared store: Redis removes values by their time to live and its own eviction, "
            "a bucket by its rules; clear removes all values of a namespace"
        )
    if not secret_given:
        given.remote_secret_file = REMOTE_SECRET.from_environment
    return ""


def _do(given: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the report. Raises OnefoldError and OSError."""
    from onefold.cache.tiers.records.folder import Folder
    from onefold.cache_folder import disk_folder
    from onefold.cli import cache_actions, cache_report
    from onefold.errors import ConfigError

    given.disk = os.fspath(disk_folder(given.disk))
    path = os.path.expanduser(given.disk)
    if not os.path.exists(path):
        raise ConfigError(f"there is no folder {given.disk}")
    if not os.path.isdir(path):
        raise ConfigError(f"{given.disk} is a file, not a folder")
    folder = Folder.look(given.disk)
    code, told = 0, dict[str, Any]()
    match given.action:
        case "ls":
            told = cache_actions.ls(folder, given.namespace)
        case "stat":
            told = cache_actions.stat(folder)
        case "verify":
            with cache_report.bar(shown=not given.json) as progress:
                told = cache_actions.verify(folder, given.namespace, given.remove, progress)
            code = 1 if told["bad"] else 0
        case "prune":
            told = cache_actions.prune(folder, given.namespace, given.budget, given.older_than, given.dry_run)
        case "clear":
            told = cache_actions.clear(folder, given.namespace, (lambda _: True) if given.yes else _agreed)
            code = 0 if told["agreed"] else 1
    return code, told


def _do_in_store(given: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the report. Raises OnefoldError and OSError."""
    from onefold.cli import cache_report, cache_store

    code, told = 0, dict[str, Any]()
    with cache_store.opened(given.remote, given.remote_secret_file) as shared:
        match given.action:
            case "ls":
                most = None if given.json or given.all else cache_report.MOST_ROWS
                told = cache_store.ls(shared, given.namespace, most)
            case "stat":
                told = cache_store.stat(shared)
            case "verify":
                with cache_report.bar(shown=not given.json) as progress:
                    told = cache_store.verify(shared, given.namespace, given.remove, progress)
                code = 1 if told["bad"] else 0
            case "clear":
                told = cache_store.clear(shared, given.namespace, (lambda _: True) if given.yes else _agreed)
                code = 0 if told["agreed"] else 1
    return code, told


def _tell(given: argparse.Namespace, told: dict[str, Any]) -> None:
    """Prints the report. Raises OSError."""
    from onefold.cli import cache_report

    if given.json:
        print(json.dumps(told), flush=True)
    elif given.remote is not None:
        cache_report.show_store(given.action, told)
    else:
        cache_report.show(given.action, told, every=getattr(given, "all", False))


def _agreed(question: str) -> bool:
    """Asks the user, and returns whether the answer was yes. Raises ConfigError without a terminal."""
    from onefold.errors import ConfigError

    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError("no terminal to ask on: give --yes to delete without asking")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
