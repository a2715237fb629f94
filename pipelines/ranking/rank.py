"""Rank the candidate passages of questions by hidden states or by the encoder, beside BM25."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.names import EncodingName
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.layers import layers_text, needed_layers, parse_inputs
from bertvision.pipelines.files import write_text
from bertvision.pipelines.ranking.bm25 import SETTINGS, TOKENS, bm25
from bertvision.pipelines.ranking.cross_encoder import (
    check_cross_encoder,
    rank_together,
    report_shared,
)
from bertvision.pipelines.ranking.metrics import Candidates
from bertvision.pipelines.ranking.options import CROSS_ENCODER, SCORERS, RankOptions, ScorerName
from bertvision.pipelines.ranking.records import Ranking, find_ranking
from bertvision.pipelines.ranking.rows import mark_best, random_row, system_row
from bertvision.pipelines.ranking.systems import Job, System, rank_systems
from bertvision.pipelines.ranking.trec_eval import qrels_file
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.sentences.ranking_data import PARTS, read_ranking
from bertvision.pipelines.tasks.sentences.wikiqa import SPLITS, WikiqaTask
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)


def rank(
    workspace: Workspace,
    dataset: str,
    tags: Sequence[str],
    *,
    scorers: Sequence[ScorerName] = ("cosine",),
    cross_encoder: bool = False,
    poolings: Sequence[TokenPooling] = ("mean",),
    layers: str = "all",
    seeds: int = 1,
    options: RankOptions | None = None,
    resamples: int = 10_000,
    encoding: EncodingName | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
) -> dict[str, Any]:
    """Rank with every scorer × input × pooling × snapshot; do what is not done yet.

    Args:
        workspace: that the data set was added to.
        dataset: its name, such as ``wikiqa``.
        tags: snapshots.
        scorers: of `SCORERS`, which read stored states.
        cross_encoder: also by each snapshot itself, reading question and passage together.
        poolings: of a text's tokens.
        layers: as `parse_inputs` reads it.
        seeds: how many, from 0; a scorer without a random part has the first alone.
        options: how scorers are trained; None is the default.
        resamples: how often questions are drawn for intervals.
        encoding: of hidden states that are extracted now.
        precision: of their forward pass.
        scheduler: see `ensure_features`.

    Returns:
        ``rows``, the first of which are BM25, a random order and the encoders themselves, and what
        they are of.

    Raises:
        InputError: a name is not known, the data lacks a part, a part has no positive passage, or
            the encoder was not fine-tuned on pairs.
        ProvenanceError: hidden states were not extracted alike, or a ranking was made with other
            settings; names the field.
        WorkspaceError: the data changed.
        LockedError: another process ranks the same data set.
    """
    if not (scorers or cross_encoder) or seeds < 1:
        raise InputError(f"{len(scorers)} scorers and {seeds} seeds: give at least one of each")
    job = _job(workspace, dataset, scorers, options or RankOptions())
    if cross_encoder:
        check_cross_encoder(job)
    report_shared(job)
    depth = workspace.config.model.num_hidden_layers
    choice = partial(parse_inputs, layers, depth)
    if scorers:
        ensure_features(
            workspace,
            tags,
            dataset,
            SPLITS,
            poolings,
            layers=needed_layers(choice, poolings, depth),
            encoding=encoding,
            precision=precision,
            scheduler=scheduler,
        )
    job.folder.mkdir(parents=True, exist_ok=True)
    with exclusive(job.folder / ".lock", f"ranking {dataset}"):
        baseline = _baseline(job)
        whole = {tag: rank_together(job, tag, precision) for tag in tags if cross_encoder}
        records: dict[System, Ranking] = {}
        for tag, pooling in product(tags, poolings if scorers else ()):
            records |= rank_systems(job, tag, pooling, scorers, choice, seeds)
    groups: dict[System, list[Ranking]] = {}
    for system, record in records.items():
        groups.setdefault(replace(system, seed=0), []).append(record)
    rows = [
        system_row(
            group,
            baseline,
            resamples=resamples,
            system=system.scorer,
            checkpoint=str(system.tag),
            pooling=system.pooling,
            layers=layers_text(system.layers),
        )
        for system, group in groups.items()
    ]
    mark_best(rows, ("system", "checkpoint", "pooling"))
    first = system_row([baseline], None, resamples=resamples, system="bm25")
    together = [
        system_row(
            [record], baseline, resamples=resamples, system=CROSS_ENCODER, checkpoint=str(tag)
        )
        for tag, record in whole.items()
    ]
    chance = random_row(job.candidates.get("dev"), job.candidates["test"], system="random order")
    return {
        "dataset": dataset,
        "data": workspace.dataset(dataset).data[SPLITS[0]].source,
        "data_sha256": job.data.sha256,
        "training": asdict(job.training),
        "resamples": resamples,
        "folder": str(job.folder),
        "rows": [first, chance, *together, *rows],
    }


def _job(workspace: Workspace, name: str, scorers: Sequence[str], training: RankOptions) -> Job:
    """Read and check everything that is not the encoder's."""
    if unknown := [scorer for scorer in scorers if scorer not in SCORERS]:
        raise InputError(f"{unknown[0]!r} is no scorer: choose from {', '.join(SCORERS)}")
    dataset = workspace.dataset(name)
    if not isinstance(dataset.task, WikiqaTask):
        raise InputError(f"{name} has nothing to rank: the ranking task is wikiqa")
    recorded = dataset.data[SPLITS[0]]
    data = read_ranking(recorded.source)
    if data.sha256 != recorded.sha256:
        raise WorkspaceError(
            f"{recorded.source} changed since it was added to {workspace.root} (sha256 "
            f"{data.sha256[:12]}…, recorded {recorded.sha256[:12]}…): put the old files back, or "
            "use another --workspace"
        )
    for line in data.skipped:
        log.warning("left out %s", line)
    there = {pair.part for pair in data.pairs}
    needed = ("test",) if all(scorer == "cosine" for scorer in scorers) else PARTS
    candidates = {
        part: Candidates.of(data, part) for part in PARTS if part in there or part in needed
    }
    for part, found in candidates.items():
        if not found.label.any():
            raise InputError(
                f"no question of {part} has a positive passage among its {len(found):,} "
                f"candidates: nothing can be learned or scored there; check the labels of {part}"
            )
    return Job(workspace, name, data, candidates, training)


def _baseline(job: Job) -> Ranking:
    """BM25, and the labels for trec_eval."""
    for part in job.ranked:
        path = job.folder / "qrels" / f"{part}.qrels"
        path.parent.mkdir(exist_ok=True)
        write_text(path, qrels_file(job.candidates[part], job.passages))
    settings = {"data_sha256": job.data.sha256, "scorer": "bm25", **SETTINGS, **TOKENS}
    if record := find_ranking(job.folder / "bm25", settings):
        return record
    scores = {part: bm25(job.data, job.candidates[part]) for part in job.ranked}
    return job.write(Path("bm25"), settings, scores)
