"""A lock for places without an operating system that releases it: a lease, renewed while held.

The lock is an object that says who holds it. It is made, renewed and taken over only by
conditional writes, so of any number of processes exactly one gets it. Its holder renews it every
few seconds. A lease that was not renewed for `LEASE_SECONDS` is over, and the next one takes it;
how old it is says the server's clock, so that the clocks of the machines do not matter.

What a lease cannot do: a holder that stands still for longer than that (a suspended machine) may
have one request on the way when another one takes over. It finds out before its next write, and
stops. That one request is a conditional write too, of what the holder found before it began (see
`delegation.ShardAttempt`): where the next one wrote since, it is refused.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections import Counter
from datetime import UTC, datetime

from bertvision.errors import LockedError, StoreError
from bertvision.featurestore.storage.objects import Objects, Stored
from bertvision.featurestore.storage.storage import ABSENT

LEASE_SECONDS = 60.0
"""How long a lease lasts without being renewed."""
_POLL_SECONDS = 0.5
_TRIES = 5
_ADVICE = "write to a local folder and copy it there, or use a server that knows conditions"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""Goes on while the machine is suspended, where the system has such a clock: the server's does."""


class Lease:
    """A lease that this process holds from `acquire` to `release`.

    Args:
        objects: Objects among which the lease's lies.
        path: Path of the object.
        name: Name of the object, for messages.
        what: Action of the holder, for messages.
    """

    def __init__(self, objects: Objects, path: str, name: str, what: str) -> None:
        self._objects = objects
        self._path = path
        self._name = name
        self._what = what
        self._holder = secrets.token_hex(8)
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._renewals = 0
        self._version = ABSENT
        self._renewed = 0.0
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew_for_ever, daemon=True)

    def acquire(self, wait: bool) -> None:
        """Get the lease.

        Args:
            wait: until it is free, instead of raising.

        Raises:
            LockedError: another process holds it.
            StoreError: the server does not judge conditions, so that everybody would get it, or
                refuses those that hold.
        """
        refused: Counter[str] = Counter()
        while True:
            there = self._objects.get(self._path)
            if there is None or _is_over(there):
                version = there.version if there else ABSENT
                if self._write(version):
                    break
                refused[version] += 1
                if refused[version] == _TRIES:
                    raise StoreError(
                        f"the server of {self._name} refuses to replace what nobody else writes, "
                        f"as one that knows only If-None-Match does: {_ADVICE}"
                    )
                time.sleep(_POLL_SECONDS)  # or who is writing it at this moment is met again
            elif wait:
                time.sleep(_POLL_SECONDS)
            else:
                raise LockedError(self._refusal(there))
        if not self._objects.judges_conditions:
            self._check_server()
        self._thread.start()

    def check(self) -> None:
        """Make sure that it is still held, as far as can be known.

        Raises:
            LockedError: it was lost.
        """
        if self._lost or time.clock_gettime(_CLOCK) - self._renewed > LEASE_SECONDS:
            raise LockedError(
                f"the lock {self._name} was lost: it could not be renewed for "
                f"{LEASE_SECONDS:.0f} s, and another process may be {self._what}; what was "
                "committed is whole: run the same command again, it goes on from there"
            )

    def release(self) -> None:
        """Give it back; the next one need not wait until it is over."""
        self._released.set()
        self._thread.join()
        if self._lost:
            return
        content = self._content(released=True)
        if self._objects.put(self._path, content, self._version) is None:
            # the answer to the last renewal was lost, and with it the version
            there = self._objects.get(self._path)
            if there is not None and self._holds(there):
                self._objects.put(self._path, content, there.version)

    def _write(self, only_if: str) -> bool:
        started = time.clock_gettime(_CLOCK)
        self._renewals += 1  # no two contents are the same, so no two versions are
        version = self._objects.put(self._path, self._content(), only_if)
        if version is None:
            return self._is_mine()
        self._version, self._renewed = version, started
        return True

    def _is_mine(self) -> bool:
        """Whether a write did succeed although its answer was lost and its repetition refused."""
        there = self._objects.get(self._path)
        if there is None or not self._holds(there):
            return False
        self._version, self._renewed = there.version, time.clock_gettime(_CLOCK) - there.age
        return True

    def _holds(self, there: Stored) -> bool:
        fields = _fields(there)
        return fields.get("holder") == self._holder and not fields.get("released")

    def _check_server(self) -> None:
        """Both conditions are false now: a server that writes all the same does not know them."""
        for false in (ABSENT, '"00000000000000000000000000000000"'):
            if self._objects.put(self._path, self._content(), false) is not None:
                raise StoreError(
                    f"the server of {self._name} ignores conditional writes (If-Match, "
                    f"If-None-Match), without which two writers cannot be kept apart: {_ADVICE}"
                )
        self._objects.judges_conditions = True

    def _renew_for_ever(self) -> None:
        while not self._released.wait(LEASE_SECONDS / 4):
            try:
                self._lost = not self._write(self._version)
            except Exception:  # noqa: BLE001 - tried again; `check` says when it is too late
                continue
            if self._lost:
                return

    def _content(self, released: bool = False) -> bytes:
        fields = {
            "holder": self._holder,
            "process": os.getpid(),
            "since": self._since,
            "renewals": self._renewals,
            "what": self._what,
            "released": released,
        }
        return json.dumps(fields).encode()

    def _refusal(self, there: Stored) -> str:
        fields = _fields(there)
        return (
            f"another process is {fields.get('what')} since {fields.get('since')} (process "
            f"{fields.get('process')}, last sign of life {there.age:.0f} s ago): wait for it to "
            f"end, or stop it; where it was killed, the lock is free {LEASE_SECONDS:.0f} s after "
            f"that sign; nothing was changed (lock: {self._name})"
        )


def _is_over(there: Stored) -> bool:
    return bool(_fields(there).get("released")) or there.age > LEASE_SECONDS


def _fields(there: Stored) -> dict[str, object]:
    """Fields of the lock; none where it is damaged, and its age alone decides."""
    try:
        fields = json.loads(there.data)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}
