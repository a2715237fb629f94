"""Reading SQuAD from files and the hub: what is read, held out, and named as malformed."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.squad.read import (
    MAX_CHARACTERS,
    Answer,
    Question,
    load_squad,
    read_squad,
)
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.selection import hold_out_groups

CONTEXT = "Anna founded Norvik in 1901. Zoë lives there."


def document() -> dict[str, Any]:
    """A well-formed v2.0 document: two articles, three paragraphs, four questions."""
    answerable = {
        "id": "q1",
        "question": "Who founded Norvik?",
        "answers": [{"text": "Anna", "answer_start": 0}, {"text": "Anna", "answer_start": 0}],
        "is_impossible": False,
    }
    impossible = {
        "id": "q2",
        "question": "Who sold Norvik?",
        "answers": [],
        "plausible_answers": [{"text": "Anna", "answer_start": 999}],
        "is_impossible": True,
    }
    accents = {
        "id": "q3",
        "question": "Who lives there?",
        "answers": [{"text": "Zoë", "answer_start": 29}],
        "is_impossible": False,
    }
    other = {
        "id": "q4",
        "question": "When?",
        "answers": [{"text": "1950", "answer_start": 3}],
        "is_impossible": False,
    }
    return {
        "version": "v2.0",
        "data": [
            {
                "title": "Norvik",
                "paragraphs": [
                    {"context": CONTEXT, "qas": [answerable, impossible]},
                    {"context": CONTEXT, "qas": [accents]},
                ],
            },
            {"title": "Other", "paragraphs": [{"context": "In 1950.", "qas": [other]}]},
        ],
    }


def write(folder: Path, value: Any) -> Path:
    path = folder / "squad.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_reads_answerable_and_impossible_questions_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, document())
    data = read_squad(path)
    assert [q.id for q in data.questions] == ["q1", "q2", "q3", "q4"]
    assert data.questions[0] == Question(
        "q1", "Who founded Norvik?", CONTEXT, (Answer("Anna", 0), Answer("Anna", 0)), False
    )
    assert data.questions[1].is_impossible
    assert data.questions[1].answers == ()
    assert data.questions[0].context is data.questions[2].context
    assert (data.version, data.skipped) == ("v2.0", [])
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_v1_has_no_is_impossible(tmp_path: Path) -> None:
    value = document()
    value["version"] = "1.1"
    del value["data"][0]["paragraphs"][0]["qas"][1]
    for article in value["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                del qa["is_impossible"]
    data = read_squad(write(tmp_path, value))
    assert data.version == "1.1"
    value["version"] = 2
    assert read_squad(write(tmp_path, value)).version == "2"
    assert [q.is_impossible for q in data.questions] == [False, False, False]
    del value["version"]
    assert read_squad(write(tmp_path, value)).version == "v1.1"


def test_gzip_reads_like_plain_json(tmp_path: Path) -> None:
    path = write(tmp_path, document())
    packed = tmp_path / "squad.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_squad(packed).questions == read_squad(path).questions
    assert load_squad(str(packed), "train").questions == read_squad(path).questions


FILE_FAILURES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("squad.json", b" \n", "is empty"),
    "wrong JSON": ("squad.json", b'{"data": [', "is not JSON that can be read: .* line 1"),
    "not UTF-8": ("squad.json", b'{"data": "\xff"}', r"is not UTF-8 \(byte 10"),
    "not gzip": ("squad.json.gz", b'{"data": []}', "is not whole gzip data"),
    "truncated gzip": (
        "squad.json.gz",
        gzip.compress(b'{"data": []}')[:-9],
        "is not whole gzip data",
    ),
    "corrupt gzip": ("squad.json.gz", gzip.compress(b"x")[:10] + b"\xff" * 9, "not whole gzip"),
    "gzip named json": ("squad.json", gzip.compress(b"{}"), "name that ends with .json.gz"),
    "deep nesting": ("squad.json", b"[" * 200_000, "is not JSON that can be read"),
    "endless integer": ("squad.json", b'{"data": ' + b"9" * 9999 + b"}", "is not JSON that can be"),
    "a list": ("squad.json", b"[]", "the document: expected an object, found a list"),
    "no data": ("squad.json", b'{"version": "v2.0"}', "data: is missing"),
    "data of wrong type": ("squad.json", b'{"data": {}}', "data: expected a list, found an object"),
    "no articles": ("squad.json", b'{"data": []}', "data: holds no articles"),
    "version of wrong type": ("squad.json", b'{"version": [], "data": [{}]}', "version: expected"),
    "no questions": (
        "squad.json",
        b'{"data": [{"paragraphs": [{"context": "x", "qas": []}]}]}',
        "holds no questions",
    ),
}


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "reason"), FILE_FAILURES.values(), ids=FILE_FAILURES.keys()
)
def test_a_file_that_cannot_be_read_is_an_error_also_when_skipping(
    tmp_path: Path, name: str, content: bytes, reason: str, skip_bad: bool
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as caught:
        read_squad(path, skip_bad=skip_bad)
    assert str(caught.value).startswith((f"{path}: ", f"{path}, line 1: "))
    assert str(caught.value).count(str(path)) == 1


def test_a_missing_file_or_a_folder_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent.json: cannot be read: No such file"):
        load_squad(str(tmp_path / "absent.json"), "train")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_squad(tmp_path)


def _edit(*keys: str | int, to: Any) -> Callable[[dict[str, Any]], None]:
    def edit(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        value[keys[-1]] = to

    return edit


def _without(*keys: str | int) -> Callable[[dict[str, Any]], None]:
    def edit(value: Any) -> None:
        for key in keys[:-1]:
            value = value[key]
        del value[keys[-1]]

    return edit


P = ("data", 0, "paragraphs", 0)
Q = (*P, "qas", 0)
A = (*Q, "answers", 0)
AT = "data[0].paragraphs[0].qas[0]"
UNANSWERED = {"answers": [], "is_impossible": False}
BAD_PARTS: dict[str, tuple[Callable[[dict[str, Any]], None], str, list[str]]] = {
    # name: (edit, JSON path and reason, ids left when skipping)
    "article no object": (
        _edit("data", 0, to=7),
        "data[0]: the article: expected an object, found an integer",
        ["q4"],
    ),
    "no paragraphs key": (
        _without("data", 0, "paragraphs"),
        "data[0]: paragraphs: is missing",
        ["q4"],
    ),
    "no paragraphs": (
        _edit("data", 0, "paragraphs", to=[]),
        "data[0]: paragraphs: holds no paragraphs",
        ["q4"],
    ),
    "no context": (
        _without(*P, "context"),
        "data[0].paragraphs[0]: context: is miss",
        ["q3", "q4"],
    ),
    "context of wrong type": (
        _edit(*P, "context", to=None),
        "data[0].paragraphs[0]: context: expected a string, found null",
        ["q3", "q4"],
    ),
    "context of a million characters": (
        _edit(*P, "context", to="Anna " * 200_000),
        "data[0].paragraphs[0]: context: has 1,000,000 characters, but at most 500,000",
        ["q3", "q4"],
    ),
    "surrogate in context": (
        _edit(*P, "context", to="Anna \ud800"),
        r"data[0].paragraphs[0]: context: has the lone surrogate '\ud800' at character 5",
        ["q3", "q4"],
    ),
    "no qas": (_without(*P, "qas"), "data[0].paragraphs[0]: qas: is missing", ["q3", "q4"]),
    "question no object": (
        _edit(*Q, to="Who?"),
        f"{AT}: the question: expected an object, found",
        [],
    ),
    "no id": (_without(*Q, "id"), f"{AT}: id: is missing", []),
    "id of wrong type": (_edit(*Q, "id", to=1.5), f"{AT}: id: expected a string, found 1.5", []),
    "empty id": (_edit(*Q, "id", to=""), f"{AT}: id: is empty", []),
    "surrogate in id": (_edit(*Q, "id", to="q\udfff"), f"{AT}: id: has the lone surrogate", []),
    "no question": (_without(*Q, "question"), f"{AT}: question: is missing", []),
    "surrogate in question": (
        _edit(*Q, "question", to="\ud800"),
        f"{AT}: question: has the lone surrogate",
        [],
    ),
    "endless question": (
        _edit(*Q, "question", to="?" * (MAX_CHARACTERS + 1)),
        f"{AT}: question: has 500,001 characters",
        [],
    ),
    "no answers key": (_without(*Q, "answers"), f"{AT}: answers: is missing", []),
    "answers of wrong type": (_edit(*Q, "answers", to={}), f"{AT}: answers: expected a list", []),
    "answer no object": (_edit(*A, to="Anna"), f"{AT}: answers[0]: expected an object", []),
    "no answer text": (_without(*A, "text"), f"{AT}: answers[0].text: is missing", []),
    "empty answer": (_edit(*A, "text", to=""), f"{AT}: answers[0].text: is empty", []),
    "no answer_start": (
        _without(*A, "answer_start"),
        f"{AT}: answers[0].answer_start: is missing",
        [],
    ),
    "answer_start true": (
        _edit(*A, "answer_start", to=True),
        f"{AT}: answers[0].answer_start: expected an integer, found a boolean",
        [],
    ),
    "answer_start a float": (
        _edit(*A, "answer_start", to=0.5),
        f"{AT}: answers[0].answer_start: expected an integer, found 0.5",
        [],
    ),
    "offset one off": (
        _edit(*A, "answer_start", to=1),
        f"{AT}: answers[0].answer_start: 1 does not match: the context has 'nna ' there, not the "
        "answer 'Anna'",
        [],
    ),
    "negative offset": (
        _edit(*A, "answer_start", to=-1),
        f"{AT}: answers[0].answer_start: -1 does not match",
        [],
    ),
    "offset beyond the end": (
        _edit(*A, "answer_start", to=10**30),
        f"{AT}: answers[0].answer_start: {10**30} does not match",
        [],
    ),
    "second answer wrong": (
        _edit(*Q, "answers", 1, "text", to="Boris"),
        f"{AT}: answers[1].answer_start: 0 does not match",
        [],
    ),
    "is_impossible of wrong type": (
        _edit(*Q, "is_impossible", to="no"),
        f"{AT}: is_impossible: expected a boolean, found a string",
        [],
    ),
    "impossible with answers": (
        _edit(*Q, "is_impossible", to=True),
        f"{AT}: answers: holds 2, but is_impossible is true",
        [],
    ),
    "answerable without answers": (
        lambda d: _edit(*Q, to={**d["data"][0]["paragraphs"][0]["qas"][0], **UNANSWERED})(d),
        f"{AT}: answers: is empty, but is_impossible is false",
        [],
    ),
}


@pytest.mark.parametrize(("edit", "message", "left"), BAD_PARTS.values(), ids=BAD_PARTS.keys())
def test_a_bad_part_is_named_and_can_be_skipped(
    tmp_path: Path, edit: Callable[[dict[str, Any]], None], message: str, left: list[str]
) -> None:
    value = document()
    edit(value)
    path = write(tmp_path, value)
    with pytest.raises(InputError) as caught:
        read_squad(path)
    assert str(caught.value).startswith(f"{path}, {message}")

    data = read_squad(path, skip_bad=True)
    assert [f"{data.skipped[0]}. --skip-bad leaves such questions out"] == [str(caught.value)]
    assert len(data.skipped) == 1
    assert [q.id for q in data.questions] == (left or ["q2", "q3", "q4"])


def test_a_duplicate_id_names_both_places(tmp_path: Path) -> None:
    value = document()
    value["data"][1]["paragraphs"][0]["qas"][0]["id"] = "q2"
    path = write(tmp_path, value)
    message = (
        r"data\[1\].paragraphs\[0\].qas\[0\]: the id 'q2' is already that of "
        r"data\[0\].paragraphs\[0\].qas\[1\]"
    )
    with pytest.raises(InputError, match=message):
        read_squad(path)
    assert [q.id for q in read_squad(path, skip_bad=True).questions] == ["q1", "q2", "q3"]


def test_skipping_everything_is_an_error(tmp_path: Path) -> None:
    value = document()
    value["data"] = [{"paragraphs": []}, 3]
    with pytest.raises(InputError, match=r"holds no questions after skipping 2: .*data\[0\]"):
        read_squad(write(tmp_path, value), skip_bad=True)


@pytest.fixture
def hub_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[dict[str, Any]]], str]:
    """Writes rows as a data set folder that ``datasets`` loads as it loads one from the hub."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()

    def make(rows: list[dict[str, Any]]) -> str:
        folder = tmp_path / "hub"
        folder.mkdir()
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(str(folder / "validation.parquet"))
        return str(folder)

    return make


