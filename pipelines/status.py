"""What a workspace holds and what can be run next."""

from __future__ import annotations

import json
from typing import Any

from bertvision.featurestore.schema import SnapshotTag
from bertvision.pipelines.workspace import Workspace


def status(workspace: Workspace) -> dict[str, Any]:
    """What a workspace holds and what can be run next, JSON-able.

    Returns:
        ``workspace``, ``model``, ``task``, ``questions`` by split, ``snapshots`` (tag, whether it
        is made, BERT's EM and F1 on dev), ``stored`` splits by tag, ``heads`` and ``next``, a list
        of commands.
    """
    config = workspace.config
    made = workspace.snapshots()
    wanted = sorted({*config.finetune.tags, *made})
    stored = workspace.stored()
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
        "stored": stored,
        "heads": heads,
        "next": _next_commands(workspace, wanted, made, stored, heads),
    }


def _bert_scores(workspace: Workspace, tag: SnapshotTag) -> dict[str, float] | None:
    path = workspace.bert_dir(tag) / "metrics.json"
    if not path.is_file():
        return None
    metrics = json.loads(path.read_text(encoding="utf-8"))["rules"]["n-best"]["metrics"]
    return {"exact": metrics["exact"], "f1": metrics["f1"]}


def _next_commands(
    workspace: Workspace,
    wanted: list[SnapshotTag],
    made: list[SnapshotTag],
    stored: dict[str, list[str]],
    heads: list[dict[str, Any]],
) -> list[str]:
    commands = []
    if any(tag not in made or _bert_scores(workspace, tag) is None for tag in wanted):
        commands.append("bertvision finetune --resume")
    for tag in made:
        missing = [split for split in workspace.splits() if split not in stored.get(tag, [])]
        if missing:
            commands.append(f"bertvision extract --checkpoint {tag} --split {','.join(missing)}")
    trained = {head["trained_on"] for head in heads}
    for at, splits in stored.items():
        if "train" in splits and at not in trained:
            commands.append(f"bertvision train adapter-386-shared --checkpoint {at}")
    for head in heads:
        name, at = head["name"], head["trained_on"]
        if "dev" in stored.get(at, []):
            commands.append(f"bertvision evaluate {name} --trained-on {at} --checkpoint {at}")
    return commands
