"""Permutation of tokens into a layout and back, against elementwise indices."""

import pytest
import torch
from attention_cases import random_plan
from tiny import qkv

from cab_hf.call.layout import BlockLayout, TokenPermutation
from cab_hf.ops import reference

LENGTH, HEADS, DIM = 111, 3, 10
CPU = torch.device("cpu")
FIRST = torch.arange(LENGTH)[None] >= torch.tensor([[9], [0]])
LAST = torch.arange(LENGTH)[None] < torch.tensor([[63], [111]])
PACKED = torch.tensor([[0] * 40 + [1] + [2] * 70, [0] * 111])
# queries, valid, document
TEXTS = {
    "left-padded": (LENGTH, FIRST, None),
    "right-padded": (LENGTH, LAST, None),
    "nothing-but-padding": (LENGTH, FIRST & torch.tensor([[True], [False]]), None),
    "a-chunk": (105, FIRST, None),
    "packed": (LENGTH, None, PACKED),
    "packed-padded": (LENGTH, LAST & FIRST, PACKED),
}
LAYOUTS = {
    "by-token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "by-head": lambda x: x.contiguous(),
    # queries in one projection with keys and values
    "of-one-projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().narrow(2, 0, HEADS).transpose(1, 2)
    ),
}


def layout_of(text):
    queries, *others = TEXTS[text]
    return BlockLayout.build(2, queries, LENGTH, LENGTH - queries, *others, align=16, device=CPU)


def by_number(x, index):
    """Gather rows of x [B, H, N, D] by an index per element."""
    batch, heads, _, dim = x.shape
    index = index.view(batch, -1)
    index = index - (torch.arange(batch) * x.shape[2])[:, None]
    return x.gather(2, index[:, None, :, None].expand(-1, heads, -1, dim))


def apply_by_number(order, x):
    return by_number(x, order.source)


def undo_by_number(order, x):
    result = by_number(x, order.target)
    if order.padding is None:
        return result
    return result.masked_fill(order.padding[:, None, :, None], 0.0)


def noise(length, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, HEADS, length, DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_permutation_and_gradients_match_elementwise_index(text, layout, dtype):
    order = layout_of(text).query_order
    tokens, places = TEXTS[text][0], order.vacant.shape[1]
    x = LAYOUTS[layout](noise(tokens, dtype)).requires_grad_()
    y = LAYOUTS[layout](noise(places, dtype, 1)).requires_grad_()
    # results never depend on empty places
    grad = noise(places, dtype, 2).masked_fill(order.vacant[:, None, :, None], 0.0)
    for actual, expected, leaf, upstream in (
        (order.apply(x), apply_by_number(order, x), x, grad),
        (order.undo(y), undo_by_number(order, y), y, noise(tokens, dtype, 3)),
    ):
        assert torch.equal(actual, expected)
        gradients = [torch.autograd.grad(out, leaf, upstream)[0] for out in (actual, expected)]
        assert torch.equal(*gradients)


@pytest.mark.parametrize("text", TEXTS)
def test_attention_in_layout_is_bit_identical(text):
    laid = layout_of(text)
    orders = laid.query_order, laid.key_order, laid.key_order
    leaves = [x.requires_grad_() for x in qkv(2, q_length=TEXTS[text][0], kv_length=LENGTH, dim=16)]

    def attended(apply, undo):
        q, k, v = map(apply, orders, leaves)
        plan = random_plan(q, k, (32, 16), ranges=laid.ranges)
        out = undo(laid.query_order, reference.attention(q, k, v, plan, 0.2))
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    expected = attended(apply_by_number, undo_by_number)
    assert all(map(torch.equal, attended(TokenPermutation.apply, TokenPermutation.undo), expected))


def test_empty_slot_has_zero_gradient():
    """The gradient is zero even if the output gradient is NaN there."""
    order = layout_of("packed").key_order
    x = noise(LENGTH).requires_grad_()
    grad = noise(order.vacant.shape[1]).masked_fill(order.vacant[:, None, :, None], torch.nan)
    (result,) = torch.autograd.grad(order.apply(x), x, grad)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("text", ["left-padded", "packed-padded"])
def test_round_trip_is_twice_differentiable(text):
    order = layout_of(text).query_order
    x = torch.randn(2, 1, LENGTH, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: order.undo(order.apply(x).square()), x)


def test_permutation_compiles_without_graph_break():
    order = layout_of("left-padded").query_order
    x = noise(LENGTH).requires_grad_()

    def moved(x):
        return order.undo(order.apply(x).square())

    torch._dynamo.reset()
    actual = torch.compile(moved, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(actual, moved(x))
    gradients = [torch.autograd.grad(out.sum(), x)[0] for out in (actual, moved(x))]
    assert torch.equal(*gradients)
