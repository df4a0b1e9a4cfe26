"""A GGUF file as llama.cpp writes it becomes the same model, and the same tokenizer, in mlx-lm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import tiny_gguf
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer

from onefold import ConfigError
from onefold.engine.gguf import convert

PROMPT = mx.array([[5, 9, 200, 7, 1, 33, 2, 90]])

TEXTS = (
    "",
    "hello hello12 world",
    "  two  spaces\n\n\tand a tab ",
    "1234567890 3.14e-10 ½ ٣",
    "def f(x):\r\n    return {'a': [1, 2]}  # fine\n",
    "naïve 日本語 العربية 👩‍👩‍👧 \U0001d518 \u200b\u00a0\x00\x7f",
    "<|im_start|>user\nit's<|im_end|>\n<|endoftext|>",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("gguf")
    file = tiny_gguf.write(where / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), tiny_gguf.facts())
    return converted(file)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return mlx_lm.load(str(folder))[1]


def converted(file: Path, dtype: mx.Dtype = mx.float32) -> Path:
    made = file.parent / "made"
    made.mkdir()
    convert(file, made, dtype)
    return made


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), tiny_gguf.facts())
    seen: list[int] = []
    convert(file, tmp_path, mx.float32, seen.append)
    weights = sum(w.nbytes for w in mx.load(str(tmp_path / "model.safetensors")).values())
    assert seen == sorted(seen) and len(seen) > 10
    assert 2 * weights <= seen[-1] == weights + (tmp_path / "model.safetensors").stat().st_size


# -- the model --------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_computes_the_same(tmp_path: Path, tied: bool) -> None:
    original = tiny_gguf.tiny_model(tied=tied)
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(original), tiny_gguf.facts())
    model, _ = mlx_lm.load(str(converted(file)))
    assert mx.array_equal(model(PROMPT), original(PROMPT))
    assert model.args.tie_word_embeddings == tied


def test_the_order_of_rows_matters() -> None:
    """So that the test above would notice."""
    original = tiny_gguf.tiny_model()
    expected = original(PROMPT)
    for layer in original.layers:
        query = np.array(layer.self_attn.q_proj.weight)
        layer.self_attn.q_proj.weight = mx.array(tiny_gguf.interleaved(query, tiny_gguf.HEADS))
    assert not mx.allclose(original(PROMPT), expected, atol=1e-3)


@pytest.mark.parametrize("kind", [tiny_gguf.HALF, tiny_gguf.PACKED_4, tiny_gguf.PACKED_8])
def test_packed_weights_are_the_files_to_the_last_bit(tmp_path: Path, kind: int) -> None:
    arrays = tiny_gguf.tensors(tiny_gguf.tiny_model())
    kinds = {name: kind for name, array in arrays.items() if array.ndim == 2}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", arrays, tiny_gguf.facts(), kinds)
    model, _ = mlx_lm.load(str(converted(file)))
    held = tiny_gguf.tensors(model)
    assert held.keys() == arrays.keys()
    for name, array in arrays.items():
        assert np.array_equal(held[name], tiny_gguf.unpacked(array, kinds.get(name, tiny_gguf.PLAIN))), name


def test_the_type_that_was_asked_for(tmp_path: Path) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), tiny_gguf.facts())
    made = converted(file, mx.bfloat16)
    model, _ = mlx_lm.load(str(made))
    assert {value.dtype for _, value in tree_flatten(model.parameters())} == {mx.bfloat16}
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_config_is_in_the_words_of_others(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 5000.0
    assert (config["head_dim"], config["num_key_value_heads"]) == (tiny_gguf.HEAD_DIM, tiny_gguf.KV_HEADS)
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


# -- the tokenizer ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_the_split_of_digits(tokenizer: Any) -> None:
    """12 is a merge, which the split keeps from being used: each digit is a token."""
    words = tiny_gguf.vocabulary()
    assert [words[t] for t in tokenizer.encode("hello w  12")] == ["hello", "Ġw", "ĠĠ", "1", "2"]


def test_without_the_split_digits_merge(tmp_path: Path) -> None:
    said = tiny_gguf.facts() | {"tokenizer.ggml.pre": "gpt-2"}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), said)
    _, tokenizer = mlx_lm.load(str(converted(file)))
    assert [tiny_gguf.vocabulary()[t] for t in tokenizer.encode("12")] == ["12"]


def test_control_tokens_and_the_template(tokenizer: Any) -> None:
    assert tokenizer.eos_token_ids == {2}
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n"
    tokens = tokenizer.encode(prompt)
    assert (tokens[0], tokens[-2]) == (1, 2)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "user\nhello\n"


def test_text_is_streamed_fast(tokenizer: Any) -> None:
    """mlx-lm reads off tokenizer.json's decoder whether tokens can be turned into text one by one."""
    streamed = tokenizer.detokenizer
    assert isinstance(streamed, BPEStreamingDetokenizer)
    for token in tokenizer.encode(TEXTS[4]):
        streamed.add_token(token)
    streamed.finalize()
    assert streamed.text == TEXTS[4]


def test_without_types_the_named_tokens_are_control_tokens(tmp_path: Path) -> None:
    said = tiny_gguf.facts()
    del said["tokenizer.ggml.token_type"]
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), said)
    _, tokenizer = mlx_lm.load(str(converted(file)))
    assert tokenizer.encode("<|im_end|><|endoftext|>") == [2, 0]


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("general.architecture", "gemma", "'gemma'"),
        ("tokenizer.ggml.model", "llama", "tokenizer.ggml.model is 'llama'"),
        ("tokenizer.ggml.pre", "tekken", "'tekken', of which only smollm and gpt-2"),
        ("tokenizer.ggml.add_bos_token", True, "begin with a token"),
        ("tokenizer.ggml.eos_token_id", 9999, "eos token is 9999"),
        ("tokenizer.ggml.token_type", [6, 1, 1], "tokens of type 6"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.type"),
        ("llama.block_count", None, "does not say llama.block_count"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path: Path, key: str, value: Any, says: str) -> None:
    said = tiny_gguf.facts() | {key: value}
    said = {name: what for name, what in said.items() if what is not None}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), said)
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be converted") as raised:
        converted(file)
    assert says in str(raised.value)


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight", "stray"])
def test_a_tensor_without_a_place_is_refused(tmp_path: Path, name: str) -> None:
    arrays = tiny_gguf.tensors(tiny_gguf.tiny_model()) | {name: np.ones(4, np.float32)}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", arrays, tiny_gguf.facts())
    with pytest.raises(ConfigError, match="has no place in a llama"):
        converted(file)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, part: float) -> None:
    file = tiny_gguf.write(tmp_path / "tiny.gguf", tiny_gguf.tensors(tiny_gguf.tiny_model()), tiny_gguf.facts())
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * part)])
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be read as GGUF"):
        converted(file)
