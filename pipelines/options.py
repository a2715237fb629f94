"""Options of a job, each declared once: read by the command line, by Python and by the record.

Neither this module nor one that declares options imports anything heavy, so that `bertvision
--help` answers at once; values are checked by pydantic, when an object of options is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import PurePath
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

PrecisionName = Literal["auto", "32", "bf16"]
"""Arithmetic of a job (see `precision.resolve_precision`)."""
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow"]
"""Where losses go beside the log that every training writes."""


class Option(NamedTuple):
    """Declaration of an option beside its type."""

    help: str = ""
    """One sentence, also that of the command line; without one the option is Python's alone."""
    flag: str | None = None
    """Its names on the command line, where they are not the field's, apart by a space."""
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    several: bool = False
    """Whether the command line takes it several times."""
    decides: bool = True
    """Whether the result of an analysis depends on it, as it does not on where it is computed."""
    apart: bool = False
    """Whether results with another value than the default are kept beside those with it."""
    check: Callable[[str], object] | None = None
    """Raises InputError of a value that is not allowed, where its type does not say which are."""
    later: bool = False
    """Whether files of before it came have no such field: at its default a digest is theirs."""


@dataclass(frozen=True)
class Options:
    """Base of options: frozen, and checked when they are made.

    Raises:
        InputError: a value is not allowed; the message names its option.
    """

    def __post_init__(self) -> None:
        from bertvision.pipelines.records import validated

        model = _model(type(self))  # type: ignore[arg-type]  # a class is hashable, says Python
        values = {flag(k, o)[2:]: getattr(self, k) for k, (_, o) in declared(type(self)).items()}
        values = {k: str(x) if isinstance(x, PurePath) else x for k, x in values.items()}
        for name, value in validated(model, values):
            object.__setattr__(self, name, value)

    @property
    def digest(self) -> str:
        """Short name of these settings, for files."""
        from bertvision.pipelines.records import digest_of

        values = asdict(self)
        for name, (_, option) in declared(type(self)).items():
            if option.later and values[name] == getattr(type(self), name):
                del values[name]
        return digest_of(values)[:12]


def declared(options: type[Options]) -> dict[str, tuple[Any, Option]]:
    """Type and `Option` of every field, in order."""
    declared_options = {}
    for name, hint in get_type_hints(options, include_extras=True).items():
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        declared_options[name] = bare, next((x for x in extras if isinstance(x, Option)), Option())
    return declared_options


def flag(name: str, option: Option) -> str:
    """The name of a field on the command line."""
    return option.flag or f"--{name.replace('_', '-')}"


@cache
def _model(options: type[Any]) -> type[BaseModel]:
    """The pydantic model that checks the values of options."""
    from pydantic import ConfigDict, Field, create_model

    checks: dict[str, Any] = {
        name: (
            Annotated[hint, Field(alias=flag(name, o)[2:], ge=o.ge, gt=o.gt, le=o.le, lt=o.lt)],
            ...,
        )
        for name, (hint, o) in declared(options).items()
    }
    return create_model(options.__name__, __config__=ConfigDict(allow_inf_nan=False), **checks)
