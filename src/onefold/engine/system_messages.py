"""System messages in the middle of a conversation, for templates that take one only at its start.

Keeps true: a message stays where it is in the conversation, so that what came before it is rendered as it was without
it. A template that puts system messages in their place gets them. One that refuses them there, moves them to the front
or leaves them out gets them as text of the neighbouring message. Which it is, is found by rendering, once.

Does not know any template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_TRIALS = (
    (("system", "zq-0"), ("user", "zq-1"), ("assistant", "zq-2"), ("user", "zq-3"), ("system", "zq-4")),
    (("system", "zq-0"), ("user", "zq-1"), ("assistant", "zq-2"), ("system", "zq-3"), ("user", "zq-4")),
    (("system", "zq-0"), ("system", "zq-1"), ("user", "zq-2")),
)


class SystemMessages:
    def __init__(self, render: Callable[[Sequence[Message]], str], refused: tuple[type[Exception], ...]) -> None:
        """`refused` is what `render` raises for a conversation that the template does not take."""
        self._render = render
        self._refused = refused
        self._in_place: bool | None = None

    def place(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Returns the same conversation in a form that the template accepts."""
        if not any(message.get("role") == "system" for message in messages[1:]):
            return messages
        if self._in_place is None:
            self._in_place = all(self._renders_in_order(trial) for trial in _TRIALS)
        return messages if self._in_place else fold(messages)

    def _renders_in_order(self, trial: Sequence[tuple[str, str]]) -> bool:
        try:
            text = self._render([{"role": role, "content": content} for role, content in trial])
        except self._refused:
            return False
        found = [text.find(content) for _, content in trial]
        return found[0] >= 0 and found == sorted(set(found))


def fold(messages: Sequence[Message]) -> list[Message]:
    """System messages after the first become text: of the message of the user, or the result of a tool, before them;
    after an answer, of the user's next."""
    made: list[Message] = []
    held: list[str] = []
    for message in messages:
        role, content = message.get("role"), str(message.get("content") or "")
        before = made[-1].get("role") if made else "system"
        if role == "system" and made and before in ("system", "user", "tool"):
            made[-1] = _joined(made[-1], [made[-1].get("content"), content])
        elif role == "system" and made:
            held.append(content)
        elif held and role == "user":
            made.append(_joined(message, [*held, content]))
            held = []
        elif held and role == "tool":  # it belongs to the call before
            made.append(_joined(message, [content, *held]))
            held = []
        else:
            made += [_joined({"role": "user"}, held)] if held else []
            made.append(message)
            held = []
    return [*made, _joined({"role": "user"}, held)] if held else made


def _joined(message: Message, texts: Sequence[str | None]) -> Message:
    return {**message, "content": "\n\n".join(text for text in texts if text)}
