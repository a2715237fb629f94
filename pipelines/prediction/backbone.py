"""An encoder in memory, run once for all heads that answer from its hidden states."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.encoders.forward import can_pack
from bertvision.pipelines.encoders.loading import (
    check_token_ids,
    dimensions,
    pad_id,
    takes_token_types,
)
from bertvision.pipelines.extraction.job import check_lengths
from bertvision.pipelines.finetuning.kept_logits import predict_logits
from bertvision.pipelines.poolings import TokenPooling, check_of_texts, pool
from bertvision.pipelines.precision import (
    Precision,
    autocast,
    device,
    head_precision,
    resolve_precision,
)
from bertvision.pipelines.progress import progress
from bertvision.pipelines.results.systems import BERT
from bertvision.pipelines.sharing.head import Head
from bertvision.pipelines.tasks.task import Task
from bertvision.pipelines.tasks.windows import Windows, collate, special_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Float32Array = npt.NDArray[np.float32]


class Backbone:
    """An encoder in memory, with all members of the predictors that share it.

    Args:
        folder: Folder with its weights and tokenizer.
        model: Encoder with the output layer of its task, or without where no member reads that.
        tokenizer: Its tokenizer.
        heads: Heads by the name of their run.
        owns: Whether the own output layer of the encoder is among the members.
        precision: Arithmetic of the encoder and the heads: auto, 32 or bf16.

    Raises:
        InputError: A head reads the token to which a column points.
    """

    def __init__(
        self,
        folder: Path,
        model: PreTrainedModel,
        tokenizer: Any,
        heads: Mapping[str, Head],
        *,
        owns: bool,
        precision: str,
    ) -> None:
        self.folder = folder
        self.tokenizer = tokenizer
        self.heads = heads
        self._model = model
        self._asked = precision
        self.precision: Precision = resolve_precision(precision)
        self._longest = dimensions(model.config, tokenizer).max_length
        self._padding = pad_id(tokenizer, model.config)
        self._tried = 0  # tokens of the longest window that the encoder was tried with
        self._special = special_ends(tokenizer)
        base = cast("PreTrainedModel", model.base_model)
        self._together = owns and bool(heads) and can_pack(base)
        self._encoder: Encoder | None = None
        for name, head in heads.items():
            check_of_texts(head.config.tokens, name)
        if heads and not self._together:
            layers: dict[TokenPooling, set[int]] = {}
            for head in heads.values():
                layers.setdefault(head.config.tokens, set()).update(head.config.layers)
            self._layers = {tokens: sorted(layers[tokens]) for tokens in sorted(layers)}
            # it is cut and cast there, and has to stay whole where its output layer answers too
            encoder = copy.deepcopy(base) if owns else base
            self._encoder = Encoder(encoder, self._layers, self.precision, special=self._special)

    def logits(
        self, windows: Windows, members: Mapping[str, Task], desc: str | None
    ) -> dict[str, dict[str, Float32Array]]:
        """Logits of members on windows, by name and then as in `Logits.arrays`.

        Args:
            windows: Windows of texts.
            members: Task of each member, by its name.
            desc: Name of the progress bar; None shows none.

        Raises:
            InputError: A window is longer than any that the encoder takes, or the tokenizer is
                not that of the encoder.
        """
        check_lengths(self._longest, windows)
        check_token_ids(windows.input_ids, self.tokenizer, self._model)
        heads = {name: task for name, task in members.items() if name != BERT}
        if not heads or self._encoder is not None:
            made = self._of_heads(windows, heads, desc) if heads else {}
            if BERT in members:
                made[BERT], _ = predict_logits(
                    *(self._model, members[BERT], windows),
                    padding=self._padding,
                    precision=self.precision,
                    desc=desc,
                )
            return made
        return self._of_all(windows, members, desc)

    def _of_heads(
        self, windows: Windows, members: Mapping[str, Task], desc: str | None
    ) -> dict[str, dict[str, Float32Array]]:
        """Logits of heads, from hidden states as an extraction computes them."""
        assert self._encoder is not None
        if (longest := int(windows.n_tokens.max())) > self._tried:
            self._encoder.check(windows)
            self._tried = longest
        order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
        made = _Gathered(len(order))
        with torch.inference_mode(), progress(len(order), desc, "window") as bar:
            for batch in self._encoder.batches(windows.n_tokens[order]):
                rows = order[batch]
                lengths = torch.from_numpy(windows.n_tokens[rows].astype(np.int64))
                states = dict(zip(self._layers, self._encoder(windows, rows), strict=True))
                for name, task in members.items():
                    tokens = self.heads[name].config.tokens
                    made.add(
                        *(name, task, rows, lengths),
                        self._answer(name, states[tokens], self._layers[tokens], lengths),
                    )
                bar.update(len(rows))
        return made.arrays()

    def _of_all(
        self, windows: Windows, members: Mapping[str, Task], desc: str | None
    ) -> dict[str, dict[str, Float32Array]]:
        """Logits of heads and the output layer, from one pass over windows that are padded."""
        where, token_types = device(), takes_token_types(self._model)
        self._model.to(where).eval()  # type: ignore[arg-type]
        order = np.argsort(-windows.n_tokens, kind="stable").astype(np.int64)
        made, first_token, done = _Gathered(len(order)), windows.first_token, 0
        pooler = getattr(self._model.base_model, "pooler", None)
        with torch.inference_mode(), progress(len(order), desc, "window") as bar:
            while done < len(order):
                size = max(
                    1, _BATCH_TOKENS[where.type != "cpu"] // int(windows.n_tokens[order[done]])
                )
                rows = order[done : done + size]
                batch = collate(windows, first_token, rows, self._padding, token_types=token_types)
                batch = batch.to(where)
                with autocast(self.precision, where):
                    output = self._model(**batch.inputs, output_hidden_states=True)
                    layers = [state.float() for state in output.hidden_states]
                    cls = [state[:, 0] for state in layers]
                    if pooler is not None:
                        cls.append(pooler(output.hidden_states[-1]).float())
                real, lengths = batch.attention_mask.bool(), batch.attention_mask.sum(1).cpu()
                states: dict[TokenPooling, Tensor] = {"cls": torch.stack(cls, dim=1)}
                read = {self.heads[name].config.tokens for name in members if name != BERT}
                if read - {"cls"}:
                    states["all"] = torch.stack([state[real] for state in layers], dim=1)
                for pooling in read - {"cls", "all"}:
                    states[pooling] = pool(states["all"], lengths.numpy(), pooling, self._special)
                for name, task in members.items():
                    if name == BERT:
                        made.add(name, task, rows, lengths, output)
                        continue
                    given = states[self.heads[name].config.tokens]
                    answer = self._answer(name, given, range(given.shape[1]), lengths)
                    made.add(name, task, rows, lengths, answer)
                done += len(rows)
                bar.update(len(rows))
        return made.arrays()

    def _answer(self, name: str, states: Tensor, layers: Sequence[int], lengths: Tensor) -> Any:
        """Output of a head for hidden states (tokens or windows, layers, hidden)."""
        head, where = self.heads[name].to(states.device), states.device
        config = head.config
        precision = head_precision(self._asked, config.kind)
        places = [list(layers).index(layer) for layer in config.layers]
        if places != list(range(states.shape[1])):
            states = states[:, places]
        if head.config.tokens != "all":
            lengths = torch.ones_like(lengths)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        with autocast(precision, where):
            return head(states.to(dtype), lengths.to(where))


_BATCH_TOKENS = (8_192, 65_536)
"""Tokens of a batch, padding included, on a CPU and on another device."""


class _Gathered:
    """Logits of windows that come in another order than they have in the data."""

    def __init__(self, windows: int) -> None:
        self._windows = windows
        self._parts: dict[str, dict[str, list[Float32Array]]] = {}

    def add(
        self, member: str, task: Task, rows: npt.NDArray[np.int64], lengths: Tensor, output: Any
    ) -> None:
        """Add the output of a member for a batch.

        Args:
            member: Name of the member.
            task: Task of the output.
            rows: (batch,) windows that it is of.
            lengths: (batch,) tokens of each.
            output: Output, padded.
        """
        of_member = self._parts.setdefault(member, {})
        for name, values in task.logits(output).items():
            ragged = task.of_tokens
            values = values.float().cpu()
            parts = of_member.setdefault(name, [np.empty(0, np.float32)] * self._windows)
            for row, n, one in zip(rows.tolist(), lengths.tolist(), values, strict=True):
                parts[row] = (one[:n] if ragged else one[None]).numpy()

    def arrays(self) -> dict[str, dict[str, Float32Array]]:
        """All logits, in the order of the data."""
        return {
            member: {name: np.concatenate(parts) for name, parts in arrays.items()}
            for member, arrays in self._parts.items()
        }
