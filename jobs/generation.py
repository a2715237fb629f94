"""Prompts continued by a decoder, into the store; and the texts that came out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bertvision.errors import InputError, counted
from bertvision.jobs.show import Row, Rows, ShownRecord, Values
from bertvision.jobs.store import open_store, split_name, store_place
from bertvision.pipelines.declare import DEFAULTS, NewStorePath, WorkspacePath, job
from bertvision.pipelines.encoders.sites.names import check_patterns
from bertvision.pipelines.files import write_text
from bertvision.pipelines.reading import StrPath, path_of, text_of
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.job_options import GenerateOptions

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit

_DEEPEST = 1000
"""More blocks than any decoder has: its own number is known once it is loaded."""


class Generated(ShownRecord):
    """Result of `generate` (see `pipelines.generation.generate.Generated`)."""

    def table(self, values: Values) -> str:
        """Lines on the generated texts and how they ended."""
        reasons = ", ".join(f"{n:,} by {name}" for name, n in values["finish_reasons"].items() if n)
        return "\n".join(
            [
                f"{values['tag']}/{values['split']}: {counted(values['examples'], 'example')}, "
                f"{values['added']:,} added by this call, {size(values['bytes'])}",
                f"{counted(values['prompt_tokens'], 'token')} of prompts, "
                f"{values['generated_tokens']:,} generated"
                f"{f' (kept: {keep})' if (keep := values['keep']) else ''}; ended: {reasons}",
                f"layers: {', '.join(map(str, values['layers']))}",
            ]
        )


@job
def generate(
    name: str,
    *,
    model: StrPath,
    data: StrPath,
    revision: str | None = None,
    task: Literal["text", "chat"] = "text",
    text: str | None = None,
    split: str | None = None,
    options: GenerateOptions = DEFAULTS,
    skip_bad: bool = False,
    jsonl: StrPath | None = None,
    workspace: WorkspacePath = None,
    store: NewStorePath = None,
    **changes: Any,
) -> Generated:
    """Continue prompts with a decoder, and store its hidden states.

    The hidden states of all tokens are kept, read and written, or with ``keep`` those of some. A
    killed generation is finished by the same call, and nothing is stored twice. The likeliest token
    comes next, or one that is drawn, with ``temperature``.

    Args:
        name: Split to write, such as 0e/answers.
        model: Decoder: a folder, or a name on the hub.
        data: Prompts: a file, a folder or a data set on the hub.
        revision: Branch, tag or commit of the decoder on the hub.
        task: Form of the prompts: text (jsonl, parquet, txt), or chat, conversations to answer.
        text: Column of the texts (task text; default text).
        split: Split of the data, where they have several.
        skip_bad: Leave out malformed rows and prompts that are too long; count them.
        jsonl: Write the texts to this file too, a line of JSON each.

    Raises:
        InputError: a prompt is malformed or too long, the model is no decoder, or an option is
            wrong.
        UnknownNameError: the data have no such split.
        NonFiniteError: a hidden state is NaN or infinite.
        ProvenanceError: the split was begun with another model, other prompts or settings.
        LockedError: another process is writing the split.
        DiskSpaceError: the disk is too small, or full; what was committed stays.
    """
    tag, stored = split_name(name)
    if options.sites:
        check_patterns(options.sites, _DEEPEST)
    target = _target(path_of(jsonl), text_of(data) or "")
    place = store_place(workspace, store)
    from bertvision.featurestore.storage.opening import open_storage

    open_storage(place).require_writable()
    from bertvision.featurestore.store import ActivationStore
    from bertvision.pipelines.generation.generate import Generation, check_texts
    from bertvision.pipelines.generation.loading import load_decoder
    from bertvision.pipelines.generation.prompts import prompt_date, read_prompts

    if target is not None:
        check_texts(options.keep)
    loaded = load_decoder(text_of(model) or "", revision)
    date = prompt_date(options.date, loaded.tokenizer, task, place, tag, stored)
    options = replace(options, date=date)
    prompts = read_prompts(
        text_of(data) or "",
        loaded.tokenizer,
        task=task,
        column=text,
        split=split,
        longest=loaded.longest,
        model=loaded.model,
        skip_bad=skip_bad,
        date=date,
    )
    generation = Generation(loaded, prompts, options)
    opened = ActivationStore.create(place)
    done = generation.run(opened, tag, stored)
    if target is not None:
        _write_lines(target, opened[f"{tag}/{stored}"])
    return Generated(**done.to_json())


def generated_texts(
    name: str,
    *,
    tokenizer: StrPath | None = None,
    workspace: StrPath | None = None,
    store: StrPath | None = None,
) -> Rows[Row]:
    """The texts of a split that `generate` wrote, in the order of the prompts.

    Args:
        name: Name of the split, such as ``0e/answers``.
        tokenizer: folder or name on the hub; by default that of the decoder, where it was.
        workspace: folder of the experiment; by default the one you stand in.
        store: activation store, a folder or a URL; by default the workspace's.

    Returns:
        Rows with ``id``, ``prompt``, ``completion``, ``finish_reason`` (stop, length or context)
        and ``example``, the position in the split.

    Raises:
        UnknownNameError: there is no such split.
        InputError: it was not generated, or the tokenizer is another one or gone.
        IncompleteSplitError: shards of the split are missing.
        CorruptStoreError: the split is damaged.
    """
    tag, split = split_name(name)
    opened = open_store(workspace, store)[f"{tag}/{split}"]
    return Rows(Row(values) for values in _texts(opened, text_of(tokenizer)))


def _texts(split: ActivationSplit, tokenizer: str | None) -> Sequence[Values]:
    from bertvision.pipelines.generation.generate import generated_texts as read

    return [text._asdict() for text in read(split, tokenizer)]


def _target(jsonl: Path | None, data: str) -> Path | None:
    """The file to write the texts to, checked before the work of which they come.

    Raises:
        InputError: it is a folder, or a file that prompts are read from.
    """
    if jsonl is None:
        return None
    path, source = jsonl.expanduser(), Path(data).expanduser()
    if path.is_dir():
        raise InputError(f"--jsonl {jsonl} is a folder: name a file, such as {jsonl / 'out.jsonl'}")
    paths = [source, *(source.iterdir() if source.is_dir() else ())]
    if path.exists() and any(other.exists() and path.samefile(other) for other in paths):
        raise InputError(f"--jsonl {jsonl} has the prompts, and would replace them: name another")
    return path


def _write_lines(path: Path, split: ActivationSplit) -> None:
    lines = (json.dumps(values, ensure_ascii=False) for values in _texts(split, None))
    write_text(path, "".join(f"{line}\n" for line in lines))
