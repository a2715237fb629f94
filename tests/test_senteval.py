"""SentEval's probing and downstream files: splits, labels, encodings, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import TaskConfig, TaskData
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.tasks.sentences.senteval import DOWNSTREAM, PROBING
from bertvision.pipelines.tasks.task import load_task

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
        ("xx\tPast\tA .", "2: the split 'xx' is none of tr, va, te"),
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
