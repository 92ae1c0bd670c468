"""Plans and gradients that every engine must reproduce, on the CPU and on a GPU."""

import torch
from budget import EPS
from valid_plan import require_valid

from cab_hf import BlockPlan
from cab_hf.call.layout import BlockLayout, LayoutOptions
from cab_hf.ops import reference
from cab_hf.plan import KeyRanges


def random_plan(q, k, blocks, share=0.4, ranges=None, heads=None, **complete):
    """Return a plan with every diagonal block and each other block with probability ``share``.

    ``complete`` may have ``dense_rows``, see `BlockPlan.from_dense`.
    """
    query_block, key_block = blocks
    ranges = ranges or KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    shape = BlockPlan.causal(ranges, heads or q.shape[1], query_block, key_block).to_dense().shape
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share
    keep = keep.to(q.device)
    row = ranges.rows(query_block).min_last // key_block
    diagonal = torch.arange(shape[-1], device=q.device) >= row.unsqueeze(-1)
    keep = keep | diagonal.unsqueeze(1)
    return BlockPlan.from_dense(
        keep, ranges, query_block=query_block, key_block=key_block, **complete
    )


def seeds(count):
    return torch.randint(2**62, (count,), generator=torch.Generator().manual_seed(0))


def laid_out(layout, batch, length, kv_length, align, device):
    """Return the `BlockLayout` of causal, left-padded or packed inputs, or of a chunk.

    The chunk begins inside of a query block, and ``align`` later tokens of its sequence follow.
    """
    valid = torch.ones(batch, kv_length, dtype=torch.bool)
    document = None
    if layout == "padded":
        valid[0, : kv_length // 5] = False
    if layout == "packed":
        document = (torch.arange(kv_length) >= kv_length // 3).long().expand(batch, -1).to(device)
    options = LayoutOptions()
    if layout == "chunk":
        options = LayoutOptions(
            block_offset=(kv_length - length) % align, sequence_end=kv_length + align
        )
    laid = BlockLayout.build(
        batch,
        length,
        kv_length,
        kv_length - length,
        None if layout in ("causal", "chunk") else valid.to(device),
        document,
        align=align,
        device=device,
        options=options,
    )
    return laid


def draw(device, dtype, q_length, kv_length=None, batch=1, heads=6, kv_heads=2, dim=16):
    """Return q, k, v and the output gradient; q has the strides of a model."""
    generator = torch.Generator().manual_seed(0)

    def normal(length, count):
        x = torch.randn(batch, length, count, dim, generator=generator)
        return x.to(device, dtype).transpose(1, 2)

    kv_length = kv_length or q_length
    sizes = ((q_length, heads), (kv_length, kv_heads), (kv_length, kv_heads), (q_length, heads))
    return [normal(*size) for size in sizes]


def case(
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
    """Return (q, k, v, gradient, plan) of one case.

    ``dense_rows`` is one list of rows per batch row, or "tail". One of ``sample_period`` unlisted
    blocks is sampled.
    """
    q, k, v, grad = draw(device, dtype, **shape)
    batch, kv_length = q.shape[0], k.shape[2]
    laid = laid_out(layout, batch, q.shape[2], kv_length, max(blocks), device)
    q, grad, k, v = laid.queries(q), laid.queries(grad), laid.keys(k), laid.keys(v)
    pattern = q if plan_heads is None else q[:, :plan_heads]
    if dense_rows == "tail":
        dense_rows = laid.ranges.tail_rows(blocks[0], blocks[0])
    elif dense_rows is not None:
        dense_rows = torch.tensor(dense_rows, device=device)
    plan = random_plan(pattern, k, blocks, share, laid.ranges, dense_rows=dense_rows)
    if sample_period is not None:
        plan = plan.with_sample(sample_period, seeds(1)[0].to(device))
    require_valid(plan)
    return q, k, v, grad, plan


def with_gradients(attend, inputs, grad, plan, scale, through_lse=False, **logits):
    """Return {"out", "lse", "dq", "dk", "dv"}; with ``through_lse``, the loss reads lse too."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    results = out, lse = attend(*leaves, plan, scale, return_lse=True, **logits)
    has_keys = (plan.ranges.end >= 0)[:, None, :, None]
    grads = [grad.to(out.dtype) * has_keys, (grad * has_keys).sum(-1).to(lse.dtype)]
    num_outputs = 2 if through_lse else 1
    gradients = torch.autograd.grad(results[:num_outputs], leaves, grads[:num_outputs])
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def assert_engine_within_budget(attend, q, k, v, grad, plan, scale, **how):
    """Assert that output, log-sum-exp and gradients have at most twice PyTorch's error."""
    actual = with_gradients(attend, (q, k, v), grad, plan, scale, **how)
    plain = with_gradients(reference.attention, (q, k, v), grad, plan, scale, **how)
    double_inputs = [x.double() for x in (q, k, v)]
    exact = with_gradients(reference.attention, double_inputs, grad.double(), plan, scale, **how)
    has_keys = (plan.ranges.end >= 0)[:, None]
    for name in actual:
        result, usual, expected = (x[name].detach().double() for x in (actual, plain, exact))
        if name == "lse":
            is_empty = expected == -torch.inf
            assert torch.equal((result == -torch.inf) & has_keys, is_empty & has_keys)
            result, usual, expected = (
                x.masked_fill(is_empty, 0.0) for x in (result, usual, expected)
            )
        # outputs of padding queries are not used
        elif name in ("out", "dq"):
            result, usual, expected = (
                x * has_keys.unsqueeze(-1) for x in (result, usual, expected)
            )
        error = (result - expected).abs().max()
        eps = EPS[q.dtype] * expected.abs().max()
        allowed = 2 * ((usual - expected).abs().max() + eps)
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
