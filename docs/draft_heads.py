"""Draft heads in the manner of EAGLE, trained on stored states of a decoder and beside it live.

    python docs/draft_heads.py MODEL DATA FOLDER

``MODEL`` is google/gemma-3-270m in a folder, ``DATA`` has ``squad``: heads are trained on training
contexts, and draft the decoder's own continuations of the beginnings of held-out ones. ``FOLDER``
takes stores and runs; an interrupted call goes on by the same command. It writes the table
``draft_heads``.

A head is EAGLE's, of one layer (Li et al. 2024, arXiv:2401.15077, section 3.1): the state of a
token and the embedding of the next one give the next state, from which the decoder's output layer
reads a token. The loss is that of section 3.2. Arithmetic is bfloat16 in training, the decoder's
live too. A draft is a chain that begins with a state of the decoder in float32, whatever the head
was trained on.
"""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from collect_decoder import write, write_texts
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoModelForCausalLM

import bertvision
from bertvision.pipelines.uncertainty import paired_runs

WHOLE, ENCODED, CODED = "float32", ("bfloat16", "int8", "int4"), "transform:0.115"
SOURCES, SEEDS = ("live", *ENCODED, CODED), 3
LENGTH, EPOCHS, BATCH, RATE, CLASSES = 128, 3, 4, 2e-3, 0.1
"""Tokens of a text at most, passes over them, texts of a batch, the learning rate, and the weight
of the cross-entropy beside the regression."""
WORDS, WRITTEN = 32, 32
"""Words of a prompt, and tokens that the decoder continues it by."""
DRAFTED, VOCABULARY = 4, 8192
"""Tokens of a draft, and those that heads know: the most frequent ones of the training texts."""
TRAIN, DRAFTS = "0e/texts-train", "0e/drafts"
Row = dict[str, Any]


def main(model: Path, data: Path, folder: Path) -> None:
    """Extract, generate, train, measure, and write the table."""
    torch.set_num_threads(1)
    write_texts(data / "squad" / "train.json.gz", 2, folder / "texts" / "train.jsonl")
    titles = write_texts(data / "squad" / "dev.json.gz", 3, folder / "prompts.jsonl", WORDS)
    splits = make_stores(model, folder)
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    drafter = Drafter(decoder.requires_grad_(False), splits)
    (folder / "runs").mkdir(exist_ok=True)
    for seed, source in itertools.product(range(SEEDS), SOURCES):
        path = folder / "runs" / f"{source}-{seed}.json"
        if not path.is_file():
            path.write_text(json.dumps(drafter.run(source, seed)), encoding="utf-8")
    write_table(folder, drafter, titles)


def make_stores(model: Path, folder: Path) -> dict[str, bertvision.ActivationSplit]:
    """Store the last states of the texts, in every encoding, and those of the continuations."""
    given = ["--model", str(model), "--layers", "-1", "--precision", "32"]
    texts = ["--task", "text", "--data", str(folder / "texts"), "--max-length", str(LENGTH)]
    prompts = ["--data", str(folder / "prompts.jsonl"), "--max-new-tokens", str(WRITTEN)]
    for name in (WHOLE, CODED):
        how = ["--encoding", name, "--workspace", str(folder / name.partition(":")[0])]
        subprocess.run(["bertvision", "extract", *given, *texts, *how], check=True)
    how = ["--encoding", WHOLE, "--workspace", str(folder / WHOLE)]
    subprocess.run(["bertvision", "generate", DRAFTS, *given, *prompts, *how], check=True)
    store = bertvision.ActivationStore.open(folder / WHOLE / "activations")
    splits = {"drafts": store[DRAFTS], WHOLE: store[TRAIN]}
    whole = splits[WHOLE]
    for encoding in ENCODED:
        sizes = {"hidden_size": whole.record.hidden_size, "layers": whole.record.layers}
        with store.writer("0e", encoding, **sizes, encoding=encoding) as writer:
            for i, ids in enumerate(ids_of(whole)):
                if i not in writer:
                    writer.add(i, whole[i].transpose(1, 2), input_ids=ids)
            splits[encoding] = writer.finish()
    coded = bertvision.ActivationStore.open(folder / CODED.partition(":")[0] / "activations")
    return splits | {CODED: coded[TRAIN]}


