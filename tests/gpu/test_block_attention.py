"""Triton attention kernels on a CUDA device: head dims, groups, layouts and block sizes."""

import pytest
import torch
from attention_cases import assert_engine_within_budget, make_case, run_with_gradients
from tiny import FULL_BUDGET_CONFIG, draw_token_ids, make_tiny_model
from valid_plan import assert_valid_plan

import cab_hf
from cab_hf import BlockPlan, engines
from cab_hf.ops.attention import block, transpose
from cab_hf.ops.launch import reads_by_descriptor
from cab_hf.plan import BlockIndices, KeyRanges

pytestmark = pytest.mark.gpu
CASES = [
    *(
        pytest.param({"q_length": 333, "heads": 4, "kv_heads": 2, "dim": dim}, id=f"d{dim}")
        for dim in (16, 64, 80, 96, 128, 192, 256, 320, 512, 640, 1024)
    ),
    *(
        pytest.param(
            {"q_length": 1000, "heads": 2 * group, "kv_heads": 2, "dim": 64}, id=f"g{group}"
        )
        for group in (1, 3, 4, 8)
    ),
    *(
        pytest.param(
            {"q_length": 777, "heads": 4, "kv_heads": 1, "dim": dim, "layout": layout, "batch": 2},
            id=f"{layout}-d{dim}",
        )
        for dim in (128, 320)
        for layout in ("padded", "packed")
    ),
    pytest.param(
        {"q_length": 300, "kv_length": 1111, "heads": 8, "kv_heads": 2, "dim": 128}, id="chunk"
    ),
    pytest.param(
        {"q_length": 300, "kv_length": 700, "heads": 2, "kv_heads": 2, "dim": 512}, id="chunk-d512"
    ),
    pytest.param(
        {"q_length": 700, "heads": 8, "kv_heads": 2, "dim": 128, "plan_heads": 2}, id="shared"
    ),
    pytest.param({"q_length": 63, "heads": 4, "kv_heads": 4, "dim": 64}, id="below-one-block"),
]
BLOCK_SIZES = [
    pytest.param((128, 128), id="128x128"),
    pytest.param((128, 64), id="128x64"),
    pytest.param((64, 64), id="64x64"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
@pytest.mark.parametrize("shape", CASES)
def test_kernels_match_reference(gpu, shape, block_sizes, dtype):
    q, k, v, grad, plan = make_case(gpu, dtype, block_sizes, **shape)
    scale = q.shape[-1] ** -0.5
    assert_engine_within_budget(block.attention, q, k, v, grad_out=grad, plan=plan, scale=scale)


@pytest.mark.parametrize("layout", ["causal", "padded", "packed"])
@pytest.mark.parametrize("dim", [128, 320])
def test_dense_rows_match_reference(gpu, dim, layout):
    shape = {"q_length": 777, "heads": 4, "kv_heads": 2, "dim": dim, "batch": 2, "layout": layout}
    q, k, v, grad, plan = make_case(gpu, torch.bfloat16, (128, 64), **shape, dense_rows="tail")
    assert_engine_within_budget(
        engines.TRITON.attention, q, k, v, grad_out=grad, plan=plan, scale=dim**-0.5
    )


@pytest.mark.parametrize("layout", ["causal", "padded", "packed"])
@pytest.mark.parametrize("block_sizes", [(128, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("engine_name", ["triton", "flex"])
def test_sampled_blocks_match_reference(gpu, layout, block_sizes, engine_name):
    shape = {"q_length": 1777, "heads": 4, "kv_heads": 2, "dim": 64, "batch": 2, "layout": layout}
    q, k, v, grad, plan = make_case(
        gpu, torch.bfloat16, block_sizes, **shape, dense_rows="tail", selection_probability=0.2
    )
    plan = plan.with_sample(3, torch.tensor(5, device=gpu))
    assert_valid_plan(plan)
    query_block, key_block = block_sizes
    workload = engines.Workload(
        device="cuda",
        head_dim=64,
        dtype=q.dtype,
        training=True,
        query_block=query_block,
        key_block=key_block,
    )
    engine = engines.choose(engine_name, workload)
    assert_engine_within_budget(engine.attention, q, k, v, grad_out=grad, plan=plan, scale=64**-0.5)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("engine_name", ["triton", "flex"])
def test_softcap_matches_reference(gpu, engine_name, dim):
    shape = {"q_length": 777, "heads": 4, "kv_heads": 2, "dim": dim, "batch": 2}
    q, k, v, grad, plan = make_case(gpu, torch.bfloat16, (128, 64), **shape, layout="packed")
    workload = engines.Workload(
        device="cuda",
        head_dim=dim,
        dtype=q.dtype,
        training=True,
        query_block=128,
        key_block=64,
        softcap=True,
    )
    attend = engines.choose(engine_name, workload).attention
    # four times the usual scale, so that some logits reach the soft cap
    assert_engine_within_budget(
        attend, q, k, v, grad_out=grad, plan=plan, scale=4 * dim**-0.5, softcap=3.0
    )


@pytest.mark.parametrize("dim", [64, 320])
def test_float32_matches_reference(gpu, dim):
    shape = {"q_length": 333, "heads": 4, "kv_heads": 2, "dim": dim}
    q, k, v, grad, plan = make_case(gpu, torch.float32, (128, 64), **shape)
    assert_engine_within_budget(block.attention, q, k, v, grad_out=grad, plan=plan, scale=dim**-0.5)


@pytest.mark.parametrize("dim", [64, 128, 320])
def test_gradients_are_deterministic(gpu, dim):
    shape = {"q_length": 1000, "heads": 8, "kv_heads": 2, "dim": dim}
    q, k, v, grad, plan = make_case(gpu, torch.bfloat16, (128, 64), **shape)
    first_gradients, second_gradients = (
        run_with_gradients(block.attention, (q, k, v), grad_out=grad, plan=plan, scale=dim**-0.5)
        for _ in range(2)
    )
    for tensor_name, gradient in first_gradients.items():
        assert torch.equal(gradient, second_gradients[tensor_name]), tensor_name


@pytest.mark.parametrize("dim", [128, 512])
def test_attention_runs_in_cuda_graph(gpu, dim):
    q, k, v, _, plan = make_case(gpu, torch.bfloat16, (128, 64), q_length=1000, dim=dim)
    block.attention(q, k, v, plan, scale=0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured_out = block.attention(q, k, v, plan, scale=0.1)
    q.copy_(q.roll(128, dims=2))
    graph.replay()
    assert torch.equal(captured_out, block.attention(q, k, v, plan, scale=0.1))


def test_attention_compiles_without_graph_break(gpu):
    q, k, v, grad, plan = make_case(gpu, torch.bfloat16, (128, 64), q_length=500, dim=64)
    q, k, v = leaves = [x.requires_grad_() for x in (q, k, v)]

    def attend(q, k, v):
        return block.attention(q, k, v, plan, scale=0.125)

    actual = torch.compile(attend, fullgraph=True)(q, k, v)
    expected = attend(q, k, v)
    assert torch.equal(actual, expected)
    actual_grads = torch.autograd.grad(actual, leaves, grad)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    assert all(map(torch.equal, actual_grads, expected_grads))


def test_transpose_matches_reference(gpu):
    is_selected = torch.rand(2, 8, 1000, 2000, device=gpu) < 0.05
    block_lists = BlockIndices.from_dense(is_selected)
    expected = is_selected.transpose(2, 3)
    assert torch.equal(transpose.transpose(block_lists, 2000).to_dense(1000), expected)
    column_lists = transpose.pack_columns(block_lists, 2000, with_slots=True)
    assert torch.equal(column_lists.counts, expected.sum(-1, dtype=torch.int32))
    # the first query block that lists key block 77 in head 3
    head, column = 3, 77
    start = int(column_lists.starts[0, head, column])
    row, slot = int(column_lists.rows[start]), int(column_lists.slots[start])
    assert int(block_lists.indices[0, head, row, slot]) == column


@pytest.mark.parametrize("head_dim", [320, 512])
def test_cab_dense_of_large_heads_matches_sdpa(gpu, head_dim):
    """Compare with SDPA in float32; row 0 has left padding."""
    head_fields = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": head_dim}
    model = make_tiny_model(**head_fields).to(gpu)
    ids = draw_token_ids(2, 300).to(gpu)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    workload = engines.Workload(
        device="cuda",
        head_dim=head_dim,
        dtype=torch.float32,
        training=False,
        query_block=128,
        key_block=128,
    )
    # without tensor descriptors, float32 tiles of these head dims exceed shared memory
    assert (
        engines.choose_exact_attention(workload, None) is engines.TRITON
    ) == reads_by_descriptor(gpu)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        model.set_attn_implementation("cab_dense")
        actual = model(input_ids=ids, attention_mask=mask).logits
    is_real_token = mask.bool()
    assert (actual - expected)[is_real_token].abs().max() <= 2e-3 * expected.abs().max()


def train_twenty_steps(model, ids):
    """Return the losses of 20 training steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("engine_name", ["flex", "triton"])
@pytest.mark.parametrize("block_sizes", BLOCK_SIZES[:2])
def test_full_budget_training_losses_match_dense(gpu, block_sizes, engine_name):
    ids = draw_token_ids(2, 400).to(gpu)
    dense_losses = train_twenty_steps(
        make_tiny_model(head_dim=64).to(gpu, torch.bfloat16).train(), ids
    )
    model = make_tiny_model(head_dim=64).to(gpu, torch.bfloat16).train()
    query_block, key_block = block_sizes
    with cab_hf.cab(
        model, FULL_BUDGET_CONFIG, query_block=query_block, key_block=key_block, engine=engine_name
    ):
        sparse_losses = train_twenty_steps(model, ids)
    assert dense_losses[-1] < 0.9 * dense_losses[0]
    torch.testing.assert_close(sparse_losses, dense_losses, rtol=2e-2, atol=0)


def test_dense_attention_of_131072_tokens_and_512_channels_fits_memory(gpu):
    """Kernels keep one tile of attention weights, so memory is not quadratic in the length."""
    length = 131_072
    q = torch.randn((1, 2, length, 512), device=gpu, dtype=torch.bfloat16)
    k, v = torch.randn((2, 1, 1, length, 512), device=gpu, dtype=torch.bfloat16)
    key_ranges = KeyRanges.causal(1, length, length, gpu)
    plan = BlockPlan.causal(key_ranges, 1, 128, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated()
    out = block.attention(q, k, v, plan, scale=512**-0.5)
    assert (torch.cuda.max_memory_allocated() - input_bytes) / 2**30 < 4
    query_slice = slice(length - 64, length)
    logits = (q[:, :, query_slice].float() @ k.float().transpose(-1, -2)) * 512**-0.5
    positions = torch.arange(length, device=gpu)
    logits = logits.masked_fill(positions > positions[query_slice, None], -torch.inf)
    expected = logits.softmax(-1) @ v.float()
    torch.testing.assert_close(out[:, :, query_slice].float(), expected, atol=2e-3, rtol=2e-2)
