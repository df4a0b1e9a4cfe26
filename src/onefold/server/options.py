"""The options of all APIs for how an answer is made. Knows no API's messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from onefold.engine.request import Sampling
from onefold.errors import BadRequest
from onefold.server.body import Fields

MOST_TOKENS = 1 << 20
"""More than any answer; larger numbers are taken for "as many as you like"."""
MOST_STOPS = 16
LARGEST_TOKEN = (1 << 31) - 1
TEXT_ONLY = "This model takes text only: {} cannot be read."

# fmt: off
NOT_TEMPLATE_OPTIONS = frozenset({
    "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})
# fmt: on
"""They would reach the function that renders, not the template: a client might bring a template of its own."""

MaxTokens = Annotated[int, Field(ge=1, description=f"More than {MOST_TOKENS} is taken for {MOST_TOKENS}.")]


class SamplingFields(Fields):
    """A field that is absent or null has the server's setting, or else the model's recommendation."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, description="0 and -1 switch it off.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None

    def sampling(self, defaults: Sampling) -> Sampling:
        said: dict[str, Any] = {
            name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None
        }
        if "top_k" in said:
            said["top_k"] = min(max(0, said["top_k"]), LARGEST_TOKEN)
        if "seed" in said:
            said["seed"] %= 1 << 63
        if said.get("top_p") == 0:  # the smallest nucleus is the likeliest token
            said |= {"top_p": 1.0, "temperature": 0.0}
        said["logit_bias"] = {_token(name): bias for name, bias in said.get("logit_bias", {}).items()}
        return replace(defaults, **said)


def stop_strings(given: str | list[str] | None, where: str) -> tuple[str, ...]:
    found = [given] if isinstance(given, str) else given or []
    if len(found) > MOST_STOPS:
        raise BadRequest(f"At most {MOST_STOPS} stop strings can be given, not {len(found)}.", where=where)
    return tuple(dict.fromkeys(text for text in found if text))


def for_the_template(given: dict[str, Any] | None) -> dict[str, Any]:
    for name in given or {}:
        if name in NOT_TEMPLATE_OPTIONS:
            raise BadRequest("A client cannot set this option.", where=f"chat_template_kwargs.{name}")
    return given or {}


def most_tokens(*given: int | None) -> int | None:
    """Returns the first that is set."""
    said = next((n for n in given if n is not None), None)
    return None if said is None else min(said, MOST_TOKENS)


def _token(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 10 and int(name) <= LARGEST_TOKEN):
        raise BadRequest("The keys of logit_bias must be token ids.", where="logit_bias")
    return int(name)
