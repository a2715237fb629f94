"""Checkpoints of one model by words such as ``step1000``: stored, probed and read as snapshots."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, make_family
from hubs import Repository, Stored, running
from test_predict import write_rows
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import bertvision
from bertvision.errors import InputError, UnknownNameError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.results.systems import SystemName
from bertvision.pipelines.workspace.workspace import Workspace

EXACT: dict[str, Any] = {"encoding": "float32", "precision": "32"}
STEPS = ("step512", "step1000", "main")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a tiny GPT-NeoX, which shares no weights between its output and embeddings."""
    root = tmp_path_factory.mktemp("pretraining")
    family = FAMILIES["gpt2"]._replace(model_type="gpt_neox")
    first = make_family(family, root / STEPS[0], AutoModelForCausalLM)
    model = AutoModelForCausalLM.from_pretrained(first)
    for seed, step in enumerate(STEPS[1:]):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(root / step)
        AutoTokenizer.from_pretrained(first).save_pretrained(root / step)
    return root


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.csv", 24, 1, scores=False)


@pytest.fixture(scope="module")
def adopted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace for hidden states alone; tags are the names of the folders."""
    root = tmp_path_factory.mktemp("adopted") / "workspace"
    done = bertvision.adopt([str(checkpoints / step) for step in STEPS], workspace=root)
    assert [(row.tag, row.made) for row in done.snapshots] == [
        ("main", True),
        ("step512", True),
        ("step1000", True),
    ]
    command = "bertvision extract --checkpoint main,step512,step1000 --task text --data FILE"
    assert done.next == [f"{command} --workspace {root}"]
    return root


def test_each_tag_has_the_states_and_the_next_tokens_of_its_own_checkpoint(
    adopted: Path, checkpoints: Path, texts: Path
) -> None:
    names: dict[str, Any] = dict(task="csv", data=texts, text="first", label="label", split="all")
    bertvision.extract(
        STEPS, **names, pool="none", logits="top:3", workspace=adopted, max_length=32, **EXACT
    )
    store = bertvision.ActivationStore.open(adopted / "activations")
    assert list(store) == ["main", "step512", "step1000"]
    for step in STEPS:
        split = store[f"{step}/rows-all"]
        model = AutoModelForCausalLM.from_pretrained(checkpoints / step).eval()
        start, end = (int(split.plan.first_token[0] + n) for n in (0, split.plan.n_tokens[0]))
        ids = torch.as_tensor(split.array("input_ids")[start:end].astype(np.int64))[None]
        with torch.no_grad():
            out = model(ids, output_hidden_states=True)
        states = torch.stack(out.hidden_states, dim=-1)[0]
        torch.testing.assert_close(split[0], states, rtol=1e-5, atol=1e-5)
        due = out.logits[0].log_softmax(dim=-1).topk(3).values
        stored = torch.as_tensor(split.array("topk_logprobs")[start:end])
        torch.testing.assert_close(stored, due, atol=1e-5, rtol=0)


def test_they_are_probed_and_compared_side_by_side(adopted: Path, texts: Path) -> None:
    names: dict[str, Any] = dict(task="csv", data=texts, text="first", label="label")
    bertvision.extract(
        STEPS, **names, split="all", pool="mean", workspace=adopted, max_length=32, **EXACT
    )
    rows = bertvision.probe("rows", checkpoint=STEPS, pool="mean", workspace=adopted)
    assert list(dict.fromkeys(row.tag for row in rows)) == ["main", "step512", "step1000"]
    page = Path(bertvision.report(workspace=adopted).page)
    assert "analyses of hidden states" in page.read_text()
    with pytest.raises(UnknownNameError, match=r"step7: made are .*adopt FOLDER:step7` adds it"):
        bertvision.extract("step7", task="rows", split="all", workspace=adopted)


def test_a_copy_is_told_also_where_the_other_was_adopted_before(
    adopted: Path, checkpoints: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root, copy = tmp_path / "workspace", tmp_path / "step2000"
    shutil.copytree(adopted, root)
    shutil.copytree(checkpoints / "main", copy)
    bertvision.adopt(str(copy), workspace=root)
    assert "snapshots main and step2000 have the same weights" in caplog.text
    bertvision.adopt(f"{copy}:again", workspace=root)
    assert "snapshots main and again have the same weights" in caplog.text
    tags = ["again", "main", "step512", "step1000", "step2000"]
    assert Workspace.find(root).snapshots() == tags
    with pytest.raises(WorkspaceError, match=r"name another tag for .*:main_other"):
        bertvision.adopt(f"{checkpoints / 'step512'}:main", workspace=root)


def test_the_encoder_that_is_none_of_them_stays_0e(
    checkpoints: Path, texts: Path, tmp_path: Path
) -> None:
    names: dict[str, Any] = dict(task="csv", data=texts, text="first", label="label", split="all")
    where = {"workspace": tmp_path / "workspace", "max_length": 32}
    bertvision.extract("0e", model=str(checkpoints / "main"), **names, pool="mean", **where)
    bertvision.adopt(str(checkpoints / "step512"), workspace=tmp_path / "workspace")
    assert Workspace.find(tmp_path / "workspace").snapshots() == ["step512", "0e"]
    with pytest.raises(InputError, match="without the task that 3e was fine-tuned on"):
        bertvision.adopt(f"{checkpoints / 'step1000'}:3e", workspace=tmp_path / "workspace")


def test_heads_of_a_task_are_trained_on_them_and_no_new_output_layer_is_scored(
    tiny_bert: Path, texts: Path, tmp_path: Path
) -> None:
    dev = write_rows(tmp_path / "dev.csv", 12, 2, scores=False)
    done = bertvision.adopt(
        f"{tiny_bert}:main",
        task="csv",
        train=texts,
        dev=dev,
        text="first",
        pair="second",
        precision="32",
        workspace=tmp_path / "workspace",
    )
    assert [row.tag for row in done.snapshots] == ["main"]
    space = Workspace.find(tmp_path / "workspace")
    assert not space.bert_dir("main").exists()
    command = "bertvision extract --checkpoint main --split train,tune,dev"
    assert done.next == [f"{command} --workspace {space.root}"]
    with pytest.raises(InputError, match="main was not fine-tuned"):
        bertvision.Predictor.load("bert:main", workspace=space.root)
    with pytest.raises(InputError, match="main was not fine-tuned"):
        bertvision.logits("main", workspace=space.root)
    states = AutoModel.from_pretrained(tiny_bert).state_dict()
    kept = AutoModel.from_pretrained(space.snapshot_dir("main")).state_dict()
    same = {name: torch.equal(states[name], kept[name]) for name in states}
    assert all(same[name] or name.startswith("pooler.") for name in states)
    bertvision.extract("main", workspace=space.root, **EXACT)
    bertvision.train("cls-learned-pooling", checkpoint="main", workspace=space.root)
    (scores,) = bertvision.evaluate("cls-learned-pooling", workspace=space.root)
    assert (scores.trained_on, scores.checkpoint) == ("main", "main")
    predictor = bertvision.Predictor.load("cls-learned-pooling:main", workspace=space.root)
    assert predictor({"text": "anna", "text_pair": "rome"})


def test_a_revision_of_the_hub_is_its_own_tag(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(monkeypatch, tmp_path / "cache") as hub:
        neox = hub.repositories["model", "me/neox"] = Repository()
        for step in STEPS[:2]:  # the newest, on the branch main, is not even looked for
            files = {p.name: p.read_bytes() for p in (checkpoints / step).iterdir()}
            stored = {name: Stored(content, False) for name, content in files.items()}
            neox.commit(step, stored, "pretraining")
        root = tmp_path / "workspace"
        bertvision.adopt(["me/neox@step512", "me/neox@step1000:later"], workspace=root)
    config = Workspace.find(root).config
    assert config.adopted is not None
    assert config.adopted.sources == {"later": "me/neox@step1000", "step512": "me/neox@step512"}
    assert (config.model.name_or_path, config.model.revision) == ("me/neox", "step1000")
    with pytest.raises(UnknownNameError, match="is not known"):
        bertvision.extract("0e", workspace=root)
    for tag, step in (("step512", "step512"), ("later", "step1000")):
        kept = AutoModel.from_pretrained(root / "snapshots" / tag).state_dict()
        states = AutoModel.from_pretrained(checkpoints / step).state_dict()
        assert all(torch.equal(states[name], kept[name]) for name in states)


def test_words_are_ordered_by_the_numbers_in_them_before_0e() -> None:
    texts = ("0e", "step1000", "untrained", "main", "step512", "1e", "seed2_step4", "seed10_step1")
    expected = ["untrained", "main", "seed2_step4", "seed10_step1", "step512", "step1000"]
    assert sorted(map(SnapshotTag, texts)) == [*expected, "0e", "1e"]
    assert SnapshotTag("step01") < SnapshotTag("step1") < SnapshotTag("step02")
    for word in (
        "main-dev",
        "Main",
        "v1.0",
        "step 1",
        "nul",
        "store",
        "report",
        "a/b",
        "_x",
        "main+step1",
    ):
        assert not SnapshotTag.is_valid(word)


def test_a_word_behind_a_head_is_a_snapshot_and_behind_a_module_a_class() -> None:
    assert SystemName.parse("bert:main") == ("bert", "main", "main")
    assert SystemName.parse("learned-pooling:main:1e") == ("learned-pooling", "main", "1e")
    name, *tags = SystemName.parse("my_heads:last:main")
    assert ("my_heads" in name, tags) == (True, ["main", "main"])
    with pytest.raises(InputError, match="not a snapshot tag"):
        SystemName.parse("adapter-386-shared:Main")


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fine-tuning to a word": (
        lambda folder: bertvision.finetune(save_at="main", model=str(folder / "main")),
        "--save-at main: fine-tuning is saved at fractions",
    ),
    "classes of what has none": (
        lambda folder: bertvision.adopt(str(folder / "main"), classes="a,b"),
        "--classes a,b: main were not fine-tuned",
    ),
    "a task without data": (
        lambda folder: bertvision.adopt(str(folder / "main"), task="csv"),
        "a new workspace needs the task and data",
    ),
    "a mean of words": (
        lambda folder: bertvision.adopt(f"{folder / 'main'}:a+b"),
        "neither a number of epochs",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused_and_leaves_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call, message = REFUSED[case]
    with pytest.raises(InputError, match=message):
        call(checkpoints)
    assert not list(tmp_path.iterdir())
