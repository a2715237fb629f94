"""Several writers at once, and full disks: one writes, nothing is lost, the error is clear."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import stat
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults import Op, Recorder, contents, small
from processes import run_code
from stores import Made
from transformers import AutoModelForQuestionAnswering

from bertvision.errors import DiskSpaceError, LockedError, StoreError
from bertvision.featurestore.damage import find_damage
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.writer import open_writer

# A warm process forks the writers of each race, so that they start within microseconds. Each says
# what became of it and then waits: who won holds the lock until all have tried.
RACES = """
import json, os, signal, sys
from pathlib import Path
import torch
from bertvision.errors import LockedError
from bertvision.featurestore.writer import open_writer
from faults import Recorder, small

torch.set_num_threads(1)
root, made = Path(sys.argv[1]), small()
made.stats()

def write(store, go, said, held):
    recorder = Recorder(store)
    os.read(go, 1)
    try:
        with recorder.recording(), open_writer(store, made.spec, made.contents, made.stats) as w:
            os.write(said, b"won\\n")
            os.read(held, 1)
            for shard in w.pending():
                made.write_shard(w, shard)
    except LockedError:
        os.write(said, f"refused {sorted({op.kind for op in recorder.ops})}\\n".encode())

for race in range(int(sys.argv[2])):
    (go, start), (said, say), (held, release) = os.pipe(), os.pipe(), os.pipe()
    writers = []
    for _ in range(2 + race % 3):
        if not (child := os.fork()):
            for end in (start, said, release):
                os.close(end)
            write(root / str(race), go, say, held)
            os._exit(0)
        writers.append(child)
    for end in (go, say, held):
        os.close(end)
    os.close(start)
    with os.fdopen(said) as lines:
        heard = [next(lines).strip() for _ in writers]
        if race % 2:  # the one that holds the lock dies with it
            for child in writers:
                os.kill(child, signal.SIGKILL)
        os.close(release)
        for child in writers:
            os.waitpid(child, 0)
    print(json.dumps(heard), flush=True)
"""


@pytest.mark.parametrize("races", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_of_writers_that_race_one_wins_and_a_killed_one_leaves_no_lock(
    memory: Path, races: int, tried: Callable[[int, str], None]
) -> None:
    tried(races, "races")
    done = run_code(RACES, memory, races)
    assert done.returncode == 0, done.stderr
    for race, line in enumerate(done.stdout.splitlines()):
        heard = Counter(json.loads(line))
        assert heard.pop("won") == 1
        assert sum(heard.values()) == 1 + race % 3
        for refused in heard:
            # folders and the lock's own file are made before it can be tried
            kinds = json.loads(refused.removeprefix("refused ").replace("'", '"'))
            assert set(kinds) <= {"create", "fsync", "mkdir"}
        split = ActivationSplit(memory / str(race), "1e", "train")
        assert len(split.missing_shards()) == (split.record.shards if race % 2 else 0)
        assert find_damage(split) == []
        if race % 10 == 1:
            assert small().write(memory / str(race)).verify() == []
    assert len(done.stdout.splitlines()) == races


# several processes write different splits of one store, whose shared files they take turns with
NEIGHBOURS = """
import os, sys
from pathlib import Path
import torch
from faults import small

torch.set_num_threads(1)
splits = [small(tag=t, split=s) for t in ("0e", "1e") for s in ("train", "dev")]
for made in splits:
    made.stats()
for round in range(int(sys.argv[2])):
    children = []
    for made in splits:
        if not (child := os.fork()):
            made.write(Path(sys.argv[1], str(round)))
            os._exit(0)
        children.append(child)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
"""


def test_writers_of_different_splits_share_a_store(memory: Path) -> None:
    done = run_code(NEIGHBOURS, memory, 3)
    assert done.returncode == 0, done.stderr
    for store in memory.iterdir():
        for tag in ("0e", "1e"):
            for name in ("train", "dev"):
                split = ActivationSplit(store, tag, name).require_complete()
                assert split.verify() == []


def test_threads_that_own_whole_shards_lose_none(memory: Path) -> None:
    made = Made([20] * 90, encoding="int8")
    whole = made.write(memory / "whole")
    assert made.plan.n_shards == 30
    for threads in (2, 4, 8):
        store = memory / str(threads)
        with (
            open_writer(store, made.spec, made.contents, made.stats) as writer,
            ThreadPoolExecutor(threads) as pool,
        ):
            order = random.Random(threads).sample(writer.pending(), 30)
            list(pool.map(lambda shard, w=writer: made.write_shard(w, shard), order))
        assert contents(store) == contents(memory / "whole")
    assert whole.verify() == []


def test_a_lock_is_refused_with_what_its_holder_does(tmp_path: Path) -> None:
    with (
        exclusive(tmp_path / ".lock", "writing 1e/train"),
        pytest.raises(LockedError, match="another process is writing 1e/train: wait for it"),
        exclusive(tmp_path / ".lock", "writing 1e/train"),
    ):
        pass
    with exclusive(tmp_path / ".lock", "writing 1e/train"):
        pass  # free again


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_where_there_are_no_locks_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nor is a file put there that stands for a lock, and would after its writer was killed."""

    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with pytest.raises(StoreError, match="has no locks .* work in a folder of a local disk"):
            small().write(tmp_path / "store")
    assert not (tmp_path / "store/arrays.zarr").exists()


