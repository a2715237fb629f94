"""The card of a store."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bertvision.errors import InputError, counted
from bertvision.featurestore.reader import SplitReader
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.sharing.cards.markdown import (
    LIBRARY,
    bytes_text,
    code,
    digests,
    encoder_name,
    facts,
    on_hub,
    page,
    table,
)
from bertvision.pipelines.stored_name import StoredName
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.reproduce import extraction_command


def store_card(
    repository: str,
    splits: Sequence[SplitReader],
    stored_bytes: Mapping[str, int],
    licence: str | None,
) -> bytes:
    """The card of a repository that holds splits of a store.

    Args:
        repository: ``owner/name`` where it is pushed.
        splits: that it holds then.
        stored_bytes: of their hidden states, by name.
        licence: that the text and the hidden states are given under; None says nothing.
    """
    first, held = splits[0].name, sum(stored_bytes[split.name] for split in splits)
    read = (
        "import bertvision\n\n"
        f'store = bertvision.ActivationStore.open("hf://datasets/{repository}")  # no download\n'
        f'split = store["{first}"]\n'
        "split[17]  # float32 (seq, hidden, layers)"
    )
    return page(
        _metadata(splits, licence),
        repository.rpartition("/")[2],
        [
            "Hidden states of an encoder on the texts of a task, written by "
            "[bertvision](https://pypi.org/project/bertvision): every shard, array and record is "
            f"under a checksum. {counted(len(splits), 'split')}, {bytes_text(held)} of hidden "
            "states.",
            table(
                ["split", "examples", "tokens", "layers × width", "encoding", "size"],
                [
                    [
                        f"`{split.name}`",
                        f"{split.record.examples:,}",
                        f"{split.record.tokens:,}",
                        f"{len(split.record.layers)} × {split.record.hidden_size:,}",
                        split.record.encoding,
                        size(stored_bytes[split.name]),
                    ]
                    for split in splits
                ],
            ),
            f"Licence: {licence}." if licence else "",
            "## Read it",
            code(read, "python"),
            code(f"bertvision pull datasets/{repository} activations", "bash"),
            "`pull` checks each file against the digests of the ledger. The hidden states are Zarr "
            "(`arrays.zarr`), as codes of their encoding; the texts are Parquet (`examples/`).",
            *(part for split in splits for part in _split(split)),
        ],
    )


def _split(split: SplitReader) -> list[str]:
    """What is recorded of one split."""
    record, made_of = split.record, split.record.provenance
    about: dict[str, object] = {
        "encoder": encoder_name(made_of),
        "task": made_of.get("task"),
        "tokens": made_of.get("tokens"),
        "layers": ", ".join(split.layer_names or map(str, record.layers)),
        "encoding": record.encoding,
        "compression": None if record.compression == "none" else record.compression,
        "order of tokens": "permuted" if record.is_shuffled else None,
        "precision of the encoder": made_of.get("precision"),
        "longest window": made_of.get("max_length"),
        "shards": f"{record.shards:,} of {record.shard_tokens:,} tokens",
        "written with": ", ".join(f"{name} {v}" for name, v in record.versions.items()),
    }
    parts = [f"## `{split.name}`", facts(about | digests(made_of))]
    if errors := split.encoding_error:
        names = split.layer_names or list(map(str, record.layers))
        parts += [
            "What the encoding loses, in parts of the distance from the mean, measured on a sample "
            "when it was written:",
            table(
                ["kind of token", "largest error of a layer", "in layer"],
                [[kind, float(of.max()), names[int(of.argmax())]] for kind, of in errors.items()],
            ),
        ]
    if (command := _command(split)) is not None:
        parts += ["Made by:", code(command, "bash")]
    return parts


def _command(split: StoredSplit) -> str | None:
    """What extracts it again; None of one that was imported or written by a program."""
    if "task" not in split.record.provenance:
        return None
    try:
        return extraction_command(split, StoredName.parse(split.split).tokens)
    except InputError:
        return None


def _metadata(splits: Sequence[SplitReader], licence: str | None) -> str:
    from huggingface_hub import DatasetCardData

    names = sorted({split.split for split in splits})
    encoders = {on_hub(split.record.provenance.get("model")) for split in splits} - {None}
    return DatasetCardData(
        license=licence,
        tags=["bertvision", "activations", "hidden-states", *sorted(map(str, encoders))],
        size_categories=[_category(sum(split.record.examples for split in splits))],
        # so that the viewer shows the texts, which are the same in all snapshots
        configs=[
            {
                "config_name": name,
                "data_files": [{"split": _plain(name), "path": f"examples/{name}.parquet"}],
            }
            for name in names
        ],
        library_name=LIBRARY,
    ).to_yaml()


def _plain(name: str) -> str:
    """A split's name as the hub's viewer takes it."""
    return re.sub(r"\W", "_", name)


def _category(n: int) -> str:
    """The hub's word for a number of examples."""
    bounds = ["1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T"]
    for power, bound in enumerate(bounds, 3):
        if n < 10**power:
            return f"n<{bound}" if power == 3 else f"{bounds[power - 4]}<n<{bound}"
    return f"n>{bounds[-1]}"
