"""Attention heads that follow dependency relations: known answers from maps made by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from treebanks import drawn_sentence, write_treebank

import bertvision
from bertvision.errors import InputError, UnknownNameError
from bertvision.pipelines.analysis.attention import WindowMaps
from bertvision.pipelines.analysis.relations import Looked, RelationsResult, between_words
from bertvision.pipelines.analysis.relations import relations_of_maps as relations
from bertvision.pipelines.tasks.treebank import ParsedSentence
from bertvision.pipelines.workspace.workspace import Workspace

LAYERS, HEADS = 2, 3
SENTENCES = [drawn_sentence(np.random.default_rng(i), f"s{i}") for i in range(60)]


def maps_of(sentence: ParsedSentence, pieces: int = 1, seed: int = 0) -> Looked:
    """Random attention, but: head 2.1 looks from a noun to its preposition, head 1.3 at the next.

    The window is [CLS], ``pieces`` tokens for each word, [SEP].
    """
    random = np.random.default_rng([seed, len(sentence.words)])
    n = len(sentence.words)
    words = np.concatenate([[-1], np.repeat(np.arange(n), pieces), [-1]])
    weights = random.dirichlet(np.ones(len(words)), (LAYERS, HEADS, len(words)))

    def look(layer: int, head: int, word: int, at: int) -> None:
        for row in np.flatnonzero(words == word):
            weights[layer, head, row] = 0.1 / len(words)
            weights[layer, head, row, words == at] = 0.9 / pieces

    for word, (head, relation) in enumerate(zip(sentence.heads, sentence.relations, strict=True)):
        if relation == "case":
            look(1, 0, head - 1, word)
        if word + 1 < n:
            look(0, 2, word, word + 1)
    ids = np.arange(len(words), dtype=np.int32)
    return Looked(sentence, words, WindowMaps(0, ids, torch.from_numpy(weights)))


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_head_that_follows_a_relation_is_found_with_its_direction(pieces: int) -> None:
    halves = ([maps_of(s, pieces) for s in SENTENCES[k::2]] for k in (0, 1))
    found = {row["relation"]: row for row in relations(*halves).rows()}
    assert (found["case"]["layer"], found["case"]["head"]) == (2, 1)
    assert found["case"]["direction"] == "head to dependent"
    assert found["case"]["accuracy"] == 1
    assert (found["det"]["layer"], found["det"]["head"]) == (1, 3)
    assert found["det"]["direction"] == "dependent to head"
    assert found["det"]["accuracy"] == 1
    # in these sentences a determiner's noun is the next word: the offset knows that too
    assert (found["det"]["offset"], found["det"]["by_offset"]) == (1, 1)
    assert found["det"]["ahead_low"] == found["det"]["ahead_high"] == 0
    assert "punct" not in found
    # a subject's verb is the next word, which head 1.3 finds; an object's is far, which none does
    assert found["nsubj"]["accuracy"] == 1
    assert found["obl"]["accuracy"] < 0.6


def test_what_is_chosen_is_scored_on_other_sentences() -> None:
    """The best of random heads on one half is no better than chance on the other."""
    random = np.random.default_rng(0)

    def noise(sentence: ParsedSentence) -> Looked:
        n = len(sentence.words) + 2
        weights = torch.from_numpy(random.dirichlet(np.ones(n), (20, 20, n)))
        words = np.concatenate([[-1], np.arange(n - 2), [-1]])
        return Looked(sentence, words, WindowMaps(0, np.arange(n, dtype=np.int32), weights))

    found = relations(map(noise, SENTENCES[:30]), map(noise, SENTENCES[30:]))
    chance = np.mean([1 / (len(s.words) - 1) for s in SENTENCES])
    assert np.average(found.accuracy, weights=found.examples) < 2.5 * chance
    assert (found.n_chosen, found.n_scored) == (30, 30)


def test_attention_between_words_is_summed_to_and_averaged_from_their_pieces() -> None:
    of = maps_of(SENTENCES[0], pieces=2, seed=3)
    found = between_words(of)
    weights = of.maps.weights.numpy()
    for a, b in ((0, 1), (3, 2)):
        rows, columns = (np.flatnonzero(of.words == w) for w in (a, b))
        expected = weights[:, :, rows][..., columns].sum(-1).mean(-1)
        np.testing.assert_allclose(found[..., a, b], expected)
    assert (found[..., 2, 2] == -1).all()


def test_relations_with_too_few_examples_are_named_and_none_at_all_is_refused() -> None:
    halves = [[maps_of(s) for s in SENTENCES[k : k + 12]] for k in (0, 12)]
    found = relations(*halves, n_cut=2)
    assert set(found.few) <= {"nmod", "obl", "obj", "nsubj", "case", "det"}
    assert not set(found.few) & set(found.relations)
    assert "longer than a window: 2 sentences" in found.table()
    assert RelationsResult.from_json(found.to_json()).to_json() == found.to_json()
    with pytest.raises(InputError, match="has 10 examples in each half"):
        relations(*[half[:2] for half in halves])


def test_a_word_without_tokens_looks_at_nothing_and_is_left_out() -> None:
    of = maps_of(SENTENCES[0])
    without = of._replace(words=np.where(of.words == 1, -1, of.words))
    assert np.isfinite(between_words(without)).all()
    many = [[without] * 40, [without] * 40]
    named = {*relations(*many).relations}
    assert "nsubj" not in named  # word 1 is the verb, the head of the subject
    assert "det" in named


def test_relations_of_a_snapshot_are_kept(workspace: Workspace, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(workspace.root, root, ignore=lambda *_: {"heads", "activations", "analysis"})
    with pytest.raises(UnknownNameError, match="treebank"):
        bertvision.relations("1e", workspace=root)
    trees = write_treebank(tmp_path / "trees", dev=60)
    found = bertvision.relations("1e", data=trees, workspace=root)
    assert found.n_chosen == found.n_scored == 30
    assert {"det", "case"} <= {*found.relations, *found.few}
    again = bertvision.relations("1e", workspace=root)
    assert again.to_json() == found.to_json()
    page = bertvision.report(out=tmp_path / "report", workspace=root).page.read_text()
    assert "Attention heads that follow a dependency relation" in page
