"""Sparse attention: a predictor chooses blocks, an engine attends them, and pairs are counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cab_hf.config import CabConfig, blocks_of
from cab_hf.engines import Engine
from cab_hf.hf.fit import layer_index
from cab_hf.hf.rotary import slow_channels
from cab_hf.ops import HAS_TRITON
from cab_hf.plan import BlockPlan
from cab_hf.predictors import LayerContext, make_predictor


@dataclass(frozen=True)
class Sparse:
    """Attention under the plan of a predictor.

    Attributes:
        text, engine, kind, reason: as of `Exact`.
        layer: the module that attends.
        one_in: of how many blocks that are not chosen one is sampled; 0: none is.
    """

    text: Any
    engine: Engine
    config: CabConfig
    layer: nn.Module | None
    one_in: int = 0
    kind: ClassVar[str] = "sparse"
    reason: ClassVar[None] = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """[B, H, N_q, D] of q [B, H, N_q, D] over k and v [B, H_kv, N_k, D]."""
        config, text = self.config, self.text
        frame = text.frame(*blocks_of(config), q.device)
        q_frame, k_frame, v_frame = frame.queries(q), frame.keys(k), frame.keys(v)
        seed = None
        if self.one_in:
            if not frame.spans.aligned:
                raise NotImplementedError(
                    "sampled_one_in is set for packed documents under torch.compile, where blocks "
                    "that hold parts of several cannot be sampled; do not compile, or set it to 0."
                )
            # also when a layer is computed again: dropout behind it then draws the same
            seed = torch.randint(2**62, (), device=q.device)

        def predict() -> BlockPlan:
            plan = self.choose(frame, q_frame, k_frame, scale)
            return plan if seed is None else plan.with_sample(self.one_in, seed)

        # plans are kept for a backward pass where any of these has one
        trained = next((x for x in (q, k, v) if x.requires_grad), q)
        plan = text.state.kept_plan(self.layer, trained, predict)
        out = frame.attend(self.engine, q_frame, k_frame, v_frame, plan, scale)
        if not torch.compiler.is_compiling():
            _count(self.layer, plan)
        return frame.restore(out)

    def choose(self, frame: Any, q: Tensor, k: Tensor, scale: float) -> BlockPlan:
        """What the predictor chooses for q and k of the text's ``frame``."""
        config = self.config
        index = layer_index(self.layer)
        channels = slow_channels(self.layer, q.shape[-1])
        call = LayerContext(frame.spans, scale, index, self.text.state.shared, channels)
        plan = frame.choose(make_predictor(config), q, k, call)
        short = frame.short(config.query_block, config.min_length, plan.query_block)
        # documents that would be exact alone
        return plan if short is None else plan.with_dense_rows(short)


# (query, key) pairs that each layer attended and could have attended: int64 [2], on its device
attended: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _count(layer: nn.Module, plan: BlockPlan) -> None:
    before = attended.get(layer)
    if plan.full.counts.is_cuda and HAS_TRITON:
        # models on the CPU never need Triton
        from cab_hf.ops.pairs import add_pairs

        attended[layer] = add_pairs(plan, before)
        return
    pairs = torch.stack(plan.pairs())
    attended[layer] = pairs if before is None else before.to(pairs.device) + pairs
