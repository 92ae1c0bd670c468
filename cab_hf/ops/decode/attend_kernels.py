"""Kernels that attend to the selected keys of a decode step (split-K, as in Flash-Decoding).

A row is one KV head of one sequence. Several programs per row each gather an equal part of the
selected keys and values, and write a partial result. A second kernel merges the partial results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import LOG2_E, choose_precision, make_vectors
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.reference import Choice
from cab_hf.ops.launch import LOWEST_LOGIT, on_device_of

NUM_MEAN_VALUES = tl.constexpr(reference.NUM_MEAN_VALUES)

# smallest number of rows (queries) of a matrix product on tensor cores
MIN_DOT_ROWS = 16
# the sizes below were the fastest on an H200
# smallest number of programs among which the selected keys of a row are divided
MIN_SPLITS = 16
# largest number of programs among which the selected keys of a row are divided
MAX_SPLITS = 120
# desired number of programs of a launch, over all rows; limited by the numbers per row above
TARGET_PROGRAMS = 960
# keys per loop iteration of a program
KEYS_PER_ITERATION = 16
NUM_ATTEND_STAGES = 3
NUM_ATTEND_WARPS = 2
# values that a program sums for the mean of all values
MEAN_VALUES_PER_PROGRAM = 32
# partial results of a row that the merging kernel reads per loop iteration
SPLITS_PER_ITERATION = 64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    padding_mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over the selected keys; see `reference.attend`."""
    attend_function = torch.ops.cab_hf.decode_attend if torch.compiler.is_compiling() else _attend
    return attend_function(
        q=q,
        k=k,
        v=v,
        slots=choice.slots,
        counts=choice.counts,
        unread_logit=choice.unread_logit,
        scale=scale,
        length=length,
        padding_mask=padding_mask,
        sinks=sinks,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    counts: Tensor,
    unread_logit: Tensor | None,
    scale: float,
    length: Tensor | None,
    padding_mask: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute `attend` for the tensors of a `Choice`, which a custom op can have as arguments."""
    batch, kv_heads, num_slots, dim = k.shape
    heads, value_dim = q.shape[1], v.shape[3]
    group_size, num_rows = heads // kv_heads, batch * kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    slots = slots if slots.stride(-1) == 1 else slots.contiguous()
    padding_mask, padding_mask_stride, first_token = launch.make_padding_arguments(padding_mask)
    num_key_splits = max(MIN_SPLITS, min(MAX_SPLITS, TARGET_PROGRAMS // num_rows))
    # additional programs estimate the contribution of the keys that are not selected (unread keys)
    num_mean_splits = NUM_MEAN_VALUES.value // MEAN_VALUES_PER_PROGRAM
    num_splits = num_key_splits if unread_logit is None else num_key_splits + num_mean_splits
    max_logits = q.new_empty(num_rows, num_splits, group_size, dtype=torch.float32)
    exp_sums = torch.empty_like(max_logits)
    partial_out = q.new_empty(num_rows, num_splits, group_size, value_dim, dtype=torch.float32)
    out = q.new_empty(batch, heads, 1, value_dim)
    with on_device_of(q):
        _attend_kernel[(num_splits, num_rows)](
            q=make_vectors(q),
            k=make_vectors(k),
            v=make_vectors(v),
            slots_ptr=slots,
            stride_slots_batch=slots.stride(0),
            stride_slots_head=slots.stride(1),
            counts_ptr=counts,
            stride_counts_batch=counts.stride(0),
            stride_counts_head=counts.stride(1),
            unread_logit_ptr=unread_logit,
            length_ptr=length,
            padding_mask_ptr=padding_mask,
            padding_mask_stride=padding_mask_stride,
            first_token_ptr=first_token,
            max_logits_ptr=max_logits,
            exp_sums_ptr=exp_sums,
            partial_out_ptr=partial_out,
            qk_scale=scale * LOG2_E.value,
            kv_heads=kv_heads,
            num_key_splits=num_key_splits,
            GROUP_SIZE=group_size,
            BLOCK_G=max(MIN_DOT_ROWS, triton.next_power_of_2(group_size)),
            BLOCK_N=KEYS_PER_ITERATION,
            D=dim,
            D_V=value_dim,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_V=max(16, triton.next_power_of_2(value_dim)),
            NEEDS_INT64=num_slots * max(k.stride(2), v.stride(2)) >= 1 << 31,
            MEAN_VALUES_PER_PROGRAM=MEAN_VALUES_PER_PROGRAM,
            PRECISION=choose_precision(q),
            num_warps=NUM_ATTEND_WARPS,
            num_stages=NUM_ATTEND_STAGES,
            **launch.make_pdl_options(q),
        )
        _merge_splits_kernel[(num_rows, group_size)](
            max_logits_ptr=max_logits,
            exp_sums_ptr=exp_sums,
            partial_out_ptr=partial_out,
            sinks_ptr=sinks,
            out_ptr=out,
            num_splits=num_splits,
            kv_heads=kv_heads,
            D_V=value_dim,
            BLOCK_SPLITS=SPLITS_PER_ITERATION,
            BLOCK_V=triton.next_power_of_2(value_dim),
            num_warps=4,
            **launch.make_pdl_options(q),
        )
    return out


# numbers that depend on the batch must not cause another compilation
@triton.jit(do_not_specialize=["stride_slots_batch", "stride_slots_head", "num_key_splits"])
def _attend_kernel(
    q,
    k,
    v,
    slots_ptr,
    stride_slots_batch,
    stride_slots_head,
    counts_ptr,
    stride_counts_batch,
    stride_counts_head,
    unread_logit_ptr,
    length_ptr,
    padding_mask_ptr,
    padding_mask_stride,
    first_token_ptr,
    max_logits_ptr,
    exp_sums_ptr,
    partial_out_ptr,
    qk_scale,
    kv_heads,
    num_key_splits,
    GROUP_SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NEEDS_INT64: tl.constexpr,
    MEAN_VALUES_PER_PROGRAM: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Attend to one of ``num_key_splits`` equal parts of the selected keys of a row.

    For each head, write the maximum logit, the sum of exp2(logit - maximum), and the sum of the
    weighted values. The keys that are not selected (unread keys) count as one key, whose value is
    the mean of `NUM_MEAN_VALUES` values. Programs after the first ``num_key_splits`` write partial
    results of this key, each from ``MEAN_VALUES_PER_PROGRAM`` values.

    The arguments ``stride_X_batch`` and ``stride_X_head`` are strides of ``X_ptr`` in elements.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = row // kv_heads, row % kv_heads
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head_in_group = tl.arange(0, BLOCK_G)
    is_real_head = head_in_group < GROUP_SIZE
    channel, value_channel = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    v_head_ptr = v.data + batch * v.batch_stride + kv_head * v.head_stride
    partial_row = (row * tl.num_programs(0) + split) * GROUP_SIZE + head_in_group
    partial_out_ptrs = partial_out_ptr + partial_row[:, None] * D_V + value_channel[None, :]

    # unread keys: one logit per head, and the part of the mean value [BLOCK_V] of this program
    if unread_logit_ptr is not None:  # noqa: SIM102 - the compiler evaluates this condition only
        if split >= num_key_splits:
            first_slot, end_slot = 0, tl.load(length_ptr).to(tl.int64)
            if padding_mask_ptr is not None:
                first_slot = tl.load(first_token_ptr + batch)
            mean_value, real_slot_share = tl.zeros([BLOCK_V], tl.float32), 0.0
            for start in range(0, MEAN_VALUES_PER_PROGRAM, BLOCK_N):
                i = (
                    (split - num_key_splits) * MEAN_VALUES_PER_PROGRAM
                    + start
                    + tl.arange(0, BLOCK_N)
                )
                slot = first_slot + i * (end_slot - first_slot) // NUM_MEAN_VALUES
                is_real = slot < end_slot
                if padding_mask_ptr is not None:
                    padding_mask_ptrs = padding_mask_ptr + batch * padding_mask_stride + slot
                    is_real = tl.load(padding_mask_ptrs, mask=is_real, other=0) != 0
                v_tile = tl.load(
                    v_head_ptr + slot[:, None] * v.token_stride + value_channel[None, :],
                    mask=is_real[:, None] & (value_channel < D_V)[None, :],
                    other=0.0,
                )
                mean_value += tl.sum(v_tile.to(tl.float32), 0) / NUM_MEAN_VALUES
                real_slot_share += tl.sum(is_real.to(tl.float32), 0) / NUM_MEAN_VALUES
            logit = tl.load(
                unread_logit_ptr + row * GROUP_SIZE + head_in_group, mask=is_real_head, other=0.0
            )
            has_unread_keys = logit > LOWEST_LOGIT
            tl.store(
                max_logits_ptr + partial_row,
                tl.where(has_unread_keys, logit, LOWEST_LOGIT),
                mask=is_real_head,
            )
            tl.store(
                exp_sums_ptr + partial_row,
                tl.where(has_unread_keys, real_slot_share, 0.0),
                mask=is_real_head,
            )
            mean_value = tl.where(has_unread_keys[:, None], mean_value[None, :], 0.0)
            tl.store(
                partial_out_ptrs,
                mean_value,
                mask=is_real_head[:, None] & (value_channel < D_V)[None, :],
            )
            return

    # queries of the group, [BLOCK_G, BLOCK_D]
    q_ptrs = (
        q.data
        + batch * q.batch_stride
        + (kv_head * GROUP_SIZE + head_in_group)[:, None] * q.head_stride
    )
    q_tile = tl.load(
        q_ptrs + channel[None, :], mask=is_real_head[:, None] & (channel < D)[None, :], other=0.0
    )
    k_head_ptr = k.data + batch * k.batch_stride + kv_head * k.head_stride
    listed_slots_ptr = slots_ptr + batch * stride_slots_batch + kv_head * stride_slots_head
    num_selected = tl.load(counts_ptr + batch * stride_counts_batch + kv_head * stride_counts_head)
    keys_per_split = tl.cdiv(num_selected, num_key_splits)
    split_end = tl.minimum((split + 1) * keys_per_split, num_selected)
    m_i = tl.full([BLOCK_G], LOWEST_LOGIT, tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    l_i = tl.zeros([BLOCK_G], tl.float32)
    for start in range(split * keys_per_split, split_end, BLOCK_N):
        # gather k [BLOCK_N, BLOCK_D] and v [BLOCK_N, BLOCK_V]
        i = start + tl.arange(0, BLOCK_N)
        is_in_bounds = i < split_end
        slot = tl.load(listed_slots_ptr + i, mask=is_in_bounds, other=0)
        if NEEDS_INT64:
            slot = slot.to(tl.int64)
        k_tile = tl.load(
            k_head_ptr + slot[:, None] * k.token_stride + channel[None, :],
            mask=is_in_bounds[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        v_tile = tl.load(
            v_head_ptr + slot[:, None] * v.token_stride + value_channel[None, :],
            mask=is_in_bounds[:, None] & (value_channel < D_V)[None, :],
            other=0.0,
        )
        # online softmax of logits [BLOCK_G, BLOCK_N]
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * qk_scale
        s = tl.where(is_in_bounds[None, :], s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        m_i = m_new
    tl.store(max_logits_ptr + partial_row, m_i, mask=is_real_head)
    tl.store(exp_sums_ptr + partial_row, l_i, mask=is_real_head)
    tl.store(partial_out_ptrs, acc, mask=is_real_head[:, None] & (value_channel < D_V)[None, :])


@triton.jit(do_not_specialize=["num_splits", "kv_heads"])
def _merge_splits_kernel(
    max_logits_ptr,
    exp_sums_ptr,
    partial_out_ptr,
    sinks_ptr,
    out_ptr,
    num_splits,
    kv_heads,
    D_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Merge the ``num_splits`` partial results of one query head, and write the output."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    row, head_in_group, group_size = (
        tl.program_id(0).to(tl.int64),
        tl.program_id(1),
        tl.num_programs(1),
    )
    value_channel = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    l_i = tl.zeros([1], tl.float32)
    m_i = tl.full([1], LOWEST_LOGIT, tl.float32)
    if sinks_ptr is not None:
        # the sink acts as a first key, whose value is 0
        sink = tl.load(sinks_ptr + row % kv_heads * group_size + head_in_group).to(tl.float32)
        m_i = tl.zeros([1], tl.float32) + sink * LOG2_E
        l_i += 1.0
    for start in range(0, num_splits, BLOCK_SPLITS):
        # maxima and sums [BLOCK_SPLITS], outputs [BLOCK_SPLITS, BLOCK_V]
        split = start + tl.arange(0, BLOCK_SPLITS)
        partial_row = (row * num_splits + split) * group_size + head_in_group
        split_max = tl.load(
            max_logits_ptr + partial_row, mask=split < num_splits, other=LOWEST_LOGIT
        )
        m_new = tl.maximum(m_i, tl.max(split_max, 0))
        # programs without keys have written a maximum of LOWEST_LOGIT and sums of 0
        weight = tl.exp2(split_max - m_new)
        split_sum = tl.load(exp_sums_ptr + partial_row, mask=split < num_splits, other=0.0)
        split_out = tl.load(
            partial_out_ptr + partial_row[:, None] * D_V + value_channel[None, :],
            mask=(split < num_splits)[:, None] & (value_channel < D_V)[None, :],
            other=0.0,
        )
        alpha = tl.exp2(m_i - m_new)
        acc = acc * alpha + tl.sum(split_out * weight[:, None], 0)
        l_i = l_i * alpha + tl.sum(split_sum * weight, 0)
        m_i = m_new
    out_ptrs = out_ptr + (row * group_size + head_in_group) * D_V + value_channel
    tl.store(out_ptrs, (acc / l_i).to(out_ptr.dtype.element_ty), mask=value_channel < D_V)


_attend_op = torch.library.custom_op("cab_hf::decode_attend", _attend, mutates_args=())


@_attend_op.register_fake
def _(q, k, v, slots, counts, unread_logit, scale, length, padding_mask, sinks=None):
    return q.new_empty(*q.shape[:3], v.shape[3])
