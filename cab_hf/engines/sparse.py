"""Sparse attention: a predictor selects blocks, an engine attends to them.

The (query, key) pairs of each layer are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.transforms import refuse_vmap
from cab_hf.config import CabConfig, blocks_of
from cab_hf.engines import TRITON, Engine
from cab_hf.ops import HAS_TRITON, Workload
from cab_hf.plan import BlockPlan
from cab_hf.predictors import make_predictor


@dataclass(frozen=True)
class Sparse:
    """Sparse attention under the plan of a predictor.

    Attributes:
        engine, kind, reason: See `Exact`.
        config: Settings of the call, without a dense tail if the call is a chunk that does not
            contain it.
    """

    engine: Engine
    config: CabConfig
    kind: ClassVar[str] = "sparse"
    reason: ClassVar[None] = None

    def attend(self, call: Call) -> Tensor:
        """Return the output [B, H, N_q, D_v] of a call.

        Raises:
            NotImplementedError: If `torch.vmap` batches queries, keys or values.
        """
        refuse_vmap("the input of sparse attention", call.q, call.k, call.v)
        layout = call.text.layout(*blocks_of(self.config), call.q.device)
        q, k, v = layout.queries(call.q), layout.keys(call.k), layout.keys(call.v)
        sample_period, seed = call.sampled_one_in, None
        if sample_period:
            refuse_sample(call.work)
            if not layout.ranges.aligned:
                raise NotImplementedError(
                    "sampled_one_in must be 0 for packed documents under torch.compile, got "
                    f"{sample_period}. Blocks that contain parts of several documents cannot be "
                    "sampled. Do not compile, or set sampled_one_in to 0."
                )
            # drawn even if a layer is recomputed, so that dropout after it draws the same numbers
            seed = torch.randint(2**62, (), device=q.device)

        def predict() -> BlockPlan:
            plan = self.choose(call, layout, q, k)
            return plan if seed is None else plan.with_sample(sample_period, seed)

        plan = call.text.state.plan_for_recompute(call, predict)
        engine = self.engine.capped(call.softcap)
        out = layout.attend(engine, q, k, v, plan, call.scale, call.sinks)
        if not torch.compiler.is_compiling():
            _count(call.layer, plan)
        return layout.restore(out)

    def choose(self, call: Call, layout: Any, q: Tensor, k: Tensor) -> BlockPlan:
        """Return the plan that the predictor makes for q and k in the ``layout`` of the call."""
        config = self.config
        context = call.context(layout.ranges, call.text.state.shared)
        plan = layout.choose(make_predictor(config), q, k, context)
        short = layout.short(config.query_block, config.min_length, plan.query_block)
        # documents that would be exact if they were not packed
        return plan if short is None else plan.with_dense_rows(short)


def refuse_sample(work: Workload) -> None:
    """Raise ValueError if sampled blocks cannot be attended, because engine 'triton' cannot run."""
    reason = TRITON.unavailable(work) if work.device == "cuda" else None
    if reason is not None:
        raise ValueError(
            "sampled_one_in must be 0 if engine 'triton' cannot attend to the sampled blocks: it "
            f"{reason}. Set sampled_one_in to 0."
        )


# (query, key) pairs that each layer attended, and all causal pairs: int64 [2], on the layer's
# device
attended: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _count(layer: nn.Module, plan: BlockPlan) -> None:
    before = attended.get(layer)
    if plan.full.counts.is_cuda and HAS_TRITON:
        # imported late, because models on the CPU never need Triton
        from cab_hf.ops.pairs import add_pairs

        attended[layer] = add_pairs(plan, before)
        return
    pairs = torch.stack(plan.pairs())
    attended[layer] = pairs if before is None else before.to(pairs.device) + pairs
