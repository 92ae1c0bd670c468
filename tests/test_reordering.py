"""`TokenPermutation` equals `torch.gather` with expanded indices, in outputs and gradients."""

import pytest
import torch
from attention_cases import random_plan
from tiny import qkv

from cab_hf.call.layout import BlockLayout, TokenPermutation
from cab_hf.ops import reference

LENGTH, HEADS, DIM = 111, 3, 10
CPU = torch.device("cpu")
LEFT_PADDING_MASK = torch.arange(LENGTH)[None] >= torch.tensor([[9], [0]])
RIGHT_PADDING_MASK = torch.arange(LENGTH)[None] < torch.tensor([[63], [111]])
PACKED_DOC_IDS = torch.tensor([[0] * 40 + [1] + [2] * 70, [0] * 111])
# by name: (number of queries, padding mask, document ids)
LAYOUT_CASES = {
    "left-padded": (LENGTH, LEFT_PADDING_MASK, None),
    "right-padded": (LENGTH, RIGHT_PADDING_MASK, None),
    "nothing-but-padding": (LENGTH, LEFT_PADDING_MASK & torch.tensor([[True], [False]]), None),
    "a-chunk": (105, LEFT_PADDING_MASK, None),
    "packed": (LENGTH, None, PACKED_DOC_IDS),
    "packed-padded": (LENGTH, RIGHT_PADDING_MASK & LEFT_PADDING_MASK, PACKED_DOC_IDS),
}
# by name: function that changes the strides of a tensor [B, H, N, D], but not its values
STRIDE_FUNCTIONS = {
    "by-token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "by-head": lambda x: x.contiguous(),
    # strides of q as a slice of a fused qkv projection
    "of-one-projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().narrow(2, 0, HEADS).transpose(1, 2)
    ),
}


def make_layout(case):
    """Return the `BlockLayout` of one of `LAYOUT_CASES`."""
    q_length, padding_mask, doc_ids = LAYOUT_CASES[case]
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


def gather_tokens(x, index):
    """Gather tokens of x [B, H, N, D] by `torch.gather` with an expanded index.

    ``index`` has numbers of tokens in the flattened batch, [B * N].
    """
    batch, heads, _, dim = x.shape
    index = index.view(batch, -1)
    index = index - (torch.arange(batch) * x.shape[2])[:, None]
    return x.gather(2, index[:, None, :, None].expand(-1, heads, -1, dim))


def apply_by_gather(order, x):
    """Return the expected result of `TokenPermutation.apply`, by `gather_tokens`."""
    return gather_tokens(x, order.token_indices)


def undo_by_gather(order, x):
    """Return the expected result of `TokenPermutation.undo`, by `gather_tokens`."""
    result = gather_tokens(x, order.position_indices)
    if order.is_padding is None:
        return result
    return result.masked_fill(order.is_padding[:, None, :, None], 0.0)


def random_tensor(length, dtype=torch.float32, seed=0):
    """Return a random tensor [2, HEADS, length, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, length, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("case", LAYOUT_CASES)
@pytest.mark.parametrize("strides", STRIDE_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_permutation_and_gradients_match_elementwise_index(case, strides, dtype):
    order = make_layout(case).query_order
    num_tokens, num_slots = LAYOUT_CASES[case][0], order.is_vacant.shape[1]
    x = STRIDE_FUNCTIONS[strides](random_tensor(num_tokens, dtype)).requires_grad_()
    y = STRIDE_FUNCTIONS[strides](random_tensor(num_slots, dtype, 1)).requires_grad_()
    # attention gives zero gradients to empty slots
    grad = random_tensor(num_slots, dtype, 2).masked_fill(order.is_vacant[:, None, :, None], 0.0)
    for actual, expected, leaf, upstream in (
        (order.apply(x), apply_by_gather(order, x), x, grad),
        (order.undo(y), undo_by_gather(order, y), y, random_tensor(num_tokens, dtype, 3)),
    ):
        assert torch.equal(actual, expected)
        (gradient,) = torch.autograd.grad(actual, leaf, upstream)
        (expected_gradient,) = torch.autograd.grad(expected, leaf, upstream)
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("case", LAYOUT_CASES)
def test_attention_in_layout_is_bit_identical(case):
    block_layout = make_layout(case)
    orders = block_layout.query_order, block_layout.key_order, block_layout.key_order
    leaves = [
        x.requires_grad_() for x in qkv(2, q_length=LAYOUT_CASES[case][0], kv_length=LENGTH, dim=16)
    ]

    def out_and_gradients(apply, undo):
        q, k, v = map(apply, orders, leaves)
        plan = random_plan(q, k, (32, 16), ranges=block_layout.ranges)
        out = undo(block_layout.query_order, reference.attention(q, k, v, plan, scale=0.2))
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    actual = out_and_gradients(TokenPermutation.apply, TokenPermutation.undo)
    expected = out_and_gradients(apply_by_gather, undo_by_gather)
    assert all(map(torch.equal, actual, expected))


def test_empty_slot_has_zero_gradient():
    """Pass NaN as the output gradient of empty slots, which must not reach any token."""
    order = make_layout("packed").key_order
    x = random_tensor(LENGTH).requires_grad_()
    grad = random_tensor(order.is_vacant.shape[1]).masked_fill(
        order.is_vacant[:, None, :, None], torch.nan
    )
    (result,) = torch.autograd.grad(order.apply(x), x, grad)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("case", ["left-padded", "packed-padded"])
def test_round_trip_is_twice_differentiable(case):
    order = make_layout(case).query_order
    x = torch.randn(2, 1, LENGTH, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: order.undo(order.apply(x).square()), x)


def test_permutation_compiles_without_graph_break():
    order = make_layout("left-padded").query_order
    x = random_tensor(LENGTH).requires_grad_()

    def square_in_layout(x):
        return order.undo(order.apply(x).square())

    torch._dynamo.reset()
    actual = torch.compile(square_in_layout, fullgraph=True, backend="aot_eager")(x)
    expected = square_in_layout(x)
    assert torch.equal(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), x)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), x)
    assert torch.equal(gradient, expected_gradient)
