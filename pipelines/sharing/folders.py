"""Folders pushed and pulled whole, under the digests of a manifest: heads, snapshots, reports.

Trained heads, pushed and pulled.

Snapshots of an encoder, pushed and pulled.

Reports, pushed as a page that the hub shows, and pulled.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import InputError, ProvenanceError, WorkspaceError
from bertvision.pipelines.files import new_folder, sha256_of_files
from bertvision.pipelines.records import read_record
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards import LIBRARY, head_card, page, snapshot_card
from bertvision.pipelines.sharing.download import fetch, staging
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.manifest import (
    CARD,
    Kind,
    Manifest,
    SharedFile,
    check_files,
    earlier_push,
)
from bertvision.pipelines.sharing.upload import Content, Sent, base_of, send
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


# nothing that runs, and nothing that is unpickled
_PATH = re.compile(
    r"(?:\w[\w@.-]*/){0,3}\w[\w@.-]*\.(?:json|safetensors|txt|model|html|csv|svg)", re.ASCII
)


def is_shared(path: str) -> bool:
    """Whether a file of that path is pushed and pulled: records, weights, tables, pages."""
    return _PATH.fullmatch(path) is not None


def push_folder(
    api: HfApi,
    repository: Repository,
    kind: Kind,
    name: str,
    files: Mapping[str, Content],
    card: bytes,
    *,
    private: bool | None,
    replace: bool,
) -> Sent:
    """Send files with a manifest and a card, in one commit where they are few.

    Files of an earlier push that are not among them are removed.

    Args:
        api: of the hub.
        repository: to send to.
        kind: of what they are.
        name: of it, where it is.
        files: by path in the repository.
        card: the README.md.
        private: whether a new repository is.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the hub does not take so much, or the repository holds something else; nothing
            was sent.
        HubError: the hub cannot be reached, or refuses.
    """
    base, removed = base_of(api, repository), set[str]()
    files = {path: file for path, file in files.items() if path not in (manifests.FILE, CARD)}
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
        name=name,
        bertvision=version("bertvision"),
        files={path: SharedFile.of(content) for path, content in files.items()},
    )
    return send(
        api,
        repository,
        [{manifests.FILE: manifest.content(), CARD: card, **files}],
        f"{name}, pushed by bertvision {manifest.bertvision}",
        private=private,
        remedy="push it to a repository of its own",
        base=base,
        removed=removed,
    )


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
        api: of the hub.
        repository: at a commit.
        files: that it holds.
        manifest: of the repository.
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


FILES = ("config.json", "model.safetensors", "metrics.json")
"""A head's own files; its folder may hold logs and predictions too."""
SCORES = "scores.json"


def push_head(
    api: HfApi,
    repository: Repository,
    folder: Path,
    *,
    private: bool | None = None,
    licence: str | None = None,
    replace: bool = False,
) -> Sent:
    """Send a trained head: configuration, weights, what its training came to, its scores, a card.

    Args:
        api: of the hub.
        repository: to send to.
        folder: of the run.
        private: whether a new repository is.
        licence: of the weights, for the card.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the repository holds something else; nothing was sent.
        WorkspaceError: the head is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    config, metrics = read_run_config(folder), read_run_metrics(folder)
    if (changed := changed_file(folder)) is not None:
        raise WorkspaceError(
            f"the head {folder} is damaged: {changed} is not as it was written; nothing was sent"
        )
    scores = _scores(folder)
    told = [score.model_dump(mode="json", exclude={"sha256"}) for score in scores]
    made: dict[str, Content] = {name: folder / name for name in FILES}
    made[SCORES] = (json.dumps(told, indent=2, ensure_ascii=False) + "\n").encode()
    return push_folder(
        api,
        repository,
        "head",
        f"{config.run.text}:{config.trained_on}",
        made,
        head_card(repository.name, config, metrics, scores, licence),
        private=private,
        replace=replace,
    )


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
        api: of the hub.
        repository: at a commit.
        files: that it holds.
        manifest: of the repository.
        folder: to make; None is that of the head in ``space``.
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


def _scores(folder: Path) -> list[HeadScores]:
    """Scores of a head, on the splits of any snapshots."""
    found = sorted((folder / "eval").glob("[!.]*/metrics.json"))
    return [read_record(path, HeadScores, "bertvision evaluate") for path in found]


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


def push_snapshot(
    api: HfApi,
    repository: Repository,
    folder: Path,
    *,
    private: bool | None = None,
    licence: str | None = None,
    replace: bool = False,
) -> Sent:
    """Send a snapshot: weights, configuration, tokenizer, what it was made from, a card.

    Args:
        api: of the hub.
        repository: to send to.
        folder: of the snapshot.
        private: whether a new repository is.
        licence: of the weights, for the card.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the repository holds something else; nothing was sent.
        StoreNotFoundError: it is no whole snapshot.
        WorkspaceError: its record is damaged.
        HubError: the hub cannot be reached, or refuses.
    """
    info = read_snapshot_info(folder)
    files = {path.name: path for path in sorted(folder.iterdir()) if is_shared(path.name)}
    card = snapshot_card(repository.name, info, licence)
    return push_folder(
        api, repository, "snapshot", info.tag, files, card, private=private, replace=replace
    )


def push_report(
    api: HfApi,
    repository: Repository,
    folder: Path,
    *,
    private: bool | None = None,
    replace: bool = False,
) -> Sent:
    """Send a report, as a static Space: the hub shows its page as it is.

    Args:
        api: of the hub.
        repository: a Space.
        folder: of the report.
        private: whether a new repository is.
        replace: take the place of what `push` did not send, or of another kind of thing.

    Raises:
        InputError: the repository holds something else; nothing was sent.
        WorkspaceError: there is no report.
        HubError: the hub cannot be reached, or refuses.
    """
    if not (folder / "index.html").is_file():
        raise WorkspaceError(f"there is no report in {folder}: `bertvision report` writes it")
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    files = {name: paths[name] for name in sorted(paths) if is_shared(name)}
    title = repository.name.rpartition("/")[2]
    metadata = f"title: {title}\nsdk: static\napp_file: index.html\ntags:\n- {LIBRARY}"
    card = page(
        metadata,
        title,
        [
            "A report of [bertvision](https://pypi.org/project/bertvision): `index.html`, and its "
            "tables as CSV and JSON beside it."
        ],
    )
    return push_folder(
        api, repository, "report", "report", files, card, private=private, replace=replace
    )
