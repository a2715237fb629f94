"""The installed files are the package, whole and alone, and importing it costs nothing."""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from stores import Made

ROOT = Path(__file__).parents[1]
ROOMS = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
HEAVY = {
    *("torch", "zarr", "fsspec", "dask", "transformers", "datasets", "pytorch_lightning"),
    *("numpy", "xarray", "pyarrow", "matplotlib", "pydantic"),
}


def ignored(folder: str, names: list[str]) -> set[str]:
    """Names in a folder that are no sources: those that git ignores, and git itself."""
    lines = (ROOT / ".gitignore").read_text().split()
    patterns = [line.strip("/") for line in lines if not line.startswith("/")]
    if Path(folder) == ROOT:
        patterns += [line.strip("/") for line in lines if line.startswith("/")] + [".git"]
    return {name for name in names if any(fnmatch.fnmatch(name, p) for p in patterns)}


def sources(tree: Path) -> set[str]:
    """The files of the package below ``tree``, as they are named when it is installed."""
    rooms = (path for room in ROOMS for path in (tree / room).rglob("*") if path.is_file())
    files = [*tree.glob("*.py"), tree / "py.typed", *rooms]
    return {f"bertvision/{path.relative_to(tree).as_posix()}" for path in files}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources: a build in place would leave files behind, and pick up older ones."""
    import shutil

    copy = tmp_path_factory.mktemp("sources") / "bertvision"
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    out = tree.with_name("wheel")
    expected = sources(tree)
    command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*command, "-w", out], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert expected <= sources(tree)  # the build took nothing away
    (found,) = out.glob("bertvision-*.whl")
    return found


def names_of(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path, tree: Path) -> None:
    names = names_of(wheel)
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    assert names - info == sources(tree)


def test_wheel_metadata_carries_license_and_command(wheel: Path) -> None:
    info = {name.split("/", 1)[1] for name in names_of(wheel) if ".dist-info/" in name}
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"} <= info


def test_wheel_runs_where_it_is_installed(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    # PYTHONPATH comes before the site-packages, which lend the dependencies
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    code = "import bertvision, sys; print(bertvision.__file__, file=sys.stderr); "
    code += "from bertvision.cli import app; app(['--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr.strip() == str(tmp_path / "bertvision" / "__init__.py")
    assert done.returncode == 0
    assert "finetune" in done.stdout


def test_xarray_finds_the_engine_of_an_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """By the entry point alone: nothing of bertvision is imported by the user."""
    Made([4, 6]).write(tmp_path / "store")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    code = "import xarray; print(xarray.open_datatree('store', engine='bertvision').leaves[0].path)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "/1e/train", done.stderr


def test_every_sub_package_is_listed_for_the_build() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {p.parent for room in ROOMS for p in (ROOT / room).rglob("*.py")}
    dotted = {".".join(("bertvision", *folder.relative_to(ROOT).parts)) for folder in folders}
    assert set(config["tool"]["setuptools"]["packages"]) == dotted | {"bertvision"}


def test_constraints_pin_every_dependency_to_one_public_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", pin) for pin in pins)
    pinned = {normalised(pin.split("==")[0]) for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    needed = [*project["dependencies"], *(name for extra in extras for name in extra)]
    names = {normalised(re.split(r"[\[<>=!~ ]", need)[0]) for need in needed}
    assert names - {"bertvision"} <= pinned


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


COMMANDS = {
    "import bertvision": [sys.executable, "-c", "import bertvision"],
    "bertvision --help": [
        str(Path(sysconfig.get_path("scripts")) / "bertvision"),
        "--help",
    ],
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_start_takes_less_than_half_a_second(command: list[str]) -> None:
    seconds = []
    while not seconds or (min(seconds) >= 0.5 and len(seconds) < 5):
        before = os.times()  # of the processor: other work goes on beside the tests
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        used = after.children_user - before.children_user
        seconds.append(used + after.children_system - before.children_system)
    assert min(seconds) < 0.5, seconds


PARTS = {
    "import bertvision": "",
    "bertvision --help": "from bertvision.cli import app; app(['--help'], standalone_mode=False)",
    "bertvision --version": (
        "from bertvision.cli import app; app(['--version'], standalone_mode=False)"
    ),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_start_imports_no_heavy_library(part: str, tmp_path: Path) -> None:
    report = tmp_path / "modules.json"
    code = f"import bertvision, json, sys; {part}"
    code += f"\njson.dump(list(sys.modules), open({str(report)!r}, 'w'))"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    imported = {name.partition(".")[0] for name in json.loads(report.read_text())}
    assert "bertvision" in imported
    assert imported & HEAVY == set()


PUBLIC = """
    __version__
    quickstart status score report adopt finetune logits repeat spread extract
    import_states export_states generate generated_texts audit shuffle_tokens
    train evaluate heads predict sweep dry_run plan doctor
    ensemble compare latency quantise push pull error_analysis results predictions table
    probe rank similarity view
    Row Rows ensure_features register_speculators_backend load_head Head Predictor
    Workspace PooledSplit ActivationStore ActivationWriter ActivationSplit ActivationBatch
    ActivationLoader TokenMixture TokenStream TokenTransform TokenBatch TopLogits
    Sampler SequentialSampler ShuffleSampler ShardPlan
    ActivationDataModule HiddenStates BertvisionError BertvisionWarning
    DataOptions FinetuneOptions ExtractOptions TrainOptions GenerateOptions ProbeOptions RankOptions
    SimilarityOptions
    build_head SpanHead ClassificationHead ClassOutput SpanOutput class_loss span_loss
    distillation_loss
    Variant
    Task TaskConfig Sentence TaskData Line find_file read_text splits_in text_lines
    SentenceTask RawSentence SentenceRows require_fields
""".split()  # noqa: SIM905


def test_public_names_are_these() -> None:
    import bertvision
    from bertvision.pipelines import analysis

    public = [*PUBLIC, *analysis.names()]
    assert bertvision.__all__ == public == list(dict.fromkeys(public))
    assert [name for name in public if getattr(bertvision, name, None) is None] == []
    assert dir(bertvision) == sorted(public)
    with pytest.raises(AttributeError, match="'bertvision' has no attribute 'activation'"):
        getattr(bertvision, "activation")  # noqa: B009


def test_type_checkers_see_the_public_names() -> None:
    import bertvision

    tree = ast.parse((ROOT / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"bertvision.{bertvision._home(name)}.{name}" for name in seen}
    assert seen == homes
    assert set(bertvision._HOME) <= set(seen)
