"""Sparse decode on a CUDA device: kernels, CUDA graphs and models, compared with references."""

import pytest
import torch
from decode_cases import (
    STEP_CASES,
    assert_dense_step_equals_sdpa,
    assert_step_equals_reference,
    make_step_inputs,
    make_step_masks,
)
from tiny import draw_token_ids, make_tiny_model
from transformers import StaticCache

import cab_hf
from cab_hf.decode import step
from cab_hf.ops import decode
from cab_hf.ops.decode import kernels, reference

pytestmark = pytest.mark.gpu
# longer cases in the format of `decode_cases.STEP_CASES`
LONG_CASES = {
    "long": (32, 8, 16384, 16000, 128, 128, 1024, {}),
    "longer-of-3": (9, 3, 33000, 32800, 64, 64, 4096, {"padding": 3000}),
}
ALL_CASES = STEP_CASES | LONG_CASES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ALL_CASES.values(), ids=ALL_CASES)
def test_step_matches_reference(gpu, case, dtype):
    assert_step_equals_reference(case, dtype, gpu)


def test_captured_step_follows_growing_cache(gpu):
    q, k, v, choose_args = make_step_inputs(LONG_CASES["long"], torch.bfloat16, gpu)
    scale, length, num_keys, channels, *_ = choose_args
    key_index = kernels.index_keys(k, channels)
    static_q = torch.empty_like(q)

    def compute_step_output():
        # the first kernel uses programmatic dependent launch, and must wait for this copy
        static_q.copy_(q)
        choice = decode.choose(
            static_q, key_index, scale=scale, length=length, num_keys=num_keys, channels=channels
        )
        return decode.attend(static_q, k, v, choice, scale=scale, length=length)

    side_stream = torch.cuda.Stream()
    with torch.cuda.stream(side_stream):
        compute_step_output()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute_step_output()
    for num_written_slots in (16000, 500, 9000, 16384):
        length.fill_(num_written_slots)
        graph.replay()
        assert torch.equal(out, compute_step_output())
        choice = reference.choose(
            q, key_index, scale=scale, length=length, num_keys=num_keys, channels=channels
        )
        expected = reference.attend(q, k, v, choice, scale=scale, length=length)
        assert (out - expected).float().norm() < 0.05 * expected.float().norm()


def test_steps_are_deterministic(gpu):
    q, k, v, choose_args = make_step_inputs(LONG_CASES["longer-of-3"], torch.bfloat16, gpu)
    scale, length, num_keys, channels, padding_mask, sinks = choose_args
    key_index = kernels.index_keys(k, channels)

    def compute_step_output():
        choice = kernels.choose(
            q,
            key_index,
            scale=scale,
            length=length,
            num_keys=num_keys,
            channels=channels,
            padding_mask=padding_mask,
            sinks=sinks,
        )
        return kernels.attend(
            q, k, v, choice, scale=scale, length=length, padding_mask=padding_mask
        )

    outs = [compute_step_output() for _ in range(3)]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_name", make_step_masks())
def test_dense_step_matches_rowwise_attention(gpu, monkeypatch, mask_name, dtype):
    assert_dense_step_equals_sdpa(make_step_masks(gpu)[mask_name], monkeypatch, dtype, gpu)


@pytest.mark.parametrize("cache_implementation", [None, "static"])
def test_reading_all_keys_generates_dense_tokens(gpu, monkeypatch, cache_implementation):
    monkeypatch.setattr(step, "min_sparse_tokens", lambda config: 0)
    model, ids = make_tiny_model(head_dim=64).to(gpu), draw_token_ids(2, 300).to(gpu)
    generate_options = {
        "max_new_tokens": 40,
        "do_sample": False,
        "cache_implementation": cache_implementation,
    }
    expected = model.generate(ids, **generate_options)
    cab_hf.apply_cab(model, min_length=2000, sparse_decode=True, decode_tokens=2000)
    assert torch.equal(model.generate(ids, **generate_options), expected)


def test_compiled_step_is_one_graph_and_equals_eager_step(gpu):
    model = cab_hf.apply_cab(
        make_tiny_model(head_dim=64).to(gpu), min_length=0, sparse_decode=True, decode_tokens=128
    )
    ids = draw_token_ids(2, 700).to(gpu)

    @torch.no_grad()
    def compute_logits(forward):
        cache = cab_hf.index_cache(model, StaticCache(model.config, max_cache_len=1024))
        step_logits = [model(ids[:, :660], past_key_values=cache).logits[:, -1:]]
        for i in range(660, 690):
            step_logits.append(forward(ids[:, i : i + 1], past_key_values=cache).logits.clone())
        return torch.cat(step_logits, dim=1)

    compiled_model = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    eager_logits = compute_logits(model)
    # compiled and eager code round scores differently, so one key more or less may be selected
    assert (compute_logits(compiled_model) - eager_logits).norm() < 1e-3 * eager_logits.norm()
