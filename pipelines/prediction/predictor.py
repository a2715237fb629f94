"""Predictors: an encoder with what was trained on it, that answers texts.

A predictor is BERT with its own output layer, a head on its hidden states, or an ensemble of these,
at one snapshot. Texts become the windows that they are in training, and logits become answers by
the rules and the threshold of `bertvision evaluate`. Predictors of one snapshot share its encoder,
which is run once for all of them.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from bertvision.errors import BertvisionWarning, InputError, WorkspaceError
from bertvision.featurestore.storage.durable import make_folder
from bertvision.pipelines.encoders.loading import (
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from bertvision.pipelines.files import new_folder, sha256_of_files
from bertvision.pipelines.prediction.backbone import Backbone, Float32Array
from bertvision.pipelines.prediction.inputs import layout_of, make_item, zipped
from bertvision.pipelines.prediction.source import FILE, Source, find_source
from bertvision.pipelines.records import Record, read_record, write_record
from bertvision.pipelines.results.ensemble import combined
from bertvision.pipelines.results.systems import BERT, Combine
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards import predictor_card
from bertvision.pipelines.sharing.head import Head
from bertvision.pipelines.sharing.hub import cached_folder
from bertvision.pipelines.sharing.shareable import Shareable, is_shared, push_saved
from bertvision.pipelines.tasks.data import TaskConfig
from bertvision.pipelines.tasks.logits import Logits, WindowIndex
from bertvision.pipelines.tasks.tagging import tag_groups
from bertvision.pipelines.tasks.task import Task, load_task
from bertvision.pipelines.training.trained_head import task_of_kind
from bertvision.pipelines.variants.registry import load_variants
from bertvision.pipelines.variants.variant import restore, transformer_layers
from bertvision.pipelines.workspace.records import read_run_config, read_snapshot_info
from bertvision.pipelines.workspace.snapshots import encoder_of, load_snapshot

if TYPE_CHECKING:
    from typing import Self

    from transformers import PreTrainedModel


class PredictorRecord(Record):
    """``predictor.json``: what a saved predictor is made of, beside its weights."""

    name: str
    """As it is called in its workspace: ``adapter-64-shared:0.3e``."""
    task: TaskConfig
    members: tuple[str, ...]
    """`BERT`, and heads such as ``adapter-64-shared:0.3e``, in ``heads/0``, ``heads/1`` and so
    on."""
    combine: Combine | None = None
    """How softmaxes of several members are combined."""
    threshold: float | None = None
    """Threshold of no answer, in logits; None where the task has none."""
    threshold_tuned_on: str | None = None
    """Split of the workspace that tuned it; None where it was left at 0."""
    variant: tuple[str, ...] = ()
    """Changes of fine-tuning that the encoder has (`FinetuneConfig.variant`)."""
    checkpoint: str
    """Snapshot of the encoder."""
    weights_sha256: str
    """Digest of the snapshot's weights, of which those here may be a part."""


