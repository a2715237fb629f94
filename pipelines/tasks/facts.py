"""Reading comprehension about invented facts, in the form of SQuAD 2.0: data for the quickstart.

A paragraph tells of two or three entities of one kind (people, towns, firms, books, ships). Some
relations are stated of several of them, so that the answer must be matched with its subject; a
question is unanswerable because its relation is stated of another entity of the paragraph only, the
commonest trap in SQuAD 2.0 (Rajpurkar et al. 2018, table 2, "entity swap"). All names are composed
from syllables: nothing can be answered from what a model has read before.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.tasks import facts_wording as wording
from bertvision.pipelines.tasks.facts_wording import RELATIONS, Relation

QUESTIONS_PER_PARAGRAPH = 3
"""Of which one is unanswerable."""

_NAME_POOLS = 16  # a name belongs to one pool, and a seed draws from one: seed modulo this


class StatedFact(NamedTuple):
    """One fact and where the paragraph states it."""

    subject: str
    """Full name of the entity."""
    relation: str
    """Name of the relation."""
    value: str
    """``context[start : start + len(value)]``."""
    start: int
    """Character offset of the value in the context."""


class FactQuestion(NamedTuple):
    """A question over a paragraph."""

    text: str
    """The question as asked."""
    subject: str
    """Full name of the entity it asks about."""
    relation: str
    """Name of the relation it asks for."""
    answer: StatedFact | None
    """The fact that answers it; None if the paragraph does not."""
    plausible: StatedFact | None
    """For an unanswerable question: the same relation, stated of another entity."""


class FactParagraph(NamedTuple):
    """A paragraph with all that it states."""

    context: str
    """The text."""
    facts: tuple[StatedFact, ...]
    """Everything stated, in the order of the text."""
    questions: tuple[FactQuestion, ...]
    """Answerable and unanswerable ones, in random order."""


def write_facts(path: Path, n_questions: int, *, seed: int) -> None:
    """Write what `make_facts` returns as a JSON file in UTF-8, the same bytes for the same seed.

    Args:
        path: the file to write.
        n_questions: how many questions, a multiple of 3.
        seed: which.

    Raises:
        InputError: as for `make_facts`.
    """
    text = json.dumps(make_facts(n_questions, seed=seed), ensure_ascii=False, indent=1)
    path.write_text(text + "\n", encoding="utf-8", newline="\n")


def make_facts(n_questions: int, *, seed: int) -> dict[str, Any]:
    """Generate a data set in the JSON form of SQuAD 2.0.

    Args:
        n_questions: how many questions, a multiple of 3; a third is unanswerable.
        seed: at least 0. Seeds that differ modulo 16 share no name of an entity, so that a train and
            a dev split are about different worlds.

    Raises:
        InputError: the number is not a positive multiple of 3, or the seed is negative.
    """
    articles = []
    for i, paragraph in enumerate(make_paragraphs(n_questions, seed=seed)):
        questions = [
            _as_squad(question, f"facts-{seed}-{QUESTIONS_PER_PARAGRAPH * i + j:06d}")
            for j, question in enumerate(paragraph.questions)
        ]
        articles.append(
            {
                "title": paragraph.facts[0].subject,
                "paragraphs": [{"context": paragraph.context, "qas": questions}],
            }
        )
    return {"version": "v2.0", "data": articles}


def make_paragraphs(n_questions: int, *, seed: int) -> list[FactParagraph]:
    """Generate the paragraphs of `make_facts`, with the facts they state.

    Args:
        n_questions: how many questions, a multiple of 3.
        seed: at least 0.

    Raises:
        InputError: the number is not a positive multiple of 3, or the seed is negative.
    """
    if n_questions < 1 or n_questions % QUESTIONS_PER_PARAGRAPH:
        raise InputError(
            f"{n_questions} questions: give a positive multiple of {QUESTIONS_PER_PARAGRAPH}, as "
            "every paragraph has that many"
        )
    if seed < 0:
        raise InputError(f"seed {seed} is negative: give 0 or more")
    rng = random.Random(seed)
    pool = seed % _NAME_POOLS
    return [_paragraph(rng, pool) for _ in range(n_questions // QUESTIONS_PER_PARAGRAPH)]


def _as_squad(question: FactQuestion, id_: str) -> dict[str, Any]:
    def spans(fact: StatedFact | None) -> list[dict[str, Any]]:
        return [] if fact is None else [{"text": fact.value, "answer_start": fact.start}]

    squad = {
        "id": id_,
        "question": question.text,
        "answers": spans(question.answer),
        "is_impossible": question.answer is None,
    }
    if question.answer is None:
        squad["plausible_answers"] = spans(question.plausible)
    return squad


# --- names and values ---------------------------------------------------------------------------


class _Entity(NamedTuple):
    name: str
    short: str  # for a later mention
    kind: str
    nominative: str
    possessive: str
    objective: str


def _stem(rng: random.Random, ending: str) -> str:
    syllables = rng.choice(wording.ONSETS) + rng.choice(wording.VOWELS) + rng.choice(wording.CODAS)
    if rng.random() < 0.5:
        syllables += rng.choice(wording.VOWELS) + rng.choice(wording.CODAS)
    return (syllables + rng.choice(wording.ENDINGS[ending])).capitalize()


def _compose(rng: random.Random, kind: str) -> str:
    if kind == "person":
        return f"{_stem(rng, 'first')} {_stem(rng, 'last')}"
    if kind == "firm":
        return rng.choice(wording.FIRM_FORMS).format(_stem(rng, "last"))
    if kind == "book":
        return rng.choice(wording.BOOK_FORMS).format(_stem(rng, "town"))
    if kind == "ship":
        return "the " + _stem(rng, "ship")
    return _stem(rng, kind)  # town, river


def _value(rng: random.Random, kind: str, pool: int, used: set[str]) -> str:
    """A value of this kind that the paragraph does not have yet."""
    while True:
        if kind in wording.YEARS:
            value = str(rng.randint(*wording.YEARS[kind]))
        elif kind in wording.NUMBERS:
            value = f"{rng.randint(*wording.NUMBERS[kind]):,}"
        elif kind == "profession":
            value = rng.choice(wording.PROFESSIONS)
        elif kind == "goods":
            value = rng.choice(wording.GOODS)
        elif kind == "instrument":
            value = rng.choice(wording.INSTRUMENTS)
        else:
            value = _compose(rng, kind)
            if zlib.crc32(value.encode()) % _NAME_POOLS != pool:
                continue
        if value not in used:
            used.add(value)
            return value


def _entity(rng: random.Random, kind: str, pool: int, used: set[str]) -> _Entity:
    name = _value(rng, kind, pool, used)
    if kind == "person":
        pronouns = rng.choice([("she", "her", "her"), ("he", "his", "him")])
        return _Entity(name, name.split()[-1], kind, *pronouns)
    return _Entity(name, name, kind, "it", "its", "it")


# --- sentences ----------------------------------------------------------------------------------


class _Stated(NamedTuple):
    """A value in a sentence, in place of its text."""

    entity: _Entity
    relation: Relation
    value: str


_Pieces = list["str | _Stated"]


class _Speaker:
    """Words facts one sentence after the other, and knows whom the last one was about."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.introduced: set[str] = set()
        self.focus: _Stated | None = None  # what the last sentence ended on, if about one entity

    def introduce(self, entities: Sequence[_Entity]) -> _Pieces:
        """A sentence that names the entities and says nothing of them."""
        self.introduced.update(e.name for e in entities)
        names = [e.name for e in entities]
        return [self.rng.choice(wording.INTRODUCTIONS).format(_enumerate(names))]

    def tell(self, facts: Sequence[_Stated]) -> _Pieces:
        """One sentence with one or two facts about one entity."""
        entity = facts[0].entity
        phrases = [self.rng.choice(fact.relation.verb_phrases) for fact in facts]
        if len(facts) == 1 and self.rng.random() < 0.35:
            template = self.rng.choice(facts[0].relation.clauses)
        else:
            template = "{S} " + " and ".join(_distinct(self.rng, facts, phrases))
        pieces = _fill(template, entity, self._mention(entity), facts)
        self.focus = facts[-1]
        if self.rng.random() < 0.2:
            pieces = [self.rng.choice(wording.OPENERS), *pieces]
        return pieces

    def contrast(self, one: _Stated, other: _Stated) -> _Pieces:
        """One sentence with the same relation of two entities."""
        pieces: _Pieces = []
        for fact in (one, other):
            self.focus = None
            phrase = "{S} " + self.rng.choice(fact.relation.verb_phrases)
            pieces += _fill(phrase, fact.entity, self._mention(fact.entity), [fact])
            if fact is one:
                pieces.append(self.rng.choice(wording.CONTRASTS))
        return pieces

    def _mention(self, entity: _Entity) -> tuple[str, str, str]:
        """How to call the entity now: nominative, possessive and objective."""
        name = entity.name
        if name in self.introduced:
            name = entity.short if self.rng.random() < 0.7 else name
            if self.focus is not None and self.focus.entity == entity:
                heard = self.focus.relation.value_kind
                if heard == entity.kind:
                    pass  # a pronoun could mean either
                elif entity.kind != "person" and heard in ("town", "firm", "river"):
                    name = "the " + entity.kind
                elif self.rng.random() < 0.75:
                    return entity.nominative, entity.possessive, entity.objective
        self.introduced.add(entity.name)
        return _cases(name)


