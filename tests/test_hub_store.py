"""Stores on the hub: pushed, pulled, checked, read where they are; over HTTP, with faults."""

from __future__ import annotations

import json
from pathlib import Path

import hubs
import pytest
import torch
from stores import Made
from terminal import done, run

import bertvision
from bertvision.errors import (
    CorruptStoreError,
    HubError,
    IncompleteSplitError,
    InputError,
    ProvenanceError,
    StoreNotFoundError,
    UnknownNameError,
)
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.sharing import transfer

REPO = "me/acts"
LENGTHS = [30, 40, 50, 60, 20, 64]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with two splits of 1e and one of 2e, quantised, of several shards."""
    folder = tmp_path / "store"
    Made(LENGTHS, encoding="int8").write(folder)
    Made([9, 30], encoding="int8", split="dev").write(folder)
    Made(LENGTHS, encoding="int8", layers=2, tag="2e").write(folder)
    return folder


def held(folder: Path) -> dict[str, bytes]:
    """The contents of a store, but for locks."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.endswith("lock")
    }


def test_a_store_comes_back_byte_for_byte(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """The pulled store is the one that was pushed, and nothing of the transport is left in it."""
    sent = bertvision.push("store", REPO, store=store)
    assert (sent.kind, sent.repository, sent.commit) == (
        "store",
        "datasets/me/acts",
        hub.repositories["dataset", REPO].branches["main"],
    )
    brought = bertvision.pull(REPO, tmp_path / "copy")
    assert brought.splits == ["1e/dev", "1e/train", "2e/train"]
    assert held(tmp_path / "copy") == held(store)


def test_a_split_alone_is_pushed_and_pulled(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """The metadata of the whole tells of the splits that are there alone."""
    bertvision.push("1e/train", REPO, store=store)
    root = json.loads(hub.files("dataset", REPO)["arrays.zarr/zarr.json"])
    assert "2e" not in json.dumps(root)
    bertvision.push("1e/dev,2e/train", REPO, store=store)
    done("pull", f"datasets/{REPO}", tmp_path / "copy", "--split", "2e/train")
    copy = ActivationStore.open(tmp_path / "copy")
    assert {tag: list(copy[tag]) for tag in copy} == {"2e": ["train"]}
    assert not copy["2e/train"].verify()
    bertvision.pull(REPO, tmp_path / "copy", split="1e/dev,1e/train")
    assert held(tmp_path / "copy") == held(store)


def test_what_is_there_is_not_brought_again(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """A second pull looks at the records alone, and finishes what another one left half done."""
    bertvision.push("1e/train", REPO, store=store)
    bertvision.pull(REPO, tmp_path / "copy")
    hub.requests.clear()
    bertvision.pull(REPO, tmp_path / "copy")
    asked = hub.asked("GET", "/resolve/")
    assert {path.rpartition("/")[2] for path in asked} == {"bertvision.json", "split.json"}
    (tmp_path / "copy" / "ledger" / "1e" / "train" / "00001.json").unlink()
    bertvision.pull(REPO, tmp_path / "copy")
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def test_the_records_come_behind_what_they_tell_of(hub: hubs.Hub, store: Path) -> None:
    """A push that dies in between leaves no record of a shard that is not there."""
    hub.faults += [hubs.status(403, "POST", "/commit/") for _ in range(1)]
    with pytest.raises(HubError, match="does not allow it"):
        bertvision.push("store", REPO, store=store)
    hub.faults.append(_after(2, hubs.status(403, "POST", "/commit/")))
    with pytest.raises(HubError):
        bertvision.push("store", REPO, store=store)
    there = hub.files("dataset", REPO)
    assert any("hidden_states/c/" in path for path in there)
    assert not any(path.startswith("ledger/") for path in there)


def _after(n: int, fault: hubs.Fault) -> hubs.Fault:
    """A fault that strikes at the request behind so many commits."""
    left = [n]

    def late(handler: hubs._Handler) -> bool:
        if handler.command == "POST" and "/commit/" in handler.path and left[0] > 0:
            left[0] -= 1
            return False
        return left[0] == 0 and fault(handler)

    return late


def test_an_interrupted_push_goes_on(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """Files that were uploaded before are not sent again, whether committed or not."""
    hub.faults.append(_after(1, hubs.status(403, "POST", "/commit/")))
    with pytest.raises(HubError):
        bertvision.push("store", REPO, store=store)
    before = set(hub.asked("PUT", "/lfs/"))
    assert any("hidden_states/c/" in path for path in hub.files("dataset", REPO)) is False
    hub.requests.clear()
    bertvision.push("store", REPO, store=store)
    assert before
    assert not before & set(hub.asked("PUT", "/lfs/")), "nothing was sent twice"
    bertvision.pull(REPO, tmp_path / "copy")
    assert held(tmp_path / "copy") == held(store)


@pytest.mark.parametrize(
    ("code", "method", "part"),
    [
        (429, "POST", "/preupload/"),
        (503, "POST", "/commit/"),
        (429, "POST", "/commit/"),
        (500, "PUT", "/lfs/"),
        (502, "POST", "repos/create"),
    ],
)
def test_a_push_outlives_faults_that_pass(
    hub: hubs.Hub, tmp_path: Path, code: int, method: str, part: str
) -> None:
    """Each request of a push is asked again where the hub is busy or fails."""
    Made([30, 40], encoding="int8").write(tmp_path / "store")
    hub.faults.append(hubs.status(code, method, part, Retry_After="0"))
    bertvision.push("store", REPO, store=tmp_path / "store")
    assert not hub.faults, "the fault struck"
    bertvision.pull(REPO, tmp_path / "copy")
    assert held(tmp_path / "copy") == held(tmp_path / "store")


@pytest.mark.parametrize(
    ("code", "method", "part"),
    [(503, "GET", "/tree/"), (500, "HEAD", "/resolve/"), (429, "GET", "/resolve/")],
)
def test_a_pull_outlives_faults_that_pass(
    hub: hubs.Hub, tmp_path: Path, code: int, method: str, part: str
) -> None:
    """Each request of a pull is asked again where the hub is busy or fails."""
    Made([30, 40], encoding="int8").write(tmp_path / "store")
    bertvision.push("store", REPO, store=tmp_path / "store")
    hub.faults.append(hubs.status(code, method, part, Retry_After="0"))
    bertvision.pull(REPO, tmp_path / "copy")
    assert not hub.faults, "the fault struck"
    assert held(tmp_path / "copy") == held(tmp_path / "store")


def test_a_download_that_breaks_off_goes_on(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """A connection that ends in the middle of a shard does no harm."""
    bertvision.push("1e/train", REPO, store=store)
    hub.faults.append(hubs.cut("hidden_states/c/0", 100))
    bertvision.pull(REPO, tmp_path / "copy")
    assert not hub.faults
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def test_an_interrupted_pull_goes_on(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """Files that were brought are not asked for again; nothing is in place before all is there."""
    bertvision.push("1e/train", REPO, store=store)
    hub.faults.append(hubs.status(403, "GET", "hidden_states/c/1/"))
    with pytest.raises(HubError, match="does not allow"):
        bertvision.pull(REPO, tmp_path / "copy")
    assert not (tmp_path / "copy" / "ledger" / "1e").exists()
    bertvision.pull(REPO, tmp_path / "copy")
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()
    asked = [path for path in hub.asked("GET", "/resolve/") if "input_ids/c" in path]
    assert len(asked) == 1


@pytest.mark.parametrize(
    "path",
    [
        "arrays.zarr/1e/train/hidden_states/c/1/0/0",
        "arrays.zarr/1e/train/scale/c/0/0",
        "arrays.zarr/1e/train/input_ids/c/0",
        "arrays.zarr/1e/train/n_tokens/zarr.json",
        "examples/train.parquet",
        "ledger/1e/train/00001.json",
        "ledger/1e/train/split.json",
    ],
)
def test_a_wrong_byte_is_found(hub: hubs.Hub, tmp_path: Path, path: str) -> None:
    """One flipped bit in any file: nothing looks whole, and a mended repository is pulled then."""
    Made([30, 50], encoding="int8").write(tmp_path / "store")
    bertvision.push("1e/train", REPO, store=tmp_path / "store")
    right = hub.files("dataset", REPO)[path]
    wrong = bytearray(right)
    wrong[len(wrong) // 2] ^= 1
    hub.change("dataset", REPO, path, bytes(wrong))
    with pytest.raises(CorruptStoreError):
        bertvision.pull(REPO, tmp_path / "copy")
    assert not (tmp_path / "copy" / "ledger" / "1e").exists()
    hub.change("dataset", REPO, path, right)
    bertvision.pull(REPO, tmp_path / "copy")
    assert not ActivationStore.open(tmp_path / "copy")["1e/train"].verify()


def test_limits_are_checked_before_anything_is_sent(
    hub: hubs.Hub, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many files, too many entries and too large files are refused, with what to do."""
    for name, match in (
        ("MOST_FILES", "files, and the hub takes 3"),
        ("MOST_ENTRIES", "entries, and the hub takes 3.*shard_tokens="),
        ("MOST_BYTES", "in a file"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(transfer, name, 3)
            with pytest.raises(InputError, match=match):
                bertvision.push("store", REPO, store=store)
    assert not hub.asked("POST", "")
    assert not hub.repositories


def test_files_go_in_several_commits(
    hub: hubs.Hub, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store of many files is no single commit, and the last one has the card."""
    monkeypatch.setattr(transfer, "FILES_OF_A_COMMIT", 10)
    sent = bertvision.push("store", REPO, store=store)
    assert len(hub.repositories["dataset", REPO].messages) > sent.files // 10
    bertvision.pull(REPO, tmp_path / "copy")
    assert held(tmp_path / "copy") == held(store)


def test_another_split_of_the_name_is_refused(hub: hubs.Hub, store: Path, tmp_path: Path) -> None:
    """Neither in a repository nor in a store is a split replaced by one of something else."""
    bertvision.push("1e/train", REPO, store=store)
    Made([10, 20], encoding="int8").write(tmp_path / "other")
    with pytest.raises(ProvenanceError, match="another 1e/train.*--revision"):
        bertvision.push("1e/train", REPO, store=tmp_path / "other")
    before = held(tmp_path / "other")
    with pytest.raises(ProvenanceError, match="another 1e/train"):
        bertvision.pull(REPO, tmp_path / "other")
    assert {k: v for k, v in held(tmp_path / "other").items() if ".pull" not in k} == before


def test_texts_that_other_snapshots_use_are_not_replaced(
    hub: hubs.Hub, store: Path, tmp_path: Path
) -> None:
    """A split has the same examples in every snapshot, in a repository and in a store."""
    bertvision.push("1e/train", REPO, store=store)
    Made([10, 20], encoding="int8", tag="3e").write(tmp_path / "other")
    before = hub.files("dataset", REPO)
    with pytest.raises(ProvenanceError, match="other examples of train"):
        bertvision.push("3e/train", REPO, store=tmp_path / "other")
    assert hub.files("dataset", REPO) == before
    with pytest.raises(ProvenanceError, match="other examples of train"):
        bertvision.pull(REPO, tmp_path / "other")


def test_an_incomplete_split_is_not_pushed(hub: hubs.Hub, tmp_path: Path) -> None:
    """Nobody gets a split that lacks shards."""
    Made(LENGTHS).write(tmp_path / "store", 1)
    with pytest.raises(IncompleteSplitError):
        bertvision.push("store", REPO, store=tmp_path / "store")
    assert not hub.repositories


def test_revisions_are_branches_to_push_and_anything_to_pull(
    hub: hubs.Hub, store: Path, tmp_path: Path
) -> None:
    """A branch is made where it is pushed to; a commit is pulled as it was."""
    first = bertvision.push("1e/dev", REPO, store=store).commit
    bertvision.push("2e/train", REPO, store=store, revision="more")
    assert bertvision.pull(REPO, tmp_path / "main").splits == ["1e/dev"]
    assert bertvision.pull(REPO, tmp_path / "b", revision="more").splits == ["1e/dev", "2e/train"]
    assert bertvision.pull(REPO, tmp_path / "c", revision=first).commit == first
    with pytest.raises(HubError, match="no such revision"):
        bertvision.pull(REPO, tmp_path / "d", revision="never")


def test_a_private_repository_needs_the_token(
    hub: hubs.Hub, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users without a token are told what to set; the token itself is never told."""
    result = run("push", "1e/dev", REPO, "--private", "--store", store, "--json")
    assert result.exit_code == 0, result.stderr
    assert hub.repositories["dataset", REPO].private
    assert hubs.TOKEN not in result.output
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    result = run("pull", f"datasets/{REPO}", tmp_path / "copy")
    assert result.exit_code == 2
    assert "HF_TOKEN" in result.stderr
    assert "hf_another" not in result.output
    result = run("push", "1e/dev", REPO, "--store", store)
    assert (result.exit_code, "HF_TOKEN" in result.stderr) == (2, True)
    assert "hf_another" not in result.output


def test_a_store_is_read_on_the_hub(hub: hubs.Hub, store: Path) -> None:
    """Splits are read in ranges, without a download, of the commit that was opened."""
    bertvision.push("store", REPO, store=store)
    opened = ActivationStore.open(f"hf://datasets/{REPO}")
    assert str(opened.storage).endswith(hub.repositories["dataset", REPO].branches["main"])
    here = ActivationStore.open(store)
    for name in ("1e/train", "2e/train"):
        assert torch.equal(opened[name][3], here[name][3])
    hub.requests.clear()
    part = opened["1e/train"].read([0, 1], layers=[-1]).decode()
    assert torch.equal(part, here["1e/train"].read([0, 1], layers=[-1]).decode())
    shard = hub.files("dataset", REPO)["arrays.zarr/1e/train/hidden_states/c/0/0/0"]
    assert len(hub.asked("GET", "hidden_states/c/")) >= 1
    assert len(shard) > 0
    hub.change("dataset", REPO, "ledger/1e/train/split.json", b"{}")
    assert torch.equal(opened["1e/train"][2], here["1e/train"][2]), "of the commit it was opened at"


def test_no_store_on_the_hub_is_said(hub: hubs.Hub) -> None:
    with pytest.raises(StoreNotFoundError, match="no hf://datasets/me/none"):
        ActivationStore.open("hf://datasets/me/none")


def test_a_name_that_is_no_repository_is_refused(hub: hubs.Hub, store: Path) -> None:
    for name in ("acts", "me/a/b", "../acts", "me/..", "https://huggingface.co/me/acts"):
        with pytest.raises(InputError, match="no repository"):
            bertvision.push("store", name, store=store)
    with pytest.raises(InputError, match="dataset repository: write me/acts"):
        bertvision.push("store", "models/me/acts", store=store)
    bertvision.push("1e/dev", REPO, store=store)
    with pytest.raises(UnknownNameError, match="has no split 1e/tran"):
        bertvision.pull(REPO, "copy", split="1e/tran")


def test_the_card_says_what_is_recorded(hub: hubs.Hub, store: Path) -> None:
    """Sizes, encoder and its digests, how to read it; the viewer's configuration; a licence."""
    bertvision.push("1e/dev", REPO, store=store, license="cc-by-4.0")
    card = hub.files("dataset", REPO)["README.md"].decode()
    _, metadata, text = card.split("---\n", 2)
    assert "license: cc-by-4.0" in metadata
    assert "path: examples/dev.parquet" in metadata
    for part in ("`1e/dev`", "39", "int8", "3 × 16", "`ab`", 'open("hf://datasets/me/acts")'):
        assert part in text, part
    assert str(store) not in card
