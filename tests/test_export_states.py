"""A split as files of others: the values of the store, whole or absent, and back again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from faults import Op, Recorder
from processes import run_code
from safetensors import safe_open
from safetensors.torch import load_file
from stores import Made
from terminal import done, run

import bertvision
from bertvision.errors import BertvisionError, InputError, LockedError, NonFiniteError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.storage.lock import exclusive
from bertvision.featurestore.store import ActivationStore

FORMATS = ("safetensors", "npy", "arrow")
LENGTHS = [30, 5, 40, 17, 22, 9, 60, 3, 12, 28, 35, 1]


def made(root: Path, encoding: str = "float16") -> ActivationSplit:
    """A permuted split of extraction, several shards of 64 tokens."""
    return Made(LENGTHS, encoding=encoding).write(root / "store")


def written(root: Path, keys: list[str]) -> ActivationSplit:
    """A split that was written by keys."""
    store = ActivationStore.create(root / "store")
    given: dict[str, Any] = {"hidden_size": 4, "layers": ["a", "b"], "encoding": "float16"}
    with store.writer("1e", "train", shard_tokens=16, **given) as writer:
        for i, key in enumerate(keys):
            states = torch.full((i + 2, 2, 4), float(i))
            ids = torch.arange(i + 2)
            labels = {"kind": i, "pair": [i, -i]}
            writer.add(key, states, input_ids=ids, labels=labels, fields={"mask": ids % 2 == 0})
        found: ActivationSplit = writer.finish(3)
    return found


def send(root: Path, kind: str, **options: Any) -> Any:
    given: dict[str, Any] = {"format": kind, "store": root / "store", **options}
    return bertvision.export_states("1e/train", root / kind, **given)


def content(split: ActivationSplit) -> dict[str, torch.Tensor]:
    """Hidden states (seq, layers, hidden) by key."""
    keys, rows = split.table()["id"].to_pylist(), split.plan.example_id.tolist()
    return {keys[row]: split[i].transpose(1, 2) for i, row in enumerate(rows)}


def back(root: Path, kind: str, encoding: str = "float16") -> ActivationSplit:
    """An export, imported again."""
    bertvision.import_states(root / kind, "1e/again", store=root / "back", encoding=encoding)
    found: ActivationSplit = ActivationStore.open(root / "back")["1e/again"]
    return found


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_round_trip_gives_the_same_values_bit_for_bit(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    split = made(tmp_path)
    sent = send(tmp_path, kind, dtype=dtype)
    assert (sent.examples, sent.written) == (len(LENGTHS), len(LENGTHS))
    again = back(tmp_path, kind, dtype)
    due, found = content(split), content(again)
    assert found.keys() == due.keys()
    assert all(torch.equal(found[key], due[key]) for key in due)
    assert again.record.layers == split.record.layers
    first, n = again.plan.first_token, again.plan.n_tokens
    keys = again.table()["id"].to_pylist()
    of = {keys[row]: i for i, row in enumerate(again.plan.example_id.tolist())}
    starts = np.cumsum(LENGTHS) - LENGTHS
    for key, i in of.items():
        row = int(key.removeprefix("q"))
        tokens = np.arange(LENGTHS[row]) + starts[row]
        assert again.array("input_ids")[first[i] :][: n[i]].tolist() == tokens.tolist()
        offsets = again.array("offset_mapping")[first[i] :][: n[i]]
        assert offsets.tolist() == np.stack([tokens, tokens + 1], 1).tolist()
        assert again.labels["start_positions"][i] == row


@pytest.mark.parametrize("kind", FORMATS)
def test_a_round_trip_of_int8_stays_within_its_error(tmp_path: Path, kind: str) -> None:
    split = made(tmp_path, "int8")
    send(tmp_path, kind, dtype="float16")
    due, found = content(split), content(back(tmp_path, kind, "int8"))
    for key, states in due.items():
        assert float((found[key] - states).norm() / states.norm()) < 2e-2


@pytest.mark.parametrize("kind", FORMATS)
def test_keys_labels_and_fields_come_back(tmp_path: Path, kind: str) -> None:
    keys = ["z/../../etc", "../up", "b", "a\\b", "C:x", "é ü", "10", "2"]
    split = written(tmp_path, keys)
    send(tmp_path, kind)
    again = back(tmp_path, kind)
    assert content(again).keys() == set(keys)
    assert all(torch.equal(content(again)[key], content(split)[key]) for key in keys)
    assert again.layer_names == ["a", "b"]
    ids = again.table()["id"].to_pylist()
    for i, row in enumerate(again.plan.example_id.tolist()):
        number = keys.index(ids[row])
        assert again.labels["kind"][i] == number
        assert again.labels["pair"][i].tolist() == [number, -number]
        begin = int(again.plan.first_token[i])
        mask = again.array("mask")[begin : begin + number + 2]
        assert mask.tolist() == [n % 2 == 0 for n in range(number + 2)]


def test_no_key_becomes_a_path(tmp_path: Path) -> None:
    written(tmp_path, ["../up", "/etc/x", "a/b"])
    before = set(tmp_path.rglob("*"))
    send(tmp_path, "safetensors")
    files = {path.name for path in set(tmp_path.rglob("*")) - before}
    numbered = {f"hs_{i}.safetensors" for i in range(3)}
    assert files == numbered | {"safetensors", "export.json", ".safetensors.export.lock"}


def test_keys_that_are_numbers_are_those_of_the_files_as_speculators_counts(
    tmp_path: Path,
) -> None:
    written(tmp_path, ["2", "10", "0"])
    send(tmp_path, "safetensors", dtype="float16")
    sample = load_file(tmp_path / "safetensors" / "hs_10.safetensors")
    assert sample["hidden_states"].shape == (3, 2, 4)
    assert sample["hidden_states"].dtype == torch.float16
    assert sample["token_ids"].tolist() == [0, 1, 2]
    assert sample["token_ids"].dtype == torch.int64
    with safe_open(tmp_path / "safetensors" / "hs_10.safetensors", "pt") as file:
        assert file.metadata()["key"] == "10"


def test_datasets_opens_an_arrow_export(tmp_path: Path) -> None:
    split = made(tmp_path)
    send(tmp_path, "arrow", dtype="float16", layers="2,0")
    data = load_from_disk(str(tmp_path / "arrow")).with_format("numpy")
    assert len(data) == len(LENGTHS)
    row = data[5]
    i = split.plan.example_id.tolist().index(int(row["id"][1:]))
    assert data.features["hidden_states"].dtype == "float16"
    due = split.read([i], layers=[2, 0]).hidden_states.numpy()
    assert np.array_equal(row["hidden_states"], due)
    assert len(row["input_ids"]) == len(due)


def test_an_array_is_in_the_order_of_the_data_and_maps_into_memory(tmp_path: Path) -> None:
    split = made(tmp_path)
    send(tmp_path, "npy")
    states = np.load(tmp_path / "npy" / "hidden_states.npy", mmap_mode="r")
    lengths = np.load(tmp_path / "npy" / "lengths.npy")
    assert lengths.tolist() == LENGTHS
    due = torch.cat([content(split)[f"q{i}"] for i in range(len(LENGTHS))])
    assert np.array_equal(states, due.numpy())


DYING = """
import os, signal, sys
from pathlib import Path
import torch
import bertvision
import bertvision.pipelines.foreign.exporting
from faults import Recorder