def hub_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": "q1",
            "title": "Norvik",
            "context": CONTEXT,
            "question": "Who founded Norvik?",
            "answers": {"text": ["Anna"], "answer_start": [0]},
        },
        {
            "id": "q2",
            "title": "Norvik",
            "context": CONTEXT,
            "question": "Who sold Norvik?",
            "answers": {"text": [], "answer_start": []},
        },
    ]


def test_a_hub_data_set_reads_like_a_file(hub_folder: Callable[..., str]) -> None:
    data = load_squad(hub_folder(hub_rows()), "dev")
    assert data.questions == [
        Question("q1", "Who founded Norvik?", CONTEXT, (Answer("Anna", 0),), False),
        Question("q2", "Who sold Norvik?", CONTEXT, (), True),
    ]
    assert data.questions[0].context is data.questions[1].context
    assert data.version == "v2.0"
    expected = (
        f'["q1","Who founded Norvik?",{json.dumps(CONTEXT)},[["Anna",0]],false]'
        f'["q2","Who sold Norvik?",{json.dumps(CONTEXT)},[],true]'
    )
    assert data.sha256 == hashlib.sha256(expected.encode()).hexdigest()


def test_hub_rows_are_validated_like_a_file(hub_folder: Callable[..., str]) -> None:
    rows = hub_rows()
    rows[0]["answers"]["answer_start"] = [4]
    source = hub_folder(rows)
    with pytest.raises(InputError, match=r"row 0: answers\[0\].answer_start: 4 does not match"):
        load_squad(source, "validation")
    data = load_squad(source, "validation", skip_bad=True)
    assert [q.id for q in data.questions] == ["q2"]
    assert data.skipped[0].startswith(f"{source} (validation), row 0: answers[0]")


