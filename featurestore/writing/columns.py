"""Fields of an example, checked; those beside its states are kept for each shard."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from safetensors.numpy import save

from bertvision.errors import CorruptStoreError, InputError
from bertvision.featurestore.format.keeping import KEPT_POSITION, Keep, kept_positions
from bertvision.featurestore.format.layout import PLAN_ARRAYS
from bertvision.featurestore.format.logits import OUTPUTS, TopLogits, TopRule
from bertvision.featurestore.format.records import ArrayRecord, Layout, ShardFile
from bertvision.featurestore.writing.growing import (
    KEY_CHARACTERS,
    Column,
    GrowingLedger,
    GrowingShard,
)

Rows = dict[str, npt.NDArray[Any]]
"""Arrays of one example by name: (seq, …) of its tokens, or (…) of itself."""

_NAME = re.compile(r"[a-z][a-z0-9_]{0,79}", re.ASCII)
_TAKEN = {*PLAN_ARRAYS, "hidden_states", "scale", "channel_mean", "channel_std"} | {
    KEPT_POSITION,
    *OUTPUTS,
}
_DTYPES = get_args(ArrayRecord.model_fields["dtype"].annotation)
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_MOST_BYTES = 1 << 30
_MOST_AXES = 3  # of an entry


def as_whole(what: str, value: object) -> int:
    """A whole number that was given, 0 or more.

    Args:
        what: names it, for the message.
        value: Value; NumPy's numbers are taken too.

    Raises:
        InputError: it is none, as 1.0, "1" and True are none.
    """
    try:
        if not isinstance(value, bool) and operator.index(value) >= 0:  # type: ignore[arg-type]
            return operator.index(value)  # type: ignore[arg-type]  # what has no index raised
    except TypeError:
        pass
    raise InputError(f"{what} is {value!r}: give a whole number from 0 on")


def as_key(key: object) -> str:
    """The key of an example.

    Raises:
        InputError: it is none.
    """
    number = isinstance(key, (int, np.integer)) and not isinstance(key, bool)
    name = str(key) if number else key
    if not isinstance(name, str) or not 0 < len(name) <= KEY_CHARACTERS:
        raise InputError(
            f"{key!r} is no key: give a text of 1 to {KEY_CHARACTERS} characters, or a number"
        )
    if not name.isprintable():
        raise InputError(f"{key!r} is no key: it has characters that cannot be printed")
    return name


DIMS = ("seq", "layers", "hidden")
"""Axes of an example as the store has them."""


def as_states(
    name: str, hidden_states: object, layout: Layout, dims: Sequence[str] = DIMS
) -> torch.Tensor:
    """The hidden states of an example as a tensor of the split's shape, (seq, layers, hidden).

    Args:
        name: Key of the example.
        hidden_states: Array of floats.
        layout: Layers, channels and shards of the split.
        dims: Names of the axes of the array.

    Raises:
        InputError: The array has another shape, or ``dims`` are not the names of three axes.
    """
    if sorted(dims) != sorted(DIMS):
        raise InputError(f"dims={dims!r}: give {', '.join(map(repr, DIMS))} in the array's order")
    try:
        states = torch.as_tensor(hidden_states)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"example {name!r}: the hidden states are no array: {error}") from None
    if states.ndim == len(DIMS):
        states = states.permute([list(dims).index(dim) for dim in DIMS])
    wanted = (len(layout.layers), layout.hidden_size)
    shape = tuple(states.shape)
    if len(shape) != 3 or shape[1:] != wanted or states.dtype not in _FLOATS:
        turned = len(shape) == 3 and shape[:0:-1] == wanted
        hint = "; dims=('seq', 'hidden', 'layers') says that channels come first" if turned else ""
        raise InputError(
            f"example {name!r} is {states.dtype} of shape {shape}: give floats of (seq, "
            f"{wanted[0]} layers, {wanted[1]} channels){hint}"
        )
    if states.layout != torch.strided or states.is_meta:
        raise InputError(f"example {name!r} is sparse, or has no values: give a dense tensor")
    return states


def check_length(name: str, tokens: int, layout: Layout) -> None:
    """Check that a shard has room for an example.

    Raises:
        InputError: It is empty, or longer than a shard.
    """
    if not 1 <= tokens <= layout.shard_tokens:
        raise InputError(
            f"example {name!r} has {tokens} tokens: a shard holds examples of 1 to "
            f"{layout.shard_tokens}; begin the split with a larger shard_tokens, of several times "
            "the longest example"
        )


def rows_of(
    seq: int,
    input_ids: object,
    labels: Mapping[str, object] | None,
    fields: Mapping[str, object] | None,
) -> tuple[Rows, dict[str, Column]]:
    """The arrays of an example, and what they are.

    Args:
        seq: its tokens.
        input_ids: (seq,) token ids, or None.
        labels: Labels of the example, by name, or None.
        fields: Fields of its tokens, by name, (seq, …) each, or None.

    Raises:
        InputError: a name or a value cannot be stored.
    """
    rows: Rows = {}
    columns = {}
    ids = None if input_ids is None else {"input_ids": input_ids}
    given: tuple[tuple[Literal["token", "example"], Mapping[str, object] | None], ...]
    given = ("token", ids), ("token", fields), ("example", labels)
    for per, named in given:
        if named is None:
            continue
        if not isinstance(named, Mapping):
            raise InputError(f"{named!r} are no arrays by name: give {{name: array}}")
        for name, value in named.items():
            if name in rows or (name == "input_ids" and named is labels):
                raise InputError(f"{name!r} is given twice: name each array once")
            _check_name(name)
            array = _as_array(name, value)
            if name == "input_ids":
                array = _token_ids(array)
            if per == "token" and (array.ndim < 1 or len(array) != seq):
                raise InputError(
                    f"field {name!r} has shape {array.shape}: its first axis must be that of the "
                    f"{seq} tokens; what an example has as a whole is one of its labels"
                )
            entry = array.shape[1:] if per == "token" else array.shape
            if len(entry) > _MOST_AXES or 0 in entry:
                raise InputError(
                    f"{name!r} has entries of shape {entry}: at most {_MOST_AXES} axes are "
                    "stored, none of them empty"
                )
            rows[name] = array
            columns[name] = Column(per=per, dtype=array.dtype.name, shape=entry)
    return rows, columns


def kept_rows(
    keep: Keep, seq: int, rows: Rows, columns: Mapping[str, Column]
) -> tuple[npt.NDArray[np.int32], Rows, dict[str, Column]]:
    """The tokens of an example that are kept.

    Args:
        keep: Rule that says which.
        seq: Tokens of the example.
        rows: Arrays of the example.
        columns: Kinds of these arrays.

    Returns:
        (kept tokens,) their places; arrays and kinds of these alone, with the places among them.

    Raises:
        InputError: There is no such mask.
    """
    fields = {name: rows[name] for name, column in columns.items() if column.per == "token"}
    masks = {name: values for name, values in fields.items() if name != "input_ids"}
    lengths = np.array([seq])
    places = kept_positions(keep.mask(lengths, masks), lengths)
    chosen = rows | {name: values[places] for name, values in fields.items()}
    place = Column(per="token", dtype="int32", shape=())
    return places, chosen | {KEPT_POSITION: places}, {**columns, KEPT_POSITION: place}


def as_top(name: str, seq: int, logits: object, rule: TopRule | None) -> TopLogits | None:
    """Log-probabilities of the tokens of an example, as the store has them, arrays of NumPy.

    Args:
        name: Key of the example.
        seq: Tokens of the example.
        logits: Logits over the vocabulary, or what is stored of them; None where the split has
            none.
        rule: Rule of the stored tokens.

    Raises:
        InputError: They are missing, of no use, or of another shape.
    """
    if (logits is None) != (rule is None):
        raise InputError(
            f"example {name!r} comes {'with' if rule is None else 'without'} logits: make the "
            f"writer with {'logits such as top:64' if rule is None else 'no logits'}, or "
            f"{'leave them out' if rule is None else 'give those of each example to add'}"
        )
    if rule is None:
        return None
    if not isinstance(logits, TopLogits):
        try:
            tensor = torch.as_tensor(logits)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"example {name!r}: the logits are no array: {error}") from None
        logits = rule.of(tensor.detach())
    given = logits.map(lambda x: x.cpu().numpy() if isinstance(x, torch.Tensor) else np.asarray(x))
    arrays = given._asdict()
    wanted = {key: (seq, *shape) for key, shape in rule.shapes.items()}
    if {key: values.shape for key, values in arrays.items()} != wanted:
        shapes = {key: values.shape for key, values in arrays.items()}
        raise InputError(f"example {name!r}: logits are of shapes {shapes}, {wanted} are due")
    if not all(np.isfinite(values).all() for values in arrays.values()):
        raise InputError(
            f"example {name!r}: logits hold NaN, or fewer than {rule.k} tokens have a probability"
        )
    return TopLogits(*(values.astype(OUTPUTS[key]) for key, values in arrays.items()))


def check_same(columns: Mapping[str, Column], there: Mapping[str, Column], what: str) -> None:
    """Check that an example has the arrays that the examples before it have.

    Args:
        columns: Columns of the example.
        there: Values that they have.
        what: names it, for the message.

    Raises:
        InputError: a name is missing or new, or an array of another kind.
    """
    for name in sorted({*columns, *there}):
        one, other = columns.get(name), there.get(name)
        if one != other:
            raise InputError(
                f"{what} has {f'{name!r}: {one}' if one else f'no {name!r}'}, the examples before "
                f"it {f'have {other}' if other else 'have none'}: give every example the same "
                "arrays, of one type and shape"
            )


def write_rows(
    ledger: GrowingLedger,
    shard: int,
    rows: Sequence[Rows],
    columns: Mapping[str, Column],
) -> ShardFile | None:
    """Write the arrays of a shard's examples; nothing where there are none.

    Raises:
        InputError: they are more than a reader takes.
    """
    if not columns:
        return None
    arrays = {}
    for name, column in columns.items():
        values = [row[name] for row in rows]
        joined = np.concatenate(values) if column.per == "token" else np.stack(values)
        arrays[name] = np.ascontiguousarray(joined)
    if (size := sum(array.nbytes for array in arrays.values())) > _MOST_BYTES:
        raise InputError(
            f"the arrays beside the hidden states of a shard have {size:,} bytes, "
            f"{_MOST_BYTES:,} at most are stored: take fewer tokens to a shard"
        )
    data = save(arrays)
    ledger.storage.write(ledger.rows_key(shard), data)
    return ShardFile(bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))


def read_column(ledger: GrowingLedger, record: GrowingShard, name: str) -> npt.NDArray[Any]:
    """One array of a shard's examples, (tokens, …) or (examples, …); of its file no more is read.

    Raises:
        CorruptStoreError: the file is missing, or does not hold what its record says.
    """
    column, key = record.columns[name], ledger.rows_key(record.shard)
    rows = record.tokens if column.per == "token" else record.examples
    values: npt.NDArray[Any] = np.empty((rows, *column.shape), column.dtype)
    try:
        with closing(ledger.storage.open(key)) as file:
            length = np.empty(1, "<u8")
            file.read_into(length, 0)
            header = np.empty(min(int(length[0]), file.size), np.uint8)
            file.read_into(header, 8)
            begin, end = json.loads(header.tobytes())[name]["data_offsets"]
            if begin < 0 or end - begin != values.nbytes:
                raise ValueError(f"{name} has {end - begin} bytes, {values.nbytes} are due")
            file.read_into(values, 8 + len(header) + begin)
    except (FileNotFoundError, EOFError, KeyError, ValueError, TypeError) as error:
        raise CorruptStoreError(f"{ledger.storage}/{key} cannot be read: {error}") from None
    return values


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InputError(
            f"{name!r} is no name of an array: use 1 to 80 of a-z, 0-9 and '_', beginning with a "
            "letter"
        )
    if name in _TAKEN or name.startswith("error_"):
        raise InputError(f"{name!r} is a name that the store uses itself: choose another one")


def _as_array(name: str, value: object) -> npt.NDArray[Any]:
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            raise InputError(
                f"{name!r} is bfloat16, which is stored of hidden states alone: cast "
                "it to float16 or float32"
            )
        if value.layout != torch.strided or value.is_meta:
            raise InputError(f"{name!r} is sparse, or has no values: give a dense tensor")
        value = value.detach().cpu().numpy()
    try:
        array = np.array(value)  # a copy: the caller may use its memory again
    except (TypeError, ValueError) as error:
        raise InputError(f"{name!r} is no array: {error}") from None
    if array.dtype.name not in _DTYPES:
        raise InputError(
            f"{name!r} is {array.dtype}: numbers and truth values are stored; texts "
            "belong in a table of your own, under the keys"
        )
    return array


def _token_ids(ids: npt.NDArray[Any]) -> npt.NDArray[Any]:
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or np.any(ids != ids.astype(np.int32)):
        raise InputError(
            f"input_ids are {ids.dtype} of shape {ids.shape}: give (seq,) whole numbers below 2^31"
        )
    return ids.astype(np.int32)
