"""Taking the activations of sites out of a forward pass, by hooks that go as it ends.

Sites of a snapshot's encoder that are extracted: those that are meant, and those stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from bertvision.errors import InputError, ProvenanceError
from bertvision.featurestore.stored_split import StoredSplit
from bertvision.pipelines.encoders.loading import read_config
from bertvision.pipelines.encoders.sites.names import Site, choose_sites, width_of

Take = Callable[[int, Tensor], None]
"""Called with a site's number and its activations, (…, channels), while the pass is under way."""


class Taps:
    """The modules of an encoder at which the activations of sites are seen.

    Args:
        model: the encoder.
        sites: Sites by the numbers that they are to have.

    Raises:
        InputError: this version of transformers has no such module.
    """

    def __init__(self, model: PreTrainedModel, sites: Mapping[int, Site]) -> None:
        self._config = model.config
        self._modules = [(i, site, self._find(model, site)) for i, site in sites.items()]

    @contextmanager
    def taken(self, take: Take) -> Iterator[None]:
        """Hand the activations on as forward passes inside the block compute them.

        Nothing is copied or kept here: what is taken may change once ``take`` has returned.

        Args:
            take: Function that is called once for each site and pass.

        Raises:
            InputError: a module reads or gives something else than vectors of the site's width.
        """
        with ExitStack() as hooks:
            for number, site, module in self._modules:
                hooks.callback(self._hook(number, site, module, take).remove)
            yield

    def _find(self, model: PreTrainedModel, site: Site) -> nn.Module:
        try:
            return model.get_submodule(site.module)
        except AttributeError as error:
            raise InputError(
                f"this version of transformers has no {site.module} in "
                f"{self._config.model_type}: no sites of it can be extracted; its hidden states "
                "can, without --sites"
            ) from error

    def _hook(self, number: int, site: Site, module: nn.Module, take: Take) -> Any:
        width = site.width(self._config)

        def see(state: Any) -> None:
            if not isinstance(state, Tensor) or state.shape[-1:] != (width,):
                raise InputError(
                    f"{site.module} of {self._config.model_type} {site.side} no vectors of {width} "
                    "channels, as its configuration has it: this version of transformers is not "
                    "supported"
                )
            take(number, state)

        if site.side == "reads":
            return module.register_forward_pre_hook(lambda _, given: see(given[0]))
        return module.register_forward_hook(lambda _, given, output: see(_first(output)))


def _first(output: Any) -> Any:
    """The vectors of a module's output: in some families others follow them in a tuple."""
    return output[0] if isinstance(output, tuple) else output


_SHOWN = 3


def snapshot_sites(folder: Path, patterns: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """The sites that patterns mean, in the order in which they are computed, and their width.

    Args:
        folder: Folder of the snapshot.
        patterns: As in `choose_sites`.

    Raises:
        InputError: a pattern means no site of its encoder, the family has no known sites, or they
            are of several widths.
    """
    config = read_config(folder, f"snapshot {folder.name}")
    names = choose_sites(patterns, config.model_type, config.num_hidden_layers)
    return names, width_of(names, config)


def check_same_sites(stored: StoredSplit, sites: Sequence[str]) -> None:
    """Refuse to go on with a split of other sites; what it lacks is said by name.

    Args:
        stored: a split of sites, whole or begun.
        sites: names of those that are wanted.

    Raises:
        ProvenanceError: it holds others.
    """
    names = stored.layer_names
    lacking = [name for name in sites if name not in names]
    more = [name for name in names if name not in sites]
    if not lacking and not more:
        return
    parts = [f"lacks {_some(lacking)}"] if lacking else []
    parts += [f"holds {_some(more)} beside those that are asked for"] if more else []
    raise ProvenanceError(
        f"{stored.name} in {stored.storage} {' and '.join(parts)}: its sites were chosen when it "
        "was begun; take the same, another --store, or remove it with "
        f"`bertvision store rm {stored.name}`"
    )


def _some(names: Sequence[str]) -> str:
    """The first of them, and how many there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
