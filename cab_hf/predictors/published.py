"""The published CAB classes, under their published names, on the functions of `predictors.frc`.

`CabConfig.published` is the same recipe as a config. These names give its parts one by one: coarse
tokens, curvature, mask, diagnostics.
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

# which end of each formula's curvature is attended
KEPT_SIDE = {"forman": "lowest", "additive": "highest"}
# points of a scatter panel: bounds the size of the figure, evenly thinned beyond
POINTS_DRAWN = 20_000
QUANTILES = (0.1, 0.5, 0.9)


class BlockFrc(NamedTuple):
    """Curvature of the block graph and what it is made of, float32 [B, H, M, M] each.

    Rows are query blocks, columns key blocks; all three are 0 outside the causal part.
    """

    frc: Tensor
    affinity: Tensor
    triangles: Tensor


def coarsen_qk_max_l2(q: Tensor, k: Tensor, block_size: int = 64) -> tuple[Tensor, Tensor]:
    """Return the token of largest L2 norm of every block, the first of equals.

    A block with a key that is not finite has NaN, and later functions always keep it.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D], H a multiple of H_kv.
        block_size: tokens in a block; the last block may hold fewer.

    Returns:
        float32 [B, H, M_q, D] and [B, H_kv, M_k, D], M = ceil(N / block_size).

    Raises:
        ValueError: for shapes that do not fit, or a block size below 1.
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
    """Curvature of every (query block, key block) edge.

    Edge weights are A = ReLU(Q K^T / sqrt(D)), 0 outside the causal part; A A are the triangles.

    * ``"forman"``: F = 4 A - S_i - S_j + 3 A A, with S_i the strength of row i and S_j of column j,
      summed down to row i when causal. Forman-Ricci curvature, of which the LOWEST is kept, as a
      bridge. It is no strong edge: the F of an edge grows with its own A.
    * ``"additive"``: F = A scaled to [0, 1] over its row - ``redundancy`` * A A / M. The HIGHEST is
      kept. M counts all blocks, so a longer text can change what an earlier row keeps.

    The columns of key blocks that hold NaN have NaN in F, and edges of weight 0.

    Args:
        q_coarse: [B, H, M, D].
        k_coarse: [B, H_kv, M, D], H a multiple of H_kv.
        formula: ``"forman"`` or ``"additive"``.
        redundancy: weight of the triangles in ``"additive"``, in [0, 1]; unused in ``"forman"``.
        causal: whether block i sees the blocks up to i only.

    Raises:
        ValueError: for shapes that do not fit, different numbers of query and key blocks, an
            unknown formula, or a redundancy outside [0, 1].
    """
    _require_heads(q_coarse=q_coarse, k_coarse=k_coarse)
    _require_recipe(formula, redundancy)
    blocks = q_coarse.shape[2]
    if k_coarse.shape[2] != blocks:
        raise ValueError(
            f"k_coarse has {k_coarse.shape[2]} blocks and q_coarse {blocks}; they must be equal in "
            "number, since triangles walk from key blocks on as query blocks."
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
            # the predictor sums a column down to the row itself; here all of it is seen
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
    """The blocks that are attended, bool [B, H, M, M].

    A row that sees n blocks keeps ceil((1 - sparsity) * n) of them, the diagonal counted in; of
    equals the lower index is kept. Curvatures of NaN come first, and one is kept in any case.

    Args:
        frc: curvature, [B, H, M, M].
        sparsity: share of every row's visible blocks that is dropped, in [0, 1).
        keep: ``"lowest"`` curvature (Forman) or ``"highest"`` (additive).
        keep_diagonal: keep every row's own block, whatever its curvature.
        causal: whether block i sees the blocks up to i only.

    Raises:
        ValueError: for a curvature that is not square, a sparsity outside [0, 1), or an unknown
            ``keep``.
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
    """Return the ``count`` best blocks of each row, with the diagonal if ``keep_diagonal``.

    A score of NaN is the best. One is kept even if ``count`` leaves no place for it.
    """
    forced = visible.diag().diag() & bool(keep_diagonal)
    marked = (score.isnan() & visible & ~forced).any(-1, keepdim=True)
    count = count.maximum(forced.sum(-1, keepdim=True) + marked)
    return reference.best_of_rows(score, visible, forced, count.squeeze(-1))


class CoarseCurvaturePredictor(nn.Module):
    """The published predictor: max-L2 tokens, block curvature, a fixed share of every row.

    On causal input, what it keeps is the plan of `CabConfig.published` with the same sparsity and
    formula. It holds a few float32 [B, H, M, M] tensors at once; `FrcPredictor` works on some
    heads at a time. It has no parameters, and no gradient flows through it.

    Args:
        block_size: tokens in a query block and in a key block.
        sparsity: share of every row's visible blocks that is dropped, in [0, 1).
        formula, redundancy, causal: see `compute_block_frc`.
        keep_diagonal: keep every row's own block, whatever its curvature.

    Raises:
        ValueError: naming the argument, the value seen and what is accepted.
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
        """The blocks kept for q [B, H, N, D] over k [B, H_kv, N, D], bool [B, H, M, M].

        With ``return_diagnostics`` also the curvature they were chosen by.

        Raises:
            ValueError: for shapes that do not fit, or q and k of different lengths.
        """
        _require_heads(q=q, k=k)
        if q.shape[2] != k.shape[2]:
            raise ValueError(
                f"k has {k.shape[2]} tokens and q {q.shape[2]}; they must be of one length: these "
                "classes take whole texts. FrcPredictor takes chunks over a cache."
            )
        queries, keys = coarsen_qk_max_l2(q, k, self.block_size)
        diagnostics = compute_block_frc(
            queries, keys, formula=self.formula, redundancy=self.redundancy, causal=self.causal
        )
        kept = self.select(diagnostics.frc)
        return (kept, diagnostics) if return_diagnostics else kept

    def select(self, frc: Tensor) -> Tensor:
        """The blocks kept by their curvature ``frc``, [B, H, M, M] -> bool [B, H, M, M]."""
        return generate_block_mask_from_frc(
            frc,
            self.sparsity,
            keep=KEPT_SIDE[self.formula],
            keep_diagonal=self.keep_diagonal,
            causal=self.causal,
        )


class AdaptiveCurvaturePredictor(CoarseCurvaturePredictor):
    """The same, with a sparsity for each row taken from the row's own curvature.

    A row keeps the blocks whose curvature lies more than ``threshold`` standard deviations beyond
    the row's mean, on the side the formula keeps, and its diagonal block when ``keep_diagonal``.
    Mean and (population) deviation are over the blocks the row sees; a row of equal curvatures has
    none beyond a threshold of 0 or more. Where that is fewer than ceil(min_keep * n) of the row's n
    visible blocks the next best are added, where it is more than ceil(max_keep * n) the worst are
    left out, never the diagonal; of equals the lower index is kept. Nothing is drawn at random.

    Args:
        threshold: standard deviations from the row's mean; any finite number.
        min_keep, max_keep: least and largest share of a row's visible blocks that is kept,
            0 < min_keep <= max_keep <= 1. ``sparsity`` is 1 - min_keep, the largest a row can have.
        block_size, recipe: see `CoarseCurvaturePredictor`.

    Raises:
        ValueError: naming the argument, the value seen and what is accepted.
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
        """The blocks kept by their curvature ``frc``, [B, H, M, M] -> bool [B, H, M, M]."""
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
    """A figure of how curvature is distributed; ``visualize_frc_statistics(*diagnostics)``.

    Panels: its histogram over the causal part, the heat map of the first head of the first batch
    row, its quantiles by row, and curvature against affinity and triangles where these are given.

    Args:
        frc, affinity, triangles: [B, H, M, M], as in `BlockFrc`.
        path: where the figure is saved, in the format its ending names; the folder must exist.
        causal: whether block i sees the blocks up to i only; the rest is not drawn.

    Raises:
        ValueError: for shapes that do not fit.
        ImportError: without matplotlib.
    """
    _require_square(frc)
    others = {"affinity": affinity, "triangles": triangles}
    others = {name: other for name, other in others.items() if other is not None}
    for name, other in others.items():
        expected = f"{list(frc.shape)} like frc"
        require(other.shape == frc.shape, f"the shape of {name}", list(other.shape), expected)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "visualize_frc_statistics draws with matplotlib, which cannot be imported; "
            "`pip install matplotlib` brings it."
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
    by_row.plot(torch.stack(rows).numpy(), label=[f"{level:.0%} lie below" for level in QUANTILES])
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
    """Floating-point operations of one attention layer's parts; see `estimate_flops`."""

    coarsen: int
    scores: int
    triangles: int
    attention: int
    dense: int

    @property
    def saving(self) -> float:
        """Dense attention over everything the sparse one computes; above 1, work is saved."""
        return self.dense / (self.coarsen + self.scores + self.triangles + self.attention)


def estimate_flops(
    n: int,
    head_dim: int,
    heads: int = 1,
    block_size: int = 64,
    sparsity: float = 0.95,
    causal: bool = True,
) -> FlopsEstimate:
    """Forward operations under the published recipe; a multiply and an add are two.

    With n tokens, D = head_dim and M = ceil(n / block_size) blocks, for each head:

    * coarsen = 4 n D: the squared norms of q and k
    * scores = 2 M^2 D: the coarse product, causal or not (the mask comes after it)
    * triangles = 2 M^3: A A
    * attention = 4 D * (query, key) pairs of the kept blocks: q k^T and p v
    * dense = 4 D * all pairs: n (n + 1) / 2 when causal, else n^2

    Causal pairs are exact. Otherwise a ragged last block counts as an average one, since the rows
    that keep it are unknown. Softmax, sorting and projections are left out.

    Args:
        n, head_dim: tokens, and channels of a head.
        heads: query heads; keys are counted for as many.
        block_size, sparsity, causal: see `CoarseCurvaturePredictor`.

    Raises:
        ValueError: for a size below 1, or a sparsity outside [0, 1).
    """
    _require_sizes(n=n, head_dim=head_dim, heads=heads, block_size=block_size)
    _require_recipe(sparsity=sparsity)
    blocks = -(-n // block_size)
    # rounded as `reference.share_of_row` rounds
    kept = [math.ceil((1 - sparsity) * seen - 1e-9) for seen in range(1, blocks + 1)]
    pairs, every = kept[-1] * n * n // blocks, n * n
    if causal:
        sizes = [min(block_size, n - start) for start in range(0, n, block_size)]
        pairs = sum(
            size * (size + 1) // 2 + (count - 1) * size * block_size
            for size, count in zip(sizes, kept, strict=True)
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
    require(kept, "sparsity", sparsity, "in [0, 1): a row keeps at least one block")


def _require_square(frc: Tensor) -> None:
    square = frc.ndim == 4 and frc.shape[2] == frc.shape[3] and frc.numel() > 0
    require(square, "the shape of frc", list(frc.shape), "[B, H, M, M], none 0")


def _require_heads(**pair: Tensor) -> None:
    """q [B, H, N_q, D] and k [B, H_kv, N_k, D], nothing empty, H a multiple of H_kv."""
    (q_name, q), (k_name, k) = pair.items()
    for name, x, heads in ((q_name, q, "H"), (k_name, k, "H_kv")):
        inhabited = x.ndim == 4 and x.numel() > 0
        require(inhabited, f"the shape of {name}", list(x.shape), f"[B, {heads}, N, D], none 0")
    fitting = f"[{q.shape[0]}, H_kv, N, {q.shape[3]}] to go with {q_name} {list(q.shape)}"
    same = (k.shape[0], k.shape[3]) == (q.shape[0], q.shape[3])
    require(same, f"the shape of {k_name}", list(k.shape), fitting)
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q_name} has {q.shape[1]} heads and {k_name} {k.shape[1]}; the heads of {q_name} "
            f"must be a multiple of those of {k_name}."
        )
