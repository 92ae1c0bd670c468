"""`plan_tiles` computes tile sizes and launch sizes from shapes and settings."""

import pytest
import torch

from cab_hf import CabConfig
from cab_hf.selection import tiles
from cab_hf.selection.tiles import FP8, ChannelWidths, TileRange, compute_channel_widths, plan_tiles

CONFIG = CabConfig(128, 64, outlier_queries=16, typical_queries=32, typical_key_stride=4)


def make_tile_plan(config=CONFIG, **changed_arguments):
    """Return the `TilePlan` of a sequence of 131,072 tokens, with ``changed_arguments``."""
    default_arguments = {
        "q_length": 131_072,
        "kv_length": 131_072,
        "num_heads": 32,
        "num_kv_heads": 8,
        "channel_widths": ChannelWidths(64, 64),
        "dtype": FP8,
        "is_whole_sequence": True,
        "has_descriptors": True,
    }
    return plan_tiles(config, **{**default_arguments, **changed_arguments})


def test_default_config_at_131072_tokens_gives_expected_tile_sizes():
    plan = make_tile_plan()
    typical_tiles, outlier_tiles = plan.typical_tiles, plan.outlier_tiles
    # 128 sampled queries per program: 4 query blocks with 32 each, or 8 query blocks with 16 each
    assert (typical_tiles.q_blocks_per_tile, outlier_tiles.q_blocks_per_tile) == (4, 8)
    assert (typical_tiles.rows_per_tile, outlier_tiles.rows_per_tile) == (128, 128)
    assert (typical_tiles.keys_per_block, outlier_tiles.keys_per_block) == (16, 64)
    assert (typical_tiles.tile_keys, outlier_tiles.tile_keys) == (128, 128)
    assert (typical_tiles.blocks_per_step, outlier_tiles.blocks_per_step) == (8, 2)
    assert (typical_tiles.keys_per_run, outlier_tiles.keys_per_run) == (2, 4)
    assert (typical_tiles.num_first_channels, typical_tiles.num_other_channels) == (128, 0)
    assert (outlier_tiles.num_first_channels, outlier_tiles.num_other_channels) == (64, 0)
    # from one tile to the next, 4 query blocks of 128 tokens see 8 more key blocks of 64, and 8
    # query blocks see 16 more
    assert (typical_tiles.scratch_growth, outlier_tiles.scratch_growth) == (8, 16)
    assert plan.scratch_dtype == torch.float16 and plan.is_head_major


@pytest.mark.parametrize("scratch_bytes", [1, 1 << 20, 1 << 40])
@pytest.mark.parametrize("is_whole_sequence", [True, False])
def test_chunks_cover_every_tile_once_and_fit_the_scratch(
    scratch_bytes, is_whole_sequence, monkeypatch
):
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", scratch_bytes)
    plan = make_tile_plan(q_length=8_000, kv_length=8_000, is_whole_sequence=is_whole_sequence)
    # chunks are in descending order, and cover all query blocks without gaps
    chunk_borders = [chunk_end for _, chunk_end in plan.chunks] + [plan.chunks[-1].begin]
    assert chunk_borders == sorted(chunk_borders, reverse=True) and chunk_borders[-1] == 0
    assert chunk_borders[0] * plan.q_blocks_per_chunk_tile >= plan.q_blocks
    assert all(
        later_chunk.begin == earlier_chunk.end
        for later_chunk, earlier_chunk in zip(plan.chunks, plan.chunks[1:], strict=False)
    )
    for query_tiles, max_num_logits in zip(plan.sample_tiles, plan.scratch_logits, strict=True):
        num_logits_of_chunks = [
            query_tiles.count_scratch_logits(plan.convert_chunk_to_tiles(query_tiles, chunk), 32)
            for chunk in plan.chunks
        ]
        assert max(num_logits_of_chunks) == max_num_logits
    for chunk in plan.chunks:
        num_logits = sum(
            query_tiles.count_scratch_logits(plan.convert_chunk_to_tiles(query_tiles, chunk), 32)
            for query_tiles in plan.sample_tiles
        )
        assert 2 * num_logits <= scratch_bytes or chunk.end - chunk.begin == 1


