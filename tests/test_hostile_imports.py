"""Hidden states in damaged, hostile or ambiguous files: refused by name, or taken as they are."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreigners
import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc
import pytest
import torch
from processes import run_code
from safetensors.torch import save_file
from test_hostile_records import SLOW
from test_import_states import beside, bring, held, split_of

from bertvision.errors import InputError, NonFiniteError

HARMS = """
import json, random, shutil, sys
from pathlib import Path
import torch
import foreigners, bertvision
from bertvision.errors import BertvisionError

torch.set_num_threads(1)
kind, root, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
source, store, chance = getattr(foreigners, kind)(root / "source"), root / "store", random.Random(5)
files, taken, longest = sorted(source.iterdir()), 0, 0
for _ in range(count):
    path = chance.choice(files)
    whole = path.read_bytes()
    harmed = bytearray(whole)
    at = chance.randrange(len(whole) if chance.random() < 0.3 else min(400, len(whole)))
    match chance.choice(["flip", "flip", "byte", "cut", "word"]):
        case "flip":
            harmed[at] ^= 1 << chance.randrange(8)
        case "byte":
            harmed[at] = chance.choice([0, 1, 127, 128, 255])
        case "word":
            words = [b"\\xff\\xff\\xff\\x7f", b"\\0\\0\\0\\x80", bytes(4)]
            harmed[at : at + 4] = chance.choice(words)
        case "cut":
            del harmed[at:]
    print(path.name, at, bytes(harmed[at : at + 4]), file=sys.stderr)
    path.write_bytes(harmed)
    shutil.rmtree(store, ignore_errors=True)
    try:
        bertvision.import_states(source, "0e/s", store=store, encoding="bfloat16")
        assert bertvision.ActivationStore.open(store)["0e/s"].verify() == []
        taken += 1
    except BertvisionError as error:
        longest = max(longest, len(str(error)))
    path.write_bytes(whole)
print(json.dumps([taken, longest]))
"""


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=SLOW)])
@pytest.mark.parametrize("kind", ["saelens", "speculators", "numpy_files", "flat", "deepspec"])
def test_no_damage_ends_in_a_traceback_or_the_death_of_the_process(
    kind: str, count: int, tmp_path: Path, tried: Callable[[int, str], None]
) -> None:
    ended = run_code(HARMS, kind, tmp_path, count)
    assert ended.returncode == 0, ended.stderr[-2000:]
    taken, longest = json.loads(ended.stdout)
    assert 0 < taken < count
    assert longest < 1500
    tried(count, "damaged files to import")


def arrow(folder: Path, table: pa.Table, compression: str | None = None) -> Path:
    folder.mkdir(parents=True)
    options = ipc.IpcWriteOptions(compression=compression)
    with (
        pa.OSFile(str(folder / "d.arrow"), "wb") as file,
        ipc.new_stream(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "d.arrow"}]}))
    return folder


def rows(*lengths: int, hidden: int = 8) -> pa.Array:
    values = [[[i + 0.5] * hidden] * n for i, n in enumerate(lengths)]
    return pa.array(values, pa.list_(pa.list_(pa.float32())))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((0, 3, 5), (1, 4, 6)),
        ((0, 3, 5), (0, -5, 5)),
        ((0, 8, 16, 24, 32, 40), tuple(range(2_000_000, 2_000_048, 8))),
        ((0, 8, 16, 24, 32, 40), tuple(range(4, 52, 8))),
    ],
)
def test_offsets_that_lead_out_of_an_arrow_file_are_refused(
    old: tuple[int, ...], new: tuple[int, ...], tmp_path: Path
) -> None:
    path = arrow(tmp_path / "source", pa.table({"hidden_states": rows(3, 2)})) / "d.arrow"
    before, after = (struct.pack(f"<{len(x)}i", *x) for x in (old, new))
    whole = path.read_bytes()
    assert whole.count(before) == 1
    path.write_bytes(whole.replace(before, after))
    code = """
import sys, bertvision
try:
    bertvision.import_states(sys.argv[1], "0e/s", store=sys.argv[2])
except bertvision.errors.InputError as error:
    print(error)
