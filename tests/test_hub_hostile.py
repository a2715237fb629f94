"""Repositories of somebody who means harm, and pulls that are killed: nothing here is lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import hubs
import pytest
from headed import NAME, made, with_head
from stores import Made

import bertvision
from bertvision.errors import HubError, InputError
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing import stores

REPO = "me/bad"


def commit(hub: hubs.Hub, kind: str, files: Mapping[str, bytes]) -> None:
    """Let a repository hold these files beside those that it has."""
    repository = hub.repositories.setdefault((kind, REPO), hubs.Repository())
    there = repository.files() if repository.branches else {}
    new = {path: hubs.Stored(content, lfs=False) for path, content in files.items()}
    repository.commit("main", {**there, **new}, "bad")


def test_a_manifest_of_no_files_empties_no_folder(hub: hubs.Hub, tmp_path: Path) -> None:
    """Files of a folder stay, whatever a repository says that it is to hold."""
    manifest = manifests.Manifest(kind="snapshot", bertvision="0")
    commit(hub, "model", {manifests.FILE: manifest.content()})
    mine = tmp_path / "copy" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(InputError, match="names no files"):
        bertvision.pull(REPO, mine.parent)
    assert mine.read_text() == "mine"


def test_a_second_pull_keeps_what_was_added(hub: hubs.Hub, tmp_path: Path) -> None:
    """Scores that a pulled head got here are not lost when it is pulled again."""
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    with_head(one)
    bertvision.push(f"{NAME}@s3:1e", "me/head", workspace=one.root)
    folder = Path(bertvision.pull("me/head", workspace=other.root).folder)
    scores = folder / "eval" / "1e" / "predictions.json"
    scores.parent.mkdir(parents=True)
    scores.write_text("{}")
    assert bertvision.pull("me/head", workspace=other.root).folder == str(folder)
    assert scores.read_text() == "{}"


def test_a_huge_manifest_is_not_brought(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The temporary folder is not filled by what calls itself a manifest."""
    monkeypatch.setattr(manifests, "SMALL_BYTES", 1000)
    commit(hub, "model", {manifests.FILE: b" " * 1001})
    with pytest.raises(InputError, match="no manifest"):
        bertvision.pull(REPO, tmp_path / "copy")
    assert not hub.asked("GET", "/resolve/")


def test_a_split_brings_its_own_files_alone(hub: hubs.Hub, tmp_path: Path) -> None:
    """Other files in its folders would fill the disk uncounted."""
    Made([30, 40]).write(tmp_path / "store")
    bertvision.push("store", REPO, store=tmp_path / "store")
    commit(hub, "dataset", {"arrays.zarr/1e/train/huge.bin": b"x" * 1000})
    with pytest.raises(InputError, match=r"huge\.bin"):
        bertvision.pull(REPO, tmp_path / "copy")
    assert not hub.asked("GET", "huge.bin")


def test_a_killed_pull_over_a_half_made_split_claims_nothing_wrong(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of an extraction that was not finished are missing then, and not damaged."""
    Made([30, 40, 50]).write(tmp_path / "store")
    half = Made([30, 40, 50])
    half.hidden_states = [states + 1 for states in half.hidden_states]
    half.write(tmp_path / "copy", 1)
    bertvision.push("store", REPO, store=tmp_path / "store")
    _kill_at(monkeypatch, "ledger/1e/train/split.json")
    with pytest.raises(KeyboardInterrupt):
        bertvision.pull(REPO, tmp_path / "copy")
    split = ActivationStore.open(tmp_path / "copy")["1e/train"]
    assert not any("hidden_states" in found for found in split.verify())


def test_a_pull_that_is_killed_at_the_end_leaves_nothing_behind(
    hub: hubs.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one finds files that it put there, and its own temporary names do not stay."""
    Made([30, 40]).write(tmp_path / "store")
    bertvision.push("store", REPO, store=tmp_path / "store")
    _kill_at(monkeypatch, "input_ids/c/0")
    with pytest.raises(KeyboardInterrupt):
        bertvision.pull(REPO, tmp_path / "copy")
    monkeypatch.undo()
    with hubs.running(monkeypatch, tmp_path / "cache2") as again:
        again.repositories = hub.repositories
        bertvision.pull(REPO, tmp_path / "copy")
    assert not list((tmp_path / "copy").rglob(".*.pulled"))
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def _kill_at(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Die before a file is put in place."""
    link = stores._link

    def killed(source: Path, path: Path) -> None:
        if part in path.as_posix():
            raise KeyboardInterrupt
        link(source, path)

    monkeypatch.setattr(stores, "_link", killed)


@pytest.mark.parametrize("offline", [False, True])
def test_offline_is_said_at_once(
    hub: hubs.Hub, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    """Files that the cache lacks are neither waited for nor called missing in the repository."""
    from huggingface_hub import constants

    from bertvision.pipelines.sharing import hub as asked

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(asked, "WAITS", (3600.0,))
    with pytest.raises(HubError, match="cache"):
        bertvision.Head.from_pretrained("me/none", local_files_only=not offline)


def test_a_token_of_an_argument_is_not_repeated(hub: hubs.Hub, tmp_path: Path) -> None:
    """A server that says the token in its refusal does not get it into a message."""
    head = bertvision.Head.from_pretrained(with_head(made(tmp_path / "one")))
    hub.faults.append(_telling)
    with pytest.raises(HubError, match="403") as caught:
        head.push_to_hub("me/head", token="hf_ofTheArgument")
    assert not hub.faults
    assert "hf_ofTheArgument" not in str(caught.value)


def _telling(handler: hubs._Handler) -> bool:
    if "repos/create" not in handler.path:
        return False
    said = f"not for {handler.headers.get('Authorization')}"
    handler.answer(403, {"error": said}, X_Error_Message=said)
    return True
