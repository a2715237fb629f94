"""Attention of windows that lie one after another on one token axis, without any padding.

The forward pass over packed windows, without any padding, of BERT and the families like it.

Windows of a batch lie one after another on one token axis. All of such an encoder but its attention
looks at each token alone; the attention is computed window by window. So no arithmetic goes into
padding, windows need no sorting by length, and hidden states come out the way they are stored.

The forward pass of any encoder of transformers, over padded windows of like length.

Which windows are computed together is decided by a trial (see `padding_trial`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from bertvision.errors import BertvisionError, InputError
from bertvision.featurestore.format.logits import TopLogits
from bertvision.pipelines.encoders.families import FAMILIES, position_offset
from bertvision.pipelines.encoders.kept_states import KeptStates
from bertvision.pipelines.encoders.loading import pad_id, takes_token_types
from bertvision.pipelines.encoders.padding_trial import SIMILAR, Batching
from bertvision.pipelines.encoders.sites.names import Site, sites_of
from bertvision.pipelines.encoders.sites.taps import Taps
from bertvision.pipelines.encoders.vocabulary_head import NextTokens
from bertvision.pipelines.precision import Precision
from bertvision.pipelines.tasks.windows import Windows, collate

PACKED_ATTENTION = "sdpa-packed"
"""Name of the attention below in transformers' registry, and in the provenance of a split."""


class BatchTokens(NamedTuple):
    """Tokens of a forward pass, which suit the caches of a CPU or keep an accelerator busy."""

    cpu: int
    accelerator: int

    def on(self, device: torch.device) -> int:
        """Tokens for a device."""
        return self.cpu if device.type == "cpu" else self.accelerator


