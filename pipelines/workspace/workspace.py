"""The workspace: the folder of one experiment.

```
bertvision.yaml        model, task, data with digests, fine-tuning, seeds, versions
snapshots/0.3e/        BERT at a point of fine-tuning, in save_pretrained form
bert/0.3e/             its span logits, predictions and metrics
activations/           the store of hidden states, where it is not kept elsewhere
extraction/0.3e/       what extractions cost
datasets/              where added data sets come from
probes/ ranking/ similarity/ analysis/  what was probed, ranked, read from hidden states
heads/0.3e/<run>/      heads, by the snapshot whose activations they were trained on
quantised/0.3e/        the same of BERT with 8-bit linear layers
latency/0.3e.json      how long answers take
ensembles/0.3e/<name>/ ensembles, by the snapshot they were scored on
report/                the report
finetune/              log of fine-tuning; the resume file while it runs
```
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertvision.errors import InputError, StoreNotFoundError, UnknownNameError, WorkspaceError
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.featurestore.views.html import html_table
from bertvision.pipelines.reading import StoredName
from bertvision.pipelines.tasks.registry import find_task
from bertvision.pipelines.workspace.config import WorkspaceConfig
from bertvision.pipelines.workspace.runs import Run

if TYPE_CHECKING:
    from bertvision.featurestore.split import ActivationSplit
    from bertvision.featurestore.store import SnapshotSplits
    from bertvision.featurestore.stored_split import StoredSplit
    from bertvision.pipelines.tasks.windows import Windows
    from bertvision.pipelines.workspace.dataset import Dataset

FILE = "bertvision.yaml"
RESULTS = (
    *("bert", "quantised", "heads", "ensembles"),
    *("probes", "ridge_probes", "ranking", "similarity", "analysis", "latency"),
)
"""Folders of what was found, which a report shows."""


@dataclass(frozen=True)
class Workspace:
    """An open workspace; make one with `create` or `find`."""

    root: Path
    """Absolute path of the folder."""
    config: WorkspaceConfig
    """The contents of its ``bertvision.yaml``."""
    _datasets: dict[str | None, Dataset] = field(default_factory=dict, compare=False, repr=False)
    """By name, shared with those that `at` makes, so that items are read once."""

    def __fspath__(self) -> str:
        """Path of the folder: a job takes the workspace itself for ``workspace``."""
        return str(self.root)

    def __repr__(self) -> str:
        (_, task), (_, model), (_, snapshots) = self._facts()
        return f"<Workspace {self.root}: {task}, {model}; snapshots {snapshots}>"

    def _repr_html_(self) -> str:
        return html_table([], self._facts(), title=f"Workspace {self.root}")

    def _facts(self) -> list[tuple[str, str]]:
        c, names = self.config, ", ".join(self.snapshots()) or "none yet"
        return [("task", c.task.name), ("model", c.model.name_or_path), ("snapshots", names)]

    @classmethod
    def create(cls, root: str | Path, config: WorkspaceConfig) -> Workspace:
        """Make a workspace at ``root``: the folder and its ``bertvision.yaml``.

        Raises:
            WorkspaceError: there is one already, or the rest of one.
        """
        root = Path(root).expanduser().resolve()
        if (root / FILE).exists():
            raise WorkspaceError(f"{root} is a workspace already: use another --workspace")
        for name in ("snapshots", "activations", *RESULTS):
            if (root / name).exists() and (name not in RESULTS or _holds_records(root / name)):
                raise WorkspaceError(
                    f"{root / name} is left of a workspace without its {FILE}: move it elsewhere, "
                    "or use another --workspace"
                )
        root.mkdir(parents=True, exist_ok=True)
        config.write(root / FILE)
        return cls(root, config)

    def ensure_written(self) -> Workspace:
        """Itself, made on the disk where it was only planned (see `create`)."""
        return self if (self.root / FILE).is_file() else self.create(self.root, self.config)

    @classmethod
    def find(cls, root: str | Path | None = None) -> Workspace:
        """Open the workspace at ``root``, or the one the current folder stands in.

        Args:
            root: its folder; None looks in the current folder and its parents.

        Raises:
            WorkspaceError: there is none, or its ``bertvision.yaml`` is not readable.
            InputError: ``root`` is a file.
        """
        if root is not None:
            places = [Path(root).expanduser().resolve()]
            where = str(places[0])
            if places[0].is_file():
                raise InputError(f"--workspace {root} is a file: give a folder")
        else:
            places = [Path.cwd(), *Path.cwd().parents]
            where = f"{places[0]} and its parents"
        for place in places:
            if (place / FILE).is_file():
                return cls(place, WorkspaceConfig.read(place / FILE))
        raise WorkspaceError(
            f"no workspace in {where} (no {FILE}): name one with --workspace DIR, or make one with "
            "`bertvision quickstart`, `bertvision finetune --model NAME --train FILE --dev FILE`, "
            "or, of states alone, `bertvision extract --model NAME --task text --data FILE`"
        )

    @property
    def activations(self) -> str | Path:
        """Path or URL of the activation store (it may not exist yet)."""
        store = self.config.activations
        if store is None:
            return self.root / "activations"
        return store if "://" in store else Path(store)

    def at(self, store: str | None) -> Workspace:
        """The workspace with the activations of another store; None changes nothing.

        Args:
            store: a folder or an fsspec URL.

        Raises:
            InputError: the URL is of no known file system, or holds what may be a secret.
        """
        from bertvision.featurestore.storage.opening import open_storage

        if store is None:
            return self
        where = store if "://" in store else Path(store).expanduser().resolve()
        changed = {"activations": str(open_storage(where))}
        return replace(self, config=self.config.model_copy(update=changed))

    def keep_at(self, store: str | None) -> Workspace:
        """As `at`, and from now on every command uses that store.

        Raises:
            InputError: as `at`.
            StoreError: the place cannot be reached, or access to it is not allowed.
        """
        from bertvision.featurestore.storage.opening import open_storage

        moved = self.at(store)
        if moved.config != self.config:
            open_storage(moved.activations).names("")  # or a typing error would be kept
            moved.config.write_place(self.root / FILE)
        return moved

    def snapshots(self) -> list[SnapshotTag]:
        """Tags of the whole snapshots, ordered as numbers."""
        tags = []
        for path in (self.root / "snapshots").glob("*/snapshot.json"):
            try:
                tags.append(SnapshotTag(path.parent.name))
            except InputError:
                continue
        return sorted(tags)

    def snapshot_dir(self, tag: str) -> Path:
        """Folder of the snapshot ``tag`` (it may not exist yet)."""
        return self.root / "snapshots" / SnapshotTag(tag)

    def bert_dir(self, tag: str) -> Path:
        """Folder of BERT's own logits, predictions and metrics at ``tag``."""
        return self.root / "bert" / SnapshotTag(tag)

    def head_dir(self, trained_on: str, name: str) -> Path:
        """Folder of the run ``name`` (a head) trained on the activations of ``trained_on``."""
        return self.root / "heads" / SnapshotTag(trained_on) / Run.parse(name).name

    def require_snapshot(self, tag: str) -> Path:
        """Folder of a whole snapshot.

        Raises:
            UnknownNameError: it was not made.
        """
        tag, made = SnapshotTag(tag), self.snapshots()
        if tag not in made:
            raise UnknownNameError(
                f"{self.root} has no snapshot {tag}: made are {', '.join(made) or 'none yet'}; "
                + self._how_to_make(tag)
            )
        return self.snapshot_dir(tag)

    def require_output(self, tag: str) -> Path:
        """Folder of a whole snapshot whose output layer is of the task.

        Raises:
            UnknownNameError: it was not made.
            InputError: it is a named checkpoint, whose output layer has random weights.
        """
        folder = self.require_snapshot(tag)
        if SnapshotTag(tag).is_named:
            raise InputError(
                f"{tag} was not fine-tuned: its output layer has random weights, and answers "
                "nothing; train heads on its hidden states with `bertvision train HEAD "
                f"--checkpoint {tag}`"
            )
        return folder

    def _how_to_make(self, tag: SnapshotTag) -> str:
        """Command that makes a missing snapshot."""
        tags = self.config.finetune.tags if find_task(self.config.task.name).learns else ()
        if tag in tags:
            return f"{tag} was asked for: `bertvision finetune --resume` makes it (again)"
        if tag.is_untrained or tag.is_pretrained or tag.is_mean:
            return f"`bertvision extract --checkpoint {tag}` makes it"
        if self.config.adopted is not None or (tag.is_named and not tags):
            return f"`bertvision adopt FOLDER:{tag}` adds it"
        if tag.is_named:
            return f"`bertvision adopt FOLDER:{tag}` takes it, into another --workspace"
        asked = f"fine-tuning was asked for {', '.join(tags)} alone" if tags else "it has no task"
        return (
            f"{asked}: for {tag}, start another --workspace with `bertvision finetune` and "
            f"--save-at {tag[:-1]}"
        )

    def stored(self) -> dict[str, list[str]]:
        """Names of the stored splits, complete or not, by tag."""
        from bertvision.featurestore.store import ActivationStore

        try:
            store = ActivationStore.open(self.activations)
        except StoreNotFoundError:
            return {}
        return {str(tag): store[tag].splits() for tag in store}  # a damaged record is still a name

    def stored_splits(self) -> list[StoredSplit]:
        """The stored splits, complete or not, as the ledger describes them, by tag and name."""
        from bertvision.featurestore.store import ActivationStore

        try:
            return ActivationStore.open(self.activations).stored_splits()
        except StoreNotFoundError:
            return []

    def stored_snapshot(self, tag: str) -> SnapshotSplits:
        """The stored splits of a snapshot.

        Raises:
            StoreNotFoundError: nothing was extracted yet.
            UnknownNameError: nothing of this snapshot was; the message says what makes it.
        """
        from bertvision.featurestore.store import ActivationStore

        store, tag = ActivationStore.open(self.activations), SnapshotTag(tag)
        if tag not in store:
            there = tag in self.snapshots()
            extract = f"`bertvision extract --checkpoint {tag}` writes them"
            raise UnknownNameError(
                f"no activations of {tag} in {store.storage}: it holds "
                f"{', '.join(store) or 'nothing yet'}; "
                + (extract if there else self._how_to_make(tag))
            )
        return store[tag]

    def split(self, tag: str, split: str) -> ActivationSplit:
        """A stored split.

        Raises:
            StoreNotFoundError: nothing was extracted yet.
            UnknownNameError: this snapshot or split was not extracted, or there is no such
                snapshot.
        """
        return self.stored_snapshot(tag)[split]

    def splits(self) -> list[str]:
        """Names of its own splits: ``train``, ``tune`` where a part is held out, ``dev``."""
        return list(self.config.data)

    def dataset(self, name: str | None = None) -> Dataset:
        """The workspace's own data, or a data set that was added.

        Args:
            name: Name of the data set; None, and the name of the workspace's task, is its own.

        Raises:
            UnknownNameError: it was not added.
        """
        from bertvision.pipelines.workspace.dataset import own_dataset, read_dataset

        name = None if name == self.config.task.name else name
        if name not in self._datasets:
            self._datasets[name] = (
                own_dataset(self.root, self.config)
                if name is None
                else read_dataset(self.root, name)
            )
        return self._datasets[name]

    def items(self, split: str) -> list[Any]:
        """The items of a split that systems of this workspace are scored on.

        Args:
            split: ``SPLIT`` of the workspace's own data, or ``NAME-SPLIT`` of an added data set of
                the same kind of task, whose labels become indices of the workspace's classes.

        Raises:
            UnknownNameError: there is no such data set or split.
            InputError: the data set is of another kind of task, or has other classes.
            WorkspaceError: the source is gone or not what it was when it was first read.
        """
        from bertvision.pipelines.workspace.dataset import items_to_score

        data = self.dataset(StoredName.parse(split).dataset)
        return items_to_score(data, self.dataset(), split)

    def windows(self, split: str, tokenizer: Any) -> Windows:
        """The windows of a split, as `items` takes it."""
        name = StoredName.parse(split)
        return self.dataset(name.dataset).windows(name.split, tokenizer)


def _holds_records(folder: Path) -> bool:
    """Whether there are results in a folder, whose name others may give to what is their own."""
    return any(True for at in ("*.json", "*/*.json", "*/*/*.json") for _ in folder.glob(at))
