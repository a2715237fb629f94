"""Origin of a split: resuming one requires the same."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.creation import SplitContents, SplitSpec, described, more_dims
from bertvision.featurestore.format.arrays import array_record
from bertvision.featurestore.format.examples import examples_digest
from bertvision.featurestore.format.ledger import Ledger
from bertvision.featurestore.format.records import Layout, SplitRecord, first_difference

TOKEN_IDS = "token_ids_sha256"
"""Name, in the provenance of an extracted split, of the digest of its windows' tokens."""
_COMPARED = {"encoding", "compression", "layers", "hidden_size", "shard_tokens"}


def check_split(ledger: Ledger, spec: SplitSpec, contents: SplitContents) -> None:
    """Check that a split was begun from exactly the same things, tokens among them.

    What texts become depends on more than their file: on a template that writes the date, on the
    versions of libraries. So the tokens themselves are compared, by their digests.

    Raises:
        ProvenanceError: it was not; the message names the first field that differs.
    """
    stored = ledger.read_split()
    fields = described(spec, contents)
    if TOKEN_IDS not in stored.provenance:  # of a version that kept none
        fields["provenance"].pop(TOKEN_IDS, None)
    elif TOKEN_IDS not in fields["provenance"]:
        fields["provenance"][TOKEN_IDS] = stored.provenance[TOKEN_IDS]
    # not validated: what was stored of another encoding, say, need not fit to this one
    wanted = SplitRecord.model_construct(
        **fields,
        arrays=stored.arrays,
        examples_sha256=examples_digest(contents.examples, stored.format),
    )
    check_record(ledger, stored, wanted)
    for name, values in contents.per_token.items():
        there = stored.arrays.get(name)
        dims = ("token", *more_dims(name, values))
        if there is not None and there != array_record(contents.plan.place(values, 0), dims):
            raise ProvenanceError(
                f"the data make other {name} now than {ledger.name} in {ledger.storage} was begun "
                "with, so that what is written now would not be of the same tokens: a chat "
                "template that writes the date was read on another day (--date), or the versions "
                "of bertvision, tokenizers or transformers are others; use the same, or another "
                "store"
            )


def check_record(ledger: Ledger, stored: SplitRecord, wanted: SplitRecord) -> None:
    """Check that a split that was begun is the one that is to be resumed.

    Raises:
        ProvenanceError: it is another one; the message names the first field that differs.
    """
    _refuse(ledger, stored.difference(wanted))


def check_layout(ledger: Ledger, stored: Layout, wanted: Layout) -> None:
    """Check that a split that grows, or has grown, is the one that is to be resumed.

    Raises:
        ProvenanceError: it is another one; the message names the first field that differs.
    """
    there, here = _compared(stored), _compared(wanted)
    if isinstance(stored, SplitRecord):  # which has shards as small as its tokens let them be
        here["shard_tokens"] = stored.shard_tokens
    _refuse(ledger, first_difference(there, here))


def _compared(layout: Layout) -> dict[str, object]:
    """Fields that must be the same, causes first."""
    causes = {f" {name}": value for name, value in layout.provenance.items()}
    return causes | layout.model_dump(include=_COMPARED)


def _refuse(ledger: Ledger, difference: tuple[str, object, object] | None) -> None:
    if difference:
        field, there, here = difference
        raise ProvenanceError(
            f"{ledger.name} in {ledger.storage} was written with {field.strip()} = {there!r}, "
            f"now it is {here!r}: use the same, or another store"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """Hex sha256 of everything that decides a fast tokenizer's output.

    Padding and truncation are left out: they are state of the last call, not of the tokenizer.

    Args:
        tokenizer: a fast one of transformers, or of the library tokenizers.

    Raises:
        InputError: it is neither.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(backend, "to_str"):
        raise InputError(
            f"{type(tokenizer).__name__} is no fast tokenizer, whose definition has a digest: "
            'leave it out, and name it in the provenance, such as {"tokenizer": "…"}'
        )
    definition = json.loads(backend.to_str())
    definition.pop("padding", None)
    definition.pop("truncation", None)
    text = json.dumps(definition, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
