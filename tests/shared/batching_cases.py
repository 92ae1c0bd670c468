"""Prompts, settings and helper functions for tests of continuous batching."""

import dataclasses

import torch
import transformers
from tiny import FULL_BUDGET_CONFIG, SPARSE_CONFIG, draw_token_ids
from transformers import ContinuousBatchingConfig, GenerationConfig

import cab_hf
from cab_hf import dispatch

GREEDY_GENERATION_CONFIG = GenerationConfig(
    max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=2
)
BLOCK_TABLE_OPTIONS = {"max_blocks_per_request": 64}  # turns on block tables in decode steps
LOW_THRESHOLD_CONFIG = dataclasses.replace(SPARSE_CONFIG, mass_threshold=0.08, outlier_queries=0)
# arguments of `make_batching_config` by test id
BATCHING_OPTIONS = {
    "at-once": {},
    "chunks": {"max_batch_tokens": 96},
    "pages": BLOCK_TABLE_OPTIONS,
    "chunks-pages": {"max_batch_tokens": 96, **BLOCK_TABLE_OPTIONS},
}
SHARED_PREFIX = draw_token_ids(1, 128, seed=9)[0].tolist()
PROMPTS = [
    draw_token_ids(1, prompt_length, seed=prompt_length)[0].tolist()
    for prompt_length in (20, 300, 150, 77, 1)
]
PROMPTS += [
    SHARED_PREFIX + draw_token_ids(1, 40 + prompt_index, seed=prompt_index)[0].tolist()
    for prompt_index in range(3)
]


def make_batching_config(**changed_fields):
    """Return a `ContinuousBatchingConfig` of small sizes, except for ``changed_fields``."""
    return ContinuousBatchingConfig(
        **{"num_blocks": 400, "page_size": 16, "max_batch_tokens": 4096, **changed_fields}
    )


def generate_batched(model, prompts=PROMPTS, **changed_fields):
    """Generate with continuous batching; return the list of generated tokens of each prompt."""
    answers = model.generate_batch(
        prompts, GREEDY_GENERATION_CONFIG, make_batching_config(**changed_fields), warmup=False
    )
    return [answer.generated_tokens for answer in answers.values()]


def generate_one_by_one(model, prompts=PROMPTS):
    """Generate for one prompt at a time; return the list of generated tokens of each prompt."""
    return [
        model.generate(torch.tensor([prompt]), generation_config=GREEDY_GENERATION_CONFIG)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def apply_config(model, config=FULL_BUDGET_CONFIG):
    """Apply ``config`` to ``model`` with `apply_cab`, and return the model."""
    return cab_hf.apply_cab(model, config)


def list_attention_implementations(model):
    """Return a list of attention implementations: of ``model`` and of the models inside it."""
    modules = [
        module for module in model.modules() if isinstance(module, transformers.PreTrainedModel)
    ]
    return [module.config._attn_implementation for module in modules]


def start_manager(model):
    """Start a continuous batching manager of ``model`` and return the manager."""
    manager = model.init_continuous_batching(GREEDY_GENERATION_CONFIG, make_batching_config())
    manager.start()
    return manager


def record_routes(monkeypatch):
    """Return a list to which every call of `dispatch.route` appends (mask, route)."""
    routes, original_route = [], dispatch.route

    def record_route(mask, config, work, **options):
        routes.append((mask, original_route(mask, config, work, **options)))
        return routes[-1][1]

    monkeypatch.setattr(dispatch, "route", record_route)
    return routes
