"""A decoder that reads prompts of different lengths at once and then a token of each at a time.

The token that comes next: the likeliest, or one that is drawn, by draws of each prompt alone.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from bertvision.errors import InputError
from bertvision.featurestore.format.logits import TopLogits, TopRule
from bertvision.pipelines.encoders.loading import pad_id
from bertvision.pipelines.encoders.padding_trial import distance
from bertvision.pipelines.encoders.sites.names import sites_of
from bertvision.pipelines.encoders.sites.taps import Taps
from bertvision.pipelines.encoders.vocabulary_head import NextTokens
from bertvision.pipelines.precision import Precision, autocast, device
from bertvision.pipelines.tasks.windows import Int32Array


class Chooser:
    """Chooses the tokens of some prompts.

    What is drawn of a prompt follows from the seed and its key alone, so that neither its
    neighbours in a batch nor a kill change it.

    Args:
        keys: Keys of the prompts.
        temperature: Divisor of logits; 0 takes the likeliest token.
        top_p: see `nucleus`.
        seed: Seed of the draws.
        before: Changes to the divided logits, in front of the nucleus (see `TextSettings`).
        after: Changes to the logits behind it.
    """

    def __init__(
        self,
        keys: Sequence[str],
        temperature: float,
        top_p: float,
        seed: int,
        before: Sequence[LogitsProcessor] = (),
        after: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._temperature, self._top_p = temperature, top_p
        self._before, self._after = list(before), list(after)
        digests = [hashlib.sha256(f"{seed} {key}".encode()).digest() for key in keys]
        self._draws = [np.random.default_rng(np.frombuffer(d, "<u4")) for d in digests]

    def __call__(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """The next token of some of the prompts, (rows,) on the CPU.

        Args:
            logits: (rows, vocabulary) float32.
            rows: (rows,) which prompts these are of.
        """
        if self._temperature == 0:
            return logits.argmax(dim=1).cpu()
        # from the likeliest down, which no temperature divides to infinity
        below = logits.double() - logits.max(dim=1, keepdim=True).values
        scores, none = below / self._temperature, torch.zeros(len(rows), 0, dtype=torch.int64)
        for change in self._before:
            scores = change(none, scores)
        likely = nucleus(scores.softmax(dim=1), self._top_p)
        if self._after:
            scores = likely.log()
            for change in self._after:
                scores = change(none, scores)
            likely = scores.softmax(dim=1)
        # in the order of the vocabulary: where two are about as likely, that of their likelihoods
        # may change with the last digit, and with it every token behind
        reached = likely.cumsum(dim=1)
        drawn = torch.tensor([[self._draws[row].random()] for row in rows], dtype=torch.float64)
        chosen = torch.searchsorted(reached, drawn.to(reached) * reached[:, -1:], right=True)
        return chosen.squeeze(1).clamp(max=logits.shape[1] - 1).cpu()


def nucleus(likely: Tensor, top_p: float) -> Tensor:
    """The smallest set of the likeliest tokens that reach a probability together; others get 0.

    Holtzman et al. 2020, The Curious Case of Neural Text Degeneration (arXiv:1904.09751), section
    3.1.

    Args:
        likely: (rows, vocabulary) probabilities.
        top_p: the probability; 1 keeps all.
    """
    if top_p == 1:
        return likely
    ordered, order = likely.sort(dim=1, descending=True, stable=True)
    ordered[ordered.cumsum(dim=1) - ordered >= top_p] = 0
    return torch.zeros_like(likely).scatter_(1, order, ordered)


_ALIKE = 1e-2
"""How far the states of a token may be apart that are computed in two ways, in parts of their mean
magnitude: arithmetic gives 1e-5, a wrong position or a token that should not be seen 0.1 or more.
"""


class Pass(NamedTuple):
    """Result of a forward pass."""

    logits: Tensor
    """(rows, vocabulary) float32 behind the last token, on the device."""
    states: Tensor
    """(rows, tokens, layers, hidden) float32 on the CPU, of padding whatever it is."""
    next_tokens: list[TopLogits] | None
    """(rows,) the most probable next tokens of the tokens that count, where they are asked for."""


class Decoder:
    """A model that continues texts, on this machine's device.

    Args:
        model: Model of ``AutoModelForCausalLM``. It belongs to this object from now on.
        layers: indices of the hidden states to give, 0 being the embedding output; or of ``sites``.
        precision: Precision of the forward pass; weights stay float32.
        sites: names of sites (see `sites.names`), in the place of hidden states.
        top: Number of the most probable next tokens to give beside; None gives none.

    Attributes:
        attention: name of the attention that it computes, for the provenance of a split.

    Raises:
        InputError: it is an encoder, keeps no cache of keys and values, or counts positions so that
            padding changes what it computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[int],
        precision: Precision,
        sites: Sequence[str] = (),
        top: TopRule | None = None,
    ) -> None:
        self.device = device()
        self.attention = str(model.config._attn_implementation)
        self._model = model.eval().requires_grad_(False).to(self.device)
        self._layers, self._precision = list(layers), precision
        takes = inspect.signature(model.forward).parameters
        self._places = "position_ids" in takes
        self._options: dict[str, Any] = {"use_cache": True, "output_hidden_states": not sites}
        if "logits_to_keep" in takes:
            self._options["logits_to_keep"] = 1
        self._taps: Taps | None = None
        if sites:
            known = sites_of(model.config.model_type, model.config.num_hidden_layers)
            names = [sites[i] for i in layers]
            base = cast(PreTrainedModel, model.base_model)
            self._taps = Taps(base, {i: known[name] for i, name in enumerate(names)})
        self._pad = min(pad_id(None, model.config), int(model.config.vocab_size) - 1)  # never seen
        self._next: NextTokens | None = None
        self._check()
        if top is not None:
            self._options["output_hidden_states"] = True
            self._next = NextTokens(model, top, f"a {model.config.model_type} model")

    def begin(self) -> Reading:
        """Begin with some prompts."""
        return Reading(self)

    def padded(self, prompts: Sequence[Int32Array]) -> tuple[Tensor, Tensor]:
        """Prompts in one frame, padded in front, so that the next token of each stands behind it.

        Returns:
            (rows, tokens) token ids, and which of them are real.
        """
        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), self._pad, np.int64)
        real = np.zeros(ids.shape, bool)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            real[row, longest - len(prompt) :] = True
        return torch.from_numpy(ids), torch.from_numpy(real)

    def forward(self, ids: Tensor, real: Tensor, cache: Any) -> tuple[Pass, Any]:
        """One pass of the model over the next tokens of some rows.

        Args:
            ids: (rows, tokens) of the next tokens.
            real: (rows, before + tokens) which tokens are looked at, those before in the cache.
            cache: keys and values of those before; None where there are none.

        Returns:
            What it gives, and the cache with the tokens in it.
        """
        where, seq = self.device, ids.shape[1]
        real = real.to(where)
        inputs: dict[str, Any] = {"input_ids": ids.to(where), "attention_mask": real.long()}
        if self._places:
            inputs["position_ids"] = (real.long().cumsum(1) - 1).clamp(min=0)[:, -seq:]
        states_of_layer: list[Tensor] = [torch.empty(0)] * len(self._layers)

        def keep(number: int, state: Tensor) -> None:
            states_of_layer[number] = state.to("cpu", torch.float32, copy=True)

        with torch.inference_mode(), autocast(self._precision, where):
            if self._taps is not None:
                with self._taps.taken(keep):
                    output = self._model(**inputs, past_key_values=cache, **self._options)
            else:
                output = self._model(**inputs, past_key_values=cache, **self._options)
                for number, layer in enumerate(self._layers):
                    keep(number, output.hidden_states[layer])
            logits, counted = output.logits[:, -1].float(), real[:, -seq:]
            given = None
            if self._next is not None and seq == 1 and self._precision == "32":
                ones = self._next.rule.of(logits).map(lambda x: x.cpu().numpy())
                given = [ones.map(itemgetter(slice(i, i + 1))) for i in range(len(logits))]
            elif self._next is not None:
                last = self._next(output.hidden_states[-1][counted])  # of rows that go on alone
                ends = counted.sum(1).cumsum(0).cpu().tolist()
                given = [
                    last.map(itemgetter(slice(begin, end)))
                    for begin, end in zip([0, *ends], ends, strict=False)
                ]
        stacked = torch.stack(states_of_layer, dim=2)
        return Pass(logits, stacked, given), output.get("past_key_values")

    def _check(self) -> None:
        """Compare states of a few tokens, read at once, with what reading token by token gives."""
        kind, words = self._model.config.model_type, int(self._model.config.vocab_size)
        some = np.unique(np.linspace(words // 3, words - 1, 6).astype(np.int32))
        precision, self._precision = self._precision, "32"
        try:
            at_once = self._read(some, steps=0)
            causal = _alike(self._read(some[:-1], steps=0), at_once[:-1])
            steady = causal and _alike(self._read(some, steps=len(some) // 2), at_once)
        except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
            raise InputError(
                f"a {kind} model does not take tokens one by one, with those before in a cache of "
                f"keys and values: take another decoder ({error})"
            ) from error
        self._precision = precision
        if not bool(at_once.isfinite().all()):
            raise InputError(
                f"this {kind} model gives hidden states that are NaN or infinite of any text: its "
                "weights are damaged; take another checkpoint"
            )
        if not causal:
            raise InputError(
                f"a {kind} model is an encoder: what it computes of a token depends on those that "
                "follow, so that it cannot write one after another; take a decoder, such as "
                "openai-community/gpt2, or `bertvision extract` for the states of this one"
            )
        if not steady:
            raise InputError(
                f"a {kind} model computes other states token by token, behind padding, than of a "
                "text at once: it cannot generate in batches here"
            )

    def _read(self, ids: Int32Array, steps: int) -> Tensor:
        """(tokens, layers, hidden) of a text, its last ``steps`` tokens one by one, then padded."""
        reading = self.begin()
        first = ids[: len(ids) - steps]
        longer = [np.tile(first, 2)] if steps else []
        states = [reading.feed(*self.padded([first, *longer])).states[0, -len(first) :]]
        for token in ids[len(first) :]:
            one = torch.full((1 + len(longer), 1), int(token))
            states.append(reading.feed(one, torch.ones_like(one, dtype=torch.bool)).states[0])
        return torch.cat(states)


class Reading:
    """State of a decoder after some prompts, from which it continues."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._cache: Any = None
        self._real: Tensor | None = None

    def feed(self, ids: Tensor, real: Tensor) -> Pass:
        """Read the next tokens of each row.

        Args:
            ids: (rows, tokens).
            real: (rows, tokens) which of them count; the others are padding, and never looked at.
        """
        self._real = real if self._real is None else torch.cat([self._real, real], dim=1)
        given, self._cache = self._decoder.forward(ids, self._real, self._cache)
        return given

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with some of the rows alone, in this order."""
        assert self._real is not None
        chosen = torch.tensor(rows)
        self._real = self._real[chosen]
        self._cache.batch_select_indices(chosen.to(self._decoder.device))


def _alike(states: Tensor, wanted: Tensor) -> bool:
    return distance(states, wanted) <= _ALIKE