def test_a_data_set_without_the_columns_is_refused(hub_folder: Callable[..., str]) -> None:
    rows = [{"id": "q1", "question": "Who?"}]
    with pytest.raises(InputError, match=r"not \['context', 'answers'\]"):
        load_squad(hub_folder(rows), "validation")


def test_a_split_the_data_set_lacks_is_refused(hub_folder: Callable[..., str]) -> None:
    with pytest.raises(InputError, match="split 'test'"):
        load_squad(hub_folder(hub_rows()), "test")


def test_an_unknown_name_without_network_says_what_to_do() -> None:
    with pytest.raises(InputError, match="Check the name, the split and the network, or download"):
        load_squad("nobody/no-such-data-set", "train")


LISTED = [[{"text": "Anna", "answer_start": 0}], []]
COLUMNS = [{"text": ["Anna"], "answer_start": [0]}, {"text": [], "answer_start": []}]


def flat(path: Path, answers: list[Any]) -> Path:
    """Two questions as annotation tools write them: a row each, with a whole number as id."""
    rows: list[dict[str, Any]] = [
        {"id": i, "context": CONTEXT, "question": "Who founded Norvik?", "answers": answer}
        for i, answer in enumerate(answers, 7)
    ]
    form = path.name.removesuffix(".gz").rpartition(".")[2]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return path
    out = io.StringIO(newline="")
    if form in ("csv", "tsv"):
        writer = csv.DictWriter(out, list(rows[0]), delimiter="," if form == "csv" else "\t")
        writer.writeheader()
        writer.writerows({**row, "answers": json.dumps(row["answers"])} for row in rows)
    elif form == "jsonl" or path.stem == "lines":
        out.writelines(json.dumps(row) + "\n" for row in rows)
    else:
        json.dump({"version": "v9", "data": rows} if path.stem == "data" else rows, out)
    data = out.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("answers", [LISTED, COLUMNS], ids=["objects", "columns"])
