"""Training: heads in company are heads alone, and an interruption changes nothing."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytorch_lightning as pl
import torch
from byhand import change, fields
from processes import run_code
from pytorch_lightning.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from stores import shard_path
from workspaces import STOP_AT

from bertvision.errors import (
    CorruptStoreError,
    InputError,
    NonFiniteError,
    ProvenanceError,
    UnknownNameError,
    WorkspaceError,
)
from bertvision.featurestore.format.plan import ShardPlan
from bertvision.featurestore.sampler import Sampler
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader
from bertvision.models.convolution import recompute_statistics
from bertvision.models.heads import SpanHead
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks.squad.metrics import squad_metrics
from bertvision.pipelines.training.datamodule import ActivationDataModule
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.module import build_heads
from bertvision.pipelines.training.resume import ResumeFile
from bertvision.pipelines.training.train import own_seconds, train
from bertvision.pipelines.training.trained_head import load_head
from bertvision.pipelines.workspace.heads import ResidentActivations, only_tag, trained_heads
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import (
    RunTraining,
    read_run_config,
    read_run_metrics,
)
from bertvision.pipelines.workspace.reproduce import training_command
from bertvision.pipelines.workspace.runs import Run, ranks
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ["learned-pooling", "adapter-64-shared", "adapter-64-shared-skip"]
OPTIONS = TrainOptions(epochs=3, batch_size=4, precision="32")


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    """The shared workspace's data under a root of this test's own."""
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    return Workspace.find(root)


def weights(space: Workspace, name: str, tag: str = "1e") -> dict[str, torch.Tensor]:
    return load_file(space.head_dir(tag, name) / "model.safetensors")


def test_heads_trained_together_are_heads_trained_alone(space: Workspace) -> None:
    together = train(space, HEADS, "1e", OPTIONS)
    found = {name: weights(space, name) for name in HEADS}
    shutil.rmtree(space.root / "heads")
    for name, metrics in zip(HEADS, together, strict=True):
        (alone,) = train(space, [name], "1e", OPTIONS)
        for key, value in weights(space, name).items():
            assert torch.equal(found[name][key], value)
        assert alone.loss == metrics.loss


PARTS = ["adapter-64-shared", "adapter-64-shared@f0.35", "learned-pooling@f0.1", "learned-pooling"]


def test_parts_of_the_data_trained_in_one_pass_are_parts_trained_alone(space: Workspace) -> None:
    together = train(space, PARTS, "1e", OPTIONS)
    found = {name: weights(space, name) for name in PARTS}
    examples = len(space.split("1e", "train"))
    assert [m.examples for m in together] == [
        examples,
        round(0.35 * examples),
        round(0.1 * examples),
        examples,
    ]
    assert [m.steps for m in together] == [3 * -(-m.examples // 4) for m in together]
    shutil.rmtree(space.root / "heads")
    for name in PARTS:
        train(space, [name], "1e", OPTIONS)
        assert all(torch.equal(found[name][k], x) for k, x in weights(space, name).items())


def test_heads_on_a_device_are_heads_from_the_store_with_one_read_for_all_passes(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["learned-pooling@s0", "learned-pooling@s1", "adapter-64-shared@l0-1"]
    train(space, names, "1e", OPTIONS)
    expected = {name: weights(space, Run.parse(name).name) for name in names}
    shutil.rmtree(space.root / "heads")
    opened: list[int] = []
    open_shard = ActivationSplit.open_shard
    monkeypatch.setattr(
        ActivationSplit, "open_shard", lambda self, i: (opened.append(i), open_shard(self, i))[1]
    )
    splits = ResidentActivations("cpu", list(map(Run.parse, names)), None)
    train(space, names, "1e", OPTIONS, splits=splits)
    assert sorted(opened) == list(range(space.split("1e", "train").plan.n_shards))
    for name, before in expected.items():
        for key, value in weights(space, Run.parse(name).name).items():
            assert torch.equal(before[key], value)


def test_statistics_of_a_head_are_of_its_own_examples_and_last_weights(space: Workspace) -> None:
    name = "cnn-1xn@f0.5"
    train(space, [name, "learned-pooling"], "1e", OPTIONS)
    found = weights(space, name)
    shutil.rmtree(space.root / "heads")
    (alone,) = train(space, [name], "1e", OPTIONS)
    assert all(torch.equal(value, found[key]) for key, value in weights(space, name).items())
    split = ActivationStore.open(space.activations)["1e"]["train"]
    own = ranks(split.plan.example_id, 0).argsort()[: alone.examples]
    batches = [split.read(own[i : i + 4].tolist()) for i in range(0, len(own), 4)][:16]
    head = load_head(space.head_dir("1e", name)).module
    for module in head.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.add_(1)
    recompute_statistics(head, [(b.decode(), b.lengths) for b in batches])
    for key, value in head.state_dict().items():
        torch.testing.assert_close(value, found[key], rtol=1e-5, atol=1e-6)


def test_heads_of_one_pass_share_what_is_no_ones_own() -> None:
    """100 s, of which 30 went into steps; the slow step met another process."""
    small, large = Run("learned-pooling"), Run("adapter-64-shared")
    found = own_seconds(100.0, {small: [1.0, 1.0, 1.0, 7.0], large: [5.0, 5.0, 5.0, 5.0]})
    assert found == {small: 35 + 4 * 1.0, large: 35 + 4 * 5.0}
    assert own_seconds(8.0, {small: []}) == {small: 8.0}


def test_a_run_says_which_shuffle_buffer_it_saw(space: Workspace) -> None:
    train(space, ["learned-pooling"], "1e", OPTIONS)
    config = read_run_config(space.head_dir("1e", "learned-pooling"))
    loader = ActivationLoader(space.split("1e", "train"))
    assert f"buffer={config.buffer})" in str(loader.state_dict()["sampler"])
    (again,) = train(space, ["learned-pooling"], "1e", OPTIONS)  # trained: nothing is refused
    assert again == read_run_metrics(space.head_dir("1e", "learned-pooling"))


def test_a_part_of_none_is_the_head_as_it_is_made(space: Workspace) -> None:
    (metrics,) = train(space, ["adapter-64-shared@f0"], "1e", OPTIONS)
    assert (metrics.steps, metrics.examples, metrics.loss) == (0, 0, None)
    assert metrics.own_seconds == 0
    run = Run("adapter-64-shared")
    made = build_heads([run], layers=3, hidden=32)[run].state_dict()
    assert all(torch.equal(made[k], x) for k, x in weights(space, "adapter-64-shared@f0").items())
    (result,) = evaluate(space, ["adapter-64-shared@f0"], trained_on="1e", tag="1e")
    assert result.head == "adapter-64-shared@f0"


def test_seeds_are_trainings_of_their_own(space: Workspace) -> None:
    names = ["learned-pooling", "learned-pooling@s1"]
    train(space, names, "1e", OPTIONS)
    first, second = (weights(space, name)["output.weight"] for name in names)
    assert not torch.equal(first, second)
    shutil.rmtree(space.root / "heads")
    train(space, names[1:], "1e", OPTIONS)
    assert torch.equal(weights(space, names[1])["output.weight"], second)


def test_the_best_epoch_is_the_one_with_the_lowest_held_out_loss(space: Workspace) -> None:
    name = "adapter-386-independent"  # enough parameters to overfit 70 windows
    options = replace(OPTIONS, epochs=5, lr=1e-2, best_epoch=True)
    (metrics,) = train(space, [name], "1e", options)
    losses = metrics.held_out_losses
    assert len(losses) == 5
    assert metrics.epoch == losses.index(min(losses)) + 1 < 5
    kept = weights(space, name)
    shorter = replace(options, epochs=metrics.epoch, best_epoch=False)
    train(space, [name], "1e", shorter, overwrite=True)
    assert all(torch.equal(kept[k], x) for k, x in weights(space, name).items())


def test_training_learns_and_writes_what_it_says(space: Workspace) -> None:
    (metrics,) = train(space, ["adapter-64-shared"], "1e", OPTIONS)
    folder = space.head_dir("1e", "adapter-64-shared")
    assert sorted(p.name for p in folder.iterdir()) == [
        "config.json",
        "log.csv",
        "metrics.json",
        "model.safetensors",
    ]
    losses = [float(line.split(",")[1]) for line in (folder / "log.csv").read_text().split()[1:]]
    assert len(losses) == metrics.steps == 3 * -(-len(space.split("1e", "train")) // 4)
    assert sum(losses[-10:]) < sum(losses[:10])
    assert metrics.total == sum(v.numel() for v in weights(space, "adapter-64-shared").values())
    assert 0 <= metrics.wait_seconds <= metrics.seconds
    assert json.loads((folder / "config.json").read_text())["layers"] == [0, 1, 2]
    assert not list((space.root / "heads/1e").glob(".run-*"))


RUN = (
    STOP_AT
    + """
