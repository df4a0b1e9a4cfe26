"""Chat templates that write calls of tools in each of the formats that mlx-lm has a parser for."""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {%- set function = call.function %}
        {%- if loop.first %}{{ BEFORE }}{% endif %}
        {# CALL #}
        {%- if loop.last %}{{ AFTER }}{% else %}{{ BETWEEN }}{% endif %}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

STRING_OR_JSON = "{{- v if v is string else v | tojson }}"


def _template(call: str, before: str = "''", after: str = "''", between: str = "''") -> str:
    made = TEMPLATE.replace("BEFORE", before).replace("AFTER", after).replace("BETWEEN", between)
    return made.replace("{# CALL #}", call).strip()


HERMES = _template(
    """{{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}{{- function.arguments | tojson }}
    {{- '}\n</tool_call>' }}""",
    between="'\n'",
)
QWEN_CODER = _template(
    """{{- '<tool_call>\n<function=' + function.name + '>\n' }}
    {%- for k, v in function.arguments.items() %}
        {{- '<parameter=' + k + '>\n' }}VALUE{{- '\n</parameter>\n' }}
    {%- endfor %}{{- '</function>\n</tool_call>' }}""".replace("VALUE", STRING_OR_JSON),
    between="'\n'",
)
GLM = _template(
    """{{- '<tool_call>' + function.name }}
    {%- for k, v in function.arguments.items() %}
        {{- '<arg_key>' + k + '</arg_key><arg_value>' }}VALUE{{- '</arg_value>' }}
    {%- endfor %}{{- '</tool_call>' }}""".replace("VALUE", STRING_OR_JSON)
)
GLM_LINES = GLM.replace("</arg_key><", "</arg_key>\n<").replace("function.name }}", "function.name + '\n' }}")
LONGCAT = re.sub(r"<(/?)(tool_call|arg_key|arg_value)>", r"<\1longcat_\2>", GLM)
MINIMAX = _template(
    """{{- '<invoke name="' + function.name + '">\n' }}
    {%- for k, v in function.arguments.items() %}
        {{- '<parameter name="' + k + '">' }}VALUE{{- '</parameter>\n' }}
    {%- endfor %}{{- '</invoke>\n' }}""".replace("VALUE", STRING_OR_JSON),
    before="'<minimax:tool_call>\n'",
    after="'</minimax:tool_call>'",
)
MINICPM = _template(
    """{{- '<function name="' + function.name + '">' }}
    {%- for k, v in function.arguments.items() %}
        {{- '<param name="' + k + '">' }}VALUE{{- '</param>' }}
    {%- endfor %}{{- '</function>' }}""".replace("VALUE", STRING_OR_JSON)
)
MUSE = _template(
    """{{- '<atem:invoke name="' + function.name + '">\n' }}
    {%- for k, v in function.arguments.items() %}
        {{- '<atem:parameter name="' + k + '">' }}VALUE{{- '</atem:parameter>\n' }}
    {%- endfor %}{{- '</atem:invoke>\n' }}""".replace("VALUE", STRING_OR_JSON),
    before="'<atem:function_calls>\n'",
    after="'</atem:function_calls>'",
)
MISTRAL = _template("{{- '[TOOL_CALLS]' + function.name + '[ARGS]' }}{{- function.arguments | tojson }}")
MISTRAL_LIST = _template(
    """{{- '{"name": "' + function.name + '", "arguments": ' }}{{- function.arguments | tojson }}
    {{- ', "id": "' + call.id + '"}' }}""",
    before="'[TOOL_CALLS] ['",
    after="']'",
    between="', '",
)
KIMI = _template(
    """{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}{{- function.arguments | tojson }}
    {{- '<|tool_call_end|>' }}""",
    before="'<|tool_calls_section_begin|>'",
    after="'<|tool_calls_section_end|>'",
)
KIMI_K3 = _template(
    """{{- '<|open|>call tool="' + function.name + '" index="' + loop.index|string + '"<|sep|>' }}
    {%- for k, v in function.arguments.items() %}
        {%- set t = 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number else 'object' %}
        {{- '<|open|>argument key="' + k + '" type="' + t + '"<|sep|>' }}VALUE{{- '<|close|>argument<|sep|>' }}
    {%- endfor %}{{- '<|close|>call<|sep|>' }}""".replace("VALUE", STRING_OR_JSON),
    before="'<|open|>tools<|sep|>'",
    after="'<|close|>tools<|sep|>'",
)
GEMMA = _template(
    """{{- '<start_function_call>call:' + function.name + '{' }}
    {%- for k, v in function.arguments.items() %}
        {{- k + ':' }}{{- '<escape>' + v + '<escape>' if v is string else v | tojson }}
        {{- ',' if not loop.last else '' }}
    {%- endfor %}{{- '}<end_function_call>' }}"""
)
PYTHONIC = _template(
    """{{- function.name + '(' }}
    {%- for k, v in function.arguments.items() %}
        {{- k + '=' }}{{- '"' + v + '"' if v is string else v | tojson }}{{- ', ' if not loop.last else '' }}
    {%- endfor %}{{- ')' }}""",
    before="'<|tool_call_start|>['",
    after="']<|tool_call_end|>'",
    between="', '",
)

FORMATS = {
    "hermes": ("json_tools", HERMES),
    "qwen3_coder": ("qwen3_coder", QWEN_CODER),
    "glm": ("glm47", GLM),
    "glm, lines": ("glm47", GLM_LINES),
    "longcat": ("longcat", LONGCAT),
    "minimax": ("minimax_m2", MINIMAX),
    "minicpm": ("minicpm5", MINICPM),
    "muse": ("muse_spark", MUSE),
    "mistral": ("mistral", MISTRAL),
    "mistral, list": ("mistral", MISTRAL_LIST),
    "kimi": ("kimi_k2", KIMI),
    "kimi k3": ("kimi_k3", KIMI_K3),
    "function gemma": ("function_gemma", GEMMA),
    "pythonic": ("pythonic", PYTHONIC),
}
MARKS = (
    *("<tool_call>", "</tool_call>", "<|tool_call_start|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<|sep|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|open|>", "<|close|>"),
    *("<|tool_call_argument_begin|>", "</arg_value>", "</parameter>", "<minimax:tool_call>"),
)
"""Texts that are special tokens in some vocabularies."""


@cache
def bytes_and_words(special: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of a few hundred tokens, some of them words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    said = ['{"name": "get_weather", "arguments": {"city": "Paris"}}</parameter></arg_value> the and of to in is'] * 20
    tokenizer.train_from_iterator(said, trainer)
    marks = ("<|im_start|>", "<|im_end|>", *special)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")


def tokenizer_of(name: str, *, special: tuple[str, ...] = ()) -> Any:
    """A tokenizer as mlx-lm loads one, whose model writes calls in this format. `special`: texts that are one token."""
    parser, template = FORMATS[name]
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    tokenizer = bytes_and_words(special)
    tokenizer.chat_template = template
    return TokenizerWrapper(
        tokenizer,
        tool_call_start=module.tool_call_start,
        tool_call_end=module.tool_call_end,
        tool_parser=module.parse_tool_call,
    )
