"""The English of the generated reading comprehension: how a fact is told and asked.

Wordings are written as text, one relation after the other::

    relation: kind of value
      - verb phrases whose subject is the entity
      + whole clauses
      ? questions

with ``{S}`` the entity ("Ilda Brenn", "she"), ``{S's}`` its possessive, ``{O}`` its object form,
``{p}`` its possessive pronoun, ``{V}`` the value and ``{a}`` the indefinite article of the value.
"""

from __future__ import annotations

from typing import NamedTuple


class Relation(NamedTuple):
    """One thing that can be said and asked of a kind of entity."""

    name: str
    """Such as ``birthplace``."""
    value_kind: str
    """What its values are: another kind of entity, or ``year``, ``number``, …"""
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
