"""A conversation as one person holds it: turns that can be taken back, and a system prompt before them.

A turn is a question with its answer, so what is sent alternates as chat templates want it. Knows nothing of tokens: a
turn that is taken back stays in the model's cache, and the next one branches off before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    question: str
    answer: str
    reasoning: str = ""


@dataclass
class Conversation:
    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """All of it, and this question, as OpenAI writes a conversation."""
        made = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            answer = {"role": "assistant", "content": turn.answer}
            if turn.reasoning:  # whether it is said again is the template's business
                answer["reasoning_content"] = turn.reasoning
            made += [{"role": "user", "content": turn.question}, answer]
        return [*made, {"role": "user", "content": question}]

    def undo(self) -> Turn | None:
        return self.turns.pop() if self.turns else None
