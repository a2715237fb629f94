"""Cloze tests: known answers, controls that see no syntax, and nothing that is left out unsaid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_family
from transformers import AutoModelForCausalLM

import bertvision
from bertvision.errors import InputError
from bertvision.pipelines.analysis.cloze import ClozeResult
from bertvision.pipelines.analysis.cloze import cloze_of_items as cloze
from bertvision.pipelines.analysis.cloze_items import (
    MASK,
    Item,
    Items,
    Prompts,
    Vocabulary,
    agreement,
    prompts,
    read_items,
)
from bertvision.pipelines.encoders.loading import load_tokenizer
from bertvision.pipelines.workspace.creation import feature_workspace


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of BERT, with a few words, letters and digits."""
    return load_tokenizer(make_family("bert", tmp_path_factory.mktemp("bert")))


class OneHot:
    """A decoder whose features are logits."""

    def __init__(self, words: int) -> None:
        self.weight = np.eye(words, dtype=np.float32)

    def features(self, place: int, states: np.ndarray) -> np.ndarray:
        return states

    def bias(self, place: int) -> np.ndarray:
        return np.zeros(len(self.weight), np.float32)


def ask(
    items: list[Item],
    tokenizer: Any,
    logits: Callable[[list[str]], dict[str, float]],
    **options: Any,
) -> ClozeResult:
    """Ask a model that gives tokens logits by the tokens of the text, and all others zero."""

    def states(made: Prompts) -> np.ndarray:
        found = np.zeros((len(made.masked), len(tokenizer)), np.float32)
        for row, start, n in zip(
            found, made.windows.first_token, made.windows.n_tokens, strict=True
        ):
            tokens = tokenizer.convert_ids_to_tokens(
                made.windows.input_ids[start : start + n].tolist()
            )
            for word, logit in logits(tokens).items():
                row[tokenizer.convert_tokens_to_ids(word)] = logit
        return found

    named = [item.model_copy(update={"id": item.id or f"line {i}"}) for i, item in enumerate(items)]
    options = {"longest": 30, "resamples": 200, **options}
    return cloze(
        Items("mine", "0" * 64, tuple(named)), states, OneHot(len(tokenizer)), tokenizer, **options
    )


def facts(*answers: str, **more: Any) -> list[Item]:
    return [Item(text=f"anna {a} [MASK] .", answer=a, **more) for a in answers]


def test_ranks_are_among_the_candidates_alone(tokenizer: Any) -> None:
    # `the` is not asked for; of the six answers a stands at rank 1, b 2, …, f 6
    scale = dict(zip("abcdef", [6.0, 5, 4, 3, 2, 1], strict=True)) | {"the": 99.0}
    found = ask(facts(*"abcdef"), tokenizer, lambda tokens: scale, k=3)
    assert found.n_candidates.tolist() == [6]
    assert found.p1.item() == pytest.approx(1 / 6)
    assert found.pk.item() == pytest.approx(3 / 6)
    assert found.mrr.item() == pytest.approx(np.mean([1 / rank for rank in range(1, 7)]))
    assert found.chance.item() == pytest.approx(1 / 6)
    assert found.majority.item() == pytest.approx(1 / 6)  # all are as common
    assert found.p1_low.item() <= found.p1.item() <= found.p1_high.item()


def test_a_model_that_knows_the_text_is_right_and_its_controls_show_how(tokenizer: Any) -> None:
    def reads(tokens: list[str]) -> dict[str, float]:
        return {tokens[tokens.index("anna") + 1]: 1.0}  # the word that follows anna

    items = [
        Item(
            text=f"anna {a} was in rome [MASK] .",
            negated=f"who in rome [MASK] anna {other} .",
            answer=a,
        )
        for a, other in zip("abcd", "abdc", strict=True)
    ]
    found = ask(items, tokenizer, reads)
    assert (found.p1.item(), found.mrr.item(), found.p1_low.item()) == (1, 1, 1)
    assert np.isnan(found.pk).all()  # of k = 10 candidates there are none
    assert found.negated.item() == 0.5
    assert found.negated_same.item() == 0.5
    assert found.n_negated == (4,)
    assert found.shuffled.item() < 1  # the word that follows is another one
    bag = ask(items, tokenizer, lambda tokens: {t: 1.0 for t in tokens if t in "abcd"})
    assert (bag.p1.item(), bag.shuffled.item()) == (1, 1)  # needs no order
    assert found.to_json()["pk"] == [None]
    assert "P@10" not in found.table()
    assert "negated" in found.table()


def test_equal_logits_are_no_answer(tokenizer: Any) -> None:
    found = ask(facts(*"abc"), tokenizer, lambda tokens: {})
    assert found.p1.item() == 0
    assert found.mrr.item() == pytest.approx(1 / 3)


