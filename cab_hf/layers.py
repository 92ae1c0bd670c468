"""PyTorch layers with the published recipe, for your own model: attention and a transformer block.

Models of transformers do not need these layers; see `cab_hf.apply_cab`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cab_hf.checks import is_whole_number, require
from cab_hf.config import CabConfig
from cab_hf.engines import ENGINES, Workload, choose
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import CoarseCurvaturePredictor, FrcPredictor, LayerContext


class CABAttention(nn.Module):
    """Multi-head block-sparse self-attention with the settings of `CabConfig.published`.

    The layer has no positional encoding. Add a positional encoding to ``x``; otherwise attention
    depends on the order of tokens only through causality.

    All queries of a block attend to the same blocks, which are selected without gradients. The
    blocks of an early query can therefore depend on later queries of its block, but no query
    attends to later keys. Gradients through attention and through the projections are exact.

    Args:
        dim: channels of x, a multiple of ``num_heads``.
        num_heads: query heads.
        block_size: tokens in a query block and in a key block, a multiple of 16.
        sparsity: share of the visible blocks of every row that is dropped, in [0, 1); 0 is exact
            attention.
        num_kv_heads: KV heads, a divisor of ``num_heads``; None means ``num_heads``.
        formula: ``"forman"`` or ``"additive"``; see `published.compute_block_frc`.
        causal: True for causal attention. False for attention in both directions: the strength of
            a column in the published formula is then the sum over all rows.
        bias: True if the four projections have a bias.
        engine: as in `CabConfig`.

    Raises:
        ValueError: if an argument is out of range. The message contains its name and value.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        block_size: int = 64,
        sparsity: float = 0.95,
        *,
        num_kv_heads: int | None = None,
        formula: str = "forman",
        causal: bool = True,
        bias: bool = False,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _require_divisor("num_heads", num_heads, multiple_name="dim", multiple=dim)
        _require_divisor(
            "num_kv_heads", num_kv_heads, multiple_name="num_heads", multiple=num_heads
        )
        engine_names = ("auto", *ENGINES)
        require(
            engine in engine_names, "engine", engine, "one of " + ", ".join(map(repr, engine_names))
        )
        # built even if causal attention does not use it: its constructor validates the arguments,
        # and its messages use the argument names of this class
        published_predictor = CoarseCurvaturePredictor(
            block_size, sparsity, formula=formula, causal=causal
        )
        require(block_size % 16 == 0, "block_size", block_size, "a multiple of 16")
        self.config = CabConfig.published(
            sparsity, formula, query_block=block_size, key_block=block_size, engine=engine
        )
        self.causal = causal
        self.predictor = FrcPredictor(self.config) if causal else published_predictor
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim, bias=bias)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(dim, dim, bias=bias)

    def forward(self, x: Tensor, return_plan: bool = False) -> Tensor | tuple[Tensor, BlockPlan]:
        """Return the output of the layer, [B, N, dim].

        Args:
            x: [B, N, dim].
            return_plan: True to return (output, `BlockPlan`); ``plan.density()`` is the density.

        Raises:
            ValueError: if x has another shape, or the engine cannot compute this call.
        """
        dim = self.q_proj.in_features
        is_valid_shape = x.ndim == 3 and x.shape[-1] == dim and x.numel() > 0
        require(
            is_valid_shape,
            "the shape of x",
            list(x.shape),
            f"[B, N, {dim}] without empty dimensions",
        )
        q, k, v = (
            self._split_heads(projection(x))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        scale = self.head_dim**-0.5
        plan = self._select_blocks(q, k, scale)
        engine = choose(self.config.engine, Workload.from_tensors(q, k, v, plan.blocks))
        out = engine.attention(q, k, v, plan=plan, scale=scale)
        out = self.o_proj(out.transpose(1, 2).flatten(2))
        return (out, plan) if return_plan else out

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return x [B, N, heads * head_dim] as [B, heads, N, head_dim]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _select_blocks(self, q: Tensor, k: Tensor, scale: float) -> BlockPlan:
        """Return the selected blocks of q [B, H, N, D] and k [B, H_kv, N, D].

        Args:
            q: queries.
            k: keys.
            scale: factor of the logits.
        """
        batch, _, length, _ = q.shape
        key_ranges = KeyRanges.causal(batch, length, length, q.device)
        if self.causal:
            return self.predictor(q, k, LayerContext(key_ranges, scale))
        # Every query attends to all keys, so the end of its range is not its position. FrcPredictor
        # reads positions from the ends of ranges; `CoarseCurvaturePredictor` needs no ranges.
        key_ranges = replace(key_ranges, end=key_ranges.start + (length - 1), aligned=False)
        block_size = self.config.query_block
        return BlockPlan.from_dense(
            self.predictor(q, k), key_ranges, query_block=block_size, key_block=block_size
        )


class CABAttentionLayer(nn.Module):
    """A pre-norm transformer block with `CABAttention`.

    The block computes ``y = x + attention(norm(x))`` and returns ``y + mlp(norm(y))``. The norms
    are RMSNorm. The MLP has a linear layer, a GELU and another linear layer.

    Args:
        dim: channels of x, a multiple of ``num_heads``.
        num_heads: query heads.
        block_size: tokens in a query block and in a key block, a multiple of 16.
        sparsity: share of the visible blocks of every row that is dropped, in [0, 1).
        mlp_ratio: hidden channels of the MLP divided by ``dim``.
        attention: other keyword arguments of `CABAttention`; ``bias`` also applies to the MLP.

    Raises:
        ValueError: if an argument is out of range. The message contains its name and value.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        block_size: int = 64,
        sparsity: float = 0.95,
        *,
        mlp_ratio: float = 4.0,
        **attention_arguments: Any,
    ) -> None:
        super().__init__()
        self.attention = CABAttention(dim, num_heads, block_size, sparsity, **attention_arguments)
        if not 1 <= dim * mlp_ratio < math.inf:
            raise ValueError(
                f"mlp_ratio must give at least one hidden channel for dim={dim}, got {mlp_ratio}. "
                "Pass a number of at least 1 / dim."
            )
        hidden_dim = int(dim * mlp_ratio)
        bias = attention_arguments.get("bias", False)
        self.attention_norm = nn.RMSNorm(dim)
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, hidden_dim, bias=bias), nn.GELU(), nn.Linear(hidden_dim, dim, bias=bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output [B, N, dim] of the block for x [B, N, dim]."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def _require_divisor(divisor_name: str, divisor: Any, *, multiple_name: str, multiple: Any) -> None:
    """Raise a ValueError unless both values are positive ints and ``divisor`` divides ``multiple``.

    Args:
        divisor_name: name of the argument that must be a divisor.
        divisor: value of this argument.
        multiple_name: name of the argument that must be a multiple.
        multiple: value of that argument.
    """
    for argument_name, argument_value in ((multiple_name, multiple), (divisor_name, divisor)):
        require(
            is_whole_number(argument_value), argument_name, argument_value, "a whole number >= 1"
        )
    if multiple % divisor:
        raise ValueError(
            f"{divisor_name} must divide {multiple_name}={multiple}, got {divisor}. Pass a divisor."
        )
