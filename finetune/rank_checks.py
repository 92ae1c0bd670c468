"""Check that all processes of a run have the same settings, weights and data.

If a process had other weights or data, training would raise no error, but its result would be
wrong.
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

# settings with paths, which may differ between machines; file contents are compared instead
PATHS = ("model", "calibration", "data", "validation", "out")
# integer dtype by the bytes of an element
INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 2**24  # elements that a checksum converts to int64 at a time, to limit memory


def facts_of(
    settings: Settings, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return a dict of values that must be equal in all processes, for `require_equal`.

    The values are settings, hashes of config and tokenizer, and checksums of weights, by a name for
    error messages. Call this function before FSDP shards the model.
    """
    fields = {name: value for name, value in asdict(settings).items() if name not in PATHS}
    facts = {f"--{name.replace('_', '-')}": repr(value) for name, value in fields.items()}
    config = {name: x for name, x in model.config.to_dict().items() if name != "_name_or_path"}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    tokens = [vocabulary, tokenizer.special_tokens_map]
    for name, content in {"the config of the model": config, "the tokenizer": tokens}.items():
        text = json.dumps(content, default=str, sort_keys=True)
        facts[name] = sha256(text.encode()).hexdigest()
    # with FSDP one process loads the weights and broadcasts them
    weights = () if is_fsdp_enabled() else model.named_parameters()
    return {**facts, **{f"weight {name}": checksum(weight) for name, weight in weights}}


def checksum(tensor: Tensor) -> int:
    """Return a checksum that depends on the bits and the order of the elements of a tensor.

    The checksum is the same on every device.
    """
    tensor = tensor.detach().contiguous().flatten()
    bits = tensor.view(INTEGER_DTYPES[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for number, chunk in enumerate(bits.split(CHUNK) if bits.numel() else ()):
        # a change of one element always changes the sum, because odd factors are invertible modulo
        # 2^64; integer sums do not depend on the order of summation
        index = torch.arange(len(chunk), device=chunk.device) + number * CHUNK
        total += ((2 * index + 1) * (chunk.to(torch.int64) + 1)).sum()
    return int(total)


def require_equal(facts: Mapping[str, Any]) -> None:
    """Raise an error unless all processes have the same ``facts``.

    All processes must call this function.

    Raises:
        UsageError: a value in a process differs from process 0. All processes raise, and the
            message names the value and the process.
    """
    facts_of_first, *facts_of_others = gather_object([dict(facts)])
    for rank, facts_of_other in enumerate(facts_of_others, 1):
        for name in dict.fromkeys((*facts_of_first, *facts_of_other)):
            if facts_of_first.get(name) != facts_of_other.get(name):
                raise UsageError(
                    f"{name} must be equal in all processes, got another value in process {rank} "
                    "than in process 0. Give all processes the same settings, and the same model "
                    "and data files."
                )


@contextmanager
def ending_together() -> Iterator[None]:
    """Report why a run stopped in every process, not only in the process with the first error.

    An error in the block is published to the other processes. If their collectives then fail, they
    raise a UsageError with the published reason.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        yield
    except Exception as error:
        # collectives raise RuntimeErrors, of which NotImplementedError is a subclass
        is_lost = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        causes = failures_of_others(group) if is_lost and group is not None else []
        causes = [str(error)] if isinstance(error, RankLost) else causes
        if causes:
            raise UsageError(
                f"this process must stop because another one stopped: {'; '.join(causes)}"
            ) from error
        if group is not None:
            publish_failure(group, error)
        raise
