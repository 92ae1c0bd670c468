"""Hooks into the model runners of vLLM, for facts that no runner passes to a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from cab_hf.call.mask import CabMask
from cab_hf.vllm.layers import learn
from cab_hf.vllm.requests import hook, is_dense


@dataclass
class Batch:
    """The batch that the runner of this process prepares.

    Attributes:
        prompts: tokens in the prompt of each request; 0 for a request that is read densely.
        mask_cache: a `CabMask` by request and length. Layers of all KV cache groups share it in a
            forward pass, so that a layer finds the plan of its anchor in another group.
    """

    prompts: list[int] = field(default_factory=list)
    mask_cache: dict[Any, CabMask] = field(default_factory=dict)


BATCH = Batch()
# ids of the requests that are read densely
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
    """Note which of the requests that a scheduler hands to a runner are read densely."""
    _dense.difference_update(scheduler_output.finished_req_ids)
    for each in scheduler_output.scheduled_new_reqs:
        (_dense.add if is_dense(each.sampling_params) else _dense.discard)(each.req_id)


def begin_batch(ids: list[str], lengths: list[int]) -> None:
    """Note the requests of the next batch, and the tokens of their prompts."""
    BATCH.prompts = [
        0 if name in _dense else length for name, length in zip(ids, lengths, strict=True)
    ]
    BATCH.mask_cache = {}
