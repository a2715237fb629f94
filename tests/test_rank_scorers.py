"""Scorers of passages, their training and inputs, BM25, and the metrics of a ranking."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import pytrec_eval
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rankings import candidates, random_candidates

from bertvision.errors import InputError, NonFiniteError
from bertvision.pipelines.extraction.layers import parse_inputs
from bertvision.pipelines.readouts.inputs import end_to_end
from bertvision.pipelines.readouts.options import SCORERS, RankOptions, ScorerName
from bertvision.pipelines.readouts.rank import (
    Batch,
    Bilinear,
    Trained,
    Vectors,
    hinge_loss,
    make_scorer,
    scaled,
    score,
    train,
)
from bertvision.pipelines.readouts.rank_metrics import (
    Candidates,
    QuestionScores,
    bm25,
    expected_at_random,
    ranks,
    score_questions,
    summary,
    tie_order,
)
from bertvision.pipelines.tasks.data import Sentence
from bertvision.pipelines.tasks.sentences.ranking import RankingData

LEARNED = [name for name in SCORERS if name != "cosine"]
QUICK = RankOptions(epochs=3)


def vectors(of: Candidates, inputs: int, width: int, seed: int) -> Vectors:
    """Random vectors of all queries and passages."""
    generator = torch.Generator().manual_seed(seed)
    queries, passages = int(of.query.max()) + 1, int(of.passage.max()) + 1
    return Vectors(
        torch.randn(inputs, queries, width, generator=generator),
        torch.randn(inputs, passages, width, generator=generator),
    )


def mean_ap(trained: Trained, of: Vectors, test: Candidates) -> float:
    found = score_questions(score(trained.scorer, of, test), test.label, test.question, test.tie)
    return float(found.ap.mean())


def test_a_bilinear_scorer_starts_as_the_dot_product() -> None:
    of = random_candidates(5, seed=0)
    given = vectors(of, inputs=2, width=7, seed=1)
    scores = score(make_scorer("bilinear", 2, 7, 0), given, of)
    u, v = given.queries[:, of.query], given.passages[:, of.passage]
    torch.testing.assert_close(torch.from_numpy(scores), (u * v).sum(-1))


def test_a_bilinear_scorer_is_u_w_v() -> None:
    scorer = Bilinear(1, 3)
    with torch.no_grad():
        scorer.change.copy_(torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(0)))
    u, v = torch.randn(2, 1, 5, 3, generator=torch.Generator().manual_seed(1))
    expected = torch.stack([u[0, i] @ scorer.weight[0] @ v[0, i] for i in range(5)])
    torch.testing.assert_close(scorer.score(u, v)[0], expected)
    rows = torch.tensor([4, 0, 0, 2]), torch.tensor([1, 3, 2, 2])
    torch.testing.assert_close(
        scorer(u, v, *rows), scorer.score(u[:, rows[0]], v[:, rows[1]]), check_stride=False
    )


def test_a_cosine_ignores_the_lengths_of_vectors() -> None:
    scorer = make_scorer("cosine", 1, 4, 0)
    u, v = torch.randn(2, 1, 6, 4, generator=torch.Generator().manual_seed(2))
    expected = (u * v).sum(-1) / (u.norm(dim=-1) * v.norm(dim=-1))
    torch.testing.assert_close(scorer.score(3 * u, 0.1 * v), expected)
    assert (scorer.score(0 * u, v) == 0).all()


def test_a_linear_scorer_of_u_and_v_alone_prefers_the_same_passage_for_every_question() -> None:
    scorer = make_scorer("logistic-uv", 1, 4, 0)
    with torch.no_grad():
        scorer.weight.normal_(generator=torch.Generator().manual_seed(0))  # type: ignore[operator]
    queries, passages = torch.randn(2, 1, 2, 4, generator=torch.Generator().manual_seed(1))
    first, second = (
        scorer(queries, passages, torch.tensor([q, q]), torch.tensor([0, 1]))[0] for q in (0, 1)
    )
    torch.testing.assert_close(first[0] - first[1], second[0] - second[1])


def test_the_hinge_pulls_the_right_way_and_stops_at_the_margin() -> None:
    scores = torch.tensor([[0.0, 0.5, -2.0], [3.0, 0.5, -2.0]], requires_grad=True)
    rows = torch.zeros(3, dtype=torch.int64)
    pairs = torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([0.25, 0.75])
    loss = hinge_loss(scores, Batch(rows, rows, *pairs), margin=1.0)
    # input 0: the first pair falls short by 1.5, the second is farther apart than the margin
    assert loss.tolist() == [0.25 * 1.5, 0.0]
    loss.sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[-0.25, 0.25, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("name", LEARNED)
def test_inputs_trained_together_learn_what_each_learns_alone(name: ScorerName) -> None:
    of = random_candidates(40, seed=5)
    given = vectors(of, inputs=3, width=6, seed=6)
    parts = {"train": of, "dev": random_candidates(40, seed=5)}
    training = RankOptions(epochs=12, patience=2, batch_size=16, lr=1e-2)
    together = train(name, given, parts, training, seed=1)
    for i in range(3):
        one = given.take([i])
        alone = train(name, one, parts, training, seed=1)
        assert alone.epochs == [together.epochs[i]]
        np.testing.assert_allclose(alone.curves[0], together.curves[i])
        scores = score(alone.scorer, one, of)[0], score(together.scorer, given, of)[i]
        np.testing.assert_allclose(*(centred(s, of.question) for s in scores), atol=1e-4)


def centred(
    scores: npt.NDArray[np.floating], question: npt.NDArray[np.integer]
) -> npt.NDArray[np.floating]:
    """Scores about the mean of their question.

    The loss compares candidates of a question alone. So what shifts all of them has no gradient but
    rounding, which Adam makes whole steps of, in a direction that depends on the processor.
    """
    number = np.unique(question, return_inverse=True)[1]
    return scores - (np.bincount(number, scores) / np.bincount(number))[number]


def test_another_seed_is_another_training_and_the_same_seed_the_same() -> None:
    of = random_candidates(30, seed=7)
    given, parts = vectors(of, inputs=1, width=6, seed=8), {"train": of, "dev": of}
    first, again, other = (
        score(train("mlp", given, parts, QUICK, seed=seed).scorer, given, of) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3


def test_the_epoch_that_is_best_on_dev_is_kept() -> None:
    of, dev = random_candidates(60, seed=9), random_candidates(60, seed=9)
    given = vectors(of, inputs=4, width=8, seed=10)
    training = RankOptions(epochs=8, patience=3, lr=1e-2)
    found = train("logistic", given, {"train": of, "dev": dev}, training)
    scores = score(found.scorer, given, dev)
    maps = 100 * score_questions(scores, dev.label, dev.question, dev.tie).ap.mean(-1)
    for epoch, curve, value in zip(found.epochs, found.curves, maps, strict=True):
        assert curve[epoch] == max(curve)
        assert curve.index(max(curve)) == epoch  # the first of equals
        assert len(curve) == min(epoch + 3, 8) + 1
        assert value == pytest.approx(curve[epoch])


def test_a_scorer_that_never_gets_better_stays_as_it_was() -> None:
    of = random_candidates(10, seed=11)
    given = vectors(of, inputs=1, width=4, seed=12)
    found = train("bilinear", given, {"train": of, "dev": of}, RankOptions(epochs=0))
    assert found.epochs == [0]
    assert (found.scorer.change == 0).all()


def _rotated(seed: int) -> tuple[Vectors, dict[str, Candidates]]:
    """Questions that the passages answer whose vector is the query's, turned: (vectors, parts)."""
    sizes = {"train": 300, "dev": 60, "test": 100}
    parts = {part: random_candidates(n, seed=n) for part, n in sizes.items()}
    width, random = 8, torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(width, width, generator=random))[0]
    queries, passages, found, q, p = [], [], {}, 0, 0
    for part, of in parts.items():
        u = torch.randn(len(of.questions), width, generator=random)
        v = torch.randn(len(of), width, generator=random)
        answers = torch.from_numpy(of.label == 1)
        v[answers] = (u @ turn)[of.question[of.label == 1]] + 0.3 * v[answers]
        queries.append(u)
        passages.append(v)
        found[part] = Candidates(
            of.questions, of.question, of.query + q, of.passage + p, of.label, of.tie
        )
        q, p = q + len(u), p + len(v)
    return Vectors(torch.cat(queries)[None], torch.cat(passages)[None]), found


