"""A tiny llama as a GGUF file, written as llama.cpp writes one, and the same model as mlx-lm has it.

The writer is the format's: header, facts, where each tensor is, tensors. It knows plain and two packed types of tensor.
The tokenizer has a token for each byte, a few merges and three control tokens.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

HEADS, KV_HEADS, HEAD_DIM, LAYERS, INTERMEDIATE = 4, 2, 16, 2, 96
HIDDEN = HEADS * HEAD_DIM
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
GROUP = 32

_PLACES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def alphabet() -> list[str]:
    """A character for each byte, as byte-level vocabularies have them: printable ones stand for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (b for b in range(256) if b not in plain)
    return [chr(b) for b in plain] + [chr(256 + i) for i, _ in enumerate(others)]


def vocabulary() -> list[str]:
    return CONTROL + alphabet() + [merge.replace(" ", "") for merge in MERGES]


def tiny_model(*, tied: bool = True) -> llama.Model:
    mx.random.seed(0)
    shape = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "intermediate_size": INTERMEDIATE}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    rest = {"rms_norm_eps": 1e-5, "vocab_size": len(vocabulary()), "rope_theta": 5000.0, "tie_word_embeddings": tied}
    model = llama.Model(llama.ModelArgs(model_type="llama", **shape, **heads, **rest))
    for name, value in tree_flatten(model.parameters()):  # norms of one would hide a norm in the wrong place
        if name.endswith("norm.weight"):
            model.load_weights([(name, mx.random.uniform(0.5, 1.5, value.shape))], strict=False)
    return model


def tensors(model: llama.Model) -> dict[str, np.ndarray]:
    """By their names in a GGUF file, with the rows of q and k in the order that they have there."""
    found = {}
    for name, value in tree_flatten(model.parameters()):
        stem, array = name.removesuffix(".weight"), np.array(value)
        block = ""
        if stem.startswith("model.layers."):
            number, _, stem = stem.removeprefix("model.layers.").partition(".")
            block = f"blk.{number}."
        heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(stem)
        found[f"{block}{_PLACES[stem]}.weight"] = array if heads is None else interleaved(array, heads)
    return found


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(rows.shape)


def facts() -> dict[str, Any]:
    """Whole numbers are written as uint32; a list of them is of int32."""
    tokens = vocabulary()
    return {
        "general.architecture": "llama",
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": INTERMEDIATE,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0,
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL else 1 for token in tokens],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


# -- the format -----------------------------------------------------------------------------

PLAIN, HALF, PACKED_4, PACKED_8 = 0, 1, 3, 8
"""GGUF's numbers for float32, float16, Q4_1 and Q8_0."""


def write(file: Path, arrays: dict[str, np.ndarray], said: dict[str, Any], kinds: dict[str, int] | None = None) -> Path:
    """`kinds` says how a tensor is written; float32 otherwise."""
    kinds = kinds or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(arrays), len(said))
    head += b"".join(_text(key) + _value(value) for key, value in said.items())
    body = b""
    for name, array in arrays.items():
        kind = kinds.get(name, PLAIN)
        head += _text(name) + struct.pack("<I", array.ndim) + struct.pack(f"<{array.ndim}Q", *array.shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += _padded(_encoded(array, kind))
    file.write_bytes(_padded(head) + body)
    return file


def packed(array: np.ndarray, kind: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole numbers, scales and offsets of groups: the values are numbers * scale + offset."""
    groups = array.reshape(-1, GROUP)
    if kind == PACKED_8:
        scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
        return np.round(groups / scale.astype(np.float32)).clip(-127, 127), scale, np.zeros_like(scale)
    low = groups.min(1, keepdims=True).astype(np.float16)
    scale = ((groups.max(1, keepdims=True) - low) / 15).astype(np.float16)
    return np.round((groups - low) / scale.astype(np.float32)).clip(0, 15), scale, low


def unpacked(array: np.ndarray, kind: int) -> np.ndarray:
    """What is left of an array after it was written as `kind`."""
    if kind == PLAIN:
        return array
    if kind == HALF:
        return array.astype(np.float16).astype(np.float32)
    numbers, scale, offset = packed(array, kind)
    return (numbers * scale.astype(np.float32) + offset.astype(np.float32)).reshape(array.shape).astype(np.float32)


def _encoded(array: np.ndarray, kind: int) -> bytes:
    if kind in (PLAIN, HALF):
        return array.astype(np.float32 if kind == PLAIN else np.float16).tobytes()
    numbers, scale, offset = packed(array, kind)
    scales, offsets = scale.view(np.uint8), offset.view(np.uint8)
    if kind == PACKED_8:
        return np.concatenate([scales, numbers.astype(np.int8).view(np.uint8)], 1).tobytes()
    low, high = np.split(numbers.astype(np.uint8), 2, axis=1)
    return np.concatenate([scales, offsets, low | high << 4], 1).tobytes()


def _value(value: Any) -> bytes:
    if isinstance(value, list):
        texts = bool(value) and isinstance(value[0], str)
        items = b"".join(_text(v) if texts else struct.pack("<i", v) for v in value)
        return struct.pack("<IIQ", 9, 8 if texts else 5, len(value)) + items
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    return struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 32)
