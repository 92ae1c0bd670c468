"""Exact attention probabilities in chunks of queries, and their sums over key blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from cab_hf.plan import BlockRanges, KeyRanges
from cab_hf.selection.reference import QUERY_CHUNK

# logits of one chunk of queries: 256 MiB in float32
LOGITS_AT_A_TIME = 2**26


def attention_rows(
    q: Tensor,
    k: Tensor,
    ranges: KeyRanges,
    scale: float,
    stride: int = 1,
    at_a_time: int = QUERY_CHUNK,
) -> Iterator[tuple[int, Tensor]]:
    """Yield attention probabilities over tiles of ``stride`` x ``stride`` tokens, chunk by chunk.

    A row of tiles contains ``stride`` consecutive queries. The logit of a tile is the mean logit
    over its antidiagonal, which contains every query and every key of the tile once. With
    ``stride=1`` the probabilities are exact. The full N x N matrix is never allocated.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        ranges: intervals of keys that each query may attend to.
        scale: factor of the dot products.
        stride: tokens per tile.
        at_a_time: rows of tiles per chunk.

    Yields:
        (index of the first row of the chunk, float32 [B, H, rows, T]). T is the number of key tiles
        up to the last tile that is visible to the chunk. Rows of padding are zero.
    """
    rows = ranges.rows(stride)
    # padding tokens in a tile add 0 to its logit
    q = q.masked_fill(~(ranges.end >= 0)[:, None, :, None], 0.0)
    k = k.masked_fill(~ranges.key_valid[:, None, :, None], 0.0)
    queries = _tiles(q, stride, backwards=True).unflatten(1, (k.shape[1], -1))
    keys = _tiles(k, stride).unsqueeze(2).transpose(-1, -2)
    for start in range(0, queries.shape[3], at_a_time):
        chunk = slice(start, start + at_a_time)
        num_tiles = max(0, int(rows.max_last[:, chunk].max())) // stride + 1
        visible = _visible_tiles(rows, chunk=chunk, num_tiles=num_tiles, stride=stride)
        logits = (queries[:, :, :, chunk] @ keys[..., :num_tiles]).flatten(1, 2) * (scale / stride)
        probabilities = logits.masked_fill_(~visible, -torch.inf).softmax(-1)
        # softmax over no keys is NaN: a row of padding attends to nothing
        yield start, probabilities.masked_fill_(~visible, 0.0)


def _tiles(x: Tensor, stride: int, backwards: bool = False) -> Tensor:
    """Concatenate the tokens of each tile: x [B, H, N, D] as float32 [B, H, T, stride * D].

    ``backwards=True`` reverses the order of tokens in a tile, so that a product of queries with
    keys is a sum over the antidiagonal.
    """
    tiles = F.pad(x, (0, 0, 0, -x.shape[2] % stride)).unflatten(2, (-1, stride)).float()
    return (tiles.flip(3) if backwards else tiles).flatten(3)


def _visible_tiles(rows: BlockRanges, *, chunk: slice, num_tiles: int, stride: int) -> Tensor:
    """Return bool [B, 1, rows, num_tiles], True if any key of a tile is visible to any query.

    Args:
        rows: bounds of the visible keys of all rows of tiles.
        chunk: the rows of tiles that the result contains.
        num_tiles: number of key tiles that the result contains, from the first one on.
        stride: tokens per tile.
    """
    first_key = torch.arange(0, num_tiles * stride, stride, device=rows.max_last.device)
    last_key = first_key + (stride - 1)
    is_visible = first_key <= rows.max_last[:, chunk, None]
    is_visible &= last_key >= rows.min_first[:, chunk, None]
    return (is_visible & (rows.queries[:, chunk, None] > 0)).unsqueeze(1)


def block_sums(x: Tensor, size: int, blocks: int) -> Tensor:
    """Sum x [..., T] over groups of ``size`` adjacent entries, [..., blocks].

    Entries after the end of x count as 0.
    """
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

    The mass is the sum of the attention probabilities of all queries of the query block over all
    keys of the key block. The masses of a query block sum to the number of its queries. If
    ``stride`` > 1, the masses sum to the number of its rows of tiles, see `attention_rows`.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        ranges: intervals of keys that each query may attend to.
        scale: factor of the dot products.
        query_block: tokens per query block, a multiple of ``stride``.
        key_block: tokens per key block, a multiple of ``stride``.
        stride: tokens per tile, see `attention_rows`.
    """
    kv_blocks, rows_per_block = -(-k.shape[2] // key_block), query_block // stride
    logits_per_q_block = q.shape[0] * q.shape[1] * rows_per_block * -(-k.shape[2] // stride)
    q_blocks_at_a_time = max(1, LOGITS_AT_A_TIME // logits_per_q_block)
    chunks = []
    for _, probabilities in attention_rows(
        q,
        k,
        ranges=ranges,
        scale=scale,
        stride=stride,
        at_a_time=rows_per_block * q_blocks_at_a_time,
    ):
        num_padding = -probabilities.shape[2] % rows_per_block
        rows = F.pad(probabilities, (0, 0, 0, num_padding)).unflatten(2, (-1, rows_per_block))
        chunks.append(block_sums(rows.sum(3), key_block // stride, kv_blocks))
    return torch.cat(chunks, dim=2)
