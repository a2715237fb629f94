"""Run it on the splits of a workspace."""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError
from bertvision.pipelines.analysis.attending.looks import attention as attention_of_maps
from bertvision.pipelines.analysis.attending.looks_result import AttentionResult
from bertvision.pipelines.analysis.attending.maps import (
    attention_maps,
    load_eager,
    sampled_windows,
)
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.records import read_snapshot_info
from bertvision.pipelines.workspace.snapshots import load_snapshot_tokenizer
from bertvision.pipelines.workspace.workspace import Workspace


def run_attention(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    task: str | None = None,
    windows: int | None = 200,
    precision: str = "auto",
    seed: int = 0,
    plot: Path | None = None,
) -> AttentionResult:
    """Measure what each attention head of a snapshot looks at, on sampled windows.

    Args:
        workspace: with the snapshot; ``0e`` and ``untrained`` are made where they are missing.
        tag: the snapshot.
        split: of the data.
        task: an added data set; None is the workspace's own data.
        windows: of a seeded sample; None takes all.
        precision: arithmetic of the forward pass: auto, 32 or bf16.
        seed: of the sample.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        UnknownNameError: there is no such snapshot, data set or split.
        InputError: ``plot`` does not end in ``.svg``, or the family gives no attention.
        WorkspaceError: the snapshot is damaged, or the data changed.
    """
    folder, arithmetic = ensure_snapshot(workspace, tag), resolve_precision(precision)
    data = workspace.dataset(task)
    data.check([split])

    def measure() -> AttentionResult:
        tokenizer = load_snapshot_tokenizer(folder)
        every = data.windows(split, tokenizer)
        if every.parts is not None:
            raise InputError(
                f"the windows of {data.name} hold several documents each, which do not attend to "
                "each other: add the documents without packing, in another --workspace"
            )
        rows = sampled_windows(len(every), windows, seed)
        where = f"{tag}/{split}" if data.name is None else f"{tag}/{data.name}-{split}"
        return attention_of_maps(
            attention_maps(load_eager(folder), every, rows, precision=arithmetic),
            sep=tokenizer.sep_token_id,
            name=where,
            n_available=len(every),
            seed=seed,
        )

    options = {
        "task": Given(data.name, None, named=True),
        "windows": Given(windows, 200),
        "precision": Given(arithmetic, arithmetic),
        "seed": Given(seed, 0),
    }
    runs = {str(tag): read_snapshot_info(folder).weights_sha256}
    job = Job(AttentionResult, (tag,), (split,), options, (), runs)
    return kept_or_measured(workspace, job, measure, plot)
