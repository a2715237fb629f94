"""Latency: the same windows for all, and no layer is run that a head does not need."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from byhand import change
from safetensors.torch import load_file
from workspaces import answerable_options

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.finetuning import latency as measuring
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.latency import measure_latency
from bertvision.pipelines.finetuning.latency_record import latency_file, read_latencies
from bertvision.pipelines.report.costs import latency_section
from bertvision.pipelines.report.section import Reading
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.training.trained_head import load_head
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ["learned-pooling", "learned-pooling@l0-1", "last-layer"]


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Workspace:
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    space = Workspace.find(root)
    train(space, HEADS, "1e", TrainOptions(epochs=1, batch_size=8, precision="32"))
    return space


def _answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Answers of systems, batch by batch, where they would be timed."""
    answers: dict[str, list[Any]] = {}

    def answer(
        systems: Sequence[Any], batches: Sequence[Any], rounds: int, precision: str
    ) -> npt.NDArray[np.float64]:
        with torch.inference_mode():
            answers.update({s.name: [s.answer(batch) for batch in batches] for s in systems})
        return np.ones((len(systems), rounds))

    monkeypatch.setattr(measuring, "_measured", answer)
    return answers


def test_a_head_runs_no_layer_above_those_it_takes(space: Workspace) -> None:
    found = measure_latency(
        space, [("1e", name) for name in HEADS], tag="0.5e", windows=3, rounds=2
    )
    assert [system.name for system in found.systems] == ["BERT", *HEADS]
    assert [system.layers for system in found.systems] == [2, 2, 1, 2]
    assert (found.windows, found.rounds, found.batch_size, found.tag) == (3, 2, 1, "0.5e")
    for system in found.systems:
        assert 0 < system.low <= system.seconds <= system.high
    assert found.systems[0].speed_up == 1
    assert [system.trained_on for system in found.systems] == [None, "1e", "1e", "1e"]
    left_out: list[str] = []
    assert read_latencies(space, left_out) == [found]
    section = latency_section(Reading(space, read_rows(space), left_out))
    assert section is not None
    rows = section.tables[0].rows
    assert [row["name"] for row in rows] == ["BERT", *(f"{h} trained on 1e" for h in HEADS)]
    assert left_out == []
    shutil.copy(latency_file(space, "0.5e"), latency_file(space, "1e"))
    assert read_latencies(space, left_out) == [found]
    assert "latency/1e.json is of the snapshot 0.5e" in left_out[-1]
    change(latency_file(space, "1e"), tag="1e")
    assert read_latencies(space, left_out) == [found]
    assert "latency/1e.json is of other weights" in left_out[-1]
    assert "`bertvision latency --checkpoint 1e`" in left_out[-1]
    latency_file(space, "1e").unlink()
    latency_file(space, "0.5e").write_text("{")
    assert latency_section(Reading(space, read_rows(space), left_out)) is None
    assert "latency/0.5e.json is damaged" in left_out[-1]


def test_a_head_answers_as_it_does_on_stored_activations(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timed answer is the real one: that of the head on float32 states of the whole encoder."""
    answers = _answers(monkeypatch)
    measure_latency(space, [("1e", name) for name in HEADS], tag="1e", windows=5, batch_size=2)
    snapshot = load_snapshot(space.snapshot_dir("1e"))
    windows = space.windows("dev", snapshot.tokenizer)
    row = int(np.linspace(0, len(windows) - 1, 5)[2])
    first, n = int(windows.first_token[row]), int(windows.n_tokens[row])
    tokens = slice(first, first + n)
    inputs = {
        "input_ids": torch.from_numpy(windows.input_ids[tokens].astype(np.int64))[None],
        "token_type_ids": torch.from_numpy(windows.token_type_ids[tokens].astype(np.int64))[None],
    }
    with torch.inference_mode():
        output = snapshot.model(**inputs, output_hidden_states=True)
        for name in HEADS:
            head = load_head(space.head_dir("1e", name))
            states = torch.stack([output.hidden_states[i][0] for i in head.config.layers], dim=1)
            expected = head.module(states, torch.tensor([n])).start_logits[0]
            torch.testing.assert_close(
                answers[name][1].start_logits[0, :n], expected, atol=1e-4, rtol=1e-4
            )
    torch.testing.assert_close(
        answers["BERT"][1].start_logits[0, :n], output.start_logits[0], atol=1e-4, rtol=1e-4
    )


def test_a_classification_head_takes_the_first_token_and_the_pooler_output(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finetune(tmp_path / "lab", FinetuneOptions(**answerable_options(tiny_bert, tmp_path)))
    space = Workspace.find(tmp_path / "lab")
    extract(space, "1e", encoding="float32", precision="32")
    name = "cls-learned-pooling"
    train(space, [name], "1e", TrainOptions(precision="32", lr=0.01))
    evaluate(space, [name], trained_on="1e", tag="1e", precision="32")
    answers = _answers(monkeypatch)
    windows = len(space.windows("dev", load_snapshot(space.snapshot_dir("1e")).tokenizer))
    measure_latency(space, [("1e", name)], tag="1e", windows=windows, batch_size=3)
    found = torch.cat([output.logits for output in answers[name]])
    stored = load_file(space.head_dir("1e", name) / "eval" / "1e" / "dev.safetensors")
    torch.testing.assert_close(found, stored["logits"], atol=1e-4, rtol=1e-4)


def test_by_default_one_head_of_each_kind_is_measured(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(space, ["last-layer@s1", "last-layer@f0.5"], "1e", TrainOptions(epochs=1))
    monkeypatch.chdir(space.root)
    found = bertvision.latency(windows=1, rounds=1)
    assert sorted(system.name for system in found.systems) == sorted(["BERT", *HEADS])
    assert "speed-up" in str(found)
    assert found.to_json()["tag"] == "1e"


def test_what_cannot_be_measured_is_said_before_anything_is_loaded(space: Workspace) -> None:
    with pytest.raises(UnknownNameError, match="no head nothing was trained"):
        bertvision.latency("nothing", checkpoint="1e", workspace=space.root)
    with pytest.raises(UnknownNameError, match="no snapshot 0.9e"):
        bertvision.latency(checkpoint="0.9e", trained_on="1e", workspace=space.root)
    with pytest.raises(InputError, match="--rounds"):
        bertvision.latency(rounds=0, workspace=space.root)
