"""Requests of analyses: what decides a result, where it is kept, and what encodings cost it.

A job makes a `Request` of its own arguments, names the splits, snapshots and files that it reads,
and hands over its measurement. A result with the same settings of the same weights is not measured
twice: it is kept in ``analysis/`` of the workspace, beside its figure.

Two things decide what an encoding costs. A statistic bears rounding up to a size, which
`docs/analyses.md` measures on a real encoder: `AnalysisResult.keeps` says what came out. And an
encoding may round a kind of token in a layer more than it promises, which its calibration measured
when the split was written: massive activations, or an outlier channel that widens the steps of all
others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from bertvision.errors import ProvenanceError, WorkspaceError
from bertvision.pipelines.analysis.result import (
    FOLDER,
    Analysis,
    Keeps,
    Kept,
    R,
    read_analysis,
)
from bertvision.pipelines.declare import Argument, arguments
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.measurements import weights_of_snapshot
from bertvision.pipelines.plotting import check_suffix
from bertvision.pipelines.reading import Tags
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.checks import check_snapshots, check_stored, find_workspace
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.pipelines.precision import Precision


log = logging.getLogger(__name__)

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


def encoding_notes(kind: str, keeps: Keeps, splits: Iterable[ActivationSplit]) -> list[str]:
    """Sentences on the encodings of splits, where they change what an analysis tells.

    Args:
        kind: Kind of the analysis.
        keeps: Accuracy of the analysis by encoding.
        splits: The splits that it reads.

    Raises:
        CorruptStoreError: the measured errors of a split are damaged.
    """
    from bertvision.featurestore.format.calibration import is_beyond_promise

    notes: list[str] = []
    named: dict[str, list[str]] = {}
    for split in {split.name: split for split in splits}.values():
        encoding: str = split.encoding.name
        if not split.encoding.calibrated:
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
        support: Kept = keeps.get(encoding, "unmeasured")
        if support == "values" or (support == "unmeasured" and encoding == "int8"):
            continue  # int8 within its promise is off by 2 % of a deviation at most
        splits_are = f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
        sentence = _SENTENCES[support].format(splits=splits_are, encoding=encoding, kind=kind)
        notes.append(f"{sentence}.")
    return notes


_TOKENS = {
    "first": "the first token of each window",
    "special": "special tokens",
    "ordinary": "ordinary tokens",
    "pooled": "its vectors",
}


class Setting(NamedTuple):
    """The value of an argument that decides a result, and its default."""

    value: JsonValue
    default: JsonValue
    name: str = ""
    """Part of the names of files; empty where results with other values are not kept apart."""
    flag: str = ""
    """Its name on the command line."""

    @classmethod
    def of(cls, argument: Argument, value: Any) -> Setting:
        """The setting of an argument.

        Args:
            argument: Declaration of the argument.
            value: Its value.
        """
        keyword = argument.name
        name = keyword if value is True else f"{keyword}-{value}"
        return cls(value, argument.default, name if argument.option.apart else "", argument.flag)


class Other(NamedTuple):
    """A split that another workspace holds."""

    workspace: Workspace
    split: ActivationSplit


class Request:
    """An analysis that was asked for.

    Attributes:
        kind: Name of the job.
        workspace: Workspace that it is kept in.
        scheduler: Scheduler that computes it.
        settings: Settings of its result, by keyword, beside the data that it reads.
        tags: Snapshots, as they are typed.
        names: Names of the splits or data sets that it reads.
        read: Splits that it reads of the workspace's store.
        others: Splits that it reads of other workspaces, by a name that tells them apart.
        runs: Snapshots that it runs, with the digests of their weights.
        files: Digests of the files that it reads, by name.
    """

    def __init__(
        self, job: Callable[..., Any], given: Mapping[str, Any], *, names: str = "split"
    ) -> None:
        """Find the workspace, and check where the figure goes and who computes.

        Args:
            job: The job.
            given: Values of its arguments, by name; those that jobs share as ``where``.
            names: Argument that names the splits, or the data sets.

        Raises:
            WorkspaceError: There is no workspace.
            InputError: The figure is no SVG file, or the scheduler does not answer.
        """
        given = {**given, **given.get("where", {})}
        self.kind = job.__name__
        self._plot = given.get("plot")
        if self._plot is not None:
            check_suffix(Path(self._plot))
        self.scheduler = given.get("scheduler", "threads")
        if "scheduler" in given:
            from bertvision.pipelines.scheduler import check_scheduler

            check_scheduler(self.scheduler)
        self.workspace = find_workspace(given.get("workspace"), given.get("store"))
        declared = arguments(job)
        self._names_flag = f"--{names}"
        self._between = "," if declared[0].hint == Tags else " "
        self.settings: dict[str, Setting] = {}
        for argument in declared:
            if argument.options:
                value = getattr(given["options"], argument.field)
                self.settings[argument.field] = Setting.of(argument, value)
            elif argument.option.decides and not argument.positional and argument.name != names:
                self.settings[argument.name] = Setting.of(argument, given[argument.name])
        self.tags: list[str] = []
        self.names: list[str] = []
        self.read: list[ActivationSplit] = []
        self.others: dict[str, Other] = {}
        self.runs: dict[str, str] = {}
        self.files: dict[str, str] = {}

    def splits(self, tags: Sequence[str], *names: str, whole: bool = True) -> list[ActivationSplit]:
        """Read splits of the workspace's store.

        Args:
            tags: Snapshots, in the order in which they are compared.
            *names: Splits of each; the first of a snapshot before the second.
            whole: Whether every token of each example is needed.

        Returns:
            The splits, those of a snapshot beside each other.

        Raises:
            UnknownNameError: There is no such snapshot or split.
            InputError: One keeps some tokens of each example, and all are needed.
            IncompleteSplitError: Shards of one are missing.
        """
        places = [(tag, name) for tag in tags for name in names]
        for place in places:
            check_stored(self.workspace, *place, whole=whole)
        read = [self.workspace.split(*place).require_complete() for place in places]
        self.tags, self.read = [*tags], [*self.read, *read]
        self.names = self.names or [*names]
        return read

    def snapshot(self, tag: str, precision: str | None = None) -> tuple[Path, Precision]:
        """Run a snapshot; ``0e`` and ``untrained`` are made where they are missing.

        Args:
            tag: The snapshot.
            precision: Arithmetic that is asked for, which is a setting of the result then; None is
                float32.

        Returns:
            Its folder, and the arithmetic.

        Raises:
            UnknownNameError: There is no such snapshot.
            WorkspaceError: It is damaged.
        """
        check_snapshots(self.workspace, [tag])
        from bertvision.pipelines.precision import resolve_precision
        from bertvision.pipelines.workspace.pretrained import ensure_snapshot

        folder, arithmetic = (
            ensure_snapshot(self.workspace, tag),
            resolve_precision(precision or "32"),
        )
        self.tags = [tag]
        self.runs[tag] = read_snapshot_info(folder).weights_sha256
        if precision is not None:
            self.settings["precision"] = Setting(arithmetic, arithmetic)
        return folder, arithmetic

    def same_layers(self) -> tuple[int, ...]:
        """The layers that every split holds.

        Raises:
            ProvenanceError: Two hold different layers.
        """
        check_layers(self.read)
        return tuple(self.read[0].record.layers)

    def samples(self, most: int, seed: int | Sequence[int]) -> Iterator[NDArray[np.float32]]:
        """A seeded sample of the tokens of each split, one split after the other.

        Args:
            most: Size of a sample at most; of a split with fewer tokens all are taken.
            seed: Seed of the samples; splits of equal size give the same rows.

        Yields:
            (tokens, layers, hidden) hidden states.

        Raises:
            NonFiniteError: NaN or infinity in the sample.
        """
        from bertvision.pipelines.analysis.reduce import check_finite, sampled_rows
        from bertvision.pipelines.scheduler import compute, use_scheduler

        for split in self.read:
            states = split.dask()
            rows = sampled_rows(states.shape[0], most, seed)
            with use_scheduler(self.scheduler, self.kind):
                sample = compute(states[rows])
            check_finite(sample.sum(axis=0))
            yield sample

    @property
    def command(self) -> str:
        """Command that makes the result again."""
        words = ["bertvision", self.kind, self._between.join(self.tags)]
        words += [self._names_flag, ",".join(self.names)] if self.names else []
        for keyword, setting in self.settings.items():
            if setting.value != setting.default:
                words.append(setting.flag or f"--{keyword.replace('_', '-')}")
                words += [] if setting.value is True else [str(setting.value)]
        return " ".join(words)

    def answer(self, result: type[R], measure: Callable[[], R]) -> R:
        """The result: the kept one, where it is of the same settings and weights.

        Otherwise it is measured, and kept in the place of what was there. It is drawn in both
        cases.

        Args:
            result: Type of the result.
            measure: The measurement.

        Raises:
            ProvenanceError: A split was extracted with other weights than its snapshot has now.
        """
        from bertvision.featurestore.lazy import SplitSource

        apart = [s.name for s in self.settings.values() if s.value != s.default]
        parts = [self.kind, *self.tags, "+".join(self.names), *apart]
        path = self.workspace.root / FOLDER / f"{'-'.join(filter(None, parts))}.json"
        drawn = Path(self._plot) if self._plot else path.with_suffix(".svg")
        others = [other.split for other in self.others.values()]
        for space, split in [*((self.workspace, x) for x in self.read), *self.others.values()]:
            _check_weights(space, split)
        weights = {str(x.tag): digest for x in self.read if (digest := _weights(x)) is not None}
        stored = {x.name: x for x in self.read} | {k: x.split for k, x in self.others.items()}
        made = {
            "weights_sha256": {**weights, **self.runs},
            "splits_sha256": {k: SplitSource.of(x).record_sha256 for k, x in stored.items()},
            "files_sha256": self.files,
            "settings": {keyword: setting.value for keyword, setting in self.settings.items()},
        }
        answer = self._kept(path, result, made)
        if answer is None:
            notes = encoding_notes(self.kind, result.keeps, [*self.read, *others])
            answer = measure().with_notes(notes)
            path.parent.mkdir(exist_ok=True)
            record: type[Analysis[R]] = Analysis[result]  # type: ignore[valid-type]
            command = self.command
            write_record(
                path, record(kind=self.kind, result=answer, notes=notes, command=command, **made)
            )
        answer.figure().save(drawn)
        log.info("plot: %s", drawn)
        return answer

    def _kept(self, path: Path, result: type[R], made: Mapping[str, object]) -> R | None:
        """The kept result, where it was made of the same."""
        if not path.exists():
            return None
        try:
            record = read_analysis(path, result, self.command)
        except WorkspaceError as error:
            log.warning("measured anew: %s", error)
            return None
        if any(getattr(record, field) != value for field, value in made.items()):
            return None
        log.info("as it was measured before, with the same settings and weights: %s", path)
        return record.result


def check_layers(splits: Sequence[ActivationSplit]) -> None:
    """Refuse splits that hold other layers than the first of them.

    Raises:
        ProvenanceError: one does; names both and what they hold.
    """
    first, *others = splits
    for other in others:
        if first.record.layers != other.record.layers:
            raise ProvenanceError(
                f"{first.name} holds layers {layers_text(first.record.layers)}, {other.name} "
                f"{layers_text(other.record.layers)}: extract the same layers of both"
            )


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
