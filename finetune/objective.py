"""What all processes compute together: the loss of a micro batch, or predicted tokens."""

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

    DDP and FSDP hook into the call of a module, so the loss, which reads the weight of the head,
    must be computed inside of one.
    """

    def __init__(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        """``autocast``: of products, where weights of float32 are trained; None: as weights are."""
        super().__init__()
        self.model, self.autocast = model, autocast
        # the layers that FSDP2 gathers one by one
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def forward(self, batch: Batch, places: Tensor | None = None) -> Tensor:
        """The summed loss of a batch, a float scalar; or the likeliest tokens after ``places``.

        Args:
            batch: ``input_ids``, ``position_ids`` and, for a loss, ``labels``: int64 [B, N], the
                labels being shifted already and -100 where there is nothing to learn.
            places: int64 [P], of tokens of the first row.
        """
        device = batch["input_ids"].device.type
        with torch.autocast(device, self.autocast, enabled=self.autocast is not None):
            hidden, weight = forward_hidden(self.model, batch)
            if places is not None:
                return (hidden[0, places].to(weight.dtype) @ weight.T).argmax(-1)
            return linear_cross_entropy(hidden, weight, batch["labels"])


def labelled(batch: Batch) -> Tensor:
    """How many tokens of a batch are to be learnt, an int64 scalar."""
    return (batch["labels"] != IGNORED).sum()


def learning_rate(step: int, settings: Settings) -> float:
    """The rate of a step from 1 to ``steps``: it rises in a line, then falls along a cosine.

    It is ``lr`` at step ``warmup`` and ``lr * lr_end`` at the last one.
    """
    steps, warmup, lr, lr_end = settings.steps, settings.warmup, settings.lr, settings.lr_end
    if step <= warmup:
        return lr * step / warmup
    done = (step - warmup) / (steps - warmup)
    return lr * (lr_end + (1 - lr_end) * (1 + math.cos(math.pi * done)) / 2)


def one_sum(values: list[float], accelerator: Any) -> list[float]:
    """Each of ``values`` summed over all processes, in one go and in float64."""
    mine = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(mine, "sum").tolist()
