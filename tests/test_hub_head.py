"""Head: loaded, saved and pushed as users of transformers expect, and nothing hostile gets in."""

from __future__ import annotations

import json
from pathlib import Path

import hubs
import pytest
import torch
from headed import NAME, made, with_head
from safetensors.torch import save_file

import bertvision
from bertvision.errors import HubError, InputError, UnknownNameError, WorkspaceError
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.records import read_run_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_head(made(tmp_path / "one"))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    state, others = one.state_dict(), other.state_dict()
    return list(state) == list(others) and all(torch.equal(state[n], others[n]) for n in state)


def test_a_head_is_loaded_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    """Weights, configuration and output are the same, from training's folder and from its own."""
    head = bertvision.Head.from_pretrained(folder)
    head.save_pretrained(tmp_path / "saved")
    again = bertvision.Head.from_pretrained(str(tmp_path / "saved"))
    assert same(head, again)
    assert (again.config, again.training) == (head.config, False)
    states, lengths = torch.randn(7, 3, 16), torch.tensor([4, 3])
    assert torch.equal(head(states, lengths).start_logits, again(states, lengths).start_logits)


def test_a_changed_head_is_pushed_and_loaded(hub: hubs.Hub, folder: Path, tmp_path: Path) -> None:
    """The head goes as it is now, without the scores that it had before."""
    head = bertvision.Head.from_pretrained(folder)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1)
    head.push_to_hub("me/mine", private=True, license="mit")
    assert hub.repositories["model", "me/mine"].private
    files = hub.files("model", "me/mine")
    assert set(files) == {"config.json", "model.safetensors", "bertvision.json", "README.md"}
    assert "Scores" not in files["README.md"].decode()
    assert same(bertvision.Head.from_pretrained("me/mine"), head)
    with pytest.raises(InputError, match="Head.from_pretrained loads it"):
        bertvision.pull("me/mine", tmp_path / "copy")


def test_a_pushed_head_of_a_workspace_is_loaded(hub: hubs.Hub, folder: Path) -> None:
    """By its name, at a revision, and from the cache without the hub."""
    space = folder.parents[2]
    commit = bertvision.push(f"{NAME}@s3", "me/head", workspace=space).commit
    head = bertvision.Head.from_pretrained("me/head", revision=commit)
    assert same(head, bertvision.Head.from_pretrained(folder))
    hub.requests.clear()
    bertvision.Head.from_pretrained("me/head", revision=commit, local_files_only=True)
    assert hub.requests == []
    with pytest.raises(HubError):
        bertvision.Head.from_pretrained("me/none")


def test_a_configuration_of_other_tensors_allocates_nothing(folder: Path) -> None:
    """A configuration that lies is refused by the names and shapes of what is there."""
    config = read_run_config(folder)
    lie = config.model_copy(update={"hidden_size": 1 << 20, "layers": tuple(range(10_000))})
    write_record(folder / "config.json", lie)
    _seal(folder)
    with pytest.raises(WorkspaceError, match="not of the head that config.json describes"):
        bertvision.Head.from_pretrained(folder)
    write_record(folder / "config.json", config)
    save_file({"strange": torch.zeros(2)}, folder / "model.safetensors")
    _seal(folder)
    with pytest.raises(WorkspaceError, match="not of the head that config.json describes"):
        bertvision.Head.from_pretrained(folder)


def test_no_class_is_imported_that_was_not_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A downloaded configuration runs no code, not even of a module that is installed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')\n")
    config = read_run_config(folder).model_copy(update={"head": "evil:Head"})
    write_record(folder / "config.json", config)
    _seal(folder)
    for named in (None, "learned-pooling", "evil:Other"):
        with pytest.raises(InputError, match="somebody's own"):
            bertvision.Head.from_pretrained(folder, named=named)
    with pytest.raises(SystemExit, match="it ran"):
        bertvision.Head.from_pretrained(folder, named="evil:Head")


def test_what_is_neither_folder_nor_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="no folder nowhere"):
        bertvision.Head.from_pretrained("nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WorkspaceError):
        bertvision.Head.from_pretrained(tmp_path / "empty")


def _seal(folder: Path) -> None:
    """Let the digests be those of the files: what is tested is behind them."""
    import hashlib

    from bertvision.pipelines.workspace.records import read_run_metrics

    digests = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "config.json")
    }
    metrics = read_run_metrics(folder)
    write_record(folder / "metrics.json", metrics.model_copy(update={"sha256": digests}))
    assert json.loads((folder / "metrics.json").read_text())["sha256"] == digests
