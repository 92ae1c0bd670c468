"""Models and engine "flex" on a CUDA device. Run with `make gpu-test`."""

from dataclasses import replace

import pytest
import torch
from attention_cases import make_random_plan
from budget import assert_within_budget
from call_cases import compute_gradients
from selecting import draw_topic_qk
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_qkv, draw_token_ids, make_tiny_model
from transformers import DynamicCache
from valid_plan import assert_valid_plan

import cab_hf
from cab_hf import CabConfig, engines
from cab_hf.ops import reference
from cab_hf.ops.attention import flex
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, RowsPredictor, make_predictor

pytestmark = pytest.mark.gpu
BLOCK_SIZES = [
    pytest.param((128, 128), id="128x128"),
    pytest.param((128, 64), id="128x64"),
    pytest.param((64, 64), id="64x64"),
]
SHAPES = [
    pytest.param({"q_length": 1024, "heads": 8, "kv_heads": 2, "dim": 128}, id="d128"),
    pytest.param({"q_length": 777, "heads": 9, "kv_heads": 3, "dim": 64}, id="d64-odd-group-3"),
    pytest.param({"q_length": 63, "heads": 4, "kv_heads": 4, "dim": 64}, id="below-one-block"),
    pytest.param(
        {"q_length": 300, "kv_length": 1111, "heads": 4, "kv_heads": 1, "dim": 64}, id="chunk"
    ),
    pytest.param({"q_length": 900, "heads": 2, "kv_heads": 2, "dim": 256}, id="d256"),
    pytest.param(
        {"q_length": 500, "heads": 4, "kv_heads": 2, "dim": 96, "batch": 2}, id="d96-batch"
    ),
]


