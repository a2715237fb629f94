"""Similarities in rows: every score of every sub-set, the trivial baselines first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.similarity.metrics import ALL, Agreement, Value
from bertvision.pipelines.similarity.records import SimilarityFile, SimilarityScore
from bertvision.pipelines.tasks.soundness import doubts, is_doubtful

Row = dict[str, Any]
OVERLAP, MAJORITY = "word overlap", "majority"
"""What the baselines are called, among the scorers."""
_METRICS = ("pearson", "spearman", "mse", "accuracy")


def similarity_rows(files: Iterable[SimilarityFile]) -> list[Row]:
    """A row for every score and sub-set.

    Returns:
        ``dataset``, ``target`` (``relatedness``, ``entailment``), ``scorer`` (`OVERLAP`,
        `MAJORITY`, ``cosine``, ``trained``), ``tag``, ``pooling``, ``layers`` (text), ``subset``
        (``all``: every pair as one sample, ``mean`` and ``wmean`` over sub-sets, or a sub-set),
        ``pairs``, ``scored_part``; ``pearson``, ``spearman``, ``mse`` and ``accuracy``, each with
        ``_low``, ``_high`` and ``_sd`` (over ``seeds``); ``dev``; ``best``: whether ``dev`` is the
        highest of the single layers of this scorer, snapshot and pooling; ``train``,
        ``chosen_on``, ``unscored`` (pairs), ``missing`` (sub-sets), ``doubts``, ``settings`` (a
        digest), ``data`` (its digest's first digits). What was not measured is None.
    """
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    for file in files:
        key = file.dataset, file.settings.digest
        if key not in seen:
            seen.add(key)
            rows += _baselines(file)
        best = {
            (score.scorer, score.target): _best(file, score)
            for score in file.scores
            if score.dev is not None
        }
        for score in file.scores:
            told = {
                "scorer": score.scorer,
                "target": score.target,
                "tag": str(file.tag),
                "pooling": file.pooling,
                "layers": layers_text(score.layers),
                "seeds": len(score.epochs) or 1,
                "dev": score.dev,
                "best": score.layers == best.get((score.scorer, score.target)),
            }
            if score.accuracy is not None:
                pairs = file.pairs[file.scored_part]
                rows.append(_row(file, told, ALL, pairs, {"accuracy": score.accuracy}))
            for agreed in score.agreements:
                rows.append(_agreed(file, told, agreed, score.mse))
    return rows


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What must be known to read the rows: how many pairs of what, a sentence for each data set."""
    told = []
    for name, row in {r["dataset"]: r for r in rows if r["subset"] == ALL}.items():
        text = f"{name}: {row['pairs']:,} pairs of {row['scored_part']} are scored"
        of_dev = row["scored_part"] == "dev"
        text += " (the scores of test are not there)" * of_dev
        if row["unscored"]:
            text += f"; {row['unscored']:,} that nobody judged are left out"
        if row["missing"]:
            text += f"; without the sub-sets {row['missing']}, which are not there"
        if row["train"]:
            text += f"; {row['train']:,} train, {row['chosen_on']:,} are chosen on"
            text += " (held out of train)" * of_dev
        if row["doubts"]:
            text += f". {row['doubts']}"
        told.append(f"{text}.")
    return told


def _best(file: SimilarityFile, like: SimilarityScore) -> tuple[int, ...] | None:
    """The single layer with the highest score on the pairs that are chosen on."""
    single = [
        s
        for s in file.scores
        if len(s.layers) == 1 and (s.scorer, s.target) == (like.scorer, like.target)
    ]
    ranked = sorted(single, key=lambda s: (-(s.dev or 0.0), s.layers))
    return ranked[0].layers if ranked else None


def _baselines(file: SimilarityFile) -> list[Row]:
    found = [
        _agreed(file, {"scorer": OVERLAP, "target": "relatedness"}, agreed, None)
        for agreed in file.overlap
    ]
    if file.majority is not None:
        told = {"scorer": MAJORITY, "target": "entailment"}
        row = _row(file, told, ALL, file.pairs[file.scored_part], {})
        found.append(row | {"accuracy": file.majority})
    return found


def _agreed(
    file: SimilarityFile, told: Mapping[str, Any], agreed: Agreement, mse: Value | None
) -> Row:
    values = {"pearson": agreed.pearson, "spearman": agreed.spearman}
    if mse is not None and agreed.subset == ALL:
        values["mse"] = mse
    return _row(file, told, agreed.subset, agreed.pairs, values)


def _row(
    file: SimilarityFile,
    told: Mapping[str, Any],
    subset: str,
    pairs: int,
    values: Mapping[str, Value],
) -> Row:
    row: Row = {
        "dataset": file.dataset,
        "target": told["target"],
        "scorer": told["scorer"],
        "tag": told.get("tag"),
        "pooling": told.get("pooling"),
        "layers": told.get("layers"),
        "subset": subset,
        "pairs": pairs,
        "scored_part": file.scored_part,
    }
    for name in _METRICS:
        value = values.get(name)
        row |= {
            name: value and value.value,
            f"{name}_low": value and value.low,
            f"{name}_high": value and value.high,
            f"{name}_sd": value and value.sd,
        }
    return row | {
        "seeds": told.get("seeds"),
        "dev": told.get("dev"),
        "best": told.get("best", False),
        "train": file.pairs.get("train"),
        "chosen_on": file.pairs.get("chosen_on"),
        "unscored": sum(file.unscored.values()),
        "missing": ", ".join(file.missing),
        "doubts": _doubts(file),
        "settings": file.settings.digest,
        "data": str(file.made_from.get("data_sha256", ""))[:12],
    }


def _doubts(file: SimilarityFile) -> str | None:
    """What trained scorers may have learned by heart, where there is a training part."""
    if "train" not in file.pairs:
        return None
    parts = []
    if is_doubtful(file.soundness):
        parts.append(doubts(file.soundness))
    if is_doubtful(file.sentences):
        shared = file.sentences[file.scored_part].shared.get("train", 0)
        total = file.sentences[file.scored_part].rows
        parts.append(
            f"{shared:,} of its {total:,} distinct sentences are in train too, in other pairs, "
            "which trained scorers may gain by"
        )
    return "; ".join(parts) or None
