"""Losses go to a logger of Lightning where one is named, and nowhere else otherwise."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import yaml
from terminal import run

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.workspace.workspace import Workspace

ASKED = {"checkpoint": "1e", "precision": "32"}


@pytest.fixture
def space(workspace: Workspace, tmp_path: Path) -> Path:
    root = tmp_path / "workspace"
    shutil.copytree(workspace.root, root, ignore=shutil.ignore_patterns("heads"))
    return root


def test_the_csv_logger_has_every_step_and_the_settings(space: Path) -> None:
    bertvision.train("learned-pooling", logger="csv", workspace=space, **ASKED)
    folder = space / "heads" / "1e" / "csv" / "version_0"
    lines = (folder / "metrics.csv").read_text().splitlines()
    (trained,) = bertvision.train("learned-pooling", workspace=space, **ASKED)
    assert "loss/learned-pooling" in lines[0]
    assert len(lines) == 1 + trained.steps
    settings = yaml.safe_load((folder / "hparams.yaml").read_text())
    assert settings["learned-pooling"]["training"]["lr"] == 1e-3
    assert bertvision.status(workspace=space).heads[0]["name"] == "learned-pooling"


def test_tensorboard_by_either_option_gets_events(space: Path) -> None:
    pytest.importorskip("tensorboard")
    bertvision.train("learned-pooling", logger="tensorboard", workspace=space, **ASKED)
    bertvision.train("learned-pooling@s1", tensorboard=True, workspace=space, **ASKED)
    events = (space / "heads" / "1e" / "tensorboard").glob("version_*/events.*")
    assert {path.parent.name for path in events} == {"version_0", "version_1"}


def test_without_a_logger_there_is_none(space: Path) -> None:
    bertvision.train("learned-pooling", workspace=space, **ASKED)
    assert [p.name for p in (space / "heads" / "1e").glob("[!.]*")] == ["learned-pooling"]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_is_said_with_what_installs_it(
    space: Path, name: str
) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    with pytest.raises(InputError, match=f"--logger {name} needs .*`pip install {name}`"):
        bertvision.train("learned-pooling", logger=name, workspace=space, **ASKED)


@pytest.mark.parametrize(("name", "file"), [("wandb", "*.wandb"), ("mlflow", "mlflow.db")])
def test_an_installed_logger_keeps_the_losses_beside_the_heads(
    space: Path, name: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    bertvision.train("learned-pooling", logger=name, workspace=space, **ASKED)
    (kept,) = (space / "heads" / "1e" / name).rglob(file)
    assert b"loss/learned-pooling" in kept.read_bytes()


def test_a_logger_of_another_name_is_refused_with_those_there_are(space: Path) -> None:
    told = run("train", "learned-pooling", "--logger", "comet", "-w", space).stderr
    assert "csv, tensorboard, wandb" in " ".join(told.split())
