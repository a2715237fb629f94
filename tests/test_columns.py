"""Further columns of the rows: tokens that they point to (`at:FIELD`), and groups to leave out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertvision
from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.encoders.loading import load_tokenizer
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.poolings import check_pooling, from_file_part
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe_data import Labelled, partition, read_data
from bertvision.pipelines.readouts.probe_results import ProbeFile
from bertvision.pipelines.tasks.data import Sentence, TaskConfig
from bertvision.pipelines.tasks.sentences.labelled import LabelledTask
from bertvision.pipelines.tasks.sentences.task import pointed_tokens, sentence_windows
from bertvision.pipelines.uncertainty import share, share_difference
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

WORDS = ("anna", "rome", "berlin", "was", "founded", "in")
EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}


def rows() -> list[dict[str, Any]]:
    """Twelve texts of two kinds in three groups; `word` points by text, `spot` by number."""
    made = []
    for i in range(12):
        text = f"{'  ' if i % 4 == 1 else ''}in {19 + i}01 {WORDS[i % 3]} was founded"
        word = WORDS[i % 3]
        spot = text.index(word) + len(word) - 1
        kind = "city" if i % 2 else "name"
        made.append({"text": text, "label": kind, "word": word, "spot": spot, "group": f"g{i % 3}"})
    return made


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    folder = tmp_path_factory.mktemp("columns")
    made = feature_workspace(folder / "ws", str(tiny_bert))
    add_dataset(made.root, "csv", str(write(folder / "facts.jsonl", rows())))
    bertvision.extract("0e", task="facts", pool="none", workspace=made.root, **EXACT)
    return made


def test_a_column_points_to_the_token_whose_state_is_kept(space: Workspace) -> None:
    """By the encoder and out of stored tokens, by a part of the text and by its position."""
    other = space.at(str(space.root / "of-encoder"))
    for target in (space, other):  # the tokens are stored in the first alone
        bertvision.extract(
            *("0e",),
            **{"task": "facts", "pool": "at:word,at:spot"},
            **{"workspace": space.root, "store": str(target.activations), **EXACT},
        )
    split = space.split("0e", "facts-all")
    tokenizer = load_snapshot(space.snapshot_dir("0e")).tokenizer
    expected = []
    for n, row in enumerate(rows()):
        (at,) = np.flatnonzero(split.plan.example_id == n)
        states = split.read([int(at)]).decode().numpy()
        words = tokenizer.convert_ids_to_tokens(tokenizer(row["text"])["input_ids"])
        pieces = tokenizer.tokenize(row["word"])
        last = max(
            i + len(pieces) - 1 for i in range(len(words)) if words[i : i + len(pieces)] == pieces
        )
        expected.append(states[last])
    for target in (space, other):
        for column in ("word", "spot"):
            kept = PooledSplit(target, "0e", "facts", "all", f"at:{column}")
            assert kept.stored.record.provenance["tokens"] == f"at:{column}"
            assert ("pooled_from" in kept.stored.record.provenance) == (target is space)
            np.testing.assert_allclose(kept.features(), np.array(expected), atol=2e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("berlin", "stands 0 times in"),
        ("in", "stands 2 times in"),
        (18, "the text has the characters 0 to 17"),
        (2, "a character that is no white space"),
        ("9" * 5000, "stands 0 times in"),
        (None, "give the position of a character"),
        ("", "give the position of a character"),
        (True, "give the position of a character"),
    ],
)
def test_a_value_that_points_nowhere_is_refused_with_its_sentence(
    tiny_bert: Path, value: object, message: str
) -> None:
    sentences = [Sentence("line 1", "in rome in 7 weeks")]
    windows = sentence_windows(sentences, load_tokenizer(tiny_bert))
    with pytest.raises(InputError, match=f"^sentence 'line 1', column 'spot': .*{message}"):
        pointed_tokens(windows, sentences, [value], "spot")


def test_digits_are_positions_or_parts_as_the_form_of_the_file_tells(tmp_path: Path) -> None:
    """JSON lines have both; a CSV has texts alone, of which digits are positions."""
    task, config = LabelledTask("csv"), TaskConfig(name="csv", text="text", label="label")
    text = "  it was in 1984 here"
    lines = [{"text": text, "label": "a", "at": value} for value in ("1984", 5, "here")]
    path = write(tmp_path / "a.jsonl", lines)
    values, _ = task.column(str(path), "all", config, "at", positions=True)
    assert list(values.values()) == ["1984", 3, "here"]
    csv = tmp_path / "a.csv"
    csv.write_text(f"text,label,at\n{text},a,5\n{text},a,here\n")
    values, _ = task.column(str(csv), "all", config, "at", positions=True)
    assert list(values.values()) == [3, "here"]
    for value, message in (("1984", "may be a position, or a part"), ("21", "characters 0 to 20")):
        csv.write_text(f"text,label,at\n{text},a,{value}\n")
        with pytest.raises(InputError, match=f"line 2: '{value}'.*{message}"):
            task.column(str(csv), "all", config, "at", positions=True)


def test_columns_are_those_of_the_file_that_was_added(space: Workspace, tmp_path: Path) -> None:
    data = space.dataset("facts")
    assert data.column("all", "group") == [row["group"] for row in rows()]
    with pytest.raises(InputError, match=r"not \['gone'\].*name a column that every row has"):
        data.column("all", "gone")
    own = space.dataset("facts")
    changed = rows()
    changed[0]["group"] = "another"
    path = Path(own.data["all"].source)
    before = path.read_bytes()
    try:
        write(path, changed)
        with pytest.raises(WorkspaceError, match="changed since it was first read"):
            data.column("all", "group")
    finally:
        path.write_bytes(before)


def test_names_of_pointed_tokens_are_names_of_splits() -> None:
    assert StoredName("all", "at:word", "facts").name == "facts-all-at_word"
    assert StoredName.parse("facts-all-at_word") == StoredName("all", "at:word", "facts")
    assert from_file_part("at_") is None
    for wrong in ("at:", "at:Word", "at:a-b", "at:../x", "middle"):
        with pytest.raises(InputError, match=f"^--pool '{wrong}': "):
            check_pooling(wrong)


def test_each_group_is_scored_by_probes_of_the_others(space: Workspace) -> None:
    options = ProbeOptions(group="group", max_epochs=4)
    data = read_data(space.dataset("facts"), options)
    assert data.clusters is not None
    assert len(data.folds) == 3
    for fold in data.folds:
        (out,) = {data.clusters[i] for i in fold.test}
        assert out not in {data.clusters[i] for i in (*fold.train, *fold.held_out)}
    assert data.scored.tolist() == list(range(12))
    bertvision.probe(
        "facts", pool="at:word", layers="1", group="group", epochs=4, workspace=space.root
    )
    (path,) = (space.root / "probes/facts").glob("0e-at_word-*.json")
    file = ProbeFile.read(path)
    assert file.clusters == [0, 1, 2] * 4
    (record,) = file.probes
    drawn = share(record.bits(12), clusters=file.clusters)
    assert (record.accuracy, record.low, record.high) == drawn


def test_a_text_that_groups_share_is_not_learned_where_it_is_scored() -> None:
    texts = ["a", "b", "c", "d", "a", "e", "f", "g"]
    labelled = Labelled(np.array([0, 1] * 4), texts, ["x"] * 4 + ["y"] * 4)
    folds = partition({"all": labelled}, ProbeOptions(group="g", dev_fraction=0.5))
    assert [fold.test.tolist() for fold in folds] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert sorted([*folds[0].train, *folds[0].held_out]) == [5, 6, 7]
    assert sorted([*folds[1].train, *folds[1].held_out]) == [1, 2, 3]


def test_groups_are_of_data_in_one_piece() -> None:
    part = Labelled(np.array([0, 1] * 4), list("abcdefgh"), ["x", "y"] * 4)
    with pytest.raises(InputError, match="--group g: the data have the splits train, dev"):
        partition({"train": part, "dev": part}, ProbeOptions(group="g"))


def test_intervals_of_groups_are_wider_where_groups_differ() -> None:
    """Groups that are all right or all wrong: their number counts, not that of the examples."""
    correct = np.repeat([True, False, True, True], 50)
    clusters = np.repeat(range(4), 50).tolist()
    plain, of_groups = share(correct), share(correct, clusters=clusters)
    assert plain.value == of_groups.value == 75
    assert of_groups.high - of_groups.low > 4 * (plain.high - plain.low)
    nothing = share_difference(correct, correct, clusters=clusters)
    assert (nothing.value, nothing.low, nothing.high) == (0, 0, 0)


def test_a_head_reads_the_token_to_which_a_column_points(tiny_bert: Path, tmp_path: Path) -> None:
    """It is scored on stored splits; a text alone has no columns."""
    root, common = tmp_path / "ws", {"precision": "32", "workspace": tmp_path / "ws"}
    data = write(tmp_path / "rows.jsonl", rows())
    bertvision.finetune(
        **{"model": str(tiny_bert), "task": "csv", "train": str(data), "dev": str(data)},
        **{"save_at": "0", "tune_fraction": 0, **common},
    )
    bertvision.extract("0e", pool="at:word", encoding="float32", **common)
    (trained,) = bertvision.train("cls-last-state@pat_word", lr=0.1, epochs=40, **common)
    assert trained.head == "cls-last-state@pat_word"
    (row,) = bertvision.evaluate(trained.head, **common)
    assert row.provenance["tokens"] == "at:word"
    with pytest.raises(InputError, match=r"column 'word' .* a text alone has no columns"):
        bertvision.Predictor.load(f"{trained.head}:0e", workspace=root)
    with pytest.raises(InputError, match=r"column 'word' .* a text alone has no columns"):
        bertvision.latency(trained.head, checkpoint="0e", **common)
