"""The agents of the demonstration: conversations with one system prompt, first one alone and then all at once.

Each agent waits for its answer before it asks again, on a thread of its own. `play` reports everything on the
caller's thread. Knows a server by its HTTP API alone.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from onefold.cli.client import Client
from onefold.cli.conversation import Conversation, Turn
from onefold.cli.demo_script import RULES, role
from onefold.cli.reading import Reading
from onefold.engine.request import Reasoning, Text
from onefold.errors import ServerError

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Asked:
    """A question, its answer, and how it went."""

    agent: str
    turn: int
    """From 0."""
    question: str
    reading: Reading

    @property
    def prompt_tokens(self) -> int:
        return 0 if self.reading.hit is None else self.reading.hit.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return 0 if self.reading.hit is None else self.reading.hit.cached

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.reading.completion_tokens


@dataclass(frozen=True)
class Heard:
    """A piece of an answer that is on its way."""

    agent: str
    turn: int
    text: str


News = Heard | Asked


class Agent:
    def __init__(self, number: int, client: Client) -> None:
        self.role = role(number)
        self._client = client
        self._conversation = Conversation(RULES)

    @property
    def turn(self) -> int:
        """The number of the next question."""
        return len(self._conversation.turns)

    def ask(self, tell: Callable[[News], None]) -> Asked:
        turn, question = self.turn, self.role.question(self.turn)
        body = {
            "messages": self._conversation.messages(question),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "repetition_penalty": 1.1,  # small models go round in circles without it
            "chat_template_kwargs": {"enable_thinking": False},  # or a short answer would be nothing but thoughts
        }
        reading = Reading()
        with contextlib.closing(self._client.chat(body)) as events:
            for event in events:
                reading.add(event)
                if isinstance(event, Text | Reasoning):
                    tell(Heard(self.role.desk, turn, event.text))
        self._conversation.turns.append(Turn(question, reading.text, reading.reasoning))
        asked = Asked(self.role.desk, turn, question, reading)
        tell(asked)
        return asked


@dataclass(frozen=True)
class Played:
    """`cold` came to an empty cache, alone; `warm` are all others, which took `warm_seconds` together."""

    cold: Asked
    cold_seconds: float
    warm: tuple[Asked, ...]
    warm_seconds: float

    @property
    def last(self) -> list[Asked]:
        """The last question of each conversation."""
        by_agent = {asked.agent: asked for asked in sorted((self.cold, *self.warm), key=lambda a: a.turn)}
        return list(by_agent.values())


def play(client: Client, n_agents: int, turns: int, hear: Callable[[News], None]) -> Played:
    """`hear` is called on this thread. Raises ServerError."""
    agents = [Agent(number, client) for number in range(n_agents)]
    _warm_up(client)
    begun = time.perf_counter()
    cold = agents[0].ask(hear)
    middle = time.perf_counter()
    warm = _together(agents, turns, hear)
    return Played(cold, middle - begun, tuple(warm), time.perf_counter() - middle)


def _warm_up(client: Client) -> None:
    """The first forward also reads the weights from the disk, which has nothing to do with any cache. It leaves
    nothing behind."""
    with contextlib.closing(
        client.chat({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2})
    ) as events:
        for _ in events:
            pass
    client.delete("/v1/cache")


def _together(agents: list[Agent], turns: int, hear: Callable[[News], None]) -> list[Asked]:
    news: queue.SimpleQueue[News | ServerError] = queue.SimpleQueue()

    def live(agent: Agent) -> None:
        try:
            while agent.turn < turns:
                agent.ask(news.put)
        except ServerError as error:
            news.put(error)

    for agent in agents:  # daemons: an interrupt does not wait for their answers
        threading.Thread(target=live, args=(agent,), name=agent.role.desk, daemon=True).start()
    asked: list[Asked] = []
    while len(asked) < len(agents) * turns - 1:
        told = news.get()
        if isinstance(told, ServerError):
            raise told
        hear(told)
        if isinstance(told, Asked):
            asked.append(told)
    return asked
