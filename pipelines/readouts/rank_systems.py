"""Ranking with snapshots: every scorer, input and seed that was not ranked before."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt
import torch

from bertvision.errors import InputError, WorkspaceError, counted
from bertvision.featurestore.format.records import Provenance, first_difference
from bertvision.pipelines.encoders.loading import pad_id
from bertvision.pipelines.extraction.contents import without_digest
from bertvision.pipelines.extraction.layers import LayerChoice, Layers, layers_text, parse_inputs
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.files import new_folder, write_text
from bertvision.pipelines.finetuning.kept_logits import predict_logits
from bertvision.pipelines.measurements import check_made_from
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import device, resolve_precision
from bertvision.pipelines.readouts.inputs import (
    Extraction,
    ensure_inputs,
    locked,
    read_inputs,
)
from bertvision.pipelines.readouts.options import CROSS_ENCODER, SCORERS, RankOptions, ScorerName
from bertvision.pipelines.readouts.rank import DROPOUT, HIDDEN, Vectors, scaled, score, train
from bertvision.pipelines.readouts.rank_metrics import (
    SETTINGS,
    TOKENS,
    Candidates,
    bm25,
    qrels_file,
    run_file,
    score_questions,
    summary,
)
from bertvision.pipelines.readouts.rank_results import (
    FILE,
    FOLDER,
    PerQuestion,
    Ranking,
    mark_best,
    random_row,
    read_ranked,
    system_row,
)
from bertvision.pipelines.records import write_record
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.tasks.sentences.ranking import (
    PARTS,
    SPLITS,
    RankingData,
    WikiqaPairsTask,
    WikiqaTask,
    pairs_of,
    read_ranking,
)
from bertvision.pipelines.tasks.soundness import report_doubts
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
_NUMBERS = 1 << 28
"""Numbers in the stacked vectors of a chunk, 1 GiB as float32, or one input's where that is more.
While scorers are trained the features they were stacked from, the chosen ones and those on the
scorer's scale are held beside them, each at most as large: four times as much in all."""

Scores = Mapping[str, npt.NDArray[np.float32]]
"""(pairs,) scores of each part that is ranked."""


