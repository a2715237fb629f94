"""Context: statistics of words against their definitions, known answers, and what is a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
from analyses import states as random_states
from families import make_family
from figures import Drawing
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import bertvision
from bertvision.errors import InputError, NonFiniteError, ProvenanceError
from bertvision.pipelines.analysis import uses as uses_module
from bertvision.pipelines.analysis.context import ContextResult, Samples
from bertvision.pipelines.analysis.context import context_of_arrays as context
from bertvision.pipelines.analysis.uses import (
    CONTEXTS,
    Uses,
    Vocabulary,
    sample_positions,
    sample_uses,
    sample_windows,
)
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.workspace.workspace import Workspace

N = 150
STATISTICS = (
    *("random_cosine", "self_similarity", "intra_similarity", "explained", "random_explained"),
    *("static_similarity", "static_baseline", "nearest", "margin", "by_position"),
)


def samples(n: int = N, words: int = 12, seed: int = 0) -> Samples:
    """Words with 3 to 7 uses, three windows, two positions."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 8, words)
    cuts = np.cumsum(sizes)[:-1]
    rows = [np.split(rng.permutation(n)[: sizes.sum()], cuts) for _ in range(2)]
    windows = [np.arange(20), np.arange(20, 55), np.arange(60, 64)]
    at = [np.array([0, 20, 60]), np.array([5, 25])]
    return Samples(Uses(*rows, 0, 0, 0, 0, 0, words), windows, at, (0, 5))


def gaussian(n: int = N, layers: int = 3, hidden: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, layers, hidden))


def run(x: np.ndarray, of: Samples | None = None, block: int = 40, **options: Any) -> ContextResult:
    states = {"1e": da.from_array(x, chunks=(block, *x.shape[1:]))}
    return context(states, of or samples(len(x)), **options)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def of_all_pairs(x: np.ndarray, y: np.ndarray) -> float:
    """Mean cosine of a row of x with another row of y."""
    n = len(x)
    return float(np.mean([cosine(x[i], y[j]) for i in range(n) for j in range(n) if i != j]))


def first_component(x: np.ndarray) -> float:
    values = np.linalg.svd(x - x.mean(axis=0), compute_uv=False) ** 2
    return float(values[0] / values.sum())


def reference(x: np.ndarray, of: Samples) -> dict[str, Any]:
    """The statistics of a layer, one pair at a time; ``x`` is (token, layer, hidden)."""
    found: dict[str, list[Any]] = {name: [] for name in STATISTICS}
    random = np.concatenate(of.uses.random)
    use = np.concatenate(of.uses.groups)
    word = np.repeat(np.arange(len(of.uses.groups)), [len(g) for g in of.uses.groups])
    for layer in range(x.shape[1]):
        h, first = x[:, layer], x[:, 0]
        alone = [i for i in range(len(use))]
        nearest, margins = [], []
        for i in alone:
            others = [j for j in alone if j != i]
            cosines = [cosine(h[use[i]], h[use[j]]) for j in others]
            same = max(c for c, j in zip(cosines, others, strict=True) if word[j] == word[i])
            other = max(c for c, j in zip(cosines, others, strict=True) if word[j] != word[i])
            nearest.append(word[others[int(np.argmax(cosines))]] == word[i])
            margins.append(same - other)
        values = {
            "random_cosine": of_all_pairs(h[random], h[random]),
            "self_similarity": np.mean([of_all_pairs(h[g], h[g]) for g in of.uses.groups]),
            "intra_similarity": np.mean(
                [np.mean([cosine(v, h[w].mean(axis=0)) for v in h[w]]) for w in of.windows]
            ),
            "explained": np.mean([first_component(h[g]) for g in of.uses.groups]),
            "random_explained": np.mean([first_component(h[g]) for g in of.uses.random]),
            "static_similarity": np.mean([cosine(h[i], first[i]) for i in random]),
            "static_baseline": of_all_pairs(h[random], first[random]),
            "nearest": np.mean(nearest),
            "margin": np.mean(margins),
            "by_position": [of_all_pairs(h[rows], h[rows]) for rows in of.at],
        }
        for name, value in values.items():
            found[name].append(value)
    return {name: np.moveaxis(np.array(of_layers), 0, -1) for name, of_layers in found.items()}


