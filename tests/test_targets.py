"""Probes of words and spans: their forms, their vectors, and what is learned and scored of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from probing import problem
from sklearn.linear_model import LogisticRegression

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.readouts import targets
from bertvision.pipelines.readouts.inputs import read_inputs
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import Inputs
from bertvision.pipelines.readouts.probe_data import read_data
from bertvision.pipelines.readouts.probe_measures import online_code
from bertvision.pipelines.readouts.probe_results import ProbeFile
from bertvision.pipelines.readouts.targets import (
    SPAN_POOLINGS,
    TargetSplit,
    check_span_poolings,
    span_tokens,
)
from bertvision.pipelines.tasks.data import Target, TaskConfig
from bertvision.pipelines.tasks.spans import SpanSentence, SpansTask
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.treebank import words_of_tokens
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import Dataset, add_dataset, planned_dataset
from bertvision.pipelines.workspace.snapshots import workspace_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}
LONG = "founded in berlin in 1901 by anna and rome"
ROWS = [
    {"text": "anna founded the firm", "targets": [[[0, 1], [1, 2], "subject"]]},
    {"tokens": ["the", "firm", "was", "founded"], "targets": [[[0, 2], [3, 4], "object"]]},
    {"text": "in rome", "targets": []},
    {
        "text": f"anna was born {LONG}",  # whose end has no room in a window of 16 tokens
        "targets": [[[0, 1], [2, 3], "subject"], [[3, 5], [11, 12], "object"]],
    },
    *(
        {
            "text": f"tom was born in {place} and berlin",
            "targets": [[[0, 1], [2, 3], "subject"], [[2, 4], [4, 5], "object"]],
        }
        for place in ("rome", "1901", "the firm", "tom")
    ),
]


def rows(spans: int = 2) -> list[dict[str, Any]]:
    """The rows as files have them, with both spans or the first."""
    made = []
    for row in ROWS:
        targets = [
            {"span1": one, "label": label} | ({"span2": other} if spans == 2 else {})
            for one, other, label in row["targets"]
        ]
        made.append({**row, "targets": targets})
    return made


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path, **settings: Any) -> list[SpanSentence]:
    config = TaskConfig(name="spans", **settings)
    return load_task("spans").read(str(path), "all", config).items


@pytest.fixture(scope="module")
def space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Spans in windows of 16 tokens, and tags of 24 sentences, with all tokens in float32."""
    folder = tmp_path_factory.mktemp("targets")
    made = feature_workspace(folder / "ws", str(tiny_bert))
    add_dataset(made.root, "spans", str(write(folder / "arcs.jsonl", rows())), max_length=16)
    lines = []
    for i in range(24):
        name, place = ("anna", "tom")[i % 2], ("rome", "berlin", "1901")[i % 3]
        words = [name, "was", "born", "in", place, *["in"] * (i % 4)]
        lines += [f"{w}\t{'N' if w in (name, place) else 'F'}\n" for w in words] + ["\n"]
    (folder / "tags.conll").write_text("".join(lines))
    add_dataset(made.root, "tagging", str(folder / "tags.conll"))
    for task in ("arcs", "tagging"):
        bertvision.extract("0e", task=task, workspace=made.root, pool="none", **EXACT)
    return made


def data_of(space: Workspace, name: str, **options: Any) -> tuple[Dataset, Any]:
    data = space.dataset(name)
    tokenizer = workspace_tokenizer(space)
    return data, read_data(data, ProbeOptions(**options), lambda: tokenizer)


def test_both_forms_of_words_and_both_numbers_of_spans_are_read(tmp_path: Path) -> None:
    for spans in (1, 2):
        path = write(tmp_path / f"{spans}.jsonl", rows(spans))
        items = read(path)
        assert items[1].words == ("the", "firm", "was", "founded")
        assert items[1].targets == (Target(((0, 2), (3, 4))[:spans], "object"),)
        assert items[2].targets == ()
        task = SpansTask("spans")
        assert task.items_of(task.table(items)) == items
        assert task.read(str(path), "all", TaskConfig(name="spans")).classes == (
            *("object", "subject"),
        )


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"span1": [0, 3], "label": "x"}, r"span \[0, 3\].*0 ≤ first < end ≤ 2"),
        ({"span1": [1, 1], "label": "x"}, r"span \[1, 1\]"),
        ({"span1": [0, True], "label": "x"}, r"span \[0, True\]"),
        ({"span1": "0-1", "label": "x"}, "span '0-1'"),
        ({"label": "x"}, "span None"),
        ({"span1": [0, 1], "label": ["a", "b"]}, "a target of several labels is several targets"),
        ({"span1": [0, 1]}, "label None"),
        ([0, 1, "x"], "must be an object"),
    ],
)
def test_a_malformed_target_is_refused_with_its_line(
    tmp_path: Path, target: object, message: str
) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "in rome", "targets": [target]}, rows(1)[0]])
    with pytest.raises(InputError, match=f"a.jsonl, line 1: .*{message}"):
        read(path)
    assert len(read(path, skip_bad=True)) == 1


