from __future__ import annotations

import json
import shutil
import signal
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from byhand import fields
from processes import run_code
from safetensors.numpy import load_file
from transformers import AutoModelForQuestionAnswering
from workspaces import SETTINGS, STOP_AT, write_squad

from bertvision.errors import DiskSpaceError, InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.encoders.loading import load_model
from bertvision.pipelines.finetuning.baseline import evaluate_bert
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.finetuning.module import FinetuneModule, learning_rate
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.windows import collate
from bertvision.pipelines.workspace.config import FinetuneConfig, WorkspaceConfig
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = (
    STOP_AT
    + """
import json, torch
from pathlib import Path
torch.set_num_threads(1)
from bertvision.pipelines.finetuning.finetune import finetune
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.training.resume import StoppedError
options = FinetuneOptions(**json.loads(sys.argv[4]))
try:
    finetune(Path(sys.argv[3]), options, resume_every_seconds=0, evaluate=False)
except StoppedError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
)


@pytest.fixture(scope="module")
def options(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("squad")
    data = {name: write_squad(folder / f"{name}.json", n, n) for name, n in _SIZES.items()}
    return {"model": str(tiny_bert), **data, **SETTINGS}


_SIZES = {"train": 14, "dev": 4}


@pytest.fixture(scope="module")
def finished(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    root = tmp_path_factory.mktemp("workspaces") / "finished"
    result = finetune(root, FinetuneOptions(**options))
    assert result["steps"] > 5
    return Workspace.find(root)


def test_a_disk_too_small_is_refused_before_any_step(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours of steps are not lost to a disk that could never hold their snapshots."""
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    with pytest.raises(DiskSpaceError, match=r"1 kB are free: .* --save-at .* --workspace"):
        finetune(tmp_path / "small", FinetuneOptions(**options))
    assert not list((tmp_path / "small").glob("snapshots/*"))


def test_snapshots_of_one_step_are_refused_by_name(
    options: dict[str, Any], finished: Workspace, tmp_path: Path
) -> None:
    """They would be the same weights, and their scores would pass for a comparison."""
    asked = FinetuneOptions(**{**options, "save_at": ("0e", "1e", "1.001e")})
    with pytest.raises(InputError, match=r"--save-at 1e,1\.001e: all of them fall on step \d+ of"):
        finetune(tmp_path / "ws", asked, evaluate=False)
    assert not Workspace.find(tmp_path / "ws").snapshots()
    shutil.copytree(finished.snapshot_dir("1e"), tmp_path / "ws" / "snapshots" / "1e")
    finetune(tmp_path / "ws", asked, evaluate=False)  # it was begun before this was refused
    assert Workspace.find(tmp_path / "ws").snapshots() == ["0e", "1e", "1.001e"]


def test_a_mean_of_snapshots_has_the_mean_of_their_weights_and_a_score(
    options: dict[str, Any], finished: Workspace, tmp_path: Path
) -> None:
    asked = {**options, "save_at": ("1e", "1.5e", "1e+1.5e")}
    result = finetune(tmp_path / "ws", FinetuneOptions(**asked))
    assert [s["tag"] for s in result["snapshots"]] == ["1e", "1.5e", "1e+1.5e"]
    assert result["snapshots"][2]["bert"]["f1"] >= 0
    space = Workspace.find(tmp_path / "ws")
    one, other, mean = (
        load_file(space.snapshot_dir(tag) / "model.safetensors")
        for tag in ("1e", "1.5e", "1e+1.5e")
    )
    assert weights(finished.root)["1e"] == weights(space.root)["1e"], "the training is the same"
    assert any((one[name] != other[name]).any() for name in one)
    for name, found in mean.items():
        half = (one[name].astype(np.float64) + other[name]) / 2
        np.testing.assert_array_equal(found, half.astype(np.float32))
    assert read_snapshot_info(space.snapshot_dir("1e+1.5e")).step == result["steps"]
    kept = space.snapshot_dir("1e+1.5e") / "model.safetensors"
    before = kept.stat().st_mtime_ns
    assert finetune(space.root, FinetuneOptions(), resume=True)["steps"] == 0
    assert kept.stat().st_mtime_ns == before


def test_a_mean_is_made_on_demand_of_snapshots_that_are_there(copy: Workspace) -> None:
    folder = ensure_snapshot(copy, "0e+1e+1.5e")
    tags = ("0e", "1e", "1.5e")
    each = [load_file(copy.snapshot_dir(tag) / "model.safetensors") for tag in tags]
    for name, found in load_file(folder / "model.safetensors").items():
        mean = np.mean([of[name] for of in each], axis=0, dtype=np.float64)
        np.testing.assert_allclose(found, mean, rtol=1e-6)
    with pytest.raises(UnknownNameError, match=r"has no snapshot 0\.7e"):
        ensure_snapshot(copy, "0.7e+1e")
    assert not copy.snapshot_dir("0.7e+1e").exists()


@pytest.fixture
def copy(finished: Workspace, tmp_path: Path) -> Workspace:
    shutil.copytree(finished.root, tmp_path / "copy")
    return Workspace.find(tmp_path / "copy")


def weights(root: Path) -> dict[str, bytes]:
    files = sorted((root / "snapshots").glob("[0-9]*/model.safetensors"))
    return {file.parent.name: file.read_bytes() for file in files}


def run_until(root: Path, options: dict[str, Any], step: int, signum: int) -> tuple[int, str]:
    """Fine-tune in a process of its own that gets a signal at the end of a step."""
    arguments = [str(step), str(int(signum)), str(root), json.dumps(options)]
    done = run_code(RUN, *arguments, CUDA_VISIBLE_DEVICES="")
    return done.returncode, done.stderr


def _log(root: Path) -> pd.DataFrame:
    return pd.read_csv(root / "finetune" / "log.csv")


def test_snapshots_are_bit_for_bit_the_same_after_kill_and_sigterm(
    options: dict[str, Any], finished: Workspace, tmp_path: Path
) -> None:
    expected = weights(finished.root)
    assert sorted(expected) == ["0.3e", "0e", "1.5e", "1e"]
    assert len(set(expected.values())) == 4

    root = tmp_path / "interrupted"
    per_epoch = read_snapshot_info(finished.snapshot_dir("1e")).step
    code, errors = run_until(root, options, 2, signal.SIGKILL)
    assert code == -signal.SIGKILL, errors
    assert len(weights(root)) < 4
    # the resumed process crosses the end of the first epoch
    code, errors = run_until(root, options, per_epoch + 1, signal.SIGTERM)
    assert code == 143, errors
    assert "SIGTERM" in errors
    assert (root / "finetune" / "resume.ckpt").is_file()
    assert len(weights(root)) < 4

    result = finetune(root, FinetuneOptions(), resume=True, evaluate=False)
    assert 0 < result["steps"] < per_epoch
    assert weights(root) == expected
    assert sorted(path.name for path in (root / "finetune").iterdir()) == ["log.csv"]
    log, whole = _log(root), _log(finished.root)
    assert log.drop(columns="seconds").equals(whole.drop(columns="seconds"))
    assert (log["seconds"] > 0).all()
    last = read_snapshot_info(finished.snapshot_dir("1.5e"))
    assert last.seconds_per_step == pytest.approx(whole["seconds"].median(), rel=1e-3)


@pytest.mark.parametrize("order", ["given", "length"])
def test_a_run_of_another_order_goes_on_bit_for_bit(
    options: dict[str, Any], finished: Workspace, tmp_path: Path, order: str
) -> None:
    settings = {**options, "order": order, "save_at": ("1e", "1.5e")}
    finetune(tmp_path / "whole", FinetuneOptions(**settings), evaluate=False)
    per_epoch = read_snapshot_info(tmp_path / "whole/snapshots/1e").step
    for step in (2, per_epoch + 1):
        code, errors = run_until(tmp_path / "parts", settings, step, signal.SIGTERM)
        assert code == 143, errors
    finetune(tmp_path / "parts", FinetuneOptions(), resume=True, evaluate=False)
    found = weights(tmp_path / "whole")
    assert weights(tmp_path / "parts") == found
    shuffled = weights(finished.root)
    assert all(found[tag] != shuffled[tag] for tag in ("1e", "1.5e"))
    other = {**settings, "order": "shuffled"}
    with pytest.raises(WorkspaceError, match=f"made with order = {order}, not shuffled"):
        finetune(tmp_path / "whole", FinetuneOptions(**other))


def test_a_deleted_snapshot_is_made_again_the_same(
    copy: Workspace, finished: Workspace, options: dict[str, Any]
) -> None:
    shutil.rmtree(copy.snapshot_dir("0.3e"))
    result = finetune(copy.root, FinetuneOptions(**options), evaluate=False)
    assert result["steps"] == read_snapshot_info(finished.snapshot_dir("0.3e")).step
    assert weights(copy.root) == weights(finished.root)


def test_when_everything_is_there_nothing_is_done(
    finished: Workspace, options: dict[str, Any]
) -> None:
    def state() -> dict[Path, int]:
        return {p: p.stat().st_mtime_ns for p in finished.root.rglob("*") if p.is_file()}

    before = state()
    result = finetune(finished.root, FinetuneOptions(**options))
    assert result["steps"] == 0
    assert state() == before
    assert "bertvision finetune --resume" not in result["next"]


def test_snapshots_are_taken_at_the_rounded_step(finished: Workspace) -> None:
    model, tokenizer, info = load_snapshot(finished.snapshot_dir("1e"))
    windows = len(finished.windows("train", tokenizer))
    per_epoch = ceil(ceil(windows / 4) / 2)
    assert info.steps_per_epoch == per_epoch
    for tag in finished.snapshots():
        info = read_snapshot_info(finished.snapshot_dir(tag))
        assert info.step == round(tag.fraction * per_epoch)
        assert info.data == finished.config.data


def test_0e_is_the_pretrained_encoder(finished: Workspace, tiny_bert: Path) -> None:
    pretrained = load_model(tiny_bert, AutoModelForQuestionAnswering).state_dict()
    for name, tensor in load_snapshot(finished.snapshot_dir("0e")).model.state_dict().items():
        assert torch.equal(tensor, pretrained[name])


def test_training_lowers_the_loss(finished: Workspace) -> None:
    _, tokenizer, _ = load_snapshot(finished.snapshot_dir("0e"))
    windows = finished.windows("train", tokenizer)
    task = load_task("squad_v2")
    rows, labels = np.arange(len(windows)), task.labels(windows)
    batch = collate(windows, windows.first_token, rows, 0, labels)
    losses = [
        task.loss(load_snapshot(finished.snapshot_dir(tag)).model(**batch.inputs), batch).item()
        for tag in ("0e", "0.3e", "1e", "1.5e")
    ]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.95 * losses[0]


def test_saved_logits_are_those_of_a_direct_forward_pass(finished: Workspace) -> None:
    model, tokenizer, _ = load_snapshot(finished.snapshot_dir("1e"))
    windows = finished.windows("dev", tokenizer)
    path = finished.bert_dir("1e") / "dev.safetensors"
    saved = Logits.load(path, WindowIndex.of(finished.items("dev"), windows), "bertvision")
    assert np.array_equal(load_file(path)["n_tokens"], windows.n_tokens)
    assert np.array_equal(load_file(path)["question_index"], windows.item_index)
    for row, first in enumerate(windows.first_token):
        tokens = slice(first, first + windows.n_tokens[row])
        with torch.inference_mode():
            output = model(
                torch.from_numpy(windows.input_ids[tokens]).long()[None],
                token_type_ids=torch.from_numpy(windows.token_type_ids[tokens]).long()[None],
            )
        for name, values in saved.arrays.items():
            np.testing.assert_allclose(values[tokens], getattr(output, name)[0], atol=1e-5)
    assert sorted(saved.arrays) == ["end_logits", "start_logits"]


def test_bert_is_scored_on_dev_by_three_rules(finished: Workspace) -> None:
    metrics = json.loads((finished.bert_dir("1.5e") / "metrics.json").read_text())
    names = ["n-best", "n-best, threshold 0", "argmax", "n-best, oracle threshold"]
    assert list(metrics["rules"]) == names
    for rule in metrics["rules"].values():
        assert rule["metrics"]["total"] == 12
        assert rule["metrics"]["NoAns_total"] == 4
    predictions = json.loads((finished.bert_dir("1.5e") / "predictions.json").read_text())
    assert predictions.keys() == {question.id for question in finished.items("dev")}
    with_scores = evaluate_bert(finished, "1.5e")
    assert with_scores is not None
    assert with_scores.to_json() == fields(finished.bert_dir("1.5e") / "metrics.json")


def test_a_changed_pretrained_model_is_refused(
    options: dict[str, Any], tiny_bert: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    asked = FinetuneOptions(**{**options, "model": str(model), "save_at": ("0e",)})
    finetune(tmp_path / "ws", asked, evaluate=False)
    data = bytearray((model / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (model / "model.safetensors").write_bytes(data)
    shutil.rmtree(tmp_path / "ws" / "snapshots" / "0e")
    with pytest.raises(WorkspaceError, match="changed since"):
        finetune(tmp_path / "ws", asked, evaluate=False)


def test_a_damaged_resume_file_is_refused_by_name(copy: Workspace) -> None:
    shutil.rmtree(copy.snapshot_dir("1.5e"))
    (copy.root / "finetune" / "resume.ckpt").write_bytes(b"PK\x03\x04 half")
    with pytest.raises(WorkspaceError, match=r"resume\.ckpt is damaged"):
        finetune(copy.root, FinetuneOptions())


def test_bf16_trains_too(options: dict[str, Any], tmp_path: Path) -> None:
    asked = {**options, "precision": "bf16", "epochs": 1.0, "save_at": ("0.3e",)}
    result = finetune(tmp_path / "ws", FinetuneOptions(**asked), evaluate=False)
    workspace = Workspace.find(tmp_path / "ws")
    model = load_snapshot(workspace.snapshot_dir("0.3e")).model
    assert result["steps"] == 2
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize(
    ("warmup", "decay", "expected"),
    [
        (0.0, "none", [1.0] * 10),
        (0.4, "none", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (0.0, "linear", [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        (0.5, "linear", [0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]),
    ],
)
def test_learning_rate_schedule(warmup: float, decay: str, expected: list[float]) -> None:
    settings = FinetuneConfig.model_validate({"lr": 1.0, "warmup": warmup, "decay": decay})
    rates = [learning_rate(settings, step, 10) for step in range(10)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("weight_decay", "kind"), [(0.0, "Adam"), (0.1, "AdamW")])
def test_the_optimiser_is_adam_or_with_weight_decay_adamw(
    tiny_bert: Path, weight_decay: float, kind: str
) -> None:
    settings = FinetuneConfig(weight_decay=weight_decay, lr=0.5)
    task = load_task("squad_v2")
    module = FinetuneModule(
        load_model(tiny_bert, AutoModelForQuestionAnswering),
        task,
        settings,
        total_steps=1,
        digest="",
    )
    optimizer = module.configure_optimizers()
    assert type(optimizer).__name__ == kind
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, weight_decay)


@pytest.mark.parametrize("spare", [True, False])
def test_weights_decay_and_vectors_are_spared_in_new_workspaces(
    tiny_bert: Path, spare: bool
) -> None:
    """Without a gradient a step of AdamW is the decay alone."""
    model = load_model(tiny_bert, AutoModelForQuestionAnswering)
    settings = FinetuneConfig(weight_decay=0.5, lr=0.5, spare_vectors=spare)
    module = FinetuneModule(model, load_task("squad_v2"), settings, total_steps=1, digest="")
    optimizer = module.configure_optimizers()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        spared = spare and ("LayerNorm" in name or name.endswith("bias"))
        assert (parameter == (1.0 if spared else 0.75)).all(), name


def test_earlier_workspaces_keep_their_digest(finished: Workspace) -> None:
    config = finished.config
    assert config.finetune.spare_vectors
    before = config.finetune.model_copy(update={"spare_vectors": False})
    text = json.dumps(config.model_copy(update={"finetune": before}).model_dump(mode="json"))
    assert '"spare_vectors": false' in text
    older = json.loads(text.replace('"spare_vectors": false, ', ""))
    assert (
        WorkspaceConfig.model_validate(older).digest()
        == config.model_copy(update={"finetune": before}).digest()
        != config.digest()
    )


def test_accumulated_batches_give_the_gradient_of_one_large_batch(
    tiny_bert: Path, options: dict[str, Any], tmp_path: Path
) -> None:
    """Without dropout, one step on 3 × 4 windows and one on 1 × 12 move the weights equally."""
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config))
    moved = []
    for batch_size, accumulate in ((100, 1), (7, 100)):
        asked = {
            **options,
            "model": str(model),
            "batch_size": batch_size,
            "accumulate": accumulate,
            "save_at": ("1e",),
            "epochs": 1.0,
            "gradient_clip": 0.0,
        }
        root = tmp_path / f"{accumulate}"
        assert finetune(root, FinetuneOptions(**asked), evaluate=False)["steps"] == 1
        moved.append(_log(root)["loss"].item())
        state = load_snapshot(root / "snapshots" / "1e").model.state_dict()
        moved.append(state["bert.encoder.layer.1.output.dense.weight"])
    assert moved[0] == pytest.approx(moved[2], rel=1e-4)
    torch.testing.assert_close(moved[1], moved[3], atol=2e-5, rtol=1e-4)
