"""Options that are declared in an options class become keywords of a verb."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import wraps
from typing import Any, TypeVar, cast

from bertvision.errors import did_you_mean
from bertvision.pipelines.options import Option, Options, declared, flag
from bertvision.pipelines.tasks.registry import TokenPooling
from bertvision.verbs.arguments.reading import (
    parse_layers,
    parse_names,
    parse_tokens,
    parse_weight_decays,
)

_O = TypeVar("_O", bound=Options)
_V = TypeVar("_V", bound=Callable[..., Any])

READ: dict[Any, Callable[[Any], Any]] = {
    tuple[int, ...] | None: parse_layers,
    tuple[str, ...] | None: parse_names,
    tuple[TokenPooling, ...] | None: parse_tokens,
    tuple[float, ...]: parse_weight_decays,
}
"""How an option is read, by the type of its field."""


def offered(options: type[Options]) -> Iterator[tuple[str, str, Any, Option]]:
    """Field, keyword, type and declaration of every option that is not that of the class alone."""
    for name, (hint, option) in declared(options).items():
        if option.help:
            yield name, flag(name, option)[2:].replace("-", "_"), hint, option


def takes(options: type[Options]) -> Callable[[_V], _V]:
    """Shows the options of a class in the signature and the docstring of a verb.

    They take the place of ``**changes``, so that ``help()`` says everything. A keyword that is none
    of the verb's is a TypeError with those that are.

    Args:
        options: class of the verb's parameter ``options``; see `chosen`.
    """
    defaults = {field.name: field.default for field in fields(options)}

    def expand(verb: _V) -> _V:
        signature = inspect.signature(verb)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        first = next(i for i, p in enumerate(own) if p.name == "options")
        shown = [
            inspect.Parameter(
                keyword,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=inspect.formatannotation(hint),
            )
            for name, keyword, hint, _ in offered(options)
        ]
        signature = signature.replace(parameters=[*own[:first], *shown, *own[first:]])
        lines = (f"{keyword}: {option.help}" for _, keyword, _, option in offered(options))
        text = "".join(
            textwrap.indent(textwrap.fill(line, 92, subsequent_indent="    "), " " * 8) + "\n"
            for line in lines
        )
        if verb.__doc__:  # python -OO leaves none
            verb.__doc__ = re.sub(r" *\*\*changes: .*\n", lambda _: text, verb.__doc__)

        @wraps(verb)
        def checked(*args: Any, **given: Any) -> Any:
            for keyword in given:
                if keyword not in signature.parameters:
                    hint = did_you_mean(keyword, signature.parameters, most=3)
                    there = ", ".join(signature.parameters)
                    raise TypeError(
                        f"{verb.__name__}() has no argument {keyword!r}: {hint}there are {there}"
                    )
            return verb(*args, **given)

        checked.__dict__["__signature__"] = signature
        return cast(_V, checked)

    return expand


def chosen(kind: type[_O], options: _O | None, changes: Mapping[str, Any]) -> _O:
    """The options of a job: an object of them, and what was given by keyword.

    Args:
        kind: their class.
        options: the object; None is the defaults.
        changes: by keyword, as it was typed or as it is; `takes` has checked the names.

    Raises:
        InputError: a value is not allowed; the message names its option.
    """
    known = {keyword: (name, hint) for name, keyword, hint, _ in offered(kind)}
    values = {}
    for keyword, value in changes.items():
        name, of = known[keyword]
        values[name] = READ[of](value) if of in READ and value is not None else value
    return replace(options or kind(), **values)
