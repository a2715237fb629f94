"""Reading comprehension about invented facts, in the form of SQuAD 2.0: data for the quickstart.

A paragraph tells of two or three entities of one kind (people, towns, firms, books, ships). Some
relations are stated of several of them, so that the answer must be matched with its subject; a
question is unanswerable because its relation is stated of another entity of the paragraph only, the
"entity swap" of SQuAD 2.0 (Rajpurkar et al. 2018, table 1). All names are composed from syllables:
nothing can be answered from what a model has read before.

The words are in ``generated.json``: syllables of names, lists of words, ranges of numbers, and for
each kind of entity its relations, roughly in the order of events. A wording has ``{S}`` for the
entity ("Ilda Brenn", "she"), ``{S's}`` for its possessive, ``{O}`` for its object form, ``{p}`` for
its possessive pronoun, ``{V}`` for the value and ``{a}`` for the indefinite article of the value.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.files import write_text

NAME_POOLS = 16
"""A composed name belongs to one pool; data sets made from different pools share no name."""

_WORDS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))


def _stem(rng: random.Random, ending: str) -> str:
    parts = _WORDS["syllables"]
    syllables = rng.choice(parts["onsets"]) + rng.choice(parts["vowels"])
    syllables += rng.choice(parts["codas"])
    if rng.random() < 0.3:
        syllables += rng.choice(parts["vowels"]) + rng.choice(parts["codas"])
    return str(syllables + rng.choice(parts["endings"][ending])).capitalize()


def _compose(rng: random.Random, kind: str) -> str:
    if kind == "person":
        return f"{_stem(rng, 'first')} {_stem(rng, 'last')}"
    if kind == "firm":
        return str(rng.choice(_WORDS["firms"]).format(_stem(rng, "last")))
    if kind == "book":
        return str(rng.choice(_WORDS["books"]).format(_stem(rng, "town")))
    if kind == "ship":
        return "the " + _stem(rng, "ship")
    return _stem(rng, kind)  # town, river


def draw_value(rng: random.Random, kind: str, pool: int, used: set[str]) -> str:
    """A value of this kind that is not in ``used``, and then is; names are of this pool."""
    while True:
        if kind in _WORDS["years"]:
            value = str(rng.randint(*_WORDS["years"][kind]))
        elif kind in _WORDS["numbers"]:
            value = f"{rng.randint(*_WORDS['numbers'][kind]):,}"
        elif kind in _WORDS["words"]:
            value = rng.choice(_WORDS["words"][kind])
        else:
            value = _compose(rng, kind)
            if zlib.crc32(value.encode()) % NAME_POOLS != pool:
                continue
        if value not in used:
            used.add(value)
            return value


class Relation(NamedTuple):
    """One thing that can be said and asked of a kind of entity."""

    name: str
    """Such as ``birthplace``."""
    value_kind: str
    """Kind of its values: another kind of entity, or ``year``, ``number``, …"""
    verb_phrases: tuple[str, ...]
    """Follow a subject; two of them can share one."""
    clauses: tuple[str, ...]
    """Complete in themselves."""
    questions: tuple[str, ...]
    """Each asks for the value."""


RELATIONS: dict[str, tuple[Relation, ...]] = {
    kind: tuple(
        Relation(r["name"], r["value_kind"], *(tuple(r[field]) for field in Relation._fields[2:]))
        for r in relations
    )
    for kind, relations in _WORDS["relations"].items()
}
"""By kind of entity, what can be said of it, roughly in the order of events."""


class Cases(NamedTuple):
    """A name or pronoun in the forms a sentence needs."""

    nominative: str
    possessive: str
    objective: str


class Entity(NamedTuple):
    """Person or thing that a paragraph tells of."""

    name: str
    """Full name, as questions use it."""
    short: str
    """Name for a later mention: the surname of a person."""
    kind: str
    """One of the keys of `RELATIONS`."""
    pronoun: Cases
    """She, he or it."""


def draw_entity(rng: random.Random, kind: str, pool: int, used: set[str]) -> Entity:
    """An entity of this kind, with a name as `draw_value` draws it."""
    name = draw_value(rng, kind, pool, used)
    if kind == "person":
        pronoun = rng.choice([Cases("she", "her", "her"), Cases("he", "his", "him")])
        return Entity(name, name.split()[-1], kind, pronoun)
    return Entity(name, name, kind, Cases("it", "its", "it"))


class Stated(NamedTuple):
    """A value in a sentence, in place of its text."""

    entity: Entity
    relation: Relation
    value: str


Pieces = list[str | Stated]
"""A sentence, with the values it states in place."""


class Speaker:
    """Words facts one sentence after the other, and knows whom the last one was about."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.introduced: set[str] = set()
        self.focus: Sequence[Stated] = ()  # the facts of the last sentence, if of one entity

    def introduce(self, entities: Sequence[Entity]) -> Pieces:
        """A sentence that names the entities and says nothing of them."""
        self.introduced.update(e.name for e in entities)
        names = [e.name for e in entities]
        return [str(self.rng.choice(_WORDS["introductions"]).format(_enumerate(names)))]

    def tell(self, facts: Sequence[Stated]) -> Pieces:
        """One sentence with one or two facts about one entity."""
        entity = facts[0].entity
        phrases = [self.rng.choice(fact.relation.verb_phrases) for fact in facts]
        if len(facts) == 1 and self.rng.random() < 0.35:
            template = self.rng.choice(facts[0].relation.clauses)
        else:
            template = "{S} " + " and ".join(_distinct(self.rng, facts, phrases))
        pieces = _fill(template, entity, self._mention(entity), facts)
        self.focus = facts
        if self.rng.random() < 0.2:
            pieces = [self.rng.choice(_WORDS["openers"]), *pieces]
        return pieces

    def contrast(self, one: Stated, other: Stated) -> Pieces:
        """One sentence with the same relation of two entities."""
        pieces: Pieces = []
        for fact in (one, other):
            self.focus = ()
            phrase = "{S} " + self.rng.choice(fact.relation.verb_phrases)
            pieces += _fill(phrase, fact.entity, self._mention(fact.entity), [fact])
            if fact is one:
                pieces.append(self.rng.choice(_WORDS["contrasts"]))
        return pieces

    def _mention(self, entity: Entity) -> Cases:
        """How to call the entity now, so that nobody else can be meant."""
        name = entity.name
        if name in self.introduced:
            name = entity.short if self.rng.random() < 0.7 else name
            if self.focus and self.focus[0].entity == entity:
                heard = {fact.relation.value_kind for fact in self.focus}
                if entity.kind in heard:
                    pass  # both a noun and a pronoun could mean the value
                elif entity.kind != "person" and heard & {"town", "firm", "river"}:
                    name = "the " + entity.kind  # "it" could mean the value
                elif self.rng.random() < 0.75:
                    return entity.pronoun
        self.introduced.add(entity.name)
        return cases(name)


