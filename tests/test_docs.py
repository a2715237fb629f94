"""The documentation says what is: its commands parse, its code runs, its tables are current."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import typer
from docs_scripts import docs_script
from families import make_family
from stores import Made
from transformers import AutoModelForCausalLM
from workspaces import write_squad

import bertvision
from bertvision.cli import app
from bertvision.models.factory import HEADS, describe_heads
from bertvision.pipelines import analysis

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The shell commands of a page: from its bash blocks, and `bertvision …` in its text."""
    text = "".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [re.sub(r"^(?:[A-Z]+=\S+ )+", "", line.strip()) for line in text.splitlines()]
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines += re.findall(r"`((?:bertvision|make) [^`\n]+)`", prose)
    return [line for line in lines if re.match(r"(bertvision|make) ", line) and "…" not in line]


def parse(words: list[str]) -> None:
    """Parse a command line as the program would, without running it."""
    command: Any = typer.main.get_command(app)
    path = [words.pop(0)]
    while words and words[0] in getattr(command, "commands", {}):
        path.append(words.pop(0))
        command = command.commands[path[-1]]
    if words in ([], ["--help"], ["--version"]):
        return
    assert not hasattr(command, "commands"), f"there is no command {' '.join([*path, *words])}"
    command.make_context(" ".join(path), words)


def wrong(command: str) -> str | None:
    """The reason why a command could not be run, if there is one."""
    program, *words = shlex.split(command)
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        lacking = [word for word in words if "=" not in word and word not in targets]
        return f"{command}: no target {lacking}" if lacking else None
    try:
        parse([program, *words])
    except Exception as error:
        return f"{command}: {error}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_exist_with_their_options(page: Path) -> None:
    assert [found for command in set(commands(page)) if (found := wrong(command))] == []


def test_commands_were_found_and_wrong_ones_fail() -> None:
    assert len({command for page in PAGES for command in commands(page)}) > 100
    with pytest.raises(AssertionError):
        parse(["bertvision", "fine-tune"])
    with pytest.raises(Exception, match="No such option"):
        parse(["bertvision", "extract", "--no-such-option"])


