"""One way for every analysis: take what is kept, or measure and keep it; draw it either way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, NamedTuple

from pydantic import JsonValue

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.featurestore.lazy import SplitSource
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.encodings import encoding_notes
from bertvision.pipelines.analysis.records import FOLDER, Analysis, R, read_analysis
from bertvision.pipelines.measurements import weights_of_snapshot
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)


class Given(NamedTuple):
    """The value of an option of an analysis, and its default."""

    value: JsonValue
    default: JsonValue
    named: bool | str = False
    """Whether results with another value than the default are kept beside those with it; a text is
    what their files are called by."""

    def called(self, keyword: str) -> str:
        """Part of the names of files; empty where such results are not kept apart."""
        if isinstance(self.named, str) or not self.named:
            return self.named or ""
        return keyword if self.value is True else f"{keyword}-{self.value}"


class Other(NamedTuple):
    """A split that another workspace holds."""

    workspace: Workspace
    split: ActivationSplit


@dataclass(frozen=True)
class Job(Generic[R]):
    """An analysis that is asked for.

    Its options are said once: they are its settings, and in the command that makes it again stand
    those that are not the default.
    """

    result: type[R]
    """Type of its result."""
    tags: Sequence[str]
    """The snapshots, as they are typed."""
    names: Sequence[str]
    """Names of the splits; none of an analysis that reads texts of its own."""
    options: Mapping[str, Given]
    """By keyword what decides its result beside the splits; where it computes does not."""
    splits: Sequence[ActivationSplit]
    """Splits that it reads of the workspace's store."""
    runs: Mapping[str, str] = field(default_factory=dict)
    """Snapshots that it runs, with the digests of their weights."""
    names_option: str = "--split"
    """Flag of the names."""
    tags_between: str = " "
    """Separator of the snapshots."""
    others: Mapping[str, Other] = field(default_factory=dict)
    """Splits that it reads of other workspaces, by a name that tells them apart."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that it reads, by name with their digests."""

    @property
    def settings(self) -> dict[str, JsonValue]:
        """By keyword the value of every option."""
        return {keyword: given.value for keyword, given in self.options.items()}

    @property
    def name(self) -> str:
        """Name of its files, without suffix."""
        named = [of.called(k) for k, of in self.options.items() if of.value != of.default]
        parts = [self.result.kind, *self.tags, "+".join(self.names), *named]
        return "-".join(filter(None, parts))

    @property
    def records(self) -> dict[str, str]:
        """By split the digest of its record."""
        splits = {split.name: split for split in self.splits}
        splits |= {name: other.split for name, other in self.others.items()}
        return {name: SplitSource.of(split).record_sha256 for name, split in splits.items()}

    @property
    def command(self) -> str:
        """Command that makes it again."""
        words = ["bertvision", self.result.kind, self.tags_between.join(self.tags)]
        words += [self.names_option, ",".join(self.names)] if self.names else []
        for keyword, given in self.options.items():
            if given.value != given.default:
                words.append(f"--{keyword.replace('_', '-')}")
                # None is all, which is typed as 0
                words += [] if given.value is True else [str(given.value or 0)]
        return " ".join(words)


def kept_or_measured(
    workspace: Workspace, job: Job[R], measure: Callable[[], R], plot: Path | None = None
) -> R:
    """The result of a job: the one that is kept, where it is of the same settings and splits.

    Otherwise it is measured and kept in the place of what was there. It is drawn in both cases.

    Args:
        workspace: where it is kept, for its report.
        job: what is asked for.
        measure: makes it.
        plot: SVG file to write; by default beside the record.

    Raises:
        InputError: ``plot`` does not end in ``.svg``; before anything is read.
        ProvenanceError: a split was extracted with other weights than its snapshot has now.
    """
    folder = workspace.root / FOLDER
    path, drawn = folder / f"{job.name}.json", plot or folder / f"{job.name}.svg"
    check_suffix(drawn)
    for space, split in [*((workspace, split) for split in job.splits), *job.others.values()]:
        _check_weights(space, split)
    weights = {
        str(split.tag): str(digest)
        for split in job.splits
        if (digest := _weights(split)) is not None
    }
    made = {
        "weights_sha256": {**weights, **job.runs},
        "splits_sha256": job.records,
        "files_sha256": dict(job.files),
        "settings": job.settings,
    }
    result = _find(path, job, made)
    if result is None:
        read = [*job.splits, *(other.split for other in job.others.values())]
        notes = encoding_notes(job.result.kind, read)
        result = measure().with_notes(notes)
        folder.mkdir(exist_ok=True)
        values = {"kind": result.kind, "result": result, "notes": notes, **made}
        record: type[Analysis[R]] = Analysis[job.result]  # type: ignore[name-defined]
        write_record(path, record(command=job.command, **values))
    result.figure().save(drawn)
    log.info("plot: %s", drawn)
    return result


def _weights(split: ActivationSplit) -> object:
    """Digest of the weights that a split was extracted with; None where it is not recorded."""
    return split.record.provenance.get("weights_sha256")


def _check_weights(workspace: Workspace, split: ActivationSplit) -> None:
    """Refuse hidden states of other weights than their snapshot has now."""
    stored, there = _weights(split), weights_of_snapshot(workspace, split.tag)
    if None not in (stored, there) and stored != there:
        raise ProvenanceError(
            f"{split.name} in {split.storage} was extracted with other weights than "
            f"{workspace.snapshot_dir(split.tag)} has now: `bertvision store rm {split.name}`, "
            f"then `bertvision extract --checkpoint {split.tag} --split {split.split}`, or name "
            "another --store"
        )


def _find(path: Path, job: Job[R], made: Mapping[str, object]) -> R | None:
    """The kept result, where it is of the same job."""
    if not path.exists():
        return None
    try:
        record = read_analysis(path, job.result, job.command)
    except WorkspaceError as error:
        log.warning("measured anew: %s", error)
        return None
    if any(getattr(record, field) != value for field, value in made.items()):
        return None
    log.info("as it was measured before, with the same settings and weights: %s", path)
    return record.result
