"""Isotropy: known answers, and the streamed statistics against all pairs of tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from clusters import cluster
from figures import Drawing
from hypothesis import given, settings
from hypothesis import strategies as st

from bertvision.errors import InputError
from bertvision.pipelines.analysis import moments
from bertvision.pipelines.analysis.isotropy import IsotropyResult
from bertvision.pipelines.analysis.isotropy import isotropy_of_arrays as isotropy


def gaussian(n: int, layers: int, hidden: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, layers, hidden))


def run(x: np.ndarray, *, rows: int = 70, **options: Any) -> IsotropyResult:
    options.setdefault("components", (1, 3))
    return isotropy({"1e": da.from_array(x, chunks=(rows, *x.shape[1:]))}, **options)


def of(result: IsotropyResult, name: str) -> Any:
    """A statistic of the only snapshot and set, by layer."""
    return getattr(result, name)[0][0]


def test_mean_cosine_is_that_of_all_pairs_of_different_tokens() -> None:
    x = gaussian(150, 2, 6) + [[0.0], [1.5]]
    unit = x / np.linalg.norm(x, axis=2, keepdims=True)
    pairs = ~np.eye(150, dtype=bool)
    expected = [(unit[:, i] @ unit[:, i].T)[pairs].mean() for i in range(2)]
    np.testing.assert_allclose(of(run(x), "mean_cosine"), expected, rtol=1e-11)


def test_parallel_tokens_have_cosine_one_and_one_component() -> None:
    lengths = np.linspace(1, 9, 100)[:, None, None]
    result = run(lengths * np.arange(1.0, 7.0))
    assert of(result, "mean_cosine")[0] == pytest.approx(1, abs=1e-12)
    assert of(result, "explained_variance")[0] == pytest.approx([1, 1], abs=1e-12)


def test_opposite_tokens_have_the_least_possible_mean_cosine() -> None:
    # half along v, half along −v: Σu = 0, hence −1 / (n − 1)
    signs = np.where(np.arange(100) % 2, 1.0, -1.0)[:, None, None]
    assert of(run(signs * np.ones(6)), "mean_cosine")[0] == pytest.approx(-1 / 99, rel=1e-12)


def test_cosine_ignores_the_length_of_tokens_and_mean_norm_does_not() -> None:
    x = gaussian(150, 2, 6) + 1
    scale = np.random.default_rng(3).uniform(0.1, 10, (150, 1, 1))
    one, scaled = run(x), run(x * scale)
    np.testing.assert_allclose(of(scaled, "mean_cosine"), of(one, "mean_cosine"), rtol=1e-11)
    expected = np.linalg.norm(x * scale, axis=2).mean(axis=0)
    np.testing.assert_allclose(of(scaled, "mean_norm"), expected, rtol=1e-12)


def test_white_data_explain_k_of_d() -> None:
    x = gaussian(300, 1, 8)[:, 0]
    white, _ = np.linalg.qr(x - x.mean(axis=0))  # orthonormal columns of mean zero
    result = run(white[:, None], components=(1, 3, 8))
    np.testing.assert_allclose(of(result, "explained_variance")[0], [1 / 8, 3 / 8, 1], rtol=1e-11)


def test_explained_variance_is_that_of_the_spectrum_and_ignores_the_mean() -> None:
    scale = np.sqrt([8.0, 4.0, 2.0, 1.0, 1.0])
    x = gaussian(300, 1, 5)[:, 0]
    white, _ = np.linalg.qr(x - x.mean(axis=0))
    rotation, _ = np.linalg.qr(gaussian(5, 1, 5, seed=2)[:, 0])
    result = run((white * scale @ rotation + 30)[:, None], components=(1, 2, 3))
    shares = of(result, "explained_variance")[0]
    np.testing.assert_allclose(shares, [8 / 16, 12 / 16, 14 / 16], rtol=1e-9)


def test_an_outlier_channel_is_found_by_its_mean_and_by_its_sd_and_adds_most_cosine() -> None:
    x = gaussian(500, 3, 64)
    x[:, 1, 17] += 25
    x[:, 2, 40] *= 25
    result = run(x)
    assert of(result, "outlier_channels") == ((), (17,), (40,))
    assert of(result, "top_channel")[1] == 17
    assert of(result, "top_cosine")[1] == pytest.approx(of(result, "mean_cosine")[1], rel=0.05)
    assert of(result, "top_cosine")[1] > 0.8


def test_contributions_of_channels_to_the_cosine_add_up() -> None:
    x = gaussian(100, 1, 2) + [3.0, 0.0]
    both = run(x, components=(1,))
    unit = x[:, 0] / np.linalg.norm(x[:, 0], axis=1, keepdims=True)
    pairs = ~np.eye(100, dtype=bool)
    by_channel = [np.outer(u, u)[pairs].mean() for u in unit.T]
    assert of(both, "top_channel") == (0,)
    assert of(both, "top_cosine")[0] == pytest.approx(by_channel[0], rel=1e-11)
    assert of(both, "mean_cosine")[0] == pytest.approx(sum(by_channel), rel=1e-11)


def test_processes_and_threads_and_any_blocks_agree() -> None:
    x = gaussian(200, 2, 6) + 1
    threads = run(x, scheduler="threads")
    with dask.config.set(num_workers=1):  # a fresh process, which takes seconds to start
        processes = run(x, scheduler="processes")
    one_block = run(x, rows=200)
    assert processes.to_json() == threads.to_json()
    for name in ("mean_cosine", "mean_norm", "explained_variance", "log_ratio"):
        np.testing.assert_allclose(getattr(one_block, name), getattr(threads, name), rtol=1e-11)


def test_a_sample_is_seeded_and_counted() -> None:
    x = gaussian(400, 1, 6) + 1
    one, same, other = (run(x, max_tokens=90, seed=seed) for seed in (0, 0, 1))
    assert (one.n_vectors, one.n_available) == (((90,),), ((400,),))
    assert of(one, "mean_cosine") == of(same, "mean_cosine")
    assert of(one, "mean_cosine") != of(other, "mean_cosine")


def test_a_layer_that_does_not_vary_is_null_in_json() -> None:
    x = gaussian(100, 2, 6)
    x[:, 1] = 2.0
    again = json.loads(json.dumps(run(x).to_json(), allow_nan=False))

    def kept(name: str) -> list[Any]:
        return again[name][0][0]

    assert kept("explained_variance")[1] == [None, None]
    assert kept("mean_cosine")[1] == pytest.approx(1)
    assert kept("mean_share")[1] == pytest.approx(1)
    for name in ("corrected_cosine", "corrected_ratio", "mean_correlation", "dominant"):
        assert kept(name)[1] is None
        assert kept(name)[0] is not None


def test_table_has_a_row_per_layer_for_each_snapshot_and_set() -> None:
    x = gaussian(500, 2, 64)
    x[:, 1, 17] += 25
    states = {tag: da.from_array(x, chunks=(100, 2, 64)) for tag in ("0e", "0.3e")}
    first = dict.fromkeys(states, np.arange(0, 500, 5))
    result = isotropy(states, first=first, name="dev", layers=(0, 6))
    title, *tables, legend = result.table().split("\n\n")
    assert title == "Isotropy, 0e, 0.3e, dev, 500 tokens and 100 first tokens"
    assert "EV k" in legend
    places = [table.splitlines()[0] for table in tables]
    assert places == ["0e, tokens", "0e, first tokens", "0.3e, tokens", "0.3e, first tokens"]
    lines = tables[2].splitlines()
    norm, cosine = result.mean_norm[1, 0, 1], result.mean_cosine[1, 0, 1]
    assert lines[-1].split()[:4] == ["6", f"{norm:.2f}", f"{cosine:.3f}", "17"]
    assert lines[-1].split()[-2:] == ["1", "17"]
    assert lines[-2].split()[-2:] == ["0", "–"]


def test_outlier_channels_that_come_and_go_are_named() -> None:
    x = gaussian(500, 2, 64)
    later = x.copy()
    x[:, 1, [17, 40]] += 25
    later[:, 1, [40, 50]] += 25
    both = {"0e": x, "1e": later}
    result = isotropy(
        {tag: da.from_array(of, chunks=(100, 2, 64)) for tag, of in both.items()}, outlier_sd=4.0
    )
    assert result.moved(1, 0, 1) == ([50], [17])
    assert result.moved(0, 0, 1) == ([], [])
    (row,) = (r for r in result.rows() if (r["snapshot"], r["layer"]) == ("1e", 1))
    assert (row["outlier_channels"], row["new_outliers"]) == ([40, 50], [50])
    assert row["gone_outliers"] == [17]
    (shown,) = (r for r in result.shown() if (r["snapshot"], r["layer"]) == ("1e", 1))
    assert shown["channels"] == "40 +50 −17"


def log_z(vectors: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The partition function by its definition, in both senses of each direction."""
    along = vectors @ directions
    return np.concatenate([np.log(np.exp(sign * along).sum(axis=0)) for sign in (1, -1)])


