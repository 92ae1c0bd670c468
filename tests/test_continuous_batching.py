"""Continuous batching: refused for a model on "cab", and the same as ever for any other."""

import pytest
import torch
import transformers
from tiny import tiny_model, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import continuous_api

import cab_hf

GREEDY = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
SMALL = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
PROMPTS = tokens(2, 20).tolist()


def tiny_llava():
    vision = transformers.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=tiny_model().config, image_token_index=3
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def implementations(model):
    modules = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return [module.config._attn_implementation for module in modules]


def batch(model):
    return model.generate_batch(PROMPTS, GREEDY, SMALL, warmup=False)


def in_a_context(model):
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=SMALL):
        pass


WAYS = {
    "generate_batch": batch,
    "init_continuous_batching": lambda model: model.init_continuous_batching(GREEDY, SMALL),
    "context": in_a_context,
    "manager": lambda model: continuous_api.ContinuousBatchingManager(model, GREEDY, SMALL),
    "generate": lambda model: model.generate(
        torch.tensor(PROMPTS), cache_implementation="paged", max_new_tokens=2
    ),
}


@pytest.fixture
def flash_is_there(monkeypatch):
    """transformers then switches to flash attention any model that is not on it."""
    monkeypatch.setattr(continuous_api, "is_flash_attn_3_available", lambda **_: True)
    monkeypatch.setattr(
        transformers.PreTrainedModel,
        "set_attn_implementation",
        lambda *_: pytest.fail("the model was switched"),
    )


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("build", [tiny_model, tiny_llava], ids=["text", "vision-language"])
def test_a_model_on_cab_is_refused_before_anything_is_switched(build, way, request):
    model = cab_hf.apply_cab(build(), min_length=0)
    before = implementations(model)
    request.getfixturevalue("flash_is_there")
    sentence = "has attn_implementation='cab'.*load it with another attn_implementation"
    with pytest.raises(NotImplementedError, match=sentence):
        way(model)
    assert "cab" in before and implementations(model) == before


def test_exact_attention_by_our_name_is_refused_too():
    model = tiny_model()
    model.set_attn_implementation("cab_dense")
    with pytest.raises(NotImplementedError, match="has attn_implementation='cab_dense'"):
        batch(model)


def test_a_model_on_another_implementation_is_served():
    model = tiny_model()
    meant = [
        model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        for prompt in PROMPTS
    ]
    assert [result.generated_tokens for result in batch(model).values()] == meant
    cab_hf.apply_cab(model, min_length=0)
    cab_hf.remove_cab(model)
    assert [result.generated_tokens for result in batch(model).values()] == meant


def test_cab_is_not_switched_on_under_a_running_manager():
    model = tiny_model()
    manager = model.init_continuous_batching(GREEDY, SMALL)
    manager.start()
    try:
        with pytest.raises(NotImplementedError, match="continuous batching runs on LlamaForCausal"):
            cab_hf.apply_cab(model)
        assert model.config._attn_implementation == "sdpa"
    finally:
        manager.stop()
    assert cab_hf.apply_cab(model, min_length=0).config._attn_implementation == "cab"
    with pytest.raises(NotImplementedError, match="has attn_implementation='cab'"):
        manager.start()
