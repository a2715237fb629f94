"""The encoder's forward pass, and extraction whole and by its parts."""

from __future__ import annotations

import argparse
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from common.bert import encoder_of, split_of, windows_of
from common.data import lengths

from bertvision.featurestore.format.encoding import ChannelStats, encode
from bertvision.featurestore.format.layout import get_encoding
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import open_writer
from bertvision.pipelines.encoders.encoder import Encoder
from bertvision.pipelines.extraction.shardwork import ShardWork
from bertvision.pipelines.extraction.split_extraction import calibrate
from bertvision.pipelines.precision import Precision, resolve_precision
from bertvision.pipelines.tasks.windows import Windows
from gpu.clock import seconds_of

ENCODING = "int8"


class Extraction:
    """An encoder on the device, and a split that this machine extracted with it.

    Measured are examples/s.

    Attributes:
        device: it runs on.
        precision: of the forward pass.
        windows: of the split, in the order of ids.
        encoder: of all hidden states.
        folder: of the store.
        split: that lies there, all of it.
    """

    def __init__(self, options: argparse.Namespace, size: str) -> None:
        self.device = torch.device(options.device)
        self.precision: Precision = resolve_precision("auto")
        self.folder: Path = options.folder / f"gpu-{size}-{options.examples}"
        self.windows: Windows = windows_of(lengths(options.examples))
        model = encoder_of(size)
        self._spec, self._contents = split_of(
            self.windows, model, ENCODING, shard_tokens=options.shard_tokens
        )
        states = range(model.config.num_hidden_layers + 1)
        self.encoder = Encoder(model, {"all": states}, self.precision)
        (self._calibration,) = calibrate(self.encoder, self.windows, ENCODING)
        self._extract(self.folder)
        self.split = ActivationSplit(self.folder, self._spec.tag, self._spec.split)

    def forward(self) -> float:
        """The forward pass of extraction's batches, nothing kept."""

        def run() -> None:
            for rows in self._batches():
                self.encoder.forward(self.windows, rows)

        return len(self.windows) / self._seconds(run)

    def encode(self) -> float:
        """Encoding alone, of one batch over and over."""
        rows = next(self._batches())
        (states,) = self.encoder(self.windows, rows)
        stats = ChannelStats(*(x.to(self.device) for x in self._calibration.stats))
        encoding, times = get_encoding(ENCODING), 4

        def run() -> None:
            for _ in range(times):
                encode(states, encoding, stats)

        return times * len(rows) / self._seconds(run)

    def write(self) -> float:
        """Writing alone, of one shard over and over, by one thread."""
        plan = self._contents.plan
        folder = self.folder.with_name("gpu-write")
        shutil.rmtree(folder, ignore_errors=True)
        count = len(plan.examples_of(0))
        held = self.split.read(range(count))
        with open_writer(folder, self._spec, self._contents, lambda: self._calibration) as writer:
            started = time.perf_counter()
            writer.write_shard(0, held.codes, held.scale)
            seconds = time.perf_counter() - started
        shutil.rmtree(folder)
        return count / seconds

    def extraction(self) -> float:
        """All of it, until the last shard is on the disk."""
        folder = self.folder.with_name("gpu-extraction")
        shutil.rmtree(folder, ignore_errors=True)
        seconds = self._extract(folder)
        shutil.rmtree(folder)
        return len(self.windows) / seconds

    def _extract(self, folder: Path) -> float:
        with open_writer(folder, self._spec, self._contents, lambda: self._calibration) as writer:
            work = ShardWork({"all": writer}, self.windows, self.encoder, "error")
            pending = {shard: ("all",) for shard in writer.pending()}
            return self._seconds(lambda: deque(work.write(pending), maxlen=0))

    def _batches(self) -> Iterator[np.ndarray]:
        plan = self._contents.plan
        for shard in range(plan.n_shards):
            members = np.array(plan.examples_of(shard))
            for batch in self.encoder.batches(plan.n_tokens[members]):
                yield plan.example_id[members[batch]]

    def _seconds(self, run: Callable[[], object]) -> float:
        return seconds_of(run, self.device)
