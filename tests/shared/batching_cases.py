"""Prompts, settings and helper functions for tests of continuous batching."""

import dataclasses

import torch
import transformers
from tiny import FULL, SPARSE, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

import cab_hf
from cab_hf import dispatch

GREEDY = GenerationConfig(max_new_tokens=10, do_sample=False, pad_token_id=0, eos_token_id=2)
PAGES = {"max_blocks_per_request": 64}  # turns on block tables in decode steps
LOW = dataclasses.replace(SPARSE, mass_threshold=0.08, outlier_queries=0)
# arguments of `batching` by test id
WAYS = {
    "at-once": {},
    "chunks": {"max_batch_tokens": 96},
    "pages": PAGES,
    "chunks-pages": {"max_batch_tokens": 96, **PAGES},
}
BEGINNING = tokens(1, 128, seed=9)[0].tolist()
PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (20, 300, 150, 77, 1)]
PROMPTS += [BEGINNING + tokens(1, 40 + i, seed=i)[0].tolist() for i in range(3)]


def batching(**changes):
    """Return a `ContinuousBatchingConfig` of small sizes, except for the fields ``changes``."""
    return ContinuousBatchingConfig(
        **{"num_blocks": 400, "page_size": 16, "max_batch_tokens": 4096, **changes}
    )


def served(model, prompts=PROMPTS, **changes):
    """Generate with continuous batching; return the list of generated tokens of each prompt."""
    answers = model.generate_batch(prompts, GREEDY, batching(**changes), warmup=False)
    return [answer.generated_tokens for answer in answers.values()]


def generated(model, prompts=PROMPTS):
    """Generate for one prompt at a time; return the list of generated tokens of each prompt."""
    return [
        model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]


def on_cab(model, config=FULL):
    """Apply ``config`` to ``model`` with `apply_cab`, and return the model."""
    return cab_hf.apply_cab(model, config)


def implementations(model):
    """Return a list of attention implementations: of ``model`` and of the models inside it."""
    modules = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    return [module.config._attn_implementation for module in modules]


def managed(model):
    """Start a continuous batching manager of ``model`` and return the manager."""
    manager = model.init_continuous_batching(GREEDY, batching())
    manager.start()
    return manager


def routed(monkeypatch):
    """Return a list to which every call of `dispatch.route` appends (mask, route)."""
    routes, original = [], dispatch.route

    def recording_route(mask, config, work, **options):
        routes.append((mask, original(mask, config, work, **options)))
        return routes[-1][1]

    monkeypatch.setattr(dispatch, "route", recording_route)
    return routes
