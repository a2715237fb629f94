"""Added data sets, pooled extraction, and features in the order of the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from hypothesis import given
from hypothesis import strategies as st
from sentences import write_probing
from test_workspace import write_squad

from bertvision.errors import (
    InputError,
    ProvenanceError,
    UnknownNameError,
    WorkspaceError,
)
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import POOLINGS, TokenPooling
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.registry import TASKS, find_task
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.creation import feature_workspace, open_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

NAME = "bigram_shift"
EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}


@pytest.fixture(scope="module")
def made(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace without a task, with a data set of which all poolings are stored in float32."""
    folder = tmp_path_factory.mktemp("features")
    space = feature_workspace(folder / "ws", str(tiny_bert))
    add_dataset(space.root, NAME, str(write_probing(folder / f"{NAME}.txt")))
    ensure_features(space, ["0e", "untrained"], NAME, ["train", "dev"], POOLINGS, **EXACT)
    return space


@pytest.fixture
def copy(made: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(made.root, tmp_path / "copy")
    return Workspace.find(tmp_path / "copy")


def direct(space: Workspace, tag: str, split: str, pooling: TokenPooling) -> np.ndarray:
    """(items, layers, hidden), one window at a time by transformers' own forward pass."""
    snapshot, data = load_snapshot(space.snapshot_dir(tag)), space.dataset(NAME)
    windows = data.windows(split, snapshot.tokenizer)
    found = []
    for first, n in zip(windows.first_token, windows.n_tokens, strict=True):
        ids = torch.from_numpy(windows.input_ids[first : first + n].astype(np.int64))[None]
        types = torch.from_numpy(windows.token_type_ids[first : first + n].astype(np.int64))[None]
        with torch.inference_mode():
            states = snapshot.model.base_model(
                input_ids=ids, token_type_ids=types, output_hidden_states=True
            ).hidden_states
        of_layers = torch.stack(states)[:, 0].numpy()  # (layers, tokens, hidden)
        pooled = {
            "cls": of_layers[:, 0],
            "sep": of_layers[:, -1],
            "mean": of_layers.mean(axis=1),
            "max": of_layers.max(axis=1),
            "first": of_layers[:, 1],
            "last": of_layers[:, -2],
        }
        found.append(pooled[pooling])
    return np.stack(found)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("tag", ["0e", "untrained"])
def test_features_are_the_pooled_hidden_states_in_the_order_of_the_data(
    made: Workspace, tag: str, pooling: TokenPooling
) -> None:
    split = made.split(tag, f"{NAME}-train-{pooling}")
    assert split.plan.example_id.tolist() != list(range(len(split)))  # it is stored permuted
    truth = direct(made, tag, "train", pooling)
    found = PooledSplit(made, tag, NAME, "train", pooling).features([0, 1, 2])
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)
    last = PooledSplit(made, tag, NAME, "train", pooling).features([2])
    np.testing.assert_array_equal(last[:, 0], found[:, 2])


def test_twins_offer_the_same_layers(made: Workspace) -> None:
    """The checkpoint, saved with an output layer for spans, has no pooler."""
    for tag in ("0e", "untrained"):
        for pooling in POOLINGS:
            assert PooledSplit(made, tag, NAME, "dev", pooling).stored.record.layers == (0, 1, 2)


def test_a_pooled_split_knows_its_name_and_what_is_stored_of_it(made: Workspace) -> None:
    held, lacking = (PooledSplit(made, "0e", NAME, split, "max") for split in ("dev", "test"))
    assert (held.name, held.data) == (f"{NAME}-dev-max", made.dataset(NAME))
    found = held.find()
    assert found is not None
    assert (found.is_complete, found.name) == (True, held.stored.name)
    assert lacking.find() is None
    with pytest.raises(UnknownNameError, match=f"no split '{NAME}-test-max'"):
        lacking.features()


def test_labels_are_stored_beside_the_states(made: Workspace) -> None:
    split = made.split("0e", f"{NAME}-train-mean")
    labels = [item.label for item in made.dataset(NAME).items("train")]
    np.testing.assert_array_equal(split.labels["label"], np.array(labels)[split.plan.example_id])
    assert made.dataset(NAME).task.items_of(split.table()) == made.dataset(NAME).items("train")


