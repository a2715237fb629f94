"""The folder of a method: the same fine-tuning with several seeds, each a workspace of its own.

```
mrpc/seed-0/    a workspace, whose settings differ from the others' in the seed alone
mrpc/seed-1/    …
```
"""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.format.records import first_difference
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.workspace import FILE, Workspace

_PREFIX = "seed-"


def seed_folder(root: Path, seed: int) -> Path:
    """Where the workspace of a seed is.

    Args:
        root: folder of the method.
        seed: Seed of the fine-tuning.
    """
    return root / f"{_PREFIX}{seed}"


def check_no_workspace(root: Path) -> None:
    """Refuse what cannot hold the workspaces of several seeds.

    Raises:
        WorkspaceError: it is a workspace itself.
        InputError: it is a file.
    """
    if root.is_file():
        raise InputError(f"{root} is a file: name a folder that is to hold a workspace a seed")
    if (root / FILE).exists():
        raise WorkspaceError(
            f"{root} is a workspace itself, of one seed: name another folder, which holds a "
            f"workspace for each seed ({_PREFIX}0, {_PREFIX}1, …)"
        )


def holds_runs(root: Path) -> bool:
    """Whether a folder holds workspaces of several seeds, and is none itself.

    Raises:
        WorkspaceError: as of `find_seeds`.
    """
    return root.is_dir() and not (root / FILE).exists() and bool(find_seeds(root))


def find_seeds(root: Path) -> list[Workspace]:
    """The workspaces of a folder, by seed; none where nothing was made yet.

    Raises:
        WorkspaceError: it is a workspace itself, a settings file is not readable, a workspace has
            another seed than its name, or they differ in more than the seed.
        InputError: it is a file.
    """
    check_no_workspace(root)
    by_seed: dict[int, Workspace] = {}
    for path in root.glob(f"{_PREFIX}*/{FILE}"):
        text = path.parent.name.removeprefix(_PREFIX)
        if text.isascii() and text.isdigit() and seed_folder(root, int(text)) == path.parent:
            by_seed[int(text)] = Workspace.find(path.parent)
    for seed, workspace in by_seed.items():
        if (own := workspace.config.finetune.seed) != seed:
            raise WorkspaceError(
                f"{workspace.root} was made with seed {own}: rename it to {_PREFIX}{own}, or move "
                "it to another folder"
            )
    workspaces = [by_seed[seed] for seed in sorted(by_seed)]
    _check_alike(workspaces)
    return workspaces


def require_seeds(root: Path) -> list[Workspace]:
    """As `find_seeds`, of a folder that must hold some.

    Raises:
        WorkspaceError: as there, or it holds none.
        InputError: it is a file.
    """
    if seeds := find_seeds(root):
        return seeds
    raise WorkspaceError(
        f"{root} {'holds no runs' if root.is_dir() else 'does not exist'}: a folder of runs has a "
        f"workspace for each seed ({_PREFIX}0, {_PREFIX}1, …), which `bertvision repeat --seeds 5 "
        f"… -w {shlex.quote(str(root))}` makes"
    )


def _check_alike(workspaces: Sequence[Workspace]) -> None:
    """Refuse runs that differ in more than their seed: they have no common mean."""
    for other in workspaces[1:]:
        first = workspaces[0]
        if difference := first_difference(_told(first.config), _told(other.config)):
            name, there, here = difference
            raise WorkspaceError(
                f"{other.root} has {name} = {reprlib.repr(here)}, {first.root} has "
                f"{reprlib.repr(there)}: the runs of a folder may differ in the seed alone; move "
                "one of them to another folder"
            )


def _told(config: WorkspaceConfig) -> dict[str, Any]:
    """All settings but the seed, and how many items it happens to choose."""
    values = config.model_dump(mode="json", exclude={"versions", "activations"})
    del values["finetune"]["seed"]
    values["data"] = {split: {"sha256": data.sha256} for split, data in config.data.items()}
    return values
