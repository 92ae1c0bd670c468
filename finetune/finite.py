"""Check that gradients, parameters and optimizer states are finite.

A single NaN in a gradient spreads to all trained parameters, and from there to all later
checkpoints.
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
from cab_hf.finetune.checkpoints import get_trained_parameters
from cab_hf.finetune.objective import all_reduce_sums


def require_finite_step(
    step: int, loss: float, grad_norm: float, model: nn.Module, accelerator: Any
) -> None:
    """Raise an error before an optimizer step if the loss or the gradient norm is not finite.

    All processes must call this function.

    Args:
        step: number of the step.
        loss: the summed loss of this process.
        grad_norm: norm of the gradients over all processes.
        model: the trained model.
        accelerator: accelerate's accelerator.

    Raises:
        UsageError: the loss or the norm is not finite in some process. All processes raise. The
            message names the first weight or gradient that is not finite.
    """
    is_not_finite = not (math.isfinite(loss) and math.isfinite(grad_norm))
    if all_reduce_sums([float(is_not_finite)], accelerator) == [0.0]:
        return
    reasons = []
    if is_not_finite:
        gradients = (
            (name, parameter.grad)
            for name, parameter in get_trained_parameters(model).items()
            if parameter.grad is not None
        )
        for tensor_kind, named_tensors in (
            ("weight", model.named_parameters()),
            ("gradient", gradients),
        ):
            name = find_first_not_finite_tensor(named_tensors)
            if name is not None:
                reasons.append(f"a {tensor_kind} that is not finite, the first in {name}")
    reasons = [*gather_object(reasons), f"a loss of {loss} and a gradient norm of {grad_norm}"]
    raise UsageError(
        f"step {step} has {reasons[0]}. It was skipped, and nothing of it is saved. Give a smaller "
        "lr or --clip if the run was stable until then, else another model or --dtype."
    )


def find_first_not_finite_tensor(named_tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor with NaN or infinity; None if all are finite.

    ``named_tensors`` yields (name, tensor). Of a DTensor, only the local shard is checked.
    """
    for name, tensor in named_tensors:
        local_shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local_shard.is_floating_point() and not torch.isfinite(local_shard).all():
            return name
    return None


def require_finite_state(
    step: int,
    parameters: Mapping[str, Tensor],
    optimizer_states: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Raise a UsageError if parameters or optimizer states to be saved are not finite.

    Args:
        step: number of the step.
        parameters: the result of `checkpoints.copy_parameters`.
        optimizer_states: the result of `checkpoints.copy_optimizer_state`.
    """
    optimizer_tensors = (
        (parameter_name, state_tensor)
        for parameter_name, parameter_state in optimizer_states.items()
        for state_tensor in parameter_state.values()
    )
    tensor_name = find_first_not_finite_tensor([*parameters.items(), *optimizer_tensors])
    if tensor_name is not None:
        raise UsageError(
            f"step {step} has values that are not finite in {tensor_name}. It is not saved. Give a "
            "smaller lr or weight_decay, and the run continues from the checkpoint before it."
        )
