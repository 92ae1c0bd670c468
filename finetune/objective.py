"""Computations of all processes together: the loss of a micro batch, or predicted tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.finetune.loss import IGNORED, linear_cross_entropy
from cab_hf.finetune.models import forward_hidden
from cab_hf.finetune.settings import Settings

Batch = Mapping[str, Tensor]


class Objective(nn.Module):
    """A model and its loss as one module.

    DDP and FSDP hook into the call of a module. The loss reads the weight of the head, so it must
    be computed inside such a call.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        """Wrap ``model``.

        ``autocast`` is the dtype of products if float32 weights are trained; None: the dtype of
        weights.
        """
        super().__init__()
        self.model, self.autocast = model, autocast
        # the layers that FSDP2 gathers one by one
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def forward(self, batch: Batch, places: Tensor | None = None) -> Tensor:
        """Return the summed loss of a batch, or the likeliest tokens after ``places``.

        Args:
            batch: ``input_ids``, ``position_ids`` and, for a loss, ``labels``: int64 [B, N]. Labels
                are already shifted, and -100 marks tokens without a label.
            places: int64 [P], positions of tokens in the first row.
        """
        device = batch["input_ids"].device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            hidden, weight = forward_hidden(self.model, batch)
            if places is not None:
                return (hidden[0, places].to(weight.dtype) @ weight.T).argmax(-1)
            return linear_cross_entropy(hidden, weight, batch["labels"])


def labelled(batch: Batch) -> Tensor:
    """Count the tokens of a batch with a label, an int64 scalar."""
    return (batch["labels"] != IGNORED).sum()


def learning_rate(step: int, settings: Settings) -> float:
    """Return the rate of a step from 1 to ``steps``: a linear warm-up, then a cosine.

    The rate is ``lr`` at step ``warmup`` and ``lr * lr_end`` at the last step.
    """
    steps, warmup, lr, lr_end = settings.steps, settings.warmup, settings.lr, settings.lr_end
    if step <= warmup:
        return lr * step / warmup
    done = (step - warmup) / (steps - warmup)
    return lr * (lr_end + (1 - lr_end) * (1 + math.cos(math.pi * done)) / 2)


def one_sum(values: list[float], accelerator: Any) -> list[float]:
    """Sum each of ``values`` over all processes, in one call and in float64."""
    mine = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(mine, "sum").tolist()