def test_pairs_compare_two_words_and_groups_are_counted_apart(tokenizer: Any) -> None:
    items = [
        *(Item(text=f"who {i} [MASK]", answer="a", wrong="b", group="x") for i in range(3)),
        Item(text="who 3 [MASK]", answer="b", wrong="a", group="y"),
    ]
    found = ask(items, tokenizer, lambda tokens: {"a": 2.0, "b": 1.0, "c": 9.0})
    assert found.groups == ("x", "y", "all")
    assert found.n_items == (3, 1, 4)
    assert found.p1.tolist() == [1, 0, 0.75]
    assert found.chance.tolist() == [0.5, 0.5, 0.5]
    assert found.majority.tolist() == [1, 0, 0.75]  # a is the answer three times of four
    assert found.n_candidates.tolist() == [2, 2, 2]


def test_the_order_of_items_does_not_matter(tokenizer: Any) -> None:
    items = [*facts(*"abcdef", group="x"), *facts(*"aac", group="y")]
    scale = dict(zip("abcdef", [6.0, 5, 4, 3, 2, 1], strict=True))
    one, other = (ask(of, tokenizer, lambda tokens: scale) for of in (items, items[::-1]))
    for i, group in enumerate(one.groups):
        j = other.groups.index(group)
        for name in ("p1", "mrr", "majority", "shuffled"):
            np.testing.assert_allclose(getattr(one, name)[i], getattr(other, name)[j], rtol=1e-12)


def test_what_is_not_one_token_is_named_and_counted(tokenizer: Any) -> None:
    items = [
        Item(text="who [MASK]", answer="anna", candidates=("anna", "boris", "rome", "Rome")),
        Item(text="in [MASK]", answer="rome", candidates=("anna", "boris", "rome", "%")),
        Item(text="in [MASK] .", answer="boris", wrong="rome", id="seven"),
        Item(text="the [MASK] .", answer="rome", wrong="paris"),
        Item(text="a " * 40 + "[MASK]", answer="rome", wrong="anna", id="long"),
        Item(text="[MASK] in rome", negated="1[MASK] in rome", answer="a", wrong="b", id="n"),
    ]
    found = ask(items, tokenizer, lambda tokens: {"rome": 1.0})
    assert found.n_items == (3,)
    assert set(found.left_out) == {
        "seven: its answer 'boris' is not one token",
        "line 3: no candidate beside its answer is one token",
        "candidate 'boris', not one token (of 2 items)",
        "candidate 'paris', not one token (of 1 items)",
        "candidate '%', not one token (of 1 items)",
        "candidate 'Rome', the same token as 'rome' (of 1 items)",
        "long: its text is longer than 30 tokens, or has two masks",
        "n: its negated text, where a candidate is not the same token, or too long",
    }
    assert "Left out: seven" in found.table()


def test_of_many_that_are_left_out_the_first_are_told_and_the_json_has_all(tokenizer: Any) -> None:
    words = ("anna", "rome", *(f"%{i}" for i in range(12)))
    found = ask([Item(text="in [MASK]", answer="rome", candidates=words)], tokenizer, lambda _: {})
    assert len(found.left_out) == len(found.to_json()["left_out"]) == 12
    assert "and 4 more, in the JSON." in " ".join(found.table().split())


def test_without_an_item_that_can_be_asked_the_reason_is_told(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="no item of mine can be asked .*'boris' is not one token"):
        ask(facts("boris"), tokenizer, lambda tokens: {})
    with pytest.raises(InputError, match="no item of mine can be asked .*longer than 8 tokens"):
        ask(
            [Item(text="a " * 9 + MASK, answer="a", wrong="b")],
            tokenizer,
            lambda tokens: {},
            longest=8,
        )


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "modernbert"])
def test_a_word_is_the_token_that_the_whole_text_has_there(family: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_family(family, tmp_path))
    vocabulary = Vocabulary(tokenizer)
    seen = 0
    for text in ("anna [MASK] rome", "[MASK] in rome", "in (=[MASK]) rome", "1[MASK]"):
        made = prompts([text], tokenizer, 60)
        masked = made.windows.input_ids.tolist()
        assert masked[made.masked.item()] == tokenizer.mask_token_id
        for word in ("founded", "rome", "f", "an", "ou", "s", "4", ")", "[SEP]"):
            token = vocabulary.tokens(text, [word])[word]
            if token is None:
                continue
            filled = tokenizer(text.replace(MASK, word), split_special_tokens=True)["input_ids"]
            place = made.masked.item()  # what follows may be cut otherwise after a mask
            assert filled[: place + 1] == [*masked[:place], token], (text, word)
            seen += 1
    assert seen >= 4


