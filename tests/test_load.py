"""`onefold.load`: what it takes, and what it says of what it cannot take. Nothing here needs a network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import mlx.core as mx
import pytest
from huggingface_hub import errors
from local_model import END, write_as_downloaded
from mlx_lm.tuner.lora import LoRALinear

import onefold
from onefold.engine import stock

PROMPT = mx.array([[1, 2, 3]])
REPOSITORY = "somebody/something"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's, and no way to the hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A model folder to spoil."""
    return Path(shutil.copytree(model, tmp_path / "copy"))


def refused(given: Any, **options: Any) -> str:
    with pytest.raises(onefold.ConfigError) as raised:
        onefold.load(given, **options)
    return str(raised.value)


# -- what it takes ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [str, Path])
def test_a_folder(model: Path, kind: type) -> None:
    loaded, tokenizer = onefold.load(kind(model))
    assert loaded(PROMPT).shape == (1, 3, 128)
    assert tokenizer.eos_token == END


def test_a_folder_in_the_home_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(model.parent))
    _, tokenizer = onefold.load(f"~/{model.name}")
    assert tokenizer.eos_token == END


def test_an_id_that_was_fetched_before(hub: Path) -> None:
    write_as_downloaded(hub, REPOSITORY)
    _, tokenizer = onefold.load(REPOSITORY)
    assert tokenizer.eos_token == END


def test_a_path_called_demo_is_a_folder(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").symlink_to(model)
    monkeypatch.chdir(tmp_path)
    for given in ("./demo", Path("demo")):
        assert onefold.load(given)[1].eos_token == END


def test_settings_of_the_tokenizer(model: Path) -> None:
    _, tokenizer = onefold.load(model, tokenizer_config={"eos_token": "!"})
    assert tokenizer.eos_token == "!"


def test_an_adapter(model: Path, tmp_path: Path) -> None:
    lora = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": {"rank": 2, "scale": 1.0, "dropout": 0.0}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(lora))
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), {})
    loaded, _ = onefold.load(model, adapter_path=tmp_path)
    assert isinstance(loaded.layers[-1].self_attn.q_proj, LoRALinear)


def test_code_that_comes_with_a_model_is_run_only_if_trusted(copy: Path) -> None:
    (copy / "own.py").write_text("from mlx_lm.models.qwen2 import Model, ModelArgs\n")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_file": "own.py"}))
    assert "trust_remote_code=True" in refused(copy)
    loaded, _ = onefold.load(copy, trust_remote_code=True)
    assert type(loaded).__module__ == "mlx_lm.models.qwen2"


def test_trust_is_for_the_tokenizer_too(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(stock.mlx_lm, "load", lambda *_, **options: seen.append(options) or (None, None))
    onefold.load(model, trust_remote_code=True)
    onefold.load(model)
    assert [options["trust_remote_code"] for options in seen] == [True, False]
    assert [options["tokenizer_config"] for options in seen] == [{"trust_remote_code": True}, {}]


# -- what it cannot take ------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["", None, 7, b"demo"])
def test_nonsense(given: Any) -> None:
    assert f"not {given!r}" in refused(given)


@pytest.mark.parametrize("given", ["/no/where", "./nowhere", "~/nowhere", "a/b/c", "a b", "-x/y"])
def test_no_such_folder(given: str) -> None:
    assert f'there is no folder "{given}"' in refused(given)


def test_a_file(model: Path) -> None:
    said = refused(model / "config.json")
    assert "config.json" in said
    assert "is a file" in said


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    said = refused(tmp_path)
    assert str(tmp_path) in said
    assert "no config.json" in said
    assert "GGUF" not in said
    (tmp_path / "model.gguf").touch()
    assert "GGUF files are not read" in refused(tmp_path)


def test_a_folder_without_weights(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    assert "no model*.safetensors" in refused(copy)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", "{"),
        ("config.json", '{"model_type": "no-such-architecture"}'),
        ("config.json", '{"model_type": "llama"}'),
        ("config.json", "[]"),
        ("model.safetensors", "not safetensors"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "{"),
    ],
)
def test_a_broken_folder(copy: Path, file: str, content: str) -> None:
    (copy / file).write_text(content)
    said = refused(copy)
    assert said.startswith(f'the model "{copy}" cannot be loaded: ')
    assert "\n" not in said


def test_a_tokenizer_of_another_version(copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer | {"version": "2.0"}))
    assert "Unknown tokenizer version" in refused(copy)


def test_an_interrupt_is_none_of_ours(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stock.mlx_lm, "load", load)
    with pytest.raises(KeyboardInterrupt):
        onefold.load(model)


def test_an_adapter_that_is_not_there(model: Path, tmp_path: Path) -> None:
    assert f'the adapter "{tmp_path}" has no adapter_config.json' in refused(model, adapter_path=tmp_path)
    assert "is no folder" in refused(model, adapter_path=tmp_path / "nowhere")


def test_an_id_without_a_network(hub: Path) -> None:
    said = refused(REPOSITORY)
    assert said.startswith(f'the model "{REPOSITORY}" cannot be loaded: ')
    assert "Hugging Face cannot be reached" in said


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (errors.RepositoryNotFoundError, "no Hugging Face repository of that name"),
        (errors.GatedRepoError, "wants to be asked first"),
        (errors.RevisionNotFoundError, "no such revision"),
        (errors.HfHubHTTPError, "too many requests (HfHubHTTPError)"),
        (errors.HTTPError, "too many requests (HTTPError)"),  # as one of a proxy comes through
    ],
)
def test_what_the_hub_says(monkeypatch: pytest.MonkeyPatch, error: Any, says: str) -> None:
    def load(*_: Any, **__: Any) -> None:
        answer = errors.Response(429, request=SimpleNamespace(url="http://localhost"))
        more = {} if error is errors.HTTPError else {"response": answer}
        raise error("too many requests\nand more", **more)

    monkeypatch.setattr(stock.mlx_lm, "load", load)
    said = refused(REPOSITORY)
    assert REPOSITORY in said
    assert says in said
