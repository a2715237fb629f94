"""The output layer that a checkpoint brings from another fine-tuning: kept, reordered or made new.

Its rows mean something only by the names of their classes (``id2label``). Where these are the
task's, in whatever order, the rows are put into the task's order; otherwise the layer is made new,
as a layer that predicts other classes is no start for these.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from bertvision.errors import InputError
from bertvision.pipelines.encoders.loading import (
    PretrainedEncoder,
    load_model,
    load_reported,
    new_model,
    quiet_transformers,
)
from bertvision.pipelines.encoders.weights import weight_names

OutputOrigin = Literal["kept", "reordered", "new"]
"""Whether fine-tuning begins with the output layer of the checkpoint."""
_GENERIC = re.compile(r"^LABEL_(\d+)$", re.ASCII)
_SHOWN = 6


class OutputChoice(NamedTuple):
    """Choice of the output layer of a checkpoint.

    Attributes:
        origin: Whether it is kept, reordered or made new; None where the checkpoint has none.
        reason: Sentence about it, for the user; empty where there is nothing to say.
    """

    origin: OutputOrigin | None = None
    reason: str = ""


def choose_output(
    checkpoint: PretrainedEncoder, model_class: Any, options: Mapping[str, Any]
) -> OutputChoice:
    """Decide whether a task begins with the output layer that a checkpoint has.

    Args:
        checkpoint: Checkpoint with its weights on this machine.
        model_class: Class of the encoder with the task's output layer, as of `load_model`.
        options: Settings of its configuration that the task asks for; ``id2label`` names the
            classes in the task's order.
    """
    model = _skeleton(checkpoint.config, model_class, options)
    if not set(_output_names(model)) & set(weight_names(checkpoint.folder)):
        return OutputChoice()
    name, wanted = checkpoint.name_or_path, options.get("id2label")
    if wanted is None:  # starts and ends of spans, scores of sentences
        return OutputChoice("kept", f"the output layer of {name} is kept")
    theirs = _class_names(checkpoint.config)
    ours = [wanted[i] for i in range(len(wanted))]
    if len(ours) == 1 and len(theirs) == 1:  # one score has no order to mistake
        return OutputChoice("kept", f"the output layer of {name}, of one score, is kept")
    rows = _rows(theirs, ours)
    whole = _last_linear(model) is None  # layers whose rows are not classes alone
    if rows is None or (whole and rows != sorted(rows)):
        return OutputChoice("new", _why_new(name, theirs, ours))
    if rows == sorted(rows):
        return OutputChoice("kept", f"the output layer of {name}, of {_list(ours)}, is kept")
    return OutputChoice(
        "reordered",
        f"the output layer of {name} is kept: its classes, {_list(theirs)}, are put into the "
        f"order of the data's, {_list(ours)}",
    )


def load_with_output(
    folder: Path,
    model_class: Any,
    config: PreTrainedConfig,
    options: Mapping[str, Any],
    *,
    origin: OutputOrigin | None,
    seed: int,
) -> PreTrainedModel:
    """Load a checkpoint with the output layer that `choose_output` decided on.

    Args:
        folder: Folder of the checkpoint.
        model_class: As of `load_model`.
        config: Configuration of the checkpoint, whose ``id2label`` names its own classes.
        options: Settings of the configuration that the task asks for.
        origin: Decision; None takes what the checkpoint has, as `load_model` does.
        seed: Seed of a new output layer.

    Raises:
        InputError: as of `load_model`, or the names of the classes changed since the decision.
    """
    if origin != "new":
        model = load_model(folder, model_class, **options)
        if origin == "reordered":
            _reorder(model, folder, config, options)
        return model
    model, _ = load_reported(folder, model_class, resize_output=True, **options)
    fresh = new_model(config, model_class, seed=seed, **options).state_dict()
    model.load_state_dict({name: fresh[name] for name in _output_names(model)}, strict=False)
    return model


def _reorder(
    model: PreTrainedModel, folder: Path, config: PreTrainedConfig, options: Mapping[str, Any]
) -> None:
    """Put the rows of the last layer into the order of the task's classes."""
    theirs, ours = _class_names(config), list(options["id2label"].values())
    rows, layer = _rows(theirs, ours), _last_linear(model)
    if rows is None or layer is None:
        raise InputError(
            f"{folder / 'config.json'} names the classes {_list(theirs)} now, and named "
            f"{_list(ours)}, in another order, when the workspace was made: put the old names "
            "back, or start another --workspace"
        )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(parameter[rows].clone())


def _class_names(config: PreTrainedConfig) -> list[str]:
    """Names of the classes of a checkpoint, in the order of its rows."""
    return [str(name) for _, name in sorted((config.id2label or {}).items())]


def _rows(theirs: Sequence[str], ours: Sequence[str]) -> list[int] | None:
    """Row of the checkpoint for each class of the task; None where the names do not tell."""
    if len(theirs) != len(ours):
        return None
    # LABEL_1 tells the class 1, and no class that has a name
    theirs, ours = ([_GENERIC.sub(r"\1", name) for name in names] for names in (theirs, ours))
    places = {_plain(name): row for row, name in enumerate(theirs)}
    if len(places) != len(theirs) or {_plain(name) for name in ours} != set(places):
        return None
    return [places[_plain(name)] for name in ours]


def _plain(name: str) -> str:
    """Name of a class without case; a space, a hyphen and an underscore are one."""
    return re.sub(r"[\s_-]+", "_", name.strip().casefold())


def _why_new(name: str, theirs: Sequence[str], ours: Sequence[str]) -> str:
    said = (
        f"the output layer of {name} is of {_classes(theirs)}, and the data have {_classes(ours)}: "
        "fine-tuning begins with a new output layer"
    )
    if len(theirs) == len(ours):
        said += (
            "; to begin with that of the checkpoint, name its classes as the data do, under "
            "id2label in its config.json"
        )
    return said


def _classes(names: Sequence[str]) -> str:
    return f"{len(names)} classes ({_list(names)})" if len(names) > 1 else f"one {names[0]}"


def _list(names: Sequence[str]) -> str:
    more = f", … ({len(names)})" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _skeleton(
    config: PreTrainedConfig, model_class: Any, options: Mapping[str, Any]
) -> PreTrainedModel:
    """The model without numbers."""
    config = copy.deepcopy(config)
    for name, value in options.items():
        setattr(config, name, value)
    with torch.device("meta"), quiet_transformers():
        model: PreTrainedModel = model_class.from_config(config, trust_remote_code=False)
    return model


def _last_linear(model: PreTrainedModel) -> nn.Linear | None:
    """The layer that has a row for each class; None of an output layer of a task's own."""
    if hasattr(model, "output_layer"):
        return None
    inside = set(model.base_model.modules())
    fitting = [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear)
        and module not in inside
        and module.out_features == model.config.num_labels
    ]
    return fitting[-1] if fitting else None


def _output_names(model: PreTrainedModel) -> list[str]:
    """Names of the parameters that are the task's own."""
    layer: nn.Module = getattr(model, "output_layer", None) or _last_linear(model) or nn.Identity()
    own = {id(parameter) for parameter in layer.parameters()}
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]
