"""Extraction of the [CLS] alone: exact, small, resumable, repairable, and accounted for."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_code
from stores import record_path, shard_path
from workspaces import answerable_options

import bertvision
from bertvision.errors import (
    BertvisionError,
    DiskSpaceError,
    InputError,
    LockedError,
    ProvenanceError,
    StoreError,
    UnknownNameError,
    WorkspaceError,
)
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.records import ShardRecord
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.extraction import split_extraction
from bertvision.pipelines.extraction.extract import extract, repair
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.squad.windows import window_labels
from bertvision.pipelines.tasks.windows import collate
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import RunConfig, RunTraining
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32", "shard_tokens": 16}


@pytest.fixture(scope="module")
def made(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace of the task answerable, with train and dev of 1e extracted in float32."""
    folder = tmp_path_factory.mktemp("answerable")
    asked = answerable_options(tiny_bert, folder)
    finetune(folder / "workspace", FinetuneOptions(**asked), evaluate=False)
    space = Workspace.find(folder / "workspace")
    extract(space, "1e", splits=["train", "dev"], **EXACT)
    return space


@pytest.fixture
def copy(made: Workspace, tmp_path: Path) -> Workspace:
    """A copy that tests may change."""
    shutil.copytree(made.root, tmp_path / "copy")
    return Workspace.find(tmp_path / "copy")


@pytest.fixture
def empty(made: Workspace, tmp_path: Path) -> Workspace:
    """A copy with nothing extracted yet."""
    left_out = shutil.ignore_patterns("activations", "extraction")
    shutil.copytree(made.root, tmp_path / "empty", ignore=left_out)
    return Workspace.find(tmp_path / "empty")


def files(root: Path) -> dict[str, bytes]:
    found = (p for p in sorted(root.rglob("*")) if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(root)): p.read_bytes() for p in found}


def cost(space: Workspace, tag: str, split: str) -> dict[str, Any]:
    return json.loads((space.root / "extraction" / tag / f"{split}.json").read_text())


def of_transformers(space: Workspace, tag: str, split: str) -> torch.Tensor:
    """(windows, layers, hidden) of [CLS] and the pooler output, by transformers' own forward."""
    snapshot = load_snapshot(space.snapshot_dir(tag))
    windows = space.windows(split, snapshot.tokenizer)
    rows = np.arange(len(windows))
    batch = collate(windows, windows.first_token, rows, snapshot.tokenizer.pad_token_id)
    with torch.inference_mode():
        output = snapshot.model.base_model(**batch.inputs, output_hidden_states=True)
    states = [state[:, 0] for state in output.hidden_states]
    if output.pooler_output is not None:
        states.append(output.pooler_output)
    return torch.stack(states, dim=1)


def stored(split: ActivationSplit) -> torch.Tensor:
    """(examples, layers, hidden) in the order of the data."""
    batch = split.read(range(len(split)))
    values = torch.empty(len(split), len(split.record.layers), split.record.hidden_size)
    values[torch.from_numpy(split.plan.example_id)] = batch.decode(torch.float32)
    return values


@pytest.mark.parametrize("name", ["train", "dev"])
def test_float32_equals_transformers_forward_pass(made: Workspace, name: str) -> None:
    split = made.split("1e", f"{name}-cls").require_complete()
    truth = of_transformers(made, "1e", name)
    assert split.record.layers == (0, 1, 2, 3)  # the last is the pooler output
    assert truth.shape[1] == 4
    assert split.record.shards > 2
    torch.testing.assert_close(stored(split), truth, rtol=1e-5, atol=1e-5)


def test_a_snapshot_of_spans_has_no_pooler_output(workspace: Workspace, tmp_path: Path) -> None:
    elsewhere = workspace.at(str(tmp_path / "store"))
    (done,) = extract(elsewhere, "1e", splits=["dev"], tokens=("cls",), **EXACT)
    split = elsewhere.split("1e", "dev-cls").require_complete()
    assert (done.split, split.record.layers) == ("dev-cls", (0, 1, 2))
    truth = of_transformers(workspace, "1e", "dev")
    torch.testing.assert_close(stored(split), truth, rtol=1e-5, atol=1e-5)
    with pytest.raises(InputError, match=r"to 2$"):
        extract(elsewhere, "1e", splits=["tune"], tokens=("cls",), layers=[3])


