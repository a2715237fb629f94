"""Cloze tests: does the right word come first where it is masked?

Facts as in Petroni et al. (2019), *Language models as knowledge bases?* (LAMA): candidates are a
fixed set of words, and P@k says how often the right one is among the first k of them. Number
agreement as in Goldberg (2019), *Assessing BERT's syntactic abilities*: two candidates, the verb in
either number. Negation as in Kassner & Schütze (2020), *Negated and misprimed probes*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from bertvision.errors import InputError
from bertvision.pipelines.analysis.cloze_items import (
    AGREEMENT,
    MASK,
    Item,
    Items,
    Prompts,
    Vocabulary,
    agreement,
    prompts,
    read_items,
)
from bertvision.pipelines.analysis.lens import Decoder, Floats, pretrained_head
from bertvision.pipelines.analysis.moments import Array
from bertvision.pipelines.analysis.request import Request, Setting
from bertvision.pipelines.analysis.result import AnalysisResult, Axes, Labels, Variable
from bertvision.pipelines.declare import Kept, Resamples, Seed, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.plotting import Chart, points
from bertvision.pipelines.reading import StrPath, Tag, parse_tag
from bertvision.pipelines.records import Count
from bertvision.pipelines.results.columns import Column
from bertvision.pipelines.uncertainty import paired_bootstrap
from bertvision.pipelines.workspace.checks import check_snapshots

States = Callable[[Prompts], Floats]
"""Prompts → (windows, hidden) last state of each masked token."""
_ALL = "all"
OfGroups = Annotated[Array, Axes.of("groups")]
_SHOWN = 8
_SYSTEMS = {
    "p1": "P@1",
    "chance": "guessing",
    "majority": "commonest answer",
    "shuffled": "P@1, shuffled words",
    "negated": "P@1, negated",
}
"""Names that are told of what was left out; the rest are in the JSON."""


@dataclass(frozen=True, eq=False, repr=False)
class ClozeResult(AnalysisResult):
    """Shares of items whose right word is preferred to the others it may be chosen from.

    All shares are of items, by group; NaN where a group has no such item.

    Attributes:
        p1: (groups,) share of items whose answer comes first.
        p1_low: (groups,) lower end of its 95 % interval.
        p1_high: (groups,) its upper end.
        pk: (groups,) share whose answer is among the first ``k``, of items with more candidates.
        mrr: (groups,) mean of 1 / rank of the answer.
        chance: (groups,) ``p1`` of guessing.
        majority: (groups,) ``p1`` of always giving the candidate that is most often the answer
            where the same candidates are to be chosen from.
        shuffled: (groups,) ``p1`` where the other words stand in a random order, of items with two
            words or more.
        negated: (groups,) how often the answer comes first in the negated text.
        negated_same: (groups,) how often the same word comes first in both.
        groups: Names of the groups; ``all`` is the last where there are several.
        n_items: items of each.
        n_negated: items of each with a negated text.
        n_candidates: (groups,) mean number of candidates.
        name: Name of the set of items, for titles.
        model: Name of the model, for titles.
        note: A sentence about the model.
        k: Number of first words of ``pk``.
        left_out: Items that were left out, and candidates that are not one token, each with its
            reason.
        resamples: Number of draws of items by the bootstrap.
        seed: Seed of the bootstrap, and of the order of shuffled words.
    """

    kind = "cloze"
    heading = "The missing word (cloze tests)"
    caption = "How often the right word comes first where one word is masked"
    reading = (
        "P@1: share of items whose answer the model prefers to all other candidates, with a 95 "
        "% interval from drawing items again. Guessing and the commonest answer see no text. "
        "Shuffled: the other words of the text in a random order; what stays right there needs no "
        "syntax. Negated: P@1 of the same answer where the text denies it, which should be low; "
        "same: how often both texts get the same word."
    )
    seen = "A row for each group: P@1 with its interval, beside guessing and the controls."

    named = ("name", "model")
    variables = {
        "items": Variable("group", "items", kind="count", field="n_items"),
        "candidates": Variable("group", "candidates", 0, field="n_candidates"),
        "p1": Variable("group", "P@1", 3, interval=True),
        "p1_low": Variable("group"),
        "p1_high": Variable("group"),
        "pk": Variable("group", "P@k", 3),
        "mrr": Variable("group", "MRR", 3),
        "chance": Variable("group", "guessing", 3),
        "majority": Variable("group", "commonest answer", 3),
        "shuffled": Variable("group", "shuffled", 3),
        "negated": Variable("group", "negated", 3),
        "negated_same": Variable("group", "same", 3),
        "negated_items": Variable("group", field="n_negated"),
    }

    p1: OfGroups
    p1_low: OfGroups
    p1_high: OfGroups
    pk: OfGroups
    mrr: OfGroups
    chance: OfGroups
    majority: OfGroups
    shuffled: OfGroups
    negated: OfGroups
    negated_same: OfGroups
    groups: Labels
    n_items: Annotated[tuple[Count, ...], Axes.of("groups")]
    n_negated: Annotated[tuple[Count, ...], Axes.of("groups")]
    n_candidates: OfGroups
    name: str
    model: str
    note: str
    k: Count
    left_out: tuple[str, ...]
    resamples: Count
    seed: int

    def title(self) -> str:
        """One line that says what was measured on how much."""
        return f"Cloze, {self.model}, {self.name}, {self.n_items[-1]:,} items"

    def columns(self) -> list[Column]:
        """The columns of a group; controls that no item has are left out."""
        rows = self.rows()
        there = [c for c in super().columns() if any(row[c.key] is not None for row in rows)]
        return [replace(c, label=f"P@{self.k}") if c.key == "pk" else c for c in there]

    def remarks(self) -> list[str]:
        """Facts about the model, and the items that were left out."""
        told = [self.note]
        if self.left_out:
            more = len(self.left_out) - _SHOWN
            shown = "; ".join(self.left_out[:_SHOWN]) + (
                f"; and {more:,} more, in the JSON" if more > 0 else ""
            )
            told.append(f"Left out: {shown}.")
        return told

    def charts(self) -> dict[str, Chart]:
        """A row of points for each group: P@1 with its interval, and the controls there are."""
        names = {name: key for key, name in _SYSTEMS.items()}
        rows = [row | {"group": f"{row['group']} (n = {row['items']:,})"} for row in self.rows()]
        chart = points(rows, names, "items answered (share)", name="group")
        return {"p1": replace(chart, span=(0, 1))}


@job
def cloze(
    checkpoint: Tag = "0e",
    *,
    items: StrPath = "agreement",
    k: Annotated[int, Option(ge=2)] = 10,
    resamples: Resamples = 10_000,
    seed: Seed = 0,
    **where: Unpack[Kept],
) -> ClozeResult:
    """Ask the encoder for masked words, facts or verbs.

    The encoder runs on texts in which one word is masked, and its own MLM head says how often the
    right word comes before all other candidates, beside guessing, shuffled words and negated texts.
    A decoder reads what stands before the mask, and its output layer names the next token.

    Args:
        checkpoint: Snapshot to ask.
        items: File of items (.jsonl), or agreement: made sentences whose verb agrees with its
            subject.
        k: Number of first candidates of P@k.
        seed: Seed of draws, and of shuffled words.

    Raises:
        UnknownNameError: there is no such snapshot.
        InputError: a line of ``items`` is malformed, none can be asked, the encoder has no MLM
            head and the decoder no output layer, or an option is out of range.
    """
    request, tag = Request(cloze, locals()), parse_tag(checkpoint)
    check_snapshots(request.workspace, [tag])
    asked = agreement() if str(items) == AGREEMENT else read_items(Path(items))
    folder, _ = request.snapshot(tag)
    request.files = {asked.name: asked.sha256}
    request.settings["items"] = Setting(str(items), AGREEMENT, asked.name)

    def measure() -> ClozeResult:
        from transformers import PreTrainedModel

        from bertvision.pipelines.encoders.encoder import Encoder
        from bertvision.pipelines.encoders.loading import dimensions
        from bertvision.pipelines.encoders.vocabulary_head import CausalHead
        from bertvision.pipelines.workspace.snapshots import load_snapshot

        snapshot = load_snapshot(folder)
        config = snapshot.model.config
        last = int(config.num_hidden_layers)
        decoder, _, note = pretrained_head(request.workspace, tag, [last])
        alone = cast(PreTrainedModel, snapshot.model.base_model)
        encoder = Encoder(alone, {"all": [last]}, "32")

        def states(made: Prompts) -> Floats:
            windows, states = made.windows, []
            rows = np.arange(len(windows))
            for batch in encoder.batches(windows.n_tokens):
                (of_tokens,) = encoder(windows, rows[batch])
                lengths = windows.n_tokens[batch].astype(np.int64)
                first = np.cumsum(lengths) - lengths
                states.append(of_tokens[first + made.masked[batch], 0].cpu().numpy())
            return np.concatenate(states)

        return cloze_of_items(
            asked,
            states,
            decoder,
            snapshot.tokenizer,
            longest=dimensions(config, snapshot.tokenizer).max_length,
            k=k,
            resamples=resamples,
            seed=seed,
            model=tag,
            note=note,
            is_causal=isinstance(decoder, CausalHead),
        )

    return request.answer(ClozeResult, measure)


class _Asked(NamedTuple):
    """An item whose answer is one token."""

    item: Item
    words: tuple[str, ...]
    """Its candidates, each another token."""
    tokens: tuple[int, ...]
    """The token of each candidate."""

    @property
    def answer(self) -> int:
        """Place of the answer among them."""
        return self.words.index(self.item.answer)


class _Answered(NamedTuple):
    """Candidates that came first, (items,) each; NaN and -1 where nothing was asked."""

    rank: Array
    """Rank of the answer, from 1; candidates with the same logit stand before it."""
    first: NDArray[np.int64]
    """Index of the candidate with the largest logit."""


def cloze_of_items(
    items: Items,
    states: States,
    decoder: Decoder,
    tokenizer: Any,
    *,
    longest: int,
    k: int = 10,
    resamples: int = 10_000,
    seed: int = 0,
    model: str = "model",
    note: str = "",
    is_causal: bool = False,
) -> ClozeResult:
    """Ask for the masked word of every item.

    Args:
        items: Items to ask for.
        states: an encoder.
        decoder: reads its last states over the vocabulary.
        tokenizer: Tokenizer of the encoder, a fast one.
        longest: Number of tokens that it takes at most.
        k: Number of first words of P@k.
        resamples: Number of draws of items by the bootstrap, for the interval of P@1.
        seed: Seed of the bootstrap, and of the order of shuffled words.
        model: Name of the model, for titles.
        note: A sentence about the model.
        is_causal: Whether the model is a decoder, asked for the token that follows.

    Raises:
        InputError: no item can be asked, ``k`` is below 2, or the tokenizer has no mask.
    """
    if k < 2 or resamples < 1:
        raise InputError(f"k is {k} and resamples {resamples}: give 2 or more, and 1 or more")
    vocabulary = Vocabulary(tokenizer)
    items = items.until_mask() if is_causal else items
    asked, left_out = _askable(items, vocabulary)

    def answered(texts: Sequence[str | None]) -> _Answered:
        given = [i for i, text in enumerate(texts) if text is not None]
        answers = _Answered(np.full(len(texts), np.nan), np.full(len(texts), -1))
        if given:
            chosen = cast(list[str], [texts[i] for i in given])
            made = prompts(chosen, tokenizer, longest, is_causal=is_causal)
            if rows := [given[i] for i in made.windows.item_index]:
                features = decoder.features(0, states(made))
                _rank([asked[i] for i in rows], rows, features, decoder, answers)
        return answers

    plain = answered([item.item.text for item in asked])
    fits = np.isfinite(plain.rank)
    too = "before the mask is empty or longer than" if is_causal else "is longer than"
    twice = "" if is_causal else ", or has two masks"
    left_out += [
        f"{item.item.id}: its text {too} {longest} tokens{twice}"
        for item, fitting in zip(asked, fits, strict=True)
        if not fitting
    ]
    if not fits.any():
        raise InputError(
            f"no item of {items.name} can be asked ({left_out[0]}): take answers that are one "
            "token of the encoder's tokenizer"
        )
    asked = [asked[i] for i in np.flatnonzero(fits)]
    plain = _Answered(plain.rank[fits], plain.first[fits])
    random = np.random.default_rng(seed)
    shuffled = answered([_shuffled(item.item.text, random) for item in asked])
    negated = answered([_negated(item, vocabulary) for item in asked])
    left_out += [
        f"{item.item.id}: its negated text, where a candidate is not the same token, or too long"
        for item, rank in zip(asked, negated.rank, strict=True)
        if item.item.negated is not None and np.isnan(rank)
    ]
    same = np.where(np.isnan(negated.rank), np.nan, negated.first == plain.first)
    scores = {
        "p1": _first(plain.rank),
        "pk": np.where([len(f.words) > k for f in asked], plain.rank <= k, np.nan),
        "mrr": 1 / plain.rank,
        "chance": np.array([1 / len(item.words) for item in asked]),
        "majority": _majority(asked),
        "shuffled": _first(shuffled.rank),
        "negated": _first(negated.rank),
        "negated_same": same,
        "n_candidates": np.array([float(len(item.words)) for item in asked]),
    }
    members = _members(asked)
    means = {
        name: np.array([_mean(values[rows]) for rows in members.values()])
        for name, values in scores.items()
    }
    ends = [
        paired_bootstrap(p1, np.zeros_like(p1), resamples=resamples, seed=seed)
        for p1 in (scores["p1"][rows] for rows in members.values())
    ]
    return ClozeResult(
        **means,
        p1_low=np.array([end.low for end in ends]),
        p1_high=np.array([end.high for end in ends]),
        groups=tuple(members),
        n_items=tuple(map(len, members.values())),
        n_negated=tuple(int(np.isfinite(negated.rank[rows]).sum()) for rows in members.values()),
        name=items.name,
        model=model,
        note=note,
        k=k,
        left_out=tuple(left_out),
        resamples=resamples,
        seed=seed,
    )


def _askable(items: Items, vocabulary: Vocabulary) -> tuple[list[_Asked], list[str]]:
    """The items whose answer and another candidate are one token; what is left out, and why."""
    asked, unanswered = [], []
    dropped: Counter[str] = Counter()
    for item, words in zip(items.items, items.choices(), strict=True):
        tokens = vocabulary.tokens(item.text, words)
        if tokens[item.answer] is None:
            unanswered.append(f"{item.id}: its answer {item.answer!r} is not one token")
            continue
        by_token = {tokens[item.answer]: item.answer}
        chosen: dict[str, int] = {}
        for word in words:
            if (token := tokens[word]) is None:
                dropped[f"candidate {word!r}, not one token"] += 1
            elif (same := by_token.setdefault(token, word)) != word:
                dropped[f"candidate {word!r}, the same token as {same!r}"] += 1
            else:
                chosen[word] = token
        if len(chosen) < 2:
            unanswered.append(f"{item.id}: no candidate beside its answer is one token")
            continue
        asked.append(_Asked(item, tuple(chosen), tuple(chosen.values())))
    told = [f"{what} (of {times:,} items)" for what, times in sorted(dropped.items())]
    return asked, unanswered + told


def _rank(
    asked: Sequence[_Asked],
    rows: Sequence[int],
    features: Floats,
    decoder: Decoder,
    answers: _Answered,
) -> None:
    """Fill in ranks, of all items with the same candidates at a time."""
    alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, item in enumerate(asked):
        alike[item.tokens].append(i)
    for tokens, members in alike.items():
        index = np.array(tokens)
        logits = features[members] @ decoder.weight[index].T + decoder.bias(0)[index]
        own = np.array([asked[i].answer for i in members])
        as_large = logits >= np.take_along_axis(logits, own[:, None], axis=1)
        places = [rows[i] for i in members]
        answers.rank[places] = as_large.sum(axis=1)
        answers.first[places] = logits.argmax(axis=1)


def _shuffled(text: str, random: np.random.Generator) -> str | None:
    """The text with the words beside the mask in another order; None where there is none."""
    words = text.split()
    others = [i for i, word in enumerate(words) if MASK not in word]
    if len({words[i] for i in others}) < 2:
        return None
    mixed = list(words)
    while mixed == words:
        for i, j in zip(others, random.permutation(others), strict=True):
            mixed[i] = words[j]
    return " ".join(mixed)


def _negated(item: _Asked, vocabulary: Vocabulary) -> str | None:
    """The negated text, where the candidates are the same tokens in it."""
    text = item.item.negated
    if text is None or tuple(vocabulary.tokens(text, item.words).values()) != item.tokens:
        return None
    return text


def _majority(asked: Sequence[_Asked]) -> Array:
    """(items,) the chance that the commonest answer of the same candidates is the right one."""
    answers: defaultdict[frozenset[str], Counter[str]] = defaultdict(Counter)
    for item in asked:
        answers[frozenset(item.words)][item.item.answer] += 1
    scores = []
    for item in asked:
        counts = answers[frozenset(item.words)]
        most = max(counts.values())
        tied = sum(times == most for times in counts.values())
        scores.append((counts[item.item.answer] == most) / tied)
    return np.array(scores)


def _members(asked: Sequence[_Asked]) -> dict[str, list[int]]:
    """By group its items, and all of them where there are several groups."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for i, item in enumerate(asked):
        groups[item.item.group].append(i)
    if len(groups) > 1:
        groups[_ALL if _ALL not in groups else "all groups"] = list(range(len(asked)))
    return dict(groups)


def _first(rank: Array) -> Array:
    """1 where the answer came first, 0 where not, NaN where nothing was asked."""
    return np.where(np.isnan(rank), np.nan, rank == 1)


def _mean(values: Array) -> float:
    """Mean of what is a number; NaN where nothing is."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else np.nan
