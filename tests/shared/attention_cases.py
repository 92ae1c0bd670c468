"""Inputs, plans and error budgets for tests of attention engines, on the CPU and on a GPU."""

import torch
from budget import EPS
from valid_plan import assert_valid_plan

from cab_hf import BlockPlan
from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges


def random_plan(q, k, blocks, share=0.4, ranges=None, heads=None, **fields):
    """Return a plan with all diagonal blocks, and other blocks with probability ``share``.

    Args:
        q, k: [B, H, N_q, D] and [B, H_kv, N_k, D].
        blocks: (query block, key block).
        share: probability that a block that is not on the diagonal is listed.
        ranges: `KeyRanges`; None: causal.
        heads: number of heads of the plan; None: the heads of q.
        fields: further arguments of `BlockPlan.from_dense`, such as ``dense_rows``.
    """
    query_block, key_block = blocks
    ranges = ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    shape = BlockPlan.causal(ranges, heads or q.shape[1], query_block, key_block).to_dense().shape
    is_selected = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share
    is_selected = is_selected.to(q.device)
    last_key_block = ranges.rows(query_block).min_last // key_block
    is_diagonal = torch.arange(shape[-1], device=q.device) >= last_key_block.unsqueeze(-1)
    is_selected = is_selected | is_diagonal.unsqueeze(1)
    return BlockPlan.from_dense(
        is_selected, ranges, query_block=query_block, key_block=key_block, **fields
    )


def random_seeds(count):
    """Return random seeds, int64 [count]."""
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(0))


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
    options = LayoutOptions()
    if layout == "chunk":
        options = LayoutOptions(
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
        options=options,
    )


def random_qkv_and_grad(
    device, dtype, q_length, kv_length=None, batch=1, heads=6, kv_heads=2, dim=16
):
    """Return random q, k, v and output gradient, [B, H, N, D] with the strides of [B, N, H, D]."""
    generator = torch.Generator().manual_seed(0)

    def normal(length, num_heads):
        x = torch.randn(batch, length, num_heads, dim, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    kv_length = kv_length or q_length
    sizes = ((q_length, heads), (kv_length, kv_heads), (kv_length, kv_heads), (q_length, heads))
    return [normal(length, num_heads) for length, num_heads in sizes]


def make_case(
    device,
    dtype,
    blocks,
    layout="causal",
    plan_heads=None,
    share=0.4,
    dense_rows=None,
    sample_period=None,
    **shape,
):
    """Return q, k, v, output gradient and plan of a test case.

    Args:
        device, dtype: device and dtype of q, k, v and the gradient.
        blocks: (query block, key block).
        layout: as in `make_block_layout`.
        plan_heads: number of heads of the plan; None: the heads of q.
        share: probability that the plan lists a block that is not on the diagonal.
        dense_rows: query blocks with dense attention, a list per row of the batch; "tail" for the
            last query block of each sequence; None: no dense rows.
        sample_period: one of ``sample_period`` unselected blocks is sampled; None: no sample.
        shape: arguments of `random_qkv_and_grad`, such as ``q_length``.
    """
    q, k, v, grad = random_qkv_and_grad(device, dtype, **shape)
    block_layout = make_block_layout(
        layout=layout,
        batch=q.shape[0],
        length=q.shape[2],
        kv_length=k.shape[2],
        align=max(blocks),
        device=device,
    )
    q, grad = block_layout.queries(q), block_layout.queries(grad)
    k, v, ranges = block_layout.keys(k), block_layout.keys(v), block_layout.ranges
    if dense_rows == "tail":
        dense_rows = ranges.tail_rows(blocks[0], blocks[0])
    elif dense_rows is not None:
        dense_rows = torch.tensor(dense_rows, device=device)
    plan_queries = q if plan_heads is None else q[:, :plan_heads]
    plan = random_plan(plan_queries, k, blocks, share=share, ranges=ranges, dense_rows=dense_rows)
    if sample_period is not None:
        plan = plan.with_sample(sample_period, random_seeds(1)[0].to(device))
    assert_valid_plan(plan)
    return q, k, v, grad, plan


def run_with_gradients(attend, inputs, grad, plan, scale, through_lse=False, **logits):
    """Run an engine forward and backward; return "out", "lse", "dq", "dk" and "dv" by name.

    Args:
        attend: the engine, a function like `reference.attention`.
        inputs: q, k and v.
        grad: gradient of the output.
        plan: the plan.
        scale: scale of logits.
        through_lse: True if the loss depends on the log-sum-exp too.
        logits: further arguments of the engine, such as ``softcap``.
    """
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
    results = out, lse = attend(q, k, v, plan, scale=scale, return_lse=True, **logits)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    grads = [grad.to(out.dtype) * has_keys, (grad * has_keys).sum(-1).to(lse.dtype)]
    num_outputs = 2 if through_lse else 1
    gradients = torch.autograd.grad(results[:num_outputs], leaves, grads[:num_outputs])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def assert_engine_within_budget(attend, q, k, v, grad, plan, scale, **engine_options):
    """Assert that output, log-sum-exp and gradients of an engine are within the error budget.

    The budget is twice the error of the PyTorch reference at the same precision; both errors are
    differences to the reference in float64. Arguments are those of `run_with_gradients`.
    """
    fields = {"plan": plan, "scale": scale, **engine_options}
    inputs, double_inputs = (q, k, v), [x.double() for x in (q, k, v)]
    actual_results = run_with_gradients(attend, inputs, grad, **fields)
    plain_results = run_with_gradients(reference.attention, inputs, grad, **fields)
    exact_results = run_with_gradients(reference.attention, double_inputs, grad.double(), **fields)
    has_keys = (plan.ranges.end >= 0)[:, None]
    for name in actual_results:
        result, baseline, expected = (
            x[name].detach().double() for x in (actual_results, plain_results, exact_results)
        )
        if name == "lse":
            is_empty = expected == -torch.inf
            assert torch.equal((result == -torch.inf) & has_keys, is_empty & has_keys)
            result, baseline, expected = (
                x.masked_fill(is_empty, 0.0) for x in (result, baseline, expected)
            )
        # outputs of padding queries are not used
        elif name in ("out", "dq"):
            result, baseline, expected = (
                x * has_keys.unsqueeze(-1) for x in (result, baseline, expected)
            )
        error = (result - expected).abs().max()
        eps = EPS[q.dtype] * expected.abs().max()
        allowed_error = 2 * ((baseline - expected).abs().max() + eps)
        assert error <= allowed_error, f"{name}: error {error:.3g}, allowed {allowed_error:.3g}"
