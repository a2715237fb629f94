from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

from bertvision.errors import InputError, StoreNotFoundError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.loading import (
    find_pretrained,
    load_model,
    load_tokenizer,
)
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import is_snapshot
from bertvision.pipelines.workspace.snapshots import load_snapshot, save_snapshot
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture
def config(tiny_bert: Path) -> WorkspaceConfig:
    return WorkspaceConfig(
        model=ModelConfig(
            name_or_path=str(tiny_bert),
            weights_sha256=weights_digest(tiny_bert),
            hidden_size=32,
            num_hidden_layers=2,
        ),
        task=TaskConfig(),
        data={"train": DataConfig(source="/train.json", sha256="0" * 64, questions=1)},
        finetune=FinetuneConfig(save_at=("0.3e",)),
    )


@pytest.fixture
def snapshot(tiny_bert: Path, config: WorkspaceConfig, tmp_path: Path) -> Path:
    folder = tmp_path / "snapshots" / "0.3e"
    save_snapshot(
        folder,
        load_model(tiny_bert, AutoModelForQuestionAnswering),
        load_tokenizer(tiny_bert),
        config,
        tag=SnapshotTag("0.3e"),
        step=3,
        steps_per_epoch=10,
    )
    return folder


def test_a_snapshot_reads_back_with_its_provenance(
    snapshot: Path, tiny_bert: Path, config: WorkspaceConfig
) -> None:
    loaded = load_snapshot(snapshot)
    original = load_model(tiny_bert, AutoModelForQuestionAnswering).state_dict()
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, original[name])
    assert not loaded.model.training
    assert tokenizer_digest(loaded.tokenizer) == tokenizer_digest(load_tokenizer(tiny_bert))
    info = loaded.info
    assert (info.tag, info.step, info.steps_per_epoch) == ("0.3e", 3, 10)
    assert (info.pretrained, info.task) == (config.model, config.task)
    assert (info.data, info.finetune) == (config.data, config.finetune)
    assert info.weights_sha256 == weights_digest(tiny_bert)
    assert info.versions["torch"] == torch.__version__


def test_plain_transformers_reads_a_snapshot(snapshot: Path) -> None:
    model = AutoModelForQuestionAnswering.from_pretrained(snapshot)
    inputs = AutoTokenizer.from_pretrained(snapshot)("who is anna ?", return_tensors="pt")
    ours = load_snapshot(snapshot)
    with torch.inference_mode():
        expected = ours.model(**ours.tokenizer("who is anna ?", return_tensors="pt"))
        assert torch.equal(model(**inputs).start_logits, expected.start_logits)


def test_a_folder_without_snapshot_json_is_no_snapshot(snapshot: Path) -> None:
    (snapshot / "snapshot.json").unlink()
    assert not is_snapshot(snapshot)
    with pytest.raises(StoreNotFoundError, match="bertvision finetune"):
        load_snapshot(snapshot)


def test_an_interrupted_save_leaves_nothing_and_can_be_repeated(
    tiny_bert: Path, config: WorkspaceConfig, tmp_path: Path
) -> None:
    class Full:
        """A tokenizer whose disk is full."""

        def save_pretrained(self, folder: Path) -> None:
            raise OSError(28, "No space left on device")

    folder = tmp_path / "snapshots" / "1e"
    arguments = {"tag": SnapshotTag("1e"), "step": 1, "steps_per_epoch": 1}
    model = load_model(tiny_bert, AutoModelForQuestionAnswering)
    with pytest.raises(OSError, match="No space left"):
        save_snapshot(folder, model, Full(), config, **arguments)
    assert list(folder.parent.glob("[!.]*")) == list(folder.parent.glob(".*.tmp")) == []
    # what a killed process leaves: a folder under the temporary name
    (folder.parent / ".1e.tmp").mkdir()
    (folder.parent / ".1e.tmp" / "model.safetensors").write_bytes(b"half")
    save_snapshot(folder, model, load_tokenizer(tiny_bert), config, **arguments)
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == ["1e"]
    assert load_snapshot(folder).info.tag == "1e"


def _flip_weight(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _change_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "layer_norm_eps": 0.1}))


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    definition = json.loads(path.read_text())
    vocabulary = definition["model"]["vocab"]
    vocabulary["anna"], vocabulary["boris"] = vocabulary["boris"], vocabulary["anna"]
    path.write_text(json.dumps(definition))


def _break_info(folder: Path) -> None:
    (folder / "snapshot.json").write_text('{"tag": "0.3e"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip_weight, "the weights of snapshot .* changed"),
        (_truncate_weights, "the weights of snapshot .* changed"),
        (_remove_weights, r"no model\.safetensors"),
        (_change_config, "the model configuration of snapshot .* changed"),
        (_break_config, "is damaged"),
        (_change_tokenizer, "the tokenizer of snapshot .* changed"),
        (_break_info, r"snapshot\.json is damaged"),
    ],
)
def test_a_changed_snapshot_is_refused(snapshot: Path, damage: object, message: str) -> None:
    assert callable(damage)
    damage(snapshot)
    with pytest.raises(WorkspaceError, match=message):
        load_snapshot(snapshot)


def test_the_tokenizer_digest_ignores_the_padding_of_the_last_call(tiny_bert: Path) -> None:
    tokenizer = load_tokenizer(tiny_bert)
    before = tokenizer_digest(tokenizer)
    tokenizer(["anna", "who is anna ?"], padding=True, truncation=True, max_length=3)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.add_tokens(["zebra"])
    assert tokenizer_digest(tokenizer) != before


def test_an_unknown_architecture_is_refused_by_name(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny_bert, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "nobert"}))
    with pytest.raises(InputError, match="model_type 'nobert'"):
        find_pretrained(str(folder))


def test_pickled_weights_are_never_read(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(tiny_bert, folder)
    torch.save(
        load_model(tiny_bert, AutoModelForQuestionAnswering).state_dict(),
        folder / "pytorch_model.bin",
    )
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="only safetensors weights are read"):
        find_pretrained(str(folder))


@pytest.mark.parametrize("name", ["bert-not-here", "someone/bert-not-here", "./no/folder", "a b"])
def test_an_unknown_model_is_an_input_error_also_without_a_network(name: str) -> None:
    with pytest.raises(InputError, match="folder"):
        find_pretrained(name)


def test_damaged_pretrained_weights_are_an_input_error(tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(tiny_bert, folder)
    _truncate_weights(folder)
    with pytest.raises(InputError, match="damaged"):
        load_model(folder, AutoModelForQuestionAnswering)


@pytest.mark.parametrize("task", ["squad_v2", "answerable", "features"])
def test_an_encoder_of_any_task_has_an_untrained_twin(
    task: str, config: WorkspaceConfig, tmp_path: Path
) -> None:
    # with another seed than that of tiny BERT, whose weights are random too
    finetune = config.finetune.model_copy(update={"seed": 1})
    asked = config.model_copy(update={"task": TaskConfig(name=task), "finetune": finetune})
    workspace = Workspace.create(tmp_path / "workspace", asked)
    pretrained, twin = (
        load_snapshot(ensure_snapshot(workspace, tag)).model.base_model.state_dict()
        for tag in ("0e", "untrained")
    )
    assert {k: x.shape for k, x in pretrained.items()} == {k: x.shape for k, x in twin.items()}
    assert not any(torch.equal(pretrained[k], twin[k]) for k in twin if twin[k].dim() == 2)
