"""Probing the layers of snapshots: what is kept of each probe, what is missing, rows of results."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar, Unpack

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from bertvision.errors import NonFiniteError, ProvenanceError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.format.records import Provenance
from bertvision.pipelines.extraction.layers import Layers, layers_text, wanted_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.measurements import Measurements
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.precision import device
from bertvision.pipelines.progress import progress
from bertvision.pipelines.readouts.batched import Bools
from bertvision.pipelines.readouts.directions import saved_probes
from bertvision.pipelines.readouts.inputs import (
    Extraction,
    ensure_inputs,
    locked,
    read_inputs,
    with_twin,
)
from bertvision.pipelines.readouts.options import ProbeOptions
from bertvision.pipelines.readouts.probe import MOST_ITERATIONS, Done, Inputs, Problem
from bertvision.pipelines.readouts.probe_data import ProbeData, majority, read_data
from bertvision.pipelines.readouts.probe_measures import (
    ControlRecord,
    InlpRecord,
    MdlRecord,
    block_ends,
    measure,
    measure_control,
    measure_inlp,
    measure_mdl,
)
from bertvision.pipelines.readouts.targets import TargetSplit, check_span_poolings
from bertvision.pipelines.records import digest_of
from bertvision.pipelines.results.columns import grouped
from bertvision.pipelines.tasks.soundness import SplitSoundness, doubts, is_doubtful
from bertvision.pipelines.uncertainty import share, share_difference
from bertvision.pipelines.workspace.snapshots import workspace_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
MEMORY = 2 << 30
"""Bytes of features and parameters that are held at once, unless told otherwise."""
DOUBTFUL = "†"
"""Marks data whose scores say little, in tables."""
Need = Literal["probe", "control", "mdl", "inlp", "weights"]
_GAIN = ("difference", "difference_low", "difference_high")
_OF_CONTROL, _OF_MDL = ("selectivity", "memorised", "unseen"), ("bits", "compression")
_OF_INLP = ("directions", "mean_projection")
Row = dict[str, Any]


class LayerProbe(BaseModel):
    """Record of a probe on one input, of classes or of scores."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    layers: Layers
    """Hidden states, end to end where there are several."""
    held_out: float
    """Per cent on the held-out examples, by which the best layer is chosen; mean over folds."""
    weight_decay: list[float]
    """Chosen, fold by fold."""
    weights: str | None = None
    """SHA-256 of the file with its weights, where they are kept."""


_R = TypeVar("_R", bound=LayerProbe)


class ProbeRecord(LayerProbe):
    """A classifier on one input; ``held_out`` is its accuracy."""

    accuracy: float
    """Per cent of the scored examples."""
    low: float
    """Lower end of its 95 % interval over resampled examples, or over clusters of them."""
    high: float
    """Upper end."""
    epochs: list[int]
    """Epochs of the chosen probe, fold by fold."""
    correct: str
    """Whether each scored example is right: a bit each, packed, as base64."""
    control: ControlRecord | None = None
    mdl: MdlRecord | None = None
    inlp: InlpRecord | None = None

    def bits(self, examples: int) -> Bools:
        """(examples,) whether each scored example is right."""
        packed = np.frombuffer(base64.b64decode(self.correct), np.uint8)
        return np.unpackbits(packed, count=examples).astype(bool)


def packed(correct: Bools) -> str:
    """The text that `ProbeRecord.bits` reads.

    Args:
        correct: (examples,)
    """
    return base64.b64encode(np.packbits(correct).tobytes()).decode("ascii")


