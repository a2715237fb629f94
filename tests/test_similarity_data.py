"""Reading SICK and STS: every form, what has no score, and what is refused."""

from __future__ import annotations

import gzip
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from similarities import SIZES, write_glue_sts, write_sick, write_sts

from bertvision.errors import InputError
from bertvision.pipelines.readouts.similarity import read_parts, word_overlap
from bertvision.pipelines.tasks.sentences.similarity_data import ENTAILMENT, read_similarity
from bertvision.pipelines.workspace.dataset import Dataset, add_dataset


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
        ("1\t \tB", "a sentence is empty"),
        ("1\tA", "has 2 columns"),
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