def test_isotropy_and_its_correction_are_those_of_the_definition() -> None:
    x = gaussian(150, 2, 8) * np.linspace(0.2, 2, 8) + np.linspace(0, 1, 8)
    result = run(x)
    for layer in range(2):
        vectors = x[:, layer]
        value = log_z(vectors, np.linalg.eigh(vectors.T @ vectors)[1])
        assert of(result, "log_ratio")[layer] == pytest.approx(value.min() - value.max(), rel=1e-10)
        centred = vectors - vectors.mean(axis=0)
        components = np.linalg.svd(centred)[2].T
        rest = centred - centred @ components[:, :1] @ components[:, :1].T
        value = log_z(rest, components[:, 1:])
        corrected = of(result, "corrected_ratio")[layer]
        assert corrected == pytest.approx(value.min() - value.max(), rel=1e-9)
        unit = rest / np.linalg.norm(rest, axis=1, keepdims=True)
        pairs = (unit @ unit.T)[~np.eye(150, dtype=bool)]
        assert of(result, "corrected_cosine")[layer] == pytest.approx(pairs.mean(), abs=1e-12)
    assert result.removed == 1
    assert run(gaussian(150, 1, 250)).removed == 2


@pytest.mark.parametrize("slab", [2**10, 2**22])
def test_states_in_float32_give_the_digits_of_float64(
    slab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "SLAB_BYTES", slab)
    x = (gaussian(900, 2, 64) * np.linspace(0.2, 3, 64) + 1).astype(np.float32)
    x[:, :, 17] += 30  # as outlier channels are: far from zero
    x[:, :, 5] *= 20
    one, other = run(x), run(x.astype(np.float64))
    for name in ("log_ratio", "corrected_ratio"):
        np.testing.assert_allclose(of(one, name), of(other, name), rtol=1e-6)
    np.testing.assert_allclose(
        of(one, "corrected_cosine"), of(other, "corrected_cosine"), atol=1e-7
    )
    for name in ("mean_cosine", "explained_variance", "gamma", "sd", "mean_correlation"):
        np.testing.assert_allclose(of(one, name), of(other, name), rtol=1e-11)


