"""What the layers of one forward pass share, and what a layer keeps for its second forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cab_hf.plan import BlockLists, BlockPlan

if TYPE_CHECKING:
    from cab_hf.call.call import Call

# bytes of a layer's lists, of which all layers keep some
MEASURED_FROM = 2**26

# a layer that gradient checkpointing computes again attends as it did the first time, or not at all
SETTINGS_CHANGED = (
    "gradient checkpointing computes a layer again in the backward pass, and the model attends "
    "otherwise than in the forward pass: a `with` block of cab_hf.cab or cab_hf.context_parallel "
    "was left or entered in between, or apply_cab or remove_cab called. Call backward inside the "
    "block that the forward pass ran in."
)
SAMPLED_LATER = (
    "gradient checkpointing with use_reentrant=True runs the forward pass without gradients, where "
    "sampled_one_in samples nothing; give use_reentrant=False, or sampled_one_in=0."
)


@dataclass(eq=False, kw_only=True)
class ForwardState:
    """What all layers of one kind share in one forward pass.

    Attributes:
        shared: what predictors and steps of one layer leave for those of later ones.
    """

    shared: dict[Any, Any] = field(default_factory=dict)
    _made: dict[Any, Any] = field(default_factory=dict)
    _parsed: list[tuple[Any, Any]] = field(default_factory=list)
    # how each layer attended, by layer
    _attended: dict[Any, Any] = field(default_factory=dict)
    # of layers that gradients flow through
    _predicted: dict[Any, list[BlockPlan]] = field(default_factory=dict)

    def of_some_queries(self) -> ForwardState:
        """That of a part of the queries, which layers attend in the same way as the others."""
        return ForwardState(_parsed=self._parsed, _attended=self._attended)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What ``make`` returns, made once for all layers that give the same ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def parsed(self, config: Any, parse: Callable[[Any], Any]) -> Any:
        """What ``parse`` makes of a model's ``config``, once a forward pass.

        Tables of budgets are long, and torch.compile traces every number that is looked at.
        """
        for known, result in self._parsed:
            if known is config:
                return result
        self._parsed.append((config, parse(config)))
        return self._parsed[-1][1]

    def require_same_settings(self, call: Call) -> None:
        """Refuse a layer that is computed again and attends otherwise than the first time.

        Raises:
            RuntimeError: a backward pass finds other settings than the forward pass had.
        """
        if torch.compiler.is_compiling():
            return
        how, sampled = (call.config, call.sparse), call.sampled_one_in
        before = self._attended.setdefault(call.layer, (how, sampled))
        if before == (how, sampled):
            return
        if in_backward_pass():
            raise RuntimeError(SETTINGS_CHANGED if before[0] != how else SAMPLED_LATER)
        self._attended[call.layer] = how, sampled

    def kept_plan(self, call: Call, predict: Callable[[], BlockPlan]) -> BlockPlan:
        """What ``predict`` chooses for a layer, kept for a second forward pass.

        Gradient checkpointing computes a layer again in the backward pass: it then attends under
        the plan of the first time. A layer that a model calls several times is predicted anew.
        """
        x = next((x for x in (call.q, call.k, call.v) if x.requires_grad), None)
        if torch.compiler.is_compiling() or x is None or is_captured(x):
            return predict()
        kept = self._predicted.setdefault(call.layer, [])
        if not in_backward_pass():
            plan = trimmed(predict())
            # lists of all layers would take memory beside what the longest layer needs
            kept.append(narrowed(plan).map_tensors(_to_pinned_host))
            return plan
        if len(kept) > 1:
            # which of the calls this is, and whose plans are left, is not known
            self.shared.clear()
        if len(kept) != 1:
            return predict()
        return kept.pop().map_tensors(lambda part: part.to(x.device, non_blocking=True).int())


def in_backward_pass() -> bool:
    """Whether autograd runs, and what is computed is computed again."""
    # as torch.utils.checkpoint finds out
    return torch._C._current_graph_task_id() != -1


def is_captured(x: Tensor) -> bool:
    """Whether what is computed of ``x`` goes into a CUDA graph."""
    # a graph that is replayed knows no host
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def trimmed(plan: BlockPlan) -> BlockPlan:
    """The same plan whose lists, where they are large, are no wider than the longest of them.

    It waits for the device, which has a long layer to compute then.
    """
    return plan.map_lists(_trimmed)


def _trimmed(lists: BlockLists) -> BlockLists:
    if lists.indices.nbytes <= MEASURED_FROM:
        return lists
    width = max(1, int(lists.counts.max()))
    return BlockLists(lists.counts, lists.indices[..., :width].contiguous())


def narrowed(plan: BlockPlan) -> BlockPlan:
    """The same plan with lists in 16 bits where they fit."""
    return plan.map_tensors(lambda x: x.short()) if plan.kv_blocks < 2**15 else plan


def _to_pinned_host(x: Tensor) -> Tensor:
    """A copy in the host's memory, without waiting for it; on a CPU the tensor itself."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
