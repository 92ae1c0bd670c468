"""Masks: padding with a KV cache, bidirectional patterns, and models that change masks."""

import copy

import pytest
import torch
import transformers
from tiny import FULL_BUDGET_CONFIG, draw_token_ids, make_tiny_model
from tiny_types import make_tiny_model as make_model_of_type
from transformers import BertConfig
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

import cab_hf
from cab_hf.call.hook import cab_mask
from cab_hf.eval.kv_cache import make_cache_arguments, read_with_cache


@pytest.fixture(scope="module")
def model():
    """Return a tiny LLaMA with "cab" at full budget."""
    return cab_hf.apply_cab(make_tiny_model(), FULL_BUDGET_CONFIG)


NUM_CACHED_TOKENS = 200  # tokens in the cache before a call with 60 tokens


def compute_logits_after_cache(model, mask, cache_kind="dynamic"):
    """Prefill 200 tokens, and return the logits of 60 more tokens with the attention mask ``mask``.

    ``cache_kind`` is the kind of the cache, "dynamic" or "static".
    """
    ids = draw_token_ids(2, 260)
    cache = transformers.DynamicCache(config=model.config)
    if cache_kind == "static":
        cache = transformers.StaticCache(model.config, max_cache_len=400)
    read_with_cache(model, ids[:, :NUM_CACHED_TOKENS], cache)
    return read_with_cache(model, ids[:, NUM_CACHED_TOKENS:], cache, attention_mask=mask).logits


# slices of a mask [B, 260] that leave out tokens, which makes the mask too short
SHORT_MASK_SLICES = [
    pytest.param(slice(NUM_CACHED_TOKENS, 260), id="new-tokens"),
    pytest.param(slice(0, NUM_CACHED_TOKENS), id="cached-tokens"),
    pytest.param(slice(0, 259), id="one-missing"),
]


@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@pytest.mark.parametrize("mask_slice", SHORT_MASK_SLICES)
@torch.no_grad()
def test_padding_mask_shorter_than_cache_and_call_raises(model, mask_slice, cache_kind):
    mask = torch.ones(2, 260, dtype=torch.int64)
    mask[0, :7] = 0
    compute_logits_after_cache(model, mask, cache_kind)
    error_pattern = (
        f"attention_mask has {mask[:, mask_slice].shape[1]} tokens and there are 260 keys"
    )
    with pytest.raises(ValueError, match=error_pattern):
        compute_logits_after_cache(model, mask[:, mask_slice], cache_kind)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("cache_kind", ["dynamic", "static"])
@torch.no_grad()
def test_decode_loop_without_extended_mask_raises(model, cache_kind, is_compiled):
    cache = transformers.DynamicCache(config=model.config)
    if cache_kind == "static":
        cache = transformers.StaticCache(model.config, max_cache_len=400)
    ids, mask = draw_token_ids(2, 60), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :7] = 0
    read_with_cache(model, ids, cache, attention_mask=mask)
    decode_step = torch.compile(model, backend="eager") if is_compiled else model
    with pytest.raises((ValueError, NotImplementedError), match="attention_mask has 60 tokens"):
        decode_step(ids[:, :1], attention_mask=mask, **make_cache_arguments(model, cache))


@pytest.mark.parametrize("num_padding_tokens", [0, 20])
@torch.no_grad()
def test_gpt2_with_static_cache_generates_dense_tokens(num_padding_tokens):
    model, ids = make_model_of_type("gpt2"), draw_token_ids(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :num_padding_tokens] = 0

    def generate_logits():
        return model.generate(
            input_ids=ids,
            attention_mask=mask,
            cache_implementation="static",
            max_new_tokens=3,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        ).logits

    expected = generate_logits()
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG)
    torch.testing.assert_close(generate_logits(), expected, rtol=1e-4, atol=1e-4)


