"""The shell completes names, never with an error; options are declared once."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from stores import Made
from typer.testing import CliRunner

import bertvision
from bertvision.cli import app
from bertvision.errors import InputError
from bertvision.models.zoo import HEADS
from bertvision.pipelines.declare import arguments, bound
from bertvision.pipelines.options import Options, declared, flag
from bertvision.pipelines.readouts.options import ProbeOptions, RankOptions, SimilarityOptions
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import ExtractOptions, FinetuneOptions, TrainOptions
from bertvision.pipelines.workspace.workspace import FILE


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Names of a workspace alone: completion reads no more."""
    root = tmp_path_factory.mktemp("typed") / "space"
    places = ("snapshots/0.3e/snapshot.json", "snapshots/1e/snapshot.json")
    heads = ("heads/1e/learned-pooling@f0.3", "heads/0.3e/average-pooling", "heads/1e/.run-1")
    for place in (*places, *(f"{head}/metrics.json" for head in heads), "datasets/mine.json"):
        (root / place).parent.mkdir(parents=True, exist_ok=True)
        (root / place).write_text("{}")
    (root / FILE).write_text("this is no workspace that could be read")
    Made([30, 40], tag="1e", split="dev-cls").write(root / "activations")
    Made([30, 40], tag="2e", split="train").write(root / "activations")
    return root


def offered(line: str, shell: str = "bash") -> list[str]:
    """The words that a shell offers behind a line that was typed."""
    words = line.split(" ")
    typed = {
        "_BERTVISION_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_TYPER_COMPLETE_ARGS": line,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    found = CliRunner().invoke(app, [], prog_name="bertvision", env=typed)
    assert found.exit_code == 0, found.stderr
    assert found.exception is None
    return found.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("train --checkpoint ", ["0.3e", "1e", "2e"]),
        ("extract --checkpoint 0", ["0.3e", "0e"]),
        ("extract --checkpoint 0.3e,", ["0.3e,1e", "0.3e,2e", "0.3e,0e", "0.3e,untrained"]),
        ("evaluate --trained-on ", ["0.3e", "1e"]),
        ("evaluate ", ["average-pooling", "learned-pooling@f0.3"]),
        ("evaluate --trained-on 1e ", ["learned-pooling@f0.3"]),
        ("evaluate --checkpoint 1e --split d", ["dev-cls", "dev"]),
        ("extract --encoding fl", ["float16", "float32"]),
        ("extract --compression ", ["none", "zstd", "pcodec"]),
        ("extract --pool cls,m", ["cls,mean", "cls,max"]),
        ("extract --task m", ["mrpc", "mine", "mnli"]),
        ("cka ", ["0.3e", "1e", "2e"]),
        ("store info ", ["1e/dev-cls", "2e/train"]),
        ("store audit 2", ["2e/train"]),
    ],
)
def test_names_are_offered(space: Path, line: str, names: list[str]) -> None:
    command, _, rest = line.rpartition(" ")
    first, *words = command.split(" ")
    sub = 2 if first == "store" else 1
    typed = [first, *words]
    typed[sub:sub] = ["-w", str(space)]
    found = offered(f"bertvision {' '.join(typed)} {rest}")
    if "--task" in line:
        assert set(names) <= set(found)
    else:
        assert found == names


