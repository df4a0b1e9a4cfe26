"""The chat itself: runs commands, and shows an answer to each question with a line of figures.

- A question that got no answer, not even the beginning of one, leaves the conversation as it was.
- An answer that is stopped stays, as far as it came.

Knows neither where answers come from nor how anything looks.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable

from onefold.cli.answering import Source
from onefold.cli.conversation import Conversation, Turn
from onefold.cli.holding import show_held
from onefold.cli.interrupts import Interrupts
from onefold.cli.lines import Lines, keys_ignored
from onefold.cli.reading import Reading
from onefold.cli.screen import Screen
from onefold.engine.request import Event, Hit, Progress, Reasoning, Text
from onefold.errors import OnefoldError
from onefold.sizes import show_count, show_size

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)


class Chat:
    def __init__(
        self, source: Source, lines: Lines, screen: Screen, conversation: Conversation, max_tokens: int
    ) -> None:
        self._source = source
        self._lines = lines
        self._screen = screen
        self._conversation = conversation
        self._max_tokens = max_tokens
        self._last: Reading | None = None
        self._failed = False
        self._left = False
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "new": ("a new conversation; the system prompt stays", self._new),
            "undo": ("undo the last turn; the next one continues before it", self._undo),
            "system": ("set the system prompt to the text that follows; without one, show it", self._system),
            "stats": ("what the cache holds and has saved", self._stats),
            "help": ("this", self._help),
            "quit": ("leave, as Ctrl-D does", self._quit),
        }

    def run(self) -> int:
        """Runs the chat to its end. Returns the exit code: 0 if every question was answered."""
        if self._lines.typed:
            self._screen.note(f"{self._source.name}: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves")
        while not self._left:
            try:
                self._next()
            except KeyboardInterrupt:  # there was nothing to stop
                if not self._lines.typed:
                    raise
                self._screen.note("\nCtrl-D leaves")
        return 1 if self._failed else 0

    def _next(self) -> None:
        said = self._lines.next()
        if said is None:
            self._left = True
            if self._lines.typed:
                self._screen.note("")  # what comes next is not to begin behind the prompt
        elif said:
            self._take(said)

    def _take(self, said: str) -> None:
        found = COMMAND.fullmatch(said)
        if found is None:
            self._ask(said)
        elif found[1] in self._commands:
            self._commands[found[1]][1]((found[2] or "").strip())
        else:
            self._screen.complaint(f"unknown command /{found[1]}; /help lists the commands")

    # -- a question ----------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        reading, stopped = Reading(), False
        try:
            self._listen(self._conversation.messages(question), reading)
        except KeyboardInterrupt:
            stopped = True
        except OnefoldError as error:
            self._failed = True
            self._screen.end_answer()
            self._screen.complaint(str(error))
        self._screen.end_answer()
        if reading.text or reading.reasoning:
            self._conversation.turns.append(Turn(question, reading.text, reading.reasoning))
        elif stopped:
            self._screen.note("stopped before the answer began; the question is removed")
        self._last = reading
        if reading.hit is not None:
            self._screen.note(self._line(reading, stopped))

    def _listen(self, messages: list[dict[str, str]], reading: Reading) -> None:
        answer = contextlib.closing(self._source.ask(messages))
        with keys_ignored(), Interrupts() as interrupts, answer as asked:
            events, first = interrupts.between(asked), None
            with self._screen.waiting("...") as show:
                for event in events:
                    reading.add(event)
                    if isinstance(event, Progress):
                        show(f"reading the prompt: {event.done:,} of {event.total:,} tokens")
                    elif isinstance(event, Text | Reasoning):
                        first = event
                        break
            if first is not None:
                self._show(first)
            for event in events:
                reading.add(event)
                self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, Text):
            self._screen.answer(event.text)
        elif isinstance(event, Reasoning):
            self._screen.thought(event.text)

    # -- what is told of it --------------------------------------------------------------------

    def _line(self, reading: Reading, stopped: bool) -> str:
        assert reading.hit is not None
        parts = [_reuse(reading.hit)]
        if reading.seconds_to_first is not None:
            parts.append(f"first token after {reading.seconds_to_first:.2f} s")
        generated = show_count(reading.completion_tokens, "token")
        if reading.tokens_per_second is not None:
            parts.append(f"{generated}, {reading.tokens_per_second:.1f} per second")
        elif reading.completion_tokens:
            parts.append(generated)
        if stopped:
            parts.append("stopped")
        elif reading.done is not None and reading.done.finish == "length":
            full = reading.completion_tokens >= self._max_tokens
            parts.append("cut off by --max-tokens" if full else "cut off: there is no memory for more")
        stats = self._source.stats()
        if stats is not None:
            parts.append(show_held(stats))
        return " · ".join(parts)

    # -- commands ------------------------------------------------------------------------------

    def _new(self, _: str) -> None:
        self._conversation.turns.clear()
        self._screen.note("a new conversation")

    def _undo(self, _: str) -> None:
        turn = self._conversation.undo()
        said = "nothing to undo" if turn is None else f"undone: {_short(turn.question)}"
        self._screen.note(said)

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
        there = self._conversation.system
        self._screen.note(f"system prompt: {there}" if there else "no system prompt is set; /system TEXT sets one")

    def _stats(self, _: str) -> None:
        stats = self._source.stats()
        if stats is None:
            self._screen.complaint("this server does not report its cache")
            return
        cache = stats["cache"]
        peak = show_size(cache["peak_bytes"])
        rows = [
            ("model", self._source.name),
            ("requests", f"{cache['requests']:,}, {cache['hits']:,} of them reused KV"),
            ("prompt tokens", f"{cache['tokens_requested']:,}, {cache['tokens_cached']:,} of them reused"),
            ("generated tokens", f"{stats['generated_tokens']:,}"),
            ("stored tokens", f"{cache['stored_tokens']:,}, each once"),
            ("memory", f"{show_held(stats)}; peak {peak}, activations included"),
            ("evicted tokens", f"{cache['evicted_tokens']:,}"),
        ]
        if self._last is not None and self._last.hit is not None:
            rows.append(("last prompt", _reuse(self._last.hit, quote=True)))
        self._screen.rows(rows)

    def _help(self, _: str) -> None:
        self._screen.rows((f"/{name}", told) for name, (told, _) in self._commands.items())
        self._screen.note("A line that ends with \\ continues on the next line. Keys are ignored during an answer.")

    def _quit(self, _: str) -> None:
        self._left = True


def _reuse(hit: Hit, *, quote: bool = False) -> str:
    """`quote`: also say what was known there, and what came instead."""
    said = f"{hit.prompt_tokens:,} prompt tokens, {hit.cached:,} reused"
    if hit.diverged:
        return f"{said}: new from {hit.diverged if quote else hit.diverged.partition(': known ')[0]}"
    return f"{said} ({hit.reason})" if hit.reason else said


def _short(text: str, most: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[:most] + "..."