def make_prefix_model():
    """Return an HRM model with "cab", which attends bidirectionally among tokens of type 1."""
    depth_fields = {"num_layers_per_stack": 1, "num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1}
    return cab_hf.apply_cab(
        make_model_of_type("hrm_text", **depth_fields, L_bp_cycles=[1]), FULL_BUDGET_CONFIG
    )


def make_prefix_inputs(prefix_length):
    """Return inputs whose first ``prefix_length`` tokens attend to each other."""
    token_types = (torch.arange(64) < prefix_length).long()[None]
    return {"input_ids": draw_token_ids(1, 64), "token_type_ids": token_types, "use_cache": False}


# by name: function that returns the logits of a model, eager or compiled
GRAPH_MODES = {
    "eager": lambda model, inputs: model(**inputs).logits,
    "compiled": lambda model, inputs: torch.compile(model, backend="eager")(**inputs).logits,
    "traced": lambda model, inputs: torch.compile(model, backend="aot_eager")(**inputs).logits,
    "exported": lambda model, inputs: (
        torch.export.export(model, (), inputs, strict=False).module()(**inputs).logits
    ),
}


@pytest.mark.parametrize("compute_logits", GRAPH_MODES.values(), ids=GRAPH_MODES)
@torch.no_grad()
def test_bidirectional_prefix_raises_in_every_graph_mode(compute_logits):
    with pytest.raises(NotImplementedError, match="lets tokens attend to later tokens"):
        compute_logits(make_prefix_model(), make_prefix_inputs(30))


@pytest.mark.parametrize("compute_logits", GRAPH_MODES.values(), ids=GRAPH_MODES)
@torch.no_grad()
def test_prefix_model_without_prefix_equals_sdpa(compute_logits):
    model = make_prefix_model()
    actual = compute_logits(model, make_prefix_inputs(0))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(actual, model(**make_prefix_inputs(0)).logits, rtol=1e-4, atol=1e-4)


def make_mask_with_image(image_slots, q_offset, q_length=8):
    """Return the mask of a call with ``q_length`` tokens after ``q_offset`` cached tokens.

    ``image_slots`` is the slice of image tokens, which attend to each other in both directions.
    """
    image_ids = torch.full((1, 16), -1)
    image_ids[:, image_slots] = 0
    mask_function = or_masks(causal_mask_function, blockwise_overlay(image_ids))
    kv_length = q_offset + q_length
    return cab_mask(
        1, q_length, kv_length, q_offset, mask_function=mask_function, config=BertConfig()
    )


def test_bidirectional_image_tokens_are_searched_in_queries_only():
    assert make_mask_with_image(slice(2, 5), q_offset=8).details.unsupported_error is None
    assert (
        "attend to later tokens"
        in make_mask_with_image(slice(10, 12), q_offset=8).details.unsupported_error
    )
    assert (
        "attend to later tokens"
        in make_mask_with_image(slice(2, 5), q_offset=0).details.unsupported_error
    )


def test_window_of_multimodal_mask_is_detected_without_image():
    # Gemma 3 has this bidirectional mask function even if the prompt contains no image
    image_ids = torch.full((1, 60), -1)
    mask_function = and_masks(
        or_masks(causal_mask_function, blockwise_overlay(image_ids)), sliding_window_overlay(7)
    )
    mask_options = {"mask_function": mask_function, "use_vmap": True, "config": BertConfig()}
    mask = cab_mask(1, 60, 60, **mask_options)
    assert mask.details.unsupported_error is None and mask.window == 7
    image_ids[:, 3:9] = 0
    assert "attend to later tokens" in cab_mask(1, 60, 60, **mask_options).details.unsupported_error


@pytest.mark.parametrize(
    "use_mask",
    [
        pytest.param(lambda mask: mask[:, 0], id="index"),
        pytest.param(lambda mask: mask.dtype, id="dtype"),
        pytest.param(lambda mask: mask.to(torch.bool), id="method"),
        pytest.param(lambda mask: mask.shape[-1], id="size"),
        pytest.param(lambda mask: dict(zip("bhqk", mask.shape, strict=True)), id="sizes"),
        pytest.param(lambda mask: torch.zeros(2, 2) + mask, id="added-to-a-tensor"),
        pytest.param(lambda mask: mask + torch.zeros(2, 2), id="adds-a-tensor"),
        pytest.param(lambda mask: 1.0 - mask, id="subtracted"),
        pytest.param(lambda mask: mask & True, id="and"),
        pytest.param(lambda mask: ~mask, id="not"),
        pytest.param(lambda mask: mask > 0, id="compared"),
        pytest.param(lambda mask: torch.where(mask, 0.0, 1.0), id="torch"),
        pytest.param(lambda mask: torch.zeros(2).masked_fill(mask, 1.0), id="torch-method"),
        pytest.param(lambda mask: 0.0 in mask, id="searched"),
    ],
)
def test_model_code_that_computes_with_its_mask_raises(use_mask):
    mask = cab_mask(1, 8, 8, config=transformers.DogeConfig())
    with pytest.raises(NotImplementedError, match="^doge computes with its attention mask .*eager"):
        use_mask(mask)


def test_mask_lacks_tensor_methods_and_can_be_copied():
    mask = cab_mask(1, 8, 8)
    assert not hasattr(mask, "to") and mask.ndim == len(mask.shape) == 4
    assert copy.deepcopy(mask).kv_length == copy.copy(mask).kv_length == 8
