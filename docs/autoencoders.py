"""Sparse autoencoders of SAELens on a decoder, from stores and from the decoder live.

    python docs/autoencoders.py MODEL DATA FOLDER

``MODEL`` is google/gemma-3-270m in a folder, ``DATA`` has ``squad``, whose contexts are the texts,
``FOLDER`` takes stores and runs; an interrupted call goes on by the same command. It needs the
extra ``sae``, and writes the tables ``autoencoders`` and ``autoencoders_order``.

Every run is the same trainer with the same settings on the same tokens, twice each, centred and
scaled. What differs is where vectors come from: a store, or the decoder, run again in each epoch up
to the layer, with SAELens' own mixing buffer behind it. A second table mixes the vectors of an int8
store less and less.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collect_decoder import write, write_texts
from sae_lens import SAE, BatchTopKTrainingSAE, BatchTopKTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.mixing_buffer import mixing_buffer
from sae_lens.training.sae_trainer import SAETrainer
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import bertvision
from bertvision.pipelines.uncertainty import paired_runs

LAYER, LENGTH, SEEDS = 9, 128, 3
STORED = ("float32", "int8", "int4", "transform:0.115", "transform:0.3")
SOURCES = (*STORED, "live")
ORDERS: dict[str, dict[str, Any]] = {
    "all shards": {},
    "1 shard": {"buffer": 1},
    "stored order": {"shuffle": False},
}
"""Options of streams of the int8 store whose vectors are mixed less and less."""
EPOCHS, BATCH, LATENTS, ACTIVE, RATE = 2, 256, 1280, 32, 3e-3
BUFFER = 32 * BATCH
"""Tokens that are mixed live: SAELens fills as many, and keeps a half back."""
SCORED = 16
"""Held-out windows on which the decoder's loss is measured."""
SPLIT = "0e/texts-{}-kept"
Row = dict[str, Any]


def main(model: Path, data: Path, folder: Path) -> None:
    """Extract, train, measure, and write the table."""
    torch.set_num_threads(1)
    for name, every in (("train", 4), ("dev", 5)):
        write_texts(data / "squad" / f"{name}.json.gz", every, folder / "texts" / f"{name}.jsonl")
    for encoding in STORED:
        extract(model, folder, encoding)
    (folder / "runs").mkdir(exist_ok=True)
    check = Check(model, folder)
    for source, seed in itertools.product((*STORED, *ORDERS, "live"), range(SEEDS)):
        path = path_of(folder, source, seed)
        if not path.is_file():
            path.write_text(json.dumps(run(model, folder, source, seed, check)), encoding="utf-8")
    write_table("autoencoders", SOURCES, folder, check)
    write_table("autoencoders_order", ORDERS, folder, check)


def path_of(folder: Path, source: str, seed: int) -> Path:
    """The file of a run; int8 is mixed within all of its shards."""
    return folder / "runs" / f"{'int8' if source == 'all shards' else source}-{seed}.json"


def extract(model: Path, folder: Path, encoding: str) -> None:
    """Store the layer, in float32 of both splits."""
    bertvision.extract(
        model=str(model),
        task="text",
        data=str(folder / "texts"),
        max_length=LENGTH,
        keep="from:1",
        layers=LAYER,
        encoding=encoding,
        precision="32",
        split="train,dev" if encoding == "float32" else "train",
        workspace=folder / encoding,
    )


def stored(folder: Path, source: str, part: str) -> bertvision.ActivationSplit:
    """A split, ``train`` or ``dev``, that a source reads."""
    encoding = "int8" if source in ORDERS else source
    store = bertvision.ActivationStore.open(folder / encoding / "activations")
    split: bertvision.ActivationSplit = store[f"0e/texts-{part}-kept"]
    return split