class Packing(NamedTuple):
    """Where windows lie on the token axis of a batch, and in a padded frame (batch × seq).

    Attributes:
        lengths: tokens of each window.
        place: (tokens,) int64 of each token in the frame; None on a CPU, which needs no frame.
        mask: (batch, 1, 1, seq) true for real tokens; None likewise.
    """

    lengths: list[int]
    place: Tensor | None = None
    mask: Tensor | None = None

    @classmethod
    def of(cls, lengths: list[int], where: torch.device) -> Packing:
        """The packing of windows of these lengths, for a device."""
        if where.type == "cpu":
            return cls(lengths)
        mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
        place = mask.flatten().nonzero().squeeze(1)
        return cls(lengths, place.to(where), mask[:, None, None].to(where))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    packing: Packing,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each window to itself, as transformers calls it.

    A CPU computes window after window; on a GPU that would be too many small kernels, so windows
    are padded to the longest, for this alone: attention is a small part of BERT's arithmetic.

    Args:
        module: the attention layer.
        query: (1, heads, tokens, channels).
        key: likewise.
        value: likewise.
        attention_mask: none is needed.
        packing: Token ranges of the windows.
        scaling: Scaling of the scores.

    Returns:
        (1, tokens, heads, channels), and no weights.
    """
    if packing.place is None or packing.mask is None:
        windows = zip(*(x.split(packing.lengths, 2) for x in (query, key, value)), strict=True)
        done = [
            F.scaled_dot_product_attention(q, k, v, scale=scaling)  # (1, heads, seq, channels)
            for q, k, v in windows
        ]
        return torch.cat(done, dim=2).transpose(1, 2), None
    place, mask = packing.place, packing.mask
    batch, seq = len(mask), mask.shape[-1]

    def framed(x: Tensor) -> Tensor:
        tokens = x.squeeze(0).transpose(0, 1)
        frame = x.new_zeros(batch * seq, *tokens.shape[1:]).index_copy(0, place, tokens)
        return frame.view(batch, seq, *tokens.shape[1:]).transpose(1, 2)

    out = F.scaled_dot_product_attention(
        framed(query), framed(key), framed(value), attn_mask=mask, scale=scaling
    )
    return out.transpose(1, 2).flatten(0, 1)[place].unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *args, **kwargs: None)


class PackedForward:
    """Computes hidden states of windows that lie one after another.

    Args:
        model: an encoder that `can_pack`; it is cast, and cut after the last wanted layer.
        wanted: indices of the hidden states that are wanted; the one after the last layer is the
            pooler output.
        precision: Precision of the forward pass.
        sites: names of sites, which then stand in the place of the hidden states: ``wanted`` counts
            them from 0.
    """

    attention = PACKED_ATTENTION
    """Name of the attention that is computed."""
    batch_tokens = BatchTokens(cpu=1024, accelerator=8192)
    """Tokens of a batch: on a CPU what its caches like best (measured at 400 to 4,096), on a GPU so
    many that launching kernels takes no longer than running them."""

    def __init__(
        self,
        model: PreTrainedModel,
        wanted: Sequence[int],
        precision: Precision,
        sites: Sequence[str] = (),
    ) -> None:
        self._model = model
        model.set_attn_implementation(PACKED_ATTENTION)
        if precision == "bf16":
            # what autocast does to these weights in every forward pass: the same bits, but once
            for module in model.modules():
                if isinstance(module, nn.Linear):
                    module.to(torch.bfloat16)
        depth = len(_blocks(model))
        self._pooler_index = depth + 1
        sources = _hidden_states(model, depth)
        if sites:
            known = sites_of(model.config.model_type, depth)
            sources = [known[name] for name in sites]
        seen = {i: sources[i] for i in wanted if i < len(sources)}
        self._taps = Taps(model, seen)
        # taken out, because in the model it would look at the first window of a batch alone
        pooler: Any = getattr(model, "pooler", None)
        self._pooler = pooler if not sites and self._pooler_index in wanted else None
        if pooler is not None:
            model.register_module("pooler", None)
        if len(seen) == len(wanted):  # or the pooler's is wanted, behind all of them
            _cut(model, 1 + max(site.block for site in seen.values()))
        self._offset = position_offset(model)
        self._token_types = takes_token_types(model)

    def __call__(
        self, windows: Windows, rows: npt.NDArray[np.int64], kept: KeptStates | None
    ) -> None:
        """Compute some windows, and hand each hidden state on at once.

        Args:
            windows: Windows of a split.
            rows: (batch,) which of them.
            kept: takes the hidden states; None drops them.
        """
        first, lengths = windows.first_token[rows], windows.n_tokens[rows]
        within = np.concatenate([np.arange(n) for n in lengths.tolist()])
        token = np.repeat(first, lengths) + within

        def row(values: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).unsqueeze(0).to(self._model.device)

        inputs = {"input_ids": row(windows.input_ids[token])}
        if self._token_types:
            inputs["token_type_ids"] = row(windows.token_type_ids[token])
        if self._offset:
            within = _counted(windows.input_ids[token] == self._offset - 1, lengths)
        taking = (
            nullcontext()
            if kept is None
            else self._taps.taken(lambda i, state: kept.add(i, state.squeeze(0)))
        )
        with taking:
            last = self._model(
                **inputs,
                position_ids=row(within + self._offset),
                packing=Packing.of(lengths.tolist(), self._model.device),
            ).last_hidden_state.squeeze(0)
        if self._pooler is not None and kept is not None:
            cls = torch.from_numpy(np.cumsum(lengths, dtype=np.int64) - lengths).to(last.device)
            kept.add_pooler(self._pooler_index, self._pooler(last[cls].unsqueeze(1)))


def _blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Blocks of a model of a known family."""
    return cast(nn.ModuleList, model.get_submodule(FAMILIES[model.config.model_type].blocks))


def _cut(model: PreTrainedModel, blocks: int) -> None:
    """Take out all blocks of a model of a known family but the first ones."""
    model.set_submodule(FAMILIES[model.config.model_type].blocks, _blocks(model)[:blocks])


def _hidden_states(model: PreTrainedModel, depth: int) -> list[Site]:
    """Where the hidden states are seen, from the embedding output on."""
    # ELECTRA widens its embeddings to the hidden size: that is what its first layer reads
    embeddings = "embeddings_project" if hasattr(model, "embeddings_project") else "embeddings"
    blocks = FAMILIES[model.config.model_type].blocks
    return [
        Site(-1, embeddings, "gives"),
        *(Site(i, f"{blocks}.{i}", "gives") for i in range(depth)),
    ]


