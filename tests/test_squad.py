"""Reading SQuAD: what is read, and that every malformed part is named."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertvision.errors import InputError
from bertvision.pipelines.tasks.squad.read import (
    MAX_CHARACTERS,
    Answer,
    Question,
    load_squad,
    read_squad,
)

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
        "data[0]: expected an object, found an integer",
        ["q4"],
    ),
    "no paragraphs key": (
        _without("data", 0, "paragraphs"),
        "data[0].paragraphs: is missing",
        ["q4"],
    ),
    "no paragraphs": (
        _edit("data", 0, "paragraphs", to=[]),
        "data[0].paragraphs: holds no paragraphs",
        ["q4"],
    ),
    "no context": (_without(*P, "context"), "data[0].paragraphs[0].context: is miss", ["q3", "q4"]),
    "context of wrong type": (
        _edit(*P, "context", to=None),
        "data[0].paragraphs[0].context: expected a string, found null",
        ["q3", "q4"],
    ),
    "context of a million characters": (
        _edit(*P, "context", to="Anna " * 200_000),
        "data[0].paragraphs[0].context: has 1,000,000 characters, but at most 500,000",
        ["q3", "q4"],
    ),
    "surrogate in context": (
        _edit(*P, "context", to="Anna \ud800"),
        r"data[0].paragraphs[0].context: has the lone surrogate '\ud800' at character 5",
        ["q3", "q4"],
    ),
    "no qas": (_without(*P, "qas"), "data[0].paragraphs[0].qas: is missing", ["q3", "q4"]),
    "question no object": (_edit(*Q, to="Who?"), f"{AT}: expected an object, found", []),
    "no id": (_without(*Q, "id"), f"{AT}.id: is missing", []),
    "id of wrong type": (_edit(*Q, "id", to=1.5), f"{AT}.id: expected a string, found 1.5", []),
    "empty id": (_edit(*Q, "id", to=""), f"{AT}.id: is empty", []),
    "surrogate in id": (_edit(*Q, "id", to="q\udfff"), f"{AT}.id: has the lone surrogate", []),
    "no question": (_without(*Q, "question"), f"{AT}.question: is missing", []),
    "surrogate in question": (
        _edit(*Q, "question", to="\ud800"),
        f"{AT}.question: has the lone surrogate",
        [],
    ),
    "endless question": (
        _edit(*Q, "question", to="?" * (MAX_CHARACTERS + 1)),
        f"{AT}.question: has 500,001 characters",
        [],
    ),
    "no answers key": (_without(*Q, "answers"), f"{AT}.answers: is missing", []),
    "answers of wrong type": (_edit(*Q, "answers", to={}), f"{AT}.answers: expected a list", []),
    "answer no object": (_edit(*A, to="Anna"), f"{AT}.answers[0]: expected an object", []),
    "no answer text": (_without(*A, "text"), f"{AT}.answers[0].text: is missing", []),
    "empty answer": (_edit(*A, "text", to=""), f"{AT}.answers[0].text: is empty", []),
    "no answer_start": (
        _without(*A, "answer_start"),
        f"{AT}.answers[0].answer_start: is missing",
        [],
    ),
    "answer_start true": (
        _edit(*A, "answer_start", to=True),
        f"{AT}.answers[0].answer_start: expected an integer, found a boolean",
        [],
    ),
    "answer_start a float": (
        _edit(*A, "answer_start", to=0.5),
        f"{AT}.answers[0].answer_start: expected an integer, found 0.5",
        [],
    ),
    "offset one off": (
        _edit(*A, "answer_start", to=1),
        f"{AT}.answers[0].answer_start: 1 does not match: the context has 'nna ' there, not the "
        "answer 'Anna'",
        [],
    ),
    "negative offset": (
        _edit(*A, "answer_start", to=-1),
        f"{AT}.answers[0].answer_start: -1 does not match",
        [],
    ),
    "offset beyond the end": (
        _edit(*A, "answer_start", to=10**30),
        f"{AT}.answers[0].answer_start: {10**30} does not match",
        [],
    ),
    "second answer wrong": (
        _edit(*Q, "answers", 1, "text", to="Boris"),
        f"{AT}.answers[1].answer_start: 0 does not match",
        [],
    ),
    "is_impossible of wrong type": (
        _edit(*Q, "is_impossible", to="no"),
        f"{AT}.is_impossible: expected a boolean, found a string",
        [],
    ),
    "impossible with answers": (
        _edit(*Q, "is_impossible", to=True),
        f"{AT}.answers: holds 2, but is_impossible is true",
        [],
    ),
    "answerable without answers": (
        lambda d: _edit(*Q, to={**d["data"][0]["paragraphs"][0]["qas"][0], **UNANSWERED})(d),
        f"{AT}.answers: is empty, but is_impossible is false",
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
    assert str(caught.value).startswith(f"{path}: {message}")

    data = read_squad(path, skip_bad=True)
    assert data.skipped == [str(caught.value)]
    assert [q.id for q in data.questions] == (left or ["q2", "q3", "q4"])


def test_a_duplicate_id_names_both_places(tmp_path: Path) -> None:
    value = document()
    value["data"][1]["paragraphs"][0]["qas"][0]["id"] = "q2"
    path = write(tmp_path, value)
    message = (
        r"data\[1\].paragraphs\[0\].qas\[0\].id: 'q2' is already the id of "
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
