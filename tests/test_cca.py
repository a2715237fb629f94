"""SVCCA and PWCCA: known answers, invariances, and the sums against whole matrices."""

from __future__ import annotations

import warnings
from typing import Any

import dask.array as da
import numpy as np
import pytest
from clusters import cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import warm_pool

from bertvision.errors import BertvisionWarning, InputError, NonFiniteError
from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.cca import CcaResult
from bertvision.pipelines.analysis.cca import cca_of_arrays as cca

N = 240


def related(seed: int = 0, n: int = N) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, 8) and (n, 2, 6) that share part of their variation, with means far from zero."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3, 8)) * np.linspace(3, 0.3, 8) + 5
    y = np.einsum("nk,jkd->njd", x.reshape(n, -1), rng.standard_normal((2, 24, 6)))
    return x, y + rng.standard_normal((n, 2, 6)) * 4 - 7


def run(x: np.ndarray, y: np.ndarray, rows: int = 70, **options: Any) -> CcaResult:
    arrays = [da.from_array(a, chunks=(rows, *a.shape[1:])) for a in (x, y)]
    return cca(arrays[0], arrays[0] if x is y else arrays[1], **{"ridge": 0.0} | options)


def naive(x: np.ndarray, y: np.ndarray, keep: float) -> tuple[float, float]:
    """PWCCA and SVCCA of two layers, from orthonormal bases of all tokens (Björck & Golub 1973)."""
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    bases = []
    for a in (x, y):
        u, s, _ = np.linalg.svd(a, full_matrices=False)
        share = np.cumsum(s**2) / (s**2).sum()
        bases.append(u[:, : int(np.searchsorted(share, keep - 1e-12)) + 1])
    svcca = np.linalg.svd(bases[0].T @ bases[1], compute_uv=False).mean()
    if y.shape[1] < x.shape[1]:
        x, y = y, x
    qx, qy = (np.linalg.qr(a)[0] for a in (x, y))
    u, rho, _ = np.linalg.svd(qx.T @ qy, full_matrices=False)
    weights = np.abs((qx @ u).T @ x).sum(axis=1)
    return float((weights * rho).sum() / weights.sum()), float(svcca)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float64, so that nothing is left but the formula; of cut blocks."""
    monkeypatch.setattr(kernels, "PRODUCTS", np.float64)
    monkeypatch.setattr(kernels, "CHUNK", 24)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("keep", [0.99, 0.7, 1.0])
def test_both_equal_those_of_all_tokens_at_once(keep: float) -> None:
    x, y = related()
    for one, other in ((x, y), (y, x), (x, x)):
        found = run(one, other, keep=keep)
        for i in range(one.shape[1]):
            for j in range(other.shape[1]):
                expected = naive(one[:, i], other[:, j], keep)
                assert found.pwcca[i, j] == pytest.approx(expected[0], abs=1e-9)
                assert found.svcca[i, j] == pytest.approx(expected[1], abs=1e-9)


@pytest.mark.usefixtures("exact")
def test_the_authors_code_says_the_same() -> None:
    """Values of github.com/google/svcca (1f3fbf1) with epsilon 0, of the same hidden states.

    Its ``cca_core`` has the correlations and the directions. Its ``pwcca.py`` projects on other
    vectors than these, without the inverse root of the covariance, so that the weights below are
    those of eq. 4 of the paper on the directions of ``cca_core``.
    """
    found = run(*related(), keep=1.0)
    means = [
        [0.4139034000, 0.4638190239],
        [0.3898515002, 0.4465482571],
        [0.5309229019, 0.4651897630],
    ]
    weighted = [
        [0.3856270890, 0.4957687598],
        [0.3964359589, 0.4414605544],
        [0.5718424199, 0.4503736044],
    ]
    np.testing.assert_allclose(found.svcca, means, atol=1e-9)
    np.testing.assert_allclose(found.pwcca, weighted, atol=1e-9)


@given(st.integers(0, 2**31), st.floats(1e-9, 1e9), st.floats(-1e3, 1e3))
@settings(max_examples=10)
def test_products_in_float32_leave_five_digits(seed: int, scale: float, shift: float) -> None:
    x, y = related(seed)
    found = run(scale * (x + shift), y)
    expected = [[naive(a, b, 0.99) for b in y.swapaxes(0, 1)] for a in x.swapaxes(0, 1)]
    np.testing.assert_allclose(found.pwcca, np.array(expected)[..., 0], atol=1e-5)
    np.testing.assert_allclose(found.svcca, np.array(expected)[..., 1], atol=1e-5)


@given(st.integers(0, 2**31), st.floats(1, 100))
@settings(max_examples=10)
def test_any_invertible_map_of_all_directions_changes_nothing(seed: int, condition: float) -> None:
    """Where all are kept; and of PWCCA, whose weights are of x, a map of y."""
    x, y = related()
    y = np.concatenate([y, y[:, :1] ** 2 - 50], axis=1)[:, :, :4].repeat(2, axis=2)
    y = y + np.random.default_rng(1).standard_normal(y.shape)  # as many channels as x
    rng = np.random.default_rng(seed)
    maps = [np.linalg.qr(rng.standard_normal((8, 8)))[0] for _ in range(2)]
    mapping = maps[0] * np.geomspace(1, condition, 8) @ maps[1]
    before = run(x, y, keep=1.0)
    after = run(x, y @ mapping + rng.standard_normal(8) * 100, keep=1.0)
    np.testing.assert_allclose(after.svcca, before.svcca, atol=1e-5)
    np.testing.assert_allclose(after.pwcca, before.pwcca, atol=1e-5)
    turned = run(x @ mapping, y, keep=1.0)
    np.testing.assert_allclose(turned.svcca, before.svcca, atol=1e-5)


def test_of_most_of_the_variance_a_map_that_stretches_changes_what_is_kept() -> None:
    x, y = related()
    stretched = x * np.geomspace(1e-2, 1e2, 8)
    assert run(stretched, y).kept_x != run(x, y).kept_x
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))
    for moved in (x @ rotation, 7 * x, x - 30):
        assert run(moved, y).kept_x == run(x, y).kept_x
        np.testing.assert_allclose(run(moved, y).svcca, run(x, y).svcca, atol=1e-5)


def test_a_layer_and_a_map_of_it_are_one_and_independent_ones_are_as_by_chance() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 4000, 1, 20))
    mapped = x @ rng.standard_normal((20, 20))
    for result in (run(x, x), run(x, mapped, keep=1.0)):
        np.testing.assert_allclose([result.pwcca, result.svcca], 1, atol=1e-5)
    # the mean singular value of the product of two random projections, about 0.85 √(d / n)
    assert run(x, y).svcca.item() == pytest.approx(0.85 * np.sqrt(20 / 4000), rel=0.1)


def test_a_direction_weighs_what_it_makes_up_of_its_layer() -> None:
    """Nearly all of x is one channel, which y holds too: PWCCA is near 1, SVCCA of all is not."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 2000, 1, 10))
    x[..., 0] *= 1000
    y[..., 0] = x[..., 0]
    found = run(x, y, keep=1.0)
    assert found.pwcca.item() > 0.9
    assert found.svcca.item() < 0.2
    assert run(x, y).kept_x == (1,)
    assert run(y, x).svcca.item() == pytest.approx(1, abs=1e-5)