@dataclass(frozen=True)
class Job:
    """Everything that all systems of a call share."""

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

    @property
    def ranked(self) -> list[str]:
        """The parts that are ranked: test, and dev where there is one."""
        return [part for part in ("dev", "test") if part in self.candidates]

    def find(self, path: Path, settings: Mapping[str, Any]) -> Ranking | None:
        """The ranking that is kept, or None where there is none yet.

        Args:
            path: Folder of the ranking, inside that of the data set.
            settings: Settings of `Ranking`.

        Raises:
            ProvenanceError: it was made with other settings; names the field.
            WorkspaceError: it is damaged.
        """
        folder = self.folder / path
        if not (folder / FILE).is_file():
            return None
        ranked = read_ranked(folder / FILE)
        mend = "give the same, use another --workspace, or delete that folder"
        check_made_from(folder, ranked.settings, settings, mend)
        return ranked

    def write(
        self,
        path: Path,
        settings: Mapping[str, Any],
        scores: Scores,
        epoch: int = 0,
        curve: Sequence[float] = (),
    ) -> Ranking:
        """Score a ranking and write it.

        Args:
            path: See `find`.
            settings: See `find`.
            scores: Scores of each part.
            epoch: See `Ranking`.
            curve: ``dev_map_by_epoch`` of `Ranking`.

        Raises:
            InputError: no question has a positive passage.
        """
        folder, metrics, questions = self.folder / path, {}, {}
        for part, values in scores.items():
            asked = self.candidates[part]
            questions[part] = score_questions(values, asked.label, asked.question, asked.tie)
            metrics[part] = summary(questions[part], len(asked.questions))._asdict()
        ranking = Ranking(
            settings=dict(settings),
            metrics=metrics,
            per_question=PerQuestion(
                **{name: x.tolist() for name, x in questions["test"]._asdict().items()}
            ),
            epoch=epoch,
            dev_map_by_epoch=list(curve),
        )
        with new_folder(folder) as temporary:  # which puts on the disk what is written into it
            for part, values in scores.items():
                text = run_file(values, self.candidates[part], self.passages, folder.name)
                (temporary / f"{part}.run").write_text(text, encoding="utf-8")
            write_record(temporary / FILE, ranking)
        return ranking

    def kept_or_ranked(
        self, path: Path, settings: Mapping[str, Any], scores: Callable[[], Scores]
    ) -> Ranking:
        """The ranking that is kept, or a new one of these scores; see `find` and `write`."""
        return self.find(path, settings) or self.write(path, settings, scores())


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
    **extraction: Unpack[Extraction],
) -> dict[str, Any]:
    """Rank with every scorer × input × pooling × snapshot; do what is not done yet.

    Args:
        workspace: Workspace that the data set was added to.
        dataset: Name of the data set, such as ``wikiqa``.
        tags: The snapshots.
        scorers: Scorers of stored states, of `SCORERS`.
        cross_encoder: Whether to rank by each snapshot itself too, which reads question and passage
            together.
        poolings: Poolings of a text's tokens.
        layers: Inputs as `parse_inputs` reads them.
        seeds: Number of seeds, from 0; a scorer without a random part has the first alone.
        options: Settings of the training of scorers; None is the default.
        resamples: Number of draws of questions for intervals.
        **extraction: Settings of the extraction of hidden states that are missing.

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
    _check_own_pairs(job, cross_encoder)
    choice = partial(parse_inputs, layers, workspace.config.model.num_hidden_layers)
    if scorers:
        ensure_inputs(workspace, tags, dataset, SPLITS, poolings, choice, extraction)
    with locked(job.folder, f"ranking {dataset}"):
        baseline = _baseline(job)
        precision = extraction.get("precision", "auto")
        whole = {tag: _rank_together(job, tag, precision) for tag in tags if cross_encoder}
        records: dict[System, Ranking] = {}
        for tag, pooling in product(tags, poolings if scorers else ()):
            records |= _rank_systems(job, tag, pooling, scorers, choice, seeds)
    groups = grouped(records, lambda system: replace(system, seed=0))
    row = partial(system_row, resamples=resamples)
    rows = [
        row(
            [records[member] for member in group],
            baseline,
            system=system.scorer,
            checkpoint=str(system.tag),
            pooling=system.pooling,
            layers=layers_text(system.layers),
        )
        for system, group in groups.items()
    ]
    mark_best(rows, ("system", "checkpoint", "pooling"))
    first = row([baseline], None, system="bm25")
    chance = random_row(job.candidates.get("dev"), job.candidates["test"], system="random order")
    together = [
        row([record], baseline, system=CROSS_ENCODER, checkpoint=str(tag))
        for tag, record in whole.items()
    ]
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
    data = read_ranking(dataset.data[SPLITS[0]].source)
    dataset.check_unchanged(SPLITS[0], data.sha256)
    for line in data.skipped:
        log.warning("left out %s", line)
    there = {pair.part for pair in data.pairs}
    needed = ("test",) if all(scorer == "cosine" for scorer in scorers) else PARTS
    candidates = {
        part: Candidates.of(data, part) for part in PARTS if part in there or part in needed
    }
    for part, candidates_of_part in candidates.items():
        if not candidates_of_part.label.any():
            raise InputError(
                f"no question of {part} has a positive passage among its "
                f"{len(candidates_of_part):,} candidates: nothing can be learned or scored there; "
                f"check the labels of {part}"
            )
    return Job(workspace, name, data, candidates, training)


def _baseline(job: Job) -> Ranking:
    """BM25, and the labels for trec_eval."""
    for part in job.ranked:
        path = job.folder / "qrels" / f"{part}.qrels"
        path.parent.mkdir(exist_ok=True)
        write_text(path, qrels_file(job.candidates[part], job.passages))
    settings = {"data_sha256": job.data.sha256, "scorer": "bm25", **SETTINGS, **TOKENS}
    return job.kept_or_ranked(
        Path("bm25"),
        settings,
        lambda: {part: bm25(job.data, job.candidates[part]) for part in job.ranked},
    )


def _check_own_pairs(job: Job, cross_encoder: bool) -> None:
    """Say how many pairs of test the encoder was fine-tuned on, if it was and there are any.

    Raises:
        InputError: the encoder is to rank by itself, and was not fine-tuned on pairs.
    """
    own = job.workspace.dataset()
    if isinstance(own.task, WikiqaPairsTask):
        parts = {"train": own.items("train"), "test": pairs_of(job.data, "test")}
        report_doubts(
            f"{job.dataset}, beside what the encoder was fine-tuned on,",
            {part: list(map(own.task.example, items)) for part, items in parts.items()},
        )
    elif cross_encoder:
        raise InputError(
            f"{CROSS_ENCODER}: the encoder of {job.workspace.root} was fine-tuned on "
            f"{own.task.name}, so that it cannot score a question and a passage together: make a "
            "workspace with `bertvision finetune --task wikiqa_pairs`, or leave it out of --scorers"
        )


def _rank_together(job: Job, tag: str, precision: str) -> Ranking:
    """Rank by the scores of a snapshot that reads question and passage in one window.

    The score of a pair is by how much the logit of an answer is above that of none.

    Raises:
        UnknownNameError: there is no such snapshot.
        ProvenanceError: the ranking was made with other settings; names the field.
        WorkspaceError: the snapshot or the ranking is damaged.
    """
    ensure_snapshot(job.workspace, tag)
    arithmetic = resolve_precision(precision)
    folder = job.workspace.snapshot_dir(tag)
    info = read_snapshot_info(folder)
    settings = {
        "data_sha256": job.data.sha256,
        "checkpoint": str(tag),
        "scorer": CROSS_ENCODER,
        "weights_sha256": info.weights_sha256,
        "max_length": info.task.max_length,
        "precision": arithmetic,
    }

    def scores() -> Scores:
        snapshot, task = load_snapshot(folder), job.workspace.dataset().task
        by_part = {}
        for part in job.ranked:
            windows = task.windows(pairs_of(job.data, part), snapshot.tokenizer, info.task)
            arrays, _ = predict_logits(
                snapshot.model,
                task,
                windows,
                padding=pad_id(snapshot.tokenizer, snapshot.model.config),
                precision=arithmetic,
                desc=f"{CROSS_ENCODER} {tag} {part}",
            )
            none, answer = arrays["logits"].T
            by_part[part] = answer - none
        return by_part

    return job.kept_or_ranked(Path(tag, CROSS_ENCODER), settings, scores)


@dataclass(frozen=True)
class System:
    """A scorer with one input and one seed, which a folder of results is of."""

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

    def settings(self, job: Job, activations: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that its scores depend on, by name."""
        learned = {} if self.scorer == "cosine" else asdict(job.training)
        if self.scorer.startswith("mlp"):
            learned |= {"hidden": HIDDEN, "dropout": DROPOUT}
        return {
            "data_sha256": job.data.sha256,
            "checkpoint": str(self.tag),
            "pooling": self.pooling,
            "layers": list(self.layers),
            "scorer": self.scorer,
            "seed": self.seed,
            **learned,
            **{f"activations.{field}": value for field, value in activations.items()},
        }