torch.set_num_threads(1)
store, root, kind = sys.argv[1:4]
if kind == "arrow":
    import datasets
for point in sys.argv[4:]:
    if os.fork():
        os.wait()
        continue

    def before(i, op):
        if i == int(point):
            os.kill(os.getpid(), signal.SIGKILL)

    folder = Path(root, point)
    with Recorder(folder, before).recording():
        bertvision.export_states("1e/train", folder, format=kind, store=store)
    os._exit(1)
"""


def files(folder: Path) -> dict[str, bytes]:
    """The contents of files that have names of their own, by name."""
    paths = (path for path in folder.iterdir() if not path.name.startswith("."))
    return {path.name: path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", FORMATS)
def test_killed_anywhere_the_same_call_ends_the_same_and_nothing_looks_whole_before(
    memory: Path, kind: str
) -> None:
    made(memory)
    recorder = Recorder(memory / "whole")
    given: dict[str, Any] = {"format": kind, "store": memory / "store"}
    with recorder.recording():
        bertvision.export_states("1e/train", memory / "whole", **given)
    whole = files(memory / "whole")
    count = len(recorder.ops)
    points = [count * part // 8 for part in range(1, 8)]
    ended = run_code(DYING, memory / "store", memory, kind, *points)
    assert ended.returncode == 0, ended.stderr
    left = []
    for point in points:
        folder = memory / str(point)
        for name, data in files(folder).items() if folder.exists() else ():
            assert data == whole[name] or name == "export.json", recorder.ops[point]
        if (folder / "export.json").exists() and "true" not in (folder / "export.json").read_text():
            with pytest.raises(InputError, match="was not finished"):
                bertvision.import_states(folder, "0e/x", store=memory / "other")
        left.append(bertvision.export_states("1e/train", folder, **given).written)
        assert files(folder) == whole, recorder.ops[point]
    assert left == sorted(left, reverse=True)
    assert len(LENGTHS) >= left[0] > left[-1]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "npy").mkdir()
    (tmp_path / "npy" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="is there and no export"):
        send(tmp_path, "npy")
    assert [path.name for path in (tmp_path / "npy").iterdir()] == ["mine.txt"]
    send(tmp_path, "safetensors")
    with pytest.raises(InputError, match="an export with dtype = 'float32', now it is 'float16'"):
        send(tmp_path, "safetensors", dtype="float16")
    with pytest.raises(InputError, match=r"an export with layers = \[0, 1, 2\]"):
        send(tmp_path, "safetensors", layers=[1])
    ActivationStore.open(tmp_path / "store").remove("1e", "train")
    Made(LENGTHS[:5], encoding="float16").write(tmp_path / "store")
    with pytest.raises(InputError, match="an export with examples = 12"):
        send(tmp_path, "safetensors")
    assert send(tmp_path, "arrow").written == 5


def test_a_file_that_was_damaged_since_is_named_and_written_again(tmp_path: Path) -> None:
    made(tmp_path)
    send(tmp_path, "safetensors")
    path = tmp_path / "safetensors" / "hs_4.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="hs_4.safetensors is damaged, or of another export"):
        send(tmp_path, "safetensors")
    os.unlink(path)
    assert send(tmp_path, "safetensors").written == 1
    assert path.read_bytes() == whole


def test_what_float16_does_not_hold_is_refused_by_its_key(tmp_path: Path) -> None:
    store = ActivationStore.create(tmp_path / "store")
    with store.writer("1e", "train", hidden_size=2, layers=[0], encoding="float32") as writer:
        writer.add("small", torch.ones(3, 1, 2))
        writer.add("large", torch.full((3, 1, 2), 7e4))
        writer.finish()
    with pytest.raises(NonFiniteError, match="'large' of 1e/train holds values beyond 65,504"):
        send(tmp_path, "npy", dtype="float16")
    send(tmp_path, "arrow", dtype="float32")


def test_one_process_exports_to_a_folder_at_a_time(tmp_path: Path) -> None:
    made(tmp_path)
    with (
        exclusive(tmp_path / ".npy.export.lock", "exporting"),
        pytest.raises(LockedError, match="another process is exporting to"),
    ):
        send(tmp_path, "npy")


def test_a_full_disk_is_said_and_the_same_call_goes_on(tmp_path: Path) -> None:
    made(tmp_path)

    def full(_: int, op: Op) -> None:
        if op.kind == "write" and "hs_6" in op.path:
            raise OSError(28, "No space left on device")

    with (
        Recorder(tmp_path / "safetensors", full).recording(),
        pytest.raises(BertvisionError, match="No space left on the disk"),
    ):
        send(tmp_path, "safetensors")
    assert 0 < send(tmp_path, "safetensors").written < len(LENGTHS)


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    made(tmp_path)
    words = ("store", "export", "1e/train", tmp_path / "out", "--store", tmp_path / "store")
    said = done(*words, "--format", "npy", "--dtype", "float16", "--layers", "-1")
    assert said.startswith(f"1e/train: 12 examples in {tmp_path / 'out'}, npy, float16, ")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["layers"] == [2]
    shutil.rmtree(tmp_path / "out")
    result = run(*words, "--format", "parquet")
    assert result.exit_code == 2
    assert "--format 'parquet': choose one of safetensors, npy, arrow" in result.stderr
