"""`bertvision similarity`: data, metrics, the trained scorer, and from files to the report."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from byhand import change
from processes import run_code
from scipy import stats
from similarities import SIZES, write_glue_sts, write_sick, write_sts
from terminal import cells, done, run
from transformers import AutoModel, AutoTokenizer

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.readouts.options import SimilarityOptions
from bertvision.pipelines.readouts.similarity import (
    read_parts,
    target_distribution,
    train_scorer,
    word_overlap,
)
from bertvision.pipelines.readouts.similarity_results import (
    SimilarityFile,
    accuracy,
    agreement,
    notes,
)
from bertvision.pipelines.tasks.sentences.similarity import ENTAILMENT, read_similarity
from bertvision.pipelines.uncertainty import weighted_pearson, weighted_ranks
from bertvision.pipelines.workspace.dataset import Dataset, add_dataset

EXACT = ["--encoding", "float32", "--precision", "32"]
FAST = ["--epochs", 4, "--resamples", 50]
DATA = ["sick", "sts_benchmark", "sts14"]
CPU = torch.device("cpu")


def test_ranks_and_correlations_of_a_sample_are_those_of_the_values_drawn() -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 5, 40).astype(float)  # with many ties
    y = x + random.normal(size=40)
    counts = random.multinomial(40, np.full(40, 1 / 40), 20).astype(float)
    ranks = weighted_ranks(x, counts)
    linear = weighted_pearson(x[None], y[None], counts)
    ranked = weighted_pearson(ranks, weighted_ranks(y, counts), counts)
    for i, drawn in enumerate(counts.astype(int)):
        rows = np.repeat(np.arange(40), drawn)
        np.testing.assert_allclose(np.repeat(ranks[i], drawn), stats.rankdata(x[rows]))
        assert linear[i] == pytest.approx(100 * stats.pearsonr(x[rows], y[rows])[0])
        assert ranked[i] == pytest.approx(100 * stats.spearmanr(x[rows], y[rows])[0])


def test_means_over_sub_sets_are_sentevals_and_all_is_one_sample() -> None:
    random = np.random.default_rng(1)
    subset = np.repeat([0, 1], [30, 10])
    gold = random.normal(size=40)
    predicted = gold + random.normal(size=40) + 5 * subset  # each sub-set on a scale of its own
    found = {a.subset: a for a in agreement(predicted[None], gold, subset, ["a", "b"], 200)}
    a, b = (stats.spearmanr(predicted[subset == i], gold[subset == i])[0] * 100 for i in (0, 1))
    assert found["a"].spearman.value == pytest.approx(a)
    assert found["mean"].spearman.value == pytest.approx((a + b) / 2)
    assert found["wmean"].spearman.value == pytest.approx((3 * a + b) / 4)
    whole = 100 * stats.spearmanr(predicted, gold)[0]
    assert found["all"].spearman.value == pytest.approx(whole)
    assert whole < min(a, b)
    assert [found[name].pairs for name in ("a", "b", "all")] == [30, 10, 40]
    for one in found.values():
        assert one.spearman.low < one.spearman.value < one.spearman.high


def test_an_interval_of_a_correlation_is_about_that_of_theory() -> None:
    random = np.random.default_rng(2)
    gold = random.normal(size=400)
    predicted = gold + random.normal(size=400)
    (found,) = agreement(predicted[None], gold, np.zeros(400, np.int64), ["one"], 1000)
    z = np.arctanh(found.pearson.value / 100)  # Fisher's
    for end, value in ((-1.96, found.pearson.low), (1.96, found.pearson.high)):
        assert value == pytest.approx(100 * np.tanh(z + end / np.sqrt(397)), abs=1.5)


def test_a_constant_scorer_has_no_correlation_and_seeds_have_a_deviation() -> None:
    gold, flat = np.arange(10.0), np.zeros(10)
    (found,) = agreement(np.stack([gold, flat]), gold, np.zeros(10, np.int64), ["one"], 50)
    assert found.pearson.value == found.spearman.value == pytest.approx(50)
    assert found.pearson.sd == pytest.approx(100 / np.sqrt(2))
    right = np.array([[True, True, False, False], [True, False, False, False]])
    assert accuracy(right, 50).value == pytest.approx(37.5)


def test_the_target_distribution_has_the_score_as_its_mean() -> None:
    classes, scores = np.arange(1, 6), np.array([1.0, 3.3, 4.9, 5.0])
    found = target_distribution(scores, classes)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-6)
    np.testing.assert_allclose(found @ classes, scores, rtol=1e-6)
    assert found[1] == pytest.approx([0, 0, 0.7, 0.3, 0], abs=1e-6)


def test_the_trained_scorer_learns_a_softmax_regression() -> None:
    random = np.random.default_rng(3)
    x = random.normal(size=(600, 8)).astype(np.float32) * 1e-3 + 7  # small beside its mean
    logits = (x - 7) @ (random.normal(size=(8, 4)) * 3e3)
    labels = logits.argmax(1)
    parts = x[:400], x[400:500], x[500:]
    targets = np.eye(4, dtype=np.float32)[labels[:400]]
    options = SimilarityOptions(epochs=60, seeds=3, lr=0.05, patience=20)

    def quality(p: Any) -> float:
        return float((p.argmax(1) == labels[400:500]).mean())

    found = train_scorer(parts, targets, quality, options, CPU)
    right = (found.probabilities.argmax(2) == labels[500:]).mean(1)
    assert right.min() > 0.9
    assert len({p.tobytes() for p in found.probabilities}) == 3  # seeds differ
    alone = train_scorer(
        parts, targets, quality, SimilarityOptions(epochs=60, seeds=1, lr=0.05, patience=20), CPU
    )
    np.testing.assert_allclose(alone.probabilities[0], found.probabilities[0], atol=1e-3)
    x[0, 0] = np.nan
    with pytest.raises(NonFiniteError, match="store verify"):
        train_scorer(parts, targets, quality, options, CPU)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sts")
    write_sick(folder)
    write_glue_sts(folder / "STS-B")
    write_sts(folder / "2014", {"images": 20, "OnWN": 12})
    return folder


@pytest.fixture(scope="module")
def measured(
    tiny_bert: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    """A workspace of the tiny BERT with similarities, and what the command said of them."""
    root = tmp_path_factory.mktemp("similarity") / "workspace"
    text = done(
        *("similarity", *DATA, "--data", data, "--model", tiny_bert, "-w", root),
        *("--untrained", "--layers", "all,first+last", *EXACT, *FAST, "--json"),
    )
    return root, json.loads(text)


@pytest.fixture
def copy(measured: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    shutil.copytree(measured[0], tmp_path / "workspace")
    return tmp_path / "workspace"


def test_every_data_set_has_its_baselines_and_its_scorers(
    measured: tuple[Path, list[dict[str, Any]]],
) -> None:
    rows = [r for r in measured[1] if r["subset"] == "all"]
    for name, scorers in (
        ("sick", ["word overlap", "majority", "cosine", "trained", "trained"]),
        ("sts_benchmark", ["word overlap", "cosine", "trained"]),
        ("sts14", ["word overlap", "cosine"]),
    ):
        mine = [r for r in rows if r["dataset"] == name]
        systems = list(dict.fromkeys((r["scorer"], r["target"]) for r in mine))
        assert [s for s, _ in systems] == scorers
        for r in mine:
            if r["tag"]:
                assert r["layers"] in ("0", "1", "2", "1+2")
        assert {r["tag"] for r in mine if r["tag"]} == {"0e", "untrained"}
    overlap = next(r for r in rows if r["scorer"] == "word overlap")
    assert overlap["spearman"] > 80  # as these data were made
    majority = next(r for r in rows if r["scorer"] == "majority")
    judged = [r for r in rows if r["target"] == "entailment" and r["scorer"] == "trained"]
    assert len(judged) == 2 * 4
    for r in judged:
        assert r["accuracy_low"] <= r["accuracy"] <= r["accuracy_high"]
        assert (r["pairs"], r["seeds"]) == (SIZES["SICK_test_annotated.txt"], 3)
    assert 0 < majority["accuracy"] < 100
    assert {r["scored_part"] for r in rows if r["dataset"] == "sts_benchmark"} == {"dev"}
    related = [r for r in rows if r["scorer"] == "trained" and r["mse"] is not None]
    assert len(related) == 2 * 2 * 4  # data sets × snapshots × inputs


def test_cosines_are_those_of_the_encoders_own_hidden_states(
    measured: tuple[Path, list[dict[str, Any]]], tiny_bert: Path, data: Path
) -> None:
    found = read_similarity("sts14", str(data))
    model = AutoModel.from_pretrained(tiny_bert).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)

    def states(text: str) -> torch.Tensor:
        with torch.inference_mode():
            output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        return torch.stack(output.hidden_states)[:, 0].mean(1)  # (layers, hidden)

    vectors = torch.stack([states(text.text) for text in found.texts])
    u, v = (vectors[[pair[i] for pair in found.pairs]] for i in (2, 3))
    scores = torch.cosine_similarity(u, v, dim=-1).T.numpy()
    gold = np.array([pair.score for pair in found.pairs])
    inside = np.array([pair.subset == "images" for pair in found.pairs])
    for layer, values in enumerate(scores):
        rows = {
            r["subset"]: r
            for r in measured[1]
            if (r["dataset"], r["scorer"], r["tag"], r["layers"])
            == ("sts14", "cosine", "0e", str(layer))
        }
        assert list(rows) == ["all", "mean", "wmean", "images", "OnWN"]
        theirs = 100 * stats.pearsonr(values[inside], gold[inside])[0]
        assert rows["images"]["pearson"] == pytest.approx(theirs, abs=0.1)
        assert rows["all"]["pearson"] == pytest.approx(
            100 * stats.pearsonr(values, gold)[0], abs=0.1
        )


def test_the_best_layer_is_chosen_on_held_out_pairs_alone(
    measured: tuple[Path, list[dict[str, Any]]],
) -> None:
    rows = [r for r in measured[1] if r["subset"] == "all" and r["tag"]]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for r in rows:
        key = (r["dataset"], r["target"], r["scorer"], r["tag"])
        groups.setdefault(key, []).append(r)
    for (name, *_), mine in groups.items():
        best = [r for r in mine if r["best"]]
        single = [r["dev"] for r in mine if "+" not in r["layers"]]
        if name == "sts14":  # nothing to choose on
            assert (best, set(single)) == ([], {None})
        else:
            assert [r["dev"] for r in best] == [max(single)]


def test_a_second_call_measures_nothing_again(copy: Path) -> None:
    folder = copy / "similarity"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/*.json")}
    assert len(before) == 3 * 2
    text = done("similarity", *DATA, "-w", copy, "--untrained", *FAST)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*/*.json")} == before
    rows = cells(text.split("\n\n")[0])
    assert rows[0][:6] == ["data", "scorer", "snapshot", "pool", "layers", "pairs"]
    assert "sts14: 32 pairs of test are scored; 11 that nobody judged are left out" in text
    assert "without the sub-sets deft-forum, deft-news" in text
    assert "sts_benchmark: 30 pairs of dev are scored" in text
    assert "held out of train" in text


KILLED = """
import os, signal, sys
from bertvision.pipelines.readouts.similarity_results import SimilarityFile
from test_similarity import measure_sick

