"""The limits of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from onefold.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Raises ConfigError if `prefill_share` cannot be used."""

    rows: int = 32
    """Requests that hold memory at a time."""
    prefill_chunk: int = 2048
    """Tokens of a prompt that one forward computes at most."""
    reserve_tokens: int = 256
    """Room for an answer that a request must find at admission."""
    queue_timeout_seconds: float = 600.0
    """How long a request waits for its turn before it fails with Busy."""
    prefill_share: float = 0.5
    """The share of the time in which streams run that prompts get. Above 0 and below 1."""

    def __post_init__(self) -> None:
        if not 0 < self.prefill_share < 1:
            raise ConfigError(f"prefill_share is {self.prefill_share}; it must lie between 0 and 1, 0.5 for instance")