def _cases(name: str) -> tuple[str, str, str]:
    """Nominative, possessive and objective of a name."""
    return name, name + ("'" if name.endswith("s") else "'s"), name


def _enumerate(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]


def _distinct(
    rng: random.Random, facts: Sequence[_Stated], phrases: Sequence[str]
) -> Sequence[str]:
    """Verb phrases that do not begin alike ("was born in … and was born in …")."""
    while len(phrases) > 1 and phrases[0].split()[:2] == phrases[1].split()[:2]:
        phrases = [rng.choice(fact.relation.verb_phrases) for fact in facts]
    return phrases


def _fill(
    template: str, entity: _Entity, mention: tuple[str, str, str], facts: Sequence[_Stated]
) -> _Pieces:
    """Put names and values into a template with as many ``{V}`` as facts."""
    nominative, possessive, objective = mention
    text = template.replace("{S}", nominative).replace("{S's}", possessive)
    text = text.replace("{O}", objective).replace("{p}", entity.possessive)
    before, *rest = text.split("{V}")
    pieces: _Pieces = []
    for fact, after in zip(facts, rest, strict=True):
        article = "an" if fact.value[0] in "aeiou" else "a"
        pieces += [before.replace("{a}", article), fact]
        before = after
    return [*pieces, before]


# --- paragraphs ---------------------------------------------------------------------------------

