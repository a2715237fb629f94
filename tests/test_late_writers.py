"""Two processes write one shard of an object store, and no lease keeps them apart.

One of them was suspended, say, and its last request arrives when another one holds the lock. The
requests arrive in every order here; each writer has values of its own, so that what is read tells
who wrote it. What is read is always of one writer, or the read is an error.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import pytest
import torch
from faults import Killed
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from remotes import FaultyProxy
from stores import Made

from bertvision.errors import CorruptStoreError, LockedError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.encoding import encode
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.shard import shard_key
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage import objects
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.storage.storage import ABSENT, ChangedError
from bertvision.featurestore.writer import SplitWriter, open_writer

VALUES = {"early": 0.0, "late": 1.0, "holder": 2.0}
FOUND = ["nothing", "a file", "files", "a record"]
"""Files that an early writer left before the two begin."""


class Shard(NamedTuple):
    """The only shard of a split whose writers hold no lock."""

    url: str
    made: Made

    def writer(self) -> SplitWriter:
        return SplitWriter(Ledger(open_storage(self.url), "1e", "train"))

    def write(self, who: str, writer: SplitWriter) -> None:
        states = torch.cat([self.made.of_stored(i) for i in self.made.plan.examples_of(0)])
        writer.write_shard(0, *encode(states + VALUES[who], writer.split.encoding, writer.stats))

    def find(self, what: str) -> None:
        """Leave the shard as an early writer, killed before its next request, does."""
        writer = self.writer()
        record = writer.split.record
        for name in ("hidden_states", "scale"):
            writer.ledger.storage.remove(shard_key(record, name, 0))
        writer.ledger.retract_shard(0)
        if what != "nothing":
            number = {"a file": 1, "files": len(self.files()), "a record": 99}[what]
            with suppress(Killed), before_request(writer, number, die):
                self.write("early", writer)

    def files(self) -> list[str]:
        quantised = self.made.spec.encoding == "int8"
        return ["hidden_states", "scale"] if quantised else ["hidden_states"]

    def writer_that_is_read(self) -> str | None:
        """The writer whose values are read: None where there is no record.

        Raises:
            CorruptStoreError: the record does not tell of the bytes that are there.
        """
        split = ActivationSplit(self.url, "1e", "train")
        if split.missing_shards():
            return None
        reader = split.open_shard(0)
        codes, scale = split.buffers(reader.tokens, len(split.record.layers))
        count = len(self.made.plan.examples_of(0))
        reader.read(0, count, range(len(split.record.layers)), codes, scale)
        who = [who for who in VALUES if torch.equal(self.codes_of(who), torch.from_numpy(codes))]
        assert len(who) == 1, "what is read is of no writer"
        assert find_damage(split) == []
        return who[0]

    def codes_of(self, who: str) -> torch.Tensor:
        split = ActivationSplit(self.url, "1e", "train")
        states = torch.cat([self.made.of_stored(i) for i in self.made.plan.examples_of(0)])
        return encode(states + VALUES[who], split.encoding, split.stats)[0].transpose(0, 1)


def die(*_: Any) -> None:
    raise Killed


@contextmanager
def before_request(
    writer: SplitWriter, number: int, act: Callable[..., None], kinds: str = "upload"
) -> Iterator[list[str]]:
    """Act before one of a writer's requests of some kinds, and list these requests."""
    storage: Any = writer.ledger.storage
    made: list[str] = []

    def standing_before(kind: str) -> Callable[..., Any]:
        real = getattr(storage._objects, kind)

        def call(path: str, *rest: Any) -> Any:
            made.append(kind)
            if kind == "upload":
                rest = (b"".join(map(bytes, rest[0])), *rest[1:])
            if len(made) == number + 1:
                act(kind, path, *rest)
            if kind == "upload":
                return real(path, [rest[0]], *rest[1:])
            return real(path, *rest)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds.split():
            patch.setattr(storage._objects, kind, standing_before(kind))
        yield made


def split_at(url: str, encoding: str) -> Shard:
    made = Made([9, 30, 12], encoding=encoding, layers=2, hidden=8)
    assert made.plan.n_shards == 1
    with open_writer(url, made.spec, made.contents, made.stats):
        pass
    return Shard(url, made)


