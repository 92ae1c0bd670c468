"""Quantised keys and sampled queries: the operands of the scoring kernels.

`reference.sample_outlier_queries` and `reference.sample_typical_queries` define the samples. On
GPUs that multiply 8-bit floats, this module rounds keys and sampled queries to 8-bit floats.

The 8-bit format of keys: a key is divided by its quantisation scale, a power of two, and the
quotient is rounded. The tensor ``key_scale_exponents`` stores the exponent of each quantisation
scale. The exponents of all quantisation scales are equal modulo 10, so that most keys of a head
have the same quantisation scale.

Kernels index heads over all batch rows: ``flat_head = batch * num_heads + head``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from cab_hf import capability
from cab_hf.config import CabConfig, num_typical_queries
from cab_hf.ops.attention.tiles import (
    INFINITE_BITS,
    LOG2_E,
    choose_precision,
    get_magnitude_bits,
    make_vector_pointers,
    make_vectors,
)
from cab_hf.plan import KeyRanges
from cab_hf.selection import reference
from cab_hf.selection.tiles import FP8, HeadRange, compute_channel_widths, plan_gram

# before rounding, a key is scaled so that its largest channel has this exponent. At this exponent,
# 8-bit floats have four significant bits and multiples of 2^-9. Thus keys of all magnitudes have
# the same relative error, and the rounding of a key does not depend on other keys
ROUNDING_EXPONENT = tl.constexpr(-2)
# all keys whose largest channel has an exponent from COMMON_SCALE_FIRST_EXPONENT to
# COMMON_SCALE_FIRST_EXPONENT + 9 have the same quantisation scale. Most keys are in this range:
# their largest channel is between 2^-3 and 2^7
COMMON_SCALE_FIRST_EXPONENT = tl.constexpr(-3)
# difference between the exponents of two consecutive quantisation scales
SCALE_EXPONENT_STEP = tl.constexpr(10)
# channels of larger magnitude are clamped, because their products would not be finite
MAX_CHANNEL_MAGNITUDE = tl.constexpr(2.0**56)
# exponent that marks a key with NaN or an infinity. Exponents of finite keys are one less than a
# multiple of 10, and most of these exponents are -1. The marker is next to -1, so that the marker
# does not widen the range of exponents that a float16 must represent
NONFINITE_KEY_MARKER = -2
NONFINITE_KEY_EXPONENT = tl.constexpr(NONFINITE_KEY_MARKER)
# norm of 8-bit queries: their products with keys of norms up to 32,000 fit a float16
FP8_QUERY_NORM = 8.0
# most 16-bit channels that one instruction loads
MAX_RUN_CHANNELS = 8
# largest number of cached `ChannelOrder` objects
MAX_CACHED_ORDERS = 256
# keys per program of `_quantize_keys_kernel`
KEYS_PER_QUANTIZE_PROGRAM = 128
# samples per program of `_gather_queries_kernel`
QUERIES_PER_GATHER_PROGRAM = 64
# keys per program of `_mark_blocks_kernel`
KEYS_PER_MARK_PROGRAM = 2048
COSINE_STEPS = tl.constexpr(reference.COSINE_STEPS)
MIN_SQUARED_NORM = tl.constexpr(reference.MIN_SQUARED_NORM)
PADDING_SIMILARITY = tl.constexpr(reference.PADDING_SIMILARITY)
SAMPLED_SIMILARITY = tl.constexpr(reference.SAMPLED_SIMILARITY)


class ChannelOrder(NamedTuple):
    """Order of the channels in a stored key or query: those of outlier queries, then the others.

    The channels of outlier queries are the channels that outlier queries are scored on.

    Attributes:
        channel_table: int32 [num_first_channels + num_other_channels], the channel of q or k that
            each stored channel contains; -1 for padding.
        num_first_channels: Number of stored channels of outlier queries, a power of two. The
            number of all stored channels if outlier queries are scored on all channels.
        num_other_channels: Number of further stored channels, a power of two or 0.
        run_length: Length of the aligned runs of ``channel_table`` that contain adjacent channels
            or only padding. One instruction loads a run.
    """

    channel_table: Tensor
    num_first_channels: int
    num_other_channels: int
    run_length: int

    @classmethod
    @lru_cache(MAX_CACHED_ORDERS)
    def create(cls, channels: tuple[int, ...], head_dim: int, device: torch.device) -> ChannelOrder:
        """Return the order of channels if outlier queries are scored on ``channels``.

        The result is cached, because the copy of ``channel_table`` to the device synchronises.

        Args:
            channels: Channels that outlier queries are scored on; () for all channels.
            head_dim: Channels of q and k.
            device: Device of ``channel_table``.
        """
        outlier_channels = channels or tuple(range(head_dim))
        other_channels = [channel for channel in range(head_dim) if channel not in outlier_channels]
        channel_widths = compute_channel_widths(channels, head_dim)
        channel_table = [
            *outlier_channels,
            *[-1] * (channel_widths.outliers - len(outlier_channels)),
        ]
        channel_table += [*other_channels, *[-1] * (channel_widths.others - len(other_channels))]
        return cls(
            channel_table=torch.tensor(channel_table, dtype=torch.int32, device=device),
            num_first_channels=channel_widths.outliers,
            num_other_channels=channel_widths.others,
            run_length=_find_run_length(channel_table),
        )

    @property
    def num_stored_channels(self) -> int:
        """Return the number of stored channels."""
        return self.num_first_channels + self.num_other_channels


def _find_run_length(channel_table: list[int]) -> int:
    """Return `ChannelOrder.run_length`: a power of two, at most `MAX_RUN_CHANNELS`."""
    run_length = MAX_RUN_CHANNELS
    while not all(
        _is_contiguous_run(channel_table[run_start : run_start + run_length])
        for run_start in range(0, len(channel_table), run_length)
    ):
        run_length //= 2
    return run_length


def _is_contiguous_run(channels: list[int]) -> bool:
    """Return True if one load instruction can read these entries of `ChannelOrder.channel_table`.

    The entries are all padding, or n adjacent channels whose first channel is a multiple of n.
    """
    num_channels, first_channel = len(channels), channels[0]
    if first_channel == -1:
        return channels == [-1] * num_channels
    return first_channel % num_channels == 0 and channels == [
        *range(first_channel, first_channel + num_channels)
    ]


class QuerySample(NamedTuple):
    """The sampled queries of one kind, typical or outlier, of all query blocks of a group of heads.

    The samples of a head are in the order of the query blocks.

    Attributes:
        vectors: [heads, M_q * samples_per_block, C], the sampled queries in the dtype of the stored
            keys.
        scale: float32 [heads, M_q * samples_per_block], factors that convert products to logits to
            base two. For 8-bit keys, the kernel of `score` multiplies this tensor by the largest
            quantisation scale of the keys.
        lse: float32 [heads, M_q * samples_per_block], the log-sum-exp to base two, written by
            `score`.
        first_key: int32 [heads, M_q * samples_per_block], index of the first visible sampled key.
        last_key: int32 [heads, M_q * samples_per_block], index of the last visible sampled key; -1
            if no sampled key is visible.
        samples_per_block: Samples per query block.
        key_stride: Distance between sampled keys, in tokens. Sampled key i is the token
            ``reference.get_first_sampled_key(key_stride) + i * key_stride``.
    """

    vectors: Tensor
    scale: Tensor
    lse: Tensor
    first_key: Tensor
    last_key: Tensor
    samples_per_block: int
    key_stride: int

    @property
    def tensors(self) -> SampleTensors:
        """Return the tensors as an argument of kernels."""
        return SampleTensors(
            vectors=self.vectors,
            scale=self.scale,
            lse=self.lse,
            first_key=self.first_key,
            last_key=self.last_key,
        )


class SampleTensors(NamedTuple):
    """The tensors of a `QuerySample` as an argument of kernels."""

    vectors: Tensor
    scale: Tensor
    lse: Tensor
    first_key: Tensor
    last_key: Tensor


def choose_scoring_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which `score` multiplies keys and queries with the dtype of ``x``.

    The result is an 8-bit float if ``x`` has 16 bits and the GPU multiplies 8-bit floats, and the
    dtype of ``x`` otherwise.
    """
    has_fp8 = (
        x.dtype != torch.float32 and capability.capability(x.device) >= capability.FP8_CAPABILITY
    )
    return FP8 if has_fp8 else x.dtype


