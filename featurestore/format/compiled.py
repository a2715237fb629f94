"""Kernels that numba compiled, once they are worth it: until then, and without numba, torch serves.

A kernel is compiled, or loaded from numba's cache, in a thread, as soon as a certain amount of its
work has been done without it: no batch waits for it, and a process that reads little never imports
numba. It runs in whichever thread calls it, without the interpreter's lock.

A fork waits until no kernel is being made: the child would lack the thread, whose locks on the
compiler and on imports would never be released there. What was ready before works in the child, and
what was not is made there when it is worth it.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

log = logging.getLogger(__name__)

Kernel: TypeAlias = Callable[..., None]

_WORTH_BYTES = 64 << 20
"""Work without a kernel, in bytes of what it fills, after which it is made: some 0.1 s of torch."""

_STRIDES, _SIZES = "UniTuple(int64, 2)", "int64, int64"
_F4, _I8 = "float32[::1]", "int64[::1]"
_BITS = {"float32": "uint32[::1]", "bfloat16": "uint16[::1]"}
_SIGNATURES = {
    f"{name} {dtype}": signature
    for dtype, bits in _BITS.items()
    for states in ["float32[::1]" if dtype == "float32" else bits]
    for name, signature in {
        "encode_int8": f"{bits}, {_STRIDES}, boolean, {_F4}, {_F4}, int8[::1], {_STRIDES}, {_F4}, "
        f"{_SIZES}",
        "encode_int4": f"{bits}, {_STRIDES}, boolean, {_F4}, {_F4}, uint8[::1], {_STRIDES}, "
        f"uint8[::1], {_F4}, {_F4}, {_F4}, int64, {_SIZES}",
        "decode_int8": f"int8[::1], {_STRIDES}, {_F4}, {_F4}, {_F4}, {states}, {_STRIDES}, "
        f"{_SIZES}",
        "decode_int4": f"uint8[::1], {_STRIDES}, uint8[::1], {_F4}, int64, {_F4}, {_F4}, {states}, "
        f"{_STRIDES}, {_SIZES}",
    }.items()
} | {
    "transform_encode float32": f"{_F4}, {_I8}, float32, {_F4}, float32, {_I8}, {_I8}, {_F4}, "
    f"{_I8}, uint16[::1], {_I8}, {_I8}, {_SIZES}",
    "transform_decode float32": f"uint16[::1], {_I8}, float32, {_F4}, uint32[::1], {_F4}, {_I8}, "
    f"{_I8}, {_SIZES}",
    "gather_rows": f"{_I8}, int64[:, ::1]",
    "read_run": f"int32, {_I8}, int64, {_I8}, uint64[:, ::1], int64, int64, int64, boolean[::1]",
}
"""The types of the arguments of each kernel: a function of `kernels`, and the type of its hidden
states, which float16 shares with bfloat16."""


class Kernels:
    """The kernels of a process.

    Attributes:
        names: Names of all of them.
    """

    names = tuple(_SIGNATURES)

    def __init__(self) -> None:
        self._ready: dict[str, Kernel] = {}
        self._work = Counter[str]()
        self._asked: set[str] = set()
        self._wanted: list[str] = []
        self._failed = set[str]()
        self._ending = False
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # of what is asked, and the thread
        self._making = threading.RLock()  # of numba; a fork and the end of the process wait for it

    def get(self, name: str, work: int) -> Kernel | None:
        """A kernel, or None as long as it is not ready.

        Args:
            name: Its name.
            work: Bytes that it would fill now.
        """
        if (kernel := self._ready.get(name)) is None and name not in self._asked:
            self._work[name] += work
            if self._work[name] >= _WORTH_BYTES:
                self._ask(name)
        return kernel

    def make(self, *names: str) -> bool:
        """Make kernels now, all of them by default; whether they are ready."""
        for name in names or self.names:
            self._make(name)
        return all(name in self._ready for name in names or self.names)

    def require(self, name: str) -> Kernel:
        """A kernel that nothing in torch stands for, made now if it is not ready.

        Without numba it is the function itself, which takes a thousand times as long.
        """
        if (kernel := self._ready.get(name)) is not None:
            return kernel
        self._make(name)
        if name not in self._ready and name not in self._asked:
            self._asked.add(name)
            log.warning(
                "numba cannot compile %s here, so that Python does it, some thousand times as "
                "slowly: `pip install numba` mends it where it is missing",
                name.partition(" ")[0],
            )
        return self._ready.get(name) or _function(name)

    def _ask(self, name: str) -> None:
        with self._lock:
            if name in self._asked or self._ending:
                return
            self._asked.add(name)
            self._wanted.append(name)
            if self._thread is None:
                thread = threading.Thread(
                    target=self._make_wanted, name="bertvision-kernels", daemon=True
                )
                with suppress(RuntimeError):  # there may be no more threads
                    thread.start()
                    self._thread = thread

    def _make_wanted(self) -> None:
        while True:
            with self._lock:
                if not self._wanted or self._ending:
                    self._thread = None
                    return
                name = self._wanted.pop(0)
            self._make(name)

    def _make(self, name: str) -> None:
        with self._making:
            if name in self._ready or name in self._failed or self._ending:
                return
            try:
                self._ready[name] = _compiled(name)
            except Exception as error:  # numba is not there, not whole, or not for this processor
                self._failed.add(name)
                log.debug("the kernel %s is done without: %s", name, error)

    def before_fork(self) -> None:
        """Wait until no kernel is being made, and let none be begun."""
        self._making.acquire()
        self._lock.acquire()

    def after_fork(self) -> None:
        """Go on as before."""
        self._lock.release()
        self._making.release()

    def after_fork_in_child(self) -> None:
        """Go on without the thread, which is the parent's."""
        self._thread, self._wanted, self._asked = None, [], set()
        self.after_fork()

    def end(self) -> None:
        """Let no kernel be begun, and wait for the one that is being made.

        The compiler would lose its memory in the middle of its work otherwise.
        """
        self._ending = True
        with self._making:
            pass


def _compiled(name: str) -> Kernel:
    """Compile a kernel, or load it where a process has compiled it before.

    Raises:
        Exception: numba's own; there are many of them.
    """
    import numba
    from numba.extending import register_jitable

    from bertvision.featurestore.format.kernels import HELPERS

    for helper in HELPERS:
        register_jitable(helper)
    function = _native(name) if name in _NATIVE else _function(name)
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        kernel = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for its cache can be written to
        kernel = numba.njit(**options)(function)
    kernel.compile(f"void({_SIGNATURES[name]})")
    kernel.disable_compile()
    return kernel  # type: ignore[no-any-return]


def _function(name: str) -> Kernel:
    """The function that a kernel is compiled from."""
    from bertvision.featurestore.format import kernels

    function: Kernel = getattr(kernels, name.partition(" ")[0])
    return function


def _native(name: str) -> Kernel:
    """The function that a kernel which calls C is compiled from.

    Raises:
        ImportError: C's functions are not there.
    """
    from bertvision.featurestore.format import native

    function: Kernel = getattr(native, name)
    return function


_NATIVE = ("gather_rows", "read_run")
KERNELS = Kernels()
"""Those of this process."""
os.register_at_fork(
    before=KERNELS.before_fork,
    after_in_parent=KERNELS.after_fork,
    after_in_child=KERNELS.after_fork_in_child,
)
atexit.register(KERNELS.end)
