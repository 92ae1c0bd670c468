"""`ForwardState`: caches that the layers of one forward pass share, and plans for recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cab_hf.plan import BlockIndices, BlockPlan

# size in bytes above which the lists of a plan are trimmed; trimming waits for the device
MIN_TRIMMED_BYTES = 2**26

# error for a layer that gradient checkpointing recomputes with other settings
SETTINGS_CHANGED_ERROR = (
    "gradient checkpointing computes a layer again in the backward pass, and attention settings "
    "differ from the forward pass: a `with` block of cab_hf.cab or cab_hf.context_parallel was "
    "left or entered in between, or apply_cab or remove_cab was called. Call backward inside the "
    "`with` block of the forward pass."
)
SAMPLING_IN_RECOMPUTE_ERROR = (
    "gradient checkpointing with use_reentrant=True runs the forward pass without gradients, where "
    "sampled_one_in samples nothing. Set use_reentrant=False, or sampled_one_in=0."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardState:
    """The caches that all layers of one type share in one forward pass.

    Attributes:
        shared_state: results that predictors and decode steps of one layer store for later layers.
    """

    shared_state: dict[Any, Any] = field(default_factory=dict)
    _cache: dict[Any, Any] = field(default_factory=dict)
    # pairs of a config and its parsed config; a list, because configs are compared by identity
    _parsed_configs: list[tuple[Any, Any]] = field(default_factory=list)
    # attention module -> settings with which it first computed attention in this forward pass
    _first_settings: dict[Any, Any] = field(default_factory=dict)
    # attention module -> its plans, if the module needs gradients
    _plans: dict[Any, list[BlockPlan]] = field(default_factory=dict)

    def make_state_of_query_slice(self) -> ForwardState:
        """Return an empty state for a slice of the queries, with the same settings and configs."""
        return ForwardState(
            _parsed_configs=self._parsed_configs, _first_settings=self._first_settings
        )

    def get_or_compute(self, cache_key: Any, compute_value: Callable[[], Any]) -> Any:
        """Return the result of ``compute_value``, cached for all layers under ``cache_key``."""
        if cache_key not in self._cache:
            self._cache[cache_key] = compute_value()
        return self._cache[cache_key]

    def store(self, cache_key: Any, value: Any) -> None:
        """Store a ``value`` that `get_or_compute` and `get_stored` return."""
        self._cache[cache_key] = value

    def get_stored(self, cache_key: Any) -> Any:
        """Return the value that is cached under ``cache_key``; None without a value."""
        return self._cache.get(cache_key)

    def parse_config_once(self, config: Any, parse_config: Callable[[Any], Any]) -> Any:
        """Return ``parse_config(config)``, computed once per forward pass.

        Parsing in every layer would be slow: a config can contain long tables, and torch.compile
        traces each number that the parser reads.
        """
        for known_config, parsed_config in self._parsed_configs:
            if known_config is config:
                return parsed_config
        self._parsed_configs.append((config, parse_config(config)))
        return self._parsed_configs[-1][1]

    def require_same_settings(
        self, layer: Any, config: Any, *, is_sparse: bool, sampled_one_in: int
    ) -> None:
        """Check that a recomputed layer has the settings of its first computation.

        Args:
            layer: attention module.
            config: settings of the layer.
            is_sparse: True if sparse attention is requested.
            sampled_one_in: see `Call.sampled_one_in`.

        Raises:
            RuntimeError: if settings in the backward pass differ from those in the forward pass.
        """
        if torch.compiler.is_compiling():
            return
        settings = (config, is_sparse), sampled_one_in
        first_settings = self._first_settings.setdefault(layer, settings)
        if first_settings == settings:
            return
        if is_in_backward_pass():
            has_same_config = first_settings[0] == settings[0]
            raise RuntimeError(
                SAMPLING_IN_RECOMPUTE_ERROR if has_same_config else SETTINGS_CHANGED_ERROR
            )
        self._first_settings[layer] = settings

    def make_plan_for_recompute(
        self, layer: Any, qkv_tensors: Sequence[Tensor], predict_plan: Callable[[], BlockPlan]
    ) -> BlockPlan:
        """Return the plan of a layer from ``predict_plan``, and store the plan for recomputation.

        If gradient checkpointing recomputes the layer in the backward pass, returns the stored
        plan. If the model calls the layer several times, recomputation calls ``predict_plan``
        again.

        Args:
            layer: attention module.
            qkv_tensors: q, k and v of the layer.
            predict_plan: function that selects blocks and returns a plan.
        """
        tensor_with_gradient = next((x for x in qkv_tensors if x.requires_grad), None)
        if (
            torch.compiler.is_compiling()
            or tensor_with_gradient is None
            or is_captured_in_cuda_graph(tensor_with_gradient)
        ):
            return predict_plan()
        saved_plans = self._plans.setdefault(layer, [])
        if not is_in_backward_pass():
            plan = trim_plan(predict_plan())
            # stored on the host, because the lists of all layers need much memory of the GPU
            saved_plans.append(narrow_plan_to_int16(plan).map_tensors(_copy_to_pinned_host))
            return plan
        if len(saved_plans) > 1:
            # Select blocks again: the layer was called several times, and the recomputed call is
            # not known. Shared results are of the last call, so they are removed.
            self.shared_state.clear()
        if len(saved_plans) != 1:
            return predict_plan()
        device = tensor_with_gradient.device
        return saved_plans.pop().map_tensors(lambda x: x.to(device, non_blocking=True).int())


def is_in_backward_pass() -> bool:
    """Return True in a backward pass, in which gradient checkpointing recomputes layers."""
    # the same test as in torch.utils.checkpoint
    return torch._C._current_graph_task_id() != -1


def is_captured_in_cuda_graph(x: Tensor) -> bool:
    """Return True if operations on ``x`` are captured in a CUDA graph.

    Callers must then share no results with other forward passes: replaying a graph runs no code on
    the host.
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def trim_plan(plan: BlockPlan) -> BlockPlan:
    """Return the plan with padded index lists cut to the length of the longest list.

    Cutting waits for the device. Lists of at most `MIN_TRIMMED_BYTES` bytes are not cut.
    """
    return plan.map_lists(_trim_block_lists)


def _trim_block_lists(block_lists: BlockIndices) -> BlockIndices:
    """Return large lists cut to the length of the longest list; return other lists unchanged."""
    if block_lists.indices.nbytes <= MIN_TRIMMED_BYTES:
        return block_lists
    max_list_length = max(1, int(block_lists.counts.max()))
    return BlockIndices(block_lists.counts, block_lists.indices[..., :max_list_length].contiguous())


def narrow_plan_to_int16(plan: BlockPlan) -> BlockPlan:
    """Return the plan with int16 lists if all block indices are below 2**15."""
    return plan.map_tensors(lambda x: x.short()) if plan.kv_blocks < 2**15 else plan


def _copy_to_pinned_host(x: Tensor) -> Tensor:
    """Return a copy of a CUDA tensor in pinned host memory; return a CPU tensor unchanged.

    Does not wait until the copy is complete.
    """
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
