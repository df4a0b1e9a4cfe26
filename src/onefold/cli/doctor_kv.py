"""`onefold doctor --kv MODEL`: tries every format of stored KV on the user's own model and text, and recommends one."""

from __future__ import annotations

import json
import pydoc_data.topics
import sys
from pathlib import Path
from typing import Any

from onefold.cache.model.formats.names import NAMES
from onefold.cli.command_line import complain
from onefold.engine.context_length import context_length
from onefold.errors import ConfigError, OnefoldError

LEAST_TOKENS = 64
FEW_TOKENS = 1024
"""With fewer, perplexity and speed vary by several per cent from text to text."""
CHARACTERS = 32
"""Of a token, at the most: a longer text is not tokenised to its end."""


def run(name: str, model_name: str, text: str | None, tokens: int, *, as_json: bool) -> int:
    """Print what each format costs; returns the exit code."""
    try:
        told = measured(model_name, text, tokens)
    except OnefoldError as error:
        return complain(name, str(error))
    print(json.dumps(told, indent=1) if as_json else shown(told))
    return 0


def measured(model_name: str, text: str | None, n_tokens: int) -> dict[str, Any]:
    """Returns what each format costs, by name. Raises ConfigError for a text that cannot be used, and for a model with
    which no format can be tried."""
    import onefold
    from onefold import kv_trial

    if n_tokens < LEAST_TOKENS:
        raise ConfigError(f"--tokens must be at least {LEAST_TOKENS}, got {n_tokens}")
    content = _read(text)[: n_tokens * CHARACTERS]
    model, tokenizer = onefold.load(model_name)
    tokens = list(tokenizer.encode(content))[:n_tokens]
    if len(tokens) < LEAST_TOKENS:
        raise ConfigError(f"the text has {len(tokens)} tokens: give one with at least {LEAST_TOKENS}")
    longest = context_length(model, tokenizer)
    if longest is not None and len(tokens) + kv_trial.DECODED > longest:
        most = f"give --tokens of at most {longest - kv_trial.DECODED}"
        raise ConfigError(f"{len(tokens)} tokens of the text are beyond this model's context of {longest}: {most}")
    able, refused, bits = _possible(model)
    _say(f"trying {', '.join(able)} on {len(tokens):,} tokens")
    found = kv_trial.trial(model, tokens, able, None, lambda n: _say(f"  {n:,} of {len(tokens):,} tokens"))
    if not found["16"].is_finite:
        raise ConfigError("the model's own outputs on this text are not numbers: give another text, or another model")
    for name in [name for name, q in found.items() if not q.is_finite]:
        del found[name]
        refused[name] = "its outputs on this text are not numbers"
    exact = found["16"]
    formats = {
        name: {
            "bytes_per_token": q.token_bytes,
            "share": round(q.token_bytes / exact.token_bytes, 4),
            "perplexity": round(q.perplexity, 4),
            "perplexity_change": round(q.loss(exact), 5),
            "mean_kl": round(q.mean_divergence, 6),
            "prefill_tokens_per_second": round(len(tokens) / q.prefill_seconds, 1),
            "decode_tokens_per_second": round(1 / q.decode_seconds, 1),
        }
        for name, q in found.items()
    }
    few = f"{len(tokens)} tokens say little: give {FEW_TOKENS} or more with --text and --tokens"
    return {
        "model": model_name,
        "tokens": len(tokens),
        "formats": formats,
        "model_bits": bits,
        "refused": refused,
        "recommended": kv_trial.recommended(found),
        "most_kl": kv_trial.MOST_DIVERGENCE,
        "warning": few if len(tokens) < FEW_TOKENS else "",
    }


def _say(line: str) -> None:
    """Print how far it is, where it does not mix with the report."""
    print(line, file=sys.stderr, flush=True)


def _possible(model: Any) -> tuple[list[str], dict[str, str], int]:
    """Returns the formats that the model can have, why it cannot have the others, and the bits of its own keys and
    values. Raises ConfigError if no KV of it is stored in a format."""
    import onefold

    able, refused, bits = list[str](), dict[str, str](), 16
    for name in NAMES:
        try:
            with onefold.PrefixCache(model, kv=name) as cache:
                if cache.uncached_reason:
                    raise ConfigError(f"this model's KV is not cached: {cache.uncached_reason}")
                if not cache.state.store.token_bytes:
                    raise ConfigError("no layer of this model keeps the KV of all tokens: serve it without --kv")
                made = cache.parts.models.anatomies[0].made_type
                bits = 8 * made.size if made is not None else bits
            able.append(name)
        except ConfigError as error:
            if name == "16":
                raise
            refused[name] = str(error)
    return able, refused, bits


def shown(told: dict[str, Any]) -> str:
    lines = [f"{told['model']}, {told['tokens']} tokens of text", ""]
    own = f"{told['model_bits']} bits"
    names = f"{'--kv':8} {'bytes/token':>11} {'share':>6} {'perplexity':>10} {'mean KL':>9}"
    lines.append(f"{names} {'prefill/s':>9} {'decode/s':>8}")
    for name, f in told["formats"].items():
        change = "" if name == "16" else f"{f['perplexity_change']:+.2%}"
        costs = f"{f['bytes_per_token']:>11,} {f['share']:>6.3f} {change or f['perplexity']:>10} {f['mean_kl']:>9.5f}"
        speeds = f"{f['prefill_tokens_per_second']:>9,.1f} {f['decode_tokens_per_second']:>8,.1f}"
        lines.append(f"{name:8} {costs} {speeds}" + (f"   the model's own {own}" if name == "16" else ""))
    lines += [f"{name}: {why}" for name, why in told["refused"].items()]
    why = f"the fewest bytes with a mean KL of at most {told['most_kl']} on this text"
    if told["warning"]:
        lines += ["", told["warning"]]
    lines += ["", f"share: of the bytes of the model's own {own}; mean KL: of the next token, against these"]
    lines += [f"perplexity: that of the model's own {own}, and how much higher it is in the other formats"]
    lines += [f"recommended: --kv {told['recommended']} ({why})"]
    return "\n".join(lines)


def _read(path: str | None) -> str:
    if path is None:
        return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:60_000]
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
