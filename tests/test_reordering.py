"""`TokenPermutation` equals `torch.gather` with expanded indices, in outputs and gradients."""

import pytest
import torch
from attention_cases import make_random_plan
from tiny import draw_qkv

from cab_hf.call.layout import BlockLayout, TokenPermutation
from cab_hf.ops import reference

SEQUENCE_LENGTH, NUM_HEADS, HEAD_DIM = 111, 3, 10
CPU = torch.device("cpu")
LEFT_PADDING_MASK = torch.arange(SEQUENCE_LENGTH)[None] >= torch.tensor([[9], [0]])
RIGHT_PADDING_MASK = torch.arange(SEQUENCE_LENGTH)[None] < torch.tensor([[63], [111]])
PACKED_DOC_IDS = torch.tensor([[0] * 40 + [1] + [2] * 70, [0] * 111])
# by name: (number of queries, padding mask, document ids)
LAYOUT_CASES = {
    "left-padded": (SEQUENCE_LENGTH, LEFT_PADDING_MASK, None),
    "right-padded": (SEQUENCE_LENGTH, RIGHT_PADDING_MASK, None),
    "nothing-but-padding": (
        SEQUENCE_LENGTH,
        LEFT_PADDING_MASK & torch.tensor([[True], [False]]),
        None,
    ),
    "a-chunk": (105, LEFT_PADDING_MASK, None),
    "packed": (SEQUENCE_LENGTH, None, PACKED_DOC_IDS),
    "packed-padded": (SEQUENCE_LENGTH, RIGHT_PADDING_MASK & LEFT_PADDING_MASK, PACKED_DOC_IDS),
}
# by name: function that changes the strides of a tensor [B, H, N, D], but not its values
STRIDE_FUNCTIONS = {
    "by-token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "by-head": lambda x: x.contiguous(),
    # strides of q as a slice of a fused qkv projection
    "of-one-projection": lambda x: (
        torch.cat((x, x), 1).transpose(1, 2).contiguous().narrow(2, 0, NUM_HEADS).transpose(1, 2)
    ),
}


def make_layout(case_name):
    """Return the `BlockLayout` of one of `LAYOUT_CASES`."""
    q_length, padding_mask, doc_ids = LAYOUT_CASES[case_name]
    return BlockLayout.build(
        batch=2,
        q_length=q_length,
        kv_length=SEQUENCE_LENGTH,
        q_offset=SEQUENCE_LENGTH - q_length,
        padding_mask=padding_mask,
        doc_ids=doc_ids,
        align=16,
        device=CPU,
    )


def gather_tokens(x, token_index):
    """Gather tokens of x [B, H, N, D] by `torch.gather` with an expanded index.

    ``token_index`` has numbers of tokens in the flattened batch, [B * N].
    """
    batch, heads, _, dim = x.shape
    token_index = token_index.view(batch, -1)
    token_index = token_index - (torch.arange(batch) * x.shape[2])[:, None]
    return x.gather(2, token_index[:, None, :, None].expand(-1, heads, -1, dim))


def apply_by_gather(permutation, x):
    """Return the expected result of `TokenPermutation.permute_tokens`, by `gather_tokens`."""
    return gather_tokens(x, permutation.token_indices)


def undo_by_gather(permutation, x):
    """Return the expected result of `TokenPermutation.unpermute_tokens`, by `gather_tokens`."""
    tokens = gather_tokens(x, permutation.position_indices)
    if permutation.is_padding is None:
        return tokens
    return tokens.masked_fill(permutation.is_padding[:, None, :, None], 0.0)


