"""Options that are declared in an options class become those of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, get_origin

import typer

from bertvision.commands.options import (
    parse_layers,
    parse_names,
    parse_poolings,
    parse_weight_decays,
)
from bertvision.pipelines.options import Option, Options, declared, flag
from bertvision.pipelines.tasks.registry import TokenPooling


def _parse_tokens(text: str) -> Any:
    return ("all",) if text == "none" else parse_poolings(text)


_READ: dict[Any, Callable[[str], Any]] = {
    tuple[int, ...] | None: parse_layers,
    tuple[str, ...] | None: parse_names,
    tuple[TokenPooling, ...] | None: _parse_tokens,
    tuple[float, ...]: parse_weight_decays,
}
"""How the text of an option is read, by the type of its field."""


def _text(hint: Any, default: Any) -> str | None:
    """A default as it would be typed."""
    if default is None:
        return "all" if _READ[hint] is parse_layers else None
    return ",".join(f"{x:.0e}".replace("e-0", "e-") for x in default)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has an option for every field of each parameter that is an options class."""
    signature = inspect.signature(command, eval_str=True)
    classes = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if inspect.isclass(parameter.annotation) and issubclass(parameter.annotation, Options)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        for name, options in classes.items():
            values = {field: given.pop(field) for field, _ in _offered(options)}
            for field, (hint, _) in _offered(options):
                if hint in _READ and values[field] is not None:
                    values[field] = _READ[hint](values[field])
            given[name] = options(**values)
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _parameters(classes[name]) if name in classes else [parameter]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _offered(options: type[Options]) -> Iterator[tuple[str, tuple[Any, Option]]]:
    """The fields that the command line offers."""
    return ((name, found) for name, found in declared(options).items() if found[1].help)


def _parameters(options: type[Options]) -> Iterator[inspect.Parameter]:
    defaults = {field.name: field.default for field in fields(options)}
    for name, (hint, option) in _offered(options):
        default = defaults[name]
        if hint in _READ:
            hint, default = str | None, _text(hint, default)
        elif get_origin(hint) is Literal:
            hint = str
        shown = typer.Option(flag(name, option), help=option.help, min=option.ge, max=option.le)
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, shown])