@pytest.fixture(scope="module", params=["float32", "int8"])
def shard(request: pytest.FixtureRequest) -> Shard:
    return split_at(f"memory://late/{uuid.uuid4().hex}", request.param)


def late_request(shard: Shard, number: int) -> Callable[[], None]:
    """Write as one that is suspended with a request on the way; gives what lets it arrive."""
    storage: Any = (writer := shard.writer()).ledger.storage
    on_the_way: list[tuple[Any, ...]] = []

    def suspend(_: str, *request: Any) -> None:
        on_the_way.append(request)
        raise Killed

    with pytest.raises(Killed), before_request(writer, number, suspend):
        shard.write("late", writer)
    ((path, content, only_if),) = on_the_way
    return lambda: storage._objects.upload(path, [content], only_if)


def ends_whole(shard: Shard, number: int, found: str, moment: int) -> bool:
    """Let a late request arrive before one of the holder's; whether there was such a one."""
    shard.find(found)
    arrive = late_request(shard, number)
    holder = shard.writer()
    kinds = "upload version"
    stopped = False
    with before_request(holder, moment, lambda *_: arrive(), kinds) as made:
        try:
            shard.write("holder", holder)
        except ChangedError:
            stopped = True
    if arrived_after := len(made) <= moment:
        arrive()
    try:
        read = shard.writer_that_is_read()
    except CorruptStoreError:
        assert stopped, "it says that it committed what is damaged"
        assert found == "a record"
    else:
        assert read == (None if stopped else "holder") or (stopped and read in ("early", "late"))
    shard.write("holder", shard.writer())  # the same command again
    assert shard.writer_that_is_read() == "holder"
    return not arrived_after


@pytest.mark.parametrize("found", FOUND)
@pytest.mark.parametrize("request_", ["hidden_states", "scale", "the record"])
def test_a_late_request_does_no_harm_whenever_it_arrives(
    shard: Shard, request_: str, found: str
) -> None:
    requests = [*shard.files(), "the record"]
    if request_ not in requests:
        return
    moment = 0
    while ends_whole(shard, requests.index(request_), found, moment):
        moment += 1
    assert moment >= 2 * len(requests)  # each version is asked for, and each file put


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(0, 3, id="the first file, before the holder's"),
        pytest.param(1, 4, id="the second file, between the holder's"),
        pytest.param(2, 7, id="the record, before the holder's"),
    ],
)
def test_so_it_is_on_a_server(s3: list[str], number: int, moment: int) -> None:
    shard = split_at(f"s3://bucket/{uuid.uuid4().hex}", "int8")
    assert ends_whole(shard, number, "nothing", moment)


class Turns:
    """Lets requests of two threads through in a given order, one at a time."""

    def __init__(self, order: list[str]) -> None:
        self._order = order + ["late"] * 99 + ["holder"] * 99
        self._ended: set[str] = set()
        self._changed = threading.Condition()

    @contextmanager
    def take(self, who: str) -> Iterator[None]:
        with self._changed:
            assert self._changed.wait_for(lambda: self._next() == who, 30)
            yield
            del self._order[0]
            self._changed.notify_all()

    def end(self, who: str) -> None:
        with self._changed:
            self._ended.add(who)
            self._changed.notify_all()

    def _next(self) -> str:
        while self._order[0] in self._ended:
            del self._order[0]
        return self._order[0]


