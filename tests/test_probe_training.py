"""Probes trained together are those trained alone, and both are what the literature trains."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from probing import as_data, blobs, problem
from torch import nn

from bertvision.pipelines.readouts.batched import (
    EarlyStopping,
    FixedEpochs,
    Stack,
)
from bertvision.pipelines.readouts.batched import train as train_batched
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import (
    Batch,
    Classifiers,
    Inputs,
    logits,
)
from bertvision.pipelines.readouts.probe_data import majority
from bertvision.pipelines.readouts.probe_measures import measure

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
    from bertvision.pipelines.tasks.sentences.senteval import PROBING

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
    for given in (inputs, turned):
        found = problem(given, labels, options).train(learn, learn, "loss")
        probabilities.append(logits(found.parameters, given.take(test)).softmax(-1))
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

    inputs, labels = blobs(6000, 3, 30, noise=4.0, seed=4)
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