def _rank_systems(
    job: Job,
    tag: str,
    pooling: TokenPooling,
    scorers: Sequence[ScorerName],
    choice: LayerChoice,
    seeds: int,
) -> dict[System, Ranking]:
    """Rank with every scorer, input and seed, all inputs of a scorer and seed at once.

    Raises:
        InputError: a layer is not stored.
        ProvenanceError: a ranking was made with other settings; names the field.
    """
    sources = [PooledSplit(job.workspace, tag, job.dataset, split, pooling) for split in SPLITS]
    activations = _provenance(sources)
    systems = {
        system: system.settings(job, activations)
        for scorer in scorers
        for layer in choice(sources[0].stored.record.layers)
        for seed in range(1 if scorer == "cosine" else seeds)
        for system in [System(tag, pooling, layer, scorer, seed)]
    }
    ranked = {system: job.find(system.path, settings) for system, settings in systems.items()}
    records = {system: record for system, record in ranked.items() if record is not None}
    missing = [system for system in systems if system not in records]
    for chunk in _chunks(missing, job):
        inputs = list(dict.fromkeys(system.layers for system in chunk))
        queries, passages = (
            torch.from_numpy(read_inputs(source, inputs)).transpose(0, 1).contiguous()
            for source in sources
        )
        for scorer, seed in dict.fromkeys((system.scorer, system.seed) for system in chunk):
            chosen = [s for s in chunk if (s.scorer, s.seed) == (scorer, seed)]
            some = Vectors(queries, passages).take([inputs.index(s.layers) for s in chosen])
            read = scaled(some, scorer, job.candidates.get("train"))
            read = Vectors(*(values.to(device()) for values in read))
            name, with_what = f"{tag}/{pooling}", counted(len(chosen), "input")
            log.info("%s: %s with %s, seed %d", name, scorer, with_what, seed)
            trained = train(scorer, read, job.candidates, job.training, seed=seed)
            scores = {p: score(trained.scorer, read, job.candidates[p]) for p in job.ranked}
            for i, system in enumerate(chosen):
                own = {part: values[i] for part, values in scores.items()}
                learned = trained.epochs[i], trained.curves[i]
                records[system] = job.write(system.path, systems[system], own, *learned)
    return {system: records[system] for system in systems}


def _chunks(missing: Sequence[System], job: Job) -> Iterator[list[System]]:
    """Systems by the width of their inputs, as many inputs at once as fit into memory."""
    texts = len(job.data.queries) + len(job.data.passages)
    hidden = job.workspace.config.model.hidden_size
    for width in sorted({len(system.layers) for system in missing}):
        inputs = list(dict.fromkeys(s.layers for s in missing if len(s.layers) == width))
        at_once = max(1, _NUMBERS // (texts * hidden * width))
        for begin in range(0, len(inputs), at_once):
            chosen = inputs[begin : begin + at_once]
            yield [system for system in missing if system.layers in chosen]


def _provenance(sources: Sequence[PooledSplit]) -> Provenance:
    """Provenance of the stored vectors, the same of queries and of passages.

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
