"""Hooks into vLLM's model runners, for facts that runners do not pass to a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from cab_hf.call.mask import MaskInfo
from cab_hf.vllm.layers import learn
from cab_hf.vllm.requests import hook, is_dense


@dataclass
class Batch:
    """The batch that the runner of this process prepares.

    Attributes:
        prompts: tokens in the prompt of each request; 0 for a dense request.
        mask_cache: `MaskInfo` objects by request and length. Layers of all KV cache groups share
            the masks in a forward pass, so a layer finds the plan of an anchor in another group.
    """

    prompts: list[int] = field(default_factory=list)
    mask_cache: dict[Any, MaskInfo] = field(default_factory=dict)


BATCH = Batch()
# ids of dense requests
_dense: set[str] = set()


def watch(vllm_config: Any) -> None:
    """Install the hooks in the runner class of an engine; does nothing the second time."""
    second = vllm_config.use_v2_model_runner
    file = "gpu.model_runner" if second else "gpu_model_runner"
    kind = import_module(f"vllm.v1.worker.{file}").GPUModelRunner

    def note_prompts(runner: Any, made: Any) -> None:
        if second:
            ids = made.req_ids
            lengths = runner.req_states.prompt_len.np[made.idx_mapping_np].tolist()
        else:
            ids = runner.input_batch.req_ids
            lengths = runner.input_batch.num_prompt_tokens[: len(ids)].tolist()
        begin_batch(ids, lengths)

    hook(kind, "prepare_inputs" if second else "_prepare_inputs", after=note_prompts)
    hook(kind, "execute_model", before=note_switches)
    # the first call after the model is loaded, before memory is measured
    hook(kind, "get_kv_cache_spec", before=lambda x: learn(x.get_model(), x.vllm_config))


def note_switches(runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
    """Record which of the newly scheduled requests are dense."""
    _dense.difference_update(scheduler_output.finished_req_ids)
    for each in scheduler_output.scheduled_new_reqs:
        (_dense.add if is_dense(each.sampling_params) else _dense.discard)(each.req_id)


def begin_batch(ids: list[str], lengths: list[int]) -> None:
    """Record the prompt lengths of the requests in the next batch, in tokens."""
    BATCH.prompts = [
        0 if name in _dense else length for name, length in zip(ids, lengths, strict=True)
    ]
    BATCH.mask_cache = {}
