"""A page of methods alone, for those who stand in no workspace or in a folder of runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bertvision.pipelines.repeats.folder import require_seeds
from bertvision.pipelines.report.facts import facts
from bertvision.pipelines.report.page import Report, check_place, write_page
from bertvision.pipelines.report.repeats.section import (
    methods_section,
    methods_sentence,
    read_compared,
)
from bertvision.pipelines.results.rows import read_rows


def write_methods(folders: Sequence[str], out: Path) -> Report:
    """Write a report of methods with several seeds, as `bertvision spread` compares them.

    An older report at the same place is replaced.

    Args:
        folders: as of `methods.read_method`, one at least.
        out: folder of the report.

    Raises:
        WorkspaceError: a folder holds no runs, they differ in more than the seed, none of them is
            scored, or they are of another task, data or metric than those of the first.
        UnknownNameError: no run of a folder has such a system, or several are meant.
        InputError: a folder is a file, a method is named twice, or ``out`` is a file, or a folder
            that holds something else than a report.
    """
    target = out.expanduser().resolve()
    check_place(target)
    compared = read_compared(folders)
    first = require_seeds(compared.methods[0].root)[0]
    left_out: list[str] = []
    about = facts(first, read_rows(first, left_out=left_out), left_out)
    return write_page(
        target,
        name=Path(os.path.commonpath([method.root for method in compared.methods])).name
        or compared.methods[0].name,
        subject="fine-tuning with several seeds",
        heading=f"The first run: {first.root.parent.name}, seed {first.config.finetune.seed}",
        facts=about,
        headline=[methods_sentence(compared.found)],
        sections=[methods_section(compared)],
        files=compared.files,
        results=len(compared.files),
        left_out=left_out,
    )
