"""Executes the notebooks of docs/notebooks/ in a workspace, and keeps their outputs in them.

Usage: python docs/execute_notebooks.py WORKSPACE [NAME...]

The workspace is one that `make quickstart` left. What is kept of outputs are results, prints and
figures; progress and messages on stderr are not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent / "notebooks"


def main(workspace: str, *names: str) -> None:
    """Execute those that are named, or all, and write them where they are."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or path.stem in names:
            nbformat.write(executed(path, Path(workspace)), path)
            print(f"{path.stem}: {path.stat().st_size / 1000:.0f} kB")


def executed(path: Path, workspace: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs that it has in a workspace; what is at ``path`` stays.

    Raises:
        CellExecutionError: a cell raised an error.
    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(workspace)}}
    NotebookClient(notebook, timeout=600, record_timing=False, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}  # its version is the machine's
    return notebook


if __name__ == "__main__":
    main(*sys.argv[1:])
