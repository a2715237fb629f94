"""The archives of the fixtures."""

from __future__ import annotations

import tarfile
from pathlib import Path


def opened(path: Path) -> tarfile.TarFile:
    """An archive whose members stay in the folder that they are extracted to.

    Python before 3.11.4 knows no filters, and takes them as they are: the archives are our own.
    """
    archive = tarfile.open(path)  # noqa: SIM115
    archive.extraction_filter = getattr(tarfile, "data_filter", None)
    return archive
