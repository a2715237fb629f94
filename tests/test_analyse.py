"""Analyses of a workspace: they measure the stored tokens, the same on every scheduler."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from byhand import change, fields
from figures import Drawing
from processes import warm_pool
from stores import record_path

import bertvision
from bertvision.errors import IncompleteSplitError, InputError, ProvenanceError, UnknownNameError
from bertvision.jobs import command
from bertvision.pipelines.analysis import request
from bertvision.pipelines.analysis.sides import told_apart
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.workspace.workspace import Workspace


@pytest.fixture
def empty(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A workspace with the shared snapshots and no activations."""
    (tmp_path / "snapshots").symlink_to(workspace.root / "snapshots")
    return Workspace(tmp_path, workspace.config)


def tokens(workspace: Workspace, tag: str) -> np.ndarray:
    """(tokens, layers, hidden) of dev, example by example."""
    split = workspace.split(tag, "dev")
    return np.concatenate([example.numpy().transpose(0, 2, 1) for example in split])


def test_cka_of_a_snapshot_with_itself_is_one_on_the_diagonal(
    workspace: Workspace, tmp_path: Path
) -> None:
    for biased in (False, True):
        result = bertvision.cka(
            "1e", "1e", biased=biased, plot=tmp_path / "cka.svg", workspace=workspace
        )
        np.testing.assert_allclose(np.diag(result.cka), 1, rtol=1e-9)
        np.testing.assert_allclose(result.cka, result.cka.T, rtol=1e-9)
        off = result.cka[~np.eye(3, dtype=bool)]
        assert (off < 1 - 1e-6).all()
        assert result.unbiased is not biased
        assert result.n_tokens == workspace.split("1e", "dev").record.tokens
    drawn = Drawing(tmp_path / "cka.svg")
    assert drawn.texts[0] == result.title()
    assert drawn.texts.count("1.00") >= 3
    assert drawn.faults() == []


def test_isotropy_measures_the_stored_tokens_and_no_fill(
    workspace: Workspace, tmp_path: Path
) -> None:
    result = bertvision.isotropy(["1e"], plot=tmp_path / "isotropy.svg", workspace=workspace)
    found = tokens(workspace, "1e").astype(np.float64)
    cls = np.stack([example.numpy()[0].T for example in workspace.split("1e", "dev")])
    for j, vectors in enumerate((found, cls.astype(np.float64))):
        n = len(vectors)
        assert result.n_vectors[0][j] == result.n_available[0][j] == n
        norms = np.linalg.norm(vectors, axis=2)
        np.testing.assert_allclose(result.mean_norm[0, j], norms.mean(axis=0), rtol=1e-6)
        unit = (vectors / norms[:, :, None]).sum(axis=0)  # (layers, hidden)
        np.testing.assert_allclose(
            result.mean_cosine[0, j], ((unit**2).sum(axis=1) - n) / (n * (n - 1)), rtol=1e-6
        )
    drawn = Drawing(tmp_path / "isotropy.svg")
    assert drawn.texts[0] == result.title()
    assert drawn.faults() == []


