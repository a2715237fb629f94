"""Fine-tuning by several processes of this machine, each with a device of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bertvision.pipelines.finetuning.distilling import open_student
from bertvision.pipelines.training.launch import check_devices, launch
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.workspace.job_options import FinetuneOptions


def finetune_on(
    devices: int, root: Path | None, options: FinetuneOptions, *, resume: bool = False
) -> dict[str, Any]:
    """Make every snapshot of a workspace as `finetune.finetune` does, with several processes.

    They take each step together: its batches are shared out, and gradients are summed.

    Args:
        devices: how many processes, at least 2; where there are GPUs, no more than these.
        root: see `finetune.finetune`.
        options: likewise.
        resume: likewise.

    Returns:
        What the workspace holds, with ``seconds`` and ``steps`` of this call.

    Raises:
        InputError: there are not so many devices, or a variant cannot be shared; else as of
            `finetune.finetune`.
        WorkspaceError: see `finetune.finetune`.
        StoppedError: likewise.
        RankLostError: a process failed; names it.
    """
    check_devices(devices)
    for variant in load_variants(options.variant or ()):  # before a workspace is made
        variant.check_shared(devices)
    workspace = open_student(root, options, resume=resume)
    for variant in load_variants(workspace.config.finetune.variant):
        variant.check_shared(devices)
    asked = ["finetune", "--resume", "--json", "--workspace", str(workspace.root)]
    found: dict[str, Any] = json.loads(launch(asked, devices))
    return found