def test_large_exponents_do_not_overflow() -> None:
    x = gaussian(100, 1, 8) * 400
    ratio = of(run(x), "log_ratio")[0]
    assert np.isfinite(ratio)
    assert ratio < -100


@given(st.integers(0, 2**31))
@settings(max_examples=10)
def test_turning_the_space_changes_no_statistic_of_directions(seed: int) -> None:
    x = gaussian(150, 1, 8) * np.linspace(0.2, 2, 8) + 1
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((8, 8)))
    one, other = run(x), run(x @ rotation)
    for name in ("mean_cosine", "mean_norm", "mean_share", "explained_variance", "log_ratio"):
        np.testing.assert_allclose(of(other, name), of(one, name), rtol=1e-9)
    for name in ("corrected_cosine", "corrected_ratio"):
        np.testing.assert_allclose(of(other, name), of(one, name), rtol=1e-7, atol=1e-12)
    for name in ("mean_correlation", "gamma"):  # of channels
        assert np.abs(of(other, name) - of(one, name)).max() > 1e-6


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
@settings(max_examples=10)
def test_order_and_scale_change_what_they_should(seed: int, scale: float) -> None:
    x = gaussian(150, 1, 8) + 1
    order = np.random.default_rng(seed).permutation(150)
    one, other = run(x), run(scale * x[order], rows=40)
    same = ("mean_cosine", "mean_share", "explained_variance", "corrected_cosine", "gamma")
    for name in (*same, "mean_correlation", "dominant"):
        np.testing.assert_allclose(of(other, name), of(one, name), rtol=1e-9, atol=1e-12)
    for name in ("mean_norm", "sd"):
        np.testing.assert_allclose(of(other, name), scale * of(one, name), rtol=1e-9)


