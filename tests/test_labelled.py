"""A user's own csv, tsv and jsonl: columns, classes and scores, and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.sentences.labelled import with_columns
from bertvision.pipelines.tasks.task import load_task

ROWS = [
    ("One.", "x", "yes"),
    ('Two "quoted", with a comma.', "y", "no"),
    ("Drei ° Grad", "z", "yes"),
]
COLUMNS = {"text": "a", "label": "b"}


def read(source: Path, split: str = "train", **options: object) -> TaskData:
    return load_task("csv").read(str(source), split, TaskConfig(name="csv", **COLUMNS | options))


def write(path: Path, rows: list[tuple[str, str, str]], header: str = "a c b") -> Path:
    names = header.split()
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    if form == "jsonl":
        text = "".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in rows)
    elif form == "tsv":
        text = "".join("\t".join(row) + "\n" for row in [names, *rows])
    else:
        out = io.StringIO(newline="")
        csv.writer(out).writerows([names, *rows])
        text = out.getvalue()
    data = text.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def labelled(*labels: str) -> list[tuple[str, str, str]]:
    return [(f"Sentence {i}.", "", label) for i, label in enumerate(labels)]


FORMS = ["csv", "tsv", "jsonl", "csv.gz", "tsv.gz", "jsonl.gz"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: str, tmp_path: Path):
    path = write(tmp_path / f"mine.{form}", ROWS)
    data = read(path)
    assert [(i.text, i.pair, i.label) for i in data.items] == [
        (ROWS[0][0], None, 1),
        (ROWS[1][0], None, 0),
        (ROWS[2][0], None, 1),
    ]
    assert data.classes == ("no", "yes")
    assert load_task("csv").splits(str(path)) == ("all",)
    paired = read(path, pair="c")
    assert [i.pair for i in paired.items] == ["x", "y", "z"]


@pytest.mark.parametrize("form", FORMS)
def test_folder_holds_its_splits(form: str, tmp_path: Path):
    for split, labels in (("train", ("b", "a", "c")), ("dev", ("c", "c")), ("test", ("a",))):
        write(tmp_path / f"{split}.{form}", labelled(*labels))
    assert load_task("csv").splits(str(tmp_path)) == ("train", "dev", "test")
    assert [i.label for i in read(tmp_path, "train").items] == [1, 0, 2]
    # the classes are those of train, not of what the split happens to have
    for classes in ((), ("a", "b", "c")):
        dev = read(tmp_path, "dev", classes=classes)
        assert [i.label for i in dev.items] == [2, 2]
        assert dev.classes == ("a", "b", "c")
    (tmp_path / f"dev.{form}").unlink()
    assert load_task("csv").splits(str(tmp_path)) == ("train", "test")


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (("b", "a", "b"), ("a", "b")),
        (("10", "9", "2"), ("2", "9", "10")),
        (("1.0", "0.0"), ("0.0", "1.0")),  # whole numbers are names
        (("0.5", "low"), ("0.5", "low")),
        ((" a", "b "), ("a", "b")),
    ],
)
def test_labels_are_classes(labels: tuple[str, ...], classes: tuple[str, ...], tmp_path: Path):
    data = read(write(tmp_path / "mine.csv", labelled(*labels)))
    assert data.classes == classes
    assert [data.classes[i.label] for i in data.items] == [label.strip() for label in labels]


@pytest.mark.parametrize("labels", [("0.5", "1.25"), ("1", "2.5", "-3"), ("1e-3", "2.0")])
def test_labels_are_scores_where_all_are_numbers_and_one_is_not_whole(
    labels: tuple[str, ...], tmp_path: Path
):
    data = read(write(tmp_path / "mine.tsv", labelled(*labels)))
    assert data.classes == ()
    assert [i.label for i in data.items] == [float(label) for label in labels]
    assert all(isinstance(i.label, float) for i in data.items)


def test_whole_scores_of_another_split_stay_scores(tmp_path: Path):
    write(tmp_path / "train.csv", labelled("0.5", "1", "2"))
    dev = write(tmp_path / "dev.csv", labelled("3", "4"))
    for source in (tmp_path, dev):
        assert [i.label for i in read(source, "dev").items] == [3.0, 4.0]


def test_dev_without_scores_is_refused_where_training_has_them(tmp_path: Path):
    write(tmp_path / "train.csv", labelled("0.5", "1", "2"))
    dev = write(tmp_path / "dev.csv", labelled("3", "good", "bad"))
    for source in (tmp_path, dev):
        with pytest.raises(InputError, match=r"dev\.csv, line 3: the score 'good' is no finite"):
            read(source, "dev")
        assert [i.label for i in read(source, "dev", skip_bad=True).items] == [3.0]


def test_numbers_and_truth_values_of_jsonl_are_labels(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"a": "One.", "b": true}\n\n{"a": "Two.", "b": false, "more": [1]}\n')
    assert read(path).classes == ("false", "true")
    path.write_text('{"a": "One.", "b": 2}\n{"a": "Two.", "b": 0.25}\n')
    assert [i.label for i in read(path).items] == [2.0, 0.25]
    path.write_text("".join(f'{{"a": "One.", "b": {b}}}\n' for b in ("1", "1.0", '"1"', "0.0")))
    data = read(path)
    assert data.classes == ("0", "1")
    assert [i.label for i in data.items] == [1, 1, 1, 0]


def test_unseen_label_is_refused_with_its_row_or_skipped(tmp_path: Path):
    write(tmp_path / "train.csv", labelled("a", "b"))
    dev = write(tmp_path / "dev.csv", labelled("a", "c", "b"))
    for source, classes in ((tmp_path, ()), (dev, ("a", "b"))):
        with pytest.raises(
            InputError, match=r"dev\.csv, line 3: the label 'c' is none of the 2 cl"
        ):
            read(source, "dev", classes=classes)
        data = read(source, "dev", classes=classes, skip_bad=True)
        assert [i.label for i in data.items] == [0, 1]


def test_ids_name_rows_and_occur_once(tmp_path: Path):
    rows = [("One.", "q7", "x"), ("Two.", "q8", "y")]
    path = write(tmp_path / "mine.csv", rows, "a id b")
    assert [i.id for i in read(path).items] == ["q7", "q8"]
    plain = read(write(tmp_path / "plain.csv", ROWS))
    assert [i.id for i in plain.items] == ["line 2", "line 3", "line 4"]
    path = write(tmp_path / "twice.csv", [*rows, rows[0]], "a id b")
    with pytest.raises(InputError, match=r"line 4: the id 'q7' is already that of line 2"):
        read(path)
    assert [i.id for i in read(path, skip_bad=True).items] == ["q7", "q8"]


def test_row_without_an_id_takes_none_that_another_has(tmp_path: Path):
    path = tmp_path / "mine.jsonl"
    ids = ("3", "null", '""', "0")
    path.write_text("".join(f'{{"id": {x}, "a": "One.", "b": {i}}}\n' for i, x in enumerate(ids)))
    assert [i.id for i in read(path).items] == ["3", "line 2", "line 3", "0"]
    rows = [("One.", "3", "x"), ("Two.", "", "y")]
    found = read(write(tmp_path / "mine.csv", rows, "a id b"))
    assert [i.id for i in found.items] == ["3", "line 3"]
    path.write_text('{"id": [1], "a": "One.", "b": 1}\n')
    with pytest.raises(InputError, match=r"line 1: the id \[1\] must be a string or a number"):
        read(path)


def test_field_may_be_longer_than_a_csv_reader_expects(tmp_path: Path):
    rows = [("x" * 140_000, "", "a"), ("Two.", "", "b")]
    assert len(read(write(tmp_path / "mine.csv", rows)).items[0].text) == 140_000
    rows.append(("x" * 500_001, "", "b"))
    with pytest.raises(InputError, match="line 4: the text has 500,001 characters, but at most"):
        read(write(tmp_path / "mine.csv", rows))


@pytest.mark.parametrize("name", ["rte", "squad_v2", "bigram_shift", "wikiqa"])
@pytest.mark.parametrize("column", ["text", "pair", "label"])
def test_columns_are_named_of_labelled_files_alone(name: str, column: str):
    with pytest.raises(InputError, match=rf"--{column} body: .*--task csv.*columns of {name}"):
        with_columns(load_task(name), TaskConfig(name=name, **{column: "body"}))
    with_columns(load_task(name), TaskConfig(name=name))
    with_columns(load_task("csv"), TaskConfig(name="csv", **{column: "body"}))


@pytest.mark.parametrize("form", ["csv", "tsv"])
@pytest.mark.parametrize("fields", [2, 4])
def test_misaligned_columns_name_file_line_found_and_expected(
    form: str, fields: int, tmp_path: Path
):
    path = write(tmp_path / f"mine.{form}", labelled("a", "b"))
    separator = {"csv": ",", "tsv": "\t"}[form]
    path.write_text(path.read_text() + separator.join("wxyz"[:fields]) + "\n")
    expected = rf"mine\.{form}, line 4: has {fields} fields, expected are 3: a, c, b"
    with pytest.raises(InputError, match=expected):
        read(path)
    assert len(read(path, skip_bad=True).items) == 2


def test_quoted_line_break_is_counted_and_unclosed_quote_refused(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text('a,b\n"One,\ntwo.",x\nThree.\n')
    with pytest.raises(InputError, match="line 4: has 1 fields"):
        read(path)
    path.write_text('a,b\nOne.,x\n"Two.,y\nThree.,x\n')
    with pytest.raises(InputError, match=r"line 3: is no CSV \(unexpected end of data\).*\.tsv"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON that can be read"),
        ("[1]", "is JSON, but no object"),
        ('{"a": "One."}', r"has the fields \['a'\], but not \['b'\]"),
        ('{"a": 5, "b": "x"}', "a must be a string"),
        ('{"a": "One.", "b": [1]}', r"the label \[1\] must be a string or a number"),
        ('{"a": "One.", "b": null}', "has no label"),
        ('{"a": "One.", "b": ""}', "has no label"),
        ('{"a": "One \\ud800.", "b": "x"}', "lone surrogate"),
    ],
)
def test_malformed_object_is_named_with_its_line_or_skipped(
    line: str, message: str, tmp_path: Path
):
    path = write(tmp_path / "mine.jsonl", labelled("x", "y"))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match=rf"mine\.jsonl, line 3: .*{message}"):
        read(path)
    assert len(read(path, skip_bad=True).items) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": None}, r"has the columns \['a', 'c', 'b'\], but not \['text'\]: .*--text"),
        ({"label": None}, r"but not \['label'\]: .*--label"),
        ({"text": "sentence"}, r"but not \['sentence'\]"),
        ({"pair": "d"}, r"but not \['d'\]"),
    ],
)
def test_columns_must_be_named_and_there(options: dict[str, str | None], message: str, tmp_path):
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / "mine.csv", ROWS), **options)


def test_column_that_is_there_twice_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="'a' more than once"):
        read(write(tmp_path / "mine.csv", ROWS, "a a b"))


def test_one_class_empty_file_and_unknown_form_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"mine\.csv: all rows have the label 'x'.*two classes"):
        read(write(tmp_path / "mine.csv", labelled("x", "x")))
    with pytest.raises(InputError, match="line 2: has no label"):
        read(write(tmp_path / "mine.csv", labelled("", "x", "y")))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match=r"empty\.csv: is empty"):
        read(tmp_path / "empty.csv")
    with pytest.raises(InputError, match=r"mine\.csv: holds no rows"):
        read(write(tmp_path / "mine.csv", []))
    with pytest.raises(InputError, match=r"mine\.txt: its form is not known: name it \.csv"):
        read(write(tmp_path / "mine.txt", ROWS))
    with pytest.raises(InputError, match=r"holds no train\.csv or train\.tsv or train\.jsonl"):
        load_task("csv").splits(str(tmp_path))


def test_bytes_that_are_no_utf_8_are_named_with_their_line(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"a,b\nOne.,x\nCaf\xe9.,y\n")
    with pytest.raises(InputError, match=r"mine\.csv, line 3: byte 0xe9 is not UTF-8"):
        read(path)


def test_dev_of_one_class_is_no_error(tmp_path: Path):
    path = write(tmp_path / "dev.csv", labelled("x", "x"))
    assert [i.label for i in read(path, "dev", classes=("w", "x")).items] == [1, 1]


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)


@given(st.lists(st.tuples(words, words), min_size=2, max_size=8))
def test_what_was_written_is_what_is_read(tmp_path_factory, pairs):
    rows = [(text, pair, "xy"[i % 2]) for i, (text, pair) in enumerate(pairs)]
    folder = tmp_path_factory.mktemp("labelled")
    for form in ("csv", "jsonl"):
        data = read(write(folder / f"mine.{form}", rows), pair="c")
        expected = [(text.strip(), pair.strip(), i % 2) for i, (text, pair) in enumerate(pairs)]
        assert [(i.text, i.pair, i.label) for i in data.items] == expected
