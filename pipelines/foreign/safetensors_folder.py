"""A folder of safetensors files, one for each sample, as speculators and vLLM write them.

Speculators calls them ``hs_{i}.safetensors`` for the i-th row of its data, vLLM's connector after
its requests. Each holds ``hidden_states`` (tokens, layers, hidden) and ``token_ids`` (tokens,).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bertvision.errors import InputError
from bertvision.pipelines.files import check_regular
from bertvision.pipelines.foreign.sample import Sample, Source, files_of, no_states, sample_of

KEY = "key"
"""What an exported file calls the key of its example, among its metadata."""
_NUMBERED = re.compile(r"hs_(0|[1-9]\d{0,17})", re.ASCII)


class SafetensorsFolder(Source):
    """Safetensors files of a folder; the folders inside of it are not looked into.

    All headers are read at once, so that what is cut off or damaged is known before hours are
    spent on the others.

    Args:
        folder: of the files.

    Raises:
        InputError: two files have the same key.
    """

    kind = "safetensors"

    def __init__(self, folder: Path) -> None:
        found, bad = dict[str, Path](), dict[str, str]()
        self.longest = 0
        for path in sorted(files_of(folder, ".safetensors"), key=_order):
            try:
                key, tokens = _header(path)
            except InputError as error:
                bad[_key(path)] = str(error)
                continue
            if key in found:
                raise InputError(
                    f"{path} and {found[key]} are both of example {key!r}: remove one of them"
                )
            found[key] = path
            self.longest = max(self.longest, tokens)
        self.keys, self._paths, self.bad = list(found), list(found.values()), bad

    def read(self, position: int) -> Sample:
        """See `Source.read`."""
        path = self._paths[position]
        with _opened(path) as file:
            return sample_of(str(path), {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def _header(path: Path) -> tuple[str, int]:
    """Key and tokens of a file."""
    with _opened(path) as file:
        if "hidden_states" not in (names := list(file.keys())):
            raise InputError(no_states(str(path), names))
        shape = file.get_slice("hidden_states").get_shape()
        # without numbers a shape may have any size
        return (file.metadata() or {}).get(KEY, _key(path)), shape[0] if shape and all(shape) else 0


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; what is wrong with it is said with its name."""
    check_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged, cut off or still being written: {error}") from None


def _key(path: Path) -> str:
    found = _NUMBERED.fullmatch(path.stem)
    return found[1] if found else path.stem


def _order(path: Path) -> tuple[int, str]:
    """By number where there is one, then by name."""
    key = _key(path)
    return int(key) if key.isdigit() and key.isascii() and len(key) < 19 else -1, path.name