def test_statistics_of_channels_are_those_of_numpy() -> None:
    x = gaussian(150, 2, 8) @ np.random.default_rng(1).standard_normal((8, 8)) + 3
    result = run(x)
    quantiles = [0, 0.25, 0.5, 0.75, 1]
    for layer in range(2):
        vectors = x[:, layer]
        rho = np.corrcoef(vectors.T)
        sd = np.quantile(vectors.std(axis=0), quantiles)
        np.testing.assert_allclose(of(result, "sd")[layer], sd)
        gamma = [np.mean([rho[j, k] ** 2 for k in range(8)]) for j in range(8)]
        np.testing.assert_allclose(of(result, "gamma")[layer], np.quantile(gamma, quantiles))
        apart = [abs(rho[j, k]) for j in range(8) for k in range(8) if j != k]
        assert of(result, "mean_correlation")[layer] == pytest.approx(np.mean(apart))
        mean = vectors.mean(axis=0)
        share = mean @ mean / (vectors**2).sum(axis=1).mean()
        assert of(result, "mean_share")[layer] == pytest.approx(share)
        variance = np.sort(vectors.var(axis=0))[::-1]
        k = next(k for k in range(1, 9) if variance[:k].sum() >= variance.sum() / 2)
        assert of(result, "dominant")[layer] == k / 8


def test_white_data_are_the_other_end_of_every_statistic() -> None:
    x = gaussian(3000, 1, 8)[:, 0]
    white, _ = np.linalg.qr(x - x.mean(axis=0))
    result = run(white[:, None])
    np.testing.assert_allclose(of(result, "gamma")[0], 1 / 8, rtol=1e-9)
    assert of(result, "mean_correlation")[0] == pytest.approx(0, abs=1e-12)
    assert of(result, "mean_share")[0] == pytest.approx(0, abs=1e-12)
    assert of(result, "dominant")[0] == 0.5
    assert of(result, "log_ratio")[0] == pytest.approx(0, abs=1e-4)
    np.testing.assert_allclose(of(result, "sd")[0], 1 / np.sqrt(3000), rtol=1e-9)


def test_a_common_vector_makes_cosines_that_the_correction_takes_away() -> None:
    x = gaussian(500, 1, 100)
    x[:, 0, 3] += 30
    result = run(x)
    assert of(result, "mean_cosine")[0] > 0.8
    assert of(result, "mean_share")[0] > 0.8
    assert abs(of(result, "corrected_cosine")[0]) < 0.01
    assert of(result, "corrected_ratio")[0] > 0.2 * of(result, "log_ratio")[0]


def test_cls_is_measured_apart_from_the_tokens_it_is_one_of() -> None:
    x = gaussian(300, 2, 8)
    rows = np.arange(0, 300, 3)
    states = da.from_array(x, chunks=(70, 2, 8))
    both = isotropy({"1e": states}, first={"1e": rows}, components=(1,))
    assert both.sets == ("tokens", "first tokens")
    for j, alone in enumerate((run(x, components=(1,)), run(x[rows], components=(1,)))):
        for name in ("mean_cosine", "corrected_ratio", "gamma"):
            np.testing.assert_allclose(getattr(both, name)[0, j], of(alone, name), rtol=1e-9)
    sampled = isotropy({"1e": states}, first={"1e": rows}, components=(1,), max_tokens=50, seed=2)
    assert sampled.n_vectors == ((50, 50),)
    assert sampled.n_available == ((300, 100),)