def test_a_bilinear_scorer_finds_what_the_cosine_cannot_see() -> None:
    given, parts = _rotated(0)
    cosine = train("cosine", given, parts, QUICK)
    learned = train("bilinear", given, parts, RankOptions(epochs=40, lr=1e-2))
    test = parts["test"]
    chance = expected_at_random(test.label, test.question).ap.mean()
    assert mean_ap(cosine, given, test) < chance + 0.1
    assert mean_ap(learned, given, test) > 0.85


@pytest.mark.parametrize("name", SCORERS)
def test_shuffled_labels_leave_chance_within_three_standard_errors(name: ScorerName) -> None:
    given, parts = _rotated(1)
    random = np.random.default_rng(2)
    mixed = {}
    for part, of in parts.items():
        order = np.lexsort((random.random(len(of)), of.question))
        mixed[part] = Candidates(
            of.questions, of.question, of.query, of.passage, of.label[order], of.tie
        )
    test = mixed["test"]
    trained = train(name, scaled(given, name, mixed["train"]), mixed, QUICK)
    read = scaled(given, name, mixed["train"])
    scores = score(trained.scorer, read, test)[0]
    difference = (
        score_questions(scores, test.label, test.question, test.tie).ap
        - expected_at_random(test.label, test.question).ap
    )
    assert abs(difference.mean()) < 3 * difference.std() / math.sqrt(len(difference))


