"""Extraction: the store holds exactly what the encoder computes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import record_path, shard_path

from bertvision.errors import (
    DiskSpaceError,
    InputError,
    NonFiniteError,
    ProvenanceError,
    UnknownNameError,
)
from bertvision.featurestore.format.encoding import decode, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines import quickstart
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import load_model, load_tokenizer
from bertvision.pipelines.extraction import split_extraction
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.extraction.split_extraction import calibrate
from bertvision.pipelines.tasks.generated import make_paragraphs
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.squad.windows import question_windows
from bertvision.pipelines.tasks.windows import Windows, collate
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


def direct(workspace: Workspace, tag: str, split: ActivationSplit, examples: list[int]) -> list:
    """Hidden states (seq, hidden, layers) of stored examples from one plain forward pass."""
    snapshot = load_snapshot(workspace.snapshot_dir(tag))
    windows = workspace.windows(split.split, snapshot.tokenizer)
    rows = split.plan.example_id[examples]
    batch = collate(windows, windows.first_token, rows, snapshot.tokenizer.pad_token_id)
    with torch.inference_mode():
        states = snapshot.model(
            input_ids=batch.input_ids,
            token_type_ids=batch.token_type_ids,
            attention_mask=batch.attention_mask,
            output_hidden_states=True,
        ).hidden_states
    stacked = torch.stack(states, dim=-1)  # (batch, seq, hidden, layers)
    return [x[:n] for x, n in zip(stacked, split.plan.n_tokens[examples].tolist(), strict=True)]


def test_float32_equals_a_direct_forward_pass(workspace: Workspace) -> None:
    split = workspace.split("0.5e", "train")
    for i in (0, 1, len(split) // 2, len(split) - 1):
        (truth,) = direct(workspace, "0.5e", split, [i])
        torch.testing.assert_close(split[i], truth, rtol=1e-5, atol=1e-5)


def test_what_is_stored_is_what_the_encoder_gave(workspace: Workspace) -> None:
    split = workspace.split("0.5e", "train")
    snapshot = load_snapshot(workspace.snapshot_dir("0.5e"))
    windows = workspace.windows("train", snapshot.tokenizer)
    encoder = Encoder(snapshot.model.base_model, {"all": split.record.layers}, "32")
    for shard in range(split.plan.n_shards):
        members = np.array(split.plan.examples_of(shard))
        lengths = split.plan.n_tokens[members]
        for batch in encoder.batches(lengths):
            (given,) = encoder(windows, split.plan.example_id[members[batch]])
            parts = given.split(lengths[batch].tolist())
            for i, part in zip(members[batch], parts, strict=True):
                assert torch.equal(split[int(i)], part.transpose(1, 2))


def test_bfloat16_weights_are_what_autocast_makes_of_them(workspace: Workspace) -> None:
    snapshots = [load_snapshot(workspace.snapshot_dir("1e")) for _ in range(2)]
    windows = workspace.windows("dev", snapshots[0].tokenizer)
    cast = Encoder(snapshots[0].model.base_model, {"all": [0, 1, 2]}, "bf16")
    plain = Encoder(snapshots[1].model.base_model, {"all": [0, 1, 2]}, "32")
    plain._precision = "bf16"  # autocast alone, with float32 weights
    rows = np.arange(3)
    assert torch.equal(cast(windows, rows)[0], plain(windows, rows)[0])


def test_batches_cover_the_windows_in_order(workspace: Workspace) -> None:
    encoder = Encoder(
        load_snapshot(workspace.snapshot_dir("1e")).model.base_model, {"all": [0]}, "32"
    )
    lengths = np.random.default_rng(0).integers(30, 387, 50)
    batches = encoder.batches(lengths)
    assert [i for batch in batches for i in range(50)[batch]] == list(range(50))
    assert max(lengths[batch].sum() for batch in batches) <= 1024
    assert encoder.batches(np.array([5000, 1])) == [slice(0, 1), slice(1, 2)]


def test_the_text_side_and_labels_belong_to_the_activations(workspace: Workspace) -> None:
    split = workspace.split("1e", "dev")
    snapshot = load_snapshot(workspace.snapshot_dir("1e"))
    windows = workspace.windows("dev", snapshot.tokenizer)
    questions = workspace.items("dev")
    assert workspace.dataset().task.items_of(split.table()) == questions
    input_ids = split.array("input_ids")
    for i, row in enumerate(split.plan.example_id):
        start, n = split.plan.first_token[i], split.plan.n_tokens[i]
        first = windows.first_token[row]
        np.testing.assert_array_equal(
            input_ids[start : start + n], windows.input_ids[first : first + n]
        )
    np.testing.assert_array_equal(
        split.labels["question_index"], windows.item_index[split.plan.example_id]
    )
    assert split.plan.example_id.tolist() == list(range(len(windows)))  # dev keeps its order


def test_the_same_again_writes_nothing_and_finds_all_whole(workspace: Workspace) -> None:
    again = extract(workspace, "1e", encoding="float32", precision="32", shard_tokens=512)
    assert [done.shards_written for done in again] == [0, 0, 0]
    assert all(
        split.verify() == []
        for split in map(lambda s: workspace.split("1e", s), ("train", "tune", "dev"))
    )


def test_a_transform_has_the_error_asked_for_and_is_extracted_again_bit_for_bit(
    workspace: Workspace, tmp_path: Path
) -> None:
    """Layers of an encoder, coded together: shards of an interrupted extraction are the same."""
    space = workspace.at(str(tmp_path / "coded"))
    asked: dict[str, Any] = {"encoding": "transform:1e-1", "precision": "32", "shard_tokens": 512}
    (done,) = extract(space, "1e", splits=["dev"], **asked)
    assert all(0.05 < error["largest"] < 0.15 for error in done.encoding_error.values())
    split, true = space.split("1e", "dev"), workspace.split("1e", "dev")
    assert split.record.encoding == "transform:0.1"
    assert split.verify() == []
    states = torch.cat([true[i] for i in range(len(true))])
    lost = torch.cat([split[i] for i in range(len(split))]) - states
    assert float((lost / states.std(dim=0)).square().mean().sqrt()) < 0.12
    path = shard_path(split, "hidden_states", 1)
    before = path.read_bytes()
    record_path(split, 1).unlink()
    path.write_bytes(b"")
    (again,) = extract(space, "1e", splits=["dev"], **asked)
    assert again.shards_written == 1
    assert path.read_bytes() == before
    shards = sum(file.stat().st_size for file in path.parents[2].rglob("*") if file.is_file())
    matrices = split.transform.arrays["predictor"], split.transform.arrays["basis"]
    assert again.bytes == done.bytes == shards + sum(values.nbytes for values in matrices)


def test_a_lost_shard_is_computed_again_bit_for_bit(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(workspace.root, root)
    copy = Workspace.find(root)
    split = copy.split("1e", "train")
    record = split.ledger.find_shard(1, split.record)
    record_path(split, 1).unlink()
    shard_path(split, "hidden_states", 1).write_bytes(b"")
    (done,) = extract(
        copy, "1e", splits=["train"], encoding="float32", precision="32", shard_tokens=512
    )
    assert done.shards_written == 1
    assert (
        copy.split("1e", "train").ledger.find_shard(1, copy.split("1e", "train").record) == record
    )


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"encoding": "int8"}, "encoding"),
        ({"precision": "bf16"}, "precision"),
        ({"layers": [0, 2]}, "layers"),
        ({"shard_tokens": 1024}, "(shard_tokens|plan_sha256)"),
    ],
)
def test_another_way_of_extraction_is_refused_by_field(
    workspace: Workspace, options: dict, field: str
) -> None:
    same = {"encoding": "float32", "precision": "32", "shard_tokens": 512}
    with pytest.raises(ProvenanceError, match=f"with {field}"):
        extract(workspace, "1e", **{**same, **options})


@pytest.mark.parametrize(
    ("tag", "options", "error", "message"),
    [
        ("2e", {}, UnknownNameError, r"no snapshot 2e: made are 0\.5e, 1e"),
        ("1e", {"splits": ["test"]}, UnknownNameError, "'test' is no split"),
        ("1e", {"encoding": "int7"}, InputError, "unknown encoding 'int7': choose one of int8"),
        ("1e", {"layers": [3]}, InputError, "hidden states 0 .* to 2"),
        ("1e", {"precision": "16"}, InputError, "choose auto, 32 or bf16"),
    ],
)
def test_bad_requests_are_named(
    workspace: Workspace, tag: str, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        extract(workspace, tag, **options)


def test_a_disk_that_is_too_small_is_refused_before_computing(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workspace.root, tmp_path / "copy", ignore=shutil.ignore_patterns("activations"))
    monkeypatch.setattr(split_extraction, "free_bytes", lambda path: 1000)
    with pytest.raises(DiskSpaceError, match="are needed .* 1 kB are free"):
        extract(Workspace.find(tmp_path / "copy"), "1e")
    assert not (tmp_path / "copy/activations").exists()


@pytest.mark.parametrize(
    ("options", "advised", "not_advised"),
    [
        (
            {"encoding": "float32"},
            r"fewer --layers or take a smaller --encoding \(bfloat16, float16, int8, int4\)$",
            "--pool",
        ),
        (
            {"encoding": "int8", "layers": [1]},
            r"--store or take a smaller --encoding \(int4\)$",
            "--layers",
        ),
        ({"encoding": "int4", "layers": [1]}, r": free some space or name another --store$", "int"),
        ({"encoding": "int4", "tokens": ("mean", "max")}, r"one --pool at a time$", "encoding"),
    ],
)
def test_on_a_small_disk_only_what_helps_is_advised(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict,
    advised: str,
    not_advised: str,
) -> None:
    monkeypatch.setattr(split_extraction, "free_bytes", lambda path: 10)
    with pytest.raises(DiskSpaceError, match=advised) as raised:
        extract(workspace.at(str(tmp_path / "s")), "1e", splits=["dev"], **options)
    assert not_advised not in str(raised.value).partition(" are free: ")[2]


def test_the_number_of_hidden_states_is_checked(workspace: Workspace) -> None:
    snapshot = load_snapshot(workspace.snapshot_dir("1e"))
    encoder = Encoder(snapshot.model.base_model, {"all": [0, 2]}, "32")
    encoder.model.encoder.layer = encoder.model.encoder.layer[:1]
    with pytest.raises(InputError, match="1 hidden states instead of 2"):
        encoder(workspace.windows("dev", snapshot.tokenizer), np.array([0]))


def test_int8_of_a_real_encoder_loses_less_than_one_per_cent_in_every_layer() -> None:
    """All-MiniLM-L6-v2, whose outlier channels are those of a trained BERT."""
    model_folder = quickstart.packaged_encoder()
    paragraphs = make_paragraphs(120, seed=3)
    tokenizer = load_tokenizer(model_folder)
    questions = [
        Question(f"{i}", q.text, p.context, (), True)
        for i, p in enumerate(paragraphs)
        for q in p.questions[:1]
    ]
    windows = question_windows(questions, tokenizer)
    encoder = Encoder(load_model(model_folder), {"all": range(7)}, "32")
    (calibration,) = calibrate(
        encoder, windows, "int8", hidden_size=384, special=tokenizer.all_special_ids
    )
    stats = calibration.stats
    (hidden_states,) = encoder(windows, np.arange(len(windows)))
    restored = decode(*encode(hidden_states, get_encoding("int8"), stats)[:2], stats)
    error = (restored - hidden_states).norm(dim=(0, 2)) / hidden_states.norm(dim=(0, 2))
    assert error.shape == (7,)
    assert float(error.max()) < 0.01


def test_non_finite_hidden_states_name_shard_and_windows(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workspace.root, tmp_path / "copy", ignore=shutil.ignore_patterns("activations"))
    compute = Encoder.__call__

    def broken(self: Encoder, windows: Windows, rows: np.ndarray) -> list[torch.Tensor]:
        hidden_states = compute(self, windows, rows)[0].clone()
        hidden_states[0, 1] = torch.nan
        return [hidden_states]

    monkeypatch.setattr(Encoder, "__call__", broken)
    with pytest.raises(NonFiniteError, match="1e/dev, shard 0, window 0 of .*token 0, layer 1"):
        extract(Workspace.find(tmp_path / "copy"), "1e", splits=["dev"], encoding="float32")
    other = Workspace.find(tmp_path / "copy").at(str(tmp_path / "other"))
    # the calibration sample meets it first
    with pytest.raises(NonFiniteError, match="window 0 of the data, token 0, layer 1"):
        extract(other, "1e", splits=["dev"], encoding="int8")


@pytest.mark.parametrize("tokens", [("all",), ("cls", "mean")])
def test_values_beyond_float16_are_refused_before_a_split_is_begun(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: Any
) -> None:
    """Decoders have such activations; another encoding can be taken for the split then."""
    ignored = shutil.ignore_patterns("activations")
    space = Workspace.find(shutil.copytree(workspace.root, tmp_path / "copy", ignore=ignored))
    compute = Encoder.__call__

    def massive(self: Encoder, windows: Windows, rows: np.ndarray) -> list[torch.Tensor]:
        kinds = [hidden_states.clone() for hidden_states in compute(self, windows, rows)]
        kinds[-1][0, 1, 3] = 1e5
        return kinds

    monkeypatch.setattr(Encoder, "__call__", massive)
    options: dict[str, Any] = {"splits": ["dev"], "tokens": tokens, "precision": "32"}
    where = "1e/dev" if tokens == ("all",) else "1e/dev-mean"
    with pytest.raises(NonFiniteError, match=f"{where}, window 0 .*100000 does not fit float16"):
        extract(space, "1e", encoding="float16", **options)
    assert not (space.root / "activations").exists()
    extract(space, "1e", encoding="bfloat16", **options)


def test_recorded_non_finite_values_are_replaced_and_counted(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workspace.root, tmp_path / "copy", ignore=shutil.ignore_patterns("activations"))
    space = Workspace.find(tmp_path / "copy")
    extract(space, "1e", splits=["dev"], encoding="float32", precision="32")
    truth = space.split("1e", "dev")
    compute = Encoder.__call__

    def broken(self: Encoder, windows: Windows, rows: np.ndarray) -> list[torch.Tensor]:
        hidden_states = compute(self, windows, rows)[0].clone()
        hidden_states[0, 1, 3] = torch.nan
        return [hidden_states]

    monkeypatch.setattr(Encoder, "__call__", broken)
    elsewhere = space.at(str(tmp_path / "elsewhere"))
    extract(elsewhere, "1e", splits=["dev"], precision="32", nonfinite="record")
    split = elsewhere.split("1e", "dev")
    assert split.info()["nonfinite"] >= 1
    stored = torch.cat([split[i] for i in range(len(split))])
    assert stored.isfinite().all()
    true = torch.cat([truth[i] for i in range(len(truth))])
    assert float((stored - true).norm() / true.norm()) < 0.05
