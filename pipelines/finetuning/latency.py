"""How long an answer takes: the encoder with a head beside the encoder with its output layer.

A head that takes no hidden state above layer k needs an encoder of k layers, and only these are
run. All systems answer the same windows, in turns, in one process: what the machine does besides
meets all of them, and speed-ups are medians of the ratios within a round. Compression papers give
this number (Sanh et al. 2019, arXiv:1910.01108, table 3).

An encoder with its linear layers in 8 bits, scored as the encoder itself is.

Dynamic quantisation (Zafrir et al. 2019, arXiv:1910.06188, without their training; as torch's
tutorial does it to BERT): weights are int8 with a scale for each output channel, inputs of a layer
are rounded to 8 bits with a scale of their own as they come, products are summed in integers. The
embeddings, LayerNorms, attention products and the task's output layer stay in float32. It needs no
data and no training, and runs on CPUs alone.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.pipelines.encoders.loading import load_model, pad_id, takes_token_types
from bertvision.pipelines.finetuning.baseline import kept_scores, scored
from bertvision.pipelines.finetuning.latency_record import (
    NAME,
    Latencies,
    Latency,
    QuantisedScores,
    latency_file,
    quantise_command,
    quantised_dir,
)
from bertvision.pipelines.poolings import SpecialEnds, check_of_texts, pool
from bertvision.pipelines.precision import Precision, autocast, device, resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.records import write_record
from bertvision.pipelines.tasks.windows import Batch, collate, special_ends
from bertvision.pipelines.training.trained_head import LoadedHead, load_head
from bertvision.pipelines.workspace.heads import find_head
from bertvision.pipelines.workspace.runs import Run
from bertvision.pipelines.workspace.snapshots import Snapshot, load_snapshot, snapshot_at
from bertvision.pipelines.workspace.workspace import Workspace

_CPU = torch.device("cpu")


def quantise(workspace: Workspace, tag: str) -> QuantisedScores:
    """Score a snapshot on dev with its linear layers in 8 bits; what is there is kept.

    Where the workspace's own scores are not of float32, it is scored in float32 too: beside them, 8
    bits would be told together with the other arithmetic.

    Args:
        workspace: Workspace with the snapshot.
        tag: Tag of the snapshot.

    Returns:
        The contents of ``quantised/<tag>/metrics.json``.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: this torch has no kernels for it, or the encoder no linear layers.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    source, folder = workspace.require_snapshot(tag), quantised_dir(workspace, tag)
    kept_before = kept_scores(workspace, tag, folder, QuantisedScores, quantise_command(tag))
    if kept_before is not None:
        return kept_before
    snapshot = load_snapshot(source)
    model, layers = quantised(snapshot.model)
    again, whole = quantise_command(tag), None
    measured = scored(workspace, snapshot._replace(model=model), folder, _CPU, again)
    if resolve_precision(workspace.config.finetune.precision) != "32":
        whole = scored(workspace, snapshot, folder / "float32", _CPU, again).rules
    scores = QuantisedScores(
        **measured.model_dump(),
        layers=len(layers),
        bytes=_bytes(snapshot.model.base_model, layers),
        float_bytes=_bytes(snapshot.model.base_model, {}),
        precision="32",
        whole=whole,
        engine=torch.backends.quantized.engine,
    )
    write_record(folder / "metrics.json", scores)
    return scores


def quantised(model: PreTrainedModel) -> tuple[PreTrainedModel, dict[str, nn.Linear]]:
    """A copy of a model with its encoder's linear layers in 8 bits, on the CPU.

    Args:
        model: Model in float32; left as it is.

    Returns:
        The copy, in evaluation mode, and the layers of ``model`` that are quantised, by name.

    Raises:
        InputError: this torch has no kernels for it, or the encoder has no linear layers.
    """
    layers = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    if not layers:
        raise InputError(
            f"{model.config.model_type} has no linear layers that torch can quantise: it keeps its "
            "weights in layers of its own"
        )
    if torch.backends.quantized.engine == "none":
        raise InputError(
            f"torch {torch.__version__} has no 8-bit kernels for this CPU (its quantised engines: "
            f"{', '.join(torch.backends.quantized.supported_engines) or 'none'})"
        )
    with warnings.catch_warnings():
        # deprecated in favour of torchao, which is no dependency
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*quantize", category=UserWarning)
        try:
            from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
        except ImportError:
            raise InputError(
                f"torch {torch.__version__} has no dynamic quantisation any more: install an "
                "earlier one, such as torch 2.8"
            ) from None
        made = copy.deepcopy(model).to(_CPU).eval()  # type: ignore[arg-type]
        chosen = dict.fromkeys(layers, per_channel_dynamic_qconfig)
        quantize_dynamic(made, chosen, dtype=torch.qint8, inplace=True)
    return made, layers


