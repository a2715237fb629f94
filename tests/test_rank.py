"""`bertvision rank`: reading questions with candidates, and from files to the table."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytrec_eval
import torch
from byhand import change, fields
from rankings import write_aligned, write_table
from terminal import cells, done, run
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.readouts.rank_metrics import Candidates, score_questions
from bertvision.pipelines.readouts.rank_systems import rank
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.sentences.ranking import read_ranking
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.workspace import Workspace

PEOPLE = ["anna", "boris", "clara", "david"]
SIZES = {"train": 30, "dev": 10, "test": 15}
EXACT = ["--encoding", "float32", "--precision", "32"]
FAST = ["--epochs", 4, "--resamples", 200]


def write_people(folder: Path) -> Path:
    """Questions after years of birth, answered by the passage of that person; the last by none."""
    random = np.random.default_rng(0)
    rows: dict[str, list[tuple[str, str, int, str]]] = {}
    for part, n in SIZES.items():
        rows[part] = []
        for i in range(n):
            asked = PEOPLE[int(random.integers(4))]
            years = random.choice(["1901", "1902", "1950"], 4)
            for person, year in zip(random.permutation(PEOPLE), years, strict=True):
                label = int(person == asked and i < n - 1)
                passage = f"{person} was born in {year} in the city {part} {i} ."
                rows[part].append((f"when was {asked} born ?", passage, label, f"{i}"))
    return write_aligned(folder, rows)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_people(tmp_path_factory.mktemp("wikiqa") / "data")


@pytest.fixture(scope="module")
def ranked(
    tiny_bert: Path, data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A workspace of the tiny BERT with rankings, and what the command said of them."""
    root = tmp_path_factory.mktemp("rank") / "workspace"
    text = done(
        *("rank", "wikiqa", "--data", data, "--model", tiny_bert, "-w", root, "--pool", "cls,mean"),
        *("--checkpoint", "0e,untrained", "--layers", "all,first+last", *EXACT, *FAST, "--json"),
    )
    return root, json.loads(text)


