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
from figures import SVG, Drawing

from bertvision.errors import InputError
from bertvision.pipelines.analysis.isotropy import IsotropyResult, isotropy


def gaussian(n: int, layers: int, hidden: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, layers, hidden))


def run(x: np.ndarray, *, rows: int = 70, **options: Any) -> IsotropyResult:
    options.setdefault("components", (1, 3))
    return isotropy(da.from_array(x, chunks=(rows, *x.shape[1:])), **options)


def test_mean_cosine_is_that_of_all_pairs_of_different_tokens() -> None:
    x = gaussian(150, 2, 6) + [[0.0], [1.5]]
    unit = x / np.linalg.norm(x, axis=2, keepdims=True)
    pairs = ~np.eye(150, dtype=bool)
    expected = [(unit[:, i] @ unit[:, i].T)[pairs].mean() for i in range(2)]
    np.testing.assert_allclose(run(x).mean_cosine, expected, rtol=1e-11)


def test_parallel_tokens_have_cosine_one_and_one_component() -> None:
    lengths = np.linspace(1, 9, 100)[:, None, None]
    result = run(lengths * np.arange(1.0, 7.0))
    assert result.mean_cosine[0] == pytest.approx(1, abs=1e-12)
    assert result.explained_variance[0] == pytest.approx([1, 1], abs=1e-12)


def test_opposite_tokens_have_the_least_possible_mean_cosine() -> None:
    # half along v, half along −v: Σu = 0, hence −1 / (n − 1)
    signs = np.where(np.arange(100) % 2, 1.0, -1.0)[:, None, None]
    assert run(signs * np.ones(6)).mean_cosine[0] == pytest.approx(-1 / 99, rel=1e-12)


def test_cosine_ignores_the_length_of_tokens_and_mean_norm_does_not() -> None:
    x = gaussian(150, 2, 6) + 1
    scale = np.random.default_rng(3).uniform(0.1, 10, (150, 1, 1))
    one, scaled = run(x), run(x * scale)
    np.testing.assert_allclose(scaled.mean_cosine, one.mean_cosine, rtol=1e-11)
    expected = np.linalg.norm(x * scale, axis=2).mean(axis=0)
    np.testing.assert_allclose(scaled.mean_norm, expected, rtol=1e-12)


def test_white_data_explain_k_of_d() -> None:
    x = gaussian(300, 1, 8)[:, 0]
    white, _ = np.linalg.qr(x - x.mean(axis=0))  # orthonormal columns of mean zero
    result = run(white[:, None], components=(1, 3, 8))
    np.testing.assert_allclose(result.explained_variance[0], [1 / 8, 3 / 8, 1], rtol=1e-11)


def test_explained_variance_is_that_of_the_spectrum_and_ignores_the_mean() -> None:
    scale = np.sqrt([8.0, 4.0, 2.0, 1.0, 1.0])
    x = gaussian(300, 1, 5)[:, 0]
    white, _ = np.linalg.qr(x - x.mean(axis=0))
    rotation, _ = np.linalg.qr(gaussian(5, 1, 5, seed=2)[:, 0])
    result = run((white * scale @ rotation + 30)[:, None], components=(1, 2, 3))
    np.testing.assert_allclose(result.explained_variance[0], [8 / 16, 12 / 16, 14 / 16], rtol=1e-9)


def test_an_outlier_channel_is_found_by_its_mean_and_by_its_sd_and_adds_most_cosine() -> None:
    x = gaussian(500, 3, 64)
    x[:, 1, 17] += 25
    x[:, 2, 40] *= 25
    result = run(x)
    assert result.outlier_channels == ((), (17,), (40,))
    assert result.top_channel[1] == 17
    assert result.top_cosine[1] == pytest.approx(result.mean_cosine[1], rel=0.05)
    assert result.top_cosine[1] > 0.8


def test_contributions_of_channels_to_the_cosine_add_up() -> None:
    x = gaussian(100, 1, 2) + [3.0, 0.0]
    both = run(x, components=(1,))
    unit = x[:, 0] / np.linalg.norm(x[:, 0], axis=1, keepdims=True)
    pairs = ~np.eye(100, dtype=bool)
    by_channel = [np.outer(u, u)[pairs].mean() for u in unit.T]
    assert both.top_channel == (0,)
    assert both.top_cosine[0] == pytest.approx(by_channel[0], rel=1e-11)
    assert both.mean_cosine[0] == pytest.approx(sum(by_channel), rel=1e-11)


