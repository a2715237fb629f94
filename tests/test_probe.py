"""Probes trained together are those trained alone, and what they are held to is what it says."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from probing import as_data, blobs, problem
from torch import nn

from bertvision.errors import InputError, WorkspaceError
from bertvision.pipelines.readouts.batched import (
    EarlyStopping,
    FixedEpochs,
    Stack,
)
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.directions import SavedProbe, saved_probes
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import (
    Batch,
    Classifiers,
    Inputs,
    logits,
)
from bertvision.pipelines.readouts.probe_data import Labelled, majority, partition, stratified
from bertvision.pipelines.readouts.probe_measures import (
    block_ends,
    code_length,
    control_labels,
    extended_basis,
    measure,
    measure_control,
    measure_inlp,
    online_code,
    unseen_share,
)
from bertvision.pipelines.uncertainty import paired_bootstrap, share, share_difference

QUICK = ProbeOptions(max_epochs=12)


def rows(*ends: int) -> list[torch.Tensor]:
    return [torch.arange(a, b) for a, b in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize("hidden", [0, 7], ids=["linear", "mlp"])
@pytest.mark.parametrize("standardise", [False, True], ids=["raw", "standardised"])
def test_probes_trained_together_are_those_trained_one_by_one(
    hidden: int, standardise: bool
) -> None:
    options = replace(QUICK, hidden=hidden, standardise=standardise, tenacity=0)
    inputs, labels = blobs(400, 5, 12, inputs=4, noise=2.5)
    data = as_data(labels, options)
    together = measure(problem(inputs, labels, options), data)
    assert len(set(together.epochs.ravel())) > 1  # some left before others
    for i in range(inputs.count):
        own = Inputs(inputs.values[:, [i]].contiguous())
        for decay in options.weight_decays:
            alone = replace(options, weight_decays=(decay,))
            found = measure(problem(own, labels, alone), data)
            if decay != together.weight_decay[0, i]:
                assert found.held_out[0] <= together.held_out[i] + 1e-9
                continue
            assert found.held_out[0] == together.held_out[i]
            assert found.epochs[0, 0] == together.epochs[0, i]
            assert (found.correct[0] == together.correct[i]).all()


def stacked(
    models: int, rule: EarlyStopping | FixedEpochs, *, hidden: int = 0, decay: float = 0.1
) -> Stack[Batch]:
    adam = partial(torch.optim.Adam, lr=0.01, weight_decay=decay, fused=True)
    readout = Classifiers(6, 4, hidden, np.arange(models))
    return Stack(readout, 5, adam, rule, torch.device("cpu"))


@pytest.mark.parametrize("hidden", [0, 7], ids=["linear", "mlp"])
def test_a_step_is_that_of_torch_with_the_weight_decay_on_everything(hidden: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 20, 6), torch.randint(0, 4, (20,))
    probes = stacked(3, EarlyStopping(3, 1), hidden=hidden)
    starts = [p.detach().clone() for p in probes.parameters]
    assert all((p[0] == p[2]).all() for p in starts)  # the same start for every input
    for _ in range(5):
        probes.step(Batch(x, y))
    for i in range(3):
        layers = [nn.Linear(6, 7), nn.Sigmoid(), nn.Linear(7, 4)] if hidden else [nn.Linear(6, 4)]
        model = nn.Sequential(*layers)
        with torch.no_grad():
            for own, part in zip(model.parameters(), starts, strict=True):
                own.copy_(part[i])
        adam = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(5):
            adam.zero_grad()
            nn.functional.cross_entropy(model(x[i]), y).backward()
            adam.step()
        torch.testing.assert_close(logits(probes.parameters, x)[i], model(x[i]))


def test_probes_that_leave_do_not_disturb_those_that_stay() -> None:
    torch.manual_seed(0)
    batch = Batch(torch.randn(3, 20, 6), torch.randint(0, 4, (20,)))
    whole = stacked(3, FixedEpochs(np.array([2, 2, 2])), decay=0.01)
    part = stacked(3, FixedEpochs(np.array([2, 1, 2])), decay=0.01)
    train_batched([whole, part], lambda epoch: [batch] * 4, epochs=2)
    for a, b in zip(part.best, whole.best, strict=True):
        torch.testing.assert_close(a[[0, 2]], b[[0, 2]])
        assert not torch.equal(a[1], b[1])
    assert part.epochs.tolist() == [2, 1, 2]


def test_early_stopping_known_answer() -> None:
    # new bests at looks 1 and 3; the third miss, at look 5, ends it: nothing counts any more
    scores = [0.5, 0.4, 0.6, 0.6, 0.55, 0.7, 0.7, 0.69]
    rule = EarlyStopping(1, misses=3)
    looks = [rule.look(np.array([s])) for s in scores]
    assert [bool(look.improved[0]) for look in looks] == [True, False, True] + [False] * 5
    assert [bool(look.stopped[0]) for look in looks] == [False] * 4 + [True] * 4
    assert rule.best[0] == 0.6


def test_misses_are_counted_over_the_whole_training() -> None:
    rule = EarlyStopping(2, misses=6)
    ended = [
        tuple(rule.look(np.array([a, 0.1 * i])).stopped)
        for i, a in enumerate([0.5, 0.4, 0.4, 0.6, 0.5, 0.5, 0.5, 0.5])
    ]
    assert ended == [(False, False)] * 7 + [(True, False)]


def test_the_chosen_probe_is_the_one_of_the_best_look() -> None:
    inputs, labels = blobs(600, 3, 5, noise=2.0)
    learn, held_out, test = rows(300, 450, 600)
    options = ProbeOptions(max_epochs=40, tenacity=1, weight_decays=(1e-4,))
    probes = problem(inputs, labels, options)
    chosen = probes.train(learn, held_out)
    again = probes.train_alike(learn, chosen.weight_decay, chosen.epochs)
    assert chosen.epochs[0] < 40
    torch.testing.assert_close(chosen.parameters, again.parameters)
    right = probes.predictions(chosen.parameters, held_out)[0] == labels[300:450]
    assert right.mean() == pytest.approx(chosen.held_out[0])


def test_ties_take_the_smallest_weight_decay() -> None:
    inputs, labels = blobs(200, 2, 4, noise=0.01)
    options = ProbeOptions(max_epochs=20, lr=0.1)
    learn, held_out = rows(150, 200)
    found = problem(inputs, labels, options).train(learn, held_out)
    assert found.held_out[0] == 1
    assert found.weight_decay[0] == 1e-5


@pytest.mark.parametrize("hidden", [0, 50], ids=["linear", "mlp"])
def test_a_perfectly_encoded_label_gives_100(hidden: int) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 6, 1200)
    values = random.standard_normal((1200, 1, 20)).astype(np.float32)
    values[:, 0, :6] = 5 * np.eye(6)[labels]
    options = ProbeOptions(max_epochs=100, hidden=hidden)
    found = measure(
        problem(Inputs(torch.from_numpy(values)), labels, options), as_data(labels, options)
    )
    assert found.correct.all()


SHARES = {
    "sentence_length": np.ones(6),
    "word_content": np.ones(50),  # of a thousand
    "tree_depth": np.array([8.0, 12, 13, 11, 9, 6, 4]),
    "top_constituents": np.ones(20),
    "bigram_shift": np.ones(2),
    "past_present": np.ones(2),
    "subj_number": np.ones(2),
    "obj_number": np.ones(2),
    "odd_man_out": np.ones(2),
    "coordination_inversion": np.ones(2),
    "cr": np.array([36.0, 64]),
    "trec": np.array([1.6, 22, 23, 21, 16.4, 16]),
}
"""How the classes of the probing tasks, and of the downstream sets that are skewed, are spread."""


def test_every_probing_task_is_among_the_shares() -> None:
    from bertvision.pipelines.tasks.registry import PROBING

    assert set(PROBING) <= set(SHARES)


OFTEN = {"word_content", "tree_depth", "subj_number", "trec"}
"""Many classes, skewed ones, two, and both: every run of the tests sees these."""


@pytest.mark.parametrize(
    "task", [t if t in OFTEN else pytest.param(t, marks=pytest.mark.slow) for t in SHARES]
)
def test_shuffled_labels_score_the_majority(task: str) -> None:
    random = np.random.default_rng(sum(map(ord, task)))
    shares = SHARES[task] / SHARES[task].sum()
    labels = random.choice(len(shares), 3000, p=shares)
    centres = random.standard_normal((len(shares), 2, 8))
    values = centres[labels] + random.standard_normal((len(labels), 2, 8))
    labels = random.permutation(labels)
    options = ProbeOptions(lr=5e-3, max_epochs=60)
    data = as_data(labels, options)
    found = measure(
        problem(Inputs(torch.from_numpy(values.astype(np.float32))), labels, options), data
    )
    fold = data.folds[0]
    guess = majority(labels[fold.train], labels[fold.test])
    error = np.sqrt(guess * (100 - guess) / len(fold.test))
    assert 100 * found.correct.mean(axis=1) == pytest.approx(guess, abs=3 * error)


def test_an_unregularised_probe_does_not_change_under_rotation() -> None:
    """Full-batch training to the optimum: Adam itself is not invariant, the optimum is."""
    inputs, labels = blobs(900, 3, 10, noise=3.0)
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((10, 10)))[0]
    turned = Inputs(inputs.values @ torch.from_numpy(turn.astype(np.float32)))
    options = ProbeOptions(
        weight_decays=(0.0,), max_epochs=600, tenacity=10_000, batch_size=900, lr=0.03
    )
    learn, _, test = rows(450, 600, 900)
    probabilities = []
    for features in (inputs, turned):
        found = problem(features, labels, options).train(learn, learn, "loss")
        probabilities.append(logits(found.parameters, features.take(test)).softmax(-1))
    torch.testing.assert_close(*probabilities, atol=2e-3, rtol=0)


def test_standardised_inputs_have_mean_0_and_deviation_1_on_the_training_examples() -> None:
    values = torch.randn(300, 2, 6) * torch.tensor([1.0, 50, 1e-3, 1, 1, 0]) + 7
    inputs = Inputs(values).standardised(torch.arange(200))
    taken = inputs.take(torch.arange(200))
    torch.testing.assert_close(taken.mean(1), torch.zeros(2, 6), atol=1e-3, rtol=0)
    torch.testing.assert_close(
        taken.std(1, correction=0),
        torch.tensor([1.0, 1, 1, 1, 1, 0]).expand(2, 6),
        rtol=1e-2,
        atol=0,
    )


@pytest.mark.parametrize("classes", [2, 6], ids=["binary", "six"])
def test_scores_are_those_of_scikit_learn(classes: int) -> None:
    """The same L2 penalty, both at their optimum: within half a point."""
    from sklearn.linear_model import LogisticRegression

    inputs, labels = blobs(4000, classes, 30, inputs=2, noise=4.0, seed=3)
    learn, held_out, test = rows(1000, 1500, 4000)
    decay = 0.01
    options = ProbeOptions(
        weight_decays=(decay,), max_epochs=300, tenacity=10_000, lr=0.02, batch_size=1000
    )
    probes = problem(inputs, labels, options)
    found = probes.train(learn, learn, "loss")
    scores = (probes.predictions(found.parameters, test) == labels[1500:]).mean(axis=1)
    for i in range(inputs.count):
        x = inputs.values[:, i].numpy()
        reference = LogisticRegression(C=1 / (decay * 1000), max_iter=1000)
        reference.fit(x[:1000], labels[:1000])
        assert 100 * scores[i] == pytest.approx(
            100 * reference.score(x[1500:], labels[1500:]), abs=0.5
        )
    assert scores.min() > 1.2 / classes  # something was learnt


def test_sentevals_protocol_is_close_to_the_optimum_of_scikit_learn() -> None:
    """Early stopping and batches of 64 included, over SentEval's weight decays."""
    from sklearn.linear_model import LogisticRegression

    inputs, labels = blobs(3000, 3, 30, noise=4.0, seed=4)
    options = ProbeOptions()
    data = as_data(labels, options)
    found = measure(problem(inputs, labels, options), data)
    fold, x = data.folds[0], inputs.values[:, 0].numpy()
    scores = [
        LogisticRegression(C=1 / (decay * len(fold.train)), max_iter=1000)
        .fit(x[fold.train], labels[fold.train])
        .score(x[fold.test], labels[fold.test])
        for decay in options.weight_decays
    ]
    assert 100 * found.correct.mean() == pytest.approx(100 * max(scores), abs=1.0)


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
        block_ends(examples),
        classes,
        lambda begin, end: np.full(3, (end - begin) * np.log2(classes)),
    )
    assert code.uniform_bits == pytest.approx(examples * np.log2(classes), rel=1e-12)
    assert code.bits == pytest.approx(code.uniform_bits, rel=1e-12)
    assert code.compression == pytest.approx(1.0, rel=1e-12)


