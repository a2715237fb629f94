"""An experiment as a whole: what it holds, the quickstart, the report, scoring a file."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Unpack

from pydantic import BaseModel, ConfigDict

from bertvision.errors import InputError
from bertvision.jobs.show import (
    RowsField,
    ShownRecord,
    Values,
    mapping_table,
    score_columns,
)
from bertvision.pipelines.declare import StorePath, Where, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Names, StrPath, parse_names, path_of
from bertvision.pipelines.repeats.folder import holds_runs
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.text import format_table, shorten
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.workspace import FILE

if TYPE_CHECKING:
    from bertvision.pipelines.report.page import Report


class SnapshotStatus(BaseModel):
    """A snapshot of a workspace: whether it is made, and BERT's own first scores there."""

    model_config = ConfigDict(frozen=True, extra="allow")

    tag: str
    made: bool
    bert: dict[str, float] | None


class Status(ShownRecord):
    """Content of a workspace, and the commands to run next."""

    rows_in: ClassVar[str] = "snapshots"

    workspace: str
    model: str
    task: str
    variant: list[str] = []
    """Changes to fine-tuning, such as ``freeze:6``."""
    items: dict[str, int]
    """By split."""
    snapshots: list[SnapshotStatus]
    stored: dict[str, list[str]]
    """By snapshot the splits that are stored whole."""
    unfinished: dict[str, list[str]]
    """By snapshot the splits whose extraction has not ended."""
    growing: dict[str, list[str]]
    """By snapshot the splits that examples are still added to."""
    heads: list[dict[str, str]]
    """``trained_on`` and ``name`` of each trained head."""
    begun: list[dict[str, str]]
    """The same of each head whose training was interrupted."""
    next: list[str]
    """Commands."""
    seconds: float = 0.0
    """Seconds of fine-tuning in this call."""
    steps: int = 0
    """Steps of fine-tuning in this call."""

    @classmethod
    def of(cls, contents: Mapping[str, Any], workspace: StrPath | None) -> Status:
        """The status whose next commands name the workspace as the call did.

        Args:
            contents: Content of the workspace, as `pipelines.workspace.status` gives it.
            workspace: Workspace that the call named; None where it is that of the current folder.
        """
        named = "" if workspace is None else f" --workspace {shlex.quote(os.fspath(workspace))}"
        return cls(**dict(contents) | {"next": [command + named for command in contents["next"]]})

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return status_table(values)


class Scored(ShownRecord):
    """The official metrics of a predictions file, in per cent: those of parts where it has some.

    Of answers they begin with ``exact`` and ``f1``, of tags with ``entity_f1`` or ``accuracy``;
    ``total`` is the number of questions or sentences.
    """

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        return mapping_table(values)


class Quickstart(ShownRecord):
    """Scores and times of the quickstart."""

    workspace: str
    rows: RowsField
    """``system``, ``trained_on``, ``evaluated_on``, ``percent_of_encoder`` and ``metrics``."""
    seconds: dict[str, float]
    """Time of this call, by what it went to."""
    remark: str

    def table(self, values: Values) -> str:
        """The one table of the quickstart, with where the time went."""
        rows = [{**r, **r["metrics"]} for r in values["rows"]]
        shown = columns(
            "text", system="system", trained_on="trained on", evaluated_on="evaluated on"
        )
        shown += [Column("percent_of_encoder", "% of encoder", digits=3), *score_columns(rows)]
        table = table_of(shown, rows)
        seconds = "   ".join(f"{name} {value:.1f}" for name, value in values["seconds"].items())
        return f"{table}\n\nseconds: {seconds}\n\n{values['remark']}"


@job
def status(
    **where: Unpack[Where],
) -> Status:
    """Show what the workspace holds, and what to run next.

    Examples:
        >>> import bertvision
        >>> bertvision.status().task
        'squad_v2'

    Raises:
        WorkspaceError: there is no workspace.
    """
    space = find_workspace(**where)
    from bertvision.pipelines.workspace.status import status as run

    return Status.of(run(space), where.get("workspace"))


@job
def score(
    predictions: StrPath,
    data: StrPath,
    *,
    na_prob: StrPath | None = None,
    na_prob_thresh: float = 1.0,
    skip_bad: bool = False,
) -> Scored:
    """Score a predictions file with the official metric of its task.

    That of answers is SQuAD 2.0's: exact match and F1, with the best threshold where probabilities
    are given. That of tags of words is conlleval's F1 of entities, with the accuracy of words and
    the F1 of surface forms.

    Args:
        predictions: JSON file: {"question id": "answer"}; or words with their tags, in the form of
            the data.
        data: SQuAD file, or words with their gold tags: .conll, .conllu, .tsv, .txt, .jsonl.
        na_prob: JSON file: {"question id": probability of no answer}.
        na_prob_thresh: Predict no answer above this probability.
        skip_bad: Skip malformed questions or sentences of the data and count them.

    Raises:
        InputError: a file is malformed, or does not cover the questions or the words.
    """
    for path in (Path(predictions), Path(data)):
        if not path.is_file():
            what = "is a folder: name a file in it" if path.is_dir() else "there is no such file"
            raise InputError(f"{path}: {what}")
    if (forms := Path(predictions).suffixes) and ".json" not in forms:
        if na_prob is not None or na_prob_thresh != 1.0:
            raise InputError("--na-prob and --na-prob-thresh are of answers, in a .json file")
        from bertvision.pipelines.tasks import tagging

        tagged = tagging.score_files(Path(predictions), Path(data), skip_bad=skip_bad)
        return Scored.model_validate(tagged)
    from bertvision.pipelines.tasks.squad.metrics import score_files

    scores = score_files(
        Path(predictions),
        Path(data),
        path_of(na_prob),
        na_prob_thresh=na_prob_thresh,
        skip_bad=skip_bad,
    )
    return Scored.model_validate(scores)


