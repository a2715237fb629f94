"""Pushes to a repository that holds something: whose it is, what goes, who comes between."""

from __future__ import annotations

import json
from pathlib import Path

import hubs
import pytest
from headed import NAME, made, with_head
from stores import Made
from terminal import run

import bertvision
from bertvision.errors import HubError, InputError, ProvenanceError
from bertvision.featurestore.store import ActivationStore

REPO = "me/it"


def hold(hub: hubs.Hub, kind: str, *paths: str) -> None:
    """Let a repository hold files of somebody else beside those that it has."""
    repository = hub.repositories.setdefault((kind, REPO), hubs.Repository())
    there = repository.files() if repository.branches else {}
    new = {path: hubs.Stored(b"theirs", lfs=False) for path in paths}
    repository.commit("main", {**there, **new}, "theirs")


@pytest.mark.parametrize("paths", [("README.md",), ("model.safetensors", "notes.md")])
def test_somebody_elses_model_is_not_replaced(
    hub: hubs.Hub, tmp_path: Path, paths: tuple[str, ...]
) -> None:
    """Neither its card nor its weights, unless that is asked for; other files stay even then."""
    space = made(tmp_path / "one")
    hold(hub, "model", *paths, "data/mine.json")
    before = hub.files("model", REPO)
    result = run("push", "1e", REPO, "-w", space.root)
    assert result.exit_code == 2
    assert all(part in result.stderr for part in (REPO, "another name", "--replace"))
    assert hub.files("model", REPO) == before
    assert not hub.asked("POST", "")
    bertvision.push("1e", REPO, workspace=space.root, replace=True)
    after = hub.files("model", REPO)
    assert b"bertvision" in after["README.md"]
    assert after["data/mine.json"] == b"theirs"
    bertvision.push("1e", REPO, workspace=space.root)  # now it is ours


def test_somebody_elses_data_set_is_not_replaced(hub: hubs.Hub, tmp_path: Path) -> None:
    Made([30]).write(tmp_path / "store")
    hold(hub, "dataset", "README.md", "train.csv")
    with pytest.raises(InputError, match=r"me/it holds 2 files.*such as README\.md.*--replace"):
        bertvision.push("store", REPO, store=tmp_path / "store")
    assert set(hub.files("dataset", REPO)) == {"README.md", "train.csv"}


def test_a_manifest_of_nobody_is_no_claim(hub: hubs.Hub, tmp_path: Path) -> None:
    """A file that is only called as ours does not make the card ours."""
    hold(hub, "model", "bertvision.json", "README.md")
    with pytest.raises(InputError, match="did not send"):
        bertvision.push("1e", REPO, workspace=made(tmp_path / "one").root)


def test_a_repository_that_was_just_made_is_filled(hub: hubs.Hub, tmp_path: Path) -> None:
    hold(hub, "model", ".gitattributes")
    bertvision.push("1e", REPO, workspace=made(tmp_path / "one").root)
    assert {".gitattributes", "README.md"} < set(hub.files("model", REPO))


def test_a_head_does_not_replace_a_snapshot(hub: hubs.Hub, tmp_path: Path) -> None:
    """Both are models, and have files of the same names; with --replace only the head is left."""
    with_head(space := made(tmp_path / "one"))
    bertvision.push("1e", REPO, workspace=space.root)
    with pytest.raises(InputError, match="holds a snapshot, and this is a head"):
        bertvision.push(f"{NAME}@s3:1e", REPO, workspace=space.root)
    head = bertvision.load_head(space.head_dir("1e", f"{NAME}@s3"))
    pushed = bertvision.Head(head.module, head.config)
    with pytest.raises(InputError, match="replace=True"):
        pushed.push_to_hub(REPO)
    pushed.push_to_hub(REPO, replace=True)
    assert "snapshot.json" not in hub.files("model", REPO)


def test_files_of_an_earlier_push_go_with_it(hub: hubs.Hub, tmp_path: Path) -> None:
    """In the same commit, and only those that its manifest names."""
    space = made(tmp_path / "one")
    old = space.snapshot_dir("1e") / "added_tokens.json"
    old.write_text("{}")
    bertvision.push("1e", REPO, workspace=space.root)
    hold(hub, "model", "theirs.json")
    old.unlink()
    bertvision.push("1e", REPO, workspace=space.root)
    files = hub.files("model", REPO)
    assert "added_tokens.json" not in files
    assert files["theirs.json"] == b"theirs"
    assert len(hub.repositories["model", REPO].messages) == 4, "made, pushed, theirs, pushed"


