"""Options that every analysis of stored activations has."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer

from bertvision.commands.options import Csv, Json, Plot, Scheduler, Store, Workspace, runs_verb


def _shared(
    seed: Annotated[int, typer.Option(help="Seed of what is sampled.")] = 0,
    scheduler: Scheduler = "threads",
    plot: Plot = None,
    csv: Csv = None,
    workspace: Workspace = None,
    store: Store = None,
    as_json: Json = False,
) -> None:
    """What stands behind the options of its own."""


def runs_analysis(command: Callable[..., None]) -> Callable[..., None]:
    """As `runs_verb`, of a command that names what is its own alone.

    Args:
        command: of an analysis; `_shared` has the other parameters of its verb.
    """
    signature = inspect.signature(command, eval_str=True)
    shared = inspect.signature(_shared, eval_str=True).parameters.values()
    parameters = [*signature.parameters.values(), *shared]

    @wraps(command)
    def run(**given: Any) -> None:
        runs_verb(command)(**given)

    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
