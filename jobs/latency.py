"""How long answers take, and what an encoder answers in 8 bits."""

from __future__ import annotations

from typing import Annotated, ClassVar

from bertvision.errors import counted
from bertvision.jobs.show import Shown, Values, score_columns
from bertvision.pipelines.declare import PrecisionOption, WorkspacePath, job
from bertvision.pipelines.finetuning.latency_record import (
    NAME,
    Latencies,
    QuantisedScores,
    system_name,
)
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import (
    Names,
    Tag,
    parse_names,
    parse_tag,
)
from bertvision.pipelines.results.columns import Column, columns, table_of
from bertvision.pipelines.tasks.scores import headline
from bertvision.pipelines.text import fill
from bertvision.pipelines.workspace.checks import check_learns, check_trained_heads, find_workspace
from bertvision.pipelines.workspace.heads import only_tag, trained_heads
from bertvision.pipelines.workspace.heads import trained_on as trained_where
from bertvision.pipelines.workspace.records import read_run_config
from bertvision.pipelines.workspace.workspace import Workspace


class LatencyTable(Shown, Latencies):
    """How long systems take for a window, measured in turns."""

    rows_in: ClassVar[str] = "systems"

    def table(self, values: Values) -> str:
        """Milliseconds per window of each system, with the range over rounds, and the speed-up."""
        shown = [
            *columns("text", name="system", layers="layers run"),
            Column("ms", "ms per window"),
            Column("range", "fastest to slowest round", "text"),
            Column("speed_up", "speed-up", digits=2),
        ]
        rows = [
            {
                **system,
                "name": system_name(system["name"], system["trained_on"], values["tag"]),
                "ms": 1e3 * system["seconds"],
                "range": f"{1e3 * system['low']:.1f} to {1e3 * system['high']:.1f}",
            }
            for system in values["systems"]
        ]
        legend = (
            f"Medians of {values['rounds']} rounds, in each of which every system answers the same "
            f"{counted(values['windows'], 'window')} of {values['tokens']:.0f} tokens in the mean, "
            f"{values['batch_size']} at a time, on {values['device']} with "
            f"{counted(values['threads'], 'thread')} in precision {values['precision']}.  "
            "Layers run: the encoder is cut above the last hidden state that the head takes.  "
            "Speed-up: BERT's time over the system's."
        )
        return f"{table_of(shown, rows)}\n\n{fill(legend)}"


@job
def latency(
    heads: Names | None = None,
    *,
    checkpoint: Tag | None = None,
    trained_on: Tag | None = None,
    windows: Annotated[int, Option(ge=1)] = 32,
    batch_size: Annotated[int, Option(ge=1)] = 1,
    rounds: Annotated[int, Option(ge=1)] = 5,
    precision: PrecisionOption = "auto",
    quantised: bool = False,
    beside: Names | None = None,
    workspace: WorkspacePath = None,
) -> LatencyTable:
    """Time an answer: encoder and head, beside BERT itself.

    A head that takes none of the upper hidden states needs only the layers below them.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> measured = bertvision.latency(checkpoint="1e", windows=2, rounds=1)
        >>> [system.name for system in measured.systems][:1]
        ['BERT']

    Args:
        heads: Names of trained heads; by default all, one of each kind.
        checkpoint: Snapshot of the encoder; by default the one heads were trained on.
        trained_on: Snapshot the heads were trained on; by default the same.
        windows: Windows of dev, evenly spread.
        batch_size: Windows of a forward pass.
        rounds: Rounds, in each of which every system answers all windows.
        quantised: Also the encoder with 8-bit linear layers, on a CPU.
        beside: Encoders of other workspaces, such as students: ../mrpc-4:1e.

    Raises:
        UnknownNameError: there is no such head or snapshot.
        WorkspaceError: a head or the snapshot is damaged.
        InputError: an option is wrong, or does not fit this machine.
    """
    names = parse_names(heads) if heads else []
    target = None if checkpoint is None else parse_tag(checkpoint)
    source = None if trained_on is None else parse_tag(trained_on)
    space = find_workspace(workspace)
    if source is None:
        source = target or (
            trained_where(space, names)
            if names
            else only_tag({tag for tag, _ in trained_heads(space)}, "heads were trained on")
        )
    target = target or source
    space.require_snapshot(target)
    if names:
        check_trained_heads(space, names, source)
    else:
        names = _one_of_each(space, source)
    from bertvision.pipelines.finetuning.latency import measure_latency

    latencies = measure_latency(
        space,
        [(source, name) for name in names],
        tag=target,
        windows=windows,
        batch_size=batch_size,
        rounds=rounds,
        precision=precision,
        in_8_bits=quantised,
        beside=parse_names(beside) if beside else (),
    )
    return LatencyTable.model_validate(latencies.model_dump())


class QuantisedTable(Shown, QuantisedScores):
    """Scores and size of an encoder with 8-bit linear layers."""

    def table(self, values: Values) -> str:
        """Its scores, beside those in float32 where BERT's own are not, and the encoder's size."""
        plain = {key: values[key] for key in ("snapshot", "layers", "bytes", "float_bytes")}
        rows = [{**plain, "system": NAME, **headline(values["rules"])}]
        if values["whole"] is not None:  # BERT's own scores are of another precision
            whole = {"system": "BERT, float32", "layers": 0, "bytes": values["float_bytes"]}
            rows.append({**plain, **whole, **headline(values["whole"])})
        shown = [
            *columns("text", system="system", snapshot="snapshot"),
            *score_columns(rows[:1]),
            Column("layers", "8-bit layers", "count"),
            *columns("size", bytes="size", float_bytes="in float32"),
        ]
        return table_of(shown, rows)


@job
def quantise(
    checkpoint: Annotated[Tag | None, Option(flag="--checkpoint")] = None,
    *,
    workspace: WorkspacePath = None,
) -> QuantisedTable:
    """Score a snapshot with 8-bit linear layers.

    It is scored on dev, on a CPU. It then stands among the results as bert-int8; `bertvision
    latency --quantised` measures it.

    Examples:
        >>> import bertvision
        >>> scored = bertvision.quantise("1e")
        >>> scored.layers, scored.bytes < scored.float_bytes
        (12, True)

    Args:
        checkpoint: The snapshot; by default the only one there is.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: the workspace has no task, or this torch cannot quantise its encoder.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    tag = None if checkpoint is None else parse_tag(checkpoint)
    space = find_workspace(workspace)
    check_learns(space)
    tag = tag or only_tag(space.snapshots(), "snapshots")
    space.require_snapshot(tag)
    from bertvision.pipelines.finetuning.latency import quantise as run

    return QuantisedTable.model_validate(run(space, tag).model_dump())


def _one_of_each(space: Workspace, tag: str) -> list[str]:
    """The heads trained on a snapshot, without those that differ in seed or data alone.

    Of a class of one's own none is taken: its module is imported where its path was named.
    """
    commands: dict[tuple[str, str], str] = {}
    for name in (name for on, name in trained_heads(space) if on == tag):
        config = read_run_config(space.head_dir(tag, name))
        if ":" not in config.head:
            commands.setdefault((config.head, config.variant), name)
    return list(commands.values())
