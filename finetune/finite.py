"""Refusals of a step or a checkpoint with numbers that are not finite; logs refuse them as well.

A single NaN spreads to every value that is trained, and from there into every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cab_hf.finetune.checkpoints import trained
from cab_hf.finetune.objective import one_sum
from cab_hf.runs.settings import UsageError


def require_finite_step(
    step: int, loss: float, norm: float, model: nn.Module, accelerator: Any
) -> None:
    """Refuse a step of the optimiser whose numbers are not finite; called by all processes.

    Args:
        loss: summed, of this process.
        norm: of the gradients of all processes together.

    Raises:
        UsageError: in every process, naming the step, and the first parameter that is not finite,
            or whose gradient.
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
                culprits.append(f"a {what} that is not finite, first of all in {name}")
    why, *_ = [*gather_object(culprits), f"a loss of {loss} with a gradient of {norm}"]
    raise UsageError(
        f"step {step} has {why}; it was skipped, and nothing of it is saved. Give a smaller lr or "
        "--clip where the run had gone well until then, or else another model or --dtype."
    )


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor with a NaN or an infinity, of a sharded one in the part here."""
    for name, each in tensors:
        each = each.to_local() if isinstance(each, DTensor) else each
        if each.is_floating_point() and not torch.isfinite(each).all():
            return name
    return None


def require_finite_state(
    step: int, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Refuse to save gathered parameters or moments that are not finite, naming the first."""
    moments = ((name, each) for name, state in optimizer.items() for each in state.values())
    name = first_not_finite([*parameters.items(), *moments])
    if name is not None:
        raise UsageError(
            f"step {step} has left {name} with values that are not finite; it is not saved. Give a "
            "smaller lr or weight_decay, and the run goes on from the checkpoint before."
        )
