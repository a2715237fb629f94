"""Analyses of hidden states, a file each: its arithmetic, its result and its job.

A module with a job of its own name is an analysis. That is all there is to adding one: the command
`bertvision rsa`, the function ``bertvision.rsa``, what is kept, tables, figures and the section of
the report follow from `rsa.py` (docs/adding-an-analysis.md).
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bertvision.pipelines.analysis.result import AnalysisResult


def sources() -> dict[str, Path]:
    """The files of all analyses, by name; nothing is imported."""
    files = {p.stem: p for folder in __path__ for p in Path(folder).glob("[!_]*.py")}
    return {
        name: files[name]
        for name in sorted(files)
        if f"\n@job\ndef {name}(" in files[name].read_text("utf-8")
    }


def names() -> list[str]:
    """The names of all analyses, in order; nothing is imported."""
    return list(sources())


def results() -> tuple[type[AnalysisResult], ...]:
    """The types of the results of all analyses, in the order of their names."""
    modules = {name: import_module(f"{__name__}.{name}") for name in names()}
    return tuple(
        getattr(module, inspect.signature(getattr(module, name)).return_annotation)
        for name, module in modules.items()
    )
