"""Plans of the reference and of the kernels, and inputs for tests that compare the two."""

import pytest
import torch
from attention_cases import make_block_layout
from tiny import draw_qkv
from valid_plan import assert_valid_plan

from cab_hf import BlockPlan
from cab_hf.config import block_sizes, tail_and_query_block_sizes
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, frc, make_predictor
from cab_hf.selection import QuantizedKeys, api, gather
from cab_hf.selection.reference import ScoreOptions


def plan_by_reference(config, q, k, ranges=None, scale=0.25, channels=(), **logit_options):
    """Return the plan of the predictor in ``config`` by the reference implementation.

    Args:
        config: settings, which name the predictor.
        q, k: [B, H, N_q, D] and [B, H_kv, N_k, D].
        scale, channels: as in `LayerContext`.
        ranges: `KeyRanges` of the queries; None for causal attention without padding.
        logit_options: values for the fields ``sinks`` and ``softcap`` of `LayerContext`.
    """
    ranges = ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    context = LayerContext(ranges, scale, 0, channels=channels, **logit_options)
    plan = make_predictor(config)(q, k, context)
    assert_valid_plan(plan)
    return plan


def plan_by_kernels(config, q, k, ranges, scale=0.25, channels=()):
    """Return the plan of the predictor in ``config`` by its kernels, in Triton's interpreter."""
    if config.predictor == "rows":
        return plan_rows_by_kernels(config, q, k, ranges, scale=scale, channels=channels)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(frc, "has_kernels", lambda x: True)
        return plan_by_reference(config, q, k, ranges, scale=scale)


def plan_rows_by_kernels(
    config, q, k, ranges, scale=0.25, channels=(), quantized_dtype=None, **logit_options
):
    """Return the plan of `RowsPredictor` by kernels in Triton's interpreter.

    Args:
        config, q, k, scale, channels: as in `plan_by_reference`.
        ranges: `KeyRanges` of the queries.
        quantized_dtype: dtype of the quantized keys; None: the dtype of k.
        logit_options: values for the fields ``sinks`` and ``softcap`` of `ScoreOptions`.
    """
    quantized_values, key_scale_exponents = gather.quantize(k, channels, quantized_dtype or k.dtype)
    quantized_keys = QuantizedKeys(quantized_values, key_scale_exponents)
    score_options = ScoreOptions(scale, channels, **logit_options)
    full_blocks, partial_blocks = api._select_by_kernels(
        q, quantized_keys, key_ranges=ranges, config=config, score_options=score_options
    )
    query_block, key_block = block_sizes(config)
    plan = BlockPlan(
        full=full_blocks,
        partial=partial_blocks,
        ranges=ranges,
        query_block=query_block,
        key_block=key_block,
        dense_rows=ranges.tail_rows(*tail_and_query_block_sizes(config)),
    )
    assert_valid_plan(plan)
    return plan


def draw_peaked_qk(**input_sizes):
    """Return normal q and k times 2, so that attention is neither uniform nor on one block only.

    ``input_sizes`` has arguments of `tiny.draw_qkv`.
    """
    q, k, _ = draw_qkv(**input_sizes)
    return 2 * q, 2 * k


def arrange_in_layout(layout, q, k, align):
    """Return (q, k, `KeyRanges`) after rearranging q and k for a layout of `make_block_layout`.

    The layout "in-place" keeps q and k: the second document starts at token 37, inside a block, as
    under torch.compile.
    """
    batch, length = q.shape[0], q.shape[2]
    if layout == "in-place":
        range_end = torch.arange(length, dtype=torch.int32).expand(batch, -1)
        range_start = ((range_end >= 37).int() * 37).contiguous()
        return q, k, KeyRanges(range_start, range_end, torch.ones(batch, length, dtype=torch.bool))
    block_layout = make_block_layout(
        layout=layout,
        batch=batch,
        length=length,
        kv_length=k.shape[2],
        align=align,
        device="cpu",
    )
    return block_layout.queries(q), block_layout.keys(k), block_layout.ranges


def draw_topic_qk(
    device,
    length=8191,
    q_length=None,
    batch=1,
    heads=8,
    kv_heads=2,
    dim=128,
    dtype=torch.bfloat16,
    num_topics=32,
):
    """Return random q and k, [B, H, N, D] with the strides of [B, N, H, D].

    Runs of 300 tokens are similar, as in real text: a random one of ``num_topics`` vectors is added
    to all tokens of a run.
    """
    generator = torch.Generator(device).manual_seed(0)
    tensor_options = {"device": device, "generator": generator}
    topic_keys = torch.randn(num_topics, dim, **tensor_options)
    topic_keys *= 0.8 * dim**0.5 / topic_keys.norm(dim=-1, keepdim=True)
    topic_ids = torch.randint(num_topics, (length // 300 + 1,), **tensor_options).repeat_interleave(
        300
    )[:length]
    k = torch.randn(batch, length, kv_heads, dim, **tensor_options) + topic_keys[topic_ids][:, None]
    q = torch.randn(batch, length, heads, dim, **tensor_options) + topic_keys[topic_ids][:, None]
    q = q[:, length - (q_length or length) :]
    return q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2)
