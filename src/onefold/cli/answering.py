"""Where a chat's answers come from: an engine in this process, or a server. Either gives the same events.

`ask` raises what went wrong, and closing what it gives stops the answer. `stats` is what GET /v1/cache tells, or
nothing where a server has no such thing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from onefold.cli.client import Client
from onefold.engine.engine import Engine
from onefold.engine.request import Event, Failed, Request
from onefold.errors import ServerError

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How an answer is made; None is the default of the model or the server."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def said(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class Source(Protocol):
    name: str

    def ask(self, messages: Messages) -> Generator[Event, None, None]:
        """Yields the events of the answer. Raises OnefoldError."""

    def stats(self) -> Mapping[str, Any] | None: ...

    def close(self) -> None: ...


class Here:
    def __init__(self, engine: Engine, wishes: Wishes) -> None:
        self.name = engine.model_id
        self._engine = engine
        said = wishes.said()
        self._max_tokens = said.pop("max_tokens", None)
        self._sampling = dataclasses.replace(engine.defaults, **said)

    def ask(self, messages: Messages) -> Generator[Event, None, None]:
        prompt = self._engine.chat(messages)
        asked = self._engine.ask(Request(prompt=prompt, max_tokens=self._max_tokens, sampling=self._sampling))
        with contextlib.closing(asked) as events:
            for event in events:
                if isinstance(event, Failed):
                    raise event.error
                yield event

    def stats(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self._engine.stats())

    def close(self) -> None:
        self._engine.stop()


class There:
    def __init__(self, client: Client, wishes: Wishes, model: str = "") -> None:
        """Asks the server for its models, so that an unknown one fails now. Raises ServerError."""
        self._client = client
        models = client.get("/v1/models").get("data") or [{}]
        self.name = model or str(models[0].get("id", "default"))
        self._body = {"model": self.name, **wishes.said()}

    def ask(self, messages: Messages) -> Generator[Event, None, None]:
        return self._client.chat({**self._body, "messages": list(messages)})

    def stats(self) -> Mapping[str, Any] | None:
        try:
            return self._client.get("/v1/cache")
        except ServerError:  # another kind of server
            return None

    def close(self) -> None:
        pass
