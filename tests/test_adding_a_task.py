"""The page about adding a task: its file, taken as it is written, and run to the end."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from scipy.special import softmax

from bertvision import plugins
from bertvision.errors import InputError
from bertvision.jobs.heads import evaluated_table
from bertvision.jobs.results import errors_table
from bertvision.jobs.systems import compare_table
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.results.compare import compare
from bertvision.pipelines.results.ensemble import ensemble
from bertvision.pipelines.results.error_analysis import errors
from bertvision.pipelines.results.rows import read_rows
from bertvision.pipelines.tasks import registry
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.registry import (
    TaskEntry,
    check_task,
    find_task,
    name_task,
)
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

PAGE = Path(__file__).parents[1] / "docs" / "adding-a-task.md"
TAG = "6e"
HEADS = ["cls-learned-pooling", "cls-last-state"]


def block(language: str, begins: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return next(text for text in found if text.startswith(begins))


def write_data(folder: Path, rows: int, split: str, seed: int) -> None:
    """Sentences whose last word and mark tell their tone."""
    random = np.random.default_rng(seed)
    names, places = ["anna", "boris", "clara", "david"], ["paris", "london", "rome"]
    forms = {
        "question": "who is {} in {} ?",
        "order": "find {} , find {} .",
        "statement": "{} was in {} .",
    }
    lines = []
    for i in range(rows):
        label = list(forms)[i % 3]
        sentence = forms[label].format(random.choice(names), random.choice(places))
        lines.append(f"{label}\t{sentence} {random.integers(1, 9)}\n")
    folder.mkdir(exist_ok=True)
    (folder / f"{split}.txt").write_text("".join(lines))


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The task's dotted path; its file is in the current folder, as the page says."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "tone.py").write_text(block("python", "# tone.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield "tone:ToneTask"
    sys.modules.pop("tone", None)


@pytest.fixture(scope="module")
def space(added: str, tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Fine-tuned, extracted, trained and evaluated."""
    folder = tmp_path_factory.mktemp("tone")
    write_data(folder / "tone", 150, "train", 1)
    write_data(folder / "tone", 30, "dev", 2)
    finetune(
        folder / "workspace",
        FinetuneOptions(
            model=str(tiny_bert),
            task=added,
            data=str(folder / "tone"),
            epochs=6.0,
            save_at=("0e", TAG),
            batch_size=16,
            lr=2e-3,
            tune_fraction=0.1,
            precision="32",
        ),
    )
    made = Workspace.find(folder / "workspace")
    extract(made, TAG, encoding="float32", precision="32")
    train(made, HEADS, TAG, TrainOptions(precision="32", lr=0.02, epochs=10))
    evaluate(made, HEADS, trained_on=TAG, tag=TAG, precision="32")
    return made


def test_the_task_is_small_and_the_page_s_commands_name_it(added: str) -> None:
    assert len(block("python", "# tone.py").splitlines()) < 50
    assert f"--task {added} " in block("bash", "bertvision finetune")
    assert f'"{added}"' in block("toml", "[project")
    entry = find_task(name_task(added))
    assert entry == TaskEntry(added, "macro_f1", "cls", None, 64, "classification")


def test_a_class_is_imported_only_where_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace that somebody else made, with a module beside it, runs no code."""
    (tmp_path / "theirs.py").write_text(
        block("python", "# tone.py") + f"\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"
    )
    monkeypatch.chdir(tmp_path)
    config = TaskConfig(name="theirs:ToneTask")  # as reading a workspace does
    with pytest.raises(InputError, match="BERTVISION_TASKS=theirs:ToneTask"):
        load_task(config.name)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setenv("BERTVISION_TASKS", "other:Task,theirs:ToneTask")
    assert load_task(config.name).headline == "macro_f1"
    assert (tmp_path / "ran").exists()
    assert str(tmp_path) not in sys.path
    sys.modules.pop("theirs")


def test_the_current_folder_is_looked_in_for_the_named_module_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a registered class nor what a named one imports is taken from there."""
    (tmp_path / "helper_of_theirs.py").write_text("raise SystemExit('ran')\n")
    (tmp_path / "mine.py").write_text("import helper_of_theirs\nclass Task: pass\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    with pytest.raises(InputError, match="'mine:Task' cannot be imported.*helper_of_theirs"):
        plugins.load_class("mine:Task", "task", named=True)
    assert "mine" not in sys.modules
    with pytest.raises(InputError, match="No module named 'mine'"):
        plugins.load_class("mine:Task", "task")
    assert sys.path == before


def test_a_task_of_an_installed_package_has_its_own_name(
    added: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path.cwd())  # as where it is installed
    point = EntryPoint("tone", added, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([point]))
    assert check_task("tone") == "tone"
    assert load_task("tone").name == "tone"
    assert find_task("tone").max_length == 64
    with pytest.raises(InputError, match=r"no task: did you mean tone\b"):
        check_task("tome")


def test_what_is_no_task_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_a_task.py").write_text("class Thing: pass\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"'not_a_task:Thing' has no headline.*SentenceTask"):
        find_task(name_task("not_a_task:Thing"))
    with pytest.raises(InputError, match=r"'nowhere:Thing' cannot be imported.*current folder"):
        find_task(name_task("nowhere:Thing"))
    sys.modules.pop("not_a_task")


