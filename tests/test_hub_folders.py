"""Heads, snapshots and reports on the hub: pushed, pulled, checked; over HTTP, with faults."""

from __future__ import annotations

import json
from pathlib import Path

import hubs
import pytest
import torch
from headed import NAME, made, with_head
from terminal import done, run

import bertvision
from bertvision.errors import HubError, InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.sharing import manifest as manifests

REPO = "me/head"


def test_a_head_comes_back_where_it_belongs(hub: hubs.Hub, tmp_path: Path) -> None:
    """A pushed head is loaded as it was, in another workspace of the same snapshot."""
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    folder = with_head(one)
    assert "bertvision pull me/head" in done("push", f"{NAME}@s3:1e", REPO, "-w", one.root)
    brought = json.loads(done("pull", REPO, "-w", other.root, "--json"))
    assert brought["folder"] == str(other.head_dir("1e", f"{NAME}@s3"))
    assert (brought["kind"], brought["name"]) == ("head", f"{NAME}@s3:1e")
    before, after = bertvision.load_head(folder), bertvision.load_head(brought["folder"])
    assert after.config == before.config
    for name, value in before.module.state_dict().items():
        assert torch.equal(value, after.module.state_dict()[name])
    assert not (other.root / "heads" / ".pull-me--head").exists()
    bertvision.pull(REPO, workspace=other.root)  # again: it is there


def test_only_a_heads_own_files_are_sent(hub: hubs.Hub, tmp_path: Path) -> None:
    """Neither logs nor predictions leave, and the card knows no path of the machine."""
    with_head(space := made(tmp_path / "one"))
    bertvision.push(NAME + "@s3", REPO, workspace=space.root, license="mit")
    files = hub.files("model", REPO)
    own = {"config.json", "model.safetensors", "metrics.json", "scores.json"}
    assert set(files) == own | {"bertvision.json", "README.md"}
    _, metadata, text = files["README.md"].decode().split("---\n", 2)
    assert "license: mit" in metadata
    assert "library_name: bertvision" in metadata
    assert "secret" not in metadata + text
    for part in (
        "squad_v2",
        "64.25",
        "| 77 |",
        "seed 3",
        "`1e`",
        "a" * 64,
        "123",
        "from_pretrained",
    ):
        assert part in text, part
    assert "bertvision train learned-pooling" in text


def test_what_is_not_known_is_left_out_of_a_card(hub: hubs.Hub, tmp_path: Path) -> None:
    """Without scores there is no table of them, and without a licence no word of one."""
    folder = with_head(space := made(tmp_path / "one"))
    (folder / "eval" / "1e" / "metrics.json").unlink()
    bertvision.push(NAME + "@s3", REPO, workspace=space.root)
    card = hub.files("model", REPO)["README.md"].decode()
    assert "Scores" not in card
    assert "licen" not in card.lower()


