"""Commands that only look at a workspace answer at once: they import nothing heavy."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stores import Made
from terminal import done, run

import bertvision
from bertvision.errors import UnknownNameError
from bertvision.featurestore.store import ActivationStore
from bertvision.models.zoo import HEADS
from bertvision.pipelines.files import write_json
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)
from bertvision.pipelines.workspace.records import (
    DatasetRecord,
    PassRecord,
    RunConfig,
    RunTraining,
    read_run_config,
)
from bertvision.pipelines.workspace.status import status
from bertvision.pipelines.workspace.workspace import Workspace

TAGS = ("0e", "0.1e", "0.2e", "0.3e", "0.5e", "1e", "2e", "10e")
HEAVY = {
    *("torch", "transformers", "zarr", "datasets", "dask", "pytorch_lightning"),
    *("pyarrow", "xarray", "pandas", "numpy", "fsspec", "matplotlib"),
}
SCORES = {
    "snapshot": "tiny",
    "weights_sha256": "0",
    "split": "dev",
    "rules": {"n-best": {"threshold": 0.0, "metrics": {"exact": 50.0, "f1": 50.0}}},
    "seconds": {"dev": 1.0},
}
"""The scores of BERT at a snapshot."""


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
    """The JSON that a command printed, the packages it imported, and its seconds of CPU."""
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


def test_a_half_trained_head_is_named_with_the_command_that_goes_on(space: Workspace) -> None:
    run = read_run_config(space.head_dir("1e", "learned-pooling"))
    half = [run.model_copy(update={"head": head}) for head in ("last-layer", "average-pooling")]
    folder = space.root / "heads" / "1e" / ".run-0123456789abcdef"
    write_json(folder / "pass.json", PassRecord(runs=tuple(half)).to_json())
    assert status(space)["begun"] == []  # nothing that could be gone on with was kept
    (folder / "resume.ckpt").write_bytes(b"")
    found = status(space)
    assert found["begun"] == [
        {"trained_on": "1e", "name": name} for name in ("last-layer", "average-pooling")
    ]
    going_on = "bertvision train last-layer average-pooling --checkpoint 1e"
    (command,) = [c for c in found["next"] if c.startswith(going_on)]
    assert "--precision 32" in command
    assert "--overwrite" not in command
    table = done("status", "-w", space.root)
    assert re.search(r"^average-pooling +1e \(begun\) +1$", table, re.MULTILINE)
    assert max(map(len, table.split("next:")[0].splitlines()[1:])) <= 80
    shutil.rmtree(folder)


def test_what_is_done_is_not_offered_again(space: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "space"
    shutil.copytree(space.root, root, ignore=shutil.ignore_patterns("cola-dev-cls", "datasets"))
    made = Workspace.find(root)
    store = ActivationStore.open(root / "activations")
    for tag in TAGS:
        if "dev" in store[tag]:
            store.remove(tag, "dev")
        Made([30, 40, 50], tag=tag, split="dev").write(root / "activations")
        write_json(made.bert_dir(tag) / "metrics.json", SCORES)
        write_json(made.head_dir(tag, "learned-pooling") / "eval" / tag / "metrics.json", {})
    assert status(made)["next"] == ["bertvision sweep", "bertvision report"]
    (root / "report").mkdir()
    (root / "report" / "index.html").write_text("")
    assert status(made)["next"] == ["bertvision sweep"]
    for tag in TAGS:
        for name, head in HEADS.items():
            if head.kind == "span" and not head.convolves:
                write_json(made.head_dir(tag, name) / "metrics.json", {})
                write_json(made.head_dir(tag, name) / "eval" / tag / "metrics.json", {})
    os.utime(root / "report" / "index.html", (0, 0))
    assert status(made)["next"] == ["bertvision report"]
    os.utime(root / "report" / "index.html")
    assert status(made)["next"] == []


@pytest.mark.parametrize(
    ("tag", "advice"),
    [
        ("0.3e", "asked for: `bertvision finetune --resume` makes it"),
        ("0.7e", "alone: for 0.7e, start another --workspace .* --save-at 0.7$"),
        ("untrained", "`bertvision extract --checkpoint untrained` makes it"),
    ],
)
def test_a_missing_snapshot_comes_with_its_own_advice(
    space: Workspace, tmp_path: Path, tag: str, advice: str
) -> None:
    """One that was asked for is made again; one that never was takes another workspace."""
    root = tmp_path / "space"
    shutil.copytree(space.root, root)
    shutil.rmtree(root / "snapshots" / "0.3e")
    shutil.rmtree(root / "activations" / "ledger" / "0.3e")
    made = Workspace.find(str(root))
    with pytest.raises(UnknownNameError, match=rf"no snapshot {tag}: made are .*; .*{advice}"):
        made.require_snapshot(tag)
    reads: list[Callable[[], object]] = [
        lambda: made.split(tag, "train"),
        lambda: bertvision.train("learned-pooling", checkpoint=tag, workspace=root),
        lambda: bertvision.isotropy(tag, workspace=root),
    ]
    for read in reads:
        said = rf"no activations of {tag} .* holds .*; .*{advice}"
        with pytest.raises(UnknownNameError, match=said):
            read()
    with pytest.raises(UnknownNameError, match=rf"extract --checkpoint {tag}` .* what makes"):
        bertvision.ActivationStore.open(made.activations)[tag]


def test_a_workspace_shows_itself_in_a_line(space: Workspace) -> None:
    shown = repr(Workspace.find(str(space.root)))
    assert shown == (
        f"<Workspace {space.root}: squad_v2, tiny; snapshots "
        "0e, 0.1e, 0.2e, 0.3e, 0.5e, 1e, 2e, 10e>"
    )


def test_info_without_a_name_lists_the_names(space: Workspace) -> None:
    result = run("store", "info", "-w", space.root)
    assert result.exit_code == 2
    assert "which split? name one: 0e/train, 0.1e/" in result.stderr
    table = done("store", "info", "1e/train", "-w", space.root)
    assert re.search(r"^bytes +[0-9.]+ kB$", table, re.MULTILINE)
    assert done("store", "ls", "-w", space.root).splitlines()[-1].endswith(" kB in all")
