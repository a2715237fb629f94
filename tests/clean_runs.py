"""Two experiments of the same data that tell themselves apart by their seeds, and their clean runs.

What is read of a store, and what a head says, is compared with a run that nothing disturbed.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file
from terminal import run
from workspaces import write_squad

from bertvision.errors import BertvisionError, StoreNotFoundError
from bertvision.featurestore.format.ledger import LEDGER
from bertvision.featurestore.format.records import ROOT
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.pipelines.workspace.records import HeadScores, RunConfig

WORKSPACES = ("a", "b")
SPLITS = ("1e/train", "1e/dev", "0.5e/dev")
ENCODINGS = ("int8", "float32")
RUNS = ("learned-pooling", "learned-pooling@s1")
TRAIN = ["--precision", "32", "--epochs", 1, "--batch-size", 4]
SHARD_TOKENS = 160
"""So few that the smallest split has several shards."""


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


def command(*args: object) -> Ended:
    """Run a command: it ends well, or with one message and no traceback."""
    with mock.patch("bertvision.pipelines.extraction.contents.SHARD_TOKENS", SHARD_TOKENS):
        result = run(*args)
    told = f"{' '.join(map(str, args))}\n{result.stderr}"
    if not (result.exception is None or isinstance(result.exception, SystemExit)):
        raise AssertionError(told) from result.exception
    assert result.exit_code in (0, 1, 2, 143), told
    assert "Traceback" not in result.stderr, told
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == (result.exit_code > 1), told
    return Ended(result.exit_code, result.stdout, result.stderr)


def extract(root: Path, split: str, encoding: str) -> Ended:
    tag, _, name = split.partition("/")
    options = ["--encoding", encoding, "--precision", "32"]
    return command("extract", "--checkpoint", tag, "--split", name, *options, "-w", root)


def train(root: Path, name: str) -> Ended:
    return command("train", name, "--checkpoint", "1e", *TRAIN, "-w", root, "--json")


def evaluate(root: Path, name: str, tag: str) -> Ended:
    on = ["--trained-on", "1e", "--checkpoint", tag, "--precision", "32"]
    return command("evaluate", name, *on, "-w", root, "--json")


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, without locks and temporary files."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in found
        if not path.name.endswith((".lock", ".tmp"))
    }


def files_of(store: Path, split: str) -> dict[str, bytes]:
    """The files of one split, by their paths in the store."""
    held = {
        f"{folder}/{split}/{name}": data
        for folder in (LEDGER, ROOT)
        for name, data in files(store / folder / split).items()
    }
    table = store / f"examples/{split.partition('/')[2]}.parquet"
    beside = (table, table.with_name(f"{table.name}.sha256"))
    return held | {f"examples/{path.name}": path.read_bytes() for path in beside if path.is_file()}


def readings(split: ActivationSplit) -> dict[str, Any]:
    """All that a split gives, part by part; what is refused is left out."""
    found: dict[str, Any] = {}

    def take(name: str, read: Any) -> None:
        with suppress(BertvisionError):
            found[name] = read()

    def shard(number: int) -> tuple[bytes, ...]:
        batch = split.read(split.plan.examples_of(number))
        scale = b"" if batch.scale is None else batch.scale.numpy().tobytes()
        labels = [batch.labels[name].numpy().tobytes() for name in sorted(batch.labels)]
        states = batch.hidden_states.contiguous().numpy().tobytes()
        ours = [x.numpy().tobytes() for x in (batch.codes.contiguous(), batch.lengths)]
        return (*ours, scale, states, *labels)

    for name in split.record.arrays:
        take(name, lambda name=name: split.array(name).tobytes())
    take("table", split.table)
    take("shards", lambda: split.plan.n_shards)
    for number in range(found.get("shards", 0)):
        take(f"shard {number}", lambda number=number: shard(number))
    return found


class Clean(NamedTuple):
    """A split that was extracted without disturbance: where it is, and all that it gives."""

    workspace: str
    encoding: str
    split: str
    files: dict[str, bytes]
    readings: dict[str, Any]


class CleanRuns:
    """The experiments, and what undisturbed runs in copies of them come to, each made once.

    Args:
        model: folder of the encoder.
        folder: where all of it is made.
    """

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        data = [
            write_squad(folder / f"{name}.json", n, n) for name, n in (("train", 5), ("dev", 3))
        ]
        options = ["--train", data[0], "--dev", data[1], "--save-at", "0.5,1", "--precision", 32]
        options += ["--tune-fraction", 0, "--max-length", 48, "--max-question-length", 12]
        options += ["--overlap", 8, "--batch-size", 4, "--lr", 1e-3]
        for seed, name in enumerate(WORKSPACES):
            made = [*options, "--seed", seed, "-w", self.base(name)]
            assert command("finetune", "--model", model, *made).status == 0

    def base(self, workspace: str) -> Path:
        """A workspace with its snapshots alone."""
        return self.folder / "base" / workspace

    @cache  # noqa: B019
    def made(self, workspace: str, encoding: str) -> Path:
        """The workspace with all splits extracted, and heads trained and scored."""
        root = self.folder / "clean" / f"{workspace}-{encoding}"
        shutil.copytree(self.base(workspace), root)
        for split in SPLITS:
            assert extract(root, split, encoding).status == 0
        for name in RUNS:
            assert train(root, name).status == 0
            assert evaluate(root, name, "1e").status == 0
        return root

    @cached_property
    def splits(self) -> dict[str, Clean]:
        """Every clean split by what its record says that it is."""
        found = {}
        for workspace in WORKSPACES:
            for encoding in ENCODINGS:
                store = self.made(workspace, encoding) / "activations"
                for name in SPLITS:
                    split = ActivationSplit(store, *name.split("/"))
                    given, held = readings(split), files_of(store, name)
                    assert split.record.shards >= 3
                    assert split.verify() == []
                    found[split.record.identity] = Clean(workspace, encoding, name, held, given)
        assert len(found) == len(WORKSPACES) * len(ENCODINGS) * len(SPLITS)
        return found

    def origin(self, config: RunConfig) -> Clean:
        """The clean split that a head says it was trained on."""
        for clean in self.splits.values():
            if (clean.split, clean.encoding) != ("1e/train", config.encoding):
                continue
            root = self.made(clean.workspace, clean.encoding)
            made_from = ActivationSplit(root / "activations", "1e", "train").record.provenance
            if made_from.items() <= config.activations.items():
                return clean
        raise AssertionError(f"no clean run trained on {config.activations}")

    def trained(self, workspace: str, encoding: str, name: str) -> Path:
        """The folder of a head that was trained without disturbance."""
        return self.made(workspace, encoding) / "heads" / "1e" / name

    def head(self, config: RunConfig) -> Path:
        """The folder of the head that was trained as this record says."""
        origin = self.origin(config)
        return self.trained(origin.workspace, origin.encoding, config.run.name)

    @cache  # noqa: B019
    def weights(self, folder: Path) -> dict[str, torch.Tensor]:
        """The weights of a clean head."""
        return load_file(folder / "model.safetensors")

    @cache  # noqa: B019
    def scores(self, head: Path, workspace: str, encoding: str, tag: str) -> Any:
        """The score of a clean head on a clean dev split."""
        root = self.folder / "scored"
        shutil.copytree(self.made(workspace, encoding), root)
        shutil.copytree(head, root / "heads" / "1e" / head.name, dirs_exist_ok=True)
        (scored,) = json.loads(evaluate(root, head.name, tag).stdout)
        shutil.rmtree(root)
        return scored["rules"]

    def rules(self, head: Path, scores: HeadScores) -> Any:
        """The score that a head must have on the activations that a record of scores names."""
        encoding = scores.activations["dev"]["encoding"]
        for (workspace, tag), made_from in self.provenances.items():
            if made_from == scores.provenance:
                assert tag == scores.checkpoint
                return self.scores(head, workspace, str(encoding), tag)
        raise AssertionError(f"no clean run made {scores.provenance}")

    @cached_property
    def provenances(self) -> dict[tuple[str, str], Any]:
        """Provenance of the dev splits, by workspace and tag; the same in every encoding."""
        stores = {w: self.made(w, ENCODINGS[0]) / "activations" for w in WORKSPACES}
        return {
            (w, tag): ActivationSplit(store, tag, "dev").record.provenance
            for w, store in stores.items()
            for tag in ("1e", "0.5e")
        }

    @cached_property
    def of_bert(self) -> dict[str, Any]:
        """Scores of the encoder itself at each snapshot, by the digest of its weights."""
        found = [json.loads(p.read_text()) for p in self.folder.glob("base/*/bert/*/metrics.json")]
        return {scores["weights_sha256"]: scores["rules"] for scores in found}


def opened(store: Path) -> dict[str, ActivationSplit]:
    """The splits of a store that can be opened."""
    try:
        held = ActivationStore.open(store)
        names = [(tag, split) for tag in held for split in held[tag]]
    except StoreNotFoundError:
        return {}
    found = {}
    for tag, split in names:
        try:
            found[f"{tag}/{split}"] = held[tag][split]
        except BertvisionError:
            continue
    return found


def fingerprint(store: Path) -> tuple[object, ...]:
    """A value that changes when any file of a store does."""
    held = []
    for folder, _, names in os.walk(store):
        for name in names:
            at = os.stat(os.path.join(folder, name))
            held.append((folder, name, at.st_ino, at.st_size, at.st_mtime_ns))
    return tuple(sorted(held))