class Predictor:
    """An encoder with its output layer, a head or an ensemble of these, that answers texts.

    `load` makes one out of what a workspace has; `save_pretrained` writes one into a folder that
    needs no workspace, and `from_pretrained` reads it.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> _ = bertvision.evaluate("learned-pooling", trained_on="1e")
        >>> predictor = bertvision.Predictor.load("learned-pooling:1e")
        >>> answer = predictor(question="Where is it?", context="It is in the garden.")
        >>> sorted(answer)
        ['answer', 'end', 'score', 'start']
        >>> predictor.save_pretrained("my-predictor")
        >>> again = bertvision.Predictor.from_pretrained("my-predictor")
        >>> again(question="Where is it?", context="It is in the garden.") == answer
        True
    """

    def __init__(self, record: PredictorRecord, backbone: Backbone) -> None:
        self.record = record
        self._backbone = backbone
        name, first = record.task.name, record.members[0]
        self.task: Task = (
            load_task(name)
            if first == BERT
            else task_of_kind(backbone.heads[first].config.kind, name)
        )
        self.layout = layout_of(self.task, record.task)

    @classmethod
    def load(
        cls,
        what: str | Path,
        *,
        workspace: str | Path | None = None,
        precision: str = "auto",
    ) -> Self:
        """Load what `bertvision predict` takes.

        Args:
            what: ``bert:1e``, a trained head such as ``adapter-64-shared:0.3e``, or an ensemble
                ``max-bert+adapter-64-shared:1e``, in a workspace; or the folder of a snapshot, of a
                trained head or of a saved predictor; or ``owner/name`` of one on the hub.
            workspace: Folder of the workspace; by default the one you stand in.
            precision: Arithmetic: auto, 32 or bf16.

        Raises:
            UnknownNameError: There is none of that name.
            InputError: Its task has no texts that it answers.
            WorkspaceError: Its files are missing or damaged.
        """
        return load_predictors([find_source(str(what), workspace)], precision, kind=cls)[0]

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        named: str | Sequence[str] | None = None,
        precision: str = "auto",
    ) -> Self:
        """Load a predictor that `save_pretrained` or `push_to_hub` wrote.

        Every file is compared with its digest before it is read, and nothing is unpickled.

        Args:
            place: Folder of the predictor, or ``owner/name`` on the hub.
            revision: Branch, tag or commit on the hub.
            token: Token for the hub; by default that of the environment or of its login.
            cache_dir: Folder of downloads; by default the hub's cache.
            local_files_only: Take what the cache has, and ask nobody.
            named: Dotted path of a head's class, where it is one of somebody's own; of several
                heads those of all.
            precision: Arithmetic: auto, 32 or bf16.

        Raises:
            UnknownNameError: There is neither such a folder nor a name of a repository.
            WorkspaceError: A file is missing, damaged, or not of a predictor.
            HubError: The hub cannot be reached, or refuses.
        """
        folder = Path(place).expanduser()
        if not folder.is_dir():
            bring = partial(
                cached_folder,
                str(place),
                missing="give that of a saved predictor, or owner/name on the hub",
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
            folder = bring((FILE,), revision=revision)
            _check_is_predictor(folder, str(place))  # before GBs are brought
            patterns = ("*.json", "*.safetensors", "*.txt", "*.model")
            folder = bring(patterns, revision=folder.name)  # the commit of which the record is
        record = _checked(folder)
        task = load_task(record.task.name)
        owns = BERT in record.members
        whole = owns or bool(record.variant)
        options = task.model_options(record.task) if whole else {}
        model = load_model(folder, *([task.model_class] if whole else []), **options)
        restore(load_variants(record.variant), model, folder)
        runs = [member for member in record.members if member != BERT]
        named = [named] if isinstance(named, str) else named or ()
        heads = {
            run: _load_head(folder / "heads" / str(i), run, named) for i, run in enumerate(runs)
        }
        tokenizer = load_tokenizer(folder)
        return cls(
            record, Backbone(folder, model, tokenizer, heads, owns=owns, precision=precision)
        )

    def __call__(
        self,
        inputs: Any = None,
        *,
        question: str | Sequence[str] | None = None,
        context: str | Sequence[str] | None = None,
        top_k: int | None | Literal[""] = "",
    ) -> Any:
        """Answer texts, in the form of `transformers.pipeline` for the same task.

        Args:
            inputs: A text or a list of texts; of pairs, dicts with ``text`` and ``text_pair``; of
                questions, dicts with ``question`` and ``context``.
            question: Question, or several, in the place of ``inputs``.
            context: Context of the question, or one for each.
            top_k: Classes to return, the likeliest first; None returns all. By default one, without
                a list around it.

        Returns:
            Of classes ``label`` and ``score``, a probability; of a score itself the same, with the
            label ``score``; of words what the token-classification pipeline gives with
            ``aggregation_strategy="first"``, for words between spaces; of questions ``score``,
            ``start``, ``end`` and ``answer``, which is empty where the context has none; of parses
            and orders, for which there is no pipeline, what `Task.answers` says. A dict for one
            dict, parse or order; a list for a list, and for one text alone, as the pipelines have
            it.

        Raises:
            InputError: An input is empty, or none that the task takes.
        """
        if question is not None or context is not None:
            inputs = zipped(question, context)
        several = not isinstance(inputs, str | Mapping)
        if several and not isinstance(inputs, Iterable):
            raise InputError(f"{inputs!r} is no input: give a text, a dict with texts, or several")
        given = list(inputs) if several else [inputs]
        items = [self.item(one, str(i)) for i, one in enumerate(given)]
        answers = [
            self._as_pipeline(answer, top_k, one)
            for answer, one in zip(self.answers(items), given, strict=True)
        ]
        alike = self.task.kind in ("token", "tree", "order")
        if several or (isinstance(inputs, str) and top_k == "" and not alike):
            return answers
        return answers[0]

    def _as_pipeline(
        self, answer: Mapping[str, Any], top_k: int | None | Literal[""], given: Any
    ) -> Any:
        if self.task.kind == "token":
            text = given if isinstance(given, str) else given.get("text", given.get("sentence"))
            places = [match.span() for match in re.finditer(r"\S+", text)]
            return tag_groups(text, places, answer["tags"], answer["scores"])
        if self.task.kind == "span":
            return {name: answer[name] for name in ("score", "start", "end", "answer")}
        if self.task.kind in ("tree", "order"):
            return dict(answer)
        if top_k == "" or "probabilities" not in answer:
            best = {"label": answer["label"], "score": answer["score"]}
            return best if top_k == "" else [best]
        ranked = sorted(answer["probabilities"].items(), key=lambda pair: -pair[1])
        return [{"label": label, "score": score} for label, score in ranked[:top_k]]

    @property
    def precision(self) -> str:
        """Arithmetic of the encoder: 32 or bf16."""
        return self._backbone.precision

    @property
    def digest(self) -> str:
        """Digest of all that its answers follow from: weights, settings, threshold, arithmetic."""
        digest = hashlib.sha256(self.record.model_dump_json().encode())
        digest.update(f"{self.precision} {version('bertvision')}".encode())
        for member in self.record.members:
            if member != BERT:
                for values in self._backbone.heads[member].state_dict().values():
                    digest.update(values.detach().cpu().numpy().tobytes())
        return digest.hexdigest()

    def item(self, given: Any, name: str = "0") -> Any:
        """The item of a text, or of texts by name (see `make_item`).

        Args:
            given: One of ``inputs`` of `__call__`.
            name: Id of the item.

        Raises:
            InputError: A text is missing, empty, or too long.
        """
        return make_item(self.task, self.layout, given, name)

    def logits(self, items: Sequence[Any], desc: str | None = None) -> Logits:
        """Logits on all windows of some items.

        Args:
            items: Items of the task, as `item` makes them, or with labels.
            desc: Name of the progress bar; None shows none.

        Raises:
            InputError: An item makes no window that the encoder takes.
        """
        return together([self], items, desc)[0]

    def answers(self, items: Sequence[Any], desc: str | None = None) -> list[Mapping[str, Any]]:
        """Answers to items, in their order (see `Task.answers`).

        Args:
            items: As of `logits`.
            desc: As of `logits`.
        """
        if not items:
            return []
        return self.read(self.logits(items, desc))

    def read(self, logits: Logits) -> list[Mapping[str, Any]]:
        """Answers that logits mean, by the threshold of the predictor.

        Args:
            logits: Logits of all windows of the items.
        """
        if not all(np.isfinite(values).all() for values in logits.arrays.values()):
            raise InputError(
                f"the logits of {self.record.name} hold NaN or infinity: the model has diverged"
            )
        return self.task.answers(logits, self.record.task, self.record.threshold)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the encoder, its tokenizer and the heads into one folder.

        The encoder is in the form of transformers, with its output layer where that answers.
        Where heads alone answer it is cut above the highest hidden state that they read, unless
        its family computes other states then.

        Args:
            folder: Folder to write; replaced as a whole where it is a predictor already.

        Raises:
            InputError: The encoder has parts that its family does not have, such as adapters.
            WorkspaceError: Something else is in the folder.
            DiskSpaceError: The disk is full.
        """
        path = Path(folder).expanduser()
        if path.is_dir() and any(path.iterdir()) and not _is_saved(path):
            raise WorkspaceError(f"{path} holds something else: name another folder")
        make_folder(path.parent)
        with new_folder(path) as made:
            self._write(made)

    def _write(self, made: Path) -> None:
        backbone, source = self._backbone, self._backbone.folder
        heads = [backbone.heads[run] for run in self.record.members if run != BERT]
        with quiet_transformers():
            whole = BERT in self.record.members or self.record.variant
            if whole or (source / FILE).is_file():
                for path in sorted(source.iterdir()):
                    if path.is_file() and is_shared(path.name) and path.name not in _RECORDS:
                        shutil.copyfile(path, made / path.name)
            else:
                highest = max(max(head.config.layers) for head in heads)
                _cut(encoder_of(source), highest, backbone.tokenizer).save_pretrained(made)
                backbone.tokenizer.save_pretrained(made)
        for i, head in enumerate(heads):
            head.save_pretrained(made / "heads" / str(i))
        write_record(made / FILE, self.record)
        manifests.write_manifest(made, "predictor", self.record.name, sorted(_files(made)))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        license: str | None = None,  # noqa: A002
        replace: bool = False,
        token: str | bool | None = None,
    ) -> str:
        """Send the predictor to the hub, with a card.

        Args:
            repo_id: ``owner/name``, made where there is none.
            private: Visibility of a new repository; by default its owner's.
            revision: Branch to send to, made where there is none.
            license: Licence that the card names; by default it names none.
            replace: Take the place of what `push` did not send, or of another kind of thing.
            token: Token for the hub; by default that of the environment or of its login.

        Returns:
            The address of the repository.

        Raises:
            InputError: ``repo_id`` is none, or the repository holds something else.
            HubError: The hub cannot be reached, or refuses.
        """
        return push_saved(
            lambda folder, name: self.shareable(folder, name, license),
            repo_id,
            private=private,
            revision=revision,
            replace=replace,
            token=token,
        )

    def shareable(self, folder: Path, name: str, licence: str | None) -> Shareable:
        """Save the predictor for the hub.

        Args:
            folder: Folder to save it in; it has to stay until all is sent.
            name: ``owner/name`` of the repository, for the card.
            licence: Licence that the card names; None names none.
        """
        self.save_pretrained(folder / "predictor")
        record = self.record
        facts = {
            "task": record.task.name,
            "made of": ", ".join(record.members),
            "encoder": f"snapshot {record.checkpoint}, weights {record.weights_sha256[:12]}…",
            "classes": ", ".join(record.task.classes),
            "threshold of no answer": record.threshold,
        }
        question = "context" in self.layout.columns
        card = predictor_card(name, record.name, facts, question, licence)
        return Shareable("predictor", record.name, _files(folder / "predictor"), card)

    def __repr__(self) -> str:
        return f"<Predictor {self.record.name}: {self.record.task.name}>"


_RECORDS = {FILE, manifests.FILE, manifests.CARD, "snapshot.json"}
"""Files beside the weights that are not the encoder's."""


P = TypeVar("P", bound=Predictor)


def check_alike(predictors: Sequence[Predictor]) -> None:
    """Refuse predictors that are asked at once and tell different things.

    Raises:
        InputError: Their tasks or the classes of these differ.
    """
    first = predictors[0]
    for other in predictors[1:]:
        one, two = ((p.task.name, p.record.task.classes) for p in (first, other))
        if one != two:
            what = "other classes" if one[0] == two[0] else two[0]
            raise InputError(
                f"{first.record.name} answers {one[0]} and {other.record.name} {what}: ask "
                "systems of one task at once"
            )


def together(
    predictors: Sequence[Predictor], items: Sequence[Any], desc: str | None = None
) -> list[Logits]:
    """Logits of several predictors on the same items; encoders that they share run once.

    Args:
        predictors: Predictors of one task's items.
        items: Items of the task.
        desc: Name of the progress bar; None shows none.

    Returns:
        The logits of each, in order.
    """
    made: dict[Backbone, tuple[WindowIndex, dict[str, dict[str, Float32Array]]]] = {}
    for predictor in predictors:
        backbone = predictor._backbone
        if backbone in made:
            continue
        windows = predictor.task.windows(items, backbone.tokenizer, predictor.record.task)
        members = {
            member: one.task
            for one in predictors
            if one._backbone is backbone
            for member in one.record.members
        }
        index = WindowIndex.of(items, windows)
        made[backbone] = index, backbone.logits(windows, members, desc)
    return [_combined(predictor, *made[predictor._backbone]) for predictor in predictors]


def _combined(
    predictor: Predictor, windows: WindowIndex, made: Mapping[str, Mapping[str, Float32Array]]
) -> Logits:
    """The logits of the members as one."""
    members, combine = predictor.record.members, predictor.record.combine
    if combine is None:
        return Logits(made[members[0]], windows)
    return combined([Logits(made[member], windows) for member in members], combine)


def load_predictors(
    sources: Sequence[Source | str],
    precision: str = "auto",
    *,
    kind: type[P] = Predictor,  # type: ignore[assignment]
) -> list[P]:
    """Load several predictors; those of one snapshot share its encoder.

    Args:
        sources: Source of each, as of `find_source`.
        precision: Arithmetic: auto, 32 or bf16.
        kind: Class of the predictors.

    Raises:
        InputError: The task of one has no texts that it answers.
        WorkspaceError: Files are missing or damaged.
    """
    backbones: dict[Path, Backbone] = {}
    made: list[P] = []
    for source in sources:
        if isinstance(source, str):
            made.append(kind.from_pretrained(source, precision=precision))
            continue
        folder = source.workspace.snapshot_dir(source.checkpoint)
        if folder not in backbones:
            sharing = [
                other
                for other in sources
                if isinstance(other, Source)
                and other.workspace.snapshot_dir(other.checkpoint) == folder
            ]
            backbones[folder] = _backbone(folder, sharing, precision)
        info = read_snapshot_info(folder)
        record = PredictorRecord(
            name=source.name,
            task=info.task,
            variant=info.finetune.variant,
            members=source.members,
            combine=source.combine,
            checkpoint=info.tag,
            weights_sha256=info.weights_sha256,
        )
        predictor = kind(record, backbones[folder])
        if predictor.task.tunes:
            tuned_on = source.result and source.result.threshold_tuned_on
            predictor.record = record.model_copy(
                update={"threshold": _threshold(source), "threshold_tuned_on": tuned_on}
            )
        made.append(predictor)
    return made


def _backbone(folder: Path, sources: Sequence[Source], precision: str) -> Backbone:
    """The encoder of a snapshot with all that reads its hidden states."""
    snapshot = load_snapshot(folder)
    folders = {name: path for source in sources for name, path in source.heads.items()}
    heads = {
        name: _load_head(path, name, [path for source in sources for path in source.classes])
        for name, path in folders.items()
    }
    owns = any(BERT in source.members for source in sources)
    return Backbone(
        *(folder, snapshot.model, snapshot.tokenizer, heads), owns=owns, precision=precision
    )


def _load_head(folder: Path, member: str, classes: Sequence[str]) -> Head:
    """A head of a predictor, of a class of somebody's own where that was named.

    Args:
        folder: Folder of the head.
        member: Its name among the members.
        classes: Dotted paths that were named.

    Raises:
        InputError: Its class was not named.
    """
    head = read_run_config(folder).head
    if ":" in head and head not in classes:
        raise InputError(
            f"{member} is of the class {head}, which is code of somebody's own: write {head} in "
            "the place of its name, or give named= in Python, to have it imported"
        )
    return Head.from_pretrained(folder, named=head)


def _threshold(source: Source) -> float | None:
    """The threshold of no answer that a system was scored with, or 0 with a warning."""
    if source.result is not None:
        return source.result.rules["n-best"]["threshold"]
    run = source.members[0].rpartition(":")[0] or BERT
    how = "finetune" if run == BERT else f"evaluate {run} --checkpoint {source.checkpoint}"
    warnings.warn(
        f"the threshold of no answer of {source.name} is 0, since it was not scored: `bertvision "
        f"{how}` tunes it",
        BertvisionWarning,
        stacklevel=4,
    )
    return 0.0


def _cut(model: PreTrainedModel, highest: int, tokenizer: Any) -> PreTrainedModel:
    """An encoder without the layers above a hidden state, if it computes the same below.

    Args:
        model: Encoder without an output layer.
        highest: Index of the highest hidden state that is read.
        tokenizer: Its tokenizer.
    """
    depth = int(model.config.num_hidden_layers)
    if highest >= depth:
        return model
    lower = copy.deepcopy(model)
    del transformer_layers(lower)[highest:]
    lower.config.num_hidden_layers = highest
    text = tokenizer("Whether both compute the same.", return_tensors="pt")
    given = {name: text[name] for name in ("input_ids", "attention_mask")}
    with torch.inference_mode():
        whole, below = (m(**given, output_hidden_states=True).hidden_states for m in (model, lower))
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(whole, below, strict=False))
    return lower if same else model