def cases(name: str) -> Cases:
    """The cases of a name."""
    return Cases(name, name + ("'" if name.endswith("s") else "'s"), name)


def _enumerate(names: Sequence[str]) -> str:
    return ", ".join(names[:-1]) + " and " + names[-1]


def _distinct(rng: random.Random, facts: Sequence[Stated], phrases: Sequence[str]) -> Sequence[str]:
    """Verb phrases that do not begin alike ("was born in … and was born in …")."""
    while len(phrases) > 1 and phrases[0].split()[:2] == phrases[1].split()[:2]:
        phrases = [rng.choice(fact.relation.verb_phrases) for fact in facts]
    return phrases


def address(template: str, entity: Entity, mention: Cases) -> str:
    """Put an entity into a template; ``{V}`` and ``{a}`` stay."""
    text = template.replace("{S}", mention.nominative).replace("{S's}", mention.possessive)
    return text.replace("{O}", mention.objective).replace("{p}", entity.pronoun.possessive)


def _fill(template: str, entity: Entity, mention: Cases, facts: Sequence[Stated]) -> Pieces:
    """Put an entity and values into a template with as many ``{V}`` as facts."""
    text = address(template, entity, mention)
    before, *rest = text.split("{V}")
    pieces: Pieces = []
    for fact, after in zip(facts, rest, strict=True):
        article = "an" if fact.value[0] in "aeiou" else "a"
        pieces += [before.replace("{a}", article), fact]
        before = after
    return [*pieces, before]


