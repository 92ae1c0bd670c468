"""State that layers share in one forward pass, and plans that recomputed layers use again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cab_hf.plan import BlockIndices, BlockPlan

# bytes; smaller lists of a plan are not trimmed, because trimming waits for the device
MEASURED_FROM = 2**26

# a layer that gradient checkpointing recomputes must attend as in the forward pass
SETTINGS_CHANGED = (
    "gradient checkpointing computes a layer again in the backward pass, and attention settings "
    "differ from the forward pass: a `with` block of cab_hf.cab or cab_hf.context_parallel was "
    "left or entered in between, or apply_cab or remove_cab was called. Call backward inside the "
    "`with` block of the forward pass."
)
SAMPLED_LATER = (
    "gradient checkpointing with use_reentrant=True runs the forward pass without gradients, where "
    "sampled_one_in samples nothing. Set use_reentrant=False, or sampled_one_in=0."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardState:
    """The caches that all layers of one type share in one forward pass.

    Attributes:
        shared: results that predictors and decode steps pass to later layers.
    """

    shared: dict[Any, Any] = field(default_factory=dict)
    _cache: dict[Any, Any] = field(default_factory=dict)
    # (config, parsed config); a list, because configs are compared by identity
    _parsed: list[tuple[Any, Any]] = field(default_factory=list)
    # settings of the first computation of each layer, by layer
    _attended: dict[Any, Any] = field(default_factory=dict)
    # plans of layers that need gradients
    _predicted: dict[Any, list[BlockPlan]] = field(default_factory=dict)

    def for_some_queries(self) -> ForwardState:
        """Return the state for a part of the queries, with the same settings and configs."""
        return ForwardState(_parsed=self._parsed, _attended=self._attended)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the result of ``make``, computed once for all layers with the same ``key``."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def store(self, key: Any, value: Any) -> None:
        """Store a ``value`` that `cached` and `stored` return."""
        self._cache[key] = value

    def stored(self, key: Any) -> Any:
        """Return the value that is cached under ``key``; None if there is none."""
        return self._cache.get(key)

    def parsed(self, config: Any, parse: Callable[[Any], Any]) -> Any:
        """Return ``parse(config)``, computed once per forward pass.

        Tables are long, and torch.compile traces every number that is read.
        """
        for known, result in self._parsed:
            if known is config:
                return result
        self._parsed.append((config, parse(config)))
        return self._parsed[-1][1]

    def require_same_settings(
        self, layer: Any, config: Any, *, sparse: bool, sampled_one_in: int
    ) -> None:
        """Check that a recomputed layer has the settings of its first computation.

        Args:
            layer: attention module.
            config: settings of the layer.
            sparse, sampled_one_in: see `Call`.

        Raises:
            RuntimeError: if settings in the backward pass differ from those in the forward pass.
        """
        if torch.compiler.is_compiling():
            return
        settings = (config, sparse), sampled_one_in
        before = self._attended.setdefault(layer, settings)
        if before == settings:
            return
        if in_backward_pass():
            raise RuntimeError(SETTINGS_CHANGED if before[0] != settings[0] else SAMPLED_LATER)
        self._attended[layer] = settings

    def plan_for_recompute(
        self, layer: Any, tensors: Sequence[Tensor], predict: Callable[[], BlockPlan]
    ) -> BlockPlan:
        """Return the plan of a layer from ``predict``, and store it for the recomputation.

        If gradient checkpointing recomputes a layer in the backward pass, the layer uses the stored
        plan. A layer that a model calls several times is predicted again.

        Args:
            layer: attention module.
            tensors: q, k and v of the layer.
            predict: function that selects blocks.
        """
        x = next((x for x in tensors if x.requires_grad), None)
        if torch.compiler.is_compiling() or x is None or is_captured(x):
            return predict()
        saved_plans = self._predicted.setdefault(layer, [])
        if not in_backward_pass():
            plan = trimmed(predict())
            # stored on the host: the lists of all layers would increase the peak memory of the GPU
            saved_plans.append(narrowed(plan).map_tensors(_to_pinned_host))
            return plan
        if len(saved_plans) > 1:
            # it is not known which call of the layer this is
            self.shared.clear()
        if len(saved_plans) != 1:
            return predict()
        return saved_plans.pop().map_tensors(
            lambda part: part.to(x.device, non_blocking=True).int()
        )


def in_backward_pass() -> bool:
    """Return True in a backward pass, in which gradient checkpointing recomputes layers."""
    # the same test as in torch.utils.checkpoint
    return torch._C._current_graph_task_id() != -1


def is_captured(x: Tensor) -> bool:
    """Return True if operations on ``x`` are captured in a CUDA graph."""
    # a replayed graph runs no code on the host
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def trimmed(plan: BlockPlan) -> BlockPlan:
    """Return the plan with large lists cut to the length of the longest list.

    Cutting waits for the device. Only lists of long layers are large enough.
    """
    return plan.map_lists(_trimmed)


def _trimmed(lists: BlockIndices) -> BlockIndices:
    """Return lists of more than `MEASURED_FROM` bytes cut to the length of the longest list."""
    if lists.indices.nbytes <= MEASURED_FROM:
        return lists
    width = max(1, int(lists.counts.max()))
    return BlockIndices(lists.counts, lists.indices[..., :width].contiguous())


def narrowed(plan: BlockPlan) -> BlockPlan:
    """Return the plan with int16 lists if all block indices fit."""
    return plan.map_tensors(lambda x: x.short()) if plan.kv_blocks < 2**15 else plan


def _to_pinned_host(x: Tensor) -> Tensor:
    """Return a copy in pinned host memory, without waiting for it; on a CPU the tensor itself."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