def allocate_quantized_keys(
    k: Tensor, channels: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Allocate values and exponents, the results of `quantize`, without computing them."""
    num_stored_channels = sum(compute_channel_widths(channels, k.shape[3]))
    stored_keys = k.new_empty(*k.shape[:3], num_stored_channels, dtype=dtype)
    return stored_keys, k.new_empty(*k.shape[:3], 1, dtype=torch.int8)


def quantize(k: Tensor, channels: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return k as ``stored_keys * 2 ** key_scale_exponents``.

    The channels of the stored keys have the order of `ChannelOrder`.

    For 8-bit values, each key is divided by its quantisation scale, a power of two, and rounded.
    For other dtypes, keys are not scaled, and their exponents are 0. A key with NaN or an infinity
    in any channel becomes zeros, and its exponent is `NONFINITE_KEY_MARKER`.

    Args:
        k: [B, H_kv, N_k, D].
        channels: Channels that outlier queries are scored on; () for all channels.
        dtype: Dtype of the values: `tiles.FP8`, or the dtype of k.

    Returns:
        stored_keys: ``dtype`` [B, H_kv, N_k, C].
        key_scale_exponents: int8 [B, H_kv, N_k, 1].
    """
    batch, heads, length, head_dim = k.shape
    channel_order = ChannelOrder.create(channels, head_dim, k.device)
    k = k if k.stride(-1) == 1 else k.contiguous()
    stored_keys, key_scale_exponents = allocate_quantized_keys(k, channels, dtype)
    grid = batch * heads, triton.cdiv(length, KEYS_PER_QUANTIZE_PROGRAM)
    _quantize_keys_kernel[grid](
        k=make_vectors(k),
        stored_keys=stored_keys,
        key_scale_exponents=key_scale_exponents,
        channel_table=channel_order.channel_table,
        heads=heads,
        length=length,
        BLOCK_N=KEYS_PER_QUANTIZE_PROGRAM,
        FIRST_WIDTH=channel_order.num_first_channels,
        OTHER_WIDTH=channel_order.num_other_channels,
        RUN_LENGTH=channel_order.run_length,
        num_warps=4,
    )
    return stored_keys, key_scale_exponents


def mark_blocks(key_scale_exponents: Tensor, is_valid_key: Tensor, key_block: int) -> Tensor:
    """Return int8 [B, H_kv, M_k], 1 for key blocks with a key that contains NaN or an infinity.

    `find_marked_blocks` of `cab_hf.ops.reference` is the definition. Padding keys are ignored.

    Args:
        key_scale_exponents: int8 [B, H_kv, N_k, 1], from `quantize`.
        is_valid_key: bool [B, N_k], False for padding.
        key_block: Keys per block.
    """
    batch, heads, length, _ = key_scale_exponents.shape
    kv_blocks = triton.cdiv(length, key_block)
    marked_blocks = key_scale_exponents.new_empty(batch, heads, kv_blocks)
    padded_key_block = triton.next_power_of_2(key_block)
    blocks_per_program = max(1, KEYS_PER_MARK_PROGRAM // padded_key_block)
    is_valid_key = is_valid_key.expand(batch, length)
    grid = batch * heads, triton.cdiv(kv_blocks, blocks_per_program)
    _mark_blocks_kernel[grid](
        key_scale_exponents=key_scale_exponents.contiguous(),
        is_valid_key=is_valid_key.view(torch.int8),
        valid_batch_stride=is_valid_key.stride(0),
        valid_token_stride=is_valid_key.stride(1),
        marked_blocks=marked_blocks,
        heads=heads,
        length=length,
        kv_blocks=kv_blocks,
        KEY_BLOCK=key_block,
        BLOCK_N=padded_key_block,
        BLOCKS_PER_PROGRAM=blocks_per_program,
        num_warps=4,
    )
    return marked_blocks


def sample_queries(
    q: Tensor,
    *,
    key_ranges: KeyRanges,
    config: CabConfig,
    head_range: HeadRange,
    scale: float,
    channels: tuple[int, ...],
    dtype: torch.dtype,
) -> list[QuerySample]:
    """Gather the sampled queries of a group of heads: the typical and the outlier queries.

    Typical queries are at equal steps in each query block. Outlier queries are selected by
    `sample_outlier_positions`, if ``config.outlier_queries`` is not 0.

    Args:
        q: [B, H, N_q, D].
        key_ranges: Keys that each query may attend to.
        config: Settings of the selection.
        head_range: Heads whose queries are sampled.
        scale: Softmax scale, the factor in ``logits = scale * q @ k.T``.
        channels: Channels that outlier queries are scored on; () for all channels.
        dtype: Dtype of the gathered queries: the dtype of the stored keys.

    Returns:
        The `QuerySample` of typical queries, with all channels: the shape of ``vectors`` is
        [heads, M_q * num_typical_queries(config), channel_order.num_stored_channels] for the
        `ChannelOrder` ``channel_order`` of ``channels``. Then, unless ``config.outlier_queries`` is
        0, the `QuerySample` of outlier queries, with ``channels`` only: [heads, M_q *
        config.outlier_queries, channel_order.num_first_channels]. The fields ``lse`` are allocated,
        but not computed.
    """
    channel_order = ChannelOrder.create(channels, q.shape[3], q.device)
    outlier_samples = []
    if num_outliers := config.outlier_queries:
        outlier_positions = sample_outlier_positions(
            q,
            key_ranges,
            head_range=head_range,
            query_block=config.query_block,
            samples_per_block=num_outliers,
        )
        outlier_sample = _allocate_sample(
            q,
            head_range=head_range,
            config=config,
            samples_per_block=num_outliers,
            num_channels=channel_order.num_first_channels,
            dtype=dtype,
        )
        _gather_queries(
            q,
            key_ranges,
            head_range=head_range,
            sample=outlier_sample,
            channel_order=channel_order,
            positions=outlier_positions,
            scale=scale,
            query_block=config.query_block,
        )
        outlier_samples.append(outlier_sample)
    typical_sample = _allocate_sample(
        q,
        head_range=head_range,
        config=config,
        samples_per_block=num_typical_queries(config),
        num_channels=channel_order.num_stored_channels,
        dtype=dtype,
        key_stride=config.typical_key_stride,
    )
    _gather_queries(
        q,
        key_ranges,
        head_range=head_range,
        sample=typical_sample,
        channel_order=channel_order,
        positions=None,
        scale=scale,
        query_block=config.query_block,
    )
    return [typical_sample, *outlier_samples]


def sample_outlier_positions(
    q: Tensor,
    key_ranges: KeyRanges,
    *,
    head_range: HeadRange,
    query_block: int,
    samples_per_block: int,
) -> Tensor:
    """Return the positions of the outliers of each query block, for a group of heads.

    `reference.sample_outlier_queries` is the definition.

    Args:
        q: [B, H, N_q, D].
        key_ranges: Keys that each query may attend to; queries without keys are padding.
        head_range: Heads whose queries are sampled.
        query_block: Queries per block.
        samples_per_block: Samples per query block.

    Returns:
        int32 [heads, M_q * samples_per_block], positions in q; -1 for missing samples.
    """
    length, head_dim = q.shape[2:]
    q_blocks = triton.cdiv(length, query_block)
    if samples_per_block == query_block:
        return _list_all_positions(key_ranges, head_range, q_blocks * samples_per_block)
    gram_tiles = plan_gram(
        query_block=query_block,
        head_dim=head_dim,
        num_heads=head_range.num_heads,
        q_blocks=q_blocks,
    )
    block_q, q_blocks_per_launch = gram_tiles.block_q, gram_tiles.q_blocks_per_launch
    positions = torch.empty(
        head_range.num_heads, q_blocks * samples_per_block, device=q.device, dtype=torch.int32
    )
    gram_shape = head_range.num_heads * q_blocks_per_launch * block_q, block_q
    gram = q.new_empty(gram_shape, dtype=torch.int8) if gram_tiles.has_gram else None
    mean_similarity = positions.new_empty(head_range.num_heads * q_blocks_per_launch, block_q)
    inverse_norm = torch.empty_like(mean_similarity, dtype=torch.float32)
    last_key = key_ranges.end if key_ranges.end.stride(1) == 1 else key_ranges.end.contiguous()
    query_vectors = make_vectors(q if q.stride(-1) == 1 else q.contiguous())
    for first_q_block in range(0, q_blocks, q_blocks_per_launch):
        # heads vary fastest: programs that run together read adjacent memory of [B, N, H, D]
        grid = head_range.num_heads, min(q_blocks_per_launch, q_blocks - first_q_block)
        _similarities_kernel[grid](
            q=query_vectors,
            last_key=last_key,
            last_key_stride=last_key.stride(0),
            gram=gram,
            mean_similarity=mean_similarity,
            inverse_norm=inverse_norm,
            first_q_block=first_q_block,
            first_head=head_range.first_head,
            heads_per_row=head_range.heads_per_row,
            length=length,
            QUERY_BLOCK=query_block,
            BLOCK_Q=block_q,
            D=head_dim,
            BLOCK_D=gram_tiles.block_d,
            PRECISION=choose_precision(q),
            num_warps=4,
        )
        _farthest_points_kernel[grid](
            q=query_vectors,
            gram=gram,
            mean_similarity=mean_similarity,
            inverse_norm=inverse_norm,
            positions=positions,
            first_q_block=first_q_block,
            first_head=head_range.first_head,
            heads_per_row=head_range.heads_per_row,
            q_blocks=q_blocks,
            QUERY_BLOCK=query_block,
            SAMPLES_PER_BLOCK=samples_per_block,
            BLOCK_Q=block_q,
            D=head_dim,
            BLOCK_D=gram_tiles.block_d,
            num_warps=1 if gram_tiles.has_gram else 4,
        )
    return positions


def _list_all_positions(key_ranges: KeyRanges, head_range: HeadRange, length: int) -> Tensor:
    """Return the positions 0 to ``length`` - 1, with -1 for padding, int32 [heads, length]."""
    position = torch.arange(length, device=key_ranges.end.device, dtype=torch.int32)
    last_key = F.pad(key_ranges.end, (0, length - key_ranges.q_length), value=-1)
    positions = position.where(last_key >= 0, -1).repeat_interleave(head_range.heads_per_row, 0)
    return positions[head_range.first_head : head_range.first_head + head_range.num_heads]


def _allocate_sample(
    q: Tensor,
    *,
    head_range: HeadRange,
    config: CabConfig,
    samples_per_block: int,
    num_channels: int,
    dtype: torch.dtype,
    key_stride: int = 1,
) -> QuerySample:
    """Allocate a `QuerySample` of ``samples_per_block`` queries with ``num_channels`` channels."""
    sample_shape = (
        head_range.num_heads,
        triton.cdiv(q.shape[2], config.query_block) * samples_per_block,
    )
    return QuerySample(
        vectors=q.new_empty((*sample_shape, num_channels), dtype=dtype),
        scale=q.new_empty(sample_shape, dtype=torch.float32),
        lse=q.new_empty(sample_shape, dtype=torch.float32),
        first_key=torch.empty(sample_shape, device=q.device, dtype=torch.int32),
        last_key=torch.empty(sample_shape, device=q.device, dtype=torch.int32),
        samples_per_block=samples_per_block,
        key_stride=key_stride,
    )


def _gather_queries(
    q: Tensor,
    key_ranges: KeyRanges,
    *,
    head_range: HeadRange,
    sample: QuerySample,
    channel_order: ChannelOrder,
    positions: Tensor | None,
    scale: float,
    query_block: int,
) -> None:
    """Write queries, their scales and their visible keys to ``sample``.

    Args:
        q: [B, H, N_q, D].
        key_ranges: Keys that each query may attend to.
        head_range: Heads of the sample.
        sample: Allocated by `_allocate_sample`. All fields except ``lse`` are written.
        channel_order: Order of the channels.
        positions: int32 [heads, M_q * samples_per_block], positions of outlier queries, -1 for
            missing samples; None for typical queries, whose positions the kernel computes.
        scale: Softmax scale, the factor in ``logits = scale * q @ k.T``.
        query_block: Queries per block.
    """
    samples_per_head, num_channels = sample.vectors.shape[1:]
    first_key, last_key = (
        x if x.stride(1) == 1 else x.contiguous() for x in (key_ranges.start, key_ranges.end)
    )
    grid = head_range.num_heads, triton.cdiv(samples_per_head, QUERIES_PER_GATHER_PROGRAM)
    _gather_queries_kernel[grid](
        q=make_vectors(q if q.stride(-1) == 1 else q.contiguous()),
        first_keys=first_key,
        last_keys=last_key,
        first_key_stride=first_key.stride(0),
        last_key_stride=last_key.stride(0),
        positions=positions,
        channel_table=channel_order.channel_table,
        sample=sample.tensors,
        qk_scale=scale * LOG2_E.value,
        first_head=head_range.first_head,
        heads_per_row=head_range.heads_per_row,
        length=q.shape[2],
        samples_per_head=samples_per_head,
        QUERY_NORM=FP8_QUERY_NORM if sample.vectors.dtype == FP8 else 0.0,
        QUERY_BLOCK=query_block,
        SAMPLES_PER_BLOCK=sample.samples_per_block,
        BLOCK_M=QUERIES_PER_GATHER_PROGRAM,
        FIRST_WIDTH=channel_order.num_first_channels,
        OTHER_WIDTH=num_channels - channel_order.num_first_channels,
        RUN_LENGTH=channel_order.run_length,
        KEY_STRIDE=sample.key_stride,
        FIRST_SAMPLED_KEY=reference.get_first_sampled_key(sample.key_stride),
        num_warps=4,
    )


@triton.jit
def compute_exponent(x):
    """Return the exponents of non-negative float32 numbers to base two, clamped to -60 to 60."""
    exponent = (x.to(tl.int32, bitcast=True) >> 23) - 127
    return tl.minimum(tl.maximum(exponent, -60), 60)


@triton.jit
def power_of_two(exponent):
    """Return exact float32 powers of two for integer exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_channels(
    vector_pointers,
    is_real_vector,
    channel_table,
    FIRST_STORED_CHANNEL: tl.constexpr,
    NUM_CHANNELS: tl.constexpr,
    RUN_LENGTH: tl.constexpr,
):
    """Load NUM_CHANNELS stored channels of N vectors of q or k, from FIRST_STORED_CHANNEL on.

    Args:
        vector_pointers: [N, 1], pointers to the vectors.
        is_real_vector: bool [N], False for vectors that are replaced by zeros.
        channel_table: `ChannelOrder.channel_table`.

    Returns:
        values: float32 [N, NUM_CHANNELS], zeros for padding channels.
        stored_channels: int32 [NUM_CHANNELS], the indices of the stored channels.
    """
    stored_channels = FIRST_STORED_CHANNEL + tl.arange(0, NUM_CHANNELS)
    channel = tl.max_contiguous(
        tl.multiple_of(tl.load(channel_table + stored_channels), RUN_LENGTH), RUN_LENGTH
    )
    mask = is_real_vector[:, None] & (channel >= 0)[None, :]
    return tl.load(vector_pointers + channel[None, :], mask=mask, other=0.0).to(
        tl.float32
    ), stored_channels


@triton.jit
def _clamp_channels(x):
    """Clamp finite float32 numbers so that no magnitude exceeds `MAX_CHANNEL_MAGNITUDE`."""
    return tl.clamp(x, -MAX_CHANNEL_MAGNITUDE, MAX_CHANNEL_MAGNITUDE)


@triton.jit
def _round_to_fp8(x, exponent, exponent_shift, stored_keys):
    """Return x * 2 ** (exponent_shift - exponent) as 8-bit floats.

    The rounding takes place before the multiplication by 2 ** exponent_shift, at the exponent
    `ROUNDING_EXPONENT` of the largest channel.

    Args:
        x: float32 [N, C].
        exponent: int32 [N], exponent of the largest channel minus `ROUNDING_EXPONENT`.
        exponent_shift: int32 [N], ``exponent`` minus the exponent of the quantisation scale.
        stored_keys: Pointer, whose dtype is the dtype of the result.
    """
    x = (x * power_of_two(-exponent)[:, None]).to(stored_keys.dtype.element_ty).to(tl.float32)
    return (x * power_of_two(exponent_shift)[:, None]).to(stored_keys.dtype.element_ty)


# the length changes from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=["length"])
def _quantize_keys_kernel(
    k,
    stored_keys,
    key_scale_exponents,
    channel_table,
    heads,
    length,
    BLOCK_N: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    RUN_LENGTH: tl.constexpr,
):
    """Write the values and exponents of BLOCK_N keys of a KV head, see `quantize`."""
    # keys k_first [BLOCK_N, FIRST_WIDTH] and k_other [BLOCK_N, OTHER_WIDTH], in the order of
    # ``channel_table``
    flat_head = tl.program_id(0)
    token = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in_sequence = token < length
    key_pointers = make_vector_pointers(k, flat_head // heads, flat_head % heads, token)
    key_row = flat_head.to(tl.int64) * length + token
    stored_key_pointers = stored_keys + key_row[:, None] * (FIRST_WIDTH + OTHER_WIDTH)
    k_first, first_stored_channels = _load_channels(
        key_pointers,
        is_in_sequence,
        channel_table,
        FIRST_STORED_CHANNEL=0,
        NUM_CHANNELS=FIRST_WIDTH,
        RUN_LENGTH=RUN_LENGTH,
    )
    if OTHER_WIDTH > 0:
        k_other, other_stored_channels = _load_channels(
            key_pointers,
            is_in_sequence,
            channel_table,
            FIRST_STORED_CHANNEL=FIRST_WIDTH,
            NUM_CHANNELS=OTHER_WIDTH,
            RUN_LENGTH=RUN_LENGTH,
        )
    # largest magnitude of each key [BLOCK_N], as integers: a maximum of floats may drop a NaN
    magnitude_bits = tl.max(get_magnitude_bits(k_first), 1)
    if OTHER_WIDTH > 0:
        magnitude_bits = tl.maximum(magnitude_bits, tl.max(get_magnitude_bits(k_other), 1))
    is_finite = magnitude_bits < INFINITE_BITS
    k_first = tl.where(is_finite[:, None], k_first, 0.0)
    if OTHER_WIDTH > 0:
        k_other = tl.where(is_finite[:, None], k_other, 0.0)
    if stored_keys.dtype.element_ty.is_fp8():
        # exponents [BLOCK_N], 8-bit values [BLOCK_N, FIRST_WIDTH] and [BLOCK_N, OTHER_WIDTH]
        k_first = _clamp_channels(k_first)
        if OTHER_WIDTH > 0:
            k_other = _clamp_channels(k_other)
        max_magnitude = tl.where(is_finite, magnitude_bits, 0).to(tl.float32, bitcast=True)
        max_magnitude = tl.minimum(max_magnitude, MAX_CHANNEL_MAGNITUDE)
        # a key of zeros may have any quantisation scale: use the scale of most keys
        exponent = tl.where(max_magnitude > 0, compute_exponent(max_magnitude), 0)
        # the remainder has the sign of the dividend in Triton: keep the dividend positive
        exponent_shift = (
            exponent - COMMON_SCALE_FIRST_EXPONENT + 100 * SCALE_EXPONENT_STEP
        ) % SCALE_EXPONENT_STEP
        exponent -= ROUNDING_EXPONENT
        stored_exponent = tl.where(is_finite, exponent - exponent_shift, NONFINITE_KEY_EXPONENT)
        tl.store(key_scale_exponents + key_row, stored_exponent.to(tl.int8), mask=is_in_sequence)
        tl.store(
            stored_key_pointers + first_stored_channels[None, :],
            _round_to_fp8(k_first, exponent, exponent_shift, stored_keys),
            mask=is_in_sequence[:, None],
        )
        if OTHER_WIDTH > 0:
            k_other = _round_to_fp8(k_other, exponent, exponent_shift, stored_keys)
            tl.store(
                stored_key_pointers + other_stored_channels[None, :],
                k_other,
                mask=is_in_sequence[:, None],
            )
    else:
        # 16-bit or float32 values of the same shapes; their exponent is 0
        stored_exponent = tl.where(is_finite, 0, NONFINITE_KEY_EXPONENT)
        tl.store(key_scale_exponents + key_row, stored_exponent.to(tl.int8), mask=is_in_sequence)
        stored_dtype: tl.constexpr = stored_keys.dtype.element_ty
        tl.store(
            stored_key_pointers + first_stored_channels[None, :],
            k_first.to(stored_dtype),
            mask=is_in_sequence[:, None],
        )
        if OTHER_WIDTH > 0:
            tl.store(
                stored_key_pointers + other_stored_channels[None, :],
                k_other.to(stored_dtype),
                mask=is_in_sequence[:, None],
            )


@triton.jit
def _compute_cosine_steps(dot_products, left_inverse_norm, right_inverse_norm):
    """Return cosine similarities in steps of 1 / COSINE_STEPS, not rounded; NaN counts as -1."""
    cosine = dot_products * left_inverse_norm * right_inverse_norm
    cosine = tl.where(cosine == cosine, cosine, -1.0)
    return tl.minimum(tl.maximum(cosine, -1.0), 1.0) * COSINE_STEPS


@triton.jit
def _load_queries(
    query_pointers, is_real_query, first_channel, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load BLOCK_D channels of the queries of a block, [BLOCK_Q, BLOCK_D]; zeros for padding.

    Args:
        query_pointers: [BLOCK_Q, 1], pointers to the queries.
        is_real_query: bool [BLOCK_Q], False for padding.
        first_channel: The first of the BLOCK_D channels.
    """
    channel = first_channel + tl.arange(0, BLOCK_D)
    mask = is_real_query[:, None] & (channel < D)[None, :]
    return tl.load(query_pointers + channel[None, :], mask=mask, other=0.0)


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=["last_key_stride", "first_q_block", "first_head", "length"])
def _similarities_kernel(
    q,
    last_key,
    last_key_stride,
    gram,
    mean_similarity,
    inverse_norm,
    first_q_block,
    first_head,
    heads_per_row,
    length,
    QUERY_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the cosine similarities of one query block, in steps of 1 / COSINE_STEPS.

    Outputs of the query block:

    * ``gram``: int8 [BLOCK_Q, BLOCK_Q], similarities of all pairs of queries. The argument is None
      if query blocks are too large for a program.
    * ``mean_similarity``: int32 [BLOCK_Q], similarity to the mean query; PADDING_SIMILARITY for
      padding.
    * ``inverse_norm``: float32 [BLOCK_Q], 1 / norm of each query.
    """
    # queries of the block: query_position and is_real_query [BLOCK_Q]
    q_block = first_q_block + tl.program_id(1)
    launch_head = tl.program_id(0).to(tl.int64)
    query_index = tl.arange(0, BLOCK_Q)
    query_position = q_block * QUERY_BLOCK + query_index
    is_in_block = (query_index < QUERY_BLOCK) & (query_position < length)
    batch = (first_head + launch_head) // heads_per_row
    is_real_query = (
        tl.load(last_key + batch * last_key_stride + query_position, mask=is_in_block, other=-1)
        >= 0
    )
    query_pointers = make_vector_pointers(
        q, batch, (first_head + launch_head) % heads_per_row, query_position
    )
    # products of all pairs of queries [BLOCK_Q, BLOCK_Q], and of each query with the sum of all
    # queries [BLOCK_Q]. The sum replaces the mean, because the cosine is the same for both
    if gram is not None:
        gram_matrix = tl.zeros([BLOCK_Q, BLOCK_Q], tl.float32)
        for first_channel in tl.static_range(0, D, BLOCK_D):
            queries = _load_queries(
                query_pointers, is_real_query, first_channel, D=D, BLOCK_D=BLOCK_D
            )
            gram_matrix = tl.dot(queries, queries.T, gram_matrix, input_precision=PRECISION)
        squared_norm = tl.sum(
            tl.where(query_index[:, None] == query_index[None, :], gram_matrix, 0.0), 1
        )
        query_sum_products = tl.sum(gram_matrix, 1)
        sum_squared_norm = tl.sum(query_sum_products, 0)
    else:
        squared_norm = tl.zeros([BLOCK_Q], tl.float32)
        query_sum_products = tl.zeros([BLOCK_Q], tl.float32)
        sum_squared_norm = 0.0
        for first_channel in tl.static_range(0, D, BLOCK_D):
            queries = _load_queries(
                query_pointers, is_real_query, first_channel, D=D, BLOCK_D=BLOCK_D
            ).to(tl.float32)
            channel_sums = tl.sum(queries, 0)
            squared_norm += tl.sum(queries * queries, 1)
            query_sum_products += tl.sum(queries * channel_sums[None, :], 1)
            sum_squared_norm += tl.sum(channel_sums * channel_sums, 0)
    # similarities to the mean query [BLOCK_Q]
    query_inverse_norm = tl.rsqrt(tl.maximum(squared_norm, MIN_SQUARED_NORM))
    first_query_row = (tl.program_id(1) * tl.num_programs(0) + launch_head) * BLOCK_Q
    sum_inverse_norm = tl.rsqrt(tl.maximum(sum_squared_norm, MIN_SQUARED_NORM))
    similarity = _compute_cosine_steps(query_sum_products, query_inverse_norm, sum_inverse_norm).to(
        tl.int32
    )
    tl.store(
        mean_similarity + first_query_row + query_index,
        tl.where(is_real_query, similarity, PADDING_SIMILARITY),
    )
    tl.store(inverse_norm + first_query_row + query_index, query_inverse_norm)
    if gram is not None:
        # similarities of all pairs [BLOCK_Q, BLOCK_Q]. The inverse norms are needed along rows and
        # along columns, which have different register layouts: read one of them from memory again
        tl.debug_barrier()
        column_inverse_norm = tl.load(inverse_norm + first_query_row + query_index)
        similarity_steps = _compute_cosine_steps(
            gram_matrix, query_inverse_norm[:, None], column_inverse_norm[None, :]
        ).to(tl.int8)
        gram_row = first_query_row + query_index
        tl.store(gram + gram_row[:, None] * BLOCK_Q + query_index[None, :], similarity_steps)


@triton.jit
def _dot_with_vector(
    query_pointers, vector_pointer, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Return dot products of the queries of a block with one vector, float32 [BLOCK_Q].

    Args:
        query_pointers: [BLOCK_Q, 1], pointers to the queries.
        vector_pointer: Pointer to the vector of D channels.
    """
    dot_products = tl.zeros([BLOCK_Q], tl.float32)
    for first_channel in tl.static_range(0, D, BLOCK_D):
        channel = first_channel + tl.arange(0, BLOCK_D)
        is_channel = channel < D
        vector = tl.load(vector_pointer + channel, mask=is_channel, other=0.0).to(tl.float32)
        queries = tl.load(
            query_pointers + channel[None, :], mask=is_channel[None, :], other=0.0
        ).to(tl.float32)
        dot_products += tl.sum(queries * vector[None, :], 1)
    return dot_products


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=["first_q_block", "first_head", "q_blocks"])
def _farthest_points_kernel(
    q,
    gram,
    mean_similarity,
    inverse_norm,
    positions,
    first_q_block,
    first_head,
    heads_per_row,
    q_blocks,
    QUERY_BLOCK: tl.constexpr,
    SAMPLES_PER_BLOCK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the positions of a farthest-point sample of one query block; -1 for missing samples.

    Each sample needs one row of similarities. The row is read from ``gram``, or computed if
    ``gram`` is None.
    """
    # similarities to the mean query [BLOCK_Q]
    q_block = first_q_block + tl.program_id(1)
    launch_head = tl.program_id(0).to(tl.int64)
    query_index = tl.arange(0, BLOCK_Q)
    first_query_row = (tl.program_id(1) * tl.num_programs(0) + launch_head) * BLOCK_Q
    max_similarity = tl.load(mean_similarity + first_query_row + query_index)
    is_real_query = max_similarity < PADDING_SIMILARITY
    if gram is None:
        query_inverse_norm = tl.load(inverse_norm + first_query_row + query_index)
        batch = (first_head + launch_head) // heads_per_row
        head = (first_head + launch_head) % heads_per_row
        # padding reads the first query of the block: its similarities are not used
        query_pointers = make_vector_pointers(
            q, batch, head, q_block * QUERY_BLOCK + tl.where(is_real_query, query_index, 0)
        )
    # sample_positions [SAMPLES_PER_BLOCK], one per iteration: the query whose highest similarity to
    # the earlier samples is the lowest
    sample_number = tl.arange(0, SAMPLES_PER_BLOCK)
    sample_positions = tl.full([SAMPLES_PER_BLOCK], -1, tl.int32)
    for iteration in range(SAMPLES_PER_BLOCK):
        # pack max_similarity (high bits) and the index of the query in its block (low bits) into
        # one integer per query: the minimum has the lowest similarity and, in a tie, the lowest
        # index
        packed_min = tl.min(max_similarity * BLOCK_Q + query_index, 0)
        sampled_index = packed_min & (BLOCK_Q - 1)
        has_sample = packed_min < PADDING_SIMILARITY * BLOCK_Q
        sample_positions = tl.where(
            (sample_number == iteration) & has_sample,
            q_block * QUERY_BLOCK + sampled_index,
            sample_positions,
        )
        if gram is not None:
            similarity = tl.load(
                gram + (first_query_row + sampled_index) * BLOCK_Q + query_index
            ).to(tl.int32)
        else:
            sample_token = (q_block * QUERY_BLOCK + tl.where(has_sample, sampled_index, 0)).to(
                tl.int64
            )
            sample_pointer = (
                q.data
                + batch * q.batch_stride
                + head * q.head_stride
                + sample_token * q.token_stride
            )
            dot_products = _dot_with_vector(
                query_pointers, sample_pointer, D=D, BLOCK_Q=BLOCK_Q, BLOCK_D=BLOCK_D
            )
            sample_inverse_norm = tl.load(inverse_norm + first_query_row + sampled_index)
            similarity = _compute_cosine_steps(
                dot_products, query_inverse_norm, sample_inverse_norm
            ).to(tl.int32)
        max_similarity = tl.where(
            iteration == 0, similarity, tl.maximum(max_similarity, similarity)
        )
        max_similarity = tl.where(query_index == sampled_index, SAMPLED_SIMILARITY, max_similarity)
        max_similarity = tl.where(is_real_query, max_similarity, PADDING_SIMILARITY)
    tl.store(
        positions + (launch_head * q_blocks + q_block) * SAMPLES_PER_BLOCK + sample_number,
        sample_positions,
    )


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(
    do_not_specialize=[
        "first_key_stride",
        "last_key_stride",
        "first_head",
        "length",
        "samples_per_head",
    ]
)
def _gather_queries_kernel(
    q,
    first_keys,
    last_keys,
    first_key_stride,
    last_key_stride,
    positions,
    channel_table,
    sample,
    qk_scale,
    first_head,
    heads_per_row,
    length,
    samples_per_head,
    QUERY_NORM: tl.constexpr,
    QUERY_BLOCK: tl.constexpr,
    SAMPLES_PER_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    FIRST_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    RUN_LENGTH: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    FIRST_SAMPLED_KEY: tl.constexpr,
):
    """Write BLOCK_M sampled queries, their scales and their visible sampled keys.

    If ``QUERY_NORM`` is not 0, each query is scaled to the norm ``QUERY_NORM`` before it is stored.
    """
    # positions of the samples [BLOCK_M], -1 for missing samples
    launch_head = tl.program_id(0).to(tl.int64)
    batch = (first_head + launch_head) // heads_per_row
    head = (first_head + launch_head) % heads_per_row
    sample_row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_sample_row = sample_row < samples_per_head
    if positions is not None:
        query_position = tl.load(
            positions + launch_head * samples_per_head + sample_row, mask=is_sample_row, other=-1
        )
    else:
        # typical queries: the middle of SAMPLES_PER_BLOCK equal steps
        queries_per_step: tl.constexpr = QUERY_BLOCK // SAMPLES_PER_BLOCK
        query_position = (
            sample_row // SAMPLES_PER_BLOCK * QUERY_BLOCK
            + sample_row % SAMPLES_PER_BLOCK * queries_per_step
            + queries_per_step // 2
        )
        query_position = tl.where(is_sample_row & (query_position < length), query_position, -1)
    has_query = query_position >= 0
    first_key = tl.load(
        first_keys + batch * first_key_stride + query_position, mask=has_query, other=0
    )
    last_key = tl.load(
        last_keys + batch * last_key_stride + query_position, mask=has_query, other=-1
    )
    has_visible_key = last_key >= 0
    # channels q_first [BLOCK_M, FIRST_WIDTH] and q_other [BLOCK_M, OTHER_WIDTH]; squared norm and
    # largest magnitude [BLOCK_M]
    query_pointers = make_vector_pointers(q, batch, head, query_position)
    q_first, first_stored_channels = _load_channels(
        query_pointers,
        has_visible_key,
        channel_table,
        FIRST_STORED_CHANNEL=0,
        NUM_CHANNELS=FIRST_WIDTH,
        RUN_LENGTH=RUN_LENGTH,
    )
    squared_norm = tl.sum(q_first * q_first, 1)
    magnitude_bits = tl.max(get_magnitude_bits(q_first), 1)
    if OTHER_WIDTH > 0:
        q_other, other_stored_channels = _load_channels(
            query_pointers,
            has_visible_key,
            channel_table,
            FIRST_STORED_CHANNEL=FIRST_WIDTH,
            NUM_CHANNELS=OTHER_WIDTH,
            RUN_LENGTH=RUN_LENGTH,
        )
        squared_norm += tl.sum(q_other * q_other, 1)
        magnitude_bits = tl.maximum(magnitude_bits, tl.max(get_magnitude_bits(q_other), 1))
    # scale the queries to the norm QUERY_NORM, and store them [BLOCK_M, FIRST_WIDTH + OTHER_WIDTH]
    norm_factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if QUERY_NORM > 0:
        norm_factor = QUERY_NORM / tl.sqrt(tl.maximum(squared_norm, MIN_SQUARED_NORM))
    sample_row += launch_head * samples_per_head
    sample_pointers = sample.vectors + sample_row[:, None] * (FIRST_WIDTH + OTHER_WIDTH)
    q_first = (q_first * norm_factor[:, None]).to(sample.vectors.dtype.element_ty)
    tl.store(sample_pointers + first_stored_channels[None, :], q_first, mask=is_sample_row[:, None])
    if OTHER_WIDTH > 0:
        q_other = (q_other * norm_factor[:, None]).to(sample.vectors.dtype.element_ty)
        tl.store(
            sample_pointers + other_stored_channels[None, :], q_other, mask=is_sample_row[:, None]
        )
    # visible keys [BLOCK_M]: convert tokens to indices of sampled keys
    first_key = (tl.maximum(first_key - FIRST_SAMPLED_KEY, 0) + KEY_STRIDE - 1) // KEY_STRIDE
    last_key = tl.where(
        last_key >= FIRST_SAMPLED_KEY, (last_key - FIRST_SAMPLED_KEY) // KEY_STRIDE, -1
    )
    last_key = tl.where(last_key >= first_key, last_key, -1)
    # a query with NaN or an infinity gets the scale NaN: all its attention shares are then NaN
    logit_scale = tl.where(magnitude_bits < INFINITE_BITS, qk_scale / norm_factor, float("nan"))
    tl.store(sample.scale + sample_row, logit_scale, mask=is_sample_row)
    tl.store(sample.first_key + sample_row, first_key, mask=is_sample_row)
    tl.store(sample.last_key + sample_row, last_key, mask=is_sample_row)


# these arguments change from call to call: without specialisation, Triton compiles once
@triton.jit(do_not_specialize=["valid_batch_stride", "length", "kv_blocks"])
def _mark_blocks_kernel(
    key_scale_exponents,
    is_valid_key,
    valid_batch_stride,
    valid_token_stride,
    marked_blocks,
    heads,
    length,
    kv_blocks,
    KEY_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """Write the marks of BLOCKS_PER_PROGRAM key blocks of a KV head, see `mark_blocks`.

    ``BLOCK_N`` is KEY_BLOCK rounded up to a power of two.
    """
    flat_head = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    key_index = tl.arange(0, BLOCK_N)
    # keys of the blocks [BLOCKS_PER_PROGRAM, BLOCK_N]
    token = block[:, None] * KEY_BLOCK + key_index[None, :]
    is_in_sequence = (token < length) & (key_index < KEY_BLOCK)[None, :]
    exponent = tl.load(
        key_scale_exponents + flat_head * length + token, mask=is_in_sequence, other=0
    )
    is_valid_token = (
        is_valid_key + flat_head // heads * valid_batch_stride + token * valid_token_stride
    )
    is_valid_token = tl.load(is_valid_token, mask=is_in_sequence, other=0) != 0
    # marks of the blocks [BLOCKS_PER_PROGRAM]
    is_marked_block = tl.max(
        ((exponent == NONFINITE_KEY_EXPONENT) & is_valid_token).to(tl.int32), 1
    )
    tl.store(
        marked_blocks + flat_head * kv_blocks + block,
        is_marked_block.to(tl.int8),
        mask=block < kv_blocks,
    )
