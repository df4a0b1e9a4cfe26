"""`onefold.load`: loads a model and its tokenizer from a folder, a Hugging Face id or "demo".

Keeps true: what cannot be loaded is a ConfigError that names what was given and says what to do. A folder is told from
a Hugging Face id before mlx-lm is asked, which takes everything that is no folder for an id.

Does not know how a model is read (that is mlx-lm's) or where the demo model comes from (`demo_model`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.nn as nn
from huggingface_hub.errors import (
    GatedRepoError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from onefold.cache.model.stock import evaluate_kept
from onefold.engine import stock
from onefold.errors import ConfigError

DEMO = "demo"

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")

_FAULTS = (OSError, HTTPError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError)
"""What mlx-lm and what it stands on raise for files that are missing, broken or of another kind."""


def load(
    model: str | os.PathLike[str],
    *,
    adapter_path: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    tokenizer_config: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """Returns the model and the tokenizer of a folder, a Hugging Face id, or "demo": a small model that is
    downloaded once (93 MB) and kept. A folder that is called demo is "./demo".

    `adapter_path` is a folder of LoRA adapters, `revision` a branch, tag or commit of a Hugging Face id, and
    `tokenizer_config` goes to the tokenizer. `trust_remote_code` runs Python that comes with the model. Raises
    ConfigError."""
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise ConfigError(f'a model is a folder, a Hugging Face id or "{DEMO}", not {model!r}')
    adapter = None if adapter_path is None else str(_adapter(_path(adapter_path)))
    given = os.fspath(model)
    if model == DEMO:
        from onefold.engine import demo_model  # brings what only fetching needs

        source = str(demo_model.folder())
    else:
        source = _source(given)
    with _InOurWords(f'the model "{given}"' + (f' with the adapter "{adapter}"' if adapter else "")):
        loaded, tokenizer = stock.load(
            source,
            adapter_path=adapter,
            revision=revision,
            tokenizer_config=tokenizer_config,
            trust_remote_code=trust_remote_code,
        )
    if model == DEMO:
        demo_model.suit_device(loaded)
    evaluate_kept(loaded)  # here: no other thread could
    return loaded, tokenizer


def model_name(given: str) -> str:
    """Returns what clients call this model: the last part of a folder's path, and anything else as it was given."""
    if given in ("", DEMO) or not _path(given).is_dir():
        return given
    return os.path.basename(os.path.abspath(_path(given))) or given  # not what a link leads to: its name was chosen


def _path(given: str | os.PathLike[str]) -> Path:
    """Returns the path, from the home that it names. A home that does not exist stays as it is."""
    return Path(os.path.expanduser(given))


def _source(given: str) -> str:
    """Returns the folder or the id. Raises ConfigError if it is neither."""
    folder = _path(given)
    if folder.is_dir():
        _whole(folder)
        return str(folder)
    if folder.exists():
        raise ConfigError(f'"{given}" is a file; a model is the folder that has its config.json')
    if _ID.fullmatch(given) is None:
        raise ConfigError(f'there is no folder "{given}", and a Hugging Face id is of the form "owner/name"')
    return given


def _whole(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        gguf = " (GGUF files are not read; mlx-lm wants them converted)" if any(folder.glob("*.gguf")) else ""
        raise ConfigError(f'the folder "{folder}" has no config.json: it is not a model that mlx-lm can load{gguf}')
    if not any(folder.glob("model*.safetensors")):
        raise ConfigError(f'the folder "{folder}" has no model*.safetensors: mlx-lm reads no other weights')


def _adapter(folder: Path) -> Path:
    if not (folder / "adapter_config.json").is_file():
        what = "has no adapter_config.json" if folder.is_dir() else "is no folder"
        raise ConfigError(f'the adapter "{folder}" {what}')
    return folder


class _InOurWords:
    """Turns faults of loading into ConfigError. Interrupts, and bugs elsewhere, are raised as they are."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # The tokenizers library raises Exception itself, and no class of its own, for a tokenizer.json that it cannot
        # read. An except clause for it would catch all others too.
        if error is not None and (kind is Exception or isinstance(error, _FAULTS)):
            raise ConfigError(f"{self._what} cannot be loaded: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """Returns the cause of a fault in words. Each error of the Hugging Face hub needs another remedy."""
    if isinstance(error, GatedRepoError):
        return "its owner wants to be asked first. Ask on its page, then log in with `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no folder and no Hugging Face repository of that name, or it is private (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return "its repository has no such revision"
    if isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        return (
            "there is no folder of that name, it has not been fetched before, and Hugging Face cannot be reached. "
            "Check the network (and HF_HUB_OFFLINE, HF_ENDPOINT), or give a folder"
        )
    lines = str(error).strip().splitlines() or [""]
    return f"{lines[0]} ({type(error).__name__})" if lines[0] else type(error).__name__
