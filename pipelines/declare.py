"""The declaration of a job: one function is what Python calls, and what the command line runs.

A job's signature has the names, types, defaults and bounds of its arguments, its docstring their
help. Types that many jobs share are declared here, with their help, once. `job` checks what a
function is given; `arguments` is what the command line and the documentation are made from.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, wraps
from numbers import Number
from types import NoneType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from bertvision.errors import InputError, did_you_mean
from bertvision.featurestore.format.layout import ENCODING_NAMES, EncodingName, get_encoding
from bertvision.pipelines.options import Option, Options, PrecisionName, declared, flag
from bertvision.pipelines.poolings import POOLING_NAMES
from bertvision.pipelines.reading import READ, Names, StrPath, parse_choice

F = TypeVar("F", bound=Callable[..., Any])

DEFAULTS: Any = None
"""Default of a job's ``options``: the defaults of their class."""

WorkspacePath = Annotated[
    StrPath | None,
    Option(
        "Folder of the experiment; by default the current one.",
        "--workspace -w",
        decides=False,
    ),
]
StorePath = Annotated[
    StrPath | None,
    Option(
        "Activation store: a folder or an fsspec URL, such as s3://bucket/folder; by default the "
        "workspace's.",
        decides=False,
    ),
]
NewStorePath = Annotated[
    StrPath | None,
    Option("Activation store, a folder or an fsspec URL; by default the workspace's."),
]
FigurePath = Annotated[
    StrPath | None,
    Option("SVG file to write; by default in analysis/ of the workspace.", decides=False),
]
OtherWorkspace = Annotated[
    StrPath | None,
    Option("Workspace with the second snapshot, of the same data.", "--with", decides=False),
]
Seed = Annotated[int, Option("Seed of the sample.", ge=0)]
MaxTokens = Annotated[int, Option("Largest seeded sample of tokens; 0 uses all.", ge=0)]
Resamples = Annotated[int, Option("Bootstrap samples of intervals.", ge=1)]
DataDevice = Annotated[
    str | None,
    Option(
        "Device that the codes of a split stay on, such as cuda or cpu: read once for all epochs "
        "and heads. They must fit there.",
        decides=False,
    ),
]
PrecisionOption = Annotated[
    PrecisionName,
    Option("Arithmetic: 32, bf16, or auto, which is bf16 where it is native.", decides=False),
]
SchedulerName = Annotated[
    str,
    Option(
        "Where to compute: threads, processes, or tcp://HOST:PORT of a Dask cluster.", decides=False
    ),
]
ClusterAddress = Annotated[
    str | None, Option("tcp://HOST:PORT of a Dask cluster whose workers extract.")
]
Devices = Annotated[
    int,
    Option(
        "Processes that share the heads, each on a GPU if there are GPUs (docs/scaling.md).",
        ge=1,
    ),
]
DataSource = Annotated[
    StrPath | None,
    Option(
        "File, folder or data set on the hub, to be named once.",
        decides=False,
    ),
]
TextColumn = Annotated[
    str | None, Option("Column of the texts (tasks csv and text; default text).", decides=False)
]
PairColumn = Annotated[str | None, Option("Column of the second texts (task csv).")]
LabelColumn = Annotated[
    str | None, Option("Column of the labels (task csv; default label).", decides=False)
]
MaxLength = Annotated[
    int | None,
    Option("Tokens of a window of added data (default 128; text 512, chat 1024).", ge=16),
]
SkipBad = Annotated[
    bool | None, Option("Skip rows of added data that are malformed or fit no window.")
]
NewModel = Annotated[
    StrPath | None, Option("Make a workspace for the hidden states of this encoder alone.")
]
Poolings = Annotated[Names, Option(f"Poolings of a window's tokens: {POOLING_NAMES}.")]
NewEncoding = Annotated[
    EncodingName | None,
    Option(f"Encoding of extracted states (default int8): {ENCODING_NAMES}.", check=get_encoding),
]


class Where(TypedDict, total=False):
    """The workspace and the store of a job."""

    workspace: WorkspacePath
    store: StorePath


class Kept(TypedDict, total=False):
    """Where the result of an analysis is kept, and its figure."""

    plot: FigurePath
    workspace: WorkspacePath


