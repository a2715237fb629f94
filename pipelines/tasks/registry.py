"""The tasks by name: what can be said of a task without importing anything heavy.

A task is a class in one file (see `task.Task`) and a line in `TASKS`. One of a user's own needs no
line: it is named by the dotted path ``package.module:Class``, or offered by an installed package as
an entry point of the group ``bertvision.tasks``; then its class says what a line would.
"""

from __future__ import annotations

import os
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bertvision.errors import InputError, did_you_mean
from bertvision.pipelines.poolings import TokenPooling
from bertvision.plugins import is_dotted_path, load_class, offered

if TYPE_CHECKING:
    from bertvision.models import Kind

TaskKind = Literal["span", "classification", "token", "tree", "phrases", "order"]
"""Subject of the logits of a task: those of heads (`models.Kind`); and what no head on stored
states learns, ``tree``, a head and a relation for each word, ``phrases``, the class of a pair of
spans, and ``order``, that of sentences."""


class TaskEntry(NamedTuple):
    """A line of the registry: what can be said of a task without importing anything heavy."""

    target: str
    """Dotted path ``package.module:Class`` of its `Task`."""
    headline: str
    """The metric that stands for a system where there is room for one number."""
    tokens: TokenPooling
    """Default of an extraction: the tokens that the task's heads need."""
    hub: str | None = None
    """Data set on the hub (``owner/name`` or ``owner/name:config``) where ``--task`` names the
    task; None where it names a data set, or there is none."""
    max_length: int = 386
    """Longest window in tokens, unless told otherwise."""
    kind: TaskKind = "classification"
    """``span`` where a span of the text is looked for, so that logits are of tokens; those of
    classes and scores are of windows, and scores are a classification too."""
    learns: bool = True
    """Whether an encoder can be fine-tuned on it."""


def _task(target: str, headline: str = "", tokens: TokenPooling = "all", **facts: Any) -> TaskEntry:
    return TaskEntry(f"bertvision.pipelines.tasks.{target}", headline, tokens, **facts)


def _sentences(target: str, headline: str = "accuracy", **facts: Any) -> TaskEntry:
    return _task(f"sentences.{target}", headline, "cls", max_length=128, **facts)


def _glue(name: str, headline: str = "accuracy") -> TaskEntry:
    return _sentences("labelled:GlueTask", headline, hub=f"nyu-mll/glue:{name}")


PROBING = (
    *("sentence_length", "word_content", "tree_depth", "top_constituents", "bigram_shift"),
    *("past_present", "subj_number", "obj_number", "odd_man_out", "coordination_inversion"),
)
"""SentEval's probing tasks, from surface over syntax to semantics, in the order of their paper."""
_SIMILARITY = ("sick", "sts_benchmark", "sts12", "sts13", "sts14", "sts15", "sts16")

TASKS: dict[str, TaskEntry] = {
    "squad_v2": _task("squad.spans:SpanTask", "f1", kind="span"),
    "squad_v1": _task("squad.spans:SpanTask", "f1", kind="span"),
    "answerable": _task("squad.spans:AnswerableTask", "accuracy", "cls", hub="squad_v2"),
    "cola": _glue("cola", "matthews"),
    "sst2": _glue("sst2"),
    "mrpc": _glue("mrpc"),
    "qqp": _glue("qqp"),
    "stsb": _glue("stsb", "pearson"),
    "mnli": _glue("mnli"),
    "qnli": _glue("qnli"),
    "rte": _glue("rte"),
    "wnli": _glue("wnli"),
    **dict.fromkeys(PROBING, _sentences("labelled:ProbingTask")),
    **dict.fromkeys(("mr", "cr", "subj", "mpqa", "trec"), _sentences("labelled:DownstreamTask")),
    "csv": _sentences("labelled:LabelledTask"),
    "wikiqa": _sentences("ranking:WikiqaTask", "map", learns=False),
    "wikiqa_pairs": _sentences("ranking:WikiqaPairsTask", "f1"),
    **dict.fromkeys(_SIMILARITY, _sentences("similarity:SimilarityTask", "spearman", learns=False)),
    "treebank": _task("treebank:TreebankTask", max_length=128, learns=False),
    "tagging": _task("tagging:TaggingTask", "entity_f1", max_length=128, kind="token"),
    "parsing": _task("parsing:ParsingTask", "las", max_length=128, kind="tree"),
    "phrases": _task("sentences.phrases:PhraseTask", "accuracy", max_length=128, kind="phrases"),
    "ordering": _task("ordering:OrderingTask", "tau", kind="order"),
    "spans": _task("spans:SpansTask", max_length=128, learns=False),
    "text": _task("documents:TextTask", max_length=512, learns=False),
    "chat": _task("chat:ChatTask", max_length=1024, learns=False),
    "features": _task("features:FeaturesTask", learns=False),
}

