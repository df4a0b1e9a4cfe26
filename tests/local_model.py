"""A tiny but real model folder, so that mlx-lm's own `load` and server run without a network.

The tokenizer has one token per character of ASCII, so that a text is as many tokens as it is long and an answer that
goes back into the prompt of the next turn becomes the very tokens that were generated. Other alphabets are not for it.

Weights depend on the seed and on the tensor's name alone: a model with fewer layers is the same model cut short, which
makes it a draft that is sometimes right. The rows of the output for special tokens are zero, so that they are never
generated and an answer is as long as `max_tokens` says, unless `stops` asks for an end token. The same goes for the
space, as mlx-lm drops one that an answer begins with.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

END, START, UNKNOWN = "<|im_end|>", "<|im_start|>", "<|unknown|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """What config.json says. Heads of dimension 64 are what KV quantised in groups of 64 needs."""

    architecture: str = "qwen2"
    layers: int = 2
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 128
    vocab: int = 128
    stops: bool = False
    seed: int = 0

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """KV of one token, in bytes."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 4

    def config(self) -> dict[str, object]:
        end = _tokens()[END]
        return {
            "model_type": self.architecture,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 1 << 18,
            "tie_word_embeddings": False,
            "bos_token_id": end,
            "eos_token_id": end,
        }


TARGET = Shape()
DRAFT = replace(TARGET, layers=1)
"""The first layer of `TARGET`: the same vocabulary, and now and then the same token."""


def write_model(folder: Path, shape: Shape = TARGET) -> Path:
    """Writes what `mlx_lm.load(folder)` reads, and gives back the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", shape.config())
    weights = _weights(shape)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(weights), "model.safetensors")}
    _write_json(folder / "model.safetensors.index.json", index)
    _tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": None, "eos_token": END, "pad_token": END, "unk_token": UNKNOWN}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1 << 18,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", names | settings)
    return folder


def write_as_downloaded(hub: Path, repository: str, shape: Shape = TARGET) -> None:
    """The same, where a download of `repository` would lie: with `HF_HUB_CACHE` set to `hub`, its name is enough."""
    commit = f"{zlib.crc32(repr(shape).encode()):040x}"
    folder = hub / f"models--{repository.replace('/', '--')}"
    write_model(folder / "snapshots" / commit, shape)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(commit)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1))


def _tokens() -> dict[str, int]:
    """From "!" on, as byte-level vocabularies begin: upstream's tests expect it there."""
    characters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]  # space and newline, as byte-level writes them
    return {token: i for i, token in enumerate([*characters, UNKNOWN, START, END])}


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab=_tokens(), merges=[], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([UNKNOWN, START, END])
    return tokenizer


def _weights(shape: Shape) -> dict[str, mx.array]:
    """Of unit gain, but for attention sharp enough for an answer to depend on all of its prompt, and an output sharp
    enough for a token to be chosen with confidence."""
    module = {"qwen2": qwen2, "llama": llama}[shape.architecture]
    model = module.Model(module.ModelArgs.from_dict(shape.config()))
    found = {name: _tensor(name, value.shape, shape.seed) for name, value in tree_flatten(model.parameters())}
    tokens = _tokens()
    silent = {tokens["Ġ"], *range(tokens[UNKNOWN], shape.vocab)} - ({tokens[END]} if shape.stops else set())
    found["lm_head.weight"][sorted(silent)] = 0
    return {name: mx.array(value.astype(np.float32)) for name, value in found.items()}


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if name.endswith("norm.weight"):
        return np.ones(shape)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if len(shape) == 1:  # a bias: small, or every position attends to the same place
        return rng.standard_normal(shape) / 10
    if "embed" in name:
        return rng.standard_normal(shape)
    gain = {"q_proj": 2.0, "k_proj": 2.0, "lm_head": 3.0}.get(name.split(".")[-2], 1.0)
    return rng.standard_normal(shape) * gain / np.sqrt(shape[-1])


if __name__ == "__main__":
    import sys

    if len(sys.argv) != 2:
        sys.exit("usage: python tests/local_model.py DIR: writes a tiny model there")
    print(write_model(Path(sys.argv[1])))
