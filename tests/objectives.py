"""Checkpoints and models for what is minimised beside the loss of a task."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM


def with_mlm_head(checkpoint: Path, folder: Path) -> Path:
    """The same encoder with an MLM head, whose biases and LayerNorms are not those of the start."""
    shutil.copytree(checkpoint, folder)
    torch.manual_seed(5)
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    base = {id(p) for p in model.base_model.parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            if id(parameter) not in base and parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder
