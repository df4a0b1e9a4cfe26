"""A tiny but real model that says what its template asks for: it thinks, calls a tool, and answers in words.

Its layers add nothing, so that each token is followed by the one that `SAYS` has for it: a chain of whole phrases,
each of them one token. The generation prompt is the beginning of one of three chains: with tools and no result yet it
calls one; with a result, or without tools, it answers. A grammar may write a call's beginning for it. What it wrote in
its reasoning is left out of earlier turns, as many templates do.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import mlx.core as mx
import numpy as np
from local_model import END, Shape, write_model
from tokenizers import AddedToken, Tokenizer

THOUGHT = "The city is known; look it up."
CALL = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
ANSWER = ["It is", " sunny", " in Paris."]
SPLIT_ANSWER = "".join(ANSWER)

PATTERN = "sunny?"
"""What it says to a tool that takes text."""
_ARGUMENTS = [f'Paris", "days": 2{"}" * 2}', f'{PATTERN}"{"}" * 2}']
"""How it goes on where a grammar has written the call up to its first string, by the tool's arguments."""

_CALLS, _SAYS, _BREAKS = "<|calls|>", "<|says|>", "<|breaks|>"
_PHRASES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    _CALLS,
    _SAYS,
    _BREAKS,
    THOUGHT,
    json.dumps(CALL),
    "<tool_call>{not json</tool_call>",
    *_ARGUMENTS,
    *ANSWER,
]
_CHAINS = [
    [_CALLS, "<think>", THOUGHT, "</think>", "<tool_call>", json.dumps(CALL), "</tool_call>", END],
    [_SAYS, *ANSWER, END],
    [_BREAKS, "<tool_call>{not json</tool_call>", END],
]

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.reasoning_content and loop.last %}
        {{- '<think>' + message.reasoning_content + '</think>' }}
    {%- endif %}
    {{- message.content or '' }}
    {%- for tool_call in message.tool_calls or [] %}
        {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
        {{- '<tool_call>{"name": "' + tool_call.name + '", ' }}
        {{- '"arguments": ' + tool_call.arguments | tojson + '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if not tools or messages[-1].role == 'tool' %}{{ '<|says|>' }}
    {%- elif 'broken' in messages[-1].content %}{{ '<|breaks|>' }}
    {%- else %}{{ '<|calls|>' }}{% endif %}
{%- endif %}
""".strip()

SHAPE = Shape(layers=1, vocab=128)


def write_talking_model(folder: Path) -> Path:
    write_model(folder, SHAPE)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(p, normalized=False, special=False) for p in _PHRASES])
    tokenizer.save(str(path))
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    weights = mx.load(str(folder / "model.safetensors"))
    mx.save_safetensors(str(folder / "model.safetensors"), _bigrams(weights, tokenizer), {"format": "mlx"})
    return folder


def _bigrams(weights: dict[str, mx.array], tokenizer: Tokenizer) -> dict[str, mx.array]:
    size = SHAPE.hidden
    assert tokenizer.get_vocab_size() <= SHAPE.vocab <= size
    follows = np.zeros((SHAPE.vocab, size), np.float32)
    for chain in _CHAINS:
        ids = [tokenizer.token_to_id(phrase) for phrase in chain]
        assert None not in ids, chain
        for token, following in itertools.pairwise(ids):
            follows[following, token] = 1.0
    for weight, arguments in zip((1.0, 0.5), _ARGUMENTS, strict=True):
        follows[tokenizer.token_to_id(arguments), tokenizer.token_to_id('"')] = weight
    silent = ("o_proj.weight", "down_proj.weight")
    found = {n: mx.zeros_like(w) if n.endswith(silent) else w for n, w in weights.items()}
    found["model.embed_tokens.weight"] = mx.array(np.eye(SHAPE.vocab, size, dtype=np.float32))
    found["lm_head.weight"] = mx.array(follows)
    return found
