"""Section about how long answers take."""

from __future__ import annotations

from bertvision.errors import counted
from bertvision.pipelines.finetuning.latency_record import FILES, Latencies, read_latencies
from bertvision.pipelines.report.section import Section
from bertvision.pipelines.report.table import Table
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.results.rows import Row
from bertvision.pipelines.workspace.workspace import Workspace


def latency_section(workspace: Workspace, damaged: list[str]) -> list[Section]:
    """What was measured of each snapshot; none where nothing was.

    Args:
        workspace: that it is of.
        damaged: gets a message for each file that is damaged and left out.
    """
    measured = read_latencies(workspace, damaged)
    if not measured:
        return []
    table = Table(
        "latency",
        "Milliseconds for a window: medians over rounds",
        [
            Column("name", "system", "text"),
            Column("layers", "layers run", "count"),
            Column("ms", "ms"),
            Column("low_ms", "fastest round"),
            Column("high_ms", "slowest round"),
            Column("speed_up", "inference speed-up (×)", digits=2),
        ],
        [row for each in measured for row in _rows(each)],
        FILES,
        "bertvision latency [HEAD…] --checkpoint TAG",
        group="group",
        more=["checkpoint", "windows", "batch_size", "rounds", "precision", "device", "threads"],
    )
    lead = (
        "What an answer costs: the forward pass of as many layers as the system takes hidden "
        "states of, and its head. All systems of a snapshot answered the same windows, in turns; "
        "speed-up is BERT's time over the system's, the median of the ratios within a round. "
        "Reading and tokenising the text is not in it."
    )
    return [Section("latency", "Inference", lead, tables=[table])]


def _rows(measured: Latencies) -> list[Row]:
    about = measured.model_dump(include={"windows", "batch_size", "rounds", "precision"})
    group = (
        f"{measured.tag}: {counted(measured.windows, 'window')} of {measured.tokens:.0f} tokens in "
        f"the mean, {measured.batch_size} at a time; {counted(measured.rounds, 'round')}; "
        f"{measured.device}, {counted(measured.threads, 'thread')}, precision {measured.precision}"
    )
    return [
        {
            **about,
            "group": group,
            "checkpoint": measured.tag,
            "device": measured.device,
            "threads": measured.threads,
            "name": system.name,
            "layers": system.layers,
            "ms": 1e3 * system.seconds,
            "low_ms": 1e3 * system.low,
            "high_ms": 1e3 * system.high,
            "speed_up": system.speed_up,
        }
        for system in measured.systems
    ]
