"""Inputs, plans and error budgets for tests of attention engines, on the CPU and on a GPU."""

import torch
from budget import DTYPE_EPS
from valid_plan import assert_valid_plan

from cab_hf import BlockPlan
from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges


def make_random_plan(
    q, k, block_sizes, selection_probability=0.4, ranges=None, num_plan_heads=None, **plan_options
):
    """Return a plan with all diagonal blocks, and random other blocks.

    Args:
        q, k: [B, H, N_q, D] and [B, H_kv, N_k, D].
        block_sizes: (query block, key block).
        selection_probability: probability that a block that is not on the diagonal is listed.
        ranges: `KeyRanges`; None: causal.
        num_plan_heads: number of heads of the plan; None: the heads of q.
        plan_options: further arguments of `BlockPlan.from_dense`, such as ``dense_rows``.
    """
    query_block, key_block = block_sizes
    ranges = ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    block_mask_shape = (
        BlockPlan.causal(ranges, num_plan_heads or q.shape[1], query_block, key_block)
        .to_dense()
        .shape
    )
    is_selected = (
        torch.rand(block_mask_shape, generator=torch.Generator().manual_seed(3))
        < selection_probability
    )
    is_selected = is_selected.to(q.device)
    last_key_block = ranges.rows(query_block).min_last // key_block
    is_diagonal = torch.arange(block_mask_shape[-1], device=q.device) >= last_key_block.unsqueeze(
        -1
    )
    is_selected = is_selected | is_diagonal.unsqueeze(1)
    return BlockPlan.from_dense(
        is_selected, ranges, query_block=query_block, key_block=key_block, **plan_options
    )


def draw_seeds(num_seeds):
    """Return random seeds, int64 [num_seeds]."""
    return torch.randint(2**62, (num_seeds,), generator=torch.Generator().manual_seed(0))


