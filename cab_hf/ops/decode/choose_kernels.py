"""Kernels that select the keys of a decode step: from a query and the index to a list of slots.

`reference` of this package defines the selection, the sample of keys, and levels.

* `sample_kernel` scores a sample of the keys, and the keys that are always selected. Each program
  writes the logits of its keys, rounded to levels, and their log-sum-exp for each query head.
* `threshold_kernel` has one program per KV head and sequence. The program finds the last selected
  level by bisection. For each query head, the program writes a threshold, which is the smallest
  product q · k of a selected key, and the estimated weight of all keys that are not selected.
* `_choose_keys_kernel` reads the index of all keys, and writes one bit per key: selected or not.
* `_list_slots_kernel` converts the bits to a compact list of slots.

A key of the index has 4 bits per channel, although 4 bits need packing and PTX. Kernels for 8 bits
would have half the lines. On an H100, with 131,072 keys and batch 4, selection and attention were
about 20 % slower with 8 bits. The time was 0.167 ms instead of 0.139 ms with 32 heads, 8 KV heads
and head dim 128. The time was 0.322 ms instead of 0.264 ms with 32 KV heads and head dim 64. The
attention probability of the selected keys was the same within .006.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import LOG2_E, make_vectors
from cab_hf.ops.decode.channels import ChannelHalves
from cab_hf.ops.decode.index_kernel import make_per_token_argument
from cab_hf.ops.decode.packed import (
    MIN_DOT_COLUMNS,
    compute_key_products,
    load_queries,
    make_packing,
)
from cab_hf.ops.decode.reference import Choice, Index, compute_sample_stride
from cab_hf.ops.decode.threshold_kernels import (
    KEYS_PER_RUN,
    LOCAL_TOKENS,
    SINK_TOKENS,
    sample_kernel,
    threshold_kernel,
)
from cab_hf.ops.launch import on_device_of

# the sizes below were the fastest on an H200
# smallest number of keys per program of `_choose_keys_kernel`
MIN_KEYS_PER_PROGRAM = 2048
# largest number of keys per program of `_choose_keys_kernel`
MAX_KEYS_PER_PROGRAM = 8192
# desired number of programs of `_choose_keys_kernel`, limited by the numbers of keys above
TARGET_PROGRAMS = 512
NUM_SCORE_WARPS = 4
NUM_SCORE_STAGES = 3
# pipeline stages of `_choose_keys_kernel` that fit in the 64 KiB of shared memory of AMD's GPUs
NUM_AMD_SCORE_STAGES = 2
# warps per program of `threshold_kernel`
NUM_THRESHOLD_WARPS = 16
# keys whose bits a program of `_list_slots_kernel` converts to slots per loop iteration
LISTED_KEYS_PER_ITERATION = 2048


def choose(
    q: Tensor,
    index: Index,
    scale: float,
    length: Tensor,
    num_keys: Tensor,
    channels: tuple[int, ...] = (),
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Choice:
    """Select the keys that a decode step attends to; see `reference.choose`."""
    choose_function = torch.ops.cab_hf.decode_choose if torch.compiler.is_compiling() else _choose
    slots, counts, unread_logit = choose_function(
        q=q,
        codes=index.codes,
        key_scales=index.scales,
        scale=scale,
        length=length,
        num_keys=num_keys,
        channels=list(channels),
        padding_mask=padding_mask,
        sinks=sinks,
    )
    return Choice(slots, counts, unread_logit)


def _choose(
    q: Tensor,
    codes: Tensor,
    key_scales: Tensor,
    scale: float,
    length: Tensor,
    num_keys: Tensor,
    channels: list[int],
    padding_mask: Tensor | None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `choose`, and return the fields of the `Choice`: (slots, counts, unread_logit)."""
    key_bytes = codes.shape[3]
    channel_halves = ChannelHalves.from_channels(tuple(channels), q.shape[3])
    q = q if q.stride(-1) == 1 else q.contiguous()
    codes = codes if codes.stride()[2:] == (key_bytes, 1) else codes.contiguous()
    key_scales = key_scales if key_scales.stride(2) == 1 else key_scales.contiguous()
    num_keys = num_keys.expand(len(q)).contiguous()
    padding_mask, padding_mask_stride, first_token = launch.make_padding_arguments(padding_mask)
    # arguments of both kernels that score keys
    scoring_arguments = {
        "q": make_vectors(q),
        "codes": make_vectors(codes),
        "key_scales": make_per_token_argument(key_scales),
        "length_ptr": length,
        "padding_mask_ptr": padding_mask,
        "padding_mask_stride": padding_mask_stride,
        "first_token_ptr": first_token,
        "qk_scale": scale * LOG2_E.value,
        "kv_heads": codes.shape[1],
        "GROUP_SIZE": q.shape[1] // codes.shape[1],
        "HAS_PTX": launch.has_ptx(q),
        **channel_halves.constexpr_arguments,
        **launch.make_pdl_options(q),
    }
    with on_device_of(q):
        thresholds, unread_logit = _find_thresholds(
            q, codes, scoring_arguments, num_keys=num_keys, sinks=sinks
        )
        slots, counts = _list_keys(q, codes, scoring_arguments, thresholds=thresholds)
    return slots, counts, unread_logit


