"""Both backends of engine "flex", TRITON and FLASH, on a CUDA device against the reference."""

import inspect

import pytest
import torch
from attention_cases import assert_engine_within_budget, make_case, run_with_gradients

from cab_hf.engines import FLASH, FLEX, Workload, choose
from cab_hf.ops import reference
from cab_hf.ops.attention import flash

pytestmark = pytest.mark.gpu
# (query block, key block)
WIDE_BLOCK_SIZES, NARROW_BLOCK_SIZES = (128, 128), (128, 64)


def make_shape(q_length=1000, heads=8, kv_heads=2, dim=128, **other_fields):
    """Return the arguments of `attention_cases.make_case` that determine shapes, with defaults."""
    return {"q_length": q_length, "heads": heads, "kv_heads": kv_heads, "dim": dim, **other_fields}


CASES = [
    pytest.param(make_shape(), id="group-4"),
    pytest.param(make_shape(q_length=333, heads=4, kv_heads=4), id="group-1"),
    pytest.param(make_shape(q_length=333, heads=9, kv_heads=3, dim=64), id="d64-group-3"),
    pytest.param(make_shape(q_length=300, kv_length=1111, kv_heads=1), id="chunk-group-8"),
    pytest.param(make_shape(q_length=300, kv_length=1111, heads=2, dim=64), id="d64-chunk-group-1"),
    pytest.param(make_shape(dim=96, heads=4), id="d96"),
    pytest.param(make_shape(q_length=300, dim=192, heads=4), id="d192"),
    pytest.param(make_shape(q_length=300, dim=256, heads=4), id="d256"),
    pytest.param(make_shape(q_length=63), id="below-one-block"),
    pytest.param(make_shape(batch=2, layout="padded"), id="padded"),
    pytest.param(make_shape(batch=2, layout="packed"), id="packed"),
    pytest.param(make_shape(plan_heads=2), id="shared-by-group"),
    pytest.param(make_shape(heads=9, kv_heads=3, plan_heads=3), id="shared-by-group-of-3"),
    pytest.param(make_shape(kv_heads=1, plan_heads=1, batch=2), id="shared-by-group-of-8"),
    pytest.param(make_shape(plan_heads=2, batch=2, layout="padded"), id="shared-padded"),
    pytest.param(make_shape(plan_heads=4), id="shared-by-half-a-group"),
    pytest.param(make_shape(plan_heads=1, batch=2), id="shared-by-all"),
    pytest.param(make_shape(dense_rows="tail"), id="dense-rows"),
    pytest.param(make_shape(batch=2, layout="padded", dense_rows="tail"), id="dense-rows-padded"),
    pytest.param(make_shape(batch=2, layout="packed", dense_rows="tail"), id="dense-rows-packed"),
]


@pytest.fixture
def hopper_gpu(gpu):
    """Return the CUDA device; skip the test if FLASH cannot run a backward pass on the device."""
    query_block, key_block = WIDE_BLOCK_SIZES
    unavailable_reason = flash.unavailable(
        head_dim=128, dtype=torch.bfloat16, query_block=query_block, key_block=key_block
    )
    if unavailable_reason:
        pytest.skip(f"FLASH {unavailable_reason}")
    return gpu


def assert_matches_reference(shape, block_sizes, device, dtype=torch.bfloat16, engine=FLASH):
    """Assert that output, log-sum-exp and gradients of an engine are within the error budget."""
    q, k, v, grad, plan = make_case(device, dtype, block_sizes, **shape)
    scale = q.shape[-1] ** -0.5
    assert_engine_within_budget(engine.attention, q, k, v, grad_out=grad, plan=plan, scale=scale)


def is_trained_by_flash(block_sizes, dim=128):
    """Return True if engine "flex" trains this head dim and these blocks with FLASH."""
    query_block, key_block = block_sizes
    workload = Workload(
        device="cuda",
        head_dim=dim,
        dtype=torch.bfloat16,
        training=True,
        query_block=query_block,
        key_block=key_block,
    )
    return choose("flex", workload) is FLASH


@pytest.mark.parametrize(
    "block_sizes", [WIDE_BLOCK_SIZES, NARROW_BLOCK_SIZES], ids=["128x128", "128x64"]
)
@pytest.mark.parametrize("shape", CASES)
def test_flash_matches_reference(hopper_gpu, shape, block_sizes):
    assert is_trained_by_flash(block_sizes, shape["dim"])
    assert_matches_reference(shape, block_sizes, hopper_gpu)


