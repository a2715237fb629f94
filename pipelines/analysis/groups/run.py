"""Groups of a workspace's data sets: whose texts they are, and under which name they are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertvision.errors import InputError
from bertvision.pipelines.analysis.groups.languages import check_groups
from bertvision.pipelines.analysis.groups.languages import languages as languages_of_vectors
from bertvision.pipelines.analysis.groups.languages_result import LanguagesResult
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.workspace import Workspace

Rows = npt.NDArray[np.int64]


def run_languages(
    workspace: Workspace,
    tag: str,
    datasets: Sequence[str | None],
    *,
    pooling: TokenPooling = "mean",
    texts: int = 1_000,
    translations: bool = False,
    precision: str = "auto",
    seed: int = 0,
    plot: Path | None = None,
) -> LanguagesResult:
    """How far groups of texts lie apart in each layer.

    Pooled states that are missing are extracted. Of one data set the classes of its texts are the
    groups; of several each is a group.

    Args:
        workspace: with the snapshot.
        tag: the snapshot.
        datasets: names of data sets; None is the workspace's own.
        pooling: of a text's tokens.
        texts: at most so many of each group, a seeded sample; of translations the first.
        translations: whether the n-th text of each group says the same as the n-th of all others.
        precision: of the forward pass that extracts.
        seed: see `languages`.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        UnknownNameError: there is no such snapshot or data set.
        InputError: there are not two groups with enough texts.
        ProvenanceError: hidden states were not extracted alike.
    """
    data = [workspace.dataset(name) for name in datasets]
    groups = grouped(data)
    check_groups(list(groups), [len(rows) for rows in groups.values()], translations=translations)
    random = np.random.default_rng(seed)
    chosen = [
        rows[:texts] if translations else rows[np.sort(random.permutation(len(rows))[:texts])]
        for rows in groups.values()
    ]
    for of in data:
        ensure_features(workspace, [tag], of.name, list(of.splits), [pooling], precision=precision)
    pooled = [
        PooledSplit(workspace, tag, of.name, split, pooling) for of in data for split in of.splits
    ]

    def read(layer: int) -> npt.NDArray[np.float32]:
        return np.concatenate([each.features([layer])[:, 0] for each in pooled])

    def measure() -> LanguagesResult:
        return languages_of_vectors(
            read,
            chosen,
            list(groups),
            layers=pooled[0].stored.record.layers,
            translations=translations,
            seed=seed,
            name=f"{tag}, {pooling}",
        )

    options = {
        "pool": Given(pooling, "mean", named=True),
        "texts": Given(texts, 1_000),
        "translations": Given(translations, False, named=True),
        "seed": Given(seed, 0),
    }
    job = Job(
        *(LanguagesResult, (tag,), tuple(map(name_of, data)), options),
        [each.stored for each in pooled],
        names_option="--task",
    )
    return kept_or_measured(workspace, job, measure, plot)


def grouped(data: Sequence[Dataset]) -> dict[str, Rows]:
    """The texts of each group, (texts,) counted through all splits of all data sets in order.

    Args:
        data: one, whose classes are the groups; or several, each of which is one.

    Raises:
        InputError: they are no sentences, or the only one has no classes.
    """
    found: dict[str, list[int]] = {}
    start = 0
    for of in data:
        if of.task.kind != "classification" or not of.task.learns:
            raise InputError(
                f"{name_of(of)} has no texts of their own to be told apart: give data sets of "
                "sentences, such as mr,subj, or a file with --task csv"
            )
        if len(data) == 1 and not of.classes:
            raise InputError(
                f"{name_of(of)} is one data set and has no classes that could be groups: give a "
                "file whose labels name the groups, or several data sets"
            )
        for split in of.splits:
            items = of.items(split)
            for i, item in enumerate(items, start):
                if len(data) > 1:
                    found.setdefault(name_of(of), []).append(i)
                elif item.label is not None:
                    found.setdefault(of.classes[int(item.label)], []).append(i)
            start += len(items)
    return {name: np.array(rows, np.int64) for name, rows in sorted(found.items())}


def name_of(data: Dataset) -> str:
    """What a data set is called: the workspace's own by its task."""
    return data.name or data.task.name