class FromStore(Kept, total=False):
    """Where a result is kept that is measured on a store."""

    store: StorePath


class OnDask(TypedDict, total=False):
    """Where a result is kept that Dask computes from a store."""

    scheduler: SchedulerName
    plot: FigurePath
    workspace: WorkspacePath
    store: StorePath


_SHARED = {"scheduler": "threads"}
"""Defaults of arguments that jobs share as ``**where: Unpack[OnDask]``; None of the others."""


@dataclass(frozen=True)
class Argument:
    """An argument of a job.

    Attributes:
        name: Keyword in Python.
        hint: Its type, without ``Annotated``.
        default: Its default; `inspect.Parameter.empty` where it has to be given.
        option: Help, flag and bounds.
        positional: Whether the command line takes it without a flag.
        options: Class of options that it is a field of, if any.
        field: Name of that field, which may differ from the keyword.
    """

    name: str
    hint: Any
    default: Any
    option: Option
    positional: bool = False
    options: type[Options] | None = None
    field: str = ""

    @property
    def flag(self) -> str:
        """Name on the command line, such as ``--max-tokens``."""
        return flag(self.name, self.option).split()[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """Names that are allowed; none where any value is."""
        kinds = (self.hint, *get_args(self.hint))
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    def check(self, value: Any) -> None:
        """Check a value that was given.

        Raises:
            InputError: It is out of bounds, or none of those allowed.
        """
        if value is None and (self.default is None or NoneType in get_args(self.hint)):
            return
        if self.choices:
            parse_choice(value, self.choices, self.flag)
        if self.option.check is not None:
            self.option.check(value)
        low, high = self.option.ge, self.option.le
        if (low, high) != (None, None) and not isinstance(value, int | float | Number):
            raise InputError(f"{self.flag} {value!r}: give a number")
        if low is not None and not value >= low:
            raise InputError(f"{self.flag} {value!r}: give {low:g} or more")
        if high is not None and not value <= high:
            raise InputError(f"{self.flag} {value!r}: give {high:g} or less")


def job(function: F) -> F:
    """Declare a job.

    Keywords that are not its own are refused with those that are, and numbers and names that its
    signature does not allow with those that it does. A job with a parameter ``options`` takes the
    fields of that class as keywords too, which stand in its signature and its docstring; it gets
    the options that they make. A field that is called like a parameter of its own is left to that.

    Args:
        function: Job, whose parameters are annotated with types, or with ``Annotated[type,
            Option(…)]``.
    """
    signature = inspect.signature(function)
    offered = _arguments(function)
    shown = []
    for argument in offered:
        own = signature.parameters.get(argument.name)
        shown.append(
            inspect.Parameter(
                argument.name,
                own.kind if own and not argument.options else inspect.Parameter.KEYWORD_ONLY,
                default=argument.default,
                annotation=inspect.formatannotation(argument.hint),
            )
        )

    @wraps(function)
    def run(*args: Any, **given: Any) -> Any:
        return function(**bound(run, args, given))

    takes_options = any(argument.options for argument in offered)
    if takes_options:
        first = next(i for i, a in enumerate(offered) if a.options)
        shown.insert(first, signature.parameters["options"])
    run.__dict__["__signature__"] = signature.replace(parameters=shown)
    if function.__doc__:  # python -OO leaves none
        run.__doc__ = _documented(function.__doc__, offered, takes_options)
    return cast(F, run)


def bound(
    run: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a job, by name, with its defaults, checked.

    Args:
        run: Job.
        args: Arguments by position.
        given: Arguments by keyword.

    Raises:
        TypeError: An argument is missing, or is not the job's.
        InputError: A value is not allowed; the message names its flag.
    """
    signature = inspect.signature(run)
    for keyword in given:
        if keyword not in signature.parameters:
            hint = did_you_mean(keyword, signature.parameters, most=3)
            there = ", ".join(signature.parameters)
            raise TypeError(
                f"{run.__name__}() has no argument {keyword!r}: {hint}there are {there}"
            )
    filled = signature.bind(*args, **given)
    changes: dict[str, Any] = {}
    kind: type[Options] | None = None
    values = {}
    for argument in arguments(run):
        if argument.options is None:
            values[argument.name] = filled.arguments.get(argument.name, argument.default)
            argument.check(values[argument.name])
            continue
        kind = argument.options
        if argument.name in filled.arguments:
            value = filled.arguments[argument.name]
            read = READ.get(argument.hint)
            changes[argument.field] = read(value) if read and value is not None else value
    if kind is not None:
        values["options"] = replace(filled.arguments.get("options") or kind(), **changes)
    return values


def arguments(run: Callable[..., Any]) -> tuple[Argument, ...]:
    """The arguments of a job, in order; fields of an options class stand in its place.

    Args:
        run: Job.
    """
    return _arguments(inspect.unwrap(run))


@cache
def _arguments(function: Callable[..., Any]) -> tuple[Argument, ...]:
    listed: list[Argument] = []
    own = inspect.signature(function).parameters
    for parameter in own.values():
        hint = eval(parameter.annotation, function.__globals__)  # our own source
        if parameter.kind is parameter.VAR_KEYWORD:
            if get_origin(hint) is Unpack:
                shared = get_type_hints(get_args(hint)[0], include_extras=True)
                for name, (bare, option) in zip(
                    shared, map(get_args, shared.values()), strict=True
                ):
                    listed.append(Argument(name, bare, _SHARED.get(name), option))
            continue
        bare, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        if parameter.name == "options":
            listed += (field for field in _fields(bare) if field.name not in own)
            continue
        option = next((extra for extra in extras if isinstance(extra, Option)), Option())
        by_place = parameter.kind is parameter.POSITIONAL_OR_KEYWORD and option.flag is None
        listed.append(Argument(parameter.name, bare, parameter.default, option, by_place))
    return tuple(listed)


def _fields(kind: type[Options]) -> Iterable[Argument]:
    """An argument for every field that is not that of the class alone."""
    defaults = {field.name: field.default for field in fields(kind)}
    for name, (hint, option) in declared(kind).items():
        if option.help:
            keyword = flag(name, option)[2:].replace("-", "_")
            yield Argument(keyword, hint, defaults[name], option, options=kind, field=name)


_SECTION = re.compile(r"^ {4}(Args|Returns|Yields|Raises|Examples|Attributes):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {8}\*{0,2}(\w+): ", re.MULTILINE)


def told(doc: str) -> dict[str, str]:
    """Texts of the section ``Args`` of a docstring, by name."""
    parts = _SECTION.split(doc)
    if "Args" not in parts:
        return {}
    names = _ENTRY.split(parts[parts.index("Args") + 1])[1:]
    return {
        name: " ".join(text.split()) for name, text in zip(names[::2], names[1::2], strict=True)
    }


def described(run: Callable[..., Any]) -> dict[str, str]:
    """The help of each argument of a job, by name."""
    shared = {argument.name: argument.option.help for argument in arguments(run)}
    return shared | told(inspect.unwrap(run).__doc__ or "")


def summary(doc: str) -> str:
    """A docstring without indentation, up to its first section."""
    return re.split(r"^(?:Args|Returns|Yields|Raises|Examples):$", doc, flags=re.MULTILINE)[
        0
    ].strip()


def _documented(doc: str, offered: Iterable[Argument], takes_options: bool) -> str:
    """A docstring whose section ``Args`` has shared arguments too."""
    known = told(doc)
    lines = [f"{a.name}: {a.option.help}" for a in offered if a.name not in known]
    if takes_options:
        lines.append("options: These options in one object; keywords override it.")
    text = "".join(
        textwrap.indent(textwrap.fill(line, 92, subsequent_indent="    "), " " * 8) + "\n"
        for line in lines
    )
    if not known:
        place = next((m.start() for m in _SECTION.finditer(doc) if m[1] != "Examples"), None)
        before, after = (
            (doc.rstrip() + "\n\n", "    ") if place is None else (doc[:place], doc[place:])
        )
        return f"{before}    Args:\n{text}\n{after}"
    parts = _SECTION.split(doc)
    at = parts.index("Args") + 1
    parts[at] = f"{parts[at].rstrip()}\n{text}" + ("\n" if at + 1 < len(parts) else "    ")
    return parts[0] + "".join(
        f"    {head}:{body}" for head, body in zip(parts[1::2], parts[2::2], strict=True)
    )
