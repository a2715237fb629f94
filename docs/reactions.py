"""Writes chemical reactions as texts and cloze items, for the analyses that need an MLM head.

Usage: python docs/reactions.py REACTIONS.csv FOLDER

The column ``smiles`` of the file holds reactions as SMILES, ``reactants>>products``. Its reactions,
each once, in an order of seed 0, become ``reactions_asked.jsonl`` (500) and
``reactions_learned.jsonl`` (the others), tokens with a space between them, so that they can be put
in another order; and ``products.jsonl`` has 200 items of each group of `GROUPS`: reactions of which
one token of a product is masked.
"""

from __future__ import annotations

import csv
import json
import random
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TOKEN = re.compile(
    r"\%\([0-9]{3}\)|\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\||\(|\)|\.|=|#|-|\+|\\|\/"
    r"|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9]"
)
"""A token of SMILES, as Schwaller et al. (2021) cut them for the encoder."""
GROUPS = {
    "carbon": ("C", "c"),
    "nitrogen, oxygen, sulphur": ("N", "n", "O", "o", "S", "s"),
    "halogens": ("F", "Cl", "Br", "I"),
    "branches and bonds": ("(", ")", "=", "#", "-", "/", "\\"),
    "ring numbers": ("1", "2", "3", "4", "5", "6"),
}
"""The words that an item of a group is chosen from."""
ASKED, OF_GROUP, LONGEST = 500, 200, 500
"""Texts to ask about, items of a group, and most tokens of the reaction of an item."""


def main(source: Path, folder: Path) -> None:
    """Write the three files."""
    with source.open(encoding="utf-8", newline="") as file:
        reactions = list(dict.fromkeys(row["smiles"] for row in csv.DictReader(file)))
    chance = random.Random(0)
    chance.shuffle(reactions)
    texts = [TOKEN.findall(reaction) for reaction in reactions]
    spaced = [{"text": " ".join(tokens)} for tokens in texts]
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "reactions_asked.jsonl", spaced[:ASKED])
    _write(folder / "reactions_learned.jsonl", spaced[ASKED:])
    _write(folder / "products.jsonl", items(texts, chance))


def items(texts: Sequence[Sequence[str]], chance: random.Random) -> list[dict[str, object]]:
    """An item of each text at most, of a group that is drawn among those not yet full.

    Args:
        texts: reactions as tokens.
        chance: draws group and token.
    """
    written: list[dict[str, object]] = []
    left = dict.fromkeys(GROUPS, OF_GROUP)
    for tokens in texts:
        if len(tokens) > LONGEST:
            continue
        products = range(tokens.index(">>") + 1, len(tokens))
        for group in chance.sample(list(GROUPS), len(GROUPS)):
            places = [i for i in products if tokens[i] in GROUPS[group]]
            if places and left[group]:
                at = chance.choice(places)
                text = " ".join([*tokens[:at], "[MASK]", *tokens[at + 1 :]])
                about = {"answer": tokens[at], "group": group, "candidates": GROUPS[group]}
                written.append({"text": text, **about})
                left[group] -= 1
                break
    return written


def _write(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
