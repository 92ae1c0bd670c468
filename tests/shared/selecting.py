"""Selections of the reference and of the kernels, for tests that compare them."""

import pytest
import torch
from attention_cases import laid_out
from tiny import qkv
from valid_plan import require_valid

from cab_hf import BlockPlan
from cab_hf.config import blocks_of, tail_of
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, frc, make_predictor
from cab_hf.selection import QuantizedKeys, api, gather
from cab_hf.selection.reference import ScoreOptions


def plan_by_reference(config, q, k, ranges=None, scale=0.25, channels=(), **logits):
    """Return the plan of the config's predictor by the reference implementation."""
    ranges = ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    context = LayerContext(ranges, scale, 0, channels=channels, **logits)
    plan = make_predictor(config)(q, k, context)
    require_valid(plan)
    return plan


def plan_by_kernels(config, q, k, ranges, scale=0.25, channels=()):
    """Return the plan of the kernels in the interpreter."""
    if config.predictor == "rows":
        return rows_plan_by_kernels(config, q, k, ranges, scale, channels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frc, "has_kernels", lambda x: True)
        return plan_by_reference(config, q, k, ranges, scale)


def rows_plan_by_kernels(config, q, k, ranges, scale=0.25, channels=(), dtype=None, **logits):
    """Return the plan of `RowsPredictor` by the kernels in the interpreter; keys as ``dtype``."""
    keys = QuantizedKeys(*gather.quantize(k, channels, dtype or k.dtype))
    options = ScoreOptions(scale, channels, **logits)
    lists = api._select_by_kernels(q, keys, ranges=ranges, config=config, options=options)
    plan = BlockPlan(
        *lists, ranges, *blocks_of(config), dense_rows=ranges.tail_rows(*tail_of(config))
    )
    require_valid(plan)
    return plan


def loud(**shape):
    """Return q and k with masses that are neither flat nor concentrated on one block."""
    q, k, _ = qkv(**shape)
    return 2 * q, 2 * k


def laid_in(layout, q, k, align):
    """Return (q, k, ranges) in a layout."""
    batch, length = q.shape[0], q.shape[2]
    if layout == "in-place":
        # without the block layout, as under torch.compile: sequences start inside of blocks
        last = torch.arange(length, dtype=torch.int32).expand(batch, -1)
        first = ((last >= 37).int() * 37).contiguous()
        return q, k, KeyRanges(first, last, torch.ones(batch, length, dtype=torch.bool))
    laid = laid_out(layout, batch, length, k.shape[2], align, "cpu")
    return laid.queries(q), laid.keys(k), laid.ranges


def heads_on(
    device,
    length=8191,
    q_length=None,
    batch=1,
    heads=8,
    kv_heads=2,
    dim=128,
    dtype=torch.bfloat16,
    topics=32,
):
    """Return q and k with the strides of a model and runs of similar tokens, as in text."""
    generator = torch.Generator(device).manual_seed(0)
    like = {"device": device, "generator": generator}
    topic_keys = torch.randn(topics, dim, **like)
    topic_keys *= 0.8 * dim**0.5 / topic_keys.norm(dim=-1, keepdim=True)
    runs = torch.randint(topics, (length // 300 + 1,), **like).repeat_interleave(300)[:length]
    k = torch.randn(batch, length, kv_heads, dim, **like) + topic_keys[runs][:, None]
    q = torch.randn(batch, length, heads, dim, **like) + topic_keys[runs][:, None]
    q = q[:, length - (q_length or length) :]
    return q.to(dtype).transpose(1, 2), k.to(dtype).transpose(1, 2)
