"""Early exits: curves over all thresholds are what a loop over thresholds gives."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from terminal import done
from transformers import BertModel
from workspaces import answerable_options, write_squad

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.jobs.command import show
from bertvision.pipelines.analysis.exit_curve import (
    confidence,
    exit_curve,
    fitting_criteria,
    outcomes_of,
)
from bertvision.pipelines.analysis.exits import exits_of_logits
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.scores import headline
from bertvision.pipelines.tasks.sentences import metrics
from bertvision.pipelines.tasks.squad.read import Answer, Question
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.variants.exits import exits_of
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.records import BertScores
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

LAYERS = (2, 3, 6, 9)
Float = np.ndarray[Any, np.dtype[np.float64]]


def sentences(labels: Sequence[Any]) -> WindowIndex:
    items = [Sentence(str(i), "a", None, label) for i, label in enumerate(labels)]
    n = len(items)
    return WindowIndex(items, np.ones(n, np.int32), np.arange(n, dtype=np.int32), None)


def of_classes(seed: int, classes: int = 3, n: int = 60, outputs: int = 4) -> list[Logits]:
    """Logits that are the surer the higher their layer; rounded, so that many are equal."""
    random = np.random.default_rng(seed)
    gold = random.integers(classes, size=n)
    windows, signal = sentences([int(x) for x in gold]), np.eye(classes)[gold]
    arrays = [random.normal(size=(n, classes)) + k * signal for k in range(outputs)]
    return [Logits({"logits": np.round(x, 1).astype(np.float32)}, windows) for x in arrays]


def of_scores(seed: int, n: int = 60, outputs: int = 4) -> list[Logits]:
    random = np.random.default_rng(seed)
    gold = random.uniform(0, 5, n)
    arrays = [gold + random.normal(size=n) * 2 / (k + 1) + k for k in range(outputs)]
    windows = sentences([float(x) for x in gold])
    return [Logits({"logits": x[:, None].astype(np.float32)}, windows) for x in arrays]


def of_questions(seed: int, *, spans: bool) -> list[Logits]:
    """Questions with one to three windows, a third of them without an answer."""
    random = np.random.default_rng(seed)
    context = "anna boris clara david paris rome"
    starts = np.array([(m, m + len(w)) for w in context.split() for m in [context.index(w)]])
    questions = [
        Question(
            f"q{i}",
            *("who ?", context),
            () if i % 3 == 0 else (Answer("clara david", 11),),
            i % 3 == 0,
        )
        for i in range(25)
    ]
    item = np.repeat(np.arange(25), random.integers(1, 4, 25)).astype(np.int32)
    n_tokens = np.full(len(item), 8, np.int32)  # [CLS], six words, [SEP]
    offsets = np.concatenate([[[-1, -1]], starts, [[-1, -1]]]).astype(np.int32)
    index = WindowIndex(questions, n_tokens, item, np.tile(offsets, (len(item), 1)))
    found = []
    for k in range(len(LAYERS)):
        if spans:
            arrays = {
                name: (random.normal(size=8 * len(item)) * (k + 1)).astype(np.float32)
                for name in ("start_logits", "end_logits")
            }
        else:
            arrays = {"logits": random.normal(size=(len(item), 2)).astype(np.float32)}
        found.append(Logits(arrays, index))
    return found


def leaving(sure: Float, threshold: float) -> list[int]:
    """For each window the first output layer that is as sure; a loop, as one would run it."""
    places = []
    for window in sure:
        place = 0
        while place < len(window) and window[place] < threshold:
            place += 1
        places.append(place)
    return places


def taken(logits: Sequence[Logits], places: Sequence[int]) -> Logits:
    """The answer of each window at the output layer where it left."""
    windows, arrays = logits[0].windows, {}
    for name, values in logits[0].arrays.items():
        n = np.full(len(places), len(values) // len(places))  # all windows are of one length
        first = np.cumsum(n) - n
        parts = [
            logits[k].arrays[name][a : a + c] for k, a, c in zip(places, first, n, strict=True)
        ]
        arrays[name] = np.concatenate(parts)
    return Logits(arrays, windows)


CASES: dict[str, tuple[str, str, list[Logits]]] = {
    "accuracy": ("mnli", "accuracy", of_classes(0)),
    "matthews": ("cola", "matthews", of_classes(1, classes=2)),
    "matthews of several": ("mnli", "matthews", of_classes(2)),
    "f1": ("wikiqa_pairs", "f1", of_classes(3, classes=2)),
    "pearson": ("stsb", "pearson", of_scores(4)),
    "questions": ("answerable", "accuracy", of_questions(5, spans=False)),
    "spans": ("squad_v2", "f1", of_questions(6, spans=True)),
    "spans that always answer": ("squad_v1", "f1", of_questions(7, spans=True)),
}


@pytest.mark.parametrize("criterion", ["entropy", "probability", "patience"])
@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_that_of_a_loop_over_thresholds(case: str, criterion: str) -> None:
    name, metric, logits = CASES[case]
    if metric == "pearson" and criterion != "patience":
        return
    task = load_task(name)
    threshold = 0.0 if name == "squad_v2" else None
    outcomes = outcomes_of(task, logits, metric, threshold)
    sure = confidence(criterion, [of.arrays for of in logits], logits[0].windows.n_tokens, 0.7)
    curve = exit_curve(sure, LAYERS, outcomes)
    wanted = sorted({math.inf, *sure.ravel().tolist()}, reverse=True)
    reached = [t for t in wanted if t in curve.thresholds]
    assert len(reached) == len(curve.thresholds)  # descending, each once
    at = 0
    for t in wanted:  # between two of its points nothing changes
        at = at + 1 if at + 1 < len(reached) and t <= reached[at + 1] else at
        places = leaving(sure, t)
        assert curve.layers[at] == pytest.approx(np.mean([LAYERS[k] for k in places]), abs=1e-9)
        found = headline(task.score(taken(logits, places), None).rules)[metric]
        assert curve.scores[at] == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_at_the_ends_all_windows_leave_at_the_last_and_at_the_first_layer(case: str) -> None:
    name, metric, logits = CASES[case]
    criteria = fitting_criteria(None, scores=metric == "pearson")
    task, threshold = load_task(name), 0.0 if name == "squad_v2" else None
    if metric == "matthews" and name == "mnli":
        return  # which is not what stands for the task
    found = exits_of_logits(task, logits, LAYERS, criteria, threshold=threshold)
    assert found.criteria == criteria
    assert (found.mean_layers[:, 0] == LAYERS[-1]).all()
    assert (found.scores[:, 0] == found.fixed[-1]).all()
    assert np.isnan(found.thresholds[:, 0]).all()
    for k in range(len(criteria)):
        last = np.flatnonzero(np.isfinite(found.mean_layers[k]))[-1]
        assert found.mean_layers[k, last] == LAYERS[0]
        assert found.scores[k, last] == found.fixed[0]
    for of, score in zip(logits, found.fixed, strict=True):
        own = headline(task.score(of, None).rules)[metric]
        assert score == pytest.approx(own, abs=1e-9)
    assert (found.least <= LAYERS[-1]).all()
    assert (found.least_scores >= found.fixed[-1] - 1).all()
    for k, (layers, score) in enumerate(zip(found.least, found.least_scores, strict=True)):
        shown = np.flatnonzero(found.mean_layers[k] == layers)
        assert all(found.scores[k, at] == score for at in shown)


def test_the_metrics_are_those_of_the_tasks() -> None:
    logits = of_classes(1, classes=2)
    gold = np.array([item.label for item in logits[0].windows.items])
    said = logits[1].arrays["logits"].argmax(1)
    for task, name, of in (
        ("cola", "matthews", metrics.matthews),
        ("wikiqa_pairs", "f1", metrics.f1),
    ):
        outcomes = outcomes_of(load_task(task), logits, name, None)
        score = outcomes.metric(outcomes.total(np.ones(len(gold), np.int64))[None])
        assert score[0] == pytest.approx(of(said, gold), abs=1e-9)


def pabee(said: Sequence[float], patience: int, same: Any) -> int:
    """The output layer at which the loop of Zhou et al. (2020, section 3.2) stops."""
    counter = 0
    for i in range(len(said)):
        if i:
            counter = counter + 1 if same(said[i - 1], said[i]) else 0
        if counter == patience:
            return i
    return len(said) - 1


@pytest.mark.parametrize("patience", [0, 1, 2, 3])
def test_patience_is_that_of_pabee(patience: int) -> None:
    for logits, same in (
        (of_classes(8, outputs=8), lambda a, b: a == b),
        (of_scores(9, outputs=8), lambda a, b: abs(a - b) < 1.2),
    ):
        arrays = [of.arrays for of in logits]
        sure = confidence("patience", arrays, logits[0].windows.n_tokens, 1.2)
        values = np.stack([x["logits"].astype(np.float64) for x in arrays], axis=1)
        said = values[..., 0] if values.shape[-1] == 1 else values.argmax(-1)
        assert leaving(sure, patience) == [pabee(list(row), patience, same) for row in said]


def test_confidences_are_what_they_are_called() -> None:
    logits = of_classes(10)
    arrays, n = [of.arrays for of in logits], logits[0].windows.n_tokens
    p = torch.tensor(np.stack([x["logits"] for x in arrays[:-1]], 1)).double().softmax(-1)
    entropy = torch.distributions.Categorical(probs=p).entropy().numpy()
    np.testing.assert_allclose(confidence("entropy", arrays, n), -entropy, atol=1e-9)
    best = p.max(-1).values.numpy()
    np.testing.assert_allclose(confidence("probability", arrays, n), best, atol=1e-12)

    spans = of_questions(11, spans=True)
    n, first = spans[0].windows.n_tokens, spans[0].arrays
    ends = [torch.tensor(first[f"{at}_logits"]).double().view(len(n), 8) for at in ("start", "end")]
    both = [x.softmax(-1) for x in ends]
    found = [torch.distributions.Categorical(probs=x).entropy() for x in both]
    arrays = [of.arrays for of in spans]
    mean = ((found[0] + found[1]) / 2).numpy()
    np.testing.assert_allclose(confidence("entropy", arrays, n)[:, 0], -mean, atol=1e-9)
    product = (both[0].max(-1).values * both[1].max(-1).values).numpy()
    np.testing.assert_allclose(confidence("probability", arrays, n)[:, 0], product, atol=1e-12)


def test_a_task_that_is_scored_otherwise_is_refused() -> None:
    class Halves(type(load_task("mnli"))):  # type: ignore[misc]
        def score(self, dev: Logits, tune: Logits | None) -> Any:
            found = super().score(dev, tune)
            found.rules["argmax"]["metrics"]["accuracy"] /= 2
            return found

    task: Task = Halves("mnli")
    with pytest.raises(InputError, match="mnli computes its accuracy in a way of its own"):
        exits_of_logits(task, of_classes(0), LAYERS, ["entropy"])
    with pytest.raises(InputError, match="is scored by spearman"):
        outcomes_of(load_task("stsb"), of_scores(0), "spearman", None)


@pytest.fixture(scope="module")
def space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Four layers, each with an output layer, that tell answerable questions."""
    folder = tmp_path_factory.mktemp("exits")
    options = answerable_options(tiny_bert, folder)
    options |= {"variant": ("copy:2", "exits-by-depth:1+2+3"), "save_at": ("1e",), "epochs": 1.0}
    finetune(folder / "workspace", FinetuneOptions(**options))
    workspace = Workspace.find(folder / "workspace")
    extract(workspace, "1e", encoding="float32", precision="32", shard_tokens=64)
    return workspace