QUESTIONS_PER_PARAGRAPH = 3
"""Questions asked of a paragraph; one of them is unanswerable."""


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
        n_questions: Number of questions, a multiple of 3.
        seed: Seed of the draw.

    Raises:
        InputError: as for `make_facts`.
    """
    text = json.dumps(make_facts(n_questions, seed=seed), ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


def make_facts(n_questions: int, *, seed: int) -> dict[str, Any]:
    """Generate a data set in the JSON form of SQuAD 2.0.

    Args:
        n_questions: Number of questions, a multiple of 3; a third is unanswerable.
        seed: at least 0. Seeds that differ modulo 16 share no name, so that a train and a dev
            split are about different worlds.

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
        n_questions: Number of questions, a multiple of 3.
        seed: Seed, at least 0.

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
    pool = seed % NAME_POOLS
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


# How many entities there are, and of how many of them each relation is stated.
_PLANS: list[tuple[int, tuple[int, ...]]] = [
    (2, (2, 1)),
    (2, (2, 1, 1)),
    (2, (1, 1, 1)),
    (3, (2, 1)),
]


def _paragraph(rng: random.Random, pool: int) -> FactParagraph:
    used: set[str] = set()
    kind = rng.choice(list(RELATIONS))
    n_entities, plan = rng.choice(_PLANS)
    entities = [draw_entity(rng, kind, pool, used) for _ in range(n_entities)]
    relations = rng.sample(RELATIONS[kind], len(plan))
    told: dict[str, list[Entity]] = {}
    while {e.name for some in told.values() for e in some} != {e.name for e in entities}:
        told = {r.name: rng.sample(entities, n) for r, n in zip(relations, plan, strict=True)}
    stated = [
        Stated(entity, relation, draw_value(rng, relation.value_kind, pool, used))
        for relation in relations
        for entity in told[relation.name]
    ]
    context, facts = _write(_sentences(rng, entities, stated))
    return FactParagraph(context, facts, _questions(rng, entities, relations, facts))


def _sentences(
    rng: random.Random, entities: Sequence[Entity], stated: Sequence[Stated]
) -> list[Pieces]:
    """Word the facts: in an order, some of them together."""
    order = RELATIONS[entities[0].kind]
    rest = list(stated)
    units: list[list[Stated]] = []
    if rng.random() < 0.4:  # rest[0] and rest[1] share the first relation of the plan
        units.append([rest.pop(0), rest.pop(0)])
    for entity in rng.sample(entities, len(entities)):
        own = [fact for fact in rest if fact.entity == entity]
        rng.shuffle(own)
        while own:
            n = 2 if len(own) > 1 and rng.random() < 0.4 else 1
            units.append(
                sorted(own[:n], key=lambda fact: order.index(fact.relation))
            )  # nobody dies and is born
            own = own[n:]
    if rng.random() < 0.4:
        rng.shuffle(units)
    speaker = Speaker(rng)
    sentences = [speaker.introduce(entities)] if rng.random() < 0.3 else []
    for unit in units:
        if len(unit) == 2 and unit[0].entity != unit[1].entity:
            sentences.append(speaker.contrast(unit[0], unit[1]))
        else:
            sentences.append(speaker.tell(unit))
    return sentences


def _write(sentences: Sequence[Pieces]) -> tuple[str, tuple[StatedFact, ...]]:
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
        context += sentence[0].upper() + sentence[1:] + ". "
    return context.rstrip(), tuple(facts)


def _questions(
    rng: random.Random,
    entities: Sequence[Entity],
    relations: Sequence[Relation],
    facts: Sequence[StatedFact],
) -> tuple[FactQuestion, ...]:
    stated = {(fact.subject, fact.relation): fact for fact in facts}
    pairs = [(entity, relation) for entity in entities for relation in relations]
    answerable = [(e, r) for e, r in pairs if (e.name, r.name) in stated]
    unanswerable = [(e, r) for e, r in pairs if (e.name, r.name) not in stated]
    asked = [*rng.sample(answerable, QUESTIONS_PER_PARAGRAPH - 1), rng.choice(unanswerable)]
    rng.shuffle(asked)
    questions = []
    for entity, relation in asked:
        text = address(rng.choice(relation.questions), entity, cases(entity.name))
        answer = stated.get((entity.name, relation.name))
        others = [fact for fact in facts if fact.relation == relation.name]
        plausible = rng.choice(others) if answer is None else None
        questions.append(FactQuestion(text, entity.name, relation.name, answer, plausible))
    return tuple(questions)
