"""Sentence tasks and SentEval's files: what is read, learned, kept, scored and refused."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoTokenizer, pipeline

from bertvision.errors import InputError
from bertvision.models.outputs import ClassOutput
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.registry import PROBING, TASKS
from bertvision.pipelines.tasks.sentences.labelled import DOWNSTREAM
from bertvision.pipelines.tasks.sentences.task import SentenceTask
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import collate

CLASSES = ("no", "perhaps", "yes")
ITEMS = [
    Sentence("a", "anna lives in paris .", None, 2),
    Sentence("b", "boris wrote a book .", "the book was in london .", 0),
    Sentence("c", "", None, 1),
    Sentence("d", "who is king ?", None, None),
]


def task_of(name: str = "csv") -> SentenceTask:
    task = load_task(name)
    assert isinstance(task, SentenceTask)
    return task


def predicted(logits: np.ndarray, items: list[Sentence]) -> Logits:
    rows = np.arange(len(items), dtype=np.int32)
    windows = WindowIndex(items, np.full(len(items), 3, np.int32), rows, None)
    return Logits({"logits": logits}, windows)


def one_hot(classes: list[int], n: int) -> np.ndarray:
    return np.eye(n, dtype=np.float32)[classes]


def test_outputs_are_one_for_each_class_and_one_of_a_score():
    task = task_of()
    classes, scores = TaskConfig(name="csv", classes=CLASSES), TaskConfig(name="csv")
    assert (task.outputs(classes), task.outputs(scores)) == (3, 1)


@pytest.mark.parametrize("classes", [CLASSES, ("no", "yes"), ()])
def test_transformers_own_pipeline_reads_a_snapshot(
    classes: tuple[str, ...], tiny_bert: Path, tmp_path: Path
):
    """Names of the classes with their probabilities, and a score as it is.

    Also from a checkpoint whose output layer was made for something else, and from those saved
    before the names were written.
    """
    task, config = task_of(), TaskConfig(name="csv", classes=classes)
    tokenizer, text = AutoTokenizer.from_pretrained(tiny_bert), ITEMS[0].text
    other = {"num_labels": len(classes) or 1, "problem_type": "multi_label_classification"}
    first = load_model(tiny_bert, task.model_class, **other)
    first.save_pretrained(tmp_path / "old")
    model = load_model(tmp_path / "old", task.model_class, **task.model_options(config))
    assert model.state_dict().keys() == first.state_dict().keys()
    assert all(torch.equal(x, first.state_dict()[name]) for name, x in model.state_dict().items())
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "new")
    said = pipeline("text-classification", str(tmp_path / "new"), device="cpu")(text, top_k=None)
    with torch.no_grad():
        output = model(**tokenizer(text, return_tensors="pt"))
    assert output.loss is None
    expected = output.logits[0].softmax(0) if classes else output.logits[0]
    names = classes or ("score",)
    assert {x["label"]: x["score"] for x in said} == pytest.approx(
        dict(zip(names, expected.tolist(), strict=True))
    )


def test_windows_labels_and_store_agree(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", classes=CLASSES, max_length=16)
    windows = task.windows(ITEMS, AutoTokenizer.from_pretrained(tiny_bert), config)
    assert len(windows) == len(ITEMS)
    for arrays in (task.labels(windows), task.stored(windows)):
        assert arrays["label"].tolist() == [2, 0, 1, -1]
        assert np.issubdtype(arrays["label"].dtype, np.integer)
    assert windows.n_tokens.tolist() == [7, 14, 2, 6]
    scored = [item._replace(label=0.5) for item in ITEMS[:3]] + ITEMS[3:]
    found = task.labels(task.windows(scored, AutoTokenizer.from_pretrained(tiny_bert), config))
    assert found["label"].dtype == np.float32
    assert np.array_equal(found["label"], [0.5, 0.5, 0.5, np.nan], equal_nan=True)


@pytest.mark.parametrize("labels", [[2, 0, 1, None], [0.5, -1.25, 3.0, None], [None] * 4])
def test_table_gives_the_items_back(labels: list[float | None]):
    task = task_of()
    items = [item._replace(label=x) for item, x in zip(ITEMS, labels, strict=True)]
    found = task.items_of(task.table(items))
    assert found == items
    assert [type(i.label) for i in found] == [type(i.label) for i in items]


def test_loss_is_summed_cross_entropy_and_the_heads_mean(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", classes=CLASSES, max_length=16)
    windows = task.windows(ITEMS[:3], AutoTokenizer.from_pretrained(tiny_bert), config)
    batch = collate(windows, windows.first_token, np.arange(3), 0, task.labels(windows))
    logits = torch.randn(3, 3)
    output = SimpleNamespace(logits=logits)
    expected = functional.cross_entropy(logits, torch.tensor([2, 0, 1]), reduction="none")
    torch.testing.assert_close(task.loss(output, batch), expected.sum())
    stored = {"label": torch.from_numpy(task.stored(windows)["label"])}
    torch.testing.assert_close(task.head_loss(ClassOutput(logits), stored), expected.mean())
    assert task.logits(output)["logits"] is logits


def test_loss_of_scores_is_the_squared_error(tiny_bert: Path):
    task, config = task_of(), TaskConfig(name="csv", max_length=16)
    items = [item._replace(label=x) for item, x in zip(ITEMS, (0.5, 2.25, -1.0), strict=False)]
    windows = task.windows(items, AutoTokenizer.from_pretrained(tiny_bert), config)
    batch = collate(windows, windows.first_token, np.arange(3), 0, task.labels(windows))
    logits = torch.tensor([[0.0], [2.0], [1.0]])
    found = task.loss(SimpleNamespace(logits=logits), batch)
    torch.testing.assert_close(found, torch.tensor(0.25 + 0.0625 + 4))
    stored = {"label": torch.from_numpy(task.stored(windows)["label"])}
    torch.testing.assert_close(task.head_loss(ClassOutput(logits), stored), found / 3)


def test_scores_of_classes_and_which_tasks_have_f1():
    items = [Sentence(str(i), "a", "b", label) for i, label in enumerate([1, 1, 0, 0])]
    logits = one_hot([1, 0, 0, 0], 2)
    for name in ("rte", "mrpc", "cola", "csv"):
        scores = task_of(name).score(predicted(logits, items), None)
        metrics = scores.rules["argmax"]["metrics"]
        assert scores.rules["argmax"]["threshold"] is None
        assert metrics["accuracy"] == 75
        assert metrics["matthews"] == pytest.approx(100 / 3**0.5)
        assert metrics["majority"] == 50
        assert metrics["total"] == 4
        assert ("f1" in metrics) == (name == "mrpc")
        assert scores.predictions == {"0": 1, "1": 0, "2": 0, "3": 0}
        assert scores.na_scores == {}
    assert task_of("mrpc").score(predicted(logits, items), None).rules["argmax"]["metrics"][
        "f1"
    ] == pytest.approx(200 / 3)


def test_scores_of_a_regression():
    items = [Sentence(str(i), "a", "b", x) for i, x in enumerate([0.0, 1.0, 2.0, 5.0])]
    logits = np.array([[0.1], [0.2], [0.3], [0.35]], np.float32)
    scores = task_of("stsb").score(predicted(logits, items), None)
    metrics = scores.rules["argmax"]["metrics"]
    assert metrics["spearman"] == pytest.approx(100)
    assert metrics["pearson"] == pytest.approx(100 * np.corrcoef(logits[:, 0], [0, 1, 2, 5])[0, 1])
    assert scores.predictions["3"] == pytest.approx(0.35)


def test_what_cannot_be_scored_is_refused():
    task, items = task_of(), [Sentence("a", "x", None, 1), Sentence("b", "y", None, 0)]
    nan = np.array([[0.0, np.nan], [1.0, 0.0]])
    with pytest.raises(InputError, match="NaN"):
        task.score(predicted(nan, items), None)
    with pytest.raises(InputError, match="1 of 2 items have no label"):
        task.score(predicted(np.eye(2), [items[0], items[1]._replace(label=None)]), None)
    with pytest.raises(InputError, match=r"shape \(3, 2\).*2 items"):
        task.score(predicted(np.zeros((3, 2)), items), None)


PROBE = """\
tr\tPres\tA fox warns .
va\tPast\tHe said " no .
tr\tPast\tShe went .
te\tPres\tIt 's 5° .
te\tPast\tThey left .
"""


def read(name: str, source: Path, split: str, **options: object) -> TaskData:
    return load_task(name).read(str(source), split, TaskConfig(name=name, **options))


def said(data: TaskData) -> list[tuple[str, float | None]]:
    return [(item.text, item.label) for item in data.items]


def test_every_task_is_registered():
    assert len(PROBING) == 10
    assert set(DOWNSTREAM) == {"mr", "cr", "subj", "mpqa", "trec"}
    for name in (*PROBING, *DOWNSTREAM):
        assert TASKS[name].headline == "accuracy"
        assert load_task(name).name == name


@pytest.mark.parametrize("name", PROBING)
def test_probing_file_is_cut_into_its_splits(name: str, tmp_path: Path):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    for folder in (plain, packed):
        folder.mkdir()
    (plain / f"{name}.txt").write_bytes(PROBE.encode())
    (packed / f"{name}.txt.gz").write_bytes(gzip.compress(PROBE.encode()))
    for source in (plain, packed, plain / f"{name}.txt", packed / f"{name}.txt.gz"):
        assert load_task(name).splits(str(source)) == ("train", "dev", "test")
        by_split = {split: read(name, source, split) for split in ("train", "dev", "test")}
        assert said(by_split["train"]) == [("A fox warns .", 1), ("She went .", 0)]
        assert said(by_split["dev"]) == [('He said " no .', 0)]
        assert said(by_split["test"]) == [("It 's 5° .", 1), ("They left .", 0)]
        assert {data.classes for data in by_split.values()} == {("Past", "Pres")}
        assert len({data.sha256 for data in by_split.values()}) == 1
        ids = [item.id for data in by_split.values() for item in data.items]
        assert len(set(ids)) == 5


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path):
    path = tmp_path / "tree_depth.txt"
    path.write_text("".join(f"tr\t{n}\tOne .\n" for n in (10, 9, 12, 9)))
    data = read("tree_depth", path, "train")
    assert data.classes == ("9", "10", "12")
    assert [item.label for item in data.items] == [1, 0, 2, 0]


def test_label_that_only_test_has_is_a_class_that_cannot_be_learned(tmp_path: Path):
    path = tmp_path / "word_content.txt"
    path.write_text("tr\tfox\tA fox .\ntr\that\tA hat .\nte\tsea\tThe sea .\n")
    assert read("word_content", path, "train").classes == ("fox", "hat", "sea")
    assert said(read("word_content", path, "test")) == [("The sea .", 2)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tr\tPast", "2: has 2 fields, expected are 3: split, label, sentence"),
        ("tr\tPast\tA\tB", "2: has 4 fields, expected are 3"),
        ("xx\tPast\tA .", "2: the split is 'xx'; it must be one of tr, va, te"),
        ("tr\t\tA .", "2: has no label"),
        ("tr\tPast\t ", "2: the text is empty"),
    ],
)
def test_malformed_probing_line_is_named_or_skipped(line: str, message: str, tmp_path: Path):
    path = tmp_path / "past_present.txt"
    path.write_text(PROBE.replace("\n", f"\n{line}\n", 1))
    with pytest.raises(InputError, match=rf"past_present\.txt, line {message}"):
        read("past_present", path, "train")
    data = read("past_present", path, "train", skip_bad=True)
    assert said(data) == [("A fox warns .", 1), ("She went .", 0)]
    assert len(data.skipped) == 1


def test_bytes_that_are_no_utf_8_are_refused_in_probing_files(tmp_path: Path):
    path = tmp_path / "past_present.txt"
    path.write_bytes(b"tr\tPast\tOne .\ntr\tPres\tCaf\xe9 .\n")
    with pytest.raises(InputError, match="line 2: byte 0xe9 is not UTF-8"):
        read("past_present", path, "train")


def test_split_or_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match=r"holds no past_present\.txt"):
        read("past_present", tmp_path, "train")
    (tmp_path / "past_present.txt").write_text("tr\tPast\tOne .\n")
    with pytest.raises(InputError, match="holds no rows"):
        read("past_present", tmp_path, "dev")
    with pytest.raises(InputError, match="no split 'all': train, dev, test"):
        read("past_present", tmp_path, "all")


@pytest.mark.parametrize("name", ["mr", "cr", "subj", "mpqa"])
@pytest.mark.parametrize("split", ["train", "dev"])
def test_set_in_one_piece_names_the_command_that_cross_validates_it(
    name: str, split: str, tmp_path: Path
):
    expected = rf"{name} has no split '{split}', but all: `bertvision probe {name}` cross-valid"
    with pytest.raises(InputError, match=expected):
        read(name, tmp_path, split)


def test_trec_has_no_dev_but_takes_files(tmp_path: Path):
    (tmp_path / "TREC.train.all").write_text("5 How far ?\n0 How ?\n")
    test = tmp_path / "TREC.test.all"
    test.write_text("3 Who ?\n")
    expected = r"trec has no split 'dev', but train, test: use `bertvision probe trec`, .*--dev"
    with pytest.raises(InputError, match=expected):
        read("trec", tmp_path, "dev")
    assert said(read("trec", test, "dev")) == [("Who ?", 3)]


@pytest.mark.parametrize(
    ("name", "file", "splits"),
    [
        ("trec", "TREC.train.all", ("train",)),
        ("trec", "TREC.test.all.gz", ("test",)),
        ("trec", "mine.all", ("all",)),
        ("mr", "rt-polarity.all", ("all",)),
        ("mr", "train.txt", ("all",)),
    ],
)
def test_single_downstream_file_is_one_split(
    name: str, file: str, splits: tuple[str, ...], tmp_path: Path
):
    data = b"0 How ?\n1 Who ?\n"
    path = tmp_path / file
    path.write_bytes(gzip.compress(data) if file.endswith(".gz") else data)
    assert load_task(name).splits(str(path)) == splits
    assert said(read(name, path, splits[0])) == [("How ?", 0), ("Who ?", 1)]


@pytest.mark.parametrize("name", ["mr", "cr", "subj", "mpqa"])
@pytest.mark.parametrize("packed", [False, True])
def test_downstream_set_is_one_split(name: str, packed: bool, tmp_path: Path):
    data = b'0 simplistic , " silly . \n1 caf\xc3\xa9 \n1 \n'
    file = DOWNSTREAM[name].files["all"] + (".gz" if packed else "")
    (tmp_path / file).write_bytes(gzip.compress(data) if packed else data)
    assert load_task(name).splits(str(tmp_path)) == ("all",)
    for source in (tmp_path, tmp_path / file):
        found = read(name, source, "all")
        # an empty sentence counts, as in the published counts
        assert said(found) == [('simplistic , " silly .', 0), ("café", 1), ("", 1)]
        assert found.classes == ("0", "1")


def test_downstream_file_of_latin_1_is_read(tmp_path: Path):
    (tmp_path / "rt-polarity.all").write_bytes(b"0 bad\n1 caf\xe9 \x85 d\xe9j\xe0 vu\n")
    assert said(read("mr", tmp_path, "all")) == [("bad", 0), ("café \x85 déjà vu", 1)]


def test_trec_has_two_splits(tmp_path: Path):
    (tmp_path / "TREC.train.all").write_text("5 How far ?\n0 How ?\n")
    (tmp_path / "TREC.test.all").write_text("3 Who ?\n")
    assert load_task("trec").splits(str(tmp_path)) == ("train", "test")
    assert said(read("trec", tmp_path, "train")) == [("How far ?", 5), ("How ?", 0)]
    assert said(read("trec", tmp_path, "test")) == [("Who ?", 3)]


def test_downstream_label_that_is_none_is_refused(tmp_path: Path):
    (tmp_path / "subj.all").write_text("0 smart\n1 a\nno label\n")
    with pytest.raises(InputError, match=r"line 3: the label 'no' is none of the 2 classes: 0, 1"):
        read("subj", tmp_path, "all")
