"""What a workspace holds and what can be run next."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bertvision.featurestore.schema import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.workspace import Workspace


def status(workspace: Workspace) -> dict[str, Any]:
    """What a workspace holds and what can be run next, JSON-able.

    Returns:
        ``workspace``, ``model``, ``task``, ``questions`` by split, ``snapshots`` (tag, whether it
        is made, BERT's EM and F1 on dev), by tag the splits ``stored`` whole and those whose
        extraction is ``unfinished``, ``heads`` and ``next``, a list of commands.
    """
    config = workspace.config
    made = workspace.snapshots()
    wanted = sorted({*config.finetune.tags, *made})
    stored = workspace.stored()
    splits = [workspace.split(tag, name) for tag, names in stored.items() for name in names]
    heads = [{"trained_on": str(tag), "name": name} for tag, name in workspace.heads()]
    return {
        "workspace": str(workspace.root),
        "model": config.model.name_or_path,
        "task": config.task.name,
        "questions": {split: data.questions for split, data in config.data.items()},
        "snapshots": [
            {"tag": str(tag), "made": tag in made, "bert": _bert_scores(workspace, tag)}
            for tag in wanted
        ],
        "stored": _by_tag(split for split in splits if split.is_complete),
        "unfinished": _by_tag(split for split in splits if not split.is_complete),
        "heads": heads,
        "next": [
            *_next_for_bert(workspace, wanted, made, splits),
            *_next_for_heads(workspace, splits),
        ],
    }


def _by_tag(splits: Iterable[ActivationSplit]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for split in splits:
        found.setdefault(str(split.tag), []).append(split.split)
    return found


def _bert_scores(workspace: Workspace, tag: SnapshotTag) -> dict[str, float] | None:
    path = workspace.bert_dir(tag) / "metrics.json"
    if not path.is_file():
        return None
    metrics = json.loads(path.read_text(encoding="utf-8"))["rules"]["n-best"]["metrics"]
    return {"exact": metrics["exact"], "f1": metrics["f1"]}


def _next_for_bert(
    workspace: Workspace,
    wanted: list[SnapshotTag],
    made: list[SnapshotTag],
    splits: list[ActivationSplit],
) -> list[str]:
    """Commands that need BERT: snapshots to make and score, splits to extract or to finish."""
    commands = []
    if any(tag not in made or _bert_scores(workspace, tag) is None for tag in wanted):
        commands.append("bertvision finetune --resume")
    for tag in made:
        begun = {split.split: split for split in splits if split.tag == tag}
        commands += [_finish(split) for split in begun.values() if not split.is_complete]
        missing = [split for split in workspace.splits() if split not in begun]
        if missing:
            commands.append(f"bertvision extract --checkpoint {tag} --split {','.join(missing)}")
    return commands


def _finish(split: ActivationSplit) -> str:
    """The command that ends an extraction: with the options it was begun with."""
    record = split.record
    return (
        f"bertvision extract --checkpoint {split.tag} --split {split.split} "
        f"--encoding {record.encoding} --layers {','.join(map(str, record.layers))} "
        f"--precision {record.provenance.get('precision', 'auto')}"
        + (f" --compression {record.compression}" if record.compression != "none" else "")
        + (" --nonfinite record" if record.provenance.get("nonfinite") == "record" else "")
    )


def _next_for_heads(workspace: Workspace, splits: list[ActivationSplit]) -> list[str]:
    """Commands that need stored activations alone: heads to train, and to score on dev."""
    whole = {split.name for split in splits if split.is_complete}
    trained = workspace.heads()
    commands = [
        f"bertvision train adapter-386-shared --checkpoint {split.tag}"
        for split in splits
        if split.split == "train" and split.is_complete and split.tag not in dict(trained)
    ]
    for tag, name in trained:
        scored = workspace.head_dir(tag, name) / "eval" / tag / "metrics.json"
        if f"{tag}/dev" in whole and not scored.is_file():
            commands.append(f"bertvision evaluate {name} --trained-on {tag} --checkpoint {tag}")
    return commands
