"""Checks that all processes of a run have the same settings, weights and data.

A process with other weights or data would train without an error, and its loss would be
meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.integrations.fsdp import is_fsdp_enabled

from cab_hf.distributed.exchange import RankLost, failures_of_others, publish_failure
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.settings import Settings

# paths, which may differ between machines; the content of the files is compared
PLACES = ("model", "calibration", "data", "validation", "out")
# integers with the same number of bytes
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**24  # numbers per step


def facts_of(
    settings: Settings, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return settings, weights and tokens by name for `require_equal`; call it before sharding."""
    fields = {name: value for name, value in asdict(settings).items() if name not in PLACES}
    fields = {f"--{name.replace('_', '-')}": repr(value) for name, value in fields.items()}
    config = {name: x for name, x in model.config.to_dict().items() if name != "_name_or_path"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    tokens = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    tokens = [tokens, tokenizer.special_tokens_map]
    for name, x in {"the config of the model": config, "the tokenizer": tokens}.items():
        fields[name] = sha256(json.dumps(x, default=str, sort_keys=True).encode()).hexdigest()
    # with FSDP one process reads the weights and sends them to the others
    weights = () if is_fsdp_enabled() else model.named_parameters()
    return {**fields, **{f"weight {name}": checksum(each) for name, each in weights}}


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the bits of a tensor and their positions, equal on every device."""
    tensor = tensor.detach().contiguous().flatten()
    bits = tensor.view(BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        # an odd factor keeps all bits, and sums of integers do not depend on their order
        place = torch.arange(len(chunk), device=chunk.device) + number * CHUNK
        total += ((2 * place + 1) * (chunk.to(torch.int64) + 1)).sum()
    return int(total)


def require_equal(facts: Mapping[str, Any]) -> None:
    """Raise an error unless all processes have the same ``facts``. All processes must call it.

    Raises:
        UsageError: in every process. The message names the first differing fact and the processes.
    """
    first, *others = gather_object([dict(facts)])
    for rank, other in enumerate(others, 1):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                raise UsageError(
                    f"{name} must be equal in all processes, got another value in process {rank} "
                    "than in process 0. Give all processes the same settings, and the same model "
                    "and data files."
                )


@contextmanager
def ending_together() -> Iterator[None]:
    """Raise a UsageError with the reason of another process that stopped.

    Without it, this process would only report a lost connection.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        yield
    except Exception as error:
        # errors of collectives; NotImplementedError is Python's
        lost = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        causes = failures_of_others(group) if lost and group is not None else []
        causes = [str(error)] if isinstance(error, RankLost) else causes
        if causes:
            raise UsageError(
                f"this process must stop because another one stopped: {'; '.join(causes)}"
            ) from error
        if group is not None:
            publish_failure(group, error)
        raise
