"""Training beside the encoder: heads are those of the store, and what is stored is whole."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import run_code
from workspaces import STOP_AT

import bertvision
from bertvision.errors import BertvisionError, InputError, WorkspaceError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.stream import ActivationLoader
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.live import splits as live
from bertvision.pipelines.live.pilot import measure
from bertvision.pipelines.live.splits import ComputedSplit, Splits
from bertvision.pipelines.workspace.job_options import Source, TrainOptions
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ["learned-pooling", "adapter-64-shared"]
TRAINING: dict[str, Any] = {"epochs": 2, "batch_size": 4, "precision": "32", "best_epoch": True}


def copied(workspace: Workspace, root: Path, encoding: str, shard_tokens: int = 512) -> Workspace:
    """A workspace with nothing stored but the first shard of train: many shards are missing."""
    shutil.copytree(
        workspace.root, root, ignore=shutil.ignore_patterns("heads", "activations", "extraction")
    )
    space = Workspace.find(root)
    common: dict[str, Any] = {
        "encoding": encoding,
        "precision": "32",
        "shard_tokens": shard_tokens,
    }
    extract(space, "1e", splits=("train",), shards=[0], **common)
    extract(space, "1e", splits=("tune",), shards=[], **common)
    return space


def trained(space: Workspace, source: str) -> dict[str, bytes]:
    """The files of the weights of the heads."""
    bertvision.train(HEADS, checkpoint="1e", source=source, workspace=space.root, **TRAINING)
    return {name: (space.head_dir("1e", name) / "model.safetensors").read_bytes() for name in HEADS}


def stored(space: Workspace) -> dict[str, bytes]:
    folder = space.root / "activations"
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "lock" not in path.name
    }


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_heads_are_the_same_from_whatever_source(
    workspace: Workspace, tmp_path: Path, encoding: str
) -> None:
    extracted, auto, alive = (
        copied(workspace, tmp_path / name, encoding) for name in ("store", "auto", "live")
    )
    extract(extracted, "1e", splits=("train", "tune"), encoding=encoding, precision="32")
    assert extracted.split("1e", "train").plan.n_shards > 4
    expected, begun = trained(extracted, "store"), stored(alive)
    assert trained(auto, "auto") == expected
    assert stored(auto) == stored(extracted)
    assert not find_damage(auto.split("1e", "train"))
    assert trained(alive, "live") == expected
    assert stored(alive) == begun
    shutil.rmtree(alive.root / "activations")
    with pytest.raises(WorkspaceError, match="was trained on 1e before with"):
        trained(alive, "auto")  # in shards of another size
    assert not any(alive.stored().values())


def test_a_computed_split_keeps_no_more_shards_than_it_may(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space, whole = copied(workspace, tmp_path / "live", "float32"), workspace.split("1e", "train")
    monkeypatch.setattr(live, "MOST_EARLY", 0)
    monkeypatch.setattr(live, "default_buffer", lambda *_: 2)
    with Splits(Source("live")) as splits:
        split = splits(space, "1e", "all", "train")
        assert isinstance(split, ComputedSplit)
        assert 1 == split.passes(1) < split.passes(2) < 2
        loader, same = (ActivationLoader(s, batch_size=5, buffer=4) for s in (split, whole))
        for _ in range(2):
            for batch, expected in zip(loader, same, strict=True):
                assert np.array_equal(batch.decode(), expected.decode())
                assert len(split.ledger.shards()) <= 3  # one more while it is written
    with pytest.raises(BertvisionError):  # its place is gone
        split.read(range(len(split)))


RUN = (
    STOP_AT
    + """
import bertvision
from bertvision.pipelines.training import train as training
run = training.train
training.train = lambda *given, **named: run(*given, resume_every_seconds=0, **named)
bertvision.train(sys.argv[4:], checkpoint="1e", source="auto", workspace=sys.argv[3],
                 epochs=2, batch_size=4, precision="32", best_epoch=True)
