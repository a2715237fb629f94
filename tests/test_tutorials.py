"""Tutorials and notebooks run from beginning to end, on a workspace that the quickstart made.

The workspace is the quickstart's own, of few questions and with a narrow encoder: what is tested is
that a reader gets through, and not the numbers that the pages show.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from docs_scripts import docs_script
from typer.main import get_command

import bertvision
from bertvision.cli import app
from bertvision.pipelines import quickstart

ROOT = Path(__file__).parents[1]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
BLOCK = re.compile(
    r"(<!-- not run: .+ -->\n)?^```(bash|python)\n(.*?)^```", re.DOTALL | re.MULTILINE
)


FEWER_STEPS = {
    "if step == 600:": "if step == 100:",
    "range(1, 501)": "range(1, 101)",
    '"train.conll", 600': '"train.conll", 120',
    '"dev.conll", 150': '"dev.conll", 30',
}
"""Trainings of the pages themselves take fewer steps, on less data."""


def narrow_encoder(folder: Path) -> Path:
    """Write an encoder of as many layers as the quickstart's, and its tokenizer; 32 channels."""
    from transformers import BertConfig, BertForQuestionAnswering

    shutil.copytree(quickstart.packaged_encoder(), folder)
    torch.manual_seed(0)
    config = BertConfig.from_pretrained(folder)
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 32, 4, 64
    BertForQuestionAnswering(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace such as `make quickstart` leaves, of 96 questions."""
    folder = tmp_path_factory.mktemp("tutorials")
    encoder = narrow_encoder(folder / "encoder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "packaged_encoder", lambda: encoder)
        patch.setattr(quickstart, "QUESTIONS", (96, 96))
        patch.setattr(quickstart, "DEV_QUESTIONS", 24)
        bertvision.quickstart(workspace=folder / "quickstart")
    return folder / "quickstart"


def run_commands(source: str) -> None:
    """Run the lines of a bash block that are this program's, as the shell would."""
    for line in source.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True) or [""]
        if program == "bertvision":
            with pytest.raises(SystemExit) as ended:
                get_command(app).main(words)
            assert not ended.value.code, line


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_from_top_to_bottom(
    page: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quick)
    torch.manual_seed(0)
    session: dict[str, Any] = {"__name__": page.stem}
    text = page.read_text()
    for steps, fewer in FEWER_STEPS.items():
        text = text.replace(steps, fewer)
    for i, (left_out, language, source) in enumerate(BLOCK.findall(text)):
        if left_out:
            continue
        if language == "bash":
            run_commands(source)
        else:
            exec(compile(source, f"{page.name}[{i}]", "exec", dont_inherit=True), session)


def test_each_tutorial_says_for_whom_what_and_how_long_and_leads_to_one_other() -> None:
    links = []
    for page in TUTORIALS:
        text = page.read_text()
        for part in ("**For** ", "**At the end** ", "**It takes** ", "## What not to believe"):
            assert part in text, f"{page.name} lacks {part}"
        links += re.findall(r"^- Next: .*\]\(([\w.-]+\.md)\)", text, re.MULTILINE)
    assert sorted(links) == [page.name for page in TUTORIALS if page.stem != "first-store"]


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    return [output for cell in code for output in cell.outputs]


def test_the_cells_of_a_notebook_run_and_draw_its_figures(
    quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in one process with the tests; the slow tests run all notebooks as Jupyter does."""
    import matplotlib.pyplot as plt

    monkeypatch.chdir(quick)
    committed = nbformat.read(NOTEBOOKS[0], as_version=4)
    plt.switch_backend("agg")
    plt.close("all")  # figures of other tests in this process
    session: dict[str, Any] = {"__name__": NOTEBOOKS[0].stem}
    for cell in committed.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, NOTEBOOKS[0].name, "exec", dont_inherit=True), session)
    drawn = [out for out in outputs(committed) if "image/png" in out.get("data", {})]
    assert len(plt.get_fignums()) == len(drawn) > 0
    plt.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_the_committed_one_shows(
    path: Path, quick: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kinds of results and figures from the same cells; of other numbers."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    committed = nbformat.read(path, as_version=4)
    made = docs_script("execute_notebooks").executed(path, quick)

    def kinds(notebook: nbformat.NotebookNode) -> list[list[str]]:
        return [sorted(out.get("data", {})) for out in outputs(notebook) if "data" in out]

    assert kinds(made) == kinds(committed)
    assert any("image/png" in kind for kind in kinds(made))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_committed_notebook_is_small_and_without_traces_of_a_machine(path: Path) -> None:
    assert path.stat().st_size < 200_000
    notebook = nbformat.read(path, as_version=4)
    assert {out.output_type for out in outputs(notebook)} <= {
        "execute_result",
        "display_data",
        "stream",
    }
    assert "stderr" not in {out.get("name") for out in outputs(notebook)}
    shown = [out.get("text", "") or out.data.get("text/plain", "") for out in outputs(notebook)]
    assert not re.search(r"(/tmp|/home|/work|/Users|0x[0-9a-f]{6})", "".join(shown))
