"""Sizes of the launches of the selection kernels, computed from shapes and settings.

A *tile* is the set of samples of ``q_blocks_per_tile`` consecutive query blocks of a head; each
sample is a row of the tile. A *step* is ``blocks_per_step`` consecutive key blocks. One program
scores one tile and loops over steps. A *chunk* is a range of tiles whose scores are in memory at
the same time.

No function of this module reads a tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import triton

from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops.attention.tiles import choose_tile_size

FP8 = torch.float8_e4m3fn
# smallest number of channels that one product of 8-bit floats multiplies
MIN_FP8_CHANNELS = 32
# fewest samples per program: a warp group multiplies 64 rows, and twice as many hide latency
MIN_SAMPLES_PER_PROGRAM = 128
# fewest samples per program for float32 products, which need more registers
MIN_SAMPLES_PER_PROGRAM_FLOAT32 = 16
# most keys per tile of FP8 products; half as many for other dtypes
MAX_TILE_KEYS = 128
# fewest keys that one product takes
MIN_TILE_KEYS = 16
# most key blocks per step: a running maximum and sum per sample and key block are in registers
MAX_BLOCKS_PER_STEP = 8
# most tiles of keys in flight: depth of the software pipeline
MAX_STAGES = 3
# largest tile of keys, in bytes
MAX_TILE_BYTES = 32 << 10
# largest size of all tiles of keys that a program has in flight, in bytes
MAX_IN_FLIGHT_BYTES = 96 << 10
# size of the keys, in bytes, that fits into the L2 cache of a GPU. If the keys are larger, programs
# that run at the same time process the same few heads
MAX_CACHED_KEY_BYTES = 32 << 20
# largest scratch of all chunks in flight, in bytes, for at most `MAX_KEYS_WITH_SMALL_SCRATCH` keys
MAX_SCRATCH_BYTES = 1152 << 20
MAX_KEYS_WITH_SMALL_SCRATCH = 131072
# most queries for which the scratch does not grow with more keys, see `compute_max_scratch_bytes`
MAX_QUERIES_WITH_SMALL_SCRATCH = 32768
# most chunks that run at the same time. The last programs of a chunk leave multiprocessors idle,
# which the programs of other chunks use
MAX_CHUNKS_IN_FLIGHT = 3
# fewest programs of a launch if several chunks are in flight. Several chunks with fewer programs
# each take longer than one larger chunk
MIN_PROGRAMS_IN_FLIGHT = 128
# threads that share a row of a matrix product in the register layout of tensor cores
LANES_PER_ROW = 4
# adjacent columns of a row that these threads hold, two columns per thread
COLUMNS_PER_LANE_GROUP = 8
# channels per step of the product of queries with queries
GRAM_CHANNELS_PER_STEP = 64
# largest query block whose Gram matrix fits the registers of a program
MAX_GRAM_QUERIES = 128
# largest size of the Gram matrices of one launch, in bytes; larger inputs need several launches
MAX_GRAM_BYTES = 512 << 20


class HeadRange(NamedTuple):
    """Consecutive heads that one launch processes. A head has the index batch_row * H + head.

    Attributes:
        first_head: Index of the first head.
        num_heads: Number of heads.
        heads_per_row: H, the number of heads per batch row.
    """

    first_head: int
    num_heads: int
    heads_per_row: int


class TileRange(NamedTuple):
    """Tiles ``begin`` (inclusive) to ``end`` (exclusive) of every head."""

    begin: int
    end: int


class ChannelWidths(NamedTuple):
    """Widths of the two groups of channels in a stored key or query.

    Attributes:
        outliers: Number of channels that outlier queries are scored on, padded to a power of two.
        others: Number of other channels, padded to a power of two; 0 if outlier queries are scored
            on all channels.
    """

    outliers: int
    others: int


@dataclass(frozen=True)
class SampleTiles:
    """Sizes of the launch that scores the samples of one kind: typical queries or outlier queries.

    A product of a tile of queries with a tile of keys is split along the channels into two
    products whose widths are powers of two.

    Attributes:
        num_samples: Samples per query block.
        key_stride: Distance between sampled keys, in tokens.
        keys_per_block: Sampled keys per key block.
        kv_blocks: Key blocks of the sequence.
        num_first_channels: Channels of the first product.
        num_other_channels: Channels of the second product; 0 for a single product.
        tile_keys: Sampled keys per tile of keys.
        keys_per_run: Keys of a block that are adjacent in a tile, see `score.interleave_keys`.
        blocks_per_step: Key blocks per step, at least 1.
        q_blocks_per_tile: Query blocks per tile.
        num_stages: Depth of the software pipeline: number of tiles of keys in flight.
        scratch_growth: Difference in key blocks between the scratch of a tile and the scratch of
            the previous tile, see `score`; 0 if the scratch of all tiles has the same width.
    """

    num_samples: int
    key_stride: int
    keys_per_block: int
    kv_blocks: int
    num_first_channels: int
    num_other_channels: int
    tile_keys: int
    keys_per_run: int
    blocks_per_step: int
    q_blocks_per_tile: int
    num_stages: int
    scratch_growth: int

    @property
    def rows_per_tile(self) -> int:
        """Return the number of samples per tile."""
        return self.q_blocks_per_tile * self.num_samples

    @property
    def num_columns(self) -> int:
        """Return the number of key blocks of the sequence, rounded up to whole steps."""
        return triton.cdiv(self.kv_blocks, self.blocks_per_step) * self.blocks_per_step

    def count_columns(self, tile_range: TileRange) -> int:
        """Return the number of key blocks in the scratch of one head, over ``tile_range``."""
        begin, end = tile_range
        if self.scratch_growth:
            return self.scratch_growth * (end * (end + 1) - begin * (begin + 1)) // 2
        return (end - begin) * self.num_columns

    def count_scratch_logits(self, tile_range: TileRange, num_heads: int) -> int:
        """Return the number of logits in the scratch of ``num_heads`` heads, over the tiles."""
        return self.count_columns(tile_range) * num_heads * self.rows_per_tile


@dataclass(frozen=True)
class TilePlan:
    """Sizes of all launches that score the samples of a group of heads and fill their bitmap.

    The scratch of a long sequence can exceed the memory. Therefore the tiles are cut into chunks.
    A few chunks are in flight at the same time. When a chunk ends, the next chunk uses its scratch.

    Attributes:
        sample_tiles: Sizes for typical queries, then for outlier queries if there are any.
        q_blocks: Query blocks of a head.
        q_blocks_per_chunk_tile: Query blocks per tile of ``chunks``: the maximum of
            ``q_blocks_per_tile`` over ``sample_tiles``.
        chunks: Ranges of tiles. The last tiles come first, because their programs run longest.
        chunks_in_flight: Number of chunks that run at the same time, each with its own scratch.
        scratch_logits: For each kind, the number of logits in the scratch of the largest chunk.
        scratch_dtype: Dtype of the scratch.
        is_head_major: True if programs that run at the same time process the same head, so that the
            keys of this head stay in the L2 cache.
    """

    sample_tiles: tuple[SampleTiles, ...]
    q_blocks: int
    q_blocks_per_chunk_tile: int
    chunks: tuple[TileRange, ...]
    chunks_in_flight: int
    scratch_logits: tuple[int, ...]
    scratch_dtype: torch.dtype
    is_head_major: bool

    @property
    def typical_tiles(self) -> SampleTiles:
        """Return the sizes for typical queries."""
        return self.sample_tiles[0]

    @property
    def outlier_tiles(self) -> SampleTiles | None:
        """Return the sizes for outlier queries; None if no outlier queries are sampled."""
        return self.sample_tiles[1] if len(self.sample_tiles) > 1 else None

    def convert_chunk_to_tiles(self, sample_tiles: SampleTiles, chunk: TileRange) -> TileRange:
        """Convert a chunk to the tiles of one kind of samples.

        Args:
            sample_tiles: One of ``TilePlan.sample_tiles``. Its tiles have ``q_blocks_per_tile``
                query blocks.
            chunk: One of ``chunks``, whose tiles have ``q_blocks_per_chunk_tile`` query blocks.
        """
        tiles_per_chunk_tile = self.q_blocks_per_chunk_tile // sample_tiles.q_blocks_per_tile
        return TileRange(chunk.begin * tiles_per_chunk_tile, chunk.end * tiles_per_chunk_tile)


def plan_tiles(
    config: CabConfig,
    *,
    q_length: int,
    kv_length: int,
    num_heads: int,
    num_kv_heads: int,
    channel_widths: ChannelWidths,
    dtype: torch.dtype,
    is_whole_sequence: bool,
    has_descriptors: bool,
) -> TilePlan:
    """Compute the sizes of the launches of `score` and `threshold`.

    Args:
        config: Settings of the selection.
        q_length: Queries per batch row.
        kv_length: Keys per batch row.
        num_heads: Heads of one launch, summed over batch rows.
        num_kv_heads: KV heads, summed over batch rows.
        channel_widths: Result of `compute_channel_widths`.
        dtype: Dtype of the stored keys and of the gathered queries.
        is_whole_sequence: True if query i is token i, so that the number of visible keys grows
            from tile to tile.
        has_descriptors: True if kernels read keys by tensor descriptors, see
            `launch.reads_by_descriptor`.
    """
    sizes_by_sample_kind = [
        (num_typical_queries(config), config.typical_key_stride, sum(channel_widths))
    ]
    if config.outlier_queries:
        sizes_by_sample_kind.append((config.outlier_queries, 1, channel_widths.outliers))
    sample_tiles = tuple(
        _plan_sample_tiles(
            config,
            num_samples=num_samples,
            key_stride=key_stride,
            num_channels=num_channels,
            kv_length=kv_length,
            dtype=dtype,
            is_whole_sequence=is_whole_sequence,
            has_descriptors=has_descriptors,
        )
        for num_samples, key_stride, num_channels in sizes_by_sample_kind
    )
    q_blocks = triton.cdiv(q_length, config.query_block)
    q_blocks_per_chunk_tile = max(tiles.q_blocks_per_tile for tiles in sample_tiles)
    # float16 suffices for logits of 8-bit products, and packs two comparisons in one instruction
    scratch_dtype = torch.float16 if dtype == FP8 else torch.float32
    chunks, chunks_in_flight, scratch_logits = _plan_chunks(
        sample_tiles,
        q_blocks=q_blocks,
        q_blocks_per_chunk_tile=q_blocks_per_chunk_tile,
        num_heads=num_heads,
        scratch_dtype=scratch_dtype,
        max_scratch_bytes=compute_max_scratch_bytes(q_length, kv_length),
    )
    total_key_bytes = num_kv_heads * kv_length * sum(channel_widths) * dtype.itemsize
    return TilePlan(
        sample_tiles=sample_tiles,
        q_blocks=q_blocks,
        q_blocks_per_chunk_tile=q_blocks_per_chunk_tile,
        chunks=chunks,
        chunks_in_flight=chunks_in_flight,
        scratch_logits=scratch_logits,
        scratch_dtype=scratch_dtype,
        is_head_major=total_key_bytes > MAX_CACHED_KEY_BYTES,
    )


def _plan_sample_tiles(
    config: CabConfig,
    *,
    num_samples: int,
    key_stride: int,
    num_channels: int,
    kv_length: int,
    dtype: torch.dtype,
    is_whole_sequence: bool,
    has_descriptors: bool,
) -> SampleTiles:
    """Compute the sizes of the launch for one kind of samples.

    ``num_channels`` is the number of stored channels that the samples are scored on: a power of
    two, or the sum of two powers of two.
    """
    keys_per_block = config.key_block // key_stride
    # a number that is a power of two, such as 64 + 64, needs one product only
    is_power_of_two = num_channels & (num_channels - 1) == 0
    num_first_channels = num_channels if is_power_of_two else 1 << (num_channels.bit_length() - 1)
    min_samples = (
        MIN_SAMPLES_PER_PROGRAM_FLOAT32 if dtype == torch.float32 else MIN_SAMPLES_PER_PROGRAM
    )
    q_blocks_per_tile = triton.cdiv(min_samples, num_samples)
    bytes_per_key = num_channels * dtype.itemsize
    # GPUs that read keys by pointers can have half the shared memory
    memory_divisor = 1 if has_descriptors else 2
    max_tile_keys = MAX_TILE_KEYS if dtype == FP8 else MAX_TILE_KEYS // 2
    max_tile_keys = min(max_tile_keys, MAX_TILE_BYTES // memory_divisor // bytes_per_key)
    max_tile_keys = max(MIN_TILE_KEYS, min(max_tile_keys, MAX_BLOCKS_PER_STEP * keys_per_block))
    tile_keys = (
        max_tile_keys
        if max_tile_keys % keys_per_block == 0
        else choose_tile_size(keys_per_block, max_tile_keys)
    )
    # without descriptors, Triton loads all tiles of a key block in the same stage
    keys_per_stage = tile_keys if has_descriptors else max(tile_keys, keys_per_block)
    num_stages = MAX_IN_FLIGHT_BYTES // memory_divisor // (keys_per_stage * bytes_per_key)
    blocks_per_step = max(1, tile_keys // keys_per_block)
    tokens_per_step = config.key_block * blocks_per_step
    new_steps_per_tile = triton.cdiv(q_blocks_per_tile * config.query_block, tokens_per_step)
    return SampleTiles(
        num_samples=num_samples,
        key_stride=key_stride,
        keys_per_block=keys_per_block,
        kv_blocks=triton.cdiv(kv_length, config.key_block),
        num_first_channels=num_first_channels,
        num_other_channels=num_channels - num_first_channels,
        tile_keys=tile_keys,
        keys_per_run=_compute_keys_per_run(blocks_per_step, keys_per_block, tile_keys),
        blocks_per_step=blocks_per_step,
        q_blocks_per_tile=q_blocks_per_tile,
        num_stages=max(1, min(MAX_STAGES, num_stages)),
        scratch_growth=new_steps_per_tile * blocks_per_step if is_whole_sequence else 0,
    )


def _compute_keys_per_run(blocks_per_step: int, keys_per_block: int, tile_keys: int) -> int:
    """Return `SampleTiles.keys_per_run`, the keys of a block that are adjacent in a tile."""
    if blocks_per_step == 1:
        # all keys of a tile belong to one block
        return tile_keys
    return min(COLUMNS_PER_LANE_GROUP // min(LANES_PER_ROW, blocks_per_step), keys_per_block)


def _plan_chunks(
    sample_tiles: tuple[SampleTiles, ...],
    *,
    q_blocks: int,
    q_blocks_per_chunk_tile: int,
    num_heads: int,
    scratch_dtype: torch.dtype,
    max_scratch_bytes: int,
) -> tuple[tuple[TileRange, ...], int, tuple[int, ...]]:
    """Cut the tiles of a head into chunks.

    The scratch of all chunks in flight has at most ``max_scratch_bytes``. A chunk has at least one
    tile, even if the scratch of this tile is larger.

    Returns:
        `TilePlan.chunks`, `TilePlan.chunks_in_flight` and `TilePlan.scratch_logits`.
    """
    tiles_per_chunk_tile = [
        q_blocks_per_chunk_tile // tiles.q_blocks_per_tile for tiles in sample_tiles
    ]

    def count_logits_per_kind(chunk: TileRange) -> list[int]:
        return [
            tiles.count_scratch_logits(
                TileRange(chunk.begin * num_tiles, chunk.end * num_tiles), num_heads
            )
            for tiles, num_tiles in zip(sample_tiles, tiles_per_chunk_tile, strict=True)
        ]

    def count_scratch_bytes(chunk: TileRange) -> int:
        return sum(count_logits_per_kind(chunk)) * scratch_dtype.itemsize

    num_chunk_tiles = triton.cdiv(q_blocks, q_blocks_per_chunk_tile)
    # if all tiles fit the scratch, several launches would cost more time than they save
    fits_one_chunk = count_scratch_bytes(TileRange(0, num_chunk_tiles)) <= max_scratch_bytes
    for chunks_in_flight in range(1 if fits_one_chunk else MAX_CHUNKS_IN_FLIGHT, 0, -1):
        max_chunk_bytes = max_scratch_bytes // chunks_in_flight
        chunks = _split_tiles(num_chunk_tiles, count_scratch_bytes, max_chunk_bytes)
        if chunks_in_flight == 1:
            break
        # the first chunk has the fewest tiles
        num_programs = (chunks[0].end - chunks[0].begin) * num_heads
        has_enough_programs = num_programs >= MIN_PROGRAMS_IN_FLIGHT
        if has_enough_programs and count_scratch_bytes(chunks[0]) <= max_chunk_bytes:
            break
    logits_of_chunks = [count_logits_per_kind(chunk) for chunk in chunks]
    max_logits_per_kind = tuple(
        max((chunk_logits[sample_kind] for chunk_logits in logits_of_chunks), default=0)
        for sample_kind in range(len(sample_tiles))
    )
    return chunks, chunks_in_flight, max_logits_per_kind


def _split_tiles(
    num_tiles: int, count_scratch_bytes: Callable[[TileRange], int], max_chunk_bytes: int
) -> tuple[TileRange, ...]:
    """Cut tiles 0 to ``num_tiles`` into chunks, from the last tile to the first.

    Each chunk begins as early as its scratch allows, and has at least one tile.

    Args:
        num_tiles: Number of tiles.
        count_scratch_bytes: Function that returns the bytes of the scratch of a chunk.
        max_chunk_bytes: Largest scratch of a chunk of several tiles.
    """

    def fits_scratch(first_tile: int, end_tile: int) -> bool:
        chunk = TileRange(first_tile, end_tile)
        return first_tile + 1 == end_tile or count_scratch_bytes(chunk) <= max_chunk_bytes

    chunk_ends = [num_tiles]
    while chunk_ends[-1]:
        end_tile = chunk_ends[-1]
        chunk_ends.append(
            bisect_left(range(end_tile), True, key=partial(fits_scratch, end_tile=end_tile))
        )
    return tuple(TileRange(begin, end) for end, begin in pairwise(chunk_ends))


def compute_max_scratch_bytes(q_length: int, kv_length: int) -> int:
    """Return the largest scratch of all chunks in flight, in bytes.

    The scratch of a program grows with the keys. Therefore the limit is proportional to the keys
    from `MAX_KEYS_WITH_SMALL_SCRATCH` on; otherwise too few programs would run at the same time.
    A call of few queries, such as a chunk of a prompt, needs little memory otherwise. Its limit is
    therefore at most proportional to the queries.

    Args:
        q_length: Queries per batch row.
        kv_length: Keys per batch row.
    """
    growth = min(kv_length / MAX_KEYS_WITH_SMALL_SCRATCH, q_length / MAX_QUERIES_WITH_SMALL_SCRATCH)
    return int(MAX_SCRATCH_BYTES * max(growth, 1.0))


def compute_channel_widths(channels: tuple[int, ...], head_dim: int) -> ChannelWidths:
    """Return the padded widths of the channels of outlier queries, and of the other channels.

    Args:
        channels: Channels that outlier queries are scored on; () for all channels.
        head_dim: Channels of q and k.
    """
    num_outlier_channels = len(channels) or head_dim
    return ChannelWidths(
        outliers=_pad_width(num_outlier_channels),
        others=_pad_width(head_dim - num_outlier_channels),
    )


def _pad_width(num_channels: int) -> int:
    """Round a number of channels up to a power of two, at least `MIN_FP8_CHANNELS`; 0 remains 0."""
    return max(MIN_FP8_CHANNELS, triton.next_power_of_2(num_channels)) if num_channels else 0


class GramTiles(NamedTuple):
    """Sizes of the launches of `gather.sample_outlier_positions`.

    Attributes:
        block_q: Queries per block, rounded up to a power of two.
        block_d: Channels per step of a matrix product.
        has_gram: True if a program computes the Gram matrix of a query block. For larger query
            blocks, a program computes one row of the Gram matrix at a time.
        q_blocks_per_launch: Query blocks per launch.
    """

    block_q: int
    block_d: int
    has_gram: bool
    q_blocks_per_launch: int


def plan_gram(query_block: int, head_dim: int, num_heads: int, q_blocks: int) -> GramTiles:
    """Compute the sizes of the launches of `gather.sample_outlier_positions`.

    Args:
        query_block: Queries per block.
        head_dim: Channels of q.
        num_heads: Heads of a launch, summed over batch rows.
        q_blocks: Query blocks of a head.
    """
    block_q = triton.next_power_of_2(query_block)
    has_gram = query_block <= MAX_GRAM_QUERIES
    q_blocks_per_launch = q_blocks
    if has_gram:
        gram_bytes_per_q_block = block_q * block_q * num_heads
        q_blocks_per_launch = min(max(1, MAX_GRAM_BYTES // gram_bytes_per_q_block), q_blocks)
    return GramTiles(
        block_q=block_q,
        block_d=max(16, min(GRAM_CHANNELS_PER_STEP, triton.next_power_of_2(head_dim))),
        has_gram=has_gram,
        q_blocks_per_launch=q_blocks_per_launch,
    )