def _bytes(model: nn.Module, layers: dict[str, nn.Linear]) -> int:
    """Size of a model's weights, where these layers have int8 ones.

    A layer of (out, in) weights has a byte for each, and for each output channel a scale (8 bytes)
    and a zero point (8), as torch keeps them.
    """
    weights = {id(layer.weight): layer.weight for layer in layers.values()}
    whole = sum(p.numel() * p.element_size() for p in model.parameters() if id(p) not in weights)
    return whole + sum(w.numel() + 16 * w.shape[0] for w in weights.values())


class _System(NamedTuple):
    """Something that answers windows."""

    name: str
    trained_on: str | None
    layers: int
    """Transformer layers that are run."""
    answer: Callable[[Batch], object]
    weights_sha256: str | None = None
    """Digest of an encoder of another workspace."""


def measure_latency(
    workspace: Workspace,
    trained: Sequence[tuple[str, str]],
    *,
    tag: str,
    windows: int = 32,
    batch_size: int = 1,
    rounds: int = 5,
    precision: str = "auto",
    in_8_bits: bool = False,
    beside: Sequence[str] = (),
) -> Latencies:
    """Measure seconds per window of BERT and of heads on it, and keep them in the workspace.

    Reading texts and making windows of them is not counted: it is the same for all.

    Args:
        workspace: Workspace with the snapshot and the heads.
        trained: Snapshot that each head was trained on, and its run's name.
        tag: snapshot of the encoder.
        windows: Windows of dev, evenly spread; all where there are fewer.
        batch_size: windows of a forward pass.
        rounds: in each of which every system answers all windows; one more goes before them.
        precision: arithmetic of all: auto, 32 or bf16; with ``in_8_bits`` auto is 32.
        in_8_bits: also the encoder with 8-bit linear layers, whose other parts are in float32.
        beside: encoders of other workspaces of the same tokenizer, ``FOLDER:TAG``, such as
            students.

    Returns:
        The contents of ``latency/<tag>.json``, which an earlier measurement there gives way to.

    Raises:
        UnknownNameError: there is no such head or snapshot.
        WorkspaceError: a head or the snapshot is damaged.
        InputError: 8 bits are asked for beside systems that run on a GPU or in bf16, or an encoder
            beside has another tokenizer.
    """
    if in_8_bits and device().type != "cpu":
        raise InputError(
            f"--quantised: 8-bit layers run on a CPU, and all systems here on {device().type}; "
            "hide the GPU (CUDA_VISIBLE_DEVICES=) to measure them beside each other"
        )
    if in_8_bits and precision == "bf16":
        raise InputError(
            "--quantised --precision bf16: what is not in 8 bits is in float32, and beside bf16 a "
            "speed-up would be of both; leave --precision out"
        )
    tag = SnapshotTag(tag)
    arithmetic = resolve_precision("32" if in_8_bits and precision == "auto" else precision)
    folder = workspace.require_snapshot(tag)
    snapshot = load_snapshot(folder)
    sample = _Sample.of(workspace, snapshot, windows, batch_size)
    encoder = cache(lambda layers: _to_device(load_model(folder, num_hidden_layers=layers)))
    systems = [_bert(snapshot.model)]
    if in_8_bits:
        systems.append(_in_8_bits(snapshot.model))
    systems += [_beside(place, snapshot) for place in beside]
    for trained_on, name in trained:
        head = load_head(find_head(workspace, trained_on, name), Run.parse(name))
        deepest = min(max(head.config.layers), workspace.config.model.num_hidden_layers)
        check_of_texts(head.config.tokens, name)
        answer = _with_head(head, encoder(deepest), special_ends(snapshot.tokenizer))
        systems.append(_System(name, str(SnapshotTag(trained_on)), deepest, answer))
    seconds = _measured(systems, sample.batches, rounds, arithmetic)
    latencies = Latencies(
        tag=str(tag),
        weights_sha256=snapshot.info.weights_sha256,
        windows=sample.windows,
        tokens=sample.tokens,
        batch_size=batch_size,
        rounds=rounds,
        precision=arithmetic,
        device=device().type,
        threads=torch.get_num_threads(),
        systems=tuple(
            Latency(
                name=system.name,
                trained_on=system.trained_on,
                layers=system.layers,
                weights_sha256=system.weights_sha256,
                seconds=float(np.median(spent)) / sample.windows,
                low=float(spent.min()) / sample.windows,
                high=float(spent.max()) / sample.windows,
                speed_up=float(np.median(seconds[0] / spent)),
            )
            for system, spent in zip(systems, seconds, strict=True)
        ),
    )
    path = latency_file(workspace, tag)
    path.parent.mkdir(exist_ok=True)
    write_record(path, latencies)
    return latencies


