"""A workspace whose activations are elsewhere: extracted, trained on, looked at and analysed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from remotes import s3_server
from typer.testing import CliRunner

from bertvision.cli import app
from bertvision.pipelines.workspace.workspace import Workspace

SECRETS = {"AWS_ACCESS_KEY_ID": "canary-key", "AWS_SECRET_ACCESS_KEY": "canary-secret"}
STORE = "s3://bucket/activations"


def done(*words: str, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == status, result.output
    assert "canary" not in result.output
    return json.loads(result.stdout) if "--json" in words else result.output


@pytest.fixture(scope="module")
def space(workspace: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with snapshots, and dev of 1e extracted to S3."""
    copy = tmp_path_factory.mktemp("elsewhere") / "space"
    shutil.copytree(workspace.root, copy, ignore=shutil.ignore_patterns("activations"))
    options = ["--encoding", "float32", "--precision", "32", "-w", str(copy)]
    with s3_server(**SECRETS):
        done("extract", "--checkpoint", "1e", "--split", "dev", *options, "--store", STORE)
        done("extract", "--checkpoint", "1e", "--split", "train", *options)
        yield copy


def test_the_store_is_kept_and_found_by_every_command(space: Path) -> None:
    assert Workspace.find(space).activations == STORE
    where = ["-w", str(space), "--json"]
    assert done("status", *where)["stored"] == {"1e": ["dev", "train"]}
    held = done("store", "ls", *where)
    assert [split["complete"] for split in held] == [True, True]
    assert done("store", "verify", *where) == {"1e/dev": [], "1e/train": []}
    assert done("isotropy", "1e", *where)["n_vectors"][0][0] == held[0]["tokens"]
    assert not (space / "activations").exists()


def test_a_store_is_looked_at_without_a_workspace(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    held = done("store", "ls", "--store", STORE, "--json")
    assert [split["split"] for split in held] == ["dev", "train"]
    info = done("store", "info", "1e/dev", "--store", STORE, "--json")
    assert info["provenance"] == held[0]["provenance"]


def test_store_names_another_one_for_once(space: Path, workspace: Workspace) -> None:
    there = str(workspace.activations)
    result = done("status", "-w", str(space), "--store", there, "--json")
    assert set(result["stored"]) == {"0.5e", "1e"}
    assert Workspace.find(space).activations == STORE


@pytest.mark.filterwarnings("default::bertvision.errors.BertvisionWarning")  # tune is not there
def test_heads_are_trained_and_scored_from_it(space: Path) -> None:
    done("train", "learned-pooling", "-w", str(space))
    scored = done("evaluate", "learned-pooling", "-w", str(space), "--json")
    assert scored
    written = [path for path in space.rglob("*") if path.is_file()]
    assert not [path for path in written if b"canary" in path.read_bytes()]


def test_a_store_that_cannot_be_reached_is_not_kept(space: Path) -> None:
    before = (space / "bertvision.yaml").read_bytes()
    words = ["extract", "--checkpoint", "1e", "--split", "dev", "-w", str(space)]
    said = done(*words, "--store", "s3://nobucket/activations", status=2)
    assert "s3://nobucket/activations" in said
    assert "there is no such bucket: make it, or correct the URL" in said
    assert (space / "bertvision.yaml").read_bytes() == before


def test_the_snapshots_do_not_depend_on_where_the_activations_are(workspace: Workspace) -> None:
    assert workspace.at(STORE.replace("s3", "memory")).config.digest() == workspace.config.digest()
