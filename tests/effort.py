"""How much tests do: `make test` runs a few of what is random, `make test-all` (ONEFOLD_TEST_ALL=1) runs all of it.

What takes long is marked `slow`, and runs with `make test-all` only.
"""

from __future__ import annotations

import os

ALL = os.environ.get("ONEFOLD_TEST_ALL") == "1"


def effort(few: int, all_of_them: int) -> int:
    """How many examples, seeds or rounds to run."""
    return all_of_them if ALL else few
