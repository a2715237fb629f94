"""Folders that are pushed and pulled whole: heads, snapshots, reports.

The digests of their files are in a manifest; whatever kind it is, one `push` sends it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.files import new_folder, sha256_of_files
from bertvision.pipelines.records import read_record
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards import head_card, report_card, snapshot_card
from bertvision.pipelines.sharing.hub import Repository, connect, parse_repository
from bertvision.pipelines.sharing.manifest import (
    CARD,
    Kind,
    Manifest,
    SharedFile,
    check_files,
    earlier_push,
)
from bertvision.pipelines.sharing.transfer import Content, Sent, base_of, fetch, send, staging
from bertvision.pipelines.training.trained_head import changed_file
from bertvision.pipelines.workspace.records import (
    HeadScores,
    RunConfig,
    read_run_config,
    read_run_metrics,
    read_snapshot_info,
)
from bertvision.pipelines.workspace.workspace import Workspace

if TYPE_CHECKING:
    from huggingface_hub import HfApi


FILES = ("config.json", "model.safetensors", "metrics.json")
"""A head's own files; its folder may hold logs and predictions too."""
SCORES = "scores.json"
# nothing that runs, and nothing that is unpickled
_PATH = re.compile(
    r"(?:\w[\w@.-]*/){0,3}\w[\w@.-]*\.(?:json|safetensors|txt|model|html|csv|svg)", re.ASCII
)


def is_shared(path: str) -> bool:
    """Whether a file of that path is pushed and pulled: records, weights, tables, pages."""
    return _PATH.fullmatch(path) is not None


class Shareable(NamedTuple):
    """A folder that is pushed whole."""

    kind: Kind
    name: str
    """Its name where it is."""
    files: Mapping[str, Content]
    """Files by path in the repository."""
    card: bytes
    """The README.md."""