GOOD = {"text": "anna [MASK] rome", "answer": "founded"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: .*JSON"),
        ("[]", "line 2: "),
        ({"answer": "a"}, "line 2: text: Field required"),
        (GOOD | {"answer": 3}, "line 2: answer: .*string.*found 3"),
        (GOOD | {"anwser": "a"}, "line 2: anwser: .*not permitted"),
        (GOOD | {"text": "anna"}, r"line 2: text: holds \[MASK\] 0 times"),
        (GOOD | {"negated": "[MASK] [MASK]"}, r"line 2: negated: holds \[MASK\] 2 times"),
        (GOOD | {"wrong": "founded"}, "line 2: wrong: is the answer itself, 'founded'"),
        (GOOD | {"wrong": "a", "candidates": ["a", "b"]}, "line 2: wrong: stands beside"),
        (GOOD | {"candidates": ["a", "b"]}, "line 2: candidates: do not hold .*'founded'"),
        (GOOD | {"candidates": ["founded"]}, "line 2: candidates: .*at least 2"),
        (GOOD | {"id": "one"}, "the id 'one' is that of 2 items"),
    ],
)
def test_a_malformed_line_is_named_with_its_field(line: Any, message: str, tmp_path: Path) -> None:
    written = line if isinstance(line, str) else json.dumps(line)
    path = tmp_path / "items.jsonl"
    path.write_text(json.dumps(GOOD | {"id": "one"}) + "\n" + written + "\n")
    with pytest.raises(InputError, match=rf"items\.jsonl(, |: ){message}"):
        read_items(path)


def test_items_are_read_with_the_answers_of_all_as_candidates(tmp_path: Path) -> None:
    path = tmp_path / "capitals.jsonl"
    lines = [
        GOOD,
        GOOD | {"answer": "left", "group": "verbs", "id": "x"},
        GOOD | {"wrong": "saw"},
        GOOD | {"candidates": ["a", "founded", "a"]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_items(path)
    assert found.name == "capitals"
    assert [item.id for item in found.items] == ["line 1", "x", "line 5", "line 7"]
    assert found.choices() == [
        ("founded", "left"),
        ("founded", "left"),
        ("founded", "saw"),
        ("a", "founded"),
    ]
    with pytest.raises(InputError, match="ends in .jsonl"):
        read_items(tmp_path / "capitals.csv")


def test_the_agreement_that_is_made_has_the_right_verb_and_attractors() -> None:
    made = agreement(each=20)
    assert made.items == agreement(each=20).items
    assert made.sha256 != agreement(each=20, seed=1).sha256
    groups = [item.group for item in made.items]
    assert {group: groups.count(group) for group in groups} == {
        "no other noun": 20,
        "other noun of the same number": 20,
        "1 attractor": 20,
        "2 attractors": 20,
    }
    for item in made.items:
        words = item.text.split()
        assert words[0] == "The"
        plural = words[1].endswith("s")
        others = [words[i + 1].endswith("s") for i, w in enumerate(words) if w == "the"]
        assert item.answer in (("are", "were") if plural else ("is", "was"))
        assert item.wrong in (("is", "was") if plural else ("are", "were"))
        differing = {"1 attractor": 1, "2 attractors": 2}.get(item.group, 0)
        assert sum(other != plural for other in others) == differing
    assert sum(item.answer in ("are", "were") for item in made.items) == 40


def test_a_decoder_is_asked_for_the_token_behind_the_text_before_the_mask(tmp_path: Path) -> None:
    folder = make_family("gpt2", tmp_path / "lm-gpt2", AutoModelForCausalLM)
    words = ("g", "d", "t", "s")
    texts = ["the kin", "a cold ba", "no", "who ran to the fas", "rive", "it is a be", ""]
    lines = [
        {"text": f"{text}{MASK}, it rained.", "answer": words[i % 4], "candidates": words}
        for i, text in enumerate(texts)
    ]
    path = tmp_path / "ends.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    feature_workspace(tmp_path / "space", str(folder))
    read = bertvision.cloze("0e", items=path, k=2, resamples=100, workspace=tmp_path / "space")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer, ranks = load_tokenizer(folder), []
    columns = [tokenizer(word)["input_ids"][0] for word in words]
    for i, text in enumerate(texts[:-1]):
        with torch.inference_mode():
            logits = model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0, -1]
        ranks.append(1 + int((logits[columns] > logits[columns[i % 4]]).sum()))
    assert read.n_items == (6,)
    assert read.p1.tolist() == [np.mean(np.array(ranks) == 1)]
    assert read.pk.tolist() == [np.mean(np.array(ranks) <= 2)]
    assert read.mrr[0] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert "line 7: its text before the mask is empty" in str(read)
    assert "asked for the token that follows" in str(read)
