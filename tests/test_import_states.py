"""Hidden states that other programs wrote become a split: every value, once, under its key."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreigners
import numpy as np
import pytest
import torch
from datasets import Dataset
from faults import Recorder
from foreigners import HIDDEN, LAYERS, LENGTHS
from processes import run_code
from safetensors.torch import load_file, save_file
from terminal import done, run

import bertvision
from bertvision.errors import InputError, NonFiniteError, ProvenanceError
from bertvision.featurestore.split import ActivationSplit
from bertvision.featurestore.store import ActivationStore
from bertvision.jobs.foreign import Imported

ROWS = range(len(LENGTHS))


def bring(source: Path, store: Path, **options: Any) -> Imported:
    given: dict[str, Any] = {"encoding": "bfloat16", **options}
    return bertvision.import_states(source, "0e/s", store=store, **given)


def split_of(store: Path) -> ActivationSplit:
    found: ActivationSplit = ActivationStore.open(store)["0e/s"]
    return found


def held(store: Path) -> dict[str, torch.Tensor]:
    """The hidden states (tokens, layers, hidden) of the split by key."""
    split = split_of(store)
    assert split.verify() == []
    keys = split.table()["id"].to_pylist()
    rows = split.plan.example_id.tolist()
    return {keys[row]: split[i].transpose(1, 2) for i, row in enumerate(rows)}


def beside(store: Path, name: str) -> dict[str, list[Any]]:
    """An array of tokens by key."""
    split = split_of(store)
    keys, array = split.table()["id"].to_pylist(), split.array(name)
    first, n, rows = split.plan.first_token, split.plan.n_tokens, split.plan.example_id
    return {keys[row]: array[first[i] :][: n[i]].tolist() for i, row in enumerate(rows)}


def same(found: dict[str, torch.Tensor], due: dict[str, torch.Tensor]) -> bool:
    return found.keys() == due.keys() and all(torch.equal(found[k], due[k]) for k in due)


@pytest.mark.parametrize(
    ("write", "name", "layers"),
    [
        (foreigners.speculators, "{}", ["stored 0", "stored 1", "stored 2"]),
        (foreigners.deepspec, "{}", ["hidden state 2", "hidden state 10", "last, normed"]),
        (foreigners.numpy_files, "text-{}", ["stored 0", "stored 1", "stored 2"]),
        (foreigners.flat, "text-{}", ["stored 0", "stored 1", "stored 2"]),
    ],
)
def test_every_value_and_every_id_is_stored_under_its_key(
    tmp_path: Path, write: Callable[[Path], Path], name: str, layers: list[str]
) -> None:
    done = bring(write(tmp_path / "source"), tmp_path / "store")
    assert (done.examples, done.added, done.layers) == (len(LENGTHS), len(LENGTHS), layers)
    assert same(held(tmp_path / "store"), {name.format(i): foreigners.states(i) for i in ROWS})
    ids = {name.format(i): foreigners.token_ids(i).tolist() for i in ROWS}
    assert beside(tmp_path / "store", "input_ids") == ids


def test_cached_activations_of_saelens_are_one_layer_with_the_name_of_the_hook(
    tmp_path: Path,
) -> None:
    done = bring(foreigners.saelens(tmp_path / "source"), tmp_path / "store")
    assert done.layers == ["blocks.0.hook_mlp_out"]
    due = {str(i): foreigners.states(i, 6, 1) for i in ROWS}
    assert same(held(tmp_path / "store"), due)
    assert beside(tmp_path / "store", "input_ids")["11"] == foreigners.token_ids(11, 6).tolist()


def test_what_lies_beside_the_states_comes_along(tmp_path: Path) -> None:
    bring(foreigners.flat(tmp_path / "flat"), tmp_path / "store")
    split = split_of(tmp_path / "store")
    keys = split.table()["id"].to_pylist()
    family = {keys[r]: split.labels["family"][i] for i, r in enumerate(split.plan.example_id)}
    assert family == {f"text-{i}": i % 3 for i in ROWS}
    assert beside(tmp_path / "store", "loss_mask")["text-1"] == [i % 2 == 0 for i in range(5, 14)]
    bring(foreigners.deepspec(tmp_path / "cache"), tmp_path / "other")
    assert beside(tmp_path / "other", "loss_mask")["3"] == [0, 1, 0, 1, 0, 1, 0]
    assert split_of(tmp_path / "other").record.provenance["model"] == "some/llm"


def test_one_array_is_padded_or_flat_by_its_lengths_and_a_memory_map_needs_its_shape(
    tmp_path: Path,
) -> None:
    tall = torch.zeros(len(LENGTHS), max(LENGTHS), LAYERS, HIDDEN)
    for i in ROWS:
        tall[i, : LENGTHS[i]] = foreigners.states(i)
    due = {str(i): foreigners.states(i) for i in ROWS}
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS))
    np.save(tmp_path / "padded.npy", tall.numpy())
    bring(tmp_path / "padded.npy", tmp_path / "a", lengths=tmp_path / "lengths.npy")
    assert same(held(tmp_path / "a"), due)
    raw = torch.cat(list(due.values())).bfloat16().view(torch.int16).numpy()
    raw.tofile(tmp_path / "raw.bin")
    given = {"lengths": tmp_path / "lengths.npy", "dtype": "bfloat16"}
    bring(tmp_path / "raw.bin", tmp_path / "b", shape=(sum(LENGTHS), LAYERS, HIDDEN), **given)
    assert same(held(tmp_path / "b"), due)
    with pytest.raises(InputError, match=r"has 3,744 bytes: bfloat16 of shape \(79, 3, 8\) has"):
        bring(tmp_path / "raw.bin", tmp_path / "c", shape="79,3,8", **given)
    np.save(tmp_path / "lengths.npy", np.array(LENGTHS) + 1)
    with pytest.raises(InputError, match=r"lengths \(12, 90 in all\) do not belong together"):
        bring(tmp_path / "padded.npy", tmp_path / "d", lengths=tmp_path / "lengths.npy")


def test_floats_of_8_bits_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    codes = torch.tensor([[[1.0, -2.0]], [[4.0, 0.5]]]).to(torch.float8_e4m3fn)
    scales = torch.tensor([0.25, 3.0]).view(2, 1, 1)
    sample = {"hidden_states": codes, "hidden_states_scales": scales}
    save_file(sample, folder / "hs_0.safetensors")
    bring(folder, tmp_path / "store")
    assert held(tmp_path / "store")["0"].tolist() == [[[0.25, -0.5]], [[12.0, 1.5]]]


DYING = """
import os, signal, sys
from pathlib import Path
import torch
import bertvision
from faults import Recorder, in_memory

