"""GLUE's folders and hub data sets: columns, labels and splits of every task, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import datasets
import pytest

from bertvision.errors import InputError
from bertvision.pipelines.tasks.data import Sentence, TaskConfig, TaskData
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.tasks.sentences.labelled import GLUE, GlueTask
from bertvision.pipelines.tasks.task import load_task

# Of each task: header (None: there is none), two rows as GLUE writes them, and what they say.
A, B = 'He said "no.', "It is 5° cold."
FILES: dict[str, tuple[str | None, list[str], list[tuple[str, str | None, float]]]] = {
    "cola": (None, [f"gj04\t1\t\t{A}", f"gj04\t0\t*\t{B}"], [(A, None, 1), (B, None, 0)]),
    "sst2": ("sentence\tlabel", [f"{A} \t1", f"{B}\t0"], [(A, None, 1), (B, None, 0)]),
    "mrpc": (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        [f"1\t70\t71\t{A}\t{B}", f"0\t72\t73\t{B}\t{A}"],
        [(A, B, 1), (B, A, 0)],
    ),
    "qqp": (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
        [f"133273\t213221\t213222\t{A}\t{B}\t0", f"402555\t536040\t536041\t{B}\t{A}\t1"],
        [(A, B, 0), (B, A, 1)],
    ),
    "stsb": (
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        [
            f"0\tmain-captions\tMSRvid\t2012test\t0001\tnone\tnone\t{A}\t{B}\t5.000",
            f"1\tmain-captions\tMSRvid\t2012test\t0004\tnone\tnone\t{B}\t{A}\t3.8",
        ],
        [(A, B, 5.0), (B, A, 3.8)],
    ),
    "mnli": (
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\t"
        "sentence1_parse\tsentence2_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        [
            f"0\t31193\t31193n\tgovernment\t( a )\t( b )\t(R a)\t(R b)\t{A}\t{B}\tneutral\tneutral",
            f"1\t1\t1c\tfiction\t( a )\t( b )\t(R a)\t(R b)\t{B}\t{A}\tneutral\tcontradiction",
        ],
        [(A, B, 1), (B, A, 2)],
    ),
    "qnli": (
        "index\tquestion\tsentence\tlabel",
        [f"0\t{A}\t{B}\tentailment", f"1\t{B}\t{A}\tnot_entailment"],
        [(A, B, 0), (B, A, 1)],
    ),
    "rte": (
        "index\tsentence1\tsentence2\tlabel",
        [f"0\t{A}\t{B}\tnot_entailment", f"1\t{B}\t{A}\tentailment"],
        [(A, B, 1), (B, A, 0)],
    ),
    "wnli": (
        "index\tsentence1\tsentence2\tlabel",
        [f"0\t{A}\t{B}\t1", f"1\t{B}\t{A}\t0"],
        [(A, B, 1), (B, A, 0)],
    ),
}
DEV = {"mnli": "dev_matched.tsv"}


def read(name: str, source: Path | str, split: str = "train", **options: object) -> TaskData:
    return load_task(name).read(str(source), split, TaskConfig(name=name, **options))


def write(path: Path, name: str, rows: list[str] | None = None) -> Path:
    header, own, _ = FILES[name]
    lines = [*([] if header is None else [header]), *(own if rows is None else rows)]
    data = ("\n".join(lines) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def said(data: TaskData) -> list[tuple[str, str | None, float | None]]:
    return [(item.text, item.pair, item.label) for item in data.items]


def test_every_task_is_registered_with_its_headline():
    assert set(FILES) == set(GLUE)
    headlines = {name: TASKS[name].headline for name in GLUE}
    assert headlines == dict.fromkeys(GLUE, "accuracy") | {"cola": "matthews", "stsb": "pearson"}
    for name in GLUE:
        assert TASKS[name].hub == f"nyu-mll/glue:{name}"
        assert isinstance(load_task(name), GlueTask)


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("place", ["{file}", "{file}.gz", "{folder}/{file}", "{folder}/{file}.gz"])
def test_task_is_read_from_the_folders_that_glue_ships(name: str, place: str, tmp_path: Path):
    for split, file in (("train", "train.tsv"), ("dev", DEV.get(name, "dev.tsv"))):
        path = write(
            tmp_path / place.format(file=file, folder=GLUE[name].folder),
            name,
        )
        for source in (tmp_path, path.parent, path):
            data = read(name, source, split)
            assert said(data) == FILES[name][2]
            assert data.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
            assert data.classes == GLUE[name].classes
            assert data.skipped == []
            assert len({item.id for item in data.items}) == 2
    assert load_task(name).splits(str(tmp_path)) == ("train", "dev")


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("train.tsv", "train"),
        ("train.tsv.gz", "train"),
        ("dev.tsv", "dev"),
        ("dev_matched.tsv", "dev"),
        ("rte-validation.tsv", "dev"),
        ("test.tsv", "test"),
        ("mine.tsv", "all"),
    ],
)
def test_single_file_is_one_split_and_read_as_what_it_is_given_for(
    file: str, split: str, tmp_path: Path
):
    path = write(tmp_path / file, "rte")
    assert load_task("rte").splits(str(path)) == (split,)
    for asked in {split, "train", "dev"}:
        assert said(read("rte", path, asked)) == FILES["rte"][2]


def test_folder_offers_the_splits_it_holds(tmp_path: Path):
    write(tmp_path / "MNLI" / "dev_matched.tsv", "mnli")
    assert load_task("mnli").splits(str(tmp_path)) == ("dev",)
    with pytest.raises(InputError, match=r"holds no train\.tsv or .* or dev\.tsv"):
        load_task("rte").splits(str(tmp_path))
    assert load_task("rte").splits("nyu-mll/glue:rte") == ("train", "dev")


@pytest.mark.parametrize("name", GLUE)
def test_hub_data_says_the_same_as_the_files(name: str, tmp_path: Path):
    spec = GLUE[name]
    rows = FILES[name][2]
    specs = spec.layout.columns
    texts = [specs[column].names[-1] for column in ("text", "pair") if column in specs]
    columns: dict[str, list[object]] = {
        column: [row[i] for row in rows] for i, column in enumerate(texts)
    }
    kind = (
        datasets.ClassLabel(names=list(spec.classes)) if spec.classes else datasets.Value("float")
    )
    features = datasets.Features(
        {
            **dict.fromkeys(texts, datasets.Value("string")),
            "label": kind,
            "idx": datasets.Value("int32"),
        }
    )
    table = datasets.Dataset.from_dict(
        {**columns, "label": [row[2] for row in rows], "idx": [0, 1]}, features=features
    )
    for split in ("train", spec.dev.replace("dev", "validation")):
        table.to_parquet(tmp_path / f"{split}-00000-of-00001.parquet")
    for split in ("train", "dev") if name != "mnli" else ("train",):
        data = read(name, tmp_path, split)
        assert [row[:2] for row in said(data)] == [row[:2] for row in rows]
        assert [row[2] for row in said(data)] == pytest.approx([row[2] for row in rows])
        assert data.classes == spec.classes
        assert data.sha256 == read(name, tmp_path, split).sha256


def test_classes_of_the_hub_are_taken_by_name_not_by_number(tmp_path: Path):
    features = datasets.Features(
        {
            "sentence1": datasets.Value("string"),
            "sentence2": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["not_entailment", "entailment"]),
        }
    )
    rows = {"sentence1": [A, B], "sentence2": [B, A], "label": [0, 1]}
    path = tmp_path / "train.parquet"
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)
    assert said(read("rte", tmp_path)) == [(A, B, 1), (B, A, 0)]
    with pytest.raises(InputError, match=r"has the classes .*, task are .*'acceptable'|columns"):
        read("cola", tmp_path)
    with pytest.raises(InputError, match=r"has the classes \['not_ent.*task are|columns"):
        read("mnli", tmp_path)


def test_a_folder_names_no_files_of_a_server(tmp_path: Path):
    """Its README may say that its data are at an address."""
    rows = {"sentence": [A, B], "label": [1, 0]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    asked: list[str] = []

    class Server(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # or headers and body are 40 ms apart

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/train.parquet"
        (tmp_path / "README.md").write_text(
            "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
            f"    path: {address}\n---\n"
        )
        with pytest.raises(InputError, match=r"README.md names data outside its folder: http"):
            read("cola", tmp_path)
        server.shutdown()
    assert asked == []


def test_the_readme_of_a_folder_says_which_file_is_which_split(tmp_path: Path):
    for name, text in (("part-a", A), ("part-b", B)):
        rows = {"sentence": [text, text], "label": [1, 0]}
        datasets.Dataset.from_dict(rows).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        "    path: part-a.parquet\n  - split: validation\n    path: part-b.parquet\n---\n"
    )
    assert {item.text for item in read("cola", tmp_path).items} == {A}
    assert {item.text for item in read("cola", tmp_path, "dev").items} == {B}


def test_unpublished_labels_of_the_hub_are_refused_or_skipped(tmp_path: Path):
    rows = {"sentence": [A, B, "Yes."], "label": [1, -1, 0]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "train.parquet")
    with pytest.raises(InputError, match=r"\(train\), row 1: has no label"):
        read("cola", tmp_path)
    data = read("cola", tmp_path, skip_bad=True)
    assert [item.text for item in data.items] == [A, "Yes."]
    assert len(data.skipped) == 1


def test_hub_name_that_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"'nyu-mll/glue:cola' .*split 'validation'.*network"):
        read("cola", "nyu-mll/glue:cola", "dev")


def test_quotes_are_text_and_never_swallow_rows(tmp_path: Path):
    rows = ['1\t1\t2\t"One\t"Two "three', '0\t3\t4\tFour"\tFive']
    path = write(tmp_path / "train.tsv", "mrpc", rows)
    assert said(read("mrpc", path)) == [('"One', '"Two "three', 1), ('Four"', "Five", 0)]


def test_line_breaks_of_unicode_do_not_end_rows(tmp_path: Path):
    rows = ["a\t1\t\tOne\u2028two\x85three.", "a\t0\t*\tFour.\r"]
    path = write(tmp_path / "train.tsv", "cola", rows)
    assert said(read("cola", path)) == [("One\u2028two\x85three.", None, 1), ("Four.", None, 0)]


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("cola", "a\t1\tOne.", "3: has 3 fields, expected are 4: source, label, judgement, sent"),
        ("rte", "1\ta\tb", "4: has 3 fields, expected are 4: index, sentence1, sentence2, label"),
        ("rte", "1\ta\tb\tc\td", "4: has 5 fields, expected are 4: index, sentence1"),
        ("rte", "0\ta\tb\tmaybe", "4: the label 'maybe' is none of the 2 classes: entailment, not"),
        ("rte", "0\ta\tb\t", "4: has no label"),
        ("rte", "0\ta\t \tentailment", "4: the second text is empty"),
        ("cola", "a\t1\t\t ", "3: the text is empty"),
        ("cola", "a\t7\t\tOne.", "3: the label '7' is none of the 2 classes"),
        ("stsb", "\t" * 7 + "a\tb\tfive", "4: the score 'five' is no finite number"),
        ("stsb", "\t" * 7 + "a\tb\tnan", "4: the score 'nan' is no finite number"),
    ],
)
def test_malformed_row_is_named_with_its_line_or_skipped(
    name: str, row: str, message: str, tmp_path: Path
):
    path = write(tmp_path / "train.tsv", name, [*FILES[name][1], row])
    with pytest.raises(InputError, match=rf"train\.tsv, line {message}.*--skip-bad"):
        read(name, path)
    data = read(name, path, skip_bad=True)
    assert said(data) == FILES[name][2]
    assert [line.split(": ")[0] for line in data.skipped] == [f"{path}, line {message[0]}"]
    with pytest.raises(InputError, match=r"holds no rows after skipping 1: "):
        read(name, write(tmp_path / "bad" / "train.tsv", name, [row]), skip_bad=True)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"index\tsentence1\tsentence2\tlabel\n", "holds no rows"),
        (b"sentence\tlabel\na\t1\n", r"line 1: has the columns \['sentence', 'label'\], but not"),
        (b"index\tsentence1\tsentence2\tlabel\n0\ta\xff\tb\tx\n", "line 2: byte 0xff is not UTF-8"),
        (b"\x1f\x8b\x08\x00", "is gzip data: give it a name that ends with .tsv.gz"),
    ],
)
def test_file_that_is_no_table_is_refused(data: bytes, message: str, tmp_path: Path):
    path = tmp_path / "train.tsv"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message):
        read("rte", path)


def test_broken_gzip_missing_files_and_splits_are_refused(tmp_path: Path):
    (tmp_path / "train.tsv.gz").write_bytes(b"\x1f\x8b\x08\x00broken")
    with pytest.raises(InputError, match="not whole gzip data"):
        read("rte", tmp_path)
    bomb = gzip.compress(b"x" * (1 << 27))
    assert len(bomb) < 1 << 18
    (tmp_path / "train.tsv.gz").write_bytes(bomb)
    with pytest.raises(InputError, match=r"more than 67,108,864 bytes.*unpack it yourself"):
        read("rte", tmp_path)
    with pytest.raises(InputError, match=r"holds no dev\.tsv or RTE/dev\.tsv .*to read rte from"):
        read("rte", tmp_path, "dev")
    with pytest.raises(InputError, match=r"no such file or folder"):
        read("rte", tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"rte has no labelled split 'test'"):
        read("rte", tmp_path, "test")


def test_training_data_of_one_class_is_refused(tmp_path: Path):
    task = load_task("rte")
    items = [Sentence(str(i), "a", "b", 1) for i in range(3)]
    with pytest.raises(InputError, match=r"folder: all 3 sentences have the same label"):
        task.check_data(items, "folder")
    with pytest.raises(InputError, match=r"folder holds no sentence"):
        task.check_data([], "folder")
    task.check_data([*items, items[0]._replace(label=0)], "folder")
