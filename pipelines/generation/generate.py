"""Generation: prompts → texts, whose tokens and hidden states become a split of the store.

A batch of prompts, continued token by token until each has ended, with its hidden states.

What was generated, as text: the tokens of a split, read by the tokenizer that they are of.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertvision.errors import DiskSpaceError, InputError, counted
from bertvision.featurestore.creation import SplitSpec
from bertvision.featurestore.format.keeping import Keep
from bertvision.featurestore.format.logits import LOGITS, TopLogits, TopRule
from bertvision.featurestore.format.plan import SHARD_TOKENS, ShardPlan
from bertvision.featurestore.format.records import Provenance
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.writer import expected_bytes, free_bytes
from bertvision.featurestore.writing.appending import ActivationWriter
from bertvision.featurestore.writing.origin import tokenizer_digest
from bertvision.pipelines.encoders.loading import fetch, load_tokenizer
from bertvision.pipelines.encoders.sites.names import choose_sites, width_of
from bertvision.pipelines.extraction.layers import kept_layers
from bertvision.pipelines.generation.decoder import Chooser, Decoder
from bertvision.pipelines.generation.loading import LoadedDecoder, TextSettings
from bertvision.pipelines.generation.prompts import Prompt, digest
from bertvision.pipelines.precision import resolve_precision
from bertvision.pipelines.progress import progress
from bertvision.pipelines.tasks.windows import Int32Array, Int64Array
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.job_options import GenerateOptions

FINISH_REASONS = ("stop", "length", "context")
"""Why a text ends, by its number in the store: its last token is one that ends texts; it has as
many new tokens as were asked for; or the decoder takes no more tokens."""


class Continued(NamedTuple):
    """A prompt and what follows."""

    key: str
    input_ids: Int32Array
    """(tokens,) of the prompt and all that was generated."""
    prompt_tokens: int
    hidden_states: Tensor
    """(tokens, layers, hidden) float32 on the CPU."""
    finish_reason: int
    """See `FINISH_REASONS`."""
    next_tokens: TopLogits | None
    """The most probable next tokens of each, arrays of NumPy, where they are asked for."""


def go_on(
    prompts: Sequence[Prompt],
    decoder: Decoder,
    choose: Chooser,
    *,
    most_new: int,
    longest: int,
    stops: Collection[int],
    settings: TextSettings,
    told: Callable[[int, int], None],
) -> list[Continued]:
    """Generate the texts of a batch.

    Every token is read by the decoder, the last one of a text too, so that the states of all are
    there. Where half of the rows of a batch have ended, the others go on without them.

    Args:
        prompts: Prompts of the batch.
        decoder: Decoder that continues them.
        choose: their tokens.
        most_new: tokens of a text behind its prompt.
        longest: tokens of a text, its prompt included.
        stops: token ids that end a text.
        settings: Settings of the decoder that change its texts.
        told: called after each step with the tokens that were generated, and with those that will
            not be because a text has ended.
    """
    limits = [new_tokens(prompt, most_new, longest) for prompt in prompts]
    changes = [
        settings.of_prompt(len(prompt.ids), len(prompt.ids) + limit)
        for prompt, limit in zip(prompts, limits, strict=True)
    ]
    reading = decoder.begin()
    given = reading.feed(*decoder.padded([prompt.ids for prompt in prompts]))
    states = [
        [states_of_prompt[-len(p.ids) :]]
        for p, states_of_prompt in zip(prompts, given.states, strict=True)
    ]
    tops: list[list[TopLogits]] = [[] for _ in prompts]
    for row, top in enumerate(given.next_tokens or ()):
        tops[row].append(top)
    written: list[list[int]] = [[] for _ in prompts]
    reasons: dict[int, int] = {}
    rows, logits = list(range(len(prompts))), given.logits
    while len(reasons) < len(prompts):
        going = [row not in reasons for row in rows]
        if any(changes):
            logits = logits.clone()  # those of a pass cannot be changed
            for place in np.flatnonzero(going).tolist():
                row = rows[place]
                text = torch.tensor([[*prompts[row].ids.tolist(), *written[row]]])
                change: Any = changes[row]
                logits[place] = change(text.to(logits.device), logits[place : place + 1])[0]
        tokens = choose(logits, rows)
        given = reading.feed(tokens[:, None], torch.tensor(going)[:, None])
        logits, never = given.logits, 0
        for place in np.flatnonzero(going).tolist():
            row, token = rows[place], int(tokens[place])
            written[row].append(token)
            states[row].append(given.states[place])
            if given.next_tokens is not None:
                tops[row].append(given.next_tokens[place])
            if token in stops:
                reasons[row] = 0
            elif len(written[row]) == limits[row]:
                reasons[row] = 1 if limits[row] == most_new else 2
            if row in reasons:
                never += limits[row] - len(written[row])
        told(sum(going), never)
        left = [place for place, row in enumerate(rows) if row not in reasons]
        if 0 < len(left) <= len(rows) / 2:  # less often, and more is computed that goes nowhere
            reading.keep(left)
            rows, logits = [rows[place] for place in left], logits[left]
    return [
        Continued(
            prompt.key,
            np.concatenate([prompt.ids, np.array(written[row], np.int32)]),
            len(prompt.ids),
            torch.cat(states[row]),
            reasons[row],
            TopLogits.joined(tops[row]) if tops[row] else None,
        )
        for row, prompt in enumerate(prompts)
    ]


def new_tokens(prompt: Prompt, most_new: int, longest: int) -> int:
    """Largest number of tokens generated for a prompt."""
    return min(most_new, longest - len(prompt.ids))


log = logging.getLogger(__name__)


class Generated(NamedTuple):
    """Result of a generation.

    Attributes:
        tag: Snapshot of the split.
        split: its name.
        examples: prompts with what follows, that the split has.
        added: Number added by this call; the others were there before.
        prompt_tokens: Stored tokens of the prompts of all examples.
        generated_tokens: likewise.
        keep: Rule of the tokens that are stored of each text; None where all are.
        finish_reasons: Number of texts by reason (see `batch.FINISH_REASONS`).
        layers: indices of the hidden states, or names of the sites.
        bytes: Size of the split's shards.
    """

    tag: str
    split: str
    examples: int
    added: int
    prompt_tokens: int
    generated_tokens: int
    keep: str | None
    finish_reasons: dict[str, int]
    layers: list[int] | list[str]
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """Values by name."""
        return self._asdict()


class Generation:
    """Prompts, a decoder, and how it continues them.

    Args:
        loaded: the decoder.
        prompts: Prompts in the order of the data.
        options: Options of the extraction.

    Raises:
        InputError: the model is no decoder, has no such layer or site, sites are of several widths,
            or options contradict each other.
    """

    def __init__(
        self, loaded: LoadedDecoder, prompts: Sequence[Prompt], options: GenerateOptions
    ) -> None:
        config = loaded.model.config
        if options.sites and options.layers is not None:
            raise InputError("--layers beside --sites: name blocks in --sites, as blocks.3.*")
        if options.top_p not in (None, 1) and not options.temperature:
            raise InputError("--top-p is for tokens that are drawn: give a --temperature above 0")
        self._settings = TextSettings(
            *(loaded.model, loaded.stops), drawn=options.temperature > 0, top_p=options.top_p
        )
        depth = config.num_hidden_layers
        self._sites: tuple[str, ...] = ()
        self._layers = kept_layers(options.layers, depth, pooler=False, tokens="all")
        if options.sites:
            self._sites = choose_sites(options.sites, config.model_type, depth)
            self._layers = tuple(range(len(self._sites)))
        self._hidden = width_of(self._sites, config)
        self._precision = resolve_precision(options.precision)
        top = None if options.logits is None else TopRule.parse(options.logits)
        self._decoder = Decoder(loaded.model, self._layers, self._precision, self._sites, top)
        self._loaded, self._prompts, self._options = loaded, prompts, options
        self._most = [
            new_tokens(prompt, options.max_new_tokens, loaded.longest) for prompt in prompts
        ]
        self._check_keep()
        longest = max(len(p.ids) + n for p, n in zip(prompts, self._most, strict=True))
        self._shard_tokens = max(SHARD_TOKENS, 2 * longest)

    def run(self, store: ActivationStore, tag: str, split: str) -> Generated:
        """Go on with the prompts that the split does not have yet, and finish it.

        A call that was killed is finished by the same one. Which prompts stand in a batch together
        follows from the prompts alone, and a batch that a kill has cut is computed again as a
        whole: the same texts come out, and of one batch size on one machine the same bytes.

        Args:
            store: Its place.
            tag: Tag of the split.
            split: its name.

        Raises:
            InputError: the split holds prompts that are not among these.
            NonFiniteError: a hidden state is NaN or infinite.
            ProvenanceError: the split was begun from something else; the message names the field.
            LockedError: another process is writing it.
            DiskSpaceError: the disk is too small, or full; what was committed stays.
        """
        with store.writer(
            *(tag, split),
            hidden_size=self._hidden,
            layers=self._sites or self._layers,
            encoding=self._options.encoding,
            shard_tokens=self._shard_tokens,
            keep=self._options.keep,
            logits=self._options.logits,
            tokenizer=self._loaded.tokenizer,
            provenance=self._made_from(),
        ) as writer:
            missing = [i for i, p in enumerate(self._prompts) if p.key not in writer]
            if missing:
                self._check_space(store, SplitSpec(tag, split, *self._stored_as()), missing)
                self._write(writer, f"generate {tag}/{split}")
            done = writer.finish(self._options.permute, examples=len(self._prompts))
        return _summary(store, done, len(missing))

    def _check_keep(self) -> None:
        """Refuse a rule that a text may have no token for, before any is generated."""
        fewest = self._kept_tokens(range(len(self._prompts)), [1] * len(self._prompts))
        if not fewest.all():
            prompt = min(self._prompts, key=lambda prompt: len(prompt.ids))
            raise InputError(
                f"--keep {self._options.keep}: prompt {prompt.key!r} has "
                f"{counted(len(prompt.ids), 'token')}, and its text may have none that is kept: "
                f"give from:N with N up to {len(prompt.ids)}, or leave such prompts out"
            )

    def _kept_tokens(self, prompts: Sequence[int], new: Sequence[int]) -> Int64Array:
        """(prompts,) tokens that are stored of texts with so many new tokens."""
        read = np.array([len(self._prompts[i].ids) for i in prompts])
        lengths: Int64Array = read + np.array(new)
        if self._options.keep is None:
            return lengths
        starts = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        mask = Keep.parse(self._options.keep).mask(
            lengths, {"generated": (places >= np.repeat(read, lengths)).astype(np.uint8)}
        )
        kept: Int64Array = np.add.reduceat(mask.astype(np.int64), starts)
        return kept

    def _stored_as(self) -> tuple[str, tuple[int, ...], int, Provenance]:
        logits = self._options.logits
        made_from: Provenance = {} if logits is None else {LOGITS: logits}
        return self._options.encoding, self._layers, self._hidden, made_from

    def _made_from(self) -> Provenance:
        """Everything that the tokens and their states depend on, causes first."""
        options = self._options
        drawn: Provenance = {"top_p": self._settings.top_p, "seed": options.seed}
        return {
            **self._loaded.made_from,
            **({} if options.date is None else {"date": options.date}),
            **self._settings.made_from,
            "prompts_sha256": digest(self._prompts),
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
            **(drawn if options.temperature else {}),
            "precision": self._precision,
            "attn_implementation": self._decoder.attention,
        }

    def _check_space(self, store: ActivationStore, spec: SplitSpec, missing: list[int]) -> None:
        """Say how large it will be, and refuse where not even short texts fit."""
        read = sum(len(self._prompts[i].ids) for i in missing)
        new = sum(self._most[i] for i in missing)
        least, most = (
            expected_bytes(
                ShardPlan.make(self._kept_tokens(missing, each), shard_tokens=self._shard_tokens),
                spec,
            )
            for each in ([1] * len(missing), [self._most[i] for i in missing])
        )
        if self._options.permute is not None:  # each shard is written twice
            least, most = 2 * least, 2 * most
        free = free_bytes(store.storage)
        log.info(
            "%s/%s: %s, %s, and at most %s that are generated; at most %s; free on the disk: %s",
            *(spec.tag, spec.split),
            counted(len(missing), "prompt"),
            counted(read, "token"),
            f"{new:,}",
            size(most),
            "unknown" if free is None else size(free),
        )
        if free is not None and least > free:
            raise DiskSpaceError(
                f"{size(least)} at least are needed in {store.storage}, {size(free)} are free: "
                "free some space, name another --store, keep fewer --layers or take a smaller "
                "--encoding"
            )
        if free is not None and most > free:
            log.warning(
                "the disk has no room for texts that are all of --max-new-tokens; where it is full "
                "before the end, the same command goes on when there is more"
            )

    def _write(self, writer: ActivationWriter, name: str) -> None:
        """Add what is missing, batch by batch."""
        todo = [
            batch
            for batch in self._batches()
            if not all(self._prompts[i].key in writer for i in batch)
        ]
        most = sum(self._most[i] for batch in todo for i in batch)
        with progress(most, name, "token") as bar:

            def told(new: int, never: int) -> None:
                bar.total = (bar.total or 0) - never  # or the time that is left would count them
                bar.update(new)

            for batch in todo:
                prompts = [self._prompts[i] for i in batch]
                options = self._options
                texts = go_on(
                    prompts,
                    self._decoder,
                    Chooser(
                        [p.key for p in prompts],
                        *(options.temperature, self._settings.top_p, options.seed),
                        *(self._settings.before, self._settings.after),
                    ),
                    most_new=options.max_new_tokens,
                    longest=self._loaded.longest,
                    stops=self._loaded.stops,
                    settings=self._settings,
                    told=told,
                )
                for row, text in zip(batch, texts, strict=True):
                    if text.key not in writer:
                        generated = np.arange(len(text.input_ids)) >= text.prompt_tokens
                        writer.add(
                            text.key,
                            text.hidden_states,
                            input_ids=text.input_ids,
                            labels={"finish_reason": text.finish_reason, "prompt": row},
                            fields={"generated": generated.astype(np.uint8)},
                            logits=text.next_tokens,
                        )

    def _batches(self) -> list[list[int]]:
        """Numbers of prompts of like length, the longest first."""
        lengths = np.array([len(prompt.ids) for prompt in self._prompts])
        order = np.argsort(-lengths, kind="stable").tolist()
        each = self._options.batch_size
        return [order[first : first + each] for first in range(0, len(order), each)]


def _summary(store: ActivationStore, split: ActivationSplit, added: int) -> Generated:
    record, reasons = split.record, split.labels["finish_reason"]
    generated = int(split.array("generated").sum())  # of the fill it is 0
    return Generated(
        tag=record.tag,
        split=record.split,
        examples=len(split),
        added=added,
        prompt_tokens=split.plan.total_tokens - generated,
        generated_tokens=generated,
        keep=split.keep,
        finish_reasons={name: int((reasons == i).sum()) for i, name in enumerate(FINISH_REASONS)},
        layers=split.layer_names or [*record.layers],
        bytes=store.stored_bytes(record.tag, record.split),
    )


class GeneratedText(NamedTuple):
    """A prompt and what follows, in words."""

    id: str
    """Key of the prompt."""
    prompt: str
    """With the special tokens that it was read with; empty where its tokens are not stored."""
    completion: str
    """Without special tokens."""
    finish_reason: str
    """See `FINISH_REASONS`."""
    example: int
    """Its position in the split."""


def generated_texts(split: ActivationSplit, tokenizer: str | None = None) -> list[GeneratedText]:
    """The texts of a split, in the order of the prompts.

    Args:
        split: Split that `bertvision generate` wrote, complete, with all generated tokens.
        tokenizer: folder or hub name; by default that of the decoder, where it was.

    Raises:
        InputError: the split was not generated, or the tokenizer is another one or gone.
        IncompleteSplitError: it is not complete.
    """
    split.require_complete()
    if "generated" not in split.record.arrays or "finish_reason" not in split.labels:
        raise InputError(f"{split.name} was not written by `bertvision generate`: it has no texts")
    check_texts(split.keep)
    reader, order = _tokenizer(split, tokenizer), np.argsort(split.labels["prompt"])
    return list(_texts(split, reader, order.tolist()))


def check_texts(keep: str | None) -> None:
    """Check that a rule keeps all generated tokens, of which texts are read.

    Raises:
        InputError: It keeps some of them.
    """
    if keep not in (None, "completion", "generated"):
        raise InputError(
            f"the texts of a split are read from its tokens, and --keep {keep} stores some of "
            "them: --keep completion stores all that are generated"
        )


def _tokenizer(split: ActivationSplit, given: str | None) -> Any:
    made_from = split.record.provenance
    name, revision = given, None
    if name is None:
        name, revision = str(made_from.get("model")), made_from.get("model_revision")
    local = Path(name).expanduser()
    folder = local if local.is_dir() else fetch(name, None if revision is None else str(revision))
    tokenizer = load_tokenizer(folder)
    if tokenizer_digest(tokenizer) != made_from.get("tokenizer_sha256"):
        raise InputError(
            f"the tokenizer of {name} is not the one that {split.name} was made with: name the "
            "folder of that one with --tokenizer"
        )
    return tokenizer


def _texts(split: ActivationSplit, tokenizer: Any, order: list[int]) -> Iterator[GeneratedText]:
    ids, generated = split.array("input_ids"), split.array("generated")
    keys, plan = split.table()["id"].to_pylist(), split.plan
    for example in order:
        begin = int(plan.first_token[example])
        span = slice(begin, begin + int(plan.n_tokens[example]))
        tokens, new = ids[span], generated[span] == 1
        whole, before = (
            tokenizer.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for some in (tokens, tokens[~new])
        )
        if whole.startswith(before):  # a decoder of pieces drops the space in front of the first
            completion = whole[len(before) :]
        else:  # the prompt ends within a character
            completion = tokenizer.decode(tokens[new], skip_special_tokens=True)
        yield GeneratedText(
            keys[int(plan.example_id[example])],
            tokenizer.decode(tokens[~new], clean_up_tokenization_spaces=False),
            completion,
            FINISH_REASONS[int(split.labels["finish_reason"][example])],
            example,
        )