def test_one_token_per_window_with_its_labels(made: Workspace) -> None:
    split = made.split("1e", "train-cls")
    snapshot = load_snapshot(made.snapshot_dir("1e"))
    windows = made.windows("train", snapshot.tokenizer)
    rows = split.plan.example_id
    assert (split.plan.n_tokens == 1).all()
    assert split.plan.seed == made.config.finetune.seed
    assert sorted(rows) == list(range(len(windows)))
    assert rows.tolist() != sorted(rows)
    np.testing.assert_array_equal(split.labels["question_index"], windows.item_index[rows])
    for name in ("start_positions", "end_positions"):
        np.testing.assert_array_equal(split.labels[name], windows.labels[name][rows])
    np.testing.assert_array_equal(split.labels["answerable"], window_labels(windows)[rows])
    assert split.labels["answerable"].dtype == np.int8
    tokens = split.plan.first_token
    assert (split.array("input_ids")[tokens] == snapshot.tokenizer.cls_token_id).all()
    assert (split.array("offset_mapping")[tokens] == -1).all()
    assert split.record.provenance["tokens"] == "cls"
    assert split.table().num_rows == made.config.data["train"].questions


def test_splits_of_all_tokens_say_what_they_always_said(copy: Workspace) -> None:
    extract(copy, "0e", splits=["dev"], tokens=("all",))
    split = copy.split("0e", "dev")
    assert "tokens" not in split.record.provenance
    assert split.record.shard_tokens == split.record.tokens  # one shard, of what it holds
    assert "answerable" in split.labels


@pytest.mark.parametrize(
    ("encoding", "most"), [("int8", 0.02), ("int4", 0.2), ("bfloat16", 0.005), ("float16", 1e-3)]
)
def test_every_encoding_holds_them(empty: Workspace, encoding: str, most: float) -> None:
    (done,) = extract(empty, "1e", splits=["dev"], encoding=encoding, precision="32")
    split = empty.split("1e", "dev-cls").require_complete()
    assert split.verify() == []
    truth = of_transformers(empty, "1e", "dev")
    error = (stored(split) - truth).norm(dim=(0, 2)) / truth.norm(dim=(0, 2))
    assert float(error.max()) < most
    assert done.bytes == split.info()["bytes"]
    assert split.record.shard_tokens == len(split)  # at most 256: one shard, without fill


