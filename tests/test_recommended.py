"""What generation_config.json recommends, and what is made of one that makes no sense."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import onefold
from onefold.engine.recommended import recommended
from onefold.engine.request import Sampling


def read(folder: Path, text: str) -> Sampling:
    (folder / "generation_config.json").write_text(text)
    return recommended(SimpleNamespace(name_or_path=str(folder)))


def test_a_loaded_model_brings_it_along(tmp_path, model):
    folder = shutil.copytree(model, tmp_path / "model")
    assert recommended(onefold.load(folder)[1]) == Sampling()
    said = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(said))
    assert recommended(onefold.load(folder)[1]) == Sampling(temperature=0.6, top_k=20, top_p=0.95)


@pytest.mark.parametrize("text", ["", "[1]", "null", "{", '{"temperature": "hot"}', '{"top_k": 1.5}', '{"top_p": -1}'])
def test_nonsense_is_no_recommendation(tmp_path, text):
    assert read(tmp_path, text) == Sampling()


def test_what_makes_sense_is_taken(tmp_path):
    said = {"temperature": 0, "top_p": 7, "repetition_penalty": 1.1, "min_p": None, "eos_token_id": [1, 2]}
    assert read(tmp_path, json.dumps(said)) == Sampling(temperature=0, repetition_penalty=1.1)


def test_a_tokenizer_from_nowhere():
    assert recommended(SimpleNamespace()) == recommended(SimpleNamespace(name_or_path="")) == Sampling()