# How many entities there are, and of how many of them each relation is stated.
_PLANS: list[tuple[int, tuple[int, ...]]] = [
    (2, (2, 2, 1, 1)),
    (2, (2, 1, 1, 1)),
    (3, (3, 2, 1)),
    (3, (2, 2, 1, 1)),
    (3, (2, 2, 2)),
]


def _paragraph(rng: random.Random, pool: int) -> FactParagraph:
    used: set[str] = set()
    kind = rng.choice(list(RELATIONS))
    n_entities, plan = rng.choice(_PLANS)
    entities = [_entity(rng, kind, pool, used) for _ in range(n_entities)]
    relations = rng.sample(RELATIONS[kind], len(plan))
    told: dict[str, list[_Entity]] = {}
    while {e.name for of in told.values() for e in of} != {e.name for e in entities}:
        told = {r.name: rng.sample(entities, n) for r, n in zip(relations, plan, strict=True)}
    stated = [
        _Stated(entity, relation, _value(rng, relation.value_kind, pool, used))
        for relation in relations
        for entity in told[relation.name]
    ]
    context, facts = _write(_sentences(rng, entities, stated))
    return FactParagraph(context, facts, _questions(rng, entities, relations, facts))


def _sentences(
    rng: random.Random, entities: Sequence[_Entity], stated: Sequence[_Stated]
) -> list[_Pieces]:
    """Word the facts: in an order, some of them together."""
    rest = list(stated)
    units: list[list[_Stated]] = []
    if rng.random() < 0.4:  # rest[0] and rest[1] share the first relation of the plan
        units.append([rest.pop(0), rest.pop(0)])
    for entity in rng.sample(entities, len(entities)):
        own = [fact for fact in rest if fact.entity == entity]
        rng.shuffle(own)
        while own:
            n = 2 if len(own) > 1 and rng.random() < 0.4 else 1
            units.append(own[:n])
            own = own[n:]
    if rng.random() < 0.4:
        rng.shuffle(units)
    speaker = _Speaker(rng)
    sentences = [speaker.introduce(entities)] if rng.random() < 0.3 else []
    for unit in units:
        if len(unit) == 2 and unit[0].entity != unit[1].entity:
            sentences.append(speaker.contrast(unit[0], unit[1]))
        else:
            sentences.append(speaker.tell(unit))
    return sentences


def _write(sentences: Sequence[_Pieces]) -> tuple[str, tuple[StatedFact, ...]]:
    """Join sentences into a paragraph and note where each value lies."""
    context = ""
    facts: list[StatedFact] = []
    for pieces in sentences:
        sentence = ""
        for piece in pieces:
            if isinstance(piece, str):
                sentence += piece
            else:
                start = len(context) + len(sentence)
                entity, relation, value = piece
                facts.append(StatedFact(entity.name, relation.name, value, start))
                sentence += value
        context += sentence[0].upper() + sentence[1:].removesuffix(".") + ". "
    return context.rstrip(), tuple(facts)


def _questions(
    rng: random.Random,
    entities: Sequence[_Entity],
    relations: Sequence[Relation],
    facts: Sequence[StatedFact],
) -> tuple[FactQuestion, ...]:
    by_key = {(fact.subject, fact.relation): fact for fact in facts}
    unstated = [
        (entity, relation)
        for entity in entities
        for relation in relations
        if (entity.name, relation.name) not in by_key
    ]
    pairs = [
        (entity, relation)
        for entity in entities
        for relation in relations
        if (entity.name, relation.name) in by_key
    ]
    asked = [*rng.sample(pairs, QUESTIONS_PER_PARAGRAPH - 1), rng.choice(unstated)]
    rng.shuffle(asked)
    questions = []
    for entity, relation in asked:
        template = rng.choice(relation.questions)
        [text] = _fill(template, entity, _cases(entity.name), [])
        answer = by_key.get((entity.name, relation.name))
        others = [fact for fact in facts if fact.relation == relation.name]
        plausible = rng.choice(others) if answer is None else None
        questions.append(FactQuestion(text, entity.name, relation.name, answer, plausible))
    return tuple(questions)
