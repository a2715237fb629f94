"""RSA: known answers, invariances, the sums against whole matrices, and the join of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from figures import Drawing
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import warm_pool
from scipy.spatial.distance import pdist
from scipy.stats import pearsonr
from workspaces import PEOPLE

import bertvision
from bertvision.errors import InputError, NonFiniteError, ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis import rsa as rsa_module
from bertvision.pipelines.analysis.rsa import Paired, RsaResult
from bertvision.pipelines.analysis.rsa import rsa_of_arrays as rsa
from bertvision.pipelines.analysis.sides import joined_rows
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.workspace.workspace import FILE, Workspace

N = 120


def related(seed: int = 0, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, 8) and (n, 2, 6) that share part of their variation, with means away from zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3, 8)) * np.linspace(3, 0.3, 8) + 1
    y = np.einsum("nk,jkd->njd", x.reshape(n, -1), rng.standard_normal((2, 24, 6)))
    return x, y + rng.standard_normal((n, 2, 6)) * 4 - 7


def paired(x: np.ndarray, y: np.ndarray, rows: int = 50) -> Paired:
    both = [da.from_array(a, chunks=(rows, *a.shape[1:])) for a in (x, y)]
    return Paired(both[0], both[0] if x is y else both[1], np.arange(len(x)), np.arange(len(y)))


def run(x: np.ndarray, y: np.ndarray, rows: int = 50, **options: Any) -> RsaResult:
    options = {"n_tokens": N, "repeats": 1} | options
    return rsa({"dev": paired(x, y, rows)}, **options)


def reference(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """SciPy's cosine distances of all pairs, and its Pearson's correlation."""
    distances = [[pdist(a[:, i], "cosine") for i in range(a.shape[1])] for a in (x, y)]
    return np.array([[pearsonr(a, b).statistic for b in distances[1]] for a in distances[0]])


def by_token(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Each row of the cosine matrices without its diagonal, correlated, averaged."""
    kernels = []
    for a in (x, y):
        unit = a / np.linalg.norm(a, axis=2, keepdims=True)
        kernels.append([unit[:, i] @ unit[:, i].T for i in range(a.shape[1])])
    rest = ~np.eye(len(x), dtype=bool)
    rows = [[[k[t][rest[t]] for t in range(len(x))] for k in side] for side in kernels]
    return np.array(
        [
            [
                np.mean([pearsonr(*pair).statistic for pair in zip(k, m, strict=True)])
                for m in rows[1]
            ]
            for k in rows[0]
        ]
    )


def test_both_variants_equal_scipy_on_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rsa_module, "ROWS", 24)
    x, y = related()
    found = run(x, y)
    np.testing.assert_allclose(found.of_pairs[0, 0], reference(x, y), atol=1e-6)
    np.testing.assert_allclose(found.of_tokens[0, 0], by_token(x, y), atol=1e-6)


def test_the_diagonal_does_not_enter() -> None:
    # with it, unrelated tokens would correlate: every token is alike to itself in both
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, N, 1, 400))
    found = run(x, y)
    assert abs(found.of_pairs.item()) < 0.05
    assert abs(found.of_tokens.item()) < 0.05
    kernels = [np.corrcoef(a[:, 0]).ravel() for a in (x, y)]
    assert np.corrcoef(kernels)[0, 1] > 0.6


def test_a_layer_beside_itself_is_one() -> None:
    x, _ = related()
    found = run(x, x)
    np.testing.assert_allclose(np.einsum("srii->sri", found.of_pairs), 1, atol=1e-12)
    np.testing.assert_allclose(np.einsum("srii->sri", found.of_tokens), 1, atol=1e-12)
    np.testing.assert_allclose(found.of_pairs[0, 0], found.of_pairs[0, 0].T, atol=1e-12)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=10)
def test_rotation_and_lengths_of_tokens_change_nothing_and_translation_does(seed: int) -> None:
    x, y = related()
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    moved = (x @ rotation) * rng.uniform(0.01, 100, (N, 1, 1))
    before = run(x, y)
    after = run(moved, y)
    np.testing.assert_allclose(after.of_pairs, before.of_pairs, atol=1e-6)
    np.testing.assert_allclose(after.of_tokens, before.of_tokens, atol=1e-6)
    assert np.abs(run(x + 3, y).of_pairs - before.of_pairs).max() > 0.01


