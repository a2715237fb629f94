"""Run: a head trained with one seed on one part of a snapshot's training examples.

Written ``HEAD[@pPOOLING][@lLAYERS][@lrRATE][@eEPOCHS][@dTEACHER][@tTEMPERATURE][@wWEIGHT]`` and
``[@fFRACTION][@sSEED]``, such as ``adapter-386-shared@f0.3@s1``, ``learned-pooling@l0-6@e3`` or
``cls-learned-pooling@pmean``; what is not written is the default (of layers, learning rate
and epochs: what the training was told). That is also the name of its folder, so that heads which
differ in any of these stand beside each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.names import SnapshotTag, check_name
from bertvision.models import Kind
from bertvision.pipelines.poolings import TokenPooling, file_part, from_file_part
from bertvision.pipelines.ranks import Rank

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

HEAD_TOKENS: Final[dict[Kind, TokenPooling]] = {
    "span": "all",
    "token": "all",
    "classification": "cls",
}
"""Tokens of each window that heads read, by their kind, where their name says no pooling."""
TEMPERATURE = 2.0
"""Default temperature, that of DistilBERT's code."""
LABELS_WEIGHT = 0.5
"""Part of a distilled head's loss that labels have, where nothing else is said."""

_NUMBER = r"\d+(?:\.\d+)?(?:e-?\d+)?"
_MARKS = {
    "p": r"cls|sep|mean|max|first|last|at_[a-z0-9_]{1,40}",
    "l": r"\d+(?:-\d+)*",
    "lr": _NUMBER,
    "e": r"[1-9]\d{0,3}",
    "d": r"\d+(?:\.\d+)?e(?:\+\d+(?:\.\d+)?e)*",
    "t": _NUMBER,
    "w": _NUMBER,
    "f": r"[01]|0?\.\d{1,4}|[01]\.\d{1,4}",
    "s": r"\d{1,9}",
}
"""Marks that a run's name may carry behind @, in this order, with the form of their values."""


class Run(NamedTuple):
    """A head, the part of the examples that it is trained on, the seed, and settings of its own."""

    head: str
    """Name of the registry or of a plugin, or a dotted path ``package.module:Class``."""
    fraction: float = 1.0
    """Part of the training examples, 0 to 1; 0 is the head as it is made."""
    seed: int = 0
    """Seed of initial weights, order, dropout and the choice of examples."""
    variant: str = ""
    """Settings that its name carries: ``@pmean@l0-6@lr0.01@e3@d1e@t4``."""

    @classmethod
    def parse(cls, text: str) -> Run:
        """The run that ``text`` writes.

        Raises:
            InputError: it is no run's name.
        """
        head, values = _marks(text)
        variant = _variant(_settings(values))
        return cls.of(head, float(values.get("f", "1")), int(values.get("s", "0")), variant)

    @classmethod
    def of(cls, head: str, fraction: float, seed: int, variant: str = "") -> Run:
        """The run of these parts.

        Raises:
            InputError: the head's name is not allowed, the fraction is outside 0 to 1 or has more
                than four decimals, or the seed is negative.
        """
        if not 0 <= fraction <= 1 or round(fraction, 4) != fraction:
            raise InputError(
                f"fraction {fraction:g}: give part of the training examples, from 0 to 1 with at "
                "most four decimals, such as 0.3"
            )
        if seed < 0:
            raise InputError(f"seed {seed}: give 0 or more")
        check_name(_head_folder(head), "head")
        return cls(head, fraction, seed, variant)

    @property
    def name(self) -> str:
        """As it is written; of a dotted path what is safe as a folder's name."""
        fraction = "" if self.fraction == 1 else f"@f{self.fraction:.4f}".rstrip("0").rstrip(".")
        seed = f"@s{self.seed}" if self.seed else ""
        return _head_folder(self.head) + self.variant + fraction + seed

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of `TrainOptions` that its name carries."""
        return _settings(_marks(self.head + self.variant)[1])

    def having(self, **settings: Any) -> Run:
        """The run whose name also carries these fields of `TrainOptions`; no pool of None."""
        return self._replace(variant=_variant({**self.settings, **settings}))

    @property
    def text(self) -> str:
        """As it is typed: of a class of one's own with its dotted path."""
        return self.head + self.name[len(_head_folder(self.head)) :]

    def tokens(self, kind: Kind) -> TokenPooling:
        """The tokens of each window that the head reads.

        Args:
            kind: Kind of the head.

        Raises:
            InputError: the name says a pooling, and the head reads all tokens.
        """
        pooling: TokenPooling | None = self.settings.get("pool")
        if pooling is not None and kind != "classification":
            raise InputError(
                f"{self.name} reads all tokens of a window: leave the pooling {pooling} out, or "
                "choose from `bertvision heads --kind classification`"
            )
        return pooling or HEAD_TOKENS[kind]

    def examples(self, total: int) -> int:
        """How many of a split's examples it is trained on."""
        return round(self.fraction * total)


def runs_of(heads: Iterable[str], fractions: Sequence[float], seeds: Sequence[int]) -> list[Run]:
    """Every head with every fraction and seed; a head may itself be written with its own.

    Raises:
        InputError: a name, fraction or seed is not allowed, or a run comes twice.
    """
    runs = []
    for head in heads:
        run, (_, values) = Run.parse(head), _marks(head)
        if values.keys() & {"f", "s"}:
            runs.append(run)
        else:
            runs += [
                Run.of(run.head, fraction, seed, run.variant)
                for seed in seeds
                for fraction in fractions
            ]
    names = [run.name for run in runs]
    if not names or len(set(names)) != len(names):
        raise InputError(f"heads {', '.join(names) or '(none)'}: name at least one, each once")
    return runs


