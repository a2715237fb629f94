"""Python and the libraries that bertvision stands on, against the versions that it declares."""

from __future__ import annotations

import locale
import platform
import sys
from collections.abc import Callable, Iterator
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from bertvision.pipelines.machine.finding import Finding

_MAIN = ("torch", "transformers", "pytorch-lightning", "zarr", "datasets", "dask", "numpy")
"""Libraries whose versions are always told."""


def examine_libraries(
    package: str = "bertvision", version_of: Callable[[str], str] = metadata.version
) -> list[Finding]:
    """Versions of Python and of all that a package requires.

    Args:
        package: whose declared requirements count.
        version_of: the installed version of a distribution; PackageNotFoundError where there is
            none.

    Returns:
        One finding on Python, one on the libraries.
    """
    python = f"{platform.python_version()} ({platform.machine()}, {platform.system()})"
    try:
        declared = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        advice = "Install it with pip, or what it requires is not known here."
        return [
            Finding("python", "ok", python),
            Finding("libraries", "warning", f"{package} is not installed, but run", advice),
        ]
    due = SpecifierSet(declared["Requires-Python"] or "")
    fits = platform.python_version() in due
    return [
        Finding("python", "ok", python)
        if fits
        else Finding("python", "error", python, f"Install Python {due}."),
        _libraries(metadata.requires(package) or [], version_of),
    ]


def _libraries(required: list[str], version_of: Callable[[str], str]) -> Finding:
    held: dict[str, str] = {}
    missing: list[str] = []
    outside: list[str] = []
    for requirement in _needed(required):
        try:
            version = held[requirement.name] = version_of(requirement.name)
        except metadata.PackageNotFoundError:
            missing.append(str(requirement))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            outside.append(f"{requirement.name} {version} (needed: {requirement.specifier})")
    found = ", ".join(f"{name} {held[name]}" for name in _MAIN if name in held)
    if missing:
        install = f"Install what is missing: pip install {' '.join(map(repr, missing))}."
        return Finding("libraries", "error", f"{found}; without {', '.join(missing)}", install)
    if outside:
        advice = f"Install versions that are in the declared ranges: {', '.join(outside)}."
        return Finding("libraries", "warning", found, advice)
    return Finding("libraries", "ok", f"{found}; all {len(held)} are in their ranges")


def _needed(required: list[str]) -> Iterator[Requirement]:
    """What is required without any extra."""
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def examine_text() -> Finding:
    """Whether names of files and what is printed are UTF-8."""
    encodings = {
        "files": sys.getfilesystemencoding(),
        "texts": locale.getpreferredencoding(False),
        "output": getattr(sys.stdout, "encoding", None) or "unknown",
    }
    found = ", ".join(f"{what} {encoding}" for what, encoding in encodings.items())
    if all(name.lower().replace("-", "") == "utf8" for name in encodings.values()):
        return Finding("locale", "ok", found)
    return Finding("locale", "warning", found, "Set PYTHONUTF8=1, or a locale such as C.UTF-8.")