@given(st.integers(0, 2**31), st.integers(7, 90))
@settings(deadline=None, max_examples=10)
def test_tokens_are_joined_by_their_rows_whatever_the_order_and_the_chunks(
    seed: int, rows: int
) -> None:
    x, y = related()
    order = np.random.default_rng(seed).permutation(N)
    place = np.argsort(order)  # row of each token of y
    split = paired(x, y[order], rows)._replace(rows_y=place)
    options: dict[str, Any] = {"n_tokens": 40, "repeats": 2, "seed": 3}
    found, straight = rsa({"dev": split}, **options), run(x, y, **options)
    np.testing.assert_allclose(found.of_pairs, straight.of_pairs, atol=1e-6)
    by_row = rsa({"dev": split._replace(rows_y=np.arange(N))}, **options)
    assert np.abs(by_row.of_pairs - straight.of_pairs).max() > 0.05


def test_schedulers_agree_bit_for_bit() -> None:
    x, y = related()
    options: dict[str, Any] = {"n_tokens": 80, "repeats": 2}
    threads = run(x, y, **options)
    with warm_pool():
        processes = run(x, y, scheduler="processes", **options)
    np.testing.assert_array_equal(processes.of_pairs, threads.of_pairs)
    np.testing.assert_array_equal(processes.of_tokens, threads.of_tokens)


def test_repeats_are_other_samples_and_all_tokens_are_one() -> None:
    x, y = related()
    found = run(x, y, n_tokens=60, repeats=4, seed=1)
    assert len(np.unique(found.of_pairs[0, :, 0, 0])) == 4
    again = run(x, y, n_tokens=60, repeats=4, seed=1)
    np.testing.assert_array_equal(again.of_pairs, found.of_pairs)
    row = found.rows()[0]
    assert row["rsa"] == pytest.approx(found.of_pairs[0, :, 0, 0].mean())
    assert row["rsa_sd"] == pytest.approx(found.of_pairs[0, :, 0, 0].std(ddof=1))
    whole = run(x, y, n_tokens=500, repeats=4)
    assert whole.n_tokens == (N,)
    assert whole.rows()[0]["rsa_sd"] is None
    assert "All tokens of dev entered: there is one sample of them." in whole.table()


def test_splits_stand_side_by_side_and_the_result_comes_back_from_json(tmp_path: Path) -> None:
    x, y = related()
    found = rsa(
        {"dev": paired(x, y), "other-dev": paired(*related(5))},
        n_tokens=60,
        repeats=3,
        names=("0e", "1e"),
        layers_x=(0, 3, 6),
        layers_y=(0, 6),
    )
    lines = found.table().splitlines()
    assert lines[0] == "RSA, 0e × 1e, 3 × 60 of 120 tokens of dev, 60 of 120 tokens of other-dev"
    mean, sd = found.of_pairs[1, :, 2, 1].mean(), found.of_pairs[1, :, 2, 1].std(ddof=1)
    (line,) = (line for line in lines if line.split()[:2] == ["6", "other-dev"])
    assert f"{mean:.3f} ± {sd:.3f}" in line
    values = json.loads(json.dumps(found.to_json(), allow_nan=False))
    again = RsaResult.from_json(values)
    assert again.to_json() == found.to_json()
    np.testing.assert_array_equal(again.of_tokens, found.of_tokens)
    found.figure().save(tmp_path / "rsa.svg")
    drawn = Drawing(tmp_path / "rsa.svg")
    assert drawn.faults() == []
    assert {found.title(), "layer of 0e"} <= set(drawn.texts)
    assert "RSA by token of the same layer" in " ".join(drawn.texts)


def test_a_token_without_direction_leaves_its_layer_without_a_value() -> None:
    x, y = related()
    x[5, 1] = 0
    found = run(x, y)
    assert np.isnan(found.of_pairs[0, 0, 1]).all()
    assert np.isfinite(found.of_pairs[0, 0, [0, 2]]).all()
    assert found.rows()[2]["rsa"] is None


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_bad_values_and_options_are_named() -> None:
    x, y = related()
    for options in ({"n_tokens": 2}, {"repeats": 0}):
        with pytest.raises(InputError, match="give at least 3 tokens and 1 repeat"):
            run(x, y, **options)
    with pytest.raises(InputError, match="dev has 2, give at least 3"):
        run(x[:2], y[:2])
    y[3, 1, 2] = np.inf
    with pytest.raises(NonFiniteError, match="in 1 of 2 layers"):
        run(x, y)


@pytest.fixture
def empty(workspace: Workspace, tmp_path: Path) -> Workspace:
    """A workspace with the shared snapshots and no activations."""
    (tmp_path / "snapshots").symlink_to(workspace.root / "snapshots")
    return Workspace(tmp_path, workspace.config)


