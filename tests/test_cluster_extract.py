"""Extraction on a cluster: the store of a single process, whatever dies on the way."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import cluster
from processes import running
from sentence_space import sentence_space

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.opening import open_storage
from bertvision.featurestore.writer import SplitWriter
from bertvision.pipelines import scheduler
from bertvision.pipelines.extraction import cluster as cluster_extract
from bertvision.pipelines.extraction.cluster import ClusterWork
from bertvision.pipelines.extraction.extract import Extracted, extract
from bertvision.pipelines.scheduler import ClusterError
from bertvision.pipelines.workspace.pretrained import ensure_snapshot
from bertvision.pipelines.workspace.workspace import Workspace

SPLIT, SHARD_TOKENS = "sentences-all", 128


def workers(n_workers: int = 2, **options: Any) -> AbstractContextManager[Any]:
    """A cluster whose workers do the same arithmetic as this process."""
    return cluster(n_workers, threads_per_worker=torch.get_num_threads(), **options)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Address of a cluster of two worker processes, for tests that do not kill them."""
    with workers() as made:
        yield made.scheduler_address


@pytest.fixture(scope="module")
def made_space(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with a tiny encoder and sentences of many lengths."""
    return sentence_space(tiny_bert, tmp_path_factory.mktemp("space"))


@pytest.fixture
def space(made_space: Workspace, tmp_path: Path) -> Workspace:
    """A copy for each test."""
    return Workspace.find(shutil.copytree(made_space.root, tmp_path / "workspace"))


def run(space: Workspace, store: Path | str, **options: Any) -> list[Extracted]:
    settings: dict[str, Any] = {"dataset": "sentences", "encoding": "int8", "precision": "32"}
    settings |= {"tokens": ("all",), "shard_tokens": SHARD_TOKENS, "store": str(store)}
    return extract(space, "0e", **settings | options)


def files(store: Path) -> dict[str, bytes]:
    """The bytes of everything in a store; locks are empty and stay."""
    paths = (path for path in store.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(store)): path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def alone(made_space: Workspace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that a single process writes."""
    store = tmp_path_factory.mktemp("alone") / "alone"
    run(made_space, store)
    split = ActivationSplit(store, "0e", SPLIT)
    assert split.plan.n_shards >= 16  # or there is nothing to hand out
    return store


# --- the same bytes


@pytest.mark.parametrize("tokens", [("all",), ("cls", "mean", "max")], ids=",".join)
def test_the_store_equals_that_of_a_single_process_byte_for_byte(
    space: Workspace, tmp_path: Path, address: str, tokens: tuple[Any, ...]
) -> None:
    options = {"tokens": tokens, "shard_tokens": SHARD_TOKENS if tokens == ("all",) else 4}
    alone = run(space, tmp_path / "alone", **options)
    shared = run(space, tmp_path / "shared", scheduler=address, **options)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    names = [SPLIT] if tokens == ("all",) else [f"{SPLIT}-{pooling}" for pooling in tokens]
    assert [done.split for done in shared] == names
    for one, other in zip(alone, shared, strict=True):
        assert other.shards_written == one.shards_written > 4
        assert (other.examples_written, other.bytes) == (one.examples_written, one.bytes)
        assert other.encoder_seconds > 0


def test_workers_extract_sites_as_a_single_process_does(
    space: Workspace, tmp_path: Path, address: str
) -> None:
    for store, scheduler_ in (("alone", None), ("shared", address)):
        (done,) = run(space, tmp_path / store, scheduler=scheduler_, sites=("*.hook_mlp_out",))
        assert (done.split, done.shards_written >= 16) == (f"{SPLIT}-sites", True)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")
    names = ActivationSplit(tmp_path / "shared", "0e", f"{SPLIT}-sites").layer_names
    assert names == ["blocks.0.hook_mlp_out", "blocks.1.hook_mlp_out"]


def test_workers_keep_the_tokens_that_a_single_process_does(
    space: Workspace, tmp_path: Path, address: str
) -> None:
    for store, scheduler_ in (("alone", None), ("shared", address)):
        (done,) = run(space, tmp_path / store, scheduler=scheduler_, keep="every:3")
        assert done.split == f"{SPLIT}-kept"
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


def test_workers_pool_stored_tokens_without_the_encoder(
    space: Workspace, tmp_path: Path, address: str
) -> None:
    options = {"encoding": "float32", "tokens": ("cls", "mean"), "shard_tokens": 4}
    for store, scheduler_ in (("alone", None), ("shared", address)):
        run(space, tmp_path / store, encoding="float32")
        done = run(space, tmp_path / store, scheduler=scheduler_, **options)
        assert [one.pooled_from for one in done] == [f"0e/{SPLIT}"] * 2
        assert all(one.shards_written > 4 for one in done)
    assert files(tmp_path / "shared") == files(tmp_path / "alone")


def test_what_is_there_already_is_not_computed_again(
    space: Workspace, alone: Path, tmp_path: Path, address: str
) -> None:
    run(space, tmp_path / "shared", shards=[0, 3, 4])
    before = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "shared" / "ledger" / "0e" / SPLIT).glob("0*.json")
    }
    assert len(before) == 3
    (done,) = run(space, tmp_path / "shared", scheduler=address)
    assert done.shards_written == ActivationSplit(alone, "0e", SPLIT).plan.n_shards - 3
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert files(tmp_path / "shared") == files(alone)
    (again,) = run(space, tmp_path / "shared", scheduler="tcp://127.0.0.1:9")  # asks nobody
    assert again.shards_written == 0


