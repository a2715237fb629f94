"""Separation of groups of vectors, before and after each group is moved to the same centre.

Libovický, Rosa and Fraser (2019), *How Language-Neutral is Multilingual BERT?* (arXiv:1911.03310):
a language's states are those of all languages moved by a vector of its own, so that taking away
the mean of each language (centring) leaves what they have in common.

How far languages, or any groups of texts, lie apart, as it is read.

Languages, or any groups of texts, by layer: how well they are told apart, as centring leaves it.

See `apart` for the measures and their source. Centres are those of the training half wherever a
classifier is scored on the other half.

Groups of a workspace's data sets: whose texts they are, and under which name they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Unpack

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request
from bertvision.pipelines.analysis.result import (
    AnalysisResult,
    Axes,
    Keeps,
    Labels,
    Numbers,
    Variable,
)
from bertvision.pipelines.declare import DataSource, FromStore, PrecisionOption, Seed, job
from bertvision.pipelines.files import to_json
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, curves
from bertvision.pipelines.poolings import POOLING_NAMES
from bertvision.pipelines.progress import progress
from bertvision.pipelines.reading import Names, Tag, parse_names, parse_poolings, parse_tag, text_of
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.workspace.checks import check_snapshots
from bertvision.pipelines.workspace.data import check_data, open_data

if TYPE_CHECKING:
    from bertvision.pipelines.workspace.dataset import Dataset


Vectors = npt.NDArray[np.floating]
Groups = npt.NDArray[np.int64]


def centroids(x: Vectors, groups: Groups, count: int) -> npt.NDArray[np.float64]:
    """The mean vector of each group, (groups, hidden) float64.

    Args:
        x: (texts, hidden)
        groups: (texts,) number of each text's group; every group has a text.
        count: Number of groups.
    """
    return np.stack([x[groups == g].mean(axis=0, dtype=np.float64) for g in range(count)])


def between_share(x: Vectors, groups: Groups, count: int) -> float:
    """Share of the variance that lies between groups, η²: 0 where all have one centre, 1 at most.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        count: Number of groups.

    Returns:
        Sum of squares between centroids over that of all texts; NaN where texts do not vary.
    """
    means = centroids(x, groups, count)
    centre = x.mean(axis=0, dtype=np.float64)
    sizes = np.bincount(groups, minlength=count)
    between = float((sizes * ((means - centre) ** 2).sum(axis=1)).sum())
    total = float(((x - centre) ** 2).sum(dtype=np.float64))
    return between / total if total > 0 else float("nan")


def v_measure(x: Vectors, groups: Groups, count: int, seed: int) -> float:
    """How well clusters of the vectors are the groups, from 0 (as chance) to 1.

    V-measure (Rosenberg & Hirschberg 2007): harmonic mean of homogeneity and completeness, of
    k-means with as many clusters as groups, the best of ten starts.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        count: Number of groups.
        seed: Seed of the starts.
    """
    from sklearn.cluster import KMeans
    from sklearn.metrics import v_measure_score

    clusters = KMeans(count, n_init=10, random_state=seed).fit_predict(x)
    return float(v_measure_score(groups, clusters))


def identified(x: Vectors, groups: Groups, train: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether a linear classifier names the group of texts that it was not trained on.

    Logistic regression on features of mean 0 and deviation 1 over the training texts.

    Args:
        x: (texts, hidden)
        groups: (texts,)
        train: (texts,) which of them it is trained on.

    Returns:
        (other texts,) in their order.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))
    model.fit(x[train], groups[train])
    right: npt.NDArray[np.bool_] = model.predict(x[~train]) == groups[~train]
    return right


def retrieved(x: Vectors, groups: Groups, count: int) -> float:
    """How often the nearest text of another group, by cosine, is the translation.

    The n-th text of each group is the translation of the n-th of every other.

    Args:
        x: (texts, hidden)
        groups: (texts,) as many of each.
        count: Number of groups.

    Returns:
        Mean over the ordered pairs of groups, and their texts.
    """
    unit = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    each = [unit[groups == g] for g in range(count)]
    shares = [
        float(((each[a] @ each[b].T).argmax(axis=1) == np.arange(len(each[a]))).mean())
        for a in range(count)
        for b in range(count)
        if a != b
    ]
    return float(np.mean(shares))


OfLayers = Annotated[Array, Axes.of("layers")]


@dataclass(frozen=True, eq=False, repr=False)
class LanguagesResult(AnalysisResult):
    """How far groups of texts lie apart in each layer.

    Attributes:
        between: (layers,) share of the variance that lies between groups.
        cosine: (layers, groups, groups) cosines between the centroids of groups.
        identified: (layers,) accuracy of a linear classifier on the other half of the texts.
        identified_centred: (layers,) the same, after each group is moved to the same centre.
        clusters: (layers,) V-measure of k-means.
        clusters_centred: (layers,) the same, centred.
        retrieved: (layers,) how often the nearest text of another group is the translation; NaN
            where texts are no translations.
        retrieved_centred: (layers,) the same, centred.
        majority: accuracy of always naming the largest group.
        groups: their names.
        sizes: (groups,) texts of each.
        name: Name of the measured snapshot, for titles.
        layers: layer numbers (0 = embedding output).
        n_scored: texts that the classifier was scored on.
        seed: Seed of the sample, the halves and the starts of k-means.
    """

    kind = "languages"
    keeps: ClassVar[Keeps] = {"int8": "course"}
    heading = "How far languages, or other groups of texts, lie apart"
    caption = "Groups of texts by layer: told apart as they are, and after centring"
    reading = (
        "Between: share of the variance that lies between groups. Identified: accuracy of a linear "
        "classifier on texts that it was not trained on. Clusters: V-measure of k-means with as "
        "many clusters as groups. Centred: after the mean of each group is taken away, which "
        "leaves what groups have in common; a linear classifier then has nothing to go on, and "
        "comes to the share of the largest group."
    )
    seen = (
        "How well groups are told apart, as they are and centred; retrieval; and the share of the "
        "variance that lies between groups."
    )

    named = ("name",)
    variables = {
        "between": Variable("layer", "between", 3, chart="variance between groups (share)"),
        "identified": Variable("layer", "identified", 3, chart=""),
        "identified_centred": Variable("layer", "centred", 3, chart=""),
        "clusters": Variable("layer", "clusters", 3, chart=""),
        "clusters_centred": Variable("layer", "centred", 3, chart=""),
        "retrieved": Variable("layer", "retrieved", 3, chart=""),
        "retrieved_centred": Variable("layer", "centred", 3, chart=""),
    }

    between: OfLayers
    cosine: Annotated[Array, Axes.of("layers", "groups", "groups")]
    identified: OfLayers
    identified_centred: OfLayers
    clusters: OfLayers
    clusters_centred: OfLayers
    retrieved: OfLayers
    retrieved_centred: OfLayers
    majority: float
    groups: Labels
    sizes: Annotated[tuple[Count, ...], Axes.of("groups")]
    name: str
    layers: Numbers
    n_scored: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        groups = ", ".join(f"{g} ({n:,})" for g, n in zip(self.groups, self.sizes, strict=True))
        return f"Groups of texts, {self.name}: {groups}"

    @property
    def _translated(self) -> bool:
        return bool(np.isfinite(self.retrieved).any())

    def columns(self) -> list[Column]:
        """Columns for a layer; retrieval where there are translations."""
        columns = super().columns()
        return columns if self._translated else columns[:-2]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each layer, with the cosines of every two centroids."""
        pairs = [(a, b) for a in range(len(self.groups)) for b in range(a)]
        return [
            row | {f"cosine {self.groups[a]} {self.groups[b]}": cosine[a][b] for a, b in pairs}
            for row, cosine in zip(super().rows(), to_json(self.cosine), strict=True)
        ]

    def remarks(self) -> list[str]:
        """Remarks on the level of chance."""
        return [
            f"Always naming the largest group is right on {100 * self.majority:.1f} % of the "
            f"{self.n_scored:,} texts that classifiers were scored on."
        ]

    def charts(self) -> dict[str, Chart]:
        """Each measure as it is beside the same, centred; retrieval where it was measured."""
        told = {"identified": "accuracy (share)", "clusters": "V-measure of k-means"}
        told |= {"retrieved": "translations found (share)"} if self._translated else {}
        rows = self.rows()
        both = {
            key: [
                {"layer": row["layer"], "texts": how, key: row[f"{key}{end}"]}
                for how, end in (("as they are", ""), ("centred", "_centred"))
                for row in rows
            ]
            for key in told
        }
        levels = {"identified": {"largest group": self.majority}}
        charts: dict[str, Chart] = {
            key: curves(both[key], key, label, by=["texts"], levels=levels.get(key))
            for key, label in told.items()
        }
        return charts | super().charts()


