"""Linear CKA: known answers, invariances, and both forms against whole kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from figures import Drawing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import warm_pool

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.analysis import cka as cka_module
from bertvision.pipelines.analysis import kernels
from bertvision.pipelines.analysis.cka import CkaResult
from bertvision.pipelines.analysis.cka import cka_of_arrays as cka
from bertvision.pipelines.analysis.kernels import FEATURES, GRAM, Form, cheaper_form


def gaussian(n: int, layers: int, hidden: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, layers, hidden))


def related(seed: int = 0, n: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, 8) and (n, 2, 6) that share part of their variation, with means far from zero."""
    x = gaussian(n, 3, 8, seed) * np.linspace(3, 0.3, 8) + 5
    mix = np.random.default_rng(seed + 1).standard_normal((2, 24, 6))
    y = np.einsum("nk,jkd->njd", x.reshape(n, -1), mix) + gaussian(n, 2, 6, seed + 2) * 4 - 7
    return x, y


def run(x: np.ndarray, y: np.ndarray, blocks: int = 3, **options: Any) -> CkaResult:
    rows = -(-len(x) // blocks)
    arrays = (da.from_array(a, chunks=(rows, *a.shape[1:])) for a in (x, y))
    return cka(*arrays, **options)


def gram_hsic(x: np.ndarray, y: np.ndarray, *, unbiased: bool) -> float:
    """Song et al. (2012), eq. 5, and Gretton et al. (2005), from token × token matrices."""
    n = len(x)
    k, l = x @ x.T, y @ y.T  # noqa: E741
    if not unbiased:
        h = np.eye(n) - 1 / n
        return float(np.trace(k @ h @ l @ h)) / (n - 1) ** 2
    np.fill_diagonal(k, 0)
    np.fill_diagonal(l, 0)
    one = np.ones(n)
    trace = np.trace(k @ l)
    sums = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    return float(trace + sums - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))


def gram_cka(x: np.ndarray, y: np.ndarray, *, unbiased: bool) -> np.ndarray:
    def hsic(a: np.ndarray, b: np.ndarray) -> float:
        return gram_hsic(a, b, unbiased=unbiased)

    return np.array(
        [
            [
                hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b))
                for b in y.astype(np.float64).transpose(1, 0, 2)
            ]
            for a in x.astype(np.float64).transpose(1, 0, 2)
        ]
    )