class _Sample(NamedTuple):
    """Windows of dev, as they are given to all systems."""

    batches: list[Batch]
    windows: int
    tokens: float
    """Mean length of a window."""

    @classmethod
    def of(cls, workspace: Workspace, snapshot: Snapshot, most: int, batch_size: int) -> _Sample:
        windows = workspace.windows("dev", snapshot.tokenizer)
        rows = np.linspace(0, len(windows) - 1, min(most, len(windows))).astype(np.int64)
        padding, model = pad_id(snapshot.tokenizer, snapshot.model.config), snapshot.model
        batches = [
            collate(
                *(windows, windows.first_token, rows[i : i + batch_size], padding),
                token_types=takes_token_types(model),
            )
            for i in range(0, len(rows), batch_size)
        ]
        return cls(batches, len(rows), float(windows.n_tokens[rows].mean()))


def _to_device(model: PreTrainedModel) -> PreTrainedModel:
    model.to(device()).eval()  # type: ignore[arg-type]
    return model


def _bert(model: PreTrainedModel) -> _System:
    """The encoder with the output layer that it was fine-tuned with."""
    _to_device(model)
    layers = int(model.config.num_hidden_layers)
    return _System("BERT", None, layers, lambda batch: model(**batch.to(device()).inputs))


def _in_8_bits(model: PreTrainedModel) -> _System:
    """The encoder with 8-bit linear layers, which take float32 alone."""
    made, _ = quantised(model)

    def answer(batch: Batch) -> object:
        with autocast("32", device()):
            return made(**batch.inputs)

    return _System(NAME, None, int(model.config.num_hidden_layers), answer)


def _beside(place: str, snapshot: Snapshot) -> _System:
    """An encoder of another workspace with its output layer, which reads the same windows."""
    workspace, tag = snapshot_at(place, "--beside")
    other = load_snapshot(workspace.snapshot_dir(tag))
    if other.info.tokenizer_sha256 != snapshot.info.tokenizer_sha256:
        raise InputError(
            f"--beside {place}: its tokenizer is another, so that it has other windows of the same "
            "texts: measure it in its own workspace"
        )
    own = _bert(other.model)
    return own._replace(
        name=f"{workspace.root.name}:{tag}", weights_sha256=other.info.weights_sha256
    )


def _with_head(
    head: LoadedHead, model: PreTrainedModel, special: SpecialEnds
) -> Callable[[Batch], object]:
    """As much of the encoder as a head takes hidden states of, and the head."""
    module, tokens = head.module.to(device()), head.config.tokens

    def answer(batch: Batch) -> object:
        output = model(**batch.to(device()).text, output_hidden_states=True)
        states = [*output.hidden_states]
        if tokens == "cls":  # and the pooler output behind
            states = [state[:, 0] for state in states]
            if getattr(output, "pooler_output", None) is not None:
                states.append(output.pooler_output)
            return module(stacked(states, 1), torch.ones(len(states[0]), dtype=torch.long))
        mask = batch.attention_mask.bool()
        packed, lengths = stacked(states, 2)[mask.to(device())], mask.sum(dim=1)
        if tokens == "all":
            return module(packed, lengths)
        return module(pool(packed, lengths.numpy(), tokens, special), torch.ones_like(lengths))

    def stacked(states: Sequence[Tensor], dim: int) -> Tensor:
        return torch.stack([states[layer] for layer in head.config.layers], dim=dim)

    return answer


@torch.inference_mode()
def _measured(
    systems: Sequence[_System], batches: Sequence[Batch], rounds: int, precision: Precision
) -> npt.NDArray[np.float64]:
    """Seconds that each system takes for all batches, (systems, rounds)."""
    seconds = np.empty((len(systems), rounds + 1))
    with progress((rounds + 1) * len(systems), "latency", "pass") as bar:
        for each in range(rounds + 1):
            for i, system in enumerate(systems):
                _wait_for_device()
                began = time.perf_counter()
                for batch in batches:
                    with autocast(precision, device()):
                        system.answer(batch)
                _wait_for_device()
                seconds[i, each] = time.perf_counter() - began
                bar.update(1)
    return seconds[:, 1:]


def _wait_for_device() -> None:
    """Wait until an accelerator has done its work, which is queued ahead of it."""
    if device().type != "cpu":
        torch.accelerator.synchronize()