def check(found: ContextResult, x: np.ndarray, of: Samples) -> None:
    expected = reference(x, of)
    for name in STATISTICS:
        # cosines between uses are products in float32
        tolerance = 1e-6 if name == "margin" else 1e-11
        got = getattr(found, name)[0]
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=tolerance, err_msg=name)


def test_every_statistic_is_that_of_its_definition() -> None:
    x = gaussian() * np.linspace(0.3, 3, 8) + [[0.0], [0.5], [2.0]]
    check(run(x), x, samples())


def test_the_baselines_are_taken_away() -> None:
    found = run(gaussian() + 1)
    less = found.adjusted()
    for name, of, baseline in (
        ("self_adjusted", "self_similarity", "random_cosine"),
        ("intra_adjusted", "intra_similarity", "random_cosine"),
        ("explained_adjusted", "explained", "random_explained"),
        ("static_adjusted", "static_similarity", "static_baseline"),
    ):
        np.testing.assert_array_equal(less[name], getattr(found, of) - getattr(found, baseline))


def test_identical_states_are_alike_and_no_more_than_random_ones() -> None:
    found = run(np.tile(np.arange(1.0, 9.0), (N, 2, 1)))
    for name in ("self_similarity", "intra_similarity", "static_similarity", "by_position"):
        np.testing.assert_allclose(getattr(found, name), 1, atol=1e-12)
    for name in ("self_adjusted", "intra_adjusted", "static_adjusted"):
        np.testing.assert_allclose(found.adjusted()[name], 0, atol=1e-12)
    assert np.isnan(found.explained).all()  # nothing varies


def test_a_state_that_is_its_word_alone_is_told_from_all_others() -> None:
    """One direction for each word and for each other token, whatever stands around it."""
    of = samples(400)
    word = np.arange(400)
    for group in of.uses.groups:
        word[group] = group[0]
    x = np.eye(400)[word][:, None]
    found = run(x, of)
    assert found.self_similarity[0, 0] == pytest.approx(1, abs=1e-12)
    assert found.static_similarity[0, 0] == pytest.approx(1, abs=1e-12)
    assert (found.nearest[0, 0], found.margin[0, 0]) == (1, pytest.approx(1))
    assert found.adjusted()["self_adjusted"][0, 0] > 0.9


def test_uses_along_one_line_are_explained_by_one_direction() -> None:
    of = samples()
    x = gaussian(layers=1, hidden=64)
    rng = np.random.default_rng(1)
    for group in of.uses.groups:
        x[group, 0] = 5 + np.outer(rng.standard_normal(len(group)), rng.standard_normal(64))
    found = run(x, of)
    assert found.explained[0, 0] == pytest.approx(1, abs=1e-12)
    assert found.random_explained[0, 0] < 0.9


def test_isotropic_states_without_words_have_nothing_above_the_baselines() -> None:
    groups = [np.arange(10 * k, 10 * k + 10) for k in range(200)]
    mixed = np.split(np.random.default_rng(0).permutation(2000), 200)
    windows = [np.arange(1000 * k, 1000 * k + 1000) for k in range(2)]
    of = Samples(Uses(groups, mixed, 0, 0, 0, 0, 0, 200), windows, [groups[0]], (0,))
    found = run(gaussian(2000, 2, 200), of, block=700)
    assert abs(found.random_cosine).max() < 0.001
    assert abs(found.adjusted()["self_adjusted"]).max() < 0.005
    assert abs(found.adjusted()["explained_adjusted"]).max() < 0.005
    assert abs(found.adjusted()["static_adjusted"][0, 1]) < 0.01
    # a token is part of the mean of its window: of n tokens 1 / √n is left
    np.testing.assert_allclose(found.adjusted()["intra_adjusted"], 1 / np.sqrt(1000), atol=0.01)
    assert found.chance == pytest.approx(9 / 1999)
    np.testing.assert_allclose(found.nearest, found.chance, atol=0.01)


