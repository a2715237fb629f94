"""The weights of a checkpoint: which files they are, so that what is digested is what is loaded.

transformers finds weights by what a folder says of itself: an index, a key of the configuration, an
adapter beside them. Each of these can name files that are not the digested ones, or are pickled, or
lie elsewhere. So the folder is held to the two layouts that `save_pretrained` writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertvision.errors import InputError
from bertvision.pipelines.files import read_json, sha256_of_files

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PART = re.compile(r"model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_ELSEWHERE = {
    "transformers_weights": "names other weights than the folder's own",
    "quantization_config": "says that the weights are quantised",
}
"""Keys of a configuration that have other weights loaded, or the same ones otherwise."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in order: exactly those that are loaded.

    Raises:
        InputError: there are none, or the index names files that are not of the checkpoint.
    """
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.is_file():
        raise InputError(
            f"{folder} holds no {_SINGLE}: only safetensors weights are read; convert others with "
            "transformers' save_pretrained"
        )
    index_content = read_json(index)
    parts = index_content.get("weight_map") if isinstance(index_content, dict) else None
    if (
        not isinstance(parts, dict)
        or not parts
        or not isinstance(index_content.get("metadata"), dict)
    ):
        raise InputError(f"{index} is no index of weights: save the model again")
    for name in parts.values():
        if not isinstance(name, str) or not _PART.fullmatch(name):
            raise InputError(
                f"{index} names {name!r}: parts of a checkpoint are called "
                "model-00001-of-00002.safetensors and lie beside their index; save the model again"
            )
        if not (folder / name).is_file():
            raise InputError(f"{index} names {name}, which is not there: copy the whole checkpoint")
    return [folder / name for name in sorted(set(parts.values()))]


def has_weights(folder: Path) -> bool:
    """Whether all the weights of a checkpoint lie in its folder."""
    try:
        return bool(weight_files(folder))
    except InputError:
        return False


def check_loading(folder: Path) -> None:
    """Make sure that what transformers loads from a folder is its `weight_files` and no more.

    Raises:
        InputError: it would load other files, or the same ones otherwise.
    """
    weight_files(folder)
    config = folder / "config.json"
    values = read_json(config)
    for key, why in _ELSEWHERE.items():
        if isinstance(values, dict) and values.get(key) is not None:
            raise InputError(
                f"{config} has {key}, which {why}: take the checkpoint without it, as float weights"
            )
    if (adapter := folder / "adapter_config.json").is_file():
        raise InputError(
            f"{adapter} has an adapter loaded beside the weights: merge it into them (peft's "
            "merge_and_unload) and save the model again"
        )


def weight_names(folder: Path) -> list[str]:
    """Names of the tensors of a checkpoint folder.

    Raises:
        InputError: as of `weight_files`, or a file is damaged.
    """
    names: list[str] = []
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                names += file.keys()
        except SafetensorError as error:
            raise InputError(
                f"{path} is damaged, or still being written ({error}): wait until it is whole, or "
                "save the model again"
            ) from error
    return names


def files_with(folder: Path, names: Sequence[str]) -> list[str]:
    """Names of the files of a checkpoint folder that hold any of some tensors.

    Raises:
        InputError: as of `weight_files`.
    """
    wanted, files = set(names), []
    for path in weight_files(folder):
        with safe_open(path, framework="numpy") as file:
            if wanted & set(file.keys()):
                files.append(path.name)
    return files


def weights_digest(folder: Path) -> str:
    """Hex sha256 of the bytes of a checkpoint folder's weights."""
    return sha256_of_files(weight_files(folder))


def weights_of(folder: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Some tensors of a checkpoint folder's weights.

    Raises:
        InputError: one is not there.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as weights:
            there = set(weights.keys())
            tensors |= {name: weights.get_tensor(name) for name in names if name in there}
    if missing := [name for name in names if name not in tensors]:
        raise InputError(f"the weights in {folder} lack {', '.join(missing)}")
    return tensors


def has_pooler(folder: Path) -> bool:
    """Whether the encoder that is saved in a folder has a pooler; the weights are not read.

    Raises:
        InputError: there are no weights.
    """
    names: set[str] = set()
    for path in weight_files(folder):
        with safe_open(path, framework="numpy") as weights:
            names |= set(weights.keys())
    return any("pooler" in name.split(".")[:-1] for name in names)
