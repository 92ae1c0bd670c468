"""A predictor of one's own: one class, one call, and it runs in any model and any evaluation.

    python examples/own_predictor.py

Keeps what every row is forced to keep (sinks, neighbours) and the key blocks whose values of k are
largest on average: a crude guess, to show where a better one would stand.
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
    """The loudest key blocks, 1 - ``sparsity`` of a row, whatever the queries ask for."""

    def encode_keys(self, k: Tensor, valid: Tensor | None = None) -> Tensor:
        """Mean norm of the keys of every block, [B, H_kv, M_k]: all that choosing needs of k."""
        norms = k.float().norm(dim=-1)
        if valid is not None:
            norms = norms * valid.unsqueeze(1)
        return torch.stack([block.mean(-1) for block in norms.split(self.config.key_block, -1)], -1)

    def choose(self, q: Tensor, summary: Tensor, call: LayerContext) -> BlockPlan:
        config = self.config
        blocks = {"query_block": config.query_block, "key_block": config.key_block}
        visible = block_visibility(call.ranges, **blocks)
        forced = reference.forced_blocks(visible, call.ranges, config).unsqueeze(1)
        visible = visible.unsqueeze(1)
        # [B, H, M_q, M_k]: a query head has the keys of its group
        score = summary.repeat_interleave(q.shape[1] // summary.shape[1], dim=1)
        score = score.unsqueeze(2).expand(-1, -1, visible.shape[2], -1)
        count = reference.share_of_row(visible, 1 - config.sparsity)
        spare = count - forced.sum(-1, keepdim=True)
        keep = forced | reference.top_blocks(score, visible & ~forced, spare)
        return BlockPlan.from_dense(keep, call.ranges, **blocks)


cab_hf.register_predictor("loudest", LoudestBlocks)


def main() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    config = CabConfig(predictor="loudest", sparsity=0.8, min_length=0)
    with cab_hf.cab(model, config), torch.no_grad():
        print(cab_hf.describe(model, tokens=2048))
        model(torch.randint(256, (1, 2048)))
        for layer in cab_hf.stats(model):
            print(f"layer {layer['layer']}: {layer['density']:.3f} of the pairs attended")


if __name__ == "__main__":
    main()
