"""The mark of tests whose subject is what a forked child does. Any other test starts its processes from nothing."""

from __future__ import annotations

import sys

import pytest

forks = pytest.mark.skipif(
    sys.platform == "darwin",
    reason="the subject is a forked child, and macOS's frameworks may abort one in a process that has used them",
)