class LayerProbes(Measurements, Generic[_R]):
    """All probes of a snapshot, a pooling and one choice of settings."""

    model_config = ConfigDict(frozen=False, extra="forbid")
    makes: ClassVar[str] = "bertvision probe"

    task: str
    settings: ProbeOptions
    examples: dict[str, int]
    """Number of examples that train, are held out, and are scored; in a cross-validation, those of
    the first fold and of all."""
    soundness: dict[str, SplitSoundness] | None = None
    """Contradictions of each split, and what it shares with others; None in files of before."""
    probes: list[_R] = Field(default_factory=list)

    @property
    def doubts(self) -> str | None:
        """Faults of the data where their scores say little; else None."""
        checked = self.soundness or {}
        return doubts(checked) if is_doubtful(checked) else None

    @property
    def data(self) -> str:
        """A digest of the data of all splits."""
        digests = {k: v for k, v in self.made_from.items() if k.endswith(": data_sha256")}
        return digest_of(digests)[:12]

    def told(self) -> Mapping[str, object]:
        """By field what decides the probes: all but these, and what was found of the data."""
        without = {"probes", "made_from", "settings", "soundness"}
        return {**self.made_from, **self.model_dump(mode="json", exclude=without)}

    def resume(self, root: Path) -> Self:
        """As `Measurements.resume`; a file of before is told of doubts about its data."""
        resumed = super().resume(root)
        if resumed.soundness is None and self.doubts:
            resumed = resumed.model_copy(update={"soundness": self.soundness})
            resumed.write(root)  # reports are to mark it, even where nothing is left to be trained
        return resumed

    def weights_path(self, root: Path, layers: Layers) -> Path:
        """Where the weights of a probe are kept in the workspace at ``root``."""
        return self.place(root).with_suffix("") / f"{layers_text(layers)}.safetensors"

    def has_weights(self, root: Path, probe: _R) -> bool:
        """Whether the weights of a probe are kept as they were written."""
        path = self.weights_path(root, probe.layers)
        return path.is_file() and sha256_of_files([path]) == probe.weights

    def find(self, layers: Layers) -> _R | None:
        """The probe on an input, if it was trained."""
        return next((probe for probe in self.probes if probe.layers == layers), None)

    def put(self, probe: _R) -> None:
        """Add a probe, or replace that on the same input."""
        others = [other for other in self.probes if other.layers != probe.layers]
        self.probes = sorted([*others, probe], key=lambda p: (len(p.layers), p.layers))

    def best_layer(self) -> Layers | None:
        """The single layer that does best on held-out examples; the lowest of equals.

        It is not chosen on the scored examples: their maximum over layers would be too high.
        """
        single = [record for record in self.probes if len(record.layers) == 1]
        return max(single, key=lambda r: (r.held_out, -r.layers[0])).layers if single else None


class ProbeFile(LayerProbes[ProbeRecord]):
    """Probes of classes."""

    folder: ClassVar[str] = "probes"

    classes: list[str]
    majority: float
    """Per cent that the most frequent class of the training examples scores."""
    clusters: list[int] | None = None
    """Number of the cluster of each scored example, which intervals draw: of words their sentence,
    else the group that is left out; None draws examples."""


def probe(
    workspace: Workspace,
    dataset: str | None,
    tags: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    poolings: Sequence[TokenPooling] | None = None,
    concat: Sequence[str] = (),
    untrained: bool = False,
    control: bool = False,
    mdl: bool = False,
    inlp: int = 0,
    save: bool = False,
    options: ProbeOptions | None = None,
    memory: int = MEMORY,
    **extraction: Unpack[Extraction],
) -> list[ProbeFile]:
    """Train probes on pooled hidden states of each layer, or find those trained before.

    Hidden states that are missing are extracted. Probes of several layers and poolings are trained
    at once, as many as ``memory`` holds; each is what it would be if it were trained alone, so that
    it does not matter how often this is stopped and called again.

    Args:
        workspace: Workspace with the snapshots.
        dataset: An added data set; None is the workspace's own data.
        tags: The snapshots.
        layers: Indices of hidden states; None is all, from the embedding output to the last.
        poolings: Poolings over the tokens of each window, by default cls and mean (of decoders
            last and mean); of data whose labels are those of words, over the tokens of each, by
            default mean.
        concat: Layers to be put end to end besides, such as ``first+last`` or ``0+3+6``.
        untrained: Whether to probe the twin with random weights too, which differences are taken
            from.
        control: Whether to measure the control task and selectivity too.
        mdl: Whether to measure the online code of the labels too.
        inlp: Projections of the iterative nullspace projection; 0 leaves it out.
        save: Whether to keep the weights of the probes too.
        options: Settings of the training.
        memory: Bytes of features and of parameters at once, about.
        **extraction: Settings of the extraction of hidden states that are missing.

    Returns:
        Everything that is now kept of each snapshot and pooling, snapshots in order.

    Raises:
        InputError: the data cannot be probed, or there is no such layer.
        ProvenanceError: probes or hidden states were made from something else, or those of
            different snapshots or splits not alike; names the field.
        LockedError: another process probes the same data set.
    """
    options = options or ProbeOptions()
    source = workspace.dataset(dataset)
    data = read_data(source, options, partial(workspace_tokenizer, workspace))
    if data.spans is not None:
        check_span_poolings(poolings := poolings or ("mean",))
    poolings = poolings or (workspace.config.model.pooling, "mean")
    choice = partial(wanted_layers, layers, concat, workspace.config.model.num_hidden_layers)
    snapshots = with_twin(tags, untrained)
    needs: list[Need] = ["probe"]
    needs += ["control"] if control else []
    needs += ["mdl"] if mdl else []
    needs += ["inlp"] if inlp else []
    needs += ["weights"] if save else []
    folder = workspace.root / ProbeFile.folder / data.name
    every: list[ProbeFile] = []
    parts = list(data.sizes)
    stored = poolings if data.spans is None else ("all",)
    ensure_inputs(workspace, snapshots, source.name, parts, stored, choice, extraction)
    with locked(folder, f"probing {data.name}"):
        for tag in snapshots:
            splits: dict[TokenPooling, list[PooledSplit]] = {}
            files, wanted = {}, []
            for pooling in poolings:
                splits[pooling] = [
                    PooledSplit(workspace, tag, source.name, name, pooling)
                    if data.spans is None
                    else TargetSplit(workspace, tag, source.name, name, pooling, data.spans[name])
                    for name in data.sizes
                ]
                files[pooling] = _new(data, splits[pooling], options).resume(workspace.root)
                layers_stored = splits[pooling][0].stored.record.layers
                wanted += [Wanted(pooling, key) for key in choice(layers_stored)]
            probing = Probing(workspace, data, tag, splits, files, options, inlp)
            probing.complete(wanted, needs, memory)
            every += files.values()
    return every