@given(st.integers(0, 2**31), st.floats(1e-3, 1e3))
@settings(max_examples=10, deadline=None)
def test_turning_and_scaling_the_space_change_nothing(seed: int, scale: float) -> None:
    x = gaussian() * np.linspace(0.3, 3, 8) + 1
    rotation, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((8, 8)))
    one, other = run(x), run(scale * x @ rotation)
    for name in STATISTICS:
        tolerance = 1e-5 if name == "margin" else 1e-9
        np.testing.assert_allclose(getattr(other, name), getattr(one, name), atol=tolerance)


@given(st.integers(0, 2**31), st.integers(1, N))
@settings(max_examples=10, deadline=None)
def test_the_order_in_which_tokens_are_stored_and_their_blocks_change_nothing(
    seed: int, block: int
) -> None:
    x = gaussian() + 0.5
    order = np.random.default_rng(seed).permutation(N)
    places = np.argsort(order)  # x[order][places] is x
    one, other = run(x), run(x[order], block=block, rows={"1e": places})
    assert other.to_json() == one.to_json()


@pytest.mark.parametrize("size", [1, 7, 30])
def test_how_groups_are_put_into_blocks_and_tiles_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    x = gaussian() + 0.5
    monkeypatch.setattr(uses_module, "SAMPLE_ROWS", size)
    monkeypatch.setattr(uses_module, "ROWS", 5)
    check(run(x), x, samples())


def test_a_vector_without_a_direction_is_left_out_of_what_needs_one() -> None:
    x = gaussian()
    of = samples()
    group = of.uses.groups[0]
    x[group, 1] = 0
    found = run(x, of)
    rest = of.uses._replace(groups=of.uses.groups[1:])
    without = run(x, of._replace(uses=rest))
    for name in ("self_similarity", "explained", "nearest"):
        np.testing.assert_allclose(getattr(found, name)[0, 1], getattr(without, name)[0, 1])
    assert np.isfinite(found.margin).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["groups", "random", "windows", "at"])
def test_nan_and_infinity_are_refused_wherever_they_stand(kind: str, value: float) -> None:
    x, of = gaussian(), samples()
    row = (getattr(of.uses, kind) if hasattr(of.uses, kind) else getattr(of, kind))[0][0]
    x[row, 2, 3] = value
    with pytest.raises(NonFiniteError, match="first is number 2"):
        run(x, of)


def test_several_snapshots_are_measured_on_the_same_tokens() -> None:
    x, y = gaussian() + 1, gaussian(seed=1)
    both = context({"0e": da.from_array(x), "1e": da.from_array(y)}, samples())
    assert both.snapshots == ("0e", "1e")
    for k, alone in enumerate((run(x), run(y))):
        for name in STATISTICS:
            np.testing.assert_array_equal(getattr(both, name)[k], getattr(alone, name)[0])


def test_without_the_output_of_the_embeddings_nothing_is_said_of_it() -> None:
    found = run(gaussian(layers=2), layers=(4, 8))
    assert np.isnan(found.static_similarity).all()
    assert np.isnan(found.adjusted()["static_adjusted"]).all()
    (row, _) = found.rows()
    assert (row["layer"], row["static_similarity"]) == (4, None)
    json.dumps(found.to_json(), allow_nan=False)


def test_one_word_is_refused() -> None:
    of = samples()
    few = of._replace(uses=of.uses._replace(groups=of.uses.groups[:1], random=of.uses.random[:1]))
    with pytest.raises(InputError, match="1 words and 3 windows .* give more --tokens"):
        run(gaussian(), few)


