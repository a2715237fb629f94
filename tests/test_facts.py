"""The generated reading comprehension: the same bytes, true answers, true absences, variety."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from bertvision.errors import InputError
from bertvision.pipelines.tasks.generated import (
    RELATIONS,
    FactParagraph,
    make_facts,
    make_paragraphs,
    write_facts,
)
from bertvision.pipelines.tasks.squad.read import read_squad

TRAIN, DEV = 1, 2


@pytest.fixture(scope="module")
def train() -> list[FactParagraph]:
    return make_paragraphs(3000, seed=TRAIN)


@pytest.fixture(scope="module")
def dev() -> list[FactParagraph]:
    return make_paragraphs(900, seed=DEV)


def names(paragraphs: list[FactParagraph]) -> set[str]:
    """Every composed name: of what is told of, and of people, towns, … that are answers."""
    found = {fact.subject for paragraph in paragraphs for fact in paragraph.facts}
    values = {fact.value for paragraph in paragraphs for fact in paragraph.facts}
    return found | {value for value in values if value[0].isupper()}


def test_a_seed_gives_the_same_bytes_in_every_process(tmp_path: Path) -> None:
    write_facts(tmp_path / "train.json", 300, seed=TRAIN)
    digest = hashlib.sha256((tmp_path / "train.json").read_bytes()).hexdigest()
    assert digest == "d5847030a52f44e297733d52738b5601a2352aca80e4d88016540564763ca5df"


def test_another_seed_gives_other_paragraphs(
    train: list[FactParagraph], dev: list[FactParagraph]
) -> None:
    assert not {p.context for p in train} & {p.context for p in dev}


@pytest.mark.parametrize("seed", [DEV, 3, 1234])
def test_seeds_share_no_name(train: list[FactParagraph], seed: int) -> None:
    other = names(make_paragraphs(900, seed=seed))
    assert len(other) > 1000
    assert not names(train) & other


def test_file_is_squad_2_and_answers_lie_where_it_says(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    write_facts(path, 900, seed=TRAIN)
    data = read_squad(path)
    assert data.version == "v2.0"
    assert data.skipped == []
    assert len({q.id for q in data.questions}) == len(data.questions) == 900
    assert sum(q.is_impossible for q in data.questions) == 300
    for question in data.questions:
        assert question.is_impossible == (not question.answers)
        for text, start in question.answers:
            assert question.context[start : start + len(text)] == text
    assert json.loads(path.read_text(encoding="utf-8")) == make_facts(900, seed=TRAIN)


def test_answers_are_what_is_stated_of_the_subject(train: list[FactParagraph]) -> None:
    for paragraph in train:
        for fact in paragraph.facts:
            end = fact.start + len(fact.value)
            assert paragraph.context[fact.start : end] == fact.value
            assert not paragraph.context[fact.start - 1].isalnum()
            assert not paragraph.context[end : end + 1].isalnum()
        for question in paragraph.questions:
            assert question.subject in question.text
            if question.answer is not None:
                assert question.answer in paragraph.facts
                assert question.answer.subject == question.subject
                assert question.answer.relation == question.relation


def test_unanswerable_questions_ask_what_is_stated_of_another_only(
    train: list[FactParagraph],
) -> None:
    seen = 0
    for paragraph in train:
        stated = {(fact.subject, fact.relation) for fact in paragraph.facts}
        assert len(stated) == len(paragraph.facts)
        for question in paragraph.questions:
            if question.answer is None:
                seen += 1
                assert (question.subject, question.relation) not in stated
                assert question.subject in {subject for subject, _ in stated}
                assert question.plausible in paragraph.facts
                assert question.plausible.relation == question.relation
    assert seen == 1000


def test_no_value_or_subject_of_a_paragraph_has_a_namesake(train: list[FactParagraph]) -> None:
    for paragraph in train:
        values = [fact.value for fact in paragraph.facts]
        subjects = {fact.subject for fact in paragraph.facts}
        assert len(set(values)) == len(values)
        assert not subjects & set(values)
        for value in values:
            if value[0].isupper():  # a name that is an answer is written nowhere else
                assert paragraph.context.count(value) == 1


def test_every_relation_is_asked_in_every_wording(train: list[FactParagraph]) -> None:
    wordings = Counter(
        question.text.replace(question.subject, "{S}")
        for paragraph in train
        for question in paragraph.questions
    )
    assert len(wordings) >= len(
        {q for kind in RELATIONS.values() for r in kind for q in r.questions}
    )
    assert max(wordings.values()) < 0.03 * 3000
    for kind, relations in RELATIONS.items():
        assert len({r.name for r in relations}) == len(relations) >= 6, kind
        for relation in relations:
            assert len(relation.verb_phrases) >= 2, relation
            assert len(relation.questions) >= 3, relation


def test_paragraphs_state_several_facts_of_several_subjects(train: list[FactParagraph]) -> None:
    for paragraph in train:
        assert len({fact.subject for fact in paragraph.facts}) in (2, 3)
        assert 3 <= len(paragraph.facts) <= 4
        assert "{" not in paragraph.context
        assert "  " not in paragraph.context
        assert paragraph.context.endswith(".")
    words = [len(paragraph.context.split()) for paragraph in train]
    assert 22 < sum(words) / len(words) < 32
    assert min(words) > 10


@pytest.mark.parametrize(
    ("n_questions", "seed", "reason"),
    [(0, 1, "multiple of 3"), (-3, 1, "multiple of 3"), (100, 1, "multiple of 3"), (3, -1, "seed")],
)
def test_impossible_sizes_and_seeds_are_refused(n_questions: int, seed: int, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_facts(n_questions, seed=seed)
