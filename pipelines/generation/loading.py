"""Loading a decoder whole: with its output layer, and the tokens that end its texts.

What a decoder's ``generation_config.json`` says of the tokens that it writes.

Its authors may have set penalties, tokens that are never written, least lengths. transformers
applies them unasked, so that a text without them is not the model's. They are applied here by the
same classes of transformers, to each text with its own tokens alone; what cannot be is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
    TypicalLogitsWarper,
)

from bertvision.errors import InputError, counted
from bertvision.featurestore.format.records import Provenance
from bertvision.pipelines.encoders.loading import (
    dimensions,
    find_pretrained,
    load_reported,
    load_tokenizer,
)
from bertvision.pipelines.encoders.weights import weights_digest
from bertvision.pipelines.files import sha256_of_files

log = logging.getLogger(__name__)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"sequence_bias": (), "repetition_penalty": (1,), "no_repeat_ngram_size": (0,)},
    **{"bad_words_ids": (), "min_length": (0,), "min_new_tokens": (0,)},
    **{"forced_bos_token_id": (), "forced_eos_token_id": ()},
    **{"exponential_decay_length_penalty": (), "suppress_tokens": ([],)},
    "begin_suppress_tokens": ([],),
}
"""Settings that are applied, and values of each that change nothing, beside None."""
_OF_DRAWING: dict[str, tuple[Any, ...]] = {
    **{"top_k": (0,), "top_p": (1,), "min_p": (0,), "typical_p": (1,)},
    **{"epsilon_cutoff": (0,), "eta_cutoff": (0,)},
}
"""Settings that are applied where tokens are drawn."""
_REFUSED: dict[str, tuple[Any, ...]] = {
    **{"num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,)},
    **{"penalty_alpha": (0,), "dola_layers": (), "guidance_scale": (1,), "constraints": ()},
    **{"force_words_ids": (), "stop_strings": (), "max_time": (), "watermarking_config": ()},
    **{"token_healing": (False,), "encoder_repetition_penalty": (1,)},
    **{"encoder_no_repeat_ngram_size": (0,)},
}
"""Settings that change texts, and that nothing here applies."""


class TextSettings:
    """The settings of a decoder that change its texts.

    Args:
        model: Decoder with its output layer.
        stops: Token ids that end a text.
        drawn: Whether tokens are drawn.
        top_p: Probability that was asked for (see `nucleus`); None leaves it to the settings.

    Attributes:
        top_p: Probability that is drawn from.
        made_from: The settings as the provenance keeps them; empty where nothing is set.

    Raises:
        InputError: A setting cannot be applied; names it.
    """

    def __init__(
        self, model: PreTrainedModel, stops: Sequence[int], *, drawn: bool, top_p: float | None
    ) -> None:
        config = model.generation_config
        refused = _set(config, _REFUSED | ({"top_h": ()} if drawn else {}))
        if refused:
            name, value = next(iter(refused.items()))
            raise InputError(
                f"generation_config.json of the model sets {name} to {value!r}, which is not done "
                "here, so that its texts would be others than transformers' generate writes: set "
                f"it to null in a copy of the model, or take another decoder"
            )
        self._values = _set(config, _NEUTRAL)
        self._stops = torch.tensor(stops, dtype=torch.int64)
        drawing = _set(config, _OF_DRAWING)
        if not drawn:
            if getattr(config, "do_sample", None):
                log.info(
                    "generation_config.json of the model draws tokens (%s): the likeliest are "
                    "taken all the same, as no --temperature is given",
                    _shown(_set(config, {"temperature": ()}) | drawing),
                )
            drawing = {}
        self.top_p = float(drawing.pop("top_p", 1.0) if top_p is None else top_p)
        drawing.pop("top_p", None)
        try:
            self.before, self.after = _warpers(drawing)
            self.of_prompt(1, 2)
        except (TypeError, ValueError, IndexError) as error:
            raise InputError(
                f"generation_config.json of the model cannot be applied: {error}"
            ) from error
        applied = self._values | drawing
        self.made_from: Provenance = {}
        if applied:
            self.made_from = {"generation_config": json.dumps(applied, sort_keys=True)}
            log.info("as generation_config.json of the model says: %s", _shown(applied))

    def of_prompt(self, prompt_tokens: int, longest: int) -> LogitsProcessorList:
        """Processor of the logits of one text; called with its tokens and the logits.

        Args:
            prompt_tokens: Tokens of the prompt.
            longest: Tokens of the text at most, its prompt included.
        """
        settings, stops = self._values, self._stops
        done: list[Any] = []
        if (bias := settings.get("sequence_bias")) is not None:
            done.append(SequenceBiasLogitsProcessor(bias))
        if (penalty := settings.get("repetition_penalty")) is not None:
            done.append(RepetitionPenaltyLogitsProcessor(float(penalty)))
        if (size := settings.get("no_repeat_ngram_size")) is not None:
            done.append(NoRepeatNGramLogitsProcessor(size))
        if (words := settings.get("bad_words_ids")) is not None:
            done.append(NoBadWordsLogitsProcessor(words, stops if len(stops) else None))
        if (least := settings.get("min_length")) is not None and len(stops):
            done.append(MinLengthLogitsProcessor(least, stops))
        if (least := settings.get("min_new_tokens")) is not None and len(stops):
            done.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, least, stops))
        if (first := settings.get("forced_bos_token_id")) is not None:
            done.append(ForcedBOSTokenLogitsProcessor(first))
        if (last := settings.get("forced_eos_token_id")) is not None:
            done.append(ForcedEOSTokenLogitsProcessor(longest, last))
        if (decay := settings.get("exponential_decay_length_penalty")) is not None and len(stops):
            done.append(ExponentialDecayLengthPenalty(tuple(decay), stops, prompt_tokens))
        if (never := settings.get("suppress_tokens")) is not None:
            done.append(SuppressTokensLogitsProcessor(never))
        if (never := settings.get("begin_suppress_tokens")) is not None:
            begin = prompt_tokens + (prompt_tokens == 1 and "forced_bos_token_id" in settings)
            done.append(SuppressTokensAtBeginLogitsProcessor(never, begin))
        return LogitsProcessorList(done)


def _warpers(settings: Mapping[str, Any]) -> tuple[LogitsProcessorList, LogitsProcessorList]:
    """Processors of logits before tokens are drawn: in front of the nucleus, and behind it."""
    before = [TopKLogitsWarper(settings["top_k"])] if "top_k" in settings else []
    kinds: dict[str, Any] = {
        **{"min_p": MinPLogitsWarper, "typical_p": TypicalLogitsWarper},
        **{"epsilon_cutoff": EpsilonLogitsWarper, "eta_cutoff": EtaLogitsWarper},
    }
    after = [kind(settings[name]) for name, kind in kinds.items() if name in settings]
    return LogitsProcessorList(before), LogitsProcessorList(after)


def _set(config: Any, neutral: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """The settings that change something, by name."""
    values = {name: getattr(config, name, None) for name in neutral}
    return {n: v for n, v in values.items() if v is not None and v not in neutral[n]}


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "of all"


class LoadedDecoder(NamedTuple):
    """A decoder, ready to read prompts."""

    model: PreTrainedModel
    """With its output layer, in float32, on the CPU."""
    tokenizer: Any
    longest: int
    """Tokens that it takes."""
    stops: tuple[int, ...]
    """Tokens that end a text, ascending; none where nothing says which."""
    made_from: Provenance
    """Its provenance, as the store compares it."""


def load_decoder(name: str, revision: str | None = None) -> LoadedDecoder:
    """Load a decoder from a folder or the hub: safetensors alone, and none of its own code.

    Args:
        name: folder or hub name.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: there is none, its family cannot generate, or its weights lack a part.
    """
    pretrained = find_pretrained(name, revision)
    tokenizer = load_tokenizer(pretrained.folder)
    model, missing = load_reported(pretrained.folder, AutoModelForCausalLM)
    if missing:
        raise InputError(
            f"the weights in {pretrained.folder} lack {counted(len(missing), 'part')} of a decoder "
            f"with its output layer, such as {missing[0]}: they are those of a model that writes "
            "no text; take a checkpoint of a causal language model, such as openai-community/gpt2"
        )
    stops = _stops(model, tokenizer)
    return LoadedDecoder(
        model,
        tokenizer,
        dimensions(model.config, tokenizer).max_length,
        stops,
        {
            "model": pretrained.name_or_path,
            "model_revision": pretrained.revision,
            "weights_sha256": weights_digest(pretrained.folder),
            "config_sha256": sha256_of_files([pretrained.folder / "config.json"]),
            "stop_ids": ",".join(map(str, stops)),
        },
    )


def _stops(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text: those of the model, or else the tokenizer's."""
    settings = (getattr(model, "generation_config", None), model.config)
    for named in (
        *(getattr(one, "eos_token_id", None) for one in settings),
        tokenizer.eos_token_id,
    ):
        ids = named if isinstance(named, list) else [named]
        if known := sorted({i for i in ids if isinstance(i, int) and 0 <= i < len(tokenizer)}):
            return tuple(known)
    return ()
