"""Measuring similarity with snapshots: agreement with people, what is kept of it, rows, a table."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, Unpack

import numpy as np

from bertvision.errors import InputError
from bertvision.featurestore.format.records import Provenance
from bertvision.pipelines.extraction.layers import Layers, layers_text, parse_inputs
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.measurements import Measurements
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.readouts.batched import Bools, Floats, Ints
from bertvision.pipelines.readouts.inputs import (
    Extraction,
    Float32s,
    ensure_inputs,
    locked,
    read_inputs,
    with_twin,
)
from bertvision.pipelines.readouts.options import PairScorerName, SimilarityOptions
from bertvision.pipelines.readouts.probe_data import majority
from bertvision.pipelines.readouts.similarity import (
    SimilarityParts,
    cosines,
    pair_features,
    read_parts,
    target_distribution,
    train_scorer,
    word_overlap,
)
from bertvision.pipelines.records import Count, Record
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.tasks.sentences.metrics import pearson, spearman
from bertvision.pipelines.tasks.sentences.similarity import ENTAILMENT, SPLIT
from bertvision.pipelines.tasks.soundness import SplitSoundness, doubts, is_doubtful
from bertvision.pipelines.uncertainty import (
    percentiles,
    resampled,
    weighted_pearson,
    weighted_ranks,
)
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
Target = Literal["relatedness", "entailment"]
"""The question that people were asked."""
Row = dict[str, Any]

ALL, MEAN, WEIGHTED = "all", "mean", "wmean"
"""All pairs as one sample; the mean over sub-sets; the mean weighted by their pairs."""
OVERLAP, MAJORITY = "word overlap", "majority"
"""Names of the baselines, among the scorers."""
_METRICS = ("pearson", "spearman", "mse", "accuracy")
_LEGEND = (
    "Correlations × 100 over all pairs of a data set, with 95 % intervals over pairs; mean and "
    "weighted: the mean\nSpearman over sub-sets, and that weighted by their pairs. *: the layer "
    "with the highest score on the pairs that are chosen on."
)


class Value(Record):
    """A figure with its 95 % interval over pairs, mean over seeds."""

    value: float
    low: float
    high: float
    sd: float | None = None
    """Standard deviation over seeds (n − 1); None of one."""

    @classmethod
    def of(cls, by_seed: Floats, drawn: Floats) -> Value:
        """A figure from that of each seed, (seeds,), and its means in resamples, (resamples,)."""
        low, high = percentiles(drawn).tolist()
        sd = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None
        return cls(value=float(by_seed.mean()), sd=sd, low=low, high=high)


class Agreement(Record):
    """Correlations of one sub-set, or of several together."""

    subset: str
    """Its name, or `ALL`, `MEAN`, `WEIGHTED`."""
    pairs: Count
    pearson: Value
    """From −100 to 100."""
    spearman: Value


class SimilarityScore(Record):
    """One scorer on one input."""

    layers: Layers
    """Hidden states, end to end where there are several."""
    scorer: PairScorerName
    target: Target
    agreements: list[Agreement] = []
    """Correlations of all pairs, of sub-sets and their means; empty of entailment."""
    mse: Value | None = None
    """Mean squared error in squared points of the score, of the trained scorer of relatedness."""
    accuracy: Value | None = None
    """Per cent, of entailment."""
    dev: float | None
    """Spearman, Pearson (trained) or accuracy on the pairs that are chosen on, mean over seeds;
    None where the data have none but the scored."""
    epochs: list[int] = []
    """The chosen epoch, by seed."""


class SimilarityFile(Measurements):
    """All similarities of a snapshot, a pooling and one choice of settings."""

    folder: ClassVar[str] = "similarity"
    makes: ClassVar[str] = "bertvision similarity"

    settings: SimilarityOptions
    scored_part: str
    """``test``, or ``dev`` of data whose test has no scores."""
    pairs: dict[str, Count]
    """Number of scored pairs; where there is a training part, also of those that train and that
    epochs are chosen on."""
    unscored: dict[str, Count]
    """Pairs that nobody judged and that are left out, by sub-set."""
    missing: list[str]
    """Sub-sets that the data lack."""
    soundness: dict[str, SplitSoundness]
    """Pairs under two scores, and pairs that parts share."""
    sentences: dict[str, SplitSoundness]
    """Single sentences that parts share."""
    overlap: list[Agreement]
    """Agreement of the words that both sentences of a pair have, the baseline."""
    majority: float | None
    """Accuracy of always naming the most frequent judgement; None without entailment."""
    scores: list[SimilarityScore]

    def adding(self, score: SimilarityScore) -> SimilarityFile:
        """The same with one more score, in order of target, scorer and layers."""
        ordered = sorted(
            [*self.scores, score],
            key=lambda s: (s.target == "entailment", s.scorer, len(s.layers), s.layers),
        )
        return self.model_copy(update={"scores": ordered})

    @property
    def doubts(self) -> str | None:
        """Pairs and sentences that trained scorers may know by heart; None without any."""
        if "train" not in self.pairs:
            return None
        parts = [doubts(self.soundness)] if is_doubtful(self.soundness) else []
        if is_doubtful(self.sentences):
            shared = self.sentences[self.scored_part].shared.get("train", 0)
            total = self.sentences[self.scored_part].rows
            parts.append(
                f"{shared:,} of its {total:,} distinct sentences are in train too, in other pairs, "
                "which trained scorers may gain by"
            )
        return "; ".join(parts) or None


class _Wanted(NamedTuple):
    """A score of a scorer on an input."""

    layers: Layers
    scorer: PairScorerName
    target: Target


def similarity(
    workspace: Workspace,
    dataset: str,
    tags: Sequence[str],
    *,
    scorers: Sequence[PairScorerName] = ("cosine", "trained"),
    poolings: Sequence[TokenPooling] = ("mean",),
    layers: str = "all",
    untrained: bool = False,
    options: SimilarityOptions | None = None,
    **extraction: Unpack[Extraction],
) -> list[SimilarityFile]:
    """Score pairs of sentences with every scorer × input × pooling × snapshot, where not done yet.

    Each score is kept as soon as it is measured, so that it does not matter how often this is
    stopped and called again.

    Args:
        workspace: Workspace that the data set was added to.
        dataset: Name of the data set, such as ``sick``.
        tags: The snapshots.
        scorers: Scorers of `PAIR_SCORERS`; ``trained`` is left out of data without a training part.
        poolings: Poolings of a sentence's tokens.
        layers: Inputs as `parse_inputs` reads them.
        untrained: Whether to measure the twin with random weights too.
        options: Settings of the training and the intervals; None is the default.
        **extraction: Settings of the extraction of hidden states that are missing.

    Returns:
        Everything that is now kept of each snapshot and pooling, snapshots in order.

    Raises:
        InputError: a name is not known, or the data are none of pairs with scores.
        ProvenanceError: hidden states were not extracted alike, or similarities were measured of
            others; names the field.
        WorkspaceError: the data changed.
        LockedError: another process measures the same data set.
    """
    options = options or SimilarityOptions()
    data = read_parts(workspace.dataset(dataset), options.dev_fraction)
    if data.missing:
        log.warning(
            "%s lacks its sub-sets %s: means are of the others", data.name, ", ".join(data.missing)
        )
    choice = partial(parse_inputs, layers, workspace.config.model.num_hidden_layers)
    snapshots = with_twin(tags, untrained)
    folder = workspace.root / SimilarityFile.folder / data.name
    files: list[SimilarityFile] = []
    ensure_inputs(workspace, snapshots, dataset, (SPLIT,), poolings, choice, extraction)
    with locked(folder, f"measuring the similarity of {data.name}"):
        for pooled in (
            PooledSplit(workspace, tag, dataset, SPLIT, pooling)
            for tag in snapshots
            for pooling in poolings
        ):
            if len(pooled.stored) != len(data.texts):
                raise InputError(
                    f"{data.name} has {len(data.texts)} texts and {len(pooled.stored)} stored "
                    f"windows of {pooled.tag}: extract it again into another --store"
                )
            file = _new(data, pooled, options).resume(workspace.root)
            there = {(s.layers, s.scorer, s.target) for s in file.scores}
            wanted = [
                _Wanted(inputs, scorer, target)
                for inputs in choice(pooled.stored.record.layers)
                for scorer in dict.fromkeys(scorers)
                for target in _targets(data, scorer)
            ]
            missing = [one for one in wanted if one not in there]
            for score in _measured(data, pooled, missing, options) if missing else ():
                file = file.adding(score)
                file.write(workspace.root)
            files.append(file)
    return files


def _new(data: SimilarityParts, pooled: PooledSplit, options: SimilarityOptions) -> SimilarityFile:
    """A file without scores, with everything that decides what they become."""
    record, scored = pooled.stored.record, data.scored
    made_from: Provenance = {"encoding": record.encoding, **record.provenance}
    roles = {data.scored_part: scored, "train": data.train, "chosen_on": data.chosen_on}
    judged = data.train if data.entailment else None
    return SimilarityFile(
        dataset=data.name,
        tag=pooled.tag,
        pooling=pooled.pooling,
        settings=options,
        made_from=made_from,
        scored_part=data.scored_part,
        pairs={role: len(part) for role, part in roles.items() if part is not None},
        unscored=data.unscored,
        missing=list(data.missing),
        soundness=data.soundness,
        sentences=data.sentences,
        overlap=_agreements(data, word_overlap(data.texts, scored)[None], options),
        majority=majority(judged.label, scored.label) if judged else None,
        scores=[],
    )


def _targets(data: SimilarityParts, scorer: PairScorerName) -> list[Target]:
    """Targets that a scorer can have in the data; none where it cannot be trained."""
    if scorer == "cosine":
        return ["relatedness"]
    if data.train is None or data.chosen_on is None:
        return []
    return ["relatedness", "entailment"] if data.entailment else ["relatedness"]


def _measured(
    data: SimilarityParts,
    pooled: PooledSplit,
    missing: Sequence[_Wanted],
    options: SimilarityOptions,
) -> Iterator[SimilarityScore]:
    """The missing scores, input by input, as they are measured; each as if it were alone.

    Raises:
        NonFiniteError: vectors hold NaN or infinity.
    """
    with progress(len(missing), f"{data.name} {pooled.tag} {pooled.pooling}", "score") as bar:
        for inputs in dict.fromkeys(one.layers for one in missing):
            vectors = read_inputs(pooled, [inputs])[:, 0]
            for one in (one for one in missing if one.layers == inputs):
                measure = _cosine if one.scorer == "cosine" else _trained
                yield measure(data, vectors, one, options)
                bar.update(1)


def _cosine(
    data: SimilarityParts, vectors: Float32s, wanted: _Wanted, options: SimilarityOptions
) -> SimilarityScore:
    chosen_on = data.chosen_on
    return SimilarityScore(
        **wanted._asdict(),
        agreements=_agreements(data, cosines(vectors, data.scored)[None], options),
        dev=spearman(cosines(vectors, chosen_on), chosen_on.score) if chosen_on else None,
    )


def _trained(
    data: SimilarityParts, vectors: Float32s, wanted: _Wanted, options: SimilarityOptions
) -> SimilarityScore:
    train, chosen_on, scored = data.train, data.chosen_on, data.scored
    assert train is not None  # by `_targets`
    assert chosen_on is not None
    is_judged = wanted.target == "entailment"
    judged = np.eye(len(ENTAILMENT), dtype=np.float32)
    trained = train_scorer(
        [pair_features(vectors, part) for part in (train, chosen_on, scored)],
        judged[train.label] if is_judged else target_distribution(train.score, data.classes),
        lambda p: (
            100 * float((p.argmax(1) == chosen_on.label).mean())
            if is_judged
            else pearson(p @ data.classes, chosen_on.score)
        ),
        options,
        device(),
    )
    learned = {"dev": float(np.mean(trained.dev)), "epochs": trained.epochs}
    if is_judged:
        right = trained.probabilities.argmax(2) == scored.label
        return SimilarityScore(
            **wanted._asdict(), **learned, accuracy=accuracy(right, options.resamples)
        )
    predicted = trained.probabilities @ data.classes
    return SimilarityScore(
        **wanted._asdict(),
        **learned,
        agreements=_agreements(data, predicted, options),
        mse=_mean((predicted - scored.score) ** 2, options.resamples),
    )


def _agreements(
    data: SimilarityParts, predicted: Floats, options: SimilarityOptions
) -> list[Agreement]:
    scored = data.scored
    return agreement(predicted, scored.score, scored.subset, data.subsets, options.resamples)


def agreement(
    predicted: Floats, gold: Floats, subset: Ints, names: Sequence[str], resamples: int
) -> list[Agreement]:
    """Correlations of each sub-set, their mean, their weighted mean, and of all pairs as one.

    Pairs are drawn inside of each sub-set, and both correlations computed anew, of ranks that are
    those of the sample drawn. Counts of the pairs are drawn, so that a correlation is a weighted
    one, and a rank a sum of counts.

    Args:
        predicted: (seeds, pairs) scores, higher is more alike.
        gold: (pairs,) people's scores.
        subset: (pairs,) index of the sub-set.
        names: Names of the sub-sets; one alone has no means beside it, and is called `ALL`.
        resamples: Number of draws of pairs.
    """
    members = [np.flatnonzero(subset == i) for i in range(len(names))]
    groups = [*members, np.concatenate(members)]  # all pairs as one in the last place

    def correlations(is_ranked: bool) -> tuple[Floats, Floats]:
        """(seeds, groups), and in resamples (seeds, resamples, groups)."""
        correlate = spearman if is_ranked else pearson

        def drawn(counts: Floats) -> Floats:
            drawn_values = np.empty((len(predicted), len(groups), len(counts)))
            for j, rows in enumerate(groups):
                mine = counts[:, rows]
                y = weighted_ranks(gold[rows], mine) if is_ranked else _unit(gold[rows])
                for i, values in enumerate(predicted):
                    x = weighted_ranks(values[rows], mine) if is_ranked else _unit(values[rows])
                    drawn_values[i, j] = weighted_pearson(x, y, mine)
            return drawn_values

        measured = [[correlate(p[rows], gold[rows]) for rows in groups] for p in predicted]
        samples = resampled(drawn, members, resamples)
        return np.array(measured), np.ascontiguousarray(samples.swapaxes(1, 2))

    both = [correlations(False), correlations(True)]

    def told(name: str, pairs: int, weights: Floats) -> Agreement:
        linear, ranked = (
            Value.of(measured @ weights, (samples @ weights).mean(0)) for measured, samples in both
        )
        return Agreement(subset=name, pairs=pairs, pearson=linear, spearman=ranked)

    each, sizes = np.eye(len(groups)), np.array([len(rows) for rows in members], np.float64)
    agreements = [told(ALL, len(gold), each[-1])]
    if len(names) > 1:
        for name, weights in ((MEAN, np.ones_like(sizes)), (WEIGHTED, sizes)):
            agreements.append(told(name, len(gold), np.append(weights, 0) / weights.sum()))
        for i, name in enumerate(names):
            agreements.append(told(name, len(members[i]), each[i]))
    return agreements


def accuracy(correct: Bools, resamples: int) -> Value:
    """Share of right pairs in per cent.

    Args:
        correct: (seeds, pairs) whether each is right.
        resamples: Number of draws of pairs.
    """
    return _mean(100 * correct.astype(np.float64), resamples)


def _mean(values: Floats, resamples: int) -> Value:
    """The mean over pairs, of (seeds, pairs)."""
    pairs, mean = values.shape[1], values.mean(0)
    drawn = resampled(lambda counts: counts @ mean / pairs, [np.arange(pairs)], resamples)
    return Value.of(values.mean(1), drawn)


def _unit(values: Floats) -> Floats:
    """(1, pairs) with deviation 1, so that a constant sample is told by its size alone."""
    spread = values.std()
    scaled: Floats = ((values - values.mean()) / (spread if spread > 0 else 1))[None]
    return scaled


def similarity_rows(files: Iterable[SimilarityFile]) -> list[Row]:
    """A row for every score and sub-set, the trivial baselines first.

    Returns:
        ``dataset``, ``target`` (``relatedness``, ``entailment``), ``scorer`` (`OVERLAP`,
        `MAJORITY`, ``cosine``, ``trained``), ``tag``, ``pooling``, ``layers`` (text), ``subset``
        (``all``: every pair as one sample, ``mean`` and ``wmean`` over sub-sets, or a sub-set),
        ``pairs``, ``scored_part``; ``pearson``, ``spearman``, ``mse`` and ``accuracy``, each with
        ``_low``, ``_high`` and ``_sd`` (over ``seeds``); ``dev``; ``best``: whether ``dev`` is the
        highest of the single layers of this scorer, snapshot and pooling; ``train``,
        ``chosen_on``, ``unscored`` (pairs), ``missing`` (sub-sets), ``doubts``, ``settings`` (a
        digest), ``data`` (its digest's first digits). A measure that was not taken is None.
    """
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    for file in files:
        scored, key = file.pairs[file.scored_part], (file.dataset, file.settings.digest)
        if key not in seen:
            seen.add(key)
            overlap = partial(_row, file, scorer=OVERLAP, target="relatedness")
            rows += [overlap(a.subset, a.pairs, _correlations(a)) for a in file.overlap]
            if file.majority is not None:
                row = _row(file, ALL, scored, {}, scorer=MAJORITY, target="entailment")
                rows.append(row | {"accuracy": file.majority})
        best: dict[tuple[str, str], Layers] = {}
        single = [s for s in file.scores if len(s.layers) == 1 and s.dev is not None]
        for score in sorted(single, key=lambda s: (-(s.dev or 0.0), s.layers)):
            best.setdefault((score.scorer, score.target), score.layers)
        for score in file.scores:
            row_of = partial(
                _row,
                file,
                scorer=score.scorer,
                target=score.target,
                tag=str(file.tag),
                pooling=file.pooling,
                layers=layers_text(score.layers),
                seeds=len(score.epochs) or 1,
                dev=score.dev,
                best=score.layers == best.get((score.scorer, score.target)),
            )
            if score.accuracy is not None:
                rows.append(row_of(ALL, scored, {"accuracy": score.accuracy}))
            for a in score.agreements:
                mse = {"mse": score.mse} if score.mse and a.subset == ALL else {}
                rows.append(row_of(a.subset, a.pairs, {**_correlations(a), **mse}))
    return rows


def _correlations(agreement: Agreement) -> dict[str, Value]:
    return {"pearson": agreement.pearson, "spearman": agreement.spearman}


def _row(
    file: SimilarityFile,
    subset: str,
    pairs: int,
    values: Mapping[str, Value],
    *,
    scorer: str,
    target: str,
    tag: str | None = None,
    pooling: str | None = None,
    layers: str | None = None,
    **score: Any,
) -> Row:
    row: Row = {"dataset": file.dataset, "target": target, "scorer": scorer, "tag": tag}
    row |= {"pooling": pooling, "layers": layers, "subset": subset, "pairs": pairs}
    row["scored_part"] = file.scored_part
    for name in _METRICS:
        value = values.get(name)
        for end, field in (("", "value"), ("_low", "low"), ("_high", "high"), ("_sd", "sd")):
            row[name + end] = value and getattr(value, field)
    return row | {
        **{"seeds": None, "dev": None, "best": False, **score},
        "train": file.pairs.get("train"),
        "chosen_on": file.pairs.get("chosen_on"),
        "unscored": sum(file.unscored.values()),
        "missing": ", ".join(file.missing),
        "doubts": file.doubts,
        "settings": file.settings.digest,
        "data": str(file.made_from.get("data_sha256", ""))[:12],
    }


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Facts needed to read the rows: how many pairs of what, a sentence for each data set."""
    sentences = []
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
        sentences.append(f"{text}.")
    return sentences


NAMES = columns("text", scorer="scorer", tag="snapshot", pooling="pooling", layers="layers")
PAIRS = Column("pairs", "pairs", "count")
VALUES = {
    "spearman": Column("spearman", "Spearman", sd=True, interval=True),
    "pearson": Column("pearson", "Pearson", sd=True, interval=True),
    "mse": Column("mse", "squared error", digits=3, sd=True),
    "accuracy": Column("accuracy", "accuracy", sd=True, interval=True),
}
"""Columns of the figures, by key."""


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each scorer, snapshot, pooling and input; sub-sets are in ``--json`` and CSV.

    Args:
        rows: Rows of `similarity_rows`, as they are.
    """

    def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[k] for k in ("dataset", "target", "scorer", "tag", "pooling", "layers"))

    means = {(*key(row), row["subset"]): row["spearman"] for row in rows}
    lines = [
        {
            **row,
            "dataset": row["dataset"] + " (entailment)" * (row["target"] == "entailment"),
            "layers": f"{row['layers']} *" if row["best"] else row["layers"],
            "mean": means.get((*key(row), MEAN)),
            "weighted": means.get((*key(row), WEIGHTED)),
        }
        for row in rows
        if row["subset"] == ALL
    ]
    shown = [Column("dataset", "data", "text"), *NAMES, PAIRS, VALUES["spearman"]]
    shown[3] = replace(shown[3], label="pool")
    shown += [*columns(mean="mean", weighted="weighted"), *list(VALUES.values())[1:]]
    told = [c for c in shown if any(line[c.key] is not None for line in lines)]
    return "\n".join([f"{table_of(told, lines)}\n\n{_LEGEND}", *notes(rows)])