write, calls = SimilarityFile.write, []
def killing(file, root):
    write(file, root)
    calls.append(file)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
SimilarityFile.write = killing
measure_sick(sys.argv[1])
"""


def measure_sick(root: Path | str) -> None:
    """Measure what `measured` has of SICK at 0e."""
    done("similarity", "sick", "-w", root, "--layers", "all,first+last", *FAST)


def test_a_killed_run_keeps_its_scores_and_is_finished_with_the_same_file(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of a snapshot and a pooling too, which may take hours."""
    (file,) = (copy / "similarity" / "sick").glob("0e-*.json")
    expected = file.read_bytes()
    file.unlink()
    code = run_code(KILLED, copy, 5)
    assert code.returncode == -signal.SIGKILL, code.stderr
    begun = json.loads(file.read_text())["scores"]
    assert len(begun) == 5
    written: list[SimilarityFile] = []
    write = SimilarityFile.write
    monkeypatch.setattr(
        SimilarityFile, "write", lambda self, root: written.append(self) or write(self, root)
    )
    measure_sick(copy)
    assert file.read_bytes() == expected
    assert len(written) == len(json.loads(expected)["scores"]) - len(begun) == 7


def test_notes_say_held_out_of_train_only_where_there_is_a_train() -> None:
    row = {"dataset": "sts", "subset": "all", "pairs": 30, "scored_part": "dev", "unscored": 0}
    row |= {"missing": "", "train": None, "chosen_on": None, "doubts": None}
    scored = "sts: 30 pairs of dev are scored (the scores of test are not there)"
    assert notes([row]) == [f"{scored}."]
    learned = f"{scored}; 54 train, 6 are chosen on (held out of train)."
    assert notes([row | {"train": 54, "chosen_on": 6}]) == [learned]
    of_test = notes([row | {"scored_part": "test", "train": 54, "chosen_on": 6}])
    assert of_test == ["sts: 30 pairs of test are scored; 54 train, 6 are chosen on."]