def make_block_layout(layout, batch, length, kv_length, align, device):
    """Return the `BlockLayout` of a batch with a named arrangement of padding and documents.

    Args:
        layout: "causal"; "padded", with left padding in row 0; "packed", with two documents; or
            "chunk", a prefill chunk that starts inside a query block and ends ``align`` tokens
            before the end of its sequence.
        batch: number of rows.
        length: number of queries.
        kv_length: number of keys.
        align: documents start at multiples of this number of tokens.
        device: device of the layout.
    """
    padding_mask = torch.ones(batch, kv_length, dtype=torch.bool)
    doc_ids = None
    if layout == "padded":
        padding_mask[0, : kv_length // 5] = False
    if layout == "packed":
        doc_ids = (torch.arange(kv_length) >= kv_length // 3).long().expand(batch, -1).to(device)
    layout_options = LayoutOptions()
    if layout == "chunk":
        layout_options = LayoutOptions(
            block_offset=(kv_length - length) % align, sequence_end=kv_length + align
        )
    return BlockLayout.build(
        batch=batch,
        q_length=length,
        kv_length=kv_length,
        q_offset=kv_length - length,
        padding_mask=None if layout in ("causal", "chunk") else padding_mask.to(device),
        doc_ids=doc_ids,
        align=align,
        device=device,
        options=layout_options,
    )


def draw_qkv_and_grad(
    device, dtype, q_length, kv_length=None, batch=1, heads=6, kv_heads=2, dim=16
):
    """Return random q, k, v and output gradient, [B, H, N, D] with the strides of [B, N, H, D]."""
    generator = torch.Generator().manual_seed(0)

    def draw_normal(length, num_heads):
        x = torch.randn(batch, length, num_heads, dim, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    kv_length = kv_length or q_length
    lengths_and_heads = (
        (q_length, heads),
        (kv_length, kv_heads),
        (kv_length, kv_heads),
        (q_length, heads),
    )
    return [draw_normal(length, num_heads) for length, num_heads in lengths_and_heads]


def make_case(
    device,
    dtype,
    block_sizes,
    layout="causal",
    plan_heads=None,
    selection_probability=0.4,
    dense_rows=None,
    sample_period=None,
    **input_sizes,
):
    """Return q, k, v, output gradient and plan of a test case.

    Args:
        device, dtype: device and dtype of q, k, v and the gradient.
        block_sizes: (query block, key block).
        layout: as in `make_block_layout`.
        plan_heads: number of heads of the plan; None: the heads of q.
        selection_probability: probability that the plan lists a block that is not on the diagonal.
        dense_rows: query blocks with dense attention, a list per row of the batch; "tail" for the
            last query block of each sequence; None: no dense rows.
        sample_period: one of ``sample_period`` unselected blocks is sampled; None: no sample.
        input_sizes: arguments of `draw_qkv_and_grad`, such as ``q_length``.
    """
    q, k, v, grad_out = draw_qkv_and_grad(device, dtype, **input_sizes)
    block_layout = make_block_layout(
        layout=layout,
        batch=q.shape[0],
        length=q.shape[2],
        kv_length=k.shape[2],
        align=max(block_sizes),
        device=device,
    )
    q, grad_out = block_layout.queries(q), block_layout.queries(grad_out)
    k, v, ranges = block_layout.keys(k), block_layout.keys(v), block_layout.ranges
    if dense_rows == "tail":
        dense_rows = ranges.tail_rows(block_sizes[0], block_sizes[0])
    elif dense_rows is not None:
        dense_rows = torch.tensor(dense_rows, device=device)
    plan_queries = q if plan_heads is None else q[:, :plan_heads]
    plan = make_random_plan(
        plan_queries,
        k,
        block_sizes,
        selection_probability=selection_probability,
        ranges=ranges,
        dense_rows=dense_rows,
    )
    if sample_period is not None:
        plan = plan.with_sample(sample_period, draw_seeds(1)[0].to(device))
    assert_valid_plan(plan)
    return q, k, v, grad_out, plan


def run_with_gradients(
    attend, inputs, grad_out, plan, scale, has_lse_gradient=False, **logit_options
):
    """Run an engine forward and backward; return "out", "lse", "dq", "dk" and "dv" by name.

    Args:
        attend: the engine, a function like `reference.attention`.
        inputs: q, k and v.
        grad_out: gradient of the output.
        plan: the plan.
        scale: scale of logits.
        has_lse_gradient: True if the loss depends on the log-sum-exp too.
        logit_options: further arguments of the engine, such as ``softcap``.
    """
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = out, lse = attend(q, k, v, plan, scale=scale, return_lse=True, **logit_options)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    output_gradients = [
        grad_out.to(out.dtype) * has_keys,
        (grad_out * has_keys).sum(-1).to(lse.dtype),
    ]
    num_outputs = 2 if has_lse_gradient else 1
    input_gradients = torch.autograd.grad(
        outputs[:num_outputs], leaves, output_gradients[:num_outputs]
    )
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *input_gradients), strict=True))


def assert_engine_within_budget(attend, q, k, v, grad_out, plan, scale, **engine_options):
    """Assert that output, log-sum-exp and gradients of an engine are within the error budget.

    The budget is twice the error of the PyTorch reference at the same precision; both errors are
    differences to the reference in float64. Arguments are those of `run_with_gradients`.
    """
    engine_arguments = {"plan": plan, "scale": scale, **engine_options}
    qkv, double_qkv = (q, k, v), [x.double() for x in (q, k, v)]
    actual_results = run_with_gradients(attend, qkv, grad_out, **engine_arguments)
    plain_results = run_with_gradients(reference.attention, qkv, grad_out, **engine_arguments)
    exact_results = run_with_gradients(
        reference.attention, double_qkv, grad_out.double(), **engine_arguments
    )
    has_keys = (plan.ranges.end >= 0)[:, None]
    for output_name in actual_results:
        result, baseline, expected = (
            x[output_name].detach().double() for x in (actual_results, plain_results, exact_results)
        )
        if output_name == "lse":
            is_empty = expected == -torch.inf
            assert torch.equal((result == -torch.inf) & has_keys, is_empty & has_keys)
            result, baseline, expected = (
                x.masked_fill(is_empty, 0.0) for x in (result, baseline, expected)
            )
        # outputs of padding queries are not used
        elif output_name in ("out", "dq"):
            result, baseline, expected = (
                x * has_keys.unsqueeze(-1) for x in (result, baseline, expected)
            )
        error = (result - expected).abs().max()
        rounding_error = DTYPE_EPS[q.dtype] * expected.abs().max()
        allowed_error = 2 * ((baseline - expected).abs().max() + rounding_error)
        assert error <= allowed_error, (
            f"{output_name}: error {error:.3g}, allowed {allowed_error:.3g}"
        )