SQUAD = ("squad_v1", "squad_v2")
"""Tasks that follow from the data: on the command line their names are those of data sets."""

NAMED_BY_FILE = ("csv", "spans", "text", "chat")
"""Tasks of files of one's own: their data sets are named by the file."""

ENTRY_POINT_GROUP = "bertvision.tasks"

TRUST = "BERTVISION_TASKS"
"""Variable of the environment: dotted paths that may be imported, with commas between them."""

_WITHOUT_DATA = "features"  # says of a workspace that it has no task: nobody chooses it
_named: set[str] = set()


def is_task(name: str) -> bool:
    """Whether ``name`` is one of `TASKS`, of an installed package, or a dotted path."""
    return name in TASKS or is_dotted_path(name) or name in offered(ENTRY_POINT_GROUP)


def check_task(name: str) -> str:
    """Return ``name`` if it is that of a task; nothing is imported.

    Raises:
        InputError: it is not.
    """
    if not is_task(name):
        raise _no_task(name)
    return name


def find_task(name: str) -> TaskEntry:
    """Facts about a task.

    A class of one's own is imported for that, but only where the user named it: a workspace that
    somebody else made runs no code.

    Raises:
        InputError: there is none, or its class may not or cannot be imported.
    """
    if name in TASKS:
        return TASKS[name]
    check_task(name)
    if not is_dotted_path(name):
        return _entry_of(offered(ENTRY_POINT_GROUP)[name], named=False)
    trusted = {*_named, *os.environ.get(TRUST, "").split(",")}
    if name not in trusted and name.partition(":")[0] not in sys.modules:
        raise InputError(
            f"the task {name} is code of somebody's own: set {TRUST}={name} in the environment, or "
            "import its module in Python, to have it imported here"
        )
    return _entry_of(name, named=True)


def head_kind(name: str) -> Kind:
    """The kind of the heads that learn a task itself.

    Raises:
        InputError: no head learns it: what it predicts is neither a span nor a class of a window.
    """
    kind = find_task(name).kind
    if kind == "span" or kind == "classification" or kind == "token":
        return kind
    raise InputError(
        f"no head learns the task {name}, and no student: its output layer reads all tokens at "
        "once; `bertvision report` shows what the encoder itself scores, and analyses such as "
        "`bertvision cka` and probes of other data (`bertvision probe`) read its layers"
    )


def name_task(name: str) -> str:
    """`check_task`, of a name that the user gave: its class may be imported from now on.

    Raises:
        InputError: there is no such task, or none that has data.
    """
    if name == _WITHOUT_DATA:
        raise _no_task(name)
    _named.add(check_task(name))
    return name


def _no_task(name: str) -> InputError:
    known = [*(task for task in TASKS if task != _WITHOUT_DATA), *offered(ENTRY_POINT_GROUP)]
    return InputError(
        f"{name!r} is no task: {did_you_mean(name, known)}there are {', '.join(known)}; a class of "
        "your own is given as package.module:Class"
    )


def path_name(name: str) -> str:
    """The name of a task as files may carry it; of a dotted path what is safe of it."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()) if is_dotted_path(name) else name


@cache
def _entry_of(target: str, *, named: bool) -> TaskEntry:
    task = load_class(target, "task", named=named)
    missing = [field for field in TaskEntry._fields[1:] if not hasattr(task, field)]
    if missing:
        raise InputError(
            f"task {target!r} has no {missing[0]}: make it a class that inherits from "
            "bertvision.SentenceTask or bertvision.Task"
        )
    return TaskEntry(target, *(getattr(task, field) for field in TaskEntry._fields[1:]))