def _counted(
    padding: npt.NDArray[np.bool_], lengths: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Positions as RoBERTa's kin count them: padding that a text spells is at −1, uncounted.

    Args:
        padding: (tokens,) whether a token is the padding.
        lengths: (windows,) tokens of each window.
    """
    count = np.cumsum(~padding, dtype=np.int64)
    last = np.cumsum(lengths, dtype=np.int64) - 1
    before = np.concatenate([[0], count[last[:-1]]])
    return np.where(padding, -1, count - np.repeat(before, lengths) - 1)


def can_pack(model: PreTrainedModel) -> bool:
    """Whether windows can be packed for an encoder: of a family that packs, attending both ways."""
    family = FAMILIES.get(model.config.model_type)
    decodes = getattr(model.config, "is_decoder", False)
    return family is not None and family.packs and not decodes


_GROUP_TOKENS = BatchTokens(cpu=1024, accelerator=8192)


class PaddedForward:
    """Computes hidden states by a model's own forward pass, with padding masked.

    Windows are padded behind their last token, so positions are those that the model counts itself,
    and a decoder's tokens look at none of it.

    Args:
        model: the encoder; it is cut after the last wanted layer where its family is known.
        wanted: indices of the hidden states that are wanted; the one after the last layer is the
            pooler output.
        sites: names of sites, which then stand in the place of the hidden states: ``wanted`` counts
            them from 0.
        next_tokens: Reader of the next token from the last hidden state; None reads none.

    Attributes:
        batching: Windows that are computed together.
        logits: Log-probabilities of the tokens of the last windows, one after another, if any.
    """

    batch_tokens = BatchTokens(cpu=4096, accelerator=16384)
    """Tokens of a batch: enough to find windows of like length in it."""

    def __init__(
        self,
        model: PreTrainedModel,
        wanted: Sequence[int],
        sites: Sequence[str] = (),
        next_tokens: NextTokens | None = None,
    ) -> None:
        self._model = model
        self._next_tokens = next_tokens
        self.logits: TopLogits | None = None
        self.batching: Batching = "like"
        self._sparse = getattr(model.config, "attention_type", None) == "block_sparse"
        self.attention = str(model.config._attn_implementation)
        """Name of the attention that is computed."""
        depth = int(model.config.num_hidden_layers)
        self._pooled = not sites and depth + 1 in wanted
        self._taps: Taps | None = None
        blocks = max(1, *wanted)  # transformers gives the embedding output with a block's
        if sites:
            known = sites_of(model.config.model_type, depth)
            seen = {i: known[sites[i]] for i in wanted}
            self._taps = Taps(model, seen)
            blocks = 1 + max(site.block for site in seen.values())
        family = FAMILIES.get(model.config.model_type)
        if family is not None and next_tokens is None and blocks < depth:
            _cut(model, blocks)
            if family.ln_final is not None:  # of the last block alone
                model.set_submodule(family.ln_final, nn.Identity())
            depth = blocks
        self._states = depth + 1
        self._pad = pad_id(None, model.config)
        self._token_types = takes_token_types(model)
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # keys and values of a decoder's layers, for generation

    def __call__(
        self, windows: Windows, rows: npt.NDArray[np.int64], kept: KeptStates | None
    ) -> None:
        """Compute some windows, and hand their hidden states on group by group.

        Args:
            windows: Windows of a split.
            rows: (batch,) which of them.
            kept: takes the hidden states; None drops them.

        Raises:
            InputError: the model does not give a hidden state per layer and one more, or cannot
                compute windows of such lengths.
        """
        lengths = windows.n_tokens[rows]
        if self._next_tokens is not None:
            self.logits = self._next_tokens.rule.empty(int(lengths.sum()))
        for members in groups(lengths, self.group_tokens, self.batching):
            self._group(windows, rows[members], members, lengths, kept)

    @property
    def group_tokens(self) -> int:
        """Tokens that are computed together, with padding."""
        return _GROUP_TOKENS.on(self._model.device)

    def _group(
        self,
        windows: Windows,
        rows: npt.NDArray[np.int64],
        members: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.integer],
        kept: KeptStates | None,
    ) -> None:
        where = self._model.device
        batch = collate(
            windows, windows.first_token, rows, self._pad, token_types=self._token_types
        )
        inputs = batch.to(where).text
        if kept is None:
            self._compute(inputs)
            return
        real = batch.attention_mask.flatten().nonzero().squeeze(1).to(where)

        def keep(state: int, values: Tensor) -> None:
            kept.add(state, values.flatten(0, 1)[real], members)

        if self._taps is not None:
            with self._taps.taken(keep):
                output = self._compute(inputs)
            self._read_next(output.last_hidden_state.flatten(0, 1)[real], members, lengths)
            return
        output = self._compute(inputs, output_hidden_states=True)
        states: tuple[Tensor, ...] = getattr(output, "hidden_states", None) or ()
        if self._sparse:  # behind the window stand tokens that fill the last block
            states = tuple(state[:, : inputs["input_ids"].shape[1]] for state in states)
        shape = (*batch.input_ids.shape, self._model.config.hidden_size)
        if len(states) != self._states or any(state.shape != shape for state in states):
            raise InputError(
                f"{self._model.config.model_type} gives hidden states of the shapes "
                f"{[tuple(state.shape) for state in states]}, where {self._states} of {shape} are "
                "needed, one per layer and the embeddings: its states cannot be extracted"
            )
        for layer, state in enumerate(states):
            keep(layer, state)
        if self._pooled:
            kept.add_pooler(self._states, output.pooler_output, members)
        self._read_next(states[-1].flatten(0, 1)[real], members, lengths)

    def _read_next(
        self,
        last: Tensor,
        members: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.integer],
    ) -> None:
        """Keep the next tokens of some windows, where they are asked for."""
        if self._next_tokens is None or self.logits is None:
            return
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places = np.concatenate([np.arange(starts[i], starts[i] + lengths[i]) for i in members])
        for out, values in zip(self.logits, self._next_tokens(last), strict=True):
            out[places] = values

    def _compute(self, inputs: dict[str, Tensor], **options: Any) -> Any:
        """The model's output.

        Raises:
            InputError: it cannot compute such windows; says what it said.
        """
        model: Any = self._model
        tokens = inputs["input_ids"].shape[1]
        if self._sparse and tokens > _full_attention(model.config):
            model.set_attention_type("block_sparse")  # which a short window ends for good
        try:
            return model(**inputs, **options)
        except (BertvisionError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # each family stumbles over what it lacks in its own way
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InputError(
                f"a {model.config.model_type} model cannot compute windows of {tokens} token ids "
                f"alone, without other inputs ({type(error).__name__}: {said}): take an encoder "
                "of text such as bert-base-uncased, or other lengths of windows (--max-length)"
            ) from error


def _full_attention(config: Any) -> int:
    """Tokens up to which BigBird looks at all of them, and not at blocks."""
    return int((5 + 2 * config.num_random_blocks) * config.block_size)


def groups(
    lengths: npt.NDArray[np.integer], most: int, batching: Batching = "like"
) -> list[npt.NDArray[np.int64]]:
    """Put windows of like length together, longest first.

    Args:
        lengths: (windows,) tokens of each.
        most: tokens of a group, with padding; a longer window is a group of its own.
        batching: Lengths that are put together.

    Returns:
        Rows of each group; every window is in one.
    """
    order = np.argsort(-lengths.astype(np.int64), kind="stable")
    if batching == "single":
        return list(order[:, None])
    similar = SIMILAR if batching == "like" else 1
    cuts, start = [], 0
    for i, n in enumerate(lengths[order].tolist()):
        longest = int(lengths[order[start]])
        if i > start and (n < similar * longest or (i + 1 - start) * longest > most):
            cuts.append(i)
            start = i
    return np.split(order, cuts)
