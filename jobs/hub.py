"""Results sent to the Hugging Face hub, and brought from there."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, get_args

from bertvision.errors import InputError, UnknownNameError, counted
from bertvision.featurestore.format.names import SnapshotTag
from bertvision.jobs.show import ShownRecord, Values
from bertvision.jobs.store import open_store, split_name
from bertvision.pipelines.declare import StorePath, WorkspacePath, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Names, StrPath, parse_names, path_of
from bertvision.pipelines.sharing.hub import Repository, RepositoryKind, parse_repository
from bertvision.pipelines.text import size
from bertvision.pipelines.workspace.checks import find_workspace
from bertvision.pipelines.workspace.heads import find_head, trained_heads, trained_on

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_KINDS: dict[str, RepositoryKind] = {
    "head": "model",
    "predictor": "model",
    "snapshot": "model",
    "store": "dataset",
    "report": "space",
}


class Pushed(ShownRecord):
    """Result of `push`."""

    def table(self, values: Values) -> str:
        """Lines on the pushed files and how to pull them."""
        return (
            f"{values['what']}: {counted(values['files'], 'file')}, {size(values['bytes'])}, in "
            f"{values['url']} at {values['commit'][:12]}\n"
            f"`bertvision pull {values['repository']}` brings it"
        )


class Pulled(ShownRecord):
    """Result of `pull`."""

    def table(self, values: Values) -> str:
        """Line on the pulled files, their commit and their folder."""
        what = ", ".join(values.get("splits", [])) or values["name"]
        return (
            f"{what} of {values['repository']} at {values['commit'][:12]}: in {values['folder']}, "
            "every file as it was sent"
        )


@job
def push(
    what: str,
    repository: str,
    *,
    revision: str | None = None,
    with_encoder: bool = False,
    private: Annotated[bool | None, Option(flag="--private/--public")] = None,
    license: str | None = None,
    replace: bool = False,
    workspace: WorkspacePath = None,
    store: StorePath = None,
) -> Pushed:
    """Send heads, snapshots, splits or the report to the Hub.

    The token is that of HF_TOKEN or of `hf auth login`. What is there is not sent again, so a
    killed push is finished by the same call. What an earlier push left there and this one no
    longer has is removed; a file that push did not send never is.

    Args:
        what: NAME:SNAPSHOT of a trained head, a snapshot such as 1e, splits such as
            1e/train,1e/dev, store for all splits, or report.
        repository: owner/name, made where there is none.
        revision: Branch to send to; by default the main one.
        with_encoder: Send a head, an ensemble or bert:1e with its encoder, for `bertvision predict
            owner/name`.
        private: Visibility of a new repository; by default its owner's.
        license: Licence that the card names, such as cc-by-4.0.
        replace: Replace the card, files and splits of the same names; with store, also remove
            splits that an earlier push sent and the store does not have.

    Raises:
        UnknownNameError: there is no such head, snapshot or split.
        IncompleteSplitError: shards of a split are missing.
        ProvenanceError: the repository holds another split of that name.
        InputError: the hub does not take so many or so large files, or the repository holds what
            `push` did not send, and nothing was sent; or an argument is wrong.
        HubError: the hub cannot be reached, or refuses, or another push came between.
    """
    kind, name = parse_repository(repository)
    sort = "predictor" if with_encoder else _sort_of(what, workspace)
    if kind not in (None, _KINDS[sort]):
        raise InputError(
            f"{repository}: a {sort} is pushed to a {_KINDS[sort]} repository: write {name}"
        )
    place = Repository(name, _KINDS[sort], revision)
    if sort == "store":
        from bertvision.pipelines.sharing.stores import push_store

        opened = open_store(workspace, store)
        names = [f"{tag}/{split}" for tag in opened for split in opened[tag]]
        if what != "store":
            names = ["/".join(split_name(part)) for part in parse_names(what)]
        if not names:
            raise UnknownNameError(f"{opened.storage} is empty: `bertvision extract` writes to it")
        sent = push_store(
            *(_api(), place, opened, names),
            private=private,
            licence=license,
            replace=replace,
            whole=what == "store",
        )
    elif sort == "predictor":
        from bertvision.pipelines.prediction.predictor import Predictor, load_predictors
        from bertvision.pipelines.prediction.source import find_source
        from bertvision.pipelines.sharing.shareable import Shareable
        from bertvision.pipelines.sharing.shareable import push as push_folder

        predictor: Predictor
        (predictor,) = load_predictors([find_source(what, path_of(workspace))], "auto")
        with TemporaryDirectory() as saved:
            made: Shareable = predictor.shareable(Path(saved), name, license)
            sent = push_folder(_api(), place, made, private=private, replace=replace)
    else:
        from bertvision.pipelines.sharing import shareable

        folder, what = _folder_of(what, sort, workspace)
        kinds = {
            "head": shareable.head,
            "snapshot": shareable.snapshot,
            "report": shareable.report,
        }
        folder_to_send = kinds[sort](folder, name, license)
        sent = shareable.push(_api(), place, folder_to_send, private=private, replace=replace)
    return Pushed(
        what=what,
        kind=sort,
        repository=str(place._replace(revision=None)),
        revision=revision,
        url=sent.url,
        commit=sent.repository.revision or "",
        files=sent.files,
        bytes=sent.bytes,
    )


@job
def pull(
    repository: str,
    folder: StrPath | None = None,
    *,
    split: Names | None = None,
    revision: str | None = None,
    workspace: WorkspacePath = None,
) -> Pulled:
    """Bring what `push` sent from the Hub, and check every file.

    A killed pull is finished by the same call.

    Args:
        repository: owner/name, or datasets/owner/name, spaces/owner/name.
        folder: Folder to write; by default its place in the workspace. Snapshots and reports need
            one.
        split: Splits of a store to bring, such as 1e/dev; by default all.
        revision: Branch, tag or commit; by default the main branch.

    Raises:
        HubError: the hub cannot be reached, or refuses, or a file is not as it was sent.
        CorruptStoreError: a file of a split is not as its ledger says.
        ProvenanceError: there is another split, or another snapshot that a head was trained on.
        WorkspaceError: there is something else in its place, or no workspace.
        InputError: the repository was not made by `push`, or an argument is wrong.
        DiskSpaceError: the disk is too small.
    """
    kind, name = parse_repository(repository)
    target = path_of(folder)
    target = None if target is None else target.expanduser().absolute()
    names = None if split is None else ["/".join(split_name(part)) for part in parse_names(split)]
    space = find_workspace(workspace) if target is None else None
    from bertvision.pipelines.sharing import hub
    from bertvision.pipelines.sharing.manifest import fetch_manifest

    api = _api()
    place = hub.resolve(api, _find(api, kind, name)._replace(revision=revision))
    files = hub.sizes(api, place)
    manifest = fetch_manifest(api, place, files)
    if names is not None and manifest.kind != "store":
        raise InputError(f"--split is for stores, and {place} holds a {manifest.kind}")
    told = {}
    if manifest.kind == "store":
        from bertvision.pipelines.sharing.stores import pull_store

        if target is None and space is not None:
            if isinstance(space.activations, str):
                raise InputError(
                    f"the store of the workspace is {space.activations}, and splits are pulled to "
                    "a local disk: name a FOLDER"
                )
            target = space.activations
        assert target is not None
        told["splits"] = pull_store(api, place, files, target, names)
    elif manifest.kind == "head":
        from bertvision.pipelines.sharing.shareable import pull_head

        target = pull_head(api, place, files, manifest, folder=target, space=space)
    else:
        from bertvision.pipelines.sharing.shareable import pull_folder

        if target is None:
            raise InputError(f"{place} holds a {manifest.kind}: name a FOLDER to put it in")
        pull_folder(api, place, files, manifest, target.parent, lambda stage: target)
    return Pulled(
        kind=manifest.kind,
        name=manifest.name or "store",
        repository=str(place._replace(revision=None)),
        commit=place.revision or "",
        folder=str(target),
        **told,
    )


def _api() -> HfApi:
    from bertvision.pipelines.sharing.hub import connect

    return connect()


def _sort_of(what: str, workspace: StrPath | None) -> str:
    """Whether a head, a snapshot, a store (or splits of it) or a report is named."""
    if what in ("store", "report"):
        return what
    if "/" in what:
        return "store"
    if not SnapshotTag.is_valid(what):
        return "head"
    heads = trained_heads(find_workspace(workspace)) if SnapshotTag(what).is_named else []
    return "head" if what in {name for _, name in heads} else "snapshot"


def _folder_of(what: str, sort: str, workspace: StrPath | None) -> tuple[Path, str]:
    """The folder of a head, snapshot or report, and its name in full."""
    space = find_workspace(workspace)
    if sort == "report":
        return space.root / "report", what
    if sort == "snapshot":
        return space.require_snapshot(what), what
    name, _, tag = what.rpartition(":")
    if not (name and SnapshotTag.is_valid(tag)):
        name, tag = what, trained_on(space, [what])
    return find_head(space, tag, name), f"{name}:{tag}"


def _find(api: HfApi, kind: RepositoryKind | None, name: str) -> Repository:
    """The repository of a name, of whichever kind it is.

    Raises:
        HubError: there is none.
        InputError: there are several.
    """
    from bertvision.pipelines.sharing.hub import exists

    kinds = get_args(RepositoryKind) if kind is None else (kind,)
    places = [place for one in kinds if exists(api, place := Repository(name, one))]
    if len(places) > 1:
        raise InputError(f"there are several of that name: write {' or '.join(map(str, places))}")
    return places[0] if places else Repository(name, kinds[0])  # which the hub then says is missing
