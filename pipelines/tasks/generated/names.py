"""Names and values of the generated reading comprehension: their parts, and how they are drawn."""

from __future__ import annotations

import random
import zlib

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
