"""Options are declared once: what a command offers is what the options class of its job says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer

import bertvision
from bertvision.cli import app
from bertvision.errors import InputError
from bertvision.pipelines.declare import arguments, bound
from bertvision.pipelines.options import Options, declared, flag
from bertvision.pipelines.readouts.options import ProbeOptions, RankOptions, SimilarityOptions
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import FinetuneConfig
from bertvision.pipelines.workspace.job_options import ExtractOptions, FinetuneOptions, TrainOptions

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
        if not option.help:
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
    with pytest.raises(InputError, match=r"^--pool 'top': choose all, cls, sep, mean or max$"):
        ExtractOptions(tokens="top")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="^--epochs 0: "):
        ProbeOptions(max_epochs=0)


def test_values_are_kept_in_one_form() -> None:
    assert TrainOptions(layers=[0, 2]) == TrainOptions(layers=(0, 2))  # type: ignore[arg-type]
    assert len({TrainOptions(), TrainOptions(epochs=1)}) == 1


def test_a_path_may_be_given_as_a_path() -> None:
    assert FinetuneOptions(train=Path("a/train.json")).train == str(Path("a/train.json"))  # type: ignore[arg-type]