def _new(data: ProbeData, splits: Sequence[PooledSplit], options: ProbeOptions) -> ProbeFile:
    """A file without probes, with everything that decides what they become."""
    guesses = [majority(data.labels[f.train], data.labels[f.test]) for f in data.folds]
    return ProbeFile(
        dataset=data.name,
        task=data.task,
        tag=splits[0].tag,
        pooling=splits[0].pooling,
        settings=options,
        made_from=made_from(splits),
        classes=list(data.classes),
        examples=data.counts,
        majority=float(np.average(guesses, weights=[len(f.test) for f in data.folds])),
        clusters=data.scored_clusters,
        soundness=data.soundness,
    )


def made_from(splits: Sequence[PooledSplit]) -> Provenance:
    """Provenance of the stored hidden states of the splits of a data set."""
    told: Provenance = {}
    for pooled in splits:
        record = pooled.stored.record
        told[f"{pooled.split}: encoding"] = record.encoding
        told |= {f"{pooled.split}: {key}": value for key, value in record.provenance.items()}
    return told


class Wanted(NamedTuple):
    """An input that probes are wanted of."""

    pooling: TokenPooling
    layers: Layers


class Group(NamedTuple):
    """Inputs of one width that miss the same and fit into memory together."""

    inputs: list[Wanted]
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class Probing:
    """The probes of a snapshot on a data set, by pooling: those that are kept, and the missing."""

    workspace: Workspace
    data: ProbeData
    tag: str
    splits: dict[TokenPooling, list[PooledSplit]]
    files: dict[TokenPooling, ProbeFile]
    options: ProbeOptions
    projections: int = 0
    """Projections of the iterative nullspace projection."""

    def complete(self, wanted: Sequence[Wanted], needs: Sequence[Need], memory: int) -> None:
        """Measure what is missing and write it, group by group.

        Args:
            wanted: Inputs.
            needs: Measurements of each.
            memory: Bytes that a group may take, about; a single input may take more.
        """
        groups, name = self._missing(wanted, needs, memory), self.data.name
        if not groups:
            log.info("%s of %s: %s there", name, self.tag, counted(len(wanted), "probe"))
            return
        with progress(sum(map(self._work, groups)), f"{name} {self.tag}", "probe") as bar:
            for group in groups:
                problem = self._problem(self.load(group.inputs), bar.update)
                for need in group.needs:
                    self.measure(need, problem, group.inputs)
                    for pooling in dict.fromkeys(key.pooling for key in group.inputs):
                        self.files[pooling].write(self.workspace.root)
        if self.options.solver == "lbfgs":
            self._report_short(wanted)

    def _report_short(self, wanted: Sequence[Wanted]) -> None:
        """Say once of all probes how many stopped before their optimum, and what helps."""
        records = [self.files[key.pooling].find(key.layers) for key in wanted]
        iterations = [n for record in records if record for n in record.epochs]
        if short := sum(n >= MOST_ITERATIONS for n in iterations):
            log.warning(
                "%d of %s of %s at %s are not at their optimum after %d iterations: %s",
                *(short, counted(len(iterations), "probe"), self.data.name, self.tag),
                MOST_ITERATIONS,
                "greater --weight-decays bring them there sooner"
                if self.options.standardise
                else "--standardise brings features to one scale, on which they come there sooner",
            )

    def _missing(self, wanted: Sequence[Wanted], needs: Sequence[Need], memory: int) -> list[Group]:
        alike: dict[tuple[int, tuple[Need, ...]], list[Wanted]] = {}
        for key in wanted:
            record = self.files[key.pooling].find(key.layers)
            missing = tuple(need for need in needs if self._lacks(key, record, need))
            if missing:
                alike.setdefault((len(key.layers), missing), []).append(key)
        groups = []
        for (parts, missing), keys in alike.items():
            width = parts * self.splits[keys[0].pooling][0].width
            outputs = self.options.hidden or len(self.data.classes)
            # the parameter, its gradient, two moments, the best so far, and a copy of one at times
            learned = 6 * len(self.options.weight_decays) * outputs * width
            copies = 2 if "inlp" in missing else 1  # of the vectors, without what was removed
            most = max(1, memory // (4 * (copies * len(self.data.labels) * width + learned)))
            groups += [Group(keys[i : i + most], missing) for i in range(0, len(keys), most)]
        return groups

    def _lacks(self, key: Wanted, record: ProbeRecord | None, need: Need) -> bool:
        """Whether something of an input is still to be measured."""
        if record is None or need == "probe":
            return record is None
        if need == "inlp":
            return record.inlp is None or len(record.inlp.accuracy) != 1 + self.projections
        if need == "weights":
            return not self.files[key.pooling].has_weights(self.workspace.root, record)
        return getattr(record, need) is None

    def _work(self, group: Group) -> int:
        """Number of probes that are trained for a group."""
        grid, folds = len(self.options.weight_decays), len(self.data.folds)
        blocks = len(block_ends(len(self.data.folds[0].train))) - 1
        each = {"probe": grid * folds, "control": folds, "mdl": grid * blocks, "weights": 1}
        each["inlp"] = grid * (self.projections + 2)
        return len(group.inputs) * sum(each[need] for need in group.needs)

    def load(self, group: Sequence[Wanted]) -> Inputs:
        """The vectors of a group of inputs, for all examples, on the device that trains.

        Raises:
            ProvenanceError: there are not as many vectors as labels.
            NonFiniteError: they hold NaN or infinity.
        """
        data, width = self.data, len(group[0].layers) * self.splits[group[0].pooling][0].width
        values = np.empty((len(data.labels), len(group), width), np.float32)
        for pooling in dict.fromkeys(key.pooling for key in group):
            chosen = [i for i, key in enumerate(group) if key.pooling == pooling]
            start = 0
            for pooled in self.splits[pooling]:
                size, windows = data.sizes[pooled.split], len(pooled)
                if windows != size:
                    raise ProvenanceError(
                        f"{pooled.split} of {data.name} has {size} labels and {windows} stored "
                        f"windows of {self.tag}: extract it again into another --store"
                    )
                read = read_inputs(pooled, [group[i].layers for i in chosen])
                values[start : start + size, chosen] = read
                start += size
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"hidden states of {data.name} at {self.tag} hold NaN or infinity: no probe can be "
                "trained on them; `bertvision store verify` says where they are"
            )
        return Inputs(torch.from_numpy(values).to(device()))

    def _problem(self, inputs: Inputs, done: Done) -> Problem:
        labels = torch.from_numpy(self.data.labels).to(inputs.values.device)
        return Problem(inputs, labels, len(self.data.classes), self.options, done)

    def measure(self, need: Need, problem: Problem, group: Sequence[Wanted]) -> None:
        """Measure one thing of a group of inputs, and put it into its files.

        Args:
            need: Measures to take.
            problem: Vectors of the group with their labels.
            group: The inputs.
        """
        if need == "probe":
            self._train(problem, group)
            return
        rows = [self.files[key.pooling].find(key.layers) for key in group]
        records = [record for record in rows if record is not None]  # needs begin with the probe
        if need == "mdl":
            for record, code in zip(records, measure_mdl(problem, self.data), strict=True):
                record.mdl = code
            return
        if need == "inlp":
            for record, removed in zip(
                records, measure_inlp(problem, self.data, self.projections), strict=True
            ):
                record.inlp = removed
            return
        if need == "weights":
            decays = np.array([record.weight_decay[0] for record in records])
            epochs = np.array([record.epochs[0] for record in records])
            probes = saved_probes(problem, self.data, decays, epochs)
            for key, record, saved in zip(group, records, probes, strict=True):
                path = self.files[key.pooling].weights_path(self.workspace.root, key.layers)
                source = {"dataset": self.data.name, "tag": str(self.tag), "pooling": key.pooling}
                source["layers"] = layers_text(key.layers)
                record.weights = saved._replace(source=source).save(path)
            return
        controls = measure_control(
            problem,
            self.data,
            np.array([record.weight_decay for record in records]).T,
            np.array([record.epochs for record in records]).T,
            np.array([record.accuracy for record in records]),
        )
        for record, control in zip(records, controls, strict=True):
            record.control = control

    def _train(self, problem: Problem, group: Sequence[Wanted]) -> None:
        trained = measure(problem, self.data)
        for i, key in enumerate(group):
            of_accuracy = share(trained.correct[i], clusters=self.data.scored_clusters)
            record = ProbeRecord(
                layers=key.layers,
                **dict(zip(("accuracy", "low", "high"), of_accuracy, strict=True)),
                held_out=float(trained.held_out[i]),
                weight_decay=trained.weight_decay[:, i].tolist(),
                epochs=trained.epochs[:, i].tolist(),
                correct=packed(trained.correct[i]),
            )
            self.files[key.pooling].put(record)