# --- whatever dies


class Assassin:
    """A worker's plugin: some shards kill whoever is the first to write them, at some moment.

    Args:
        moments: by shard: in the middle of the first, second, third file (the record is the last),
            or after all of them.
        folder: where it is noted whom each shard has killed.
    """

    def __init__(self, moments: dict[int, int], folder: Path) -> None:
        self.moments, self.folder = moments, folder

    def setup(self, worker: object) -> None:
        real = SplitWriter.write_shard

        def write_shard(writer: SplitWriter, shard: int, *rest: Any) -> Any:
            if not self.claims(shard):
                return real(writer, shard, *rest)
            storage, files_written = writer.ledger.storage, 0
            write = storage.write

            def dying(key: str, content: Any, *condition: str) -> str:
                nonlocal files_written
                half = files_written == self.moments[shard]
                version = str(write(key, _half(content) if half else content, *condition))
                files_written += 1
                return version

            storage.write = dying  # type: ignore[method-assign]
            real(writer, shard, *rest)
            return _die()

        SplitWriter.write_shard = write_shard  # type: ignore[method-assign]

    def claims(self, shard: int) -> bool:
        if shard not in self.moments:
            return False
        try:
            (self.folder / f"{shard}-{os.getpid()}").touch()
            (self.folder / str(shard)).touch(exist_ok=False)
        except FileExistsError:
            (self.folder / f"{shard}-{os.getpid()}").unlink()
            return False
        return True


