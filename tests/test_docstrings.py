"""Examples in the docstrings of public names run as they stand, in a small workspace."""

from __future__ import annotations

import doctest
import inspect
import shutil
from pathlib import Path

import pytest

import bertvision
from bertvision.pipelines.workspace.workspace import Workspace

NAMES = [name for name in bertvision.__all__ if not name.startswith("__")]


def examples(name: str) -> list[doctest.DocTest]:
    """The doctests of a public class, its methods and properties, or of a function."""
    thing = getattr(bertvision, name)
    globs = {"bertvision": bertvision}
    found = doctest.DocTestFinder(recurse=inspect.isclass(thing)).find(thing, name, globs=globs)
    return [test for test in found if test.examples]


@pytest.mark.parametrize("name", NAMES)
def test_examples_stand_in_a_section_that_the_site_shows_as_code(name: str) -> None:
    assert [test.name for test in examples(name) if any(e.indent < 4 for e in indented(test))] == []


def indented(test: doctest.DocTest) -> list[doctest.Example]:
    """The examples of a docstring, with their indents below its own."""
    return doctest.DocTestParser().get_examples(inspect.cleandoc(test.docstring or ""))


def run(test: doctest.DocTest) -> str:
    """Differences from the output in the docstring."""
    report: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    return "".join(report)


@pytest.mark.parametrize("name", NAMES)
def test_examples_of_public_names_run(
    name: str, workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if found := examples(name):
        # a copy, which they may change
        monkeypatch.chdir(shutil.copytree(workspace.root, tmp_path / "space"))
        assert "".join(map(run, found)) == ""


def test_the_example_of_the_package_runs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace.root)
    (test,) = doctest.DocTestFinder(recurse=False).find(bertvision, globs={})
    assert test.examples
    assert run(test) == ""


def test_no_example_is_skipped_and_the_store_has_some() -> None:
    tests = {name: examples(name) for name in NAMES}
    skipping = [
        name
        for name, found in tests.items()
        if any(doctest.SKIP in e.options for test in found for e in test.examples)
    ]
    assert skipping == []
    assert "+SKIP" not in (bertvision.__doc__ or "")
    with_examples = {name for name, found in tests.items() if found}
    assert with_examples >= {
        "ActivationStore",
        "ActivationSplit",
        "ActivationBatch",
        "ActivationLoader",
        "ActivationDataModule",
        "Sampler",
        "ShuffleSampler",
        "SequentialSampler",
    }


def test_an_example_that_is_wrong_is_found() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert "Expected:\n    3\nGot:\n    2" in run(wrong)
