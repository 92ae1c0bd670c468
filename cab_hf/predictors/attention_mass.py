"""Exact attention probabilities in chunks of rows, and their sums over key blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.plan import BlockRanges, KeyRanges
from cab_hf.selection.reference import QUERY_CHUNK

LOGITS_AT_A_TIME = 2**26  # 256 MiB in float32


def attention_rows(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    scale: float,
    stride: int = 1,
    at_a_time: int = QUERY_CHUNK,
) -> Iterator[tuple[int, Tensor]]:
    """Yield attention probabilities over tiles of ``stride`` tokens, in chunks of tile rows.

    The logit of a tile is the mean over its antidiagonal, so every query and every key of the tile
    enters once. ``stride=1`` is exact attention. The full N x N matrix is never allocated.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        ranges: intervals of keys that each query may attend to.
        scale: factor of the logits.
        stride: tokens per tile.
        at_a_time: tile rows per chunk.

    Yields:
        (first row, float32 [B, H, rows, T]). T ends after the last key tile that these rows may
        attend to. Rows of padding are zero.
    """
    rows = ranges.rows(stride)
    # a sequence may end inside a tile: missing tokens add nothing
    q, k = (
        x.masked_fill(~real[:, None, :, None], 0.0)
        for x, real in ((q, ranges.end >= 0), (k, ranges.key_valid))
    )
    queries = _tiles(q, stride, backwards=True).unflatten(1, (k.shape[1], -1))
    keys = _tiles(k, stride).unsqueeze(2).transpose(-1, -2)
    for start in range(0, queries.shape[3], at_a_time):
        chunk = slice(start, start + at_a_time)
        seen = max(0, int(rows.max_last[:, chunk].max())) // stride + 1
        visible = _visible_tiles(rows, chunk, seen, stride)
        logits = (queries[:, :, :, chunk] @ keys[..., :seen]).flatten(1, 2) * (scale / stride)
        probabilities = logits.masked_fill_(~visible, -torch.inf).softmax(-1)
        # softmax over no keys is NaN: a row of padding attends to nothing
        yield start, probabilities.masked_fill_(~visible, 0.0)


def _tiles(x: Tensor, stride: int, backwards: bool = False) -> Tensor:
    """Return x [B, H, N, D] as float32 [B, H, T, stride * D]: one row of tokens per tile."""
    tiles = F.pad(x, (0, 0, 0, -x.shape[2] % stride)).unflatten(2, (-1, stride)).float()
    return (tiles.flip(3) if backwards else tiles).flatten(3)


def _visible_tiles(rows: BlockRanges, chunk: slice, tiles: int, stride: int) -> Tensor:
    """Return bool [B, 1, rows, tiles]: True if any key of the tile is visible to a query."""
    key = torch.arange(0, tiles * stride, stride, device=rows.max_last.device)
    begins = key <= rows.max_last[:, chunk, None]
    ends = key + (stride - 1) >= rows.min_first[:, chunk, None]
    return (begins & ends & (rows.queries[:, chunk, None] > 0)).unsqueeze(1)


def block_sums(x: Tensor, size: int, blocks: int) -> Tensor:
    """Sum x [..., T] over groups of ``size`` neighbours: [..., blocks], zero after the end of T."""
    return F.pad(x, (0, blocks * size - x.shape[-1])).unflatten(-1, (blocks, size)).sum(-1)


def block_mass(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    scale: float,
    query_block: int,
    key_block: int,
    stride: int = 1,
) -> Tensor:
    """Return the attention mass of every key block per query block, float32 [B, H, M_q, M_k].

    Each row sums to the number of its queries, or to the number of its tiles if ``stride`` is above
    1.
    """
    blocks, tiles = -(-k.shape[2] // key_block), query_block // stride
    logits_a_block = q.shape[0] * q.shape[1] * tiles * -(-k.shape[2] // stride)
    at_a_time = tiles * max(1, LOGITS_AT_A_TIME // logits_a_block)
    parts = []
    for _, some in attention_rows(q, k, ranges, scale, stride, at_a_time):
        by_block = F.pad(some, (0, 0, 0, -some.shape[2] % tiles)).unflatten(2, (-1, tiles)).sum(3)
        parts.append(block_sums(by_block, key_block // stride, blocks))
    return torch.cat(parts, dim=2)
