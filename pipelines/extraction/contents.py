"""Content of a stored split beside the activations: layers, labels, text, provenance."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from bertvision.errors import BertvisionError, InputError, counted
from bertvision.featurestore.creation import SplitContents, SplitSpec
from bertvision.featurestore.format.keeping import KEEP, KEPT_POSITION, Keep, kept_positions
from bertvision.featurestore.format.ledger import Ledger, split_names
from bertvision.featurestore.format.logits import LOGITS
from bertvision.featurestore.format.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.storage.storage import Storage
from bertvision.featurestore.writing.origin import TOKEN_IDS
from bertvision.pipelines.extraction.job import ExtractionJob
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName, sites_part
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows
from bertvision.pipelines.workspace.dataset import Dataset
from bertvision.pipelines.workspace.records import SnapshotInfo
from bertvision.pipelines.workspace.workspace import Workspace

log = logging.getLogger(__name__)

POOLED_SHARD_WINDOWS = 256
"""Most windows of a shard of pooled states: 6.8 MB at BERT-large in int8. A shard is what a killed
extraction computes again, and here each of its tokens stands for a whole window."""


def order_seed(workspace: Workspace, split: str) -> int | None:
    """The seed that permutes the stored order of a split of the data; None keeps that of the data.

    Args:
        workspace: Workspace whose seed it is.
        split: only what is trained on is stored in another order.
    """
    return workspace.config.finetune.seed if split in ("train", "all") else None


def chosen_tokens(windows: Windows, job: ExtractionJob, task: Task) -> Windows:
    """Windows with the tokens that an extraction keeps of them.

    Args:
        windows: Windows of a split.
        job: Extraction, with the rule.
        task: Task of the data.

    Returns:
        The same windows, with ``keep`` where there is a rule. Those of which no token is kept stay
        among them, and are left out of the split.

    Raises:
        InputError: There is no such field, no token is kept, or labels are places in windows.
    """
    if (rule := job.options.keep) is None:
        return windows
    if {"start_positions", "end_positions"}.intersection(task.stored(windows)):
        raise InputError(
            f"--keep {rule}: answers are stored as places in whole windows; extract all tokens, "
            "and leave some out when you read: split.tokens(keep=…)"
        )
    chosen = replace(windows, keep=Keep.parse(rule).mask(windows.n_tokens, windows.token_fields))
    if not (left := int(np.count_nonzero(chosen.n_kept))):
        raise InputError(f"--keep {rule}: no token of {counted(len(windows), 'window')} is kept")
    if left < len(windows):
        log.warning(
            "--keep %s keeps no token of %s, which %s left out",
            *(rule, counted(len(windows) - left, "window")),
            "is" if len(windows) - left == 1 else "are",
        )
    return chosen


def split_contents(
    task: Task,
    windows: Windows,
    items: Sequence[Any],
    tokens: TokenPooling,
    *,
    seed: int | None,
    shard_tokens: int | None,
) -> SplitContents:
    """The plan of a split, and everything beside the activations.

    Args:
        task: Task of the data.
        windows: Windows of the split, in the order of the data.
        items: Items that they were made from.
        tokens: Tokens that are kept.
        seed: permutes the stored order; None keeps that of the data.
        shard_tokens: Capacity of a shard; None takes what suits the tokens.
    """
    per_token: dict[str, npt.NDArray[Any]] = {
        "input_ids": windows.input_ids,
        "token_type_ids": windows.token_type_ids,
        "offset_mapping": windows.offset_mapping,
        **windows.token_fields,
    }
    lengths, capacity = windows.n_kept, SHARD_TOKENS
    if windows.keep is not None:
        per_token = {name: values[windows.keep] for name, values in per_token.items()}
        per_token[KEPT_POSITION] = kept_positions(windows.keep, windows.n_tokens)
    if tokens != "all":
        # a pooling is of no one token, but for [CLS]
        per_token = {k: x[windows.first_token] for k, x in per_token.items() if tokens == "cls"}
        lengths = np.ones_like(lengths)
        # all alike, so that hardly any fill is left
        capacity = ceil(len(windows) / max(1, ceil(len(windows) / POOLED_SHARD_WINDOWS)))
    rows = np.flatnonzero(lengths)
    make = ShardPlan.fitted if shard_tokens is None and tokens == "all" else ShardPlan.make
    plan = make(lengths[rows], seed=seed, shard_tokens=shard_tokens or capacity)
    plan = replace(plan, example_id=rows[plan.example_id])
    return SplitContents(
        plan,
        per_token=per_token,
        per_example=task.stored(windows),
        examples=task.table(items),
    )


def asked_split(
    workspace: Workspace,
    data: Dataset,
    job: ExtractionJob,
    tokens: TokenPooling,
    windows: Windows,
    storage: Storage,
    *,
    layers: tuple[int, ...],
    hidden_size: int,
    made_from: Provenance,
) -> tuple[SplitSpec, SplitContents]:
    """A stored split as an extraction makes it, and everything in it beside the activations.

    Args:
        workspace: Workspace with the data.
        data: Data that are extracted.
        job: Job of the split.
        tokens: Tokens that are kept.
        windows: Windows of the split, in the order of the data.
        storage: Storage of the store.
        layers: Indices of the hidden states, or of the sites, that are kept.
        hidden_size: Channels of a hidden state, or of a site.
        made_from: Everything that the activations depend on.
    """
    hidden, some = workspace.config.model.hidden_size, job.options.keep is not None
    sites = sites_part(hidden_size, hidden) if job.options.sites else None
    name = StoredName(job.split, tokens, data.name, sites, some).name
    longest = int(windows.n_kept.max()) if tokens == "all" else 1
    contents = split_contents(
        *(data.task, windows, data.items(job.split), tokens),
        seed=order_seed(workspace, job.split),
        shard_tokens=job.options.shard_tokens or shard_capacity(storage, job.tag, name, longest),
    )
    spec = SplitSpec(
        tag=job.tag,
        split=name,
        encoding=job.options.encoding,
        compression=job.options.compression,
        layers=layers,
        hidden_size=hidden_size,
        provenance=made_from,
    )
    return spec, contents


def shard_capacity(storage: Storage, tag: str, split: str, longest: int) -> int | None:
    """The capacity of the shards of a split that was begun, here or in another snapshot.

    With the same one the split can be finished, and has the same plan in all snapshots, so that
    their tokens are compared row by row.

    Args:
        storage: Storage of the store.
        tag: Tag of the snapshot; its own split comes first.
        split: Name of the stored split.
        longest: Tokens of the longest window; one that a shard had no room for is of other tokens.

    Returns:
        None where no snapshot has such a split.
    """
    names = [(other, name) for other, name in split_names(storage) if name == split]
    for other, name in sorted(names, key=lambda pair: pair[0] != tag):
        with suppress(BertvisionError):  # whoever reads a damaged record says so
            capacity = Ledger(storage, other, name).read_split().shard_tokens
            if capacity >= longest:
                return capacity
    return None


def provenance(
    workspace: Workspace,
    dataset: Dataset,
    info: SnapshotInfo,
    job: ExtractionJob,
    tokens: TokenPooling,
    attention: str,
) -> Provenance:
    """Everything that the activations of a split depend on, as the store compares it."""
    made_from: Provenance = {
        "model": info.pretrained.name_or_path,
        "model_revision": info.pretrained.revision,
        "step": info.step,
        "weights_sha256": info.weights_sha256,
        "config_sha256": info.config_sha256,
        "tokenizer_sha256": info.tokenizer_sha256,
        **made_from_data(dataset, job.split),
        "seed": workspace.config.finetune.seed,
        "precision": job.options.precision,
        "nonfinite": job.options.nonfinite,
        "attn_implementation": attention,
    }
    if job.options.sites is not None:
        made_from["layer_names"] = json.dumps(job.options.sites)
    if job.options.keep is not None:
        made_from[KEEP] = job.options.keep
    if job.options.logits is not None:
        made_from[LOGITS] = job.options.logits
    if tokens == "all":  # of which nothing is said
        return made_from
    made_from["tokens"] = tokens
    if job.pooled_from is not None:
        made_from["pooled_from"] = job.pooled_from.name
        made_from["pooled_from_encoding"] = job.pooled_from.encoding
    return made_from


def token_ids_digest(windows: Windows) -> str:
    """Hex sha256 of the tokens of all windows, in the order of the data."""
    digest = hashlib.sha256()
    for values in (windows.n_tokens, windows.input_ids, windows.token_type_ids):
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).data)
    return digest.hexdigest()


def without_digest(made_from: Provenance) -> Provenance:
    """A provenance but for the digest of tokens, which is known once there are windows."""
    return {name: value for name, value in made_from.items() if name != TOKEN_IDS}


def made_from_data(dataset: Dataset, split: str) -> Provenance:
    """The part of the provenance that tells of the data."""
    config = dataset.config
    made_from: Provenance = {
        "task": config.name,
        "data_sha256": dataset.data[split].sha256,
        **{field: getattr(config, field) for field in dataset.task.settings},
    }
    if dataset.finetune is not None:
        made_from["tune_fraction"] = config.tune_fraction
        made_from["train_questions"] = dataset.finetune.train_questions
        if dataset.finetune.nested:
            made_from["nested"] = True
    if config.dev_fraction:
        made_from["dev_fraction"] = config.dev_fraction
    if config.linked:
        made_from["linked"] = True
    if config.date is not None:
        made_from["date"] = config.date
    # of a labelled file, and only where they are set: other tasks have no columns
    columns = {"text": config.text, "pair": config.pair, "label": config.label}
    if config.skip_bad and dataset.finetune is None:
        made_from["skip_bad"] = True
    return made_from | {name: column for name, column in columns.items() if column is not None}
