"""Cloze items: texts with one masked word, candidates for it, and the windows that ask for it.

A file has one JSON object a line (``.jsonl``, or ``.jsonl.gz``). `Item` says what may be in it.
Sentences for number agreement are made here: a verb agrees with its subject, however far it is. In
"the keys to the cabinet are here" another noun stands between the subject and its verb. Where its
number is the other one it distracts: it is an attractor (Linzen et al. 2016, *Assessing the ability
of LSTMs to learn syntax-sensitive dependencies*; for masked language models Goldberg 2019,
*Assessing BERT's syntactic abilities*). The sentences are built like those of Marvin & Linzen
(2018), *Targeted syntactic evaluation of language models*.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from bertvision.errors import InputError
from bertvision.pipelines.records import Settings, digest_of, what_is_wrong
from bertvision.pipelines.tasks.source import read_text, text_lines
from bertvision.pipelines.tasks.windows import TEXTS_AT_ONCE, Windows, require_fast

MASK = "[MASK]"
"""Stands for the masked word in every file; each tokenizer has its own."""
_Text = Annotated[str, Field(min_length=1)]
AGREEMENT = "agreement"
"""Name of the set, which stands for a file of items."""
_NOUNS = [
    *(("author", "authors"), ("guard", "guards"), ("farmer", "farmers"), ("doctor", "doctors")),
    *(("pilot", "pilots"), ("teacher", "teachers"), ("officer", "officers"), ("king", "kings")),
]
_PLACES = ["near", "behind", "beside", "with"]
_VERBS = [("is", "are"), ("was", "were")]
_ENDS = ["here", "old", "famous", "late"]
_GROUPS = {
    "no other noun": (),
    "other noun of the same number": (False,),
    "1 attractor": (True,),
    "2 attractors": (True, True),
}
"""For each noun between subject and verb, whether it has the other number."""


class Item(Settings):
    """A text in which one word is asked for."""

    text: _Text
    """With `MASK` once."""
    answer: _Text
    """The word that belongs there."""
    wrong: _Text | None = None
    """The one other word it is chosen from, such as the verb in the other number."""
    candidates: Annotated[tuple[_Text, ...], Field(min_length=2)] | None = None
    """All words it is chosen from, the answer among them. Where neither they nor ``wrong`` are
    given, these are the answers of all such items of the file."""
    negated: _Text | None = None
    """A text with `MASK` that denies what ``text`` says: there the answer does not belong."""
    group: _Text = "all"
    """Group that it is counted with: a relation, or a kind of sentence."""
    id: str = ""
    """Name in messages; by default its line."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Item:
        for name, text in (("text", self.text), ("negated", self.negated or MASK)):
            if (times := text.count(MASK)) != 1:
                raise ValueError(f"{name}: holds {MASK} {times} times: expected once")
        if self.wrong is not None and self.candidates is not None:
            raise ValueError("wrong: stands beside candidates; give one of the two")
        if self.wrong == self.answer:
            raise ValueError(f"wrong: is the answer itself, {self.answer!r}")
        if self.candidates is not None and self.answer not in self.candidates:
            raise ValueError(f"candidates: do not hold the answer, {self.answer!r}")
        return self


class Items(NamedTuple):
    """A set of items."""

    name: str
    """Name in titles: that of the file without its ending."""
    sha256: str
    """Digest of what they were read or made from, in hex."""
    items: tuple[Item, ...]
    """In order, each with an id."""

    def until_mask(self) -> Items:
        """The same without what stands behind the mask, which a decoder does not see."""

        def cut(text: str | None) -> str | None:
            return text and text[: text.index(MASK)] + MASK

        updates = [{"text": cut(item.text), "negated": cut(item.negated)} for item in self.items]
        cut_items = zip(self.items, updates, strict=True)
        return self._replace(items=tuple(item.model_copy(update=new) for item, new in cut_items))

    def choices(self) -> list[tuple[str, ...]]:
        """For each item the words that are chosen from, each once."""
        free = [i.answer for i in self.items if i.wrong is None and i.candidates is None]
        common = tuple(dict.fromkeys(free))
        chosen = []
        for item in self.items:
            pair = None if item.wrong is None else (item.answer, item.wrong)
            chosen.append(pair or tuple(dict.fromkeys(item.candidates or common)))
        return chosen


def read_items(path: Path) -> Items:
    """Read a file of items.

    Raises:
        InputError: it cannot be read, holds no item or two of the same id, or a line is malformed;
            names the line and the field.
    """
    name = path.name.removesuffix(".gz")
    if not name.endswith(".jsonl"):
        raise InputError(
            f"{path}: items are read of JSON lines: give a file that ends in .jsonl or .jsonl.gz, "
            "or agreement, for sentences that are made here"
        )
    text, digest = read_text(path)
    items = []
    for line in text_lines(text):
        try:
            item = Item.model_validate_json(line.text, strict=True)
        except ValidationError as error:
            raise InputError(f"{path}, line {line.number}: {what_is_wrong(error)}") from error
        items.append(item.model_copy(update={"id": item.id or f"line {line.number}"}))
    ident, times = Counter(item.id for item in items).most_common(1)[0]
    if times > 1:
        raise InputError(f"{path}: the id {ident!r} is that of {times} items: each has its own")
    return Items(name.removesuffix(".jsonl"), digest, tuple(items))