torch.set_num_threads(1)
source, root = sys.argv[1:3]
for point in sys.argv[3:]:
    if os.fork():
        os.wait()
        continue
    renames = 0

    def before(i, op):
        global renames
        renames += op.kind == "rename"
        if renames == int(point):
            os.kill(os.getpid(), signal.SIGKILL)

    store = Path(root, point)
    with Recorder(store, before).recording():
        bertvision.import_states(source, "0e/s", encoding="bfloat16", shard_tokens=16, store=store)
    os._exit(1)
"""


def test_a_killed_import_goes_on_where_it_was_and_stores_nothing_twice(memory: Path) -> None:
    """Killed at renames, which commit: those of the records of six shards are among them."""
    source = foreigners.speculators(memory / "source")
    recorder = Recorder(memory / "whole")
    with recorder.recording():
        bring(source, memory / "whole", shard_tokens=16)
    renames = [op.to for op in recorder.ops if op.kind == "rename"]
    shards = [n for n, to in enumerate(renames, 1) if re.search(r"0e/s/\d+\.json$", to)]
    points = [2, shards[1], shards[4], len(renames)]
    ended = run_code(DYING, source, memory, *points)
    assert ended.returncode == 0, ended.stderr
    added = [bring(source, memory / str(point), shard_tokens=16).added for point in points]
    assert added[0] == len(LENGTHS) > added[1] > added[2] > added[3] == 0
    for point in points:
        assert same(held(memory / str(point)), {str(i): foreigners.states(i) for i in ROWS})


def test_a_finished_import_is_left_as_it_is(tmp_path: Path) -> None:
    source = foreigners.speculators(tmp_path / "source")
    bring(source, tmp_path / "store")
    shutil.copy(source / "hs_3.safetensors", source / "hs_12.safetensors")
    with pytest.raises(InputError, match="0e/s is complete and takes no more examples"):
        bring(source, tmp_path / "store")
    os.unlink(source / "hs_12.safetensors")
    assert bring(source, tmp_path / "store").added == 0
    first = load_file(source / "hs_0.safetensors")
    save_file(first | {"token_ids": first["token_ids"] + 1}, source / "hs_0.safetensors")
    with pytest.raises(ProvenanceError, match="first_sample_sha256"):
        bring(source, tmp_path / "store")


def cut(folder: Path) -> None:
    path = folder / "hs_4.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def other_tokens(folder: Path) -> None:
    path = folder / "hs_4.safetensors"
    save_file(load_file(path) | {"token_ids": torch.arange(13)}, path)


def other_layers(folder: Path) -> None:
    path = folder / "hs_4.safetensors"
    save_file(load_file(path) | {"hidden_states": torch.zeros(12, 2, HIDDEN)}, path)


def infinite(folder: Path) -> None:
    path = folder / "hs_4.safetensors"
    held = load_file(path)
    held["hidden_states"][3, 1, 2] = float("inf")
    save_file(held, path)


DAMAGE = {
    cut: "hs_4.safetensors is damaged, cut off",
    other_tokens: r"hidden states of 12 tokens and token ids of shape \(13,\)",
    other_layers: r"'4' is torch.float32 of shape \(12, 2, 8\)",
    infinite: "'4': the hidden states hold NaN or infinity|'4'.* infin",
}


@pytest.mark.parametrize("harm", DAMAGE)
def test_a_sample_that_is_wrong_is_named_and_left_out_only_when_that_is_asked(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    source = foreigners.speculators(tmp_path / "source")
    harm(source)
    with pytest.raises((InputError, NonFiniteError), match=DAMAGE[harm]):
        bring(source, tmp_path / "store")
    done = bring(source, tmp_path / "store", skip_bad=True)
    assert list(done.skipped) == ["4"]
    assert "left out, as they cannot be read: 1 sample" in str(done)
    due = {str(i): foreigners.states(i) for i in ROWS if i != 4}
    assert same(held(tmp_path / "store"), due)


def test_what_waited_and_does_not_fit_is_left_out_under_its_own_name(tmp_path: Path) -> None:
    def large(folder: Path) -> None:
        path = folder / "hs_4.safetensors"
        sample = load_file(path)
        sample["hidden_states"][3, 1, 2] = 9.9e7  # int4's channel statistics say so, later
        save_file(sample, path)

    source = foreigners.speculators(tmp_path / "source")
    large(source)
    options = {"encoding": "int4", "shard_tokens": 48}
    with pytest.raises(NonFiniteError, match=r"'4': token 3, layer 1: 9.*e\+07 does not fit int4"):
        bring(source, tmp_path / "store", **options)
    done = bring(source, tmp_path / "another", skip_bad=True, **options)
    assert list(done.skipped) == ["4"]
    assert done.added == done.examples == len(ROWS) - 1
    assert set(held(tmp_path / "another")) == {str(i) for i in ROWS if i != 4}


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "sprung"),)

    np.save(tmp_path / "objects.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "pickled.npy").write_bytes(pickle.dumps(Trap()))
    (tmp_path / "torch").mkdir()
    torch.save({"hidden_states": Trap()}, tmp_path / "torch" / "hs_0.pt")
    for path, said in {
        "objects.npy": "is no whole .npy file of numbers",
        "pickled.npy": "is no whole .npy file of numbers",
        "torch": "what torch.save or pickle wrote is not opened",
        "torch/hs_0.pt": "what torch.save or pickle wrote is not opened",
    }.items():
        with pytest.raises(InputError, match=said):
            bring(tmp_path / path, tmp_path / "store")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["../secret.arrow", "/etc/passwd", "a/b.arrow", "..", ""])
def test_names_inside_of_files_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    cached = foreigners.saelens(tmp_path / "cached")
    shutil.copy(next(cached.glob("*.arrow")), tmp_path / "secret.arrow")
    state = json.loads((cached / "state.json").read_text())
    state["_data_files"][1]["filename"] = name
    (cached / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="state.json is damaged"):
        bring(cached, tmp_path / "store")
    cache = foreigners.deepspec(tmp_path / "cache")
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["shards"][1]["file_name"] = name
    (cache / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="manifest.json is damaged: shards.1.file_name"):
        bring(cache, tmp_path / "store")


def test_a_cache_whose_index_points_behind_a_shard_is_refused(tmp_path: Path) -> None:
    cache = foreigners.deepspec(tmp_path / "cache")
    shard = cache / "shard-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(InputError, match="sample 11 of .* end behind the end of shard 1"):
        bring(cache, tmp_path / "store")
    (cache / "samples.idx").write_bytes((cache / "samples.idx").read_bytes()[:-56])
    with pytest.raises(InputError, match="616 bytes: 12 samples of 56 bytes are due"):
        bring(cache, tmp_path / "other")


def test_data_sets_whose_rows_are_no_arrays_or_reordered_are_refused(tmp_path: Path) -> None:
    ragged = {"hidden_states": [[[1.0, 2.0], [3.0]]], "token_ids": [[1, 2]]}
    Dataset.from_dict(ragged).save_to_disk(str(tmp_path / "ragged"))
    with pytest.raises(InputError, match="its lists are of different lengths"):
        bring(tmp_path / "ragged", tmp_path / "store")
    two = {"one": [[[1.0], [2.0]]], "two": [[[1.0], [2.0]]]}
    Dataset.from_dict(two).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(InputError, match="one and two of them hold .* name one with --column"):
        bring(tmp_path / "two", tmp_path / "store")
    bring(tmp_path / "two", tmp_path / "store", column="two")
    assert held(tmp_path / "store")["0"].tolist() == [[[1.0]], [[2.0]]]


def test_a_shuffled_data_set_is_refused_as_its_order_is_beside_it(tmp_path: Path) -> None:
    foreigners.saelens(tmp_path / "cached")
    state = json.loads((tmp_path / "cached" / "state.json").read_text())
    state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    (tmp_path / "cached" / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match="flatten_indices"):
        bring(tmp_path / "cached", tmp_path / "store")


def test_the_command_says_what_it_did_and_what_is_not_known(tmp_path: Path) -> None:
    source = foreigners.speculators(tmp_path / "source")
    words = ("store", "import", source, "0e/s", "--store", tmp_path / "store")
    said = done(*words, "--layers", "2,18,33")
    assert said.startswith("0e/s: 12 examples of safetensors, 12 added by this call, ")
    assert said.rstrip().endswith("layers: 2, 18, 33")
    assert json.loads(done(*words, "--layers", "2,18,33", "--json"))["added"] == 0
    (tmp_path / "empty").mkdir()
    result = run("store", "import", tmp_path / "empty", "0e/s", "--store", tmp_path / "other")
    assert result.exit_code == 2
    assert "holds no hidden states that are known (it has nothing)" in result.stderr
    assert not (tmp_path / "other").exists()
    result = run("store", "import", source, "0e/t", "--store", tmp_path / "s", "--layers", "1,2")
    assert "the samples have 3 layers, and 2 are named: 1, 2" in result.stderr


def hooks(number: int, layers: int = 12) -> dict[str, torch.Tensor]:
    """A cache of TransformerLens, (1, tokens, hidden) of each hook, in an order of its own."""
    tokens = LENGTHS[number]
    states = torch.arange(layers * tokens * HIDDEN).view(layers, 1, tokens, HIDDEN).bfloat16()
    named = {f"blocks.{layer}.hook_resid_post": states[layer].float() for layer in range(layers)}
    return {**dict(sorted(named.items())), "tokens": torch.arange(tokens)[None] + number}


@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_a_cache_of_hooks_has_its_layers_in_the_order_of_the_blocks(
    tmp_path: Path, form: str
) -> None:
    folder = tmp_path / "caches"
    folder.mkdir()
    for i in range(3):
        extra = {"blocks.0.ln1.hook_scale": torch.ones(1, LENGTHS[i], 1)}
        path = folder / f"prompt_{i}.{form}"
        if form == "npz":
            np.savez_compressed(path, **{k: v.numpy() for k, v in (hooks(i) | extra).items()})
        else:
            save_file(hooks(i) | extra, path)
    with pytest.raises(InputError, match="activations of different shapes, .* --column 'blocks"):
        bring(folder, tmp_path / "none")
    done = bring(folder, tmp_path / "store", column="blocks.*.hook_resid_post")
    assert done.layers == [f"blocks.{i}.hook_resid_post" for i in range(12)]
    due = [torch.stack([*hooks(i).values()][:-1], 2)[0] for i in range(3)]
    order = [sorted(map(str, range(12))).index(str(i)) for i in range(12)]
    assert same(held(tmp_path / "store"), {f"prompt_{i}": due[i][:, order] for i in range(3)})
    assert beside(tmp_path / "store", "input_ids")["prompt_2"][0] == 2
    one = bring(folder / f"prompt_0.{form}", tmp_path / "one", column="blocks.1*.hook_resid_post")
    assert one.layers == [f"blocks.{i}.hook_resid_post" for i in (1, 10, 11)]


@pytest.mark.parametrize(
    ("tensors", "column", "message"),
    [
        ({"a.hook_x": torch.zeros(2, 3, 4)}, None, "a batch of 2 texts"),
        ({"a.hook_x": torch.zeros(4)}, None, r"a.hook_x has shape \(4,\)"),
        ({"a": torch.zeros(3, 4)}, None, "has no hidden_states: it has a"),
        ({"a": torch.zeros(3, 4)}, "b*", "has nothing named 'b\\*': it has a"),
        (
            {"a.hook_x": torch.zeros(3, 4), "token_ids": torch.arange(2)},
            None,
            "3 tokens and token ids of shape \\(2,\\)",
        ),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "npz"])
def test_named_tensors_that_are_no_sample_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], column: str | None, message: str, form: str
) -> None:
    path = tmp_path / f"x.{form}"
    if form == "npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file(tensors, path)
    with pytest.raises(InputError, match=message):
        bring(path, tmp_path / "store", column=column)


def test_npz_is_not_unpickled_nor_believed(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", hidden_states=np.array([{}], object))
    with pytest.raises(InputError, match="objects would have to be unpickled"):
        bring(tmp_path / "objects.npz", tmp_path / "store")
    np.savez(tmp_path / "cut.npz", hidden_states=np.ones((3, 2, 4), np.float32))
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cut.npz is damaged, cut off"):
        bring(tmp_path / "cut.npz", tmp_path / "store")
    for shape in (b"(9, 9, 9)", b"(-3, 2,4)"):
        (tmp_path / "large.npz").write_bytes(whole.replace(b"(3, 2, 4)", shape))
        with pytest.raises(InputError, match="large.npz"):
            bring(tmp_path / "large.npz", tmp_path / "store")
    locked = bytearray(whole)
    locked[whole.index(b"PK\x03\x04") + 6] |= 1
    locked[whole.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "locked.npz").write_bytes(locked)
    with pytest.raises(InputError, match="locked.npz"):
        bring(tmp_path / "locked.npz", tmp_path / "store")


def test_columns_of_several_hooks_are_layers_by_a_pattern(tmp_path: Path) -> None:
    rows = {f"blocks.{i}.hook_mlp_out": [[[i, 1.0]] * 3] * 2 for i in range(2)}
    Dataset.from_dict(rows | {"blocks": [1, 2]}).save_to_disk(tmp_path / "data")
    done = bring(tmp_path / "data", tmp_path / "store", column="blocks.*")
    assert done.layers == list(rows)
    assert held(tmp_path / "store")["1"][0].tolist() == [[0.0, 1.0], [1.0, 1.0]]
    with pytest.raises(InputError, match="has no column 'x.*'"):
        bring(tmp_path / "data", tmp_path / "store", column="x*")
    with pytest.raises(InputError, match=r"--column block\*: blocks does not hold sequences"):
        bring(tmp_path / "data", tmp_path / "store", column="block*")


def test_hdf5_of_structural_probes_is_layers_first(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    states = {str(i): torch.randn(LAYERS, LENGTHS[i], HIDDEN).bfloat16().float() for i in ROWS}
    with h5py.File(tmp_path / "bert.hdf5", "w") as file:
        for key in sorted(states):
            file.create_dataset(key, data=states[key].numpy(), compression="gzip")
        file["sentence_to_index"] = json.dumps({"a": "0"})
    done = bring(tmp_path / "bert.hdf5", tmp_path / "store")
    assert done.source == "HDF5"
    assert same(held(tmp_path / "store"), {k: v.transpose(0, 1) for k, v in states.items()})
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        for key, values in states.items():
            group = file.create_group(f"clip-{key}")
            group["hidden_states"] = values.transpose(0, 1).numpy()
            group["token_ids"] = np.arange(values.shape[1])
    bring(tmp_path / "groups.h5", tmp_path / "other")
    due = {f"clip-{k}": v.transpose(0, 1) for k, v in states.items()}
    assert same(held(tmp_path / "other"), due)
    assert beside(tmp_path / "other", "input_ids")["clip-0"] == list(range(LENGTHS[0]))


def test_hdf5_that_is_not_clear_or_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    path, store = tmp_path / "x.h5", tmp_path / "store"
    with h5py.File(path, "w") as file:
        file["0"] = np.ones((2, 5, HIDDEN), np.float32)
    with pytest.raises(InputError, match=r"may be \(layers, tokens, hidden\) or .* --layers"):
        bring(path, store)
    assert bring(path, store, layers=["low", "high"]).layers == ["low", "high"]
    with h5py.File(path, "a") as file:
        file["1"] = np.ones((3, 4, HIDDEN), np.float32)
    with pytest.raises(InputError, match="2 different first and 2 different second axes"):
        bring(path, store)
    with h5py.File(path, "w") as file:
        file["1"] = h5py.ExternalLink("/etc/passwd", "x")
        file.create_dataset("2", (2, 1 << 20, HIDDEN), "f4", chunks=True)
    with pytest.raises(InputError, match="1 is a link, which .*; .*was not written to its end"):
        bring(path, store)
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(64))
    with pytest.raises(InputError, match="x.h5 is damaged, cut off"):
        bring(path, store)