def ids_of(split: bertvision.ActivationSplit) -> list[Tensor]:
    """The token ids of each example."""
    ids, plan = torch.from_numpy(split.array("input_ids")).long(), split.plan
    ends = plan.first_token + plan.n_tokens
    return [ids[i:j] for i, j in zip(plan.first_token.tolist(), ends.tolist(), strict=True)]


class Written(NamedTuple):
    """A prompt and its continuation."""

    ids: Tensor
    """(seq,) token ids."""
    states: Tensor
    """(seq, hidden) last states."""
    prompt: int
    """Tokens of the prompt."""
    number: int
    """Place of the prompt in its file."""


class Head(nn.Module):
    """A layer such as the decoder's, and its final norm, which give the next state.

    The layer begins with random weights, the norm with the decoder's.

    Args:
        decoder: Stack of the decoder's layers.
        factor: Factor by which states have the mean norm sqrt(hidden).
    """

    def __init__(self, decoder: Any, factor: float) -> None:
        super().__init__()
        config = copy.deepcopy(decoder.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        config.vocab_size, config.pad_token_id = 1, 0
        self.fuse = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = AutoModel.from_config(config)
        self.layer.norm.load_state_dict(decoder.norm.state_dict())
        self._factor = factor

    def forward(self, states: Tensor, embedded: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """The next states, (batch, seq, hidden).

        Args:
            states: (batch, seq, hidden).
            embedded: (batch, seq, hidden) embeddings of the tokens that follow.
            mask: (batch, 1, seq, seq) true where a query, the first of both, looks at a key.
            places: (batch, seq) positions in the text.
        """
        fused = self.fuse(torch.cat([states * self._factor, embedded], dim=-1))
        output = self.layer(
            inputs_embeds=fused,
            attention_mask={"full_attention": mask},
            position_ids=places,
            use_cache=False,
        )
        made: Tensor = output.last_hidden_state
        return made


class Drafter:
    """Trains heads, and counts how many tokens of their drafts the decoder writes itself.

    Args:
        decoder: The decoder with its output layer.
        splits: Splits of the texts by encoding, and of the continuations, ``drafts``.
    """

    def __init__(self, decoder: Any, splits: Mapping[str, bertvision.ActivationSplit]) -> None:
        self._decoder, self.splits = decoder.model, splits
        self.texts = ids_of(splits[WHOLE])
        counts = Counter(torch.cat(self.texts).tolist())
        self._known = torch.tensor(sorted(token for token, _ in counts.most_common(VOCABULARY)))
        self._output = decoder.get_output_embeddings().weight[self._known].clone()
        split = splits["drafts"]
        texts, generated = ids_of(split), split.array("generated")
        counts_of = np.add.reduceat(generated.astype(int), split.plan.first_token).tolist()
        numbers = split.array("prompt").tolist()
        self.written = [
            Written(ids, split[i][..., 0], len(ids) - written, number)
            for i, (ids, written, number) in enumerate(zip(texts, counts_of, numbers, strict=True))
            if written > DRAFTED  # a token, and a draft behind it
        ]

    def run(self, source: str, seed: int) -> Row:
        """Train a head, and measure it."""
        split = self.splits[WHOLE if source == "live" else source]
        factor = float(split.tokens(-1, scaled=True).scale_factors)
        started, tokens = time.process_time(), 0  # of the processor: other work goes on beside
        torch.manual_seed(seed)
        head = Head(self._decoder, factor).train()
        optimiser = torch.optim.AdamW(head.parameters(), lr=RATE, betas=(0.9, 0.95))
        loader = bertvision.ActivationLoader(split, batch_size=BATCH, seed=seed)
        steps = EPOCHS * len(loader)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, steps, pct_start=0.1)
        for batch in itertools.chain.from_iterable(itertools.repeat(loader, EPOCHS)):
            ids = [self.texts[i] for i in batch.examples.tolist()]
            with torch.autocast("cpu", torch.bfloat16):
                live = self._computed(ids) if source == "live" else None
                states = live or [own[..., 0] for own in batch.unpack()]
                loss = self._loss(head, ids, states, factor)
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimiser.step()
            rates.step()
            tokens += sum(map(len, ids))
        seconds = time.process_time() - started
        with torch.no_grad():
            drafts = [self._drafts(head.eval(), text) for text in self.written]
        return {"rate": tokens / seconds} | scores(self.written, drafts)

    @torch.no_grad()
    def _computed(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """The last state of every token, as the decoder gives it."""
        mask = pad_sequence([torch.ones_like(own) for own in ids], batch_first=True)
        padded = pad_sequence(list(ids), batch_first=True)
        output = self._decoder(input_ids=padded, attention_mask=mask, use_cache=False)
        return [x[: len(own)] for x, own in zip(output.last_hidden_state, ids, strict=True)]

    def _loss(
        self, head: Head, ids: Sequence[Tensor], states: Sequence[Tensor], factor: float
    ) -> Tensor:
        """Smooth L1 of the next state, and cross-entropy of what the output layer makes of it."""
        given = pad_sequence([own[:-1] for own in states], batch_first=True)
        wanted = torch.cat([own[1:] for own in states])
        embedded = self._decoder.embed_tokens(pad_sequence([x[1:] for x in ids], batch_first=True))
        seq = given.shape[1]
        real = pad_sequence([torch.ones(len(x) - 1) for x in ids], batch_first=True).bool()
        causal = torch.ones(seq, seq).tril().bool().expand(len(ids), 1, seq, seq)
        places = torch.arange(seq).expand(len(ids), seq)
        made = head(given, embedded, causal, places)[real]
        with torch.no_grad():
            truth = F.softmax((wanted @ self._output.T).float(), dim=-1)
        regression = F.smooth_l1_loss(made.float() * factor, wanted * factor)
        return regression + CLASSES * F.cross_entropy((made @ self._output.T).float(), truth)

    def _drafts(self, head: Head, text: Written) -> Tensor:
        """The tokens that are drafted behind each token and the one that follows it, (n, drafted).

        The chain of each place looks at the decoder's states up to there, and at itself.
        """
        n = len(text.ids) - 1
        own, block = torch.arange(n).repeat(DRAFTED), torch.arange(DRAFTED).repeat_interleave(n)
        earlier = (block[None] == 0) & (own[None] <= own[:, None])
        same = (own[None] == own[:, None]) & (block[None] <= block[:, None])
        mask, places = (earlier | same)[None, None], (own + block)[None]
        states, tokens = [text.states[:-1]], [text.ids[1:]]
        for step in range(1, DRAFTED + 1):
            size = step * n
            embedded = self._decoder.embed_tokens(torch.cat(tokens))[None]
            seen = mask[..., :size, :size]
            made = head(torch.cat(states)[None], embedded, seen, places[:, :size])[0, -n:]
            states.append(made)
            tokens.append(self._known[(made @ self._output.T).argmax(dim=-1)])
        return torch.stack(tokens[1:], dim=1)


def scores(texts: Sequence[Written], drafts: Sequence[Tensor]) -> Row:
    """Accepted tokens of a draft, the mean of each text, and how often as many are accepted.

    Drafts count where decoding with them makes one: behind the token that the last pass gave beside
    the accepted ones. A mean over all tokens would count easy stretches, which are skipped.
    """
    accepted = []
    for text, drafted in zip(texts, drafts, strict=True):
        # from the first token that was generated on, but for the last ones
        roots = torch.arange(text.prompt - 1, len(text.ids) - 1 - DRAFTED)
        truth = text.ids[roots[:, None] + 2 + torch.arange(DRAFTED)]
        right, made, at = (drafted[roots] == truth).cumprod(dim=1), [], 0
        while at < len(roots):
            made.append(at)
            at += int(right[at].sum()) + 1
        accepted.append(right[made])
    reached = torch.cat(accepted).double().mean(dim=0)
    means = [float(own.sum(dim=1).double().mean()) for own in accepted]
    return {"accepted": means, "reached": reached.tolist()}


def copied(text: Written) -> Tensor:
    """The tokens that followed the last two, or else the last one, earlier in the text."""
    ids, drafts = text.ids.tolist(), []
    for end in range(2, len(ids) + 1):
        places = (
            at
            for length in (2, 1)
            for at in range(end - 1, length - 1, -1)
            if ids[at - length : at] == ids[end - length : end]
        )
        at = next(places, end)
        drafts.append([*ids[at : min(at + DRAFTED, end)], *[-1] * DRAFTED][:DRAFTED])
    return torch.tensor(drafts)


def followers(text: Written, texts: Sequence[Tensor]) -> Tensor:
    """The most frequent follower in the training texts, and its follower."""
    pairs = torch.cat([torch.stack([ids[:-1], ids[1:]]) for ids in texts], dim=1).T.tolist()
    follower: dict[int, int] = {}
    for (token, after), _ in Counter(map(tuple, pairs)).most_common():
        follower.setdefault(token, after)
    drafts = [text.ids[1:].tolist()]
    for _ in range(DRAFTED):
        drafts.append([follower.get(token, -1) for token in drafts[-1]])
    return torch.tensor(drafts[1:]).T


def write_table(folder: Path, drafter: Drafter, titles: Sequence[str]) -> None:
    """Write a row for each source of states, and for drafts without a head.

    Args:
        folder: Folder of the runs.
        drafter: Drafter that made them.
        titles: Title of each prompt's article: intervals are over seeds and articles.
    """
    rows, first = list[Row](), None
    articles = [titles[text.number] for text in drafter.written]
    frequent = partial(followers, texts=drafter.texts)
    without: dict[str, Callable[[Written], Tensor]]
    without = {"no head: copied from the text": copied, "no head: most frequent follower": frequent}
    for source in (*SOURCES, *without):
        paths = [folder / "runs" / f"{source}-{seed}.json" for seed in range(SEEDS)]
        if source in without:
            drafts = [without[source](text) for text in drafter.written]
            runs = [scores(drafter.written, drafts)] * SEEDS
        else:
            runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        own = np.array([run["accepted"] for run in runs])
        row: Row = {"source": source}
        sides = {"tokens": np.full_like(own, -1), "less": first}  # a pass gives one more
        for name, side in sides.items():
            if side is not None:
                gap = paired_runs(own, side, clusters=articles)
                row |= {name: gap.difference, f"{name}_low": gap.low, f"{name}_high": gap.high}
        first = own if first is None else first
        reached = np.mean([run["reached"] for run in runs], axis=0)
        row |= {f"reached_{n}": 100 * share for n, share in enumerate(reached.tolist(), 1)}
        if source not in without:
            rates = [run["rate"] for run in runs]
            row |= {"rate": float(np.mean(rates)), "rate_sd": float(np.std(rates, ddof=1))}
        if source in drafter.splits:
            info = drafter.splits[source].info()
            row["bytes"] = info["bytes"] / info["tokens"]
        rows.append(row)
    texts = drafter.written
    written = sum(len(text.ids) - text.prompt for text in texts)
    basis = (
        f"{len(texts)} held-out prompts of {len(set(articles))} articles, {written:,} "
        f"tokens that the decoder wrote; heads of {SEEDS} seeds, each trained on "
        f"{sum(map(len, drafter.texts)):,} tokens, {EPOCHS} times."
    )
    write("draft_heads", rows, basis)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