@pytest.mark.parametrize(
    "name",
    ["a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.gz", "a.tsv", "a.parquet", "a.json", "data.json"]
    + ["lines.json"],
)
def test_rows_of_annotation_tools_are_questions(
    name: str, answers: list[Any], tmp_path: Path
) -> None:
    path = flat(tmp_path / name, answers)
    data = load_squad(str(path), "train")
    assert data.questions == [
        Question("7", "Who founded Norvik?", CONTEXT, (Answer("Anna", 0),), False),
        Question("8", "Who founded Norvik?", CONTEXT, (), True),
    ]
    assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_of_rows_is_read_by_its_splits(tmp_path: Path) -> None:
    for split in ("train", "dev"):
        flat(tmp_path / f"{split}.jsonl", COLUMNS)
    task = load_task("squad_v2")
    assert task.splits(str(tmp_path)) == ("train", "dev")
    assert len(task.read(str(tmp_path), "dev", TaskConfig(name="squad_v2")).items) == 2


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.csv",
            "id,question\n1,Who?\n",
            r"line 1: has the columns .* not \['context', 'ans",
        ),
        (
            "a.csv",
            "id,context,question,answers\n1,Anna,Who?,\"{'text': []}\"\n",
            r"line 2: answers: .* is no JSON .*: write answers as",
        ),
        (
            "a.jsonl",
            '{"id": 1, "context": "Anna", "question": "?", "answers": "", "is_impossible": true}\n'
            '{"id": 1, "context": "Anna", "question": "?", "answers": null}\n',
            "line 2: the id '1' is already that of line 1",
        ),
        (
            "a.jsonl",
            '{"id": 1}\n[]\n',
            r"line 1: has the fields \['id'\], but not \['question', 'context', 'answers'\]",
        ),
        ("a.jsonl", "{", "line 1: is not JSON"),
        ("a.parquet", "no", "is no Parquet file that can be read"),
        (
            "a.json",
            '[{"id": 1, "context": "Anna", "question": "?", "is_impossible": true, "answers": '
            '[{"text": "Anna", "answer_start": 0}]}]',
            r"row 0: answers: holds 1, but is_impossible is true",
        ),
    ],
)
def test_rows_that_are_wrong_are_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=f"{name}[:,] {said}"):
        load_squad(str(path), "train")