def agreement(each: int = 64, seed: int = 0) -> Items:
    """Make sentences, equally many with a singular and with a plural subject.

    Args:
        each: sentences of a group; rounded up to an even number.
        seed: decides the words.
    """
    random = np.random.default_rng(seed)
    items = []
    for group, others in _GROUPS.items():
        for k in range(each + each % 2):
            number = k % 2  # 1 is plural
            nouns = random.choice(len(_NOUNS), 1 + len(others), replace=False)
            words = ["The", _NOUNS[nouns[0]][number]]
            for noun, differs in zip(nouns[1:], others, strict=True):
                place = _PLACES[random.integers(len(_PLACES))]
                words += [place, "the", _NOUNS[noun][1 - number if differs else number]]
            verbs = _VERBS[random.integers(len(_VERBS))]
            end = _ENDS[random.integers(len(_ENDS))]
            items.append(
                Item(
                    text=" ".join([*words, MASK, f"{end}."]),
                    answer=verbs[number],
                    wrong=verbs[1 - number],
                    group=group,
                    id=f"{group}, {k + 1}",
                )
            )
    values = [item.model_dump(mode="json") for item in items]
    return Items(AGREEMENT, digest_of(values), tuple(items))


class Prompts(NamedTuple):
    """Texts as an encoder reads them."""

    windows: Windows
    """A window for each text that fits, in order."""
    masked: NDArray[np.int64]
    """(windows,) where in its window each mask stands; of decoders the token before it."""
    fitting: NDArray[np.bool_]
    """(texts,) whether a text fits; the others have no window."""


def prompts(
    texts: Sequence[str], tokenizer: Any, longest: int, *, is_causal: bool = False
) -> Prompts:
    """Tokenise texts that hold `MASK` once.

    Args:
        texts: Texts, at least one.
        tokenizer: Tokenizer of the encoder or decoder, a fast one.
        longest: Number of tokens of a window at most.
        is_causal: Whether a decoder reads them: up to the mask, without special tokens at the end.

    Raises:
        InputError: the tokenizer is not a fast one, or knows no mask that an encoder needs.
    """
    require_fast(tokenizer)
    if tokenizer.mask_token is None and not is_causal:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no mask token: take a checkpoint of "
            "a masked language model, such as google-bert/bert-base-uncased"
        )
    ids: list[list[int]] = []
    types: list[list[int]] = []
    places: list[list[int]] = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        # where spaces belong to tokens, the masked one has that before it
        parts = (text.split(MASK) for text in texts[start : start + TEXTS_AT_ONCE])
        encoded = tokenizer(
            [
                before.rstrip(" ") + ("" if is_causal else tokenizer.mask_token + after)
                for before, after in parts
            ],
            padding=False,
            truncation=False,
            return_attention_mask=False,
            return_token_type_ids=True,
            return_special_tokens_mask=True,
            verbose=False,
        )
        types += encoded["token_type_ids"]
        if not is_causal:
            ids += encoded["input_ids"]
            continue
        for ids_of_text, special in zip(
            encoded["input_ids"], encoded["special_tokens_mask"], strict=True
        ):
            ends = np.append(0, np.flatnonzero(np.array(special) == 0))  # of none the first
            ids.append(ids_of_text[: ends[-1] + 1])
            places.append([int(ends[-1])] if ids_of_text else [])
    if not is_causal:  # a text that spells the tokenizer's own mask beside MASK has two
        places = [np.flatnonzero(np.array(i) == tokenizer.mask_token_id).tolist() for i in ids]
    types = [
        of_text[: len(ids_of_text)]
        if "token_type_ids" in tokenizer.model_input_names
        else [0] * len(ids_of_text)
        for of_text, ids_of_text in zip(types, ids, strict=True)
    ]
    fits = [
        len(ids_of_text) <= longest and len(at) == 1
        for ids_of_text, at in zip(ids, places, strict=True)
    ]
    used = [i for i, fitting in enumerate(fits) if fitting]
    tokens = [np.array(ids[i], np.int32) for i in used]
    empty = np.zeros(0, np.int32)
    joined = np.concatenate([empty, *tokens])
    windows = Windows(
        input_ids=joined,
        token_type_ids=np.concatenate([empty, *(types[i] for i in used)]).astype(np.uint8),
        offset_mapping=np.full((len(joined), 2), -1, np.int32),
        n_tokens=np.array([len(ids_of_text) for ids_of_text in tokens], np.int32),
        item_index=np.array(used, np.int32),
        labels={},
    )
    return Prompts(windows, np.array([places[i][0] for i in used], np.int64), np.array(fits))


class Vocabulary:
    """The single token that a word is where a mask stands.

    That depends on what stands before it: a space belongs to the token of some tokenizers, and what
    goes on without one may be another token than the word alone, or part of a longer one.

    Args:
        tokenizer: Tokenizer of the encoder, a fast one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[tuple[str, str], int | None] = {}

    def tokens(self, text: str, words: Iterable[str]) -> dict[str, int | None]:
        """The token of each word in the place of the mask of a text; None where it is not one.

        Args:
            text: Text with `MASK`.
            words: any.
        """
        before = text[: text.index(MASK)]
        # of what stands before a space the token of a word does not depend
        stem = "a " if before.endswith(" ") else before.split(" ")[-1]
        words = list(words)
        if new := [word for word in dict.fromkeys(words) if (stem, word) not in self._known]:
            start, *word_ids = self._split([stem.rstrip(" "), *(stem + word for word in new)])
            for word, ids in zip(new, word_ids, strict=True):
                single = len(ids) == len(start) + 1 and ids[:-1] == start
                known = single and ids[-1] != self._tokenizer.unk_token_id
                self._known[stem, word] = ids[-1] if known else None
        return {word: self._known[stem, word] for word in words}

    def _split(self, texts: list[str]) -> list[list[int]]:
        """The tokens of some texts alone; one that is spelled like a special token is none."""
        encoded = self._tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            verbose=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids
