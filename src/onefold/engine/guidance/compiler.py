"""Makes guides: what a request asks for becomes a grammar, and the grammar is compiled for the model's vocabulary.

Compiled grammars are kept, and so are errors: a conversation sends the same tools with every request. Any number of
threads may ask; compiling blocks.
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
from dataclasses import replace
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
    KEPT_BYTES,
    KEPT_CONVERSIONS,
    KEPT_GRAMMARS,
    KEPT_SECONDS,
    MOST_BYTES,
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


class Kept(NamedTuple):
    """What was made of a grammar."""

    matcher: Any
    """At its beginning; None if there is an error."""
    error: str
    until: float
    """When it is to be tried again."""


class Compiler:
    def __init__(self, tokenizer: Any, vocab: int) -> None:
        """`vocab`: the ids that the model has an embedding for."""
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer, vocab)
        self._trials = Trials(self._vocabulary)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        """Grammars, the one used last at the end."""
        self._converted: OrderedDict[str, str] = OrderedDict()
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
                matcher.deep_copy(),
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
        """The matcher at its beginning. A tool whose schema cannot be enforced, and need not be, may be called with
        any arguments."""
        make = functools.partial(answer_grammar, asked, tools, calls, self._vocabulary, self._convert)
        loose = frozenset[str]()
        if asked.tools is not None and calls is not None:
            loose = frozenset(tool["function"]["name"] for tool in tools) - enforced(asked.tools)
        if loose and len(json.dumps(tools)) > MOST_TOOLS_BYTES:
            self._tell(loose)
            matcher, error = self._try(make(free=loose))
        else:
            matcher, error = self._try(make())
        if matcher is None and asked.tools is not None and calls is not None:
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
            matcher, error = self._try(alone)
            if matcher is None and must:
                where = f"{rule.where}.{i}"
                raise PromptError(f"the arguments of this tool cannot be enforced: {error}", where=where)
            if matcher is None:
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
            self._converted[grammar] = lark
            while len(self._converted) > KEPT_CONVERSIONS:
                self._converted.popitem(last=False)
        return lark, ""

    def _try(self, grammar: str) -> tuple[Any, str]:
        """Compiles a grammar. Returns its matcher, or None and why there is none. Raises Busy."""
        if len(grammar) > MOST_BYTES:
            return None, f"it has {len(grammar)} characters as a grammar, and {MOST_BYTES} is the most"
        with self._lock:
            if grammar in self._kept and time.monotonic() < self._kept[grammar].until:
                self._kept.move_to_end(grammar)
                return self._kept[grammar].matcher, self._kept[grammar].error
        verdict = self._trials.run(grammar)
        matcher: Any = None
        error = explained(verdict.error) if verdict.error else ""
        if not error:
            matcher = LLMatcher(self._vocabulary.compiled(), grammar, log_level=0, limits=parser_limits())
            if matcher.is_error():
                error = explained(matcher.get_error())
                matcher = None
        until = math.inf if verdict.lasting else time.monotonic() + KEPT_SECONDS
        for warning in verdict.warnings:
            log.info("llguidance relaxed a grammar: %s", explained(warning))
        with self._lock:
            self._kept[grammar] = Kept(matcher, error, until)
            self._kept.move_to_end(grammar)
            while len(self._kept) > KEPT_GRAMMARS or (sum(map(len, self._kept)) > KEPT_BYTES and len(self._kept) > 1):
                self._kept.popitem(last=False)
        return matcher, error

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
