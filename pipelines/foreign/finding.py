"""A path → the source of the kind of files that it holds."""

from __future__ import annotations

from pathlib import Path

from bertvision.errors import InputError
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
from bertvision.pipelines.foreign.sample import Source

_NOT_READ = (".pt", ".pth", ".pkl", ".npz", ".zst")


def find_source(
    path: Path,
    *,
    lengths: Path | None = None,
    input_ids: Path | None = None,
    dtype: str | None = None,
    shape: tuple[int, ...] | None = None,
    column: str | None = None,
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

    Raises:
        InputError: there is nothing at the path that is known, or it is damaged.
    """
    if not path.exists():
        raise InputError(f"there is nothing at {path}")
    if path.is_file():
        if column is not None:
            raise InputError("--column is for an Arrow data set in a folder: leave it out")
        return _array(path, lengths, input_ids, dtype, shape)
    given = {"--lengths": lengths, "--input-ids": input_ids, "--dtype": dtype, "--shape": shape}
    if wrong := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{wrong[0]} is for one file of numbers, and {path} is a folder")
    exported = read_export(path)
    if exported is not None and not exported.complete:
        raise InputError(
            f"{path} is an export that was not finished: run `bertvision store export` again first"
        )
    found = _folder(path, column)
    if exported is not None:
        found.layer_names = exported.layers
    return found


def _folder(path: Path, column: str | None) -> Source:
    if (path / INDEX).is_file():
        found: Source = DeepSpecCache(path)
    elif (path / STATE).is_file():
        return ArrowFolder(path, column)
    elif (path / STATES).is_file():
        found = open_flat(path)
    elif any(path.glob("*.safetensors")):
        found = SafetensorsFolder(path)
    elif any(path.glob("*.npy")):
        found = NumpyFolder(path)
    else:
        raise InputError(_unknown(path))
    if column is not None:
        raise InputError(f"--column is for an Arrow data set, and {path} is none: leave it out")
    return found


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
    elif (path / "dataset_dict.json").is_file():
        advice = "; it has several splits: name the folder of one"
    return (
        f"{path} holds no hidden states that are known (it has {', '.join(held) or 'nothing'}): "
        "safetensors or npy files, a DeepSpec cache, or a data set that `datasets` saved" + advice
    )
