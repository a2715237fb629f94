"""The audit of a split: a sample of its examples is computed again and compared with the store.

What a sample of examples says of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import InputError
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.audit.distance import (
    Case,
    Cause,
    Deviation,
    Drift,
    Yardstick,
    allowed,
    diagnose,
    distances,
    encoded_again,
    wrong_layer,
    yardstick,
)
from bertvision.pipelines.audit.reference import Ids, Reference
from bertvision.pipelines.progress import progress

CONFIDENCE = 0.95


def at_most(wrong: int, sampled: int, examples: int) -> float:
    """The largest part of the examples that may be wrong, with 95 % confidence, one-sided.

    The upper limit of Clopper and Pearson (1934, *The use of confidence or fiducial limits
    illustrated in the case of the binomial*): where none of n is wrong it is 1 − 0.05^(1/n), just
    below 3 / n, the rule of three. That the sample was drawn without putting back makes it an upper
    limit all the more; where all were sampled it is what was found.

    Args:
        wrong: examples of the sample that are wrong.
        sampled: examples of the sample.
        examples: Examples of the split.
    """
    from scipy.stats import beta

    if sampled >= examples:
        return wrong / examples
    return 1.0 if wrong >= sampled else float(beta.ppf(CONFIDENCE, wrong + 1, sampled - wrong))


_AT_ONCE = 16
"""Examples whose hidden states are held together."""
_OTHERS = 64
"""Other examples of the same length that a wrong one is compared with."""
_STRICT = 0.05
"""Up to such a limit a state of another layer cannot pass for that of the right one."""


class Finding(NamedTuple):
    """An example that is wrong.

    Attributes:
        example: its position in the split.
        key: its key, or its row in the data.
        kind: empty, prefix, truncated, shifted, layer, norm, swapped, tokens or other.
        what: Description in words.
        distance: median over tokens and layers of how far the stored states are from computed ones,
            in parts of their distance from the mean; None where the tokens are not as many.
    """

    example: int
    key: str
    kind: str
    what: str
    distance: float | None


class Audit(NamedTuple):
    """Findings of an audit.

    Attributes:
        split: ``tag/split``.
        examples: Number of its examples.
        sampled: Number of these that were computed again.
        wrong: Number of wrong ones in the sample.
        at_most: largest part of the examples that may be wrong (see `confidence.at_most`).
        confidence: Confidence in that.
        tolerance: Largest deviation of the encoder.
        findings: the wrong examples.
        remarks: Oddities of the split as a whole.
        deviations: Scales and offsets that the sampled tokens share (see `Drift`), of examples that
            are right by themselves.
    """

    split: str
    examples: int
    sampled: int
    wrong: int
    at_most: float
    confidence: float
    tolerance: float
    findings: list[Finding]
    remarks: list[str]
    deviations: list[Deviation]

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return self._asdict() | {
            "findings": [finding._asdict() for finding in self.findings],
            "deviations": [finding._asdict() for finding in self.deviations],
        }


def audit_split(
    split: ActivationSplit,
    reference: Reference,
    *,
    sample: int,
    seed: int,
    tolerance: float | None = None,
) -> Audit:
    """Compute a sample of a split's examples again, and compare them with what is stored.

    Args:
        split: a complete one.
        reference: Values that it should hold.
        sample: Number of examples, drawn without putting back.
        seed: Seed of the sample.
        tolerance: Largest deviation of the encoder, in parts of a state's distance from the
            mean; by default that of the reference.

    Raises:
        InputError: an example is longer than the encoder takes.
        CorruptStoreError: what is stored is damaged.
    """
    if sample < 1:
        raise InputError(f"a sample of {sample}: give at least one example")
    drawn = np.random.default_rng(seed).permutation(len(split))[:sample]
    chosen = sorted(drawn.tolist())
    comparing = _Comparison(split, reference, chosen, tolerance or reference.tolerance)
    findings: list[Finding] = []
    with progress(len(chosen), f"audit {split.name}", "example") as bar:
        for begin in range(0, len(chosen), _AT_ONCE):
            findings += comparing.look(part := chosen[begin : begin + _AT_ONCE])
            bar.update(len(part))
    return Audit(
        split=split.name,
        examples=len(split),
        sampled=len(chosen),
        wrong=len(findings),
        at_most=at_most(len(findings), len(chosen), len(split)),
        confidence=CONFIDENCE,
        tolerance=comparing.tolerance,
        findings=findings,
        remarks=[*reference.remarks, *_without_prefix(reference, chosen)],
        deviations=comparing.drift.deviations(),
    )


class _Comparison:
    """Stored states beside those they should be, a few examples at a time."""

    def __init__(
        self, split: ActivationSplit, reference: Reference, chosen: Sequence[int], tolerance: float
    ) -> None:
        self.tolerance = tolerance
        self._split, self._reference = split, reference
        self._layers = list(reference.layers)
        self._measure: Yardstick = yardstick(self._states(chosen[:_AT_ONCE]))
        self.drift = Drift(self._layers, self._measure, tolerance)
        table = split.table()
        named = table.column_names == ["id"] and len(table) == len(split)
        self._ids = table["id"].to_pylist() if named else None
        is_whole = split.record.provenance.get("tokens", "all") == "all"
        self._tokens_kept = is_whole and "input_ids" in split.record.arrays
        self._stored_ids = split.array("input_ids") if self._tokens_kept else None

    def _states(self, examples: Sequence[int]) -> list[Tensor]:
        """All hidden states of examples, as they should be."""
        reference = self._reference
        states = reference.states(
            [reference.ids[i] for i in examples], [reference.types[i] for i in examples]
        )
        if self._split.keep is None:
            return states
        return [part[self._places(i)] for i, part in zip(examples, states, strict=True)]

    def _places(self, example: int) -> Ids:
        """Places of the tokens that are kept, as far as the example is as long."""
        places = self._split.positions(example)
        return places[places < len(self._reference.ids[example])]

    def _due_ids(self, example: int) -> Ids:
        """Token ids that should be stored of an example."""
        ids = self._reference.ids[example]
        return ids if self._split.keep is None else ids[self._places(example)]

    def look(self, examples: Sequence[int]) -> list[Finding]:
        """Findings on some examples."""
        pairs = zip(examples, self._states(examples), strict=True)
        return [finding for pair in pairs if (finding := self._look(*pair)) is not None]

    def _look(self, example: int, computed: Tensor) -> Finding | None:
        """Finding on an example; None where nothing is wrong."""
        stored = self._split[example].transpose(1, 2)  # (tokens, stored layers, hidden)
        due = computed[:, self._layers]
        far, limit, good = None, 3 * self.tolerance, False
        if due.shape == stored.shape:
            apart = distances(stored, due, self._measure, self._layers)
            again = encoded_again(self._split, due)
            limits = allowed(again, due, self._measure, self._layers, self.tolerance)
            good, limit = bool((apart <= limits).all()), float(limits.median())
            far = float(apart.median())
        case = Case(stored, computed, self._layers, 2 * limit, self._due_ids(example))
        if good:
            # where much is allowed, neighbouring layers may be as near
            cause = wrong_layer(case, self._measure) if limit > _STRICT else None
            cause = cause or self._other_tokens(example)
            if cause is None:
                self.drift.add(stored, again, due)
        else:
            cause = diagnose(
                case,
                self._measure,
                lambda: self._completed(example),
                lambda: self._others(example, len(stored)),
            )
        return cause and Finding(example, self._key(example), cause.kind, cause.what, far)

    def _other_tokens(self, example: int) -> Cause | None:
        """Token ids that are not those of the data."""
        if self._stored_ids is None:
            return None
        begin = int(self._split.plan.first_token[example])
        there = self._stored_ids[begin : begin + int(self._split.plan.n_tokens[example])]
        if np.array_equal(there, self._due_ids(example)):
            return None
        words = "its token ids are not those of its text, whose hidden states it holds"
        return Cause("tokens", words)

    def _key(self, example: int) -> str:
        row = int(self._split.plan.example_id[example])
        return str(row) if self._ids is None else self._ids[row]

    def _completed(self, example: int) -> list[tuple[str, str, Tensor]]:
        """The example with the special tokens that its ids may lack, without these."""
        ids, reference = self._reference.ids[example], self._reference
        before, after = len(reference.prefix), len(reference.suffix)
        words = "its states are those of a text with {}, which {} not among its tokens"
        tries: list[tuple[str, str, Ids, int]] = []
        if before and not np.array_equal(ids[:before], reference.prefix):
            tries.append(("prefix", "a prefix", np.concatenate([reference.prefix, ids]), before))
            if after and not np.array_equal(ids[-after:], reference.suffix):
                both = np.concatenate([reference.prefix, ids, reference.suffix])
                tries.append(("prefix", "a prefix and an end", both, before))
        if after and not np.array_equal(ids[-after:], reference.suffix):
            tries.append(("truncated", "an end", np.concatenate([ids, reference.suffix]), 0))
        if before and np.array_equal(ids[:before], reference.prefix):
            tries.append(("prefix", "", ids[before:], -before))
        completed = []
        for kind, what, whole, first in tries:
            if not 0 < len(whole) <= reference.longest:
                continue
            (states,) = reference.states([whole])
            states = states[:, self._layers]
            if first < 0:  # it was computed without a prefix, that it has rows of all the same
                blank = states[:1].expand(-first, -1, -1)
                states, text = torch.cat([blank, states]), "it was computed without its prefix"
            else:
                states = states[first : first + len(ids)]
                text = words.format(what, "are" if "and" in what else "is")
            kept = slice(None) if self._split.keep is None else self._places(example)
            completed.append((kind, text, states[kept]))
        return completed

    def _others(self, example: int, tokens: int) -> Iterator[tuple[str, Tensor]]:
        """Other examples of so many tokens: the nearest in the split."""
        alike = np.arange(len(self._split))
        if self._tokens_kept:
            due = map(self._due_ids, range(len(self._split)))
            alike = np.flatnonzero([len(ids) == tokens for ids in due])
        alike = alike[alike != example]
        near = alike[np.argsort(np.abs(alike - example), kind="stable")][:_OTHERS].tolist()
        for begin in range(0, len(near), _AT_ONCE):
            part = near[begin : begin + _AT_ONCE]
            for i, states in zip(part, self._states(part), strict=True):
                yield f"example {self._key(i)!r}", states[:, self._layers]


def _without_prefix(reference: Reference, chosen: Sequence[int]) -> list[str]:
    """Tokens that do not begin as the tokenizer begins every text."""
    n = len(reference.prefix)
    ids = (reference.ids[example] for example in chosen)
    bare = (
        sum(not np.array_equal(example_ids[:n], reference.prefix) for example_ids in ids)
        if n
        else 0
    )
    if not bare:
        return []
    return [
        f"the tokens of {bare:,} of {len(chosen):,} sampled examples do not begin with "
        f"{reference.prefix.tolist()}, which the tokenizer puts before every text"
    ]
