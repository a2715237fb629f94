"""Where a checkpoint is said to be, and whether it can be there; nothing heavy is imported."""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError


def parted_revision(source: str) -> tuple[str, str | None]:
    """Part the name of a checkpoint: a folder, or a name on the hub, perhaps ``NAME@REVISION``.

    Returns:
        Folder or name on the hub, and the revision; None of a folder, and where none is given.
    """
    if Path(source).expanduser().is_dir():
        return source, None
    name, _, revision = source.partition("@")
    return name, revision or None


def check_path(name: str) -> None:
    """Refuse a path without a checkpoint; what may be a name of the hub is not looked for.

    Raises:
        InputError: there is no such folder, or no configuration in it.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        require_config(folder.resolve(), name)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"there is no folder {name}")


def require_config(folder: Path, name: str) -> Path:
    """The configuration file of a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        name: Its name in messages.

    Raises:
        InputError: there is none.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{name} is no checkpoint: {path} does not exist")
    return path
