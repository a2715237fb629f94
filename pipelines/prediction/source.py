"""The sources of predictors: the snapshot and the heads that a name means.

Nothing heavy is imported, so that a wrong name is refused at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bertvision.errors import InputError, UnknownNameError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.results.results import Result, read_results
from bertvision.pipelines.results.systems import (
    BERT,
    Combine,
    SystemName,
    find_system,
    is_own_class,
    label,
)
from bertvision.pipelines.workspace.heads import find_head, trained_heads
from bertvision.pipelines.workspace.heads import trained_on as only_trained_on
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.workspace import Workspace

FILE = "predictor.json"
"""Record in the folder of a saved predictor."""
_CLASS = re.compile(r"(?:(?<=max-)|(?<=mean-)|(?<=\+)|^)[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""The dotted path of a head's class in the name of a system: behind the colon is no digit."""


class Source(NamedTuple):
    """The parts of a predictor, in a workspace."""

    name: str
    workspace: Workspace
    checkpoint: str
    """Snapshot of the encoder."""
    members: tuple[str, ...]
    """`BERT`, and heads with the snapshot that they were trained on: ``learned-pooling:0.3e``."""
    combine: Combine | None = None
    result: Result | None = None
    """Its scores on dev, where there are any; they have the threshold of no answer."""
    classes: tuple[str, ...] = ()
    """Dotted paths of heads' classes that the name has, which may be imported."""

    @property
    def heads(self) -> dict[str, Path]:
        """Folders of its heads, by their names among the members."""
        named = (member.rpartition(":") for member in self.members if member != BERT)
        return {f"{run}:{on}": find_head(self.workspace, on, run) for run, _, on in named}


def find_source(
    text: str,
    workspace: str | Path | Workspace | None,
    *,
    trained_on: str | None = None,
    checkpoint: str | None = None,
) -> Source | str:
    """Find the system of a workspace that a name means, or the place of a saved predictor.

    Args:
        text: As in `Predictor.load`.
        workspace: The workspace, or its folder; None is the one that one stands in.
        trained_on: Snapshot that a head was trained on, as if it stood in ``text``.
        checkpoint: Snapshot of the encoder, likewise.

    Raises:
        UnknownNameError: There is no such head, snapshot or ensemble, or more than one.
        InputError: A folder holds nothing that answers.
    """
    folder = Path(text).expanduser()
    if (folder / FILE).is_file() or ("/" in text and not folder.exists()):
        return text
    if folder.is_dir() and ("/" in text or (folder / "config.json").is_file()):
        folder = folder.resolve()
        if len(folder.parents) < 3:
            raise InputError(f"{folder} holds nothing that answers")
        if (folder / "snapshot.json").is_file():
            workspace, text = folder.parents[1], f"{BERT}:{folder.name}"
        elif folder.parents[1].name == "heads" and (folder / "config.json").is_file():
            workspace, text = folder.parents[2], f"{folder.name}:{folder.parent.name}"
        else:
            raise InputError(
                f"{folder} is no snapshot, no trained head in a workspace and no folder of "
                "Predictor.save_pretrained"
            )
    space = workspace if isinstance(workspace, Workspace) else Workspace.find(workspace)
    classes = tuple(filter(is_own_class, _CLASS.findall(text)))
    for own in classes:
        text = text.replace(own, Run(own).name)
    asked = SystemName.parse(text)
    if asked.trained_on is not None and (trained_on or checkpoint):
        raise InputError(f"{text} names its snapshots: leave --trained-on and --checkpoint out")
    asked = asked._replace(
        trained_on=asked.trained_on or trained_on, checkpoint=asked.checkpoint or checkpoint
    )
    results = read_results(space, "dev", left_out=[])
    if asked.name.startswith(("max-", "mean-")) and "+" in asked.name:
        ensemble = find_system(
            results, asked.name, trained_on=asked.trained_on, checkpoint=asked.checkpoint
        )
        members = tuple(m if m == BERT else f"{m}:{ensemble.trained_on}" for m in ensemble.members)
        combine: Combine = "max" if asked.name.startswith("max-") else "mean"
        space.require_snapshot(ensemble.checkpoint)
        parts = label(ensemble), space, ensemble.checkpoint, members, combine, ensemble
        return Source(*parts, classes)
    if asked.name == BERT:
        tuned = [tag for tag in space.snapshots() if not tag.is_named]
        on = asked.checkpoint or _only(BERT, tuned)
        space.require_output(on)
        member = run = BERT
    else:
        run = Run.parse(asked.name).name
        tags = [tag for tag, name in trained_heads(space) if name == run]
        if not tags:
            only_trained_on(space, [run])  # which says what there is
        on = asked.trained_on or _only(asked.name, tags)
        find_head(space, on, run)
        member = f"{run}:{on}"
    tag = asked.checkpoint or on
    space.require_snapshot(tag)
    scored = (r for r in results if (r.run, r.trained_on, r.checkpoint) == (run, on, tag))
    name = f"{run}:{on}" if tag == on else f"{run}:{on}:{tag}"
    return Source(name, space, tag, (member,), None, next(scored, None), classes)


def _only(name: str, tags: Sequence[SnapshotTag]) -> str:
    """The one snapshot that can be meant.

    Raises:
        UnknownNameError: There is none, or more than one.
    """
    if len(tags) != 1:
        names = ", ".join(f"{name}:{tag}" for tag in tags) or "none"
        raise UnknownNameError(f"which {name} is meant? There are {names}: write one of these")
    return str(tags[0])
