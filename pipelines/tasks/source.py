"""Where a task's sentences come from: files, folders of files, and data sets of the hub."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bertvision.errors import InputError
from bertvision.pipelines.plain_yaml import read_yaml

_GZIP = b"\x1f\x8b"
_LARGEST_RATIO = 100  # of a text to its gzip; of prose it is 3, of tables up to 20
_UNSUSPICIOUS_BYTES = 1 << 26


class Line(NamedTuple):
    """A line of a file."""

    number: int
    """From 1."""
    text: str
    """Without its end."""


def read_text(path: str | Path, *, fallback: str | None = None) -> tuple[str, str]:
    """Read a file of UTF-8, perhaps compressed with gzip and named ``.gz``.

    Args:
        path: Path of the file.
        fallback: encoding of a file that is not UTF-8; None refuses it.

    Returns:
        (text without a byte order mark, SHA-256 of the file's bytes in hex).

    Raises:
        InputError: the file cannot be read, decompressed or decoded, or holds nothing.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(raw).hexdigest()
    if path.name.endswith(".gz"):
        try:
            with gzip.open(io.BytesIO(raw)) as file:
                most = max(_LARGEST_RATIO * len(raw), _UNSUSPICIOUS_BYTES)
                raw = file.read(most + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise InputError(
                f"{path}: is named .gz but is not whole gzip data ({error}): download it again"
            ) from error
        if len(raw) > most:
            raise InputError(
                f"{path}: unpacks to more than {most:,} bytes, as no text does: if you trust it, "
                "unpack it yourself and give the file that comes out"
            )
    elif raw.startswith(_GZIP):
        raise InputError(f"{path}: is gzip data: give it a name that ends with {path.suffix}.gz")
    if not raw.strip():
        raise InputError(f"{path}: is empty")
    try:
        return raw.decode("utf-8-sig"), digest
    except UnicodeDecodeError as error:
        if fallback is not None:
            return raw.decode(fallback), digest
        line = raw.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8 (byte {error.start} "
            f"of the file: {error.reason}): save the file as UTF-8"
        ) from error


def text_lines(text: str) -> Iterator[Line]:
    r"""The lines of a text but blank ones, ended by ``\n`` or ``\r\n``.

    Not by what else Unicode calls a line break: those occur inside sentences.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield Line(number, line.removesuffix("\r"))


def all_lines(text: str) -> list[str]:
    """All lines of a text, blank ones too."""
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n")


def split_files(forms: Sequence[str]) -> dict[str, list[str]]:
    """Names of the files of train, dev and test in any of these forms, such as ``train.csv``."""
    return {split: [f"{split}{form}" for form in forms] for split in ("train", "dev", "test")}


def find_file(source: str | Path, names: Sequence[str], task: str) -> Path:
    """The file that a source means: itself, or the first of these names in the folder.

    Args:
        source: path of a file or of a folder.
        names: paths inside the folder, in order of preference; each may also end with ``.gz``.
        task: Task that the file is for.

    Raises:
        InputError: there is none; names what was looked for.
    """
    path = Path(source)
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(
            f"{source}: there is no such file or folder, which {task} is to be read of"
        )
    if (file := find_in(path, names)) is not None:
        return file
    raise InputError(
        f"{source}: holds no {' or '.join(names)} (or the same with .gz) to read {task} from"
    )


def find_in(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that a folder holds, each also with ``.gz``; None without any."""
    candidates = (folder / f"{name}{end}" for name in names for end in ("", ".gz"))
    return next((path for path in candidates if path.is_file()), None)


def only_file(folder: Path, patterns: Sequence[str], split: str, older: str = "") -> Path | None:
    """The file of a folder that fits a pattern, each also with ``.gz``; None without any.

    Args:
        folder: Path of the folder.
        patterns: Patterns of names, as of a shell.
        split: Split that the file is of.
        older: Part of the names of files that give way to one without it.

    Raises:
        InputError: several files fit.
    """
    ends = [f"{pattern}{end}" for pattern in patterns for end in ("", ".gz")]
    files = sorted({path for end in ends for path in folder.glob(end) if path.is_file()})
    newer = [path for path in files if older not in path.name]
    if len(files) > 1 and len(newer) != 1:
        raise InputError(
            f"{folder}: holds {' and '.join(path.name for path in files)}, each of which may be "
            f"{split}: give the files with --train and --dev, or leave one in the folder"
        )
    return next(iter(newer or files), None)


def splits_in(source: str | Path, files: Mapping[str, Sequence[str]], task: str) -> tuple[str, ...]:
    """The splits that a local source offers: those whose files a folder holds, or that of a file.

    Args:
        source: path of a file or of a folder.
        files: Names by split, as `find_file` takes them.
        task: Task that the files are for.

    Raises:
        InputError: there is no such file or folder, or it holds none of them.
    """
    path = Path(source)
    if path.is_file():
        return (named_split(path),)
    splits = tuple(split for split, names in files.items() if find_in(path, names) is not None)
    if not splits:
        # says what lacks
        find_file(source, [name for names in files.values() for name in names], task)
    return splits


def named_split(path: Path) -> str:
    """The split that the name of a file says: a file is one, never train and dev at once.

    ``train*``, ``dev*`` and ``test*`` begin with it, ``*validation*`` is dev; any other is ``all``.
    """
    name = path.name.lower()
    if "validation" in name:
        return "dev"
    return next((split for split in ("train", "dev", "test") if name.startswith(split)), "all")


def on_hub(source: str) -> bool:
    """Whether ``datasets`` is to read a source: a name on the hub, or a folder of Parquet files."""
    path = Path(source)
    if path.is_dir():
        return any(path.rglob("*.parquet"))
    return not path.exists() and not path.is_absolute()


def load_hub(source: str, split: str) -> Any:
    """Load a split through ``datasets``.

    Args:
        source: ``owner/name``, ``owner/name:config``, or a folder of Parquet files.
        split: Name of the split on the hub.

    Returns:
        ``datasets.Dataset``.

    Raises:
        InputError: it cannot be loaded.
    """
    return _from_hub(
        source,
        f"split {split!r}",
        lambda d, name, config: d.load_dataset(name, config, split=split),
    )


def hub_splits(source: str) -> list[str]:
    """The splits of a data set, as the hub calls them.

    Args:
        source: As in `load_hub`.

    Raises:
        InputError: it cannot be found.
    """
    names = _from_hub(
        source, "its splits", lambda d, name, config: d.get_dataset_split_names(name, config)
    )
    return [str(name) for name in names]


def _from_hub(source: str, what: str, ask: Callable[[Any, str, str | None], Any]) -> Any:
    """Ask ``datasets``: the module, the data set and its configuration are what ``ask`` is given.

    Raises:
        InputError: it fails, or a folder names data outside it.
    """
    import datasets

    local = Path(source).is_dir()
    if local:
        _check_card(Path(source))
    name, _, config = (source, "", "") if local else source.partition(":")
    try:
        return ask(datasets, name, config or None)
    except Exception as error:  # the hub's client raises errors of half a dozen libraries
        raise InputError(
            f"{source!r} is no file here, and loading it as a data set ({what}) failed "
            f"with {type(error).__name__}: {str(error).strip()}. Check the name, the split and the "
            "network, or download it and give the file or its folder"
        ) from error


def _check_card(folder: Path) -> None:
    """Refuse a folder that says its data are elsewhere: ``datasets`` would fetch them.

    Raises:
        InputError: its README names files that do not lie in it, or cannot be read.
    """
    for name in ("README.md", ".huggingface.yaml"):
        card = folder / name
        try:
            values = read_yaml(card, front_matter=name == "README.md")
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise InputError(f"{card} cannot be read: {error}") from error
        for place in _texts(values.get("configs") if isinstance(values, dict) else None):
            if "://" in place or "::" in place or ".." in Path(place).parts or place[:1] in "/~":
                raise InputError(
                    f"{card} names data outside its folder: {place}: give a folder that holds its "
                    "own files, or take that name out of it"
                )


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of YAML, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)