"""
)


def test_a_training_that_is_killed_in_its_first_epoch_goes_on(
    workspace: Workspace, tmp_path: Path
) -> None:
    killed, undisturbed = (
        copied(workspace, tmp_path / name, "float32", 128)  # more shards than are read ahead
        for name in ("killed", "undisturbed")
    )
    arguments = [str(killed.root), *HEADS]
    assert run_code(RUN, "1", str(int(signal.SIGKILL)), *arguments).returncode == -signal.SIGKILL
    assert killed.split("1e", "train").missing_shards()
    assert run_code(RUN, "0", "0", *arguments).returncode == 0
    assert trained(killed, "store") == trained(undisturbed, "auto")
    assert stored(killed) == stored(undisturbed)


def test_what_finds_no_room_is_computed_in_each_epoch(
    workspace: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    space = copied(workspace, tmp_path / "full", "float32")
    begun = stored(space)
    monkeypatch.setattr(live, "free_bytes", lambda _: 1000)
    with caplog.at_level("INFO"):
        trained(space, "auto")
    assert "1e/train is computed as heads need it, and not stored, since" in caplog.text
    assert "to store it, and 1" in caplog.text
    assert stored(space) == begun


def test_room_is_needed_for_what_is_missing_alone(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = copied(workspace, tmp_path / "nearly", "float32")
    shards = space.split("1e", "train").plan.n_shards
    common: dict[str, Any] = {"encoding": "float32", "precision": "32", "shard_tokens": 512}
    extract(space, "1e", splits=("train",), shards=range(shards - 1), **common)
    extract(space, "1e", splits=("tune",), **common)
    monkeypatch.setattr(live, "free_bytes", lambda _: 2 << 20)  # less than the split takes
    trained(space, "auto")
    assert space.split("1e", "train").is_complete


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("disk", {}, "--source disk: choose store, auto or live"),
        ("store:int8", {}, "--source store:int8: choose"),
        ("live:int3", {}, "--source live:int3: .*'int3'"),
        ("live:", {}, "--source live:: choose"),
        ("auto", {"devices": 2}, "--source auto is for one process"),
        ("auto:int4", {}, "encoding = 'float32'"),  # that the split was begun in
    ],
)
def test_a_source_that_cannot_be_is_refused(
    workspace: Workspace, tmp_path: Path, source: str, options: dict[str, Any], message: str
) -> None:
    space = copied(workspace, tmp_path / "space", "float32")
    with pytest.raises(bertvision.BertvisionError, match=message):
        bertvision.train(HEADS, checkpoint="1e", source=source, workspace=space.root, **options)


def test_what_is_stored_while_heads_train_has_the_costs_of_an_extraction(
    workspace: Workspace, tmp_path: Path
) -> None:
    space = copied(workspace, tmp_path / "auto", "float32")
    shutil.rmtree(space.root / "extraction", ignore_errors=True)
    trained(space, "auto")
    record = json.loads((space.root / "extraction/1e/train.json").read_text())
    split = space.split("1e", "train")
    assert record["examples_written"] == len(split) - len(split.plan.examples_of(0))
    assert 0 < record["encoder_seconds"] < record["seconds"]


def test_a_layer_that_there_is_not_is_refused_before_anything_is_written(
    workspace: Workspace, tmp_path: Path
) -> None:
    space = copied(workspace, tmp_path / "space", "float32")
    shutil.rmtree(space.root / "activations")
    with pytest.raises(InputError, match="layers .99.: the encoder has hidden states 0"):
        bertvision.train(
            "learned-pooling@l99", checkpoint="1e", source="auto", workspace=space.root
        )
    assert not (space.root / "activations").exists()


def test_a_pilot_measures_without_keeping_anything(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = copied(workspace, tmp_path / "space", "float32")
    begun = stored(space)
    costs = measure(space, [Run("learned-pooling")], "1e", TrainOptions(epochs=5), seconds=0.2)
    assert stored(space) == begun
    assert not (space.root / "heads").exists()
    split = workspace.split("1e", "train")
    assert costs.windows == len(split)
    assert costs.bytes == split.info()["bytes"] < costs.needed
    assert costs.encoder_passes == 1  # all shards have room in the shuffle buffer
    monkeypatch.setattr(live, "MOST_EARLY", 0)
    monkeypatch.setattr(live, "default_buffer", lambda *_: 2)
    costs = measure(space, [Run("learned-pooling")], "1e", TrainOptions(epochs=5), seconds=0.2)
    assert 4 < costs.encoder_passes < 5  # two shards are there when an epoch begins
    passes = costs.encoder_passes
    assert costs.live_seconds == pytest.approx(passes * costs.encoder_seconds)
    both = measure(
        *(space, [Run("learned-pooling"), Run("cls-learned-pooling")], "1e"),
        TrainOptions(epochs=5),
        seconds=0.2,
    )
    assert both.encoder_passes == passes + 1  # the one shard of [CLS] is computed once
    assert costs.bytes < both.bytes
    assert both.live_seconds < 5 * both.encoder_seconds


def test_a_plan_says_which_source_to_take(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "MOST_EARLY", 0)
    monkeypatch.setattr(live, "default_buffer", lambda *_: 2)
    costs = bertvision.plan(
        "learned-pooling", checkpoint="1e", epochs=3, seeds=2, workspace=workspace.root
    )
    store, auto, alive = costs.rows
    assert (store.source, auto.source, alive.source) == ("store", "auto", "live")
    assert 5 < costs.encoder_passes < 6
    assert store.encoder_seconds == auto.encoder_seconds < alive.encoder_seconds
    assert alive.seconds == alive.encoder_seconds + alive.training_seconds
    assert (alive.bytes, costs.source) == (0, "auto")
    assert "Take --source auto: without a store the encoder goes over the data 5." in str(costs)


def _hold(told: Connection) -> None:
    """Use a folder as a live run does, until it is killed."""
    with live.temporary_folder() as folder:
        (folder / "shard").write_bytes(b"x")
        told.send(folder)
        signal.pause()


def test_the_folders_of_killed_runs_are_removed_by_the_next_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    killed, alive = (fork.Process(target=_hold, args=(there,)) for _ in range(2))
    killed.start()
    left = here.recv()
    alive.start()
    kept = here.recv()
    killed.kill()
    killed.join()
    mine = tmp_path / "bertvision-livestock"
    link, linked, empty = (tmp_path / f"bertvision-live-{name}" for name in ("a", "b", "c"))
    mine.mkdir()
    (mine / "file").touch()
    link.symlink_to(mine)
    linked.mkdir()
    (linked / "inside").symlink_to(mine)
    empty.mkdir()  # its process may be about to lock it
    assert left.is_dir()
    with live.temporary_folder() as own:
        assert {*tmp_path.iterdir()} == {own, kept, mine, link, empty}
    assert (mine / "file").exists()
    assert (kept / "shard").exists()
    alive.terminate()
    alive.join()


def test_the_folders_of_other_users_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "bertvision-live-other"
    other.mkdir()
    (other / "shard").touch()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(other).st_uid + 1)
    with live.temporary_folder():
        assert (other / "shard").exists()