@pytest.fixture(
    params=[(FEATURES, 2**31), (FEATURES, 0), (GRAM, 0)], ids=["held", "streamed", "gram"]
)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """Either form, whatever the shapes; that of features with all tokens held, and streamed."""
    form, held = request.param
    monkeypatch.setattr(cka_module, "cheaper_form", lambda *_: form)
    monkeypatch.setattr(kernels, "HELD_BYTES", held)
    return form


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in float64, so that nothing is left but the formula; of tiles and cut blocks."""
    monkeypatch.setattr(kernels, "PRODUCTS", np.float64)
    monkeypatch.setattr(kernels, "ROWS", 24)
    monkeypatch.setattr(kernels, "CHUNK", 24)


@pytest.mark.usefixtures("form", "exact")
@pytest.mark.parametrize("unbiased", [True, False])
def test_both_forms_equal_whole_kernels(unbiased: bool) -> None:
    x, y = related()
    result = run(x, y, unbiased=unbiased)
    assert np.abs(result.cka - gram_cka(x, y, unbiased=unbiased)).max() < 1e-10
    itself = da.from_array(x, chunks=(70, *x.shape[1:]))
    found = cka(itself, itself, unbiased=unbiased)
    assert np.abs(found.cka - gram_cka(x, x, unbiased=unbiased)).max() < 1e-10
    np.testing.assert_array_equal(found.cka_dropped, found.cka_dropped.T)


@pytest.mark.usefixtures("form")
@given(st.integers(0, 2**31), st.floats(1e-12, 1e12), st.floats(-1e3, 1e3), st.floats(1, 1e4))
@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_products_in_float32_leave_six_digits(
    seed: int, scale: float, shift: float, outlier: float
) -> None:
    x, y = related(seed)
    x[..., 3] *= outlier
    result = run(scale * (x + shift), y)
    order = np.argsort(-x.var(axis=0), axis=1)[:, :3], np.argsort(-y.var(axis=0), axis=1)[:, :3]
    rest = [
        np.stack([np.delete(a[:, i], o[i], axis=1) for i in range(a.shape[1])], axis=1)
        for a, o in zip((x, y), order, strict=True)
    ]
    assert np.abs(result.cka - gram_cka(x, y, unbiased=True)).max() < 1e-6
    assert np.abs(result.cka_dropped - gram_cka(*rest, unbiased=True)).max() < 1e-6


def test_the_form_is_that_of_fewer_operations() -> None:
    base = [(13, 768)] * 2
    for tokens, shapes, expected in (
        (8_000, base, GRAM),
        (20_000, base, FEATURES),
        (5_000, [(7, 384)] * 2, FEATURES),
        (15_000, [(25, 1024)] * 2, GRAM),
    ):
        form = cheaper_form(tokens, shapes)
        assert form is expected
        assert form.cost(tokens, shapes) == min(f.cost(tokens, shapes) for f in (FEATURES, GRAM))
    # 2 · tokens · (those across, and those of each layer with itself); tokens² · channels, and more
    assert FEATURES.cost(8_000, base) == 2 * 8_000 * (9_984**2 + 26 * 768**2)
    assert 1 < GRAM.cost(8_000, base) / (8_000**2 * 2 * 9_984) < 1.3


@pytest.mark.usefixtures("form", "exact")
@pytest.mark.parametrize("unbiased", [True, False])
def test_dropped_channels_are_those_of_largest_variance_and_leave_no_trace(unbiased: bool) -> None:
    x, y = related()
    result = run(x, y, unbiased=unbiased, drop_channels=2)
    kept = []
    for array, dropped in ((x, result.dropped_x), (y, result.dropped_y)):
        order = np.argsort(-array.var(axis=0), axis=1)[:, :2]
        assert [list(channels) for channels in dropped] == order.tolist()
        rest = [np.delete(array[:, i], order[i], axis=1) for i in range(array.shape[1])]
        kept.append(np.stack(rest, axis=1))
    expected = gram_cka(kept[0], kept[1], unbiased=unbiased)
    assert np.abs(result.cka_dropped - expected).max() < 1e-10
    assert np.abs(result.cka_dropped - result.cka).max() > 0.01


@pytest.mark.usefixtures("form")
def test_cka_of_a_layer_with_itself_is_one() -> None:
    x, _ = related()
    for unbiased in (True, False):
        result = run(x, x, unbiased=unbiased)
        np.testing.assert_allclose(np.diag(result.cka), 1, atol=1e-6)
        np.testing.assert_allclose(result.cka, result.cka.T, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [None, 90])
def test_tokens_that_lie_in_another_order_are_joined_by_their_places(
    max_tokens: int | None,
) -> None:
    x, y = related()
    order = np.random.default_rng(5).permutation(len(y))
    options: dict[str, Any] = {"max_tokens": max_tokens, "seed": 3}
    found = run(x, y[order], places=np.argsort(order), **options)
    np.testing.assert_allclose(found.cka, run(x, y, **options).cka, atol=1e-6)
    assert np.abs(run(x, y[order], **options).cka - found.cka).max() > 0.05


@given(st.integers(0, 2**31), st.floats(0.01, 100))
@settings(deadline=None, max_examples=15)
def test_rotation_scaling_and_translation_change_nothing(seed: int, scale: float) -> None:
    x, y = related()
    rng = np.random.default_rng(seed)
    rotation, _ = np.linalg.qr(rng.standard_normal((8, 8)))
    moved = scale * (x @ rotation) + rng.standard_normal(8)
    before, after = run(x, y, drop_channels=0), run(moved, y, drop_channels=0)
    np.testing.assert_allclose(after.cka, before.cka, atol=1e-6)


def test_an_invertible_map_that_is_no_rotation_changes_it() -> None:
    x, y = related()
    stretched = x * np.geomspace(0.1, 10, 8)
    assert np.abs(run(stretched, y).cka - run(x, y).cka).max() > 0.05
    assert run(x, stretched).cka[0, 0] < 0.95


def test_independent_gaussians_are_zero_unbiased_and_far_from_zero_biased() -> None:
    x, y = gaussian(512, 1, 768, seed=1), gaussian(512, 1, 768, seed=2)
    assert run(x, y, unbiased=False).cka[0, 0] == pytest.approx(0.598, abs=0.01)
    assert abs(run(x, y).cka[0, 0]) < 0.01


@pytest.mark.usefixtures("form")
@given(st.lists(st.integers(0, 200), max_size=5).map(sorted))
@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_cut_into_blocks_gives_the_same_cka(cut: list[int]) -> None:
    x, y = related()
    sizes = tuple(np.diff([0, *cut, 200]).tolist())
    arrays = (da.from_array(a, chunks=(sizes, *a.shape[1:])) for a in (x, y))
    np.testing.assert_allclose(cka(*arrays).cka, run(x, y, blocks=1).cka, atol=1e-6)


def test_groups_of_layers_give_the_same_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = related()
    monkeypatch.setattr(cka_module, "cheaper_form", lambda *_: FEATURES)
    monkeypatch.setattr(kernels, "HELD_BYTES", 0)
    whole = run(x, y)
    monkeypatch.setattr(kernels, "GROUP_BYTES", 2 * 8 * 8 * 2 * 6)
    for name in ("cka", "cka_dropped"):
        np.testing.assert_allclose(getattr(run(x, y), name), getattr(whole, name), rtol=1e-13)


def test_what_is_not_held_is_read_once_for_the_means_and_once_for_each_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, y = related()
    reads: list[int] = []
    arrays = [
        da.from_array(a, chunks=(50, *a.shape[1:])).map_blocks(
            lambda b: reads.append(len(b)) or b, dtype=a.dtype, meta=a[:0]
        )
        for a in (x, y)
    ]
    monkeypatch.setattr(cka_module, "cheaper_form", lambda *_: FEATURES)
    tokens = 2 * len(x)
    for held, group, passes in ((2**31, 2**29, 2), (0, 2**29, 2), (0, 8 * (2 * 8 * 6 + 8 * 8), 5)):
        monkeypatch.setattr(kernels, "HELD_BYTES", held)
        monkeypatch.setattr(kernels, "GROUP_BYTES", group)
        reads.clear()
        cka(*arrays)
        assert sum(reads) == passes * tokens


def test_a_sample_is_seeded_and_close_to_the_whole() -> None:
    x, y = related(n=4000)
    whole, one, same, other = (
        run(x, y, blocks=7, max_tokens=tokens, seed=seed)
        for tokens, seed in ((None, 0), (2500, 0), (2500, 0), (2500, 1))
    )
    assert (one.n_tokens, one.n_available, whole.n_tokens) == (2500, 4000, 4000)
    np.testing.assert_array_equal(one.cka, same.cka)
    assert (one.cka != other.cka).any()
    np.testing.assert_allclose(one.cka, whole.cka, atol=0.05)


@pytest.fixture(scope="module")
def cluster() -> Any:
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None, protocol="tcp"
    ) as local:
        yield local


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("max_tokens", [None, 150], ids=["all tokens", "sample"])
def test_schedulers_agree_bit_for_bit(cluster: Any, max_tokens: int | None) -> None:
    x, y = related()
    threads, tcp = (
        run(x, y, blocks=5, max_tokens=max_tokens, scheduler=scheduler)
        for scheduler in ("threads", cluster.scheduler_address)
    )
    with warm_pool():
        processes = run(x, y, blocks=5, max_tokens=max_tokens, scheduler="processes")
    for other in (processes, tcp):
        np.testing.assert_array_equal(other.cka, threads.cka)
        np.testing.assert_array_equal(other.cka_dropped, threads.cka_dropped)


def test_a_layer_that_does_not_vary_is_nan_and_null_in_json() -> None:
    x, y = related()
    x[:, 1] = 2.0
    result = run(x, y)
    assert np.isnan(result.cka[1]).all()
    assert np.isfinite(result.cka[[0, 2]]).all()
    again = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert again["cka"][1] == [None, None]
    assert again["cka"][0] == result.cka[0].tolist()


def test_table_names_layers_and_values() -> None:
    x, y = related()
    result = run(x, y, names=("0.3e", "1e"), layers_x=(0, 3, 12), layers_y=(6, 11))
    lines = result.table().splitlines()
    assert lines[0] == "Linear CKA (unbiased), 0.3e × 1e, 200 of 200 tokens"
    header = lines.index("all channels") + 1
    assert lines[header].split() == ["0.3e", "\\", "1e", "6", "11"]
    assert lines[header + 3].split() == ["12", *(f"{v:.3f}" for v in result.cka[2])]
    assert any("without the 3 channels of largest variance" in line for line in lines)


def test_plot_shows_both_matrices_with_their_numbers_layers_and_scale(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cka.svg"
    x, y = related()
    y[:, 1] = 1.0
    result = run(x, y, names=("0.3e", "1e"), layers_x=(0, 3, 12), layers_y=(6, 11))
    result.figure().save(path)
    drawn = Drawing(path)
    assert drawn.faults() == []
    assert drawn.texts[0] == result.title()
    said = " ".join(drawn.texts)
    for panel in ("all channels", "without the 3 channels of largest variance per layer"):
        assert panel in said
    for axis in ("layer of 0.3e", "layer of 1e", "0", "3", "12", "6", "11"):
        assert drawn.texts.count(axis) >= 2
    values = [*result.cka[:, 0], *result.cka_dropped[:, 0]]
    numbers = [t for t in drawn.texts if re.fullmatch(r"−?\d\.\d\d", t)]
    assert sorted(float(t.replace("−", "-")) for t in numbers) == sorted(
        round(float(v), 2) for v in values
    )
    assert {"0.2", "1.0", "grey: layer does not vary"} <= set(drawn.texts)
    assert f"layer of 0.3e 12, layer of 1e 6: {result.cka[2, 0]:.3f}" in drawn.tips
    assert sum(tip.endswith(": layer does not vary") for tip in drawn.tips) == 6


@pytest.mark.parametrize(
    ("layers", "drop"),
    [
        *[((1, 1), 1), ((14, 14), 0), ((14, 14), 1), ((15, 14), 1)],
        *[((25, 25), 1), ((13, 49), 0), ((49, 2), 1)],
    ],
)
def test_plot_of_any_number_of_layers_has_no_text_on_another(
    tmp_path: Path, layers: tuple[int, int], drop: int
) -> None:
    x, y = (np.random.default_rng(n).normal(size=(20, n, 4)).astype(np.float32) for n in layers)
    run(x, y, drop_channels=drop, names=("a-long-name-0.3e/dev", "1e/dev")).figure().save(
        tmp_path / "cka.svg"
    )
    drawn = Drawing(tmp_path / "cka.svg")
    assert drawn.faults() == []
    assert len(drawn.tips) == (1 + drop) * layers[0] * layers[1]
    numbered = any(re.fullmatch(r"−?\d\.\d\d", text) for text in drawn.texts)
    assert numbered is (max(layers) <= 14)


@pytest.mark.parametrize(
    ("name", "said"), [("cka.png", r"ends in '\.png'"), ("cka", "has no suffix"), ("", "no suffix")]
)
def test_a_plot_that_is_not_to_be_svg_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"{said}.*give a file that ends in .svg, such as"):
        run(*related()).figure().save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_values_that_are_not_finite_are_an_error_that_names_the_layer(bad: float) -> None:
    x, y = related()
    y[17, 1, 2] = bad
    with pytest.raises(NonFiniteError, match="in 1 of 2 layers.*number 1"):
        run(x, y)


@pytest.mark.parametrize("drop", [-1, 6])
def test_dropping_more_channels_than_there_are_is_refused(drop: int) -> None:
    with pytest.raises(InputError, match=f"drop_channels is {drop}; give 0 to 5"):
        run(*related(), drop_channels=drop)


def test_too_few_tokens_are_refused() -> None:
    x, y = related(n=3)
    with pytest.raises(InputError, match="at least 4 tokens; there are 3"):
        run(x, y)
