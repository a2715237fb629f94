"""Reading questions with candidate passages: what is taken, and what is refused where."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from rankings import write_aligned, write_table

from bertvision.errors import InputError
from bertvision.pipelines.readouts.rank_metrics import Candidates
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.sentences.ranking import read_ranking
from bertvision.pipelines.tasks.task import load_task

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
        ("sim.txt", lambda text: "1\n\n", r"sim\.txt, line 2: the label is empty"),
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
        ("query,passage,label\na,b\n", r"test\.csv, line 2: has 2 columns, not 3"),
        ("query,label\na,1\n", r"test\.csv, line 1: has the columns \['query', 'label'\]"),
        ('query,passage,label\na,"b"c,1\n', r"test\.csv, line 2: is no csv"),
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
