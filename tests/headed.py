"""A workspace with a snapshot and a trained head, as far as they are looked at: none is trained."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from bertvision.models.factory import build_head, count_parameters
from bertvision.pipelines.files import digests_in, write_json
from bertvision.pipelines.records import write_record
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.records import (
    HeadScores,
    RunConfig,
    RunMetrics,
    RunTraining,
    SnapshotInfo,
)
from bertvision.pipelines.workspace.workspace import Workspace

NAME = "learned-pooling"


def made(root: Path) -> Workspace:
    """A workspace with the snapshot 1e, as far as it is looked at, and nothing else."""
    data = {"dev": DataConfig(source="/secret/place/dev.json", sha256="d" * 64, questions=5)}
    model = ModelConfig(
        name_or_path="/secret/place/model",
        weights_sha256="0" * 64,
        hidden_size=16,
        num_hidden_layers=2,
    )
    tuning = FinetuneConfig(epochs=1, save_at=("1e",))
    config = WorkspaceConfig(model=model, task=TaskConfig(), data=data, finetune=tuning)
    space = Workspace.create(root, config)
    folder = space.snapshot_dir("1e")
    folder.mkdir(parents=True)
    save_file({"weight": torch.arange(6.0)}, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "bert"})
    (folder / "training.bin").write_bytes(b"a pickle")
    info = SnapshotInfo(
        tag="1e",
        step=30,
        steps_per_epoch=30,
        weights_sha256="a" * 64,
        config_sha256="b" * 64,
        tokenizer_sha256="c" * 64,
        pretrained=model,
        task=TaskConfig(),
        data=data,
        finetune=tuning,
        versions={"torch": "2.13"},
        created="2026-01-02T03:04:05Z",
    )
    write_json(folder / "snapshot.json", info.model_dump(mode="json"))
    return space


def with_head(space: Workspace, head: str = NAME, weights_sha256: str = "a" * 64) -> Path:
    """The folder of a head of 1e, written as training writes it, and its scores on dev."""
    config = RunConfig(
        head=head,
        kind="span",
        trained_on="1e",
        layers=(0, 1, 2),
        hidden_size=16,
        encoding="int8",
        training=RunTraining(
            epochs=1, batch_size=8, lr=1e-3, precision="32", best_epoch=False, seed=3, fraction=1.0
        ),
        activations={
            "model": "/secret/place/model",
            "task": "squad_v2",
            "weights_sha256": weights_sha256,
        },
    )
    folder = space.head_dir("1e", config.run.name)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    module = build_head(NAME, layers=3, hidden=16)
    save_file(module.state_dict(), folder / "model.safetensors")
    write_record(folder / "config.json", config)
    trainable, total = count_parameters(module)
    write_record(
        folder / "metrics.json",
        RunMetrics(
            head=config.run.name,
            trained_on="1e",
            fraction=1.0,
            seed=3,
            trainable=trainable,
            total=total,
            examples=123,
            steps=16,
            epoch=1,
            loss=1.25,
            held_out_losses=None,
            seconds=1.0,
            own_seconds=1.0,
            wait_seconds=0.0,
            seconds_per_epoch=1.0,
            trained_together=[config.run.name],
            sha256=digests_in(folder, ["model.safetensors", "config.json"]),
        ),
    )
    metrics = {"exact": 61.5, "f1": 64.25, "total": 77}
    scores = HeadScores(
        head=config.run.name,
        trained_on="1e",
        checkpoint="1e",
        split="dev",
        rules={"n-best": {"threshold": 0.5, "metrics": metrics}},
        precision="32",
        threshold_tuned_on="tune",
        seconds=1.0,
        weights_sha256="e" * 64,
        provenance={},
        activations={},
    )
    (folder / "eval" / "1e").mkdir(parents=True)
    write_record(folder / "eval" / "1e" / "metrics.json", scores)
    (folder / "log.csv").write_text("step,loss\n")
    return folder
