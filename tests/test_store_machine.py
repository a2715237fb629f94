"""The store against a model of it: whatever happens in whatever order, it says what is true."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

import pytest
from faults import Killed, Op, Recorder, contents, small
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from powerloss import PowerLoss
from stores import shard_path

from bertvision.errors import CorruptStoreError, IncompleteSplitError, StoreNotFoundError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.writer import open_writer

SHARDS = range(3)


class StoreMachine(RuleBasedStateMachine):
    """A store that is written, killed, loses power, is damaged and resumed.

    Attributes:
        sure: shards whose writing was acknowledged, and which were not taken back since.
        maybe: shards that were being written when the writer died.
        damaged: shards one of whose files was changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made = small()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.made.write(self.folder / "whole")
        self.whole = contents(self.folder / "whole")
        self.truth = ActivationSplit(self.folder / "whole", "1e", "train")
        self.store = self.folder / "store"
        self.created = False
        self.sure: set[int] = set()
        self.maybe: set[int] = set()
        self.damaged: set[int] = set()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def split(self) -> ActivationSplit:
        return ActivationSplit(self.store, "1e", "train")

    def write(self, shards: int) -> None:
        with open_writer(self.store, self.made.spec, self.made.contents, self.made.stats) as writer:
            self.created = True
            for shard in writer.pending()[:shards]:
                assert shard not in self.sure
                self.maybe = {shard}
                self.made.write_shard(writer, shard)
                self.sure.add(shard)
                self.maybe = set()

    @rule(shards=st.integers(0, 3))
    def resume(self, shards: int) -> None:
        self.write(shards)

    @rule(shards=st.integers(0, 3), at=st.integers(0, 250), seed=st.none() | st.integers(0, 1000))
    def crash(self, shards: int, at: int, seed: int | None) -> None:
        """Die at a call; with a seed the power goes too, and takes what was not flushed."""

        def die(i: int, op: Op) -> None:
            if i == at:
                raise Killed(str(op))

        disk = PowerLoss(self.store)
        recorder = Recorder(self.store, die)
        try:
            with recorder.recording():
                self.write(shards)
        except Killed:
            pass
        if seed is not None:
            for op in recorder.ops:
                disk.do(op)
            shutil.rmtree(self.store, ignore_errors=True)
            disk.disk(self.store, random.Random(seed))
        self.settle()

    def settle(self) -> None:
        """See whether what was under way at the end of a writer came to be."""
        try:
            found = self.split().ledger.shards()
        except StoreNotFoundError:
            assert not self.sure
            self.created = False
            return
        self.created = True
        assert self.sure <= found <= self.sure | self.maybe
        self.sure = found

    @precondition(lambda self: self.sure - self.damaged)
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        shard = data.draw(st.sampled_from(sorted(self.sure - self.damaged)))
        name = data.draw(st.sampled_from(["hidden_states", "scale"]))
        path = shard_path(self.split(), name, shard)
        content = bytearray(path.read_bytes())
        how = data.draw(st.sampled_from(["flip", "cut", "empty", "remove"]))
        if how == "flip":
            content[data.draw(st.integers(0, len(content) - 1))] ^= 16
        path.write_bytes({"cut": content[:-1], "empty": b""}.get(how, content))
        if how == "remove":
            path.unlink()
        self.damaged.add(shard)

    @precondition(lambda self: self.damaged)
    @rule(shards=st.integers(0, 3))
    def repair(self, shards: int) -> None:
        """Write again what is damaged, or a part of it: the repair is stopped in between."""
        with open_writer(
            self.store, self.made.spec, self.made.contents, self.made.stats, mend=self.damaged
        ) as writer:
            for shard in sorted(self.damaged)[:shards]:
                self.made.write_shard(writer, shard)
                self.damaged.remove(shard)

    @precondition(lambda self: self.created)
    @rule()
    def verify(self) -> None:
        shared = ("1e/train arrays.zarr/zarr.json", "1e/train arrays.zarr/1e/zarr.json")
        found = [what for what in self.split().verify() if self.sure or not what.startswith(shared)]
        expected = {f"1e/train shard {shard}" for shard in self.damaged}
        if missing := sorted(set(SHARDS) - self.sure):
            expected.add(f"1e/train lacks {len(missing)} of 3 shards (first")
        assert {what.split(":")[0] for what in found} == expected

    @precondition(lambda self: self.created)
    @rule(shard=st.sampled_from(SHARDS))
    def read(self, shard: int) -> None:
        split, examples = self.split(), self.made.plan.examples_of(shard)
        if shard not in self.sure:
            with pytest.raises(IncompleteSplitError, match=f"shard {shard}"):
                split.read(examples)
        elif shard in self.damaged:
            # some bytes are fill, which no reader needs
            try:
                batch = split.read(examples)
            except CorruptStoreError as error:
                assert f"shard {shard}" in str(error)  # noqa: PT017
            else:
                assert batch.codes.equal(self.truth.read(examples).codes)
        else:
            assert split.read(examples).codes.equal(self.truth.read(examples).codes)

    @rule()
    def finish(self) -> None:
        self.write(3)
        if not self.damaged:
            assert contents(self.store) == self.whole

    @invariant()
    def the_ledger_says_what_is_sure(self) -> None:
        if self.created:
            split = self.split()
            assert split.ledger.shards() == self.sure
            assert split.missing_shards() == sorted(set(SHARDS) - self.sure)


def test_the_store_is_what_its_model_says() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=15, stateful_step_count=14, deadline=None)
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_store_is_what_its_model_says_at_length() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(max_examples=250, stateful_step_count=30, deadline=None)
    )
