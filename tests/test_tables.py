"""The reader of tables: every form says the same, and nothing that is wrong gives a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.tasks.sentences.similarity import SIMILARITY, read_similarity
from bertvision.pipelines.tasks.tables import ID, Column, Layout, Table, aligned_table, read_table

FORMS = (".csv", ".tsv", ".jsonl", ".parquet")
LAYOUT = Layout(
    {
        "text": Column(("sentence", "text"), filled=True),
        "stars": Column(("stars",), "score", optional=True, range=(1, 3)),
        "id": ID,
    },
    hint="name it so",
)
ROWS = [{"text": "a b", "id": "x"}, {"text": "c", "id": "y"}]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    names = list(rows[0])
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    else:
        separator = "," if path.suffix == ".csv" else "\t"
        lines = [names, *([row[name] for name in names] for row in rows)]
        path.write_text("\n\n".join(separator.join(line) for line in lines))
    return path


def fields(table: Table) -> list[dict[str, Any]]:
    return [values for _, values in table.checked()]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"a{form}", ROWS)
    assert fields(read_table(path, LAYOUT, forms=FORMS)) == ROWS
    renamed = [{"sentence": row["text"], "id": row["id"]} for row in ROWS]
    assert fields(read_table(write(path, renamed), LAYOUT, forms=FORMS)) == ROWS
    write(path, [{"body": "a"}])
    with pytest.raises(InputError, match=r"has the .* \['body'\], but not \['sentence'\]: name it"):
        fields(read_table(path, LAYOUT, forms=FORMS))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": " ", "stars": "1"}, "line 2: the text is empty"),
        ({"text": "a", "stars": "4"}, "line 2: the stars is '4'; it must be a number from 1 to 3"),
        ({"text": "a", "stars": "nan"}, "line 2: the stars is 'nan'"),
    ],
)
def test_a_value_is_refused_with_what_is_allowed(
    row: dict[str, str], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.csv", [row])
    path.write_text(path.read_text().replace("\n\n", "\n"))
    with pytest.raises(InputError, match=rf"a\.csv, {message}"):
        fields(read_table(path, LAYOUT, forms=FORMS))


@given(
    st.sampled_from([".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"]),
    st.one_of(
        st.binary(max_size=60),
        st.text('{}[]",:\t\n\r 1eatx\\u', max_size=60).map(lambda x: f"text,id\n{x}".encode()),
        st.text('{}[]",:\t\n 1eatx\\u', max_size=40).map(
            lambda x: f'{{"text": "a"}}\n{x}'.encode()
        ),
    ),
)
def test_what_is_wrong_gives_no_traceback(
    tmp_path_factory: pytest.TempPathFactory, form: str, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("tables") / f"a{form}"
    path.write_bytes(data)
    try:
        rows = list(read_table(path, LAYOUT, forms=FORMS).rows)
    except InputError:
        return
    for row in rows:
        try:
            assert set(row.fields) <= {"text", "stars", "id"}
        except InputError:
            assert row.place.startswith(("line ", "row "))


def test_a_name_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": "\\ud800"}\n')
    with pytest.raises(InputError, match="line 1: the id has the lone surrogate"):
        fields(read_table(path, LAYOUT, forms=FORMS))


def test_aligned_files_name_the_file_of_a_wrong_value(tmp_path: Path) -> None:
    files = {
        "text.txt": Layout(LAYOUT.columns, header=("text",), separator="\n"),
        "stars.txt": Layout(LAYOUT.columns, header=("stars",), separator="\n"),
    }
    (tmp_path / "text.txt").write_text("a\tb\nc\n")
    (tmp_path / "stars.txt").write_text("1\n\n")
    table = aligned_table(tmp_path, files)
    assert fields(table) == [{"text": "a\tb", "stars": 1.0}, {"text": "c", "stars": None}]
    assert list(table.files) == ["text.txt", "stars.txt"]
    (tmp_path / "stars.txt").write_text("1\n9\n")
    with pytest.raises(InputError, match=r"stars\.txt, line 2: the stars is '9'"):
        fields(aligned_table(tmp_path, files))


def test_a_new_similarity_set_is_a_row_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = {
        "first": Column(("one",), filled=True),
        "second": Column(("other",), filled=True),
        "score": Column(("likeness",), "score", range=(0, 10)),
    }
    layout, files = Layout(columns, separator="\t"), {"test": ("mine.tsv",)}
    spec = SIMILARITY["sick"]._replace(folders=(), layouts=(layout,), files=files)
    monkeypatch.setitem(SIMILARITY, "mine", spec)
    (tmp_path / "mine.tsv").write_text("likeness\tone\tother\n7\tA\tB\n\tA\tC\n")
    data = read_similarity("mine", str(tmp_path))
    assert [(pair.score, data.texts[pair.second].text) for pair in data.pairs] == [(7.0, "B")]
    assert data.unscored == {"mine": 1}
