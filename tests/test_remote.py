"""Stores on fsspec URLs: as local ones are, in few requests; errors and credentials."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_code
from remotes import OUTSIDE, SlowServer, only_ours, s3_server
from stores import Made

from bertvision.errors import CorruptStoreError, InputError, StoreError, StoreNotFoundError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage import objects
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

LENGTHS = [5, 9, 30, 12, 40, 7, 33, 20, 3, 18]


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, s3: list[str]) -> str:
    """A storage of its own that can be written."""
    start = {"memory": "memory://tests", "s3": "s3://bucket"}[request.param]
    return f"{start}/{uuid.uuid4().hex}"


def test_files_are_written_read_listed_and_removed(url: str) -> None:
    storage = open_storage(url)
    assert storage.names("") == storage.names("a/b") == []
    assert storage.size("a/f") is None
    storage.write("a/f", b"one")
    storage.write("a/b/g", iter([b"t", b"w", memoryview(b"o")]))
    storage.write("a/empty", b"")
    assert (storage.read("a/f"), storage.read("a/b/g"), storage.read("a/empty")) == (
        b"one",
        b"two",
        b"",
    )
    assert sorted(storage.names("a")) == ["b", "empty", "f"]
    assert (storage.size("a/f"), storage.size("a/b"), storage.size("a/empty")) == (3, None, 0)
    storage.write("a/f", b"other")
    assert storage.read("a/f") == b"other"
    storage.remove("a/f")
    storage.remove("a/f")
    assert storage.size("a/f") is None
    storage.remove("a")
    assert storage.names("") == []
    assert storage.free_bytes() is None


@pytest.mark.parametrize("call", ["read", "open"])
def test_what_is_missing_is_not_found(url: str, call: str) -> None:
    with pytest.raises(FileNotFoundError, match="ledger/x is missing"):
        getattr(open_storage(url), call)("ledger/x")


def test_a_file_that_is_larger_than_is_due_is_not_fetched(url: str) -> None:
    storage = open_storage(url)
    storage.write("f", b"12345")
    assert storage.read("f", 5) == b"12345"
    with pytest.raises(CorruptStoreError, match="more than 4 bytes"):
        storage.read("f", 4)


@pytest.mark.parametrize("key", ["../f", "a/../../f", "/f", "a//f"])
def test_keys_do_not_lead_out(url: str, key: str) -> None:
    with pytest.raises(CorruptStoreError, match="leads out of"):
        open_storage(url).write(key, b"")


def test_pieces_may_share_their_memory(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    shared = np.empty(3 << 20, np.uint8)

    def pieces() -> Iterator[memoryview]:
        for i in range(6):
            shared[:] = i
            yield shared.data

    storage = open_storage(url)
    storage.write("f", pieces())
    out = np.empty(18 << 20, np.uint8)
    storage.open("f").read_into(out, 0)
    assert out.reshape(6, -1).min(1).tolist() == out.reshape(6, -1).max(1).tolist() == [*range(6)]


def test_content_that_fails_leaves_what_was_there(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", 5 << 20)
    storage = open_storage(url)
    storage.write("f", b"before")

    def pieces() -> Iterator[bytes]:
        yield bytes(12 << 20)
        raise ZeroDivisionError("in what makes the content")

    with pytest.raises(ZeroDivisionError, match="in what makes"):
        storage.write("f", pieces())
    assert storage.read("f") == b"before"
    if url.startswith("s3"):
        import fsspec

        fs = fsspec.filesystem("s3")
        assert not fs.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def test_large_uploads_hold_a_few_parts_at_most(s3: list[str]) -> None:
    code = """
import resource
from bertvision.featurestore.storage import objects
from bertvision.featurestore.storage.opening import open_storage
objects.PART_BYTES = 5 << 20
storage = open_storage("s3://bucket/large")
def pieces(n):
    for _ in range(n):
        yield bytes(1 << 20)
