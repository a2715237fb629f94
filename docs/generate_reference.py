"""Write the pages of docs that are made from the sources: ``make docs``.

Commands (cli.md) from their jobs; public names (reference/api.md) as directives of mkdocstrings, in
the order and under the headings of ``bertvision.__init__``; errors (reference/errors.md) from
their docstrings; the JSON schema of ``bertvision.yaml`` from the classes that read
it. A test keeps them current.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from bertvision.cli import app, commands
from bertvision.pipelines import analysis
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.workspace.config import (
    DataConfig,
    FinetuneConfig,
    ModelConfig,
    WorkspaceConfig,
)

DOCS = Path(__file__).parent
ROOT = DOCS.parent
_CLI_HEADER = """\
# The command line

Written by `make docs` from the commands; do not edit. `bertvision train --help` says more of one.

Results go to stdout, progress and messages to stderr. Every command works on the workspace of the
current folder (the one with `bertvision.yaml`, or any below it); run a killed command again, and it
goes on. `bertvision NAME …` is `bertvision.NAME(…)` in Python, with the same arguments except
--json, --csv and --dry-run (`dry_run`), and `beside=` for --with; `errors` is `error_analysis`,
`store` is `ActivationStore`.

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | `store verify` found damage, `store audit` wrong examples; `store repair`, `doctor` |
| 2 | an option, file or workspace is wrong; the message says what to do |
| 130, 143 | stopped by SIGINT or SIGTERM; what was finished is kept |
"""
_OFTEN, _NEARLY_ALL = 3, 20
"""Commands that share an option before it is described once, above all of them, and before they do
not name it any more. A command that has `_OFTEN` options of an earlier one refers to that."""


def cli() -> str:
    """The whole page."""
    root: Any = typer.main.get_command(app)
    headings = commands()
    by_name = {name: root.commands[name] for names in headings.values() for name in names}
    store = by_name["store"].commands
    options = Counter(
        _entry(option)
        for command in [*by_name.values(), *store.values()]
        if command is not by_name["store"]
        for option in command.params
    )
    often: dict[str, Entry] = {}
    for entry, n in options.most_common():
        if n >= _OFTEN and entry[0].startswith("`-"):
            often.setdefault(entry[0], entry)  # of the same flags, the commonest
    shared = set(often.values())
    named = {entry for entry in shared if options[entry] < _NEARLY_ALL}
    lines = [_CLI_HEADER, "## Options of many commands\n"]
    lines += [_line(entry) for entry in sorted(shared)]
    told: dict[str, set[Entry]] = {}
    for heading, names in headings.items():
        lines.append(f"\n## {heading}")
        for name in names:
            if name == "store":
                for word, command in store.items():
                    lines += _section(f"store {word}", command, shared, named, told)
            else:
                lines += _section(name, by_name[name], shared, named, told)
    return "\n".join(lines) + "\n"


Entry = tuple[str, str, str]
"""Flags, default and help of an option."""


def _entry(option: Any) -> Entry:
    flags = " ".join(f"`{flag}`" for flag in reversed([*option.opts, *option.secondary_opts]))
    default = option.default
    shown = (
        "" if default is None or default is False or option.required else f" (default {default})"
    )
    if option.param_type_name == "argument":
        flags = f"`{option.name.upper()}`"
    return flags, shown, option.help or ""


def _line(entry: Entry) -> str:
    flags, default, text = entry
    return f"- {flags}{default}: {text}"


def _section(
    name: str, command: Any, shared: set[Entry], named: set[Entry], told: dict[str, set[Entry]]
) -> Iterator[str]:
    """A command: its help, its options that were not told elsewhere, and the names of others."""
    yield f"\n### {name}\n"
    yield command.help.partition("\n\n")[0]
    own = [_entry(option) for option in command.params]
    new = {entry for entry in own if entry not in shared}
    like = max(told, key=lambda other: len(told[other] & new), default="")
    again = told.get(like, set()) & new
    if len(again) < _OFTEN:
        again = set()
    lines = [_line(entry) for entry in own if entry in new - again]
    if above := [entry[0] for entry in own if entry in named]:
        lines.append(f"- {', '.join(above)}: above.")
    if again:
        flags = ", ".join(entry[0] for entry in own if entry in again)
        lines.append(f"- {flags}: as for `{like}`.")
    if lines:
        yield "\n" + "\n".join(lines)
    told[name] = new


_API_HEADER = """\
# API

