"""Sentences for number agreement, made here: a verb agrees with its subject, however far it is.

In "the keys to the cabinet are here" another noun stands between the subject and its verb. Where
its number is the other one it distracts: it is an attractor (Linzen et al. 2016, *Assessing the
ability of LSTMs to learn syntax-sensitive dependencies*; for masked language models Goldberg 2019,
*Assessing BERT's syntactic abilities*). The sentences are built like those of Marvin & Linzen
(2018), *Targeted syntactic evaluation of language models*.
"""

from __future__ import annotations

import numpy as np

from bertvision.pipelines.analysis.mlm.items import MASK, Item, Items
from bertvision.pipelines.records import digest_of

AGREEMENT = "agreement"
"""Name of the set, which stands for a file of items."""
_NOUNS = [
    *(("author", "authors"), ("guard", "guards"), ("farmer", "farmers"), ("doctor", "doctors")),
    *(("pilot", "pilots"), ("teacher", "teachers"), ("officer", "officers"), ("king", "kings")),
]
_PLACES = ["near", "behind", "beside", "with"]
_VERBS = [("is", "are"), ("was", "were")]
_ENDS = ["here", "old", "famous", "late"]
_GROUPS = {
    "no other noun": (),
    "other noun of the same number": (False,),
    "1 attractor": (True,),
    "2 attractors": (True, True),
}
"""For each noun between subject and verb, whether it has the other number."""


def agreement(each: int = 64, seed: int = 0) -> Items:
    """Make sentences, equally many with a singular and with a plural subject.

    Args:
        each: sentences of a group; rounded up to an even number.
        seed: decides the words.
    """
    random = np.random.default_rng(seed)
    items = []
    for group, others in _GROUPS.items():
        for k in range(each + each % 2):
            number = k % 2  # 1 is plural
            nouns = random.choice(len(_NOUNS), 1 + len(others), replace=False)
            words = ["The", _NOUNS[nouns[0]][number]]
            for noun, differs in zip(nouns[1:], others, strict=True):
                place = _PLACES[random.integers(len(_PLACES))]
                words += [place, "the", _NOUNS[noun][1 - number if differs else number]]
            verbs = _VERBS[random.integers(len(_VERBS))]
            end = _ENDS[random.integers(len(_ENDS))]
            items.append(
                Item(
                    text=" ".join([*words, MASK, f"{end}."]),
                    answer=verbs[number],
                    wrong=verbs[1 - number],
                    group=group,
                    id=f"{group}, {k + 1}",
                )
            )
    values = [item.model_dump(mode="json") for item in items]
    return Items(AGREEMENT, digest_of(values), tuple(items))
