"""The text of generated paragraphs: facts told one sentence after the other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from bertvision.pipelines.tasks.generated import wording
from bertvision.pipelines.tasks.generated.names import draw_value
from bertvision.pipelines.tasks.generated.wording import Relation


class Cases(NamedTuple):
    """A name or pronoun in the forms a sentence needs."""

    nominative: str
    possessive: str
    objective: str


class Entity(NamedTuple):
    """Who or what a paragraph tells of."""

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
        return [self.rng.choice(wording.INTRODUCTIONS).format(_enumerate(names))]

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
            pieces = [self.rng.choice(wording.OPENERS), *pieces]
        return pieces

    def contrast(self, one: Stated, other: Stated) -> Pieces:
        """One sentence with the same relation of two entities."""
        pieces: Pieces = []
        for fact in (one, other):
            self.focus = ()
            phrase = "{S} " + self.rng.choice(fact.relation.verb_phrases)
            pieces += _fill(phrase, fact.entity, self._mention(fact.entity), [fact])
            if fact is one:
                pieces.append(self.rng.choice(wording.CONTRASTS))
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
