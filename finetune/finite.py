"""Checks that steps and checkpoints contain finite numbers only; logs check it as well.

A single NaN spreads to every trained value, and from there into every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.checkpoints import trained
from cab_hf.finetune.objective import one_sum


def require_finite_step(
    step: int, loss: float, norm: float, model: nn.Module, accelerator: Any
) -> None:
    """Raise an error for an optimizer step with numbers that are not finite.

    All processes must call it.

    Args:
        step: number of the step.
        loss: the summed loss of this process.
        norm: norm of the gradients over all processes.
        model: the trained model.
        accelerator: accelerate's accelerator.

    Raises:
        UsageError: in every process. The message names the step, and the first parameter that is
            not finite or has such a gradient.
    """
    wrong = not (math.isfinite(loss) and math.isfinite(norm))
    if one_sum([float(wrong)], accelerator) == [0.0]:
        return
    culprits = []
    if wrong:
        gradients = ((name, x.grad) for name, x in trained(model).items() if x.grad is not None)
        for what, tensors in (("weight", model.named_parameters()), ("gradient", gradients)):
            name = first_not_finite(tensors)
            if name is not None:
                culprits.append(f"a {what} that is not finite, the first in {name}")
    why, *_ = [*gather_object(culprits), f"a loss of {loss} and a gradient norm of {norm}"]
    raise UsageError(
        f"step {step} has {why}. It was skipped, and nothing of it is saved. Give a smaller lr or "
        "--clip if the run was stable until then, else another model or --dtype."
    )


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity in the local shard, or None."""
    for name, each in tensors:
        each = each.to_local() if isinstance(each, DTensor) else each
        if each.is_floating_point() and not torch.isfinite(each).all():
            return name
    return None


def require_finite_state(
    step: int, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Raise an error for parameters or moments that are not finite before they are saved."""
    moments = ((name, each) for name, state in optimizer.items() for each in state.values())
    name = first_not_finite([*parameters.items(), *moments])
    if name is not None:
        raise UsageError(
            f"step {step} has values that are not finite in {name}. It is not saved. Give a "
            "smaller lr or weight_decay, and the run continues from the checkpoint before it."
        )
