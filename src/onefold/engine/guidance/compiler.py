"""Makes guides: what a request asks for becomes a grammar, and the grammar is compiled for the model's vocabulary.

The text of a grammar is kept, and whether it can be compiled: a conversation sends the same tools with every request.
Each answer has a matcher of its own, which takes 2 to 20 ms to make: copies of a matcher share llguidance's lexer, with
its limits, and the answers of a day would exceed them. If a matcher takes longer to make, a few answers get copies of
one. Any number of threads may ask; compiling blocks.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from llguidance import LLMatcher

from onefold.engine import wanted
from onefold.engine.constraint import Constraint, ToolRule
from onefold.engine.guidance import call_format
from onefold.engine.guidance.call_format import CallFormat, plain_calls
from onefold.engine.guidance.closing import Completions
from onefold.engine.guidance.grammar import Tools, answer_grammar, enforced, is_required, offered
from onefold.engine.guidance.guide import Guide
from onefold.engine.guidance.limits import (
    COPIED_SECONDS,
    KEPT_BYTES,
    KEPT_CONVERSIONS,
    KEPT_GRAMMARS,
    KEPT_SECONDS,
    MOST_BYTES,
    MOST_COPIES,
    MOST_SECONDS,
    MOST_TOLD,
    MOST_TOOLS_BYTES,
    parser_limits,
)
from onefold.engine.guidance.messages import explained
from onefold.engine.guidance.trial import Trials
from onefold.engine.guidance.vocabulary import Vocabulary
from onefold.engine.request import Prompt, Request
from onefold.errors import PromptError, RequestError

log = logging.getLogger("onefold.engine")


class Guided(NamedTuple):
    """What keeps one answer to its constraint."""

    guide: Guide
    calls: Callable[[str], list[tuple[str, Any]]] | None
    """Parses the whole answer, which is calls of tools in a format that is not the model's own; None: it is not."""
    all_text: bool
    """What the guide allows is text alone, even if it looks like a marker of a thought or a call."""


@dataclass
class Known:
    """Whether a grammar can be compiled."""

    error: str
    """Why it cannot be; empty if it can."""
    until: float
    """When it is to be tried again."""
    slow: Any = None
    """A matcher at its beginning, if one takes long to make."""
    copies: int = 0
    """How many answers had a copy of it."""


