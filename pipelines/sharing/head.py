"""Head: a trained head as a torch module that is loaded, saved and pushed as models are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertvision.errors import InputError, WorkspaceError
from bertvision.featurestore.storage.durable import make_folder
from bertvision.models.factory import build_head, kind_of
from bertvision.models.outputs import ClassOutput, SpanOutput
from bertvision.pipelines.files import sha256_of_files
from bertvision.pipelines.records import write_record
from bertvision.pipelines.sharing import manifest as manifests
from bertvision.pipelines.sharing.cards import head_card
from bertvision.pipelines.sharing.hub import cached_folder
from bertvision.pipelines.sharing.manifest import CARD
from bertvision.pipelines.sharing.shareable import Shareable, push_saved
from bertvision.pipelines.training.trained_head import changed_file
from bertvision.pipelines.workspace.records import RunConfig, read_run_config

if TYPE_CHECKING:
    from typing import Self

CONFIG, WEIGHTS = "config.json", "model.safetensors"


class Head(nn.Module):
    """A trained head and its configuration.

    Args:
        module: Module that maps hidden states to an output.
        config: everything that its weights depend on.

    Examples:
        >>> import bertvision
        >>> _ = bertvision.train("learned-pooling", checkpoint="1e")
        >>> head = bertvision.Head.from_pretrained("heads/1e/learned-pooling")
        >>> batch = bertvision.ActivationStore.open("activations")["1e/dev"].read([0, 1])
        >>> head(batch.decode(), batch.lengths).start_logits.shape[0]
        2
        >>> head.save_pretrained("my-head")
        >>> bertvision.Head.from_pretrained("my-head").config == head.config
        True
    """

    def __init__(self, module: nn.Module, config: RunConfig) -> None:
        super().__init__()
        self.module = module
        self.config = config

    def forward(self, hidden_states: Tensor, lengths: Tensor) -> SpanOutput | ClassOutput:
        """Logits of a batch.

        Args:
            hidden_states: (tokens, layers, hidden) float, of the layers in ``config.layers``, the
                tokens of all examples one after the other, without padding.
            lengths: (batch,) int64, tokens per example.

        Returns:
            The head's logits, by what it learned: spans, or classes.
        """
        output: SpanOutput | ClassOutput = self.module(hidden_states, lengths)
        return output

    @classmethod
    def from_pretrained(
        cls,
        place: str | Path,
        *,
        named: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Load a head, in evaluation mode, from a folder or from the hub.

        The configuration is checked, and compared with the names and shapes of the tensors, before
        any weights are read. Nothing is unpickled, and no class is imported that was not named.

        Args:
            place: folder of a head, or ``owner/name`` on the hub.
            named: dotted path ``package.module:Class`` of the head's class, where it is one of
                somebody's own: what a configuration names by itself is never imported.
            revision: branch, tag or commit on the hub.
            token: Token for the hub; by default that of the environment or of its login.
            cache_dir: Folder of downloads; by default the hub's cache.
            local_files_only: Take what the cache has, and ask nobody.

        Raises:
            UnknownNameError: there is neither such a folder nor a name of a repository.
            WorkspaceError: a file is missing, damaged, or not of this head.
            InputError: it is a class of somebody's own, which was not named.
            HubError: the hub cannot be reached, or refuses.
        """
        folder = Path(place).expanduser()
        if not folder.is_dir():
            folder = cached_folder(
                str(place),
                (CONFIG, WEIGHTS, "metrics.json", manifests.FILE, CARD),
                "give that of a trained head, such as heads/1e/learned-pooling in a workspace, or "
                "owner/name on the hub",
                revision=revision,
                token=token,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
            )
        config = read_run_config(folder)
        if ":" in config.head and named != config.head:
            raise InputError(
                f"{place} is of the class {config.head}, which is code of somebody's own: give "
                f"named={config.head!r} to have it imported"
            )
        _check_digests(folder)
        module = _build(config, folder)
        try:
            module.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, KeyError, ValueError, RuntimeError, SafetensorError) as error:
            raise WorkspaceError(f"{folder / WEIGHTS} is damaged: {error}") from error
        return cls(module, config).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the configuration and the weights, with their digests.

        Args:
            folder: Folder to write to; made where there is none.

        Raises:
            DiskSpaceError: the disk is full.
        """
        path = Path(folder).expanduser()
        make_folder(path)
        state = {n: x.detach().cpu().contiguous() for n, x in self.module.state_dict().items()}
        save_file(state, path / WEIGHTS)
        write_record(path / CONFIG, self.config)
        manifests.write_manifest(path, "head", self.name, (CONFIG, WEIGHTS))

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
        """Send the head to the hub as it is now, with a card.

        Scores and what the training came to are not sent, because they are of the weights that the
        training left: `bertvision.push` sends a trained head of a workspace with both.

        Args:
            repo_id: ``owner/name``, made where there is none.
            private: Make a new repository private; by default what its owner has set.
            revision: branch to send to, made where there is none.
            license: License that the card names; by default it names none.
            replace: Take the place of what `push` did not send, or of another kind of thing.
            token: Token for the hub; by default that of the environment or of its login.

        Returns:
            The address of the repository.

        Raises:
            InputError: ``repo_id`` is none, or the repository holds something else.
            HubError: the hub cannot be reached, or refuses.
        """

        def made(folder: Path, name: str) -> Shareable:
            self.save_pretrained(folder)
            files = {file: folder / file for file in (CONFIG, WEIGHTS)}
            card = head_card(name, self.config, None, [], license)
            return Shareable("head", self.name, files, card)

        return push_saved(
            *(made, repo_id), private=private, revision=revision, replace=replace, token=token
        )

    @property
    def name(self) -> str:
        """As it is called in a workspace: ``learned-pooling@s1:0.3e``."""
        return f"{self.config.run.text}:{self.config.trained_on}"


def _check_digests(folder: Path) -> None:
    """Compare the files with the digests beside them: of a push, a save or a training.

    Raises:
        WorkspaceError: one differs, or there are none.
    """
    if not (folder / manifests.FILE).is_file():
        if (changed := changed_file(folder)) is not None:
            raise WorkspaceError(f"{folder / changed} is damaged: it is not as it was written")
        return
    told = manifests.read_manifest(folder).files
    for name in (CONFIG, WEIGHTS):
        path = folder / name
        if name not in told or not path.is_file() or sha256_of_files([path]) != told[name].sha256:
            raise WorkspaceError(f"{path} is missing or damaged: it is not as it was saved")


def _build(config: RunConfig, folder: Path) -> nn.Module:
    """The module of a configuration with fresh weights, if the tensors in the folder are its own.

    Raises:
        WorkspaceError: they are not.
    """
    made: dict[str, Any] = {
        "layers": len(config.layers),
        "hidden": config.hidden_size,
        "classes": config.classes,
        "kind": config.kind,
    }
    with torch.device("meta"):  # of which nothing is allocated, whatever a configuration says
        plan = build_head(config.head, **made)
    due = {name: list(value.shape) for name, value in plan.state_dict().items()}
    try:
        with safe_open(folder / WEIGHTS, framework="numpy") as file:
            there = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WorkspaceError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    if there != due or kind_of(plan) != config.kind:
        name = next((n for n in sorted({*due, *there}) if due.get(n) != there.get(n)), "kind")
        raise WorkspaceError(
            f"{folder / WEIGHTS} is not of the head that config.json describes: {name} is "
            f"{there.get(name, 'missing')} where {due.get(name, 'nothing')} is due"
        )
    return build_head(config.head, **made)
