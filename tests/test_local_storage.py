"""A store in a folder, used by several threads at once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from faults import in_memory

from bertvision.featurestore.storage.local import LocalStorage


@pytest.fixture
def impatient() -> Iterator[None]:
    """Threads take turns at almost every step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient")
def test_threads_make_and_remove_folders_of_one_storage(tmp_path: Path) -> None:
    with in_memory(tmp_path) as folder:
        storage = LocalStorage(folder)

        def work(name: int) -> None:
            for i in range(20):
                storage.write(f"{name}/{i}/file", b"")
            for i in range(20):
                storage.remove(f"{name}/{i}")

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [None] * 4
        assert storage.names("0") == []
