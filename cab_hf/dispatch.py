"""`dispatch`: compute one call by one of five functions.

* `sparse`: an engine computes attention under the plan of a predictor.
* `sparse_decode`: single queries attend to the keys that an index selects.
* `dense`: a dense kernel computes a plain causal call.
* `dense_blockwise`: an engine computes exact attention under a plan of all blocks.
* `dense_masked`: SDPA computes exact attention under mask tensors of few rows.

`route.route` chooses the function and its engine.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.call.validate import validate_vmap
from cab_hf.config import CabConfig, blocks_of
from cab_hf.decode import step
from cab_hf.engines import TRITON, DenseKernel, Engine, masked
from cab_hf.hf.fit import layer_index
from cab_hf.ops import HAS_TRITON, Workload, decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan
from cab_hf.predictors import make_predictor
from cab_hf.route import route

# (query, key) pairs that each layer attended in sparse calls, and all causal pairs: int64 [2], on
# the device of the layer
attended: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def dispatch(call: Call) -> Tensor:
    """Return the output [B, H, N_q, D_v] of a call.

    Raises:
        ValueError: if a named engine does not support the call.
        NotImplementedError: if `torch.vmap` batches the tensors of a sparse call.
    """
    chosen = route(
        call.mask,
        call.config,
        call.work,
        sparse=call.sparse,
        layer=call.layer,
        index=call.index,
    )
    match chosen.method:
        case "sparse":
            return sparse(call, chosen.engine, chosen.config)
        case "sparse_decode":
            return sparse_decode(call)
        case "dense":
            return dense(call, chosen.engine)
        case "dense_blockwise":
            return dense_blockwise(call, chosen.engine)
        case "dense_masked":
            return dense_masked(call)
    raise AssertionError(f"route must choose one of the five functions, got {chosen.method!r}.")


def sparse(call: Call, engine: Engine, config: CabConfig) -> Tensor:
    """Compute attention under the plan of a predictor.

    Args:
        call: queries, keys and mask of a layer.
        engine: engine that computes attention under the plan.
        config: settings of the call, see `route.Route`.
    """
    validate_vmap("the input of sparse attention", call.q, call.k, call.v)
    layout = call.mask.layout(*blocks_of(config), call.q.device)
    q, k, v = layout.queries(call.q), layout.keys(call.k), layout.keys(call.v)
    sample_period, seed = call.sampled_one_in, None
    if sample_period:
        validate_sample(call.work, sample_period, layout.ranges.aligned)
        # drawn even if a layer is recomputed, so that dropout after it draws the same numbers
        seed = torch.randint(2**62, (), device=q.device)

    def predict() -> BlockPlan:
        plan = select_blocks(call, layout, q, k, config)
        return plan if seed is None else plan.with_sample(sample_period, seed)

    plan = call.mask.state.plan_for_recompute(call.layer, (call.q, call.k, call.v), predict)
    out = layout.attend(
        engine, q, k, v, plan, scale=call.scale, sinks=call.sinks, softcap=call.softcap
    )
    if not torch.compiler.is_compiling():
        _count(call.layer, plan)
    return layout.restore(out)


def select_blocks(call: Call, layout: Any, q: Tensor, k: Tensor, config: CabConfig) -> BlockPlan:
    """Return the plan that the predictor of ``config`` makes for q and k in a ``layout``."""
    context = call.context(layout.ranges, call.mask.state.shared)
    plan = layout.choose(make_predictor(config), q, k, context)
    rows = layout.rows_below_min_length(config.query_block, config.min_length, plan.query_block)
    # documents that would be dense if they were not packed
    return plan if rows is None else plan.with_dense_rows(rows)


def sparse_decode(call: Call) -> Tensor:
    """Compute attention of one query per head over the keys that its KV head selects."""
    q, mask = call.q, call.mask
    validate_vmap("the input of a sparse decode step", q, call.k, call.v)
    length, num_keys = mask.decode_budget(
        call.config.decode_tokens, step.decode_from(call.config), q.device
    )
    padding_mask = None if mask.padding_mask is None else mask.padding_mask.to(q.device)
    choice = step.select_keys(
        q,
        call.index,
        config=call.config,
        layer=layer_index(call.layer),
        kv_heads=call.k.shape[1],
        scale=call.scale,
        length=length,
        num_keys=num_keys,
        padding_mask=padding_mask,
        sinks=call.sinks,
        shared=mask.state.shared,
    )
    return decode.attend(
        q,
        call.k,
        call.v,
        choice,
        call.scale,
        length=length,
        valid=padding_mask,
        sinks=call.sinks,
    )


def dense(call: Call, kernel: Engine | DenseKernel) -> Tensor:
    """Compute exact attention by a dense kernel, for calls whose only mask is causality."""
    return kernel.attention(call.q, *_written(call), call.scale)


def dense_blockwise(call: Call, engine: Engine) -> Tensor:
    """Compute exact attention by an engine, under a plan of all blocks."""
    size = call.mask.details.dense_block_size or DENSE_BLOCK_SIZE
    layout = call.mask.layout(size, size, call.q.device, from_start=False)
    out = layout.attend(
        engine,
        layout.queries(call.q),
        layout.keys(call.k),
        layout.keys(call.v),
        layout.full_plan(),
        scale=call.scale,
        sinks=call.sinks,
        softcap=call.softcap,
    )
    return layout.restore(out)


def dense_masked(call: Call) -> Tensor:
    """Compute exact attention by SDPA, under a separate mask for each chunk of rows.

    The sparse decode kernel computes single queries, with all visible keys selected. SDPA would run
    one program per batch row and head, which are few. SDPA would also read every slot of a static
    cache, and it supports neither sinks nor soft caps.
    """
    q, (k, v) = call.q, _written(call)
    is_special = call.work.sinks or call.work.softcap
    if q.shape[2] == 1 and (is_special or decode.has_kernels(q, k, v)):
        visible = _visible_keys(call.mask, k)
        return decode.attend(q, k, v, visible, call.scale, sinks=call.sinks, softcap=call.softcap)
    return masked.attention(q, k, v, call.mask, call.scale)


def validate_sample(work: Workload, sample_period: int = 1, is_aligned: bool = True) -> None:
    """Raise an error if sampled blocks cannot be attended.

    Args:
        work: workload of the call.
        sample_period: `Call.sampled_one_in`, for the message.
        is_aligned: True if every document starts at a block border.

    Raises:
        ValueError: if engine 'triton' cannot run, which attends to sampled blocks on a GPU.
        NotImplementedError: if documents are not aligned to blocks.
    """
    reason = TRITON.unavailable(work) if work.device == "cuda" else None
    if reason is not None:
        raise ValueError(
            "sampled_one_in must be 0 if engine 'triton' cannot attend to the sampled blocks: it "
            f"{reason}. Set sampled_one_in to 0."
        )
    if not is_aligned:
        raise NotImplementedError(
            "sampled_one_in must be 0 for packed documents under torch.compile, got "
            f"{sample_period}. Blocks that contain parts of several documents cannot be "
            "sampled. Do not compile, or set sampled_one_in to 0."
        )


def _written(call: Call) -> tuple[Tensor, Tensor]:
    """Return k and v without unwritten slots of a static cache, if the length is known."""
    length = call.mask.kv_length
    return (call.k, call.v) if length is None else (call.k[:, :, :length], call.v[:, :, :length])


def _visible_keys(mask: MaskInfo, k: Tensor) -> Choice:
    """Return the visible keys of k [B, H_kv, N, D] for one query; cached for all layers."""
    batch, kv_heads, slots = k.shape[:3]
    visible: Choice = mask.state.cached(
        ("all keys of a decode step", slots, k.device),
        lambda: Choice.from_mask(
            mask.dense_rows(start=0, stop=1, low=0, high=slots, device=k.device)[:, 0]
        ),
    )
    return visible.expanded(batch, kv_heads)


def _count(layer: nn.Module, plan: BlockPlan) -> None:
    """Add the (query, key) pairs of ``plan`` to `attended`."""
    before = attended.get(layer)
    if plan.full.counts.is_cuda and HAS_TRITON:
        # imported late, because models on the CPU never need Triton
        from cab_hf.ops.pairs import add_pairs

        attended[layer] = add_pairs(plan, before)
        return
    pairs = torch.stack(plan.pairs())
    attended[layer] = pairs if before is None else before.to(pairs.device) + pairs
