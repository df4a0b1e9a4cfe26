"""A llama model in one GGUF file, made into a folder that mlx-lm loads.

Keeps true:

1. A weight's value is the file's: dequantised in float32 and rounded once, to the type that was asked for.
2. A token's number, its text and the order of merges are the file's; text is split as the file's pre-tokenizer says.
3. What is not understood is refused by name, never left out: a model that is almost right is worse than none.

Knows nothing of where the file comes from or where the folder shall stay. Writes into a folder that is there; what a
failure leaves in it is the caller's to remove.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from onefold.cache.memory import device
from onefold.errors import ConfigError

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "gpt-2": [_BYTES],
}
"""How text is split before merging, by the name that the file gives to it."""

_NORMAL, _CONTROL = 1, 3
"""Types of a token, in GGUF's numbers."""


FLUSHED = 32 << 20
"""Bytes that are written before they are flushed to disk: so progress is the disk's, and the last flush is short."""


class _Flushed(io.FileIO):
    """A new file that is flushed while it is written. Calls `told` with the bytes of each write."""

    def __init__(self, path: Path, told: Callable[[int], None]) -> None:
        super().__init__(path, "w")
        self._told, self._left = told, FLUSHED

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._left -= written
        if self._left <= 0:
            os.fsync(self.fileno())
            self._left = FLUSHED
        self._told(written)
        return written


