"""bertvision: an activation feature store and training pipeline for BERT.

Public names are resolved on first use (PEP 562), so that `import bertvision` costs milliseconds:

>>> import bertvision
>>> store = bertvision.ActivationStore.open("activations")      # doctest: +SKIP
>>> store["0.3e"]["train"][17].shape                            # doctest: +SKIP
torch.Size([171, 1024, 25])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "ActivationBatch": "bertvision.featurestore.batch",
    "ActivationDataModule": "bertvision.pipelines.training.datamodule",
    "ActivationSplit": "bertvision.featurestore.split",
    "ActivationStore": "bertvision.featurestore.store",
    "BertvisionError": "bertvision.errors",
    "Workspace": "bertvision.pipelines.workspace.workspace",
    "build_head": "bertvision.models.registry",
}

__all__ = ["__version__", *_LAZY]  # noqa: PLE0604  (the lazy names are the public names)

if TYPE_CHECKING:
    from bertvision.errors import BertvisionError as BertvisionError
    from bertvision.featurestore.batch import ActivationBatch as ActivationBatch
    from bertvision.featurestore.split import ActivationSplit as ActivationSplit
    from bertvision.featurestore.store import ActivationStore as ActivationStore
    from bertvision.models.registry import build_head as build_head
    from bertvision.pipelines.training.datamodule import (
        ActivationDataModule as ActivationDataModule,
    )
    from bertvision.pipelines.workspace.workspace import Workspace as Workspace


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'bertvision' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