def test_a_perfect_predictor_pays_for_the_first_block_alone() -> None:
    code = code_length(block_ends(8000), 4, lambda begin, end: np.zeros(1))
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
    easy, labels = blobs(800, 4, 10, noise=0.5)
    hard, same = blobs(800, 4, 10, noise=2.0)
    assert (labels == same).all()
    inputs = Inputs(torch.cat([easy.values, hard.values], dim=1))
    rows = torch.arange(800)
    options = ProbeOptions(max_epochs=40)
    code = online_code(problem(inputs, labels, options), rows[:500], rows[500:])
    assert code.bits[0] < code.bits[1] / 2
    assert code.compression[0] > 2.5
    assert code.compression[1] > 1


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_probes_are_those_of_scikit_learn(classes: int) -> None:
    from sklearn.linear_model import LogisticRegression

    inputs, labels = blobs(600, classes, 12, inputs=3, noise=3.0, seed=5)
    decays = (1e-3, 1e-1)
    data_options = ProbeOptions(solver="lbfgs", weight_decays=decays)
    learn, held_out, test = rows(300, 450, 600)
    probes = problem(inputs, labels, data_options)
    trained = probes.train(learn, held_out)
    likely = probes.log_likelihoods(trained.parameters, test)
    for i in range(inputs.count):
        x = inputs.values[:, i].double().numpy()
        models = [
            LogisticRegression(C=1 / (decay * 300), max_iter=1000).fit(x[:300], labels[:300])
            for decay in decays
        ]
        scores = [model.score(x[300:450], labels[300:450]) for model in models]
        best = int(np.argmax(scores))
        assert trained.weight_decay[i] == decays[best]
        assert trained.held_out[i] == scores[best]
        wanted = models[best].predict_log_proba(x[450:])[np.arange(150), labels[450:]]
        assert likely[i] == pytest.approx(wanted, abs=1e-4)