# ids: 0 special, 1 to 9 words, 10 to 14 pieces that go on, 15 to 19 marks
IDS = np.arange(20)
VOCABULARY = Vocabulary(IDS == 0, (IDS > 0) & (IDS < 10), (IDS >= 10) & (IDS < 15))


def windows(*texts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate(texts), np.array([len(text) for text in texts])


def sampled(ids: np.ndarray, lengths: np.ndarray, **options: Any) -> Uses:
    options = {"most": 100, "of_word": 20, "seed": 0} | options
    return sample_uses(ids, lengths, VOCABULARY, **options)


def test_words_are_single_pieces_and_all_else_is_counted() -> None:
    texts = [[0, 1, 2, 15, 3 + k, 10, 5 + k % 4, 0] for k in range(CONTEXTS)]
    ids, lengths = windows(*texts)
    found = sampled(ids, lengths)
    assert sorted(ids[group[0]] for group in found.groups) == [1, 2]
    for group in found.groups:
        assert len(group) == len(set(group.tolist())) == CONTEXTS
        assert len({int(ids[row]) for row in group}) == 1
    assert (found.n_special, found.n_pieces, found.n_marks) == (10, 10, 5)
    assert (found.n_repeated, found.n_rare, found.n_words) == (0, 5, 2)
    assert [len(group) for group in found.random] == [len(group) for group in found.groups]
    random = np.concatenate(found.random)
    assert len(np.unique(random)) == len(random)


def test_the_same_text_again_is_no_other_use() -> None:
    text = [0, 1, 2, 3, 0]
    with pytest.raises(InputError, match="no word of one piece has 5 uses among 50 tokens"):
        sampled(*windows(*[text] * 10))
    others = [[0, 1, 2, 3, 1 + k, 0] for k in range(CONTEXTS)]
    found = sampled(*windows(*[text] * 10, *others))
    assert found.n_repeated == 3 * 9
    assert found.n_words == 3


def test_a_piece_is_none_of_the_window_before() -> None:
    """The rest of a word at the beginning of a window does not cut the last word of another."""
    texts = [[1, 1 + k, 2] for k in range(CONTEXTS)] + [[10, 3]]
    found = sampled(*windows(*texts))
    assert found.n_pieces == 1


def test_uses_are_no_more_than_asked_for() -> None:
    rng = np.random.default_rng(0)
    ids, lengths = windows(*rng.integers(1, 10, (40, 12)).tolist())
    found = sampled(ids, lengths, most=30, of_word=7)
    assert [len(group) for group in found.groups] == [7] * 4
    assert found.n_words == 9
    again, other = (sampled(ids, lengths, most=30, of_word=7, seed=seed) for seed in (0, 1))
    np.testing.assert_array_equal(again.groups, found.groups)
    assert not np.array_equal(other.groups, found.groups)
    with pytest.raises(InputError, match="as many as --tokens allows"):
        sampled(ids, lengths, most=4)


def test_windows_and_positions_are_rows_of_whole_windows() -> None:
    lengths = np.array([5, 1, 4, 3])
    special = np.isin(np.arange(13), [0, 4, 5, 10, 12])  # of the last window one token is left
    found = sample_windows(special, lengths, 100, 0)
    assert sorted(map(tuple, found)) == [(1, 2, 3), (6, 7, 8, 9)]
    assert len(sample_windows(special, lengths, 1, 0)) == 1  # there is one in any case
    first, third = sample_positions(lengths, (0, 2), 200, 0)
    assert first.tolist() == [0, 5, 6, 10]
    assert third.tolist() == [2, 8, 12]
    assert len(sample_positions(lengths, (0,), 3, 0)[0]) == 3


@pytest.mark.parametrize(
    ("family", "begin", "go_on", "neither"),
    [
        ("bert", ["the", "a", "7"], ["##s", "##a"], ["[CLS]", ".", "'"]),
        ("roberta", ["Ġf"], ["a", "na", "Ģ"], ["<s>", "Ġ", "!"]),
        ("xlm-roberta", ["▁anna", "▁found"], ["ed", "a"], ["<s>", "▁", "."]),
    ],
)
def test_tokenizers_of_every_kind_say_what_begins_a_word(
    tmp_path: Path, family: str, begin: list[str], go_on: list[str], neither: list[str]
) -> None:
    make_family(family, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    vocabulary = Vocabulary.of(tokenizer)
    for tokens, begins, goes_on in ((begin, True, False), (go_on, False, True)):
        ids = tokenizer.convert_tokens_to_ids(tokens)
        assert vocabulary.begins[ids].tolist() == [begins] * len(ids)
        assert vocabulary.goes_on[ids].tolist() == [goes_on] * len(ids)
    ids = tokenizer.convert_tokens_to_ids(neither)
    assert not (vocabulary.begins | vocabulary.goes_on)[ids].any()
    assert vocabulary.special[ids].tolist() == [True, False, False]


def test_a_workspace_is_measured_by_the_ids_that_it_stores(
    workspace: Workspace, tmp_path: Path
) -> None:
    plot = tmp_path / "context.svg"
    found = bertvision.context(
        ["0.5e", "1e"], split="train", tokens=300, plot=plot, workspace=workspace
    )
    assert found.layers == (0, 1, 2)
    assert found.n_uses <= 300
    assert found.n_uses + found.n_special + found.n_pieces + found.n_marks <= found.n_available
    # layer 0 is a word and its position: with no context, a word is nearest to itself
    assert found.nearest[0, 0] > 0.5 > 2 * found.chance
    assert found.adjusted()["self_adjusted"][0, 0] > 0.2
    np.testing.assert_allclose(found.static_similarity[:, 0], 1, atol=1e-6)
    again = bertvision.context(
        ["1e", "0.5e"], split="train", tokens=300, plot=plot, workspace=workspace
    )
    np.testing.assert_array_equal(again.self_similarity, found.self_similarity[::-1])
    page = bertvision.report(out=tmp_path / "report", workspace=workspace.root).page.read_text()
    assert "Context: what becomes of words" in page
    assert f"{found.n_uses:,} uses of {found.n_words:,} words" in page


def test_vectors_of_windows_are_refused_with_the_command_that_extracts_tokens(
    workspace: Workspace, tmp_path: Path
) -> None:
    (tmp_path / "snapshots").symlink_to(workspace.root / "snapshots")
    space = Workspace(tmp_path, workspace.config)
    extract(space, "1e", splits=["dev"], precision="32", tokens="cls")
    with pytest.raises(InputError, match="one vector for each window.*--checkpoint 1e --pool none"):
        bertvision.context(["1e"], split="dev-cls", workspace=space)


def test_snapshots_with_other_layers_are_refused(workspace: Workspace, tmp_path: Path) -> None:
    (tmp_path / "snapshots").symlink_to(workspace.root / "snapshots")
    space = Workspace(tmp_path, workspace.config)
    for tag, layers in (("0.5e", [0, 1]), ("1e", [0, 2])):
        extract(space, tag, splits=["dev"], precision="32", layers=layers)
    with pytest.raises(ProvenanceError, match="layers"):
        bertvision.context(["0.5e", "1e"], workspace=space)


@pytest.mark.parametrize("layers", [1, 2, 13, 25])
def test_the_figure_has_no_text_on_another(tmp_path: Path, layers: int) -> None:
    x = {tag: random_states(k, N, layers) for k, tag in enumerate(("0e", "0.3e", "1e"))}
    found = context(x, samples(), name="dev")
    found.figure().save(tmp_path / "context.svg")
    drawn = Drawing(tmp_path / "context.svg")
    assert drawn.faults() == []
    assert drawn.texts[0] == found.title()
    said = " ".join(drawn.texts)
    assert "self-similarity of a word's uses" in said.replace("\n", " ")
    assert "nearest is the same word" in said
    assert {"0e", "0.3e", "1e", "position 0", "position 5"} <= set(drawn.texts)
