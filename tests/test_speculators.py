"""Speculators' trainer reads its hidden states out of a store, as out of its own files."""

from __future__ import annotations

import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import foreigners
import pytest
import torch
from foreigners import HIDDEN, LENGTHS
from stores import shard_path

import bertvision
from bertvision.errors import CorruptStoreError, InputError, StoreNotFoundError

pytest.importorskip("speculators", reason="speculators is not installed")

from datasets import Dataset
from hs_connectors import FileTransfer, HiddenStatesBackend, HiddenStatesTransfer

from bertvision.pipelines.foreign.speculators import StoreTransfer, transfer_of

bertvision.register_speculators_backend()  # before any test imports the trainer


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set as speculators prepares it, its files of hidden states, and a store of them."""
    rows = [
        {"input_ids": foreigners.token_ids(i), "loss_mask": torch.ones(n), "seq_len": n}
        for i, n in enumerate(LENGTHS)
    ]
    Dataset.from_list(rows).with_format("torch").save_to_disk(tmp_path / "data")
    files = foreigners.speculators(tmp_path / "data" / "hidden_states")
    bertvision.import_states(
        files, "0e/train", layers="2,18,33", encoding="float32", store=tmp_path / "activations"
    )
    return tmp_path / "data"


def given(data: Path, **changes: Any) -> Namespace:
    options: dict[str, Any] = {"store": str(data.parent / "activations"), "store_layers": None}
    return Namespace(**(options | {"store_split": "0e/train"} | changes))


def dataset(data: Path, transfer: Any, **options: Any) -> Any:
    from speculators.train.data import ArrowDataset

    return ArrowDataset(64, data, transfer, on_missing="raise", **options)


def test_the_trainers_data_set_gives_what_it_gives_of_files(data: Path) -> None:
    transfer = transfer_of(given(data), str(data))
    of_files = dataset(data, FileTransfer(data / "hidden_states"))
    of_store = dataset(data, transfer)
    assert len(of_store) == len(LENGTHS)
    for own, ours in ((of_files[i], of_store[i]) for i in range(len(LENGTHS))):
        assert own.keys() == ours.keys()
        assert all(torch.equal(own[name].float(), ours[name].float()) for name in own)
    held_out = dataset(data, transfer, train_ratio=0.5, split="val")
    assert torch.equal(held_out[0]["input_ids"], foreigners.token_ids(len(LENGTHS) // 2))


def test_registering_again_changes_nothing_and_too_late_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = dict(HiddenStatesBackend.registry)
    bertvision.register_speculators_backend()
    assert before == HiddenStatesBackend.registry
    import speculators.train.config.resolution  # noqa: F401

    monkeypatch.delitem(HiddenStatesBackend.registry, "bertvision")
    with pytest.raises(InputError, match=r"call register_speculators_backend\(\) first"):
        bertvision.register_speculators_backend()


def test_layers_are_chosen_by_index_or_name(data: Path) -> None:
    transfer = transfer_of(given(data, store_layers="33,2"), "")
    sample = transfer.get_cached(3)
    assert sample is not None
    assert torch.equal(sample["hidden_states"], foreigners.states(3)[:, [2, 0]])
    assert sample["hidden_states"].shape == (LENGTHS[3], 2, HIDDEN)
    assert sample["token_ids"].dtype == torch.int64


def test_the_trainers_own_options_name_the_split(data: Path) -> None:
    from speculators.train.config import TrainConfig  # which reads the backends that there are

    words = ["--verifier-name-or-path", "x", "--hidden-states-backend", "bertvision"]
    words += ["--store", str(data.parent / "activations"), "--store-split", "0e/train"]
    args = Namespace(**TrainConfig.resolve(words).flatten())
    transfer = HiddenStatesBackend.registry["bertvision"].from_train_args(args, args.data_path)
    assert isinstance(transfer, HiddenStatesTransfer)
    assert transfer.get_cached(0) is not None


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_its_loaders_read_the_store_in_workers_too(data: Path, workers: int) -> None:
    from speculators.train.dataloader import create_train_val_loaders

    def batches(transfer: Any) -> list[dict[str, Any]]:
        train, held_out = create_train_val_loaders(
            **{"data_path": str(data), "total_seq_len": 32, "hidden_states_dtype": torch.float32},
            **{"transfer": transfer, "vllm_endpoint": "", "on_missing": "raise"},
            **{"verifier_name_or_path": "x", "request_timeout": None, "max_retries": 0},
            **{"generation_validation_retries": 0, "max_consecutive_generation_failures": 1},
            **{"hidden_size": HIDDEN, "num_target_layers": 2, "num_workers": workers},
            **{"prefetch_factor": 2, "preprocess": None},
        )
        return [*train, *held_out]

    of_store = batches(transfer_of(given(data), ""))
    of_files = batches(FileTransfer(data / "hidden_states"))
    assert len(of_store) == len(of_files) > 1
    for ours, own in zip(of_store, of_files, strict=True):
        for name in ("hidden_states", "verifier_last_hidden_states", "input_ids", "document_ids"):
            assert torch.equal(ours[name], own[name]), name


def test_a_row_without_an_example_is_missing_as_a_file_is(data: Path) -> None:
    transfer = transfer_of(given(data), "")
    assert transfer.get_cached(len(LENGTHS)) is None
    # what vLLM writes meanwhile comes as with the backend of files
    generated = {"hidden_states_path": str(data / "hidden_states" / "hs_4.safetensors")}
    sample = transfer.get_generated(generated)
    assert sample is not None
    assert torch.equal(sample["hidden_states"].float(), foreigners.states(4))


def test_damage_is_an_error_and_no_missing_file(data: Path) -> None:
    transfer = pickle.loads(pickle.dumps(transfer_of(given(data), "")))
    assert isinstance(transfer, StoreTransfer)
    path = shard_path(transfer.split, "hidden_states", 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptStoreError, match="shard 0"):
        dataset(data, transfer)[0]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"store_split": None}, InputError, "name the split of the store, such as --store-split"),
        ({"store": "nowhere"}, StoreNotFoundError, "no activation store at nowhere"),
        ({"store_layers": "2"}, InputError, "two layers or more, .* name them with --store-layers"),
        ({"store_layers": "2,7"}, InputError, "layer 7 is not stored"),
    ],
)
def test_what_the_trainer_cannot_use_is_said_before_it_starts(
    data: Path, changes: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        transfer_of(given(data, **changes), "")


def test_a_split_without_token_ids_is_refused(data: Path) -> None:
    store = bertvision.ActivationStore.open(data.parent / "activations")
    with store.writer("0e", "bare", hidden_size=4, layers=[1, 2]) as writer:
        writer.add("0", torch.randn(3, 2, 4))
        writer.finish()
    with pytest.raises(InputError, match="0e/bare has no token ids"):
        transfer_of(given(data, store_split="0e/bare"), "")