@job
def quickstart(
    *,
    workspace: Annotated[StrPath, Option(flag="--workspace -w")] = "quickstart",
) -> Quickstart:
    """Run the whole pipeline on a small built-in example.

    It needs no network, and takes minutes.

    Args:
        workspace: Folder to make.

    Raises:
        InputError: the encoder's package is missing.
    """
    from bertvision.pipelines.quickstart import quickstart as run

    return Quickstart.model_validate(run(Path(workspace)))


@job
def report(
    folders: Names | None = None,
    *,
    out: StrPath | None = None,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> Report:
    """Write all results as one HTML page, with tables and figures.

    The page needs no network. An older report at the same place is replaced; a folder with anything
    else is left alone.

    Examples:
        >>> import bertvision
        >>> bertvision.report().page.name
        'index.html'

    Args:
        folders: Folders of repeat, for a section that compares them; outside a workspace, for a
            page of their own.
        out: Folder to write; by default report/ in the workspace.

    Raises:
        WorkspaceError: there are no results, or a file is damaged; a folder holds no runs, or they
            are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: ``out`` is a file, or a folder that holds something else than a report; a folder
            is a file, comes twice, or is of another task or data than the workspace.
    """
    methods = [name for name in parse_names(folders or ()) if name]
    here = (path_of(workspace) or Path()).expanduser().resolve()
    if alone := holds_runs(here):
        methods = methods or [str(here)]
    elif methods and workspace is None:
        alone = not any((place / FILE).is_file() for place in (here, *here.parents))
    if alone:
        if store is not None:
            raise InputError("--store: a page of methods shows nothing of a store; leave it out")
        from bertvision.pipelines.report.build import write_methods

        return write_methods(methods, path_of(out) or here / "report")
    space = find_workspace(workspace, store)
    from bertvision.pipelines.report.build import write_report

    return write_report(space, path_of(out), methods)


def status_table(status: Values) -> str:
    """Content of a workspace, and the commands to run next."""
    items = ", ".join(f"{split} {n:,}" for split, n in status["items"].items())
    stored = {tag: list(splits) for tag, splits in status["stored"].items()}
    for key, mark in (("unfinished", "unfinished"), ("growing", "being written")):
        for tag, splits in status[key].items():
            stored.setdefault(tag, []).extend(f"{split} ({mark})" for split in splits)
    scores: Values = next((s["bert"] for s in status["snapshots"] if s["bert"]), {})
    shown = [
        *columns("text", tag="snapshot", state="made"),
        *(replace(column, label=f"BERT {column.label}") for column in score_columns([scores])),
        Column("activations", "activations", "text"),
    ]
    rows = [
        {
            **(s["bert"] or dict.fromkeys(scores, "-")),
            "tag": s["tag"],
            "state": "yes" if s["made"] else "no",
            "activations": _stored(stored.get(s["tag"], [])),
        }
        for s in status["snapshots"]
    ]
    lines = [
        f"workspace  {status['workspace']}",
        f"model      {shorten(status['model'], 11)}",
        f"task       {status['task']} ({items or 'hidden states alone'})",
        *([f"variant    {', '.join(status['variant'])}"] if status["variant"] else []),
        "",
        table_of(shown, rows),
    ]
    if status["heads"] or status["begun"]:
        lines += ["", _heads_table(status)]
    if status["next"]:
        lines += ["", "next:", *(f"  {command}" for command in status["next"])]
    return "\n".join(lines)


def _heads_table(status: Values) -> str:
    """A line for each head, whatever parts of the data and seeds it was trained with."""
    heads: dict[str, list[tuple[str, str]]] = {}
    for key, mark in (("heads", ""), ("begun", " (begun)")):
        for head in status[key]:
            name = head["name"].partition("@")[0]
            heads.setdefault(name, []).append((f"{head['trained_on']}{mark}", head["name"]))
    return format_table(
        ["head", "trained on", "runs"],
        [
            [name, ", ".join(dict.fromkeys(tag for tag, _ in runs)), str(len(runs))]
            for name, runs in sorted(heads.items())
        ],
    )


def _stored(splits: Sequence[str]) -> str:
    """The stored splits of the own data, and the names of other data sets that are stored."""
    from bertvision.pipelines.reading import StoredName

    parsed = {split: StoredName.parse(split.partition(" ")[0]).dataset for split in splits}
    own = [split for split, dataset in parsed.items() if dataset is None]
    added = sorted({dataset for dataset in parsed.values() if dataset is not None})
    return ", ".join([*own, *(f"{dataset}-…" for dataset in added)]) or "-"