def probe_rows(files: Iterable[ProbeFile]) -> list[Row]:
    """A row for every probe, with its difference from the untrained twin where there is one.

    The difference is of probes on the same pooling and layers with the same settings, and its
    interval is over resampled test examples, drawn in pairs. There is none where the hidden states
    of the two are of another encoding, precision or treatment of non-finite values.

    Returns:
        ``dataset``, ``task``, ``tag``, ``pooling``, ``layers`` (text), ``probe`` (``linear`` or
        ``mlp-50``), ``settings`` (a digest), ``accuracy``, ``low``, ``high``, ``majority``,
        ``held_out``, ``weight_decay``, ``epochs`` (means over folds), ``examples`` (scored),
        ``classes``; ``difference``, ``difference_low``, ``difference_high`` against the twin;
        ``control``, ``selectivity``, ``memorised``, ``unseen``; ``bits``, ``compression``;
        ``inlp`` (accuracy after the projections), ``directions`` (removed), ``mean_projection``;
        ``weights``, the digest of the file with them;
        ``best``: whether it is the single layer with the highest accuracy on held-out examples;
        ``doubts``: faults of the data, where their scores say little; and ``data``, a digest of the
        data. A measure that was not taken is None.
    """
    files = list(files)
    twins = {_twin(f): f for f in files if SnapshotTag(f.tag).is_untrained}
    rows = []
    for file in files:
        twin = twins.get(_twin(file)) if not SnapshotTag(file.tag).is_untrained else None
        twin = twin if twin and _stored_as(twin) == _stored_as(file) else None
        best = file.best_layer()
        for record in file.probes:
            scored = file.examples["scored"]
            other = twin.find(record.layers) if twin else None
            gain = other and share_difference(
                record.bits(scored), other.bits(scored), clusters=file.clusters
            )
            control = record.control
            rows.append(
                {
                    "dataset": file.dataset,
                    "task": file.task,
                    "tag": str(file.tag),
                    "pooling": file.pooling,
                    "layers": layers_text(record.layers),
                    "probe": f"mlp-{file.settings.hidden}" if file.settings.hidden else "linear",
                    "settings": file.settings.digest,
                    **record.model_dump(include={"accuracy", "low", "high"}),
                    "majority": file.majority,
                    "held_out": record.held_out,
                    "weight_decay": sum(record.weight_decay) / len(record.weight_decay),
                    "epochs": sum(record.epochs) / len(record.epochs),
                    "examples": scored,
                    "classes": len(file.classes),
                    "best": record.layers == best,
                    "doubts": file.doubts,
                    "data": file.data,
                    **dict(zip(_GAIN, gain or (None, None, None), strict=True)),
                    "control": control and control.accuracy,
                    **{key: getattr(control, key, None) for key in _OF_CONTROL},
                    **{key: getattr(record.mdl, key, None) for key in _OF_MDL},
                    "inlp": record.inlp and record.inlp.accuracy[-1],
                    **{key: getattr(record.inlp, key, None) for key in _OF_INLP},
                    "weights": record.weights,
                }
            )
    return rows


def by_snapshot(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str, str, str], list[Mapping[str, Any]]]:
    """Rows by data set, kind of probe, settings and snapshot."""
    return grouped(rows, itemgetter("dataset", "probe", "settings", "tag"))


def _twin(file: ProbeFile) -> tuple[str, str, str]:
    return file.dataset, file.pooling, file.settings.digest


def _stored_as(file: ProbeFile) -> dict[str, Any]:
    """Settings that the hidden states were computed and stored with, by ``split: field``."""
    fields = ("encoding", "precision", "nonfinite")
    return {k: value for k, value in file.made_from.items() if k.rpartition(": ")[2] in fields}
