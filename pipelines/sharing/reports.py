"""Reports, pushed as a page that the hub shows, and pulled."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bertvision.errors import WorkspaceError
from bertvision.pipelines.sharing.cards.markdown import LIBRARY, page
from bertvision.pipelines.sharing.folders import is_shared, push_folder
from bertvision.pipelines.sharing.hub import Repository
from bertvision.pipelines.sharing.upload import Sent

if TYPE_CHECKING:
    from huggingface_hub import HfApi


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