@pytest.mark.parametrize("name", ["cli.md", "api.md", "errors.md", "bertvision.schema.json"])
def test_generated_page_is_current(name: str) -> None:
    pages = {
        page.name: (page, render)
        for page, render in docs_script("generate_reference").PAGES.items()
    }
    page, render = pages[name]
    assert page.read_text() == render(), "run `make docs`"


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    text = (ROOT / "docs/reference/api.md").read_text()
    named = re.findall(r"^::: bertvision\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(set(bertvision.__all__) - {"__version__"})


def test_the_page_of_errors_has_every_error_of_the_tree() -> None:
    def below(error: type[Exception]) -> set[type[Exception]]:
        return {error}.union(*(below(each) for each in error.__subclasses__()))

    text = (ROOT / "docs/reference/errors.md").read_text()
    named = re.findall(r"^(?:## |[ │├└]*── |)(\w+(?:Error|Warning))\b", text, re.M)
    known = below(bertvision.BertvisionError) | below(bertvision.BertvisionWarning)
    ours = {error.__name__ for error in known if error.__module__.startswith("bertvision.")}
    assert len(ours) > 10
    assert ours <= set(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_mentions_exist(page: Path) -> None:
    folders = "benchmarks|docs|featurestore|jobs|models|pipelines|tests"
    named = re.findall(rf"`((?:{folders})/[\w./*-]*)`", page.read_text())
    missing = [name for name in named if not any(ROOT.glob(name.rstrip("/")))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_import_from_the_front_door_alone(page: Path) -> None:
    imported = re.findall(r"^\s*(?:from|import) (bertvision[\w.]*)", page.read_text(), re.MULTILINE)
    shows_a_module = page.name == "adding-an-analysis.md"
    assert set(imported) <= {"bertvision"} or shows_a_module


def test_every_promise_names_tests_that_there_are() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    named = re.findall(r"`(tests/test_\w+\.py)(?:::(\w+))?`", page)
    lines = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(lines) > 20
    assert all("`tests/test_" in line for line in lines)
    tried = re.compile(r"\d[\d,]* cases?(, \d[\d,]* [a-z ]+)* \|$")
    assert all(tried.search(line) for line in lines), "run docs/generate_reliability.py"
    for path, test in named:
        assert f"def {test}" in (ROOT / path).read_text(), f"{path}::{test}"


def test_tests_that_a_page_names_exist() -> None:
    named = {
        (path, test)
        for page in PAGES
        for path, test in re.findall(r"`(tests/test_\w+\.py)::(\w+)`", page.read_text())
    }
    assert len(named) > 40
    sources = {path: (ROOT / path).read_text() for path, _ in named}
    assert [each for each in named if f"def {each[1]}(" not in sources[each[0]]] == []


def test_the_tree_names_every_folder_and_no_other() -> None:
    tree = blocks(ROOT / "docs/architecture.md", "text")[0]
    assert len(tree.splitlines()) <= 75, "it fits on a screen"
    folders: list[str] = []
    named = set()
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        named.add("".join(folders))
    rooms = {path.parent for path in ROOT.glob("*/**/*.py") if not path.parts[-2].startswith(".")}
    tracked = ("featurestore", "jobs", "models", "pipelines")
    tracked += ("benchmarks", "tests", "docs")
    held = {
        f"{room.relative_to(ROOT)}/" for room in rooms if room.relative_to(ROOT).parts[0] in tracked
    }
    assert named == held | {path.name for path in ROOT.glob("*.py")}


def test_heads_page_gives_the_parameters_of_every_head() -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \|.*?\| ([\d,]+) \| ([\d.]+) \|$",
        (ROOT / "docs" / "heads.md").read_text(),
        re.MULTILINE,
    )
    expected = [(h.name, f"{h.total:,}", f"{h.percent:.4f}") for h in describe_heads()]
    own = {name for name, _, _ in rows}
    assert rows == [row for row in expected if row[0] in own]
    assert own == set(HEADS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small int8 store, not of the shape of any encoder that the pages name."""
    folder = tmp_path_factory.mktemp("documented")
    for split in ("train", "dev"):
        lengths = [5 + i % 4 for i in range(40)]
        made = Made(lengths, layers=7, hidden=384, encoding="int8", tag="0.3e", split=split)
        positions = np.arange(40, dtype=np.int32) % 3
        labels = {"start_positions": positions, "end_positions": positions}
        rows = {"id": list(map(str, range(40))), "text": ["a text of tokens"] * 40}
        made.contents = replace(made.contents, per_example=labels, examples=pa.table(rows))
        made.write(folder / "activations")
    return folder


@pytest.fixture(scope="module")
def experiment(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a workspace that has the snapshots of the quickstart, and reviews beside it."""
    root = tmp_path_factory.mktemp("experiment") / "workspace"
    options: dict[str, Any] = {"batch_size": 8, "lr": 1e-3, "tune_fraction": 0.2}
    bertvision.finetune(
        model=str(tiny_bert),
        train=write_squad(root.with_name("train.json"), 20, 1),
        dev=write_squad(root.with_name("dev.json"), 6, 2),
        save_at="0.3,1",
        workspace=root,
        **options,
    )
    bertvision.extract("0.3e,1e", workspace=root)
    make_family("gpt2", root / "decoder", AutoModelForCausalLM)
    (root / "prompts.jsonl").write_text('{"text": "Who founded Rome?"}\n{"text": "Anna is"}\n')
    words = ("book", "city", "river", "king")
    lines = [
        f"the {word} of {year},{label}" for label, word in enumerate(words) for year in range(6)
    ]
    (root / "reviews.csv").write_text("\n".join(["text,label", *lines, ""]))
    return root


@pytest.fixture
def in_workspace(stored: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that documented code runs in."""
    monkeypatch.chdir(stored)
    monkeypatch.syspath_prepend(stored)
    return stored


PYTHON = [
    pytest.param(page, i, id=f"{page.name}-{i}")
    for page in PAGES
    if page.parent.name != "tutorials"  # test_tutorials runs these as wholes
    for i, _ in enumerate(blocks(page, "python"))
]


JOBS = {
    *(name for name, home in bertvision._HOME.items() if home.startswith("jobs.")),
    *analysis.names(),
}


@pytest.mark.parametrize(("page", "i"), PYTHON)
def test_documented_code_runs(
    page: Path,
    i: int,
    in_workspace: Path,
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    source = blocks(page, "python")[i]
    if JOBS & set(re.findall(r"\b(\w+)\(", source)):
        monkeypatch.chdir(experiment)
    if match := re.match(r"# (\w+)\.py\n", source):  # a module of the reader's own
        (in_workspace / f"{match[1]}.py").write_text(source)
    namespace: dict[str, Any] = {"__name__": f"documented_{i}"}
    # as a reader runs it, without the __future__ imports of this file
    exec(compile(source, f"{page.name}[{i}]", "exec", dont_inherit=True), namespace)


def test_store_is_read_by_the_reader_of_the_format_page(in_workspace: Path) -> None:
    from bertvision.featurestore.store import ActivationStore

    source = next(b for b in blocks(ROOT / "docs" / "store-format.md", "python") if "def read" in b)
    namespace: dict[str, Any] = {}
    exec(compile(source, "store-format.md", "exec"), namespace)
    split = ActivationStore.open("activations")["0.3e"]["train"]
    for i in (0, 17, 39):
        ours = split[i].permute(0, 2, 1).numpy()  # (seq, layer, hidden)
        np.testing.assert_allclose(
            namespace["read"]("activations", "0.3e", "train", i), ours, 1e-6, 1e-6
        )


def test_ledger_of_the_format_page_has_the_fields_that_are_written(in_workspace: Path) -> None:
    text = (ROOT / "docs" / "store-format.md").read_text()
    ledger = in_workspace / "activations" / "ledger" / "0.3e" / "train"
    for name in ("split.json", "00000.json"):
        for field in json.loads((ledger / name).read_text()):
            assert f"`{field}`" in text, f"{name}: {field}"


def test_the_page_of_python_names_every_public_name() -> None:
    text = (ROOT / "docs" / "python-api.md").read_text()
    table = text[text.index("| name | |") : text.index("## ")]
    named = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines() if row))
    assert sorted(named) == sorted(set(bertvision.__all__) - {"__version__"})


def test_readme_is_one_page_with_the_first_commands_at_its_top() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    first = blocks(ROOT / "README.md", "bash")[0].split("\n")
    assert first[:2] == ["make quickstart", "make test"]


def test_no_code_of_the_pages_is_left_out_of_the_tests() -> None:
    fenced = {name for page in PAGES for name in re.findall(r"^```(\w+)$", page.read_text(), re.M)}
    assert fenced <= {"bash", "json", "mermaid", "python", "text", "toml"}