def test_data_from_which_nothing_can_be_learned_are_refused() -> None:
    one_sided, fine = candidates([[1, 1], [0, 0, 0]]), candidates([[1, 0], [1, 0], [0]])
    given = vectors(fine, inputs=1, width=2, seed=0)
    with pytest.raises(InputError, match="none of 2 training questions has both"):
        train("logistic", given, {"train": one_sided, "dev": fine}, QUICK)
    with pytest.raises(InputError, match="none of 1 dev questions has a positive"):
        train("logistic", given, {"train": fine, "dev": candidates([[0, 0]])}, QUICK)


def test_layers_are_read_as_they_are_written() -> None:
    stored = [0, 1, 3, 4, 5]  # of 4 layers; 5 is the pooler's output
    assert parse_inputs("all", 4, stored) == [(0,), (1,), (3,), (4,)]
    assert parse_inputs("first+last, 3, all,5", 4, stored) == [(1, 4), (3,), (0,), (1,), (4,), (5,)]
    with pytest.raises(InputError, match="there is no layer 2; there are 0,1,3,4,5"):
        parse_inputs("0,2", 4, stored)
    with pytest.raises(InputError, match="'top' is no layer"):
        parse_inputs("top", 4, stored)
    for twice in ("3+3", "first+1"):
        with pytest.raises(InputError, match=r"--layers '.*': join two different layers"):
            parse_inputs(twice, 4, stored)


def test_layers_end_to_end_are_one_wide_input() -> None:
    passages = np.random.default_rng(0).normal(size=(5, 3, 4)).astype(np.float32)
    given = end_to_end(passages, [1, 3, 6], [(1, 6), (6, 3)])
    assert given.shape == (5, 2, 8)
    np.testing.assert_array_equal(given[:, 1, :4], passages[:, 2])
    np.testing.assert_array_equal(given[:, 1, 4:], passages[:, 1])


