"""Content of a workspace, and the commands to run next."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bertvision.errors import StoreNotFoundError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.models.zoo import HEADS
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.records import read_record
from bertvision.pipelines.tasks.registry import find_task, head_kind
from bertvision.pipelines.tasks.scores import headline
from bertvision.pipelines.workspace.heads import begun_passes, going_on, trained_heads
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import (
    BertScores,
    RunConfig,
    read_dataset_record,
    read_run_config,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND, extraction_command
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import RESULTS, Workspace


def status(workspace: Workspace) -> dict[str, Any]:
    """Content of a workspace and the commands to run next, in JSON types.

    Returns:
        ``workspace``, ``model``, ``task``, ``variant``, ``items`` by split, ``snapshots`` (tag,
        whether it is made, BERT's first scores on dev), by tag the splits ``stored`` whole and
        those whose extraction is ``unfinished``, those that a writer of examples is ``growing``,
        ``heads``, those whose training is ``begun``, and
        ``next``, a list of commands.
    """
    config = workspace.config
    made = workspace.snapshots()
    whole: list[StoredSplit] = []
    unfinished: list[StoredSplit] = []
    for split in workspace.stored_splits():
        (whole if split.is_complete else unfinished).append(split)
    splits = _Stored(whole, unfinished)
    growing = {
        tag: left
        for tag, names in workspace.stored().items()
        if (left := [name for name in names if name not in splits.own(SnapshotTag(tag))])
    }
    stored_tags = (*(s.tag for s in (*whole, *unfinished)), *map(SnapshotTag, growing))
    wanted = sorted({*config.finetune.tags, *made, *stored_tags})
    begun = begun_passes(workspace)
    heads = [{"trained_on": str(tag), "name": name} for tag, name in trained_heads(workspace)]
    return {
        "workspace": str(workspace.root),
        "model": config.model.name_or_path,
        "task": config.task.name,
        "variant": list(config.finetune.variant),
        "items": {split: data.questions for split, data in config.data.items()},
        "snapshots": [
            {"tag": str(tag), "made": tag in made, "bert": _bert_scores(workspace, tag)}
            for tag in wanted
        ],
        "stored": _by_tag(splits.whole),
        "unfinished": _by_tag(splits.unfinished),
        "growing": growing,
        "heads": heads,
        "begun": [
            {"trained_on": config.trained_on, "name": config.run.name}
            for configs in begun
            for config in configs
        ],
        "next": [
            *_next_for_bert(workspace, made, splits),
            *(going_on(workspace, configs) for configs in begun),
            *_next_for_heads(workspace, splits, begun),
        ]
        or _laboratory(workspace, splits),
    }


class _Stored(NamedTuple):
    """The stored splits, of all data sets."""

    whole: list[StoredSplit]
    unfinished: list[StoredSplit]

    def own(self, tag: SnapshotTag) -> set[str]:
        """Names of those of the workspace's own data, at a snapshot, begun or whole."""
        return {s.split for s in (*self.whole, *self.unfinished) if s.tag == tag}


def _laboratory(workspace: Workspace, splits: _Stored) -> list[str]:
    """Where nothing is left undone: all other heads, and what came out."""
    learns = find_task(workspace.config.task.name).learns
    stored = workspace.stored()
    if not learns and (bare := [tag for tag in workspace.snapshots() if tag not in stored]):
        return [f"bertvision extract --checkpoint {','.join(bare)} --task text --data FILE"]
    commands = ["bertvision sweep"] if learns and not _swept(workspace, splits) else []
    probed = any((workspace.root / room).is_dir() for room in ("probes", "ridge_probes"))
    if (learns or probed) and not _is_reported(workspace):
        commands.append("bertvision report")
    return commands


def _swept(workspace: Workspace, splits: _Stored) -> bool:
    """Whether every head that is cheap beside any encoder was trained wherever one can be."""
    kind = head_kind(workspace.config.task.name)
    cheap = [Run(name) for name, head in HEADS.items() if not head.convolves and head.learns(kind)]
    names = [run.name for run in TrainOptions().named(cheap, workspace.config.model)]
    trained = {(str(tag), name) for tag, name in trained_heads(workspace)}
    tokens = workspace.config.model.usual_tokens(workspace.config.task.name)
    train = StoredName("train", tokens).name
    tags = [str(s.tag) for s in splits.whole if s.split == train]
    return all((tag, name) in trained for tag in tags for name in names)


def _is_reported(workspace: Workspace) -> bool:
    """Whether there is a report that is younger than every result."""
    page = workspace.root / "report" / "index.html"
    if not page.is_file():
        return False
    results = (path for room in RESULTS for path in (workspace.root / room).rglob("*.json"))
    return all(path.stat().st_mtime <= page.stat().st_mtime for path in results)


def _by_tag(splits: Iterable[StoredSplit]) -> dict[str, list[str]]:
    by_tag: dict[str, list[str]] = {}
    for split in splits:
        by_tag.setdefault(str(split.tag), []).append(split.split)
    return by_tag


def _bert_scores(workspace: Workspace, tag: SnapshotTag) -> dict[str, float] | None:
    path = workspace.bert_dir(tag) / "metrics.json"
    if not path.is_file():
        return None
    scores = read_record(path, BertScores, BERT_COMMAND)
    with suppress(StoreNotFoundError, WorkspaceError):  # then there is nothing to compare
        weights = read_snapshot_info(workspace.snapshot_dir(tag)).weights_sha256
        if scores.weights_sha256 != weights:
            return None  # as in the tables: they are of another snapshot of this name
    metrics = headline(scores.rules)
    first = ("exact", find_task(workspace.config.task.name).headline, "accuracy", "f1", "pearson")
    return {name: metrics[name] for name in dict.fromkeys(first) if name in metrics}


def _next_for_bert(
    workspace: Workspace,
    made: list[SnapshotTag],
    splits: _Stored,
) -> list[str]:
    """Commands that need BERT: snapshots to make and score, splits to extract or to finish."""
    commands = []
    task = workspace.config.task.name
    due = workspace.config.finetune.tags if find_task(task).learns else ()
    if any(
        tag not in made or (not tag.is_named and _bert_scores(workspace, tag) is None)
        for tag in due
    ):
        commands.append("bertvision finetune --resume")
    for tag in made:
        commands += [_finish(workspace, s) for s in splits.unfinished if s.tag == tag]
        tokens, begun = workspace.config.model.usual_tokens(task), splits.own(tag)
        missing = [s for s in workspace.splits() if StoredName(s, tokens).name not in begun]
        if missing and tag in due:  # of others, made for probes, as much is stored as was asked for
            commands.append(f"bertvision extract --checkpoint {tag} --split {','.join(missing)}")
    return commands


def _finish(workspace: Workspace, split: StoredSplit) -> str:
    """The command that ends an extraction."""
    dataset = StoredName.parse(split.split).dataset
    task = read_dataset_record(workspace.root, dataset).task if dataset else workspace.config.task
    return extraction_command(split, workspace.config.model.usual_tokens(task.name))


def _next_for_heads(
    workspace: Workspace, splits: _Stored, half: Sequence[Sequence[RunConfig]]
) -> list[str]:
    """Commands that need stored activations alone: heads to train, and to score on dev."""
    whole = {split.name for split in splits.whole}
    trained = [
        (tag, name, _tokens_of(workspace, tag, name)) for tag, name in trained_heads(workspace)
    ]
    begun = {(str(tag), tokens) for tag, _, tokens in trained}
    begun |= {(run.trained_on, run.tokens) for runs in half for run in runs}
    pooling = workspace.config.model.pooling
    first: dict[TokenPooling, str] = {"all": "adapter-386-shared", pooling: "cls-learned-pooling"}
    commands = [
        f"bertvision train {head} --checkpoint {split.tag}"
        for split in splits.whole
        for tokens, head in first.items()
        if split.split == StoredName("train", tokens).name and (str(split.tag), tokens) not in begun
    ]
    for tag, name, tokens in trained:
        scored = workspace.head_dir(tag, name) / "eval" / tag / "metrics.json"
        if f"{tag}/{StoredName('dev', tokens).name}" in whole and not scored.is_file():
            commands.append(f"bertvision evaluate {name} --trained-on {tag} --checkpoint {tag}")
    return commands


def _tokens_of(workspace: Workspace, tag: str, name: str) -> TokenPooling:
    """The tokens that a trained head takes."""
    try:
        return read_run_config(workspace.head_dir(tag, name)).tokens
    except WorkspaceError:
        return "all"  # the commands that need it report what is wrong
