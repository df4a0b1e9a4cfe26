"""What is known of one HTTP request, for its log line, its headers and the metrics.

Holds counts, times and names, and of what was said only the few characters at which a prompt diverged, if `Service`
lets them be told.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote

from onefold.engine.request import Done, Event, Generated, Hit, Place, Progress, Started

log = logging.getLogger("onefold.server")

HUNG_UP = 499
"""What nginx calls it, too. No client ever sees it."""

CONVERSATION = "x-onefold-conversation"
"""A header of requests, for proxies; the response repeats it."""
PRINTABLE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) != "%")
LONGEST_HEADER = 200
"""Characters, before they are encoded."""


LEAST_SECONDS = 0.01
"""From the first to the last event of an answer, for a rate: a call of a tool comes as a whole, at the end."""


@dataclass
class Record:
    method: str
    path: str
    """Without the query, which may hold a key."""
    now: Callable[[], float] = time.monotonic
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: int = HUNG_UP
    """Until a response begins."""
    choices_per_prompt: int = 1
    hits: dict[int, Hit] = field(default_factory=dict)
    """By prompt, as the first of its choices found it."""
    finish: dict[int, str] = field(default_factory=dict)
    """By choice."""
    tokens: dict[int, int] = field(default_factory=dict)
    """The number of tokens generated so far, by choice."""
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)
    error: str = ""
    """The name of the exception, if there was one."""
    excerpt: str = ""
    """Where a prompt diverged, with what is stored there: only for a page that shows text."""
    conversation: str = ""
    """What the client calls the conversation; a proxy in front of several servers keeps equal ones together."""
    is_view: bool = False
    """Whether the answer goes on for as long as somebody looks: its log line has `open` in place of `seconds`."""
    place: Place | None = None
    """Where the path of the choice that began or ended last ends in the cache's tree."""

    def __post_init__(self) -> None:
        self.began_at = self.now()
        self.began = time.time()

    def note(self, choice: int, event: Event) -> float | None:
        """Returns the seconds since this choice last said something, if both are known."""
        match event:
            case Started(hit):
                self.hits.setdefault(choice // self.choices_per_prompt, hit)
                self.place = event.place
            case Done():
                self.place = event.place or self.place
                self.finish[choice] = event.finish
                self.tokens[choice] = event.completion_tokens
            case Generated():
                self.tokens[choice] = event.tokens
            case Progress():
                pass
            case _:
                at, before = self.now(), self.last_token_at.get(choice)
                self.last_token_at[choice] = at
                if self.first_token_at is None:
                    self.first_token_at = at
                return None if before is None else at - before
        return None

    @property
    def generated(self) -> int:
        """Tokens of all answers."""
        return sum(self.tokens.values())

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self.now() - self.began_at

    @property
    def finishes(self) -> str:
        """Why its answers ended, with commas; empty if none has."""
        return ",".join(self.finish.values())

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_at is None else self.first_token_at - self.began_at

    @property
    def tokens_per_second(self) -> float | None:
        """From the first token on, of all choices together."""
        if self.first_token_at is None or self.generated < 2:
            return None
        seconds = max(self.last_token_at.values()) - self.first_token_at
        return (self.generated - 1) / seconds if seconds > LEAST_SECONDS else None

    def hit(self) -> Hit | None:
        """The hit of all prompts together. Its reasons are those of the first prompt that has any."""
        if not self.hits:
            return None
        found = [self.hits[i] for i in sorted(self.hits)]
        return Hit(
            sum(h.prompt_tokens for h in found),
            sum(h.matched for h in found),
            sum(h.cached for h in found),
            next((h.reason for h in found if h.reason), ""),
            next((h.diverged for h in found if h.diverged), ""),
            sum(h.restored for h in found),
            sum(h.remote for h in found),
        )

    def headers(self) -> dict[str, str]:
        made = {"x-request-id": self.id, "request-id": self.id}
        if self.conversation:
            made[CONVERSATION] = self.conversation
        hit = self.hit()
        if hit is not None:
            made["x-onefold-prompt-tokens"] = str(hit.prompt_tokens)
            made["x-onefold-matched-tokens"] = str(hit.matched)
            made["x-onefold-cached-tokens"] = str(hit.cached)
            made["x-onefold-restored-tokens"] = str(hit.restored)
            made["x-onefold-remote-tokens"] = str(hit.remote)
            if hit.reason:
                made["x-onefold-reason"] = header_text(hit.reason)
            if hit.diverged:
                made["x-onefold-diverged"] = header_text(hit.diverged)
        return made

    def line(self) -> str:
        said = [self.method, self.path, "hung up" if self.status == HUNG_UP else str(self.status)]
        hit = self.hit()
        if hit is not None:
            said.append(f"prompt={hit.prompt_tokens} matched={hit.matched} cached={hit.cached}")
            if hit.restored:
                said.append(f"restored={hit.restored}")
            if hit.remote:
                said.append(f"remote={hit.remote}")
            said.append(f"generated={self.generated} finish={self.finishes or 'none'}")
        if self.time_to_first_token is not None:
            said.append(f"first_token={self.time_to_first_token:.3f}s")
        if self.tokens_per_second is not None:
            said.append(f"tokens_per_second={self.tokens_per_second:.1f}")
        if hit is not None and hit.reason:
            said.append(f'reason="{header_text(hit.reason)}"')
        if hit is not None and hit.diverged:
            said.append(f'diverged="{header_text(hit.diverged)}"')
        if self.conversation:
            said.append('conversation="{}"'.format(self.conversation.replace('"', "%22")))
        if self.error:
            said.append(f"error={self.error}")
        took = f"{self.seconds:.3f}"
        return " ".join([*said, f"open={took}s" if self.is_view else f"seconds={took}", f"id={self.id}"])

    def write(self, level: int = logging.INFO) -> None:
        log.log(level, "%s", self.line())


def header_text(text: str) -> str:
    """Printable ASCII; everything else, and "%", percent-encoded as UTF-8."""
    cut = text if len(text) <= LONGEST_HEADER else text[: LONGEST_HEADER - 3] + "..."
    return quote(cut, safe=PRINTABLE, errors="replace").strip()
