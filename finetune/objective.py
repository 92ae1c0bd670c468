"""The training objective: a model and its loss as one module; learning rate; all-reduced sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.finetune.loss import IGNORED_LABEL, linear_cross_entropy
from cab_hf.finetune.models import forward_hidden
from cab_hf.finetune.settings import Settings

Batch = Mapping[str, Tensor]


class Objective(nn.Module):
    """A module that computes the loss of a model.

    The loss needs the weight of the head. Under FSDP this weight is gathered only while the wrapped
    module is called, so that model and loss must be one module.

    Args:
        model: a causal LM, with or without adapters.
        autocast_dtype: dtype of products if float32 weights are trained; None: the dtype of the
            weights.
    """

    def __init__(self, model: nn.Module, autocast_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.model, self.autocast_dtype = model, autocast_dtype
        # accelerate reads this attribute: the classes of layers that FSDP2 gathers one by one
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    def forward(self, batch: Batch, query_indices: Tensor | None = None) -> Tensor:
        """Return the summed loss of a batch, or the predicted next tokens at ``query_indices``.

        Args:
            batch: ``input_ids``, ``position_ids`` and, for a loss, ``labels``: int64 [B, N]. Labels
                are already shifted, and -100 marks tokens without a label.
            query_indices: int64 [P], indices of tokens in the first row whose next tokens are
                predicted; None: return the loss.

        Returns:
            The loss, a scalar; or int64 [P], the tokens with the largest logits.
        """
        device_type = batch["input_ids"].device.type
        with torch.autocast(
            device_type, self.autocast_dtype, enabled=self.autocast_dtype is not None
        ):
            hidden, weight = forward_hidden(self.model, batch)
            if query_indices is not None:
                return (hidden[0, query_indices].to(weight.dtype) @ weight.T).argmax(-1)
            return linear_cross_entropy(hidden, weight, batch["labels"])


def count_labels(batch: Batch) -> Tensor:
    """Return the number of tokens of a batch with a label, an int64 scalar."""
    return (batch["labels"] != IGNORED_LABEL).sum()


def compute_learning_rate(step: int, settings: Settings) -> float:
    """Return the learning rate of a step: a linear warm-up, then a cosine decay.

    The rate is ``lr`` at step ``warmup`` and ``lr * lr_end`` at step ``steps``. The first step has
    number 1.
    """
    num_steps, num_warmup_steps, lr, lr_end = (
        settings.steps,
        settings.warmup,
        settings.lr,
        settings.lr_end,
    )
    if step <= num_warmup_steps:
        return lr * step / num_warmup_steps
    decay_progress = (step - num_warmup_steps) / (num_steps - num_warmup_steps)
    return lr * (lr_end + (1 - lr_end) * (1 + math.cos(math.pi * decay_progress)) / 2)


def all_reduce_sums(local_values: list[float], accelerator: Any) -> list[float]:
    """Return the sum of each value over all processes, by one all-reduce in float64.

    All processes must call this function.
    """
    value_tensor = torch.tensor(local_values, dtype=torch.float64, device=accelerator.device)
    return accelerator.reduce(value_tensor, "sum").tolist()
