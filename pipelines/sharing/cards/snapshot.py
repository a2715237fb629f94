"""The card of a snapshot."""

from __future__ import annotations

from bertvision.pipelines.sharing.cards.markdown import (
    LIBRARY,
    code,
    encoder_name,
    facts,
    on_hub,
    page,
)
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.workspace.records import SnapshotInfo


def snapshot_card(repository: str, info: SnapshotInfo, licence: str | None) -> bytes:
    """The card of a snapshot.

    Args:
        repository: ``owner/name`` where it is pushed.
        info: what it was made from.
        licence: that the weights are given under; None says nothing.
    """
    from huggingface_hub import ModelCardData

    base, tuning = info.pretrained, info.finetune
    start = {"model": base.name_or_path, "model_revision": base.revision}
    seconds = None if info.seconds is None else f"{info.seconds:,.0f} s of fine-tuning"
    about = {
        "task": info.task.name,
        "pretrained encoder": encoder_name(start),
        "snapshot": f"`{info.tag}`, after {info.step:,} steps of which an epoch has "
        f"{info.steps_per_epoch:,}",
        "fine-tuning": f"batches of {tuning.batch_size}, learning rate {tuning.lr:g}, precision "
        f"{tuning.precision}, seed {tuning.seed}",
        "time": seconds,
        "longest window": info.task.max_length,
        "sha256 of the weights": f"`{info.weights_sha256}`",
        "sha256 of the pretrained weights": f"`{base.weights_sha256}`",
        "written with": ", ".join(f"{name} {v}" for name, v in info.versions.items()),
        "made": info.created,
        "licence": licence,
    } | {f"sha256 of {split}": f"`{data.sha256}`" for split, data in info.data.items()}
    metadata = ModelCardData(
        license=licence,
        library_name="transformers",
        tags=[LIBRARY],
        base_model=on_hub(base.name_or_path),
    ).to_yaml()
    kind = "AutoModelForQuestionAnswering" if find_task(info.task.name).kind == "span" else None
    load = f"""
from transformers import {kind or "AutoModel"}, AutoTokenizer

model = {kind or "AutoModel"}.from_pretrained("{repository}")
tokenizer = AutoTokenizer.from_pretrained("{repository}")
"""
    return page(
        metadata,
        f"{info.task.name} {info.tag}",
        [
            "An encoder at a point of its fine-tuning, kept by "
            "[bertvision](https://pypi.org/project/bertvision).",
            facts(about),
            "## Use",
            code(load, "python"),
            code(f"bertvision pull {repository} {repository.rpartition('/')[2]}", "bash"),
        ],
    )
