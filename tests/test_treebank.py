"""Treebanks: CoNLL-U read and refused, words found again in tokens, trees through the store."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from treebanks import ANNA, BORIS, as_conllu, drawn_sentence, write_treebank

from bertvision.errors import InputError
from bertvision.pipelines.extraction.extract import extract
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.task import load_task
from bertvision.pipelines.tasks.treebank import (
    NO_WORD,
    ParsedSentence,
    blocks,
    is_cut,
    parse,
    words_of_tokens,
)
from bertvision.pipelines.workspace.creation import feature_workspace
from bertvision.pipelines.workspace.dataset import add_dataset

TASK = load_task("treebank")
CONFIG = TaskConfig(name="treebank")


def read(text: str) -> list[ParsedSentence]:
    return [parse(block) for block in blocks(text)]


def test_the_basic_tree_over_syntactic_words_is_read() -> None:
    anna, boris = read(f"{ANNA}\n{BORIS}")  # the last blank line may be missing
    assert anna.id == "anna"
    assert anna.text == "Anna does n't live in the city ."
    assert anna.heads == (4, 4, 4, 0, 7, 7, 4, 4)
    assert anna.relations[6] == "obl"
    assert anna.upos == ("PROPN", "AUX", "PART", "VERB", "ADP", "DET", "NOUN", "PUNCT")
    assert boris.id == "line 15"  # it has no sent_id
    assert boris.words == ("Boris", "wrote", "and", "Clara", "a", "book")
    assert boris.heads == (2, 0, 4, 2, 6, 4)


@given(st.integers(0, 2**31), st.sampled_from(["\n", "\r\n"]))
def test_what_is_written_is_read_again(seed: int, end: str) -> None:
    random = np.random.default_rng(seed)
    sentences = [drawn_sentence(random, f"s{i}") for i in range(5)]
    assert read(as_conllu(sentences).replace("\n", end)) == sentences
    assert TASK.items_of(TASK.table(sentences)) == sentences


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\tPROPN\t", " PROPN\t", "line 3: has 9 fields between tabs, a word has 10: ID, FORM"),
        ("8\t.", "9\t.", "line 11: the ID '9' must be 8, the number of the word"),
        ("8\t.", "08\t.", "line 11: the ID '08' must be 8"),
        ("1\tAnna", "1\t", "line 3: the FORM '' must have characters"),
        ("NOUN", "NN", "line 10: the UPOS 'NN' must be one of ADJ, ADP"),
        ("_\t7\tdet", "_\tx\tdet", "line 9: the HEAD 'x' must be the number of a word, or 0"),
        ("_\t7\tdet", "_\t9\tdet", "line 9: the HEAD 9 must be from 0 to 8"),
        ("_\t7\tdet", "_\t0\tdet", "line 9: the HEAD 0 is that of an earlier word too"),
        ("_\t0\troot", "_\t7\troot", r"line \d+: the HEAD \d closes a circle \(words 4, 7\)"),
        ("_\t7\tdet", "_\t6\tdet", r"line 9: the HEAD 6 closes a circle \(words 6\)"),
        ("_\t7\tdet", "_\t7\t_", "line 9: the DEPREL '_' must name the relation"),
        ("2-3\t", "3-4\t", "line 4: the multiword token '3-4' must begin at the next word, 2,"),
        ("2-3\t", "2-1\t", "line 4: the multiword token '2-1' must begin .* and end where it"),
        ("2-3\t", "2-9\t", "line 4: the multiword token ends at word 9, the last word is 8"),
        ("3\tn't", "3-3\tn't\t_\t_\t_\t_\t_\t_\t_\t_\n3\tn't", "line 6: the multiword token '3-3'"),
        ("3\tn't", "1.1\tn't\t_\t_\t_\t_\t_\t_\t_\t_\n3\tn't", "line 6: the empty node '1.1' must"),
        ("5\tin", "# in\n5\tin", "line 8: is a comment behind a word"),
        ("1\tAnna", "\n1\tAnna", "line 2: is a comment without a sentence"),
    ],
)
def test_a_malformed_line_is_refused_by_file_line_and_value(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    assert ANNA.count(old) == 1
    (tmp_path / "train.conllu").write_text(ANNA.replace(old, new) + f"\n{BORIS}\n")
    with pytest.raises(InputError, match=rf"train\.conllu, {message}.*--skip-bad"):
        TASK.read(str(tmp_path), "train", CONFIG)
    found = TASK.read(str(tmp_path), "train", CONFIG.model_copy(update={"skip_bad": True}))
    assert len(found.skipped) == 1
    assert "boris" in found.items[-1].text.lower()


def test_equal_names_and_a_file_without_a_sentence_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "dev.conllu"
    file.write_text(f"{ANNA}\n{ANNA}")
    with pytest.raises(InputError, match="line 13: the id 'anna' is already that of line 1"):
        TASK.read(str(tmp_path), "dev", CONFIG)
    file.write_text("# only a comment\n")
    with pytest.raises(InputError, match="is a comment without a sentence"):
        TASK.read(str(tmp_path), "dev", CONFIG)
    with pytest.raises(InputError, match="holds no sentences after skipping 1"):
        TASK.read(str(tmp_path), "dev", CONFIG.model_copy(update={"skip_bad": True}))


def test_splits_are_found_by_the_names_of_their_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no train\.conllu, nor a file like en_ewt-ud-tr"):
        TASK.splits(str(tmp_path))
    (tmp_path / "en_ewt-ud-test.conllu.gz").write_bytes(gzip.compress(ANNA.encode()))
    (tmp_path / "train.conllu").write_text(BORIS)
    (tmp_path / "README.md").write_text("a treebank")
    assert TASK.splits(str(tmp_path)) == ("train", "test")
    assert TASK.read(str(tmp_path), "test", CONFIG).items[0].id == "anna"
    assert TASK.splits(str(tmp_path / "en_ewt-ud-test.conllu.gz")) == ("test",)
    (tmp_path / "other.conllu").write_text(BORIS)
    assert TASK.splits(str(tmp_path / "other.conllu")) == ("all",)
    (tmp_path / "en_ewt-ud-train.conllu").write_text(BORIS)
    with pytest.raises(
        InputError, match=r"holds en_ewt.* and train\.conllu, each of which may be train"
    ):
        TASK.read(str(tmp_path), "train", CONFIG)
    with pytest.raises(InputError, match="there is no such file or folder"):
        TASK.splits(str(tmp_path / "nowhere"))


def test_tokens_are_given_to_the_words_whose_characters_they_are_of(tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    (anna,) = read(ANNA)
    windows = TASK.windows([anna], tokenizer, CONFIG)
    found = words_of_tokens(anna.words, windows.offset_mapping)
    # [CLS] anna does n ' t l##i##v##e in the city . [SEP]
    assert found.tolist() == [-1, 0, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5, 6, 7, -1]
    by_word_ids = tokenizer(list(anna.words), is_split_into_words=True).word_ids()
    assert [NO_WORD if i is None else i for i in by_word_ids] == found.tolist()


def test_a_space_in_front_of_a_token_and_one_within_a_word_are_no_border() -> None:
    # "10 000 km": tokens "10", " 000", " km" as byte-level BPE has them, and a lone " "
    offsets = np.array([[-1, -1], [0, 2], [2, 6], [6, 9], [6, 7]], np.int32)
    assert words_of_tokens(["10 000", "km"], offsets).tolist() == [-1, 0, 0, 1, -1]


def test_a_sentence_longer_than_its_window_is_counted(
    tiny_bert: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    (anna,) = read(ANNA)
    for length, cut in ((15, False), (14, True)):
        config = CONFIG.model_copy(update={"max_length": length})  # below what options allow
        windows = TASK.windows([anna, anna], tokenizer, config)
        assert is_cut(anna.text, windows.offset_mapping[: windows.n_tokens[0]], length) == cut
        assert ("2 of 2 sentences have more than 14 tokens" in caplog.text) == cut


def test_a_treebank_is_extracted_with_its_trees(tiny_bert: Path, tmp_path: Path) -> None:
    source = write_treebank(tmp_path / "trees", train=6, dev=3, test=3)
    space = feature_workspace(tmp_path / "workspace", str(tiny_bert))
    data = add_dataset(space.root, "treebank", str(source))
    assert data.name == "treebank"
    extract(space, "0e", dataset="treebank", encoding="float32", precision="32")
    stored = space.split("0e", "treebank-train")
    assert stored.record.layers == (0, 1, 2)
    items = TASK.items_of(stored.table())
    assert items == data.items("train")
    row = int(stored.plan.example_id[4])
    offsets = stored.array("offset_mapping")
    begin, n = int(stored.plan.first_token[4]), int(stored.plan.n_tokens[4])
    words = words_of_tokens(items[row].words, offsets[begin : begin + n])
    assert set(words[1:-1].tolist()) == set(range(len(items[row].words)))


def test_nothing_is_trained_on_a_treebank(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use `bertvision structure`"):
        TASK.check_data([], "trees")
