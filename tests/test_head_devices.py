"""Several processes share heads out, and each head is the one that a single process trains."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from processes import Finished, running

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.ranks import Rank
from bertvision.pipelines.training.launch import environment, meeting_place
from bertvision.pipelines.workspace.runs import Run, own_part
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS = ("learned-pooling", "adapter-64-shared", "average-pooling")

RUN = """
import json, os, sys
import torch
torch.set_num_threads(1)
import bertvision
from bertvision.errors import BertvisionError
from bertvision.pipelines.training.lightning import TrainingLog
verb, root, given, rank, step, signum = sys.argv[1:]

def on_train_batch_end(self, trainer, *rest, real=TrainingLog.on_train_batch_end):
    real(self, trainer, *rest)
    if os.environ["RANK"] == rank and trainer.global_step == int(step):
        os.kill(os.getpid(), int(signum))

TrainingLog.on_train_batch_end = on_train_batch_end
try:
    getattr(bertvision, verb)(workspace=root, **json.loads(given))
except BertvisionError as error:
    print(error, file=sys.stderr)
    sys.exit(getattr(error, "exit_code", 2))
"""


def ranks(verb: str, root: Path, given: dict[str, Any], *kill: int) -> list[Finished]:
    """Call a verb in two warm processes; ``kill`` is a rank, a step from 1 and a signal."""
    store = meeting_place()
    arguments = (verb, root, json.dumps(given), *(kill or (-1, 0, 0)))
    with ExitStack() as stack:
        started = [
            stack.enter_context(running(RUN, *arguments, **environment(store, n, 2)))
            for n in range(2)
        ]
        return [child.finished() for child in started]


@pytest.fixture
def copy(workspace: Workspace, tmp_path: Path) -> Path:
    """A workspace without heads."""
    left_out = shutil.ignore_patterns("heads", "report", "ensembles")
    return Path(shutil.copytree(workspace.root, tmp_path / "copy", ignore=left_out))


@pytest.fixture(scope="module")
def alone(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads that one process trained and scored."""
    left_out = shutil.ignore_patterns("heads", "report", "ensembles")
    root = tmp_path_factory.mktemp("alone") / "copy"
    shutil.copytree(workspace.root, root, ignore=left_out)
    bertvision.sweep(HEADS, trained_on="1e", checkpoint="1e", workspace=root, precision="32")
    return root


def _weights(root: Path) -> dict[str, bytes]:
    folder = root / "heads" / "1e"
    return {name: (folder / name / "model.safetensors").read_bytes() for name in HEADS}


def _scores(root: Path) -> list[tuple[str, float]]:
    found = bertvision.results(workspace=root)
    return sorted((row.run, row.score) for row in found if row.run in HEADS)


SWEPT = {"heads": HEADS, "trained_on": "1e", "checkpoint": "1e", "precision": "32"}
TRAINED = {"heads": HEADS, "checkpoint": "1e", "precision": "32"}


def test_a_sweep_of_two_processes_gives_the_heads_and_scores_of_one(
    alone: Path, copy: Path
) -> None:
    """Bit for bit: a head is trained by one process, as it is beside others."""
    done = ranks("sweep", copy, SWEPT)
    assert [each.returncode for each in done] == [0, 0], done
    assert _weights(copy) == _weights(alone)
    assert _scores(copy) == _scores(alone)
    assert len(_scores(copy)) == len(HEADS)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_what_an_ended_process_left_is_finished_by_the_same_command(
    alone: Path, copy: Path, signum: int
) -> None:
    """The heads of the others are whole; one that was stopped goes on where it was."""
    first, second = ranks("train", copy, TRAINED, 1, 2, signum)
    assert first.returncode == 0, first
    assert second.returncode == (128 + signum if signum == signal.SIGTERM else -signum), second
    resumable = list(copy.glob("heads/1e/.run-*/resume.ckpt"))
    assert len(resumable) == (signum == signal.SIGTERM)
    whole = {path.parent.name for path in copy.glob("heads/1e/*/model.safetensors")}
    assert whole == {HEADS[0]}
    again = ranks("train", copy, TRAINED)
    assert [each.returncode for each in again] == [0, 0], again
    assert _weights(copy) == _weights(alone)


@pytest.mark.slow
def test_devices_from_python_give_the_rows_of_all_heads(alone: Path, copy: Path) -> None:
    """With processes that are started afresh, as by the command."""
    found = bertvision.train(HEADS, checkpoint="1e", precision="32", workspace=copy, devices=2)
    assert [row.head for row in found] == list(HEADS)
    assert _weights(copy) == _weights(alone)


@pytest.mark.slow
def test_a_sweep_with_devices_gives_the_rows_of_all_heads(alone: Path, copy: Path) -> None:
    rows = bertvision.sweep(**SWEPT, workspace=copy, devices=2)
    assert sorted(row.name for row in rows) == sorted(HEADS)
    assert _scores(copy) == _scores(alone)


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_more_processes_than_heads_are_refused(copy: Path, verb: str) -> None:
    asked = TRAINED if verb == "train" else SWEPT
    with pytest.raises(InputError, match="4 processes for 3 heads: .* --devices 3 or less"):
        getattr(bertvision, verb)(**asked, workspace=copy, devices=4)
    assert not (copy / "heads").exists()


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_no_devices_are_refused(copy: Path, verb: str) -> None:
    with pytest.raises(InputError, match="--devices"):
        getattr(bertvision, verb)(HEADS, workspace=copy, devices=0)


def test_tensorboard_is_for_one_process(copy: Path) -> None:
    with pytest.raises(InputError, match="--tensorboard is for one process"):
        bertvision.train(**TRAINED, workspace=copy, tensorboard=True, devices=2)


@pytest.mark.parametrize(("heads", "seeds", "count"), [(5, 2, 2), (3, 1, 3), (7, 3, 4)])
def test_every_head_is_the_part_of_one_process_and_seeds_stay_together(
    heads: int, seeds: int, count: int
) -> None:
    runs = [Run(f"head-{head}", seed=seed) for head in range(heads) for seed in range(seeds)]
    parts = [own_part(runs, Rank(number, count)) for number in range(count)]
    assert sorted(run for part in parts for run in part) == sorted(runs)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    passes = [len({run.seed for run in part}) for part in parts]
    assert sum(passes) < count + seeds  # each process that shares a seed with another adds one


@pytest.mark.parametrize(
    ("seen", "there", "claimed"),
    [(None, 2, "1"), (None, 0, None), ("4,7", 2, "7"), ("", 0, ""), ("-1", 0, "-1")],
    ids=repr,
)
def test_a_rank_sees_one_gpu(
    seen: str | None, there: int, claimed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if seen is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = seen
        Rank(number=3, count=4, local=1, local_count=2).claim_device()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == claimed


@pytest.mark.parametrize("seen", [None, "0", "0,1"], ids=repr)
def test_more_ranks_than_gpus_are_refused(
    seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes beyond the last GPU would train on the CPU, and not give the same bits."""
    there = 2 if seen is None else len(seen.split(","))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    for local in range(3):  # all of them, or some would wait for the others
        with pytest.raises(InputError, match=rf"3 processes .* {there} GPUs?: .*-node {there} or"):
            Rank(number=local, count=3, local=local, local_count=3).claim_device()
