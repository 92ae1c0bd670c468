"""The published CAB classes under their published names, based on `predictors.frc`.

`CabConfig.published` is the same recipe as a config. These classes expose its steps: coarse tokens,
curvature, block mask and diagnostics.
"""

from __future__ import annotations

import math
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from cab_hf.checks import is_number, is_share, is_whole, require
from cab_hf.ops import reference
from cab_hf.predictors.frc import (
    affinity_of,
    forman_curvature,
    largest_tokens,
    min_max,
    two_hop,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the end of each formula's curvature that is attended
KEPT_SIDE = {"forman": "lowest", "additive": "highest"}
# points of a scatter panel: limits the size of the figure
POINTS_DRAWN = 20_000
QUANTILES = (0.1, 0.5, 0.9)


class BlockFrc(NamedTuple):
    """The curvature of the block graph and its parts, float32 [B, H, M, M] each.

    Rows are query blocks and columns are key blocks. All three tensors are 0 outside the causal
    part.
    """

    frc: Tensor
    affinity: Tensor
    triangles: Tensor


def coarsen_qk_max_l2(q: Tensor, k: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Return the token of largest L2 norm of every block of q and k.

    Ties select the first token. A block with a key that is not finite has NaN, and later functions
    always keep such a block.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], H a multiple of H_kv.
        block_size: tokens per block; the last block may be shorter.

    Returns:
        float32 [B, H, M_q, D] and [B, H_kv, M_k, D] with M = ceil(N / block_size).

    Raises:
        ValueError: shapes do not fit, or the block size is below 1.
    """
    _require_heads(q=q, k=k)
    _require_sizes(block_size=block_size)
    queries, keys = (x.new_ones(x.shape[0], x.shape[2], dtype=torch.bool) for x in (q, k))
    return (
        largest_tokens(q, queries, block_size),
        largest_tokens(k, keys, block_size, mark=True),
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

    Edge weights are A = ReLU(Q K^T / sqrt(D)), and 0 outside the causal part. A A are the
    triangles.

    * ``"forman"``: F = 4 A - S_i - S_j + 3 A A, the Forman-Ricci curvature. S_i is the strength of
      row i and S_j the strength of column j, summed down to row i if causal. The method keeps the
      LOWEST values as bridges. A low F does not mean a strong edge, because F grows with A.
    * ``"additive"``: F = A scaled to [0, 1] over its row - ``redundancy`` * A A / M. The method
      keeps the HIGHEST values. M counts all blocks, so a longer sequence can change the selection
      of an earlier row.

    For a key block with NaN, the column of F is NaN and the edges have weight 0.

    Args:
        q_coarse: [B, H, M, D].
        k_coarse: [B, H_kv, M, D], H a multiple of H_kv.
        formula: ``"forman"`` or ``"additive"``.
        redundancy: weight of the triangles in ``"additive"``, in [0, 1]; unused in ``"forman"``.
        causal: True if block i attends to blocks up to i only.

    Raises:
        ValueError: shapes do not fit, query and key blocks differ in number, the formula is
            unknown, or the redundancy is outside [0, 1].
    """
    _require_heads(q_coarse=q_coarse, k_coarse=k_coarse)
    _require_recipe(formula, redundancy)
    blocks = q_coarse.shape[2]
    if k_coarse.shape[2] != blocks:
        raise ValueError(
            f"k_coarse must have as many blocks as q_coarse ({blocks}), got {k_coarse.shape[2]}. "
            "Pass q and k of equal length: triangles use each block as a query and as a key."
        )
    queries, keys = q_coarse.float(), k_coarse.float()
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    visible = _visible_blocks(queries.new_empty(1, 1, blocks, blocks), causal)
    affinity = affinity_of(queries, keys, queries.shape[-1] ** -0.5, visible)
    places = torch.arange(blocks, device=queries.device).expand(len(queries), -1)
    triangles = two_hop(affinity, places, 1, 1)
    if formula == "additive":
        frc = min_max(affinity, visible) - redundancy * triangles / blocks
    else:
        frc = forman_curvature(affinity, triangles)
        if not causal:
            # the predictor sums a column down to the row itself; here the whole column is visible
            frc = frc + affinity.cumsum(-2) - affinity.sum(-2, keepdim=True)
    frc = frc.masked_fill(keys.isnan().any(-1).unsqueeze(2), torch.nan)
    return BlockFrc(frc.masked_fill(~visible, 0.0), affinity, triangles)


def generate_block_mask_from_frc(
    frc: Tensor,
    sparsity: float = 0.95,
    *,
    keep: str = "lowest",
    keep_diagonal: bool = True,
    causal: bool = True,
) -> Tensor:
    """Return the mask of selected blocks, bool [B, H, M, M].

    A row with n visible blocks keeps ceil((1 - sparsity) * n) blocks, the diagonal included. Ties
    keep the lower index. Blocks with a curvature of NaN are kept first, and at least one such block
    is kept.

    Args:
        frc: curvature, [B, H, M, M].
        sparsity: share of every row's visible blocks that is dropped, in [0, 1).
        keep: ``"lowest"`` curvature (Forman) or ``"highest"`` (additive).
        keep_diagonal: True to keep every row's own block at any curvature.
        causal: True if block i attends to blocks up to i only.

    Raises:
        ValueError: the curvature is not square, the sparsity is outside [0, 1), or ``keep`` is
            unknown.
    """
    _require_square(frc)
    _require_recipe(sparsity=sparsity)
    require(keep in KEPT_SIDE.values(), "keep", keep, "'lowest' or 'highest'")
    visible = _visible_blocks(frc, causal)
    count = reference.share_of_row(visible, 1 - sparsity)
    return _best_blocks(-frc if keep == "lowest" else frc, visible, keep_diagonal, count)


def _visible_blocks(like: Tensor, causal: bool) -> Tensor:
    everything = torch.ones_like(like[0, 0], dtype=torch.bool)
    return everything.tril() if causal else everything


def _best_blocks(score: Tensor, visible: Tensor, keep_diagonal: bool, count: Tensor) -> Tensor:
    """Return the ``count`` best blocks of each row, including the diagonal if ``keep_diagonal``.

    A score of NaN is the best. One such block is kept even if ``count`` leaves no place for it.
    """
    forced = visible.diag().diag() & bool(keep_diagonal)
    marked = (score.isnan() & visible & ~forced).any(-1, keepdim=True)
    count = count.maximum(forced.sum(-1, keepdim=True) + marked)
    return reference.best_of_rows(score, visible, forced, count.squeeze(-1))


class CoarseCurvaturePredictor(nn.Module):
    """The published predictor: tokens of largest L2 norm, block curvature, a fixed share per row.

    For causal input the result equals the plan of `CabConfig.published` with the same sparsity and
    formula. The module stores a few float32 [B, H, M, M] tensors at once; `FrcPredictor` computes a
    few heads at a time. The module has no parameters and computes no gradients.

    Args:
        block_size: tokens in a query block and in a key block.
        sparsity: share of every row's visible blocks that is dropped, in [0, 1).
        formula, redundancy, causal: see `compute_block_frc`.
        keep_diagonal: True to keep every row's own block at any curvature.

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
        _require_recipe(formula, redundancy, sparsity)
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
            return_diagnostics: True to return (blocks, `BlockFrc`).

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
        kept = self.select(diagnostics.frc)
        return (kept, diagnostics) if return_diagnostics else kept

    def select(self, frc: Tensor) -> Tensor:
        """Return the blocks that curvature [B, H, M, M] selects, bool [B, H, M, M]."""
        return generate_block_mask_from_frc(
            frc,
            self.sparsity,
            keep=KEPT_SIDE[self.formula],
            keep_diagonal=self.keep_diagonal,
            causal=self.causal,
        )


class AdaptiveCurvaturePredictor(CoarseCurvaturePredictor):
    """The published predictor with a sparsity per row, derived from the curvature of the row.

    A row keeps blocks whose curvature is more than ``threshold`` standard deviations beyond the
    mean of the row. Beyond means below for ``"forman"`` and above for ``"additive"``. Mean and
    (population) standard deviation are over the n visible blocks of the row. If all curvatures of a
    row are equal, no block passes a threshold of 0 or more.

    The number of blocks of a row stays between ceil(min_keep * n) and ceil(max_keep * n): the next
    best blocks are added, or the worst are dropped. With ``keep_diagonal`` the diagonal block is
    always kept. Ties keep the lower index. The selection uses no random numbers.

    Args:
        threshold: distance from the row's mean in standard deviations; any finite number.
        min_keep, max_keep: smallest and largest share of a row's visible blocks that is kept, 0 <
            min_keep <= max_keep <= 1. ``sparsity`` is 1 - min_keep, the largest sparsity of a row.
        block_size, recipe: see `CoarseCurvaturePredictor`.

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
        for name, share in (("min_keep", min_keep), ("max_keep", max_keep)):
            require(is_share(share) and share > 0, name, share, "in (0, 1]")
        require(min_keep <= max_keep, "min_keep", min_keep, f"at most max_keep={max_keep}")
        super().__init__(block_size, 1 - min_keep, **recipe)
        self.threshold = threshold
        self.min_keep = min_keep
        self.max_keep = max_keep

    def select(self, frc: Tensor) -> Tensor:
        """Return the blocks that curvature [B, H, M, M] selects, bool [B, H, M, M]."""
        _require_square(frc)
        visible = _visible_blocks(frc, self.causal)
        score = -frc if KEPT_SIDE[self.formula] == "lowest" else frc
        marked, seen = visible & score.isnan(), visible & ~score.isnan()
        # scaled first: a row of equal curvatures is then exactly its own mean
        deviations = reference.standardise(min_max(score, seen), seen)
        beyond = marked | (seen & (deviations > self.threshold))
        if self.keep_diagonal:
            beyond = beyond | visible.diag().diag()
        count = beyond.sum(-1, keepdim=True).clamp(
            min=reference.share_of_row(visible, self.min_keep),
            max=reference.share_of_row(visible, self.max_keep),
        )
        return _best_blocks(score, visible, self.keep_diagonal, count)


def visualize_frc_statistics(
    frc: Tensor,
    affinity: Tensor | None = None,
    triangles: Tensor | None = None,
    path: str | PathLike[str] | None = None,
    *,
    causal: bool = True,
) -> Figure:
    """Return a figure of the distribution of curvature.

    Call it as ``visualize_frc_statistics(*diagnostics)``. The panels show a histogram over the
    causal part, a heat map of the first head of the first batch row, and quantiles per row. Two
    more panels show curvature against ``affinity`` and ``triangles`` if these are given.

    Args:
        frc, affinity, triangles: [B, H, M, M], as in `BlockFrc`.
        path: file to write; its suffix selects the format, and its folder must exist.
        causal: True if block i attends to blocks up to i only; the other blocks are not drawn.

    Raises:
        ValueError: shapes do not fit.
        ImportError: matplotlib is not installed.
    """
    _require_square(frc)
    others = {"affinity": affinity, "triangles": triangles}
    others = {name: other for name, other in others.items() if other is not None}
    for name, other in others.items():
        expected = f"{list(frc.shape)}, the shape of frc"
        require(other.shape == frc.shape, f"the shape of {name}", list(other.shape), expected)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, and visualize_frc_statistics needs it. Run `pip "
            "install matplotlib`."
        ) from error
    visible = _visible_blocks(frc, causal).cpu()
    frc, *drawn = (x.detach().float().cpu() for x in (frc, *others.values()))
    figure = Figure(figsize=(15, 8), layout="constrained")
    histogram, heat_map, by_row, *panels = figure.subplots(2, 3).flat
    seen_frc = frc[..., visible].flatten()
    histogram.hist(seen_frc[seen_frc.isfinite()].numpy(), bins=100)
    histogram.set(title="curvature, all heads", xlabel="curvature", ylabel="blocks")
    image = heat_map.imshow(frc[0, 0].masked_fill(~visible, torch.nan).numpy(), aspect="equal")
    figure.colorbar(image, ax=heat_map)
    heat_map.set(title="curvature, first head", xlabel="key block", ylabel="query block")
    levels = torch.tensor(QUANTILES)
    rows = [frc[:, :, i, seen].flatten().quantile(levels) for i, seen in enumerate(visible)]
    by_row.plot(
        torch.stack(rows).numpy(),
        label=[f"{level:.0%} of the blocks are below" for level in QUANTILES],
    )
    by_row.legend()
    by_row.set(title="curvature by row, all heads", xlabel="query block", ylabel="curvature")
    thin = slice(None, None, -(-frc[..., visible].numel() // POINTS_DRAWN))
    for name, other in zip(others, drawn, strict=True):
        panel = panels.pop(0)
        points = (x[..., visible].flatten()[thin].numpy() for x in (other, frc))
        panel.scatter(*points, s=4, alpha=0.4)
        panel.set(title=f"curvature against {name}", xlabel=name, ylabel="curvature")
    for panel in panels:
        panel.remove()
    if path is not None:
        figure.savefig(path)
    return figure


class FlopsEstimate(NamedTuple):
    """The floating-point operations of the parts of one attention layer; see `estimate_flops`."""

    coarsen: int
    scores: int
    triangles: int
    attention: int
    dense: int

    @property
    def saving(self) -> float:
        """The operations of dense attention divided by all operations of the recipe."""
        return self.dense / (self.coarsen + self.scores + self.triangles + self.attention)


def estimate_flops(
    n: int,
    head_dim: int,
    heads: int = 1,
    block_size: int = 64,
    sparsity: float = 0.95,
    causal: bool = True,
) -> FlopsEstimate:
    """Count the operations of a forward pass under the published recipe.

    A multiplication and an addition count as two operations. With n tokens, D = head_dim and M =
    ceil(n / block_size) blocks, every head needs:

    * coarsen = 4 n D: the squared norms of q and k
    * scores = 2 M^2 D: the coarse product, causal or not, because the mask is applied afterwards
    * triangles = 2 M^3: A A
    * attention = 4 D * (query, key) pairs of the selected blocks: q k^T and p v
    * dense = 4 D * all pairs: n (n + 1) / 2 if causal, else n^2

    Causal pairs are exact. Otherwise an incomplete last block counts as an average block, because
    the rows that select it are unknown. Softmax, sorting and projections are not counted.

    Args:
        n: tokens.
        head_dim: channels per head.
        heads: query heads; as many KV heads are assumed.
        block_size, sparsity, causal: see `CoarseCurvaturePredictor`.

    Raises:
        ValueError: a size is below 1, or the sparsity is outside [0, 1).
    """
    _require_sizes(n=n, head_dim=head_dim, heads=heads, block_size=block_size)
    _require_recipe(sparsity=sparsity)
    blocks = -(-n // block_size)
    # rounded like `reference.share_of_row`
    selected_per_row = [math.ceil((1 - sparsity) * seen - 1e-9) for seen in range(1, blocks + 1)]
    pairs, every = selected_per_row[-1] * n * n // blocks, n * n
    if causal:
        sizes = [min(block_size, n - start) for start in range(0, n, block_size)]
        pairs = sum(
            size * (size + 1) // 2 + (count - 1) * size * block_size
            for size, count in zip(sizes, selected_per_row, strict=True)
        )
        every = n * (n + 1) // 2
    return FlopsEstimate(
        coarsen=4 * n * head_dim * heads,
        scores=2 * blocks**2 * head_dim * heads,
        triangles=2 * blocks**3 * heads,
        attention=4 * head_dim * heads * pairs,
        dense=4 * head_dim * heads * every,
    )


def _require_sizes(**sizes: Any) -> None:
    for name, size in sizes.items():
        require(is_whole(size), name, size, "a whole number >= 1")


def _require_recipe(formula: Any = "forman", redundancy: Any = 0, sparsity: Any = 0) -> None:
    require(formula in KEPT_SIDE, "formula", formula, "'forman' or 'additive'")
    require(is_share(redundancy), "redundancy", redundancy, "in [0, 1]")
    kept = is_share(sparsity) and sparsity < 1
    require(kept, "sparsity", sparsity, "in [0, 1) so that every row keeps at least one block")


def _require_square(frc: Tensor) -> None:
    square = frc.ndim == 4 and frc.shape[2] == frc.shape[3] and frc.numel() > 0
    require(square, "the shape of frc", list(frc.shape), "[B, H, M, M] without empty dimensions")


def _require_heads(**pair: Tensor) -> None:
    """Check shapes: q [B, H, N_q, D], k [B, H_kv, N_k, D], not empty, H a multiple of H_kv."""
    (q_name, q), (k_name, k) = pair.items()
    for name, x, heads in ((q_name, q, "H"), (k_name, k, "H_kv")):
        inhabited = x.ndim == 4 and x.numel() > 0
        require(
            inhabited,
            f"the shape of {name}",
            list(x.shape),
            f"[B, {heads}, N, D] without empty dimensions",
        )
    fitting = f"[{q.shape[0]}, H_kv, N, {q.shape[3]}] to match {q_name} {list(q.shape)}"
    same = (k.shape[0], k.shape[3]) == (q.shape[0], q.shape[3])
    require(same, f"the shape of {k_name}", list(k.shape), fitting)
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} must have a multiple of the {k.shape[1]} heads of {k_name}, got "
            f"{q.shape[1]} heads. Pass all query heads of each KV head."
        )
