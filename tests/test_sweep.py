"""A sweep is its trainings and evaluations, each once, also when it was interrupted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import bertvision
from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.jobs.sweep import sweep_table
from bertvision.pipelines.planning import plan_sweep
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.results.sweep import default_heads, sweep, sweep_rows
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

HEADS = ["learned-pooling", "adapter-64-shared"]
OPTIONS = TrainOptions(batch_size=8, precision="32")


@pytest.fixture(scope="module")
def swept(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Two heads, two seeds, two parts of the data, two snapshots each way."""
    root = tmp_path_factory.mktemp("swept") / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    space = Workspace.find(root)
    sweep(space, HEADS, fractions=[0.5, 1], seeds=[0, 1], options=OPTIONS)
    return space


def files(space: Workspace) -> dict[str, int]:
    found = (space.root / "heads").rglob("*")
    return {str(p.relative_to(space.root)): p.stat().st_mtime_ns for p in found if p.is_file()}


def test_every_combination_is_there_and_the_same_sweep_does_nothing(swept: Workspace) -> None:
    before = files(swept)
    results = sweep(swept, HEADS, fractions=[0.5, 1], seeds=[0, 1], options=OPTIONS)
    assert files(swept) == before
    combinations = {(r.head, r.fraction, r.seed, r.trained_on, r.checkpoint) for r in results}
    assert len(combinations) == len(results) == 2 * 2 * 2 * 2 * 2


