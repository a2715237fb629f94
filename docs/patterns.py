"""Published patterns of what fine-tuning does to layers, as numbers of a run, and their verdicts.

Runs are the files of docs/results/patterns/, which `collect_patterns` writes: an encoder fine-tuned
on a task from one seed. The interval of an effect is over samples of tokens, as wide as of one
sample, over sentences or over seeds of probes; where a pattern was measured on all there is, it has
none. A pattern holds for an encoder and a task where it holds in the runs of all seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from bertvision.pipelines.readouts.structure import expected_layer

Run = dict[str, Any]
FAR = "treebank-test"
"""The text of another domain: web English of a treebank."""


class Effect(NamedTuple):
    """A number that is above 0 where a pattern holds, with its interval; the same where none is."""

    value: float
    low: float
    high: float


class Pattern(NamedTuple):
    """Published patterns, and how they are measured here."""

    text: str
    measured: str
    kind: str
    """As of a claim (see `generate_results.verdict`)."""
    digits: int
    reads: str
    """The analysis that a run must have for it."""
    effect: Callable[[Run], Effect]
    confounded: str = ""
    """The other reason that the effect may have: with one, no interval can decide the verdict."""


def top_changes_most(run: Run) -> Effect:
    """RSA with the pretrained encoder: the lower third of the layers less the upper third."""
    values = _rsa(run, "dev", _last(run))
    return _over_samples(_lower(values) - _upper(values))


def less_out_of_domain(run: Run) -> Effect:
    """RSA of the upper third on other text less that on the task's own."""
    far, near = (_upper(_rsa(run, split, _last(run))) for split in (FAR, "dev"))
    value, sd = far.mean() - near.mean(), np.hypot(_sd(far), _sd(near))
    return Effect(value, value - 1.96 * sd, value + 1.96 * sd)


def grows(run: Run) -> Effect:
    """RSA of the upper third at the first snapshot less that at the last."""
    first = min(run["rsa"]["dev"], key=_fraction)
    return _over_samples(_upper(_rsa(run, "dev", first)) - _upper(_rsa(run, "dev", _last(run))))


def anisotropic_above(run: Run) -> Effect:
    """Mean cosine of tokens in the upper third less that in layer 0, pretrained."""
    cosine = np.array(run["isotropy"]["dev"]["0e"]["mean_cosine"])
    return _exact(_upper(cosine[None])[0] - cosine[0])


def uses_part(run: Run) -> Effect:
    """Self-similarity of words less that of random uses, pretrained: lower third less upper."""
    similar = np.array([run["context"]["0e"]["self_adjusted"]])
    return _exact(float((_lower(similar) - _upper(similar))[0]))


def top_grows_anisotropic(run: Run) -> Effect:
    """Mean cosine of tokens in the last layer, fine-tuned less pretrained."""
    isotropy = run["isotropy"]["dev"]
    return _exact(isotropy[_last(run)]["mean_cosine"][-1] - isotropy["0e"]["mean_cosine"][-1])


def outliers_stay(run: Run) -> Effect:
    """Share of the outlier channels of all layers that are still some, less one half."""
    isotropy = run["isotropy"]["dev"]
    pairs = zip(
        isotropy["0e"]["outlier_channels"], isotropy[_last(run)]["outlier_channels"], strict=True
    )
    before, left = np.sum([(len(a), len(set(a) & set(b))) for a, b in pairs], axis=0)
    return _exact(left / before - 0.5) if before else _exact(np.nan)


def syntax_in_the_middle(run: Run) -> Effect:
    """UUAS of the best layer less that of the last, pretrained."""
    uuas = run["structure"]["0e"]["uuas"]
    best = int(np.argmax(uuas["value"]))
    return _apart(uuas, best, uuas, -1)


def syntax_stays(run: Run) -> Effect:
    """UUAS of the best layer, fine-tuned less pretrained."""
    before, after = (run["structure"][tag]["uuas"] for tag in ("0e", _last(run)))
    return _apart(after, int(np.argmax(after["value"])), before, int(np.argmax(before["value"])))


def speech_before_relations(run: Run) -> Effect:
    """Expected layer of relations less that of parts of speech, pretrained; over probe seeds."""
    upto = run["structure"]["0e"]["upto"]
    layers = range(len(run["isotropy"]["dev"]["0e"]["mean_cosine"]))
    relations, speech = (np.array(upto[task], np.float64) for task in ("relation", "upos"))
    by_seed = expected_layer(relations, layers) - expected_layer(speech, layers)
    mean, n = by_seed.mean(), len(by_seed)
    half = np.nan if n == 1 else t.ppf(0.975, n - 1) * by_seed.std(ddof=1) / np.sqrt(n)
    return Effect(mean, mean - half, mean + half)


