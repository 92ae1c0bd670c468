"""The classes and functions of the published CAB method, under their published names.

`CabConfig.published` configures the same method for models. The classes of this module expose the
steps of the method: coarse tokens, curvature, block mask and diagnostics.

Shapes: M is the number of query blocks and of key blocks. A row is a query block.
"""

from __future__ import annotations

import math
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.checks import is_fraction, is_number, is_whole_number, require
from cab_hf.ops import reference
from cab_hf.predictors.frc import (
    compute_affinity,
    compute_forman_curvature,
    compute_two_hop_weights,
    find_largest_norm_tokens,
    min_max_scale,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# by formula: whether the blocks with the lowest or with the highest curvature are selected
SELECTED_EXTREME = {"forman": "lowest", "additive": "highest"}
# most points of a scatter plot: limits the size of the figure
MAX_DRAWN_POINTS = 20_000
# quantiles per row in the figure
QUANTILES = (0.1, 0.5, 0.9)


class BlockFrc(NamedTuple):
    """The curvature of the block graph, and the terms from which the curvature is computed.

    Rows are query blocks, columns are key blocks. All tensors are 0 for invisible key blocks.

    Attributes:
        frc: curvature, float32 [B, H, M, M].
        affinity: edge weights A, float32 [B, H, M, M].
        triangles: the matrix product A A, float32 [B, H, M, M].
    """

    frc: Tensor
    affinity: Tensor
    triangles: Tensor


def coarsen_qk_max_l2(q: Tensor, k: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Return the token of largest L2 norm of every block of q and k.

    Ties select the first token. If a key of a block contains NaN or an infinity, the result for
    the block is NaN, and `generate_block_mask_from_frc` always selects the block.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], H a multiple of H_kv.
        block_size: tokens per block; the last block may be shorter.

    Returns:
        float32 [B, H, M_q, D] and [B, H_kv, M_k, D], with M_q = ceil(N_q / block_size) and M_k =
        ceil(N_k / block_size).

    Raises:
        ValueError: shapes do not fit, or the block size is below 1.
    """
    _require_heads(q=q, k=k)
    _require_sizes(block_size=block_size)
    is_valid_query, is_valid_key = (
        x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) for x in (q, k)
    )
    return (
        find_largest_norm_tokens(q, is_valid_query, block_size),
        find_largest_norm_tokens(k, is_valid_key, block_size, mark_not_finite=True),
    )


def compute_block_frc(
    q_coarse: Tensor,
    k_coarse: Tensor,
    *,
    formula: str = "forman",
    redundancy: float = 0.3,
    causal: bool = True,
) -> BlockFrc:
    """Compute the curvature of every edge (query block, key block).

    The edge weights are A = ReLU(Q K^T / sqrt(D)), and 0 for invisible key blocks. The matrix
    product A A counts triangles.

    * ``"forman"``: F = 4 A - S_i - S_j + 3 A A, the Forman-Ricci curvature. S_i is the sum of row
      i of A. S_j is the sum of column j, over the rows up to i if causal. The method selects the
      LOWEST values. A low F does not mean a strong edge, because F grows with A.
    * ``"additive"``: F = min_max_scale(A) - ``redundancy`` * A A / M. min_max_scale scales each row
      to [0, 1]. The method selects the HIGHEST values. M counts all blocks, so a longer sequence
      can change the selection of an earlier row.

    If the representative of a key block is NaN, its column of F is NaN and its edges have weight 0.

    Args:
        q_coarse: Q, the representatives of query blocks, [B, H, M, D].
        k_coarse: K, the representatives of key blocks, [B, H_kv, M, D], H a multiple of H_kv.
        formula: ``"forman"`` or ``"additive"``.
        redundancy: weight of the triangles in ``"additive"``, in [0, 1]; unused in ``"forman"``.
        causal: True if block i attends to blocks up to i only.

    Raises:
        ValueError: shapes do not fit, query and key blocks differ in number, the formula is
            unknown, or the redundancy is outside [0, 1].
    """
    _require_heads(q_coarse=q_coarse, k_coarse=k_coarse)
    _require_settings(formula, redundancy)
    num_blocks = q_coarse.shape[2]
    if k_coarse.shape[2] != num_blocks:
        raise ValueError(
            f"k_coarse must have as many blocks as q_coarse ({num_blocks}), got "
            f"{k_coarse.shape[2]}. Pass q and k of equal length, because the matrix product A A "
            "requires a square A."
        )
    queries, keys = q_coarse.float(), k_coarse.float()
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    is_visible = _find_visible_blocks(queries.new_empty(1, 1, num_blocks, num_blocks), causal)
    affinity = compute_affinity(queries, keys, queries.shape[-1] ** -0.5, is_visible)
    block_positions = torch.arange(num_blocks, device=queries.device).expand(len(queries), -1)
    triangles = compute_two_hop_weights(affinity, block_positions, query_block=1, key_block=1)
    if formula == "additive":
        frc = min_max_scale(affinity, is_visible) - redundancy * triangles / num_blocks
    else:
        frc = compute_forman_curvature(affinity, triangles)
        if not causal:
            # `compute_forman_curvature` sums a column up to row i only: use the sum of all rows
            frc = frc + affinity.cumsum(-2) - affinity.sum(-2, keepdim=True)
    frc = frc.masked_fill(keys.isnan().any(-1).unsqueeze(2), torch.nan)
    return BlockFrc(frc.masked_fill(~is_visible, 0.0), affinity, triangles)


def generate_block_mask_from_frc(
    frc: Tensor,
    sparsity: float = 0.95,
    *,
    keep: str = "lowest",
    keep_diagonal: bool = True,
    causal: bool = True,
) -> Tensor:
    """Return the mask of selected blocks, bool [B, H, M, M].

    A row with n visible blocks selects ceil((1 - sparsity) * n) blocks, the diagonal included. Ties
    select the lower index. Blocks with a curvature of NaN are selected first, and at least one such
    block is selected.

    Args:
        frc: curvature, [B, H, M, M].
        sparsity: fraction of the visible blocks that every row does not select, in [0, 1).
        keep: ``"lowest"`` to select the lowest curvature (Forman), ``"highest"`` to select the
            highest (additive).
        keep_diagonal: True to select block i in row i regardless of curvature.
        causal: True if block i attends to blocks up to i only.

    Raises:
        ValueError: the curvature is not square, the sparsity is outside [0, 1), or ``keep`` is
            unknown.
    """
    _require_square(frc)
    _require_settings(sparsity=sparsity)
    require(keep in SELECTED_EXTREME.values(), "keep", keep, "'lowest' or 'highest'")
    is_visible = _find_visible_blocks(frc, causal)
    num_selected = reference.share_of_row(is_visible, 1 - sparsity)
    return _select_best_blocks(
        -frc if keep == "lowest" else frc, is_visible, keep_diagonal, num_selected
    )


def _find_visible_blocks(frc: Tensor, causal: bool) -> Tensor:
    """Return the blocks that each row may select, bool [M, M]; ``frc`` is [B, H, M, M]."""
    all_blocks = torch.ones_like(frc[0, 0], dtype=torch.bool)
    return all_blocks.tril() if causal else all_blocks


def _select_best_blocks(
    score: Tensor, is_visible: Tensor, keep_diagonal: bool, num_selected: Tensor
) -> Tensor:
    """Return the ``num_selected`` blocks of each row with the highest scores, bool [B, H, M, M].

    A score of NaN is higher than all numbers. If a row has blocks with a score of NaN, at least one
    of these blocks is selected in addition to the diagonal.

    Args:
        score: [B, H, M, M].
        is_visible: bool [M, M], blocks that each row may select.
        keep_diagonal: True to select the diagonal first.
        num_selected: int [..., M, 1], blocks per row.
    """
    is_forced = is_visible.diag().diag() & bool(keep_diagonal)
    has_nan = (score.isnan() & is_visible & ~is_forced).any(-1, keepdim=True)
    num_selected = num_selected.maximum(is_forced.sum(-1, keepdim=True) + has_nan)
    return reference.select_best_blocks(score, is_visible, is_forced, num_selected.squeeze(-1))


class CoarseCurvaturePredictor(nn.Module):
    """The published predictor, which selects a fixed fraction of the visible blocks of each row.

    The token of largest L2 norm represents a block. Blocks are selected by the curvature of the
    block graph, see `compute_block_frc`.

    For causal input the result equals the plan of `CabConfig.published` with the same sparsity and
    formula. The module allocates several float32 [B, H, M, M] tensors; `FrcPredictor` needs less
    memory, because it processes a few heads at a time. The module has no parameters and computes no
    gradients.

    Args:
        block_size: tokens per query block and per key block.
        sparsity: fraction of the visible blocks that every row does not select, in [0, 1).
        formula: see `compute_block_frc`.
        redundancy: see `compute_block_frc`.
        causal: see `compute_block_frc`.
        keep_diagonal: True to select block i in row i regardless of curvature.

    Raises:
        ValueError: an argument is out of range. The message contains its name and value.
    """

    def __init__(
        self,
        block_size: int = 64,
        sparsity: float = 0.95,
        *,
        formula: str = "forman",
        redundancy: float = 0.3,
        keep_diagonal: bool = True,
        causal: bool = True,
    ) -> None:
        super().__init__()
        _require_sizes(block_size=block_size)
        _require_settings(formula, redundancy, sparsity)
        self.block_size = block_size
        self.sparsity = sparsity
        self.formula = formula
        self.redundancy = redundancy
        self.keep_diagonal = keep_diagonal
        self.causal = causal

    @torch.no_grad()
    def forward(
        self, q: Tensor, k: Tensor, return_diagnostics: bool = False
    ) -> Tensor | tuple[Tensor, BlockFrc]:
        """Return the blocks selected for q [B, H, N, D] over k [B, H_kv, N, D], bool [B, H, M, M].

        Args:
            q: [B, H, N, D].
            k: [B, H_kv, N, D].
            return_diagnostics: True to return the tuple (blocks, `BlockFrc`).

        Raises:
            ValueError: shapes do not fit, or q and k differ in length.
        """
        _require_heads(q=q, k=k)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"k must have as many tokens as q ({q.shape[2]}), got {k.shape[2]}. Pass whole "
                "sequences, or use FrcPredictor, which takes chunks over a KV cache."
            )
        queries, keys = coarsen_qk_max_l2(q, k, self.block_size)
        diagnostics = compute_block_frc(
            queries, keys, formula=self.formula, redundancy=self.redundancy, causal=self.causal
        )
        block_mask = self.select(diagnostics.frc)
        return (block_mask, diagnostics) if return_diagnostics else block_mask

    def select(self, frc: Tensor) -> Tensor:
        """Return the blocks that are selected by the curvature ``frc``, bool [B, H, M, M].

        Args:
            frc: curvature, [B, H, M, M].
        """
        return generate_block_mask_from_frc(
            frc,
            self.sparsity,
            keep=SELECTED_EXTREME[self.formula],
            keep_diagonal=self.keep_diagonal,
            causal=self.causal,
        )


class AdaptiveCurvaturePredictor(CoarseCurvaturePredictor):
    """The published predictor with a sparsity per row, derived from the curvature of the row.

    A row selects the blocks whose curvature differs from the mean of the row by more than
    ``threshold`` standard deviations: below the mean for ``"forman"``, above the mean for
    ``"additive"``. Mean and (population) standard deviation are over the n visible blocks of the
    row. If all curvatures of a row are equal, no block passes a threshold of 0 or more.

    The number of blocks of a row is at least ceil(min_keep * n) and at most ceil(max_keep * n).
    Blocks are selected in the order of their curvature, and ties select the lower index. With
    ``keep_diagonal`` the diagonal block is always selected.

    Args:
        block_size: tokens per query block and per key block.
        threshold: distance from the mean of the row in standard deviations; any finite number.
        min_keep: smallest fraction of its visible blocks that a row selects, in (0, max_keep].
            The attribute ``sparsity`` is 1 - min_keep, the largest sparsity of a row.
        max_keep: largest fraction of its visible blocks that a row selects, in [min_keep, 1].
        recipe: further keywords of `CoarseCurvaturePredictor`.

    Raises:
        ValueError: an argument is out of range. The message contains its name and value.
    """

    def __init__(
        self,
        block_size: int = 64,
        *,
        threshold: float = 1.0,
        min_keep: float = 0.05,
        max_keep: float = 0.5,
        **recipe: Any,
    ) -> None:
        require(is_number(threshold), "threshold", threshold, "a finite number")
        for argument_name, kept_fraction in (("min_keep", min_keep), ("max_keep", max_keep)):
            require(
                is_fraction(kept_fraction) and kept_fraction > 0,
                argument_name,
                kept_fraction,
                "in (0, 1]",
            )
        require(min_keep <= max_keep, "min_keep", min_keep, f"at most max_keep={max_keep}")
        super().__init__(block_size, 1 - min_keep, **recipe)
        self.threshold = threshold
        self.min_keep = min_keep
        self.max_keep = max_keep

    def select(self, frc: Tensor) -> Tensor:
        """Return the blocks that are selected by the curvature ``frc``, bool [B, H, M, M].

        Args:
            frc: curvature, [B, H, M, M].
        """
        _require_square(frc)
        is_visible = _find_visible_blocks(frc, self.causal)
        score = -frc if SELECTED_EXTREME[self.formula] == "lowest" else frc
        is_nan, has_score = is_visible & score.isnan(), is_visible & ~score.isnan()
        # scale to [0, 1] first: then rows of equal curvatures have deviations of exactly 0
        deviations = reference.standardise(min_max_scale(score, has_score), has_score)
        is_selected = is_nan | (has_score & (deviations > self.threshold))
        if self.keep_diagonal:
            is_selected = is_selected | is_visible.diag().diag()
        num_selected = is_selected.sum(-1, keepdim=True).clamp(
            min=reference.share_of_row(is_visible, self.min_keep),
            max=reference.share_of_row(is_visible, self.max_keep),
        )
        return _select_best_blocks(score, is_visible, self.keep_diagonal, num_selected)


def visualize_frc_statistics(
    frc: Tensor,
    affinity: Tensor | None = None,
    triangles: Tensor | None = None,
    path: str | PathLike[str] | None = None,
    *,
    causal: bool = True,
) -> Figure:
    """Draw the distribution of the curvature of blocks, and return the matplotlib figure.

    Call ``visualize_frc_statistics(*diagnostics)`` for the diagnostics of `BlockFrc`. The panels
    show a histogram over the visible blocks, a heat map of the first head of the first batch row,
    and quantiles per row. Two more panels show curvature against affinity and against triangles.

    Args:
        frc: curvature, [B, H, M, M].
        affinity: edge weights, [B, H, M, M]; None to omit the panel.
        triangles: [B, H, M, M]; None to omit the panel.
        path: file to write. The suffix selects the format, and the folder must exist. None to
            write no file.
        causal: True if block i attends to blocks up to i only. Invisible blocks are not drawn.

    Raises:
        ValueError: shapes do not fit.
        ImportError: matplotlib is not installed.
    """
    _require_square(frc)
    panel_terms = {"affinity": affinity, "triangles": triangles}
    panel_terms = {
        term_name: panel_term
        for term_name, panel_term in panel_terms.items()
        if panel_term is not None
    }
    for term_name, panel_term in panel_terms.items():
        expected_shape = f"{list(frc.shape)}, the shape of frc"
        require(
            panel_term.shape == frc.shape,
            f"the shape of {term_name}",
            list(panel_term.shape),
            expected_shape,
        )
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, and visualize_frc_statistics needs it. Run `pip "
            "install matplotlib`."
        ) from error
    is_visible = _find_visible_blocks(frc, causal).cpu()
    frc = frc.detach().float().cpu()
    figure = Figure(figsize=(15, 8), layout="constrained")
    histogram_axes, heat_map_axes, quantile_axes, *scatter_axes = figure.subplots(2, 3).flat
    visible_frc = frc[..., is_visible].flatten()
    histogram_axes.hist(visible_frc[visible_frc.isfinite()].numpy(), bins=100)
    histogram_axes.set(title="curvature, all heads", xlabel="curvature", ylabel="blocks")
    heat_map = heat_map_axes.imshow(
        frc[0, 0].masked_fill(~is_visible, torch.nan).numpy(), aspect="equal"
    )
    figure.colorbar(heat_map, ax=heat_map_axes)
    heat_map_axes.set(title="curvature, first head", xlabel="key block", ylabel="query block")
    _plot_quantiles(quantile_axes, frc, is_visible)
    # draw every n-th point only
    drawn_point_slice = slice(None, None, -(-visible_frc.numel() // MAX_DRAWN_POINTS))
    for term_name, panel_term in panel_terms.items():
        term_axes = scatter_axes.pop(0)
        visible_term = panel_term.detach().float().cpu()[..., is_visible].flatten()
        drawn_terms, drawn_curvatures = (
            visible_term[drawn_point_slice].numpy(),
            visible_frc[drawn_point_slice].numpy(),
        )
        term_axes.scatter(drawn_terms, drawn_curvatures, s=4, alpha=0.4)
        term_axes.set(title=f"curvature against {term_name}", xlabel=term_name, ylabel="curvature")
    for term_axes in scatter_axes:
        term_axes.remove()
    if path is not None:
        figure.savefig(path)
    return figure


def _plot_quantiles(axes: Axes, frc: Tensor, is_visible: Tensor) -> None:
    """Plot `QUANTILES` of the curvature of the visible blocks of each row, over all heads.

    Args:
        axes: receives the plot.
        frc: curvature, float32 [B, H, M, M].
        is_visible: bool [M, M], visible blocks of each row.
    """
    quantile_levels = torch.tensor(QUANTILES)
    quantiles = [
        frc[:, :, row, is_visible_in_row].flatten().quantile(quantile_levels)
        for row, is_visible_in_row in enumerate(is_visible)
    ]
    axes.plot(
        torch.stack(quantiles).numpy(),
        label=[f"{quantile_level:.0%} of the blocks are below" for quantile_level in QUANTILES],
    )
    axes.legend()
    axes.set(title="curvature by row, all heads", xlabel="query block", ylabel="curvature")


class FlopsEstimate(NamedTuple):
    """The floating-point operations of one attention layer, see `estimate_flops`.

    Attributes:
        coarsen: squared norms of q and k.
        scores: product of the representatives of query blocks and key blocks.
        triangles: product A A.
        attention: attention under the plan.
        dense: dense attention.
    """

    coarsen: int
    scores: int
    triangles: int
    attention: int
    dense: int

    @property
    def saving(self) -> float:
        """Return the operations of dense attention divided by those of the published method."""
        return self.dense / (self.coarsen + self.scores + self.triangles + self.attention)


def estimate_flops(
    n: int,
    head_dim: int,
    heads: int = 1,
    block_size: int = 64,
    sparsity: float = 0.95,
    causal: bool = True,
) -> FlopsEstimate:
    """Count the floating-point operations of one forward pass of the published method.

    A multiplication and an addition count as two operations. With n tokens, D = head_dim and M =
    ceil(n / block_size) blocks, every head needs:

    * coarsen = 4 n D: squared norms of q and k
    * scores = 2 M^2 D: product of the representatives, causal or not, because the mask is applied
      afterwards
    * triangles = 2 M^3: product A A
    * attention = 4 D * (query, key) pairs of the selected blocks: products q k^T and p v
    * dense = 4 D * all (query, key) pairs: n (n + 1) / 2 pairs if causal, else n^2

    The number of causal pairs is exact. Without causality, an incomplete last block counts as an
    average block, because the number of rows that select this block is unknown. Softmax, sorting
    and projections are not counted.

    Args:
        n: tokens.
        head_dim: channels per head.
        heads: query heads, and as many KV heads.
        block_size: see `CoarseCurvaturePredictor`.
        sparsity: see `CoarseCurvaturePredictor`.
        causal: see `CoarseCurvaturePredictor`.

    Raises:
        ValueError: a size is below 1, or the sparsity is outside [0, 1).
    """
    _require_sizes(n=n, head_dim=head_dim, heads=heads, block_size=block_size)
    _require_settings(sparsity=sparsity)
    num_blocks = -(-n // block_size)
    # rounded like `reference.share_of_row`
    selected_per_row = [
        math.ceil((1 - sparsity) * num_visible - 1e-9) for num_visible in range(1, num_blocks + 1)
    ]
    selected_pairs, all_pairs = selected_per_row[-1] * n * n // num_blocks, n * n
    if causal:
        block_lengths = [min(block_size, n - start) for start in range(0, n, block_size)]
        # the diagonal block of a row has fewer pairs than its other selected blocks
        selected_pairs = sum(
            block_length * (block_length + 1) // 2 + (num_selected - 1) * block_length * block_size
            for block_length, num_selected in zip(block_lengths, selected_per_row, strict=True)
        )
        all_pairs = n * (n + 1) // 2
    return FlopsEstimate(
        coarsen=4 * n * head_dim * heads,
        scores=2 * num_blocks**2 * head_dim * heads,
        triangles=2 * num_blocks**3 * heads,
        attention=4 * head_dim * heads * selected_pairs,
        dense=4 * head_dim * heads * all_pairs,
    )


def _require_sizes(**sizes: Any) -> None:
    """Raise a ValueError for a size that is not a whole number of at least 1."""
    for size_name, size in sizes.items():
        require(is_whole_number(size), size_name, size, "a whole number >= 1")


def _require_settings(formula: Any = "forman", redundancy: Any = 0, sparsity: Any = 0) -> None:
    """Raise a ValueError for a setting of the published method that is out of range."""
    require(formula in SELECTED_EXTREME, "formula", formula, "'forman' or 'additive'")
    require(is_fraction(redundancy), "redundancy", redundancy, "in [0, 1]")
    require(
        is_fraction(sparsity) and sparsity < 1,
        "sparsity",
        sparsity,
        "in [0, 1) so that every row keeps at least one block",
    )


def _require_square(frc: Tensor) -> None:
    """Raise a ValueError unless the shape is [B, H, M, M] without empty dimensions."""
    is_square = frc.ndim == 4 and frc.shape[2] == frc.shape[3] and frc.numel() > 0
    require(is_square, "the shape of frc", list(frc.shape), "[B, H, M, M] without empty dimensions")


def _require_heads(**tensors: Tensor) -> None:
    """Raise a ValueError unless the shapes of q and k fit together.

    The shapes must be [B, H, N_q, D] and [B, H_kv, N_k, D], not empty, with H a multiple of H_kv.

    Args:
        tensors: q, then k, by the argument names of the caller.
    """
    (q_name, q), (k_name, k) = tensors.items()
    for tensor_name, x, heads_dim in ((q_name, q, "H"), (k_name, k, "H_kv")):
        require(
            x.ndim == 4 and x.numel() > 0,
            f"the shape of {tensor_name}",
            list(x.shape),
            f"[B, {heads_dim}, N, D] without empty dimensions",
        )
    require(
        (k.shape[0], k.shape[3]) == (q.shape[0], q.shape[3]),
        f"the shape of {k_name}",
        list(k.shape),
        f"[{q.shape[0]}, H_kv, N, {q.shape[3]}] to match {q_name} {list(q.shape)}",
    )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} must have a multiple of the {k.shape[1]} heads of {k_name}, got "
            f"{q.shape[1]} heads. Pass all query heads of each KV head."
        )
