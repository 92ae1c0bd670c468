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

from cab_hf.distributed.exchange import RankLost, publish_failure, read_failures
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune.settings import Settings

# settings with paths, which may differ between machines; file contents are compared instead
PATH_SETTINGS = ("model", "calibration", "data", "validation", "out")
# integer dtype by the bytes of an element
INTEGER_DTYPE_BY_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK_ELEMENTS = 2**24  # elements that a checksum converts to int64 at a time, to limit memory


def collect_facts(
    settings: Settings, model: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return a dict of values that must be equal in all processes, for `require_equal_facts`.

    The values are settings, hashes of config and tokenizer, and checksums of weights, by a name for
    error messages. Call this function before FSDP shards the model.
    """
    settings_values = {
        setting_name: setting_value
        for setting_name, setting_value in asdict(settings).items()
        if setting_name not in PATH_SETTINGS
    }
    facts = {
        f"--{setting_name.replace('_', '-')}": repr(setting_value)
        for setting_name, setting_value in settings_values.items()
    }
    config_fields = {
        field_name: field_value
        for field_name, field_value in model.config.to_dict().items()
        if field_name != "_name_or_path"
    }
    tokenizer_backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = (
        tokenizer_backend.to_str() if tokenizer_backend else sorted(tokenizer.get_vocab().items())
    )
    tokenizer_content = [vocabulary, tokenizer.special_tokens_map]
    for fact_name, fact_content in {
        "the config of the model": config_fields,
        "the tokenizer": tokenizer_content,
    }.items():
        fact_json = json.dumps(fact_content, default=str, sort_keys=True)
        facts[fact_name] = sha256(fact_json.encode()).hexdigest()
    # with FSDP one process loads the weights and broadcasts them
    weights = () if is_fsdp_enabled() else model.named_parameters()
    return {
        **facts,
        **{f"weight {weight_name}": compute_checksum(weight) for weight_name, weight in weights},
    }


def compute_checksum(tensor: Tensor) -> int:
    """Return a checksum that depends on the bits and the order of the elements of a tensor.

    The checksum is the same on every device.
    """
    tensor = tensor.detach().contiguous().flatten()
    integer_bits = tensor.view(INTEGER_DTYPE_BY_BYTES[tensor.element_size()])
    checksum = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk_number, chunk in enumerate(
        integer_bits.split(CHUNK_ELEMENTS) if integer_bits.numel() else ()
    ):
        # a change of one element always changes the sum, because odd factors are invertible modulo
        # 2^64; integer sums do not depend on the order of summation
        element_indices = (
            torch.arange(len(chunk), device=chunk.device) + chunk_number * CHUNK_ELEMENTS
        )
        checksum += ((2 * element_indices + 1) * (chunk.to(torch.int64) + 1)).sum()
    return int(checksum)


def require_equal_facts(facts: Mapping[str, Any]) -> None:
    """Raise an error unless all processes have the same ``facts``.

    All processes must call this function.

    Raises:
        UsageError: a value in a process differs from process 0. All processes raise, and the
            message names the value and the process.
    """
    first_facts, *other_facts = gather_object([dict(facts)])
    for rank, rank_facts in enumerate(other_facts, 1):
        for fact_name in dict.fromkeys((*first_facts, *rank_facts)):
            if first_facts.get(fact_name) != rank_facts.get(fact_name):
                raise UsageError(
                    f"{fact_name} must be equal in all processes, got another value in process "
                    f"{rank} "
                    "than in process 0. Give all processes the same settings, and the same model "
                    "and data files."
                )


@contextmanager
def report_errors_to_all_processes() -> Iterator[None]:
    """Report why a run stopped in every process, not only in the process with the first error.

    An error in the block is published to the other processes. If their collectives then fail, they
    raise a UsageError with the published reason.
    """
    group = dist.group.WORLD if dist.is_initialized() else None
    try:
        yield
    except Exception as error:
        # collectives raise RuntimeErrors, of which NotImplementedError is a subclass
        is_collective_error = isinstance(error, RuntimeError) and not isinstance(
            error, NotImplementedError
        )
        published_reasons = (
            read_failures(group) if is_collective_error and group is not None else []
        )
        published_reasons = [str(error)] if isinstance(error, RankLost) else published_reasons
        if published_reasons:
            raise UsageError(
                "this process must stop because another one stopped: "
                f"{'; '.join(published_reasons)}"
            ) from error
        if group is not None:
            publish_failure(group, error)
        raise
