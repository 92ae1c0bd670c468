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
from cab_hf.vllm.requests import is_dense_requested, wrap_method


@dataclass
class RunnerBatch:
    """The batch that the model runner of this process prepares.

    Attributes:
        prompt_lengths: tokens in the prompt of each request; 0 for a request with the switch
            "dense".
        mask_cache: `MaskInfo` objects by request and lengths. All KV cache groups share the masks
            of a forward pass, so that a layer finds the plan of its anchor in another group.
    """

    prompt_lengths: list[int] = field(default_factory=list)
    mask_cache: dict[Any, MaskInfo] = field(default_factory=dict)


RUNNER_BATCH = RunnerBatch()
# ids of the running requests with the switch "dense"
_dense_request_ids: set[str] = set()


def install_hooks(vllm_config: Any) -> None:
    """Install the hooks in the model runner class of an engine.

    Calling the function again for the same class has no effect.
    """
    is_v2_runner = vllm_config.use_v2_model_runner
    module_name = "gpu.model_runner" if is_v2_runner else "gpu_model_runner"
    runner_class = import_module(f"vllm.v1.worker.{module_name}").GPUModelRunner

    def record_prompts(runner: Any, prepared_inputs: Any) -> None:
        if is_v2_runner:
            request_ids = prepared_inputs.req_ids
            prompt_lengths = runner.req_states.prompt_len.np[
                prepared_inputs.idx_mapping_np
            ].tolist()
        else:
            request_ids = runner.input_batch.req_ids
            prompt_lengths = runner.input_batch.num_prompt_tokens[: len(request_ids)].tolist()
        begin_batch(request_ids, prompt_lengths)

    def register_model_layers(runner: Any) -> None:
        register_layers(runner.get_model(), runner.vllm_config)

    wrap_method(
        runner_class,
        "prepare_inputs" if is_v2_runner else "_prepare_inputs",
        after_call=record_prompts,
    )
    wrap_method(runner_class, "execute_model", before_call=record_switches)
    # vLLM calls get_kv_cache_spec after it has loaded the model and before it measures memory
    wrap_method(runner_class, "get_kv_cache_spec", before_call=register_model_layers)


def record_switches(runner: Any, scheduler_output: Any, *_: Any, **__: Any) -> None:
    """Add new requests with the switch "dense" to ``_dense_request_ids``, remove finished ones.

    Called before each step of the model runner.
    """
    _dense_request_ids.difference_update(scheduler_output.finished_req_ids)
    for new_request in scheduler_output.scheduled_new_reqs:
        if is_dense_requested(new_request.sampling_params):
            _dense_request_ids.add(new_request.req_id)
        else:
            _dense_request_ids.discard(new_request.req_id)


def begin_batch(request_ids: list[str], prompt_lengths: list[int]) -> None:
    """Store the prompt lengths of the next batch in `RUNNER_BATCH`, and drop the cached masks.

    Args:
        request_ids: ids of the requests, in the order of the batch.
        prompt_lengths: tokens in the prompt of each request.
    """
    RUNNER_BATCH.prompt_lengths = [
        0 if request_id in _dense_request_ids else prompt_length
        for request_id, prompt_length in zip(request_ids, prompt_lengths, strict=True)
    ]
    RUNNER_BATCH.mask_cache = {}