def test_bert_and_heads_learn_three_classes(space: Workspace) -> None:
    assert space.config.task.classes == ("question", "order", "statement")
    bert = json.loads((space.bert_dir(TAG) / "metrics.json").read_text())["rules"]["argmax"]
    assert bert["metrics"]["total"] == 30
    assert bert["metrics"]["majority"] == pytest.approx(100 / 3)
    results = read_rows(space)
    assert results.key == "macro_f1"
    assert results.items == "items"
    assert {row["name"] for row in results.heads} == set(HEADS)
    # a third is what guessing gets
    assert max(row["accuracy"] for row in results.heads) > 60
    said = json.loads((space.head_dir(TAG, HEADS[0]) / f"eval/{TAG}/predictions.json").read_text())
    assert set(said.values()) <= {0, 1, 2}
    assert len(said) == 30


def test_scores_are_those_of_the_predictions(space: Workspace) -> None:
    items = {item.id: item.label for item in space.items("dev")}
    for row in read_rows(space).runs:
        said = json.loads((space.root / row["file"]).with_name("predictions.json").read_text())
        right = np.mean([said[name] == label for name, label in items.items()])
        assert row["accuracy"] == pytest.approx(100 * right)


def test_store_keeps_the_labels_and_the_text(space: Workspace, added: str) -> None:
    split = space.split(TAG, "dev-cls")
    items = space.items("dev")
    assert load_task(added).items_of(split.table()) == items
    ids = split.plan.example_id
    labels = split.array("label")
    assert [items[i].label for i in ids] == labels.tolist()


@pytest.mark.parametrize("metric", [None, "accuracy", "matthews", "macro_f1"])
def test_systems_are_compared(space: Workspace, metric: str | None) -> None:
    found = compare(space, f"{HEADS[0]}:{TAG}", "bert:0e", metric=metric, resamples=200)  # type: ignore[arg-type]
    assert found["metric"] == metric or metric is None
    assert found["metric"] != "macro_f1" or metric in (None, "macro_f1")
    recorded = {row["written"]: row for row in read_rows(space).runs}
    assert found["first_score"] == pytest.approx(recorded[f"{HEADS[0]}:{TAG}"][found["metric"]])
    assert found["second_score"] == pytest.approx(recorded["bert:0e"][found["metric"]])
    assert found["low"] <= found["difference"] <= found["high"]
    assert "items explains" in found["sentence"] or "items alone" in found["sentence"]
    assert f"{found['first_score']:.2f}" in compare_table(found)


def test_metrics_of_other_tasks_are_refused(space: Workspace) -> None:
    for metric in ("exact", "pearson"):
        with pytest.raises(InputError, match="can be compared by macro_f1 and accuracy"):
            compare(space, "bert:0e", f"bert:{TAG}", metric=metric)  # type: ignore[arg-type]


def test_errors_are_told_by_class(space: Workspace) -> None:
    found = errors(space, "bert:0e")
    by_class = {row["group"]: row for row in found["groups"]["class"]}
    assert set(by_class) == {"question", "order", "statement"}
    assert sum(row["n"] for row in by_class.values()) == 30
    accuracy = sum(row["n"] * row["accuracy"] for row in by_class.values()) / 30
    recorded = {row["written"]: row for row in read_rows(space).runs}["bert:0e"]["accuracy"]
    assert accuracy == pytest.approx(recorded)
    wrong = sum(confused["n"] for confused in found["confusions"])
    assert wrong == pytest.approx(30 * (1 - recorded / 100))
    for confused in found["confusions"]:
        assert confused["gold"] != confused["answer"]
        assert confused["n"] <= confused["of"] == 10
    assert {e["gold"] for e in found["examples"]} <= set(by_class)
    classes, counts = found["confusion_matrix"]["classes"], found["confusion_matrix"]["counts"]
    assert [sum(row) for row in counts] == [by_class[name]["n"] for name in classes] == [10] * 3
    assert sum(counts[i][i] for i in range(3)) == 30 - wrong
    for confused in found["confusions"]:
        row, column = classes.index(confused["gold"]), classes.index(confused["answer"])
        assert counts[row][column] == confused["n"]
    text = errors_table(found)
    for name, row in zip(classes, counts, strict=True):
        assert re.search(rf"^{name} +" + " +".join(map(str, row)) + "$", text, re.MULTILINE)
    assert "taken for" in text
    scored = evaluate(space, HEADS, trained_on=TAG, tag=TAG)
    assert "macro F1" in evaluated_table([scores.to_json() for scores in scored])


def test_report_has_the_metric_of_the_task(space: Workspace, tmp_path: Path) -> None:
    errors(space, f"{HEADS[0]}:{TAG}")
    report = write_report(space, tmp_path / "report")
    page = report.page.read_text()
    assert "macro F1" in page
    assert "classes question, order, statement" in page
    assert "EM" not in re.sub(r"<[^>]*>", " ", page).split()
    assert {"confusions", f"error_groups_{TAG}", "results"} <= set(report.tables)
    row = json.loads((report.page.parent / "tables/results.json").read_text())["rows"][0]
    assert {"accuracy", "macro_f1", "matthews"} <= set(row)
    assert not {"exact", "f1", "pearson"} & set(row)


def test_an_ensemble_takes_the_likeliest_class_of_any_member(space: Workspace) -> None:
    found = ensemble(space, [HEADS[0]], with_bert=True, trained_on=TAG, tag=TAG)
    bert = load_file(space.bert_dir(TAG) / "dev.safetensors")["logits"]
    head = load_file(space.head_dir(TAG, HEADS[0]) / f"eval/{TAG}/dev.safetensors")["logits"]
    likely = np.maximum(softmax(bert, axis=1), softmax(head, axis=1)).argmax(axis=1)
    right = np.mean(likely == [item.label for item in space.items("dev")])
    assert found["rules"]["argmax"]["metrics"]["accuracy"] == pytest.approx(100 * right)
