"""Hooks into the model runners of vLLM, for facts that no runner passes to a backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
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

    def prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(prepare)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = prepare(self, *args, **kwargs)
            if second:
                ids = made.req_ids
                lengths = self.req_states.prompt_len.np[made.idx_mapping_np].tolist()
            else:
                ids = self.input_batch.req_ids
                lengths = self.input_batch.num_prompt_tokens[: len(ids)].tolist()
            begin_batch(ids, lengths)
            return made

        return call

    def executed(execute: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(execute)
        def call(self: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            _dense.difference_update(scheduled.finished_req_ids)
            for each in scheduled.scheduled_new_reqs:
                (_dense.add if is_dense(each.sampling_params) else _dense.discard)(each.req_id)
            return execute(self, scheduled, *args, **kwargs)

        return call

    def specified(specify: Callable[..., Any]) -> Callable[..., Any]:
        # the first call after the model is loaded, before memory is measured
        @wraps(specify)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            learn(self.get_model(), self.vllm_config)
            return specify(self, *args, **kwargs)

        return call

    hook(kind, "prepare_inputs" if second else "_prepare_inputs", prepared)
    hook(kind, "execute_model", executed)
    hook(kind, "get_kv_cache_spec", specified)


def begin_batch(ids: list[str], lengths: list[int]) -> None:
    """Note the requests of the next batch, and the tokens of their prompts."""
    BATCH.prompts = [
        0 if name in _dense else length for name, length in zip(ids, lengths, strict=True)
    ]
    BATCH.mask_cache = {}
