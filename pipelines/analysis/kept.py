"""One way for every analysis: take what is kept, or measure and keep it; draw it either way.

Encodings and analyses: what each analysis keeps of its numbers, and what is said of the rest.

Two things decide. A statistic bears rounding up to a size, which `docs/analyses.md` measures on a
real encoder: `KEEPS` says what came out. And an encoding may round a kind of token in a layer more
than it promises, which its calibration measured when the split was written: massive activations,
or an outlier channel that widens the steps of all others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, NamedTuple

from pydantic import JsonValue

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.featurestore.format.calibration import is_beyond_promise
from bertvision.featurestore.lazy import SplitSource
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.analysis.result import FOLDER, Analysis, R, read_analysis
from bertvision.pipelines.measurements import weights_of_snapshot
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.workspace import Workspace

Kept = Literal["values", "course", "unmeasured"]
"""``values``: the largest deviation from float32 is 1 % of the range over layers at most; `course`:
10 %, so that it is the same where the statistic rises and falls."""


class Keeps(NamedTuple):
    """Accuracy of an analysis on tokens, by encoding.

    Attributes:
        int8: In int8 stores.
        int4: In int4 stores.
    """

    int8: Kept
    int4: Kept


KEEPS: dict[str, Keeps] = {
    "cka": Keeps("values", "course"),
    "cca": Keeps("values", "course"),
    "rsa": Keeps("values", "course"),
    "isotropy": Keeps("values", "course"),
    "context": Keeps("values", "course"),
    "languages": Keeps("course", "unmeasured"),
    "attention": Keeps("unmeasured", "unmeasured"),
    "relations": Keeps("unmeasured", "unmeasured"),
    "prune": Keeps("unmeasured", "unmeasured"),
    "lens": Keeps("unmeasured", "unmeasured"),
    "cloze": Keeps("unmeasured", "unmeasured"),
    "structure": Keeps("unmeasured", "unmeasured"),
    "exits": Keeps("unmeasured", "unmeasured"),
}
"""By the kind of the analysis. The float encodings keep the values of all; those that were not
measured read vectors one by one, and an error of their split says how far each is off."""

_SENTENCES: dict[Kept, str] = {
    "course": (
        "{splits} stored as {encoding}, of which {kind} keeps the course over layers, and not the "
        "second digit: compare with care what differs by little"
    ),
    "unmeasured": (
        "{splits} stored as {encoding}; what {kind} loses by that was not measured, so repeat what "
        "matters on a store with --encoding float32"
    ),
}


def encoding_notes(kind: str, splits: Iterable[ActivationSplit]) -> list[str]:
    """Sentences on the encodings of splits, where they change what an analysis tells.

    Args:
        kind: Kind of the analysis, a key of `KEEPS`.
        splits: The splits that it reads.

    Raises:
        CorruptStoreError: the measured errors of a split are damaged.
    """
    notes: list[str] = []
    named: dict[str, list[str]] = {}
    for split in {split.name: split for split in splits}.values():
        encoding: str = split.encoding.name
        if not split.encoding.quantised:
            continue
        named.setdefault(encoding, []).append(split.name)
        layers = split.layer_names or [str(layer) for layer in split.record.layers]
        for tokens, errors in split.encoding_error.items():
            beyond = [i for i, e in enumerate(errors) if is_beyond_promise(float(e), encoding)]
            if beyond:
                worst = max(beyond, key=lambda i: float(errors[i]))
                where = ", ".join(layers[i] for i in beyond)
                notes.append(
                    f"{split.name} keeps {_TOKENS.get(tokens, tokens)} of layer {where} less well "
                    f"than {encoding} promises (an error of {errors[worst]:.2g} of an ordinary "
                    f"token's deviation in layer {layers[worst]}): numbers of these tokens alone "
                    "may be less exact than others; --encoding bfloat16 or float32 keeps them"
                )
    for encoding, names in named.items():
        kept: Kept = getattr(KEEPS[kind], encoding)
        if kept == "values" or (kept == "unmeasured" and encoding == "int8"):
            continue  # int8 within its promise is off by 2 % of a deviation at most
        splits_are = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
        sentence = _SENTENCES[kept].format(splits=splits_are, encoding=encoding, kind=kind)
        notes.append(f"{sentence}.")
    return notes


_TOKENS = {
    "first": "the first token of each window ([CLS])",
    "special": "special tokens",
    "ordinary": "ordinary tokens",
    "pooled": "its vectors",
}


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