def test_splits_stored_in_another_order_are_joined_on_example_and_position(
    empty: Workspace, tmp_path: Path
) -> None:
    extract(empty, "1e", splits=["train"], precision="32", encoding="float32")
    elsewhere = empty.at(str(tmp_path / "elsewhere"))
    extract(elsewhere, "1e", splits=["train"], precision="32", encoding="float32", shard_tokens=700)
    one, other = (space.split("1e", "train") for space in (empty, elsewhere))
    assert not np.array_equal(one.plan.example_id, other.plan.example_id)
    rows = joined_rows((one, other))
    states = [
        split.dask().compute(scheduler="threads")[r]
        for split, r in zip((one, other), rows, strict=True)
    ]
    np.testing.assert_allclose(states[0], states[1], atol=1e-4)
    paired = Paired(one.dask(), other.dask(), *rows)
    found = rsa({"train": paired}, n_tokens=200, repeats=2)
    np.testing.assert_allclose(np.einsum("srii->sri", found.of_pairs), 1, atol=1e-6)


def test_splits_of_other_tokens_are_refused_by_name(empty: Workspace) -> None:
    extract(empty, "0.5e", splits=["dev"], precision="32")
    task = empty.config.task.model_copy(
        update={"max_length": 64, "max_question_length": 16, "overlap": 8}
    )
    shorter = Workspace(empty.root, empty.config.model_copy(update={"task": task}))
    extract(shorter, "1e", splits=["dev"], precision="32")
    with pytest.raises(ProvenanceError, match="0.5e/dev and 1e/dev do not hold the same tokens"):
        bertvision.rsa("0.5e", "1e", workspace=empty)


def test_a_command_given_again_reuses_what_is_kept_until_something_differs(
    empty: Workspace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract(empty, "0.5e", splits=["dev"], precision="32")
    extract(empty, "1e", splits=["dev"], precision="32")
    measured = []
    real = ActivationSplit.dask
    monkeypatch.setattr(ActivationSplit, "dask", lambda s: measured.append(s.name) or real(s))
    caplog.set_level("INFO")
    options: dict[str, Any] = {"max_tokens": 100, "repeats": 2}
    first = bertvision.rsa("0.5e", "1e", **options, workspace=empty)
    assert measured == ["0.5e/dev", "1e/dev"]
    again = bertvision.rsa("0.5e", "1e", **options, workspace=empty)
    assert len(measured) == 2
    assert again.to_json() == first.to_json()
    assert "as it was measured before, with the same settings and weights" in caplog.text
    bertvision.rsa("0.5e", "1e", **options, seed=1, workspace=empty)
    assert len(measured) == 4
    elsewhere = empty.at(str(empty.root / "elsewhere"))  # the same weights in another encoding
    for tag in ("0.5e", "1e"):
        extract(elsewhere, tag, splits=["dev"], precision="32", encoding="float32")
    bertvision.rsa("0.5e", "1e", **options, seed=1, workspace=elsewhere)
    assert len(measured) == 6
    kept = empty.root / "analysis" / "rsa-0.5e-1e-dev.json"
    kept.write_text("{")
    bertvision.rsa("0.5e", "1e", **options, seed=1, workspace=elsewhere)
    assert len(measured) == 8
    assert "measured anew" in caplog.text


def test_the_data_of_the_task_and_those_of_another_domain_stand_side_by_side(
    empty: Workspace, tmp_path: Path
) -> None:
    """As documented: another data set, read by the same encoders, beside the task's own split."""
    mpqa = tmp_path / "mpqa.all"
    mpqa.write_text("".join(f"{i % 2} {PEOPLE[i % 4]} lives in {i} .\n" for i in range(40)))
    empty.config.write(empty.root / FILE)
    both: dict[str, Any] = {"checkpoint": "0.5e,1e", "workspace": empty.root}
    bertvision.extract(**both, split="dev", encoding="float32")
    bertvision.extract(**both, task="mpqa", data=mpqa, pool="none", encoding="float32")
    options: dict[str, Any] = {"max_tokens": 100, "repeats": 2, "workspace": empty.root}
    found = bertvision.rsa("0.5e", "1e", split="dev,mpqa-all", **options)
    assert found.splits == ("dev", "mpqa-all")
    assert found.n_available[1] == empty.split("1e", "mpqa-all").record.tokens >= 40 * 6
    for k, split in enumerate(found.splits):
        alone = bertvision.rsa("0.5e", "1e", split=split, **options)
        np.testing.assert_array_equal(found.of_pairs[k], alone.of_pairs[0])
    assert {row["split"] for row in found.shown()} == {"dev", "mpqa-all"}
    drawn = Drawing(empty.root / "analysis" / "rsa-0.5e-1e-dev+mpqa-all.svg")
    assert drawn.faults() == []
    assert {"dev", "mpqa-all"} <= set(drawn.texts)
