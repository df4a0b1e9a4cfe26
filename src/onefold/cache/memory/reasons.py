"""The reasons why a hit was shorter than possible, or something was not stored. Users see the values."""

from __future__ import annotations

import enum


class Reason(enum.StrEnum):
    NONE = ""
    """A full hit."""
    NOTHING_KNOWN = "nothing known"
    NO_CHECKPOINT = "no checkpoint"
    ROTATED = "rotated"
    BUSY = "held by another thread"
    CHECKPOINT_REFUSED = "checkpoint refused"
    DAMAGED = "damaged on disk"
    LEFT_BELOW = "left on disk"
    NO_ROOM = "no room"
    NO_ROOM_TO_RESTORE = "no room to restore"
    UNCACHED = "unknown cache"
    DROPPED = "dropped"
    LOST = "lost on the device"
    HALF_FED = "draft or target was fed nothing"
    TOO_SHORT = "too short to keep"
    CHECKPOINT_TOO_LARGE = "checkpoint too large"
    NO_ROOM_FOR_CHECKPOINT = "no room for a checkpoint"
    CHECKPOINT_THERE = "checkpoint already there"
