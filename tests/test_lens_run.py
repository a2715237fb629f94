"""Lens and cloze tests of a workspace: the model's own answers, kept, shown, and said whose."""

from __future__ import annotations

import base64
import csv
import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from families import make_family
from reports import read_table
from terminal import done, run
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.jobs.command import show
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.workspace.snapshots import load_snapshot, save_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

TEXTS = [f"the {a} in rome founded {b} , who founded anna {c}" for a, b, c in ("abc", "ede", "fgh")]
SPLIT = "texts-all"
ITEMS = [
    {"text": "the a in [MASK] founded", "answer": answer, "group": group}
    for answer, group in [("rome", "places"), ("anna", "people"), ("who", "people")]
]


class Made(NamedTuple):
    """A workspace of a BERT with an MLM head, with all tokens of `TEXTS` stored."""

    model: Path
    space: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("lens")
    model = make_family("bert", folder / "mlm-bert", AutoModelForMaskedLM)
    with (folder / "texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["text", "label"], *([t, "xy"[i % 2]] for i, t in enumerate(TEXTS))]
        )
    bertvision.extract(
        "0e",
        model=model,
        task="csv",
        data=folder / "texts.csv",
        pool="none",
        encoding="float32",
        precision="32",
        workspace=folder / "space",
    )
    return Made(model, folder / "space")


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("analysis", "report")
    return Path(shutil.copytree(made.space, tmp_path / "space", ignore=ignored))


