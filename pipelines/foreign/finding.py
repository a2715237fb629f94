"""A path → the source of the kind of files that it holds."""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular
from bertvision.pipelines.foreign.arrow_folder import STATE, ArrowFolder
from bertvision.pipelines.foreign.deepspec import INDEX, DeepSpecCache
from bertvision.pipelines.foreign.export_record import read_export
from bertvision.pipelines.foreign.numpy_arrays import (
    STATES,
    NumpyArray,
    NumpyFolder,
    load_array,
    load_raw,
    open_flat,
)
from bertvision.pipelines.foreign.safetensors_folder import SafetensorsFolder
from bertvision.pipelines.foreign.sample import Source, files_of

KINDS = ("safetensors", "npy", "arrow", "deepspec")
"""Kinds of files that a folder may hold."""
_NOT_READ = (".pt", ".pth", ".pkl", ".npz", ".zst")


def find_source(
    path: Path,
    *,
    lengths: Path | None = None,
    input_ids: Path | None = None,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    column: str | None = None,
    kind: str | None = None,
) -> Source:
    """Open hidden states that others wrote, of whichever kind they are.

    Args:
        path: a folder of safetensors or npy files, a DeepSpec cache, a data set that ``datasets``
            saved, an ``.npy`` file or a file of bare numbers.
        lengths: ``.npy`` with the tokens of each sample; of one array alone.
        input_ids: ``.npy`` with the token ids; of one array alone.
        dtype: of the numbers of a file without a header.
        shape: of a file without a header.
        column: of an Arrow data set that has the hidden states.
        kind: Kind of files to read in a folder, one of `KINDS`; None where it has one kind alone.

    Raises:
        InputError: there is nothing at the path that is known, it is damaged, or it holds files of
            several kinds.
    """
    if not path.exists():
        raise InputError(f"there is nothing at {path}")
    if not path.is_dir():
        check_regular(path)
        for option, value in (("--column", column), ("--format", kind)):
            if value is not None:
                raise InputError(f"{option} is for a folder, and {path} is a file: leave it out")
        return _array(path, lengths, input_ids, dtype, shape)
    given = {"--lengths": lengths, "--input-ids": input_ids, "--dtype": dtype, "--shape": shape}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{wrong[0]} is for one file of numbers, and {path} is a folder")
    exported = read_export(path)
    if exported is not None and not exported.complete:
        raise InputError(
            f"{path} is an export that was not finished: run `bertvision store export` again first"
        )
    if exported is not None and kind is None:
        kind = exported.format
    found = _folder(path, column, kind)
    if exported is not None:
        found.layer_names = exported.layers
    return found


def _folder(path: Path, column: str | None, kind: str | None) -> Source:
    there = _kinds(path)
    if not there:
        raise InputError(_unknown(path))
    if kind is None and len(there) > 1:
        raise InputError(
            f"{path} holds files of several kinds, {' and '.join(there)}, of which one is read: "
            f"choose with {' or '.join(f'--format {each}' for each in there)}"
        )
    chosen = kind or there[0]
    if chosen not in there:
        raise InputError(f"--format {chosen}: {path} holds {' and '.join(there)}: name that")
    if chosen == "arrow":
        return ArrowFolder(path, column)
    if column is not None:
        raise InputError(f"--column is for an Arrow data set, not for {chosen}: leave it out")
    if chosen == "deepspec":
        return DeepSpecCache(path)
    if chosen == "safetensors":
        return SafetensorsFolder(path)
    return open_flat(path) if (path / STATES).exists() else NumpyFolder(path)


def _kinds(path: Path) -> list[str]:
    """The kinds of files in a folder, of `KINDS`."""
    there = {
        "safetensors": bool(files_of(path, ".safetensors")),
        "npy": bool(files_of(path, ".npy")),
        "arrow": (path / STATE).exists(),
        "deepspec": (path / INDEX).exists(),
    }
    return [kind for kind in KINDS if there[kind]]


def _array(
    path: Path,
    lengths: Path | None,
    input_ids: Path | None,
    dtype: str | None,
    shape: tuple[int, ...] | None,
) -> Source:
    if path.suffix in _NOT_READ:
        raise InputError(_unknown(path))
    if (dtype is None) != (shape is None):
        raise InputError("--dtype and --shape say together what a file without a header holds")
    if path.suffix == ".npy" and dtype is not None:
        raise InputError(f"{path} says itself what it holds: leave --dtype and --shape out")
    if path.suffix != ".npy" and (dtype is None or shape is None):
        raise InputError(
            f"{path} has no name that says what it is: of a memory map give --dtype and --shape, "
            "such as --dtype float16 --shape 1000,128,4,768"
        )
    raw = dtype is not None and shape is not None
    states = load_raw(path, dtype, shape) if dtype and shape else load_array(path)
    beside = [None if of is None else load_array(of) for of in (lengths, input_ids)]
    return NumpyArray(states, *beside, is_bfloat16=raw and dtype == "bfloat16")


def _unknown(path: Path) -> str:
    held = sorted({p.suffix for p in path.iterdir()} - {""}) if path.is_dir() else [path.suffix]
    advice = ""
    if set(held) & {".pt", ".pth", ".pkl"}:
        advice = "; what torch.save or pickle wrote is not opened, as it can run code: save it as "
        advice += "safetensors with the program that it is from"
    elif ".zst" in held:
        advice = "; unpack *.zst first, with `zstd -d`"
    elif ".npz" in held:
        advice = "; save each array of an .npz, as numpy.load gives it, as .npy"
    elif set(held) & {".h5", ".hdf5"}:
        advice = "; save the arrays of HDF5 as .npy, or as safetensors"
    elif (path / "dataset_dict.json").is_file():
        advice = "; it has several splits: name the folder of one"
    return (
        f"{path} holds no hidden states that are known (it has {', '.join(held) or 'nothing'}): "
        "safetensors or npy files, a DeepSpec cache, or a data set that `datasets` saved" + advice
    )