def test_a_ridge_takes_directions_of_little_variance_out() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 1, 10))
    x[..., 5:] *= 1e-4
    y = x + np.array([0.0] * 5 + [1e-9] * 5) * rng.standard_normal(x.shape)
    assert run(x, y, keep=1.0).svcca.item() == pytest.approx(1, abs=1e-5)
    assert run(x, y, keep=1.0, ridge=1e-2).svcca.item() == pytest.approx(0.5, abs=0.01)


@given(st.integers(3, 240))
@settings(max_examples=10)
def test_any_blocks_give_the_same(rows: int) -> None:
    x, y = related()
    one, other = run(x, y, rows=rows), run(x, y, rows=N)
    np.testing.assert_allclose(one.pwcca, other.pwcca, atol=1e-6)
    np.testing.assert_allclose(one.svcca, other.svcca, atol=1e-6)


def test_order_of_tokens_and_groups_of_layers_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = related()
    whole = run(x, y)
    order = np.random.default_rng(5).permutation(N)
    joined = run(x, y[order], places=np.argsort(order))
    np.testing.assert_allclose(joined.pwcca, whole.pwcca, atol=1e-5)
    monkeypatch.setattr(kernels, "GROUP_BYTES", 2 * 8 * 8 * 6)
    for one, other in ((x, y), (x, x)):
        np.testing.assert_allclose(
            run(one, other).pwcca,
            run(one, one.copy()).pwcca if one is other else whole.pwcca,
            atol=1e-6,
        )


def test_schedulers_agree_bit_for_bit() -> None:
    x, y = related()
    threads = run(x, y)
    with warm_pool():
        processes = run(x, y, scheduler="processes")
    with cluster() as made:
        tcp = run(x, y, scheduler=made.scheduler_address)
    for other in (processes, tcp):
        np.testing.assert_array_equal(other.pwcca, threads.pwcca)
        np.testing.assert_array_equal(other.svcca, threads.svcca)


def test_few_tokens_are_warned_of_and_the_result_says_so() -> None:
    x, y = related(n=79)
    with pytest.warns(BertvisionWarning, match="79 tokens are few for .* of 8 channels.* 80 or"):
        found = run(x, y)
    assert "take 80 or more" in found.table()
    with warnings.catch_warnings(action="error"):
        enough = run(*related(n=80))
    assert enough.remarks() == []


def test_a_layer_that_does_not_vary_has_no_correlation() -> None:
    x, y = related()
    x[:, 1] = 2.0
    found = run(x, y)
    assert np.isnan(found.pwcca[1]).all()
    assert np.isnan(found.svcca[1]).all()
    assert np.isfinite(found.pwcca[[0, 2]]).all()
    assert found.kept_x[1] == 0


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_bad_values_and_options_are_named() -> None:
    x, y = related()
    for options, message in (
        ({"keep": 0.0}, "keep is 0.0; give a share"),
        ({"keep": 1.1}, "keep is 1.1"),
        ({"ridge": -1e-6}, "ridge is -1e-06"),
    ):
        with pytest.raises(InputError, match=message):
            run(x, y, **options)
    with pytest.raises(InputError, match="more than one token"):
        run(x[:1], y[:1])
    y[3, 1, 2] = np.nan
    with pytest.raises(NonFiniteError, match="in 1 of 2 layers"):
        run(x, y)
