"""What the hub takes: files in a repository, entries in a folder, bytes in a file.

Numbers of https://huggingface.co/docs/hub/storage-limits, checked before anything is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

from bertvision.errors import InputError
from bertvision.pipelines.text import size

MOST_FILES = 100_000
MOST_ENTRIES = 10_000
MOST_BYTES = 50 * 10**9


def check_limits(sent: Mapping[str, int], there: Collection[str], remedy: str) -> None:
    """Check that a repository can hold what is to be sent.

    Args:
        sent: bytes of each file, by path in the repository.
        there: paths of the files that it holds already.
        remedy: what makes fewer or smaller files, for the message.

    Raises:
        InputError: it cannot; nothing was sent.
    """
    paths = {*sent, *there}
    if len(paths) > MOST_FILES:
        raise InputError(
            f"the repository would hold {len(paths):,} files, and the hub takes {MOST_FILES:,}: "
            f"{remedy}; nothing was sent"
        )
    entries: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        folder, _, name = path.rpartition("/")
        while name:
            if name in entries[folder]:
                break  # and so are the folders above
            entries[folder].add(name)
            folder, _, name = folder.rpartition("/")
    folder, names = max(entries.items(), key=lambda item: len(item[1]), default=("", set()))
    if len(names) > MOST_ENTRIES:
        raise InputError(
            f"{folder} would have {len(names):,} entries, and the hub takes {MOST_ENTRIES:,} in a "
            f"folder: {remedy}; nothing was sent"
        )
    path = max(sent, key=lambda path: sent[path], default="")
    if path and sent[path] > MOST_BYTES:
        raise InputError(
            f"{path} has {size(sent[path])}, and the hub takes {size(MOST_BYTES)} in a file: "
            f"{remedy}; nothing was sent"
        )