def check_told(
    runs: Sequence[Run], distil: str | None, temperature: float, labels_weight: float
) -> None:
    """Refuse a teacher, or a way of learning from one, that no name would let do anything.

    Args:
        runs: all that are asked for.
        distil: tag of the teacher that is given beside them.
        temperature: likewise what logits are divided by.
        labels_weight: likewise the part of the loss that labels have.

    Raises:
        InputError: every run names a teacher of its own, or one does, beside a temperature or a
            weight that are given.
    """
    if distil is None:
        return
    given = dict(distil=distil, temperature=temperature, labels_weight=labels_weight)
    usual = dict(temperature=TEMPERATURE, labels_weight=LABELS_WEIGHT)
    taught = [run for run in runs if "distil" in run.settings]
    other = [r.name for r in taught if not given.items() <= {**usual, **r.settings}.items()]
    told = not usual.items() <= given.items()
    if other and (told or len(taught) == len(runs)):
        raise InputError(
            f"--distil {distil} --temperature {temperature:g} --labels-weight {labels_weight:g}: "
            f"{', '.join(other)} names another way of learning, which goes before them; leave the "
            "options out, or @d, @t and @w out of the name"
        )


def check_shares(runs: Sequence[Run], processes: int) -> None:
    """Refuse more processes than there are heads to share out among them.

    Raises:
        InputError: says how many there may be.
    """
    if processes > len(runs):
        raise InputError(
            f"{processes} processes for {counted(len(runs), 'head')}: a head is trained by one "
            f"process, so give --devices {len(runs)} or less"
        )


def own_part(runs: Sequence[Run], rank: Rank) -> list[Run]:
    """The runs that a rank trains, those of a seed together, which share a pass over the store.

    Args:
        runs: Runs of the command, the same on every rank.
        rank: this one; if it is alone, all are its own, in their order.

    Raises:
        InputError: there are fewer runs than ranks.
    """
    if rank.alone:
        return list(runs)
    check_shares(runs, rank.count)
    return rank.part(sorted(runs, key=lambda run: run.seed))


def ranks(rows: npt.NDArray[np.integer], seed: int) -> npt.NDArray[np.int64]:
    """The rank of every example: a run of k examples is trained on those of rank 0 to k − 1.

    So the parts of one seed are nested, and the same whatever the order of storage.

    Args:
        rows: (examples,) row in the data of each example.
        seed: Seed of the choice.

    Returns:
        (examples,) a permutation of 0 … examples − 1.
    """
    import numpy as np

    rank = np.random.default_rng([seed, 2]).permutation(len(rows)).astype(np.int64)
    return np.take(rank, rows)


def _marks(text: str) -> tuple[str, dict[str, str]]:
    """Head and marks of a run's name, as they are written."""
    head, *marks = text.split("@")
    values: dict[str, str] = {}
    for mark in marks:
        matching = [
            name for name, value in _MARKS.items() if re.fullmatch(f"{name}(?:{value})", mark)
        ]
        if not matching or matching[0] in values:
            raise InputError(
                f"{text!r} names no run: {'@' + mark!r} is none of @p and a pooling, @l and "
                "layers, @lr and a learning rate, @e and epochs, @d and a teacher's snapshot, @t "
                "and a temperature, @w and the labels' weight, @f and a fraction from 0 to 1 of at "
                "most four decimals, @s and a seed, each once; such as adapter-386-shared@f0.3@s1, "
                "learned-pooling@l0-6@e3 or learned-pooling@d1e@t4@w0.1"
            )
        values[matching[0]] = mark.removeprefix(matching[0])
    return head, values


def _settings(values: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `TrainOptions` that marks write."""
    settings: dict[str, Any] = {}
    if "p" in values:
        settings["pool"] = from_file_part(values["p"])
    if "l" in values:
        settings["layers"] = tuple(map(int, values["l"].split("-")))
    if "lr" in values:
        settings["lr"] = float(values["lr"])
    if "e" in values:
        settings["epochs"] = int(values["e"])
    if "d" in values:
        settings["distil"] = str(SnapshotTag(values["d"]))
        settings["temperature"] = float(values.get("t", TEMPERATURE))
        settings["labels_weight"] = float(values.get("w", LABELS_WEIGHT))
    elif values.keys() & {"t", "w"}:
        raise InputError(
            "@t and @w, temperature and the labels' weight, are of a head that learns from a "
            "snapshot's logits: write its tag too, such as learned-pooling@d1e@t4"
        )
    return settings


def _variant(settings: Mapping[str, Any]) -> str:
    """The marks that write fields of `TrainOptions`, the same for the same values."""
    variant = ""
    if settings.get("pool") is not None:
        variant += f"@p{file_part(settings['pool'])}"
    if "layers" in settings:
        variant += f"@l{'-'.join(map(str, settings['layers']))}"
    if "lr" in settings:
        variant += f"@lr{_short(settings['lr'])}"
    if "epochs" in settings:
        variant += f"@e{settings['epochs']}"
    if "distil" in settings:
        variant += f"@d{settings['distil']}"
        for mark, name, default in (
            ("t", "temperature", TEMPERATURE),
            ("w", "labels_weight", LABELS_WEIGHT),
        ):
            variant += "" if settings[name] == default else f"@{mark}{_short(settings[name])}"
    return variant


def _short(value: float) -> str:
    """A number as it is written in a name."""
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("e+", "e")


def _head_folder(head: str) -> str:
    """Folder name of a head; of a dotted path ``package.module:Class`` what is safe of it."""
    return re.sub(r"[^a-z0-9_-]+", "-", head.lower()) if ":" in head else head