def test_processes_and_threads_agree_to_the_last_bit(workspace: Workspace, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    threads = bertvision.cka("0.5e", "1e", plot=plot, workspace=workspace)
    spread = bertvision.isotropy(["1e"], plot=plot, workspace=workspace)
    with warm_pool():
        processes = bertvision.cka(
            "0.5e", "1e", plot=plot, scheduler="processes", workspace=workspace
        )
        assert np.array_equal(threads.cka, processes.cka)
        assert np.array_equal(threads.cka_dropped, processes.cka_dropped)
        again = bertvision.isotropy(["1e"], plot=plot, scheduler="processes", workspace=workspace)
    assert spread.to_json() == again.to_json()


def test_results_are_plain_json_and_name_split_and_layers(
    workspace: Workspace, tmp_path: Path
) -> None:
    plot = tmp_path / "plot.svg"
    cka = bertvision.cka(
        "0.5e", "1e", max_tokens=100, seed=3, plot=plot, workspace=workspace
    ).to_json()
    assert json.loads(json.dumps(cka, allow_nan=False)) == cka
    assert (cka["x"], cka["y"], cka["layers_x"]) == ("0.5e/dev", "1e/dev", [0, 1, 2])
    assert (cka["n_tokens"], cka["seed"]) == (100, 3)
    isotropy = bertvision.isotropy(
        ["0.5e"], split="tune", max_tokens=100, plot=plot, workspace=workspace
    ).to_json()
    assert json.loads(json.dumps(isotropy, allow_nan=False)) == isotropy
    assert (isotropy["snapshots"], isotropy["name"]) == (["0.5e"], "tune")
    assert isotropy["layers"] == [0, 1, 2]
    assert 100 == isotropy["n_vectors"][0][0] < isotropy["n_available"][0][0]


def test_csv_and_frame_have_a_row_for_each_layer_or_pair_of_layers(
    workspace: Workspace, tmp_path: Path
) -> None:
    shared = {"max_tokens": 100, "workspace": workspace.root, "plot": tmp_path / "plot.svg"}
    alike = bertvision.cka("0.5e", "1e", **shared)
    command.show(alike, True, tmp_path / "cka.csv")
    spread = bertvision.isotropy("1e", **shared)
    command.show(spread, True, tmp_path / "isotropy.csv")
    pairs, layers = alike.to_pandas(), spread.to_pandas()
    assert (len(pairs), len(layers)) == (9, 6)
    one = pairs[(pairs.layer_x == 2) & (pairs.layer_y == 1)]
    assert one.cka.item() == alike.cka[2, 1] != alike.cka[1, 2]
    assert one.cka_dropped.item() == alike.cka_dropped[2, 1]
    shares = spread.explained_variance[0, :, :, 0].ravel()
    np.testing.assert_array_equal(layers.explained_variance_1, shares)
    for frame, name in ((pairs, "cka.csv"), (layers, "isotropy.csv")):
        written = pd.read_csv(tmp_path / name)
        assert list(written) == list(frame)
        numbers = frame.select_dtypes("number")
        np.testing.assert_array_equal(written[list(numbers)], numbers)


def test_plots_go_into_the_workspace_and_layers_keep_their_numbers(empty: Workspace) -> None:
    extract(empty, "1e", splits=["dev"], layers=[0, 2], encoding="float32", precision="32")
    result = bertvision.cka("1e", "1e", biased=True, workspace=empty)
    assert result.layers_x == result.layers_y == (0, 2)
    bertvision.isotropy(["1e"], workspace=empty)
    assert sorted(path.name for path in (empty.root / "analysis").iterdir()) == [
        "cka-1e-1e-dev-biased.json",
        "cka-1e-1e-dev-biased.svg",
        "isotropy-1e-dev.json",
        "isotropy-1e-dev.svg",
    ]


def test_splits_that_do_not_hold_the_same_tokens_are_refused(empty: Workspace) -> None:
    extract(empty, "0.5e", splits=["dev"], precision="32")
    task = empty.config.task.model_copy(
        update={"max_length": 64, "max_question_length": 16, "overlap": 8}
    )
    shorter = Workspace(empty.root, empty.config.model_copy(update={"task": task}))
    extract(shorter, "1e", splits=["dev"], precision="32")
    with pytest.raises(InputError, match="the plot own.png ends in '.png'"):
        bertvision.cka(
            "0.5e", "1e", plot=Path("own.png"), workspace=empty
        )  # before anything is read
    with pytest.raises(ProvenanceError, match="0.5e/dev and 1e/dev do not hold the same tokens"):
        bertvision.cka("0.5e", "1e", workspace=empty)
    assert not (empty.root / "analysis").exists()


def test_cka_joins_splits_that_are_stored_in_another_order(
    empty: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(empty, "1e", splits=["train"], precision="32", encoding="float32")
    elsewhere = empty.at(str(tmp_path / "elsewhere"))
    extract(elsewhere, "0.5e", splits=["train"], precision="32", encoding="float32")
    whole = Workspace.split
    monkeypatch.setattr(
        Workspace, "split", lambda s, tag, n: whole(elsewhere if tag == "0.5e" else s, tag, n)
    )
    monkeypatch.setattr(request, "check_stored", lambda *place, **asked: None)
    straight = bertvision.cka("0.5e", "1e", split="train", workspace=empty)
    shutil.rmtree(tmp_path / "elsewhere")
    extract(
        elsewhere, "0.5e", splits=["train"], precision="32", encoding="float32", shard_tokens=700
    )
    one, other = elsewhere.split("0.5e", "train"), empty.split("1e", "train")
    assert not np.array_equal(one.plan.example_id, other.plan.example_id)
    joined = bertvision.cka(
        "0.5e", "1e", split="train", seed=1, workspace=empty
    )  # which reuses nothing
    np.testing.assert_allclose(joined.cka, straight.cka, atol=1e-4)


@pytest.fixture
def beside(empty: Workspace, tmp_path: Path) -> Workspace:
    """Another workspace with the same data and snapshots, and no activations."""
    root = tmp_path / "other" / "encoder-b"
    root.mkdir(parents=True)
    shutil.copytree(empty.root / "snapshots", root / "snapshots")
    empty.config.write(root / "bertvision.yaml")
    return Workspace.find(root)


def test_cka_sets_snapshots_of_two_workspaces_side_by_side(
    empty: Workspace, beside: Workspace
) -> None:
    shared: dict[str, Any] = {"splits": ["train"], "precision": "32", "encoding": "float32"}
    for tag in ("0.5e", "1e"):
        extract(empty, tag, **shared)
    extract(beside, "1e", **shared, shard_tokens=700)  # in another order
    within = bertvision.cka("0.5e", "1e", split="train", workspace=empty)
    found = bertvision.cka("0.5e", "1e", split="train", beside=beside, workspace=empty)
    np.testing.assert_allclose(found.cka, within.cka, atol=1e-4)
    assert (found.x, found.y) == (f"{empty.root.name}: 0.5e/train", "encoder-b: 1e/train")
    kept = fields(empty.root / "analysis" / "cka-0.5e-1e-train-with-encoder-b.json")
    assert kept["command"] == "bertvision cka 0.5e 1e --split train --with other/encoder-b"
    assert set(kept["weights_sha256"]) == {"0.5e"}  # of those that are the workspace's own
    assert set(kept["splits_sha256"]) == {"0.5e/train", "encoder-b: 1e/train"}
    extract(beside, "0.5e", **shared)
    alike = bertvision.cca("0.5e", "0.5e", split="train", beside=beside, workspace=empty)
    np.testing.assert_allclose(np.diag(alike.pwcca), 1, atol=1e-3)
    change(beside.snapshot_dir("1e") / "snapshot.json", weights_sha256="0" * 64)
    with pytest.raises(ProvenanceError, match="was extracted with other weights than .*encoder-b"):
        bertvision.cka("0.5e", "1e", split="train", beside=beside, workspace=empty)


def test_workspaces_whose_tokens_differ_are_refused_by_name(
    empty: Workspace, beside: Workspace
) -> None:
    extract(empty, "1e", splits=["dev"], precision="32")
    task = beside.config.task.model_copy(
        update={"max_length": 64, "max_question_length": 16, "overlap": 8}
    )
    shorter = Workspace(beside.root, beside.config.model_copy(update={"task": task}))
    extract(shorter, "1e", splits=["dev"], precision="32")
    with pytest.raises(
        ProvenanceError,
        match="1e/dev in .*/activations and 1e/dev in .*/encoder-b/activations do not hold the "
        "same tokens .they have ",
    ):
        bertvision.cka("1e", "1e", beside=beside, workspace=empty)


def test_names_of_workspaces_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    def names(*roots: str) -> list[str]:
        return told_apart([SimpleNamespace(root=Path(root)) for root in roots])  # type: ignore[misc]

    assert names("/a/squad", "/a/sst2") == ["squad", "sst2"]
    assert names("/a/bert/squad", "/a/mpnet/squad") == ["bert-squad", "mpnet-squad"]
    assert names("/squad", "/a/squad") == ["squad", "a-squad"]


@pytest.mark.parametrize(
    "run",
    [
        lambda s, tag: bertvision.isotropy([tag], workspace=s),
        lambda s, tag: bertvision.cka(tag, tag, workspace=s),
    ],
)
def test_hidden_states_of_other_weights_than_the_snapshot_has_are_refused(
    empty: Workspace, run: Callable[[Workspace, str], object]
) -> None:
    extract(empty, "1e", splits=["dev"], precision="32")
    run(empty, "1e")
    (empty.root / "snapshots").rename(empty.root / "before")
    shutil.copytree(empty.root / "before", empty.root / "snapshots")
    change(empty.snapshot_dir("1e") / "snapshot.json", weights_sha256="0" * 64)
    with pytest.raises(
        ProvenanceError,
        match="1e/dev in .* was extracted with other weights than .*snapshots/1e has now: "
        "`bertvision store rm 1e/dev`, then `bertvision extract --checkpoint 1e --split dev`",
    ):
        run(empty, "1e")


def test_an_unfinished_or_unknown_split_is_refused_with_the_command_that_helps(
    empty: Workspace,
) -> None:
    extract(empty, "1e", splits=["dev"], precision="32", shard_tokens=512)
    record_path(empty.split("1e", "dev"), 1).unlink()
    for run in (
        lambda s, tag: bertvision.isotropy([tag], workspace=s),
        lambda s, tag: bertvision.cka(tag, "1e", workspace=s),
    ):
        with pytest.raises(IncompleteSplitError, match="lacks 1 of .* shards .*bertvision extract"):
            run(empty, "1e")
        with pytest.raises(
            UnknownNameError, match="0.5e.*it holds 1e; `bertvision extract --checkpoint 0.5e`"
        ):
            run(empty, "0.5e")