def test_what_others_put_beside_our_files_is_neither_replaced_nor_removed(
    hub: hubs.Hub, tmp_path: Path
) -> None:
    space = made(tmp_path / "one")
    added = space.snapshot_dir("1e") / "added_tokens.json"
    added.write_text("{}")
    bertvision.push("1e", REPO, workspace=space.root)
    hold(hub, "model", "added_tokens.json", "special_tokens_map.json")  # ours and a new one
    added.unlink()
    bertvision.push("1e", REPO, workspace=space.root)
    assert hub.files("model", REPO)["added_tokens.json"] == b"theirs", "it was replaced since"
    (added.parent / "special_tokens_map.json").write_text("{}")
    with pytest.raises(InputError, match=r"me/it holds a file special_tokens_map\.json.*--replace"):
        bertvision.push("1e", REPO, workspace=space.root)
    assert hub.files("model", REPO)["special_tokens_map.json"] == b"theirs"


def test_shards_of_a_push_that_was_given_up_go(hub: hubs.Hub, tmp_path: Path) -> None:
    """After a killed push a split may be extracted into fewer shards: none of the others stay."""
    Made([30, 40, 50]).write(tmp_path / "many")
    hub.faults.append(_at_record(hubs.status(403, "POST", "/commit/")))
    with pytest.raises(HubError):
        bertvision.push("store", REPO, store=tmp_path / "many")
    hold(hub, "dataset", "arrays.zarr/1e/train/hidden_states/notes.txt")
    Made([30, 40, 50], shard_tokens=128).write(tmp_path / "one")
    bertvision.push("store", REPO, store=tmp_path / "one")
    files = set(hub.files("dataset", REPO))
    assert {path for path in files if "hidden_states/c/" in path} == {
        "arrays.zarr/1e/train/hidden_states/c/0/0/0"
    }
    assert "arrays.zarr/1e/train/hidden_states/notes.txt" in files


def _at_record(fault: hubs.Fault) -> hubs.Fault:
    """A fault that strikes at the commit with the records of shards."""

    def late(handler: hubs._Handler) -> bool:
        lines = handler.body.splitlines() if "/commit/" in handler.path else []
        sent = [line["value"] for line in map(json.loads, lines) if line["key"] == "file"]
        return any(value["path"].startswith("ledger/") for value in sent) and fault(handler)

    return late


def test_another_split_takes_the_place_when_told(hub: hubs.Hub, tmp_path: Path) -> None:
    """Nothing of the old one stays but what others put there; killed, no record lies."""
    Made([30, 40, 50]).write(tmp_path / "old")
    Made([20, 21], seed=None).write(tmp_path / "new")
    bertvision.push("store", REPO, store=tmp_path / "old")
    hold(hub, "dataset", "arrays.zarr/notes.txt")
    with pytest.raises(ProvenanceError, match="--replace"):
        bertvision.push("store", REPO, store=tmp_path / "new")
    hub.faults.append(_at_record(hubs.status(403, "POST", "/commit/")))
    with pytest.raises(HubError):
        bertvision.push("1e/train", REPO, store=tmp_path / "new", replace=True)
    assert "ledger/1e/train/split.json" not in hub.files("dataset", REPO)
    bertvision.push("1e/train", REPO, store=tmp_path / "new")
    assert "ledger/1e/train/00001.json" not in hub.files("dataset", REPO)
    assert "arrays.zarr/notes.txt" in hub.files("dataset", REPO)
    bertvision.pull(REPO, tmp_path / "copy")
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def test_a_split_that_is_gone_goes_when_told(hub: hubs.Hub, tmp_path: Path) -> None:
    """With all of a store and --replace; its texts stay as long as another snapshot has them."""
    for tag, split in (("1e", "train"), ("2e", "train"), ("2e", "dev")):
        Made([30, 40], tag=tag, split=split).write(tmp_path / "all")
    Made([30, 40]).write(tmp_path / "rest")
    bertvision.push("store", REPO, store=tmp_path / "all")
    for what, told in (("store", False), ("1e/train", True)):
        bertvision.push(what, REPO, store=tmp_path / "rest", replace=told)
        assert "ledger/2e/dev/split.json" in hub.files("dataset", REPO)
    bertvision.push("store", REPO, store=tmp_path / "rest", replace=True)
    files = hub.files("dataset", REPO)
    assert not [path for path in files if "2e" in path or "dev" in path]
    assert '"2e' not in json.dumps(json.loads(files["arrays.zarr/zarr.json"]))
    assert "examples/train.parquet" in files
    bertvision.pull(REPO, tmp_path / "copy")
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def _meanwhile(hub: hubs.Hub, kind: str, part: str, *, after: int = 0) -> hubs.Fault:
    """Somebody else's commit, right before a request is answered, the one behind so many."""
    left = [after]

    def fault(handler: hubs._Handler) -> bool:
        if handler.command == "POST" and part in handler.path:
            left[0] -= 1
            if left[0] == -1:
                hold(hub, kind, "theirs.json")
        return False

    return fault