class Compiler:
    def __init__(self, tokenizer: Any, vocab: int) -> None:
        """`vocab`: the ids that the model has an embedding for."""
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, vocab)
        self._trials = Trials(self._vocabulary)
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[str, Known] = OrderedDict()
        """By the text of the grammar."""
        self._grammars: OrderedDict[str, str] = OrderedDict()
        """Texts of grammars, by what was asked for."""
        self._converted: OrderedDict[str, str] = OrderedDict()
        """Clients' grammars as Lark, by their text."""
        self._told: set[str] = set()

    def guided(self, request: Request) -> Guided | None:
        """Returns the guide for the answer to a request; None if nothing is to be enforced, or if it cannot be enforced
        and need not be. Blocks. Raises PromptError, which says what cannot be enforced; Busy."""
        asked, tools = request.constraint or Constraint(), request.tools or ()
        shape, rule = asked.shape, asked.tools if tools else None
        must = shape is not None or is_required(rule) or bool(rule and enforced(rule))
        where = shape.where if shape is not None else rule.where if rule is not None else ""
        if must:
            self._vocabulary.require(where)
        elif not self._vocabulary.usable or self._calls is None:
            return None
        if rule is not None and self._calls is None and not is_required(rule):
            self._check_unused(rule, tools)
            rule = None
        if shape is None and rule is None:
            return None
        calls = self._calls or (plain_calls() if rule is not None else None)
        matcher = self._compiled(Constraint(shape=shape, tools=rule), tools, calls, where)
        try:
            guide = Guide(
                matcher,
                self._vocabulary.size,
                ends=self._vocabulary.ends,
                state=request.prompt.state,
                thinks=() if request.plain else self._thinks(request.prompt),
                must_answer=shape is not None or is_required(rule),
                # a call that was cut short would be made: a file half written
                completions=self._completions if rule is None else None,
                begins_call=self._tokenizer.tool_call_start_tokens or () if self._tokenizer.has_tool_calling else (),
            )
        except RequestError as error:  # the text that every answer begins with is too much for it
            raise PromptError(str(error), where=where) from error
        parse = calls.calls if calls is not None and self._calls is None else None
        return Guided(guide, parse, all_text=rule is None)

    def _check_unused(self, rule: ToolRule, tools: Tools) -> None:
        """Raises PromptError if a strict schema or a grammar of tools cannot be enforced, for a model that has no known
        way to call them: what is wrong with a request does not depend on the model."""
        if rule.strict and self._tokenizer.has_tool_calling:
            message = "strict cannot be enforced: the format of this model's calls is not recognised; leave strict out"
            raise PromptError(message, where=rule.where)
        checked = [tool for tool in tools if tool["function"]["name"] in enforced(rule)]
        if checked:
            self._compiled(Constraint(tools=replace(rule, required=True)), checked, plain_calls(), rule.where)

    def close(self) -> None:
        """Ends the child process that compiles grammars."""
        self._trials.close()

    def _compiled(self, asked: Constraint, tools: Tools, calls: CallFormat | None, where: str) -> Any:
        """Returns a matcher at its beginning. A tool whose schema cannot be enforced, and need not be, may be called
        with any arguments. Raises PromptError, Busy."""
        make = functools.partial(answer_grammar, asked, tools, calls, self._vocabulary, self._convert)
        offer, loose = json.dumps(tools), frozenset[str]()
        if asked.tools is not None and calls is not None:
            loose = frozenset(tool["function"]["name"] for tool in tools) - enforced(asked.tools)
        key = repr((asked, calls is self._calls, offer))
        with self._lock:
            grammar = self._grammars.get(key)
        if grammar is None and loose and len(offer) > MOST_TOOLS_BYTES:
            self._tell(loose)
            grammar = make(free=loose)
        elif grammar is None:
            grammar = make()
        matcher, error = self._try(grammar)
        if matcher is not None:
            with self._lock:
                _keep(self._grammars, key, grammar, KEPT_GRAMMARS)
            return matcher
        if asked.tools is not None and calls is not None:
            bad = self._unenforceable(asked.tools, offered(tools, asked.tools), calls) or loose
            self._tell(bad)
            matcher, error = self._try(make(free=bad))
        if matcher is None:
            raise PromptError(f"this cannot be enforced: {error}", where=where)
        return matcher

    def _unenforceable(self, rule: ToolRule, tools: Tools, calls: CallFormat) -> frozenset[str]:
        """The tools whose schemas cannot be enforced; all that need not be, if it takes long to find out. Raises
        PromptError for one that must be enforced."""
        bad, until = set(), time.monotonic() + MOST_SECONDS
        for i, tool in enumerate(tools):
            name = tool["function"]["name"]
            must = name in enforced(rule)
            wanted.check()
            if not must and time.monotonic() > until:
                bad.add(name)
                continue
            alone = answer_grammar(Constraint(tools=rule), [tool], calls, self._vocabulary, self._convert)
            error = self._known(alone).error
            if error and must:
                where = f"{rule.where}.{i}"
                raise PromptError(f"the arguments of this tool cannot be enforced: {error}", where=where)
            if error:
                bad.add(name)
        return frozenset(bad)

    def _convert(self, grammar: str) -> tuple[str, str]:
        """Returns a client's grammar as Lark, and why it cannot be. The last ones are kept. Raises Busy."""
        with self._lock:
            if grammar in self._converted:
                return self._converted[grammar], ""
        lark, error = self._trials.convert(grammar)
        if error:
            return lark, error
        with self._lock:
            _keep(self._converted, grammar, lark, KEPT_CONVERSIONS)
        return lark, ""

    def _try(self, grammar: str) -> tuple[Any, str]:
        """Returns a matcher for a grammar at its beginning, or None and why there is none. Raises Busy."""
        known = self._known(grammar)
        if known.error:
            return None, known.error
        with self._lock:
            if known.slow is not None and known.copies < MOST_COPIES:
                known.copies += 1
                return known.slow.deep_copy(), ""
        begun = time.perf_counter()
        matcher = LLMatcher(self._vocabulary.compiled(), grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            known.error = explained(matcher.get_error())
            return None, known.error
        if time.perf_counter() - begun > COPIED_SECONDS:
            with self._lock:
                known.slow, known.copies = matcher.deep_copy(), 1
        return matcher, ""

    def _known(self, grammar: str) -> Known:
        """Returns whether a grammar can be compiled; a child process compiles it if that is not known. Raises Busy."""
        if len(grammar) > MOST_BYTES:
            too_long = f"it has {len(grammar)} characters as a grammar, and {MOST_BYTES} is the most"
            return Known(too_long, math.inf)
        with self._lock:
            known = self._verdicts.get(grammar)
            if known is not None and time.monotonic() < known.until:
                self._verdicts.move_to_end(grammar)
                return known
        found = self._trials.run(grammar)
        for warning in found.warnings:
            log.info("llguidance relaxed a grammar: %s", explained(warning))
        until = math.inf if found.lasting else time.monotonic() + KEPT_SECONDS
        known = Known(explained(found.error) if found.error else "", until)
        with self._lock:
            _keep(self._verdicts, grammar, known, KEPT_GRAMMARS)
        return known

    def _tell(self, names: frozenset[str]) -> None:
        new = names - self._told
        if new and len(self._told) < MOST_TOLD:
            self._told |= new
            shown = ", ".join(json.dumps(name[:40]) for name in sorted(new)[:10])
            log.warning("the schemas of these tools cannot be enforced, so their arguments may be anything: %s", shown)

    def _thinks(self, prompt: Prompt) -> Sequence[int]:
        """The tokens by which an answer may begin to think: those of the model, unless the prompt ends behind them."""
        tokenizer = self._tokenizer
        if not tokenizer.has_thinking or prompt.state != "normal":
            return ()
        tail = prompt.tokens[-32:].tolist()  # a generation prompt is short
        return () if tokenizer.rfind_think_end(tail) >= 0 else tuple(tokenizer.think_start_tokens)

    @functools.cached_property
    def _completions(self) -> Completions:
        return Completions(self._vocabulary.compiled())

    @functools.cached_property
    def _calls(self) -> CallFormat | None:
        found = call_format.learn(self._tokenizer)
        if found is None and self._tokenizer.has_tool_calling:
            log.warning("the format of this model's tool calls is not recognised: calls are not kept to a grammar")
        return found


def _keep(kept: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Puts an entry at the end, and drops the first ones while there are more than `most`, or their keys are too long
    together."""
    kept[key] = value
    kept.move_to_end(key)
    while len(kept) > most or (sum(map(len, kept)) > KEPT_BYTES and len(kept) > 1):
        kept.popitem(last=False)
