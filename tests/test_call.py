"""What the layers of one forward pass share: each is told who it is, and may hand plans on."""

import pytest
import torch
from tiny import FULL, SIZES, SPARSE, tiny_model, tokens
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

import cab_hf
from cab_hf.call import cab_mask
from cab_hf.predictors import CurvaturePredictor, register_predictor

DECIDED = []


class FirstLayerDecides(CurvaturePredictor):
    def summarise(self, k, valid=None):
        return k, valid

    def choose(self, q, summary, call):
        if "plan" not in call.handed:
            DECIDED.append(call.layer)
            call.handed["plan"] = super().choose(q, super().summarise(*summary), call)
        return call.handed["plan"]


register_predictor("first-layer-decides", FirstLayerDecides)


def test_a_plan_is_handed_from_layer_to_layer_and_not_to_the_next_pass():
    DECIDED.clear()
    model = tiny_model()
    with cab_hf.cab(model, SPARSE, predictor="first-layer-decides"), torch.no_grad():
        model(tokens(1, 300))
        densities = {row["density"] for row in cab_hf.stats(model, reset=True)}
        assert DECIDED == [0] and len(densities) == 1
        model(tokens(1, 300))
    assert DECIDED == [0, 0]


def test_a_layer_run_again_by_checkpointing_finds_what_was_handed():
    ids = tokens(1, 300)
    model = tiny_model().train()

    def gradients():
        DECIDED.clear()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with cab_hf.cab(model, SPARSE, predictor="first-layer-decides"):
        expected = gradients()
        model.gradient_checkpointing_enable()
        for found, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert DECIDED == [0]


@pytest.mark.parametrize("logits_to_keep", [0, 1, 20, 50])
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_the_last_queries_alone_are_asked_for_by_slicing_the_mask(logits_to_keep, implementation):
    """Gemma 4 does so before layers that share the keys of others."""
    sizes = SIZES | {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 40}
    config = Gemma4TextConfig(
        **sizes,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=16,
    )
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(config).eval()
    ids = tokens(2, 150)
    mask = (torch.arange(150) >= torch.tensor([[21], [0]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": logits_to_keep}
    with torch.no_grad():
        expected = model(**inputs).logits
        cab_hf.apply_cab(model, FULL)
        model.set_attn_implementation(implementation)
        found = model(**inputs).logits
    seen = mask[:, -logits_to_keep:].bool()
    torch.testing.assert_close(found[seen], expected[seen], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "index",
    [
        pytest.param((slice(None), slice(None), slice(2), slice(None)), id="first-queries"),
        pytest.param((slice(None), slice(None), slice(8, None), slice(None)), id="no-query"),
        pytest.param((slice(None), slice(None), slice(-4, None), slice(4)), id="fewer-keys"),
        pytest.param((slice(None), slice(None), slice(None, None, 2), slice(None)), id="stride"),
        pytest.param((slice(None), 0), id="a-head"),
    ],
)
def test_a_mask_is_sliced_to_its_last_queries_only(index):
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        cab_mask(1, 8, 8)[index]