@pytest.fixture
def copy(ranked: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    shutil.copytree(ranked[0], tmp_path / "workspace")
    return tmp_path / "workspace"


def test_bm25_comes_first_then_chance_then_every_system(
    ranked: tuple[Path, dict[str, Any]],
) -> None:
    first, chance, *rows = ranked[1]["rows"]
    assert (first["system"], chance["system"]) == ("bm25", "random order")
    names = {(r["system"], r["checkpoint"], r["pooling"]) for r in rows}
    assert len(names) == 4 * 2 * 2
    assert {r["layers"] for r in rows} == {"0", "1", "2", "1+2"}  # of 3 hidden states
    assert first["map"] > 95  # the name of the person asked for stands in one passage alone
    assert chance["map"] == pytest.approx(100 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    for row in rows:
        assert (row["questions"], row["without_positive"]) == (SIZES["test"] - 1, 1)
        assert row["map_low"] <= row["map"] <= row["map_high"]
        assert row["difference"] == pytest.approx(row["map"] - first["map"])
        assert row["map_all"] == pytest.approx(row["map"] * 14 / 15)


def test_one_row_of_each_system_is_the_best_on_dev(ranked: tuple[Path, dict[str, Any]]) -> None:
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in ranked[1]["rows"][2:]:
        key = (row["system"], row["checkpoint"], row["pooling"])
        groups.setdefault(key, []).append(row)
    for rows in groups.values():
        top = max(row["dev_map"] for row in rows)
        assert [row["best"] for row in rows] == [row["dev_map"] == top for row in rows]


def test_cosines_are_those_of_the_encoders_own_hidden_states(
    ranked: tuple[Path, dict[str, Any]], tiny_bert: Path, data: Path
) -> None:
    texts = read_ranking(str(data))
    test = Candidates.of(texts, "test")
    model, tokenizer = (
        AutoModel.from_pretrained(tiny_bert).eval(),
        AutoTokenizer.from_pretrained(tiny_bert),
    )

    def states(text: str) -> torch.Tensor:
        with torch.inference_mode():
            output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        return torch.stack(output.hidden_states)[:, 0].mean(1)  # (layers, hidden)

    u, v = (torch.stack([states(i.text) for i in items]) for items in texts[:2])
    scores = torch.cosine_similarity(u[test.query], v[test.passage], dim=-1).T.numpy()
    found = 100 * score_questions(scores, test.label, test.question, test.tie).ap.mean(-1)
    rows = [
        row
        for row in ranked[1]["rows"]
        if (row["system"], row.get("checkpoint"), row.get("pooling")) == ("cosine", "0e", "mean")
    ]
    np.testing.assert_allclose([row["map"] for row in rows[:3]], found, atol=0.2)


def test_trec_eval_computes_the_same_from_the_files(ranked: tuple[Path, dict[str, Any]]) -> None:
    folder = Path(ranked[1]["folder"])
    with (folder / "qrels" / "test.qrels").open() as file:
        evaluator = pytrec_eval.RelevanceEvaluator(
            pytrec_eval.parse_qrel(file), {"map", "recip_rank", "P_1"}
        )
    runs = sorted(folder.rglob("test.run"))
    assert len(runs) == 1 + 4 * 2 * 2 * 4  # scorers × snapshots × poolings × inputs
    for path in runs:
        with path.open() as file:
            theirs = evaluator.evaluate(pytrec_eval.parse_run(file))
        metrics = json.loads((path.parent / "result.json").read_text())["metrics"]["test"]
        for ours, name in (("map_all", "map"), ("mrr_all", "recip_rank"), ("p1_all", "P_1")):
            mean = 100 * np.mean([scores[name] for scores in theirs.values()])
            assert metrics[ours] == pytest.approx(mean), path


def test_a_second_call_ranks_nothing_again_and_what_is_lost_comes_back_the_same(
    copy: Path,
) -> None:
    folder = copy / "ranking" / "wikiqa"
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*/result.json")}
    lost = folder / "0e" / "mean" / "2" / "mlp"
    shutil.rmtree(lost)
    done(
        *("rank", "wikiqa", "-w", copy, "--pool", "cls,mean", "--checkpoint", "0e,untrained"),
        *("--layers", "all,first+last", *FAST),
    )
    for path, (time, content) in before.items():
        if path.parent == lost:
            # a product of one matrix may round differently from that of several
            there, here = json.loads(content), json.loads(path.read_text())
            assert here["settings"] == there["settings"]
            assert here["epoch"] == there["epoch"]
            assert here["metrics"]["test"] == pytest.approx(there["metrics"]["test"], abs=1)
        else:
            assert path.stat().st_mtime_ns == time


def test_the_table_and_the_csv_say_the_same(copy: Path, tmp_path: Path) -> None:
    table = done(
        *("rank", "wikiqa", "-w", copy, "--scorers", "cosine,mlp", "--seeds", 2, *FAST),
        *("--csv", tmp_path / "rank.csv"),
    )
    rows = cells(table.split("\n\n")[0])
    assert rows[0][:6] == ["system", "checkpoint", "pool", "layers", "dev MAP", "MAP"]
    assert [row[0] for row in rows[1:]] == ["bm25", "random order", *3 * ["cosine"], *3 * ["mlp"]]
    with (tmp_path / "rank.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [row["system"] for row in written] == [row[0] for row in rows[1:]]
    assert [row["seeds"] for row in written] == ["1", "", "1", "1", "1", "2", "2", "2"]
    for shown, row in zip(rows[1:], written, strict=True):
        assert shown[5].startswith(f"{float(row['map']):.1f}")
    assert "1 without one are left out" in table


def test_other_settings_are_refused_by_the_name_of_the_field(copy: Path) -> None:
    result = run("rank", "wikiqa", "-w", copy, *FAST, "--margin", 0.5)
    assert result.exit_code == 2
    assert "was made with margin = 1.0, now it is 0.5" in result.stderr
    path = copy / "ranking" / "wikiqa" / "bm25" / "result.json"
    change(path, settings={**fields(path)["settings"], "k1": 2.0})
    with pytest.raises(ProvenanceError, match=r"k1 = 2\.0, now it is 1\.5"):
        rank(Workspace.find(copy), "wikiqa", ["0e"])
    path.write_text("{")
    with pytest.raises(WorkspaceError, match="is damaged"):
        rank(Workspace.find(copy), "wikiqa", ["0e"])


def test_data_that_changed_are_refused(tiny_bert: Path, tmp_path: Path) -> None:
    data = write_people(tmp_path / "data")
    arguments = ["rank", "wikiqa", "-w", tmp_path / "w", "--scorers", "cosine", *EXACT]
    done(*arguments, "--model", tiny_bert, "--data", data)
    path = data / "test" / "sim.txt"
    path.write_text(path.read_text().replace("1", "0", 1))
    result = run(*arguments)
    assert result.exit_code == 2
    assert "changed since" in result.stderr


def test_names_that_are_not_known_are_refused(copy: Path, data: Path) -> None:
    result = run("rank", "wikiqa", "-w", copy, "--scorers", "cosine,dot")
    assert (result.exit_code, "--scorers 'dot': choose one of cosine" in result.stderr) == (2, True)
    result = run("rank", "wikiqa", "-w", copy, "--layers", "9")
    assert (result.exit_code, "there is no layer 9" in result.stderr) == (2, True)
    result = run("rank", "wikiqa", "-w", copy, "--margin", "inf")
    assert (result.exit_code, "--margin inf" in result.stderr) == (2, True)
    result = run("probe", "wikiqa", "-w", copy)
    assert (result.exit_code, "bertvision rank wikiqa" in result.stderr) == (2, True)
    with pytest.raises(InputError, match="at least one of each"):
        rank(Workspace.find(copy), "wikiqa", ["0e"], seeds=0)


def test_a_part_without_positives_is_named_before_extraction(
    tiny_bert: Path, tmp_path: Path
) -> None:
    data = write_people(tmp_path / "data")
    path = data / "dev" / "sim.txt"
    path.write_text(path.read_text().replace("1", "0"))
    result = run("rank", "wikiqa", "-w", tmp_path / "w", "--model", tiny_bert, "--data", data)
    assert (result.exit_code, "no question of dev has a positive" in result.stderr) == (2, True)
    assert not (tmp_path / "w" / "activations").exists()


def test_a_task_that_is_not_of_rankings_is_refused(copy: Path) -> None:
    (copy.parent / "own.csv").write_text("text,label\nGood.,1\nBad.,0\n")
    result = run("rank", "csv", "--data", copy.parent / "own.csv", "-w", copy)
    assert result.exit_code == 2
    assert "nothing to rank" in result.stderr


def test_an_encoder_is_not_fine_tuned_on_rankings(
    tiny_bert: Path, data: Path, tmp_path: Path
) -> None:
    result = run(
        *("finetune", "--model", tiny_bert, "--task", "wikiqa", "--data", data),
        *("-w", tmp_path / "w"),
    )
    assert result.exit_code == 2
    assert "bertvision rank" in result.stderr


def test_test_alone_can_be_ranked_without_training(tiny_bert: Path, tmp_path: Path) -> None:
    data = write_people(tmp_path / "data")
    for part in ("train", "dev"):
        shutil.rmtree(data / part)
    arguments = ["rank", "wikiqa", "-w", tmp_path / "w", *EXACT, *FAST]
    table = done(*arguments, "--model", tiny_bert, "--data", data, "--scorers", "cosine")
    assert len(cells(table.split("\n\n")[0])) == 1 + 2 + 3
    result = run(*arguments, "--scorers", "mlp")
    assert result.exit_code == 2
    assert "no part train" in result.stderr


@pytest.fixture(scope="module")
def tuned(tiny_bert: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace of the tiny BERT, fine-tuned on the pairs of train."""
    root = tmp_path_factory.mktemp("tuned") / "workspace"
    done(
        *("finetune", "--model", tiny_bert, "--task", "wikiqa_pairs", "--data", data, "-w", root),
        *("--epochs", 1, "--save-at", "0,1", "--lr", "1e-3", "--precision", "32"),
    )
    return root


def test_a_fine_tuned_encoder_ranks_by_its_own_scores_and_gives_features(
    tuned: Path, data: Path
) -> None:
    text = done(
        *("rank", "wikiqa", "--data", data, "-w", tuned, "--checkpoint", "0e,1e", *EXACT),
        *("--scorers", "cross-encoder,cosine", "--layers", "last", *FAST, "--json"),
    )
    first, chance, *rows = json.loads(text)["rows"]
    assert (first["system"], chance["system"]) == ("bm25", "random order")
    assert [(r["system"], r["checkpoint"]) for r in rows] == [
        ("cross-encoder", "0e"),
        ("cross-encoder", "1e"),
        ("cosine", "0e"),
        ("cosine", "1e"),
    ]
    # 1e is other weights than 0e, in both ways
    assert rows[0]["map"] != rows[1]["map"] or rows[2]["map"] != rows[3]["map"]
    for row in rows:
        assert row["difference"] == pytest.approx(row["map"] - first["map"])

    space = Workspace.find(tuned)
    model = AutoModelForSequenceClassification.from_pretrained(space.snapshot_dir("1e")).eval()
    tokenizer = AutoTokenizer.from_pretrained(space.snapshot_dir("1e"))
    texts = read_ranking(str(data))
    test = Candidates.of(texts, "test")
    scores = []
    for q, p in zip(test.query, test.passage, strict=True):
        given = tokenizer(texts.queries[q].text, texts.passages[p].text, return_tensors="pt")
        with torch.inference_mode():
            none, answer = model(**given).logits[0].tolist()
        scores.append(answer - none)
    found = score_questions(np.array(scores), test.label, test.question, test.tie)
    assert rows[1]["map"] == pytest.approx(100 * found.ap.mean(), abs=0.5)

    done("report", "-w", tuned)
    table = json.loads((tuned / "report" / "tables" / "rankings.json").read_text())
    shown = {r["checkpoint"]: r["map"] for r in table["rows"] if r["system"] == "cross-encoder"}
    assert shown == {"0e": pytest.approx(rows[0]["map"]), "1e": pytest.approx(rows[1]["map"])}


def test_an_encoder_that_saw_no_pairs_is_no_cross_encoder(copy: Path) -> None:
    result = run("rank", "wikiqa", "-w", copy, "--scorers", "cross-encoder", *FAST)
    assert result.exit_code == 2
    assert "bertvision finetune --task wikiqa_pairs" in result.stderr


def test_pairs_of_test_that_the_encoder_learned_are_told(tuned: Path, data: Path) -> None:
    space = Workspace.find(tuned)
    pairs = load_task("wikiqa_pairs")
    train = pairs.read(str(data), "train", space.config.task).items
    assert [(x.text, x.pair, x.label) for x in space.items("train")] == [
        (x.text, x.pair, x.label) for x in train if x in space.items("train")
    ]
    assert {x.label for x in train} == {0, 1}
    other = data.parent / "other"
    shutil.copytree(data, other)
    for name in ("a.toks", "b.toks", "sim.txt", "id.txt"):
        shutil.copy(data / "train" / name, other / "test" / name)
    root = data.parent / "leaking"
    shutil.copytree(tuned, root)
    shutil.rmtree(root / "datasets", ignore_errors=True)
    result = run(
        *("rank", "wikiqa", "--data", other, "-w", root, "--scorers", "cross-encoder"),
        *("--checkpoint", "0e", "--precision", "32", *FAST),
    )
    assert "have a text that is in train too" in result.stderr


ROWS = {
    "train": [("who ?", "anna .", 1, "1"), ("who ?", "a river .", 0, "1")],
    "dev": [("where ?", "london .", 1, "1"), ("where ?", "anna .", 0, "1")],
    "test": [("who ?", "a river .", 0, "7"), ("when ?", "1901 .", 1, "9")],
}


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("form", ["toks", "tsv", "csv", "without header"])
def test_every_form_of_the_same_data_gives_the_same_pairs(
    tmp_path: Path, form: str, zipped: bool
) -> None:
    if form == "toks":
        write_aligned(tmp_path, ROWS)
    else:
        ending = "csv" if form == "csv" else "tsv"
        write_table(tmp_path, ROWS, ending, header=form != "without header")
    for path in [p for p in tmp_path.rglob("*") if p.is_file() and zipped]:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    data = read_ranking(str(tmp_path))
    assert [q.text for q in data.queries] == ["who ?", "where ?", "when ?"]
    assert [p.text for p in data.passages] == ["anna .", "a river .", "london .", "1901 ."]
    assert [(p.part, p.question, p.query, p.passage, p.label) for p in data.pairs] == [
        ("train", "1", 0, 0, 1),
        ("train", "1", 0, 1, 0),
        ("dev", "1", 1, 2, 1),
        ("dev", "1", 1, 0, 0),
        ("test", "7", 0, 1, 0),
        ("test", "9", 2, 3, 1),
    ]


def test_the_files_of_wikiqa_itself_are_read_by_the_names_of_their_columns(tmp_path: Path) -> None:
    header = "QuestionID\tQuestion\tDocumentID\tDocumentTitle\tSentenceID\tSentence\tLabel\n"
    (tmp_path / "WikiQA-test.tsv").write_text(
        f'{header}Q1\twho ?\tD1\tAnna\tD1-0\tshe said "yes\t1\nQ1\twho ?\tD1\tAnna\tD1-1\tno\t0\n'
    )
    data = read_ranking(str(tmp_path))
    assert [p.text for p in data.passages] == ['she said "yes', "no"]
    assert [p.question for p in data.pairs] == ["Q1", "Q1"]


def test_without_ids_a_question_is_its_text(tmp_path: Path) -> None:
    (tmp_path / "test.csv").write_text("query,passage,label\na b,x,0\na b,y,1\nc d,x,1\n")
    candidates = Candidates.of(read_ranking(str(tmp_path)), "test")
    assert candidates.question.tolist() == [0, 0, 1]


def test_extraction_sees_each_distinct_text_once_and_no_label(tmp_path: Path) -> None:
    write_aligned(tmp_path, ROWS)
    task = load_task("wikiqa")
    config = TaskConfig(name="wikiqa", max_length=32)
    assert task.splits(str(tmp_path)) == ("queries", "passages")
    queries = task.read(str(tmp_path), "queries", config)
    passages = task.read(str(tmp_path), "passages", config)
    assert [len(queries.items), len(passages.items)] == [3, 4]
    assert queries.sha256 == passages.sha256
    assert all(item.label is None for item in [*queries.items, *passages.items])
    with pytest.raises(InputError, match="no split 'test'"):
        task.read(str(tmp_path), "test", config)
    with pytest.raises(InputError, match="bertvision rank wikiqa"):
        task.check_data(queries.items, str(tmp_path))


def test_ids_of_texts_do_not_depend_on_the_order_of_the_files(tmp_path: Path) -> None:
    write_aligned(tmp_path / "a", ROWS)
    write_aligned(tmp_path / "b", {part: rows[::-1] for part, rows in ROWS.items()})
    first, second = (read_ranking(str(tmp_path / name)) for name in "ab")
    assert [p.id for p in first.passages] != [p.id for p in second.passages]
    assert set(first.passages) == set(second.passages)
    assert first.sha256 != second.sha256


def test_a_candidate_listed_twice_is_taken_once_and_named(tmp_path: Path) -> None:
    rows = [("who ?", "x", 1, "1"), ("who ?", "x", 1, "1"), ("who ?", "y", 0, "1")]
    write_aligned(tmp_path, {"test": rows})
    data = read_ranking(str(tmp_path))
    assert [pair.passage for pair in data.pairs] == [0, 1]
    assert len(data.skipped) == 1
    assert "b.toks, line 2" in data.skipped[0]


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("b.toks", lambda text: text + "one more\n", r"b\.toks: has 3 lines, but .*a\.toks has 2"),
        ("sim.txt", lambda text: "1\n", r"sim\.txt: has 1 lines"),
        ("sim.txt", lambda text: "1\n0.5\n", r"sim\.txt, line 2: the label is '0\.5'"),
        (
            "sim.txt",
            lambda text: "1\n\n",
            r"sim\.txt, line 2: the label is ''; it must be one of 0, 1",
        ),
        ("a.toks", lambda text: "who ?\n \n", r"a\.toks, line 2: the query is empty"),
        ("b.toks", lambda text: "\nx\n", r"b\.toks, line 1: the passage is empty"),
        ("id.txt", lambda text: "1\n1 2\n", r"id\.txt, line 2: the id '1 2' holds white space"),
        ("a.toks", lambda text: "who ?\nwhere ?\n", r"id\.txt, line 2: question '1' reads"),
        ("b.toks", lambda text: "x\nx\n", r"sim\.txt, line 2: the passage is labelled 0"),
        ("a.toks", lambda text: "", r"a\.toks: is empty"),
        ("id.txt", None, r"id\.txt: is missing beside a\.toks"),
    ],
)
def test_a_wrong_file_is_refused_by_its_name_and_line(
    tmp_path: Path, file: str, change: object, message: str
) -> None:
    write_aligned(tmp_path, ROWS)
    path = tmp_path / "train" / file
    if callable(change):
        path.write_text(change(path.read_text()))
    else:
        path.unlink()
    with pytest.raises(InputError, match=message):
        read_ranking(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("query,passage,label\na,b,2\n", r"test\.csv, line 2: the label is '2'"),
        ("query,passage,label\na,b\n", r"test\.csv, line 2: has 2 fields, expected are 3: query"),
        ("query,label\na,1\n", r"test\.csv, line 1: has the columns \['query', 'label'\]"),
        ('query,passage,label\na,"b"c,1\n', r"test\.csv, line 2: is no CSV"),
        ("query,passage,label\n", r"has none of"),
    ],
)
def test_a_wrong_table_is_refused_by_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "test.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        read_ranking(str(tmp_path))


def test_a_folder_without_any_form_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="train/a.toks"):
        read_ranking(str(tmp_path))
    with pytest.raises(InputError, match="is no folder"):
        read_ranking(str(tmp_path / "nowhere"))


def test_a_part_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_aligned(tmp_path, {"test": ROWS["test"]})
    with pytest.raises(InputError, match="no part train, only test"):
        Candidates.of(read_ranking(str(tmp_path)), "train")
