"""Probe the layers of snapshots on a data set: train what is missing, keep every result."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np

from bertvision.errors import counted
from bertvision.featurestore.format.names import EncodingName, SnapshotTag
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.storage.lock import exclusive
from bertvision.pipelines.extraction.features import ensure_features
from bertvision.pipelines.extraction.layers import needed_layers, wanted_layers
from bertvision.pipelines.extraction.pooled_split import PooledSplit
from bertvision.pipelines.probing.cache import Need, ProbeCache, Wanted
from bertvision.pipelines.probing.data import ProbeData, read_data
from bertvision.pipelines.probing.options import ProbeOptions
from bertvision.pipelines.probing.results import ProbeFile
from bertvision.pipelines.probing.scores import majority
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)
UNTRAINED = "untrained"
MEMORY = 2 << 30
"""Bytes of features and parameters that are held at once, unless told otherwise."""


def probe(
    workspace: Workspace,
    dataset: str | None,
    tags: Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    poolings: Sequence[TokenPooling] = ("cls", "mean"),
    concat: Sequence[str] = (),
    untrained: bool = False,
    control: bool = False,
    mdl: bool = False,
    options: ProbeOptions | None = None,
    encoding: EncodingName | None = None,
    precision: str = "auto",
    scheduler: str | None = None,
    memory: int = MEMORY,
) -> list[ProbeFile]:
    """Train probes on pooled hidden states of each layer, or find those trained before.

    Hidden states that are missing are extracted. Probes of several layers and poolings are trained
    at once, as many as ``memory`` holds; each is what it would be if it were trained alone, so that
    it does not matter how often this is stopped and called again.

    Args:
        workspace: with the snapshots.
        dataset: an added data set; None is the workspace's own data.
        tags: the snapshots.
        layers: indices of hidden states; None is all, from the embedding output to the last.
        poolings: over the tokens of each window.
        concat: layers to be put end to end besides, such as ``first+last`` or ``0+3+6``.
        untrained: also the twin with random weights, which differences are taken from.
        control: also the control task and selectivity.
        mdl: also the online code of the labels.
        options: settings of the training.
        encoding: of the hidden states that are extracted.
        precision: of the forward pass that extracts them.
        scheduler: where they are extracted.
        memory: bytes of features and of parameters at once, about.

    Returns:
        What is now there of each snapshot and pooling, snapshots in order.

    Raises:
        InputError: the data cannot be probed, or there is no such layer.
        ProvenanceError: probes or hidden states were made from something else, or those of
            different snapshots or splits not alike; names the field.
        LockedError: another process probes the same data set.
    """
    options = options or ProbeOptions()
    source = workspace.dataset(dataset)
    data = read_data(source, options)
    depth = workspace.config.model.num_hidden_layers
    choice = partial(wanted_layers, layers, concat, depth)
    twin = [UNTRAINED] if untrained else []
    snapshots = sorted({SnapshotTag(tag) for tag in (*tags, *twin)})
    ensure_features(
        workspace,
        snapshots,
        source.name,
        list(data.sizes),
        poolings,
        layers=needed_layers(choice, poolings, depth),
        encoding=encoding,
        precision=precision,
        scheduler=scheduler,
    )
    needs: list[Need] = ["probe"]
    needs += ["control"] if control else []
    needs += ["mdl"] if mdl else []
    folder = workspace.root / ProbeFile.folder / data.name
    folder.mkdir(parents=True, exist_ok=True)
    found: list[ProbeFile] = []
    with exclusive(folder / ".lock", f"probing {data.name}"):
        for tag in snapshots:
            splits: dict[TokenPooling, list[PooledSplit]] = {}
            files, wanted = {}, []
            for pooling in poolings:
                splits[pooling] = [
                    PooledSplit(workspace, tag, source.name, name, pooling) for name in data.sizes
                ]
                files[pooling] = _new(data, splits[pooling], options).resume(workspace.root)
                stored = splits[pooling][0].stored.record.layers
                wanted += [Wanted(pooling, key) for key in choice(stored)]
            cache = ProbeCache(workspace, data, tag, splits, files, options)
            _complete(cache, wanted, needs, memory)
            found += files.values()
    return found


def _complete(cache: ProbeCache, wanted: list[Wanted], needs: list[Need], memory: int) -> None:
    """Measure what is missing of a snapshot and write it, group by group."""
    groups = cache.missing(wanted, needs, memory)
    if not groups:
        log.info("%s of %s: %s there", cache.data.name, cache.tag, counted(len(wanted), "probe"))
        return
    total = sum(cache.work(group) for group in groups)
    with progress(total, f"{cache.data.name} {cache.tag}", "probe") as bar:
        for group in groups:
            inputs = cache.load(group.inputs)
            for need in group.needs:
                cache.measure(need, inputs, group.inputs, bar.update)
                for pooling in dict.fromkeys(key.pooling for key in group.inputs):
                    cache.files[pooling].write(cache.workspace.root)


def _new(data: ProbeData, splits: Sequence[PooledSplit], options: ProbeOptions) -> ProbeFile:
    """A file without probes, with everything that decides what they become."""
    made_from: Provenance = {}
    for pooled in splits:
        record = pooled.stored.record
        made_from[f"{pooled.split}: encoding"] = record.encoding
        made_from |= {f"{pooled.split}: {key}": value for key, value in record.provenance.items()}
    first = data.folds[0]
    guesses = [majority(data.labels[f.train], data.labels[f.test]) for f in data.folds]
    return ProbeFile(
        dataset=data.name,
        task=data.task,
        tag=splits[0].tag,
        pooling=splits[0].pooling,
        settings=options,
        made_from=made_from,
        classes=list(data.classes),
        examples={
            "folds": len(data.folds),
            "train": len(first.train),
            "held_out": len(first.held_out),
            "scored": len(data.scored),
        },
        majority=float(np.average(guesses, weights=[len(f.test) for f in data.folds])),
        soundness=data.soundness,
    )