PATTERNS = (
    Pattern(
        "Fine-tuning changes the upper layers most (Merchant et al. 2020)",
        "RSA with the pretrained encoder: lower third of the layers − upper third",
        "better",
        2,
        "rsa",
        top_changes_most,
    ),
    Pattern(
        "Less so on text of another domain (Merchant et al. 2020)",
        "RSA of the upper third: treebank − task",
        "better",
        2,
        "rsa",
        less_out_of_domain,
        "sentences of a treebank differ from the task's pairs or windows in length and format too",
    ),
    Pattern(
        "The more, the longer it lasts",
        "RSA of the upper third: at 0.1e − at the last snapshot",
        "better",
        2,
        "rsa",
        grows,
    ),
    Pattern(
        "Upper layers are less isotropic (Ethayarajh 2019)",
        "mean cosine, pretrained: upper third − layer 0",
        "better",
        2,
        "isotropy",
        anisotropic_above,
    ),
    Pattern(
        "The uses of a word part from layer to layer (Ethayarajh 2019)",
        "self-similarity less its baseline, pretrained: lower third − upper third",
        "better",
        2,
        "context",
        uses_part,
    ),
    Pattern(
        "Fine-tuning makes the last layer less isotropic",
        "mean cosine of the last layer: fine-tuned − pretrained",
        "better",
        2,
        "isotropy",
        top_grows_anisotropic,
    ),
    Pattern(
        "Outlier channels stay where they are (Kovaleva et al. 2021)",
        "share of outlier channels that stay − one half",
        "better",
        2,
        "isotropy",
        outliers_stay,
    ),
    Pattern(
        "Syntax lies below the last layer (Hewitt & Manning 2019)",
        "UUAS, pretrained: best layer − last layer, points",
        "better",
        1,
        "structure",
        syntax_in_the_middle,
    ),
    Pattern(
        "Fine-tuning leaves syntax as it was (Merchant et al. 2020)",
        "UUAS of the best layer: fine-tuned − pretrained, points",
        "match",
        1,
        "structure",
        syntax_stays,
    ),
    Pattern(
        "Parts of speech come before relations (Tenney et al. 2019)",
        "expected layer, pretrained: relations − parts of speech",
        "better",
        2,
        "structure",
        speech_before_relations,
    ),
)


def _rsa(run: Run, split: str, tag: str) -> NDArray[np.float64]:
    """(samples, layers) RSA of each layer with itself, between 0e and a snapshot."""
    return np.array(run["rsa"][split][tag])


def _last(run: Run) -> str:
    tags: list[str] = [*run["rsa"]["dev"]]
    return max(tags, key=_fraction)


def _fraction(tag: str) -> float:
    return float(tag[:-1])


def _lower(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(samples,) mean over the lower third of the transformer layers; layer 0 is none of them."""
    third = (values.shape[1] - 1) // 3
    return np.asarray(values[:, 1 : 1 + third].mean(axis=1))


def _upper(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """(samples,) mean over the upper third."""
    third = (values.shape[1] - 1) // 3
    return np.asarray(values[:, -third:].mean(axis=1))


def _sd(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else float("nan")


def _over_samples(values: NDArray[np.float64]) -> Effect:
    """The mean over samples, with the interval of one of them."""
    value, half = float(values.mean()), 1.96 * _sd(values)
    return Effect(value, value - half, value + half)


def _exact(value: float) -> Effect:
    return Effect(value, value, value)


def _apart(one: Run, i: int, other: Run, j: int) -> Effect:
    """A score less another, as if their intervals were of different sentences."""
    value = one["value"][i] - other["value"][j]
    down = np.hypot(one["value"][i] - one["low"][i], other["high"][j] - other["value"][j])
    up = np.hypot(one["high"][i] - one["value"][i], other["value"][j] - other["low"][j])
    return Effect(value, value - float(down), value + float(up))


def judged(runs: Sequence[Run], verdict: Callable[[str, float, float], str]) -> list[list[str]]:
    """A row for each pattern, encoder and task: the effect in each seed's run, and the verdict.

    Args:
        runs: a pattern is judged on those that have the analysis it reads.
        verdict: Verdict of a kind and an interval.
    """
    places = sorted({(run["encoder"], run["task"]) for run in runs})
    rows = []
    for pattern in PATTERNS:
        first = True
        for place in places:
            with_verdict = sorted(
                (r for r in runs if (r["encoder"], r["task"]) == place and _measured(r, pattern)),
                key=lambda run: run["seed"],
            )
            if not with_verdict:
                continue
            effects = [pattern.effect(run) for run in with_verdict]
            said = {verdict(pattern.kind, effect.low, effect.high) for effect in effects}
            decided = len(said) == 1 and not pattern.confounded
            doubt = f" ({pattern.confounded})" if pattern.confounded else ""
            rows.append(
                [
                    f"{pattern.text}: {pattern.measured}{doubt}" if first else "",
                    *place,
                    "; ".join(_text(effect, pattern.digits) for effect in effects),
                    said.pop() if decided else "cannot be told",
                ]
            )
            first = False
    return rows


def _measured(run: Run, pattern: Pattern) -> bool:
    """Whether a run has the analysis; of structure also the snapshots, which come one by one."""
    if pattern.reads != "structure":
        return bool(run[pattern.reads])
    tags = {"0e"} if pattern.effect is not syntax_stays else {"0e", _last(run)}
    return tags <= set(run["structure"])


def _text(effect: Effect, digits: int) -> str:
    value, low, high = (f"{x:+.{digits}f}".replace("-", "−") for x in effect)
    return value if effect.low == effect.high else f"{value} ({low} to {high})"