def test_a_class_without_training_examples_is_never_given() -> None:
    inputs, labels = blobs(300, 3, 5, seed=6)
    learn = torch.from_numpy(np.flatnonzero(labels[:200] != 1))
    probes = problem(inputs, labels, ProbeOptions(solver="lbfgs"))
    given = probes.predictions(probes.train(learn, learn).parameters, torch.arange(200, 300))
    assert set(np.unique(given)) == {0, 2}


def test_the_optimum_of_a_hidden_layer_is_not_asked_for() -> None:
    with pytest.raises(InputError, match="--solver lbfgs is of linear probes"):
        ProbeOptions(solver="lbfgs", hidden=5)
    assert ProbeOptions().digest == ProbeOptions(solver="adam").digest
    assert ProbeOptions().digest != ProbeOptions(solver="lbfgs").digest


@pytest.mark.parametrize("standardise", [False, True])
def test_saved_weights_read_vectors_as_they_are(standardise: bool, tmp_path: Path) -> None:
    inputs, labels = blobs(400, 3, 8, inputs=2, noise=2.0, seed=7)
    options = ProbeOptions(solver="lbfgs", standardise=standardise)
    data, probes = as_data(labels, options), problem(inputs, labels, options)
    measured = measure(probes, data)
    saved = saved_probes(probes, data, measured.weight_decay[0], measured.epochs[0])
    test = data.folds[0].test
    for i, one in enumerate(saved):
        x = inputs.values[test, i].numpy()
        given = (x @ one.parameters["weight"].T + one.parameters["bias"]).argmax(axis=1)
        assert ((given == labels[test]) == measured.correct[i]).all()
        own = inputs.values[data.folds[0].train, i].numpy()
        mean = own[labels[data.folds[0].train] == 1].mean(axis=0)
        assert one.means[1] == pytest.approx(mean, abs=1e-5)
        digest = one.save(path := tmp_path / f"{i}.safetensors")
        read = SavedProbe.load(path, digest)
        assert read.classes == ("0", "1", "2")
        wanted = one.means[1] - (one.means[0] + one.means[2]) / 2
        assert read.direction("1", "means") == pytest.approx(wanted, abs=1e-5)
        with pytest.raises(InputError, match="name the class"):
            read.direction()
        with pytest.raises(InputError, match="choose one of 0, 1, 2"):
            read.direction("3")
        with pytest.raises(InputError, match="an index from 0 to 2"):
            read.direction(3)
        without = read._replace(
            means=np.vstack([read.means[:2], np.full_like(read.means[:1], np.nan)])
        )
        assert without.direction(1, "means") == pytest.approx(one.means[1] - one.means[0], abs=1e-5)
        with pytest.raises(InputError, match="class 2: .*no training examples"):
            without.direction("2", "means")
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        with pytest.raises(WorkspaceError, match="not as it was written"):
            SavedProbe.load(path, digest)