Written by `make docs` from the public names; do not edit. The site shows the signature and the
docstring of each name here. What they do together, with code that a test runs, is in
[From Python](../python-api.md).
"""


def api() -> str:
    """The whole page."""
    parts = [_API_HEADER]
    for heading, names in groups():
        parts.append(f"## {heading}\n")
        parts += [f"::: bertvision.{name}\n{_options(name)}" for name in names]
    return "\n".join(parts)


def _options(name: str) -> str:
    """Options of mkdocstrings for a name: fields of options have their help in the annotation."""
    return "    options:\n      show_if_no_docstring: true\n" if name.endswith("Options") else ""


def groups() -> Iterator[tuple[str, list[str]]]:
    """Headings and names: the comments inside ``_MODULES``, and what stands below each."""
    source = (ROOT / "__init__.py").read_text(encoding="utf-8")
    table = next(
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES"
    )
    assert isinstance(table.value, ast.Dict)
    lines = source.splitlines()
    heading, names = "", list[str]()
    line = table.lineno
    for key, value in zip(table.value.keys, table.value.values, strict=True):
        assert key is not None
        comments = [text.strip() for text in lines[line : key.lineno - 1] if "#" in text]
        if comments:
            if names:
                yield heading, names
            text = comments[-1].removeprefix("#").strip()
            heading, names = text[0].upper() + text[1:], []
        names += ast.literal_eval(value)
        line = value.end_lineno or line
    yield heading, names
    yield "Analyses of hidden states", analysis.names()


BASES = ("BertvisionError", "BertvisionWarning")

_ERRORS_HEADER = """\
# Errors

Written by `make docs` from the docstrings; do not edit.

Everything that bertvision raises on purpose is a `BertvisionError`, and most errors are of the
matching built-in too, so that `except FileNotFoundError` works. A message says what was given, what
is allowed and what to do next. The command line prints it without a traceback and exits with
status 2, unless [its table](../cli.md) says otherwise; a lost rank is 75, so that a queue of jobs
may try again. `bertvision` exports `BertvisionError` and `BertvisionWarning`; the others are in
`bertvision.errors`, or in the module that is named. [The API](api.md) says of every name
what it raises, and why.
"""


def errors() -> str:
    """The whole page: the tree, and the errors beside it."""
    tree = re.search(r"```\n.*?```", _docstring(_parsed(ROOT / "errors.py")), re.DOTALL)
    assert tree is not None
    parts = [_ERRORS_HEADER, tree[0].replace("```", "```text", 1) + "\n"]
    for node, module in error_classes():
        if f"{node.name} " not in tree[0]:
            bases = " and ".join(f"`{ast.unparse(base)}`" for base in node.bases)
            home = "" if module == "errors" else f", from `bertvision.{module}`"
            about = f"Kind of {bases}{home}. {_one_line(_docstring(node))}\n"
            parts += [f"## {node.name}\n", about]
    return "\n".join(parts)


def _rooms(top: Path) -> Iterator[Path]:
    """A folder of the package and those in it."""
    return (path.parent for path in sorted(top.rglob("__init__.py")))


def error_classes() -> Iterator[tuple[ast.ClassDef, str]]:
    """The classes of errors and warnings, those of ``errors.py`` first, with their modules."""
    known = set(BASES)
    rooms = [room for top in sorted(ROOT.glob("*/__init__.py")) for room in _rooms(top.parent)]
    files = [ROOT / "errors.py", *(f for room in rooms for f in sorted(room.glob("*.py")))]
    for path in files:
        for node in _parsed(path).body:
            if not isinstance(node, ast.ClassDef):
                continue
            if node.name in BASES or known & {ast.unparse(base) for base in node.bases}:
                known.add(node.name)
                yield node, ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _docstring(node: ast.AST) -> str:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""


def _one_line(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "`")


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


SECTIONS = (ModelConfig, TaskConfig, DataConfig, FinetuneConfig)


def field_texts(section: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a class, by the field's name, in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = text.value if isinstance(text, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[field.target.id] = " ".join(value.value.split())
    return texts


def described(schema: dict[str, Any], section: type[BaseModel]) -> None:
    """Give the properties of a class's schema their texts."""
    for name, text in field_texts(section).items():
        schema["properties"][name]["description"] = text


def schema() -> dict[str, Any]:
    """The schema of the whole file."""
    made = WorkspaceConfig.model_json_schema()
    described(made, WorkspaceConfig)
    for section in SECTIONS:
        described(made["$defs"][section.__name__], section)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def settings() -> str:
    """The file's text."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


PAGES = {
    DOCS / "cli.md": cli,
    DOCS / "reference" / "api.md": api,
    DOCS / "reference" / "errors.md": errors,
    DOCS / "reference" / "bertvision.schema.json": settings,
}

if __name__ == "__main__":
    for page, render in PAGES.items():
        page.parent.mkdir(exist_ok=True)
        page.write_text(render(), encoding="utf-8")
