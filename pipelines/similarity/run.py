"""Measure the similarity that snapshots tell of pairs: what is missing, and keep every result."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from bertvision.errors import InputError
from bertvision.featurestore.format.names import EncodingName, SnapshotTag
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.layers import needed_layers, parse_inputs
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.similarity.baselines import majority, word_overlap
from bertvision.pipelines.similarity.data import SimilarityParts, read_parts
from bertvision.pipelines.similarity.measure import measure, targets_of
from bertvision.pipelines.similarity.metrics import agreement
from bertvision.pipelines.similarity.options import ScorerName, SimilarityOptions
from bertvision.pipelines.similarity.records import SimilarityFile
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.sentences.similarity import SPLIT
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
UNTRAINED = "untrained"


def similarity(
    workspace: Workspace,
    dataset: str,
    tags: Sequence[str],
    *,
    scorers: Sequence[ScorerName] = ("cosine", "trained"),
    poolings: Sequence[TokenPooling] = ("mean",),
    layers: str = "all",
    untrained: bool = False,
    options: SimilarityOptions | None = None,
    encoding: EncodingName | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
) -> list[SimilarityFile]:
    """Score pairs of sentences with every scorer × input × pooling × snapshot, where not done yet.

    Each score is kept as soon as it is measured, so that it does not matter how often this is
    stopped and called again.

    Args:
        workspace: that the data set was added to.
        dataset: its name, such as ``sick``.
        tags: snapshots.
        scorers: of `SCORERS`; ``trained`` is left out of data without a training part.
        poolings: of a sentence's tokens.
        layers: as `parse_inputs` reads it.
        untrained: also the twin with random weights.
        options: how the trained scorer is trained; None is the default.
        encoding: of hidden states that are extracted now.
        precision: of their forward pass.
        scheduler: see `ensure_features`.

    Returns:
        What is now there of each snapshot and pooling, snapshots in order.

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
    depth = workspace.config.model.num_hidden_layers
    choice = partial(parse_inputs, layers, depth)
    twin = [UNTRAINED] if untrained else []
    snapshots = sorted({SnapshotTag(tag) for tag in (*tags, *twin)})
    ensure_features(
        workspace,
        snapshots,
        dataset,
        (SPLIT,),
        poolings,
        layers=needed_layers(choice, poolings, depth),
        encoding=encoding,
        precision=precision,
        scheduler=scheduler,
    )
    folder = workspace.root / SimilarityFile.folder / data.name
    folder.mkdir(parents=True, exist_ok=True)
    found: list[SimilarityFile] = []
    with exclusive(folder / ".lock", f"measuring the similarity of {data.name}"):
        for tag in snapshots:
            for pooling in poolings:
                pooled = PooledSplit(workspace, tag, dataset, SPLIT, pooling)
                if len(pooled.stored) != len(data.texts):
                    raise InputError(
                        f"{data.name} has {len(data.texts)} texts and {len(pooled.stored)} stored "
                        f"windows of {tag}: extract it again into another --store"
                    )
                file = _new(data, pooled, options).resume(workspace.root)
                missing = [
                    (inputs, scorer, target)
                    for inputs in choice(pooled.stored.record.layers)
                    for scorer in dict.fromkeys(scorers)
                    for target in targets_of(data, scorer)
                    if file.find(inputs, scorer, target) is None
                ]
                for score in measure(data, pooled, missing, options) if missing else ():
                    file = file.adding(score)
                    file.write(workspace.root)
                found.append(file)
    return found


def _new(data: SimilarityParts, pooled: PooledSplit, options: SimilarityOptions) -> SimilarityFile:
    """A file without scores, with everything that decides what they become."""
    record, scored = pooled.stored.record, data.scored
    made_from: Provenance = {"encoding": record.encoding, **record.provenance}
    sizes = {data.scored_part: len(scored)}
    roles = {"train": data.train, "chosen_on": data.chosen_on}
    sizes |= {role: len(part) for role, part in roles.items() if part is not None}
    known = data.train is not None and data.entailment
    guess = majority(data.train.label, scored.label) if data.train and known else None
    overlap = word_overlap(data.texts, scored)
    return SimilarityFile(
        dataset=data.name,
        tag=pooled.tag,
        pooling=pooled.pooling,
        settings=options,
        made_from=made_from,
        scored_part=data.scored_part,
        pairs=sizes,
        unscored=data.unscored,
        missing=list(data.missing),
        soundness=data.soundness,
        sentences=data.sentences,
        overlap=agreement(
            overlap[None], scored.score, scored.subset, data.subsets, options.resamples
        ),
        majority=guess,
        scores=[],
    )