def _half(content: Any) -> Iterator[Any]:
    yield content[: len(content) // 2] if isinstance(content, bytes) else next(iter(content))
    _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


@pytest.mark.parametrize(
    ("allowed_failures", "seed"),
    [
        (0, 1),
        pytest.param(3, 2, marks=pytest.mark.slow),
        pytest.param(1, 3, marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_at_random_lose_nothing(
    space: Workspace, alone: Path, tmp_path: Path, allowed_failures: int, seed: int
) -> None:
    """Three workers die, each at another moment of writing a shard, and the nanny starts others."""
    from distributed import Client, WorkerPlugin

    n_shards = ActivationSplit(alone, "0e", SPLIT).plan.n_shards
    drawn = random.Random(seed)
    shards = drawn.sample(range(n_shards), 3)
    moments = dict(zip(shards, drawn.sample(range(4), 3), strict=True))
    (tmp_path / "killed").mkdir()

    class Plugin(Assassin, WorkerPlugin):  # type: ignore[misc]
        pass

    with workers(allowed_failures=allowed_failures) as made:
        with Client(made) as client:
            client.register_plugin(Plugin(moments, tmp_path / "killed"), name="assassin")
        (done,) = run(space, tmp_path / "shared", scheduler=made.scheduler_address)
    killed = {path.name.partition("-")[::2] for path in (tmp_path / "killed").glob("*-*")}
    assert {int(shard) for shard, _ in killed} == set(shards)
    assert len({process for _, process in killed}) == 3  # each was another process
    assert done.shards_written == n_shards
    assert files(tmp_path / "shared") == files(alone)


def test_a_shard_that_kills_everybody_ends_the_extraction_and_loses_no_other(
    space: Workspace, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client, WorkerPlugin

    class Plugin(WorkerPlugin):  # type: ignore[misc]
        def setup(self, worker: object) -> None:
            real = SplitWriter.write_shard

            def write_shard(writer: SplitWriter, shard: int, *rest: Any) -> Any:
                return _die() if shard == 7 else real(writer, shard, *rest)

            SplitWriter.write_shard = write_shard  # type: ignore[method-assign]

    monkeypatch.setattr(cluster_extract, "ATTEMPTS", 2)
    with workers(1, allowed_failures=0) as made:
        with Client(made) as client:
            client.register_plugin(Plugin(), name="killer")
        expected = r"shard 7 of all of 0e killed its worker 2 times: .*--memory-limit.*run the"
        with pytest.raises(ClusterError, match=expected):
            run(space, tmp_path / "shared", scheduler=made.scheduler_address)
    held = ActivationSplit(tmp_path / "shared", "0e", SPLIT)
    assert 7 in held.missing_shards()
    assert held.ledger.shards() >= set(range(6))
    run(space, tmp_path / "shared")
    assert files(tmp_path / "shared") == files(alone)


_CLIENT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(int(sys.argv[5]))
sys.path.insert(0, sys.argv[1])
from test_cluster_extract import run
from bertvision.pipelines.workspace.workspace import Workspace
run(Workspace.find(Path(sys.argv[2])), sys.argv[3], scheduler=sys.argv[4])
"""


def test_a_client_that_is_killed_leaves_a_store_that_anybody_can_finish(
    space: Workspace, alone: Path, tmp_path: Path, address: str
) -> None:
    here, ledger = Path(__file__).parent, tmp_path / "shared" / "ledger" / "0e" / SPLIT
    arguments = (here, space.root, tmp_path / "shared", address, torch.get_num_threads())
    with running(_CLIENT, *arguments) as client:
        while not list(ledger.glob("0*.json")):  # until the first shard is committed
            assert client.process.is_alive(), client.finished().stderr
            time.sleep(0.005)
        client.process.kill()
        client.finished()
    assert (ledger / ".grant").is_file()
    run(space, tmp_path / "shared")
    assert not (ledger / ".grant").exists()
    assert files(tmp_path / "shared") == files(alone)


# --- errors


def test_a_store_that_the_workers_do_not_see_is_named(space: Workspace, address: str) -> None:
    # the memory of this process
    expected = rf"the worker on .* does not find .*there is no split 0e/{SPLIT} in memory://hidden"
    with pytest.raises(ClusterError, match=expected):
        run(space, "memory://hidden", scheduler=address)


def _tell(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Workers are told something else than what is extracted."""
    real = ClusterWork.__init__

    def told(self: ClusterWork, writers: Any, job: Any, scheduler: str) -> None:
        real(self, writers, replace(job, **changes), scheduler)

    monkeypatch.setattr(ClusterWork, "__init__", told)


def test_a_workspace_that_the_workers_do_not_see_is_named(
    space: Workspace, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _tell(monkeypatch, root=tmp_path / "nowhere")
    expected = f"does not find .*no workspace in {tmp_path}/nowhere.*these very paths"
    with pytest.raises(ClusterError, match=expected):
        run(space, tmp_path / "shared", scheduler=address)
    assert not ActivationSplit(tmp_path / "shared", "0e", SPLIT).ledger.shards()


def test_a_worker_with_another_snapshot_writes_nothing(
    space: Workspace, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure_snapshot(space, "untrained")
    _tell(monkeypatch, tag="untrained")
    with pytest.raises(ProvenanceError, match=r"sees another .*: (step|weights_sha256) = .* there"):
        run(space, tmp_path / "shared", scheduler=address)
    assert not ActivationSplit(tmp_path / "shared", "0e", SPLIT).ledger.shards()


def test_schedulers_that_are_no_cluster_are_refused(space: Workspace, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="scheduler 'processes': shards are computed here"):
        run(space, tmp_path / "shared", scheduler="processes")
    with pytest.raises(InputError, match="unknown scheduler 'tpc://a:1'"):
        run(space, tmp_path / "shared", scheduler="tpc://a:1")


def test_a_cluster_that_does_not_answer_is_named_and_the_lock_is_free_again(
    space: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CONNECT_SECONDS", 0.2)
    with pytest.raises(InputError, match="no Dask scheduler answers at tcp://127.0.0.1:9"):
        run(space, tmp_path / "shared", scheduler="tcp://127.0.0.1:9")
    with open_storage(tmp_path / "shared").lock(f"ledger/0e/{SPLIT}/.lock", "looking"):
        pass