def convert(file: Path, folder: Path, dtype: mx.Dtype, show: Callable[[int], None] = lambda _: None) -> None:
    """Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json. Calls `show` with how many bytes
    of weights have been computed and written. Raises ConfigError for a file that it does not understand, OSError where
    writing fails."""
    try:
        loaded: Any = mx.load(str(file), format="gguf", return_metadata=True)
    except RuntimeError as error:  # MLX's, for a file that is no GGUF
        raise ConfigError(f"{file.name} cannot be read as GGUF: {error}") from error
    tensors, facts = loaded
    model = _Model(file.name, tensors, facts)
    _write_json(folder / "config.json", model.config(dtype))
    _write_json(folder / "tokenizer.json", model.tokenizer())
    _write_json(folder / "tokenizer_config.json", model.tokenizer_config())
    done = 0

    def told(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        show(done)

    weights = model.weights(dtype, told)
    # to a file of ours, MLX's failures to write are OSErrors
    with _Flushed(folder / "model.safetensors", told) as raw, io.BufferedWriter(raw) as out:
        mx.save_safetensors(out, weights, {"format": "mlx"})


class _Model:
    """The contents of a GGUF file, in the form that mlx-lm loads."""

    def __init__(self, name: str, tensors: dict[str, mx.array], facts: dict[str, Any]) -> None:
        self._name = name
        self._tensors = tensors
        self._facts = facts
        self._tokens: list[str] = self._fact("tokenizer.ggml.tokens")
        self._only("general.architecture", "llama")
        self._only("tokenizer.ggml.model", "gpt2")
        self._only("tokenizer.ggml.pre", *_SPLITS)
        if self._maybe("tokenizer.ggml.add_bos_token", False):
            raise self._fault("its prompts begin with a token that is added to them, which is not supported")
        scaled = sorted(key for key in facts if key.startswith("llama.rope.scaling."))
        if scaled:
            raise self._fault(f"{scaled[0]} is not supported")

    # -- weights ----------------------------------------------------------------------------

    def weights(self, dtype: mx.Dtype, told: Callable[[int], None]) -> dict[str, mx.array]:
        """Returns them, computed one after the other. Calls `told` with the bytes of each."""
        found = {}
        for name in self._tensors:
            stem, _, part = name.rpartition(".")
            if part == "weight":
                weight = found[f"{self._target(stem)}.weight"] = self._tensor(stem).astype(dtype)
                device.evaluate(weight)
                told(weight.nbytes)
            elif part not in ("scales", "biases") or f"{stem}.weight" not in self._tensors:
                raise self._fault(f"the tensor {name} has no place in a llama")
        return found

    def _target(self, stem: str) -> str:
        if stem in _OUTSIDE:
            return _OUTSIDE[stem]
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if block is None or block[2] not in _IN_BLOCK:
            raise self._fault(f"the tensor {stem} has no place in a llama")
        return f"model.layers.{block[1]}.{_IN_BLOCK[block[2]]}"

    def _tensor(self, stem: str) -> mx.array:
        """In float32. MLX gives the types that it can compute with packed, and others as plain numbers."""
        value = self._tensors[f"{stem}.weight"]
        if f"{stem}.scales" in self._tensors:
            scales, biases = (self._tensors[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            bits = value.shape[-1] // scales.shape[-1]  # words of 32 bits, and a scale for each 32 values
            value = mx.dequantize(value, scales, biases, group_size=32, bits=bits)
        value = value.astype(mx.float32)
        if stem.endswith(".attn_q"):
            return _halves(value, self._heads)
        if stem.endswith(".attn_k"):
            return _halves(value, self._kv_heads)
        return value

    # -- config.json ------------------------------------------------------------------------

    def config(self, dtype: mx.Dtype) -> dict[str, Any]:
        hidden = self._number("llama.embedding_length")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": str(dtype).removeprefix("mlx.core."),
            "hidden_size": hidden,
            "num_hidden_layers": self._number("llama.block_count"),
            "intermediate_size": self._number("llama.feed_forward_length"),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._kv_heads,
            "head_dim": int(self._maybe("llama.attention.key_length", hidden // self._heads)),
            "hidden_act": "silu",
            "rms_norm_eps": _decimal(self._fact("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _decimal(self._maybe("llama.rope.freq_base", 10000.0)),
            "max_position_embeddings": self._number("llama.context_length"),
            "vocab_size": len(self._tokens),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._special("bos"),
            "eos_token_id": self._special("eos"),
            "pad_token_id": self._special("padding"),
        }

    @property
    def _heads(self) -> int:
        return self._number("llama.attention.head_count")

    @property
    def _kv_heads(self) -> int:
        return int(self._maybe("llama.attention.head_count_kv", self._heads))

    # -- the tokenizer ----------------------------------------------------------------------

    def tokenizer(self) -> dict[str, Any]:
        """In the form of the `tokenizers` library. The decoder is what lets mlx-lm stream text without decoding an
        answer again and again."""
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": i, "content": self._tokens[i], **plain} for i in self._controls()],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": _SPLITS[self._fact("tokenizer.ggml.pre")]},
            "post_processor": None,
            "decoder": _BYTES,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(self._tokens)},
                "merges": [pair.split(" ") for pair in self._fact("tokenizer.ggml.merges")],
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        numbers = {name: self._special(theirs) for name, theirs in names.items()}
        found: dict[str, Any] = {name: None if i is None else self._tokens[i] for name, i in numbers.items()}
        return found | {
            # Takes tokenizer.json as it is. GPT2Tokenizer, which others write here, splits text in its own way.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self._number("llama.context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": self._maybe("tokenizer.chat_template", None),
        }

    def _controls(self) -> list[int]:
        """Tokens that no text becomes by merging. Where the file does not say, none but the named ones."""
        types = self._maybe("tokenizer.ggml.token_type", None)
        if types is None:
            named = {self._special(name) for name in ("bos", "eos", "padding", "unknown")}
            return sorted(i for i in named if i is not None)
        other = set(types) - {_NORMAL, _CONTROL}
        if other:
            raise self._fault(f"tokens of type {min(other)} are not supported")
        return [i for i, kind in enumerate(types) if kind == _CONTROL]

    def _special(self, name: str) -> int | None:
        number = self._maybe(f"tokenizer.ggml.{name}_token_id", None)
        if number is not None and not 0 <= number < len(self._tokens):
            raise self._fault(f"its {name} token is {number}, of {len(self._tokens)} tokens")
        return number

    # -- facts --------------------------------------------------------------------------------

    def _maybe(self, key: str, default: Any) -> Any:
        value = self._facts.get(key, default)
        return value.tolist() if isinstance(value, mx.array) else value

    def _fact(self, key: str) -> Any:
        if key not in self._facts:
            raise self._fault(f"it does not say {key}")
        return self._maybe(key, None)

    def _number(self, key: str) -> int:
        return int(self._fact(key))

    def _only(self, key: str, *known: str) -> None:
        if self._fact(key) not in known:
            raise self._fault(f"{key} is {self._fact(key)!r}, of which only {' and '.join(known)} can be converted")

    def _fault(self, why: str) -> ConfigError:
        return ConfigError(f"{self._name} cannot be converted: {why}")


def _halves(rows: mx.array, heads: int) -> mx.array:
    """Rows of q or k in the order of mlx-lm: RoPE turns row i of a head together with row i + half a head. In a GGUF
    file of a llama the two lie next to each other."""
    size = rows.shape[0] // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _decimal(number: float) -> float:
    """The shortest number that is the same in float32, which is what the file keeps: 1e-05, not 9.99999974e-06."""
    return float(str(np.float32(number)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
