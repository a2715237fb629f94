"""The trained heads of a workspace, and which snapshot is meant where none was named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import InputError, ProvenanceError, UnknownNameError, did_you_mean
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.models import Kind
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName, check_hidden_states
from bertvision.pipelines.records import read_record
from bertvision.pipelines.tasks.registry import find_task, head_kind
from bertvision.pipelines.workspace.job_options import TrainOptions
from bertvision.pipelines.workspace.records import PassRecord, RunConfig
from bertvision.pipelines.workspace.reproduce import training_pass_command
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit


def only_tag(tags: Iterable[str], what: str, option: str = "--checkpoint") -> SnapshotTag:
    """The one tag that can be meant where none was named; never a guess between several.

    Args:
        tags: the candidates.
        what: Their name, for the message.
        option: Option of the command line that names one, for the message.

    Raises:
        UnknownNameError: there is none, or more than one.
    """
    known = sorted(map(SnapshotTag, tags))
    if len(known) != 1:
        tags_text = ", ".join(known) or "none"
        raise UnknownNameError(
            f"which snapshot is meant? {what}: {tags_text}; say so with {option}, in Python with "
            f"{option[2:].replace('-', '_')}="
            if known
            else f"there is no snapshot to choose ({what}: none): `bertvision status` says "
            "what can be run next"
        )
    return known[0]


def trained_heads(workspace: Workspace) -> list[tuple[SnapshotTag, str]]:
    """The snapshot that each trained head was trained on, and the name of its run."""
    files = (workspace.root / "heads").glob("*/[!.]*/metrics.json")  # .name.tmp is half-written
    folders = [path.parent for path in files if is_head_of_snapshot(path.parent)]
    return sorted((SnapshotTag(folder.parent.name), folder.name) for folder in folders)


def is_head_of_snapshot(folder: Path) -> bool:
    """Whether a folder in ``heads`` is of a snapshot, and not another program's.

    A word such as ``tensorboard`` may be a tag: there, only a trained head tells.
    """
    tag = folder.parent.name
    is_word = SnapshotTag.is_valid(tag) and SnapshotTag(tag).is_named
    return (folder / "config.json").is_file() if is_word else SnapshotTag.is_valid(tag)


def begun_passes(workspace: Workspace) -> list[tuple[RunConfig, ...]]:
    """The trainings that were interrupted and can be resumed: the runs of each.

    One whose runs are all there is left out: they were trained otherwise since, or it replaces
    them, and then only whoever began it knows.
    """
    passes = []
    for resume in sorted((workspace.root / "heads").glob("*/.run-*/resume.ckpt")):
        path = resume.with_name("pass.json")
        if not path.is_file():
            continue  # an earlier version began it
        runs = read_record(path, PassRecord, "bertvision train").runs
        if not all(_is_trained(workspace, run) for run in runs):
            passes.append(runs)
    return passes


def going_on(workspace: Workspace, runs: Sequence[RunConfig]) -> str:
    """The command that resumes a training that was interrupted."""
    command = training_pass_command(runs, workspace.config.model.num_hidden_layers + 1)
    replaces = any(_is_trained(workspace, run) for run in runs)
    return command + (" --overwrite" if replaces else "")


def _is_trained(workspace: Workspace, config: RunConfig) -> bool:
    return (workspace.head_dir(config.trained_on, config.run.name) / "metrics.json").is_file()


def trained_on(workspace: Workspace, names: Sequence[str]) -> SnapshotTag:
    """The one snapshot on whose activations all these heads were trained.

    Raises:
        UnknownNameError: a head was not trained, or there is none or more than one snapshot.
    """
    heads = trained_heads(workspace)
    on: list[set[str]] = []
    for name in names:
        asked = _names(workspace, name)
        on.append({tag for tag, head in heads if head in asked})
        if not on[-1]:
            raise _no_head(workspace, name, None)
    what = f"{' and '.join(names)} {'was' if len(names) == 1 else 'were all'} trained on"
    return only_tag(set.intersection(*on), what, "--trained-on")


def find_head(workspace: Workspace, trained_on: str, name: str) -> Path:
    """Folder of a trained head.

    Raises:
        UnknownNameError: there is none of that name.
    """
    for run in _names(workspace, name):
        folder = workspace.head_dir(trained_on, run)
        if (folder / "metrics.json").is_file():
            return folder
    raise _no_head(workspace, name, trained_on)


def _names(workspace: Workspace, name: str) -> list[str]:
    """Names of the run that is asked for: as it is typed, and as its training wrote it."""
    run = Run.parse(name)
    (named,) = TrainOptions().named([run], workspace.config.model)
    return list(dict.fromkeys((run.name, named.name)))


def head_activations(
    workspace: Workspace, tag: str, tokens: TokenPooling, split: str
) -> ActivationSplit:
    """The stored split that heads read, whole.

    Args:
        workspace: Workspace with the activations.
        tag: the snapshot.
        tokens: Tokens that the heads read (`Run.tokens`).
        split: Split of the workspace: train, tune, dev.

    Raises:
        StoreNotFoundError: nothing was extracted yet.
        UnknownNameError: this split was not.
        IncompleteSplitError: its extraction has not ended.
        ProvenanceError: it was not extracted, and has no labels of the task.
        InputError: it holds other sites of the encoder than hidden states.
    """
    check_head_activations(workspace, tag, tokens, split)
    split_of_head = workspace.split(tag, StoredName(split, tokens).name).require_complete()
    if "task" not in split_of_head.record.provenance:
        raise ProvenanceError(
            f"{split_of_head.name} was written by `store.writer`, not extracted, and has no labels "
            f"of {workspace.config.task.name}: train on it in a loop of your own, with "
            f"bertvision.ActivationLoader, or remove it and run `bertvision extract --checkpoint "
            f"{tag} --split {split}`"
        )
    return split_of_head


class ResidentActivations:
    """Opens what heads read on a device, each split once for all passes of a snapshot.

    Args:
        device: Device that the codes stay on.
        runs: Heads that read them.
        layers: Indices of the hidden states that heads take whose names say none; None is all.
    """

    def __init__(self, device: str, runs: Sequence[Run], layers: Sequence[int] | None) -> None:
        wanted = {run.settings.get("layers", layers) for run in runs}
        self._device, self._layers = device, wanted.pop() if len(wanted) == 1 else None
        self._splits: dict[tuple[str, TokenPooling, str], ActivationSplit] = {}

    def __call__(
        self, workspace: Workspace, tag: str, tokens: TokenPooling, split: str
    ) -> ActivationSplit:
        """The split, as `head_activations` gives it, on the device.

        Raises:
            BertvisionError: As of `head_activations` and `ActivationSplit.to`.
        """
        key = tag, tokens, split
        if key not in self._splits:
            for other in [other for other in self._splits if other[0] != tag]:
                del self._splits[other]  # its memory is for this snapshot now
            stored = head_activations(workspace, tag, tokens, split)
            self._splits[key] = stored.to(self._device, self._layers)
        return self._splits[key]


def check_head_activations(
    workspace: Workspace, tag: str, tokens: TokenPooling, split: str
) -> None:
    """Check that the split that heads read is stored, before anything heavy is imported.

    Args:
        workspace: Workspace with the activations.
        tag: the snapshot.
        tokens: Tokens that the heads read (`Run.tokens`).
        split: Split of the workspace: train, tune, dev.

    Raises:
        StoreNotFoundError: nothing was extracted yet.
        UnknownNameError: this split was not.
        InputError: it holds other sites of the encoder than hidden states.
    """
    name, task = StoredName(split, tokens).name, workspace.config.task.name
    check_hidden_states(name)
    stored = workspace.stored_snapshot(tag)
    try:
        stored.require(name)
    except UnknownNameError as error:
        usual = find_task(task)
        other = (
            ""
            if (tokens == "all") == (usual.tokens == "all")
            else (
                f"; those that learn {task} itself are {usual.kind} heads, see `bertvision heads "
                f"--kind {usual.kind}`"
            )
        )
        pool = _pool_option(tokens, workspace)
        raise UnknownNameError(
            f"these heads read {name}, and of {tag} there are {', '.join(stored.splits())}: "
            f"`bertvision extract --checkpoint {tag} --split {split}{pool}` writes it{other}"
        ) from error


def check_kind(head: str, kind: Kind, task: str) -> Kind:
    """The kind that a head has in a task: where words are labelled, span heads do that.

    Args:
        head: its name, for the message.
        kind: Kind of the head.
        task: Task of the workspace.

    Raises:
        InputError: no head learns the task, or none of this kind.
    """
    if head_kind(task) == "token":
        if kind != "classification":
            return "token"
        raise InputError(
            f"{head} tells the class of a window, and {task} asks for those of words: choose from "
            "`bertvision heads --kind token`"
        )
    if kind == "span" and find_task(task).kind != "span":
        raise InputError(
            f"{head} is a span head, but the task {task} has no spans to score: choose from "
            "`bertvision heads --kind classification`"
        )
    return kind


def stored_tags(
    workspace: Workspace, wanted: Sequence[str], tokens: TokenPooling, split: str, option: str
) -> list[SnapshotTag]:
    """The snapshots that are wanted, or all, at which what heads take of a split is stored whole.

    Args:
        workspace: Workspace with the activations.
        wanted: tags; empty means all.
        tokens: Tokens that the heads read.
        split: Split of the workspace.
        option: Option of the command line that names them, for the message.

    Raises:
        UnknownNameError: of one that is wanted it is not.
        InputError: there is none.
    """
    name = StoredName(split, tokens).name
    stored = [s for s in workspace.stored_splits() if s.split == name]
    whole = sorted(SnapshotTag(s.tag) for s in stored if s.is_complete)
    tags = sorted({SnapshotTag(tag) for tag in wanted}) or whole
    pool = _pool_option(tokens, workspace)
    if absent := [tag for tag in tags if tag not in whole]:
        tags_text = ", ".join(whole) or "none"
        raise UnknownNameError(
            f"{option} {','.join(absent)}: no whole split {name} is stored; stored are "
            f"{tags_text}: `bertvision extract --checkpoint {absent[0]}{pool}` writes it"
        )
    if not tags:
        raise InputError(
            f"no split {name} is stored: `bertvision extract{pool}` writes it; `bertvision status` "
            "says what there is"
        )
    return tags


def _pool_option(tokens: TokenPooling, workspace: Workspace) -> str:
    """The option of ``bertvision extract`` that keeps these tokens; none for the default."""
    usual = workspace.config.model.usual_tokens(workspace.config.task.name)
    return "" if tokens == usual else " --pool " + tokens.replace("all", "none")


def _no_head(workspace: Workspace, name: str, trained_on: str | None) -> UnknownNameError:
    heads = trained_heads(workspace)
    heads_text = ", ".join(f"{head} ({tag})" for tag, head in heads) or "none yet"
    hint = did_you_mean(name, [head for _, head in heads])
    on = f" on {trained_on}" if trained_on else ""
    option = f" --checkpoint {trained_on}" if trained_on else ""
    return UnknownNameError(
        f"no head {name} was trained{on}: {hint}there are {heads_text}; "
        f"`bertvision train {name}{option}` trains it"
    )
