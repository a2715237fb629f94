"""The commands that make a result again."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.options import Options, declared, flag
from bertvision.pipelines.poolings import TokenPooling
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.workspace.job_options import ExtractOptions, TrainOptions
from bertvision.pipelines.workspace.records import RunConfig
from bertvision.pipelines.workspace.runs import Run

_OF_RUN = {name: Run._field_defaults[name] for name in ("seed", "fraction")}

BERT_COMMAND = "bertvision finetune --resume"
"""The command that makes BERT's own results."""


def training_command(config: RunConfig, hidden_states: int | None = None) -> str:
    """The command that trains a run again: its options, but for those that are the default.

    The precision is always among them, because its default depends on the machine.

    Args:
        config: Configuration of the run.
        hidden_states: Number that the encoder has; where the run was trained on all of them (of the
            [CLS] alone, and on the pooler output), ``--layers`` is left out. None writes it out.
    """
    run = config.run
    words = ["bertvision", "train", run.head + run.variant, "--checkpoint", config.trained_on]
    words += _training_words(config, hidden_states)
    for name, default in _OF_RUN.items():
        value = getattr(config.training, name)
        words += [] if value == default else [f"--{name}", _text(value)]
    return shlex.join(words)


def training_pass_command(configs: Sequence[RunConfig], hidden_states: int) -> str:
    """The command that trains several runs from one pass, and so resumes that pass.

    Args:
        configs: Configurations of the runs, in the order of the pass.
        hidden_states: Number of hidden states of the encoder.
    """
    if len(configs) == 1:
        return training_command(configs[0], hidden_states)
    words = ["bertvision", "train", *(config.run.text for config in configs)]
    words += ["--checkpoint", configs[0].trained_on]
    return shlex.join(words + _training_words(configs[0], hidden_states))


def _training_words(config: RunConfig, hidden_states: int | None) -> list[str]:
    """How a run was trained: its options but for those of the run alone and those it names."""
    training = config.training.model_dump()
    for name in _OF_RUN:
        del training[name]
    pooler = config.activations.get("tokens") == "cls"
    everything = hidden_states is not None and config.layers == tuple(range(hidden_states + pooler))
    options = TrainOptions(**training, layers=None if everything else config.layers)
    named = {name: getattr(TrainOptions(), name) for name in config.run.settings}
    return option_words(replace(options, **named))


def stored_options(split: StoredSplit) -> ExtractOptions:
    """The options that extract a stored split again, as it is."""
    record, parsed = split.record, StoredName.parse(split.split)
    made_from: Mapping[str, Any] = record.provenance
    sites = tuple(split.layer_names) if parsed.sites else None
    return ExtractOptions(
        splits=(parsed.split,),
        tokens=(parsed.tokens,),
        dataset=parsed.dataset,
        encoding=record.encoding,
        compression=record.compression,
        layers=None if sites else tuple(record.layers),
        sites=sites,
        keep=record.keep,
        logits=None if record.top is None else str(record.top),
        precision=made_from.get("precision", "auto"),
        nonfinite="record" if made_from.get("nonfinite") == "record" else "error",
        shard_tokens=record.shard_tokens,
    )


def not_extracted(split: StoredSplit) -> str | None:
    """Where a split comes from that no workspace can extract again; None of one that it can."""
    made_from = split.record.provenance
    if "task" in made_from or made_from.get("shuffled_from"):
        return None
    if (source := made_from.get("imported_from")) is not None:
        return f"{split.name} was imported ({source}), and not extracted by `bertvision extract`"
    return f"{split.name} was written by a program, and not extracted by `bertvision extract`"


def extraction_command(split: StoredSplit, tokens: TokenPooling) -> str:
    """The command that ends the extraction of a split: with the options it was begun with.

    Args:
        split: stored, in part.
        tokens: Tokens that are kept where the command does not say it.
    """
    options = stored_options(split)
    if options.tokens == (tokens,):
        options = replace(options, tokens=None)
    words = ["bertvision", "extract", "--checkpoint", split.tag]
    words += ["--task", options.dataset] if options.dataset else []
    return shlex.join(words + option_words(options, "encoding"))


def evaluation_command(run: str, trained_on: str, checkpoint: str, split: str = "dev") -> str:
    """The command that scores a run."""
    words = ["bertvision", "evaluate", run, "--trained-on", trained_on, "--checkpoint", checkpoint]
    return shlex.join(words + ([] if split == "dev" else ["--split", split]))


def ensemble_command(
    members: Sequence[str], combine: str, trained_on: str, checkpoint: str, split: str = "dev"
) -> str:
    """The command that makes an ensemble of runs, and of BERT where ``bert`` is a member."""
    words = ["bertvision", "ensemble", *(run for run in members if run != "bert")]
    words += ["--with-bert"] if "bert" in members else []
    words += ["--combine", combine, "--trained-on", trained_on, "--checkpoint", checkpoint]
    return shlex.join(words + ([] if split == "dev" else ["--split", split]))


def ensemble_name(members: Sequence[str], combine: str) -> str:
    """An ensemble as people read it: ``max(BERT, adapter-386-shared)``."""
    return f"{combine}({', '.join('BERT' if run == 'bert' else run for run in members)})"


def option_words(options: Options, *always: str) -> list[str]:
    """Options on a command line: that are not the default, or that ``always`` names.

    Args:
        options: Options of a command.
        *always: names of fields.
    """
    words = []
    for field in fields(options):
        value, (_, option) = getattr(options, field.name), declared(type(options))[field.name]
        if option.help and (field.name in always or value != field.default):
            words += [flag(field.name, option)]
            if field.name == "tokens" and value == ("all",):
                words += ["none"]  # of the poolings
            else:
                words += [] if value is True else [_text(value)]
    return words


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
