"""The published CAB classes on random q and k with one planted bridge.

    python examples/published_classes.py --out runs/published.png

One late query block and one early key block get a loud token in a common direction, so that nothing
the row sees weighs more. What to look for: the additive formula keeps that block; Forman curvature
with the lowest kept leaves it out, since an edge's own weight only raises its curvature.
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

TOKENS, BLOCK, HEADS, HEAD_DIM = 2048, 64, 4, 64
BRIDGE = (28, 5)  # query block, key block
LOUDNESS = 12.0


def planted_bridge() -> tuple[Tensor, Tensor]:
    """q and k, [1, H, N, D], with one strong pair of blocks."""
    q, k = torch.randn(2, 1, HEADS, TOKENS, HEAD_DIM)
    direction = torch.nn.functional.normalize(torch.randn(HEAD_DIM), dim=0)
    for x, block in zip((q, k), BRIDGE, strict=True):
        x[:, :, block * BLOCK + BLOCK // 2] = LOUDNESS * direction
    return q, k


def report(name: str, kept: Tensor) -> None:
    blocks = kept.shape[-1] * (kept.shape[-1] + 1) // 2 * HEADS
    share, result = kept.sum().item() / blocks, kept[0, :, BRIDGE[0], BRIDGE[1]].sum().item()
    print(f"{name:18} keeps {share:.3f} of the blocks, the bridge in {result} of {HEADS} heads")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/published.png"))
    out = parser.parse_args(arguments).out
    torch.manual_seed(0)

    q, k = planted_bridge()
    for formula in ("forman", "additive"):
        predictor = CoarseCurvaturePredictor(BLOCK, sparsity=0.9, formula=formula)
        kept, diagnostics = predictor(q, k, return_diagnostics=True)
        report(formula, kept)
    report("adaptive additive", AdaptiveCurvaturePredictor(BLOCK, formula="additive")(q, k))
    out.parent.mkdir(parents=True, exist_ok=True)
    visualize_frc_statistics(*diagnostics, path=out)
    print(f"the additive curvature is drawn in {out}")
    for length in (32_768, 1_048_576):
        saving = estimate_flops(length, head_dim=128).saving
        print(f"{length:,} tokens: dense attention has {saving:.1f} times the operations")

    layer = CABAttentionLayer(HEADS * HEAD_DIM, HEADS, BLOCK, sparsity=0.9)
    x = torch.randn(1, TOKENS, HEADS * HEAD_DIM)
    layer(x).square().mean().backward()
    norm = sum(p.grad.square().sum() for p in layer.parameters()).sqrt()
    print(f"one CABAttentionLayer, forward and backward: gradient norm {norm:.3f}")


if __name__ == "__main__":
    main()
