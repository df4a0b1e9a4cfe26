"""Why a record was rejected, not written or not read. The values are what users see, after "disk: "."""

from __future__ import annotations

import enum


class DiskReason(enum.StrEnum):
    # a record that is there and cannot be used
    CHECKSUM = "checksum"
    TRUNCATED = "truncated"
    TOO_LONG = "too long"
    MISNAMED = "misnamed"
    NO_HEADER = "no header of ours"
    OTHER_FORMAT = "of another format"
    OTHER_LAYOUT = "of another layout"
    OTHER_TOKENS = "of other tokens"
    ORPHAN = "orphan"
    UNREADABLE = "unreadable"
    # what was not written
    NO_ROOM = "no room on disk"
    DAILY_LIMIT = "daily limit"
    TOO_SLOW = "disk too slow"
    NOT_NOW = "not written for now"
    NOT_COMPUTED = "not yet computed"
    NO_PERMISSION = "no permission"
    TAKEN = "something else in its place"
    ALREADY_THERE = "record already there"
    UNWRITABLE_CHECKPOINT = "checkpoint that cannot be written"
    # what was not read
    SLOWER = "slower than prefill"
    NO_ROOM_TO_RESTORE = "no room to restore"
    FAILED = "failed to restore"