def test_a_mount_that_cannot_flush_a_folder_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every such error of a file counts."""

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) or fails:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    fails = False
    assert small().write(tmp_path / "store").verify() == []
    fails = True
    with pytest.raises(OSError, match="Invalid argument"):
        small().write(tmp_path / "other")


class Quota:
    """Lets so many bytes be written, then says what a full disk says."""

    def __init__(self, most: int) -> None:
        self.left = most

    def __call__(self, _: int, op: Op) -> int | None:
        if op.kind != "write":
            return None
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        part = min(self.left, len(op.data))
        self.left -= part
        return part  # the system writes what fits, and fails at the next try


def refused(store: Path, before: object) -> None:
    """A write that meets a full disk: one clear error, the store opens, and it goes on later."""
    recorder = Recorder(store, before)  # type: ignore[arg-type]
    with recorder.recording(), pytest.raises(DiskSpaceError, match="No space left.*goes on from"):
        small().write(store)
    assert not list(store.rglob("*.tmp"))  # it does not take the space that is to be freed
    check_opens(store)


def check_opens(store: Path) -> None:
    if (store / "ledger/1e/train/split.json").exists():
        split = ActivationSplit(store, "1e", "train")
        assert all("arrays.zarr/" in what for what, _ in find_damage(split))
        assert len(split.ledger.shards() | set(split.missing_shards())) == 3


def test_a_disk_that_fills_anywhere_is_one_clear_error_and_loses_nothing(
    memory: Path, tried: Callable[[int, str], None]
) -> None:
    recorder = Recorder(memory / "whole")
    with recorder.recording():
        small().write(memory / "whole")
    expected = contents(memory / "whole")
    total = sum(len(op.data) for op in recorder.ops)
    tried(21 + 4 * 5, "full disks")
    sizes = [0, 1, *(total * i // 19 for i in range(1, 19)), total - 1]
    for size in sizes:
        store = memory / f"quota-{size}"
        refused(store, Quota(size))
        small().write(store)
        assert contents(store) == expected
    for kind in ("create", "mkdir", "fsync", "rename"):
        numbers = [i for i, op in enumerate(recorder.ops) if op.kind == kind]
        for number in random.Random(0).sample(numbers, 5):

            def full(i: int, op: Op, number: int = number, kind: str = kind) -> None:
                if i == number and op.kind == kind:
                    raise OSError(errno.ENOSPC, "No space left on device")

            store = memory / f"full-{number}"
            refused(store, full)
            small().write(store)
            assert contents(store) == expected


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A small file system in memory; skips the test where none may be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(folder)]
    try:
        allowed = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if allowed.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {allowed.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def resize(folder: Path, kib: int) -> None:
    command = ["mount", "-o", f"remount,size={kib}k", str(folder)]
    subprocess.run(command, check=True, capture_output=True)


def test_a_small_disk_that_is_really_full(tmp_path: Path) -> None:
    small().write(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    pages = sum(-(-len(data) // 4096) for data in expected.values())
    met = 0
    with disk(tmp_path / "disk") as folder:
        for i in range(20):
            store = folder / f"store-{i}"
            resize(folder, 4 * (1 + pages * i // 20))
            with pytest.raises(DiskSpaceError, match="No space left.*goes on from there"):
                small().write(store)
            met += 1
            check_opens(store)
            resize(folder, 1 << 14)
            small().write(store)
            assert contents(store) == expected
            subprocess.run(["rm", "-r", store], check=True)
    assert met == 20


def test_a_snapshot_that_does_not_fit_is_one_clear_error_and_can_be_saved_again(
    tiny_bert: Path, tmp_path: Path
) -> None:
    from bertvision.pipelines.encoders.loading import load_model, load_tokenizer
    from bertvision.pipelines.files import write_json
    from bertvision.pipelines.tasks.data import TaskConfig
    from bertvision.pipelines.workspace.config import (
        DataConfig,
        FinetuneConfig,
        ModelConfig,
        WorkspaceConfig,
    )
    from bertvision.pipelines.workspace.snapshots import load_snapshot, save_snapshot

    model, tokenizer = (
        load_model(tiny_bert, AutoModelForQuestionAnswering),
        load_tokenizer(tiny_bert),
    )
    config = WorkspaceConfig(
        model=ModelConfig(
            name_or_path="tiny", weights_sha256="0" * 64, hidden_size=32, num_hidden_layers=2
        ),
        task=TaskConfig(),
        data={"train": DataConfig(source="/train.json", sha256="0" * 64, questions=1)},
        finetune=FinetuneConfig(save_at=("1e",)),
    )

    def save(folder: Path) -> None:
        tag = SnapshotTag("1e")
        save_snapshot(folder, model, tokenizer, config, tag=tag, step=1, steps_per_epoch=1)

    save(tmp_path / "whole")
    pages = sum(-(-len(data) // 4096) for data in contents(tmp_path / "whole").values())
    with disk(tmp_path / "disk") as folder:
        for i in range(20):
            resize(folder, 4 * (1 + pages * i // 20))
            with pytest.raises(DiskSpaceError, match="No space left.*goes on from there"):
                save(folder / "1e")
            assert [path for path in folder.iterdir() if path.suffix != ".lock"] == []
        resize(folder, 1 << 14)
        save(folder / "1e")
        assert load_snapshot(folder / "1e").info.step == 1
        write_json(folder / "settings.json", {"before": 1})
        resize(folder, 4 * (1 + pages))
        with pytest.raises(DiskSpaceError):
            write_json(folder / "settings.json", {"after": "x" * (1 << 16)})
        assert json.loads((folder / "settings.json").read_text()) == {"before": 1}