def test_a_cluster_gives_the_same_to_the_last_bit() -> None:
    x = gaussian(300, 2, 8) + 1
    states = {"1e": da.from_array(x, chunks=(70, 2, 8))}
    options: dict[str, Any] = {"first": {"1e": np.arange(0, 300, 3)}, "components": (1,)}
    threads = isotropy(states, max_tokens=150, **options)
    with cluster() as made:
        address = made.scheduler_address
        tcp = isotropy(states, max_tokens=150, scheduler=address, **options)
    assert tcp.to_json() == threads.to_json()


def test_plot_shows_panels_of_both_sets_and_names_lines_and_channels(tmp_path: Path) -> None:
    x = gaussian(500, 4, 64)
    x[:, 1] = 2.0  # its explained variance is NaN, which must not stop the plot
    x[:, 0, 17] += 25
    x[:, 3, 17] += 25
    x[:, 3, 5] += 25
    states = {"1e": da.from_array(x, chunks=(100, 4, 64))}
    first = {"1e": np.arange(0, 500, 5)}
    result = isotropy(
        states, first=first, components=(1, 3), outlier_sd=4.0, layers=(0, 3, 6, 12), name="dev"
    )
    result.figure().save(tmp_path / "isotropy.svg")
    drawn = Drawing(tmp_path / "isotropy.svg")
    assert drawn.faults() == []
    assert drawn.texts[0] == result.title()
    said = " ".join(drawn.texts)
    for name in (
        *(
            "mean cosine of two vectors",
            "mean |correlation| of two channels",
            "mean Euclidean norm",
        ),
        *("share of the variance in 3 principal components", "isotropy log I (0 at most)"),
        *("outlier channel (> 4 sd)", "tokens", "first tokens"),
    ):
        assert name in said
    assert drawn.texts.count("layer (0: embedding output)") == 6
    for layer, value in zip(result.layers, result.mean_cosine[0, 1], strict=True):
        assert f"first tokens: layer {layer}, {value:.4g}" in drawn.tips
    assert "channel 17 in layer 12, 1e, tokens" in drawn.tips
    # of both sets: lines of 4 points in three panels, of 3 in two; channels
    channels = sum(len(channels) for of in result.outlier_channels[0] for channels in of)
    assert channels > 3
    assert len(drawn.tips) == 2 * (4 * 3 + 3 * 2) + channels


@pytest.mark.parametrize("layers", [1, 2, 13, 25, 49])
def test_plot_of_any_number_of_layers_has_no_text_on_another(tmp_path: Path, layers: int) -> None:
    result = run(gaussian(20, layers, 12), components=tuple(range(1, 12)))
    for outliers in (0, 12, 30):
        channels = tuple(tuple(range(i, outliers * 13, 13 * layers)) for i in range(layers))
        found = replace(result, outlier_channels=((channels,),), mean_norm=result.mean_norm * 1e4)
        found.figure().save(tmp_path / "isotropy.svg")
        drawn = Drawing(tmp_path / "isotropy.svg")
        assert drawn.faults() == []
        assert any(text.endswith(": none") for text in drawn.texts) is (outliers == 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"components": (1, 7)}, r"components are \[1, 7\]; give numbers from 1 to .* 6"),
        ({"components": ()}, r"components are \[\]"),
        ({"outlier_sd": 0.0}, "outlier_sd is 0.0"),
        ({"max_tokens": 1}, "max_tokens is 1"),
        ({"scheduler": "gpu"}, "unknown scheduler 'gpu'"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(gaussian(20, 1, 6), **options)


def test_one_token_is_refused() -> None:
    with pytest.raises(InputError, match="there is only one"):
        run(gaussian(1, 1, 6))
