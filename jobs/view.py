"""A look at a split: one page of its tokens, their states and what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Unpack

from bertvision.errors import WorkspaceError
from bertvision.jobs.show import ShownRecord, Values
from bertvision.jobs.store import open_store, split_name
from bertvision.pipelines.declare import Seed, Where, job
from bertvision.pipelines.options import Option
from bertvision.pipelines.reading import Indices, StrPath, parse_indices, path_of
from bertvision.pipelines.text import fill, size
from bertvision.pipelines.workspace.checks import find_workspace


class Viewed(ShownRecord):
    """A page that was written: its path, size and tokens, and what is left out of it."""

    path: Path
    tokens: int
    of_tokens: int
    examples: int
    of_examples: int
    bytes: int
    notes: list[str]

    def table(self, values: Values) -> str:
        """Where the page is, how much of the split it shows, and what it lacks."""
        shown = f"{values['examples']:,} of {values['of_examples']:,} examples"
        if values["of_tokens"] != values["of_examples"]:  # a pooled split has a vector of each
            shown = f"{values['tokens']:,} of {values['of_tokens']:,} tokens, {shown}"
        lines = [f"page   {values['path']} ({size(values['bytes'])})", f"shows  {shown}"]
        notes = [note.replace("`", "") for note in values["notes"]]
        return "\n".join([*lines, *(fill(f"without  {note}", 9) for note in notes)])


@job
def view(
    name: str,
    *,
    head: str | None = None,
    direction: StrPath | None = None,
    latents: Indices | None = None,
    channels: Indices | None = None,
    layer: int | str = -1,
    max_tokens: Annotated[int, Option(ge=1, le=10_000)] = 2_000,
    seed: Seed = 0,
    output: StrPath | None = None,
    **where: Unpack[Where],
) -> Viewed:
    """Write one page of a split: tokens by layer, top tokens, errors.

    The page needs no network and no server. It shows norms, cosines, a head's probabilities,
    channels, directions of a file, latents of a sparse autoencoder, and the words that the head
    over the vocabulary reads, where the encoder has one.

    Examples:
        >>> import bertvision
        >>> page = bertvision.view("1e/dev", max_tokens=500)
        >>> page.path.name, page.tokens <= 500
        ('1e-dev.html', True)

    Args:
        name: Split, such as 1e/dev.
        head: Head whose probabilities and errors are shown: NAME[:TRAINED_ON]; of bert and
            ensembles the errors.
        direction: Safetensors file with vectors (hidden,) or (n, hidden), a linear probe that was
            saved, or an autoencoder of SAELens.
        latents: Latents, or rows of the file, such as 3,17; by default up to eight.
        channels: Channels, such as 3,308; by default the three largest, or none with
            ``direction``.
        layer: Layer of nearest and top tokens and of an autoencoder, by index or name.
        max_tokens: Seeded sample of whole examples with at most so many tokens.
        output: HTML file; by default in view/ of the workspace.

    Raises:
        UnknownNameError: there is no such split or head.
        InputError: a file is no safetensors, or an option does not fit the split.
        IncompleteSplitError: shards of the split are missing.
        WorkspaceError: there is neither a workspace nor a store, or files of one are damaged.
    """
    tag, split = split_name(name)
    workspace, store = where.get("workspace"), where.get("store")
    try:
        space = find_workspace(workspace, store)
    except WorkspaceError:
        if store is None or workspace is not None:
            raise
        space = None  # of a store alone its states are shown
    stored = open_store(workspace, store)[tag][split]
    from bertvision.pipelines.view.page import ViewOptions, write_view

    options = ViewOptions(
        head=head,
        direction=path_of(direction),
        latents=_numbers(latents, "--latents"),
        channels=_numbers(channels, "--channels"),
        layer=layer,
        max_tokens=max_tokens,
        seed=seed,
    )
    usual = (Path() if space is None else space.root / "view") / f"{tag}-{split}.html"
    return Viewed(**write_view(stored, path_of(output) or usual, space, options))


def _numbers(value: Indices | None, option: str) -> tuple[int, ...] | None:
    return None if value is None else parse_indices(value, option, "numbers such as 3,17")
