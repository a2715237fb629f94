"""Early exits of a snapshot, out of its store: which output layers, and what they say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.models import Kind
from bertvision.models.outputs import ClassOutput, SpanOutput, pad_packed
from bertvision.pipelines.analysis.exiting.confidence import fitting_criteria
from bertvision.pipelines.analysis.exiting.exits_result import ExitsResult
from bertvision.pipelines.analysis.exiting.measure import measure_exits
from bertvision.pipelines.analysis.kept import Given, Job, kept_or_measured
from bertvision.pipelines.encoders.weights import weights_of
from bertvision.pipelines.records import read_record
from bertvision.pipelines.results.systems import read_windows
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.registry import head_kind
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.training.evaluate import run_over
from bertvision.pipelines.variants.exits import NAME, ExitLayers, Exits, ExitsDetached
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.workspace.heads import head_activations
from bertvision.pipelines.workspace.records import BertScores, read_snapshot_info
from bertvision.pipelines.workspace.reproduce import BERT_COMMAND
from bertvision.pipelines.workspace.workspace import Workspace


def run_exits(
    workspace: Workspace,
    tag: str,
    *,
    split: str = "dev",
    criteria: Sequence[str] | None = None,
    tolerance: float | None = None,
    plot: Path | None = None,
) -> ExitsResult:
    """Score against layers, where windows leave a snapshot at the first layer that is sure enough.

    What the output layers below the last say is computed from the stored hidden states that they
    read; what the last one says, fine-tuning kept beside its scores. No encoder is run.

    Args:
        workspace: with the snapshot and the activations.
        tag: the snapshot.
        split: ``dev`` or ``tune``.
        criteria: of `confidence.CRITERIA`; None is all that fit the task.
        tolerance: scores that differ by less agree (regression); None is a tenth of the standard
            deviation of what the last layer gives.
        plot: SVG file to write; by default in ``analysis/`` of the workspace.

    Raises:
        InputError: the snapshot has no output layers below the last, a criterion does not fit the
            task, a layer is not stored, or ``plot`` does not end in ``.svg``.
        UnknownNameError: the hidden states that they read are not stored.
        WorkspaceError: fine-tuning kept no answers of this split, or those of other weights.
    """
    info = read_snapshot_info(workspace.require_snapshot(tag))
    found = [v for v in load_variants(info.finetune.variant) if isinstance(v, Exits)]
    depth = workspace.config.model.num_hidden_layers
    layers = tuple(at for of in found for at, weight in of.weights(depth).items() if weight)
    if len(layers) < 2:
        raise InputError(
            f"snapshot {tag} of {workspace.root} has no trained output layer below its last: "
            "`bertvision finetune --variant exits:all` in another --workspace makes such snapshots"
        )
    if split not in ("dev", "tune"):
        raise InputError(f"--split {split}: what the last layer says is kept of dev and tune alone")
    task, kind = load_task(info.task.name), head_kind(info.task.name)
    scores = task.kind != "span" and task.outputs(info.task) == 1
    chosen = fitting_criteria(criteria, scores=scores)
    if tolerance is not None and not scores:
        raise InputError(f"--tolerance {tolerance:g} is for scores, and {task.name} has none")
    stored = head_activations(workspace, tag, kind, split)
    stored.layer_positions(layers[:-1])

    def measure() -> ExitsResult:
        output_layers, weights = _output_layers(workspace, tag, found[0], kind)
        windows = read_windows(workspace, tag, split)
        full, threshold = _of_the_last(workspace, tag, split, windows, stored)
        modules = [_Exit(output_layers, i, at, kind) for i, at in enumerate(layers[:-1])]
        below = run_over(modules, task, stored, "32", f"exits {tag} {split}", layers=layers[:-1])
        logits = [Logits(_in_order(arrays, stored, windows, task), windows) for arrays in below]
        return measure_exits(
            task,
            [*logits, full],
            layers,
            chosen,
            tolerance=tolerance,
            threshold=threshold,
            weights=[weights[at] for at in layers],
            name=f"{tag}/{split}",
        )

    every = ",".join(fitting_criteria(None, scores=scores))
    options = {
        "criterion": Given(",".join(chosen), every, named="-".join(chosen)),
        "tolerance": Given(tolerance, None, named=True),
    }
    job = Job(ExitsResult, (tag,), (split,), options, (stored,))
    return kept_or_measured(workspace, job, measure, plot)


class _Exit(nn.Module):
    """An output layer as a head: of packed hidden states.

    Args:
        exits: the output layers.
        place: of its layer on the layer axis of what is read.
        layer: its number.
        kind: of the task.
    """

    def __init__(self, exits: ExitLayers, place: int, layer: int, kind: Kind) -> None:
        super().__init__()
        self.exits, self.place, self.layer, self.kind = exits, place, layer, kind

    def forward(self, states: Tensor, lengths: Tensor) -> SpanOutput | ClassOutput:
        """Logits of packed hidden states (tokens, layers, hidden), with lengths (batch,)."""
        padded = pad_packed(states[:, self.place], lengths, fill=0.0)
        return self.exits.forward(self.layer, padded, self.kind)


def _output_layers(
    workspace: Workspace, tag: str, variant: Exits, kind: Kind
) -> tuple[ExitLayers, dict[int, float]]:
    """The output layers that a snapshot keeps, and the weights of the losses by layer."""
    config, folder = workspace.config, workspace.snapshot_dir(tag)
    weights = variant.weights(config.model.num_hidden_layers)
    *below, _ = weights
    outputs = 2 if kind == "span" else load_task(config.task.name).outputs(config.task)
    exits = ExitLayers(below, config.model.hidden_size, outputs, learned=variant.learned)
    names = list(exits.state_dict())
    held = weights_of(folder, [f"{NAME}.{name}" for name in names])
    exits.load_state_dict({name: held[f"{NAME}.{name}"] for name in names})
    if exits.scores is not None:
        weights = dict(zip(weights, exits.scores.detach().softmax(0).tolist(), strict=True))
    if isinstance(variant, ExitsDetached):
        weights = dict.fromkeys(weights, float("nan"))
    return exits.eval(), weights


def _of_the_last(
    workspace: Workspace, tag: str, split: str, windows: WindowIndex, stored: ActivationSplit
) -> tuple[Logits, float | None]:
    """What the last layer says, and the threshold of no answer that it answers with."""
    folder, name = workspace.bert_dir(tag), f"{split}.safetensors"
    kept = read_record(folder / "metrics.json", BertScores, BERT_COMMAND)
    if kept.weights_sha256 != stored.record.provenance.get("weights_sha256"):
        raise WorkspaceError(
            f"{folder} has answers of other weights than {stored.name} was extracted with: "
            f"`{BERT_COMMAND}` makes those, `bertvision extract --checkpoint {tag}` these"
        )
    logits = Logits.load(folder / name, windows, BERT_COMMAND, kept.sha256.get(name))
    return logits, kept.rules["n-best"]["threshold"] if "n-best" in kept.rules else None


def _in_order(
    arrays: dict[str, npt.NDArray[np.float32]],
    stored: ActivationSplit,
    windows: WindowIndex,
    task: Task,
) -> dict[str, Any]:
    """Logits in the order of the data, out of the stored one."""
    lengths = stored.plan.n_tokens.astype(np.int64)
    place = np.argsort(stored.plan.example_id, kind="stable")
    same = len(place) == len(windows.n_tokens)
    if task.kind == "span":
        same = same and np.array_equal(lengths[place], windows.n_tokens)
        first = np.cumsum(lengths) - lengths
        tokens = [np.arange(first[at], first[at] + lengths[at]) for at in place]
        place = np.concatenate(tokens)
    if not same:
        raise ProvenanceError(
            f"{stored.name} holds other windows than the data make now: extract it again, in "
            "another --store"
        )
    return {name: values[place] for name, values in arrays.items()}