FEWEST = 10
"""Texts that every group must have."""
Read = Callable[[int], npt.NDArray[np.float32]]
"""Layer → (texts, hidden) pooled vectors."""


def languages_of_groups(
    read: Read,
    groups: Sequence[npt.NDArray[np.int64]],
    names: Sequence[str],
    *,
    layers: Sequence[int],
    translations: bool = False,
    seed: int = 0,
    name: str = "x",
) -> LanguagesResult:
    """Measure how far groups of texts lie apart in each layer.

    One layer is in memory at a time. Half of the texts of each group, seeded, train the linear
    classifier and give the centres for the other half; clusters and retrieval are of all texts.

    Args:
        read: gives the vectors of a layer.
        groups: Rows of the vectors of each group, (its texts,) each.
        names: Names of the groups.
        layers: numbers of the layers.
        translations: Whether the n-th text of each group says the same as the n-th of all others.
        seed: Seed of halves and starts.
        name: Name of its subject, for titles.

    Raises:
        InputError: fewer than two groups, too few texts in one, or translations that are not as
            many in each.
    """
    sizes = [len(rows) for rows in groups]
    check_groups(names, sizes, translations=translations)
    count, order = len(groups), np.concatenate(groups)
    label = np.repeat(np.arange(count), sizes)
    random = np.random.default_rng(seed)
    train = np.zeros(len(order), bool)
    for g in range(count):
        mine = np.flatnonzero(label == g)
        train[random.permutation(mine)[: len(mine) // 2]] = True
    columns: dict[str, list[Any]] = {}
    with progress(len(layers), f"groups of {name}", "layer") as bar:
        for layer in layers:
            x = read(layer)[order]
            if not np.isfinite(x).all():
                raise InputError(f"layer {layer} of {name} holds NaN or infinity")
            for key, value in _of_layer(x, label, count, train, translations, seed).items():
                columns.setdefault(key, []).append(value)
            bar.update(1)
    scored = np.bincount(label[~train], minlength=count)
    return LanguagesResult(
        **{key: np.array(values, np.float64) for key, values in columns.items()},
        majority=float(scored.max() / scored.sum()),
        groups=tuple(names),
        sizes=tuple(sizes),
        name=name,
        layers=tuple(layers),
        n_scored=int(scored.sum()),
        seed=seed,
    )


def check_groups(names: Sequence[str], sizes: Sequence[int], *, translations: bool) -> None:
    """Refuse groups that cannot be compared.

    Raises:
        InputError: fewer than two, too few texts in one, or translations that do not pair off.
    """
    if len(names) < 2:
        raise InputError(
            f"groups are compared, and there is {names[0] if names else 'none'}: give two"
        )
    for group, size in zip(names, sizes, strict=True):
        if size < FEWEST:
            raise InputError(f"group {group!r} has {size} texts: every group needs {FEWEST}")
    if translations and len(set(sizes)) > 1:
        sizes_text = ", ".join(f"{g} {n:,}" for g, n in zip(names, sizes, strict=True))
        raise InputError(
            f"translations stand in the same order in every group, and these have different "
            f"numbers of texts ({sizes_text}): give the same texts in all, or leave --translations "
            "out"
        )


def _of_layer(
    x: npt.NDArray[np.float32],
    label: npt.NDArray[np.int64],
    count: int,
    train: npt.NDArray[np.bool_],
    translations: bool,
    seed: int,
) -> dict[str, Any]:
    centres = centroids(x, label, count)
    centred = (x - centres[label]).astype(np.float32)
    # what is scored must not have moved its own centre
    by_half = (x - centroids(x[train], label[train], count)[label]).astype(np.float32)
    unit = centres / np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    nothing = float("nan")
    return {
        "between": between_share(x, label, count),
        "cosine": unit @ unit.T,
        "identified": identified(x, label, train).mean(),
        "identified_centred": identified(by_half, label, train).mean(),
        "clusters": v_measure(x, label, count, seed),
        "clusters_centred": v_measure(centred, label, count, seed),
        "retrieved": retrieved(x, label, count) if translations else nothing,
        "retrieved_centred": retrieved(centred, label, count) if translations else nothing,
    }


Rows = npt.NDArray[np.int64]


@job
def languages(
    checkpoint: Tag,
    *,
    task: Names,
    data: DataSource = None,
    text: Annotated[str | None, Option(decides=False)] = None,
    label: Annotated[str | None, Option(decides=False)] = None,
    pool: Annotated[
        str, Option(f"Pooling of a text's tokens: {POOLING_NAMES}.", apart=True)
    ] = "mean",
    texts: Annotated[int, Option(ge=10)] = 1_000,
    translations: Annotated[bool, Option(apart=True)] = False,
    precision: PrecisionOption = "auto",
    seed: Seed = 0,
    **where: Unpack[FromStore],
) -> LanguagesResult:
    """Measure how far apart languages, or groups of texts, lie.

    Of several data sets each is a group; of one, such as a file with a column of languages, its
    labels name the groups. Extracts what is missing; ``data`` is needed the first time.

    Args:
        checkpoint: Snapshot to analyse.
        task: Data sets that are the groups, such as mr,subj; or one with labels.
        text: Column of the texts (task csv; default text).
        label: Column of the groups (task csv; default label).
        texts: Largest number of texts of each group.
        translations: The n-th texts of all groups say the same.
        seed: Seed of samples, halves and clusters.

    Raises:
        UnknownNameError: there is no such snapshot or data set.
        InputError: there are not two groups with enough texts, or an option is wrong.
        ProvenanceError: hidden states were not extracted alike; names the field.
    """
    request = Request(languages, locals(), names="task")
    tag, source = parse_tag(checkpoint), text_of(data)
    (pooling, *_) = parse_poolings(pool)
    root, columns = request.workspace.root, {"text": text, "label": label}
    check_snapshots(request.workspace, [tag])
    names = list(dict.fromkeys(parse_names(task)))
    for name in names:
        check_data(root, None, name, source)
    from bertvision.pipelines.extraction.features import ensure_features
    from bertvision.pipelines.extraction.pooled_split import PooledSplit

    added = [open_data(root, None, name, source, **columns)[1] for name in names]
    datasets = [request.workspace.dataset(name) for name in added]
    groups = grouped(datasets)
    check_groups(list(groups), [len(rows) for rows in groups.values()], translations=translations)
    random = np.random.default_rng(seed)
    chosen = [
        rows[:texts] if translations else rows[np.sort(random.permutation(len(rows))[:texts])]
        for rows in groups.values()
    ]
    for each in datasets:
        ensure_features(
            request.workspace, [tag], each.name, list(each.splits), [pooling], precision=precision
        )
    pooled = [
        PooledSplit(request.workspace, tag, each.name, part, pooling)
        for each in datasets
        for part in each.splits
    ]
    request.tags, request.names = [tag], list(map(name_of, datasets))
    request.read = [each.stored for each in pooled]

    def read(layer: int) -> npt.NDArray[np.float32]:
        return np.concatenate([each.features([layer])[:, 0] for each in pooled])

    def measure() -> LanguagesResult:
        return languages_of_groups(
            read,
            chosen,
            list(groups),
            layers=pooled[0].stored.record.layers,
            translations=translations,
            seed=seed,
            name=f"{tag}, {pooling}",
        )

    return request.answer(LanguagesResult, measure)


def grouped(data: Sequence[Dataset]) -> dict[str, Rows]:
    """The texts of each group, (texts,) counted through all splits of all data sets in order.

    Args:
        data: one, whose classes are the groups; or several, each of which is one.

    Raises:
        InputError: they are no sentences, or the only one has no classes.
    """
    rows_by_group: dict[str, list[int]] = {}
    start = 0
    for dataset in data:
        if dataset.task.kind != "classification" or not dataset.task.learns:
            raise InputError(
                f"{name_of(dataset)} has no texts of their own to be told apart: give data sets of "
                "sentences, such as mr,subj, or a file with --task csv"
            )
        if len(data) == 1 and not dataset.classes:
            raise InputError(
                f"{name_of(dataset)} is one data set and has no classes that could be groups: give "
                "a file whose labels name the groups, or several data sets"
            )
        for split in dataset.splits:
            items = dataset.items(split)
            for i, item in enumerate(items, start):
                if len(data) > 1:
                    rows_by_group.setdefault(name_of(dataset), []).append(i)
                elif item.label is not None:
                    rows_by_group.setdefault(dataset.classes[int(item.label)], []).append(i)
            start += len(items)
    return {name: np.array(rows, np.int64) for name, rows in sorted(rows_by_group.items())}


def name_of(data: Dataset) -> str:
    """Name of a data set: the workspace's own by its task."""
    return data.name or data.task.name
