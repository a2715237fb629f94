"""The list of results: complete, in order, traceable to files and commands."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from byhand import change, fields
from labs import HEADS, scored_copy
from typer.testing import CliRunner

import bertvision
from bertvision import cli
from bertvision.errors import WorkspaceError
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import RunConfig
from bertvision.pipelines.workspace.reproduce import training_command
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

CONFIG: dict[str, Any] = {
    "head": "adapter-386-shared",
    "kind": "span",
    "trained_on": "0.3e",
    "layers": [0, 1, 2],
    "hidden_size": 32,
    "encoding": "int8",
    "training": {**asdict(TrainOptions(precision="bf16")), "seed": 0, "fraction": 1.0},
    "activations": {},
}


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


def test_every_result_is_there_once_and_in_order(lab: Workspace) -> None:
    ensemble(lab, HEADS[:1], with_bert=True, trained_on="0.5e", tag="1e")
    for name in ("10e", "2e"):
        shutil.copytree(lab.bert_dir("1e"), lab.bert_dir(name))
    found = read_results(lab)
    assert [(r.trained_on, r.checkpoint, r.system, r.run) for r in found] == [
        ("0.5e", "0.5e", "bert", "bert"),
        ("0.5e", "0.5e", "head", HEADS[0]),
        ("0.5e", "0.5e", "head", HEADS[1]),
        ("0.5e", "1e", "head", HEADS[0]),
        ("0.5e", "1e", "head", HEADS[1]),
        ("0.5e", "1e", "ensemble", f"max-bert+{HEADS[0]}@0.5e"),
        ("1e", "1e", "bert", "bert"),
        ("2e", "2e", "bert", "bert"),
        ("10e", "10e", "bert", "bert"),
    ]


def test_every_number_is_that_of_its_file(lab: Workspace) -> None:
    for result in read_results(lab):
        stored = json.loads((result.folder / "metrics.json").read_text())
        assert result.rules == stored["rules"]
        assert (result.folder / "predictions.json").is_file()


def test_the_command_of_a_head_makes_its_numbers_again(lab: Workspace) -> None:
    from typer.testing import CliRunner

    before = next(r for r in read_results(lab) if r.system == "head" and r.checkpoint == "1e")
    shutil.rmtree(before.folder)
    words = shlex.split(before.command)[1:] + ["--precision", "32", "--workspace", str(lab.root)]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert next(r for r in read_results(lab) if r.folder == before.folder) == before


def test_results_of_another_split_are_apart(lab: Workspace) -> None:
    from bertvision.pipelines.training.evaluate import evaluate

    evaluate(lab, HEADS, trained_on="0.5e", tag="1e", split="tune", precision="32")
    found = read_results(lab, "tune")
    assert [(r.run, r.checkpoint, r.split) for r in found] == [(h, "1e", "tune") for h in HEADS]
    assert found[0].command.endswith("--checkpoint 1e --split tune")
    assert all(r.split == "dev" for r in read_results(lab))


def test_a_run_carries_its_fraction_and_seed(lab: Workspace) -> None:
    run = f"{HEADS[0]}@f0.3@s1"
    folder = lab.root / "heads" / "0.5e" / run
    shutil.copytree(lab.head_dir("0.5e", HEADS[0]), folder)
    training = fields(folder / "config.json")["training"]
    change(folder / "config.json", training={**training, "fraction": 0.3, "seed": 1})
    found = [r for r in read_results(lab) if r.run == run]
    assert [(r.head, r.fraction, r.seed) for r in found] == [(HEADS[0], 0.3, 1)] * 2
    assert found[0].command.split()[2] == run


@pytest.mark.parametrize(
    ("place", "command"),
    [
        ("bert/1e/metrics.json", "bertvision finetune --resume"),
        (
            f"heads/0.5e/{HEADS[0]}/eval/1e/metrics.json",
            f"bertvision evaluate {HEADS[0]} --trained-on 0.5e --checkpoint 1e",
        ),
        (f"heads/0.5e/{HEADS[0]}/config.json", f"bertvision train {HEADS[0]} --checkpoint 0.5e"),
    ],
    ids=["bert", "head", "run"],
)
@pytest.mark.parametrize(
    "text",
    ["{", '{"rules": {}}', '{"rules": {"argmax": {"threshold": "high"}}}'],
    ids=["cut", "no-rules", "text"],
)
def test_a_damaged_file_is_named_with_the_command_that_makes_it(
    lab: Workspace, place: str, command: str, text: str
) -> None:
    (lab.root / place).write_bytes(text.encode("latin-1"))
    with pytest.raises(WorkspaceError) as error:
        read_results(lab)
    assert str(lab.root / place) in str(error.value)
    assert command in str(error.value)


def test_half_written_and_foreign_folders_are_no_results(lab: Workspace) -> None:
    before = read_results(lab)
    for place in (
        f"heads/0.5e/{HEADS[0]}/eval/.1e.tmp",
        f"heads/0.5e/.{HEADS[0]}.tmp/eval/1e",
        "heads/tensorboard/x/eval/1e",
        "bert/notes",
    ):
        (lab.root / place).mkdir(parents=True)
        (lab.root / place / "metrics.json").write_text('{"rules": {"argmax": 1}}')
    shutil.rmtree(lab.root / "bert" / "notes")
    assert read_results(lab) == before


@pytest.mark.parametrize(
    ("changed", "options"),
    [
        ({}, ""),
        ({"epochs": 3}, "--epochs 3"),
        ({"batch_size": 8, "lr": 1e-4}, "--batch-size 8 --lr 0.0001"),
        ({"lr": 0.00123456789}, "--lr 0.00123456789"),
        ({"seed": 2, "fraction": 0.3}, "--seed 2 --fraction 0.3"),
        ({"best_epoch": True}, "--best-epoch"),
    ],
    ids=["defaults", "epochs", "batch", "exact-lr", "seed", "best-epoch"],
)
def test_a_training_command_says_what_is_not_the_default(
    changed: dict[str, Any], options: str
) -> None:
    config = {**CONFIG, "training": {**CONFIG["training"], **changed}}
    command = training_command(RunConfig.model_validate(config), hidden_states=3)
    words = command.replace(" --precision bf16", "").split()
    assert words == [
        *["bertvision", "train", "adapter-386-shared", "--checkpoint", "0.3e"],
        *options.split(),
    ]


def test_a_training_command_names_layers_unless_they_are_all() -> None:
    config = RunConfig.model_validate(CONFIG)
    assert "--layers" not in training_command(config, hidden_states=3)
    assert "--layers 0,1,2 " in training_command(config, hidden_states=13)
    assert "--layers 0,1,2 " in training_command(config)
    cls = config.model_copy(update={"activations": {"tokens": "cls"}})
    assert "--layers" not in training_command(cls, hidden_states=2)  # and the pooler output
    assert "--layers 0,1,2 " in training_command(cls, hidden_states=3)


def test_the_defaults_are_those_of_the_command() -> None:
    options = inspect.signature(bertvision.train).parameters
    for name in ("seed", "fraction"):  # the others: tests/test_completion.py
        assert options[name].default == Run._field_defaults[name]


def test_the_command_of_a_run_trains_it_again(lab: Workspace) -> None:
    folder = lab.head_dir("0.5e", HEADS[0])
    before = {
        p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".csv" and p.is_file()
    }
    shutil.rmtree(folder)
    command = training_command(
        RunConfig.model_validate_json(before["config.json"]), hidden_states=3
    )
    assert command.endswith("--checkpoint 0.5e --lr 0.01 --precision 32")
    done = CliRunner().invoke(cli.app, [*command.split()[1:], "--workspace", str(lab.root)])
    assert done.exit_code == 0, done.output
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == before[name]


def test_five_hundred_results_are_read_at_once(lab: Workspace) -> None:
    folder = lab.head_dir("0.5e", HEADS[0])
    for seed in range(1, 250):
        copy = folder.with_name(f"{HEADS[0]}@s{seed}")
        for tag in ("0.5e", "1e"):
            (copy / "eval" / tag).mkdir(parents=True)
            source = folder / "eval" / tag / "metrics.json"
            shutil.copy(source, copy / "eval" / tag / "metrics.json")
        for name in ("config.json", "metrics.json"):
            shutil.copy(folder / name, copy / name)
    began = time.process_time()
    assert len(read_results(lab)) == 504
    assert time.process_time() - began < 1