def race(shard: Shard, order: list[str]) -> dict[str, Exception | None]:
    """Two write the shard, their requests in an order; gives how each ended."""
    turns, ends = Turns(order), dict[str, Exception | None]()

    def run(who: str) -> None:
        try:
            shard.write(who, writers[who])
            ends[who] = None
        except LockedError as error:
            ends[who] = error
        finally:
            turns.end(who)

    writers = {who: shard.writer() for who in ("late", "holder")}
    for who, writer in writers.items():
        found: Any = writer.ledger.storage
        for kind in ("upload", "version"):
            real = getattr(found._objects, kind)

            def call(*args: Any, who: str = who, real: Any = real) -> Any:
                with turns.take(who):
                    return real(*args)

            setattr(found._objects, kind, call)
    threads = [threading.Thread(target=run, args=(who,)) for who in writers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


@given(
    order=st.lists(st.sampled_from(["late", "holder"]), max_size=16), found=st.sampled_from(FOUND)
)
@example(["holder", "holder", "late", "late", "late", "late"], "nothing")
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_the_order_no_false_values_are_read(
    shard: Shard, order: list[str], found: str
) -> None:
    shard.find(found)
    ends = race(shard, order)
    try:
        read = shard.writer_that_is_read()
    except CorruptStoreError:
        # two living writers and two files: each may have put one, and stopped
        assert len(shard.files()) > 1 or found == "a record"
        assert any(ends.values())
    else:
        if found in ("nothing", "a file", "files"):
            assert (read is None) == all(ends.values())
        if len(shard.files()) == 1 and read not in (None, "early"):
            assert ends[str(read)] is None
    shard.write("holder", shard.writer())
    assert shard.writer_that_is_read() == "holder"


@pytest.mark.parametrize("start", ["memory://tests", "s3://bucket"])
@pytest.mark.parametrize("wrong", [ABSENT, '"00000000000000000000000000000000"'])
def test_a_condition_is_judged_of_large_uploads_too(
    s3: list[str], monkeypatch: pytest.MonkeyPatch, start: str, wrong: str
) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    storage: Any = open_storage(f"{start}/{uuid.uuid4().hex}")
    large, other = bytes(6 << 20), b"\x01" * (6 << 20)
    first = storage.write("f", large, ABSENT)
    assert first == storage.version("f") != ABSENT
    conditions = [("complete_multipart_upload", "IfMatch" if wrong else "IfNoneMatch")]
    with sent_conditions(storage) as sent:
        refused = None
        try:
            storage.write("f", other, wrong)
        except ChangedError as error:
            refused = str(error)
    if refused is None:
        assert sent == conditions
        pytest.skip("the server does not judge this condition of CompleteMultipartUpload")
    assert "f was written by another process meanwhile" in refused
    assert storage.version("f") == first
    second = storage.write("f", other, first)
    assert first != second == storage.version("f")
    storage.remove("f")
    assert storage.version("f") == ABSENT


@contextmanager
def sent_conditions(storage: Any) -> Iterator[list[tuple[str, str]]]:
    """The calls of S3 that have a condition, with its name."""
    sent: list[tuple[str, str]] = []
    real = getattr(storage._fs, "call_s3", None)

    def call(name: str, **fields: Any) -> Any:
        assert real is not None
        sent.extend((name, field) for field in ("IfMatch", "IfNoneMatch") if field in fields)
        return real(name, **fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage._fs, "call_s3", call, raising=False)
        yield sent


def test_a_writer_whose_answers_are_lost_goes_on(
    s3: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client asks again, and is refused what the server did already."""
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    with FaultyProxy(latency=0.002).running() as proxy:
        made = Made([300, 700, 400, 500], encoding="int8", layers=8, hidden=768, shard_tokens=1024)
        split = made.write(f"s3://bucket/{uuid.uuid4().hex}")
        lost = [line for line in proxy.lost if "ledger" in line or "/c/" in line]
    assert len([line for line in lost if line.startswith("POST")]) == 2  # completed uploads
    assert len([line for line in lost if line.endswith("00000.json")]) == 1
    assert split.verify() == []


def test_a_record_that_somebody_else_committed_is_not_replaced() -> None:
    shard = split_at(f"memory://late/{uuid.uuid4().hex}", "float32")
    shard.write("holder", shard.writer())
    ledger = shard.writer().ledger
    record = ledger.find_shard(0, ledger.read_split())
    assert record is not None
    ledger.commit_shard(record, ABSENT)  # the same one: the answer to the first try was lost
    with pytest.raises(ChangedError):
        ledger.commit_shard(record.model_copy(update={"nonfinite": 1}), ABSENT)
    split = ledger.read_split()
    ledger.commit_split(split)
    with pytest.raises(LockedError, match="run the same command again"):
        ledger.commit_split(split.model_copy(update={"plan_sha256": "0" * 64}))
