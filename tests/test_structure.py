"""Structure: trees and correlations against peers, probes on known trees, and the command."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from figures import Drawing
from hypothesis import given
from hypothesis import strategies as st
from reports import read_table
from scipy.stats import spearmanr
from terminal import done, run
from treebanks import ANNA, drawn_sentence, embedded, store_trees, write_treebank

from bertvision.errors import InputError
from bertvision.pipelines.analysis.structure import result_of
from bertvision.pipelines.readouts.batched import StackedAdam
from bertvision.pipelines.readouts.options import SYNTAX_METRICS, StructureOptions
from bertvision.pipelines.readouts.structure import (
    DepthProbes,
    DistanceProbes,
    Parts,
    RelationProbes,
    UposProbes,
    centre_of_gravity,
    expected_layer,
    majority,
    measure,
    structural,
    structural_scores,
    train,
    tree_baselines,
    unlearned,
)
from bertvision.pipelines.readouts.trees import (
    ByLength,
    Share,
    chain,
    depths,
    distance_correlation,
    distances,
    finds_root,
    gold_of,
    interval,
    n_edges,
    random_tree,
    rank_correlation,
    right_edges,
    score,
    spanning_trees,
)
from bertvision.pipelines.report.build import write_report
from bertvision.pipelines.tasks.treebank import ParsedSentence, blocks, parse
from bertvision.pipelines.workspace.workspace import Workspace

HIDDEN = 24
trees = st.tuples(st.integers(1, 25), st.integers(0, 2**31)).map(
    lambda drawn: random_tree(drawn[0], np.random.default_rng(drawn[1]))
)


def graph(heads: list[int]) -> nx.Graph:
    found = nx.Graph()
    found.add_nodes_from(range(len(heads)))
    found.add_edges_from((i, head - 1) for i, head in enumerate(heads) if head)
    return found


@given(trees)
def test_distances_and_depths_are_those_of_shortest_paths(heads: list[int]) -> None:
    tree = graph(heads)
    assert nx.is_tree(tree)
    np.testing.assert_array_equal(distances(heads), nx.floyd_warshall_numpy(tree))
    np.testing.assert_array_equal(depths(heads), distances(heads)[heads.index(0)])


def test_random_trees_are_uniform_over_labelled_trees_and_roots() -> None:
    random = np.random.default_rng(0)
    drawn = Counter(tuple(random_tree(4, random)) for _ in range(6400))
    assert len(drawn) == 4**2 * 4  # Cayley: 4^(4-2) trees, each with 4 roots
    assert max(abs(n - 100) for n in drawn.values()) < 45


@given(st.integers(1, 12), st.integers(0, 2**31))
def test_spanning_trees_are_those_of_networkx(nodes: int, seed: int) -> None:
    lengths = np.random.default_rng(seed).random((2, nodes, nodes))
    lengths = lengths + lengths.swapaxes(1, 2)
    found = spanning_trees(lengths)
    assert found.shape == (2, nodes - 1, 2)
    for edges, weights in zip(found, lengths, strict=True):
        peer = nx.minimum_spanning_tree(nx.from_numpy_array(weights))
        assert {frozenset(e) for e in edges.tolist()} == {frozenset(e) for e in peer.edges}


@given(st.integers(2, 12), st.integers(1, 6), st.integers(0, 2**31))
def test_rank_correlations_are_those_of_scipy_with_ties(n: int, values: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, y = random.integers(0, values + 1, (2, 3, n))
    found = rank_correlation(x.astype(float), y)
    for one, other, mine in zip(x, y, found, strict=True):
        tells = len(set(one.tolist())) > 1 and len(set(other.tolist())) > 1
        expected = spearmanr(one, other).statistic if tells else 0  # what tells nothing is 0
        assert mine == pytest.approx(expected, abs=1e-12)


def anna() -> ParsedSentence:
    return parse(next(blocks(ANNA)))


def test_scores_of_a_sentence_count_words_that_are_no_punctuation() -> None:
    gold = gold_of(anna())  # anna does n't live in the city .
    assert n_edges(gold) == 6
    right = gold.distances.astype(float)
    directed = right.copy()
    directed[7] = directed[:, 7] = -5  # the full stop is near to everything, and in no tree
    steps = np.abs(np.subtract.outer(np.arange(8), np.arange(8))).astype(float)
    found = right_edges(np.stack([right, directed, steps]), gold)
    assert found.tolist() == [6, 6, 2]  # n't–live and the–city are neighbours
    deep = gold.depths.astype(float)
    deep[7] = -1
    assert finds_root(np.stack([deep, -deep]), gold).tolist() == [True, False]
    assert distance_correlation(right, gold) == pytest.approx(1)
    by_scipy = np.mean([spearmanr(a, b).statistic for a, b in zip(steps, right, strict=True)])
    assert distance_correlation(steps, gold) == pytest.approx(by_scipy, abs=1e-12)


def test_scores_are_averaged_by_length_and_intervals_are_over_sentences() -> None:
    lengths = np.array([5, 5, 6, 4, 51, 9])
    values = np.array([[0.2, 0.4, 0.9, 9, 9, 0.0]])
    assert score(ByLength(values, lengths)).item() == pytest.approx((0.3 + 0.9 + 0.0) / 3)
    assert np.isnan(score(ByLength(values[:, 3:5], lengths[3:5]))).all()
    share = Share(np.array([[3.0, 0, 5]]), np.array([4.0, 0, 6]))
    assert score(share).item() == pytest.approx(0.8)
    random = np.random.default_rng(0)
    right = (random.random(400) < 0.7).astype(float)
    low, high = interval(Share(right[None], np.ones(400)), 2000)[0]
    error = 1.96 * np.sqrt(right.mean() * (1 - right.mean()) / 400)
    np.testing.assert_allclose([low, high], right.mean() + np.array([-error, error]), atol=0.01)
    many = ByLength(np.tile(right, (2, 1)), np.full(400, 7))
    np.testing.assert_allclose(interval(many, 2000)[1], [low, high])
    assert np.isnan(interval(ByLength(values[:, 3:5], lengths[3:5]), 5)).all()


def test_adam_with_a_rate_for_each_probe_is_torch_s() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(3, 4, 5), torch.randn(6, 3, 4, 5)
    mine, peer = start.clone(), start.clone().requires_grad_()
    adam, of_torch = StackedAdam([mine], 0.01), torch.optim.Adam([peer], lr=0.01)
    for k, gradient in enumerate(gradients):
        if k == 4:  # the last probe begins anew with a tenth of the rate, the others go on
            adam.slow_down(torch.tensor([False, False, True]))
            fresh = mine[2].clone().requires_grad_()
            restarted = torch.optim.Adam([fresh], lr=0.001)
        mine.grad = gradient.clone()
        adam.step()
        peer.grad = gradient.clone()
        of_torch.step()
        if k >= 4:
            fresh.grad = gradient[2].clone()
            restarted.step()
    torch.testing.assert_close(mine[:2], peer[:2].detach())
    torch.testing.assert_close(mine[2], fresh.detach())


def parts_of(folder: Path, layers: int = 2, sizes: tuple[int, int, int] = (60, 12, 20)) -> Parts:
    """Trees in layer 0, rotated, and in the other layers nothing but noise."""
    random = np.random.default_rng(1)
    rotation, _ = np.linalg.qr(random.standard_normal((HIDDEN, HIDDEN)))
    found = []
    for name, size in zip(("train", "dev", "test"), sizes, strict=True):
        sentences = [drawn_sentence(random, f"{name}-{i}") for i in range(size)]
        states = []
        for sentence in sentences:
            noise = random.standard_normal((len(sentence.words), layers, HIDDEN))
            noise[:, 0] = embedded(sentence, HIDDEN) @ rotation
            states.append(noise)
        found.append(store_trees(folder, f"treebank-{name}", sentences, states))
    return Parts(*found)


FAST = StructureOptions(
    rank=HIDDEN, units=16, seeds=1, epochs=25, batch_size=4, lr=0.02, resamples=50
)


def test_an_embedding_of_trees_is_scored_as_exact(tmp_path: Path) -> None:
    scored = parts_of(tmp_path).scored
    turn, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((HIDDEN, HIDDEN)))
    weight = torch.from_numpy(turn).float().expand(2, HIDDEN, HIDDEN)
    found = []
    for batch in scored.batches(scored.in_order(len(scored))):
        between, deep = (
            kind(2, HIDDEN, HIDDEN).by_sentence([weight], batch)
            for kind in (DistanceProbes, DepthProbes)
        )
        found += list(map(structural, between, deep, batch.golds))
    values = {m: score(of)[0] for m, of in structural_scores(found, scored.golds).items()}
    assert values == {"uuas": 1, "dspr": pytest.approx(1), "root": 1, "nspr": pytest.approx(1)}


def test_probes_learn_the_projection_under_which_states_are_trees(tmp_path: Path) -> None:
    parts = parts_of(tmp_path)
    result = result_of("0e", parts, [measure(parts, FAST, 0)], FAST)
    learned, noise = result.value[0, :4].T
    # equal distances are ties, which a probe that is off by a hair ranks in some order
    assert (learned >= [100, 0.95, 100, 0.9]).all()
    assert (noise < [60, 0.5, 60, 0.5]).all()
    assert result.low[0, 0, 0] == 100


def test_a_probe_is_what_it_would_be_alone(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, sizes=(12, 4, 4))
    options = StructureOptions(epochs=6, batch_size=4, lr=0.05)
    both = DistanceProbes(2, HIDDEN, 8)
    together = train({"distance": both, "depth": DepthProbes(2, HIDDEN, 8)}, *parts[:2], options, 3)

    class One(DistanceProbes):
        """The second layer alone."""

        def losses(self, parameters, which, batch):
            return super().losses(parameters, which, batch._replace(states=batch.states[1:]))

    alone = train({"distance": One(1, HIDDEN, 8)}, *parts[:2], options, 3)
    torch.testing.assert_close(together["distance"][0][1:], alone["distance"][0])
    other = train({"distance": One(1, HIDDEN, 8)}, *parts[:2], options, 4)
    assert not torch.allclose(other["distance"][0], alone["distance"][0])


def test_the_loss_is_that_of_the_paper(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, sizes=(5, 1, 1))
    states = parts.train
    (batch,) = states.batches(states.in_order(5))
    for probes, power in ((DistanceProbes(2, HIDDEN, 8), 2), (DepthProbes(2, HIDDEN, 8), 1)):
        (weight,) = probes.start(0)
        loss, size = probes.losses([weight], torch.arange(2), batch)
        expected, begin = np.zeros(2), 0
        for gold, n in zip(batch.golds, batch.lengths, strict=True):
            for layer in range(2):
                x = (batch.states[layer, begin : begin + n] @ weight[layer]).double().numpy()
                between = np.square(x[:, None] - x[None]).sum(-1)
                told = between if power == 2 else np.square(x).sum(-1)
                wanted = gold.distances if power == 2 else gold.depths
                expected[layer] += np.abs(told - wanted).sum() / n**power
            begin += n
        assert size == 5
        np.testing.assert_allclose(loss.numpy(), expected, rtol=1e-4)


def test_uniform_weights_have_their_centre_in_the_middle() -> None:
    probes = UposProbes(13, 4, 0, ["A", "B"])
    weights = probes.weights(probes.start(0)[0])
    assert weights.shape == (25, 13)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    assert centre_of_gravity(weights[-1].double().numpy(), range(13)) == pytest.approx(12 / 2)
    assert weights[3].argmax() == 3
    assert weights[3].max() == 1
    np.testing.assert_allclose(weights[13], [0.5, 0.5, *[0] * 11])


def test_the_expected_layer_takes_what_layers_take_away() -> None:
    scores = np.array([[50.0, 70, 60, 80], [50, 50, 50, 40], [1, 1, 1, 2]])
    found = expected_layer(scores, (0, 1, 2, 3))
    assert found[0] == pytest.approx((1 * 20 - 2 * 10 + 3 * 20) / 30)
    assert np.isnan(found[1])
    assert found[2] == 3
    assert expected_layer(scores[0], (0, 4, 8, 12)) == pytest.approx(4 * found[0])


def test_edge_probes_find_the_layer_that_has_the_label(tmp_path: Path) -> None:
    random, parts = np.random.default_rng(0), []
    kinds = ["ADP", "DET", "NOUN", "PROPN", "PUNCT", "VERB"]
    names = ["case", "det", "nmod", "nsubj", "obj", "obl"]
    for name, size in (("train", 60), ("dev", 10), ("test", 20)):
        sentences = [drawn_sentence(random, f"{name}-{i}") for i in range(size)]
        states = []
        for sentence in sentences:
            x = 0.1 * random.standard_normal((len(sentence.words), 4, HIDDEN))
            x[range(len(sentence.words)), 2, [kinds.index(u) for u in sentence.upos]] += 1
            for i, relation in enumerate(sentence.relations):
                if relation in names:
                    x[i, 3, 6 + names.index(relation)] += 1
            states.append(x)
        parts.append(store_trees(tmp_path, f"treebank-{name}", sentences, states))
    options = StructureOptions(
        rank=2, units=0, seeds=1, epochs=12, batch_size=2, lr=0.05, resamples=20
    )
    found = measure(Parts(*parts), options, 0)
    result = result_of("0e", Parts(*parts), [found], options)
    upos, relation = result.value[0, 4:]
    assert upos[2] == pytest.approx(100)
    assert max(upos[[0, 1, 3]]) < 95  # of the relation follows much
    assert relation[3] > 99
    assert result.upto[0, 0, 0].argmax() == 2
    centres, expected = result.centres()[0, 0], result.expected_layers()[0, 0]
    assert abs(centres[0] - 2) < 0.3 < abs(1.5 - 2)
    assert centres[1] > 2.3  # parts of speech tell much of a relation too
    assert expected[0] == pytest.approx(2, abs=0.1)
    assert expected[1] > expected[0] + 0.05
    # the mix of the first layer alone is its own probe
    np.testing.assert_array_equal(result.upto[0, :, :, 0], result.value[0, 4:, 0][None])


def test_baselines_know_nothing_but_the_number_of_words_and_the_commonest_label(
    tmp_path: Path,
) -> None:
    sentence = anna()
    line = sentence._replace(heads=tuple(chain(8)), relations=("root", *["next"] * 7))
    states = [np.zeros((8, 1, 4))]
    train, scored = (
        store_trees(tmp_path, f"treebank-{name}", [s], states)
        for name, s in (("train", sentence), ("test", line))
    )
    found = tree_baselines(scored, 0)["chain"]
    assert [score(found[m]).item() for m in ("uuas", "dspr", "root", "nspr")] == [1, 1, 1, 1]
    of_anna = tree_baselines(train, 0)
    assert score(of_anna["chain"]["uuas"]).item() == pytest.approx(2 / 6)
    assert of_anna["random"]["uuas"].right.shape == (10, 1)
    assert score(majority(train, scored)["upos"]).item() == pytest.approx(1 / 8)  # ADP, by name
    lacking = unlearned(train, scored, "relation")
    assert lacking.untrained == (("next", 7),)
    assert lacking.unscored[-1] == ("punct", 1)
    assert set(RelationProbes.labels(line)) == {"next"}


def test_sentences_that_are_not_whole_are_counted_and_left_out(tmp_path: Path) -> None:
    sentence = anna()
    random = np.random.default_rng(0)
    states = [random.standard_normal((8, 2, 4)) for _ in range(3)]
    whole = store_trees(tmp_path, "treebank-dev", [sentence._replace(id=i) for i in "abc"], states)
    assert (len(whole), whole.cut, whole.wordless) == (3, 0, 0)
    (batch,) = whole.batches(whole.in_order(3))
    as_stored = np.concatenate([states[i] for i in batch.numbers])
    np.testing.assert_allclose(batch.states.numpy(), as_stored.swapaxes(0, 1), atol=1e-6)
    both = [sentence._replace(id=name) for name in ("whole", "holed")]
    holed = store_trees(tmp_path / "holed", "treebank-dev", both, states[:2], without={"holed": 4})
    assert (len(holed), holed.cut, holed.wordless) == (1, 0, 1)
    (batch,) = holed.batches(holed.in_order(2))
    assert [s.id for s in batch.sentences] == ["whole"]
    np.testing.assert_allclose(batch.states.numpy(), states[0].swapaxes(0, 1), atol=1e-6)
    # without its last word a window of as many tokens as there may be is full
    full = int(holed.split.plan.n_tokens.min())
    options = {"without": {"holed": 7}, "max_length": full}
    cut = store_trees(tmp_path / "cut", "treebank-dev", both, states[:2], **options)
    assert (len(cut), cut.cut, cut.wordless) == (1, 1, 0)
    with pytest.raises(InputError, match="of 1 sentences of 0e/treebank-test none is whole"):
        store_trees(tmp_path, "treebank-test", both[1:], states[:1], without={"holed": 0})


FEW = ["--seeds", 2, "--epochs", 2, "--units", 4, "--rank", 4, "--resamples", 20]


@pytest.fixture(scope="module")
def stored(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a treebank of two snapshots."""
    folder = tmp_path_factory.mktemp("treebank")
    trees = write_treebank(folder / "trees", train=12, dev=4, test=6)
    for tag, new in (("0e", ["--model", tiny_bert, "--data", trees]), ("untrained", [])):
        given = ["--checkpoint", tag, "--task", "treebank", "--precision", "32", *new]
        done("extract", *given, "-w", folder / "space", "--json")
    return folder / "space"


