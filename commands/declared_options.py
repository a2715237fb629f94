"""Options that are declared in an options class become those of a command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, Literal, get_origin

import typer

from bertvision.commands.beforehand.completion import completed
from bertvision.pipelines.options import Option, Options, declared, flag
from bertvision.verbs.arguments.options import READ
from bertvision.verbs.arguments.reading import parse_layers


def _text(hint: Any, default: Any) -> str | None:
    """A default as it would be typed."""
    if default is None:
        return "all" if READ[hint] is parse_layers else None
    return ",".join(f"{x:.0e}".replace("e-0", "e-") for x in default)


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has an option for every field of each parameter that is an options class.

    Values that are names are completed by the shell (see `completion`).
    """
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
                if hint in READ and values[field] is not None:
                    values[field] = READ[hint](values[field])
            given[name] = options(**values)
        command(**given)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _parameters(classes[name]) if name in classes else [parameter]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    for shown in parameters:
        for info in getattr(shown.annotation, "__metadata__", ()):
            completed(shown.name, command.__name__, info)
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
        if hint in READ:
            hint, default = str | None, _text(hint, default)
        elif get_origin(hint) is Literal:
            hint = str
        shown = typer.Option(flag(name, option), help=option.help, min=option.ge, max=option.le)
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, shown])