def test_all_poolings_have_the_same_plan(made: Workspace) -> None:
    plans = {made.split("0e", f"{NAME}-train-{p}").record.plan_sha256 for p in POOLINGS}
    assert len(plans) == 1


def test_a_data_set_has_the_window_of_its_task_and_keeps_the_one_it_was_added_with(
    copy: Workspace, tmp_path: Path
) -> None:
    """An option that was left out decides nothing, whoever passes it on."""
    source = str(write_probing(tmp_path / "subj_number.txt"))
    first = add_dataset(copy.root, "subj_number", source, max_length=None)
    assert first.config.max_length == find_task("subj_number").max_length == 128
    source = str(write_probing(tmp_path / "obj_number.txt"))
    add_dataset(copy.root, "obj_number", source, max_length=100)
    assert add_dataset(copy.root, "obj_number", source).config.max_length == 100
    assert add_dataset(copy.root, "obj_number", source, max_length=None).config.max_length == 100


def test_a_pooling_added_later_is_the_same_as_one_extracted_together(copy: Workspace) -> None:
    alone = copy.at(str(copy.root / "alone"))
    extract(alone, "0e", dataset=NAME, splits=["dev"], tokens=["max"], **EXACT)
    (one, both) = (s.split("0e", f"{NAME}-dev-max").record for s in (alone, copy))
    assert one.difference(both) is None
    np.testing.assert_array_equal(
        PooledSplit(alone, "0e", NAME, "dev", "max").features(),
        PooledSplit(copy, "0e", NAME, "dev", "max").features(),
    )