def test_the_csv_has_the_sub_sets(copy: Path, tmp_path: Path) -> None:
    path = tmp_path / "sts.csv"
    done("similarity", "sts14", "-w", copy, "--scorers", "cosine", *FAST, "--csv", path)
    with path.open() as file:
        subsets = [row["subset"] for row in csv.DictReader(file) if row["scorer"] == "cosine"]
    assert subsets[:5] == ["all", "mean", "wmean", "images", "OnWN"]


def test_the_report_has_a_section_with_the_number_of_pairs(copy: Path) -> None:
    done("report", "-w", copy)
    page = (copy / "report" / "index.html").read_text()
    assert "Similarity of sentences" in page
    assert "40 pairs of sick" in page
    table = json.loads((copy / "report" / "tables" / "similarity.json").read_text())
    assert table["rows"][0]["scorer"] == "word overlap"
    by_layer = json.loads((copy / "report" / "tables" / "similarity_layers.json").read_text())
    for line in by_layer["rows"]:
        of = [
            row
            for row in table["rows"]
            if all(row[key] == line[key] for key in ("dataset", "scorer", "tag", "pooling"))
        ]
        of = [row for row in of if "+" not in row["layers"]]
        for row in of:
            number, _, best = row["layers"].partition(" ")
            assert line[f"layer_{number}"] == row["spearman"]
            assert (line["best"] == number) == bool(best)
        assert of
    names = {path.stem for path in (copy / "report" / "tables").glob("*.csv")}
    assert names == {
        *("similarity", "similarity_layers", "similarity_subsets", "similarity_entailment")
    }


