"""The surface that users see, as text: commands, public names, results; `python tests/surface.py`.

Two files are written beside the fixtures, whose difference shows what a change does to users:
``surface.txt`` has every command with its flags, defaults and bounds, every public name with its
signature, and the fields of every record and result; ``outputs.json`` has what commands say of the
workspaces in ``workspace-1.tar.xz``: JSON, the header of the CSV file, and the table. Their hidden
states are stored, so that the numbers move where arithmetic does, and by rounding between machines.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures"
SURFACE, OUTPUTS = FIXTURES / "surface.txt", FIXTURES / "outputs.json"

SQUAD = (
    *("store ls", "store info 1e/dev", "heads", "status"),
    *(
        f"table {name}"
        for name in (
            *("learning_curve", "cross_checkpoint", "data_fractions", "pooling_weights"),
            *("rankings", "parameters", "costs", "ensembles", "agreement", "results", "runs"),
        )
    ),
    "compare bert:1e learned-pooling:1e --resamples 200",
    "errors learned-pooling --trained-on 1e --checkpoint 1e",
    "cka 0.5e 1e",
    "cka 1e 1e --biased --max-tokens 100",
    "cca 0.5e 1e --max-tokens 200",
    "rsa 0.5e 1e --max-tokens 100 --repeats 3",
    "isotropy 0.5e,1e",
    "context 0.5e,1e",
    "attention 1e --precision 32",
    "prune 1e --precision 32",
)
"""Commands that read what the workspace of questions stores."""
SENTENCES = ("store ls", "status", "isotropy 6e --split dev-cls", "table probes", "table results")
"""Commands that read what the workspace of sentences stores."""


def surface() -> str:
    """Commands, public names, records and results, a line for each thing."""
    return "\n".join([*_commands(), "", *_names(), "", *_records(), ""])


def _commands() -> Iterator[str]:
    import typer

    from bertvision.cli import app

    def walk(command: Any, name: str) -> Iterator[str]:
        if hasattr(command, "commands"):
            for word in sorted(command.commands):
                yield from walk(command.commands[word], f"{name} {word}")
            return
        yield f"command {name}"
        for parameter in sorted(command.params, key=lambda p: (p.param_type_name, str(p.opts))):
            flags = "/".join([*parameter.opts, *parameter.secondary_opts])
            bounds = parameter.min, parameter.max
            said = [
                f"default {parameter.default!r}",
                *(
                    f"{end} {value}"
                    for end, value in zip(("from", "to"), bounds, strict=True)
                    if value is not None
                ),
                *(["required"] if parameter.required else []),
                *(["several"] if parameter.nargs != 1 or getattr(parameter, "multiple", 0) else []),
                *(["hidden"] if getattr(parameter, "hidden", False) else []),
            ]
            yield f"  {flags} {inspect.formatannotation(parameter.bare_type())}: {', '.join(said)}"

    yield from walk(typer.main.get_command(app), "bertvision")


def _names() -> Iterator[str]:
    import bertvision

    for name in sorted(bertvision.__all__):
        value = getattr(bertvision, name)
        if not inspect.isclass(value):
            yield f"name {name}{_signature(value)}"
            continue
        yield f"class {name}{_signature(value)}"
        for member in sorted(dir(value)):
            if member.startswith("_") or not _is_own(value, member):
                continue
            kind = "" if callable(getattr(value, member, None)) else ": attribute"
            yield f"  {member}{kind or _signature(getattr(value, member))}"


def _is_own(value: type, member: str) -> bool:
    """Whether a member is this project's, and not of torch, Lightning or the language."""
    owner = next(base for base in value.__mro__ if member in vars(base))
    return owner.__module__.startswith("bertvision")


def _signature(value: object) -> str:
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f" = {type(value).__name__}"
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _records() -> Iterator[str]:
    import bertvision.jobs
    import bertvision.pipelines
    from bertvision.pipelines import analysis
    from bertvision.pipelines.records import Record

    for result in analysis.results():
        is_record = dataclasses.is_dataclass(result)
        names = [f.name for f in dataclasses.fields(result)] if is_record else result.variables
        yield f"result {result.kind}: {', '.join(names)}"

    def below(kind: type) -> Iterator[Any]:
        for sub in kind.__subclasses__():
            yield sub
            yield from below(sub)

    for package in (bertvision.pipelines, bertvision.jobs):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    records = {
        sub.__name__: sub
        for sub in below(Record)
        # not those that are made of a result's fields, whenever one is first read
        if vars(sys.modules.get(sub.__module__, sys)).get(sub.__name__) is sub
    }
    for name in sorted(records):
        yield f"record {name}: {', '.join(records[name].model_fields)}"


def outputs(folder: Path) -> dict[str, Any]:
    """Output of commands on the workspaces of the archive, by the command.

    Args:
        folder: Where the archive is unpacked.
    """
    from test_workspace_fixture import unpack

    unpack(folder)
    said = {}
    for name, commands in (("squad", SQUAD), ("sentences", SENTENCES)):
        for command in commands:
            said[f"{name}: {command}"] = _said(folder / name, command, folder / "rows.csv")
    return said


def _said(root: Path, command: str, rows: Path) -> dict[str, Any]:
    from typer.testing import CliRunner

    from bertvision.cli import app

    words = shlex.split(command)
    before = Path.cwd()
    os.chdir(root)
    try:
        shown = CliRunner().invoke(app, words)
        found: dict[str, Any] = {"status": shown.exit_code}
        text = shown.stdout if shown.exit_code == 0 else shown.output
        found["text"] = [_plain(line, root) for line in text.splitlines()]
        if "--help" not in words and shown.exit_code == 0:
            rows.unlink(missing_ok=True)
            done = CliRunner().invoke(app, [*words, "--json", "--csv", str(rows)])
            found["json"] = _placed(json.loads(done.stdout), root)
            if rows.exists():
                with rows.open(newline="") as lines:
                    found["csv"] = next(csv.reader(lines), [])
    finally:
        os.chdir(before)
    return found


def _plain(line: str, root: Path) -> str:
    return re.sub(r"\s+", " ", line.replace(str(root.parent), "FOLDER")).strip()


def _placed(value: Any, root: Path) -> Any:
    if isinstance(value, dict):
        return {key: _placed(inner, root) for key, inner in value.items()}
    if isinstance(value, list):
        return [_placed(inner, root) for inner in value]
    return value.replace(str(root.parent), "FOLDER") if isinstance(value, str) else value


def main() -> None:
    """Write both files."""
    sys.path.insert(0, str(Path(__file__).parent))
    SURFACE.write_text(surface())
    with tempfile.TemporaryDirectory() as folder:
        said = outputs(Path(folder).resolve())
    OUTPUTS.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    for command, found in said.items():
        if found["status"]:
            print(command, found["text"][-2:])


if __name__ == "__main__":
    main()
