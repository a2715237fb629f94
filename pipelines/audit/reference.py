"""Reference of an audit: the encoder again, over the windows that the examples are of.

Each is computed by itself, by the model's own forward pass, so that nothing of how an extraction
batches windows goes into what it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from transformers import PreTrainedModel

from bertvision.errors import InputError, UnknownNameError, counted
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.loading import (
    dimensions,
    find_pretrained,
    load_model,
    load_tokenizer,
)
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.extraction.job import load_encoder
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.tasks.windows import Template, Windows
from bertvision.pipelines.workspace.reproduce import not_extracted, stored_options
from bertvision.pipelines.workspace.workspace import Workspace

EXACT, ROUGH = 0.01, 0.1
"""Deviations that the encoder may have from before, in parts of a state's distance from the mean:
in float32 on any machine, and in arithmetic of 16 bits or one that nobody recorded."""
Ids = npt.NDArray[np.int32]


@dataclass
class Reference:
    """The encoder, and the tokens that it is to be run on.

    Attributes:
        source: gives all hidden states of what the split keeps of a window.
        layers: (stored layers,) which of these each stored layer should be.
        ids: (examples,) of each stored example, its token ids, or None to make them again.
        types: token types, likewise.
        tolerance: see `EXACT` and `ROUGH`.
        prefix: Tokens that the tokenizer puts before every text.
        suffix: Tokens that it puts behind.
        longest: tokens that the encoder takes.
        remarks: Oddities of the split as a whole.
    """

    source: Encoder
    layers: Sequence[int]
    ids: Sequence[Ids]
    types: Sequence[Ids]
    tolerance: float
    prefix: Ids
    suffix: Ids
    longest: int
    remarks: list[str]

    def states(self, ids: Sequence[Ids], types: Sequence[Ids] | None = None) -> list[Tensor]:
        """All hidden states of some windows.

        Args:
            ids: (tokens,) of each.
            types: token types, likewise; by default 0.

        Returns:
            Of each (tokens, hidden states, hidden) float32 on the CPU; of a pooling one token.

        Raises:
            InputError: a window is longer than the encoder takes.
        """
        windows = _windows(ids, types or [np.zeros(len(example), np.int32) for example in ids])
        if (longest := int(windows.n_tokens.max())) > self.longest:
            raise InputError(
                f"an example has {counted(longest, 'token')}, and the encoder takes "
                f"{self.longest:,}"
            )
        counts = self.source.kept(self.source.tokens[0], windows.n_tokens).tolist()
        states: list[Tensor] = []
        for batch in self.source.batches(windows.n_tokens):
            (found_states,) = self.source(windows, np.arange(batch.start, batch.stop))
            states += [part.cpu().clone() for part in found_states.split(counts[batch])]
        return states


def of_workspace(space: Workspace, split: ActivationSplit) -> Reference:
    """The snapshot of a workspace, over the windows that its data make now.

    Raises:
        InputError: the split was not extracted from the workspace.
        UnknownNameError: the snapshot or the data are gone.
        WorkspaceError: the snapshot or the data changed.
    """
    made_from = split.record.provenance
    if "task" not in made_from:
        reason = not_extracted(split) or f"{split.name} was shuffled"
        raise InputError(f"{reason}: name the encoder that it is of with --model")
    options = stored_options(split)
    (name,), (tokens,) = options.splits or (), options.tokens or ()
    data = space.dataset(options.dataset)
    if name not in data.splits:
        raise UnknownNameError(f"the data have no {name}: they have {', '.join(data.splits)}")
    loaded = load_encoder(space, split.tag, replace(options, layers=None), alone=True)
    windows = data.task.windows(data.items(name), loaded.tokenizer, data.config)
    if windows.parts is not None:
        raise InputError(
            f"the windows of {split.name} hold several documents each, which are computed apart, "
            "and an audit computes windows as wholes: audit the same documents without packing"
        )
    rows, first = split.plan.example_id, windows.first_token
    if int(rows.max()) >= len(windows):
        raise InputError(
            f"{split.name} has windows that the data do not make: {counted(len(windows), 'window')}"
        )
    spans = [slice(int(first[row]), int(first[row] + windows.n_tokens[row])) for row in rows]
    same = loaded.info.weights_sha256 == made_from.get("weights_sha256")
    encoder = cast(Encoder, loaded.source)
    return Reference(
        source=encoder,
        layers=[loaded.layers[tokens].index(layer) for layer in split.record.layers],
        ids=[windows.input_ids[span] for span in spans],
        types=[windows.token_type_ids[span].astype(np.int32) for span in spans],
        tolerance=EXACT if made_from.get("precision") == "32" else ROUGH,
        **_ends(loaded.tokenizer),
        longest=dimensions(encoder.model.config, loaded.tokenizer).max_length,
        remarks=[] if same else ["the weights of the snapshot are not those that are recorded"],
    )


def of_model(
    split: ActivationSplit, model: str, tokenizer: str | None, layers: Sequence[int] | None
) -> Reference:
    """An encoder that is named, over the token ids that are stored.

    Args:
        split: Split with ``input_ids``.
        model: folder or hub name.
        tokenizer: Tokenizer of another folder or name; by default the model's own.
        layers: Hidden state that each stored layer is; None where their indices say it.

    Raises:
        InputError: the split has no token ids, or it is not known which its layers are.
    """
    if (
        "input_ids" not in split.record.arrays
        or split.record.arrays["input_ids"].dims[0] != "token"
    ):
        raise InputError(f"{split.name} has no token ids, which the encoder would be run on")
    split.require_all_tokens()
    pretrained = find_pretrained(model)
    encoder = cast(PreTrainedModel, load_model(pretrained.folder).base_model)
    speaker = load_tokenizer(find_pretrained(tokenizer).folder if tokenizer else pretrained.folder)
    size = dimensions(encoder.config, speaker)
    wanted = _hidden_states(split, layers, size.layers)
    if split.record.hidden_size != size.hidden_size:
        raise InputError(
            f"{split.name} has {split.record.hidden_size} channels, {model} {size.hidden_size}"
        )
    made_from, remarks = split.record.provenance, []
    for name, digest in {
        "weights_sha256": weights_digest(pretrained.folder),
        "tokenizer_sha256": tokenizer_digest(speaker),
    }.items():
        if made_from.get(name, digest) != digest:
            remarks.append(f"{name} of {tokenizer or model} is not the one that is recorded")
    plan, axis = split.plan, split.array("input_ids")
    types = split.array("token_type_ids") if "token_type_ids" in split.record.arrays else axis * 0
    spans = [
        slice(int(a), int(a + n)) for a, n in zip(plan.first_token, plan.n_tokens, strict=True)
    ]
    if axis.min() < 0 or axis.max() >= encoder.config.vocab_size:
        raise InputError(f"{split.name} has token ids that {model} does not have")
    precision = resolve_precision("32")
    return Reference(
        source=Encoder(encoder, {"all": range(size.layers + 1)}, precision, alone=True),
        layers=wanted,
        ids=[axis[span].astype(np.int32) for span in spans],
        types=[types[span].astype(np.int32) for span in spans],
        tolerance=EXACT if made_from.get("precision") == "32" else ROUGH,
        **_ends(speaker),
        longest=size.max_length,
        remarks=remarks,
    )


def _hidden_states(
    split: ActivationSplit, layers: Sequence[int] | None, depth: int
) -> Sequence[int]:
    """The index of the hidden state that each stored layer is."""
    stored = split.record.layers
    if layers is None and split.layer_names:
        raise InputError(
            f"the layers of {split.name} are called {', '.join(split.layer_names)}: say with "
            "--layers which hidden state each of them is, such as 2,18,33"
        )
    places = [layer + depth + 1 if layer < 0 else layer for layer in layers or stored]
    if len(places) != len(stored) or not all(0 <= layer <= depth for layer in places):
        raise InputError(
            f"layers {', '.join(map(str, layers or stored))}: {split.name} has "
            f"{counted(len(stored), 'layer')}, the encoder hidden states 0 to {depth}"
        )
    return places


def _ends(tokenizer: Any) -> dict[str, Ids]:
    template = Template.of(tokenizer)
    return {"prefix": template.before[:, 0], "suffix": template.after[:, 0]}


def _windows(ids: Sequence[Ids], types: Sequence[Ids]) -> Windows:
    joined = np.concatenate(ids).astype(np.int32)
    return Windows(
        input_ids=joined,
        token_type_ids=np.concatenate(types).astype(np.uint8),
        offset_mapping=np.zeros((len(joined), 2), np.int32),
        n_tokens=np.array([len(example) for example in ids], np.int32),
        item_index=np.arange(len(ids), dtype=np.int32),
        labels={},
    )