def test_similarities_of_other_weights_are_left_out_and_named_with_what_makes_them(
    copy: Path,
) -> None:
    """The snapshot was made anew, of another seed or other data."""
    change(copy / "snapshots" / "0e" / "snapshot.json", weights_sha256="0" * 64)
    text = done("report", "-w", copy, "--json")
    left_out = json.loads(text)["left_out"]
    assert len(left_out) == 3
    (sick,) = (message for message in left_out if "/sick/0e-mean-" in message)
    assert "is of other weights than" in sick
    assert "`bertvision similarity sick --checkpoint 0e --pool mean`" in sick
    for name in ("similarity", "similarity_subsets", "similarity_entailment"):
        table = json.loads((copy / "report" / "tables" / f"{name}.json").read_text())
        assert {row["tag"] for row in table["rows"]} <= {None, "untrained"}
    result = run("table", "similarity", "-w", copy)
    assert "left out: " in result.stderr
    assert "0e-mean" in result.stderr


def test_what_cannot_be_measured_is_refused(
    tiny_bert: Path, copy: Path, data: Path, tmp_path: Path
) -> None:
    result = run("similarity", "sick", "-w", copy, "--scorers", "dot")
    assert (result.exit_code, "--scorers 'dot': choose one of cosine" in result.stderr) == (2, True)
    result = run("probe", "sick", "-w", copy)
    assert (result.exit_code, "bertvision similarity sick" in result.stderr) == (2, True)
    result = run(
        *("finetune", "--model", tiny_bert, "--task", "sick", "--data", data),
        *("-w", tmp_path / "w"),
    )
    assert (result.exit_code, "bertvision similarity" in result.stderr) == (2, True)
    (tmp_path / "own.csv").write_text("text,label\nGood.,1\nBad.,0\n")
    result = run("similarity", "csv", "--data", tmp_path / "own.csv", "-w", copy)
    assert (result.exit_code, "has no similarities" in result.stderr) == (2, True)


