"""Names and values of the generated reading comprehension: their parts, and how they are drawn.

The English of the generated reading comprehension: how a fact is told and asked.

Wordings are written as text, one relation after the other::

    relation: kind of value
      - verb phrases whose subject is the entity
      + whole clauses
      ? questions

with ``{S}`` the entity ("Ilda Brenn", "she"), ``{S's}`` its possessive, ``{O}`` its object form,
``{p}`` its possessive pronoun, ``{V}`` the value and ``{a}`` the indefinite article of the value.

The text of generated paragraphs: facts told one sentence after the other.

Reading comprehension about invented facts, in the form of SQuAD 2.0: data for the quickstart.

A paragraph tells of two or three entities of one kind (people, towns, firms, books, ships). Some
relations are stated of several of them, so that the answer must be matched with its subject; a
question is unanswerable because its relation is stated of another entity of the paragraph only, the
"entity swap" of SQuAD 2.0 (Rajpurkar et al. 2018, table 1). All names are composed from syllables:
nothing can be answered from what a model has read before.
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

_ONSETS = "b br c d dr f fl g gr h j k kl l m n p pl pr qu r s sk sl st t th tr v w z".split()  # noqa: SIM905
_VOWELS = "a e i o u ai ea ou".split()  # noqa: SIM905
_CODAS = "l n r s m nd rn th x ck lm st".split()  # noqa: SIM905
_ENDINGS = {
    "first": "a en ia o is ette us ine el or".split(),  # noqa: SIM905
    "last": "er ing ov sen ane ley ard wick ski mont".split(),  # noqa: SIM905
    "town": "ford mouth stead by wick ova heim ster dale burg ton port".split(),  # noqa: SIM905
    "river": "e ne a er el".split(),  # noqa: SIM905
    "ship": "ia ora ena is ara".split(),  # noqa: SIM905
}
_FIRM_FORMS = [
    "{} Works", "{} and Sons", "{} Brothers", "{} Mills", "{} Press", "{} Company", "{} Trading",
    "{} and Partners", "{} House", "{} Union",
]  # fmt: skip
_BOOK_FORMS = [
    "The Lantern of {}", "The Orchard of {}", "A Winter in {}", "The Road to {}", "Letters from {}",
    "The Clocks of {}", "The Keeper of {}", "Return to {}", "The Bells of {}", "The Widow of {}",
    "Beyond {}", "The Silence of {}", "A History of {}", "The Gardens of {}",
]  # fmt: skip

_PROFESSIONS = """
actor|architect|astronomer|baker|barber|beekeeper|bookbinder|botanist|brewer|butcher|carpenter|
chemist|clockmaker|composer|cook|dentist|engineer|engraver|farmer|fisherman|gardener|geologist|
glassblower|historian|hunter|innkeeper|jeweller|journalist|judge|lawyer|librarian|locksmith|miller|
miner|nurse|organist|painter|pharmacist|photographer|pilot|potter|printer|sailor|schoolteacher|
sculptor|shepherd|singer|soldier|stonemason|surgeon|surveyor|tailor|translator|watchmaker|weaver
""".replace("\n", "").split("|")
_GOODS = """
bricks|carpets|candles|chairs|clocks|copper pots|cotton shirts|dyes|felt hats|fishing nets|
fountain pens|furniture|glass bottles|gloves|gramophones|grain|honey|ink|iron stoves|lace|
lamps|leather boots|linen|matches|mirrors|musical boxes|olive oil|paints|paper|pepper|
pianos|porcelain|pottery|ropes|saddles|salt|scissors|sewing machines|silk|soap|steel knives|
sugar|tea|tiles|timber|tobacco|toys|typewriters|umbrellas|violins|wallpaper|wax|wheat|wine|wool
""".replace("\n", "").split("|")
_INSTRUMENTS = """
accordion|bassoon|cello|clarinet|cornet|double bass|flute|guitar|harp|harpsichord|horn|lute|
mandolin|oboe|organ|piano|saxophone|trombone|trumpet|tuba|viola|violin|xylophone|zither
""".replace("\n", "").split("|")
_YEARS = {
    "birth year": (1790, 1950),
    "town year": (900, 1780),
    "firm year": (1780, 1960),
    "book year": (1820, 1990),
    "ship year": (1800, 1950),
}
"""Kind of value → first and last year."""
_NUMBERS = {"number": (200, 90_000), "pages": (90, 980), "metres": (18, 240)}
"""Kind of value → smallest and largest number."""


def _stem(rng: random.Random, ending: str) -> str:
    syllables = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    if rng.random() < 0.3:
        syllables += rng.choice(_VOWELS) + rng.choice(_CODAS)
    return (syllables + rng.choice(_ENDINGS[ending])).capitalize()


def _compose(rng: random.Random, kind: str) -> str:
    if kind == "person":
        return f"{_stem(rng, 'first')} {_stem(rng, 'last')}"
    if kind == "firm":
        return rng.choice(_FIRM_FORMS).format(_stem(rng, "last"))
    if kind == "book":
        return rng.choice(_BOOK_FORMS).format(_stem(rng, "town"))
    if kind == "ship":
        return "the " + _stem(rng, "ship")
    return _stem(rng, kind)  # town, river


def draw_value(rng: random.Random, kind: str, pool: int, used: set[str]) -> str:
    """A value of this kind that is not in ``used``, and then is; names are of this pool."""
    while True:
        if kind in _YEARS:
            value = str(rng.randint(*_YEARS[kind]))
        elif kind in _NUMBERS:
            value = f"{rng.randint(*_NUMBERS[kind]):,}"
        elif kind == "profession":
            value = rng.choice(_PROFESSIONS)
        elif kind == "goods":
            value = rng.choice(_GOODS)
        elif kind == "instrument":
            value = rng.choice(_INSTRUMENTS)
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


_PERSON = """
birthplace: town
  - was born in {V} | came into the world in {V} | was a native of {V}
  + {S's} birthplace was {V} | it was in {V} that {S} was born
  ? Where was {S} born? | In which town was {S} born? | What was {S's} birthplace?
  ? Which town was {S} a native of?
birth year: birth year
  - was born in {V} | came into the world in {V}
  + {S's} year of birth was {V} | it was in {V} that {S} was born
  ? When was {S} born? | In which year was {S} born? | What was {S's} year of birth?
  ? In what year did {S} come into the world?
profession: profession
  - worked as {a} {V} | earned {p} living as {a} {V} | was {a} {V} by profession
  + {S's} profession was that of {a} {V}
  ? What was {S's} profession? | What did {S} do for a living? | What did {S} work as?
  ? How did {S} earn {p} living?
employer: firm
  - worked for {V} | was employed by {V} | spent {p} career at {V} | was on the staff of {V}
  + {S's} employer was {V}
  ? Which firm did {S} work for? | Who employed {S}? | What was the name of {S's} employer?
  ? At which firm did {S} spend {p} career?
spouse: person
  - married {V} | was married to {V} | shared {p} life with {V}
  + {S's} spouse was {V}
  ? Who did {S} marry? | Who was {S} married to? | What was the name of {S's} spouse?
  ? With whom did {S} share {p} life?
teacher: person
  - studied under {V} | was taught by {V} | learned {p} craft from {V} | was a pupil of {V}
  + {S's} teacher was {V}
  ? Who taught {S}? | Under whom did {S} study? | Who was {S's} teacher?
  ? From whom did {S} learn {p} craft?
instrument: instrument
  - played the {V} | practised the {V} every day | was fond of playing the {V}
  + {S's} favourite instrument was the {V}
  ? Which instrument did {S} play? | What instrument did {S} practise?
  ? What was {S's} favourite instrument?
place of death: town
  - died in {V} | passed away in {V} | spent {p} last days in {V}
  + {S's} life ended in {V} | it was in {V} that {S} died
  ? Where did {S} die? | In which town did {S} die? | Where did {S} pass away?
  ? Where did {S} spend {p} last days?
"""

_TOWN = """
river: river
  - lies on the river {V} | stands on the banks of the {V} | was built beside the river {V}
  + the river {V} flows through {O}
  ? On which river does {S} lie? | Which river flows through {S}?
  ? On the banks of which river does {S} stand? | What is the name of the river at {S}?
population: number
  - has {V} inhabitants | is home to {V} people | counts {V} residents
  + {S's} population is {V}
  ? How many people live in {S}? | What is the population of {S}?
  ? How many inhabitants does {S} have? | How many residents does {S} count?
mayor: person
  - elected {V} as {p} mayor | chose {V} as {p} mayor | has {V} as {p} mayor
  + {S's} mayor is {V}
  ? Who is the mayor of {S}? | Who was elected mayor of {S}? | Who serves as mayor of {S}?
  ? What is the name of {S's} mayor?
foundation: town year
  - was founded in {V} | dates back to {V} | was first settled in {V}
  + {S's} history began in {V}
  ? When was {S} founded? | In which year was {S} founded? | When was {S} first settled?
  ? To which year does {S} date back?
founder: person
  - was founded by {V} | owes {p} existence to {V}
  + {S's} founder was {V} | it was {V} who founded {O}
  ? Who founded {S}? | Who was the founder of {S}? | By whom was {S} founded?
  ? To whom does {S} owe {p} existence?
craft: goods
  - is known for {p} {V} | is famous for {p} {V} | made {p} name with {V}
  + people travel to {O} for {p} {V}
  ? What is {S} known for? | What is {S} famous for? | With what did {S} make {p} name?
  ? For what do people travel to {S}?
twin town: town
  - is twinned with {V} | has long been a twin town of {V}
  + {S's} twin town is {V}
  ? Which town is {S} twinned with? | What is the twin town of {S}?
  ? With which town is {S} twinned?
"""

_FIRM = """
founder: person
  - was founded by {V} | was started by {V} | was the creation of {V}
  + {S's} founder was {V} | it was {V} who founded {O}
  ? Who founded {S}? | Who was the founder of {S}? | By whom was {S} started?
  ? Whose creation was {S}?
foundation: firm year
  - was founded in {V} | was started in {V} | opened {p} doors in {V}
  + {S's} year of foundation was {V}
  ? When was {S} founded? | In which year was {S} started? | When did {S} open {p} doors?
  ? What was the year of foundation of {S}?
headquarters: town
  - has {p} headquarters in {V} | is based in {V} | is run from {V}
  + {S's} head office is in {V}
  ? Where is {S} based? | Where does {S} have {p} headquarters? | In which town is {S} based?
  ? Where is the head office of {S}?
product: goods
  - makes {V} | produces {V} | manufactures {V} | is a maker of {V}
  + most of {S's} income comes from {V}
  ? What does {S} make? | What does {S} produce? | Which goods does {S} manufacture?
  ? From what does most of the income of {S} come?
workforce: number
  - employs {V} people | has {V} employees | gives work to {V} people
  + {S's} workforce numbers {V}
  ? How many people does {S} employ? | How many employees does {S} have?
  ? To how many people does {S} give work? | How many people make up the workforce of {S}?
director: person
  - is directed by {V} | is managed by {V} | is led by {V}
  + {S's} director is {V}
  ? Who directs {S}? | Who manages {S}? | Who is the director of {S}? | By whom is {S} led?
owner: firm
  - belongs to {V} | is owned by {V} | was bought by {V}
  + {S's} owner is {V}
  ? Who owns {S}? | To whom does {S} belong? | By whom was {S} bought?
  ? Who is the owner of {S}?
"""

_BOOK = """
author: person
  - was written by {V} | came from the pen of {V} | is the work of {V}
  + {S's} author is {V}
  ? Who wrote {S}? | Who is the author of {S}? | By whom was {S} written?
  ? From whose pen did {S} come?
publication: book year
  - was published in {V} | appeared in {V} | came out in {V}
  + {S's} first edition is dated {V}
  ? When was {S} published? | In which year did {S} appear? | When did {S} come out?
  ? In what year was {S} published?
publisher: firm
  - was published by {V} | was brought out by {V} | was printed by {V}
  + {S's} publisher was {V}
  ? Who published {S}? | Which firm brought out {S}? | By which firm was {S} printed?
  ? Who was the publisher of {S}?
setting: town
  - is set in {V} | takes place in {V} | describes life in {V}
  + {S's} plot unfolds in {V}
  ? Where is {S} set? | Where does {S} take place? | In which town is {S} set?
  ? Where does the plot of {S} unfold?
length: pages
  - has {V} pages | runs to {V} pages | fills {V} pages
  + {S's} length is {V} pages
  ? How many pages does {S} have? | To how many pages does {S} run?
  ? How many pages does {S} fill? | How many pages long is {S}?
translator: person
  - was translated by {V} | was rendered into English by {V}
  + {S's} translator was {V}
  ? Who translated {S}? | Who was the translator of {S}?
  ? By whom was {S} rendered into English?
hero: profession
  - tells the story of {a} {V} | follows the adventures of {a} {V} | has {a} {V} as {p} hero
  + {S's} hero is {a} {V}
  ? What is the profession of the hero of {S}? | Which profession does the hero of {S} have?
  ? What does the hero of {S} do for a living?
dedication: person
  - was dedicated to {V} | bears a dedication to {V}
  + {S's} dedication names {V}
  ? To whom was {S} dedicated? | Who is named in the dedication of {S}?
  ? Who was {S} dedicated to?
"""

_SHIP = """
shipyard: town
  - was built in {V} | was constructed at the yard of {V} | came from a slipway in {V}
  + {S's} hull was built in {V}
  ? Where was {S} built? | In which town was {S} built? | Where was {S} constructed?
  ? From a slipway in which town did {S} come?
launch: ship year
  - was launched in {V} | first put to sea in {V} | made {p} maiden voyage in {V}
  + {S's} maiden voyage was in {V}
  ? When was {S} launched? | In which year did {S} first put to sea?
  ? When did {S} make {p} maiden voyage? | In which year was {S} launched?
captain: person
  - was commanded by {V} | sailed under {V} | had {V} as {p} captain
  + {S's} captain was {V}
  ? Who commanded {S}? | Who was the captain of {S}? | Under whom did {S} sail?
  ? By whom was {S} commanded?
cargo: goods
  - carried {V} | transported {V} | was loaded with {V}
  + {S's} cargo consisted of {V}
  ? What did {S} carry? | What did {S} transport? | What was {S} loaded with?
  ? What did the cargo of {S} consist of?
owner: firm
  - belonged to {V} | was owned by {V} | was operated by {V}
  + {S's} owner was {V}
  ? Who owned {S}? | Which firm did {S} belong to? | By whom was {S} operated?
  ? Who was the owner of {S}?
length: metres
  - was {V} metres long | measured {V} metres from bow to stern
  + {S's} length was {V} metres
  ? How many metres long was {S}? | What was the length of {S} in metres?
  ? How many metres did {S} measure from bow to stern?
wreck: town
  - sank off {V} | was lost near {V} | went down near {V}
  + {S's} wreck lies off {V}
  ? Where did {S} sink? | Near which town was {S} lost? | Where did {S} go down?
  ? Off which town does the wreck of {S} lie?
"""


def _parse(text: str) -> tuple[Relation, ...]:
    relations: list[Relation] = []
    for block in text.strip().split("\n"):
        if not block.startswith(" "):
            name, value_kind = block.split(": ")
            relations.append(Relation(name, value_kind, (), (), ()))
            continue
        marker, phrases = block.strip()[0], tuple(block.strip()[2:].split(" | "))
        field = {"-": "verb_phrases", "+": "clauses", "?": "questions"}[marker]
        last = relations[-1]
        relations[-1] = last._replace(**{field: getattr(last, field) + phrases})
    return tuple(relations)


RELATIONS: dict[str, tuple[Relation, ...]] = {
    "person": _parse(_PERSON),
    "town": _parse(_TOWN),
    "firm": _parse(_FIRM),
    "book": _parse(_BOOK),
    "ship": _parse(_SHIP),
}
"""Kind of entity → what can be said of it, roughly in the order of events."""

INTRODUCTIONS = [
    "this chapter deals with {}", "{} are often mentioned together", "the guide compares {}",
    "{} have often been confused", "the archive has records of {}",
]  # fmt: skip
OPENERS = [
    "according to the archive, ", "records show that ", "as the newspaper reported, ", "in fact, ",
    "it is certain that ", "as is well known, ",
]  # fmt: skip
CONTRASTS = [", whereas ", ", while ", ", but ", "; by contrast, "]
"""Between two sentences that say the same of two entities."""


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
        return [self.rng.choice(INTRODUCTIONS).format(_enumerate(names))]

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
            pieces = [self.rng.choice(OPENERS), *pieces]
        return pieces

    def contrast(self, one: Stated, other: Stated) -> Pieces:
        """One sentence with the same relation of two entities."""
        pieces: Pieces = []
        for fact in (one, other):
            self.focus = ()
            phrase = "{S} " + self.rng.choice(fact.relation.verb_phrases)
            pieces += _fill(phrase, fact.entity, self._mention(fact.entity), [fact])
            if fact is one:
                pieces.append(self.rng.choice(CONTRASTS))
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
        n_questions: how many questions, a multiple of 3.
        seed: which.

    Raises:
        InputError: as for `make_facts`.
    """
    text = json.dumps(make_facts(n_questions, seed=seed), ensure_ascii=False, indent=1)
    write_text(path, text + "\n")


def make_facts(n_questions: int, *, seed: int) -> dict[str, Any]:
    """Generate a data set in the JSON form of SQuAD 2.0.

    Args:
        n_questions: how many questions, a multiple of 3; a third is unanswerable.
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
    while {e.name for of in told.values() for e in of} != {e.name for e in entities}:
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
