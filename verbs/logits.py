"""What snapshots say of the workspace's own windows, kept for students."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bertvision.pipelines.text import format_table, size
from bertvision.pipelines.workspace.heads import only_tag
from bertvision.pipelines.workspace.selection import check_split
from bertvision.verbs.arguments.checks import check_learns, find_workspace
from bertvision.verbs.arguments.reading import Names, StrPath, Tag, parse_names, parse_tag
from bertvision.verbs.rows import Rows
from bertvision.verbs.tables import Values

if TYPE_CHECKING:
    from bertvision.pipelines.finetuning.kept_logits import KeptLogits


def logits(
    checkpoint: Tag | None = None,
    *,
    split: Names = "train",
    workspace: StrPath | None = None,
) -> Rows[KeptLogits]:
    """Keep the logits of a snapshot on the windows it was trained on, for students to learn from.

    What is kept already is not computed again; a killed run is finished by the same call.

    Examples:
        >>> import bertvision
        >>> (kept,) = bertvision.logits("1e")
        >>> kept.file, kept.windows
        ('bert/1e/train.safetensors', 72)

    Args:
        checkpoint: the snapshot; by default the only one there is.
        split: of the workspace's own data: ``train``, ``tune`` or ``dev``.
        workspace: folder of the experiment; by default the one you stand in.

    Raises:
        UnknownNameError: there is no such snapshot or split.
        InputError: the workspace has no task, so that its encoder has no output layer.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    splits = parse_names(split)
    tag = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    check_learns(space)
    tag = tag or only_tag(space.snapshots(), "snapshots")
    space.require_snapshot(tag)
    for name in splits:
        check_split(name, space.config.data, None)
    from bertvision.pipelines.finetuning.kept_logits import keep_logits

    return Rows(keep_logits(space, tag, splits), logits_table)


def logits_table(kept: Sequence[Values]) -> str:
    """What is kept of each split, and what it took."""
    return format_table(
        ["snapshot", "split", "windows", "size", "seconds", "file"],
        [
            [
                *(k["tag"], k["split"], f"{k['windows']:,}", size(k["bytes"])),
                *(f"{k['seconds']:.1f}", k["file"]),
            ]
            for k in kept
        ],
    )
