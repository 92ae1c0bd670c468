"""Write a predictor of your own: one class and one call of `cab_hf.register_predictor`.

    python examples/own_predictor.py

The predictor selects the key blocks whose keys have the largest mean norm, in addition to the
blocks that are always selected (sinks and neighbours). The predictor is a simple example, not a
good predictor. Registered predictors run in every model and every evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import cab_hf
from cab_hf import BlockPlan, CabConfig
from cab_hf.ops import reference
from cab_hf.plan import block_visibility
from cab_hf.predictors import LayerContext, Predictor


class LoudestBlocks(Predictor):
    """A predictor that selects a share of 1 - ``sparsity`` of the key blocks of each query block.

    The order of preference is the same for all queries: blocks of keys with large norms first.
    """

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return the mean norm of the keys of every block, [B, H_kv, M_k].

        Args:
            k: keys, [B, H_kv, N, D].
            valid: bool [B, N], False for padding keys; None without padding.
        """
        key_norms = k.float().norm(dim=-1)
        if valid is not None:
            key_norms = key_norms * valid.unsqueeze(1)
        return torch.stack(
            [block.mean(-1) for block in key_norms.split(self.config.key_block, -1)], -1
        )

    def choose(self, q: Tensor, summary: Tensor, layer_context: LayerContext) -> BlockPlan:
        """Return the plan of one layer: the key blocks that each query block attends to.

        Args:
            q: queries, [B, H, N, D].
            summary: the result of `encode_keys`, [B, H_kv, M_k].
            layer_context: the context of the layer, with the range of visible keys of every query.
        """
        config = self.config
        block_sizes = {"query_block": config.query_block, "key_block": config.key_block}
        is_visible = block_visibility(layer_context.ranges, **block_sizes)
        # bool [B, 1, M_q, M_k], key blocks that each query block always attends to
        is_forced = reference.forced_blocks(is_visible, layer_context.ranges, config).unsqueeze(1)
        is_visible = is_visible.unsqueeze(1)
        # [B, H, M_q, M_k]; the query heads of a group have the same key blocks
        block_scores = summary.repeat_interleave(q.shape[1] // summary.shape[1], dim=1)
        block_scores = block_scores.unsqueeze(2).expand(-1, -1, is_visible.shape[2], -1)
        num_blocks = reference.share_of_row(is_visible, 1 - config.sparsity)
        num_selected = num_blocks - is_forced.sum(-1, keepdim=True)
        is_selected = is_forced | reference.top_blocks(
            block_scores, is_visible & ~is_forced, num_selected
        )
        return BlockPlan.from_dense(is_selected, layer_context.ranges, **block_sizes)


cab_hf.register_predictor("loudest", LoudestBlocks)


def main() -> None:
    """Run a small model with random weights, and print the density of each layer."""
    torch.manual_seed(0)
    model_config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(model_config).eval()
    config = CabConfig(predictor="loudest", sparsity=0.8, min_length=0)
    with cab_hf.cab(model, config), torch.no_grad():
        print(cab_hf.describe(model, tokens=2048))
        model(torch.randint(256, (1, 2048)))
        for layer in cab_hf.stats(model):
            print(f"layer {layer['layer']}: {layer['density']:.3f} of the pairs attended")


if __name__ == "__main__":
    main()