def test_scales_are_those_of_the_training_data_alone() -> None:
    of = random_candidates(50, seed=13)
    given = vectors(of, inputs=2, width=5, seed=14)
    given.queries[:, :, 2] = 7.0  # a channel that says nothing
    some = Candidates(
        of.questions[:30],
        *(a[of.question < 30] for a in (of.question, of.query, of.passage, of.label, of.tie)),
    )
    read = scaled(given, "mlp", some)
    known = read.passages[:, np.unique(some.passage)]
    torch.testing.assert_close(known.mean(1), torch.zeros(2, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(known.std(1, correction=0), torch.ones(2, 5))
    assert (read.queries[:, :, 2] == 0).all()
    lengths = scaled(given, "bilinear", some).passages.norm(dim=-1)
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


def _texts(queries: list[str], passages: list[str]) -> RankingData:
    return RankingData(
        [Sentence(str(i), text) for i, text in enumerate(queries)],
        [Sentence(str(i), text) for i, text in enumerate(passages)],
        [],
        "",
        [],
    )


def _all_pairs(queries: int, passages: int) -> Candidates:
    question = np.repeat(np.arange(queries), passages)
    passage = np.tile(np.arange(passages), queries)
    ids = [f"q{i}" for i in range(queries)]
    ties = tie_order([str(i) for i in passage])
    return Candidates(ids, question, question, passage, np.zeros(len(passage), int), ties)


def test_bm25_is_the_formula() -> None:
    passages = ["the red river Red", "a green river runs", "cities", "it is"]
    data = _texts(["red river ?", "who is it"], passages)
    scores = bm25(data, _all_pairs(2, 4)).reshape(2, 4)
    words = [["red", "river", "red"], ["green", "river", "runs"], ["cities"], []]
    mean = sum(map(len, words)) / 4

    def term(word: str, passage: list[str]) -> float:
        df, tf = sum(word in other for other in words), passage.count(word)
        idf = math.log(1 + (4 - df + 0.5) / (df + 0.5))
        return idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(passage) / mean))

    expected = [term("red", passage) + term("river", passage) for passage in words]
    np.testing.assert_allclose(scores[0], expected, rtol=1e-5)
    assert (scores[1] == 0).all()  # "who" stands in no passage, the rest are stop words


def test_bm25_of_passages_without_words_is_zero() -> None:
    assert bm25(_texts(["red"], ["a", "?"]), _all_pairs(1, 2)).tolist() == [0, 0]


def scored(of: Candidates, scores: object) -> QuestionScores:
    return score_questions(np.asarray(scores), of.label, of.question, of.tie)


def test_known_answers() -> None:
    of = candidates([[1, 0, 1, 0], [0, 1, 0]])
    found = scored(of, [4, 3, 2, 1, 3, 2, 1])
    assert found.ap.tolist() == [(1 + 2 / 3) / 2, 1 / 2]
    assert found.rr.tolist() == [1, 1 / 2]
    assert found.p1.tolist() == [1, 0]
    metrics = summary(found, 2)
    assert metrics.map == pytest.approx(100 * (5 / 6 + 1 / 2) / 2)
    assert (metrics.mrr, metrics.p1) == (75, 50)


def test_a_perfect_scorer_gets_everything_and_its_opposite_the_least() -> None:
    of = random_candidates(50, seed=1)
    assert summary(scored(of, of.label), 50)[:3] == (100, 100, 100)
    worst = scored(of, -of.label)
    assert (worst.p1 == 0).all()
    n, r = np.bincount(of.question), np.bincount(of.question, weights=of.label)
    np.testing.assert_allclose(worst.rr, 1 / (n - r + 1))


