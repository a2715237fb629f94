"""Reading and gathering by addresses, in C's calls, for `compiled` to have numba compile.

Nothing waits for the interpreter, so that threads read and gather at once. Where a call fails or a
checksum differs, `shard` reads the run again and says what is wrong.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I4 = types.int64, types.int32
llvm.load_library_permanently(str(import_module("xxhash._xxhash").__file__))
if None in map(llvm.address_of_symbol, ("XXH3_64bits", "pread", "memcpy")):
    raise ImportError("this build of xxhash, or this system, has no such functions to call")
pread: Any = types.ExternalFunction("pread", _I8(_I4, _I8, _I8, _I8))
memcpy: Any = types.ExternalFunction("memcpy", _I8(_I8, _I8, _I8))
xxh3_64: Any = types.ExternalFunction("XXH3_64bits", types.uint64(_I8, _I8))
_LINE, _AHEAD = 64, 4  # bytes of the processor's cache lines; rows that are asked for ahead


def _prefetch(_context: Any, address: Any) -> Any:
    """Ask for the memory at an address, without waiting for it."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> None:
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        name = "llvm.prefetch.p0i8"
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        of_reads, to_stay, of_data = (ir.Constant(number, value) for value in (0, 3, 1))
        where = builder.inttoptr(arguments[0], pointer)
        builder.call(function, [where, of_reads, to_stay, of_data])

    return types.void(address), generate


prefetch: Any = intrinsic(_prefetch)


def gather_rows(rows: Any, arrays: Any) -> None:
    """Copy rows of several arrays, the same of each.

    Args:
        rows: (n,) their numbers.
        arrays: (arrays, 4): address of the source's first row, bytes of a row, address of the
            target's n rows, and 1 where a row is so long that it is asked for ahead.
    """
    for k in range(len(arrays)):
        source, row, target, is_long = arrays[k]
        for i in range(len(rows)):
            if is_long and i + _AHEAD < len(rows):
                ahead = source + rows[i + _AHEAD] * row
                for line in range(0, row, _LINE):
                    prefetch(ahead + line)
            memcpy(target + i * row, source + rows[i] * row, row)


def read_run(
    file: int,
    offsets: Any,
    row: int,
    ends: Any,
    checksums: Any,
    block: int,
    address: int,
    stride: int,
    is_right: Any,
) -> None:
    """Read consecutive examples in some layers, each into its place, and check them.

    Args:
        file: Descriptor of the file.
        offsets: (layers,) where the run begins in the file.
        row: Bytes of a token in a layer.
        ends: (examples,) tokens of the run up to the end of each.
        checksums: (layers, examples) xxh3-64 of each.
        block: Bytes that are read at once, so that they are still near when they are checked.
        address: Address of the first layer's memory.
        stride: Bytes from a layer's memory to the next one's.
        is_right: (1,) bool, set where all was read and every checksum is right.
    """
    for layer in range(len(offsets)):
        first, begin = 0, 0
        memory, offset = address + layer * stride, offsets[layer]
        while first < len(ends):
            last = first + 1
            while last < len(ends) and (ends[last] - begin) * row <= block:
                last += 1
            size = (ends[last - 1] - begin) * row
            if pread(file, memory + begin * row, size, offset + begin * row) != size:
                return
            for example in range(first, last):
                length = (ends[example] - begin) * row
                if xxh3_64(memory + begin * row, length) != checksums[layer, example]:
                    return
                begin = ends[example]
            first = last
    is_right[0] = True