storage.write("a", pieces(30))  # with it everything is imported and connected
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
storage.write("b", pieces(120))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, storage.size("b"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    grown_kib, size = map(int, done.stdout.split())
    assert size == 120 << 20
    assert grown_kib < 30 << 10


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_a_store_elsewhere_is_the_same_as_a_local_one(
    url: str, encoding: str, tmp_path: Path
) -> None:
    made = Made(LENGTHS, encoding=encoding)
    there = made.write(url, shards=2)  # and goes on after an interruption:
    assert not there.is_complete
    there, here = made.write(url), made.write(tmp_path)
    assert there.verify() == []
    assert ActivationStore.open(url)["1e"].splits() == ["train"]
    options: dict[str, Any] = {"batch_size": 3, "buffer": 2, "seed": 1}
    for layers in (None, [-1, 0]):
        batches = zip(
            ActivationLoader(there, layers=layers, **options),
            ActivationLoader(here, layers=layers, **options),
            strict=True,
        )
        for one, other in batches:
            assert torch.equal(one.decode(), other.decode())
    assert torch.equal(there[3], here[3])
    assert there.table().equals(here.table())
    known = ("provenance", "bytes", "layers", "complete")
    assert {k: there.info()[k] for k in known} == {k: here.info()[k] for k in known}


def test_dask_xarray_and_zarr_read_it(url: str) -> None:
    import xarray as xr
    import zarr

    made = Made(LENGTHS)
    split = made.write(url)
    rows = torch.cat([made.of_stored(i) for i in range(len(LENGTHS))]).numpy()
    assert np.array_equal(split.dask().compute(), rows)
    assert np.array_equal(split.to_xarray()["hidden_states"].values, rows)
    array = zarr.open_group(f"{url}/arrays.zarr/1e/train", mode="r")["hidden_states"]
    assert isinstance(array, zarr.Array)
    first = slice(0, split.plan.tokens_of(0))
    assert np.array_equal(np.asarray(array[first]), rows[first])
    opened = xr.open_zarr(f"{url}/arrays.zarr", group="1e/train", consolidated=True)
    assert opened["hidden_states"].dims == ("token", "layer", "hidden")
    assert np.array_equal(opened["hidden_states"].values[first], rows[first])


@pytest.mark.slow
def test_dask_processes_open_it_again(s3: list[str]) -> None:
    made = Made(LENGTHS)
    split = made.write(f"s3://bucket/{uuid.uuid4().hex}")
    mean = split.dask().mean().compute(scheduler="processes", num_workers=2)
    assert mean == pytest.approx(torch.cat(made.hidden_states).double().mean().item(), abs=1e-6)


def test_a_storage_goes_to_other_processes_by_its_url(url: str) -> None:
    storage = open_storage(url)
    storage.write("f", b"1")
    again = pickle.loads(pickle.dumps(storage))
    assert str(again) == str(storage) == url
    assert again.read("f") == b"1"


def test_listings_show_what_others_wrote_since(url: str) -> None:
    one, other = open_storage(url), open_storage(url)
    one.write("ledger/a", b"")
    assert other.names("ledger") == ["a"]
    one.write("ledger/b", b"")
    one.remove("ledger/a")
    assert other.names("ledger") == ["b"]
    assert other.size("ledger/a") is None


@pytest.mark.parametrize("name", ["hidden_states", "scale"])
def test_damage_is_found_and_named(url: str, name: str) -> None:
    split = Made(LENGTHS, encoding="int8").write(url)
    key = f"arrays.zarr/1e/train/{name}/c/1" + ("/0/0" if name == "hidden_states" else "/0")
    data = bytearray(split.storage.read(key))
    data[40] ^= 1
    split.storage.write(key, bytes(data))
    assert [problem for problem in split.verify() if "shard 1" in problem]
    with pytest.raises(CorruptStoreError, match="shard 1"):
        for _ in ActivationLoader(ActivationSplit(url, "1e", "train"), batch_size=2):
            pass
    split.storage.remove(key)
    with pytest.raises(CorruptStoreError, match=f"shard 1: {name} is missing"):
        ActivationSplit(url, "1e", "train").open_shard(1)


# --- few requests
@only_ours
@pytest.mark.parametrize("records", [4_000, pytest.param(40_000, marks=pytest.mark.slow)])
def test_a_large_ledger_is_listed_in_few_requests(s3: list[str], records: int) -> None:
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    backend = s3_backends[DEFAULT_ACCOUNT_ID]["aws"]
    for shard in range(records):
        backend.put_object("bucket", f"many/ledger/1e/train/{shard:05d}.json", b"")
    storage = open_storage("s3://bucket/many")
    s3.clear()
    assert len(storage.names("ledger/1e/train")) == records
    assert len(s3) <= records // 1000 + 1  # S3 gives 1000 names at a time
    s3.clear()
    assert storage.names("ledger/1e") == ["train"]
    assert len(s3) == 1


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[SlowServer, Made, ActivationSplit]]:
    """A store of 2 shards of 4 MiB, behind HTTP."""
    made = Made([300, 700, 400, 500], layers=8, hidden=128, shard_tokens=1024)
    made.write(tmp_path)
    with SlowServer(tmp_path).running() as server:
        yield server, made, ActivationStore.open(server.url)["1e"]["train"]


