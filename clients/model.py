"""A tiny llama that says scripts: real layers, real attention, a real tokenizer, and words that are chosen beforehand.

    write_scripted_model(Path("model"), [Script("weather", "It is sunny.", call=("get_weather", {"city": "Paris"}))])

A user message that has the words "script weather" starts that script: the model calls the tool, and when the tool has
answered it says the answer. Without tools, and for messages that name no script, it says `OTHERWISE`.

How: half of the hidden size is for speech, half for content. Each piece of a script is a token of its own with a
dimension of its own in the first half, and the output layer has the next piece for it. Layers read everything and write
to the content half only: so a script is said to its end whatever the prompt is. Where no piece is being said, the
output is that of random layers over the whole prompt, except that the model ends as soon as it may and avoids white
space. So an answer whose tokens are masked by a grammar is arbitrary, and keeps to the grammar or does not.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|unknown|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
OTHERWISE = "There is nothing to do."

HIDDEN, SPEECH = 256, 128
LEARNED = 4096
"""Tokens of the byte-level vocabulary."""
CORPUS = 1_000_000
"""Characters that it is learned from."""


@dataclass(frozen=True)
class Script:
    name: str
    answer: str
    call: tuple[str, dict[str, Any]] | None = None
    """A tool with its arguments. One script of a model can have it, as the tag is a token that all would share."""

    def chains(self) -> Iterator[list[str]]:
        """The pieces of what it says, after the token that begins it."""
        answer = [*pieces(self.answer), END]
        yield [f"<|{self.name}|>", *(self._call() if self.call else answer)]
        yield [f"<|{self.name} answered|>", *answer]

    def _call(self) -> list[str]:
        """The call as the template writes it, in pieces that end where a value or the choice of a tool begins: a
        grammar leaves no choice between these places, and there the server puts tokens that the model did not say."""
        assert self.call is not None
        name, given = self.call
        said, text = [CALL_START, '\n{"name": "'], f'{name}", "arguments": {{'
        for i, (key, value) in enumerate(given.items()):
            quote = '"' if isinstance(value, str) else ""
            written = json.dumps(value, ensure_ascii=False).strip('"')
            said += [f'{text}{", " if i else ""}"{key}": {quote}', written]
            text = quote
        return [*said, f"{text}}}}}\n", CALL_END, END]


def pieces(text: str) -> list[str]:
    """Two words each, with the white space before them."""
    return re.findall(r"\s*\S+(?:\s+\S+)?", text)


def write_scripted_model(folder: Path, scripts: Sequence[Script]) -> Path:
    """Writes what `mlx_lm.load(folder)` reads, and gives back the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chains = [["<|says|>", *pieces(OTHERWISE), END], *(chain for script in scripts for chain in script.chains())]
    tokenizer = _tokenizer(chains)
    vocab = -(-tokenizer.get_vocab_size() // 64) * 64
    config = _config(vocab, tokenizer.token_to_id(END))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"temperature": 0.0})
    mx.save_safetensors(str(folder / "model.safetensors"), _weights(config, tokenizer, chains), {"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": None, "eos_token": END, "pad_token": END, "unk_token": UNKNOWN}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _template(scripts),
    }
    _write_json(folder / "tokenizer_config.json", names | settings)
    return folder


def _template(scripts: Sequence[Script]) -> str:
    names = json.dumps([script.name for script in scripts])
    calls = json.dumps([script.name for script in scripts if script.call])
    return f"{{%- set NAMES = {names} %}}{{%- set CALLS = {calls} %}}" + (
        Path(__file__).with_name("template.jinja").read_text().strip()
    )


def _config(vocab: int, end: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1 << 18,
        "tie_word_embeddings": False,
        "bos_token_id": end,
        "eos_token_id": end,
    }


# -- the tokenizer ---------------------------------------------------------------------------------


def _tokenizer(chains: Sequence[Sequence[str]]) -> Tokenizer:
    """Byte-level, learned from the project's own text, with each piece of a chain as a token."""
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED,
        special_tokens=[UNKNOWN, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tags = [CALL_START, CALL_END, "<tool_response>", "</tool_response>"]
    said = dict.fromkeys([*tags, *(piece for chain in chains for piece in chain if piece != END)])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in said])
    for chain in chains:
        text = "".join(chain)
        if tokenizer.encode(text).ids != [tokenizer.token_to_id(piece) for piece in chain]:
            raise ValueError(f"{text!r} is not tokenised as it is said: choose other words")
    return tokenizer


def _corpus() -> Iterator[str]:
    left = CORPUS
    for path in [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]:
        text = path.read_text()[:left]
        yield text
        left -= len(text)
        if left <= 0:
            return


# -- the weights -----------------------------------------------------------------------------------


def _weights(config: dict[str, Any], tokenizer: Tokenizer, chains: Sequence[Sequence[str]]) -> dict[str, mx.array]:
    model = llama.Model(llama.ModelArgs.from_dict(config))
    found = {name: _tensor(name, value.shape) for name, value in tree_flatten(model.parameters())}
    for name, value in found.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            value[:SPEECH] = 0
    embeds, out = found["model.embed_tokens.weight"], found["lm_head.weight"]
    embeds[:, :SPEECH] = 0
    out[:, :SPEECH] = 0
    _teach(embeds, out, tokenizer, chains)
    return {name: mx.array(value.astype(np.float32)) for name, value in found.items()}


def _teach(embeds: np.ndarray, out: np.ndarray, tokenizer: Tokenizer, chains: Sequence[Sequence[str]]) -> None:
    """The last dimension of speech is the same for every token: what is likely or unlikely everywhere."""
    always = SPEECH - 1
    embeds[:, always] = 1.0
    out[tokenizer.token_to_id(END), always] = 100.0
    for token, number in tokenizer.get_vocab().items():
        if set(token) & set("ĠĊĉč \n\t\r"):
            out[number, always] = -100.0
    out[[tokenizer.token_to_id(UNKNOWN), tokenizer.token_to_id(START)], always] = -1000.0
    follows: dict[str, str] = {}
    for here, then in itertools.chain.from_iterable(map(itertools.pairwise, chains)):
        if follows.setdefault(here, then) != then:
            raise ValueError(f"{here!r} is followed by {follows[here]!r} and by {then!r}: choose other words")
    if len(follows) > always:
        raise ValueError(f"{len(follows)} pieces, and room for {always}: write shorter scripts")
    for dimension, (here, then) in enumerate(follows.items()):
        embeds[tokenizer.token_to_id(here), dimension] = 8.0
        out[tokenizer.token_to_id(then), dimension] += 1000.0


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of unit gain, with attention sharp enough for the output to depend on all of the prompt."""
    if name.endswith("norm.weight"):
        return np.ones(shape)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if "embed" in name:
        return rng.standard_normal(shape)
    gain = 2.0 if name.split(".")[-2] in ("q_proj", "k_proj") else 1.0
    return rng.standard_normal(shape) * gain / np.sqrt(shape[-1])


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
