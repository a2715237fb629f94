"""``--task text``: documents read, cut, split and packed, and their states those of each alone."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from families import make_family
from transformers import AutoModel, AutoTokenizer

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.extraction.split_extraction import _kinds
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.dataset import add_dataset

TASK = load_task("text")
CONFIG = TaskConfig(name="text", text="text")
TEXTS = [
    "anna founded rome",
    "who is in rome?",
    "the anna in rome founded the city in 1901, and who is in rome now?",
    "a",
    "rome in 1901. rome in 1902",
]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of tiny decoders, by family."""
    names = ("gpt2", "llama")
    return {name: make_family(name, tmp_path_factory.mktemp(name)) for name in names}


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts_of(source: Path, split: str = "all", **settings: Any) -> list[str]:
    config = CONFIG.model_copy(update=settings)
    return [item.text for item in TASK.read(str(source), split, config).items]


def test_documents_are_read_of_every_form(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", [{"body": text} for text in TEXTS])
    assert texts_of(lines, text="body") == TEXTS
    pq.write_table(
        pa.table({"body": TEXTS, "id": [f"d{i}" for i in range(5)]}), tmp_path / "a.parquet"
    )
    found = TASK.read(
        str(tmp_path / "a.parquet"), "all", CONFIG.model_copy(update={"text": "body"})
    )
    assert [item.id for item in found.items] == ["d0", "d1", "d2", "d3", "d4"]
    folder = tmp_path / "plain"
    folder.mkdir()
    (folder / "b.txt").write_text("two\n\nparagraphs\n")
    (folder / "a.txt").write_text("one")
    assert TASK.splits(str(folder)) == ("all",)
    assert texts_of(folder) == ["one", "two\n\nparagraphs\n"]
    assert texts_of(folder / "b.txt") == ["two\n\nparagraphs\n"]


def test_splits_of_a_folder_are_told_by_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", [{"text": "one"}])
    (tmp_path / "dev.txt").write_text("two")
    assert TASK.splits(str(tmp_path)) == ("train", "dev")
    assert texts_of(tmp_path, "dev") == ["two"]


def test_a_data_set_is_read_through_datasets_with_its_splits(tmp_path: Path) -> None:
    for name in ("train", "validation"):
        pq.write_table(pa.table({"text": [name, ""]}), tmp_path / f"{name}-00000-of-00001.parquet")
    assert TASK.splits(str(tmp_path)) == ("train", "dev")
    assert texts_of(tmp_path, "dev") == ["validation"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"body": "x"}', r"line 2: has the fields \['body'\], but not \['text'\]: .*--text"),
        ('{"text": 3}', "line 2: text must be a string: 3"),
        ("[1]", "line 2: is JSON, but no object"),
        ("{", "line 2: is not JSON"),
        ('{"text": "x", "id": "line 1"}', "line 2: the id 'line 1' is already that of line 1"),
        ('{"text": "x", "id": [1]}', r"line 2: the id \[1\] must be a string"),
    ],
)
def test_a_malformed_row_is_refused_by_line_and_value(
    row: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{row}\n')
    with pytest.raises(InputError, match=rf"a\.jsonl, {message}.*--skip-bad"):
        texts_of(path)
    assert texts_of(path, skip_bad=True) == ["good"]


def test_what_is_no_document_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(InputError, match="is no Parquet file"):
        texts_of(tmp_path / "a.parquet")
    pq.write_table(pa.table({"body": TEXTS}), tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"has the columns \['body'\], but not \['text'\]"):
        texts_of(tmp_path / "b.parquet")
    (tmp_path / "a.csv").write_text("text\nx\n")
    with pytest.raises(InputError, match=r"name it .jsonl or .parquet"):
        texts_of(tmp_path / "a.csv")
    with pytest.raises(InputError, match="nothing but empty rows"):
        texts_of(write_lines(tmp_path / "empty.jsonl", [{"text": " "}]))


def test_what_is_cut_off_is_counted(
    decoders: dict[str, Path], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoders["llama"])
    items = TASK.read(
        str(write_lines(tmp_path / "a.jsonl", [{"text": t} for t in TEXTS])), "all", CONFIG
    ).items
    whole = TASK.windows(items, tokenizer, CONFIG)
    config = CONFIG.model_copy(update={"max_length": 20})
    with caplog.at_level(logging.WARNING):
        windows = TASK.windows(items, tokenizer, config)
    over = np.maximum(whole.n_tokens - 20, 0)
    assert windows.n_tokens.tolist() == np.minimum(whole.n_tokens, 20).tolist()
    assert f"{(over > 0).sum()} of 5 documents have more than 20 tokens" in caplog.text
    assert f"cut off, {over.sum()} tokens of them" in caplog.text


def test_split_windows_hold_every_token_once(decoders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoders["llama"])
    items = TASK.items_of(pa.table({"id": list("abcde"), "text": TEXTS}))
    config = CONFIG.model_copy(update={"max_length": 20, "windows": "split"})
    whole, windows = TASK.windows(items, tokenizer, CONFIG), TASK.windows(items, tokenizer, config)
    begin = tokenizer.bos_token_id
    assert (windows.input_ids[windows.first_token] == begin).all()
    for ids in (whole.input_ids, windows.input_ids):
        assert (ids == begin).any()
    np.testing.assert_array_equal(
        windows.input_ids[windows.input_ids != begin], whole.input_ids[whole.input_ids != begin]
    )
    assert windows.n_tokens.max() == 20


def test_how_windows_were_made_is_remembered_and_not_changed(tmp_path: Path) -> None:
    source = str(write_lines(tmp_path / "notes.jsonl", [{"text": text} for text in TEXTS]))
    add_dataset(tmp_path, "text", source, windows="pack", max_length=64)
    again = add_dataset(tmp_path, "text", source)
    assert (again.config.windows, again.config.max_length) == ("pack", 64)
    with pytest.raises(WorkspaceError, match="windows = 'pack', now it is 'cut'"):
        add_dataset(tmp_path, "text", source, windows="cut")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("length", [24, 96])
def test_states_of_packed_documents_are_those_of_each_alone(
    family: str, length: int, decoders: dict[str, Path], tmp_path: Path
) -> None:
    """No token sees another document, and positions begin anew, through the store."""
    folder = decoders[family]
    source = write_lines(tmp_path / "notes.jsonl", [{"text": text} for text in TEXTS])
    options: dict[str, Any] = {"task": "text", "data": source, "max_length": length}
    space = tmp_path / "workspace"
    bertvision.extract(
        model=folder, workspace=space, encoding="float32", windows="pack", precision="32", **options
    )
    split = bertvision.ActivationStore.open(space / "activations")["0e/notes-all"]
    model, tokenizer = (
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    first, room = {}, tokenizer.num_special_tokens_to_add()
    pieces = 0
    for example in range(len(split)):
        states, text = split[example].permute(0, 2, 1), split.text(example)
        span = slice(split.plan.first_token[example], split.plan.first_token[example] + len(states))
        rows, ids = split.array("text_row")[span], split.array("input_ids")[span]
        assert len(ids) <= length
        for row in np.unique(rows):
            tokens = np.flatnonzero(rows == row)
            assert np.all(np.diff(tokens) == 1)
            given = torch.from_numpy(ids[tokens].astype(np.int64))[None]
            with torch.inference_mode():
                alone = model(given, output_hidden_states=True).hidden_states
            truth = torch.cat(alone).transpose(0, 1)
            torch.testing.assert_close(states[tokens], truth, rtol=1e-5, atol=1e-5)
            first[pieces] = row, given[0, room:].tolist(), "".join(text[i] for i in tokens)
            pieces += 1
    assert pieces > len(split)  # or nothing would have been packed
    by_row = sorted(first.values(), key=lambda piece: piece[0])
    assert {row for row, _, _ in by_row} == set(range(len(TEXTS)))
    if length == 96:  # each is whole
        # the first token of some tokenizers stands for a letter that the next one stands for too
        for (_, _, text), truth in zip(by_row, TEXTS, strict=True):
            assert text.endswith(truth[-9:])
        for (_, ids, _), text in zip(by_row, TEXTS, strict=True):
            assert ids == tokenizer(text).input_ids[room:]


def test_the_first_token_of_each_packed_document_is_of_a_kind_of_its_own(
    decoders: dict[str, Path],
) -> None:
    """They have massive activations, and how well they are kept is said apart."""
    tokenizer = AutoTokenizer.from_pretrained(decoders["gpt2"])
    items = TASK.items_of(pa.table({"id": list("abcde"), "text": TEXTS}))
    windows = TASK.windows(items, tokenizer, CONFIG.model_copy(update={"windows": "pack"}))
    assert len(windows) == 1
    assert (_kinds("all", windows, np.arange(1), ()) == "first").sum() == len(TEXTS)


def test_poolings_and_other_tasks_refuse_packed_windows(
    decoders: dict[str, Path], tmp_path: Path
) -> None:
    source = write_lines(tmp_path / "notes.jsonl", [{"text": text, "label": "x"} for text in TEXTS])
    options: dict[str, Any] = {"model": decoders["gpt2"], "data": source, "windows": "pack"}
    with pytest.raises(InputError, match="several documents, which have no vector in common"):
        bertvision.extract(task="text", pool="mean", workspace=tmp_path / "a", **options)
    with pytest.raises(InputError, match="--windows pack: is for documents, --task text"):
        bertvision.extract(task="csv", workspace=tmp_path / "b", **options)
    with pytest.raises(InputError, match="--windows 'pile': choose cut, split or pack"):
        bertvision.extract(task="text", workspace=tmp_path / "c", **options | {"windows": "pile"})
    with pytest.raises(InputError, match="--label x: names a column"):
        bertvision.extract(task="text", label="x", workspace=tmp_path / "d", **options)


def test_a_split_of_packed_windows_is_not_audited(
    decoders: dict[str, Path], tmp_path: Path
) -> None:
    """An audit computes a window as a whole, and would find damage where there is none."""
    source = write_lines(tmp_path / "notes.jsonl", [{"text": text} for text in TEXTS])
    bertvision.extract(
        task="text", data=source, windows="pack", model=decoders["gpt2"], workspace=tmp_path / "w"
    )
    with pytest.raises(InputError, match="audit the same documents without packing"):
        bertvision.audit("0e/notes-all", workspace=tmp_path / "w")
