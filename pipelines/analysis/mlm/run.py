"""Lens and cloze tests of a workspace: whose head reads, and what is to be known of that."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.analysis.mlm.cloze import cloze as ask
from bertvision.pipelines.analysis.mlm.cloze_result import ClozeResult
from bertvision.pipelines.analysis.mlm.items import Items
from bertvision.pipelines.analysis.mlm.lens import lens as lens_of_array
from bertvision.pipelines.analysis.mlm.lens_result import LensResult
from bertvision.pipelines.analysis.mlm.prompts import Prompts
from bertvision.pipelines.analysis.mlm.sums import Decoder, Floats
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import dimensions
from bertvision.pipelines.encoders.mlm_head import MlmHead, load_mlm_head
from bertvision.pipelines.readouts.lens import train_lens, words_of
from bertvision.pipelines.readouts.options import LensOptions
from bertvision.pipelines.workspace.pretrained import ensure_snapshot, pretrained
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot, load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace


def lens(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    trained: LensOptions | None = None,
    train_split: str = "train",
    max_tokens: int | None = 10_000,
    seed: int = 0,
    scheduler: str = "threads",
    plot: Path | None = None,
) -> LensResult:
    """What a head over the vocabulary reads from every stored layer of a snapshot.

    Args:
        workspace: with the activations.
        tag: the snapshot.
        split: of it, with the states of all tokens.
        trained: train a head for each layer; None takes the MLM head of the pretrained encoder.
        train_split: what those are trained on.
        max_tokens: use a seeded sample of at most so many tokens; None uses all.
        seed: of the sample, and of training.
        scheduler: ``threads``, ``processes`` or the ``tcp://`` address of a Dask cluster.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``, the pretrained encoder has no MLM head, the
            split does not hold all tokens, or heads would be trained on it.
    """
    x = workspace.split(tag, split).require_complete()
    options = {
        "trained": Given(trained is not None, False, named=True),
        "max_tokens": Given(max_tokens, 10_000),
        "seed": Given(seed, 0),
    }
    splits = [x]
    if trained is not None:
        if split == train_split:
            raise InputError(
                f"--trained: the heads would be trained on {split}, where they are then asked: "
                "name another split with --split or --train-split"
            )
        splits.append(workspace.split(tag, train_split).require_complete())
        usual = LensOptions()
        options |= {
            "train_split": Given(train_split, "train"),
            "steps": Given(trained.steps, usual.steps),
            "dropout": Given(trained.dropout, usual.dropout),
            "lr": Given(trained.lr, usual.lr),
        }

    def measure() -> LensResult:
        folder = workspace.require_snapshot(tag)
        special = load_snapshot_tokenizer(folder).all_special_ids
        words = words_of(x)
        decoder: Decoder
        if trained is None:
            decoder, head, note = _mlm_head(workspace, tag)
        else:
            learned = splits[1]
            asked = words_of(learned)
            asked[np.isin(asked, special)] = -1
            embeddings = cast(nn.Embedding, load_snapshot(folder).model.get_input_embeddings())
            decoder = train_lens(learned, asked, embeddings.weight, trained._replace(seed=seed))
            head = "heads trained by layer"
            note = (
                f"Each layer has an affine map of its own onto the input embeddings of {tag}, "
                f"trained on {train_split} for {trained.steps:,} steps with dropout "
                f"{trained.dropout:g}."
            )
        return lens_of_array(
            x.dask(),
            words,
            decoder,
            special=special,
            max_tokens=max_tokens,
            seed=seed,
            scheduler=scheduler,
            name=x.name,
            head=head,
            note=note,
            layers=x.record.layers,
        )

    job = Job(LensResult, (tag,), (split,), options, splits)
    return kept_or_measured(workspace, job, measure, plot)


def cloze(
    workspace: Workspace,
    tag: str,
    items: Items,
    *,
    source: str,
    k: int = 10,
    resamples: int = 10_000,
    seed: int = 0,
    plot: Path | None = None,
) -> ClozeResult:
    """Ask a snapshot for masked words, through the MLM head of the pretrained encoder.

    Args:
        workspace: of the snapshot.
        tag: the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        items: what is asked.
        source: of the items, as it is typed.
        k: of P@k.
        resamples: of the bootstrap over items.
        seed: of the bootstrap, and of the order of shuffled words.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: ``plot`` does not end in ``.svg``, the pretrained encoder has no MLM head, or no
            item can be asked.
    """
    folder = ensure_snapshot(workspace, tag)
    options = {
        "items": Given(source, "agreement", named=items.name),
        "k": Given(k, 10),
        "resamples": Given(resamples, 10_000),
        "seed": Given(seed, 0),
    }

    def measure() -> ClozeResult:
        decoder, _, note = _mlm_head(workspace, tag)
        snapshot = load_snapshot(folder)
        config = snapshot.model.config
        last = int(config.num_hidden_layers)
        alone = cast(PreTrainedModel, snapshot.model.base_model)
        encoder = Encoder(alone, {"all": [last]}, "32")

        def states(made: Prompts) -> Floats:
            windows, found = made.windows, []
            rows = np.arange(len(windows))
            for batch in encoder.batches(windows.n_tokens):
                (of_tokens,) = encoder(windows, rows[batch])
                lengths = windows.n_tokens[batch].astype(np.int64)
                first = np.cumsum(lengths) - lengths
                found.append(of_tokens[first + made.masked[batch], 0].cpu().numpy())
            return np.concatenate(found)

        return ask(
            items,
            states,
            decoder,
            snapshot.tokenizer,
            longest=dimensions(config, snapshot.tokenizer).max_length,
            k=k,
            resamples=resamples,
            seed=seed,
            model=tag,
            note=note,
        )

    runs = {str(tag): read_snapshot_info(folder).weights_sha256}
    files = {items.name: items.sha256}
    job = Job(ClozeResult, (tag,), (), options, (), runs=runs, files=files)
    return kept_or_measured(workspace, job, measure, plot)


def _mlm_head(workspace: Workspace, tag: str) -> tuple[MlmHead, str, str]:
    """The MLM head of the pretrained encoder, what it is called, and what is to be known of it."""
    checkpoint = pretrained(workspace)
    name = Path(checkpoint.name_or_path).name
    head = load_mlm_head(checkpoint.folder, checkpoint.name_or_path)
    snapshot = SnapshotTag(tag)
    if snapshot.is_untrained:
        note = f"{tag} has random weights, which the MLM head of {name} was never trained with."
    elif snapshot.fraction == 0:
        note = f"The MLM head is the one that {name} was pretrained with."
    else:
        note = (
            f"{tag} was fine-tuned without an MLM head. The states are read by that of {name}, the "
            "encoder it began as: what it reads less well may be there still, in other coordinates."
        )
    return head, f"MLM head of {name}", note
