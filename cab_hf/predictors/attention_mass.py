"""Exact attention probabilities in chunks of queries, and their sums over key blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.plan import BlockRanges, KeyRanges
from cab_hf.selection.reference import QUERIES_PER_CHUNK

# logits of one chunk of queries: 256 MiB in float32
MAX_LOGITS_PER_CHUNK = 2**26


def iterate_attention_rows(
    q: Tensor,
    k: Tensor,
    key_ranges: KeyRanges,
    scale: float,
    stride: int = 1,
    rows_per_chunk: int = QUERIES_PER_CHUNK,
) -> Iterator[tuple[int, Tensor]]:
    """Yield attention probabilities over tiles of ``stride`` x ``stride`` tokens, chunk by chunk.

    A row of tiles contains ``stride`` consecutive queries. The logit of a tile is the mean logit
    over its antidiagonal, which contains every query and every key of the tile once. With
    ``stride=1`` the probabilities are exact. The full N x N matrix is never allocated.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        key_ranges: intervals of keys that each query may attend to.
        scale: factor of the dot products.
        stride: tokens per tile.
        rows_per_chunk: rows of tiles per chunk.

    Yields:
        (index of the first row of the chunk, float32 [B, H, rows, T]). T is the number of key tiles
        up to the last tile that is visible to the chunk. Rows of padding are zero.
    """
    row_bounds = key_ranges.rows(stride)
    # padding tokens in a tile add 0 to its logit
    q = q.masked_fill(~(key_ranges.end >= 0)[:, None, :, None], 0.0)
    k = k.masked_fill(~key_ranges.key_valid[:, None, :, None], 0.0)
    queries = _concatenate_tiles(q, stride, is_reversed=True).unflatten(1, (k.shape[1], -1))
    keys = _concatenate_tiles(k, stride).unsqueeze(2).transpose(-1, -2)
    for first_row in range(0, queries.shape[3], rows_per_chunk):
        chunk_rows = slice(first_row, first_row + rows_per_chunk)
        num_tiles = max(0, int(row_bounds.max_last[:, chunk_rows].max())) // stride + 1
        is_visible = _find_visible_tiles(
            row_bounds, chunk_rows=chunk_rows, num_tiles=num_tiles, stride=stride
        )
        logits = (queries[:, :, :, chunk_rows] @ keys[..., :num_tiles]).flatten(1, 2) * (
            scale / stride
        )
        probabilities = logits.masked_fill_(~is_visible, -torch.inf).softmax(-1)
        # softmax over no keys is NaN: a row of padding attends to nothing
        yield first_row, probabilities.masked_fill_(~is_visible, 0.0)


def _concatenate_tiles(x: Tensor, stride: int, is_reversed: bool = False) -> Tensor:
    """Concatenate the tokens of each tile: x [B, H, N, D] as float32 [B, H, T, stride * D].

    ``is_reversed=True`` reverses the order of tokens in a tile, so that a product of queries with
    keys is a sum over the antidiagonal.
    """
    tiles = F.pad(x, (0, 0, 0, -x.shape[2] % stride)).unflatten(2, (-1, stride)).float()
    return (tiles.flip(3) if is_reversed else tiles).flatten(3)


def _find_visible_tiles(
    row_bounds: BlockRanges, *, chunk_rows: slice, num_tiles: int, stride: int
) -> Tensor:
    """Return bool [B, 1, rows, num_tiles], True if any key of a tile is visible to any query.

    Args:
        row_bounds: bounds of the visible keys of all rows of tiles.
        chunk_rows: the rows of tiles that the result contains.
        num_tiles: number of key tiles that the result contains, from the first one on.
        stride: tokens per tile.
    """
    first_key = torch.arange(0, num_tiles * stride, stride, device=row_bounds.max_last.device)
    last_key = first_key + (stride - 1)
    is_visible = first_key <= row_bounds.max_last[:, chunk_rows, None]
    is_visible &= last_key >= row_bounds.min_first[:, chunk_rows, None]
    return (is_visible & (row_bounds.queries[:, chunk_rows, None] > 0)).unsqueeze(1)


def sum_blocks(x: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Sum x [..., T] over groups of ``block_size`` adjacent entries, [..., num_blocks].

    Entries after the end of x count as 0.
    """
    return (
        F.pad(x, (0, num_blocks * block_size - x.shape[-1]))
        .unflatten(-1, (num_blocks, block_size))
        .sum(-1)
    )


def compute_block_mass(
    q: Tensor,
    k: Tensor,
    key_ranges: KeyRanges,
    scale: float,
    query_block: int,
    key_block: int,
    stride: int = 1,
) -> Tensor:
    """Return the attention mass of every key block per query block, float32 [B, H, M_q, M_k].

    The mass is the sum of the attention probabilities of all queries of the query block over all
    keys of the key block. The masses of a query block sum to the number of its queries. If
    ``stride`` > 1, the masses sum to the number of its rows of tiles, see `iterate_attention_rows`.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        key_ranges: intervals of keys that each query may attend to.
        scale: factor of the dot products.
        query_block: tokens per query block, a multiple of ``stride``.
        key_block: tokens per key block, a multiple of ``stride``.
        stride: tokens per tile, see `iterate_attention_rows`.
    """
    kv_blocks, rows_per_block = -(-k.shape[2] // key_block), query_block // stride
    logits_per_q_block = q.shape[0] * q.shape[1] * rows_per_block * -(-k.shape[2] // stride)
    q_blocks_per_chunk = max(1, MAX_LOGITS_PER_CHUNK // logits_per_q_block)
    mass_chunks = []
    for _, probabilities in iterate_attention_rows(
        q,
        k,
        key_ranges=key_ranges,
        scale=scale,
        stride=stride,
        rows_per_chunk=rows_per_block * q_blocks_per_chunk,
    ):
        num_padding = -probabilities.shape[2] % rows_per_block
        block_rows = F.pad(probabilities, (0, 0, 0, num_padding)).unflatten(2, (-1, rows_per_block))
        mass_chunks.append(sum_blocks(block_rows.sum(3), key_block // stride, kv_blocks))
    return torch.cat(mass_chunks, dim=2)
