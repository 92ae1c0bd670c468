"""Sizes of the launches of the selection kernels: pure functions of shapes and settings.

A *tile* is ``q_blocks_per_tile`` query blocks of a head. Its rows are the samples of these query
blocks. A *step* is ``blocks_per_step`` key blocks. One program scores one tile, step by step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import triton

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops.attention.tiles import tile_of

FP8 = torch.float8_e4m3fn
# the number of channels in a product of 8-bit floats is a multiple of this
MIN_CHANNELS = 32
# samples per program, at least: a warp group multiplies 64 rows, and twice as many hide latency
MIN_ROWS = 128
# the same for float32 products, which need more registers
MIN_ROWS_FLOAT32 = 16
# keys per tile of FP8 products; half as many for 16 bits
MAX_TILE_KEYS = 128
# the fewest keys that one product takes
MIN_TILE_KEYS = 16
# key blocks per step, at most: each has a maximum and a sum per row in registers
MAX_BLOCKS_PER_STEP = 8
# tiles of keys in flight
MAX_STAGES = 3
# bytes of a tile of keys, at most
TILE_BYTES = 32 << 10
# bytes of keys in flight per program; larger tiles have fewer stages
IN_FLIGHT_BYTES = 96 << 10
# bytes of keys that fit a GPU's L2 cache together; if there are more, programs that run together
# share the keys of a few heads
CACHED_KEY_BYTES = 32 << 20
# bytes of scratch at a time
SCRATCH_BYTES = 1152 << 20
# lanes that share a row of a product
LANES = 4
# neighbouring columns of a row that these lanes hold
COLUMNS_OF_LANES = 8
# channels per product of queries with queries
GRAM_CHANNELS = 64
# the largest query block whose Gram matrix fits the registers of a program
GRAM_QUERIES = 128
# bytes of Gram matrices at a time: larger inputs are processed in several launches
GRAM_BYTES = 512 << 20


class HeadRange(NamedTuple):
    """Heads of one pass through the kernels, counted over batch rows and heads.

    Attributes:
        first: The first head.
        count: Number of heads.
        per_row: Heads per batch row.
    """

    first: int
    count: int
    per_row: int


class TileRange(NamedTuple):
    """Tiles ``begin`` to ``end``, exclusive, of every head."""

    begin: int
    end: int


class ChannelWidths(NamedTuple):
    """Places of channels in a stored vector, both powers of two.

    Attributes:
        outliers: Places of the channels that outliers are scored on.
        others: Places of the other channels; 0 if outliers are scored on all channels.
    """

    outliers: int
    others: int


@dataclass(frozen=True)
class SampleTiles:
    """Sizes of the launch that scores one kind of samples: typical queries or outliers.

    Attributes:
        num_samples: Samples per query block.
        key_stride: Distance in tokens of the sampled keys.
        key_block: Sampled keys per key block.
        kv_blocks: Key blocks of the sequence.
        first: Channels of the first product.
        others: Channels of the second product; 0 if the first product has all channels.
        tile_keys: Sampled keys per tile.
        interleave: Keys of a block that are adjacent in a tile, see `score.interleaved_keys`.
        blocks_per_step: Key blocks per step, at least 1.
        q_blocks_per_tile: Query blocks per tile.
        stages: Tiles of keys in flight.
        scratch_growth: Key blocks by which the scratch of a tile is wider than the scratch of the
            tile before it; 0 if all tiles have the same width.
    """

    num_samples: int
    key_stride: int
    key_block: int
    kv_blocks: int
    first: int
    others: int
    tile_keys: int
    interleave: int
    blocks_per_step: int
    q_blocks_per_tile: int
    stages: int
    scratch_growth: int

    @property
    def rows(self) -> int:
        """Samples per tile."""
        return self.q_blocks_per_tile * self.num_samples

    @property
    def all_columns(self) -> int:
        """Key blocks of all steps."""
        return triton.cdiv(self.kv_blocks, self.blocks_per_step) * self.blocks_per_step

    def columns(self, tiles: TileRange) -> int:
        """Return the width of the scratch of some tiles of one head, in key blocks."""
        begin, end = tiles
        if self.scratch_growth:
            return self.scratch_growth * (end * (end + 1) - begin * (begin + 1)) // 2
        return (end - begin) * self.all_columns

    def scratch_logits(self, tiles: TileRange, num_heads: int) -> int:
        """Return the number of logits in the scratch of some tiles."""
        return self.columns(tiles) * num_heads * self.rows


@dataclass(frozen=True)
class TilePlan:
    """Sizes of all launches that fill the bitmap of some heads.

    The scratch of a long sequence does not fit the memory. It is filled and read part by part.

    Attributes:
        kinds: Typical queries first, then outliers if there are any.
        q_blocks: Query blocks of a head.
        q_blocks_per_part_tile: Query blocks per tile of ``parts``, the larger one of all kinds.
        parts: Ranges of tiles, the last tiles first, because their programs run longest.
        scratch_logits: Logits in the scratch of each kind, enough for every part.
        scratch_dtype: Dtype of the scratch.
        is_by_head: True if programs that run together share a head, so that its keys are cached.
    """

    kinds: tuple[SampleTiles, ...]
    q_blocks: int
    q_blocks_per_part_tile: int
    parts: tuple[TileRange, ...]
    scratch_logits: tuple[int, ...]
    scratch_dtype: torch.dtype
    is_by_head: bool

    @property
    def typical(self) -> SampleTiles:
        return self.kinds[0]

    @property
    def outliers(self) -> SampleTiles | None:
        return self.kinds[1] if len(self.kinds) > 1 else None

    def tiles_of(self, kind: SampleTiles, part: TileRange) -> TileRange:
        """Return the tiles of a kind of samples that belong to one of ``parts``."""
        ratio = self.q_blocks_per_part_tile // kind.q_blocks_per_tile
        return TileRange(part.begin * ratio, part.end * ratio)


def plan_tiles(
    config: CabConfig,
    *,
    q_length: int,
    kv_length: int,
    num_heads: int,
    num_kv_heads: int,
    widths: ChannelWidths,
    dtype: torch.dtype,
    is_whole_sequence: bool,
    has_descriptors: bool,
) -> TilePlan:
    """Compute the sizes of the launches of `score` and `threshold`.

    Args:
        num_heads: Heads that are processed together, counted over batch rows and heads.
        num_kv_heads: All KV heads, counted over batch rows and heads.
        dtype: Dtype of the stored keys and of the gathered queries.
        is_whole_sequence: True if no key after the position of a query is visible.
        has_descriptors: True if kernels read keys by tensor descriptors, see
            `launch.reads_by_descriptor`.
    """
    sampled = [(num_typical_queries(config), config.typical_key_stride, sum(widths))]
    if config.outlier_queries:
        sampled.append((config.outlier_queries, 1, widths.outliers))
    kinds = tuple(
        _sample_tiles(
            config,
            num_samples=num_samples,
            key_stride=key_stride,
            width=width,
            kv_length=kv_length,
            dtype=dtype,
            is_whole_sequence=is_whole_sequence,
            has_descriptors=has_descriptors,
        )
        for num_samples, key_stride, width in sampled
    )
    q_blocks = triton.cdiv(q_length, config.query_block)
    largest = max(kind.q_blocks_per_tile for kind in kinds)
    # float16 is exact enough for logits of 8-bit products, and packs two comparisons
    scratch_dtype = torch.float16 if dtype == FP8 else torch.float32
    parts, scratch_logits = _parts(kinds, q_blocks, largest, num_heads, scratch_dtype)
    key_bytes = num_kv_heads * kv_length * sum(widths) * dtype.itemsize
    return TilePlan(
        kinds=kinds,
        q_blocks=q_blocks,
        q_blocks_per_part_tile=largest,
        parts=parts,
        scratch_logits=scratch_logits,
        scratch_dtype=scratch_dtype,
        is_by_head=key_bytes > CACHED_KEY_BYTES,
    )


def _sample_tiles(
    config: CabConfig,
    *,
    num_samples: int,
    key_stride: int,
    width: int,
    kv_length: int,
    dtype: torch.dtype,
    is_whole_sequence: bool,
    has_descriptors: bool,
) -> SampleTiles:
    """Compute the sizes for one kind of samples, which have ``width`` channels."""
    key_block = config.key_block // key_stride
    # if both powers of two are equal, they form one power of two, and one product has all channels
    first = width if width & (width - 1) == 0 else 1 << (width.bit_length() - 1)
    min_rows = MIN_ROWS_FLOAT32 if dtype == torch.float32 else MIN_ROWS
    q_blocks_per_tile = triton.cdiv(min_rows, num_samples)
    key_bytes = width * dtype.itemsize
    # if keys are read by pointers, a multiprocessor may have half the memory
    share = 1 if has_descriptors else 2
    max_keys = MAX_TILE_KEYS if dtype == FP8 else MAX_TILE_KEYS // 2
    max_keys = min(max_keys, TILE_BYTES // share // key_bytes)
    max_keys = max(MIN_TILE_KEYS, min(max_keys, MAX_BLOCKS_PER_STEP * key_block))
    tile_keys = max_keys if max_keys % key_block == 0 else tile_of(key_block, max_keys)
    # all tiles of a key block are in flight at the same time
    in_flight = tile_keys if has_descriptors else max(tile_keys, key_block)
    stages = IN_FLIGHT_BYTES // share // (in_flight * key_bytes)
    blocks_per_step = max(1, tile_keys // key_block)
    tokens_per_step = config.key_block * blocks_per_step
    new_steps = triton.cdiv(q_blocks_per_tile * config.query_block, tokens_per_step)
    return SampleTiles(
        num_samples=num_samples,
        key_stride=key_stride,
        key_block=key_block,
        kv_blocks=triton.cdiv(kv_length, config.key_block),
        first=first,
        others=width - first,
        tile_keys=tile_keys,
        interleave=_interleave(blocks_per_step, key_block, tile_keys),
        blocks_per_step=blocks_per_step,
        q_blocks_per_tile=q_blocks_per_tile,
        stages=max(1, min(MAX_STAGES, stages)),
        scratch_growth=new_steps * blocks_per_step if is_whole_sequence else 0,
    )


def _interleave(blocks_per_step: int, key_block: int, tile_keys: int) -> int:
    """Return how many keys of a block are adjacent in a tile."""
    if blocks_per_step == 1:
        # a key block is one tile or several tiles
        return tile_keys
    return min(COLUMNS_OF_LANES // min(LANES, blocks_per_step), key_block)


def _parts(
    kinds: tuple[SampleTiles, ...],
    q_blocks: int,
    largest: int,
    num_heads: int,
    scratch_dtype: torch.dtype,
) -> tuple[tuple[TileRange, ...], tuple[int, ...]]:
    """Cut the tiles into parts whose scratch has at most `SCRATCH_BYTES`, or one tile each.

    Returns:
        The parts, and the size of the scratch of each kind: the largest one over all parts.
    """
    ratios = [largest // kind.q_blocks_per_tile for kind in kinds]

    def logits(begin: int, end: int) -> list[int]:
        return [
            kind.scratch_logits(TileRange(begin * ratio, end * ratio), num_heads)
            for kind, ratio in zip(kinds, ratios, strict=True)
        ]

    def fits(begin: int, end: int) -> bool:
        num_bytes = sum(logits(begin, end)) * scratch_dtype.itemsize
        return begin + 1 == end or num_bytes <= SCRATCH_BYTES

    ends = [triton.cdiv(q_blocks, largest)]
    while ends[-1]:
        # the longest rows start first
        ends.append(bisect_left(range(ends[-1]), True, key=partial(fits, end=ends[-1])))
    parts = tuple(TileRange(begin, end) for end, begin in pairwise(ends))
    sizes = [logits(part.begin, part.end) for part in parts]
    largest_sizes = (max((size[i] for size in sizes), default=0) for i in range(len(kinds)))
    return parts, tuple(largest_sizes)


def channel_widths(channels: tuple[int, ...], head_dim: int) -> ChannelWidths:
    """Return the places of stored channels, padded to powers of two.

    Args:
        channels: Channels of outliers; () for all.
    """
    num_outlier = len(channels) or head_dim
    return ChannelWidths(_places(num_outlier), _places(head_dim - num_outlier))


def _places(num_channels: int) -> int:
    """Return the places of ``num_channels`` channels: a power of two, or 0 for none."""
    return max(MIN_CHANNELS, triton.next_power_of_2(num_channels)) if num_channels else 0


class GramTiles(NamedTuple):
    """Sizes of the launches that sample outliers.

    Attributes:
        block_q: Query block, rounded up to a power of two.
        block_d: Channels per product.
        has_gram: True if the Gram matrix of a query block fits a program. Otherwise its rows are
            computed one at a time.
        q_blocks_per_launch: Query blocks per launch.
    """

    block_q: int
    block_d: int
    has_gram: bool
    q_blocks_per_launch: int


def plan_gram(query_block: int, head_dim: int, num_heads: int, q_blocks: int) -> GramTiles:
    """Compute the sizes of the launches of `gather.outlier_positions`."""
    block_q = triton.next_power_of_2(query_block)
    has_gram = query_block <= GRAM_QUERIES
    step = max(1, GRAM_BYTES // (block_q * block_q * num_heads)) if has_gram else q_blocks
    return GramTiles(
        block_q=block_q,
        block_d=max(16, min(GRAM_CHANNELS, triton.next_power_of_2(head_dim))),
        has_gram=has_gram,
        q_blocks_per_launch=min(step, q_blocks),
    )
