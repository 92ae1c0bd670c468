"""Configs of predictors from other publications, and the blocks that predictors select."""

import torch
from valid_plan import assert_valid_plan

import cab_hf
from cab_hf.eval.methods import blocks
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

SMALL_BLOCKS_CONFIG = cab_hf.CabConfig(
    min_length=0, query_block=32, key_block=16, dense_tail_blocks=1
)


def draw_qk(length, heads=6, kv_heads=2, dim=16, seed=0):
    """Return random q [1, H, N, D] and k [1, H_kv, N, D]."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(1, heads, length, dim, generator=generator)
    return q, torch.randn(1, kv_heads, length, dim, generator=generator)


def compute_eager_probabilities(q, k, scale):
    """Return the probabilities of causal attention, [1, H, N, N]."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    length = q.shape[2]
    is_future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(is_future, -torch.inf).softmax(-1)


def make_config(predictor_name, mass_share=None, **config_fields):
    """Return a config with predictor ``predictor_name``.

    ``mass_share`` is the share of blocks to select, by `blocks.with_mass_share`; None: the default
    budget.
    """
    config = SMALL_BLOCKS_CONFIG.changed(
        predictor=predictor_name, dense_tail_blocks=0, **config_fields
    )
    return config if mass_share is None else blocks.with_mass_share(config, mass_share)


def select_blocks(config, q, k):
    """Return the blocks that the predictor of ``config`` selects, bool [B, H, M_q, M_k]."""
    ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], "cpu")
    plan = make_predictor(config)(q, k, LayerContext(ranges, 0.25))
    assert_valid_plan(plan)
    return plan.to_dense()


# configs whose budgets leave blocks unselected, by predictor
RIVAL_CONFIGS = {
    "streaming": make_config("streaming", local_blocks=2),
    **{
        predictor_name: make_config(predictor_name, sparsity=0.6)
        for predictor_name in ("random", "oracle", "antidiagonal", "vertical_slash")
    },
    **{
        predictor_name: make_config(predictor_name, 0.5)
        for predictor_name in ("flexprefill", "mean_pooled", "xattention", "xattention_16")
    },
}
# predictors whose selection for any query depends on the last queries, as in their publications
LAST_QUERY_PREDICTORS = ("flexprefill", "random", "vertical_slash")