def _files(folder: Path) -> dict[str, Path]:
    """The files of a saved predictor, by their paths inside its folder."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path for name, path in paths.items() if path.is_file() and is_shared(name)}


def _is_saved(folder: Path) -> bool:
    """Whether a folder is one of a saved predictor."""
    try:
        return manifests.read_manifest(folder).kind == "predictor"
    except WorkspaceError:
        return False


def _check_is_predictor(folder: Path, name: str) -> None:
    if not (folder / FILE).is_file():
        raise WorkspaceError(
            f"{name} holds no predictor: Predictor.save_pretrained writes one, with the encoder "
            "and the heads"
        )


def _checked(folder: Path) -> PredictorRecord:
    """The record of a saved predictor, after comparing its files with their digests.

    Raises:
        WorkspaceError: It is none, or a file is missing or damaged.
    """
    _check_is_predictor(folder, str(folder))
    listed = manifests.read_manifest(folder).files
    if strange := sorted(set(_files(folder)) - {*listed, manifests.FILE}):
        raise WorkspaceError(f"{folder / strange[0]} was not saved with the predictor: remove it")
    for name, due in listed.items():
        path = folder / name
        if not is_shared(name) or not path.is_file() or sha256_of_files([path]) != due.sha256:
            raise WorkspaceError(f"{path} is missing or damaged: it is not as it was saved")
    return read_record(folder / FILE, PredictorRecord, "save_pretrained", "save it again")
