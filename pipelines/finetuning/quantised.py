"""An encoder with its linear layers in 8 bits, scored as the encoder itself is.

Dynamic quantisation (Zafrir et al. 2019, arXiv:1910.06188, without their training; as torch's
tutorial does it to BERT): weights are int8 with a scale for each output channel, inputs of a layer
are rounded to 8 bits with a scale of their own as they come, products are summed in integers. The
embeddings, LayerNorms, attention products and the task's output layer stay in float32. It needs no
data and no training, and runs on CPUs alone.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn
from transformers import PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.finetuning.baseline import kept_scores, scored
from bertvision.pipelines.finetuning.latency_record import (
    QuantisedScores,
    quantise_command,
    quantised_dir,
)
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.records import write_record
from bertvision.pipelines.workspace.snapshots import load_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

_CPU = torch.device("cpu")


def quantise(workspace: Workspace, tag: str) -> QuantisedScores:
    """Score a snapshot on dev with its linear layers in 8 bits; what is there is kept.

    Where the workspace's own scores are not of float32, it is scored in float32 too: beside them, 8
    bits would be told together with the other arithmetic.

    Args:
        workspace: with the snapshot.
        tag: of the snapshot.

    Returns:
        The contents of ``quantised/<tag>/metrics.json``.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: this torch has no kernels for it, or the encoder no linear layers.
        WorkspaceError: the snapshot or the data changed since it was made.
    """
    source, folder = workspace.require_snapshot(tag), quantised_dir(workspace, tag)
    held = kept_scores(workspace, tag, folder, QuantisedScores, quantise_command(tag))
    if held is not None:
        return held
    snapshot = load_snapshot(source)
    model, layers = quantised(snapshot.model)
    again, whole = quantise_command(tag), None
    found = scored(workspace, snapshot._replace(model=model), folder, _CPU, again)
    if resolve_precision(workspace.config.finetune.precision) != "32":
        whole = scored(workspace, snapshot, folder / "float32", _CPU, again).rules
    scores = QuantisedScores(
        **found.model_dump(),
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
        model: in float32; left as it is.

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
