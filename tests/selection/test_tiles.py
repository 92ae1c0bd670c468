"""`plan_tiles` computes tile sizes and launch sizes from shapes and settings."""

import pytest
import torch

from cab_hf import CabConfig
from cab_hf.selection import tiles
from cab_hf.selection.tiles import FP8, ChannelWidths, TileRange, channel_widths, plan_tiles

CONFIG = CabConfig(128, 64, outlier_queries=16, typical_queries=32, typical_key_stride=4)


def plan_of(config=CONFIG, **changes):
    shape = {
        "q_length": 131_072,
        "kv_length": 131_072,
        "num_heads": 32,
        "num_kv_heads": 8,
        "widths": ChannelWidths(64, 64),
        "dtype": FP8,
        "is_whole_sequence": True,
        "has_descriptors": True,
    }
    return plan_tiles(config, **{**shape, **changes})


def test_default_at_131072_tokens_has_these_sizes():
    plan = plan_of()
    typical, outliers = plan.typical, plan.outliers
    # 128 sampled queries per program: 4 query blocks with 32 each, or 8 query blocks with 16 each
    assert (typical.q_blocks_per_tile, outliers.q_blocks_per_tile) == (4, 8)
    assert (typical.rows, outliers.rows) == (128, 128)
    assert (typical.key_block, outliers.key_block) == (16, 64)
    assert (typical.tile_keys, outliers.tile_keys) == (128, 128)
    assert (typical.blocks_per_step, outliers.blocks_per_step) == (8, 2)
    assert (typical.interleave, outliers.interleave) == (2, 4)
    assert (typical.first_width, typical.other_width) == (128, 0)
    assert (outliers.first_width, outliers.other_width) == (64, 0)
    # from one tile to the next, 4 query blocks of 128 tokens see 8 more key blocks of 64, and 8
    # query blocks see 16 more
    assert (typical.scratch_growth, outliers.scratch_growth) == (8, 16)
    assert plan.scratch_dtype == torch.float16 and plan.is_by_head


@pytest.mark.parametrize("scratch_bytes", [1, 1 << 20, 1 << 40])
@pytest.mark.parametrize("is_whole_sequence", [True, False])
def test_chunks_cover_every_tile_once_and_fit_the_scratch(
    scratch_bytes, is_whole_sequence, monkeypatch
):
    monkeypatch.setattr(tiles, "SCRATCH_BYTES", scratch_bytes)
    plan = plan_of(q_length=8_000, kv_length=8_000, is_whole_sequence=is_whole_sequence)
    # chunks are in descending order, and cover all query blocks without gaps
    borders = [end for _, end in plan.chunks] + [plan.chunks[-1].begin]
    assert borders == sorted(borders, reverse=True) and borders[-1] == 0
    assert borders[0] * plan.q_blocks_per_chunk_tile >= plan.q_blocks
    assert all(a.begin == b.end for a, b in zip(plan.chunks, plan.chunks[1:], strict=False))
    for kind, size in zip(plan.kinds, plan.scratch_logits, strict=True):
        of_chunks = [kind.scratch_logits(plan.tiles_of(kind, chunk), 32) for chunk in plan.chunks]
        assert max(of_chunks) == size
    for chunk in plan.chunks:
        logits = sum(kind.scratch_logits(plan.tiles_of(kind, chunk), 32) for kind in plan.kinds)
        assert 2 * logits <= scratch_bytes or chunk.end - chunk.begin == 1


def test_scratch_of_a_range_is_the_sum_of_its_tiles():
    for kind in plan_of().kinds:
        alone = sum(kind.columns(TileRange(tile, tile + 1)) for tile in range(3, 11))
        assert kind.columns(TileRange(3, 11)) == alone


@pytest.mark.parametrize(
    ("dtype", "rows", "tile_keys"),
    [(FP8, 128, 128), (torch.bfloat16, 128, 64), (torch.float32, 32, 64)],
    ids=str,
)
def test_dtype_bounds_rows_and_keys_of_a_tile(dtype, rows, tile_keys):
    typical = plan_of(dtype=dtype).typical
    assert (typical.rows, typical.tile_keys) == (rows, tile_keys)


def test_pointers_have_smaller_tiles_than_descriptors():
    shape = {"dtype": torch.bfloat16, "widths": ChannelWidths(128, 128)}
    by_descriptor = plan_of(**shape, has_descriptors=True)
    by_pointer = plan_of(**shape, has_descriptors=False)
    assert by_descriptor.typical.tile_keys == 64 and by_pointer.typical.tile_keys == 32


@pytest.mark.parametrize("key_block", [16, 64, 128, 256])
@pytest.mark.parametrize("key_stride", [1, 4, 16])
def test_step_is_whole_blocks_or_tiles_divide_a_block(key_block, key_stride):
    config = CabConfig(128, key_block, typical_key_stride=key_stride)
    for kind in plan_of(config).kinds:
        assert kind.tile_keys % kind.key_block == 0 or kind.key_block % kind.tile_keys == 0
        assert kind.tile_keys & (kind.tile_keys - 1) == 0 or kind.tile_keys % kind.key_block == 0
        assert kind.blocks_per_step == max(1, kind.tile_keys // kind.key_block)
        assert kind.tile_keys % kind.interleave == 0


def test_no_outliers_gives_one_kind_of_samples():
    plan = plan_of(CabConfig(outlier_queries=0))
    assert plan.outliers is None and len(plan.scratch_logits) == 1


@pytest.mark.parametrize(
    ("channels", "head_dim", "widths"),
    [
        ((), 128, (128, 0)),
        ((), 80, (128, 0)),
        (tuple(range(64)), 128, (64, 64)),
        ((1, 2, 3), 24, (32, 32)),
        (tuple(range(8)), 8, (32, 0)),
    ],
)
def test_channel_widths_are_powers_of_two(channels, head_dim, widths):
    assert channel_widths(channels, head_dim) == widths


def test_gram_matrices_stay_below_their_memory_bound():
    sizes = tiles.plan_gram(query_block=128, head_dim=128, num_heads=32, q_blocks=8192)
    assert sizes.has_gram and sizes.q_blocks_per_launch * 32 * 128 * 128 <= tiles.GRAM_BYTES
    assert not tiles.plan_gram(256, 128, 32, 8192).has_gram
