"""Ranking with one snapshot and pooling: every scorer and input that was not ranked before."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import WorkspaceError, counted
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.extraction.contents import without_digest
from bertvision.pipelines.extraction.layers import LayerChoice, Layers, layers_text
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.precision import device
from bertvision.pipelines.ranking.inputs import scaled, stacked
from bertvision.pipelines.ranking.metrics import Candidates
from bertvision.pipelines.ranking.options import RankOptions, ScorerName
from bertvision.pipelines.ranking.records import FOLDER, Ranking, find_ranking, write_ranking
from bertvision.pipelines.ranking.scorers import DROPOUT, HIDDEN
from bertvision.pipelines.ranking.training import Vectors, score, train
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.tasks.sentences.ranking_data import RankingData
from bertvision.pipelines.tasks.sentences.wikiqa import SPLITS
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
_NUMBERS = 1 << 28
"""Numbers in the stacked vectors of a chunk, 1 GiB as float32, or one input's where that is more.
While scorers are trained the features they were stacked from, the chosen ones and those on the
scorer's scale are held beside them, each at most as large: four times as much in all."""


@dataclass(frozen=True)
class System:
    """A scorer with one input and one seed: what a folder of results is of."""

    tag: str
    pooling: TokenPooling
    layers: Layers
    scorer: ScorerName
    seed: int

    @property
    def path(self) -> Path:
        """Its folder, inside that of the data set."""
        name = self.scorer if self.seed == 0 else f"{self.scorer}@s{self.seed}"
        return Path(self.tag, self.pooling, layers_text(self.layers), name)


@dataclass(frozen=True)
class Job:
    """What all systems of a call share."""

    workspace: Workspace
    dataset: str
    data: RankingData
    candidates: Mapping[str, Candidates]
    """Candidates by part: train, dev, test, as far as there are any."""
    training: RankOptions

    @property
    def folder(self) -> Path:
        """Folder of the data set's rankings."""
        return self.workspace.root / FOLDER / self.dataset

    @property
    def passages(self) -> list[str]:
        """Ids of all passages."""
        return [passage.id for passage in self.data.passages]

    def write(
        self,
        path: Path,
        settings: Mapping[str, Any],
        scores: Mapping[str, npt.NDArray[np.float32]],
        **learned: Any,
    ) -> Ranking:
        """Write a ranking: `write_ranking` with what is the same for all."""
        folder = self.folder / path
        return write_ranking(folder, settings, scores, self.candidates, self.passages, **learned)

    @property
    def ranked(self) -> list[str]:
        """The parts that are ranked: test, and dev where there is one."""
        return [part for part in ("dev", "test") if part in self.candidates]


def rank_systems(
    job: Job,
    tag: str,
    pooling: TokenPooling,
    scorers: Sequence[ScorerName],
    choice: LayerChoice,
    seeds: int,
) -> dict[System, Ranking]:
    """Rank with every scorer, input and seed, all inputs of a scorer and seed at once.

    Args:
        job: the data and the training.
        tag: snapshot.
        pooling: of a text's tokens.
        scorers: of `SCORERS`.
        choice: of the inputs.
        seeds: how many; ``cosine`` has nothing random and the first alone.

    Returns:
        The record of each system, those that were ranked before among them.

    Raises:
        InputError: a layer is not stored.
        ProvenanceError: a ranking was made with other settings; names the field.
    """
    sources = [PooledSplit(job.workspace, tag, job.dataset, split, pooling) for split in SPLITS]
    activations = _provenance(sources)
    systems = {
        system: _settings(job, system, activations)
        for scorer in scorers
        for layer in choice(sources[0].stored.record.layers)
        for seed in range(1 if scorer == "cosine" else seeds)
        for system in [System(tag, pooling, layer, scorer, seed)]
    }
    records = {s: find_ranking(job.folder / s.path, given) for s, given in systems.items()}
    held = {system: record for system, record in records.items() if record is not None}
    missing = [system for system in systems if system not in held]
    for chunk in _chunks(missing, job, len(job.data.queries) + len(job.data.passages)):
        held |= _rank_chunk(job, sources, chunk, systems)
    return {system: held[system] for system in systems}


def _rank_chunk(
    job: Job,
    sources: Sequence[PooledSplit],
    missing: Sequence[System],
    settings: Mapping[System, Mapping[str, Any]],
) -> dict[System, Ranking]:
    """Rank systems whose inputs are equally wide, all inputs of a scorer and seed at once."""
    inputs = list(dict.fromkeys(system.layers for system in missing))
    layers = sorted({layer for group in inputs for layer in group})
    queries, passages = (source.features(layers) for source in sources)
    vectors = stacked(queries, passages, layers, inputs)
    name = f"{sources[0].tag}/{sources[0].pooling}"
    records: dict[System, Ranking] = {}
    for scorer, seed in dict.fromkeys((system.scorer, system.seed) for system in missing):
        chosen = [s for s in missing if (s.scorer, s.seed) == (scorer, seed)]
        places = [inputs.index(system.layers) for system in chosen]
        read = scaled(vectors.take(places), scorer, job.candidates.get("train"))
        read = Vectors(*(values.to(device()) for values in read))
        log.info("%s: %s with %s, seed %d", name, scorer, counted(len(chosen), "input"), seed)
        trained = train(scorer, read, job.candidates, job.training, seed=seed)
        scores = {part: score(trained.scorer, read, job.candidates[part]) for part in job.ranked}
        for i, system in enumerate(chosen):
            records[system] = job.write(
                system.path,
                settings[system],
                {part: values[i] for part, values in scores.items()},
                epoch=trained.epochs[i],
                curve=trained.curves[i],
            )
    return records


def _chunks(missing: Sequence[System], job: Job, texts: int) -> Iterator[list[System]]:
    """Systems by the width of their inputs, as many inputs at once as fit into memory."""
    hidden = job.workspace.config.model.hidden_size
    for width in sorted({len(system.layers) for system in missing}):
        inputs = list(dict.fromkeys(s.layers for s in missing if len(s.layers) == width))
        at_once = max(1, _NUMBERS // (texts * hidden * width))
        for begin in range(0, len(inputs), at_once):
            chosen = inputs[begin : begin + at_once]
            yield [system for system in missing if system.layers in chosen]


def _provenance(sources: Sequence[PooledSplit]) -> Provenance:
    """What the stored vectors were made from, the same of queries and of passages.

    Raises:
        WorkspaceError: it is not the same; names the field.
    """
    queries, passages = (
        {**without_digest(record.provenance), "encoding": record.encoding}
        for record in [source.stored.record for source in sources]
    )
    if difference := first_difference(queries, passages):
        field, one, other = difference
        raise WorkspaceError(
            f"queries of {sources[0].tag} were extracted with {field} = {one!r}, passages with "
            f"{other!r}: extract one of them again"
        )
    return queries


def _settings(job: Job, system: System, activations: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a system's scores depend on, by name."""
    learned = {} if system.scorer == "cosine" else asdict(job.training)
    if system.scorer.startswith("mlp"):
        learned |= {"hidden": HIDDEN, "dropout": DROPOUT}
    return {
        "data_sha256": job.data.sha256,
        "checkpoint": str(system.tag),
        "pooling": system.pooling,
        "layers": list(system.layers),
        "scorer": system.scorer,
        "seed": system.seed,
        **learned,
        **{f"activations.{field}": value for field, value in activations.items()},
    }
