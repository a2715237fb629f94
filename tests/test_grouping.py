"""Held-out items share no text with those that are learned; old workspaces keep their parts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertvision.pipelines.extraction.contents import made_from_data
from bertvision.pipelines.tasks.data import Sentence, TaskConfig
from bertvision.pipelines.tasks.registry import TASKS
from bertvision.pipelines.tasks.soundness import containing, linked
from bertvision.pipelines.tasks.squad.read import Question
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.workspace.config import FinetuneConfig, WorkspaceConfig
from bertvision.pipelines.workspace.creation import open_workspace
from bertvision.pipelines.workspace.job_options import FinetuneOptions
from bertvision.pipelines.workspace.selection import hold_out_groups, hold_out_items, select_items
from bertvision.pipelines.workspace.workspace import FILE, Workspace


def write_pairs(folder: Path, pairs: int = 120) -> Path:
    """RTE's tables; a hypothesis stands in three pairs, with premises that stand in two."""
    folder.mkdir()
    for split, count in (("train", pairs), ("dev", 10)):
        lines = ["index\tsentence1\tsentence2\tlabel"]
        for i in range(count):
            label = ("entailment", "not_entailment")[i % 2]
            chain = i // 6  # six pairs hang together: three premises, two hypotheses
            texts = f"{split} premise {chain} {i % 3}", f"{split} hypothesis {chain} {i % 6 // 3}"
            lines.append("\t".join([str(i), *texts, label]))
        (folder / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def texts_of(items: Sequence[Sentence]) -> set[str]:
    return {text for item in items for text in (item.text, item.pair) if text is not None}


@pytest.fixture
def space(tiny_bert: Path, tmp_path: Path) -> Workspace:
    data = str(write_pairs(tmp_path / "rte"))
    options = FinetuneOptions(model=str(tiny_bert), task="rte", data=data, tune_fraction=0.2)
    return open_workspace(tmp_path / "lab", options, resume=False)


def test_texts_are_linked_through_others() -> None:
    pairs = [("a", "b"), ("c", "b"), ("d",), ("e", "c"), ("f", "g"), ("d", "d")]
    expected = dict(zip("abcedfg", "aaaadff", strict=True))
    assert linked(pairs) == expected
    random.Random(0).shuffle(pairs)
    assert linked(pairs) == expected
    chain = [(str(i), str(i + 1)) for i in range(20_000)]  # deeper than any stack
    assert set(linked(chain).values()) == {"0"}


def test_a_phrase_belongs_to_the_longest_sentence_with_its_words_in_a_row() -> None:
    long, short = "the old film is a good one", "a good film"
    texts = [short, "good", "a good", "good film", "old film", "a good one", "film is", long, "go"]
    owner = containing(texts)
    assert owner == {
        **dict.fromkeys([long, "good", "a good", "old film", "a good one", "film is"], long),
        **dict.fromkeys([short, "good film"], short),
        "go": "go",  # no word of either
    }
    assert containing(reversed(texts)) == owner
    assert containing([""]) == {"": ""}


def test_pairs_that_share_a_text_are_held_out_together(space: Workspace) -> None:
    train, tune = space.items("train"), space.items("tune")
    assert not texts_of(train) & texts_of(tune)
    assert (len(train), len(tune)) == (96, 24)
    assert space.config.data["tune"].questions == 24
    assert made_from_data(space.dataset(), "tune")["linked"] is True


def test_a_workspace_from_before_keeps_its_parts_and_its_digest(space: Workspace) -> None:
    config = space.config
    old = config.model_copy(update={"task": config.task.model_copy(update={"linked": False})})
    old.write(space.root / FILE)
    lines = (space.root / FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    without = "".join(line for line in lines if "linked" not in line)
    assert len(without) < len("".join(lines))
    (space.root / FILE).write_text(without, encoding="utf-8")  # as it was written then
    assert WorkspaceConfig.read(space.root / FILE).digest() == old.digest() != config.digest()
    found = Workspace.find(space.root)
    every = load_task("rte").read(found.config.data["train"].source, "train", config.task).items
    expected = hold_out_groups(every, 0.2, lambda x: x.text, seed=0)
    assert (found.items("train"), found.items("tune")) == expected
    assert texts_of(expected[0]) & texts_of(expected[1])
    assert "linked" not in made_from_data(found.dataset(), "tune")
    options = FinetuneOptions(model=config.model.name_or_path, tune_fraction=0.2)
    assert open_workspace(space.root, options, resume=True).config.task.linked is False


def test_phrases_of_sst2_are_held_out_with_their_sentence() -> None:
    task = load_task("sst2")
    sentences = [f"film {i} is a masterpiece of {i} kinds" for i in range(20)]
    phrases = [f"a masterpiece of {i} kinds" for i in range(20)]
    items = [Sentence(str(i), text) for i, text in enumerate([*phrases, *sentences])]
    kept, held = hold_out_items(items, 0.25, task.grouping(items), seed=1)
    assert [x.text for x in held[:5]] == [x.text.partition("is ")[2] for x in held[5:]]
    assert len(kept) == 30


def test_a_group_of_ones_own_is_kept_too() -> None:
    class Topics(type(load_task("rte"))):  # type: ignore[misc]
        def group(self, item: Sentence) -> str:
            return item.id[0]

    items = [Sentence("a1", "x", "y"), Sentence("a2", "z", "z"), Sentence("b1", "v", "y")]
    items.append(Sentence("c1", "u", "w"))
    group = Topics("rte").grouping(items)
    assert len({group(item) for item in items[:3]}) == 1
    assert group(items[3]) != group(items[0])


@pytest.mark.parametrize("seed", range(5))
def test_a_group_larger_than_the_part_is_not_held_out(seed: int) -> None:
    items = ["large"] * 60 + [str(i) for i in range(40)]
    kept, held = hold_out_items(items, 0.1, str, seed=seed)
    assert (len(kept), len(held)) == (90, 10)
    assert "large" not in held
    assert hold_out_items(items[::-1], 0.1, str, seed=seed)[1] == held[::-1]
    assert hold_out_items(["a", "a", "b", "b", "b"], 0.01, str, seed=seed)[1] == ["a", "a"]
    assert hold_out_items(["a", "a"], 0.9, str, seed=seed) == (["a", "a"], [])
    assert len(hold_out_items(["a", "b"], 0.99, str, seed=seed)[0]) == 1
    assert hold_out_items(items, 0, str, seed=seed)[1] == []


LEARNED = [name for name, entry in TASKS.items() if entry.learns]


@pytest.mark.parametrize("linked", [True, False])
@given(st.data())
def test_parts_of_one_seed_are_nested_whatever_is_held_out(
    linked: bool, data: st.DataObject
) -> None:
    """With every task that is learned, and its own groups: contexts, pairs, phrases, sentences."""
    name = data.draw(st.sampled_from(LEARNED))
    kind, items = load_task(name), data.draw(_items(name))
    fraction, seed = data.draw(st.floats(0, 0.99)), data.draw(st.integers(0, 3))
    part = data.draw(st.sampled_from([0.0, 0.2]))
    config = TaskConfig(name=name, tune_fraction=fraction, dev_fraction=part, linked=linked)

    def parts(count: int | None) -> dict[str, list[str]]:
        settings = FinetuneConfig(train_questions=count, nested=True, seed=seed)
        splits = ("train", "tune", "dev") if part else ("train", "tune")
        return {
            split: [x.id for x in select_items(items, split, config, settings, kind)]
            for split in splits
        }

    few = data.draw(st.integers(1, len(items)))
    more = data.draw(st.integers(few, len(items) + 3))
    small, large, whole = parts(few), parts(more), parts(None)
    for split, held in small.items():
        assert set(held) <= set(large[split]) <= set(whole[split])
    assert small.get("dev") == large.get("dev") == whole.get("dev")
    assert parts(len(items)) == whole or not whole["train"]
    there = len(whole["train"]) + len(whole["tune"])
    assert len(small["train"]) + len(small["tune"]) <= min(few, there)
    if len(whole["train"]) >= few:
        assert len(small["train"]) + len(small["tune"]) == few


def _items(name: str) -> st.SearchStrategy[list[Any]]:
    """Items of a task, several of which share a text."""
    texts = st.sampled_from([" ".join("abcdef"[i:j]) for i in range(6) for j in range(i + 1, 7)])
    if TASKS[name].target.startswith("bertvision.pipelines.tasks.squad"):
        drawn = st.lists(texts, min_size=1, max_size=30)
        return drawn.map(
            lambda found: [Question(str(i), "?", text, (), True) for i, text in enumerate(found)]
        )
    pairs = st.tuples(texts, texts | st.none())
    return st.lists(pairs, min_size=1, max_size=30).map(
        lambda found: [Sentence(str(i), a, b) for i, (a, b) in enumerate(found)]
    )
