"""Why a value of a shared store was rejected, or the store not used. Users see the values, after "remote: "."""

from __future__ import annotations

import enum


class RemoteReason(enum.StrEnum):
    # a value that is there and cannot be used
    TOO_LARGE = "too large"
    TRUNCATED = "truncated"
    OTHER_FORMAT = "of another format"
    SEAL = "wrong seal"
    OTHER_LAYOUT = "of another layout"
    GONE = "removed meanwhile"
    NOT_FINITE = "not finite"
    # a store that does not do what it was asked
    UNREACHABLE = "unreachable"
    SLOW = "too slow"
    FULL = "full"
    REFUSED = "refused"
    # what was not read, or not written
    SLOWER = "slower than prefill"
    NO_ROOM = "no room to restore"
    TOO_MANY = "not written: too many are waiting"
    FAILED = "not written: failed"
    NAMELESS = "not written: the namespace has no name that another machine knows"
