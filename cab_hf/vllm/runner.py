"""Hooks in vLLM's model runners that record what vLLM does not pass to an attention backend.

The hooks record the prompt length of each request, the requests with the switch "dense", and the
attention layers of the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from cab_hf.call.mask import MaskInfo
from cab_hf.vllm.layers import register_layers
from cab_hf.vllm.requests import hook, is_dense


@dataclass
class Batch:
    """The batch that the model runner of this process prepares.

    Attributes:
        prompt_lengths: tokens in the prompt of each request; 0 for a request with the switch
            "dense".
        mask_cache: `MaskInfo` objects by request and lengths. All KV cache groups share the masks
            of a forward pass, so that a layer finds the plan of its anchor in another group.
    """

    prompt_lengths: list[int] = field(default_factory=list)
    mask_cache: dict[Any, MaskInfo] = field(default_factory=dict)


BATCH = Batch()
# ids of the running requests with the switch "dense"
_dense_requests: set[str] = set()


def install_hooks(vllm_config: Any) -> None:
    """Install the hooks in the model runner class of an engine.

    Calling the function again for the same class has no effect.
    """
    is_v2 = vllm_config.use_v2_model_runner
    module = "gpu.model_runner" if is_v2 else "gpu_model_runner"
    runner_class = import_module(f"vllm.v1.worker.{module}").GPUModelRunner

    def record_prompts(runner: Any, result: Any) -> None:
        if is_v2:
            ids = result.req_ids
            lengths = runner.req_states.prompt_len.np[result.idx_mapping_np].tolist()
        else:
            ids = runner.input_batch.req_ids
            lengths = runner.input_batch.num_prompt_tokens[: len(ids)].tolist()
        begin_batch(ids, lengths)

    def register_model_layers(runner: Any) -> None:
        register_layers(runner.get_model(), runner.vllm_config)

    hook(runner_class, "prepare_inputs" if is_v2 else "_prepare_inputs", after=record_prompts)
    hook(runner_class, "execute_model", before=record_switches)
    # vLLM calls get_kv_cache_spec after it has loaded the model and before it measures memory
    hook(runner_class, "get_kv_cache_spec", before=register_model_layers)


def record_switches(runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
    """Update ``_dense_requests``: add new requests with the switch "dense", remove finished ones.

    Called before each step of the model runner.
    """
    _dense_requests.difference_update(scheduler_output.finished_req_ids)
    for request in scheduler_output.scheduled_new_reqs:
        if is_dense(request.sampling_params):
            _dense_requests.add(request.req_id)
        else:
            _dense_requests.discard(request.req_id)


def begin_batch(ids: list[str], lengths: list[int]) -> None:
    """Store the prompt lengths of the next batch in `BATCH`, and drop the previous batch's masks.

    Args:
        ids: ids of the requests, in the order of the batch.
        lengths: tokens in the prompt of each request.
    """
    BATCH.prompt_lengths = [
        0 if request_id in _dense_requests else length
        for request_id, length in zip(ids, lengths, strict=True)
    ]
    BATCH.mask_cache = {}
