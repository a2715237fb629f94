"""Probes in rows: every score, and the best layer of each pooling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.extraction.layers import layers_text
from bertvision.pipelines.probing.results import ProbeFile
from bertvision.pipelines.probing.scores import difference

Row = dict[str, Any]
DOUBTFUL = "†"
"""Marks data whose scores say little, in tables."""


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
        ``best``: whether it is the single layer with the highest accuracy on held-out examples;
        ``doubts``: what is wrong with the data, where their scores say little; and ``data``, a
        digest of the data.
        What was not measured is None.
    """
    files = list(files)
    twins = {_twin(f): f for f in files if SnapshotTag(f.tag).is_untrained}
    rows = []
    for file in files:
        twin = twins.get(_twin(file)) if not SnapshotTag(file.tag).is_untrained else None
        twin = twin if twin and _kept(twin) == _kept(file) else None
        best = best_layer(file)
        for record in file.probes:
            row: Row = {
                "dataset": file.dataset,
                "task": file.task,
                "tag": str(file.tag),
                "pooling": file.pooling,
                "layers": layers_text(record.layers),
                "probe": f"mlp-{file.settings.hidden}" if file.settings.hidden else "linear",
                "settings": file.settings.digest,
                "accuracy": record.accuracy,
                "low": record.low,
                "high": record.high,
                "majority": file.majority,
                "held_out": record.held_out,
                "weight_decay": sum(record.weight_decay) / len(record.weight_decay),
                "epochs": sum(record.epochs) / len(record.epochs),
                "examples": file.examples["scored"],
                "classes": len(file.classes),
                "best": record.layers == best,
                "doubts": file.doubts,
                "data": file.data,
            }
            other = twin.find(record.layers) if twin else None
            gain = None
            if other is not None:
                n = file.examples["scored"]
                gain = difference(record.bits(n), other.bits(n))
            row["difference"] = gain and gain.value
            row["difference_low"] = gain and gain.low
            row["difference_high"] = gain and gain.high
            control, mdl = record.control, record.mdl
            row["control"] = control and control.accuracy
            row["selectivity"] = control and control.selectivity
            row["memorised"] = control and control.memorised
            row["unseen"] = control and control.unseen
            row["bits"] = mdl and mdl.bits
            row["compression"] = mdl and mdl.compression
            rows.append(row)
    return rows


def best_layer(file: ProbeFile) -> tuple[int, ...] | None:
    """The single layer with the highest accuracy on held-out examples; the lowest of equals.

    It is not chosen on the scored examples: their maximum over layers would be too high.
    """
    single = [record for record in file.probes if len(record.layers) == 1]
    return max(single, key=lambda r: (r.held_out, -r.layers[0])).layers if single else None


def by_snapshot(
    rows: Sequence[Mapping[str, Any]],
) -> dict[tuple[str, str, str, str], list[Mapping[str, Any]]]:
    """Rows by data set, kind of probe, settings and snapshot."""
    found: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["dataset"], row["probe"], row["settings"], row["tag"])
        found.setdefault(key, []).append(row)
    return found


def _twin(file: ProbeFile) -> tuple[str, str, str]:
    return file.dataset, file.pooling, file.settings.digest


def _kept(file: ProbeFile) -> dict[str, Any]:
    """How the hidden states were computed and stored, by ``split: field``."""
    fields = ("encoding", "precision", "nonfinite")
    return {k: value for k, value in file.made_from.items() if k.rpartition(": ")[2] in fields}
