"""How the server behaves, decided once at the edge. The engine's own settings (budget, batch, queue) are not here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from onefold.engine.request import Sampling
from onefold.errors import ConfigError

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""What may be given a default here."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    """None: anyone who reaches the address may send requests."""
    aliases: tuple[str, ...] = ()
    """Other names that a request may call the model by; "*" is any."""
    cors_origins: tuple[str, ...] = ()
    """Web pages that may ask; "*" is any. Requests from others are refused."""
    allowed_hosts: tuple[str, ...] = ()
    """Host names that clients may use, in addition to localhost, its addresses and `host`; "*" is any."""
    namespace_per_key: bool = False
    """KV is shared only among requests with the same API key."""
    page: bool = True
    """The page at `/`."""
    show_text: bool = False
    """The page shows what prompts say, to everyone who may see it."""
    body_limit: int = 32 << 20
    """Bytes."""
    keep_alive_seconds: float = 5.0
    """A stream that has nothing to say for this long says that it is alive."""
    send_timeout_seconds: float = 60.0
    """A client that does not read, or does not send, for this long is hung up on."""
    grace_seconds: float = 5.0
    """How long running requests may take to finish when the server stops."""
    sampling: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    """Where the model's own recommendation is overridden; a request overrides both."""
    max_tokens: int | None = None
    """For requests that do not say; None: until the model ends."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"a port is a number from 0 to 65535, not {self.port}")
        for name in ("body_limit", "keep_alive_seconds", "send_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, got {getattr(self, name)}")
        if not self.grace_seconds >= 0:
            raise ConfigError(f"grace_seconds must not be negative, got {self.grace_seconds}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.show_text and self.namespace_per_key:
            raise ConfigError(
                "show_text would show the prompts of each API key to all others: leave it out with namespace_per_key"
            )
        if any(not key or key != key.strip() or not key.isascii() for key in self.api_keys):
            raise ConfigError("an API key is ASCII text that is not empty and neither begins nor ends with a space")
        if unknown := set(self.sampling) - set(SAMPLING):
            raise ConfigError(f"a default cannot be set for {', '.join(sorted(unknown))}")

    def defaults(self, recommended: Sampling) -> Sampling:
        return Sampling(**{**vars(recommended), **self.sampling})
