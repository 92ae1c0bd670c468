"""What all processes of a run must have alike, compared once before anything is learnt.

A process with other weights or other texts trains without an error, and its loss means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers.integrations.fsdp import is_fsdp_enabled

from cab_hf.finetune.settings import Settings
from cab_hf.runs.settings import UsageError

# of files, which may stand elsewhere on another machine; what is in them is compared
PLACES = ("model", "calibration", "data", "validation", "out")
# integers of as many bytes
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**24  # numbers looked at together


def facts_of(settings: Settings, model: nn.Module) -> dict[str, Any]:
    """What settings and weights are, by names for `require_alike`; ``model`` is not spread yet."""
    fields = {name: value for name, value in asdict(settings).items() if name not in PLACES}
    fields = {f"--{name.replace('_', '-')}": repr(value) for name, value in fields.items()}
    # of FSDP one process reads the weights, the others are given them
    weights = () if is_fsdp_enabled() else model.named_parameters()
    return {**fields, **{f"weight {name}": checksum(each) for name, each in weights}}


def checksum(tensor: Tensor) -> int:
    """Of the bits of a tensor and their places; the same on every device."""
    tensor = tensor.detach().contiguous().flatten()
    bits = tensor.view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        # an odd factor loses no bit, and sums of integers do not depend on their order
        place = torch.arange(len(chunk), device=chunk.device) + number * CHUNK
        total += ((2 * place + 1) * (chunk.to(torch.int64) + 1)).sum()
    return int(total)


def require_alike(facts: Mapping[str, Any]) -> None:
    """Make sure that all processes have the same ``facts``; called by all of them.

    Raises:
        UsageError: in every process, naming the first fact that differs, and the processes.
    """
    first, *others = gather_object([dict(facts)])
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"{name} of process {rank} is another than that of process 0; give all "
                    "processes the same settings, and the same files of model and data."
                )