def move_with_model_strides(device, tensors, dtype):
    """Return tensors [B, H, N, D] on a device, as transposed views of [B, N, H, D] like a model."""
    return [x.transpose(1, 2).to(device, dtype).transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_output_matches_reference(gpu, shape, block_sizes):
    q, k, v = move_with_model_strides(gpu, draw_qkv(**shape), torch.bfloat16)
    plan = make_random_plan(q, k, block_sizes)
    assert_valid_plan(plan)
    scale = q.shape[-1] ** -0.5
    with torch.no_grad():
        actual = flex.attention(q, k, v, plan, scale=scale)

    def compute_expected(q, k, v):
        return reference.attention(q, k, v, plan, scale=scale)

    assert_within_budget(actual, compute_expected, q, k, v)


@pytest.mark.parametrize("block_sizes", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_flex_gradients_match_reference(gpu, shape, block_sizes):
    q, k, v = move_with_model_strides(gpu, draw_qkv(**shape), torch.bfloat16)
    plan = make_random_plan(q, k, block_sizes)
    scale = q.shape[-1] ** -0.5
    output_gradient = torch.randn(
        q.shape, device=gpu, generator=torch.Generator(gpu).manual_seed(1)
    )

    def make_gradient_function(tensor_index, attend):
        """Return a function that maps q, k and v to the gradient of tensor ``tensor_index``."""

        def compute_gradient(q, k, v):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            out = attend(leaves[0], leaves[1], leaves[2], plan, scale=scale)
            (out * output_gradient.to(leaves[0].dtype)).sum().backward()
            return leaves[tensor_index].grad

        return compute_gradient

    for i in range(3):
        actual = make_gradient_function(i, flex.attention)(q, k, v)
        assert_within_budget(actual, make_gradient_function(i, reference.attention), q, k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_full_budget_equals_sdpa(gpu, dtype):
    model = make_tiny_model().to(gpu, dtype)
    ids = draw_token_ids(2, 300).to(gpu)
    mask = torch.ones_like(ids)
    mask[0, :33] = 0
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        with cab_hf.cab(model, FULL_BUDGET_CONFIG, query_block=128, key_block=64, engine="flex"):
            actual = model(input_ids=ids, attention_mask=mask).logits
    is_real_token = mask.bool()
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert (actual - expected)[is_real_token].abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("family", ["granite-swa", "gemma2", "llama4"])
def test_full_budget_has_the_gradients_of_dense_attention(gpu, family):
    """Compare families with sinks, soft caps and chunked attention, on the default engine."""
    model, ids = make_tiny_model(family).to(gpu), draw_token_ids(2, 400).to(gpu)
    expected = compute_gradients(model, ids)
    actual = compute_gradients(
        cab_hf.apply_cab(model, FULL_BUDGET_CONFIG, query_block=128, key_block=64), ids
    )
    for actual_gradient, expected_gradient in zip(actual, expected, strict=True):
        assert (
            actual_gradient - expected_gradient
        ).abs().max() <= 2e-3 * expected_gradient.abs().max()


def test_many_lengths_stay_sparse_past_recompile_limit(gpu):
    """Exceed dynamo's recompile limit, after which uncompiled FlexAttention would ignore lists."""
    for length in range(130, 1800, 110):
        q, k, v = move_with_model_strides(
            gpu, draw_qkv(q_length=length, heads=4, kv_heads=2, dim=64), torch.bfloat16
        )
        plan = make_random_plan(q, k, (128, 64), selection_probability=0.1)
        with torch.no_grad():
            actual = flex.attention(q, k, v, plan, scale=0.125)

        def compute_expected(q, k, v, plan=plan):
            return reference.attention(q, k, v, plan, scale=0.125)

        assert_within_budget(actual, compute_expected, q, k, v)


@pytest.mark.parametrize(
    "config",
    [
        CabConfig(),
        CabConfig(mass_threshold=0.01),
        CabConfig(outlier_queries=0),
        CabConfig.published(0.8),
    ],
    ids=["cab", "few-blocks", "typical-queries-only", "published"],
)
def test_gpu_selects_same_blocks_as_cpu(gpu, config):
    q, k, _ = draw_qkv(q_length=2000, heads=8, kv_heads=2, dim=64)
    predictor = make_predictor(config)

    def select_blocks_on(device):
        layer_context = LayerContext(KeyRanges.causal(1, 2000, 2000, device), 0.125)
        return predictor(q.to(device), k.to(device), layer_context).to_dense().cpu()

    assert (select_blocks_on("cpu") != select_blocks_on(gpu)).float().mean() <= 1e-3


def test_full_budget_with_static_cache_generates_dense_tokens(gpu):
    model = make_tiny_model().to(gpu)
    ids = draw_token_ids(2, 200).to(gpu)
    generate_options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **generate_options)
    with cab_hf.cab(model, FULL_BUDGET_CONFIG):
        assert model.generate(ids, **generate_options).tolist() == expected.tolist()


def test_compiled_model_equals_eager_model(gpu):
    model = make_tiny_model().to(gpu)
    ids = draw_token_ids(1, 300).to(gpu)
    with torch.no_grad(), cab_hf.cab(model, SPARSE_CONFIG, query_block=128, key_block=64):
        expected = model(ids).logits
        actual = torch.compile(model, fullgraph=True)(ids).logits
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)


def test_memory_at_131072_tokens_is_below_12_gib(gpu):
    """One LLaMA-3-8B layer with selection needs less than 12 GiB in addition to its inputs."""
    length = 131_072
    tensor_options = {"device": gpu, "dtype": torch.bfloat16}
    q = torch.randn((1, 32, length, 128), **tensor_options)
    k, v = torch.randn((2, 1, 8, length, 128), **tensor_options)
    torch.cuda.reset_peak_memory_stats()
    input_bytes = torch.cuda.memory_allocated()
    with torch.no_grad():
        layer_context = LayerContext(KeyRanges.causal(1, length, length, gpu), 128**-0.5)
        plan = RowsPredictor(CabConfig())(q, k, layer_context)
        workload = engines.Workload.from_tensors(q, k, v, plan.blocks)
        out = engines.choose("flex", workload).attention(q, k, v, plan, scale=128**-0.5)
    assert torch.isfinite(out).all()
    assert (torch.cuda.max_memory_allocated() - input_bytes) / 2**30 < 12


# channels with the lowest RoPE frequencies
SLOW_CHANNELS = (*range(32, 64), *range(96, 128))


@pytest.mark.parametrize("magnitude", [1e-4, 0.25, 1.0, 110.0, 1500.0, 1e4], ids=str)
def test_fp8_score_sums_are_finite_at_any_norm(gpu, magnitude):
    """A float16 sum of 256 products must not overflow.

    Scaled queries have norm 8, and channels of scaled keys are below 2^8. All products have the
    same sign here, which gives the largest possible sum.
    """
    q = torch.full((1, 2, 512, 128), magnitude, device=gpu, dtype=torch.bfloat16)
    k = q[:, :1].clone()
    # key block 2 has larger norms than all others
    k[:, :, 128:192] *= 1.15
    key_ranges = KeyRanges.causal(1, 512, 512, gpu)
    config = CabConfig(dense_tail_blocks=0, sink_blocks=0, local_blocks=1, mass_threshold=0.08)
    plan = RowsPredictor(config)(q, k, LayerContext(key_ranges, 1 / (magnitude**2), 0))
    assert_valid_plan(plan)
    is_selected = plan.to_dense()
    assert is_selected[:, :, 3, 2].all()
    # all other blocks have equal logits: only block 2 is selected besides two forced blocks
    assert is_selected[:, :, 3].sum(-1).max() <= 2 + 1


NUM_NEEDLES = 64


def plant_needles(device, length=16384):
    """Return q, k and the index tensors (head, query, key) of planted needles.

    Each of the `NUM_NEEDLES` needle queries has one key with a much larger logit than other keys.
    """
    q, k = draw_topic_qk(device, length=length, dtype=torch.float32)
    # clamp, so that values are finite in float16 after a multiplication by 1e4
    q, k = q.clamp(-6, 6), k.clamp(-6, 6)
    generator = torch.Generator(device).manual_seed(1)
    needle_vectors = torch.zeros(NUM_NEEDLES, 128, device=device)
    needle_vectors[:, SLOW_CHANNELS] = (
        3 * torch.randn(NUM_NEEDLES, 64, device=device, generator=generator).sign()
    )
    needle_indices = torch.arange(NUM_NEEDLES, device=device)
    head_indices = needle_indices % q.shape[1]
    # use query blocks within one run of similar tokens, so that the needle is their only outlier
    window_starts = torch.arange(length // 2, length - 256, 128, device=device)
    window_starts = window_starts[window_starts // 300 == (window_starts + 127) // 300]
    query_indices = window_starts[needle_indices // 2 % len(window_starts)] + needle_indices
    key_indices = 200 + needle_indices * (length // 2 - 500) // NUM_NEEDLES
    q[0, head_indices, query_indices], k[0, head_indices // 4, key_indices] = (
        needle_vectors,
        needle_vectors,
    )
    return q, k, (head_indices, query_indices, key_indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_keys_of_any_magnitude_are_selected_at_equal_density(gpu, dtype):
    q, k, (head_indices, query_indices, key_indices) = plant_needles(gpu)
    key_ranges, config = KeyRanges.causal(1, k.shape[2], k.shape[2], gpu), CabConfig()
    layer_context = LayerContext(key_ranges, 128**-0.5, 0, channels=SLOW_CHANNELS)
    needle_blocks = (
        head_indices,
        query_indices // config.query_block,
        key_indices // config.key_block,
    )

    def select_blocks(key_factor):
        plan = RowsPredictor(config)(
            (q / key_factor).to(dtype), (k * key_factor).to(dtype), layer_context
        )
        return plan.to_dense()[0]

    expected = select_blocks(1.0)
    assert expected[needle_blocks].all()
    for key_factor in (1e-4, 1e-3, 1e3, 1e4):
        actual = select_blocks(key_factor)
        assert actual[needle_blocks].all(), key_factor
        assert int(actual.sum()) == pytest.approx(int(expected.sum()), rel=0.03)
    # a power of two changes exponents only, so that the selection must be identical
    for key_factor in (2.0**-13, 2.0**13) if dtype == torch.bfloat16 else ():
        assert torch.equal(select_blocks(key_factor), expected)


# `SPARSE_CONFIG` with the default block sizes on a GPU
LARGE_BLOCKS_CONFIG = replace(SPARSE_CONFIG, query_block=128, key_block=64, outlier_queries=16)
GREEDY_OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def generate_first_logits(model, ids, **generate_options):
    """Return the logits of the first two generated tokens, [B, 2, vocabulary]."""
    output_options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 2}
    mask = (ids != 0).long()
    result = model.generate(
        ids, attention_mask=mask, **GREEDY_OPTIONS, **output_options, **generate_options
    )
    return torch.stack(result.logits, dim=1)


@pytest.mark.parametrize("length", [600, 1000, 1153, 1281, 1536])
@pytest.mark.parametrize("num_tail_blocks", [1, 2])
def test_chunks_of_whole_query_blocks_equal_one_call(gpu, length, num_tail_blocks):
    model = cab_hf.apply_cab(
        make_tiny_model().to(gpu), replace(LARGE_BLOCKS_CONFIG, dense_tail_blocks=num_tail_blocks)
    )
    ids = draw_token_ids(1, length).to(gpu)
    actual = generate_first_logits(model, ids, prefill_chunk_size=256)
    torch.testing.assert_close(actual, generate_first_logits(model, ids), rtol=2e-3, atol=2e-3)


def test_query_blocks_start_at_first_token_of_sequence(gpu):
    config = replace(LARGE_BLOCKS_CONFIG, dense_tail_blocks=0)
    model = cab_hf.apply_cab(make_tiny_model(num_hidden_layers=1).to(gpu), config)
    ids, cache = draw_token_ids(1, 1024).to(gpu), DynamicCache(config=model.config)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 256:]
        model(ids[:, :200], past_key_values=cache, use_cache=True)
        actual = model(ids[:, 200:], past_key_values=cache, use_cache=True).logits[:, 56:]
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("config_fields", [{}, {"sparse_decode": True, "decode_tokens": 0.05}])
def test_draft_tokens_do_not_change_generated_tokens(gpu, config_fields):
    model = cab_hf.apply_cab(
        make_tiny_model().to(gpu), replace(LARGE_BLOCKS_CONFIG, **config_fields)
    )
    for seed in range(8):
        ids = draw_token_ids(1, 200, seed=seed).repeat(1, 5)[:, : 700 + 31 * seed].to(gpu)
        generate_options = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 12,
            **GREEDY_OPTIONS,
        }
        expected = model.generate(ids, **generate_options)
        assert torch.equal(
            model.generate(ids, **generate_options, prompt_lookup_num_tokens=5), expected
        )


CACHE_CASES = [
    pytest.param({}, id="dynamic"),
    pytest.param({"cache_implementation": "static", "disable_compile": True}, id="static"),
]


@pytest.mark.parametrize("cache_options", CACHE_CASES)
def test_padded_row_equals_single_row(gpu, cache_options):
    config_fields = {
        "min_length": 900,
        "sparse_decode": True,
        "decode_tokens": 128,
        "mass_threshold": 0.0,
    }
    model = cab_hf.apply_cab(make_tiny_model().to(gpu), config_fields)
    prompts = draw_token_ids(1, 500).to(gpu), draw_token_ids(1, 1300, seed=2).to(gpu)
    ids = torch.cat([torch.nn.functional.pad(prompts[0], (800, 0)), prompts[1]])
    batch_logits = generate_first_logits(model, ids, **cache_options)
    for row, prompt in enumerate(prompts):
        single_logits = generate_first_logits(model, prompt, **cache_options)
        torch.testing.assert_close(batch_logits[row], single_logits[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("cache_options", CACHE_CASES)
def test_row_below_min_length_is_dense_in_chunks_before_its_right_padding(gpu, cache_options):
    config_fields = {"min_length": 900, "mass_threshold": 0.6, "share_threshold": 1.0}
    model = cab_hf.apply_cab(
        make_tiny_model().to(gpu), replace(LARGE_BLOCKS_CONFIG, **config_fields)
    )
    short_prompt, logits_of_chunks = draw_token_ids(1, 800).to(gpu), []
    ids = torch.cat(
        [torch.nn.functional.pad(short_prompt, (0, 800)), draw_token_ids(1, 1600, seed=2).to(gpu)]
    )
    with torch.no_grad():
        expected = model(short_prompt).logits
    hook_handle = model.lm_head.register_forward_hook(
        lambda module, args, out: logits_of_chunks.append(out)
    )
    generate_first_logits(model, ids, prefill_chunk_size=256, logits_to_keep=0, **cache_options)
    hook_handle.remove()
    actual = torch.cat(logits_of_chunks, 1)[:1, :800]
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)
