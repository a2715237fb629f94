"""The commands in any order, with kills, copies and damage in between: what reads is what is true.

Two experiments of the same data stand beside each other, so that parts of one can be mixed into
the other. No model of what is there is kept: whatever is read without an error is compared with a
run that nothing disturbed, and whatever `verify` calls whole is compared with its files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from clean_runs import (
    ENCODINGS,
    RUNS,
    SPLITS,
    WORKSPACES,
    Clean,
    CleanRuns,
    Ended,
    command,
    evaluate,
    extract,
    files_of,
    fingerprint,
    opened,
    readings,
    train,
)
from faults import Killed, Op, Recorder
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from bertvision.errors import BertvisionError
from bertvision.featurestore.format import arrays
from bertvision.featurestore.split import ActivationSplit
from bertvision.pipelines.records import read_record
from bertvision.pipelines.results.results import read_results
from bertvision.pipelines.training.lightning import TrainingLog
from bertvision.pipelines.training.trained_head import load_head
from bertvision.pipelines.workspace.records import (
    BertScores,
    HeadScores,
    read_run_config,
    read_run_metrics,
)
from bertvision.pipelines.workspace.workspace import Workspace

workspaces = st.sampled_from(WORKSPACES)
splits = st.sampled_from(SPLITS)
runs = st.sampled_from(RUNS)
writing = st.integers(0, 240) | st.integers(230, 480)
"""Numbers of calls that change files, at which a command is killed: as many before the first shard,
when a split is created, as after it. Some are after the command's end."""
ALIKE = [("1e/dev", "0.5e/dev"), ("0.5e/dev", "1e/dev"), RUNS, RUNS[::-1]]
RENAMED = [*[("", "")] * 4, *ALIKE]
"""Parts that may be copied over each other."""