def test_data_that_changed_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    folder = write_sts(tmp_path / "2014", {"images": 6})
    arguments = ["similarity", "sts14", "-w", tmp_path / "w", "--layers", "last", *EXACT, *FAST]
    done(*arguments, "--model", tiny_bert, "--data", folder)
    path = folder / "images.test.tsv"
    path.write_text(path.read_text().replace("book", "king", 1))
    result = run(*arguments)
    assert result.exit_code == 2
    assert "changed since" in result.stderr


def added(name: str, source: Path, root: Path) -> Dataset:
    return add_dataset(root, name, str(source))


def test_sick_is_read_of_its_three_files_with_both_judgements(tmp_path: Path) -> None:
    data = read_similarity("sick", str(write_sick(tmp_path / "SICK").parent))
    assert Counter(pair.part for pair in data.pairs) == Counter(
        dict(zip(("train", "dev", "test"), SIZES.values(), strict=True))
    )
    first = data.pairs[0]
    line = (tmp_path / "SICK" / "SICK_train.txt").read_text().splitlines()[1].split("\t")
    assert [data.texts[first.first].text, data.texts[first.second].text] == line[1:3]
    assert (first.score, ENTAILMENT[first.label or 0]) == (float(line[3]), line[4])
    assert len({text.text for text in data.texts}) == len(data.texts)


def test_pairs_that_nobody_judged_are_left_out_and_counted(tmp_path: Path) -> None:
    write_sts(tmp_path / "2016", {"headlines": 12, "plagiarism": 9})
    data = read_similarity("sts16", str(tmp_path))
    assert Counter(pair.subset for pair in data.pairs) == {"headlines": 12, "plagiarism": 9}
    assert data.unscored == {"headlines": 4, "plagiarism": 3}
    assert data.missing == ("answer-answer", "postediting", "question-question")
    assert not any(text.text.startswith("nobody") for text in data.texts)


def test_the_form_of_senteval_gives_the_same(tmp_path: Path) -> None:
    ours = write_sts(tmp_path / "2014", {"OnWN": 8, "images": 8})
    theirs = tmp_path / "STS" / "STS14-en-test"
    theirs.mkdir(parents=True)
    for path in ours.iterdir():
        rows = [line.split("\t") for line in path.read_text().splitlines()]
        name = path.name.removesuffix(".test.tsv")
        pairs = "".join(f"{a}\t{b}\n" for _, a, b in rows)
        with gzip.open(theirs / f"STS.input.{name}.txt.gz", "wt") as file:
            file.write(pairs)
        (theirs / f"STS.gs.{name}.txt").write_text("".join(f"{s}\n" for s, _, _ in rows))
    one, other = read_similarity("sts14", str(ours)), read_similarity("sts14", str(theirs))
    assert (one.pairs, one.texts, one.unscored) == (other.pairs, other.texts, other.unscored)
    (theirs / "STS.gs.OnWN.txt").write_text("1\n")
    with pytest.raises(InputError, match=r"has 1 lines, but .*OnWN"):
        read_similarity("sts14", str(theirs))