def test_the_workspace_that_one_stands_in_is_looked_at(
    space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(space / "snapshots" / "1e")
    assert offered("bertvision train --checkpoint 1") == ["1e"]


def test_heads_are_offered_in_every_shell(space: Path) -> None:
    cheap = [name for name in HEADS if name.startswith("adapter-64")]
    assert offered("bertvision train adapter-64") == cheap
    assert any("adapter-64-shared" in word for word in offered("bertvision train a", "zsh"))
    assert "adapter-64-shared" in offered("bertvision train a", "fish")


@pytest.mark.parametrize("line", ["train --checkpoint ", "evaluate ", "store info ", "cka "])
def test_without_a_workspace_nothing_is_offered_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert offered(f"bertvision {line}") == []


def test_the_name_of_a_command_is_completed_without_importing_its_job() -> None:
    group: Any = typer.main.get_command(app)
    items = group.shell_complete(None, "c")
    assert [item.value for item in items] == ["cca", "cka", "cloze", "context", "compare"]
    assert items[1].help == "Compare the layers of two snapshots by linear CKA."
    assert [dict.__getitem__(group.commands, item.value) for item in items] == [None] * 5


COMMANDS = {
    "finetune": FinetuneOptions,
    "extract": ExtractOptions,
    "train": TrainOptions,
    "sweep": TrainOptions,
    "probe": ProbeOptions,
    "rank": RankOptions,
    "similarity": SimilarityOptions,
}


def parameters(name: str) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in command.commands[name].params}


@pytest.mark.parametrize(("name", "options"), COMMANDS.items())
def test_a_command_offers_the_options_of_its_job_with_their_defaults(
    name: str, options: type[Options]
) -> None:
    offered = parameters(name)
    defaults = {field.name: field.default for field in fields(options)}
    for field, (_, option) in declared(options).items():
        own = {a.name for a in arguments(getattr(bertvision, name)) if not a.options}
        if not option.help or field in own:
            continue
        shown = offered[flag(field, option)[2:].replace("-", "_")]
        assert (shown.opts, shown.help) == ([flag(field, option)], option.help)
        if shown.default != defaults[field]:  # written as a text of it
            texts = {None: "all", (1e-5, 1e-4, 1e-3, 1e-2): "1e-5,1e-4,1e-3,1e-2"}
            assert shown.default == texts[defaults[field]]


@pytest.mark.parametrize(("name", "options"), COMMANDS.items())
def test_defaults_that_are_typed_are_those_of_the_options_class(
    name: str, options: type[Options]
) -> None:
    job = getattr(bertvision, name)
    offered = {a.name for a in arguments(job) if a.options}
    typed = {k: parameter.default for k, parameter in parameters(name).items() if k in offered}
    first = ("x",) if name in ("train", "probe", "rank", "similarity") else ()
    assert bound(job, first, typed)["options"] == options()


def test_fine_tuning_tells_the_defaults_of_its_settings() -> None:
    settings = TaskConfig.model_fields | FinetuneConfig.model_fields
    told = {
        name: match[1]
        for name, (_, option) in declared(FinetuneOptions).items()
        if (match := re.search(r"\(default ([^,)]+)", option.help))
    }
    assert len(told) > 8
    for name, default in told.items():
        assert settings[name].default == float(default), name


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": 0}, "--epochs 0: Input should be greater than 0"),
        ({"batch_size": 1.5}, "--batch-size 1.5: Input should be a valid integer"),
        ({"lr": float("nan")}, "--lr nan: "),
        ({"precision": "16"}, "--precision '16': choose auto, 32 or bf16"),
        ({"layers": ["first"]}, "--layers 'first': "),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_its_option(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        TrainOptions(**values)


def test_an_option_is_named_as_the_command_line_names_it() -> None:
    with pytest.raises(
        InputError, match=r"^--pool 'top': choose cls, sep, mean, max, first, last, at:FIELD$"
    ):
        ExtractOptions(tokens="top")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^--epochs 0: "):
        ProbeOptions(max_epochs=0)


def test_values_are_kept_in_one_form() -> None:
    assert TrainOptions(layers=[0, 2]) == TrainOptions(layers=(0, 2))  # type: ignore[arg-type]
    assert len({TrainOptions(), TrainOptions(epochs=1)}) == 1


def test_a_path_may_be_given_as_a_path() -> None:
    assert FinetuneOptions(train=Path("a/train.json")).train == str(Path("a/train.json"))  # type: ignore[arg-type]