@pytest.fixture
def space(stored: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(stored, tmp_path / "space")


def test_snapshots_stand_beside_each_other_and_each_is_kept(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[int] = []

    def counted(*given: Any) -> Any:
        trained.append(given[4])
        return train(*given)

    monkeypatch.setattr("bertvision.pipelines.readouts.structure.train", counted)
    first = run("structure", "0e", *FEW, "-w", space)
    assert first.exit_code == 0
    assert trained == [0, 1]  # a training for each seed
    lines = first.stdout.splitlines()
    assert (
        lines[0] == "Structure, 0e, sentences: 12 treebank-train, 4 treebank-dev, 6 treebank-test"
    )
    assert [line.split()[:2] for line in lines[3:6]] == [["0e", "0"], ["0e", "1"], ["0e", "2"]]
    assert "0e, relation: centre of gravity of the mix" in first.stdout.replace("\n", " ")
    csv = tmp_path / "both.csv"
    both = json.loads(done("structure", "0e,untrained", *FEW, "-w", space, "--csv", csv, "--json"))
    assert trained == [0, 1, 0, 1]  # of the second snapshot alone
    assert both["tags"] == ["0e", "untrained"]
    kept = json.loads((space / "analysis" / "structure-0e-treebank-test.json").read_text())
    assert kept["result"]["value"] == both["value"][:1]
    assert kept["command"].startswith("bertvision structure 0e --split treebank-test --rank 4")
    header, *rows = csv.read_text().splitlines()
    assert header.split(",")[:4] == ["system", "layer", "uuas", "uuas_sd"]
    assert [row.split(",")[0] for row in rows[-3:]] == ["chain", "random", "majority"]
    assert len(rows) == 2 * 3 + 3
    for name in ("0e", "untrained", "0e+untrained"):
        drawn = Drawing(space / "analysis" / f"structure-{name}-treebank-test.svg")
        assert drawn.faults() == []
        assert {"UUAS", "NSpr", "part of speech", "chain"} <= set(drawn.texts)


def test_it_is_in_the_report(space: Path) -> None:
    done("structure", "0e", *FEW, "-w", space, "--json")
    page = write_report(Workspace.find(space)).page
    rows = read_table(page, "structure")
    assert [row["system"] for row in rows] == [*["0e"] * 3, "chain", "random trees", "majority"]
    assert set(SYNTAX_METRICS) <= rows[0].keys()
    assert "Structure: trees in hidden states" in page.read_text()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--split", "treebank-train"], "such as treebank-test"),
        (["--split", "treebank-test-mean"], "give one of all tokens that no probe is trained on"),
        (["--split", "test"], "no split 'train' of 0e"),
        (["--plot", "trees.png"], "give a file that ends in .svg"),
        (["--rank", 0], "'--rank': Input should be greater than or equal to 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_trained(
    stored: Path, given: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bertvision.pipelines.readouts.structure.train", None)
    found = run("structure", "0e", *given, "-w", stored)
    assert found.exit_code != 0
    assert message in " ".join(found.stderr.split())


def test_parts_that_were_not_extracted_alike_and_other_data_are_refused(space: Path) -> None:
    more = ["-w", space, "--json", "--precision", "32"]
    done("store", "rm", "0e/treebank-dev", "--yes", "-w", space)
    done("extract", "--checkpoint", "0e", "--split", "treebank-dev", "--encoding", "float32", *more)
    found = run("structure", "0e", *FEW, "-w", space)
    assert "has encoding = 'int8', 0e/treebank-dev 'float32': extract all" in found.stderr


def test_a_treebank_without_a_test_part_names_the_option_for_another(space: Path) -> None:
    done("store", "rm", "0e/treebank-test", "--yes", "-w", space)
    result = run("structure", "0e", *FEW, "-w", space)
    assert result.exit_code == 2
    assert "no split 'treebank-test'" in result.stderr
    assert "with --split, such as --split treebank-dev" in result.stderr
