"""The lock of a store elsewhere: one holder at a time, and none that is dead for ever."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec
import pytest
from processes import running
from stores import Made

from bertvision.errors import LockedError, StoreError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage import lease
from bertvision.featurestore.storage.objects import MemoryObjects
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.writer import open_writer


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, s3: list[str]) -> str:
    start = {"memory": "memory://tests", "s3": "s3://bucket"}[request.param]
    return f"{start}/{uuid.uuid4().hex}"


def test_a_second_writer_is_refused_before_it_writes(url: str) -> None:
    made = Made([9, 30, 12, 40], seed=None)
    with open_writer(url, made.spec, made.contents, made.stats) as writer:
        made.write_shard(writer, 0)
        message = (
            rf"another process is writing 1e/train since 20\d\d-.*process {os.getpid()}, last "
            r"sign of life \d s ago.*killed, the lock is free 60 s after.*nothing was changed"
        )
        with pytest.raises(LockedError, match=message):
            made.write(url)
        assert writer.pending() == [1]
    assert made.write(url).is_complete  # given back, it is free at once


def test_the_lock_names_no_machine(url: str) -> None:
    storage = open_storage(url)
    with storage.lock("ledger/.lock", "writing"):
        held = json.loads(storage.read("ledger/.lock"))
        assert set(held) == {"holder", "process", "since", "renewals", "what", "released"}
    assert os.uname().nodename not in json.dumps(held)
    assert json.loads(storage.read("ledger/.lock"))["released"]


def test_who_waits_gets_it_when_it_is_given_back(url: str) -> None:
    order = []

    def wait() -> None:
        with open_storage(url).lock("l", "second", wait=True):
            order.append("second")

    with open_storage(url).lock("l", "first"):
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join(0.7)  # it looks at least once
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


@pytest.mark.parametrize("contenders", [2, 4])
def test_one_of_several_gets_it(contenders: int) -> None:
    held = threading.Lock()

    def contend(url: str) -> bool:
        start.wait()
        try:
            with open_storage(url).lock("l", "racing"):
                assert held.acquire(blocking=False), "two hold it"
                done.wait()
                held.release()
                return True
        except LockedError:
            refused.release()
            return False

    with ThreadPoolExecutor(contenders) as threads:
        for race in range(50):
            start, done = threading.Barrier(contenders), threading.Event()
            refused = threading.Semaphore(0)
            url = f"memory://races/{uuid.uuid4().hex}/{race}"
            results = [threads.submit(contend, url) for _ in range(contenders)]
            for _ in range(contenders - 1):
                assert refused.acquire(timeout=30)
            done.set()
            assert sum(result.result() for result in results) == 1


def test_a_killed_holder_does_not_keep_it(s3: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://bucket/{uuid.uuid4().hex}"
    code = f"""
import time
from bertvision.featurestore.storage.opening import open_storage
with open_storage({url!r}).lock("l", "being killed"):
    print("held", flush=True)
    time.sleep(60)
"""
    with running(code) as holder:
        while holder.output() != "held\n":
            assert holder.process.is_alive(), holder.finished().stderr
            time.sleep(0.005)
    storage = open_storage(url)
    with pytest.raises(LockedError, match="being killed"), storage.lock("l", "later"):
        pass
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    with storage.lock("l", "later", wait=True):
        assert json.loads(storage.read("l"))["process"] == os.getpid()


def test_a_holder_renews_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    storage = open_storage(url)
    with storage.lock("l", "first"):
        until = time.monotonic() + 60
        while json.loads(storage.read("l"))["renewals"] < 8 and time.monotonic() < until:
            time.sleep(0.1)  # longer than the lease, by the renewals that were made
        with pytest.raises(LockedError, match="first"), open_storage(url).lock("l", "second"):
            pass
        storage.write("f", b"1")


def test_who_lost_it_writes_no_more(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
    made = Made([9, 30, 12, 40], seed=None)
    with open_writer(url, made.spec, made.contents, made.stats) as writer:
        made.write_shard(writer, 0)
        thief = open_storage(url)
        thief.write("ledger/1e/train/.lock", b"{}")  # as one that took over would
        (held,) = writer.ledger.storage._leases  # type: ignore[attr-defined]
        held._thread.join(60)
        with pytest.raises(LockedError, match="lock.*was lost.*run the same command again"):
            made.write_shard(writer, 1)
    assert ActivationSplit(url, "1e", "train").missing_shards() == [1]
    assert thief.read("ledger/1e/train/.lock") == b"{}"  # and it does not give back another's


def test_who_cannot_renew_it_in_time_writes_no_more(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage: Any = open_storage(url)
    with storage.lock("l", "first"):
        storage.write("f", b"1")
        (held,) = storage._leases
        monkeypatch.setattr(held, "_renewed", time.clock_gettime(lease._CLOCK) - 61)
        with pytest.raises(LockedError, match="could not be renewed for 60 s"):
            storage.write("f", b"2")
        with pytest.raises(LockedError, match="could not be renewed"):
            storage.remove("f")
    assert storage.read("f") == b"1"


def test_a_damaged_lock_is_over_by_its_age(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(url)
    storage.write("l", b"\x00[")
    with pytest.raises(LockedError), storage.lock("l", "later"):
        pass
    monkeypatch.setattr(lease, "LEASE_SECONDS", -1.0)
    held = storage.lock("l", "later")
    held.__enter__()
    monkeypatch.undo()
    held.__exit__(None, None, None)


@pytest.mark.parametrize("known", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_refused(
    known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = MemoryObjects.put

    def ignoring(self: Any, path: str, data: bytes, only_if: str | None = None) -> str | None:
        if only_if is not None and bool(only_if) != (known == "If-Match"):
            only_if = None
        return put(self, path, data, only_if)

    monkeypatch.setattr(MemoryObjects, "put", ignoring)
    with pytest.raises(StoreError, match="ignores conditional writes.*write to a local folder"):
        Made([3]).write(f"memory://ignoring/{uuid.uuid4().hex}")


def test_a_server_that_refuses_conditions_that_hold_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It knows If-None-Match alone: a lock that was given back could never be taken again."""
    put = MemoryObjects.put

    def refusing(self: Any, path: str, data: bytes, only_if: str | None = None) -> str | None:
        return None if only_if else put(self, path, data, only_if)

    storage = open_storage(f"memory://refusing/{uuid.uuid4().hex}")
    with storage.lock("l", "first"):
        pass
    monkeypatch.setattr(MemoryObjects, "put", refusing)
    with (
        pytest.raises(StoreError, match="refuses to replace what nobody.*a server that knows"),
        storage.lock("l", "second"),
    ):
        pass


def test_a_renewal_whose_answer_was_lost_does_not_cost_the_lock() -> None:
    objects = MemoryObjects(fsspec.filesystem("memory"))
    path = f"/tests/{uuid.uuid4().hex}"
    held = lease.Lease(objects, path, "the lock", "writing")
    held.acquire(wait=False)
    put = objects.put

    def lost(*args: Any) -> str | None:
        put(*args)
        raise OSError("the connection was reset")

    objects.put = lost  # type: ignore[method-assign]
    with pytest.raises(OSError, match="reset"):
        held._write(held._version)
    objects.put = put  # type: ignore[method-assign]
    assert held._write(held._version)
    held._version = "of an answer that was lost"
    held.release()
    assert json.loads(objects.get(path).data)["released"]
