"""`dispatch`: computes attention of one call by one of five functions.

* `sparse`: an engine computes attention under the plan of a predictor.
* `sparse_decode`: a decode step attends to a few cached keys, which the index of the keys selects.
* `dense`: a dense kernel computes causal attention without padding, packed documents and windows.
* `dense_blockwise`: an engine computes exact attention under a plan of all blocks.
* `dense_masked`: SDPA computes exact attention in chunks of queries, each with a mask tensor.

`route.route` chooses the function and its engine.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.call.validate import refuse_vmap
from cab_hf.config import CabConfig
from cab_hf.decode import step
from cab_hf.engines import TRITON, DenseKernel, Engine, masked
from cab_hf.hf.fit import layer_index
from cab_hf.ops import HAS_TRITON, Workload, decode
from cab_hf.ops.decode import Choice
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan
from cab_hf.predictors import make_predictor
from cab_hf.route import route

# attention module -> int64 [2] on its device: the attended (query, key) pairs of its sparse calls,
# and all causal pairs of these calls
attended_pairs: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def dispatch(call: Call) -> Tensor:
    """Return the attention output of a call, [B, H, N_q, D_v].

    Raises:
        ValueError: if a named engine does not support the call.
        NotImplementedError: if `torch.vmap` batches the tensors of a sparse call.
    """
    chosen_route = route(
        call.mask,
        call.config,
        call.workload,
        is_sparse=call.is_sparse,
        layer=call.layer,
        key_index=call.key_index,
    )
    match chosen_route.method:
        case "sparse":
            return sparse(call, chosen_route.engine, chosen_route.config)
        case "sparse_decode":
            return sparse_decode(call)
        case "dense":
            return dense(call, chosen_route.engine)
        case "dense_blockwise":
            return dense_blockwise(call, chosen_route.engine)
        case "dense_masked":
            return dense_masked(call)
    raise AssertionError(
        f"route must choose one of the five functions, got {chosen_route.method!r}."
    )


def sparse(call: Call, engine: Engine, config: CabConfig) -> Tensor:
    """Compute attention under the plan of a predictor, and return the output [B, H, N_q, D_v].

    Args:
        call: inputs of the layer.
        engine: engine that computes attention under the plan.
        config: settings of the call, see `route.Route`.
    """
    refuse_vmap("the input of sparse attention", call.q, call.k, call.v)
    layout = call.mask.layout(config.query_block, config.key_block, call.q.device)
    q, k, v = layout.queries(call.q), layout.keys(call.k), layout.keys(call.v)
    sample_period, sampling_seed = call.sampled_one_in, None
    if sample_period:
        validate_sample(call.workload, sample_period, layout.ranges.aligned)
        # drawn in a recomputation too: random numbers that are drawn later, such as dropout, then
        # equal those of the forward pass
        sampling_seed = torch.randint(2**62, (), device=q.device)

    def predict_plan() -> BlockPlan:
        """Return the plan of the predictor, with randomly sampled blocks if sampling is enabled."""
        selected_plan = select_blocks(call, layout, q=q, k=k, config=config)
        return (
            selected_plan
            if sampling_seed is None
            else selected_plan.with_sample(sample_period, sampling_seed)
        )

    plan = call.mask.forward_state.make_plan_for_recompute(
        call.layer, (call.q, call.k, call.v), predict_plan
    )
    reordered_out = layout.attend(
        engine, q, k, v, plan=plan, scale=call.scale, sinks=call.sinks, softcap=call.softcap
    )
    if not torch.compiler.is_compiling():
        _count_pairs(call.layer, plan)
    return layout.restore(reordered_out)


def select_blocks(call: Call, layout: Any, q: Tensor, k: Tensor, config: CabConfig) -> BlockPlan:
    """Return the plan that the predictor of the settings selects.

    Query blocks of documents below ``min_length`` attend to all visible blocks, because such a
    document also has dense attention if it is not packed.

    Args:
        call: inputs of the layer.
        layout: `BlockLayout` or `ShardedLayout` of the call.
        q: queries in the order of ``layout``.
        k: keys in the order of ``layout``.
        config: settings of the call.
    """
    layer_context = call.make_layer_context(layout.ranges, call.mask.forward_state.shared_state)
    plan = layout.select_plan(make_predictor(config), q, k, layer_context)
    short_document_blocks = layout.query_blocks_below_min_length(
        config.query_block, config.min_length, plan.query_block
    )
    return plan if short_document_blocks is None else plan.with_dense_rows(short_document_blocks)


def sparse_decode(call: Call) -> Tensor:
    """Compute a decode step: the query of each head attends to the selected keys of its KV head.

    Returns [B, H, 1, D_v].
    """
    q, mask = call.q, call.mask
    refuse_vmap("the input of a sparse decode step", q, call.k, call.v)
    num_used_slots, num_read_keys = mask.decode_budget(
        call.config.decode_tokens, step.min_sparse_tokens(call.config), q.device
    )
    padding_mask = None if mask.padding_mask is None else mask.padding_mask.to(q.device)
    selected_keys = step.select_keys(
        q,
        call.key_index,
        config=call.config,
        layer=layer_index(call.layer),
        kv_heads=call.k.shape[1],
        scale=call.scale,
        length=num_used_slots,
        num_keys=num_read_keys,
        padding_mask=padding_mask,
        sinks=call.sinks,
        shared_state=mask.forward_state.shared_state,
    )
    return decode.attend(
        q,
        call.k,
        call.v,
        choice=selected_keys,
        scale=call.scale,
        length=num_used_slots,
        padding_mask=padding_mask,
        sinks=call.sinks,
    )


def dense(call: Call, kernel: Engine | DenseKernel) -> Tensor:
    """Compute causal attention without padding, packed documents and windows by a dense kernel.

    Returns [B, H, N_q, D_v].
    """
    k, v = _take_written_slots(call)
    return kernel.attention(call.q, k, v, call.scale)


def dense_blockwise(call: Call, engine: Engine) -> Tensor:
    """Compute exact attention by an engine, under a plan of all blocks.

    Returns [B, H, N_q, D_v].
    """
    block_size = call.mask.details.dense_block_size or DENSE_BLOCK_SIZE
    layout = call.mask.layout(block_size, block_size, call.q.device, from_sequence_start=False)
    reordered_out = layout.attend(
        engine,
        layout.queries(call.q),
        layout.keys(call.k),
        layout.keys(call.v),
        plan=layout.make_plan_of_visible_blocks(),
        scale=call.scale,
        sinks=call.sinks,
        softcap=call.softcap,
    )
    return layout.restore(reordered_out)


def dense_masked(call: Call) -> Tensor:
    """Compute exact attention by SDPA, with a mask tensor for each chunk of queries.

    For a single query, the sparse decode kernel computes attention over all visible keys in place
    of SDPA. SDPA would be slower: SDPA runs only one program per batch row and head, and reads
    unwritten slots of a static cache. SDPA also supports neither sinks nor soft caps.

    Returns [B, H, N_q, D_v].
    """
    q, (k, v) = call.q, _take_written_slots(call)
    has_sinks_or_softcap = call.workload.sinks or call.workload.softcap
    if q.shape[2] == 1 and (has_sinks_or_softcap or decode.has_kernels(q, k, v)):
        visible_keys = _select_visible_keys(call.mask, k)
        return decode.attend(
            q, k, v, choice=visible_keys, scale=call.scale, sinks=call.sinks, softcap=call.softcap
        )
    return masked.attention(q, k, v, mask=call.mask, scale=call.scale)


def validate_sample(
    workload: Workload, sample_period: int = 1, has_aligned_documents: bool = True
) -> None:
    """Raise an error if no engine can attend to sampled blocks.

    Args:
        workload: workload of the call.
        sample_period: `Call.sampled_one_in`, for the message.
        has_aligned_documents: True if every document starts at a block border.

    Raises:
        ValueError: if the call is on a GPU, and engine 'triton' cannot run there.
        NotImplementedError: if documents are not aligned to blocks.
    """
    unavailable_reason = TRITON.unavailable(workload) if workload.device == "cuda" else None
    if unavailable_reason is not None:
        raise ValueError(
            "sampled_one_in must be 0 if engine 'triton' cannot attend to the sampled blocks: it "
            f"{unavailable_reason}. Set sampled_one_in to 0."
        )
    if not has_aligned_documents:
        raise NotImplementedError(
            "sampled_one_in must be 0 for packed documents under torch.compile, got "
            f"{sample_period}. Blocks that contain parts of several documents cannot be "
            "sampled. Do not compile, or set sampled_one_in to 0."
        )


def _take_written_slots(call: Call) -> tuple[Tensor, Tensor]:
    """Return k and v without unwritten slots of a static cache.

    Returns k and v unchanged if the number of written slots is only on the device.
    """
    num_written_slots = call.mask.kv_length
    return (
        (call.k, call.v)
        if num_written_slots is None
        else (call.k[:, :, :num_written_slots], call.v[:, :, :num_written_slots])
    )


def _select_visible_keys(mask: MaskInfo, k: Tensor) -> Choice:
    """Return the keys that are visible to the query of a decode step, cached for all layers.

    Args:
        mask: mask of the call.
        k: [B, H_kv, N, D].
    """
    batch, kv_heads, num_slots = k.shape[:3]
    visible_keys: Choice = mask.forward_state.get_or_compute(
        ("visible keys of a decode step", num_slots, k.device),
        lambda: Choice.from_mask(
            mask.dense_mask(
                query_start=0, query_stop=1, key_start=0, key_stop=num_slots, device=k.device
            )[:, 0]
        ),
    )
    return visible_keys.expand(batch, kv_heads)


def _count_pairs(layer: nn.Module, plan: BlockPlan) -> None:
    """Add the attended pairs and the causal pairs of ``plan`` to ``attended_pairs[layer]``."""
    previous_pair_counts = attended_pairs.get(layer)
    if plan.full.counts.is_cuda and HAS_TRITON:
        # imported late, because models on the CPU never need Triton
        from cab_hf.ops.pairs import count_query_key_pairs

        attended_pairs[layer] = count_query_key_pairs(plan, previous_pair_counts)
        return
    pair_counts = torch.stack(plan.pairs())
    attended_pairs[layer] = (
        pair_counts
        if previous_pair_counts is None
        else previous_pair_counts.to(pair_counts.device) + pair_counts
    )