def test_questions_without_a_positive_passage_are_left_out_and_counted() -> None:
    of = candidates([[0, 1], [0, 0, 0], [1, 0], [0]])
    metrics = summary(scored(of, np.zeros(8)), 4)
    assert (metrics.questions, metrics.without_positive) == (2, 2)
    # equal scores: the greater id first, which is the second passage of each question
    assert metrics.map == 100 * (1 + 1 / 2) / 2
    assert metrics.map_all == metrics.map / 2
    assert (metrics.mrr_all, metrics.p1_all) == (metrics.mrr / 2, metrics.p1 / 2)
    with pytest.raises(InputError, match="none of 1 questions has a positive"):
        summary(scored(candidates([[0, 0]]), [1, 2]), 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused(value: float) -> None:
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        ranks(np.array([1.0, value]), np.zeros(2, int), np.arange(2))


ranked_questions = st.lists(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(-4, 4), st.integers(0, 15)),
        min_size=1,
        max_size=12,
        unique_by=lambda passage: passage[2],
    ),
    min_size=1,
    max_size=6,
)


@given(ranked_questions)
def test_the_metrics_are_those_of_trec_eval_ties_included(
    rows: list[list[tuple[int, int, int]]],
) -> None:
    ids = [f"{name:x}" for row in rows for _, _, name in row]
    of = candidates([[label for label, _, _ in row] for row in rows], ids)
    scores = np.array([score / 4 for row in rows for _, score, _ in row], np.float32)
    found = scored(of, scores)
    qrels = {f"q{i}": {f"{n:x}": label for label, _, n in row} for i, row in enumerate(rows)}
    run = {f"q{i}": {f"{n:x}": score / 4 for _, score, n in row} for i, row in enumerate(rows)}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"map", "recip_rank", "P_1"})
    theirs = evaluator.evaluate(run)
    answered = [f"q{i}" for i, row in enumerate(rows) if any(label for label, _, _ in row)]
    for values, name in zip(found, ("map", "recip_rank", "P_1"), strict=True):
        np.testing.assert_allclose(values, [theirs[q][name] for q in answered], atol=1e-12)


@settings(max_examples=30)
@given(ranked_questions, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_changes_nothing(
    rows: list[list[tuple[int, int, int]]], random: object
) -> None:
    ids = [f"{name:x}" for row in rows for _, _, name in row]
    of = candidates([[label for label, _, _ in row] for row in rows], ids)
    scores = np.array([score for row in rows for _, score, _ in row])
    order = np.arange(len(of))
    random.shuffle(order)  # type: ignore[attr-defined]
    mixed = score_questions(scores[order], of.label[order], of.question[order], of.tie[order])
    for before, after in zip(scored(of, scores), mixed, strict=True):
        np.testing.assert_array_equal(before, after)


def test_systems_scored_together_are_scored_as_if_alone() -> None:
    of = random_candidates(20, seed=2)
    scores = np.random.default_rng(0).normal(size=(3, len(of)))
    together = scored(of, scores)
    for i in range(3):
        for all_, one in zip(together, scored(of, scores[i]), strict=True):
            np.testing.assert_array_equal(all_[i], one)


@pytest.mark.parametrize(("n", "r"), [(1, 1), (4, 1), (5, 2), (6, 6), (6, 5)])
def test_expectations_are_the_means_over_all_orders(n: int, r: int) -> None:
    of = candidates([[1] * r + [0] * (n - r)])
    orders = np.array(list(itertools.permutations(range(n))), float)
    everything, expected = scored(of, orders), expected_at_random(of.label, of.question)
    for values, mean in zip(everything, expected, strict=True):
        assert values.mean() == pytest.approx(mean[0], abs=1e-12)


def test_shuffled_scores_give_the_expected_map_within_three_standard_errors() -> None:
    of = random_candidates(1000, seed=3)
    found = scored(of, np.random.default_rng(4).permutation(len(of)))
    for values, expected in zip(found, expected_at_random(of.label, of.question), strict=True):
        difference = values - expected
        assert abs(difference.mean()) < 3 * difference.std() / math.sqrt(len(difference))


def test_equal_scores_come_in_the_order_of_descending_ids() -> None:
    tie = tie_order(["b", "10", "9", "b"])
    assert tie.tolist() == [0, 2, 1, 0]
    assert ranks(np.zeros(3), np.zeros(3, int), tie[:3]).tolist() == [1, 3, 2]