def test_a_shard_is_streamed_in_few_requests(
    served: tuple[SlowServer, Made, ActivationSplit], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertvision.featurestore.storage import remote as remotefile

    monkeypatch.setattr(remotefile, "PART_BYTES", 2 << 20)
    server, made, split = served
    batches = iter(ActivationLoader(split, batch_size=4))
    _ = split.labels, split.plan
    server.requests.clear()
    codes = next(batches).decode()
    assert len(codes) == 1900
    asked = [size for method, path, size in server.requests if "hidden_states" in path]
    # of each shard its length, its index, and 4 MiB with 8 checksums in parts of at most 2 MiB
    assert sorted(asked)[:4] == [0, 0, 132, 132]
    assert len(asked) == 2 * (1 + 1 + 3)
    records = [path for _, path, _ in server.requests if path.endswith(".json")]
    assert len(records) == 2


def test_one_layer_asks_for_that_layer_alone(
    served: tuple[SlowServer, Made, ActivationSplit],
) -> None:
    server, made, split = served
    server.requests.clear()
    assert sum(len(batch.decode()) for batch in ActivationLoader(split, layers=[-1])) == 1900
    layer = 1024 * 128 * 4
    asked = [size for _, path, size in server.requests if "hidden_states" in path]
    assert sum(asked) < 2 * (layer + 1000)
    split.open_shard(0)
    server.requests.clear()
    view = split.dask(layers=[2]).compute()
    assert len(view) == 1900
    asked = [size for _, path, size in server.requests if "hidden_states" in path]
    assert sum(asked) < 2 * (layer + 1000)


def test_an_example_is_read_at_once_in_all_its_layers(
    served: tuple[SlowServer, Made, ActivationSplit],
) -> None:
    server, made, split = served
    split.read([1])
    server.requests.clear()
    server.latency = 0.2
    split._last = None
    assert torch.equal(split[1].permute(0, 2, 1), made.of_stored(1))
    asked = [size for _, path, size in server.requests if "hidden_states" in path and size > 132]
    assert sum(asked) < 2 * made.of_stored(1).numel() * 4
    assert len(asked) <= 8


def test_a_reader_that_is_closed_lets_go_of_what_was_fetched(
    served: tuple[SlowServer, Made, ActivationSplit],
) -> None:
    import weakref

    _, _, split = served
    reader = split.open_shard(0)
    reader.prefetch(range(8))
    file: Any = reader._file
    parts = [weakref.ref(part.data) for part in file._kept]
    assert parts
    codes, scale = split.buffers(reader.tokens, 8)
    reader.read(0, len(split.plan.examples_of(0)), range(8), codes, scale)
    reader.close()
    assert not any(part() for part in parts)


def streamed_share(folder: Path, shards: int) -> float:
    """The used share of a line of 40 MB/s, 50 ms latency and 10 MB/s per connection."""
    lengths = [1024 // 6] * (6 * shards)
    Made(lengths, layers=8, hidden=256, shard_tokens=1024).write(folder)
    server = SlowServer(folder, latency=0.05, rate=40e6, connection_rate=10e6)
    with server.running():
        split = ActivationStore.open(server.url)["1e"]["train"]
        loader = ActivationLoader(split, batch_size=8, buffer=2)
        _ = split.labels
        server.requests.clear()
        assert sum(len(batch.examples) for batch in loader) == len(lengths)
        return sum(size for *_, size in server.requests) / 40e6 / loader.wait_seconds


def test_read_ahead_hides_latency(tmp_path: Path) -> None:
    assert streamed_share(tmp_path, 10) > 0.5


@pytest.mark.slow
def test_read_ahead_reaches_four_fifths_of_the_bandwidth(tmp_path: Path) -> None:
    assert streamed_share(tmp_path, 48) >= 0.8


# --- what goes wrong is said clearly
@pytest.mark.parametrize(
    "bad",
    [
        "s3://key:hunter2@bucket/store",
        "s3://hunter2@bucket/store",
        "https://user:hunter2@example.org/store",
        "https://example.org/store?X-Amz-Signature=hunter2",
        "https://example.org/store#hunter2",
        "ftp://hunter2@example.org/store",
        "abfs://box:hunter2@account.dfs.core.windows.net/store",
        "simplecache::s3://bucket/hunter2",
        "s3://bucket/store::https://hunter2",
    ],
)
def test_a_url_with_what_may_be_a_secret_is_refused_without_repeating_it(bad: str) -> None:
    with pytest.raises(InputError, match="URL of (the|a) store") as raised:
        open_storage(bad)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("htp://host/store", "unknown .did you mean http://.*known are .*memory.*s3"),
        ("s3://", "names no place: such as s3://bucket"),
        ("s3://bucket/../other", "holds '::' or '..'"),
        ("gs://bucket/store", "not installed: pip install gcsfs"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(bad: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        open_storage(bad)


def test_without_s3fs_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import import_module

    registry = import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, "s3", raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match=r"pip install 'bertvision\[s3\]'"):
        open_storage("s3://bucket/store")


def test_what_can_only_be_read_is_not_written(tmp_path: Path) -> None:
    with SlowServer(tmp_path).running() as server:
        with pytest.raises(InputError, match="can only be read: a store is written to a local"):
            Made([3]).write(server.url)
        assert not server.requests


def test_no_store_is_told_apart_from_no_bucket(s3: list[str]) -> None:
    with pytest.raises(StoreNotFoundError, match="no activation store at s3://bucket/nothing"):
        ActivationStore.open("s3://bucket/nothing")
    for call in (lambda p: p.names(""), lambda p: p.size("f"), lambda p: p.read("f")):
        with pytest.raises(StoreError, match="s3://elsewhere.*no such bucket") as raised:
            call(open_storage("s3://elsewhere/store"))
        assert not isinstance(raised.value, FileNotFoundError)


@pytest.mark.parametrize("status", [401, 403])
def test_an_access_that_is_not_allowed_is_no_damage(
    served: tuple[SlowServer, Made, ActivationSplit], status: int
) -> None:
    server, _, split = served
    server.status, server.body = status, b"the key was SERVER-CANARY"
    for call in (lambda: split.open_shard(0), lambda: ActivationStore.open(server.url)):
        with pytest.raises(StoreError, match="not allowed .*AWS_ACCESS_KEY_ID") as raised:
            call()
        assert not isinstance(raised.value, CorruptStoreError)
        assert "SERVER-CANARY" not in str(raised.value)
        assert raised.value.__cause__ is raised.value.__context__ is None


def test_a_server_that_is_gone_is_no_damage(
    served: tuple[SlowServer, Made, ActivationSplit],
) -> None:
    server, _, split = served
    reader = split.open_shard(0)
    codes, scale = split.buffers(reader.tokens, 1)
    server.status = -1
    calls = (
        lambda: split.open_shard(1),
        lambda: reader.read(0, len(split.plan.examples_of(0)), [0], codes, scale),
        lambda: ActivationStore.open(server.url),
        lambda: ActivationStore.open("http://127.0.0.1:9/nobody-listens"),
    )
    for call in calls:
        with pytest.raises(StoreError, match="cannot be reached") as raised:
            call()
        assert not isinstance(raised.value, CorruptStoreError)


CANARIES = [f"canary{i:02d}secret" for i in range(20)]

# Does everything that can be done with a store, the ways it can fail included; what a user would
# see of it goes to stdout and stderr, logs at DEBUG and whole tracebacks included.
SCRIPT = """
import logging, os, sys, traceback
from typer.testing import CliRunner

logging.basicConfig(level=logging.DEBUG)
for name in ("s3fs", "fsspec", "botocore", "aiobotocore", "asyncio", "aiohttp", "urllib3"):
    logging.getLogger(name).setLevel(logging.WARNING)  # their own, off unless somebody asks

from fsspec.config import conf, set_conf_files
from s3fs import S3FileSystem
from bertvision.cli import app
from bertvision.featurestore.store import ActivationStore
from bertvision.featurestore.stream import ActivationLoader

set_conf_files(os.environ["FSSPEC_CONFIG_DIR"], conf)  # as at its import
S3FileSystem.retries = 1
canary = CANARIES.__getitem__

def attempt(url, *commands, **environment):
    os.environ.update(environment)
    S3FileSystem.clear_instance_cache()
    print("==", environment.keys())
    for command in commands:
        done = CliRunner().invoke(app, ["store", *command.split(), "--store", url, "--json"])
        print(done.output, done.exception if done.exit_code not in (0, 1, 2) else "")
    try:
        store = ActivationStore.open(url)
        print(repr(store), repr(store.storage), repr(store["1e"]["train"]))
        for batch in ActivationLoader(store["1e"]["train"]):
            pass
        with store.storage.lock("ledger/.lock", "writing"):
            store.storage.write("f", b"1")
    except Exception as error:
        traceback.print_exc()
        seen.append(type(error).__name__)

seen = []
working = os.environ["AWS_ENDPOINT_URL"]
attempt("s3://bucket/whole", "ls", "info 1e/train", "verify")
attempt("s3://bucket/damaged", "ls", "info 1e/train", "verify")
attempt("s3://nobucket/store", "ls")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=working.replace("//", f"//{canary(5)}:{canary(6)}@"))
gone = f"http://{canary(7)}:{canary(8)}@127.0.0.1:9"
attempt("s3://bucket/whole", "ls", AWS_ENDPOINT_URL=gone)
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=DENYING)
attempt(DENYING + "/store", "ls")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=f"nothing://{canary(9)}")
attempt("s3://bucket/whole", AWS_ENDPOINT_URL=working, AWS_PROFILE=canary(10))
del os.environ["AWS_PROFILE"]
attempt(f"s3://{canary(11)}:{canary(12)}@bucket/whole")
attempt(f"https://{canary(13)}@127.0.0.1:9/store", "ls")
attempt(f"https://127.0.0.1:9/store?X-Amz-Signature={canary(14)}&token={canary(15)}")
attempt(f"https://127.0.0.1:9/store#{canary(16)}")
attempt(f"abfs://{canary(17)}:{canary(18)}@host/store")
print("SEEN", ",".join(seen))
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Output of the script, and all objects of the bucket afterwards."""
    if OUTSIDE:
        pytest.skip("the credentials are those of the server that the tests make")
    from moto.core import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    folder = tmp_path_factory.mktemp("secrets")
    (folder / "fsspec").mkdir()
    headers = {"Authorization": f"Bearer {CANARIES[3]}"}
    configured = {"http": {"headers": headers}, "gcs": {"token": CANARIES[4]}}
    (folder / "fsspec/conf.json").write_text(json.dumps(configured))
    denying = SlowServer(folder)
    denying.status, denying.body = 403, f"<Error>{CANARIES[19]}</Error>".encode()
    environment = {
        "AWS_ACCESS_KEY_ID": CANARIES[0],
        "AWS_SECRET_ACCESS_KEY": CANARIES[1],
        "AWS_SESSION_TOKEN": CANARIES[2],
        "FSSPEC_CONFIG_DIR": str(folder / "fsspec"),
    }
    with s3_server(**environment), denying.running():
        for name in ("whole", "damaged"):
            split = Made([5, 9, 30, 40, 33], encoding="int8").write(f"s3://bucket/{name}")
        key = "arrays.zarr/1e/train/hidden_states/c/1/0/0"
        split.storage.write(key, bytes(len(split.storage.read(key))))
        script = f"CANARIES = {CANARIES}\nDENYING = {denying.url!r}\n{SCRIPT}"
        done = run_code(script, NO_COLOR="1")
        assert done.returncode == 0, done.stderr
        bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets["bucket"]
        yield done.stdout + done.stderr, {key: bucket.keys[key].value for key in bucket.keys}


def test_the_script_met_every_kind_of_error(output: tuple[str, dict[str, bytes]]) -> None:
    text, _ = output
    (seen,) = [line for line in text.splitlines() if line.startswith("SEEN")]
    assert seen.count("CorruptStoreError") == 1
    assert seen.count("InputError") == 5
    for message in (
        *("whole", "does not pass its checksum", "no such bucket", "cannot be reached"),
        *("not allowed", "holds a user name, a password or a query"),
    ):
        assert message in text
    assert "Unclosed" not in text


@pytest.mark.parametrize("canary", CANARIES)
def test_no_secret_gets_out(output: tuple[str, dict[str, bytes]], canary: str) -> None:
    text, objects = output
    assert canary not in text, [line for line in text.splitlines() if canary in line][:3]
    assert len(objects) > 20
    assert not [key for key, data in objects.items() if canary.encode() in data]


def test_no_secret_is_kept_in_a_workspace(tmp_path: Path) -> None:
    from bertvision.errors import InputError
    from bertvision.pipelines.tasks.data import TaskConfig
    from bertvision.pipelines.workspace.config import FinetuneConfig, ModelConfig, WorkspaceConfig
    from bertvision.pipelines.workspace.workspace import Workspace

    model = ModelConfig(name_or_path="b", weights_sha256="0", hidden_size=4, num_hidden_layers=1)
    config = WorkspaceConfig(model=model, task=TaskConfig(), data={}, finetune=FinetuneConfig())
    space = Workspace.create(tmp_path / "space", config)
    before = (space.root / "bertvision.yaml").read_bytes()
    with pytest.raises(InputError) as raised:
        space.keep_at(f"s3://{CANARIES[0]}:{CANARIES[1]}@bucket/store")
    assert "canary" not in str(raised.value)
    assert (space.root / "bertvision.yaml").read_bytes() == before