def test_a_result_of_the_sweep_is_that_of_its_commands(swept: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(swept.root, root, ignore=shutil.ignore_patterns("heads"))
    alone = Workspace.find(root)
    name = "adapter-64-shared@f0.5@s1"
    train(alone, [name], "0.5e", OPTIONS)
    (result,) = evaluate(alone, [name], trained_on="0.5e", tag="1e", precision="32")
    path = swept.head_dir("0.5e", name) / "eval/1e/metrics.json"
    assert json.loads(path.read_text())["rules"] == result.rules


def test_an_interrupted_sweep_does_only_what_is_missing(swept: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(swept.root, root)
    space = Workspace.find(root)
    lost = [space.head_dir("1e", "learned-pooling@s1"), space.head_dir("1e", HEADS[0]) / "eval/1e"]
    for folder in lost:
        shutil.rmtree(folder)
    kept = files(space)
    sweep(space, HEADS, fractions=[0.5, 1], seeds=[0, 1], options=OPTIONS)
    now = files(space)
    assert {name: now[name] for name in kept} == kept
    assert set(now) == set(files(swept))


def test_a_head_trained_again_is_evaluated_again(swept: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "workspace"
    shutil.copytree(swept.root, root)
    space = Workspace.find(root)
    path = space.head_dir("1e", HEADS[0]) / "eval/0.5e/metrics.json"
    before = json.loads(path.read_text())["rules"]
    other = replace(OPTIONS, lr=1e-2)
    with pytest.raises(WorkspaceError, match=r"lr = 0\.001.*--overwrite"):
        sweep(space, HEADS[:1], options=other)
    evaluations = {p: p.read_bytes() for p in path.parents[1].rglob("metrics.json")}
    train(space, HEADS[:1], "1e", other, overwrite=True)
    for p, content in evaluations.items():  # as if they had stayed
        p.parent.mkdir(parents=True)
        p.write_bytes(content)
    sweep(space, HEADS[:1], trained_on=["1e"], options=other)
    assert json.loads(path.read_text())["rules"] != before


def test_of_several_learning_rates_that_is_taken_which_does_best_on_tune(
    workspace: Workspace, tmp_path: Path
) -> None:
    root, rates = tmp_path / "workspace", (1e-7, 1e-2)
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    space = Workspace.find(root)
    asked = {"trained_on": ["1e"], "seeds": [0, 1], "rates": rates, "options": OPTIONS}
    results = sweep(space, HEADS, **asked)
    before = files(space)
    assert sweep(space, HEADS, **asked) == results
    assert files(space) == before
    for head in HEADS:
        means = {
            rate: sum(
                json.loads((folder / "eval/1e-tune/metrics.json").read_text())["rules"][
                    "n-best, oracle threshold"
                ]["metrics"]["f1"]
                for folder in (space.head_dir("1e", f"{head}@lr{rate:g}{s}") for s in ("", "@s1"))
            )
            for rate in rates
        }
        best = max(rates, key=lambda rate: means[rate])
        scored = {(r.name, r.seed, r.checkpoint) for r in results if r.head == head}
        name = f"{head}@lr{best:g}"
        assert scored == {(name, seed, tag) for seed in (0, 1) for tag in ("0.5e", "1e")}
        (other,) = set(rates) - {best}
        assert not (space.head_dir("1e", f"{head}@lr{other:g}") / "eval/1e").exists()
    table = sweep_table(sweep_rows(space, results), rates)
    assert "does best on tune of 1e-07, 0.01" in table
    with pytest.raises(InputError, match="names its own learning rate"):
        sweep(space, ["learned-pooling@lr0.1"], rates=rates)
    asked = {"fractions": [1], "split": "dev", **asked, "seeds": [0, 1, 2]}
    plan = plan_sweep(space, HEADS, checkpoints=[], **asked)
    assert (len(plan.runs), plan.evaluations) == (12, 4 + 6 * 2)


@pytest.mark.parametrize("text", ["0.1,0", "fast", "", "1e-3,inf", "nan"])
def test_learning_rates_that_are_none_are_refused(swept: Workspace, text: str) -> None:
    with pytest.raises(InputError, match="--lr.*numbers above 0"):
        bertvision.sweep("learned-pooling", lr=text, workspace=swept)
    with pytest.raises(InputError, match="is chosen on tune"):
        bertvision.sweep("learned-pooling", lr="0.1,1", split="tune", workspace=swept)


def test_rows_join_the_seeds_and_know_bert(swept: Workspace) -> None:
    results = sweep(swept, HEADS, fractions=[0.5, 1], seeds=[0, 1], options=OPTIONS)
    rows = sweep_rows(swept, results)
    assert len(rows) == len(results) / 2
    for row in rows:
        own = [
            r.rules["n-best"]["metrics"]["f1"]
            for r in results
            if (r.head, r.fraction) == (row["name"], row["fraction"])
            and (r.trained_on, r.checkpoint) == (row["trained_on"], row["checkpoint"])
        ]
        assert row["seeds"] == 2
        assert row["f1"] == pytest.approx(sum(own) / 2)
        bert = json.loads((swept.bert_dir(row["checkpoint"]) / "metrics.json").read_text())
        expected = row["f1"] - bert["rules"]["n-best"]["metrics"]["f1"]
        assert row["difference"] == pytest.approx(expected)
    table = sweep_table(rows)
    scores, costs, legend = (part.splitlines() for part in table.split("\n\n"))
    assert len(scores) - 1 == len(costs) == 1 + len(rows)
    assert scores[-1].startswith("(never answering)")
    share = f"{rows[0]['baseline']:.1f}"
    assert scores[-1].split()[-3:] == ["100.0", "50.0", share]  # NoAns, balanced, oracle F1
    assert "Retention" in legend[0]
    assert "±" in scores[1]
    assert "retention" in costs[0]


def test_the_default_heads_are_of_the_task_and_not_costly() -> None:
    small = set(default_heads("span", layers=7, hidden=384))
    large = set(default_heads("span", layers=25, hidden=1024))
    assert {"learned-pooling", "adapter-386-shared"} <= small < large
    assert "cnn-1xn" in large - small  # beside MiniLM a convolution costs as much as the encoder
    assert not {name for name in large if "xception" in name or name.startswith("cls-")}
    assert default_heads("classification", layers=7, hidden=384)[0].startswith("cls-")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"heads": ["adaptr-64-shared"]}, UnknownNameError, "adapter-64-shared"),
        ({"trained_on": ["2e"]}, UnknownNameError, r"--trained-on 2e.*stored are 0\.5e, 1e"),
        ({"checkpoints": ["0e"]}, UnknownNameError, r"--checkpoint 0e.*bertvision extract"),
        ({"heads": HEADS[:1], "fractions": [1.5]}, InputError, "from 0 to 1"),
        ({"heads": HEADS[:1], "fractions": [1, 1]}, InputError, "each once"),
    ],
)
def test_bad_requests_are_named_before_anything_is_trained(
    swept: Workspace, arguments: dict, error: type, message: str
) -> None:
    before = files(swept)
    with pytest.raises(error, match=message):
        sweep(swept, **arguments, options=OPTIONS)
    assert files(swept) == before


def test_a_workspace_without_a_task_has_no_heads_to_sweep(tiny_bert: Path, tmp_path: Path) -> None:
    """All tokens may be stored there too: what counts is the kind that the task says."""
    from bertvision.pipelines.workspace.creation import feature_workspace

    space = feature_workspace(tmp_path / "w", str(tiny_bert))
    for heads in ((), ("learned-pooling",), ("cls-learned-pooling",)):
        with pytest.raises(InputError, match="hidden states alone, without a task that heads"):
            sweep(space, heads)
    assert read_rows(space).heads == []