def test_empty_answers_say_that_a_question_is_unanswerable(tmp_path: Path) -> None:
    qas = [{"id": i, "question": "Who?", "answers": []} for i in (1, 2)]
    document = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": qas}]}]}
    path = tmp_path / "train.json"
    path.write_text(json.dumps(document))
    data = load_squad(str(path), "train")
    assert [(q.id, q.is_impossible) for q in data.questions] == [("1", True), ("2", True)]
    assert data.version == "v2.0"


def squad(folder: Path, *names: str) -> Path:
    """A folder with files in SQuAD's form, in each a question whose id is the file's name."""
    folder.mkdir(exist_ok=True)
    for name in names:
        qa = {"id": name, "question": "Who?", "answers": [{"text": "Anna", "answer_start": 0}]}
        document = {"data": [{"paragraphs": [{"context": CONTEXT, "qas": [qa]}]}]}
        data = json.dumps(document).encode()
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return folder


def read(source: Path, split: str) -> list[str]:
    task = load_task("squad_v2")
    return [q.id for q in task.read(str(source), split, TaskConfig()).items]


@pytest.mark.parametrize(
    ("files", "train", "dev"),
    [
        (["train-v2.0.json", "dev-v2.0.json"], "train-v2.0.json", "dev-v2.0.json"),
        (["train.json.gz", "dev.json.gz"], "train.json.gz", "dev.json.gz"),
        (["train-v1.1.json", "dev-v1.1.json.gz"], "train-v1.1.json", "dev-v1.1.json.gz"),
        (["train-v1.1.json.gz", "train.json.gz", "dev.json"], "train.json.gz", "dev.json"),
    ],
)
def test_a_folder_holds_its_splits(files: list[str], train: str, dev: str, tmp_path: Path) -> None:
    folder = squad(tmp_path / "squad", *files)
    assert load_task("squad_v2").splits(str(folder)) == ("train", "dev")
    assert (read(folder, "train"), read(folder, "dev")) == ([train], [dev])


