"""Continuous batching on a CUDA device: paged decode kernels and CUDA graphs."""

import pytest
import torch
from tiny import draw_token_ids, make_tiny_model
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

import cab_hf
from cab_hf.batching import support

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not support.transformers_passes_paged_cache(), reason="needs transformers 5.19 or newer"
    ),
]
GREEDY_CONFIG = GenerationConfig(max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=2)
PROMPTS = [draw_token_ids(1, length, seed=length)[0].tolist() for length in (20, 900, 300, 77, 1)]
# options of `ContinuousBatchingConfig` by test id
BATCHING_FIELDS = {
    "at-once": {},
    "chunks": {"max_batch_tokens": 256},
    "without-pages": {"max_blocks_per_request": 0},
    "without-graphs": {"use_cuda_graph": False},
    "asynchronous": {"use_async_batching": True},
}


@pytest.fixture
def model_and_answers(gpu):
    """Return (model with "cab" at full budget, generated tokens by dense attention per prompt)."""
    model = make_tiny_model(head_dim=64).to(gpu)
    expected = [
        model.generate(torch.tensor([prompt], device=gpu), generation_config=GREEDY_CONFIG)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]
    return cab_hf.apply_cab(model, min_length=0, mass_threshold=0.0), expected


def generate_answers(model, **batching_fields):
    """Return the tokens that continuous batching generates for each of `PROMPTS`.

    ``batching_fields`` are fields of `ContinuousBatchingConfig`.
    """
    batching_options = {
        "num_blocks": 400,
        "page_size": 16,
        "max_batch_tokens": 4096,
        **batching_fields,
    }
    result = model.generate_batch(
        PROMPTS, GREEDY_CONFIG, ContinuousBatchingConfig(**batching_options)
    )
    return [answer.generated_tokens for answer in result.values()]


@pytest.mark.parametrize("batching_fields", BATCHING_FIELDS.values(), ids=BATCHING_FIELDS)
def test_full_budget_equals_dense_attention(model_and_answers, batching_fields):
    model, expected = model_and_answers
    assert generate_answers(model, **batching_fields) == expected


def test_buffers_are_reset_before_first_batch(model_and_answers, monkeypatch):
    """Delay the reset of buffers: transformers resets them on one stream and fills on another."""
    model, expected = model_and_answers
    original_reset = ContinuousBatchingIOs.reset

    def reset_with_delay(self):
        if self.device.type == "cuda":
            torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
        original_reset(self)

    monkeypatch.setattr(ContinuousBatchingIOs, "reset", reset_with_delay)
    assert generate_answers(model, use_async_batching=True) == expected