@pytest.mark.parametrize("block_sizes", [(64, 64), (64, 128), (256, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
def test_flash_with_other_block_sizes_matches_reference(hopper_gpu, block_sizes, dim):
    assert is_trained_by_flash(block_sizes, dim)
    assert_matches_reference(make_shape(dim=dim), block_sizes, hopper_gpu)


@pytest.mark.parametrize(
    "block_sizes", [WIDE_BLOCK_SIZES, NARROW_BLOCK_SIZES], ids=["128x128", "128x64"]
)
@pytest.mark.parametrize(
    "shape", [make_shape(plan_heads=2), make_shape(dim=64, batch=2, layout="padded")]
)
def test_flash_in_float16_matches_reference(hopper_gpu, shape, block_sizes):
    assert_matches_reference(shape, block_sizes, hopper_gpu, torch.float16)


@pytest.mark.parametrize(
    ("dim", "block_sizes", "is_supported"),
    [
        (128, WIDE_BLOCK_SIZES, True),
        (128, NARROW_BLOCK_SIZES, False),
        (256, NARROW_BLOCK_SIZES, True),
        (192, WIDE_BLOCK_SIZES, False),
    ],
)
def test_flash_backward_supports_block_sizes(hopper_gpu, dim, block_sizes, is_supported):
    query_block, key_block = block_sizes
    assert flash.has_flash_backward(dim, query_block, key_block) == is_supported


@pytest.mark.parametrize("dim", [16, 40, 80, 160, 224])
def test_flash_with_gradients_by_triton_matches_reference(hopper_gpu, dim):
    assert is_trained_by_flash(NARROW_BLOCK_SIZES, dim)
    assert_matches_reference(make_shape(dim=dim), NARROW_BLOCK_SIZES, hopper_gpu)


@pytest.mark.parametrize(
    "block_sizes", [WIDE_BLOCK_SIZES, NARROW_BLOCK_SIZES], ids=["128x128", "128x64"]
)
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(make_shape(plan_heads=2), id="shared-by-group"),
        pytest.param(make_shape(plan_heads=1, dim=64, batch=2), id="shared-by-all"),
        pytest.param(
            make_shape(q_length=333, heads=9, kv_heads=3, plan_heads=3, dim=64, batch=2),
            id="group-3",
        ),
    ],
)
def test_triton_accepts_plans_shared_by_heads(gpu, shape, block_sizes):
    assert_matches_reference(shape, block_sizes, gpu, engine=FLEX)


def test_expanded_output_gradient_is_supported(hopper_gpu):
    """Call `out.sum().backward()`, whose output gradient is expanded with strides of 0."""
    q, k, v, _, plan = make_case(hopper_gpu, torch.bfloat16, NARROW_BLOCK_SIZES, **make_shape())

    def compute_gradients(attend):
        leaf_q, leaf_k, leaf_v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attend(leaf_q, leaf_k, leaf_v, plan, scale=0.1)
        return torch.autograd.grad(out.sum(), leaves)

    for actual, expected in zip(
        compute_gradients(FLASH.attention), compute_gradients(reference.attention), strict=True
    ):
        torch.testing.assert_close(actual, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    "shape", [make_shape(), make_shape(plan_heads=2)], ids=["per-head", "shared"]
)
def test_flash_compiles_without_graph_break(hopper_gpu, shape):
    q, k, v, grad, plan = make_case(hopper_gpu, torch.bfloat16, WIDE_BLOCK_SIZES, **shape)
    compiled_attention = torch.compile(FLASH.attention, fullgraph=True)
    actual = run_with_gradients(compiled_attention, (q, k, v), grad_out=grad, plan=plan, scale=0.1)
    expected = run_with_gradients(FLASH.attention, (q, k, v), grad_out=grad, plan=plan, scale=0.1)
    for tensor_name, tensor in expected.items():
        torch.testing.assert_close(actual[tensor_name], tensor, atol=0.02, rtol=0.02)


def test_flash_forward_does_not_synchronise(hopper_gpu):
    q, k, v, _, plan = make_case(hopper_gpu, torch.bfloat16, NARROW_BLOCK_SIZES, **make_shape())
    with torch.no_grad():
        FLASH.attention(q, k, v, plan, scale=0.1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            FLASH.attention(q, k, v, plan, scale=0.1)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "block_sizes", [WIDE_BLOCK_SIZES, NARROW_BLOCK_SIZES], ids=["128x128", "128x64"]
)
def test_flash_runs_in_cuda_graph(hopper_gpu, block_sizes):
    q, k, v, grad, plan = make_case(hopper_gpu, torch.bfloat16, block_sizes, **make_shape())
    q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def compute_out_and_gradients():
        out = FLASH.attention(q, k, v, plan, scale=0.1)
        return out, *torch.autograd.grad(out, leaves, grad)

    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        expected = [x.clone() for x in compute_out_and_gradients()]
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = compute_out_and_gradients()
    graph.replay()
    for captured_tensor, eager_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(captured_tensor, eager_tensor, atol=0.02, rtol=0.02)


def test_private_flash_interface_has_expected_signature(hopper_gpu):
    """Detect changed arguments of private functions of flash-attn-4, which is a beta version."""
    flash_functions = flash._import_flash()
    forward_parameters, backward_parameters = (
        list(inspect.signature(function).parameters)
        for function in (flash_functions.forward, flash_functions.backward)
    )
    assert forward_parameters[:3] == ["q", "k", "v"]
    assert {"out", "softmax_scale", "return_lse", "pack_gqa"} <= set(forward_parameters)
    assert backward_parameters[:7] == ["q", "k", "v", "out", "dout", "lse", "softmax_scale"]
    for parameters in (forward_parameters, backward_parameters):
        assert {"block_sparse_tensors", "mask_mod", "aux_tensors"} <= set(parameters)
