"""The pretrained model SmolLM2-135M: "cab" at full budget equals sdpa."""

import pytest
import torch

import cab_hf
from cab_hf import CabConfig
from cab_hf.eval.haystack import Haystack
from cab_hf.experiment.models import load_model

FULL_BUDGET_CONFIG = CabConfig(mass_threshold=0.0, min_length=0)


def measure_largest_logit_difference(device, prompt_length, engine):
    """Return max |logits of sdpa - logits of "cab" at full budget| for one prompt."""
    model, tokenizer = load_model("smollm2", device, "float32")
    prompt = Haystack(tokenizer, "noise", 1, None).make_prompt(prompt_length, 0.5, 0, seed=0)
    ids = torch.tensor([prompt.tokens], device=device)
    with torch.no_grad():
        expected = model(ids).logits
        with cab_hf.cab(model, FULL_BUDGET_CONFIG, engine=engine):
            actual = model(ids).logits
            assert all(layer_stats["density"] == 1 for layer_stats in cab_hf.stats(model))
    return (actual - expected).abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["reference", "flex"])
def test_full_budget_equals_sdpa_on_cpu(engine):
    assert measure_largest_logit_difference("cpu", 700, engine) <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["reference", "flex"])
@pytest.mark.parametrize("length", [1000, 4096])
def test_full_budget_equals_sdpa_on_cuda(gpu, engine, length, record_property):
    difference = measure_largest_logit_difference(gpu, length, engine)
    record_property("max |delta logits|", difference)
    assert difference <= 1e-3
