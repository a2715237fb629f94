"""HeadsModule: several heads trained from one stream, each exactly as if it were alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from bertvision.errors import WorkspaceError
from bertvision.models.outputs import span_loss
from bertvision.models.registry import build_head
from bertvision.pipelines.datamodule import HiddenStates


def seed_of(*parts: object) -> int:
    """A 63-bit seed from any values, the same in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def build_heads(names: list[str], *, layers: int, hidden: int, seed: int) -> dict[str, nn.Module]:
    """Build heads whose initial weights depend on the seed and their own name alone."""
    heads = {}
    for name in names:
        torch.manual_seed(seed_of(seed, name, "init"))
        heads[name] = build_head(name, layers=layers, hidden=hidden)
    return heads


class HeadsModule(pl.LightningModule):
    """Span heads given together.

    Their losses are independent, so one Adam with a parameter group per head on the summed loss is
    their separate training: a head's gradient has no term from the others, and Adam's state is per
    parameter. Random numbers (dropout) are drawn from (seed, head, step), so that neither company
    nor a resumed run changes them.

    Args:
        heads: modules by name.
        lr: learning rate of Adam (the paper: 1e-3).
        seed: of dropout.
        digest: of the run's settings; guards the resume file.
    """

    def __init__(
        self, heads: Mapping[str, nn.Module], *, lr: float, seed: int, digest: str
    ) -> None:
        super().__init__()
        self.names = list(heads)
        self.heads = nn.ModuleList(heads.values())
        self.lr = lr
        self.seed = seed
        self.digest = digest

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam with a parameter group per head."""
        groups = [{"params": list(head.parameters())} for head in self.heads]
        return torch.optim.Adam([g for g in groups if g["params"]], lr=self.lr)

    def training_step(self, batch: HiddenStates, batch_idx: int) -> dict[str, Any]:
        """Summed loss of the heads; each head's own is logged by its name."""
        start, end = batch.labels["start_positions"].long(), batch.labels["end_positions"].long()
        losses: dict[str, Tensor] = {}
        for name, head in zip(self.names, self.heads, strict=True):
            torch.manual_seed(seed_of(self.seed, name, self.global_step))
            losses[name] = span_loss(head(batch.hidden_states, batch.lengths), start, end)
        if self.logger is not None:
            self.log_dict({f"loss/{name}": x for name, x in losses.items()}, batch_size=len(start))
        return {
            "loss": torch.stack(list(losses.values())).sum(),
            "log": {name: loss.detach() for name, loss in losses.items()},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Record what the resume file belongs to."""
        checkpoint["run"] = self.digest

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the resume file of another run."""
        if checkpoint.get("run") != self.digest:
            raise WorkspaceError("the resume file belongs to another run: delete it to start again")