def head(folder: Path, repository: str, licence: str | None) -> Shareable:
    """A trained head: configuration, weights, metrics of its training, scores, a card.

    Args:
        folder: Folder of the run.
        repository: ``owner/name`` on the hub, for the card.
        licence: Licence of the weights, for the card.

    Raises:
        WorkspaceError: the head is damaged.
    """
    config, metrics = read_run_config(folder), read_run_metrics(folder)
    if (changed := changed_file(folder)) is not None:
        raise WorkspaceError(
            f"the head {folder} is damaged: {changed} is not as it was written; nothing was sent"
        )
    paths = sorted((folder / "eval").glob("[!.]*/metrics.json"))
    scores = [read_record(path, HeadScores, "bertvision evaluate") for path in paths]
    told = [score.model_dump(mode="json", exclude={"sha256"}) for score in scores]
    files: dict[str, Content] = {name: folder / name for name in FILES}
    files[SCORES] = (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
    card = head_card(repository, config, metrics, scores, licence)
    return Shareable("head", f"{config.run.text}:{config.trained_on}", files, card)


def snapshot(folder: Path, repository: str, licence: str | None) -> Shareable:
    """A snapshot: weights, configuration, tokenizer, record of its making, a card.

    Args:
        folder: Folder of the snapshot.
        repository: ``owner/name`` on the hub, for the card.
        licence: Licence of the weights, for the card.

    Raises:
        StoreNotFoundError: it is no whole snapshot.
        WorkspaceError: its record is damaged.
    """
    info = read_snapshot_info(folder)
    files = {path.name: path for path in sorted(folder.iterdir()) if is_shared(path.name)}
    return Shareable("snapshot", info.tag, files, snapshot_card(repository, info, licence))


def report(folder: Path, repository: str, licence: str | None = None) -> Shareable:
    """A report, for a static Space: the hub shows its page as it is.

    Args:
        folder: Folder of the report.
        repository: ``owner/name`` on the hub, for the card.
        licence: Not named by the card of a report.

    Raises:
        WorkspaceError: there is no report.
    """
    if not (folder / "index.html").is_file():
        raise WorkspaceError(f"there is no report in {folder}: `bertvision report` writes it")
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    files = {name: paths[name] for name in sorted(paths) if is_shared(name)}
    return Shareable("report", "report", files, report_card(repository))


def push(
    api: HfApi,
    repository: Repository,
    shareable: Shareable,
    *,
    private: bool | None,
    replace: bool,
) -> Sent:
    """Send files with a manifest and a card, in one commit where they are few.

    Files of an earlier push that are not among them are removed.

    Args:
        api: The hub.
        repository: Repository to send to.
        shareable: Files, manifest and card.
        private: Visibility of a new repository; None is what its owner has set.
        replace: Take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the hub does not take so much, or the repository holds something else; nothing
            was sent.
        HubError: the hub cannot be reached, or refuses.
    """
    kind = shareable.kind
    base, removed = base_of(api, repository), set[str]()
    files = {p: file for p, file in shareable.files.items() if p not in (manifests.FILE, CARD)}
    if base is not None:
        before = earlier_push(api, base.repository, base.files, kind, replace=replace)
        sent = before.files if before else {}
        others = set(files) & set(base.files) - set(sent)
        if others and not replace:
            raise InputError(
                f"{repository._replace(revision=None)} holds a file {min(others)} that `bertvision "
                "push` did not send: remove it there, push to another name, or replace it with "
                "--replace (in Python, replace=True); nothing was sent"
            )
        removed = {
            path
            for path, file in sent.items()  # not what somebody has replaced since
            if path not in files and is_shared(path) and base.files.get(path) == file.size
        }
    manifest = Manifest(
        kind=kind,
        name=shareable.name,
        bertvision=version("bertvision"),
        files={path: SharedFile.of(content) for path, content in files.items()},
    )
    return send(
        api,
        repository,
        [{manifests.FILE: manifest.content(), CARD: shareable.card, **files}],
        f"{shareable.name}, pushed by bertvision {manifest.bertvision}",
        private=private,
        remedy="push it to a repository of its own",
        base=base,
        removed=removed,
    )


def push_saved(
    made: Callable[[Path, str], Shareable],
    repo_id: str,
    *,
    private: bool | None,
    revision: str | None,
    replace: bool,
    token: str | bool | None,
) -> str:
    """Send to the hub what is in memory.

    Args:
        made: saves it in a folder, for the card of a repository of that name.
        repo_id: ``owner/name``, made where there is none.
        private: Visibility of a new repository; None is what its owner has set.
        revision: Branch to send to, made where there is none.
        replace: Take the place of what `push` did not send, or of another kind of thing.
        token: Token for the hub; None is that of the environment or of its login.

    Returns:
        The address of the repository.

    Raises:
        InputError: ``repo_id`` is none, or the repository holds something else.
        HubError: the hub cannot be reached, or refuses.
    """
    _, name = parse_repository(repo_id)
    with TemporaryDirectory() as folder:
        shareable, place = made(Path(folder), name), Repository(name, "model", revision)
        return push(connect(token), place, shareable, private=private, replace=replace).url


def pull_folder(
    api: HfApi,
    repository: Repository,
    files: Mapping[str, int],
    manifest: Manifest,
    beside: Path,
    place: Callable[[Path], Path],
) -> Path:
    """Bring a folder, and put it in place whole once every file is as it was sent.

    Args:
        api: API of the hub.
        repository: Repository at a commit.
        files: Files that it holds.
        manifest: Manifest of the repository.
        beside: folder to bring it into first, on the disk of its place.
        place: tells where it goes, from the folder with its checked files, or refuses them.

    Returns:
        The folder.

    Raises:
        InputError: the manifest names a file that is none of ours, or none at all.
        HubError: a file is not as it was sent; or the hub cannot be reached, or refuses.
        WorkspaceError: something else is in its place.
    """
    if strange := sorted(path for path in manifest.files if not is_shared(path)):
        raise InputError(f"{repository}: {strange[0]!r} is no file that is pulled")
    if not manifest.files:  # with which any folder would agree
        raise InputError(f"{repository}: its {manifests.FILE} names no files; nothing was brought")
    wanted = sorted({*manifest.files, manifests.FILE, CARD} & set(files))
    with staging(beside, repository) as stage:
        fetch(api, repository, files, wanted, stage, wanted)
        check_files(stage, manifest)
        folder = place(stage)
        if _is_there(folder, stage, manifest):
            return folder  # with what was added to it since
        with new_folder(folder) as made:
            for path in wanted:
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(stage / path, made / path)
    return folder


def _is_there(folder: Path, stage: Path, manifest: Manifest) -> bool:
    """Whether a folder has every file of a manifest as it was brought, maybe beside others.

    Raises:
        WorkspaceError: something else is there.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    for path in manifest.files:
        here = folder / path
        if not here.is_file() or sha256_of_files([here]) != sha256_of_files([stage / path]):
            raise WorkspaceError(
                f"{folder} holds something else: name another FOLDER, or move it away"
            )
    return True


def pull_head(
    api: HfApi,
    repository: Repository,
    files: Mapping[str, int],
    manifest: Manifest,
    *,
    folder: Path | None,
    space: Workspace | None,
) -> Path:
    """Bring a head into a folder, or to where it belongs in a workspace, if every file is right.

    Args:
        api: API of the hub.
        repository: Repository at a commit.
        files: Files that it holds.
        manifest: Manifest of the repository.
        folder: Folder to make; None is that of the head in ``space``.
        space: the workspace.

    Returns:
        The folder.

    Raises:
        HubError: a file is not as it was sent; or the hub cannot be reached.
        WorkspaceError: there is another head of that name, or a record is damaged.
        ProvenanceError: the workspace has another snapshot of that name than the head's.
        InputError: the repository holds files that no head has.
    """
    if lacking := sorted(set(FILES) - set(manifest.files)):
        raise InputError(
            f"{repository} has no {lacking[0]}, as heads have that were changed after their "
            "training: bertvision.Head.from_pretrained loads it; nothing was brought"
        )

    def place(stage: Path) -> Path:
        config = read_run_config(stage)
        if (changed := changed_file(stage)) is not None:
            raise WorkspaceError(f"{repository}: {changed} is not what its metrics.json tells of")
        return folder or _place(space, config)

    beside = folder.parent if folder else _root(space) / "heads"
    return pull_folder(api, repository, files, manifest, beside, place)


def _root(space: Workspace | None) -> Path:
    if space is None:
        raise InputError("name a folder to put the head in, or a workspace")
    return space.root


def _place(space: Workspace | None, config: RunConfig) -> Path:
    """The folder of a head in a workspace, whose snapshot is the one that it was trained on."""
    root, tag = _root(space), config.trained_on
    assert space is not None
    told = config.activations.get("weights_sha256")
    if tag in space.snapshots():
        there = read_snapshot_info(space.snapshot_dir(tag)).weights_sha256
        if told is not None and told != there:
            raise ProvenanceError(
                f"{config.run.name} was trained on another {tag} than that of {root}: its weights "
                f"are {str(told)[:12]}…, here {there[:12]}…; name a FOLDER to have it beside"
            )
    return space.head_dir(tag, config.run.name)
