"""What is missing of a snapshot's probes, the features for it, and its measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from bertvision.errors import NonFiniteError, ProvenanceError
from bertvision.pipelines.extraction.layers import Layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.precision import device
from bertvision.pipelines.probing.batch import Inputs
from bertvision.pipelines.probing.data import ProbeData
from bertvision.pipelines.probing.mdl import block_ends
from bertvision.pipelines.probing.measure import measure, measure_control, measure_mdl
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.probing.results import (
    ControlRecord,
    MdlRecord,
    ProbeFile,
    ProbeRecord,
    packed,
)
from bertvision.pipelines.probing.scores import accuracy
from bertvision.pipelines.probing.trainer import Done
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.workspace import Workspace

Need = Literal["probe", "control", "mdl"]


class Wanted(NamedTuple):
    """An input that probes are wanted of."""

    pooling: TokenPooling
    layers: Layers


class Group(NamedTuple):
    """Inputs of one width that miss the same and fit into memory together."""

    inputs: list[Wanted]
    needs: tuple[Need, ...]


@dataclass(frozen=True)
class ProbeCache:
    """The probes of a snapshot on a data set, by pooling."""

    workspace: Workspace
    data: ProbeData
    tag: str
    splits: dict[TokenPooling, list[PooledSplit]]
    files: dict[TokenPooling, ProbeFile]
    options: ProbeOptions

    def missing(self, wanted: Sequence[Wanted], needs: Sequence[Need], memory: int) -> list[Group]:
        """What must still be measured, in groups.

        Args:
            wanted: inputs.
            needs: of each.
            memory: bytes that a group may take, about; a single input may take more.
        """
        alike: dict[tuple[int, tuple[Need, ...]], list[Wanted]] = {}
        for key in wanted:
            if left := tuple(need for need in needs if not self._has(key, need)):
                alike.setdefault((len(key.layers), left), []).append(key)
        groups = []
        for (parts, left), keys in alike.items():
            width = parts * self.workspace.config.model.hidden_size
            outputs = self.options.hidden or len(self.data.classes)
            # the parameter, its gradient, two moments, the best so far, and a copy of one at times
            held = 6 * len(self.options.weight_decays) * outputs * width
            most = max(1, memory // (4 * (len(self.data.labels) * width + held)))
            groups += [Group(keys[i : i + most], left) for i in range(0, len(keys), most)]
        return groups

    def work(self, group: Group) -> int:
        """How many probes are trained for a group."""
        grid, folds = len(self.options.weight_decays), len(self.data.folds)
        blocks = len(block_ends(len(self.data.folds[0].train))) - 1
        each = {"probe": grid * folds, "control": folds, "mdl": grid * blocks}
        return len(group.inputs) * sum(each[need] for need in group.needs)

    def load(self, group: Sequence[Wanted]) -> Inputs:
        """The vectors of a group of inputs, for all examples, on the device that trains.

        Raises:
            ProvenanceError: there are not as many vectors as labels.
            NonFiniteError: they hold NaN or infinity.
        """
        data, width = self.data, len(group[0].layers) * self.workspace.config.model.hidden_size
        values = np.empty((len(data.labels), len(group), width), np.float32)
        for pooling in dict.fromkeys(key.pooling for key in group):
            layers = sorted({i for key in group if key.pooling == pooling for i in key.layers})
            start = 0
            for pooled in self.splits[pooling]:
                size, held = data.sizes[pooled.split], len(pooled.stored)
                if held != size:
                    raise ProvenanceError(
                        f"{pooled.split} of {data.name} has {size} labels and {held} stored "
                        f"windows of {self.tag}: extract it again into another --store"
                    )
                for rows, read in pooled.blocks(layers):
                    for i, key in enumerate(group):
                        if key.pooling == pooling:
                            at = [layers.index(layer) for layer in key.layers]
                            values[start + rows, i] = read[:, at].reshape(len(rows), width)
                start += size
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"hidden states of {data.name} at {self.tag} hold NaN or infinity: no probe can be "
                "trained on them; `bertvision store verify` says where they are"
            )
        return Inputs(torch.from_numpy(values).to(device()))

    def measure(self, need: Need, inputs: Inputs, group: Sequence[Wanted], done: Done) -> None:
        """Measure one thing of a group of inputs, and put it into its files.

        Args:
            need: what.
            inputs: of the group.
            group: which inputs these are.
            done: told of probes that ended.
        """
        if need == "probe":
            self._train(inputs, group, done)
            return
        records = [self._record(key) for key in group]
        if need == "mdl":
            code = measure_mdl(inputs, self.data, self.options, done)
            for i, record in enumerate(records):
                record.mdl = MdlRecord(
                    bits=float(code.bits[i]),
                    uniform_bits=code.uniform_bits,
                    compression=float(code.compression[i]),
                    ends=code.ends,
                )
            return
        found = measure_control(
            inputs,
            self.data,
            self.options,
            np.array([record.weight_decay for record in records]).T,
            np.array([record.epochs for record in records]).T,
            np.array([record.accuracy for record in records]),
            done,
        )
        for record, control in zip(records, found, strict=True):
            record.control = ControlRecord(**control._asdict())

    def _train(self, inputs: Inputs, group: Sequence[Wanted], done: Done) -> None:
        found = measure(inputs, self.data, self.options, done)
        for i, key in enumerate(group):
            score = accuracy(found.correct[i])
            self.files[key.pooling].put(
                ProbeRecord(
                    layers=key.layers,
                    accuracy=score.value,
                    low=score.low,
                    high=score.high,
                    held_out=float(found.held_out[i]),
                    weight_decay=found.weight_decay[:, i].tolist(),
                    epochs=found.epochs[:, i].tolist(),
                    correct=packed(found.correct[i]),
                )
            )

    def _has(self, key: Wanted, need: Need) -> bool:
        record = self.files[key.pooling].find(key.layers)
        return record is not None and (need == "probe" or getattr(record, need) is not None)

    def _record(self, key: Wanted) -> ProbeRecord:
        record = self.files[key.pooling].find(key.layers)
        assert record is not None  # needs begin with the probe itself
        return record