def test_what_null_space_projection_removes_is_gone() -> None:
    """Two classes along one direction: after it is removed, probes guess."""
    random = np.random.default_rng(8)
    labels = random.integers(0, 2, 1600)
    values = random.standard_normal((1600, 1, 6)).astype(np.float32)
    values[:, 0, 2] += 6 * labels
    inputs = Inputs(torch.from_numpy(values))
    options = ProbeOptions(solver="lbfgs", weight_decays=(1e-3,))
    (removed,) = measure_inlp(problem(inputs, labels, options), as_data(labels, options), 2)
    assert removed.accuracy[0] > 98
    assert len(removed.accuracy) == 3
    assert removed.directions == 2
    assert removed.accuracy[1] < 75  # the weights are not quite the direction
    assert removed.accuracy[2] == pytest.approx(50, abs=6)
    assert removed.mean_projection == pytest.approx(50, abs=6)


@given(st.integers(1, 4), st.integers(0, 3), st.integers(0, 100))
def test_projections_are_orthogonal_and_leave_the_rest(
    directions: int, more: int, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    basis = extended_basis(torch.zeros(0, 8), torch.randn(directions, 8, generator=drawn))
    basis = extended_basis(basis, torch.randn(more + 1, 8, generator=drawn))
    assert torch.allclose(basis @ basis.T, torch.eye(len(basis)), atol=1e-5)
    assert len(basis) == directions - 1 + more
    inputs = Inputs(torch.randn(5, 1, 8, generator=drawn))
    left = inputs.without([basis]).values[:, 0]
    assert torch.allclose(left @ basis.T, torch.zeros(5, len(basis)), atol=1e-5)
    again = Inputs(left.unsqueeze(1)).without([basis]).values[:, 0]
    assert torch.allclose(left, again, atol=1e-5)
