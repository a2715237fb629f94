"""Finding and loading BERT checkpoints: hub names and local folders, safetensors only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
)
from transformers.utils import logging as transformers_logging

from bertvision.errors import InputError
from bertvision.pipelines.config import digest_of
from bertvision.pipelines.files import sha256_of_files

Bert = BertForQuestionAnswering | BertForSequenceClassification
"""BERT with the output layer of a task."""
_FILES = [
    "config.json",
    "model.safetensors",
    "model-*-of-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "special_tokens_map.json",
    "added_tokens.json",
]


class Checkpoint(NamedTuple):
    """A BERT checkpoint on this machine's disk."""

    folder: Path
    """Holds config.json, the weights and the tokenizer."""
    name_or_path: str
    """Hub name, or the absolute path of the folder."""
    revision: str | None
    """Commit on the hub; None for a local folder."""
    config: BertConfig
    """The model's configuration; its ``model_type`` is ``bert``."""


def find_checkpoint(name_or_path: str, revision: str | None = None) -> Checkpoint:
    """Find a BERT checkpoint: an existing folder, else a name on the hub (downloaded or cached).

    Args:
        name_or_path: local folder or hub name (``bert-large-uncased``).
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: nothing by that name can be reached, the architecture is not BERT, or there
            are no safetensors weights (pickled weights are never read).
    """
    local = Path(name_or_path).expanduser()
    if local.is_dir():
        if revision is not None:
            raise InputError(f"revision {revision!r} makes no sense for the local folder {local}")
        folder, name = local.resolve(), str(local.resolve())
    else:
        folder, name = _from_hub(name_or_path, revision), name_or_path
        revision = folder.name
    config = _read_config(folder, name)
    weight_files(folder)
    return Checkpoint(folder, name, revision, config)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order.

    Raises:
        InputError: there are none.
    """
    single = folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("model-*-of-*.safetensors"))
    if not files:
        raise InputError(
            f"{folder} holds no model.safetensors: only safetensors weights are read; convert "
            "others with transformers' save_pretrained"
        )
    return files


def weights_digest(folder: Path) -> str:
    """Hex sha256 of the bytes of a checkpoint folder's weights."""
    return sha256_of_files(weight_files(folder))


def load_bert(
    folder: Path,
    model_class: type[Bert] = BertForQuestionAnswering,
    **options: Any,
) -> Bert:
    """Load BERT with a task's output layer in float32, in evaluation mode.

    Layers that the checkpoint lacks are made new from torch's global generator: seed it.

    Args:
        folder: of the checkpoint.
        model_class: BERT with an output layer, of transformers.
        **options: settings of its configuration beside the checkpoint's own.

    Raises:
        InputError: the weights are damaged or do not fit the configuration.
    """
    with quiet_transformers():
        try:
            model: Bert = model_class.from_pretrained(
                folder,
                **options,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(f"BERT in {folder} cannot be loaded: {error}") from error
        except Exception as error:
            # safetensors' own error type derives from Exception alone
            if type(error).__name__ != "SafetensorError":
                raise
            raise InputError(f"the weights in {folder} are damaged: {error}") from error
    model.eval()  # type: ignore[no-untyped-call]
    return model


def load_tokenizer(folder: Path) -> Any:
    """Load the fast tokenizer of a checkpoint folder.

    Raises:
        InputError: there is none, or it gives no character offsets.
    """
    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_fast=True
            )
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise InputError(f"the tokenizer in {folder} gives no character offsets (not a fast one)")
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex sha256 of everything that decides a fast tokenizer's output.

    Padding and truncation are left out: they are state of the last call, not of the tokenizer.
    """
    definition = json.loads(tokenizer.backend_tokenizer.to_str())
    definition.pop("padding", None)
    definition.pop("truncation", None)
    return digest_of(definition)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' load report and progress bars inside the block."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _read_config(folder: Path, name: str) -> BertConfig:
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        kind = values.get("model_type")
    except FileNotFoundError:
        raise InputError(f"{name} is no checkpoint: {path} does not exist") from None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} is not a model configuration: {error}") from error
    if kind != "bert":
        raise InputError(
            f"{name} has model_type {kind!r}: bertvision works with the BERT architecture "
            "(model_type 'bert'), such as bert-base-uncased or bert-large-uncased"
        )
    return BertConfig.from_dict(values)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    try:
        if looks_like_path:
            raise InputError(f"there is no folder {name}")
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FILES))
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub name: {error}") from error
    except OSError as error:
        # offline, unknown name or revision, no permission: the hub's errors are all OSErrors
        raise InputError(
            f"{name!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network, or give a local folder"
        ) from error