def test_a_killed_extraction_of_several_poolings_is_finished(
    copy: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A death between the poolings of one shard leaves one of them behind; both come out whole."""
    elsewhere = copy.at(str(copy.root / "killed"))
    write, written = SplitWriter.write_shard, []

    def dying(self: SplitWriter, *args: Any, **kwargs: Any) -> Any:
        if len(written) == 3:
            raise KeyboardInterrupt
        written.append(1)
        return write(self, *args, **kwargs)

    options: dict[str, Any] = {"dataset": NAME, "splits": ["train"], "shard_tokens": 8, **EXACT}
    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "write_shard", dying)
        with pytest.raises(KeyboardInterrupt):
            extract(elsewhere, "0e", tokens=["mean", "max"], **options)
    done = extract(elsewhere, "0e", tokens=["mean", "max"], **options)
    assert [d.split for d in done] == [f"{NAME}-train-mean", f"{NAME}-train-max"]
    assert sum(d.shards_written for d in done) == 2 * 5 - 3
    for pooling in ("mean", "max"):
        assert elsewhere.split("0e", f"{NAME}-train-{pooling}").verify() == []
        found = PooledSplit(elsewhere, "0e", NAME, "train", pooling).features()  # type: ignore[arg-type]
        held = PooledSplit(copy, "0e", NAME, "train", pooling).features()  # type: ignore[arg-type]
        np.testing.assert_array_equal(found, held)


def test_what_is_stored_is_not_extracted_again(
    made: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bertvision.pipelines.extraction.features as module

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("it was extracted again")

    monkeypatch.setattr(module, "extract", never)
    ensure_features(made, ["0e", "untrained"], NAME, ["train", "dev"], POOLINGS, **EXACT)


def test_features_of_another_encoder_are_refused_by_field(copy: Workspace) -> None:
    path = copy.snapshot_dir("untrained")
    shutil.rmtree(path)
    config = copy.root / "bertvision.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 1"))
    other = Workspace.find(copy.root)
    with pytest.raises(ProvenanceError, match=r"untrained/.*weights_sha256"):
        ensure_features(other, ["untrained"], NAME, ["dev"], ["mean"], **EXACT)


def test_other_snapshots_are_only_made_by_fine_tuning(made: Workspace) -> None:
    with pytest.raises(UnknownNameError, match="no snapshot 0.3e"):
        ensure_features(made, ["0.3e"], NAME, ["dev"], ["mean"])


def test_a_data_set_is_named_once_and_known_from_then_on(made: Workspace) -> None:
    data = made.dataset(NAME)
    assert (data.name, data.splits, data.classes) == (NAME, ("train", "dev", "test"), ("I", "O"))
    with pytest.raises(UnknownNameError, match=r"no data set 'mr' \(there are: bigram_shift\)"):
        made.dataset("mr")
    with pytest.raises(UnknownNameError, match="'tune' is no split of bigram_shift"):
        data.items("tune")


def test_a_changed_file_is_refused(copy: Workspace, tmp_path: Path) -> None:
    source = write_probing(tmp_path / f"{NAME}.txt", train=20)
    with pytest.raises(WorkspaceError, match=r"was added with data = "):
        add_dataset(copy.root, NAME, str(source))
    held = json.loads((copy.root / "datasets" / f"{NAME}.json").read_text())
    with pytest.raises(WorkspaceError, match=r"max_length = 128, now it is 64"):
        add_dataset(copy.root, NAME, held["data"]["train"]["source"], max_length=64)


@pytest.mark.parametrize("name", ["../up", "A", "", "a b"])
def test_names_of_data_sets_cannot_lead_elsewhere(made: Workspace, name: str) -> None:
    with pytest.raises(InputError, match="data set name"):
        made.dataset(name)


def test_a_workspace_without_a_task_says_what_it_is_for(made: Workspace) -> None:
    with pytest.raises(InputError, match="no data of its own: name a data set"):
        extract(made, "0e")
    found = status(made)
    assert (found["task"], found["items"]) == ("features", {})
    assert "bertvision finetune --resume" not in found["next"]
    with pytest.raises(WorkspaceError, match="was made with model = "):
        feature_workspace(made.root, "other-model")


@given(
    st.sampled_from(["train", "tune", "dev", "test", "all", "queries"]),
    st.sampled_from(["all", *POOLINGS]),
    st.one_of(st.none(), st.sampled_from(sorted(TASKS))),
)
def test_names_of_stored_splits_are_read_back(
    split: str, tokens: TokenPooling, dataset: str | None
) -> None:
    stored = StoredName(split, tokens, dataset)
    assert StoredName.parse(stored.name) == stored


def test_untrained_comes_before_all_other_tags() -> None:
    tags = [SnapshotTag(text) for text in ("1e", "0e", "untrained", "0.3e")]
    assert sorted(tags) == ["untrained", "0e", "0.3e", "1e"]
    assert SnapshotTag.is_valid("untrained")
    assert not SnapshotTag.is_valid("Untrained")


def test_a_decoder_has_no_cls_and_learns_no_spans(tmp_path: Path) -> None:
    model = make_family("gpt2", tmp_path / "gpt2")
    space = feature_workspace(tmp_path / "ws", str(model))
    data = write_probing(tmp_path / f"{NAME}.txt", train=8, dev=4, test=4)
    add_dataset(space.root, NAME, str(data))
    ensure_features(space, ["0e"], NAME, ["dev"], ["mean", "max"], **EXACT)
    assert PooledSplit(space, "0e", NAME, "dev", "mean").features().shape == (4, 3, 32)
    with pytest.raises(InputError, match="'cls'.*poolings are mean, max"):
        ensure_features(space, ["0e"], NAME, ["dev"], ["cls"])
    assert not any(load_task(task).of_decoders for task in ("phrases", "tagging", "answerable"))
    squad = write_squad(tmp_path / "squad.json", 4)
    for other, match in (
        ({"train": squad, "dev": squad}, "no special tokens around .*sst2 and csv"),
        ({"task": NAME, "data": str(data), "variant": ("cls-norm",)}, r"cls-norm reads \[CLS\]"),
    ):
        options = FinetuneOptions(model=str(model), **other)
        with pytest.raises(InputError, match=match):
            open_workspace(tmp_path / "other", options, resume=False)
        assert not (tmp_path / "other").exists()
