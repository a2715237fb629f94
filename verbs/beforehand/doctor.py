"""Whether this machine is fit for bertvision, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from bertvision.errors import WorkspaceError
from bertvision.pipelines.text import fill, format_table
from bertvision.verbs.arguments.checks import find_workspace
from bertvision.verbs.arguments.reading import StrPath
from bertvision.verbs.rows import ShownRecord
from bertvision.verbs.tables import Values


class Examined(BaseModel):
    """One thing that the doctor looked at (see `pipelines.machine.finding.Finding`)."""

    model_config = ConfigDict(frozen=True)

    name: str
    verdict: str
    found: str
    advice: str


class Examination(ShownRecord):
    """What the doctor found."""

    rows_in: ClassVar[str] = "findings"
    usable: bool
    """False where something makes bertvision unusable here."""
    findings: list[Examined]

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        rows = [[f["name"], f["verdict"], f["found"]] for f in values["findings"]]
        advice = [f"{f['name']}: {f['advice']}" for f in values["findings"] if f["advice"]]
        told = "\n".join(map(fill, advice)) or "Nothing needs to be changed."
        return f"{format_table(['', '', 'found'], rows)}\n\n{told}"


def doctor(*, workspace: StrPath | None = None, store: StrPath | None = None) -> Examination:
    """Look at the machine: versions, threads, arithmetic, GPU, disk, memory pages, locale.

    A product of matrices and a file of 48 MiB, which is removed, are measured; both depend on what
    else the machine does just now.

    Examples:
        >>> import bertvision
        >>> found = bertvision.doctor()
        >>> found.usable, [finding.name for finding in found.findings][:3]
        (True, ['python', 'libraries', 'threads'])

    Args:
        workspace: folder of the experiment, on whose disk the file is written; by default the one
            you stand in, or else the current folder.
        store: activation store, whose disk is looked at in its place, where it is a folder.

    Raises:
        WorkspaceError: ``workspace`` is named, and is none.
        InputError: ``store`` is a URL of no known file system.
    """
    folder = _folder(workspace, store)
    from bertvision.pipelines.machine.disk import examine_disk
    from bertvision.pipelines.machine.libraries import examine_libraries, examine_text

    found = examine_libraries()
    if all(finding.verdict != "error" for finding in found):  # or torch may not be there
        from bertvision.pipelines.machine import processor

        found += [
            processor.examine_threads(),
            processor.examine_bfloat16(),
            processor.examine_gpu(),
            processor.examine_pages(),
        ]
    found += [*examine_disk(folder), examine_text()]
    return Examination(
        usable=all(finding.verdict != "error" for finding in found),
        findings=[Examined(**finding._asdict()) for finding in found],
    )


def _folder(workspace: StrPath | None, store: StrPath | None) -> Path:
    """Where activations are, or would be."""
    try:
        space = find_workspace(workspace, store)
    except WorkspaceError:
        if workspace is not None:
            raise
        return (
            Path.cwd()
            if store is None or "://" in str(store)
            else Path(store).expanduser().resolve()
        )
    activations = space.activations
    return activations if isinstance(activations, Path) else space.root
