"""Options are declared once: what a command offers is what the options class of its job says."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

from bertvision.cli import app
from bertvision.commands.analyses.pairs import rank, similarity
from bertvision.commands.analyses.probe import probe
from bertvision.commands.declared_options import with_options
from bertvision.commands.extract import extract
from bertvision.commands.finetune import finetune
from bertvision.commands.heads import train
from bertvision.commands.sweep import sweep
from bertvision.errors import InputError
from bertvision.pipelines.options import Options, declared, flag
from bertvision.pipelines.readouts.options import ProbeOptions, RankOptions, SimilarityOptions
from bertvision.pipelines.tasks.config import TaskConfig
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import ExtractOptions, FinetuneOptions, TrainOptions

COMMANDS = {
    "finetune": (finetune, FinetuneOptions),
    "extract": (extract, ExtractOptions),
    "train": (train, TrainOptions),
    "sweep": (sweep, TrainOptions),
    "probe": (probe, ProbeOptions),
    "rank": (rank, RankOptions),
    "similarity": (similarity, SimilarityOptions),
}


def parameters(name: str) -> dict[str, Any]:
    command: Any = typer.main.get_command(app)
    return {parameter.name: parameter for parameter in command.commands[name].params}


@pytest.mark.parametrize(("name", "options"), [(k, v) for k, (_, v) in COMMANDS.items()])
def test_a_command_offers_the_options_of_its_job_with_their_defaults(
    name: str, options: type[Options]
) -> None:
    offered = parameters(name)
    defaults = {field.name: field.default for field in fields(options)}
    for field, (_, option) in declared(options).items():
        if not option.help:
            continue
        shown = offered[field]
        assert (shown.opts, shown.help) == ([flag(field, option)], option.help)
        if shown.default != defaults[field]:  # written as a text of it
            texts = {None: "all", (1e-5, 1e-4, 1e-3, 1e-2): "1e-5,1e-4,1e-3,1e-2"}
            assert shown.default == texts[defaults[field]]


@pytest.mark.parametrize(("name", "found"), COMMANDS.items())
def test_what_is_typed_nowhere_is_the_default_of_the_options_class(
    name: str, found: tuple[Any, type[Options]]
) -> None:
    command, options = found
    given: dict[str, Any] = {}

    def caught(**values: Any) -> None:
        given.update(values)

    caught.__signature__ = inspect.signature(command, eval_str=True)  # type: ignore[attr-defined]
    run = with_options(caught)
    offered = (field for field, (_, option) in declared(options).items() if option.help)
    run(**{field: parameters(name)[field].default for field in offered})
    assert given == {"options": options()}


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
    with pytest.raises(InputError, match=r"^--pool 'top': choose all, cls, sep, mean or max$"):
        ExtractOptions(tokens="top")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^--epochs 0: "):
        ProbeOptions(max_epochs=0)


def test_values_are_kept_in_one_form() -> None:
    assert TrainOptions(layers=[0, 2]) == TrainOptions(layers=(0, 2))  # type: ignore[arg-type]
    assert len({TrainOptions(), TrainOptions(epochs=1)}) == 1


def test_a_path_may_be_given_as_a_path() -> None:
    assert FinetuneOptions(train=Path("a/train.json")).train == str(Path("a/train.json"))  # type: ignore[arg-type]