def test_processes_and_threads_and_any_blocks_agree() -> None:
    x = gaussian(200, 2, 6) + 1
    threads = run(x, scheduler="threads")
    with dask.config.set(num_workers=1):  # a fresh process, which takes seconds to start
        processes = run(x, scheduler="processes")
    one_block = run(x, rows=200)
    for name in ("mean_cosine", "mean_norm", "explained_variance"):
        np.testing.assert_array_equal(getattr(processes, name), getattr(threads, name))
        np.testing.assert_allclose(getattr(one_block, name), getattr(threads, name), rtol=1e-11)


def test_a_sample_is_seeded_and_counted() -> None:
    x = gaussian(400, 1, 6) + 1
    one, same, other = (run(x, max_tokens=90, seed=seed) for seed in (0, 0, 1))
    assert (one.n_tokens, one.n_available) == (90, 400)
    assert one.mean_cosine == same.mean_cosine
    assert one.mean_cosine != other.mean_cosine


def test_a_layer_that_does_not_vary_is_null_in_json() -> None:
    x = gaussian(100, 2, 6)
    x[:, 1] = 2.0
    again = json.loads(json.dumps(run(x).to_json(), allow_nan=False))
    assert again["explained_variance"][1] == [None, None]
    assert again["mean_cosine"][1] == pytest.approx(1)
    assert again["explained_variance"][0][0] is not None


def test_table_has_a_row_per_layer() -> None:
    x = gaussian(500, 2, 64)
    x[:, 1, 17] += 25
    result = run(x, name="0.3e dev", layers=(0, 6))
    title, table, legend = result.table().split("\n\n")
    lines = table.splitlines()
    assert title == "Isotropy, 0.3e dev, 500 of 500 tokens"
    assert "EV k" in legend
    cells = lines[-1].split()
    assert cells[:4] == ["6", f"{result.mean_norm[1]:.2f}", f"{result.mean_cosine[1]:.3f}", "17"]
    assert cells[-2:] == ["1", "17"]
    assert lines[-2].split()[-2:] == ["0", "–"]


def test_plot_shows_four_panels_and_names_lines_and_channels(tmp_path: Path) -> None:
    x = gaussian(500, 4, 64)
    x[:, 1] = 2.0  # its explained variance is NaN, which must not stop the plot
    x[:, 0, 17] += 25
    x[:, 3, 17] += 25
    x[:, 3, 5] += 25
    result = run(x, outlier_sd=4.0, layers=(0, 3, 6, 12), name="1e")
    result.figure().save(tmp_path / "isotropy.svg")
    drawn = Drawing(tmp_path / "isotropy.svg")
    assert drawn.faults() == []
    assert drawn.texts[0] == result.title()
    assert {
        *("Mean cosine of two tokens", "cosine", "mean cosine", "largest part of one channel"),
        *("Variance in the first k principal components", "share of the variance"),
        *("k = 1", "k = 3", "Mean norm of a token", "Euclidean norm"),
        *("Outlier channels (mean or sd beyond 4 sd)", "channel", "17", "5"),
    } <= set(drawn.texts)
    assert drawn.texts.count("layer (0 = embedding output)") == 4
    assert drawn.texts.count("12") == 4
    tips = [title.text or "" for title in drawn.root.iter(f"{SVG}title")]
    for layer, value in zip(result.layers, result.mean_cosine, strict=True):
        assert f"mean cosine: layer {layer}, {value:.4g}" in tips
    assert "channel 17 in layer 12" in tips
    assert not any("k = 1: layer 3," in tip for tip in tips)
    # 4 points of each of 2 + 1 lines, 3 of each of 2, 3 channels, and the samples of 4
    assert len(drawn.marks("point")) == 4 * 3 + 3 * 2 + 3 + 4
    shapes = {mark.tag if mark.tag.endswith("circle") else "path" for mark in drawn.marks("s0")}
    assert shapes == {f"{SVG}circle", "path"}  # points, and their lines


@pytest.mark.parametrize("layers", [1, 2, 13, 25, 49])
def test_plot_of_any_number_of_layers_has_no_text_on_another(tmp_path: Path, layers: int) -> None:
    result = run(gaussian(20, layers, 12), components=tuple(range(1, 12)))
    for outliers in (0, 12, 30):
        channels = tuple(tuple(range(i, outliers * 13, 13 * layers)) for i in range(layers))
        found = replace(result, outlier_channels=channels, mean_norm=result.mean_norm * 1e4)
        found.figure().save(tmp_path / "isotropy.svg")
        drawn = Drawing(tmp_path / "isotropy.svg")
        assert drawn.faults() == []
        assert ("none" in drawn.texts) is (outliers == 0)


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