@pytest.mark.parametrize("after", [0, 2])
def test_of_two_pushes_at_once_one_is_told(hub: hubs.Hub, tmp_path: Path, after: int) -> None:
    """No commit follows one that it does not know of; the same push, made again, goes on."""
    Made([30, 40]).write(tmp_path / "store")
    bertvision.push("store", REPO, store=tmp_path / "store")
    Made([30, 40], split="dev").write(tmp_path / "store")
    hub.faults.append(_meanwhile(hub, "dataset", "/commit/", after=after))
    with pytest.raises(HubError, match="datasets/me/it: something else.*same command"):
        bertvision.push("store", REPO, store=tmp_path / "store")
    assert hub.repositories["dataset", REPO].messages[-1] == "theirs"
    bertvision.push("store", REPO, store=tmp_path / "store")
    assert {"theirs.json", "ledger/1e/dev/split.json"} < set(hub.files("dataset", REPO))


def test_a_push_without_changes_sees_another_one(hub: hubs.Hub, tmp_path: Path) -> None:
    """A commit of which all files are there already is none, and the next one is refused too."""
    Made([30, 40]).write(tmp_path / "store")
    bertvision.push("store", REPO, store=tmp_path / "store")
    hub.faults.append(_meanwhile(hub, "dataset", "/preupload/"))
    with pytest.raises(HubError, match="something else was pushed"):
        bertvision.push("store", REPO, store=tmp_path / "store", license="mit")
    assert hub.repositories["dataset", REPO].messages[-1] == "theirs"


def test_two_that_make_a_repository_at_once_are_told_apart(hub: hubs.Hub, tmp_path: Path) -> None:
    """The second one finds what the first one sent, though it began without a repository."""
    space = made(tmp_path / "one")
    bertvision.push("1e", REPO, workspace=space.root)
    others = hub.repositories.pop(("model", REPO))
    made_meanwhile = [others]

    def fault(handler: hubs._Handler) -> bool:
        if handler.path == "/api/repos/create" and made_meanwhile:
            hub.repositories["model", REPO] = made_meanwhile.pop()
        return False

    hub.faults.append(fault)
    with pytest.raises(HubError, match="something else was pushed"):
        bertvision.push("1e", REPO, workspace=space.root, license="mit")
    assert len(others.messages) == 2
    bertvision.push("1e", REPO, workspace=space.root, license="mit")


def test_a_commit_whose_answer_is_lost_is_known_again(hub: hubs.Hub, tmp_path: Path) -> None:
    """It is neither made twice nor taken for somebody else's."""

    def lost(handler: hubs._Handler) -> bool:
        if "/commit/" not in handler.path:
            return False
        answer = handler.answer
        handler.answer = lambda code, value, **headers: None  # type: ignore[method-assign]
        handler._route()
        handler.answer = answer  # type: ignore[method-assign]
        handler.answer(504, {"error": "too slow"})
        return True

    hub.faults.append(lost)
    sent = bertvision.push("1e", REPO, workspace=made(tmp_path / "one").root)
    assert not hub.faults
    assert len(hub.repositories["model", REPO].messages) == 2, "made, and pushed once"
    assert sent.commit == hub.repositories["model", REPO].branches["main"]
