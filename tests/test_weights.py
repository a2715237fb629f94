"""The digest of a checkpoint is of the loaded weights, whatever its folder says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import find_pretrained, load_model
from bertvision.pipelines.encoders.weights import weight_files, weights_digest


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bert, tmp_path / "model"))


@pytest.fixture
def parted(folder: Path) -> Path:
    """The same weights in two files beside an index, as `save_pretrained` writes large ones."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2]}
    parts["model-00002-of-00002.safetensors"] = names[1::2]
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / part, {"format": "pt"})
    placed = {name: part for part, held in parts.items() for name in held}
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    return folder


def set_keys(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_checkpoint_in_parts_is_loaded_whole(parted: Path, tiny_bert: Path) -> None:
    assert [path.name[:11] for path in weight_files(parted)] == ["model-00001", "model-00002"]
    one, other = load_model(parted).state_dict(), load_model(tiny_bert).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)
    before = weights_digest(parted)
    (parted / "model-00003-of-00003.safetensors").write_bytes(b"of another checkpoint")
    assert weights_digest(parted) == before


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "../model.safetensors", "/etc/passwd", "other.safetensors", 7, None,
     "model-00001-of-00002.safetensors\n", "model-00003-of-00003.safetensors"],
)  # fmt: skip
def test_an_index_that_names_other_files_is_refused(parted: Path, name: Any) -> None:
    """Even where a decoy of the right name lies beside them."""
    index = parted / "model.safetensors.index.json"
    placed = json.loads(index.read_text())["weight_map"]
    torch.save({"x": torch.ones(1)}, parted / "pytorch_model.bin")
    shutil.copy(parted / "model-00001-of-00002.safetensors", parted / "other.safetensors")
    shutil.copy(parted / "other.safetensors", parted.parent / "model.safetensors")
    set_keys(index, weight_map=placed | {next(iter(placed)): name})
    for load in (load_model, weights_digest, lambda path: find_pretrained(str(path))):
        with pytest.raises(InputError, match="index.json names "):
            load(parted)


@pytest.mark.parametrize("text", ["[]", "{}", "{", '{"weight_map": {}, "metadata": {}}',
                                  '{"weight_map": {"x": "model-00001-of-00001.safetensors"}}',
                                  "[" * 200_000])  # fmt: skip
def test_an_index_that_is_none_is_refused(parted: Path, text: str) -> None:
    (parted / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        load_model(parted)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transformers_weights": "other.safetensors"}, "names other weights than the folder's"),
        ({"transformers_weights": "../x.safetensors"}, "names other weights than the folder's"),
        ({"quantization_config": [1]}, "says that the weights are quantised"),
    ],
)
def test_a_configuration_that_has_other_weights_loaded_is_refused(
    folder: Path, values: dict[str, Any], message: str
) -> None:
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    set_keys(folder / "config.json", **values)
    with pytest.raises(InputError, match=message):
        load_model(folder)


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "elsewhere"}')
    with pytest.raises(InputError, match="merge it into them"):
        load_model(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": -1},
        {"num_hidden_layers": 10**7},
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": 1.5},
        {"hidden_size": "wide"},
        {"hidden_size": 0},
        {"vocab_size": 1 << 40},
        {"max_position_embeddings": "long"},
        {"hidden_act": ["gelu"]},
        {"model_type": ["bert"]},
    ],
)
def test_numbers_that_make_no_model_are_one_message(folder: Path, values: dict[str, Any]) -> None:
    set_keys(folder / "config.json", **values)
    with pytest.raises(InputError, match=r"model"):
        load_model(find_pretrained(str(folder)).folder)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text('{"a": ' * 100_000),
        lambda path: path.write_text("1" * 100_000),
        lambda path: path.write_text("null"),
        lambda path: path.write_text(" " * (1 << 23)),
        lambda path: (path.unlink(), os.mkfifo(path)),
    ],
    ids=["deep", "a long number", "null", "large", "a pipe"],
)
def test_a_configuration_that_cannot_be_read_is_one_message(
    folder: Path, damage: Callable[[Path], object]
) -> None:
    damage(folder / "config.json")
    with pytest.raises(InputError, match=r"config\.json"):
        find_pretrained(str(folder))