@pytest.mark.parametrize(
    "several",
    [
        ["train-v2.0.json", "train-small.json"],
        ["train.json", "train.json.gz"],
        ["train-v1.1.json", "train-v1.1.json.gz"],
        ["train-v1.1.json", "train-a.json", "train-b.json"],
    ],
)
def test_several_files_of_a_split_are_refused_by_name(several: list[str], tmp_path: Path) -> None:
    folder = squad(tmp_path / "squad", *several, "dev.json")
    expected = " and ".join(sorted(several)) + ", each of which may be train: .*--train"
    with pytest.raises(InputError, match=expected):
        load_task("squad_v2").splits(str(folder))
    with pytest.raises(InputError, match=expected):
        read(folder, "train")


def test_a_folder_without_a_split_says_so(tmp_path: Path) -> None:
    folder = squad(tmp_path / "squad", "train.json")
    assert load_task("answerable").splits(str(folder)) == ("train",)
    with pytest.raises(InputError, match=r"squad: holds no dev\*\.json"):
        read(folder, "dev")


def test_a_single_file_is_one_split_and_read_as_what_it_is_given_for(tmp_path: Path) -> None:
    names = {"train-v2.0.json": "train", "Dev.json.gz": "dev", "test.json": "test"}
    folder = squad(tmp_path / "squad", *names, "xquad.json")
    for name, split in {**names, "xquad.json": "all"}.items():
        assert load_task("squad_v2").splits(str(folder / name)) == (split,)
        assert read(folder / name, "train") == read(folder / name, "dev") == [name]
    assert load_task("squad_v2").splits("squad_v2") == ("train", "dev")


def test_a_folder_of_parquet_files_is_read_like_the_hub(hub_folder: Callable[..., str]) -> None:
    source = hub_folder(hub_rows())
    assert load_task("squad_v2").splits(source) == ("train", "dev")
    assert read(Path(source), "dev") == ["q1", "q2"]


def _context(question: Question) -> str:
    return question.context


def _questions(contexts: list[str]) -> list[Question]:
    return [Question(f"q{i}", "?", c, (), True) for i, c in enumerate(contexts)]


@given(
    st.lists(st.integers(0, 30).map("context {}".format), min_size=1),
    st.floats(0, 1, exclude_max=True),
    st.integers(0, 2**32),
)
def test_hold_out_splits_whole_contexts_exactly(
    contexts: list[str], fraction: float, seed: int
) -> None:
    questions = _questions(contexts)
    kept, held = hold_out_groups(questions, fraction, _context, seed=seed)
    assert sorted(kept + held, key=lambda q: int(q.id[1:])) == questions
    assert [q for q in questions if q in kept] == kept
    assert [q for q in questions if q in held] == held
    assert not {q.context for q in kept} & {q.context for q in held}
    distinct = len(set(contexts))
    expected = round(fraction * distinct)
    if fraction > 0 and distinct > 1:
        expected = min(max(expected, 1), distinct - 1)
    assert len({q.context for q in held}) == expected
    by_order = hold_out_groups(questions[::-1], fraction, _context, seed=seed)
    assert by_order == (kept[::-1], held[::-1])


def test_hold_out_is_the_same_in_another_python_process() -> None:
    contexts = [f"context {i}" for i in range(40)]
    code = (
        "from bertvision.pipelines.workspace.selection import hold_out_groups\n"
        "from bertvision.pipelines.tasks.squad.read import Question\n"
        "q = [Question(f'q{i}', '?', f'context {i}', (), True) for i in range(40)]\n"
        "print(*(x.id for x in hold_out_groups(q, 0.1, lambda x: x.context, seed=3)[1]))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for hash_seed in ("1", "2")
    }
    questions = _questions(contexts)
    assert found == {" ".join(q.id for q in hold_out_groups(questions, 0.1, _context, seed=3)[1])}
    assert found != {" ".join(q.id for q in hold_out_groups(questions, 0.1, _context, seed=4)[1])}


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_hold_out_refuses_a_fraction_outside_the_range(fraction: float) -> None:
    with pytest.raises(InputError, match="0 ≤ fraction < 1"):
        hold_out_groups(_questions(["a", "b"]), fraction, _context, seed=0)
