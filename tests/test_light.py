"""What only looks at a workspace answers at once: it imports nothing heavy."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stores import Made

from bertvision.pipelines.files import write_json
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.dataset_record import DatasetRecord
from bertvision.pipelines.workspace.records import RunConfig, RunTraining
from bertvision.pipelines.workspace.workspace import Workspace

TAGS = ("0e", "0.1e", "0.2e", "0.3e", "0.5e", "1e", "2e", "10e")
HEAVY = {
    *("torch", "transformers", "zarr", "datasets", "dask", "pytorch_lightning"),
    *("pyarrow", "xarray", "pandas", "numpy", "fsspec", "matplotlib"),
}


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Eight snapshots with splits, whole and half-extracted, of two data sets; and heads."""
    root = tmp_path_factory.mktemp("light") / "space"
    data = DataConfig(source="nowhere", sha256="0", questions=5)
    config = WorkspaceConfig(
        model=ModelConfig(
            name_or_path="tiny", weights_sha256="0", hidden_size=16, num_hidden_layers=2
        ),
        task=TaskConfig(),
        data={"train": data, "dev": data},
        finetune=FinetuneConfig(epochs=10, save_at=TAGS),
    )
    made = Workspace.create(root, config)
    added = DatasetRecord(task=TaskConfig(name="cola", max_length=128), data={"dev": data})
    write_json(root / "datasets" / "cola.json", added.to_json())
    for number, tag in enumerate(TAGS):
        write_json(made.snapshot_dir(tag) / "snapshot.json", {})
        for split, shards in (("train", None), ("dev", number % 2), ("cola-dev-cls", number % 3)):
            if shards != 0:
                part = Made([30, 40, 50], tag=tag, split=split)
                part.write(root / "activations", shards)
        head = made.head_dir(tag, "learned-pooling")
        training = RunTraining(
            epochs=1, batch_size=8, lr=1e-3, precision="32", best_epoch=False, seed=0, fraction=1.0
        )
        run = RunConfig(
            head="learned-pooling",
            kind="span",
            trained_on=tag,
            layers=(0, 1, 2),
            hidden_size=16,
            encoding="float32",
            training=training,
            activations={},
        )
        write_json(head / "config.json", run.to_json())
        write_json(head / "metrics.json", {})
    return made


def ran(space: Workspace, report: Path, *command: str) -> tuple[Any, set[str], float]:
    """What a command printed as JSON, the packages it imported, and its seconds of CPU."""
    code = f"""
import json, sys
from bertvision.cli import app
app({[*command, "-w", str(space.root), "--json"]!r}, standalone_mode=False)
json.dump(list(sys.modules), open({str(report)!r}, "w"))
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr.decode()
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    imported = {name.partition(".")[0] for name in json.loads(report.read_text())}
    return json.loads(done.stdout), imported, seconds


def test_status_imports_nothing_heavy(space: Workspace, tmp_path: Path) -> None:
    found, imported, seconds = ran(space, tmp_path / "modules.json", "status")
    assert imported & HEAVY == set()
    assert "bertvision" in imported
    assert [s["tag"] for s in found["snapshots"]] == [*TAGS]
    assert found["stored"] == {tag: ["train"] for tag in TAGS}
    assert found["unfinished"] == {
        tag: [name for name, n in (("cola-dev-cls", i % 3), ("dev", i % 2)) if n]
        for i, tag in enumerate(TAGS)
        if i % 3 or i % 2
    }
    assert len(found["heads"]) == len(TAGS)
    assert sum("--task cola" in command for command in found["next"]) == 5
    assert seconds < 3  # it was 5.5 with the imports, on the machine where it is 0.7 without


def test_store_ls_imports_nothing_heavy(space: Workspace, tmp_path: Path) -> None:
    found, imported, seconds = ran(space, tmp_path / "modules.json", "store", "ls")
    assert imported & HEAVY == set()
    names = [f"{split['tag']}/{split['split']}" for split in found]
    assert len(names) == len(set(names)) == 17
    assert list(dict.fromkeys(split["tag"] for split in found)) == [*TAGS]
    assert all(split["complete"] == (split["split"] == "train") for split in found)
    assert all(split["bytes"] > 0 for split in found)
    assert seconds < 3
