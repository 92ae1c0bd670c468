"""Numbers that are none: what a step would do with them, and who has them, told before it is made.

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
    """Refuse to let the optimiser make a step of numbers that are not finite.

    Called by all processes; where one has to stop, all do.

    Args:
        loss: summed, of this process.
        norm: of the gradients of all processes together.

    Raises:
        UsageError: naming the step, and the first parameter that is not finite, or whose gradient.
    """
    wrong = not (math.isfinite(loss) and math.isfinite(norm))
    (processes,) = one_sum([float(wrong)], accelerator)
    if not processes:
        return
    parts = [_culprit(model)] if wrong else []
    # of several processes the first that knows
    why = next(filter(None, gather_object(parts)), f"a loss of {loss} with a gradient of {norm}")
    raise UsageError(
        f"step {step} has {why}; it was skipped, and nothing of it is saved. Give a smaller lr or "
        "--clip where the run had gone well until then, or else another model or --dtype."
    )


def _culprit(model: nn.Module) -> str | None:
    """What is not finite, as far as this process holds it."""
    name = first_not_finite(model.named_parameters())
    if name is not None:
        return f"a weight that is not finite, in {name}"
    gradients = ((name, x.grad) for name, x in trained(model).items() if x.grad is not None)
    name = first_not_finite(gradients)
    return name and f"a gradient that is not finite, first of all in {name}"


def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first that holds a NaN or an infinity, of a spread one in the part here."""
    for name, each in tensors:
        each = each.to_local() if isinstance(each, DTensor) else each
        if each.is_floating_point() and not torch.isfinite(each).all():
            return name
    return None


def require_finite_state(
    step: int, parameters: Mapping[str, Tensor], optimizer: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Refuse to save whole parameters or moments that are not finite, naming the first."""
    moments = ((name, each) for name, state in optimizer.items() for each in state.values())
    name = first_not_finite(parameters.items()) or first_not_finite(moments)
    if name is not None:
        raise UsageError(
            f"step {step} has left {name} with values that are not finite; it is not saved. Give a "
            "smaller lr or weight_decay, and the run goes on from the checkpoint before."
        )


def require_finite_numbers(step: int, record: Mapping[str, Any]) -> None:
    """Refuse what JSON does not hold, naming the step and the number."""
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(
                f"step {step} has a {name} of {value}; it is neither logged nor saved. Give a "
                "smaller lr, and the run goes on from the checkpoint before."
            )
