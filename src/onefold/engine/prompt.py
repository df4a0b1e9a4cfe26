"""Makes prompts: the model's chat template renders a conversation as text, and the tokenizer makes tokens of it.

- What earlier turns look like, reasoning included, is the template's business alone.
- A later request branches off where the template stops agreeing: found by rendering the next turn with a
  placeholder for the answer, not by knowing any template.

Any number of threads may ask. Knows nothing of MLX or of the cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jinja2 import TemplateError

from onefold.cache.memory.tokens import common_length
from onefold.engine.request import Prompt
from onefold.engine.system_messages import SystemMessages
from onefold.engine.tokenising import Encoded, Tokeniser
from onefold.errors import PromptError

log = logging.getLogger("onefold.engine")

Message = Mapping[str, Any]

_REFUSED = (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError)
"""What a template raises for a conversation that it does not take."""


class PromptMaker:
    def __init__(
        self, tokenizer: Any, *, vocab: int, checkpoints: bool, between: Callable[[], None] | None = None
    ) -> None:
        """`checkpoints`: the model can be resumed at marked positions only, so say which will be needed. `between` is
        called between two pieces of a long text, and may raise."""
        self._tokenizer = tokenizer
        self._tokeniser = Tokeniser(tokenizer, between)
        self._vocab = vocab
        self._checkpoints = checkpoints
        self._system_messages = SystemMessages(lambda messages: self._render(messages, {}), _REFUSED)
        self._takes_tools = False
        """Whether the template is known to do something with tools; or it was said that it does not."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        most_tokens: int | None = None,
    ) -> Prompt:
        """Returns the prompt for a conversation. Raises PromptError, and TooLong beyond `most_tokens`."""
        if not messages:
            raise PromptError("messages is empty; a conversation needs at least one message", where="messages")
        if not self._tokenizer.has_chat_template:
            raise PromptError("this model has no chat template: send it a prompt at /v1/completions", where="messages")
        messages = self._system_messages.place(messages)
        settings = {**(options or {}), "tools": list(tools) if tools else None}
        with _refusals("the chat template refuses this conversation"):
            text = self._render(messages, settings)
        if tools and not self._takes_tools:
            self._look_for_tools(messages, settings, text)
        tokens, pieces = self._encode(text, most_tokens)
        marks = self._marks(messages, settings, text, tokens) if self._checkpoints else ()
        return Prompt(tokens, marks, self._state(tokens), tuple(_parts(text, messages)), pieces)

    def text(self, prompt: str | Sequence[int], *, most_tokens: int | None = None) -> Prompt:
        if isinstance(prompt, str):
            with _refusals("the prompt cannot be tokenised"):
                tokens = self._tokeniser.encode(prompt, special=True, most_tokens=most_tokens)
        else:
            tokens = np.array(prompt, np.int64)
            if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._vocab):
                raise PromptError(f"token ids of this model are from 0 to {self._vocab - 1}", where="prompt")
        if tokens.size == 0:
            raise PromptError("the prompt is empty; it needs at least one token", where="prompt")
        return Prompt(tokens.astype(np.int32))

    def _render(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        copies = [dict(m) for m in messages]  # templates may change what they are given
        last = copies[-1]
        unfinished = last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls")
        how = {"continue_final_message": True} if unfinished else {"add_generation_prompt": True}
        rendered: str = self._tokenizer.apply_chat_template(copies, tokenize=False, **{**settings, **how})
        return rendered

    def _encode(self, text: str, most_tokens: int | None = None) -> Encoded:
        with _refusals("the conversation cannot be tokenised"):
            return self._tokeniser.encode_marked(text, most_tokens=most_tokens)

    def _look_for_tools(self, messages: Sequence[Message], settings: Mapping[str, Any], text: str) -> None:
        self._takes_tools = True
        with contextlib.suppress(*_REFUSED):
            if self._render(messages, {**settings, "tools": None}) == text:
                log.warning("this model's chat template ignores tools: the model will not see them")

    def _state(self, tokens: np.ndarray) -> str:
        """Returns whether the answer begins in text, in reasoning or in a tool call."""
        tokenizer = self._tokenizer
        if tokenizer.response_initial_state:
            return str(tokenizer.response_initial_state)
        if tokenizer.has_thinking:
            tail = tokens[-32:].tolist()  # a generation prompt is short
            if tokenizer.rfind_think_start(tail) > tokenizer.rfind_think_end(tail):
                return "reasoning"
        return "normal"

    def _marks(
        self, messages: Sequence[Message], settings: Mapping[str, Any], text: str, tokens: np.ndarray
    ) -> tuple[int, ...]:
        """Returns the positions where the next turn, and another conversation on the same system prompt, branch off."""
        answer, question = {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}
        head = 0
        while head < len(messages) and messages[head].get("role") in ("system", "developer"):
            head += 1
        later = [[*messages, answer, question], *([[*messages[:head], question]] if head else [])]
        found = set()
        for conversation in later:
            with contextlib.suppress(*_REFUSED):
                other = self._render(conversation, settings)
                if other.startswith(text):
                    continue
                found.add(common_length(self._encode(other).tokens, tokens))
        return tuple(sorted(at for at in found if 0 < at < len(tokens)))


@contextlib.contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except PromptError:
        raise
    except _REFUSED as error:
        raise PromptError(f"{what}: {error}", where="messages") from error


def _parts(text: str, messages: Sequence[Message]) -> Iterator[tuple[int, str]]:
    """Where each message's content begins in the rendered text, for those that the template renders as they are."""
    at = 0
    for i, message in enumerate(messages):
        content = message.get("content")
        start = text.find(content.strip(), at) if isinstance(content, str) and content.strip() else -1
        if start >= 0:
            yield start, f"messages[{i}] ({message.get('role')})"
            at = start + len(str(content).strip())


def describe_divergence(prompt: Prompt, matched: int, known: Sequence[int], tokenizer: Any) -> str:
    """Describes where this prompt diverged from the stored tokens, and how the two continue from there."""
    if not len(known) or matched >= len(prompt.tokens) - 1:
        return ""
    now = tokenizer.decode(prompt.tokens[matched : matched + 12].tolist())
    then = tokenizer.decode(list(known)[:12])
    characters, tokens = next((mark for mark in reversed(prompt.pieces) if mark[1] <= matched), (0, 0))
    at = characters + len(tokenizer.decode(prompt.tokens[tokens:matched].tolist()))
    part = next((f", in {name}" for start, name in reversed(prompt.parts) if start <= at), "")
    return f"token {matched}{part}: known {_short(then)}, now {_short(now)}"


def _short(text: str, most: int = 40) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")