def test_the_last_layer_says_what_the_model_itself_says(made: Made) -> None:
    found = bertvision.lens("0e", split=SPLIT, workspace=made.space)
    model = AutoModelForMaskedLM.from_pretrained(made.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    own, first = [], []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        kept = [i for i, word in enumerate(ids[0]) if word not in tokenizer.all_special_ids]
        own += log_p[kept, ids[0, kept]].tolist()
        first += (log_p.argmax(-1) == ids[0])[kept].tolist()
    assert found.n_tokens == len(own) == len(" ".join(TEXTS).split())
    assert found.log_p[-1] == pytest.approx(np.mean(own), abs=1e-4)
    assert found.top1[-1] == pytest.approx(np.mean(first))
    assert found.layers == (0, 1, 2)
    assert found.title().startswith(f"Lens, 0e/{SPLIT}, MLM head of mlm-bert, ")
    assert "The MLM head is the one that mlm-bert was pretrained with." in found.table()
    assert "as no token was masked" in found.table()


def test_a_decoder_is_asked_for_the_word_that_follows(tmp_path: Path) -> None:
    folder = make_family("gpt2", tmp_path / "lm-gpt2", AutoModelForCausalLM)
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    space = tmp_path / "space"
    common: dict[str, Any] = {"precision": "32", "encoding": "float32", "workspace": space}
    bertvision.extract("0e", model=folder, task="text", data=data, pool="none", **common)
    read = bertvision.lens("0e", split=SPLIT, workspace=space)
    model, own = AutoModelForCausalLM.from_pretrained(folder).eval(), []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.inference_mode():
            log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        own += log_p[torch.arange(len(log_p) - 1), ids[0, 1:]].tolist()
    assert read.n_tokens == len(own)
    assert read.log_p[-1] == pytest.approx(np.mean(own), abs=1e-4)
    assert read.head == "output layer of lm-gpt2"
    assert "is asked for the token that follows" in str(read)


def test_a_page_shows_the_word_that_the_model_says_in_each_layer(
    made: Made, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    bertvision.view(f"0e/{SPLIT}", output=path, workspace=made.space)
    data = json.loads(path.read_text().partition('id="data">')[2].partition("</script>")[0])
    model = AutoModelForMaskedLM.from_pretrained(made.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    index = np.frombuffer(base64.b64decode(data["lens"]["codes"]), "<u2").reshape(-1, 3)
    kept = data["measures"][data["lens"]["measure"]]
    codes = np.frombuffer(base64.b64decode(kept["codes"]), "<u2").reshape(-1, 3)
    texts, begin = [], 0
    for _, end in data["examples"]:
        first, *names, last = (name.strip() for name in data["tokens"][begin:end])
        assert (first, last) == ("[CLS]", "[SEP]")
        texts.append(" ".join(names))
        ids = tokenizer(texts[-1], return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            chance, best = model(input_ids=ids).logits[0].softmax(-1).max(-1)
        said = [data["lens"]["words"][i] for i in index[begin:end, -1]]
        pieces = tokenizer.convert_ids_to_tokens(best.tolist())
        named = [p or f"#{i}" for p, i in zip(pieces, best.tolist(), strict=True)]
        assert said == named  # the vocabulary has a few numbers without a piece
        shown = kept["low"] + kept["step"] * codes[begin:end, -1]
        assert shown == pytest.approx(chance.numpy(), abs=1e-4)
        begin = end
    assert begin == len(index)
    assert sorted(texts) == sorted(TEXTS)
    assert data["labels"]["classes"] == ["x", "y"]
    coloured = {title: data["labels"]["codes"][i] for i, (_, title) in enumerate(data["points"])}
    assert coloured == {text: i % 2 for i, text in enumerate(TEXTS)}


def test_masked_words_get_the_models_own_answers(made: Made, copy: Path, tmp_path: Path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    found = json.loads(done("cloze", "--items", path, "-w", copy, "--json", "--k", 2))
    model = AutoModelForMaskedLM.from_pretrained(made.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(made.model)
    ids = tokenizer("the a in [MASK] founded", return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        logits = model(input_ids=ids).logits[0, 4]
    words = [item["answer"] for item in ITEMS]
    order = sorted(words, key=lambda w: -logits[tokenizer.convert_tokens_to_ids(w)].item())
    ranks = {word: order.index(word) + 1 for word in words}
    assert found["groups"] == ["places", "people", "all"]
    assert found["mrr"][0] == pytest.approx(1 / ranks["rome"])
    assert found["mrr"][1] == pytest.approx(np.mean([1 / ranks[w] for w in ("anna", "who")]))
    assert found["p1"][2] == pytest.approx(1 / 3)  # one of the three comes first
    assert found["pk"][2] == pytest.approx(2 / 3)
    kept = json.loads((copy / "analysis" / "cloze-0e-words.json").read_text())
    assert kept["command"] == f"bertvision cloze 0e --items {path} --k 2"
    assert kept["files_sha256"].keys() == {"words"}
    assert "as it was measured before" in run("cloze", "--items", path, "-w", copy, "--k", 2).stderr
    path.write_text(path.read_text().replace("rome", "in"))
    again = run("cloze", "--items", path, "-w", copy, "--k", 2)
    assert again.exit_code == 0
    assert "as it was measured before" not in again.stderr  # of other items


def test_both_are_kept_and_in_the_report(copy: Path, tmp_path: Path) -> None:
    read = bertvision.lens("0e", split=SPLIT, workspace=copy)
    show(read, True, tmp_path / "lens.csv")
    path = tmp_path / "words.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    asked = bertvision.cloze(items=path, workspace=copy)
    again = run("lens", "0e", "--split", SPLIT, "-w", copy)
    assert "as it was measured before" in again.stderr
    assert again.stdout.split() == read.table().split()
    report = write_report(Workspace.find(copy))
    assert {f"lens-0e-{SPLIT}", "cloze-0e-words"} <= set(report.figures)
    rows = read_table(report.page, "lens")
    assert [float(row["top1"]) for row in rows] == read.top1.tolist()
    assert {row["command"] for row in rows} == {f"bertvision lens 0e --split {SPLIT}"}
    assert [float(row["p1"]) for row in read_table(report.page, "cloze")] == asked.p1.tolist()
    with (tmp_path / "lens.csv").open() as file:
        assert [float(row["log_p"]) for row in csv.DictReader(file)] == read.log_p.tolist()


def test_of_a_fine_tuned_snapshot_it_is_said_whose_head_reads(copy: Path, tmp_path: Path) -> None:
    space = Workspace.find(copy)
    snapshot = load_snapshot(space.snapshot_dir("0e"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in snapshot.model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    save_snapshot(
        space.snapshot_dir("1e"),
        snapshot.model,
        snapshot.tokenizer,
        space.config,
        tag=SnapshotTag("1e"),
        step=1,
        steps_per_epoch=1,
    )
    path = tmp_path / "words.jsonl"
    words = ("rome", "anna", "who", "the", "a", "in", "founded")
    items = [{"text": "the a in [MASK] founded", "answer": w, "group": w} for w in words]
    path.write_text("\n".join(map(json.dumps, items)))
    one, other, untrained = (
        bertvision.cloze(tag, items=path, workspace=copy) for tag in ("0e", "1e", "untrained")
    )
    assert "1e was fine-tuned without an MLM head. The states are read by that of mlm-bert" in (
        " ".join(other.table().split())
    )
    assert "untrained has random weights" in untrained.table()
    assert one.mrr.tolist() != other.mrr.tolist()
    assert one.note not in other.table()


def test_an_encoder_without_an_mlm_head_is_refused_and_trained_heads_are_not(
    workspace: Workspace, tmp_path: Path
) -> None:
    ignored = shutil.ignore_patterns("heads", "analysis", "report")
    copy = Path(shutil.copytree(workspace.root, tmp_path / "space", ignore=ignored))
    options: dict[str, Any] = {"workspace": copy}
    for verb in (bertvision.lens, bertvision.cloze):
        with pytest.raises(InputError, match="has no MLM head: its weights lack .* take a checkp"):
            verb("1e", **options)
    assert not (copy / "analysis").exists()
    read = bertvision.lens("1e", trained=True, steps=2, dropout=0.25, max_tokens=100, **options)
    assert read.n_tokens == 100
    assert "trained on train for 2 steps with dropout 0.25" in " ".join(read.table().split())
    kept = json.loads((copy / "analysis" / "lens-1e-dev-trained.json").read_text())
    said = "bertvision lens 1e --split dev --trained --max-tokens 100 --steps 2 --dropout 0.25"
    assert kept["command"] == said
    assert kept["splits_sha256"].keys() == {"1e/dev", "1e/train"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["lens", "1e", "--dropout", 0.5], "--dropout is of heads that are trained: give --tra"),
        (["lens", "1e", "--train-split", "tune"], "--train-split is of heads that are trained"),
        (["lens", "1e", "--trained", "--split", "train"], "trained on train, where they are then"),
        (["lens", "1e", "--trained", "--train-split", "x"], "1e/x|x"),
        (["cloze", "--items", "no.jsonl"], "no.jsonl: cannot be read"),
        (["cloze", "--items", "facts"], "facts: items are read of JSON lines"),
        (["cloze", "0.3e"], "0.3e"),
    ],
)
def test_what_makes_no_sense_is_refused(
    args: list[object], message: str, workspace: Workspace
) -> None:
    result = run(*args, "-w", workspace.root)
    assert result.exit_code == 2
    assert message.split("|")[-1] in result.stderr
    assert "Traceback" not in result.stderr


def test_an_unknown_snapshot_is_named(made: Made) -> None:
    with pytest.raises(UnknownNameError):
        bertvision.lens("2e", split=SPLIT, workspace=made.space)