def test_output_layers_say_of_stored_states_what_they_say_in_the_encoder(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertvision.pipelines.analysis import exits as run

    seen: list[Sequence[Logits]] = []
    real = run.exits_of_logits

    def kept(task: Task, logits: Sequence[Logits], *args: Any, **more: Any) -> Any:
        seen.append(logits)
        return real(task, logits, *args, **more)

    with monkeypatch.context() as patched:
        patched.setattr(run, "exits_of_logits", kept)
        patched.setattr(BertModel, "forward", None)  # it is not run
        found = bertvision.exits("1e", split="tune", criterion="entropy", workspace=space.root)
    assert found.layers == (1, 2, 3, 4)
    np.testing.assert_allclose(found.weights, np.array([0.1, 0.2, 0.3, 0.4]))
    snapshot = load_snapshot(space.snapshot_dir("1e"))
    windows = space.windows("tune", snapshot.tokenizer)
    (logits,) = seen
    for row in range(len(windows)):
        a, n = windows.first_token[row], windows.n_tokens[row]
        ids = torch.tensor(windows.input_ids[a : a + n]).long().unsqueeze(0)
        types = torch.tensor(windows.token_type_ids[a : a + n]).long().unsqueeze(0)
        with torch.inference_mode():
            output = snapshot.model(input_ids=ids, token_type_ids=types, output_hidden_states=True)
            states, exits = output.hidden_states, exits_of(snapshot.model)
            own = [exits(layer, states[layer], "classification")[0][0] for layer in (1, 2, 3)]
        for of_layer, expected in zip(logits, own, strict=False):
            stored = of_layer.arrays["logits"][row]
            np.testing.assert_allclose(stored, expected.numpy(), atol=1e-4)
        np.testing.assert_allclose(
            logits[3].arrays["logits"][row], output.logits[0].numpy(), atol=1e-4
        )


def test_the_score_of_all_layers_is_the_encoders_own(space: Workspace, tmp_path: Path) -> None:
    plot, csv = tmp_path / "exits.svg", tmp_path / "exits.csv"
    found = bertvision.exits("1e", plot=plot, workspace=space.root)
    show(found, True, csv)
    text = (space.bert_dir("1e") / "metrics.json").read_text()
    scores = BertScores.model_validate_json(text)
    own = headline(scores.rules)
    assert found.fixed[-1] == own["accuracy"] == found.scores[0, 0]
    assert found.trivial == own["majority"]
    assert plot.read_text().startswith("<svg")
    assert csv.read_text().count("fixed") == 4
    kept = json.loads(done("exits", "1e", "-w", space.root, "--json"))  # what was kept
    assert kept == found.to_json()
    row = found.shown()[-1]
    assert row["fixed"] == row["entropy"] == row["patience"]
    report = bertvision.report(workspace=space.root, out=tmp_path / "report")
    assert "exits-1e-dev" in report.figures
    assert "exits" in report.tables


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"criterion": "entrop"}, "there is none; did you mean entropy"),
        ({"split": "train"}, "is kept of dev and tune alone"),
        ({"tolerance": 0.5}, "is for scores, and answerable has none"),
        ({"plot": "exits.png"}, "a file that ends in .svg"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    space: Workspace, asked: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        bertvision.exits("1e", workspace=space.root, **asked)


def test_a_snapshot_without_output_layers_is_refused_by_name(workspace: Workspace) -> None:
    with pytest.raises(InputError, match="1e of .* has no trained output layer below its last"):
        bertvision.exits("1e", workspace=workspace.root)
    with pytest.raises(UnknownNameError, match="has no snapshot 2e"):
        bertvision.exits("2e", workspace=workspace.root)
    for name in ("entropy", "probability"):
        with pytest.raises(InputError, match=f"the task gives scores, which have no {name}"):
            fitting_criteria([name], scores=True)


def test_spans_leave_early_too(tiny_bert: Path, tmp_path: Path) -> None:
    data = {name: write_squad(tmp_path / f"{name}.json", n, n) for name, n in _SIZES.items()}
    finetune(
        tmp_path / "workspace",
        FinetuneOptions(
            model=str(tiny_bert),
            **data,
            **{"save_at": ("1e",), "batch_size": 8, "lr": 1e-3, "precision": "32"},
            **{"tune_fraction": 0.3, "variant": ("exits:1",)},
        ),
    )
    workspace = Workspace.find(tmp_path / "workspace")
    extract(workspace, "1e", encoding="float32", precision="32", splits=("dev",), shard_tokens=512)
    found = bertvision.exits("1e", workspace=workspace.root)
    scores = BertScores.model_validate_json((workspace.bert_dir("1e") / "metrics.json").read_text())
    assert found.metric == "f1"
    assert found.fixed[-1] == pytest.approx(scores.rules["n-best"]["metrics"]["f1"], abs=1e-9)
    assert found.layers == (1, 2)


_SIZES = {"train": 16, "dev": 6}


def test_scores_leave_by_patience_alone(tiny_bert: Path, tmp_path: Path) -> None:
    """Scores of sentences, by how many words they have."""
    for name, n in (("train", 24), ("dev", 10)):
        words = ["anna boris clara david paris"[: 6 * (1 + i % 5) - 1] for i in range(n)]
        lines = [f"{text} {i},{len(text.split()) + 0.5}" for i, text in enumerate(words)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    options = FinetuneOptions(
        **{"model": str(tiny_bert), "task": "csv", "data": str(tmp_path), "save_at": ("1e",)},
        **{"lr": 1e-3, "precision": "32", "variant": ("copy:2", "exits-learned:all")},
    )
    finetune(tmp_path / "ws", options)
    extract(Workspace.find(tmp_path / "ws"), "1e", encoding="float32", precision="32")
    found = bertvision.exits("1e", workspace=tmp_path / "ws")
    assert (found.metric, found.criteria, found.layers) == ("pearson", ("patience",), (1, 2, 3, 4))
    assert found.weights.sum() == pytest.approx(1)
    assert found.weights.std() > 1e-6  # learned
    assert found.trivial is None
    assert found.tolerance is not None
    never = bertvision.exits("1e", tolerance=1e-9, workspace=tmp_path / "ws")
    assert never.mean_layers[0, -1] == 1  # without patience
    assert never.mean_layers[0, 0] == 4
    always = bertvision.exits("1e", tolerance=1e9, workspace=tmp_path / "ws")
    assert always.mean_layers[0].tolist() == [4, 3, 2, 1]
    assert always.thresholds[0, 1:].tolist() == [2, 1, 0]
    with pytest.raises(InputError, match="the task gives scores, which have no entropy"):
        bertvision.exits("1e", criterion="entropy", workspace=tmp_path / "ws")