class CommandLine(RuleBasedStateMachine):
    """Two workspaces, and copies of their parts that were made on the way.

    Attributes:
        at: where each workspace is now.
        copies: what was in a workspace when a copy of it was made, file by file.
        read: what the stores were like when they were last read.
    """

    clean: ClassVar[CleanRuns]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.at = {name: self.folder / name for name in WORKSPACES}
        self.copies: list[dict[str, bytes]] = []
        self.read: dict[str, tuple[object, ...]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize(begun=st.tuples(*[st.sampled_from(["", *ENCODINGS])] * 2), heads=st.booleans())
    def begin(self, begun: tuple[str, str], heads: bool) -> None:
        left_out = shutil.ignore_patterns(*([] if heads else ["heads"]))
        for name, encoding in zip(WORKSPACES, begun, strict=True):
            made = self.clean.made(name, encoding) if encoding else self.clean.base(name)
            shutil.copytree(made, self.at[name], ignore=left_out)

    # --- commands -------------------------------------------------------------------------------

    def killed(self, moment: int, call: Callable[[], Ended]) -> None:
        """Run a command that dies at a call, without a chance to clean up."""

        def die(i: int, op: Op) -> None:
            if i == moment:
                raise Killed(str(op))

        try:
            with Recorder(self.folder, die).recording():
                call()
        except Killed:
            pass

    @rule(name=workspaces, split=splits, encoding=st.sampled_from(ENCODINGS))
    def extract(self, name: str, split: str, encoding: str) -> None:
        extract(self.at[name], split, encoding)

    @rule(name=workspaces, split=splits, encoding=st.sampled_from(ENCODINGS), moment=writing)
    def extract_killed(self, name: str, split: str, encoding: str, moment: int) -> None:
        self.killed(moment, lambda: extract(self.at[name], split, encoding))

    def store(self, name: str, *args: object) -> Ended:
        return command("store", *args, "-w", self.at[name])

    @rule(name=workspaces)
    def verify(self, name: str) -> None:
        """Whole is what has exactly the files of a clean run, and nothing less is called whole."""
        ended = self.store(name, "verify", "--json")
        if ended.status == 2:
            return
        found: dict[str, list[str]] = json.loads(ended.stdout)
        assert ended.status == any(found.values())
        for split, problems in found.items():
            if not problems:
                self.check_whole(name, split)
            elif self.untouched(name, split):
                # what stands above the splits is of all of them
                (tag, _) = split.split("/")
                shared = (f"{split} arrays.zarr/zarr.json", f"{split} arrays.zarr/{tag}/zarr.json")
                assert [what for what in problems if not what.startswith(shared)] == []

    def origin(self, name: str, split: str) -> Clean:
        """The clean run that a split says it comes from."""
        held = ActivationSplit(self.at[name] / "activations", *split.split("/"))
        clean = self.clean.splits[held.record.identity]
        assert clean.split == split
        return clean

    def check_whole(self, name: str, split: str) -> None:
        clean = self.origin(name, split)
        held = files_of(self.at[name] / "activations", split)
        for path, data in clean.files.items():
            assert path in held or path.endswith(".sha256"), path
            if path.endswith("zarr.json"):
                assert arrays.same_metadata(held[path], data), path
            elif path.endswith(".sha256") and path not in held:
                continue  # as earlier versions wrote stores; the table is among what is read
            elif not path.endswith(".parquet") or f"{path}.sha256" in held:
                assert held[path] == data, path
        given = readings(ActivationSplit(self.at[name] / "activations", *split.split("/")))
        assert given == clean.readings

    def untouched(self, name: str, split: str) -> bool:
        """Whether a split has exactly the files of a clean run."""
        held = files_of(self.at[name] / "activations", split)
        return any(held == clean.files for clean in self.clean.splits.values())

    @rule(name=workspaces, split=splits)
    def repair(self, name: str, split: str) -> None:
        ended = self.store(name, "repair", split)
        if ended.status == 0:
            assert json.loads(self.store(name, "verify", split, "--json").stdout) == {split: []}
            self.check_whole(name, split)

    @rule(name=workspaces, split=splits, moment=writing)
    def repair_killed(self, name: str, split: str, moment: int) -> None:
        self.killed(moment, lambda: self.store(name, "repair", split))

    @rule(name=workspaces, split=splits)
    def remove(self, name: str, split: str) -> None:
        if self.store(name, "rm", split, "--yes").status == 0:
            assert split not in opened(self.at[name] / "activations")

    @rule(name=workspaces, split=splits, moment=st.integers(0, 120))
    def remove_killed(self, name: str, split: str, moment: int) -> None:
        self.killed(moment, lambda: self.store(name, "rm", split, "--yes"))

    @rule(name=workspaces, split=splits, encoding=st.sampled_from(ENCODINGS))
    def begin_anew(self, name: str, split: str, encoding: str) -> None:
        """There is always a way out: remove it, and what shares its table of examples; extract."""
        for other in SPLITS:
            if other.endswith(split.partition("/")[2]):
                self.store(name, "rm", other, "--yes")
        ended = extract(self.at[name], split, encoding)
        assert ended.status == 0, ended.stderr
        ended = self.store(name, "verify", split)
        assert ended.status == 0, ended.stdout
        self.check_whole(name, split)

    @rule(name=workspaces, run=runs)
    def train(self, name: str, run: str) -> None:
        ended = train(self.at[name], run)
        if ended.status:
            return
        loaded = load_head(self.at[name] / "heads" / "1e" / run)
        clean = self.clean.head(loaded.config)
        (found,), expected = json.loads(ended.stdout), read_run_metrics(clean)
        for field in ("examples", "steps", "epoch", "loss"):
            assert found[field] == getattr(expected, field), field
        record = self.origin(name, "1e/train")
        assert clean == self.clean.trained(record.workspace, record.encoding, run)

    @rule(name=workspaces, run=runs, moment=st.integers(0, 35))
    def train_killed(self, name: str, run: str, moment: int) -> None:
        self.killed(moment, lambda: train(self.at[name], run))

    @rule(name=workspaces, run=runs, step=st.integers(1, 4))
    def train_stopped(self, name: str, run: str, step: int) -> None:
        """SIGTERM comes at the end of a step: what was done is kept, and gone on with."""

        def stop(log: TrainingLog, trainer: Any, *rest: Any) -> None:
            ended_step(log, trainer, *rest)
            if trainer.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)

        ended_step = TrainingLog.on_train_batch_end
        with mock.patch.object(TrainingLog, "on_train_batch_end", stop):
            train(self.at[name], run)

    @rule(name=workspaces, run=runs, tag=st.sampled_from(["1e", "0.5e"]))
    def evaluate(self, name: str, run: str, tag: str) -> None:
        ended = evaluate(self.at[name], run, tag)
        if ended.status:
            return
        (found,) = json.loads(ended.stdout)
        head = self.clean.head(load_head(self.at[name] / "heads" / "1e" / run).config)
        on = self.origin(name, f"{tag}/dev")
        assert found["rules"] == self.clean.scores(head, on.workspace, on.encoding, tag)

    # --- what happens to files ------------------------------------------------------------------

    @rule(name=workspaces)
    def move(self, name: str) -> None:
        moved = self.folder / f"{name}-moved"
        moved = self.folder / name if moved.exists() else moved
        self.at[name] = self.at[name].rename(moved)

    def held(self, name: str) -> list[str]:
        """Files that are damaged or copied, by their paths in the workspace."""
        root = self.at[name]
        found = (
            path for top in ("activations", "heads", "bert") for path in (root / top).rglob("*")
        )
        return sorted(str(path.relative_to(root)) for path in found if path.is_file())

    @property
    def filled(self) -> list[str]:
        """Workspaces in which there is anything to damage or copy."""
        return [name for name, root in self.at.items() if (root / "activations").is_dir()]

    @precondition(lambda self: self.filled)
    @rule(data=st.data(), how=st.sampled_from(["flip", "flip", "cut", "empty", "remove"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        name = data.draw(st.sampled_from(self.filled))
        kinds: dict[str, list[str]] = {}
        for held in self.held(name):  # or almost all would be chunks
            kinds.setdefault(re.sub(r"/.*/|\d+", "#", held), []).append(held)
        paths = kinds[data.draw(st.sampled_from(sorted(kinds)))]
        path = self.at[name] / data.draw(st.sampled_from(paths))
        content = bytearray(path.read_bytes())
        if how == "flip" and content:
            bit = data.draw(st.integers(0, 8 * len(content) - 1))
            content[bit // 8] ^= 1 << bit % 8
        path.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(how, content))
        if how == "remove":
            path.unlink()

    @rule(
        name=workspaces,
        kind=st.sampled_from(["model.safetensors", "resume.ckpt", "*.json"]),
        at=st.floats(0, 1, exclude_max=True),
    )
    def damage_head(self, name: str, kind: str, at: float) -> None:
        """A flipped bit in a head, in a record of one, or in a training that was stopped."""
        for path in sorted((self.at[name] / "heads" / "1e").glob(f"*/{kind}"))[:1]:
            content = bytearray(path.read_bytes() or b"0")
            content[int(at * len(content))] ^= 16
            path.write_bytes(content)

    @precondition(lambda self: self.filled)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Make a copy, to be put back in part later."""
        name = data.draw(st.sampled_from(self.filled))
        self.copies.append({path: (self.at[name] / path).read_bytes() for path in self.held(name)})

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), name=workspaces)
    def put_back(self, data: st.DataObject, name: str) -> None:
        """Put a part of an old copy into a workspace, whichever it was made of."""
        kept = self.copies[data.draw(st.integers(0, len(self.copies) - 1))]
        self.put(name, {path: kept[path] for path in part_of(data, list(kept))}, data)

    @precondition(lambda self: self.filled)
    @rule(data=st.data(), to=workspaces)
    def merge(self, data: st.DataObject, to: str) -> None:
        """Copy a part of one workspace into the other, or of a folder into one that is alike."""
        name = data.draw(st.sampled_from(self.filled))
        part = part_of(data, self.held(name))
        self.put(to, {path: (self.at[name] / path).read_bytes() for path in part}, data)

    def put(self, name: str, part: dict[str, bytes], data: st.DataObject) -> None:
        begun = [path.name for path in (self.at[name] / "heads" / "1e").glob(".run-*")]
        old, new = data.draw(st.sampled_from(RENAMED))
        begun = [data.draw(st.sampled_from(begun))] if begun else []
        for path, content in part.items():
            renamed = path.replace(f"/{old}/", f"/{new}/")
            for other in begun:  # whose name says of what it is
                renamed = re.sub(r"/\.run-\w+/", f"/{other}/", renamed)
            target = self.at[name] / renamed
            with suppress(FileExistsError, NotADirectoryError, IsADirectoryError):
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)

    # --- what must be true at any time ----------------------------------------------------------

    @invariant()
    def what_is_read_is_what_a_clean_run_reads(self) -> None:
        for name, root in self.at.items():
            store = root / "activations"
            now = fingerprint(store)
            if self.read.get(name) == now:
                continue
            for split, held in opened(store).items():
                if given := readings(held):
                    clean = self.clean.splits[held.record.identity]
                    assert clean.split == split
                    for part, value in given.items():
                        assert value == clean.readings[part], f"{split} {part}"
                if not held.verify():
                    self.check_whole(name, split)
            self.read[name] = now

    @invariant()
    def what_is_loaded_is_what_a_clean_run_trained(self) -> None:
        for root in self.at.values():
            for folder in (root / "heads" / "1e").glob("[!.]*"):
                try:
                    loaded = load_head(folder)
                except BertvisionError:
                    continue
                weights = self.clean.weights(self.clean.head(loaded.config))
                found = loaded.module.state_dict()
                assert found.keys() == weights.keys()
                assert all(torch.equal(found[key], weights[key]) for key in weights)

    @invariant()
    def what_is_listed_is_what_a_clean_run_scored(self) -> None:
        for root in self.at.values():
            try:
                results = read_results(Workspace.find(root))
            except BertvisionError:
                continue
            for result in results:
                record = result.folder / "metrics.json"
                if result.system == "bert":
                    scores = read_record(record, BertScores, "")
                    assert result.checkpoint == scores.snapshot
                    assert result.rules == self.clean.of_bert[scores.weights_sha256]
                else:
                    head = self.clean.head(read_run_config(result.folder.parents[1]))
                    rules = self.clean.rules(head, read_record(record, HeadScores, ""))
                    assert result.rules == rules


def part_of(data: st.DataObject, paths: list[str]) -> list[str]:
    """Some of these paths, as who restores or merges would choose them."""
    how = data.draw(st.sampled_from(["shards", "shards", "folder", "files"]))
    if how == "files":
        return sorted(data.draw(st.sets(st.sampled_from(paths), min_size=1, max_size=4)))
    if how == "folder":
        depth = data.draw(st.integers(1, 5))
        found = sorted({"/".join(path.split("/")[:depth]) for path in paths})
        folder = data.draw(st.sampled_from(found))
        return [path for path in paths if f"{path}/".startswith(f"{folder}/")]
    split, parts = data.draw(splits), data.draw(st.sampled_from(["rs", "rs", "rsp", "r", "s"]))
    numbers = "|".join(map(str, data.draw(st.sets(st.integers(0, 6), min_size=1))))
    patterns = {
        "r": rf"ledger/{split}/0000({numbers})\.json",
        "s": rf"arrays\.zarr/{split}/(hidden_states|scale)/c/({numbers})/.*",
        "p": rf"arrays\.zarr/{split}/\w+/c/0(/0)?|ledger/{split}/split\.json",
    }
    wanted = re.compile("|".join(f"activations/({patterns[part]})" for part in parts))
    return [path for path in paths if wanted.fullmatch(path)]


@pytest.fixture(scope="module")
def clean(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> CleanRuns:
    return CleanRuns(tiny_bert, tmp_path_factory.mktemp("clean-runs"))


def play(clean: CleanRuns, **options: Any) -> None:
    class Machine(CommandLine):
        pass

    Machine.clean = clean
    # to find the shortest way to a failure takes minutes
    phases = (Phase.explicit, Phase.generate)
    run_state_machine_as_test(Machine, settings=settings(phases=phases, **options))


def test_whatever_is_done_in_whatever_order_what_reads_is_true(clean: CleanRuns) -> None:
    play(clean, max_examples=3, stateful_step_count=10, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_is_done_in_whatever_order_what_reads_is_true_at_length(clean: CleanRuns) -> None:
    play(clean, max_examples=60, stateful_step_count=30)