from dataclasses import replace
from pathlib import Path
from bertvision.pipelines.training.resume import StoppedError
from bertvision.pipelines.training.resume import ResumeFile
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

space = Workspace.find(Path(sys.argv[3]))
options = TrainOptions(epochs=3, batch_size=4, precision="32", best_epoch=True)
try:
    train(space, sys.argv[4:], "1e", options, resume_every_seconds=0)
except StoppedError as stopped:
    sys.exit(stopped.exit_code)
"""
)


RESUMED = ["learned-pooling", "adapter-64-shared@f0.55"]  # the second waits for examples


@pytest.fixture(scope="module")
def undisturbed(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with heads whose training was not interrupted."""
    root = tmp_path_factory.mktemp("undisturbed") / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    train(space := Workspace.find(root), RESUMED, "1e", replace(OPTIONS, best_epoch=True))
    return space


@pytest.mark.parametrize(
    "stops",
    [
        [(signal.SIGKILL, 2, -3)],
        [(signal.SIGTERM, 1, 0), (signal.SIGTERM, 2, 0)],
        [(signal.SIGINT, 1, 0), (signal.SIGINT, 1, 1)],
    ],
    ids=["killed in an epoch", "stopped at two ends of epochs", "stopped at an end and after"],
)
def test_an_interrupted_training_ends_bit_for_bit_the_same(
    space: Workspace, undisturbed: Workspace, stops: list[tuple[signal.Signals, int, int]]
) -> None:
    same = {"steps", "examples", "loss", "epoch", "held_out_losses"}

    def run(how: int, step: int) -> int:
        arguments = [str(step), str(how), str(space.root), *RESUMED]
        return run_code(RUN, *arguments).returncode

    for how, epochs, steps in stops:
        step = epochs * -(-len(space.split("1e", "train")) // 4) + steps
        assert run(int(how), step) == (-how if how == signal.SIGKILL else 128 + how)
        assert not trained_heads(space)
    assert run(0, 0) == 0
    for name in RESUMED:
        whole = weights(undisturbed, name)
        assert all(torch.equal(whole[k], v) for k, v in weights(space, name).items())
        found, told = (
            read_run_metrics(at.head_dir("1e", name)).model_dump(include=same)
            for at in (space, undisturbed)
        )
        assert found == told
        lines = (space.head_dir("1e", name) / "log.csv").read_text().split()
        assert [int(line.split(",")[0]) for line in lines[1:]] == list(range(1, len(lines)))


def test_an_interrupted_training_goes_on_beside_a_head_that_was_there(space: Workspace) -> None:
    names = ["learned-pooling", "adapter-64-shared"]
    options = replace(OPTIONS, best_epoch=True)
    train(space, names[:1], "1e", options)
    there = space.head_dir("1e", names[0]) / "model.safetensors"
    written = there.stat().st_mtime_ns
    for step, expected in ((7, 128 + signal.SIGINT), (0, 0)):
        arguments = [str(step), str(int(signal.SIGINT)), str(space.root), *names]
        assert run_code(RUN, *arguments).returncode == expected
    assert there.stat().st_mtime_ns == written
    assert [name for _, name in trained_heads(space)] == sorted(names)
    assert not list((space.root / "heads/1e").glob(".run-*"))


def test_a_head_that_diverges_is_not_saved_and_does_not_stop_the_others(space: Workspace) -> None:
    class Diverging(LastLayer):
        def features(self, hidden_states: torch.Tensor, lengths: torch.Tensor) -> list:
            return [hidden_states[:, -1] * float("nan")]

    module = types.ModuleType("diverging")
    module.Head = Diverging  # type: ignore[attr-defined]
    sys.modules["diverging"] = module
    try:
        with pytest.raises(
            NonFiniteError, match=r"diverging-head diverged on 1e.*The other heads are saved"
        ):
            train(space, ["diverging:Head", "learned-pooling"], "1e", OPTIONS)
        assert [name for _, name in trained_heads(space)] == ["learned-pooling"]
        with pytest.raises(NonFiniteError, match=r"diverging-head.*--lr"):
            train(space, ["diverging:Head"], "1e", OPTIONS)
    finally:
        del sys.modules["diverging"]


def test_code_of_somebody_else_is_imported_only_where_it_was_named(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(space, HEADS[:1], "1e", OPTIONS)
    path = space.head_dir("1e", HEADS[0]) / "config.json"
    change(path, head="somebody:Head")
    with pytest.raises(InputError, match="somebody:Head.*code of somebody's own: name it"):
        evaluate(space, HEADS[:1], trained_on="1e", tag="1e")
    assert "somebody" not in sys.modules


@pytest.mark.parametrize("damage", ["{}", "[]", '{"head": 5, "layers": 3}', "no json"])
def test_a_damaged_head_is_named_and_trained_again(space: Workspace, damage: str) -> None:
    train(space, HEADS[:1], "1e", OPTIONS)
    folder = space.head_dir("1e", HEADS[0])
    kept = weights(space, HEADS[0])
    (folder / "config.json").write_text(damage)
    with pytest.raises(WorkspaceError, match=r"damaged.*--overwrite"):
        evaluate(space, HEADS[:1], trained_on="1e", tag="1e")
    train(space, HEADS[:1], "1e", OPTIONS, overwrite=True)
    (folder / "model.safetensors").write_bytes(b"short")
    train(space, HEADS[:1], "1e", OPTIONS)  # not taken for trained
    assert all(torch.equal(kept[k], x) for k, x in weights(space, HEADS[0]).items())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_no_flipped_bit_of_a_head_is_scored(
    space: Workspace, name: str, tried: Callable[[int, str], None]
) -> None:
    """One bit of the weights moved a score by some tenths, without a word."""
    train(space, HEADS[:1], "1e", OPTIONS)
    path = space.head_dir("1e", HEADS[0]) / name
    whole = path.read_bytes()
    kept = {name: x.clone() for name, x in weights(space, HEADS[0]).items()}  # of no mapped file
    positions = range(0, len(whole), max(1, len(whole) // 7))
    tried(len(positions), "flipped bits")
    for position in positions:
        path.write_bytes(flipped(whole, position))
        with pytest.raises(WorkspaceError, match=r"damaged.*--overwrite"):
            load_head(path.parent)
    with pytest.raises(WorkspaceError, match=r"is not as it was written: give --overwrite|damaged"):
        train(space, HEADS[:1], "1e", OPTIONS)  # what was trained is not replaced unasked
    path.unlink()
    with pytest.raises(WorkspaceError, match=r"damaged.*--overwrite|there is no .*train"):
        load_head(path.parent)
    train(space, HEADS[:1], "1e", OPTIONS)  # without it there is no trained head
    assert all(torch.equal(kept[k], x) for k, x in weights(space, HEADS[0]).items())


def test_the_resume_file_of_another_training_is_refused_by_name(space: Workspace) -> None:
    begun = {}
    for name in ("learned-pooling", "adapter-64-shared"):
        arguments = ["2", str(int(signal.SIGTERM)), str(space.root), name]
        assert run_code(RUN, *arguments).returncode == 128 + signal.SIGTERM
        (begun[name],) = set(space.root.glob("heads/1e/.*/resume.ckpt")) - set(begun.values())
    shutil.copy(*begun.values())
    with pytest.raises(WorkspaceError, match="resume.ckpt belongs to another run") as error:
        train(space, ["adapter-64-shared"], "1e", replace(OPTIONS, best_epoch=True))
    assert str(begun["adapter-64-shared"]) in str(error.value)
    assert not trained_heads(space)


def test_no_flipped_bit_of_a_resume_file_is_gone_on_with(
    tmp_path: Path, tried: Callable[[int, str], None]
) -> None:
    """It ended as another head, and nothing said so."""
    state = {"global_step": 3, "weights": torch.arange(300.0), "moments": [torch.ones(7)]}
    torch.save(state, tmp_path / "resume.ckpt")
    whole, refused = (tmp_path / "resume.ckpt").read_bytes(), 0
    tried(len(range(0, len(whole), 13)), "flipped bits")
    for position in range(0, len(whole), 13):
        (tmp_path / "resume.ckpt").write_bytes(flipped(whole, position))
        try:
            found = ResumeFile(tmp_path / "resume.ckpt").find()
        except WorkspaceError as error:
            assert "delete it to start this training again" in str(error)  # noqa: PT017
            refused += 1
        else:  # of what pads the file
            assert found is not None
            again = torch.load(found, weights_only=True)
            assert again["global_step"] == 3
            assert torch.equal(again["weights"], state["weights"])
            assert torch.equal(again["moments"][0], torch.ones(7))
    assert refused > len(whole) // 13 // 2


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


def test_the_same_again_does_nothing_and_other_options_are_refused(space: Workspace) -> None:
    train(space, HEADS[:1], "1e", OPTIONS)
    before = (space.head_dir("1e", HEADS[0]) / "model.safetensors").stat().st_mtime_ns
    train(space, HEADS[:1], "1e", OPTIONS)
    assert (space.head_dir("1e", HEADS[0]) / "model.safetensors").stat().st_mtime_ns == before
    other = replace(OPTIONS, lr=1e-4)
    with pytest.raises(WorkspaceError, match=r"lr = 0\.001, now .*lr = 0\.0001.*--overwrite"):
        train(space, HEADS[:1], "1e", other)
    train(space, HEADS[:1], "1e", other, overwrite=True)
    assert (space.head_dir("1e", HEADS[0]) / "model.safetensors").stat().st_mtime_ns != before


def test_heads_that_differ_in_their_settings_stand_beside_each_other_by_name(
    space: Workspace,
) -> None:
    options = TrainOptions(precision="32", lr=0.01)
    names = ["learned-pooling", "learned-pooling@l2@e2", "learned-pooling@lr0.002"]
    train(space, names, "1e", options)
    trained = {name: read_run_config(space.head_dir("1e", name)) for name in names}
    assert [config.layers for config in trained.values()] == [(0, 1, 2), (2,), (0, 1, 2)]
    assert [config.training.epochs for config in trained.values()] == [1, 2, 1]
    assert [config.training.lr for config in trained.values()] == [0.01, 0.01, 0.002]
    alone = replace(options, layers=(2,), epochs=2)
    train(space, ["learned-pooling"], "0.5e", alone)
    train(space, ["learned-pooling@l2@e2"], "0.5e", options)
    for key, value in weights(space, "learned-pooling", "0.5e").items():
        assert torch.equal(weights(space, "learned-pooling@l2@e2", "0.5e")[key], value)
    with pytest.raises(WorkspaceError, match=r"name of its own .*: learned-pooling@l0-2$"):
        train(space, ["learned-pooling"], "1e", replace(options, layers=(0, 2)))
    command = training_command(trained["learned-pooling@l2@e2"], 3)
    assert "learned-pooling@l2@e2 " in command
    assert "--epochs" not in command
    assert "--layers" not in command
    evaluate(space, names, trained_on="1e", tag="1e")
    systems = {row["name"] for row in read_rows(space).heads if row["trained_on"] == "1e"}
    assert set(names) <= systems


def test_evaluation_scores_the_predictions_it_writes_also_across_snapshots(
    space: Workspace,
) -> None:
    train(space, HEADS, "0.5e", OPTIONS)
    for tag in ("0.5e", "1e"):
        for result in evaluate(space, HEADS, trained_on="0.5e", tag=tag, precision="32"):
            folder = space.head_dir("0.5e", result.head) / "eval" / tag
            predictions = json.loads((folder / "predictions.json").read_text())
            official = squad_metrics(predictions, space.items("dev"))
            assert result.rules["n-best"]["metrics"] == official
            assert {"HasAns_f1", "NoAns_f1"} <= official.keys()
            assert result.threshold_tuned_on == "tune"


class LastLayer(SpanHead):
    """A head of the user's own."""

    def __init__(self, *, layers: int, hidden: int) -> None:
        super().__init__(layers=layers, hidden=hidden, width=hidden)

    def features(self, hidden_states: torch.Tensor, lengths: torch.Tensor) -> list[torch.Tensor]:
        return [hidden_states[:, -1]]


def test_a_head_of_ones_own_trains_and_evaluates_by_its_dotted_path(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "own_heads", sys.modules[__name__])
    train(space, ["own_heads:LastLayer"], "1e", OPTIONS)
    evaluate(space, ["own_heads:LastLayer"], trained_on="1e", tag="1e")
    assert [name for _, name in trained_heads(space)] == ["own_heads-lastlayer"]


def test_layers_may_be_a_subset(space: Workspace) -> None:
    train(space, ["learned-pooling"], "1e", replace(OPTIONS, layers=(1, 2)))
    head = load_head(space.head_dir("1e", "learned-pooling"))
    assert head.config.layers == (1, 2)
    evaluate(space, ["learned-pooling"], trained_on="1e", tag="0.5e")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: train(s, ["adaptr-64-shared"], "1e", OPTIONS), UnknownNameError, "adapter-64"),
        (lambda s: train(s, [], "1e", OPTIONS), InputError, "at least one"),
        (lambda s: train(s, ["learned-pooling@f0.001"], "1e", OPTIONS), InputError, "none of 1e/"),
        (lambda s: train(s, HEADS, "2e", OPTIONS), UnknownNameError, "no activations of 2e"),
        (
            lambda s: train(s, ["cls-learned-pooling"], "1e", OPTIONS),
            UnknownNameError,
            "these heads read train-cls, .*extract --checkpoint 1e --split train --pool "
            "cls`.*span heads, see `bertvision heads --kind span`",
        ),
        (
            lambda s: evaluate(s, HEADS[:1], trained_on="1e", tag="1e"),
            UnknownNameError,
            "no head learned-pooling was trained on 1e.*bertvision train",
        ),
        (
            lambda _: only_tag(["0.5e", "1e"], "snapshots"),
            UnknownNameError,
            r"0\.5e, 1e.*--checkpoint",
        ),
    ],
)
def test_bad_requests_are_named(space: Workspace, call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(space)


def test_a_damaged_head_and_activations_of_another_model_are_refused(space: Workspace) -> None:
    train(space, HEADS[:1], "1e", OPTIONS)
    path = space.head_dir("1e", HEADS[0]) / "config.json"
    change(path, activations={**fields(path)["activations"], "model": "another"})
    sums = {**fields(path.with_name("metrics.json"))["sha256"], path.name: sha256_of_files([path])}
    change(path.with_name("metrics.json"), sha256=sums)
    with pytest.raises(ProvenanceError, match="model = 'another'"):
        evaluate(space, HEADS[:1], trained_on="1e", tag="1e")
    weights_path = space.head_dir("1e", HEADS[0]) / "model.safetensors"
    weights_path.write_bytes(weights_path.read_bytes()[:-5])
    with pytest.raises(WorkspaceError, match="damaged.*train it again"):
        load_head(space.head_dir("1e", HEADS[0]))


def test_a_damaged_shard_stops_training_with_its_name_and_leaves_no_head(
    space: Workspace,
) -> None:
    path = shard_path(space.split("1e", "train"), "hidden_states", 1)
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    started, threads = time.monotonic(), threading.active_count()
    with pytest.raises(CorruptStoreError, match="1e/train shard 1.*store repair"):
        train(space, HEADS[:1], "1e", OPTIONS)
    assert time.monotonic() - started < 30  # most of it is the start of the training
    assert threading.active_count() == threads
    assert not trained_heads(space)


class Recorder(pl.LightningModule):
    """Records which examples came, and trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        assert batch.hidden_states.shape[1:] == (3, 32)
        self.seen.append(batch.examples.tolist())
        return self.weight * batch.hidden_states.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_data_module_resumes_any_lightning_training_inside_an_epoch(
    workspace: Workspace, tmp_path: Path
) -> None:
    def fit(ckpt_path: Path | None, *callbacks: pl.Callback) -> list[list[int]]:
        module = Recorder()
        trainer = pl.Trainer(
            max_epochs=3,
            logger=False,
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = ActivationDataModule(workspace.activations, "1e", batch_size=4, seed=3)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return module.seen

    every = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    ended = ModelCheckpoint(
        tmp_path, filename="{epoch}", save_on_train_epoch_end=True, save_top_k=-1
    )
    whole = fit(None, every, ended)
    per_epoch = len(whole) // 3
    for step in (1, per_epoch - 1, per_epoch, per_epoch + 2, 2 * per_epoch):
        assert fit(tmp_path / f"step={step}.ckpt") == whole[step:]
    assert fit(tmp_path / "epoch=0.ckpt") == whole[per_epoch:]


@dataclass(frozen=True)
class ByLength(Sampler):
    """An order of one's own."""

    longest_first: bool = False

    def sequence(self, plan: ShardPlan, epoch: int, world_size: int) -> npt.ArrayLike:
        return np.argsort(-plan.n_tokens if self.longest_first else plan.n_tokens, kind="stable")


def test_a_trainer_validates_on_another_split_in_its_stored_order(workspace: Workspace) -> None:
    class Validated(Recorder):
        def validation_step(self, batch, batch_idx: int) -> None:
            self.validated += batch.examples.tolist()

    data = ActivationDataModule(workspace.activations, "1e", batch_size=4, val="dev")
    module = Validated()
    module.validated = []
    trainer = pl.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
    )
    trainer.fit(module, datamodule=data)
    assert module.validated == [*range(4), *range(24)]  # first the trial that Lightning makes
    assert sorted(example for batch in module.seen for example in batch) == list(range(72))
    module.validated = []
    trainer.validate(module, datamodule=data)
    assert module.validated == list(range(24))


def test_the_data_module_takes_a_sampler_and_resumes_with_no_other(workspace: Workspace) -> None:
    def data(**options: Any) -> ActivationDataModule:
        return ActivationDataModule(workspace.activations, "1e", batch_size=4, **options)

    first = data(sampler=ByLength())
    batches = iter(first.train_dataloader())
    drawn = [next(batches).examples.tolist() for _ in range(3)]
    state = first.state_dict()
    again = data(sampler=ByLength())
    again.load_state_dict(state)
    drawn += [batch.examples.tolist() for batch in again.train_dataloader()]
    plan = workspace.split("1e", "train").plan
    assert [i for batch in drawn for i in batch] == np.argsort(
        plan.n_tokens, kind="stable"
    ).tolist()
    for other in (data(), data(sampler=ByLength(longest_first=True))):
        other.load_state_dict(state)
        with pytest.raises(InputError, match=r"of ByLength\(longest_first=False\), .* the same"):
            other.train_dataloader()


def test_every_option_of_training_is_recorded_with_the_run() -> None:
    """A record leaves out names that it does not know, so that a new option would be lost."""
    options = {field.name for field in dataclass_fields(TrainOptions)} - {"layers", "pool"}
    assert options | {"seed", "fraction"} == set(RunTraining.model_fields)