def test_targets_of_one_span_and_of_two_are_two_data_sets(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [rows(1)[0], rows(2)[1]])
    with pytest.raises(InputError, match="give them in two files"):
        read(path)


@pytest.mark.parametrize("pooling", SPAN_POOLINGS)
def test_vectors_are_poolings_of_the_tokens_of_the_words(space: Workspace, pooling: str) -> None:
    """By the states of each window, word by word; both spans end to end, layers behind that."""
    data, examples = data_of(space, "arcs", folds=2)
    assert examples.spans is not None
    split = TargetSplit(space, "0e", "arcs", "all", pooling, examples.spans["all"])
    stored, items = split.stored, data.items("all")
    expected = []
    for n, item in enumerate(items):
        (at,) = np.flatnonzero(stored.plan.example_id == n)
        states = stored.read([int(at)], [0, 2]).decode().numpy()
        begin = stored.plan.first_token[at]
        offsets = stored.array("offset_mapping")[begin : begin + len(states)]
        words = words_of_tokens(item.words, offsets)
        for target in item.targets:
            spans = [states[(words >= a) & (words < b)] for a, b in target.spans]
            if all(set(range(a, b)) <= set(words.tolist()) for a, b in target.spans):
                how = {"first": lambda x: x[0], "last": lambda x: x[-1], "max": lambda x: x.max(0)}
                how["mean"] = lambda x: x.astype(np.float64).mean(0)
                expected.append(np.concatenate([how[pooling](s) for s in spans], axis=-1))
    np.testing.assert_allclose(split.features([0, 2]), np.array(expected), atol=1e-6)
    assert split.width == 2 * stored.record.hidden_size
    joined = read_inputs(split, [(0, 2)])[:, 0]
    np.testing.assert_allclose(joined, np.array(expected).reshape(len(expected), -1), atol=1e-6)


