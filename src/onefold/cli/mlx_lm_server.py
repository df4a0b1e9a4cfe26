"""`onefold mlx-lm-server`: mlx-lm's own server, with its own arguments, on our prompt cache.

The options that are ours are taken off the command line before mlx-lm's parser reads it. Two are mlx-lm's, and read
here all the same: `--prompt-cache-bytes` takes every size that our options take, and is handed on in bytes; `--model`
takes "demo", and is handed on as its folder.
"""

from __future__ import annotations

import argparse
import sys

from onefold.cache.model.formats.names import NAMES
from onefold.cli.command_line import Parser, complain
from onefold.errors import ConfigError
from onefold.sizes import parse_size

HELP = "run mlx_lm.server, with its own arguments, on Onefold's prompt cache"
COMMAND = "onefold mlx-lm-server"
KEEP = 4
PLAIN = "16"


def run(arguments: list[str]) -> int:
    ours, theirs = _parser().parse_known_args(arguments)
    if "--help" in theirs or "-h" in theirs:
        print(_parser().format_help())  # mlx-lm's follows
    quantises = any(a.startswith("--kv-b") for a in theirs)  # mlx-lm's parser takes shorter names, too
    if ours.max_kv_size and quantises:
        return complain(COMMAND, "--max-kv-size cannot be used with --kv-bits: mlx-lm has no quantised rotating cache")
    if ours.kv is not None and quantises:
        return complain(COMMAND, "--kv cannot be used with --kv-bits, mlx-lm's own quantisation: leave one out")
    from onefold.mlx_lm import DEVICE_LIMIT, LRUPromptCache, serve  # takes seconds to import: not for --help

    limit = {"off": None}.get(ours.device_limit, ours.device_limit or DEVICE_LIMIT)
    kv = PLAIN if ours.kv is None else ours.kv
    options = {"max_kv_size": ours.max_kv_size, "keep": ours.keep, "kv": kv, "device_limit": limit}
    try:
        LRUPromptCache(**options).close()  # checks the options before the model is loaded
        if ours.model is not None:
            theirs = [*theirs, "--model", _source(ours.model)]
    except ConfigError as error:
        return complain(COMMAND, str(error))
    if ours.prompt_cache_bytes is not None:
        theirs = [*theirs, "--prompt-cache-bytes", str(ours.prompt_cache_bytes)]
    before, sys.argv = sys.argv, [COMMAND, *theirs]  # where mlx-lm's parser looks
    try:
        serve(**options)
    except ConfigError as error:
        return complain(COMMAND, str(error))
    finally:
        sys.argv = before
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=COMMAND,
        usage="%(prog)s [options] [options of mlx_lm.server]",
        add_help=False,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--max-kv-size", type=int, metavar="N", help="bound each conversation's KV to N tokens (default: no bound)"
    )
    parser.add_argument(
        "--keep", type=int, default=KEEP, metavar="N", help=f"the first N of these tokens always stay (default: {KEEP})"
    )
    parser.add_argument(
        "--device-limit",
        metavar="SIZE",
        help="device memory for weights and KV, such as 24GB or 80%%; requests that do not fit are "
        "refused (default: 95%%; off: no limit)",
    )
    edges = "4+2 is 4, with the first two and the last two layers as the model makes them"
    formats = f"format of stored KV: {', '.join(NAMES)}; {edges} (default: {PLAIN})"
    parser.add_argument("--kv", metavar="FORMAT", help=formats)
    parser.add_argument("--prompt-cache-bytes", type=_bytes, help=argparse.SUPPRESS)  # mlx-lm's help lists them
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser


def _source(model: str) -> str:
    """Returns the model as mlx-lm knows it: the folder of the demo model. Raises ConfigError."""
    from onefold.engine import demo_model
    from onefold.engine.loading import DEMO

    return str(demo_model.folder()) if model == DEMO else model


def _bytes(text: str) -> int:
    if text.isdigit():
        return int(text)  # 0 is a size to mlx-lm
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
