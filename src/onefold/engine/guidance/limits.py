"""The limits of grammars: how large one may be, how long it may take to compile, and what one step of it may cost.

Clients send grammars. Without limits a schema of 40 bytes can take minutes and gigabytes to compile
(`{"type": "integer", "multipleOf": 12345678}`), and a grammar with a long chain of rules ends the process. So a child
process compiles a grammar first (`trial.py`), under these limits.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLParserLimits

MOST_BYTES = 1 << 20
"""Of a grammar's text."""
MOST_SECONDS = 4.0
"""To compile a grammar, on the machine as it is."""
CHILD_BYTES = 2 << 30
"""Address space that the child process may add, where the system can limit that."""
KEPT_GRAMMARS, KEPT_CONVERSIONS = 64, 16
"""Texts of grammars that are kept, with whether they compile; and clients' grammars that were converted to Lark."""
COPIED_SECONDS, MOST_COPIES = 0.1, 32
"""A matcher that takes so long to make is copied for so many answers, which share its lexer."""
KEPT_SECONDS = 60.0
"""Seconds for which a grammar that took too long is refused."""
MOST_TOOLS_BYTES = 1 << 19
"""Schemas of larger lists of tools are enforced only where the request asks for it."""
MOST_TOLD = 100
"""At most so many names of tools are logged."""
SLOW_SECONDS, SLOW_STEPS = 0.05, 3
"""A guide that takes so much processor time, so many times, fails its request: others wait for its masks. Time in which
the thread waits for the processor does not count."""
KEPT_BYTES = 8 << 20
"""Of the keys of what is kept: texts of grammars, and of tools."""


def parser_limits() -> Any:
    """Returns the limits of one grammar. A mask that exceeds them is an error of its request alone. 20,000 states of a
    lexer take up to 40 MB, and the fuel of a step up to 40 ms."""
    return LLParserLimits(
        max_items_in_row=3000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=1_000_000,
        step_max_items=30_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )
