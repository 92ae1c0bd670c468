"""`TokenPermutation` equals `torch.gather` with expanded indices, in outputs and gradients."""

import pytest
import torch
from attention_cases import random_plan
from tiny import qkv

from cab_hf.call.layout import BlockLayout, TokenPermutation
from cab_hf.ops import reference

LENGTH, HEADS, DIM = 111, 3, 10
CPU = torch.device("cpu")
FIRST = torch.arange(LENGTH)[None] >= torch.tensor([[9], [0]])
HAS_TOKEN = torch.arange(LENGTH)[None] < torch.tensor([[63], [111]])
PACKED = torch.tensor([[0] * 40 + [1] + [2] * 70, [0] * 111])
# by name: (number of queries, padding mask, document ids)
CASES = {
    "left-padded": (LENGTH, FIRST, None),
    "right-padded": (LENGTH, HAS_TOKEN, None),
    "nothing-but-padding": (LENGTH, FIRST & torch.tensor([[True], [False]]), None),
    "a-chunk": (105, FIRST, None),
    "packed": (LENGTH, None, PACKED),
    "packed-padded": (LENGTH, HAS_TOKEN & FIRST, PACKED),
}
# by name: function that changes the strides of a tensor [B, H, N, D], but not its values
LAYOUTS = {
    "by-token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "by-head": lambda x: x.contiguous(),
    # strides of q as a slice of a fused qkv projection
    "of-one-projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().narrow(2, 0, HEADS).transpose(1, 2)
    ),
}


def layout_of(case):
    """Return the `BlockLayout` of one of `CASES`."""
    q_length, padding_mask, doc_ids = CASES[case]
    return BlockLayout.build(
        batch=2,
        q_length=q_length,
        kv_length=LENGTH,
        q_offset=LENGTH - q_length,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        align=16,
        device=CPU,
    )


def by_number(x, index):
    """Gather tokens of x [B, H, N, D] by `torch.gather` with an expanded index.

    ``index`` has numbers of tokens in the flattened batch, [B * N].
    """
    batch, heads, _, dim = x.shape
    index = index.view(batch, -1)
    index = index - (torch.arange(batch) * x.shape[2])[:, None]
    return x.gather(2, index[:, None, :, None].expand(-1, heads, -1, dim))


def apply_by_number(order, x):
    """Return the expected result of `TokenPermutation.apply`, by `by_number`."""
    return by_number(x, order.source)


def undo_by_number(order, x):
    """Return the expected result of `TokenPermutation.undo`, by `by_number`."""
    result = by_number(x, order.target)
    if order.padding is None:
        return result
    return result.masked_fill(order.padding[:, None, :, None], 0.0)


def noise(length, dtype=torch.float32, seed=0):
    """Return a random tensor [2, HEADS, length, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, length, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_permutation_and_gradients_match_elementwise_index(case, layout, dtype):
    order = layout_of(case).query_order
    num_tokens, num_slots = CASES[case][0], order.vacant.shape[1]
    x = LAYOUTS[layout](noise(num_tokens, dtype)).requires_grad_()
    y = LAYOUTS[layout](noise(num_slots, dtype, 1)).requires_grad_()
    # attention gives zero gradients to empty slots
    grad = noise(num_slots, dtype, 2).masked_fill(order.vacant[:, None, :, None], 0.0)
    for actual, expected, leaf, upstream in (
        (order.apply(x), apply_by_number(order, x), x, grad),
        (order.undo(y), undo_by_number(order, y), y, noise(num_tokens, dtype, 3)),
    ):
        assert torch.equal(actual, expected)
        (gradient,) = torch.autograd.grad(actual, leaf, upstream)
        (expected_gradient,) = torch.autograd.grad(expected, leaf, upstream)
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("case", CASES)
def test_attention_in_layout_is_bit_identical(case):
    block_layout = layout_of(case)
    orders = block_layout.query_order, block_layout.key_order, block_layout.key_order
    leaves = [x.requires_grad_() for x in qkv(2, q_length=CASES[case][0], kv_length=LENGTH, dim=16)]

    def out_and_gradients(apply, undo):
        q, k, v = map(apply, orders, leaves)
        plan = random_plan(q, k, (32, 16), ranges=block_layout.ranges)
        out = undo(block_layout.query_order, reference.attention(q, k, v, plan, scale=0.2))
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    actual = out_and_gradients(TokenPermutation.apply, TokenPermutation.undo)
    expected = out_and_gradients(apply_by_number, undo_by_number)
    assert all(map(torch.equal, actual, expected))


def test_empty_slot_has_zero_gradient():
    """Pass NaN as the output gradient of empty slots, which must not reach any token."""
    order = layout_of("packed").key_order
    x = noise(LENGTH).requires_grad_()
    grad = noise(order.vacant.shape[1]).masked_fill(order.vacant[:, None, :, None], torch.nan)
    (result,) = torch.autograd.grad(order.apply(x), x, grad)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("case", ["left-padded", "packed-padded"])
def test_round_trip_is_twice_differentiable(case):
    order = layout_of(case).query_order
    x = torch.randn(2, 1, LENGTH, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: order.undo(order.apply(x).square()), x)


def test_permutation_compiles_without_graph_break():
    order = layout_of("left-padded").query_order
    x = noise(LENGTH).requires_grad_()

    def square_in_layout(x):
        return order.undo(order.apply(x).square())

    torch._dynamo.reset()
    actual = torch.compile(square_in_layout, fullgraph=True, backend="aot_eager")(x)
    expected = square_in_layout(x)
    assert torch.equal(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(gradient, expected_gradient)