@pytest.mark.parametrize(
    ("scratch_mib", "expected_chunks_in_flight"), [(1, 1), (250, 2), (350, 3), (1 << 20, 1)]
)
def test_chunks_in_flight_share_the_scratch(scratch_mib, expected_chunks_in_flight, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", scratch_mib << 20)
    plan = make_tile_plan(q_length=64_000, kv_length=64_000)
    assert plan.chunks_in_flight == expected_chunks_in_flight
    if scratch_mib == 1 << 20:
        assert len(plan.chunks) == 1
    if expected_chunks_in_flight > 1:
        assert len(plan.chunks) > expected_chunks_in_flight
        assert expected_chunks_in_flight * 2 * sum(plan.scratch_logits) <= scratch_mib << 20
        largest_chunk = plan.chunks[0]
        num_programs = (largest_chunk.end - largest_chunk.begin) * 32
        assert num_programs >= tiles.MIN_PROGRAMS_IN_FLIGHT


@pytest.mark.parametrize(
    ("q_length", "kv_length", "expected_mib"),
    [
        (8_192, 8_192, 100),
        (131_072, 131_072, 100),
        (2**20, 2**20, 800),
        (32_768, 2**20, 100),
        (65_536, 2**20, 200),
    ],
)
def test_scratch_grows_with_keys_and_queries(q_length, kv_length, expected_mib, monkeypatch):
    monkeypatch.setattr(tiles, "MAX_SCRATCH_BYTES", 100 << 20)
    assert tiles.compute_max_scratch_bytes(q_length, kv_length) == expected_mib << 20


def test_scratch_of_a_range_is_the_sum_of_its_tiles():
    for query_tiles in make_tile_plan().sample_tiles:
        sum_of_tiles = sum(
            query_tiles.count_columns(TileRange(tile, tile + 1)) for tile in range(3, 11)
        )
        assert query_tiles.count_columns(TileRange(3, 11)) == sum_of_tiles


@pytest.mark.parametrize(
    ("dtype", "rows_per_tile", "tile_keys"),
    [(FP8, 128, 128), (torch.bfloat16, 128, 64), (torch.float32, 32, 64)],
    ids=str,
)
def test_dtype_determines_rows_and_keys_of_a_tile(dtype, rows_per_tile, tile_keys):
    typical_tiles = make_tile_plan(dtype=dtype).typical_tiles
    assert (typical_tiles.rows_per_tile, typical_tiles.tile_keys) == (rows_per_tile, tile_keys)


def test_pointers_have_smaller_tiles_than_descriptors():
    arguments = {"dtype": torch.bfloat16, "channel_widths": ChannelWidths(128, 128)}
    plan_of_descriptors = make_tile_plan(**arguments, has_descriptors=True)
    plan_of_pointers = make_tile_plan(**arguments, has_descriptors=False)
    assert plan_of_descriptors.typical_tiles.tile_keys == 64
    assert plan_of_pointers.typical_tiles.tile_keys == 32


@pytest.mark.parametrize("key_block", [16, 64, 128, 256])
@pytest.mark.parametrize("key_stride", [1, 4, 16])
def test_tile_is_whole_blocks_or_divides_a_block(key_block, key_stride):
    config = CabConfig(128, key_block, typical_key_stride=key_stride)
    for query_tiles in make_tile_plan(config).sample_tiles:
        tile_keys, keys_per_block = query_tiles.tile_keys, query_tiles.keys_per_block
        assert tile_keys % keys_per_block == 0 or keys_per_block % tile_keys == 0
        assert tile_keys & (tile_keys - 1) == 0 or tile_keys % keys_per_block == 0
        assert query_tiles.blocks_per_step == max(1, tile_keys // keys_per_block)
        assert tile_keys % query_tiles.keys_per_run == 0


def test_plan_without_outliers_has_tiles_of_typical_queries_only():
    plan = make_tile_plan(CabConfig(outlier_queries=0))
    assert plan.outlier_tiles is None and len(plan.scratch_logits) == 1


@pytest.mark.parametrize(
    ("channels", "head_dim", "expected_widths"),
    [
        ((), 128, (128, 0)),
        ((), 80, (128, 0)),
        (tuple(range(64)), 128, (64, 64)),
        ((1, 2, 3), 24, (32, 32)),
        (tuple(range(8)), 8, (32, 0)),
    ],
)
def test_channel_widths_are_powers_of_two(channels, head_dim, expected_widths):
    assert compute_channel_widths(channels, head_dim) == expected_widths


def test_gram_matrices_stay_below_their_memory_bound():
    gram_tiles = tiles.plan_gram(query_block=128, head_dim=128, num_heads=32, q_blocks=8192)
    assert (
        gram_tiles.has_gram
        and gram_tiles.q_blocks_per_launch * 32 * 128 * 128 <= tiles.MAX_GRAM_BYTES
    )
    assert not tiles.plan_gram(256, 128, 32, 8192).has_gram
