"""Encodings and analyses: what each analysis keeps of its numbers, and what is said of the rest.

Two things decide. A statistic bears rounding up to a size, which `docs/analyses.md` measures on a
real encoder: `KEEPS` says what came out. And an encoding may round a kind of token in a layer more
than it promises, which its calibration measured when the split was written: massive activations,
or an outlier channel that widens the steps of all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from bertvision.featurestore.format.calibration import is_beyond_promise
from bertvision.featurestore.split import ActivationSplit

Kept = Literal["values", "course", "unmeasured"]
"""``values``: the largest deviation from float32 is 1 % of the range over layers at most; `course`:
10 %, so that it is the same where the statistic rises and falls."""


class Keeps(NamedTuple):
    """Accuracy of an analysis on tokens, by encoding.

    Attributes:
        int8: In int8 stores.
        int4: In int4 stores.
    """

    int8: Kept
    int4: Kept


KEEPS: dict[str, Keeps] = {
    "cka": Keeps("values", "course"),
    "cca": Keeps("values", "course"),
    "rsa": Keeps("values", "course"),
    "isotropy": Keeps("values", "course"),
    "context": Keeps("values", "course"),
    "languages": Keeps("course", "unmeasured"),
    "attention": Keeps("unmeasured", "unmeasured"),
    "relations": Keeps("unmeasured", "unmeasured"),
    "prune": Keeps("unmeasured", "unmeasured"),
    "lens": Keeps("unmeasured", "unmeasured"),
    "cloze": Keeps("unmeasured", "unmeasured"),
    "structure": Keeps("unmeasured", "unmeasured"),
    "exits": Keeps("unmeasured", "unmeasured"),
}
"""By the kind of the analysis. The float encodings keep the values of all; those that were not
measured read vectors one by one, and an error of their split says how far each is off."""

_SENTENCES: dict[Kept, str] = {
    "course": (
        "{splits} stored as {encoding}, of which {kind} keeps the course over layers, and not the "
        "second digit: compare with care what differs by little"
    ),
    "unmeasured": (
        "{splits} stored as {encoding}; what {kind} loses by that was not measured, so repeat what "
        "matters on a store with --encoding float32"
    ),
}


def encoding_notes(kind: str, splits: Iterable[ActivationSplit]) -> list[str]:
    """Sentences on the encodings of splits, where they change what an analysis tells.

    Args:
        kind: Kind of the analysis, a key of `KEEPS`.
        splits: The splits that it reads.

    Raises:
        CorruptStoreError: the measured errors of a split are damaged.
    """
    notes: list[str] = []
    named: dict[str, list[str]] = {}
    for split in {split.name: split for split in splits}.values():
        encoding: str = split.encoding.name
        if not split.encoding.quantised:
            continue
        named.setdefault(encoding, []).append(split.name)
        layers = split.layer_names or [str(layer) for layer in split.record.layers]
        for tokens, errors in split.encoding_error.items():
            beyond = [i for i, e in enumerate(errors) if is_beyond_promise(float(e), encoding)]
            if beyond:
                worst = max(beyond, key=lambda i: float(errors[i]))
                where = ", ".join(layers[i] for i in beyond)
                notes.append(
                    f"{split.name} keeps {_TOKENS.get(tokens, tokens)} of layer {where} less well "
                    f"than {encoding} promises (an error of {errors[worst]:.2g} of an ordinary "
                    f"token's deviation in layer {layers[worst]}): numbers of these tokens alone "
                    "may be less exact than others; --encoding bfloat16 or float32 keeps them"
                )
    for encoding, names in named.items():
        kept: Kept = getattr(KEEPS[kind], encoding)
        if kept == "values" or (kept == "unmeasured" and encoding == "int8"):
            continue  # int8 within its promise is off by 2 % of a deviation at most
        splits_are = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
        sentence = _SENTENCES[kept].format(splits=splits_are, encoding=encoding, kind=kind)
        notes.append(f"{sentence}.")
    return notes


_TOKENS = {
    "first": "the first token of each window ([CLS])",
    "special": "special tokens",
    "ordinary": "ordinary tokens",
    "pooled": "its vectors",
}
