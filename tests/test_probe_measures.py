"""Partitions, intervals, control tasks and description lengths, against known answers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probing import as_data, blobs, problem

from bertvision.errors import InputError
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import Inputs
from bertvision.pipelines.readouts.probe_data import Labelled, majority, partition, stratified
from bertvision.pipelines.readouts.probe_measures import (
    block_ends,
    code_length,
    control_labels,
    measure,
    measure_control,
    online_code,
    unseen_share,
)
from bertvision.pipelines.uncertainty import paired_bootstrap, share, share_difference

OPTIONS = ProbeOptions()


def split(labels: list[int], name: str = "") -> Labelled:
    return Labelled(np.array(labels), [f"{name}{i}" for i in range(len(labels))])


# --- which examples do what ---


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30)), min_size=20, max_size=120),
    st.integers(2, 10),
)
def test_parts_are_even_and_keep_equal_texts_together(
    examples: list[tuple[int, int]], parts: int
) -> None:
    labels, texts = (np.array(column) for column in zip(*examples, strict=True))
    dealt = stratified(labels, texts.tolist(), parts, seed=3)
    of_text = [set(dealt[texts == text]) for text in np.unique(texts)]
    assert all(len(found) == 1 for found in of_text)
    groups = np.bincount([found.pop() for found in of_text], minlength=parts)
    assert groups.max() - groups.min() <= 1
    assert (dealt == stratified(labels, texts.tolist(), parts, seed=3)).all()


@given(st.lists(st.integers(0, 4), min_size=50, max_size=200), st.integers(2, 10))
def test_every_class_is_spread_evenly(labels: list[int], parts: int) -> None:
    values = np.array(labels)
    dealt = stratified(values, range(len(values)), parts, seed=0)
    for label in np.unique(values):
        counts = np.bincount(dealt[values == label], minlength=parts)
        assert counts.max() - counts.min() <= 1


def test_a_cross_validation_scores_every_example_once() -> None:
    folds = partition({"all": split([0, 1] * 100)}, OPTIONS)
    assert len(folds) == 10
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(200))
    for fold in folds:
        assert sorted(np.concatenate(fold)) == list(range(200))
        assert (len(fold.train), len(fold.held_out), len(fold.test)) == (162, 18, 20)
        assert np.bincount(np.array([0, 1] * 100)[fold.test]).tolist() == [10, 10]


@pytest.mark.parametrize(
    ("names", "scored", "held_out"),
    [
        (("train", "dev", "test"), "test", "dev"),
        (("train", "dev"), "dev", "train"),
        (("train", "test"), "test", "train"),
        (("train", "dev", "unlabelled"), "dev", "train"),
    ],
    ids=["splits", "no test", "no dev", "test without labels"],
)
def test_the_splits_decide_the_parts(names: tuple[str, ...], scored: str, held_out: str) -> None:
    given, where, start = {}, {}, 0
    for name in names:
        labels = [-1] * 30 if name == "unlabelled" else [0, 1, 1] * 20
        given["test" if name == "unlabelled" else name] = split(labels, name)
        where[name] = set(range(start, start + len(labels)))
        start += len(labels)
    (fold,) = partition(given, OPTIONS)
    assert set(fold.test) == where[scored]
    assert set(fold.held_out) <= where[held_out]
    if held_out == "train":
        assert len(fold.held_out) == 6
        assert set(fold.train) == where["train"] - set(fold.held_out)
    else:
        assert (set(fold.train), set(fold.held_out)) == (where["train"], where["dev"])


def test_examples_of_one_class_are_refused() -> None:
    with pytest.raises(InputError, match="one class"):
        partition({"train": split([1] * 40), "test": split([0, 1] * 5)}, OPTIONS)


def test_too_few_examples_for_the_folds_are_refused() -> None:
    with pytest.raises(InputError, match="--folds"):
        partition({"all": split([0, 1, 0])}, OPTIONS)
    one_text = Labelled(np.array([0, 1] * 20), ["the same"] * 40)
    with pytest.raises(InputError, match="with 1 different texts") as refusal:
        partition({"all": one_text}, OPTIONS)
    assert "--folds" not in str(refusal.value)


# --- intervals ---


@pytest.mark.parametrize("seed", range(3))
def test_intervals_are_those_of_drawing_examples(seed: int) -> None:
    """Against the paired bootstrap that draws examples one by one: the same distribution."""
    random = np.random.default_rng(seed)
    first, second = random.random(400) < 0.8, random.random(400) < 0.7
    found = share_difference(first, second)
    drawn = paired_bootstrap(100.0 * first, 100.0 * second, seed=seed)
    assert found.value == pytest.approx(drawn.difference)
    assert (found.low, found.high) == pytest.approx((drawn.low, drawn.high), abs=0.5)
    alone = paired_bootstrap(100.0 * first, np.zeros(400), seed=seed)
    score = share(first)
    assert score.value == pytest.approx(alone.first)
    assert (score.low, score.high) == pytest.approx((alone.low, alone.high), abs=0.5)


def test_intervals_known_answers() -> None:
    assert share(np.ones(50, bool)) == (100, 100, 100)
    assert share(np.zeros(50, bool)) == (0, 0, 0)
    same = np.arange(50) % 3 == 0
    assert share_difference(same, same) == (0, 0, 0)
    score = share(np.arange(1000) < 500)
    half = 1.96 * np.sqrt(0.25 / 1000) * 100
    assert (score.low, score.high) == pytest.approx((50 - half, 50 + half), abs=0.2)


def test_the_majority_is_that_of_the_training_examples() -> None:
    assert majority(np.array([0, 0, 1]), np.array([0, 1, 1, 1])) == 25


# --- control tasks ---


def test_a_control_label_belongs_to_its_text_alone() -> None:
    texts = [f"sentence {i % 50}" for i in range(400)]
    labels = np.arange(400) % 4
    found = control_labels(texts, labels, seed=1)
    order = np.random.default_rng(0).permutation(400)
    moved = control_labels([texts[i] for i in order], labels[order], seed=1)
    assert (found[order] == moved).all()
    assert all(len(set(found[i::50])) == 1 for i in range(50))
    assert (found != control_labels(texts, labels, seed=2)).any()


def test_control_labels_are_spread_as_the_real_ones() -> None:
    labels = np.repeat([0, 1, 2, -1], [6000, 3000, 1000, 500])
    found = control_labels([f"s{i}" for i in range(len(labels))], labels, seed=0)
    assert np.bincount(found) / len(found) == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_unseen_share_known_answer() -> None:
    texts = ["a", "b", "c", "a", "d"]
    assert unseen_share(texts, np.array([0, 1]), np.array([2, 3, 4])) == pytest.approx(200 / 3)


def test_a_probe_that_memorises_has_no_selectivity_on_sentences_it_knows() -> None:
    """One-hot sentences that are all seen: a control label is as easy as a real one."""
    types, times = 40, 6
    texts = [f"s{i % types}" for i in range(types * times)]
    labels = np.array([i % types % 3 for i in range(types * times)])
    values = np.eye(types, dtype=np.float32)[[i % types for i in range(types * times)]] * 3
    options = ProbeOptions(max_epochs=200, weight_decays=(0.0,), tenacity=1000, lr=0.05)
    data = as_data(labels, options, texts=texts)
    inputs = Inputs(torch.from_numpy(values).unsqueeze(1))
    probes = problem(inputs, labels, options)
    found = measure(probes, data)
    scored = 100 * found.correct.mean(axis=1)
    (control,) = measure_control(probes, data, found.weight_decay, found.epochs, scored)
    assert scored[0] == 100
    assert control.memorised > 99
    assert control.unseen == 0
    assert control.selectivity == pytest.approx(0, abs=1)
    assert control.selectivity == pytest.approx(100 - control.accuracy)


def test_a_probe_of_what_is_encoded_is_selective() -> None:
    options = ProbeOptions(max_epochs=40)
    inputs, labels = blobs(2000, 2, 8, noise=0.5)
    data = as_data(labels, options)
    probes = problem(inputs, labels, options)
    found = measure(probes, data)
    scored = 100 * found.correct.mean(axis=1)
    (control,) = measure_control(probes, data, found.weight_decay, found.epochs, scored)
    assert control.unseen == 100
    assert control.selectivity > 30
    assert control.accuracy == pytest.approx(50, abs=8)


# --- description length ---


def test_blocks_of_the_paper() -> None:
    ends = block_ends(8000)
    assert ends == [8, 16, 32, 64, 128, 256, 500, 1000, 2000, 4000, 8000]
    assert block_ends(3) == [1, 2, 3]


@given(st.integers(2, 5000), st.integers(2, 1000))
def test_a_uniform_predictor_compresses_exactly_once(examples: int, classes: int) -> None:
    code = code_length(
        examples, classes, lambda begin, end: np.full(3, (end - begin) * np.log2(classes))
    )
    assert code.uniform_bits == pytest.approx(examples * np.log2(classes), rel=1e-12)
    assert code.bits == pytest.approx(code.uniform_bits, rel=1e-12)
    assert code.compression == pytest.approx(1.0, rel=1e-12)


def test_a_perfect_predictor_pays_for_the_first_block_alone() -> None:
    code = code_length(8000, 4, lambda begin, end: np.zeros(1))
    assert code.bits[0] == 8 * 2
    assert code.compression[0] == 1000


def test_probes_that_cannot_tell_code_as_the_uniform_code() -> None:
    """All inputs 0 and balanced labels: what is left is the cost of learning nothing."""
    labels = np.arange(4000) % 4
    inputs = Inputs(torch.zeros(4000, 1, 5))
    rows = torch.arange(4000)
    options = ProbeOptions(max_epochs=20, batch_size=512)
    code = online_code(problem(inputs, labels, options), rows[:3000], rows[3000:])
    assert code.compression[0] == pytest.approx(1.0, abs=0.02)


def test_the_probes_of_small_blocks_are_trained_until_they_no_longer_improve() -> None:
    """More epochs than are allowed change nothing: no block ends because it ran out of them."""
    inputs, labels = blobs(1500, 4, 10, noise=1.0)
    rows = torch.arange(1500)

    def bits(epochs: int) -> float:
        options = ProbeOptions(max_epochs=epochs, weight_decays=(1e-5,), lr=0.01)
        code = online_code(problem(inputs, labels, options), rows[:1000], rows[1000:])
        return float(code.bits[0])

    assert bits(200) == pytest.approx(bits(600), rel=1e-3)


def test_an_easier_input_has_the_shorter_code() -> None:
    easy, labels = blobs(3000, 4, 10, noise=0.5)
    hard, same = blobs(3000, 4, 10, noise=2.0)
    assert (labels == same).all()
    inputs = Inputs(torch.cat([easy.values, hard.values], dim=1))
    rows = torch.arange(3000)
    options = ProbeOptions(max_epochs=60)
    code = online_code(problem(inputs, labels, options), rows[:2000], rows[2000:])
    assert code.bits[0] < code.bits[1] / 2
    assert code.compression[0] > 2.5
    assert code.compression[1] > 1
