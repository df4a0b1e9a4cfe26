"""`onefold mlx-lm-server`: mlx-lm's own server, with its own arguments, on our prompt cache."""

from __future__ import annotations

import sys

HELP = "run mlx_lm.server, with its own arguments, on Onefold's prompt cache"


def run(arguments: list[str]) -> int:
    from onefold.mlx_lm import serve  # takes seconds to import: not for --help

    before, sys.argv = sys.argv, ["onefold mlx-lm-server", *arguments]  # where mlx-lm's parser looks
    try:
        serve()
    finally:
        sys.argv = before
    return 0