def windows(model: Path, texts: Path) -> list[Tensor]:
    """The token ids of texts, cut off, each with the first token in front."""
    given = [json.loads(line)["text"] for line in texts.read_text(encoding="utf-8").splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = tokenizer(given, truncation=True, max_length=LENGTH)["input_ids"]
    return [torch.tensor(ids) for ids in made]


class Live:
    """Vectors of the training texts, computed anew in each epoch by the decoder's lower half."""

    def __init__(self, model: Path, folder: Path, seed: int) -> None:
        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model.eval()
        decoder.layers, decoder.norm = decoder.layers[:LAYER], torch.nn.Identity()
        decoder.config.num_hidden_layers = LAYER
        self._decoder, self._seed = decoder, seed
        self._windows = windows(model, folder / "texts" / "train.jsonl")

    def vectors(self) -> Iterator[Tensor]:
        """Batches, centred and scaled by the moments of the first buffer."""
        states, first = self._states(), list[Tensor]()
        while sum(map(len, first)) < BUFFER:
            first.append(next(states))
        whole = torch.cat(first)
        self.mean = whole.mean(dim=0)
        self.factor = whole.shape[1] ** 0.5 / float((whole - self.mean).norm(dim=1).mean())
        torch.manual_seed(self._seed)
        for batch in mixing_buffer(BUFFER, BATCH, itertools.chain(first, states)):
            yield (batch - self.mean) * self.factor

    @torch.no_grad()
    def _states(self) -> Iterator[Tensor]:
        draw, pad = random.Random(self._seed), torch.nn.utils.rnn.pad_sequence
        while True:
            order = draw.sample(self._windows, len(self._windows))
            for i in range(0, len(order), 8):
                rows = order[i : i + 8]
                mask = pad([torch.ones_like(ids) for ids in rows], batch_first=True)
                output = self._decoder(
                    input_ids=pad(rows, batch_first=True), attention_mask=mask, use_cache=False
                )
                mask[:, 0] = 0
                yield output.last_hidden_state[mask.bool()]


def run(model: Path, folder: Path, source: str, seed: int, check: Check) -> Row:
    """Train an autoencoder and measure it on held-out windows."""
    live = Live(model, folder, seed) if source == "live" else None
    split = stored(folder, "float32" if live else source, "train")
    steps, width = EPOCHS * int(split.record.tokens) // BATCH, split.record.hidden_size
    started = time.process_time()  # of the processor: other work goes on beside
    if live is None:
        order = ORDERS.get(source, {})
        options = {"batch_size": BATCH, "seed": seed, "endless": True, "scaled": True} | order
        stream = split.tokens(LAYER, transform="center", **options)
    torch.manual_seed(seed)
    sae = BatchTopKTrainingSAE(
        BatchTopKTrainingSAEConfig(d_in=width, d_sae=LATENTS, k=ACTIVE, topk_threshold_lr=0.05)
    )
    config = SAETrainerConfig(
        total_training_samples=BATCH * steps, train_batch_size_samples=BATCH, lr=RATE, lr_end=RATE
    )
    SAETrainer(config, sae, live.vectors() if live else stream.vectors()).fit()
    seconds = time.process_time() - started
    if live:
        factor, mean = live.factor, live.mean
    else:
        assert stream.transform is not None  # it centres
        factor, mean = float(stream.scale_factors), stream.transform.mean[0]
    sae.fold_activation_norm_scaling_factor(factor)
    identity = torch.eye(width)
    sae.fold_activation_whitening(mean, identity, identity)
    sae.save_inference_model(folder / f"sae-{source}")  # with a threshold for every latent
    done = check(SAE.load_from_disk(folder / f"sae-{source}"))
    return {"rate": BATCH * steps / seconds} | done


class Check:
    """Quality of an autoencoder on held-out windows: on their states, and in the decoder."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._windows = windows(model, folder / "texts" / "dev.jsonl")
        split = stored(folder, "float32", "dev")
        place = split.layer_positions(LAYER)[0]
        self.states = [split[i][:, :, place] for i in range(len(split))]
        mean = torch.cat(self.states).mean(dim=0)
        changes = {"intact": lambda x: x, "zero": torch.zeros_like, "mean": mean.expand_as}
        self.losses = {name: self._loss(change) for name, change in changes.items()}

    @torch.no_grad()
    def _loss(self, change: Callable[[Tensor], Tensor]) -> list[float]:
        """The summed cross-entropy of the tokens that follow changed states, of each window.

        The state of the first token stays, and what it predicts is not counted.
        """

        def hook(_: Any, __: Any, output: Tensor) -> Tensor:
            return torch.cat([output[:, :1], change(output[:, 1:])], dim=1)

        handle, losses = self._decoder.model.layers[LAYER - 1].register_forward_hook(hook), []
        for ids in self._windows[:SCORED]:
            logits = self._decoder(input_ids=ids[None], use_cache=False).logits[0, 1:-1]
            losses.append(float(F.cross_entropy(logits, ids[2:], reduction="sum")))
        handle.remove()
        return losses

    @torch.no_grad()
    def __call__(self, sae: SAE[Any]) -> Row:
        """Error and active latents of each window, the loss with reconstructions in place."""
        active = sae.encode(torch.cat(self.states)) > 0
        return {
            "l0": float(active.sum(dim=1).float().mean()),
            "dead": float(100 * (~active.any(dim=0)).float().mean()),
            "errors": [float((sae(own) - own).square().sum()) for own in self.states],
            "losses": self._loss(sae),
        }


def write_table(table: str, sources: Iterable[str], folder: Path, check: Check) -> None:
    """Write a row for each source; scores are by window, and their means the ratios of sums."""
    tokens = sum(map(len, check.states))
    variance = torch.cat(check.states).var(dim=0, unbiased=False).sum()
    total = float(variance) * tokens / len(check.states)
    ends = {name: np.array(losses) for name, losses in check.losses.items()}
    predicted = sum(len(own) - 1 for own in check.states[:SCORED])
    rows, first = list[Row](), dict[str, np.ndarray]()
    for source in sources:
        paths = [path_of(folder, source, seed) for seed in range(SEEDS)]
        runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        losses = np.array([run["losses"] for run in runs])
        scores = {"variance": 100 * (1 - np.array([run["errors"] for run in runs]) / total)}
        for name in ("zero", "mean"):
            gap = (ends[name] - ends["intact"]).mean()
            scores[f"recovered_{name}"] = 100 * (ends[name] - losses) / gap
        row: Row = {"source": source, "loss": losses.sum() / SEEDS / predicted}
        for key, own in scores.items():
            sides = {key: np.zeros_like(own), f"{key}_less": first.get(key)}
            for name, side in sides.items():
                if side is not None:
                    gap = paired_runs(own, side)
                    ends_of = {f"{name}_low": gap.low, f"{name}_high": gap.high}
                    row |= {name: gap.difference} | ends_of
        first = first or scores
        for key in ("l0", "dead", "rate"):
            values = [run[key] for run in runs]
            row |= {key: float(np.mean(values)), f"{key}_sd": float(np.std(values, ddof=1))}
        if source in STORED:
            info = stored(folder, source, "train").info()
            row["bytes"] = info["bytes"] / info["tokens"] / len(info["layers"])
        rows.append(row)
    said = ", ".join(f"{name} {own.sum() / predicted:.2f}" for name, own in ends.items())
    basis = (
        f"{len(check.states)} held-out texts, {tokens:,} tokens; the loss on {SCORED} of them, "
        f"{predicted:,} predictions: {said}. {SEEDS} seeds each."
    )
    write(table, rows, basis)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
