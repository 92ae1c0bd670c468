"""Kernels that attend to the selected keys, wherever they are in the cache, split evenly.

K and V are gathered, and every program writes a partial result of a row. A second launch merges the
partial results (split-K, as in Flash-Decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cab_hf.ops import launch
from cab_hf.ops.attention.tiles import LOG2_E, precision, vectors
from cab_hf.ops.decode import reference
from cab_hf.ops.decode.reference import Choice
from cab_hf.ops.launch import LOWEST, on_device_of

SPREAD_VALUES = tl.constexpr(reference.SPREAD_VALUES)

# rows of the smallest product on tensor cores
LEAST_ROWS = 16
# sizes of launches, the fastest on an H200: the fewest and the most programs that share the keys of
# a row; the number of programs to aim for; keys per step of a program, its stages and warps; and
# values per program that estimate the mean
READERS, READING_PROGRAMS, READ, READ_STAGES, READ_WARPS, VALUES = (16, 120), 960, 16, 3, 2, 32
# partial results of a row that are merged at a time
MERGED_AT_A_TIME = 64


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    scale: float,
    length: Tensor | None = None,
    valid: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over the selected keys; see `reference.attend`."""
    if torch.compiler.is_compiling():
        return torch.ops.cab_hf.decode_attend(q, k, v, *choice, scale, length, valid, sinks)
    return _attend(q, k, v, *choice, scale, length, valid, sinks)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    counts: Tensor,
    unread: Tensor | None,
    scale: float,
    length: Tensor | None,
    valid: Tensor | None,
    sinks: Tensor | None = None,
) -> Tensor:
    batch, kv_heads, slots, dim = k.shape
    heads, values = q.shape[1], v.shape[3]
    group, rows = heads // kv_heads, batch * kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    chosen = chosen if chosen.stride(-1) == 1 else chosen.contiguous()
    fewest, most = READERS
    readers = max(fewest, min(most, READING_PROGRAMS // rows))
    # additional programs process the unread keys
    splits = readers if unread is None else readers + SPREAD_VALUES.value // VALUES
    largest = q.new_empty(rows, splits, group, dtype=torch.float32)
    sums = torch.empty_like(largest)
    weighted = q.new_empty(rows, splits, group, values, dtype=torch.float32)
    out = q.new_empty(batch, heads, 1, values)
    with on_device_of(q):
        _attend_kernel[(splits, rows)](
            vectors(q),
            vectors(k),
            vectors(v),
            chosen,
            *chosen.stride()[:2],
            counts,
            *counts.stride(),
            unread,
            length,
            *launch.padding(valid),
            largest,
            sums,
            weighted,
            scale * LOG2_E.value,
            kv_heads,
            readers,
            GROUP=group,
            ROWS=max(LEAST_ROWS, triton.next_power_of_2(group)),
            BLOCK_N=READ,
            D=dim,
            D_V=values,
            BLOCK_D=max(16, triton.next_power_of_2(dim)),
            BLOCK_V=max(16, triton.next_power_of_2(values)),
            FAR=slots * max(k.stride(2), v.stride(2)) >= 1 << 31,
            VALUES=VALUES,
            PRECISION=precision(q),
            num_warps=READ_WARPS,
            num_stages=READ_STAGES,
            **launch.early(q),
        )
        _merge_kernel[(rows, group)](
            largest,
            sums,
            weighted,
            sinks,
            out,
            splits,
            kv_heads,
            D_V=values,
            BLOCK_S=MERGED_AT_A_TIME,
            BLOCK_V=triton.next_power_of_2(values),
            num_warps=4,
            **launch.early(q),
        )
    return out


# numbers that depend on the batch must not cause another compilation
@triton.jit(do_not_specialize=["chosen_batch", "chosen_head", "readers"])
def _attend_kernel(
    q,
    k,
    v,
    chosen,
    chosen_batch,
    chosen_head,
    counts,
    counts_batch,
    counts_head,
    unread,
    length,
    valid,
    valid_stride,
    first,
    largest,
    sums,
    weighted,
    qk_scale,
    kv_heads,
    readers,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    FAR: tl.constexpr,
    VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend to a part of the selected keys.

    Write the weighted values, and the maximum and the sum of the weights. Additional programs
    process the unread keys, which count as one key with the mean value. Each of these programs
    computes a part of the mean.
    """
    split, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = row // kv_heads, row % kv_heads
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    member = tl.arange(0, ROWS)
    there = member < GROUP
    channel, value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    values = v.data + batch * v.batch + head * v.head
    part = (row * tl.num_programs(0) + split) * GROUP + member
    target = weighted + part[:, None] * D_V + value[None, :]
    if unread is not None:  # noqa: SIM102 - only this is known when the kernel is compiled
        if split >= readers:
            begin, end = 0, tl.load(length).to(tl.int64)
            if valid is not None:
                begin = tl.load(first + batch)
            mean, share = tl.zeros([BLOCK_V], tl.float32), 0.0
            for start in range(0, VALUES, BLOCK_N):
                at = (split - readers) * VALUES + start + tl.arange(0, BLOCK_N)
                slot = begin + at * (end - begin) // SPREAD_VALUES
                seen = slot < end
                if valid is not None:
                    seen = tl.load(valid + batch * valid_stride + slot, mask=seen, other=0) != 0
                mask = seen[:, None] & (value < D_V)[None, :]
                z = tl.load(values + slot[:, None] * v.token + value[None, :], mask=mask, other=0.0)
                mean += tl.sum(z.to(tl.float32), 0) / SPREAD_VALUES
                share += tl.sum(seen.to(tl.float32), 0) / SPREAD_VALUES
            weight = tl.load(unread + row * GROUP + member, mask=there, other=0.0)
            some = weight > LOWEST
            tl.store(largest + part, tl.where(some, weight, LOWEST), mask=there)
            tl.store(sums + part, tl.where(some, share, 0.0), mask=there)
            mean = tl.where(some[:, None], mean[None, :], 0.0)
            tl.store(target, mean, mask=there[:, None] & (value < D_V)[None, :])
            return

    vector = q.data + batch * q.batch + (head * GROUP + member)[:, None] * q.head
    x = tl.load(vector + channel[None, :], mask=there[:, None] & (channel < D)[None, :], other=0.0)
    keys = k.data + batch * k.batch + head * k.head
    listed = chosen + batch * chosen_batch + head * chosen_head
    count = tl.load(counts + batch * counts_batch + head * counts_head)
    share = tl.cdiv(count, readers)
    stop = tl.minimum((split + 1) * share, count)
    most = tl.full([ROWS], LOWEST, tl.float32)
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(split * share, stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        inside = at < stop
        slot = tl.load(listed + at, mask=inside, other=0)
        if FAR:
            slot = slot.to(tl.int64)
        y = tl.load(
            keys + slot[:, None] * k.token + channel[None, :],
            mask=inside[:, None] & (channel < D)[None, :],
            other=0.0,
        )
        z = tl.load(
            values + slot[:, None] * v.token + value[None, :],
            mask=inside[:, None] & (value < D_V)[None, :],
            other=0.0,
        )
        s = tl.dot(x, tl.trans(y), input_precision=PRECISION) * qk_scale
        s = tl.where(inside[None, :], s, float("-inf"))
        more = tl.maximum(most, tl.max(s, 1))
        p = tl.exp2(s - more[:, None])
        old = tl.exp2(most - more)
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(z.dtype), z, acc * old[:, None], input_precision=PRECISION)
        most = more
    tl.store(largest + part, most, mask=there)
    tl.store(sums + part, total, mask=there)
    tl.store(target, acc, mask=there[:, None] & (value < D_V)[None, :])


@triton.jit(do_not_specialize=["splits", "kv_heads"])
def _merge_kernel(
    largest,
    sums,
    weighted,
    sinks,
    out,
    splits,
    kv_heads,
    D_V: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the ``splits`` parts of one row of the output."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row, member, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    value = tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V], tl.float32)
    total = tl.zeros([1], tl.float32)
    most = tl.full([1], LOWEST, tl.float32)
    if sinks is not None:
        # the sink acts as a first key, whose value is 0
        sink = tl.load(sinks + row % kv_heads * group + member).to(tl.float32)
        most = tl.zeros([1], tl.float32) + sink * LOG2_E
        total += 1.0
    for start in range(0, splits, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        at = (row * splits + split) * group + member
        part = tl.load(largest + at, mask=split < splits, other=LOWEST)
        more = tl.maximum(most, tl.max(part, 0))
        # programs without a key have written sums of 0
        weight = tl.exp2(part - more)
        own = tl.load(sums + at, mask=split < splits, other=0.0)
        x = tl.load(
            weighted + at[:, None] * D_V + value[None, :],
            mask=(split < splits)[:, None] & (value < D_V)[None, :],
            other=0.0,
        )
        old = tl.exp2(most - more)
        acc = acc * old + tl.sum(x * weight[:, None], 0)
        total = total * old + tl.sum(own * weight, 0)
        most = more
    place = out + (row * group + member) * D_V + value
    tl.store(place, (acc / total).to(out.dtype.element_ty), mask=value < D_V)


_attend_op = torch.library.custom_op("cab_hf::decode_attend", _attend, mutates_args=())


@_attend_op.register_fake
def _(q, k, v, chosen, counts, unread, scale, length, valid, sinks=None):
    return q.new_empty(*q.shape[:3], v.shape[3])
