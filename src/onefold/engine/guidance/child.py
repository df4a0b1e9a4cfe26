"""The child process of a trial: compiles grammars and computes the first mask of each; converts GBNF to Lark.

It reads one JSON object per line, first the vocabulary and then grammars, and answers each with one line. It ends when
its input does. Knows nothing of MLX.
"""

from __future__ import annotations

import contextlib
import json
import resource
import sys
import threading
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from onefold.engine.guidance.limits import CHILD_BYTES, parser_limits


def main() -> int:
    _limit_memory()
    tokenizer: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        if tokenizer is None:
            tokenizer = LLTokenizer(asked["vocabulary"], n_vocab=asked["size"], eos_token=asked["ends"])
            said: dict[str, Any] = {"error": ""}
        else:
            said = _on_a_thread(tokenizer, asked)
        print(json.dumps(said), flush=True)
    return 0


def _on_a_thread(tokenizer: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Compiles, or converts, on a thread, whose stack is as small as that of the thread which will do it in the
    server."""
    said: dict[str, Any] = {"error": "the compiler failed"}
    if "convert" in asked:
        thread = threading.Thread(target=lambda: said.update(error="", lark=any_to_lark(asked["convert"])))
    else:
        thread = threading.Thread(target=lambda: said.update(_compiled(tokenizer, asked["grammar"])))
    threading.excepthook = lambda failed: said.update(error=str(failed.exc_value))  # llguidance raises plain Exceptions
    thread.start()
    thread.join()
    return said


def _compiled(tokenizer: Any, grammar: str) -> dict[str, Any]:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        mask = allocate_token_bitmask(1, tokenizer.vocab_size)
        fill_next_token_bitmask_par(LLExecutor(1), [(matcher, 0)], mask)
        if not matcher.is_error() and not mask.any():
            return {"error": "nothing can satisfy it", "warnings": []}
    return {"error": matcher.get_error(), "warnings": matcher.get_grammar_warnings()}


def _limit_memory() -> None:
    """Limits the address space to what is used now and `CHILD_BYTES`. macOS has no such limit."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + CHILD_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    sys.exit(main())
