"""Parts of a release: workflows, the image, the lowest versions, and what is cited."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import bertvision

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def loaded(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    assert isinstance(found, dict)
    return found


def steps(workflow: Path) -> list[dict[str, Any]]:
    return [step for job in loaded(workflow)["jobs"].values() for step in job["steps"]]


def targets(text: str) -> list[str]:
    """The targets that a script has make make, in order."""
    return re.findall(r"\bmake ([\w-]+)", "\n".join(re.sub("#.*", "", x) for x in text.split("\n")))


def test_the_workflow_makes_what_the_check_of_a_commit_makes() -> None:
    runs = "\n".join(step.get("run", "") for step in steps(ROOT / ".github/workflows/check.yml"))
    assert targets(runs) == targets((ROOT / ".ci/run").read_text())
    assert targets(runs) == ["install-dev", "check", "test", "quickstart"]


def test_the_workflow_runs_on_the_oldest_python_that_is_supported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jobs = loaded(ROOT / ".github/workflows/check.yml")["jobs"]
    oldest = jobs["check"]["strategy"]["matrix"]["python"][0]
    assert project["requires-python"] == f">={oldest}"


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_commits(workflow: Path) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_write_nothing_and_keeps_no_credentials(workflow: Path) -> None:
    found = loaded(workflow)
    assert found["permissions"] == {"contents": "read"}
    own = [job["permissions"] for job in found["jobs"].values() if "permissions" in job]
    assert own == ([{"id-token": "write"}] if workflow.name == "release.yml" else [])
    checkouts = [step for step in steps(workflow) if "checkout@" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    assert "secrets." not in workflow.read_text()


def test_the_citation_the_changelog_and_the_notes_are_of_this_version() -> None:
    version = bertvision.__version__
    assert loaded(ROOT / "CITATION.cff")["version"] == version
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", _text("CHANGELOG.md"), re.M)
    assert headings[:2] == ["Unreleased", version]
    assert f"\n## {version.rpartition('.')[0]}\n" in _text("docs/upgrading.md")


def _text(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.name
)
def test_a_form_asks_for_something_and_says_what(form: Path) -> None:
    found = loaded(form)
    assert {"name", "description", "body"} <= set(found)
    asked = [field for field in found["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked) > 0
    assert all(field["attributes"]["label"] for field in asked)
    assert asked[0]["validations"] == {"required": True}


def test_the_image_gets_all_that_the_package_is_built_from() -> None:
    """`.dockerignore` lets in what is named, so a new folder of the package has to be."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in lines if line.startswith("!")]
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tops = {name.split(".")[1] for name in tool["packages"] if "." in name}
    files = {path.name for path in ROOT.glob("*.py")} | {"py.typed"}
    needed = tops | files | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}
    assert {n for n in needed if not any(fnmatch.fnmatch(n, pattern) for pattern in kept)} == set()


@pytest.mark.slow  # it downloads PyTorch
@pytest.mark.timeout(1800)
def test_the_image_runs_as_nobody_in_particular(tmp_path: Path) -> None:
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    asked = subprocess.run(["docker", "info"], capture_output=True, text=True)
    if asked.returncode:
        pytest.skip(f"docker does not run: {asked.stderr.strip()}")
    tag = "bertvision-test"
    subprocess.run(["docker", "build", "--quiet", "--tag", tag, ROOT], check=True)
    run = ["docker", "run", "--rm", "--network", "none"]
    shown = subprocess.run([*run, tag, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["bertvision", bertvision.__version__]
    user = subprocess.run([*run, "--entrypoint", "id", tag, "-u"], capture_output=True, text=True)
    assert user.stdout.strip() == "1000"
    smoke = ["--volume", f"{ROOT / '.ci/smoke.py'}:/smoke.py:ro", "--user", "4321:4321"]
    tried = subprocess.run(
        [*run, *smoke, "--entrypoint", "python", tag, "/smoke.py"], capture_output=True, text=True
    )
    assert "smoke test passed" in tried.stdout, tried.stderr
