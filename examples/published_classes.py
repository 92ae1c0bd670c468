"""Run the published CAB classes on random q and k, in which one logit is large.

    python examples/published_classes.py --out runs/published.png

One query in a late block and one key in an early block have the same direction and a large norm.
This pair of blocks, the bridge, has the largest logit of its query block. The additive formula
keeps the bridge. Forman curvature drops the bridge: blocks with the lowest curvature are kept, and
a large weight of an edge raises its curvature.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from cab_hf.layers import CABAttentionLayer
from cab_hf.predictors.published import (
    AdaptiveCurvaturePredictor,
    CoarseCurvaturePredictor,
    estimate_flops,
    visualize_frc_statistics,
)

# number of tokens, N
NUM_TOKENS = 2048
# tokens per block
BLOCK_TOKENS = 64
# number of heads, H
NUM_HEADS = 4
# channels per head, D
HEAD_DIM = 64
# (query block, key block) with the largest logit
BRIDGE_BLOCKS = (28, 5)
# norm of the query and the key in the bridge; random queries and keys have a norm of about 8
BRIDGE_NORM = 12.0


def draw_qk_with_bridge() -> tuple[Tensor, Tensor]:
    """Return random q and k, [1, H, N, D] each, with the bridge."""
    q, k = torch.randn((2, 1, NUM_HEADS, NUM_TOKENS, HEAD_DIM))
    bridge_direction = torch.nn.functional.normalize(torch.randn(HEAD_DIM), dim=0)
    for head_tensor, block_index in zip((q, k), BRIDGE_BLOCKS, strict=True):
        head_tensor[:, :, block_index * BLOCK_TOKENS + BLOCK_TOKENS // 2] = (
            BRIDGE_NORM * bridge_direction
        )
    return q, k


def print_density(predictor_name: str, is_kept: Tensor) -> None:
    """Print the density of the kept blocks, and the number of heads that keep the bridge.

    The module docstring defines the bridge.

    Args:
        predictor_name: name of the predictor.
        is_kept: bool [1, H, M, M], True for each (query block, key block) that the predictor keeps.
    """
    num_causal_blocks = is_kept.shape[-1] * (is_kept.shape[-1] + 1) // 2 * NUM_HEADS
    density = is_kept.sum().item() / num_causal_blocks
    num_heads_with_bridge = is_kept[0, :, BRIDGE_BLOCKS[0], BRIDGE_BLOCKS[1]].sum().item()
    print(
        f"{predictor_name:18} keeps {density:.3f} of the blocks, the bridge in "
        f"{num_heads_with_bridge} of {NUM_HEADS} heads"
    )


def main(arguments: list[str] | None = None) -> None:
    """Compare the predictors, draw the curvature, and train a layer for one step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/published.png"))
    output_path = parser.parse_args(arguments).out
    torch.manual_seed(0)

    q, k = draw_qk_with_bridge()
    for curvature_formula in ("forman", "additive"):
        predictor = CoarseCurvaturePredictor(BLOCK_TOKENS, sparsity=0.9, formula=curvature_formula)
        is_kept, diagnostics = predictor(q, k, return_diagnostics=True)
        print_density(curvature_formula, is_kept)
    print_density(
        "adaptive additive", AdaptiveCurvaturePredictor(BLOCK_TOKENS, formula="additive")(q, k)
    )
    output_path.parent.mkdir(parents=True, exist_ok=True)
    curvature, affinity, triangles = diagnostics
    visualize_frc_statistics(curvature, affinity, triangles, path=output_path)
    print(f"the additive curvature is drawn in {output_path}")
    for length in (32_768, 1_048_576):
        operations_ratio = estimate_flops(length, head_dim=128).saving
        print(f"{length:,} tokens: dense attention has {operations_ratio:.1f} times the operations")

    layer = CABAttentionLayer(NUM_HEADS * HEAD_DIM, NUM_HEADS, BLOCK_TOKENS, sparsity=0.9)
    hidden_states = torch.randn(1, NUM_TOKENS, NUM_HEADS * HEAD_DIM)
    layer(hidden_states).square().mean().backward()
    gradient_norm = sum(parameter.grad.square().sum() for parameter in layer.parameters()).sqrt()
    print(f"one CABAttentionLayer, forward and backward: gradient norm {gradient_norm:.3f}")


if __name__ == "__main__":
    main()