"""
    ended = run_code(code, tmp_path / "source", tmp_path / "store")  # it may die of a signal
    assert ended.returncode == 0, ended.stderr
    assert "d.arrow is damaged, cut off or missing" in ended.stdout


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_what_would_grow_as_it_is_read_is_refused(compression: str, tmp_path: Path) -> None:
    table = pa.table({"hidden_states": rows(9000, 3)})
    source = arrow(tmp_path / "source", table, compression)
    with pytest.raises(InputError, match=r"^[^:]*d\.arrow is compressed"):
        bring(source, tmp_path / "store")
    empty = pa.array([[]] * 5000, pa.list_(pa.list_(pa.float32(), 2), 0))
    with pytest.raises(InputError, match="5,000 rows, more than bytes"):
        bring(arrow(tmp_path / "empty", pa.table({"hidden_states": empty})), tmp_path / "store")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("speculators", "hs_4.safetensors"),
        ("numpy_files", "text-4.npy"),
        ("numpy_files", "text-4.input_ids.npy"),
        ("flat", "lengths.npy"),
        ("flat", "keys.json"),
        ("saelens", "data-00001-of-00002.arrow"),
        ("saelens", "state.json"),
        ("deepspec", "samples.idx"),
        ("deepspec", "manifest.json"),
        ("deepspec", "shard-00001.bin"),
    ],
)
def test_what_is_no_file_is_refused_and_not_waited_for(
    make: Callable[[Path], object], kind: str, name: str, tmp_path: Path
) -> None:
    source = getattr(foreigners, kind)(tmp_path / "source")
    (source / name).unlink()
    make(source / name)
    with pytest.raises(InputError, match=name.partition(".")[0].replace("shard-00001", "shard 1")):
        bring(source, tmp_path / "store")


def test_a_pipe_is_no_source(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "states.npy")
    with pytest.raises(InputError, match=r"states\.npy is no file"):
        bring(tmp_path / "states.npy", tmp_path / "store")


def test_numbers_of_other_machines_are_taken_right(tmp_path: Path) -> None:
    states = foreigners.states(0).numpy()
    (tmp_path / "source").mkdir()
    np.save(tmp_path / "source" / "a.npy", states.astype(">f4"))
    np.save(tmp_path / "source" / "a.input_ids.npy", np.arange(len(states), dtype=">i8"))
    bring(tmp_path / "source", tmp_path / "store")
    assert torch.equal(held(tmp_path / "store")["a"], torch.from_numpy(states))
    assert beside(tmp_path / "store", "input_ids")["a"] == list(range(len(states)))
    flat = foreigners.flat(tmp_path / "flat")
    for path in flat.glob("*.npy"):
        array = np.load(path)
        np.save(path, array.astype(array.dtype.newbyteorder(">")))
    bring(flat, tmp_path / "other")
    assert torch.equal(held(tmp_path / "other")["text-0"], torch.from_numpy(states))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.bool])
def test_token_ids_that_are_no_whole_numbers_are_refused_by_type(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    sample = {"hidden_states": torch.ones(5, 2, 8), "token_ids": torch.ones(5).to(dtype)}
    (tmp_path / "source").mkdir()
    save_file(sample, tmp_path / "source" / "hs_0.safetensors")
    with pytest.raises(InputError, match=f"token ids of {dtype}, which are no whole numbers"):
        bring(tmp_path / "source", tmp_path / "store")


def test_rows_without_hidden_states_are_named_and_left_out_where_that_is_asked(
    tmp_path: Path,
) -> None:
    states = pa.array([*rows(3).to_pylist(), None, *rows(2).to_pylist()], rows(1).type)
    source = arrow(tmp_path / "source", pa.table({"hidden_states": states}))
    with pytest.raises(InputError, match=r"row 1 of .* has no hidden states"):
        bring(source, tmp_path / "store")
    done = bring(source, tmp_path / "store", skip_bad=True)
    assert (done.examples, list(done.skipped)) == (2, ["1"])


@pytest.mark.parametrize("kind", ["uint64", "int32", "float16", "bool"])
def test_labels_keep_their_type(kind: str, tmp_path: Path) -> None:
    values = np.array([1, 2**63 + 1 if kind == "uint64" else 0]).astype(kind)
    labels = pa.array(values, getattr(pa, {"bool": "bool_"}.get(kind, kind))())
    table = pa.table({"hidden_states": rows(3, 2), "labels.y": labels})
    bring(arrow(tmp_path / "source", table), tmp_path / "store")
    found = split_of(tmp_path / "store").labels["y"]
    assert (found.dtype.name, found.tolist()) == (kind, values.tolist())


@pytest.mark.parametrize(
    ("states", "scales", "product"),
    [
        ((5, 1, 1), (1, 7, 9), None),
        ((5, 2, 8), (5,), None),
        ((5, 2, 8), (1, 5, 1, 1), None),
        ((5, 8), (5, 5, 8), None),
        ((5, 2, 8), (5, 2, 1), (5, 2, 8)),
        ((5, 2, 8), (), (5, 2, 8)),
        ((5, 8), (5, 1), (5, 1, 8)),
    ],
)
def test_scales_make_states_no_larger(
    states: tuple[int, ...],
    scales: tuple[int, ...],
    product: tuple[int, ...] | None,
    tmp_path: Path,
) -> None:
    (tmp_path / "source").mkdir()
    sample = {"hidden_states": torch.ones(states), "hidden_states_scales": torch.full(scales, 0.5)}
    save_file(sample, tmp_path / "source" / "hs_0.safetensors")
    if product is None:
        with pytest.raises(InputError, match="hidden_states_scales of shape .* are not those"):
            bring(tmp_path / "source", tmp_path / "store")
    else:
        bring(tmp_path / "source", tmp_path / "store")
        found = held(tmp_path / "store")["0"]
        assert torch.equal(found, torch.full(product, 0.5))


def test_a_folder_with_several_kinds_of_files_is_imported_by_the_kind_that_is_named(
    tmp_path: Path,
) -> None:
    source = foreigners.speculators(tmp_path / "source")
    np.save(source / "a.npy", foreigners.states(1).numpy())
    (source / "README.md").write_text("Mine.")
    with pytest.raises(InputError, match="safetensors and npy, .* --format safetensors or --form"):
        bring(source, tmp_path / "store")
    assert bring(source, tmp_path / "npy", format="npy").source == "NumPy files"
    assert bring(source, tmp_path / "store", format="safetensors").source == "safetensors"
    with pytest.raises(InputError, match="--format arrow: .* holds safetensors and npy"):
        bring(source, tmp_path / "store", format="arrow")
    with pytest.raises(InputError, match="--format"):
        bring(source, tmp_path / "store", format="zip")


def test_hidden_files_of_the_system_are_no_samples(tmp_path: Path) -> None:
    source = foreigners.speculators(tmp_path / "source")
    (source / "._hs_0.safetensors").write_bytes(b"\0\5\x16\7")
    (source / "._hs_0.npy").write_bytes(b"\0\5\x16\7")
    assert bring(source, tmp_path / "store").examples == len(foreigners.LENGTHS)


def test_an_array_that_may_be_two_things_needs_lengths(tmp_path: Path) -> None:
    states = torch.stack([foreigners.states(i, 5, 1)[:, 0] for i in range(6)]).numpy()
    np.save(tmp_path / "states.npy", states)
    with pytest.raises(
        InputError, match=r"\(6, 5, 8\) may be \(samples, seq, hidden\) or .*--leng"
    ):
        bring(tmp_path / "states.npy", tmp_path / "store")
    np.save(tmp_path / "lengths.npy", np.full(6, 5))
    found = bring(tmp_path / "states.npy", tmp_path / "a", lengths=tmp_path / "lengths.npy")
    assert (found.examples, len(found.layers)) == (6, 1)
    np.save(tmp_path / "lengths.npy", np.array([4, 2]))
    found = bring(tmp_path / "states.npy", tmp_path / "b", lengths=tmp_path / "lengths.npy")
    assert (found.examples, len(found.layers)) == (2, 5)
    np.save(tmp_path / "ids.npy", np.arange(30).reshape(6, 5))
    found = bring(tmp_path / "states.npy", tmp_path / "c", input_ids=tmp_path / "ids.npy")
    assert (found.examples, len(found.layers)) == (6, 1)


def test_a_column_with_layers_of_its_own_names_none_of_them(tmp_path: Path) -> None:
    layered = pa.array([[[[1.0] * 8] * 2] * 3], pa.list_(pa.list_(pa.list_(pa.float32()))))
    found = bring(arrow(tmp_path / "source", pa.table({"h": layered})), tmp_path / "store")
    assert found.layers == ["stored 0", "stored 1"]
    with pytest.raises(InputError, match="2 layers, and 1 is named: x: name each layer once with"):
        bring(tmp_path / "source", tmp_path / "other", layers="x")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"h": pa.array([[1.0]] * 3)}, "none of them holds sequences of vectors: give a row for"),
        ({"h": rows(1, 1, 1), "id": ["x", "y", "x"]}, "rows 0 and 2 both have the id 'x'"),
        ({"h": rows(1, 1), "id": ["x", None]}, "row 1 has no id"),
        ({"h": rows()}, "has no rows"),
    ],
)
def test_data_sets_that_do_not_fit_say_what_is_due(
    table: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        bring(arrow(tmp_path / "source", pa.table(table)), tmp_path / "store")


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ({"hidden_states": torch.ones(1, 5, 2, 8)}, r"leave the axis of the batch out"),
        ({"hidden_states": torch.ones(0, 2, 8)}, "a sample without tokens is none"),
        (
            {"hidden_states": torch.ones(3, 5, 8), "token_ids": torch.arange(5)},
            r"it seems; save them as \(tokens, layers, hidden\)",
        ),
        ({"blocks.0": torch.ones(1)}, r"it has blocks.0; save the states of all layers as hidden"),
    ],
)
def test_samples_of_another_form_say_what_is_due(
    sample: dict[str, torch.Tensor], said: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    save_file(sample, tmp_path / "source" / "hs_0.safetensors")
    with pytest.raises(InputError, match=said):
        bring(tmp_path / "source", tmp_path / "store")


def test_values_that_are_no_numbers_name_the_options_of_an_import(tmp_path: Path) -> None:
    states = foreigners.states(0).clone()
    states[1, 0, 2] = float("nan")
    (tmp_path / "source").mkdir()
    save_file({"hidden_states": states}, tmp_path / "source" / "hs_0.safetensors")
    for encoding in ("int8", "bfloat16"):
        with pytest.raises(NonFiniteError, match="NaN.*--skip-bad") as caught:
            bring(tmp_path / "source", tmp_path / encoding, encoding=encoding)
        assert "nonfinite=" not in str(caught.value)
