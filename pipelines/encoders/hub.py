"""Checkpoints as they come: the files that are fetched from the hub, and their configuration."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoModel, PreTrainedConfig

from bertvision.errors import InputError
from bertvision.pipelines.encoders.checkpoint_path import check_path, require_config
from bertvision.pipelines.files import read_json

VOCABULARIES = ("tokenizer.json", "vocab.txt", "vocab.json")
"""Files that a fast tokenizer is made from, one of which a checkpoint must have."""
_WEIGHTS = ["model.safetensors", "model-*-of-*.safetensors"]
_FILES = [
    *VOCABULARIES,
    "config.json",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",  # which tokens end a text
]


_LARGEST = {
    "num_hidden_layers": 1000,
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "vocab_size": 1 << 26,
}
"""Sizes up to which a configuration is believed: a model is made of it before weights are read."""


def fetch(name: str, revision: str | None, *, weights: bool = True) -> Path:
    """The folder of a checkpoint of the hub, downloaded or in the cache.

    Args:
        name: on the hub.
        revision: branch, tag or commit; None is the newest.
        weights: bring them too.

    Raises:
        InputError: there is none, or it cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    check_path(name)
    try:
        wanted = [*_FILES, *(_WEIGHTS if weights else ())]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except HFValidationError as error:
        raise InputError(f"{name!r} is neither a folder nor a hub name: {error}") from error
    except OSError as error:
        # offline, unknown name or revision, no permission: the hub's errors are all OSErrors
        raise InputError(
            f"{name!r} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}): check the name and the network, or give a local folder"
        ) from error


def remote_weight_names(folder: Path, name: str) -> list[str]:
    """Names of the tensors of a checkpoint of the hub whose weights were not brought.

    They are in the index of its parts, or in the header of its one file, which is read alone.

    Args:
        folder: as of `fetch`.
        name: on the hub.

    Raises:
        InputError: it has no safetensors weights, or they cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            return list(read_json(index)["weight_map"])
        header = HfApi().parse_safetensors_file_metadata(name, _WEIGHTS[0], revision=folder.name)
    except EntryNotFoundError as error:
        raise InputError(
            f"{name} holds no {_WEIGHTS[0]}: only safetensors weights are read; convert others "
            "with transformers' save_pretrained"
        ) from error
    except Exception as error:  # the hub's, the network's, or of a header that is none
        raise InputError(
            f"what weights {name} has could not be read from the hub ({type(error).__name__}): "
            "check the network, or give a local folder"
        ) from error
    return list(header.tensors)


def read_config(folder: Path, name: str) -> PreTrainedConfig:
    """The configuration of a checkpoint of an encoder of text.

    Args:
        folder: of the checkpoint.
        name: what messages call it.

    Raises:
        InputError: there is none, it cannot be read without the checkpoint's own code, or it is of
            another kind of model.
    """
    path = require_config(folder, name)
    values = read_json(path)
    if not isinstance(values, dict):
        raise InputError(f"{path} is not a model configuration: it holds no object")
    kind = values.get("model_type")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each family checks its values in its own way, or trips over them
        raise InputError(
            f"{name} has model_type {kind!r}, which this version of transformers cannot make "
            "without running the checkpoint's own code, and that is never run: take a model of a "
            f"family that it knows, such as bert or roberta ({error})"
        ) from error
    for size in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        value = getattr(config, size, None)  # of an encoder alone, which is asked below
        if value is not None and not (isinstance(value, int) and 0 < value <= _LARGEST[size]):
            raise InputError(
                f"{path} has {size} {value!r}: a whole number from 1 to {_LARGEST[size]:,} is due"
            )
    try:
        known = type(config) in AutoModel._model_mapping and config.vocab_size > 0
        layers, width = config.num_hidden_layers, config.hidden_size
    except AttributeError:
        known, layers, width = False, None, None
    if not known or config.is_encoder_decoder or not isinstance(layers, int) or not width:
        raise InputError(
            f"{name} has model_type {kind!r}, which is no single stack of layers over text: take "
            "an encoder such as bert-base-uncased or FacebookAI/roberta-base, or a decoder-only "
            "model such as openai-community/gpt2"
        )
    return config