@pytest.mark.parametrize("path", ["config.json", "model.safetensors", "metrics.json"])
def test_a_wrong_byte_is_found(hub: hubs.Hub, tmp_path: Path, path: str) -> None:
    """One flipped bit in any file: nothing is put in place, and what is mended is pulled then."""
    with_head(space := made(tmp_path / "one"))
    bertvision.push(NAME + "@s3", REPO, workspace=space.root)
    right = hub.files("model", REPO)[path]
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 1
    hub.change("model", REPO, path, bytes(wrong))
    with pytest.raises(HubError, match=f"{path} is not as it was sent"):
        bertvision.pull(REPO, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    hub.change("model", REPO, path, right)
    bertvision.pull(REPO, tmp_path / "copy")
    assert bertvision.load_head(tmp_path / "copy").config.head == NAME


def test_a_damaged_head_is_not_pushed(hub: hubs.Hub, tmp_path: Path) -> None:
    folder = with_head(space := made(tmp_path / "one"))
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(WorkspaceError, match="nothing was sent"):
        bertvision.push(NAME + "@s3", REPO, workspace=space.root)
    assert not hub.repositories


def test_a_head_of_another_snapshot_is_told_apart(hub: hubs.Hub, tmp_path: Path) -> None:
    """A head says which weights it was trained on, and is not put beside others of their name."""
    one, other = made(tmp_path / "one"), made(tmp_path / "other")
    with_head(one, weights_sha256="f" * 64)
    bertvision.push(NAME + "@s3", REPO, workspace=one.root)
    with pytest.raises(ProvenanceError, match="another 1e.*FOLDER"):
        bertvision.pull(REPO, workspace=other.root)
    assert bertvision.pull(REPO, tmp_path / "copy").folder == str(tmp_path / "copy")


def test_another_head_is_not_replaced(hub: hubs.Hub, tmp_path: Path) -> None:
    with_head(one := made(tmp_path / "one"))
    bertvision.push(NAME + "@s3", REPO, workspace=one.root)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "mine.txt").write_text("mine")
    with pytest.raises(WorkspaceError, match="something else"):
        bertvision.pull(REPO, tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["mine.txt"]


def test_a_snapshot_comes_back(hub: hubs.Hub, tmp_path: Path) -> None:
    """Its files, but for those that are no records or weights; and it needs a folder."""
    space = made(tmp_path / "one")
    done("push", "1e", "me/bert", "-w", space.root, "--private")
    assert "training.bin" not in hub.files("model", "me/bert")
    assert "secret" not in hub.files("model", "me/bert")["README.md"].decode()
    result = run("pull", "me/bert", "-w", space.root)
    assert (result.exit_code, "name a FOLDER" in result.stderr) == (2, True)
    bertvision.pull("me/bert", tmp_path / "copy")
    for name in ("model.safetensors", "config.json", "snapshot.json"):
        here = space.snapshot_dir("1e") / name
        assert (tmp_path / "copy" / name).read_bytes() == here.read_bytes()


def test_a_report_is_a_page_of_the_hub(hub: hubs.Hub, tmp_path: Path) -> None:
    """A static Space with the page and its tables, which come back."""
    space = made(tmp_path / "one")
    assert "bertvision report" in run("push", "report", "me/page", "-w", space.root).stderr
    folder = space.root / "report"
    folder.mkdir()
    (folder / "index.html").write_text("<h1>scores</h1>")
    (folder / "scores.csv").write_text("a,b\n")
    bertvision.push("report", "me/page", workspace=space.root)
    assert "sdk: static" in hub.files("space", "me/page")["README.md"].decode()
    bertvision.pull("me/page", tmp_path / "page")
    assert (tmp_path / "page" / "index.html").read_text() == "<h1>scores</h1>"


def test_a_name_of_two_repositories_is_not_guessed(hub: hubs.Hub, tmp_path: Path) -> None:
    with_head(space := made(tmp_path / "one"))
    bertvision.push(NAME + "@s3", REPO, workspace=space.root)
    hub.repositories["dataset", REPO] = hubs.Repository()
    hub.repositories["dataset", REPO].commit("main", {}, "begun")
    with pytest.raises(InputError, match="me/head or datasets/me/head"):
        bertvision.pull(REPO, tmp_path / "copy")
    with pytest.raises(InputError, match=r"has no bertvision\.json"):
        bertvision.pull(f"datasets/{REPO}", tmp_path / "copy")
    assert bertvision.pull(f"models/{REPO}", tmp_path / "copy").kind == "head"


@pytest.mark.parametrize(
    "path", ["../out.json", "code.py", "weights.bin", "/etc/x.json", ".x.json"]
)
def test_a_manifest_cannot_name_what_runs_or_leads_out(
    hub: hubs.Hub, tmp_path: Path, path: str
) -> None:
    """Only records, weights, tables and pages come, into the folder that was named."""
    one = manifests.SharedFile.of(b"{}")
    manifest = manifests.Manifest(kind="snapshot", bertvision="0", files={path: one})
    files = {path: b"{}", manifests.FILE: manifest.content()}
    repository = hub.repositories["model", "me/bad"] = hubs.Repository()
    stored = {name: hubs.Stored(content, lfs=False) for name, content in files.items()}
    repository.commit("main", stored, "bad")
    with pytest.raises(InputError, match="no file that is pulled"):
        bertvision.pull("me/bad", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
