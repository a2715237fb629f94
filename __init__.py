"""bertvision: an activation feature store and training pipeline for BERT.

Public names are resolved on first use (PEP 562), so that `import bertvision` costs milliseconds.
They are all that the documentation imports; where they are defined may change, these names do not.

>>> import bertvision
>>> store = bertvision.ActivationStore.open("activations")
>>> store["1e"]["train"][17].shape  # (seq, hidden, layers)
torch.Size([85, 32, 3])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bertvision.pipelines import analysis

__version__ = "0.2.0"

_MODULES = {
    # what one does
    "jobs.experiment": ("quickstart", "status", "score", "report"),
    "jobs.finetune": ("adopt", "finetune", "logits", "repeat", "spread"),
    "jobs.extract": ("extract",),
    "jobs.foreign": ("import_states", "export_states"),
    "jobs.generation": ("generate", "generated_texts"),
    "jobs.store": ("audit", "shuffle_tokens"),
    "jobs.heads": ("train", "evaluate", "heads"),
    "jobs.predict": ("predict",),
    "jobs.sweep": ("sweep",),
    "jobs.dry_run": ("dry_run",),
    "jobs.plan": ("plan",),
    "jobs.doctor": ("doctor",),
    "jobs.systems": ("ensemble", "compare"),
    "jobs.latency": ("latency", "quantise"),
    "jobs.hub": ("push", "pull"),
    "jobs.results": ("error_analysis", "results", "predictions", "table"),
    "jobs.readouts": ("probe", "rank", "similarity"),
    "jobs.view": ("view",),
    "jobs.show": ("Row", "Rows"),
    "pipelines.extraction.features": ("ensure_features",),
    "pipelines.foreign.speculators": ("register_speculators_backend",),
    "pipelines.training.trained_head": ("load_head",),
    "pipelines.sharing.head": ("Head",),
    "pipelines.prediction.predictor": ("Predictor",),
    # what it is done with
    "pipelines.workspace.workspace": ("Workspace",),
    "pipelines.extraction.pooled_split": ("PooledSplit",),
    "featurestore.store": ("ActivationStore",),
    "featurestore.writing.appending": ("ActivationWriter",),
    "featurestore.split": ("ActivationSplit",),
    "featurestore.batch": ("ActivationBatch",),
    "featurestore.stream": ("ActivationLoader",),
    "featurestore.tokens.mixture": ("TokenMixture",),
    "featurestore.tokens.stream": ("TokenStream",),
    "featurestore.tokens.transform": ("TokenTransform",),
    "featurestore.tokens.feed": ("TokenBatch",),
    "featurestore.format.logits": ("TopLogits",),
    "featurestore.sampler": ("Sampler", "SequentialSampler", "ShuffleSampler"),
    "featurestore.format.plan": ("ShardPlan",),
    "pipelines.training.datamodule": ("ActivationDataModule", "HiddenStates"),
    "errors": ("BertvisionError", "BertvisionWarning"),
    # options of what one does
    "pipelines.workspace.job_options": (
        "DataOptions",
        "FinetuneOptions",
        "ExtractOptions",
        "TrainOptions",
        "GenerateOptions",
    ),
    "pipelines.readouts.options": ("ProbeOptions", "RankOptions", "SimilarityOptions"),
    # heads of one's own
    "models.factory": ("build_head",),
    "models.heads": ("SpanHead", "ClassificationHead"),
    "models.outputs": (
        "ClassOutput",
        "SpanOutput",
        "class_loss",
        "span_loss",
        "distillation_loss",
    ),
    # variants of fine-tuning of one's own
    "pipelines.variants.variant": ("Variant",),
    # tasks of one's own
    "pipelines.tasks.task": ("Task",),
    "pipelines.tasks.data": ("TaskConfig", "Sentence", "TaskData"),
    "pipelines.tasks.source": ("Line", "find_file", "read_text", "splits_in", "text_lines"),
    "pipelines.tasks.sentences.task": ("SentenceTask",),
    "pipelines.tasks.sentences.rows": ("RawSentence", "SentenceRows"),
    "pipelines.tasks.tables": ("require_fields",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def _home(name: str) -> str | None:
    """The module of a public name; None where there is no such name."""
    is_analysis = name not in _HOME and name in analysis.names()
    return f"pipelines.analysis.{name}" if is_analysis else _HOME.get(name)


__all__ = ["__version__", *_HOME, *analysis.names()]  # noqa: PLE0604  (the lazy names are the public names)

if TYPE_CHECKING:  # the same names for type checkers and editors; a test compares
    from bertvision.errors import BertvisionError as BertvisionError
    from bertvision.errors import BertvisionWarning as BertvisionWarning
    from bertvision.featurestore.batch import ActivationBatch as ActivationBatch
    from bertvision.featurestore.format.logits import TopLogits as TopLogits
    from bertvision.featurestore.format.plan import ShardPlan as ShardPlan
    from bertvision.featurestore.sampler import Sampler as Sampler
    from bertvision.featurestore.sampler import SequentialSampler as SequentialSampler
    from bertvision.featurestore.sampler import ShuffleSampler as ShuffleSampler
    from bertvision.featurestore.split import ActivationSplit as ActivationSplit
    from bertvision.featurestore.store import ActivationStore as ActivationStore
    from bertvision.featurestore.stream import ActivationLoader as ActivationLoader
    from bertvision.featurestore.tokens.feed import TokenBatch as TokenBatch
    from bertvision.featurestore.tokens.mixture import TokenMixture as TokenMixture
    from bertvision.featurestore.tokens.stream import TokenStream as TokenStream
    from bertvision.featurestore.tokens.transform import TokenTransform as TokenTransform
    from bertvision.featurestore.writing.appending import ActivationWriter as ActivationWriter
    from bertvision.jobs.doctor import doctor as doctor
    from bertvision.jobs.dry_run import dry_run as dry_run
    from bertvision.jobs.experiment import quickstart as quickstart
    from bertvision.jobs.experiment import report as report
    from bertvision.jobs.experiment import score as score
    from bertvision.jobs.experiment import status as status
    from bertvision.jobs.extract import extract as extract
    from bertvision.jobs.finetune import adopt as adopt
    from bertvision.jobs.finetune import finetune as finetune
    from bertvision.jobs.finetune import logits as logits
    from bertvision.jobs.finetune import repeat as repeat
    from bertvision.jobs.finetune import spread as spread
    from bertvision.jobs.foreign import export_states as export_states
    from bertvision.jobs.foreign import import_states as import_states
    from bertvision.jobs.generation import generate as generate
    from bertvision.jobs.generation import generated_texts as generated_texts
    from bertvision.jobs.heads import evaluate as evaluate
    from bertvision.jobs.heads import heads as heads
    from bertvision.jobs.heads import train as train
    from bertvision.jobs.hub import pull as pull
    from bertvision.jobs.hub import push as push
    from bertvision.jobs.latency import latency as latency
    from bertvision.jobs.latency import quantise as quantise
    from bertvision.jobs.plan import plan as plan
    from bertvision.jobs.predict import predict as predict
    from bertvision.jobs.readouts import probe as probe
    from bertvision.jobs.readouts import rank as rank
    from bertvision.jobs.readouts import similarity as similarity
    from bertvision.jobs.results import error_analysis as error_analysis
    from bertvision.jobs.results import predictions as predictions
    from bertvision.jobs.results import results as results
    from bertvision.jobs.results import table as table
    from bertvision.jobs.show import Row as Row
    from bertvision.jobs.show import Rows as Rows
    from bertvision.jobs.store import audit as audit
    from bertvision.jobs.store import shuffle_tokens as shuffle_tokens
    from bertvision.jobs.sweep import sweep as sweep
    from bertvision.jobs.systems import compare as compare
    from bertvision.jobs.systems import ensemble as ensemble
    from bertvision.jobs.view import view as view
    from bertvision.models.factory import build_head as build_head
    from bertvision.models.heads import ClassificationHead as ClassificationHead
    from bertvision.models.heads import SpanHead as SpanHead
    from bertvision.models.outputs import ClassOutput as ClassOutput
    from bertvision.models.outputs import SpanOutput as SpanOutput
    from bertvision.models.outputs import class_loss as class_loss
    from bertvision.models.outputs import distillation_loss as distillation_loss
    from bertvision.models.outputs import span_loss as span_loss
    from bertvision.pipelines.analysis.attention import attention as attention
    from bertvision.pipelines.analysis.cca import cca as cca
    from bertvision.pipelines.analysis.cka import cka as cka
    from bertvision.pipelines.analysis.cloze import cloze as cloze
    from bertvision.pipelines.analysis.context import context as context
    from bertvision.pipelines.analysis.exits import exits as exits
    from bertvision.pipelines.analysis.isotropy import isotropy as isotropy
    from bertvision.pipelines.analysis.languages import languages as languages
    from bertvision.pipelines.analysis.lens import lens as lens
    from bertvision.pipelines.analysis.prune import prune as prune
    from bertvision.pipelines.analysis.relations import relations as relations
    from bertvision.pipelines.analysis.rsa import rsa as rsa
    from bertvision.pipelines.analysis.structure import structure as structure
    from bertvision.pipelines.analysis.twonn import twonn as twonn
    from bertvision.pipelines.extraction.features import ensure_features as ensure_features
    from bertvision.pipelines.extraction.pooled_split import PooledSplit as PooledSplit
    from bertvision.pipelines.foreign.speculators import (
        register_speculators_backend as register_speculators_backend,
    )
    from bertvision.pipelines.prediction.predictor import Predictor as Predictor
    from bertvision.pipelines.readouts.options import ProbeOptions as ProbeOptions
    from bertvision.pipelines.readouts.options import RankOptions as RankOptions
    from bertvision.pipelines.readouts.options import SimilarityOptions as SimilarityOptions
    from bertvision.pipelines.sharing.head import Head as Head
    from bertvision.pipelines.tasks.data import Sentence as Sentence
    from bertvision.pipelines.tasks.data import TaskConfig as TaskConfig
    from bertvision.pipelines.tasks.data import TaskData as TaskData
    from bertvision.pipelines.tasks.sentences.rows import RawSentence as RawSentence
    from bertvision.pipelines.tasks.sentences.rows import SentenceRows as SentenceRows
    from bertvision.pipelines.tasks.sentences.task import SentenceTask as SentenceTask
    from bertvision.pipelines.tasks.source import Line as Line
    from bertvision.pipelines.tasks.source import find_file as find_file
    from bertvision.pipelines.tasks.source import read_text as read_text
    from bertvision.pipelines.tasks.source import splits_in as splits_in
    from bertvision.pipelines.tasks.source import text_lines as text_lines
    from bertvision.pipelines.tasks.tables import require_fields as require_fields
    from bertvision.pipelines.tasks.task import Task as Task
    from bertvision.pipelines.training.datamodule import (
        ActivationDataModule as ActivationDataModule,
    )
    from bertvision.pipelines.training.datamodule import HiddenStates as HiddenStates
    from bertvision.pipelines.training.trained_head import load_head as load_head
    from bertvision.pipelines.variants.variant import Variant as Variant
    from bertvision.pipelines.workspace.job_options import DataOptions as DataOptions
    from bertvision.pipelines.workspace.job_options import ExtractOptions as ExtractOptions
    from bertvision.pipelines.workspace.job_options import FinetuneOptions as FinetuneOptions
    from bertvision.pipelines.workspace.job_options import GenerateOptions as GenerateOptions
    from bertvision.pipelines.workspace.job_options import TrainOptions as TrainOptions
    from bertvision.pipelines.workspace.workspace import Workspace as Workspace


def __getattr__(name: str) -> Any:
    if (home := _home(name)) is None:
        raise AttributeError(f"module 'bertvision' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"bertvision.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *analysis.names()})