def test_spans_that_the_window_cuts_off_are_left_out_and_counted(
    space: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    _, examples = data_of(space, "arcs", folds=2)
    assert examples.sizes == {"all": 11}
    assert "1 of 12 labelled spans of all of arcs have a word without a token" in caplog.text
    assert examples.texts[:4] == ["anna\tfounded", "the firm\tfounded", "anna\tborn", "tom\tborn"]


def test_words_of_a_sentence_stay_together_and_control_labels_go_by_word(space: Workspace) -> None:
    data, examples = data_of(space, "tagging", folds=4)
    words = [word for item in data.items("all") for word in item.words]
    sentence = np.repeat(range(24), [len(item.words) for item in data.items("all")])
    assert examples.texts == words
    assert examples.scored_clusters == sentence.tolist()
    for fold in examples.folds:
        parts = [set(sentence[rows]) for rows in fold]
        assert not parts[0] & parts[1]
        assert not (parts[0] | parts[1]) & parts[2]


def test_a_probe_of_words_is_that_of_scikit_learn_on_the_same_vectors(space: Workspace) -> None:
    bertvision.probe(
        *("tagging",),
        **{"pool": "first", "layers": "1", "solver": "lbfgs", "weight_decays": "1e-2"},
        **{"folds": 2, "control": True, "workspace": space.root},
    )
    (path,) = (space.root / "probes/tagging").glob("0e-first-*.json")
    file = ProbeFile.read(path)
    (record,) = file.probes
    _, examples = data_of(space, "tagging", folds=2)
    assert examples.spans is not None
    split = TargetSplit(space, "0e", "tagging", "all", "first", examples.spans["all"])
    x, right = split.features([1])[:, 0], []
    for fold in examples.folds:
        model = LogisticRegression(C=1 / (1e-2 * len(fold.train)), max_iter=1000)
        model.fit(x[fold.train].astype(np.float64), examples.labels[fold.train])
        right.append(model.predict(x[fold.test]) == examples.labels[fold.test])
    assert record.accuracy == pytest.approx(100 * np.concatenate(right).mean())
    assert file.clusters == examples.scored_clusters
    assert record.control is not None
    assert file.task == "tagging"


def test_what_is_of_windows_or_of_sentences_is_refused_of_words(space: Workspace) -> None:
    with pytest.raises(InputError, match="--pool cls: of the tokens of a word or a span choose"):
        check_span_poolings(["mean", "cls"])
    with pytest.raises(InputError, match="--group speaker: the examples of tagging are words"):
        data_of(space, "tagging", group="speaker")
    words = {"all": [SpanSentence("line 1", ("in", "rome"), ())]}
    data = Dataset(**{**vars(space.dataset("arcs")), "_items": words})
    tokenizer = workspace_tokenizer(space)
    with pytest.raises(InputError, match="arcs has no labels"):
        read_data(data, ProbeOptions(folds=2), lambda: tokenizer)


def test_a_label_that_training_lacks_counts_as_wrong(tiny_bert: Path, tmp_path: Path) -> None:
    """A number in dev, whose label no training has, beside a test without labels."""
    made = feature_workspace(tmp_path / "ws", str(tiny_bert))
    (tmp_path / "parted").mkdir()
    for split, count in (("train", 12), ("dev", 4), ("test", 2)):
        lines = []
        for i in range(count):
            words = ["anna", "was", "in", ("rome", "berlin")[i % 2], str(1901 + i)]
            labels = ["N", "F", "F", "N", *(["NUM"] if split == "dev" else [])]
            named = enumerate([] if split == "test" else labels)
            targets = [{"span1": [k, k + 1], "label": label} for k, label in named]
            lines.append({"tokens": words, "targets": targets})
        write(tmp_path / "parted" / f"{split}.jsonl", lines)
    add_dataset(made.root, "spans", str(tmp_path / "parted"))
    bertvision.probe(
        *("parted",),
        **{"layers": "1", "solver": "lbfgs", "weight_decays": "1e-4", "control": True},
        **{"workspace": made.root, **EXACT},
    )
    (path,) = (made.root / "probes/parted").glob("0e-mean-*.json")
    file = ProbeFile.read(path)
    assert file.examples["scored"] == 4 * 5
    assert file.probes[0].accuracy == 80
    assert file.classes == ["F", "N"]


def test_the_online_code_sends_sentences_as_a_whole() -> None:
    clusters = [str(i // 3) for i in range(90)]
    labels = np.arange(90) % 3
    features = Inputs(torch.from_numpy(np.eye(3, dtype=np.float32)[labels][:, None]))
    options = ProbeOptions(max_epochs=4)
    rows, held_out = torch.arange(60), torch.arange(60, 90)
    code = online_code(problem(features, labels, options), rows, held_out, clusters)
    assert code.ends == [3, 6, 9, 15, 30, 60]


def test_spans_that_overlap_take_no_more_memory_than_a_part(
    space: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, examples = data_of(space, "arcs", folds=2)
    assert examples.spans is not None
    split = TargetSplit(space, "0e", "arcs", "all", "mean", examples.spans["all"])
    whole = split.features()
    gathered: list[int] = []
    pool = targets.pool_numpy

    def counting(states: np.ndarray, *rest: Any) -> np.ndarray:
        gathered.append(len(states))
        return pool(states, *rest)

    monkeypatch.setattr(targets, "pool_numpy", counting)
    monkeypatch.setattr(targets, "_TOKENS_AT_ONCE", 4)
    np.testing.assert_array_equal(split.features(), whole)
    assert max(gathered) <= 4 + int(split.spans.length.max())


def test_a_word_that_the_window_cuts_is_no_word(tiny_bert: Path, tmp_path: Path) -> None:
    made = feature_workspace(tmp_path / "ws", str(tiny_bert))
    words = ["in"] * 12 + ["annaromefounded"]
    tokenizer = workspace_tokenizer(made)
    assert len(tokenizer.tokenize(words[-1])) > 2
    spans = [{"span1": [k, k + 1], "label": str(k)} for k in (0, 12)]
    path = str(write(tmp_path / "cut.jsonl", [{"tokens": words, "targets": spans}]))
    for length, whole in ((16, [True, False]), (32, [True, True])):
        data = planned_dataset(made.root, "spans", path, max_length=length)
        assert span_tokens(data, "all", tokenizer).whole.tolist() == whole
