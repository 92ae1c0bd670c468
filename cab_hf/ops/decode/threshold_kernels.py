"""Kernels that find the selection threshold of each query head from a sample of the keys.

`reference` of this package defines levels and the sample.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from cab_hf.ops.attention.tiles import LOG2_E
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.packed import compute_key_products, load_queries, repeat_per_key
from cab_hf.ops.launch import LOWEST_LOGIT

LEVELS_PER_OCTAVE = tl.constexpr(reference.LEVELS_PER_OCTAVE)
OCTAVES_PER_LEVEL = tl.constexpr(1 / reference.LEVELS_PER_OCTAVE)
LAST_LEVEL = tl.constexpr(reference.LAST_LEVEL)
HIDDEN_LEVEL = tl.constexpr(reference.HIDDEN_LEVEL)
KEYS_PER_RUN = tl.constexpr(reference.KEYS_PER_RUN)
SINK_TOKENS = tl.constexpr(reference.SINK_TOKENS)
LOCAL_TOKENS = tl.constexpr(reference.LOCAL_TOKENS)
LOG2_UNREAD_WEIGHT_FACTOR = tl.constexpr(math.log2(reference.UNREAD_WEIGHT_FACTOR))
LEVEL_BITS = tl.constexpr(reference.LAST_LEVEL.bit_length())
# stored logit of a sampled slot without a countable key: the smallest int16
UNCOUNTED_LOGIT = tl.constexpr(-32768)


@triton.jit
def _round_to_levels(x, HAS_PTX: tl.constexpr):
    """Compute `reference.round_to_levels`, with an int16 result."""
    x = x * LEVELS_PER_OCTAVE
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            asm="cvt.rni.sat.s16.f32 $0, $1;",
            constraints="=h,f",
            args=[x],
            dtype=tl.int16,
            is_pure=True,
            pack=1,
        )
    return tl.floor(tl.minimum(tl.maximum(x, -32768.0), 32767.0) + 0.5).to(tl.int16)


@triton.jit
def sample_kernel(
    q,
    codes,
    key_scales,
    length_ptr,
    padding_mask_ptr,
    padding_mask_stride,
    first_token_ptr,
    qk_scale,
    kv_heads,
    logits_ptr,
    lse_ptr,
    query_scales_ptr,
    num_always_read_keys_ptr,
    SAMPLE_STRIDE: tl.constexpr,
    LOG2_SAMPLE_STRIDE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    HALF_DISTANCE: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    HAS_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write the logits of ``BLOCK_N`` sampled keys, rounded to levels, and their log-sum-exps.

    Each KV head of each sequence has one row of programs. The last program of a row processes the
    keys that are always selected instead of sampled keys. This program writes the log-sum-exp and
    the number of these keys, and the scales of the queries.
    """
    if USE_PDL:
        # wait before launching dependents: `_choose_keys_kernel` reads the query before it waits,
        # so that the kernel that writes the query must have ended
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = row // kv_heads, row % kv_heads
    num_splits = tl.num_programs(0)
    end_slot = tl.load(length_ptr).to(tl.int32)
    first_token = 0
    if padding_mask_ptr is not None:
        first_token = tl.load(first_token_ptr + batch)
    NUM_COLUMNS: tl.constexpr = KEYS_PER_ROW * BLOCK_G
    NUM_ROWS: tl.constexpr = BLOCK_N // KEYS_PER_ROW
    column, packed_row = tl.arange(0, NUM_COLUMNS), tl.arange(0, NUM_ROWS)
    # [BLOCK_G]
    lse_offset = (row * num_splits + split) * BLOCK_G + tl.arange(0, BLOCK_G)
    is_sample_program = split < num_splits - 1
    if is_sample_program & (split * BLOCK_N * SAMPLE_STRIDE >= end_slot):
        tl.store(lse_ptr + lse_offset, tl.full([BLOCK_G], LOWEST_LOGIT, tl.float32))
        return

    # slot of the first of KEYS_PER_ROW keys of each row, [NUM_ROWS, 1]: sampled keys, or in the
    # last program first sink tokens, then local tokens
    sample_index = split * BLOCK_N + packed_row * KEYS_PER_ROW
    sampled_slot = (
        sample_index // KEYS_PER_RUN * (KEYS_PER_RUN * SAMPLE_STRIDE) + sample_index % KEYS_PER_RUN
    )
    local_slot = end_slot - LOCAL_TOKENS + packed_row * KEYS_PER_ROW - SINK_TOKENS
    always_read_slot = tl.where(
        packed_row * KEYS_PER_ROW < SINK_TOKENS, first_token + packed_row * KEYS_PER_ROW, local_slot
    )
    always_read_slot = tl.where(
        packed_row * KEYS_PER_ROW < SINK_TOKENS + LOCAL_TOKENS, always_read_slot, end_slot
    )
    slot = tl.where(is_sample_program, sampled_slot, always_read_slot)[:, None]

    # mask of keys that take part in the log-sum-exp, [NUM_ROWS, NUM_COLUMNS]
    token = slot + (column // BLOCK_G)[None, :]
    is_visible = (token >= 0) & (token < end_slot)
    if padding_mask_ptr is not None:
        padding_mask = tl.load(
            padding_mask_ptr + batch * padding_mask_stride + token, mask=is_visible, other=0
        )
        is_visible = is_visible & (padding_mask != 0)
    is_always_read = (token < first_token + SINK_TOKENS) | (token >= end_slot - LOCAL_TOKENS)
    # in a short sequence, local tokens are also sinks: count them once
    is_sink_row = (packed_row * KEYS_PER_ROW < SINK_TOKENS)[:, None]
    is_counted = is_visible & tl.where(
        is_sample_program, ~is_always_read, is_sink_row == (token < first_token + SINK_TOKENS)
    )

    # load the index of the keys: codes [NUM_ROWS, KEYS_PER_ROW * BLOCK_C], scales
    # [NUM_ROWS, NUM_COLUMNS]
    packed_byte = tl.arange(0, KEYS_PER_ROW * BLOCK_C)[None, :]
    packed_key, byte = packed_byte // BLOCK_C, packed_byte % BLOCK_C
    packed_slot = slot + packed_key
    is_in_bounds = (packed_slot >= 0) & (packed_slot < end_slot) & (byte < HALF_SIZE)
    codes_ptrs = codes.data + batch * codes.batch_stride + kv_head * codes.head_stride
    codes_ptrs = codes_ptrs + slot.to(tl.int64) * HALF_SIZE + (packed_key * HALF_SIZE + byte)
    key_codes = tl.load(codes_ptrs, mask=is_in_bounds, other=0)
    scales_ptrs = (
        key_scales.data + batch * key_scales.batch_stride + kv_head * key_scales.head_stride
    )
    key_scale = tl.load(scales_ptrs + token, mask=is_counted, other=0.0)
    # keys with NaN or infinities are selected, but have no logit that could be counted
    is_counted = is_counted & (key_scale < float("inf"))

    # logits to base two, [NUM_ROWS, NUM_COLUMNS]
    first_half_queries, second_half_queries, product_offset, query_scale = load_queries(
        q=q,
        batch=batch,
        kv_head=kv_head,
        qk_scale=qk_scale,
        GROUP_SIZE=GROUP_SIZE,
        BLOCK_G=BLOCK_G,
        KEYS_PER_ROW=KEYS_PER_ROW,
        FIRST_CHANNEL=FIRST_CHANNEL,
        HALF_DISTANCE=HALF_DISTANCE,
        HALF_SIZE=HALF_SIZE,
        BLOCK_C=BLOCK_C,
    )
    s = compute_key_products(
        codes=key_codes,
        key_scale=key_scale,
        first_half_queries=first_half_queries,
        second_half_queries=second_half_queries,
        product_offset=product_offset,
        HAS_PTX=HAS_PTX,
    )
    s = s * repeat_per_key(query_scale, KEYS_PER_ROW, BLOCK_G)
    if is_sample_program:
        levels = tl.maximum(_round_to_levels(s, HAS_PTX), UNCOUNTED_LOGIT + 1)
        levels = tl.where(is_counted, levels, UNCOUNTED_LOGIT).to(tl.int16)
        logits_tile_ptrs = logits_ptr + (row * (num_splits - 1) + split) * (BLOCK_N * BLOCK_G)
        tl.store(logits_tile_ptrs + packed_row[:, None] * NUM_COLUMNS + column[None, :], levels)
        # a sampled key represents SAMPLE_STRIDE keys
        s += LOG2_SAMPLE_STRIDE
    else:
        counted_keys = is_counted & (column % BLOCK_G == 0)[None, :]
        tl.store(num_always_read_keys_ptr + row, tl.sum(tl.sum(counted_keys.to(tl.int32), 1), 0))
        tl.store(query_scales_ptr + row * BLOCK_G + tl.arange(0, BLOCK_G), query_scale)

    # log-sum-exp of the counted keys, [BLOCK_G]
    s = tl.reshape(tl.where(is_counted, s, LOWEST_LOGIT), (NUM_ROWS * KEYS_PER_ROW, BLOCK_G))
    # if no key is counted, the maximum is LOWEST_LOGIT, and the sum must not be used
    m_i = tl.max(s, 0)
    lse = m_i + tl.log2(tl.sum(tl.exp2(s - m_i[None, :]), 0))
    tl.store(lse_ptr + lse_offset, tl.where(m_i > LOWEST_LOGIT, lse, LOWEST_LOGIT))


@triton.jit
def threshold_kernel(
    logits_ptr,
    lse_ptr,
    query_scales_ptr,
    num_always_read_keys_ptr,
    sinks_ptr,
    thresholds_ptr,
    unread_logit_ptr,
    length_ptr,
    num_keys_ptr,
    kv_heads,
    max_samples,
    num_splits,
    SAMPLE_STRIDE: tl.constexpr,
    LOG2_SAMPLE_STRIDE: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_PTX: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write the threshold of each query head of a row: the smallest product of a selected key.

    A threshold is divided by the scale of the query, as are the products of `compute_key_products`.
    Also write the logarithm of the weight of all keys that are not selected, `Choice.unread_logit`.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    end_slot, num_always_read_keys = (
        tl.load(length_ptr).to(tl.int32),
        tl.load(num_always_read_keys_ptr + row),
    )
    num_keys = tl.load(num_keys_ptr + row // kv_heads)
    head_in_group, sample_index = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_N)

    # logits of the sample, rounded to levels, [BLOCK_N, BLOCK_G]. Logits after the end of the
    # sequence were not written
    num_samples = tl.minimum(
        tl.cdiv(end_slot, KEYS_PER_RUN * SAMPLE_STRIDE) * KEYS_PER_RUN, max_samples
    )
    logits_ptrs = (
        logits_ptr + (row * max_samples + sample_index)[:, None] * BLOCK_G + head_in_group[None, :]
    )
    # a separate select: with `other`, Triton 3.6 returns wrong values for every second 16-bit
    # number
    logit = tl.load(logits_ptrs, mask=(sample_index < num_samples)[:, None]).to(tl.int32)
    logit = tl.where((sample_index < num_samples)[:, None], logit, UNCOUNTED_LOGIT)

    # log-sum-exp of each head over all programs and the sink, rounded to levels, [BLOCK_G]
    split = tl.arange(0, BLOCK_SPLITS)
    lse_offset = (row * (num_splits + 1) + split)[:, None] * BLOCK_G + head_in_group[None, :]
    split_lse = tl.load(
        lse_ptr + lse_offset, mask=(split <= num_splits)[:, None], other=LOWEST_LOGIT
    )
    m_i = tl.max(split_lse, 0)
    if sinks_ptr is not None:
        sinks_ptrs = sinks_ptr + row % kv_heads * GROUP_SIZE + head_in_group
        sink = (
            tl.load(sinks_ptrs, mask=head_in_group < GROUP_SIZE, other=0.0).to(tl.float32) * LOG2_E
        )
        m_i = tl.maximum(m_i, sink)
    l_i = tl.sum(tl.exp2(split_lse - m_i[None, :]), 0)
    if sinks_ptr is not None:
        l_i += tl.exp2(sink - m_i)
    lse = m_i + tl.log2(l_i)
    lse = _round_to_levels(lse, HAS_PTX).to(tl.int32)

    # [BLOCK_N]: for each sampled key, the smallest level (lse - logit) over the heads of the group
    query_scale = tl.load(query_scales_ptr + row * BLOCK_G + head_in_group)
    # queries with NaN or infinities (query_scale is NaN) do not affect the selection
    is_finite_query = (head_in_group < GROUP_SIZE) & (query_scale == query_scale)
    head_level = tl.where(is_finite_query[None, :], lse[None, :] - logit, LAST_LEVEL)
    level = tl.minimum(tl.maximum(tl.min(head_level, 1), 1), LAST_LEVEL)
    level = tl.where(tl.max(logit, 1) > UNCOUNTED_LOGIT, level, HIDDEN_LEVEL)

    # find the last selected level: the largest level such that at most ``num_keys`` keys have this
    # or a lower level. An iteration finds one bit. Keys of level 0 are always selected
    last_level, num_read_keys = 0, num_always_read_keys
    for bit in tl.static_range(LEVEL_BITS):
        candidate_level = last_level + ((LAST_LEVEL + 1) >> (bit + 1))
        num_candidate_keys = num_always_read_keys + SAMPLE_STRIDE * tl.sum(
            (level <= candidate_level).to(tl.int32), 0
        )
        is_within_budget = (num_candidate_keys <= num_keys) & (candidate_level < LAST_LEVEL)
        last_level = tl.where(is_within_budget, candidate_level, last_level)
        num_read_keys = tl.where(is_within_budget, num_candidate_keys, num_read_keys)
    last_level += ((2 * num_read_keys < num_keys) & (last_level + 1 < LAST_LEVEL)).to(tl.int32)
    num_visible = num_always_read_keys + SAMPLE_STRIDE * tl.sum(
        (level < HIDDEN_LEVEL).to(tl.int32), 0
    )
    is_all_read = (num_visible <= num_keys) | (end_slot <= num_keys)

    # logarithm of the weight of the keys that are not selected, [BLOCK_G]
    is_unread = (level > last_level) & (level < HIDDEN_LEVEL) & ~is_all_read
    unread_weight = tl.exp2(head_level.to(tl.float32) * -OCTAVES_PER_LEVEL)
    unread_weight = tl.sum(tl.where(is_unread[:, None], unread_weight, 0.0), 0)
    unread_logit = tl.log2(unread_weight) + lse.to(tl.float32) * OCTAVES_PER_LEVEL
    unread_logit = unread_logit + (LOG2_SAMPLE_STRIDE + LOG2_UNREAD_WEIGHT_FACTOR)
    tl.store(
        unread_logit_ptr + row * GROUP_SIZE + head_in_group,
        unread_logit,
        mask=head_in_group < GROUP_SIZE,
    )

    # smallest product (`compute_key_products`) of a selected key, [BLOCK_G]. A key is selected if
    # lse - round(logit) <= last_level, hence from logit = lse - last_level - 0.5 on, where
    # logit = product * query_scale / OCTAVES_PER_LEVEL
    threshold = (lse - last_level).to(tl.float32) - 0.5
    threshold = threshold * OCTAVES_PER_LEVEL / query_scale
    threshold = tl.where(is_all_read, float("-inf"), threshold)
    threshold = tl.where(is_finite_query, threshold, float("inf"))
    tl.store(thresholds_ptr + row * BLOCK_G + head_in_group, threshold)
