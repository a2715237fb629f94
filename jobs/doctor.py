"""Whether this machine is fit for bertvision, and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Unpack

from pydantic import BaseModel, ConfigDict

from bertvision.errors import WorkspaceError
from bertvision.jobs.show import ShownRecord, Values
from bertvision.pipelines.declare import Where, job
from bertvision.pipelines.reading import StrPath
from bertvision.pipelines.text import fill, format_table
from bertvision.pipelines.workspace.checks import find_workspace


class Examined(BaseModel):
    """One thing that the doctor looked at (see `pipelines.machine.Finding`)."""

    model_config = ConfigDict(frozen=True)

    name: str
    verdict: str
    found: str
    advice: str


class Examination(ShownRecord):
    """Findings of the doctor."""

    rows_in: ClassVar[str] = "findings"
    usable: bool
    """False where something makes bertvision unusable here."""
    findings: list[Examined]

    @property
    def exit_status(self) -> int:
        """Exit status of the command: 1 where bertvision cannot be used."""
        return int(not self.usable)

    def table(self, values: Values) -> str:
        """The text that the command prints."""
        rows = [[f["name"], f["verdict"], f["found"]] for f in values["findings"]]
        advice = [f"{f['name']}: {f['advice']}" for f in values["findings"] if f["advice"]]
        told = "\n".join(map(fill, advice)) or "Nothing needs to be changed."
        return f"{format_table(['', '', 'found'], rows)}\n\n{told}"


@job
def doctor(
    **where: Unpack[Where],
) -> Examination:
    """Examine this machine, and say what to change.

    It looks at versions of the libraries, threads, bfloat16 against float32, GPU, huge pages,
    locale, and the disk of the workspace, on which a file of 48 MiB is written, read and removed.
    The command exits with 1 where bertvision cannot be used.

    Examples:
        >>> import bertvision
        >>> found = bertvision.doctor()
        >>> found.usable, [finding.name for finding in found.findings][:3]
        (True, ['python', 'libraries', 'threads'])

    Raises:
        WorkspaceError: ``workspace`` is named, and is none.
        InputError: ``store`` is a URL of no known file system.
    """
    folder = _folder(**where)
    from bertvision.pipelines import machine

    findings = machine.examine_libraries()
    if all(finding.verdict != "error" for finding in findings):  # or torch may not be there
        findings += [
            machine.examine_threads(),
            machine.examine_bfloat16(),
            machine.examine_gpu(),
            machine.examine_pages(),
        ]
    findings += [*machine.examine_disk(folder), machine.examine_text()]
    return Examination(
        usable=all(finding.verdict != "error" for finding in findings),
        findings=[Examined(**finding._asdict()) for finding in findings],
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