def draw_tensor(length, dtype=torch.float32, seed=0):
    """Return a random tensor [2, HEADS, length, DIM]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, NUM_HEADS, length, HEAD_DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("case_name", LAYOUT_CASES)
@pytest.mark.parametrize("stride_kind", STRIDE_FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_permutation_and_gradients_match_elementwise_index(case_name, stride_kind, dtype):
    permutation = make_layout(case_name).query_order
    num_tokens, num_slots = LAYOUT_CASES[case_name][0], permutation.is_vacant.shape[1]
    token_tensor = STRIDE_FUNCTIONS[stride_kind](draw_tensor(num_tokens, dtype)).requires_grad_()
    slot_tensor = STRIDE_FUNCTIONS[stride_kind](draw_tensor(num_slots, dtype, 1)).requires_grad_()
    # attention gives zero gradients to empty slots
    slot_gradient = draw_tensor(num_slots, dtype, 2).masked_fill(
        permutation.is_vacant[:, None, :, None], 0.0
    )
    for actual, expected, leaf, output_gradient in (
        (
            permutation.permute_tokens(token_tensor),
            apply_by_gather(permutation, token_tensor),
            token_tensor,
            slot_gradient,
        ),
        (
            permutation.unpermute_tokens(slot_tensor),
            undo_by_gather(permutation, slot_tensor),
            slot_tensor,
            draw_tensor(num_tokens, dtype, 3),
        ),
    ):
        assert torch.equal(actual, expected)
        (gradient,) = torch.autograd.grad(actual, leaf, output_gradient)
        (expected_gradient,) = torch.autograd.grad(expected, leaf, output_gradient)
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize("case_name", LAYOUT_CASES)
def test_attention_in_layout_is_bit_identical(case_name):
    block_layout = make_layout(case_name)
    permutations = block_layout.query_order, block_layout.key_order, block_layout.key_order
    leaves = [
        x.requires_grad_()
        for x in draw_qkv(2, q_length=LAYOUT_CASES[case_name][0], kv_length=SEQUENCE_LENGTH, dim=16)
    ]

    def compute_out_and_gradients(apply_permutation, undo_permutation):
        q, k, v = map(apply_permutation, permutations, leaves)
        plan = make_random_plan(q, k, (32, 16), ranges=block_layout.ranges)
        out = undo_permutation(
            block_layout.query_order, reference.attention(q, k, v, plan, scale=0.2)
        )
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    actual = compute_out_and_gradients(
        TokenPermutation.permute_tokens, TokenPermutation.unpermute_tokens
    )
    expected = compute_out_and_gradients(apply_by_gather, undo_by_gather)
    assert all(map(torch.equal, actual, expected))


def test_empty_slot_has_zero_gradient():
    """Pass NaN as the output gradient of empty slots, which must not reach any token."""
    permutation = make_layout("packed").key_order
    token_tensor = draw_tensor(SEQUENCE_LENGTH).requires_grad_()
    slot_gradient = draw_tensor(permutation.is_vacant.shape[1]).masked_fill(
        permutation.is_vacant[:, None, :, None], torch.nan
    )
    (token_gradient,) = torch.autograd.grad(
        permutation.permute_tokens(token_tensor), token_tensor, slot_gradient
    )
    assert torch.isfinite(token_gradient).all()


@pytest.mark.parametrize("case_name", ["left-padded", "packed-padded"])
def test_round_trip_is_twice_differentiable(case_name):
    permutation = make_layout(case_name).query_order
    token_tensor = torch.randn(2, 1, SEQUENCE_LENGTH, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(
        lambda x: permutation.unpermute_tokens(permutation.permute_tokens(x).square()), token_tensor
    )


def test_permutation_compiles_without_graph_break():
    permutation = make_layout("left-padded").query_order
    token_tensor = draw_tensor(SEQUENCE_LENGTH).requires_grad_()

    def square_in_layout(x):
        return permutation.unpermute_tokens(permutation.permute_tokens(x).square())

    torch._dynamo.reset()
    actual = torch.compile(square_in_layout, fullgraph=True, backend="aot_eager")(token_tensor)
    expected = square_in_layout(token_tensor)
    assert torch.equal(actual, expected)
    (gradient,) = torch.autograd.grad(actual.sum(), token_tensor)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), token_tensor)
    assert torch.equal(gradient, expected_gradient)
