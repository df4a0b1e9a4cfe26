"""A model's vocabulary, as llguidance takes it. Made from the tokenizer's `tokenizer.json` when it is first needed."""

from __future__ import annotations

import copy
import functools
import logging
import re
import threading
from typing import Any

from llguidance import LLTokenizer

from onefold.errors import PromptError
from onefold.faults import UNEXPECTED

log = logging.getLogger("onefold.engine")


class Vocabulary:
    def __init__(self, tokenizer: Any, size: int) -> None:
        """`size`: the ids that the model has an embedding for."""
        self._tokenizer = tokenizer
        self._size = size
        self._compiling = threading.Lock()
        self._compiled: Any = None

    @property
    def usable(self) -> bool:
        """Whether the tokenizer is one that grammars can be enforced for."""
        return not self._problem

    def require(self, where: str) -> None:
        """Raises PromptError if grammars cannot be enforced for this tokenizer. `where`: the field that asks for it."""
        if self._problem:
            name = getattr(self._tokenizer, "name_or_path", "") or type(self._tokenizer).__name__
            raise PromptError(
                f"the tokenizer of this model ({name}) {self._problem}, which schemas, grammars and forced tools need; "
                "leave this out, or serve a model with another tokenizer",
                where=where,
            )

    @functools.cached_property
    def _problem(self) -> str:
        """Why grammars cannot be enforced; empty if they can."""
        if self._backend is None:
            return "has no tokenizer.json"
        try:
            self.compiled()
        except (RuntimeError, *UNEXPECTED) as error:  # broad on purpose: llguidance reads the file, and it is not ours
            log.warning("llguidance cannot read this model's tokenizer.json: %s", error)
            return "has a tokenizer.json that llguidance cannot read"
        return ""

    @functools.cached_property
    def text(self) -> str:
        """The content of its tokenizer.json, with the tokens that were added since."""
        backend = copy.copy(self._backend)
        assert backend is not None
        backend.no_padding()
        backend.no_truncation()
        found: str = backend.to_str()
        return found

    @property
    def size(self) -> int:
        """Tokens of the vocabulary; the model may have some more ids, or fewer."""
        assert self._backend is not None
        return max(self._size, self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def ends(self) -> list[int]:
        """The tokens that end an answer."""
        return sorted(self._tokenizer.eos_token_ids)

    def compiled(self) -> Any:
        """Returns the vocabulary in llguidance's form, which takes a second to make for 150,000 tokens."""
        with self._compiling:
            if self._compiled is None:
                self._compiled = LLTokenizer(self.text, n_vocab=self.size, eos_token=self.ends)
            return self._compiled

    @functools.cached_property
    def special(self) -> dict[str, int]:
        """The tokens that only stand for themselves, and never for the characters of their name. llguidance decides:
        to it added tokens such as <tool_call> are special, which the tokenizers of many models do not say."""
        added, compiled = getattr(self._tokenizer, "added_tokens_decoder", {}), self.compiled()
        return {token.content: number for number, token in added.items() if compiled.is_special_token(number)}

    def pieces(self, text: str) -> list[str | int]:
        """Returns the text in pieces: text, and the ids of special tokens in it."""
        parts = self._special_names.split(text) if self._special_names is not None else [text]
        return [self.special.get(part, part) for part in parts if part]

    @functools.cached_property
    def _special_names(self) -> re.Pattern[str] | None:
        names = sorted(self.special, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    @functools.cached_property
    def _backend(self) -> Any:
        """The tokenizer of the `tokenizers` package; None if this one is of another kind."""
        return getattr(self._tokenizer, "backend_tokenizer", None)