def test_layers_can_be_chosen_the_pooler_output_among_them(empty: Workspace) -> None:
    extract(empty, "1e", splits=["dev"], layers=[-1, 1, 3], encoding="float32", precision="32")
    split = empty.split("1e", "dev-cls")
    assert split.record.layers == (1, 2, 3)
    truth = of_transformers(empty, "1e", "dev")[:, [1, 2, 3]]
    torch.testing.assert_close(stored(split), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layers": [4]}, InputError, "to 2, and its pooler output as 3"),
        ({"layers": [3], "tokens": ("all",)}, InputError, "to 2; its pooler output .* --pool cls"),
        ({"splits": ["dev-cls"], "tokens": ("all",)}, InputError, "dev-cls: a name that ends"),
        ({"splits": ["test"]}, UnknownNameError, "'test' is no split"),
        ({"tokens": ("all",), "splits": ["train", "dev-cls"]}, InputError, "train, dev-cls"),
    ],
)
def test_bad_requests_are_named(
    made: Workspace, options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        extract(made, "1e", **options)


def test_the_name_of_the_stored_split_is_taken_too(made: Workspace) -> None:
    (done,) = extract(made, "1e", splits=["dev-cls"], **EXACT)
    assert (done.split, done.shards_written) == ("dev-cls", 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.workspace.workspace import Workspace

write = SplitWriter.write_shard

def dying(self, shard, *rest):
    if shard == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, shard, *rest)

SplitWriter.write_shard = dying
extract(Workspace.find(Path(sys.argv[1])), "1e", splits=["train"], encoding="int8",
        precision="32", shard_tokens=16)
"""


def test_after_a_kill_at_a_shard_it_goes_on_to_the_same_store(
    empty: Workspace, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"splits": ["train"], "precision": "32", "shard_tokens": 16}
    elsewhere = empty.at(str(tmp_path / "whole"))
    (whole,) = extract(elsewhere, "1e", **options)
    dead = run_code(KILLED, empty.root, CUDA_VISIBLE_DEVICES="")
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    split = empty.split("1e", "train-cls")
    assert not split.is_complete
    assert status(empty)["unfinished"] == {"1e": ["train-cls"]}
    command = (
        "bertvision extract --checkpoint 1e --split train --encoding int8 --layers 0,1,2,3 "
        "--precision 32"
    )
    assert command in status(empty)["next"]
    written = len(split.ledger.shards())
    (done,) = extract(empty, "1e", **options)
    assert done.shards_written == whole.shards_written - written
    assert files(Path(str(empty.activations))) == files(tmp_path / "whole")


def test_status_knows_splits_of_the_cls(made: Workspace) -> None:
    found = status(made)
    assert found["stored"] == {"1e": ["dev-cls", "train-cls"]}
    assert found["unfinished"] == {}
    assert "bertvision extract --checkpoint 1e --split tune" in found["next"]
    assert "bertvision extract --checkpoint 0e --split train,tune,dev" in found["next"]
    assert "bertvision train cls-learned-pooling --checkpoint 1e" in found["next"]


def test_status_names_heads_by_the_tokens_they_take(copy: Workspace) -> None:
    extract(copy, "1e", splits=["train"], tokens=("all",))
    training = RunTraining(
        epochs=1, batch_size=1, lr=1, precision="32", best_epoch=False, seed=0, fraction=1
    )
    cls = RunConfig(
        head="cls-x",
        kind="classification",
        trained_on="1e",
        layers=(0,),
        hidden_size=32,
        encoding="int8",
        training=training,
        activations={},
    )
    for name, config in (("cls-x", cls.to_json()), ("old", {})):
        folder = copy.root / "heads/1e" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "metrics.json").write_text("{}")
    found = status(copy)["next"]
    assert "bertvision evaluate cls-x --trained-on 1e --checkpoint 1e" in found
    assert not any("evaluate old" in command for command in found)  # no dev of all tokens
    assert not any(command.startswith("bertvision train") for command in found)
    shutil.rmtree(copy.root / "heads/1e/old")
    assert "bertvision train adapter-386-shared --checkpoint 1e" in status(copy)["next"]


def test_exactly_what_is_damaged_is_extracted_again(copy: Workspace) -> None:
    root, split = Path(str(copy.activations)), copy.split("1e", "dev-cls")
    whole, spent = files(root), cost(copy, "1e", "dev-cls")
    assert split.verify() == []
    shard_path(split, "hidden_states", 1).write_bytes(b"")
    record_path(split, 2).write_text("{")
    (root / "arrays.zarr/1e/dev-cls/answerable/c/0").write_bytes(b"")
    assert len(split.verify()) >= 3
    done = repair(copy, "1e", "dev-cls")
    assert done.shards == [1, 2]
    assert files(root) == whole
    assert cost(copy, "1e", "dev-cls") == spent  # repairing is not what extraction costs


def test_costs_add_up_over_interruptions_and_stay_when_nothing_is_written(
    empty: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = SplitWriter.write_shard

    def full(self: SplitWriter, shard: int, *rest: Any) -> ShardRecord:
        if shard == 2:
            raise DiskSpaceError("the disk is full")
        return write(self, shard, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(SplitWriter, "write_shard", full)
        with pytest.raises(DiskSpaceError):
            extract(empty, "1e", splits=["dev"], **EXACT)
    first = cost(empty, "1e", "dev-cls")
    split = empty.split("1e", "dev-cls")
    assert 0 < first["examples_written"] < first["examples"] == len(split)
    (done,) = extract(empty, "1e", splits=["dev"], **EXACT)
    second = cost(empty, "1e", "dev-cls")
    assert second["examples_written"] >= first["examples_written"] + done.examples_written
    assert second["seconds"] > first["seconds"] > first["encoder_seconds"] > 0
    assert second["encoder_seconds"] == first["encoder_seconds"] + done.encoder_seconds
    assert second["bytes"] == done.bytes == split.info()["bytes"]
    known = {"tokens": "cls", "encoding": "float32", "layers": [0, 1, 2, 3], "shard_tokens": 16}
    assert known.items() <= second.items()
    path = empty.root / "extraction/1e/dev-cls.json"
    before = path.stat().st_mtime_ns
    extract(empty, "1e", splits=["dev"], **EXACT)
    assert path.stat().st_mtime_ns == before


def test_a_store_made_anew_costs_anew(copy: Workspace) -> None:
    before = cost(copy, "1e", "dev-cls")
    shutil.rmtree(Path(str(copy.activations)))
    (done,) = extract(copy, "1e", splits=["dev"], **EXACT)
    after = cost(copy, "1e", "dev-cls")
    assert after["examples_written"] == before["examples_written"] == done.examples_written
    assert after["seconds"] <= done.seconds


def test_another_store_is_kept_only_once_a_split_is_begun_in_it(
    empty: Workspace, tmp_path: Path
) -> None:
    held, elsewhere = (empty.root / "bertvision.yaml"), str(tmp_path / "elsewhere")
    before = held.read_bytes()
    (tmp_path / "file").write_text("no folder")
    for tag, options in (
        ("9e", {}),
        ("1e", {"splits": ["nope"]}),
        ("1e", {"encoding": "int7"}),
        ("1e", {"layers": [9]}),
        ("1e", {"precision": "16"}),
        ("1e", {"store": "nowhere://bucket/store"}),
        ("1e", {"store": str(tmp_path / "file")}),
        ("1e", {"store": "http://127.0.0.1:9/store"}),
    ):
        with pytest.raises((InputError, OSError, StoreError)):
            extract(empty, tag, **{"store": elsewhere, **options})
        assert held.read_bytes() == before
    _extract_with_failures_on_the_way(empty, elsewhere, tmp_path)
    assert held.read_bytes() == before
    extract(empty, "1e", splits=["dev"], store=elsewhere)
    assert Workspace.find(empty.root).activations == Path(elsewhere)
    assert not (empty.root / "activations").exists()
    again = Workspace.find(empty.root)
    kept = held.read_bytes()
    (tmp_path / "other").mkdir()
    shutil.copytree(elsewhere, tmp_path / "other/store")
    with pytest.raises(ProvenanceError):
        extract(again, "1e", splits=["dev"], encoding="int4", store=str(tmp_path / "other/store"))
    assert held.read_bytes() == kept


def _extract_with_failures_on_the_way(space: Workspace, store: str, folder: Path) -> None:
    """The data are gone, another process writes the split, the disk is too small for it."""
    source = Path(space.config.data["dev"].source)
    source.rename(folder / "gone")
    with pytest.raises(WorkspaceError, match="cannot be read again"):
        extract(Workspace.find(space.root), "1e", splits=["dev"], store=store)
    (folder / "gone").rename(source)
    lock = Ledger(open_storage(store), "1e", "dev-cls").lock()
    with lock, pytest.raises(LockedError):
        extract(space, "1e", splits=["dev"], store=store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_extraction, "free_bytes", lambda storage: 4000)
        for tokens in (("cls",), ("mean", "max")):  # two that fit each, but not both
            with pytest.raises(DiskSpaceError):
                extract(space, "1e", splits=["dev"], tokens=tokens, store=store)


@pytest.mark.parametrize("before", [None, [], ["notes.txt"], ["snapshots/0e/weights.bin"]])
@pytest.mark.parametrize("refused", [{"logits": "top:5"}, {"pool": "at:nix"}])
def test_a_refused_extraction_leaves_what_was_there_before_and_nothing_else(
    tiny_bert: Path, tmp_path: Path, before: list[str] | None, refused: dict[str, str]
) -> None:
    (data := tmp_path / "data.csv").write_text("text\nanna was born in 1901\n")
    root = tmp_path / "folder"
    for name in before or ():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("own")
    if before == []:
        root.mkdir()
    with pytest.raises(BertvisionError):
        bertvision.extract(
            model=tiny_bert, task="text", data=data, text="text", workspace=root, **refused
        )
    files = [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()]
    assert (files if root.exists() else None) == before