def _find_thresholds(
    q: Tensor, codes: Tensor, scoring_arguments: dict, *, num_keys: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Launch the kernels that find the threshold of each query head from the sample of the keys.

    Args:
        q: [B, H, 1, D].
        codes: uint8 [B, H_kv, N, C / 2].
        scoring_arguments: Keyword arguments that `sample_kernel` and `_choose_keys_kernel` share.
        num_keys: int32 [B], the number of keys to select.
        sinks: [H], one logit per head; None without.

    Returns:
        thresholds: float32 [B * H_kv, BLOCK_G], the smallest product of a selected key for each
            query head of a group, see `threshold_kernel`.
        unread_logit: float32 [B, H], see `Choice`.
    """
    batch, kv_heads, num_slots, key_bytes = codes.shape
    group_size, num_rows = q.shape[1] // kv_heads, batch * kv_heads
    sample_stride = compute_sample_stride(num_slots)
    packing = make_packing(group_size, key_bytes, KEYS_PER_RUN.value)
    sample_keys = triton.cdiv(num_slots, KEYS_PER_RUN.value * sample_stride) * KEYS_PER_RUN.value
    num_splits = triton.cdiv(sample_keys, packing.keys_per_tile)
    max_samples = num_splits * packing.keys_per_tile
    padded_group_size = packing.padded_group_size
    logits = q.new_empty(num_rows, max_samples, padded_group_size, dtype=torch.int16)
    # the additional program per row (+ 1) processes the keys that are always selected
    lse = q.new_empty(num_rows, num_splits + 1, padded_group_size, dtype=torch.float32)
    num_always_read_keys = q.new_empty(num_rows, dtype=torch.int32)
    query_scales = q.new_empty(num_rows, padded_group_size, dtype=torch.float32)
    thresholds = torch.empty_like(query_scales)
    unread_logit = q.new_empty(batch, q.shape[1], dtype=torch.float32)
    log2_sample_stride = sample_stride.bit_length() - 1
    sample_kernel[(num_splits + 1, num_rows)](
        logits_ptr=logits,
        lse_ptr=lse,
        query_scales_ptr=query_scales,
        num_always_read_keys_ptr=num_always_read_keys,
        SAMPLE_STRIDE=sample_stride,
        LOG2_SAMPLE_STRIDE=log2_sample_stride,
        num_warps=NUM_SCORE_WARPS,
        **packing.constexpr_arguments,
        **scoring_arguments,
    )
    threshold_kernel[(num_rows,)](
        logits_ptr=logits,
        lse_ptr=lse,
        query_scales_ptr=query_scales,
        num_always_read_keys_ptr=num_always_read_keys,
        sinks_ptr=sinks,
        thresholds_ptr=thresholds,
        unread_logit_ptr=unread_logit,
        length_ptr=scoring_arguments["length_ptr"],
        num_keys_ptr=num_keys,
        kv_heads=kv_heads,
        max_samples=max_samples,
        num_splits=num_splits,
        SAMPLE_STRIDE=sample_stride,
        LOG2_SAMPLE_STRIDE=log2_sample_stride,
        GROUP_SIZE=group_size,
        BLOCK_G=padded_group_size,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits + 1),
        HAS_PTX=launch.has_ptx(q),
        BLOCK_N=triton.next_power_of_2(sample_keys),
        num_warps=NUM_THRESHOLD_WARPS,
        **launch.make_pdl_options(q),
    )
    return thresholds, unread_logit


def _list_keys(
    q: Tensor, codes: Tensor, scoring_arguments: dict, *, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """Launch the kernels that list the keys whose product reaches the threshold of any query head.

    The arguments are those of `_find_thresholds`, and ``thresholds``, the result of that function.

    Returns:
        slots, counts: Fields of a `Choice`.
    """
    batch, kv_heads, num_slots, key_bytes = codes.shape
    num_rows = batch * kv_heads
    # a row of the product contains several adjacent keys, see `load_queries`
    packing = make_packing(q.shape[1] // kv_heads, key_bytes, MIN_DOT_COLUMNS)
    keys_per_program = triton.next_power_of_2(triton.cdiv(num_slots * num_rows, TARGET_PROGRAMS))
    keys_per_program = max(MIN_KEYS_PER_PROGRAM, min(MAX_KEYS_PER_PROGRAM, keys_per_program))
    keys_per_program = max(packing.keys_per_tile, keys_per_program)
    num_splits = triton.cdiv(num_slots, keys_per_program)
    num_words = triton.cdiv(num_slots, 32)
    bits = q.new_empty(num_rows, num_words, dtype=torch.int32)
    num_read_keys = q.new_empty(num_rows, num_splits, dtype=torch.int32)
    slots = q.new_empty(batch, kv_heads, num_slots, dtype=torch.int32)
    counts = q.new_empty(batch, kv_heads, dtype=torch.int32)
    _choose_keys_kernel[(num_splits, num_rows)](
        num_slots=num_slots,
        thresholds_ptr=thresholds,
        bits_ptr=bits,
        num_read_keys_ptr=num_read_keys,
        num_words=num_words,
        THRESHOLDS_PER_ROW=thresholds.shape[1],
        KEYS_PER_PROGRAM=keys_per_program,
        IS_PADDED=packing.padded_bytes != key_bytes,
        num_warps=NUM_SCORE_WARPS,
        num_stages=NUM_SCORE_STAGES if launch.has_ptx(q) else NUM_AMD_SCORE_STAGES,
        **packing.constexpr_arguments,
        **scoring_arguments,
    )
    _list_slots_kernel[(num_splits, num_rows)](
        bits_ptr=bits,
        num_read_keys_ptr=num_read_keys,
        slots_ptr=slots,
        counts_ptr=counts,
        length_ptr=scoring_arguments["length_ptr"],
        num_words=num_words,
        num_slots=num_slots,
        num_splits=num_splits,
        KEYS_PER_PROGRAM=keys_per_program,
        BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        BLOCK_N=min(LISTED_KEYS_PER_ITERATION, keys_per_program),
        num_warps=4,
        **launch.make_pdl_options(q),
    )
    return slots, counts


@triton.jit
def _choose_keys_kernel(
    q,
    codes,
    key_scales,
    length_ptr,
    padding_mask_ptr,
    padding_mask_stride,
    first_token_ptr,
    qk_scale,
    kv_heads,
    num_slots,
    thresholds_ptr,
    bits_ptr,
    num_read_keys_ptr,
    num_words,
    THRESHOLDS_PER_ROW: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KEYS_PER_ROW: tl.constexpr,
    KEYS_PER_PROGRAM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FIRST_CHANNEL: tl.constexpr,
    HALF_DISTANCE: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    IS_PADDED: tl.constexpr,
    HAS_PTX: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write one bit per key for ``KEYS_PER_PROGRAM`` keys, 1 if selected, and count the 1 bits."""
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = row // kv_heads, row % kv_heads
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
    NUM_COLUMNS: tl.constexpr = KEYS_PER_ROW * BLOCK_G
    NUM_ROWS: tl.constexpr = BLOCK_N // KEYS_PER_ROW
    first_half_queries, second_half_queries, product_offset, _ = load_queries(
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
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    end_slot = tl.load(length_ptr).to(tl.int32)
    program_begin = split * KEYS_PER_PROGRAM
    program_end = tl.minimum(program_begin + KEYS_PER_PROGRAM, num_slots)
    written_slots_end = tl.minimum(program_end, end_slot)
    column, key_in_row = tl.arange(0, NUM_COLUMNS)[None, :], tl.arange(0, KEYS_PER_ROW)[None, :]
    row_begin = tl.arange(0, NUM_ROWS)[:, None] * KEYS_PER_ROW
    first_token, padding_mask_row = 0, padding_mask_ptr
    if padding_mask_ptr is not None:
        first_token = tl.load(first_token_ptr + batch)
        padding_mask_row = padding_mask_ptr + batch * padding_mask_stride

    # threshold of each column, [1, NUM_COLUMNS]
    head_in_group = column % BLOCK_G
    threshold = tl.load(
        thresholds_ptr + row * THRESHOLDS_PER_ROW + head_in_group,
        mask=head_in_group < THRESHOLDS_PER_ROW,
        other=float("inf"),
    )

    # addresses of codes [NUM_ROWS, KEYS_PER_ROW * BLOCK_C], scales [NUM_ROWS, KEYS_PER_ROW] and
    # bits [BLOCK_N // 32]
    packed_byte = tl.arange(0, KEYS_PER_ROW * BLOCK_C)[None, :]
    packed_key, byte = packed_byte // BLOCK_C, packed_byte % BLOCK_C
    codes_ptrs = codes.data + batch * codes.batch_stride + kv_head * codes.head_stride
    codes_ptrs += (row_begin + packed_key) * HALF_SIZE + byte
    key_bytes = tl.full([], HALF_SIZE, tl.int64)
    scales_ptrs = (
        key_scales.data
        + batch * key_scales.batch_stride
        + kv_head * key_scales.head_stride
        + row_begin
        + key_in_row
    )
    word_index = tl.arange(0, BLOCK_N // 32)
    bits_ptrs = bits_ptr + row * num_words + word_index
    selected_counts = tl.zeros([BLOCK_N // 32], tl.int32)

    # tiles of BLOCK_N slots inside the cache are loaded without a mask. Slots after the end of the
    # sequence contain undefined codes, and are never listed
    unmasked_slots_end = program_begin
    if not IS_PADDED:
        unmasked_slots_end = tl.maximum(
            program_begin, tl.minimum(written_slots_end, num_slots // BLOCK_N * BLOCK_N)
        )
    # an iteration loads the scales of the next tile before it computes the products of its tile
    next_key_scale = tl.load(
        scales_ptrs + program_begin,
        mask=program_begin + row_begin + key_in_row < num_slots,
        other=0.0,
    )
    for start in range(program_begin, unmasked_slots_end, BLOCK_N):
        key_codes = tl.load(codes_ptrs + start * key_bytes)
        key_scale = next_key_scale
        next_start = tl.minimum(start + BLOCK_N, tl.maximum(num_slots - BLOCK_N, 0))
        next_key_scale = tl.load(scales_ptrs + next_start)
        tile_bits, word_counts = _compute_tile_bits(
            codes=key_codes,
            key_scale=key_scale,
            first_half_queries=first_half_queries,
            second_half_queries=second_half_queries,
            product_offset=product_offset,
            threshold=threshold,
            start=start,
            first_token=first_token,
            end_slot=end_slot,
            padding_mask_row=padding_mask_row,
            KEYS_PER_ROW=KEYS_PER_ROW,
            BLOCK_G=BLOCK_G,
            BLOCK_N=BLOCK_N,
            HAS_PTX=HAS_PTX,
        )
        tl.store(bits_ptrs + start // 32, tile_bits)
        selected_counts += word_counts
    for start in tl.range(unmasked_slots_end, written_slots_end, BLOCK_N, num_stages=1):
        is_in_bounds = (start + row_begin + packed_key < num_slots) & (byte < HALF_SIZE)
        key_codes = tl.load(codes_ptrs + start * key_bytes, mask=is_in_bounds, other=0)
        key_scale = tl.load(
            scales_ptrs + start, mask=start + row_begin + key_in_row < num_slots, other=0.0
        )
        tile_bits, word_counts = _compute_tile_bits(
            codes=key_codes,
            key_scale=key_scale,
            first_half_queries=first_half_queries,
            second_half_queries=second_half_queries,
            product_offset=product_offset,
            threshold=threshold,
            start=start,
            first_token=first_token,
            end_slot=end_slot,
            padding_mask_row=padding_mask_row,
            KEYS_PER_ROW=KEYS_PER_ROW,
            BLOCK_G=BLOCK_G,
            BLOCK_N=BLOCK_N,
            HAS_PTX=HAS_PTX,
        )
        tl.store(bits_ptrs + start // 32, tile_bits, mask=start // 32 + word_index < num_words)
        selected_counts += word_counts
    tl.store(num_read_keys_ptr + row * tl.num_programs(0) + split, tl.sum(selected_counts, 0))


@triton.jit
def _compute_tile_bits(
    codes,
    key_scale,
    first_half_queries,
    second_half_queries,
    product_offset,
    threshold,
    start,
    first_token,
    end_slot,
    padding_mask_row,
    KEYS_PER_ROW: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_PTX: tl.constexpr,
):
    """Return one bit per key for ``BLOCK_N`` keys from ``start`` on: 1 if the key is selected.

    Args:
        codes: uint8 [NUM_ROWS, KEYS_PER_ROW * BLOCK_C], codes of the keys, KEYS_PER_ROW keys per
            row.
        key_scale: float16 [NUM_ROWS, KEYS_PER_ROW], scales of the keys.
        first_half_queries, second_half_queries, product_offset: Results of `load_queries`.
        threshold: float32 [1, KEYS_PER_ROW * BLOCK_G], the smallest product of a selected key
            for each query.
        start: Slot of the first key.
        first_token: Slot of the first token of the sequence that is not padding.
        end_slot: Slot after the last token of the sequence.
        padding_mask_row: Pointer to the padding mask of the sequence; None without padding.

    Returns:
        bits: int32 [BLOCK_N // 32], 32 keys per word.
        counts: int32 [BLOCK_N // 32], the number of selected keys of each word.
    """
    NUM_ROWS: tl.constexpr = BLOCK_N // KEYS_PER_ROW
    key_scale = tl.broadcast_to(key_scale[:, :, None], (NUM_ROWS, KEYS_PER_ROW, BLOCK_G))
    key_scale = tl.reshape(key_scale, (NUM_ROWS, KEYS_PER_ROW * BLOCK_G))
    s = compute_key_products(
        codes=codes,
        key_scale=key_scale,
        first_half_queries=first_half_queries,
        second_half_queries=second_half_queries,
        product_offset=product_offset,
        HAS_PTX=HAS_PTX,
    )
    s = s - threshold
    # keys with NaN or infinities have products of NaN, and must be selected: NaN < 0 is False
    is_read = ~(tl.max(tl.reshape(s, (NUM_ROWS, KEYS_PER_ROW, BLOCK_G)), 2) < 0)
    token = (
        start + tl.arange(0, NUM_ROWS)[:, None] * KEYS_PER_ROW + tl.arange(0, KEYS_PER_ROW)[None, :]
    )
    if (start < first_token + SINK_TOKENS) | (start + BLOCK_N > end_slot - LOCAL_TOKENS):
        is_always_read = (token < first_token + SINK_TOKENS) | (token >= end_slot - LOCAL_TOKENS)
        is_read = (is_read | is_always_read) & (token < end_slot)
    if padding_mask_row is not None:
        padding_mask = tl.load(padding_mask_row + token, mask=token < end_slot, other=0)
        is_read = is_read & (padding_mask != 0)
    bits = tl.where(is_read, 1 << (token % 32), 0)
    bits = tl.sum(tl.reshape(bits, (BLOCK_N // 32, 32)), 1)
    return bits, _count_bits(bits, HAS_PTX)


@triton.jit
def _count_bits(bits, HAS_PTX: tl.constexpr):
    """Return the number of set bits of each int32."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            asm="popc.b32 $0, $1;",
            constraints="=r,r",
            args=[bits],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    x = bits.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _list_slots_kernel(
    bits_ptr,
    num_read_keys_ptr,
    slots_ptr,
    counts_ptr,
    length_ptr,
    num_words,
    num_slots,
    num_splits,
    KEYS_PER_PROGRAM: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Write the slots of the selected keys among ``KEYS_PER_PROGRAM`` keys to the list of the row.

    A program writes its slots after those of all earlier programs of the row. The first program of
    a row also writes the number of selected keys of the row.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split_indices = tl.arange(0, BLOCK_SPLITS)
    split_counts = tl.load(
        num_read_keys_ptr + row * num_splits + split_indices,
        mask=split_indices < num_splits,
        other=0,
    )
    if split == 0:
        tl.store(counts_ptr + row, tl.sum(split_counts, 0))
    num_listed = tl.sum(tl.where(split_indices < split, split_counts, 0), 0)
    program_begin = split * KEYS_PER_PROGRAM
    program_end = tl.minimum(program_begin + KEYS_PER_PROGRAM, num_slots)
    program_end = tl.minimum(program_end, tl.load(length_ptr).to(tl.int32))
    row_slots = slots_ptr + row * num_slots
    for start in range(program_begin, program_end, BLOCK_N):
        # bits of the keys, [BLOCK_N]; words after the end of the sequence are undefined and masked
        word_index = start // 32 + tl.arange(0, BLOCK_N // 32)
        bit_words = tl.load(
            bits_ptr + row * num_words + word_index, mask=word_index * 32 < program_end, other=0
        )
        bits = (bit_words[:, None] >> tl.arange(0, 32)[None, :]) & 1
        bits = tl.reshape(bits, (BLOCK_N,))
        num_listed_up_to_key = num_listed + tl.cumsum(bits, 0)
        tl.store(
            row_slots + num_listed_up_to_key - 1, start + tl.arange(0, BLOCK_N), mask=bits != 0
        )
        num_listed += tl.sum(bits, 0)


_choose_op = torch.library.custom_op("cab_hf::decode_choose", _choose, mutates_args=())


@_choose_op.register_fake
def _(q, codes, key_scales, scale, length, num_keys, channels, padding_mask, sinks=None):
    slots = q.new_empty(key_scales.shape, dtype=torch.int32)
    counts = q.new_empty(key_scales.shape[:2], dtype=torch.int32)
    return slots, counts, q.new_empty(q.shape[:2], dtype=torch.float32)