def test_the_benchmark_itself_has_no_header(tmp_path: Path) -> None:
    for name, score in (("train", "1.0"), ("dev", "2.5"), ("test", "5")):
        row = f"main-captions\tMSRvid\t2012test\t0001\t{score}\tA {name}.\tB {name}.\tsource\n"
        (tmp_path / f"sts-{name}.csv").write_text(row)
    data = read_similarity("sts_benchmark", str(tmp_path))
    assert [(pair.part, pair.score) for pair in data.pairs] == [
        ("train", 1.0),
        ("dev", 2.5),
        ("test", 5.0),
    ]
    assert [text.text for text in data.texts[:2]] == ["A train.", "B train."]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("6\tA\tB", "the score is '6'"),
        ("nan\tA\tB", "the score is 'nan'"),
        ("much\tA\tB", "the score is 'much'"),
        ("1\t \tB", "the sentence1 is empty"),
        ("1\tA", "has 2 fields, expected are 3: score, sentence1"),
    ],
)
def test_malformed_lines_are_refused_by_file_and_line(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "images.test.tsv").write_text(f"1\tA\tB\n{line}\n")
    with pytest.raises(InputError, match=rf"images\.test\.tsv, line 2: .*{told}"):
        read_similarity("sts14", str(tmp_path))


def test_a_folder_of_another_year_is_refused(tmp_path: Path) -> None:
    write_sts(tmp_path, {"OnWN": 3, "tweet-news": 3})
    with pytest.raises(InputError, match="tweet-news.* is no sub-set of sts12"):
        read_similarity("sts12", str(tmp_path))
    with pytest.raises(InputError, match="holds none of the files of sick"):
        read_similarity("sick", str(tmp_path))


def test_where_test_has_no_scores_dev_is_scored_and_train_gives_what_is_chosen_on(
    tmp_path: Path,
) -> None:
    dataset = added("sts_benchmark", write_glue_sts(tmp_path / "STS-B").parent, tmp_path / "w")
    parts = read_parts(dataset, 0.2)
    assert parts.train is not None
    assert parts.chosen_on is not None
    assert (parts.scored_part, len(parts.scored)) == ("dev", 30)
    assert len(parts.train) + len(parts.chosen_on) == 60
    trained = {*parts.train.first.tolist(), *parts.train.second.tolist()}
    assert not trained & {*parts.chosen_on.first.tolist(), *parts.chosen_on.second.tolist()}
    assert parts.classes.tolist() == [0, 1, 2, 3, 4, 5]
    assert not parts.entailment


def test_pairs_and_sentences_on_both_sides_are_counted(tmp_path: Path) -> None:
    folder = write_sick(tmp_path / "SICK")
    train = (folder / "SICK_train.txt").read_text().splitlines()
    number, first, second, score, judged = train[1].split("\t")
    with (folder / "SICK_test_annotated.txt").open("a") as file:
        file.write("\t".join([number, second, first, score, judged]) + "\n")  # turned around
    parts = read_parts(added("sick", folder, tmp_path / "w"), 0.1)
    assert parts.soundness["test"].shared["train"] == 1
    assert parts.sentences["test"].shared["train"] > 1
    assert parts.entailment


def test_word_overlap_is_jaccards(tmp_path: Path) -> None:
    parts = read_parts(added("sick", write_sick(tmp_path / "SICK"), tmp_path / "w"), 0.1)
    texts = ["The king, the book.", "the KING", "?"]
    pairs = replace(parts.scored, first=np.array([0, 0, 0]), second=np.array([0, 1, 2]))
    assert word_overlap(texts, pairs).tolist() == pytest.approx([1, 2 / 3, 0])
