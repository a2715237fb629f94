"""Error analysis: groups that part the questions, the second answer, agreement, examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byhand import change, fields, forget_digests
from hypothesis import given
from hypothesis import strategies as st
from labs import HEADS, scored_copy
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner
from workspaces import answerable_options

from bertvision.cli import app
from bertvision.errors import UnknownNameError, WorkspaceError
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.results.answers import read_answers
from bertvision.pipelines.results.error_analysis import (
    agreement,
    errors,
    groups_of,
    length_range,
    question_word,
    second_answers,
)
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.results.rows import read_costs
from bertvision.pipelines.results.systems import find_system, read_windows
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.training.evaluate import evaluate
from bertvision.pipelines.training.train import train
from bertvision.pipelines.workspace.job_options import FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.workspace import Workspace

HEAD = f"{HEADS[0]}:0.5e:1e"


@pytest.fixture
def lab(workspace: Workspace, tmp_path: Path) -> Workspace:
    return scored_copy(workspace, tmp_path / "lab")


@pytest.mark.parametrize(
    ("question", "word"),
    [
        ("What is it?", "what"),
        ("In what year did it end?", "what"),
        ("Whose book is it?", "who"),
        ("To whom was it given?", "who"),
        ("How many are there?", "how many/much"),
        ("HOW  MUCH is it?", "how many/much"),
        ("How did it end?", "how"),
        ("Which of them knew why?", "which"),
        ("Whatever is somewhere shown", "other"),
        ("Name the river.", "other"),
    ],
)
def test_question_words(question: str, word: str) -> None:
    assert question_word(question) == word


def test_ranges_of_lengths() -> None:
    starts = (1, 2, 3, 5, 9)
    names = [length_range(n, starts) for n in range(1, 12)]
    assert names == ["1", "2", *["3-4"] * 2, *["5-8"] * 4, *["9 or more"] * 3]


TEXTS = st.text("what who a b ", min_size=1, max_size=30)
QUESTIONS = st.lists(st.tuples(TEXTS, TEXTS, st.booleans()), min_size=1, max_size=20)


@given(QUESTIONS)
def test_every_question_is_in_one_group_of_each_grouping(
    given_questions: list[tuple[str, str, bool]],
) -> None:
    questions = [
        Question(str(i), text, context, (Answer(context, 0),) if answered else (), not answered)
        for i, (text, context, answered) in enumerate(given_questions)
    ]
    groupings = groups_of(questions)
    for name, groups in groupings.items():
        rows = sorted(row for group in groups.values() for row in group)
        asked = [i for i, q in enumerate(questions) if q.answers or "answer length" not in name]
        assert rows == asked, name
        assert all(groups.values())
    assert list(groupings["answer"]) in (["HasAns"], ["NoAns"], ["HasAns", "NoAns"])


def test_groups_average_to_the_recorded_score(lab: Workspace) -> None:
    found = errors(lab, HEAD)
    results = read_results(lab)
    scored = find_system(results, HEAD).rules["n-best"]["metrics"]
    bert = find_system(results, "bert:1e").rules["n-best"]["metrics"]
    for grouping in ("answer", "context length (words)", "question word"):
        rows = found["groups"][grouping]
        n = np.array([row["n"] for row in rows])
        for metric in ("exact", "f1"):
            mean = np.average([row[metric] for row in rows], weights=n)
            assert mean == pytest.approx(scored[metric])
            theirs = np.average([row[f"bert_{metric}"] for row in rows], weights=n)
            assert theirs == pytest.approx(bert[metric])
        whole = np.average([row["trivial"] for row in rows], weights=[row["n"] for row in rows])
        if grouping in ("answer", "question word"):  # which have every question
            assert whole == pytest.approx(100 / 3)
    by_answer = {row["group"]: row for row in found["groups"]["answer"]}
    assert [by_answer[kind]["trivial"] for kind in ("HasAns", "NoAns")] == [0, 100]
    assert by_answer["HasAns"]["f1"] == pytest.approx(scored["HasAns_f1"])
    assert by_answer["NoAns"]["exact"] == pytest.approx(scored["NoAns_exact"])


def test_agreement_counts_every_question_once(lab: Workspace) -> None:
    found = errors(lab, HEAD)
    counts = {k: v for k, v in found["agreement"].items() if k != "p"}
    assert sum(counts.values()) == found["questions"] == 24
    metrics = find_system(read_results(lab), HEAD).rules["n-best"]["metrics"]
    right = counts["both right"] + counts["only the system"]
    assert 100 * right / 24 == pytest.approx(metrics["exact"])


def test_agreement_of_known_answers() -> None:
    right = [True, True, True, False, False, False, False, False]
    bert = [True, False, True, True, True, True, True, False]
    found = agreement(right, bert)
    assert [found[k] for k in ("both right", "only the system", "only BERT", "none")] == [
        2,
        1,
        4,
        1,
    ]
    assert found["p"] == pytest.approx(0.375)


def test_the_second_answer_of_known_logits(lab: Workspace) -> None:
    """Logits that put the first two words of a context first and second, and no answer third."""
    windows = read_windows(lab, "1e", "dev")
    start = np.full(len(windows.offset_mapping), -20, np.float32)
    end = start.copy()
    first = np.cumsum(windows.n_tokens) - windows.n_tokens
    expected: dict[int, tuple[str, str]] = {}
    for window, (begin, n, row) in enumerate(
        zip(first, windows.n_tokens, windows.item_index, strict=True)
    ):
        tokens = begin + np.flatnonzero(windows.offset_mapping[begin : begin + n, 0] >= 0)
        if row in expected:
            continue
        start[tokens[:2]] = end[tokens[:2]] = (10, 6)
        start[first[window]] = end[first[window]] = 1
        context = windows.items[row].context
        texts = [context[b:e] for b, e in windows.offset_mapping[tokens[:2]]]
        both = context[windows.offset_mapping[tokens[0], 0] : windows.offset_mapping[tokens[1], 1]]
        expected[row] = (texts[0], both)  # 10 + 6 for both words together, 6 + 6 for the second
    forget_digests(lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e")
    result = find_system(read_results(lab), HEAD)
    path = result.folder / "dev.safetensors"
    save_file({**load_file(path), "start_logits": start, "end_logits": end}, path)
    answers = read_answers(result, windows.items)
    # scores: 20 for the first word, 16 for both, 2 for no answer less the threshold
    for threshold, first_is, second_is in ((0.0, 0, 1), (-17.0, 0, None), (-100.0, None, 0)):
        result.rules["n-best"]["threshold"] = threshold
        rows = range(len(windows.items))
        first_texts = ["" if first_is is None else expected[row][first_is] for row in rows]
        given_first = {q.id: t for q, t in zip(windows.items, first_texts, strict=True)}
        answers = answers._replace(predictions=given_first)
        found = second_answers(lab, answers, windows.items, "dev")
        assert found == ["" if second_is is None else expected[row][second_is] for row in rows]


def test_a_task_that_always_answers_has_no_answer_never_second(lab: Workspace) -> None:
    result = find_system(read_results(lab), HEAD)
    result.rules["n-best"]["threshold"] = None
    questions = lab.items("dev")
    answers = read_answers(result, questions)
    assert all(second_answers(lab, answers, questions, "dev"))


def test_examples_are_a_seeded_choice_from_every_cell(lab: Workspace) -> None:
    found = errors(lab, HEAD, examples=2)
    assert found["examples"] == errors(lab, HEAD, examples=2)["examples"]
    questions = {q.id: q for q in lab.items("dev")}
    cells: dict[str, int] = {}
    for example in found["examples"]:
        cells[example["cell"]] = cells.get(example["cell"], 0) + 1
        question = questions[example["id"]]
        assert example["question"] == question.question
        assert set(example["gold"]) == {a.text for a in question.answers}
        if question.answers:
            assert f"[{question.answers[0].text}]" in example["context"]
    counts = found["agreement"]
    assert cells == {cell: min(2, counts[cell]) for cell in counts if cell != "p" and counts[cell]}
    everything = errors(lab, HEAD, examples=24)["examples"]
    assert {e["id"] for e in everything} == set(questions)
    chosen = {errors(lab, HEAD, examples=2, seed=seed)["examples"][0]["id"] for seed in range(8)}
    assert len(chosen) > 1


def test_the_analysis_is_kept_beside_the_metrics(lab: Workspace) -> None:
    found = errors(lab, HEAD)
    folder = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"
    assert fields(folder / "errors.json") == found
    assert [r.run for r in read_results(lab)].count(HEADS[0]) == 2
    for other, there in ("", True), (" ", False):  # as it was; of other predictions
        predictions = folder / "predictions.json"
        predictions.write_text(other + predictions.read_text())
        evaluate(lab, [HEADS[0]], trained_on="0.5e", tag="1e", precision="32")
        assert (folder / "errors.json").is_file() is there
        assert (folder / "metrics.json").is_file()


def test_bert_is_analysed_without_itself_beside_it(lab: Workspace) -> None:
    found = errors(lab, "bert:1e")
    assert found["agreement"] is None
    assert "bert_f1" not in found["groups"]["answer"][0]
    assert {e["cell"] for e in found["examples"]} <= {"right", "wrong"}


def test_yes_or_no_is_analysed_in_the_groups_that_it_has(lab: Workspace) -> None:
    questions = lab.items("dev")
    folder = lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e"
    (folder / "predictions.json").write_text(json.dumps({q.id: True for q in questions}))
    accuracy = 100 * sum(not q.is_impossible for q in questions) / len(questions)
    scores = {"accuracy": accuracy, "f1": 80.0}
    rules = {"argmax": {"threshold": None, "metrics": scores}}
    change(folder / "metrics.json", rules=rules, sha256={})
    found = errors(lab, HEAD)
    assert found["second"] is None
    assert found["agreement"] is None  # BERT here gives answers, not yes or no
    rows = found["groups"]["answer"]
    assert [(r["group"], r["accuracy"]) for r in rows] == [("HasAns", 100), ("NoAns", 0)]
    assert {e["gold"] for e in found["examples"]} == {True, False}
    done = _run("errors", HEAD, lab)
    assert "not answerable" in done.output


def test_without_logits_the_command_that_makes_them_is_named(lab: Workspace) -> None:
    (lab.head_dir("0.5e", HEADS[0]) / "eval" / "1e" / "dev.safetensors").unlink()
    with pytest.raises(WorkspaceError, match="bertvision evaluate adapter-64-shared --trained-on"):
        errors(lab, HEAD)
    with pytest.raises(UnknownNameError, match="which adapter-64-shared is meant"):
        errors(lab, HEADS[0])


def test_answerable_or_not_from_fine_tuning_to_errors(tiny_bert: Path, tmp_path: Path) -> None:
    """Real heads and BERT of the classification task, with contexts of several windows."""
    finetune(tmp_path / "lab", FinetuneOptions(**answerable_options(tiny_bert, tmp_path)))
    space = Workspace.find(tmp_path / "lab")
    extract(space, "1e", encoding="float32", precision="32")
    heads = ["cls-last-state", "cls-learned-pooling"]
    train(space, heads, "1e", TrainOptions(precision="32", lr=0.01))
    evaluate(space, heads, trained_on="1e", tag="1e", precision="32")
    made = _run("ensemble", *heads, "--with-bert", "--combine", "mean", space)
    assert "accuracy" in made.output
    for name in ("bert:1e", f"{heads[0]}:1e", f"mean-bert+{'+'.join(heads)}:1e"):
        found = errors(space, name)
        n = [row["n"] for row in found["groups"]["answer"]]
        mean = np.average([row["accuracy"] for row in found["groups"]["answer"]], weights=n)
        rules = find_system(read_results(space), name).rules
        assert mean == pytest.approx(rules["argmax"]["metrics"]["accuracy"])
        assert (found["agreement"] is None) == (name == "bert:1e")
    costs = read_costs(space, read_results(space))
    assert None not in [value for cost in costs for value in (cost["seconds"], cost["bytes"])]


def _run(command: str, *words: Any) -> Any:
    """Run a command in a workspace (the last word)."""
    *given_words, lab = words
    done = CliRunner().invoke(app, [command, *given_words, "--workspace", str(lab.root)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def test_the_commands_from_members_to_errors(lab: Workspace) -> None:
    """Ensemble, then compare it and look at its errors, by the names that are printed."""
    made = _run("ensemble", HEADS[0], "--with-bert", "--checkpoint", "1", lab)
    assert f"max(BERT, {HEADS[0]})" in made.output
    name = f"max-bert+{HEADS[0]}:0.5e:1e"
    compared = _run("compare", name, "bert:1e", "--resamples", "50", lab)
    assert name in compared.output
    assert "paired bootstrap over 8 contexts" in compared.output.replace("\n", " ")
    analysed = _run("errors", name, "--examples", "1", lab)
    for text in ("question word", "McNemar", "is the second right?", "gold", "BERT EM"):
        assert text in analysed.output
    as_json = json.loads(_run("errors", name, "--json", "--examples", "1", lab).output)
    assert as_json["system"] == name


@pytest.mark.parametrize(
    "words",
    [
        ["ensemble", HEADS[0], "--with-bert", "--combine", "median"],
        ["compare", "bert:1e", HEAD, "--metric", "bleu"],
        ["compare", "bert:1e", HEAD, "--by", "article"],
        ["compare", "bert:1e", "bort"],
        ["errors", "bert", "--checkpoint", "9e"],
    ],
    ids=["combine", "metric", "by", "unknown", "snapshot"],
)
def test_bad_input_is_refused_by_name(lab: Workspace, words: list[str]) -> None:
    refused = _run(*words, lab)
    assert refused.exit_code == 2
    assert words[-1].removesuffix(":9e") in refused.output or "bert:0.5e" in refused.output
