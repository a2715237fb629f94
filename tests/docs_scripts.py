"""The scripts that write pages of docs/, which are no part of the package, as modules."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


def docs_script(name: str) -> ModuleType:
    """The script ``docs/<name>.py``, imported without being run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)  # where a script finds others that it imports
        return importlib.import_module(name)
