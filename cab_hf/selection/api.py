"""The entry points of block selection: argument checks, dispatch to a backend, registered ops.

`select_blocks` runs `reference.select_blocks` on a CPU and the kernels on a GPU. Both compute the
same selection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cab_hf.checks import require
from cab_hf.config import CabConfig, tail_and_query_block_sizes
from cab_hf.ops import has_kernels
from cab_hf.ops import reference as ops_reference
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, crossed_blocks
from cab_hf.selection import cpu, reference
from cab_hf.selection.reference import ScoreOptions

# fields of CabConfig that selection reads, with their types in the schema of the registered op
SCHEMA_TYPE_BY_FIELD = {
    "query_block": "int",
    "key_block": "int",
    "sink_blocks": "int",
    "local_blocks": "int",
    "dense_tail_blocks": "int",
    "outlier_queries": "int",
    "typical_queries": "int",
    "typical_key_stride": "int",
    "mass_threshold": "float",
    "share_threshold": "float",
    "max_density": "float",
}


@dataclass(frozen=True, eq=False)
class QuantizedKeys:
    """Keys in the format that `select_blocks` scores.

    Up to rounding, ``key = values * 2 ** exponents``.

    Attributes:
        values: [B, H_kv, N_k, C]. On a CPU, k itself, with C = D. On a GPU, k with its channels
            reordered and padded as `gather.ChannelOrder` describes, in the dtype of
            `gather.choose_scoring_dtype`: 8-bit floats if the GPU multiplies 8-bit floats.
        exponents: int8 [B, H_kv, N_k, 1], see `gather.quantize`. None on a CPU, where values are
            not scaled.
    """

    values: Tensor
    exponents: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """Return the number of KV heads, H_kv."""
        return self.values.shape[1]


def quantize_keys(
    k: Tensor, channels: tuple[int, ...] = (), *, check_finite: bool = False
) -> QuantizedKeys:
    """Return k in the format that `select_blocks` scores: quantised on a GPU, unchanged on a CPU.

    Each key is quantised independently of all other keys. Thus a KV cache can store quantised keys,
    and the quantised keys of consecutive chunks of a sequence can be concatenated.

    Args:
        k: [B, H_kv, N_k, D], after RoPE.
        channels: Ascending channels that outlier queries are scored on; () for all channels.
        check_finite: True to raise a ValueError if k contains NaN or infinities.
    """
    if check_finite:
        ops_reference.require_finite("k", k)
    if not has_kernels(k):
        return QuantizedKeys(k)
    if torch.compiler.is_compiling():
        stored_keys, key_scale_exponents = torch.ops.cab_hf.quantize_keys(k, channels)
    else:
        stored_keys, key_scale_exponents = _quantize_on_gpu(k, channels)
    return QuantizedKeys(stored_keys, key_scale_exponents)


def select_blocks(
    q: Tensor,
    keys: QuantizedKeys,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...] = (),
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[BlockIndices, BlockIndices]:
    """Return the key blocks that each query block attends to, as two lists: full and partial.

    A full block is computed without a mask, because every query of the query block may attend to
    every key of the full block. A partial block is computed with a mask.

    The query blocks that ``ranges.tail_rows`` returns attend to all visible blocks. Their lists are
    empty, and the caller must pass these query blocks to `BlockPlan` as ``dense_rows``.

    The first call compiles the kernels. Later calls with the same settings can be captured in a
    CUDA graph.

    Args:
        q: [B, H, N_q, D], after RoPE.
        keys: Result of `quantize_keys` for the same ``channels``.
        ranges: Keys that each query may attend to.
        config: Settings of predictor "rows" or "cascade".
        scale: Factor of the dot products, usually 1 / sqrt(D).
        channels: Ascending channels that outlier queries are scored on; () for all channels.
        sinks: [H], one logit per head that takes part in the softmax; None for no sinks.
        softcap: Soft cap of the logits, see `cap_logits` of `cab_hf.ops.reference`; None for no
            cap.

    Returns:
        (full, partial), the lists of full blocks and the lists of partial blocks.

    Raises:
        ValueError: The shapes of the arguments do not fit together, or ``config.check_finite`` is
            set and q contains NaN or infinities.
    """
    if config.check_finite:
        ops_reference.require_finite("q", q)
    if torch.compiler.is_compiling():
        return _select_as_op(
            q,
            keys,
            ranges,
            config,
            scale=scale,
            channels=channels,
            sinks=sinks,
            softcap=softcap,
        )
    _require_matching_shapes(q, keys, key_ranges=ranges, channels=channels, sinks=sinks)
    score_options = ScoreOptions(scale, channels, sinks, softcap)
    select_on_device = _select_by_kernels if has_kernels(q) else _select_by_reference
    return select_on_device(q, keys, key_ranges=ranges, config=config, score_options=score_options)


def _require_matching_shapes(
    q: Tensor,
    keys: QuantizedKeys,
    key_ranges: KeyRanges,
    channels: tuple[int, ...],
    sinks: Tensor | None,
) -> None:
    """Raise a ValueError if the shapes of the arguments of `select_blocks` do not fit together.

    The checks read shapes only, so that they do not synchronise with the device.
    """
    _, heads, q_length, head_dim = q.shape
    kv_length = keys.values.shape[2]
    require(
        heads % keys.kv_heads == 0,
        "q.shape[1]",
        heads,
        f"a multiple of the {keys.kv_heads} heads of keys",
    )
    require(
        key_ranges.q_length == q_length and key_ranges.kv_length == kv_length,
        "ranges",
        f"{key_ranges.q_length} queries and {key_ranges.kv_length} keys",
        f"ranges of {q_length} queries and {kv_length} keys, as q and keys are",
    )
    require(
        all(channel < head_dim for channel in channels[-1:]),
        "channels",
        channels,
        f"ascending and below the head dim, {head_dim}",
    )
    require(
        sinks is None or sinks.shape == (heads,),
        "sinks",
        sinks,
        f"a tensor of shape ({heads},), one logit per head",
    )


def _select_by_reference(
    q: Tensor,
    keys: QuantizedKeys,
    key_ranges: KeyRanges,
    config: CabConfig,
    score_options: ScoreOptions,
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `select_blocks` by `reference.select_blocks`.

    On a CPU, `cpu.compute_sampled_scores` computes the same scores faster. The scale must be
    positive.
    """
    has_fast_scores = q.device.type == "cpu" and score_options.scale > 0
    is_selected_block = reference.select_blocks(
        q,
        keys.values,
        ranges=key_ranges,
        config=config,
        score_options=score_options,
        sampled_scores_fn=cpu.compute_sampled_scores if has_fast_scores else None,
    )
    tail_tokens, query_block = tail_and_query_block_sizes(config)
    plan = BlockPlan.from_dense(
        is_selected_block,
        key_ranges,
        query_block=query_block,
        key_block=config.key_block,
        dense_rows=key_ranges.tail_rows(tail_tokens, query_block),
    )
    return plan.full, plan.partial


def _select_by_kernels(
    q: Tensor,
    keys: QuantizedKeys,
    key_ranges: KeyRanges,
    config: CabConfig,
    score_options: ScoreOptions,
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `select_blocks` by the kernels of `gather`, `score`, `threshold` and `compact`.

    If ``config.max_density`` is below 1, heads are processed in several groups, because the scores
    of all heads can exceed the memory. Query blocks with more visible keys than
    `reference.MAX_KEYS_AT_FULL_SAMPLE` are scored in a second pass, with a smaller sample.
    """
    # imported here, so that models on a CPU run without Triton
    from cab_hf.ops import launch
    from cab_hf.selection import compact, gather, threshold, tiles

    (batch, num_heads, q_length, head_dim), kv_length = q.shape, keys.values.shape[2]
    with launch.on_device_of(q):
        selection_rules = threshold.SelectionRules.create(keys.exponents, key_ranges, config)
        bitmap = threshold.Bitmap.allocate(selection_rules, num_heads)
        sample_passes = threshold.split_by_sample(selection_rules, key_ranges, config)
        is_capped = config.max_density < 1
        capped_lists = (
            compact.CappedLists.allocate(bitmap, selection_rules, key_ranges, config)
            if is_capped
            else None
        )
        for head_range in compact.split_heads(
            bitmap, selection_rules.marked_blocks.shape[2], config
        ):
            scores = (
                compact.allocate_scores(bitmap, selection_rules, head_range) if is_capped else None
            )
            for sample_pass in sample_passes:
                samples = gather.sample_queries(
                    q,
                    key_ranges=sample_pass.ranges,
                    config=sample_pass.config,
                    head_range=head_range,
                    scale=score_options.scale,
                    channels=score_options.channels,
                    dtype=keys.values.dtype,
                )
                tile_plan = tiles.plan_tiles(
                    sample_pass.config,
                    q_length=q_length,
                    kv_length=kv_length,
                    num_heads=head_range.num_heads,
                    num_kv_heads=batch * keys.kv_heads,
                    channel_widths=tiles.compute_channel_widths(score_options.channels, head_dim),
                    dtype=keys.values.dtype,
                    is_whole_sequence=q_length == kv_length and key_ranges.consecutive,
                    has_descriptors=launch.reads_by_descriptor(q.device),
                )
                threshold.fill_bitmap(
                    bitmap=bitmap,
                    samples=samples,
                    stored_keys=keys.values,
                    key_scale_exponents=keys.exponents,
                    tile_plan=tile_plan,
                    selection_rules=selection_rules,
                    head_range=head_range,
                    sample_pass=sample_pass,
                    scores=scores,
                    score_options=score_options,
                )
            if is_capped:
                compact.fill_capped_lists(
                    capped_lists,
                    scores,
                    bitmap=bitmap,
                    selection_rules=selection_rules,
                    head_range=head_range,
                )
        return (
            capped_lists.full_and_partial
            if is_capped
            else compact.convert_bitmap_to_lists(bitmap, selection_rules, key_ranges, config)
        )


def _select_as_op(
    q: Tensor,
    keys: QuantizedKeys,
    key_ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[BlockIndices, BlockIndices]:
    """Call `select_blocks` as one registered op, which torch.compile does not trace.

    If torch.compile traced the selection, torch.compile would unroll loops and compile one graph
    per sequence length.
    """
    sequence_end = key_ranges.sequence_end
    if sequence_end is not None and not isinstance(sequence_end, Tensor):
        sequence_end = torch.full((1, 1), sequence_end, device=q.device, dtype=torch.int32)
    full_counts, full, partial_counts, partial = torch.ops.cab_hf.select_blocks(
        q,
        keys.values,
        keys.exponents,
        sinks,
        key_ranges.start,
        key_ranges.end,
        key_ranges.key_valid,
        sequence_end,
        softcap=softcap,
        scale=scale,
        channels=channels,
        aligned=key_ranges.aligned,
        consecutive=key_ranges.consecutive,
        documents=key_ranges.documents,
        **{field_name: getattr(config, field_name) for field_name in SCHEMA_TYPE_BY_FIELD},
    )
    return BlockIndices(full_counts, full), BlockIndices(partial_counts, partial)


@torch.library.custom_op(
    "cab_hf::select_blocks",
    mutates_args=(),
    schema="(Tensor q, Tensor stored_keys, Tensor? key_scale_exponents, Tensor? sinks,"
    " Tensor start, Tensor end, Tensor key_valid, Tensor? sequence_end, *, float? softcap,"
    " float scale, int[] channels, bool aligned, bool consecutive, int? documents, "
    + ", ".join(
        f"{schema_type} {field_name}" for field_name, schema_type in SCHEMA_TYPE_BY_FIELD.items()
    )
    + ") -> (Tensor, Tensor, Tensor, Tensor)",
)
def _select_op(
    q,
    stored_keys,
    key_scale_exponents,
    sinks,
    start,
    end,
    key_valid,
    sequence_end,
    **scalar_arguments,
):
    """Run `select_blocks` as the implementation of the registered op ``cab_hf::select_blocks``.

    The arguments are the tensors and settings of which `KeyRanges` and `CabConfig` consist, because
    an op does not accept these objects.

    Returns:
        Counts and indices of full blocks, then counts and indices of partial blocks.
    """
    key_ranges = KeyRanges(
        start,
        end,
        key_valid,
        aligned=scalar_arguments["aligned"],
        consecutive=scalar_arguments["consecutive"],
        documents=scalar_arguments["documents"],
        sequence_end=sequence_end,
    )
    full, partial = select_blocks(
        q,
        QuantizedKeys(stored_keys, key_scale_exponents),
        key_ranges,
        _build_config(scalar_arguments),
        scale=scalar_arguments["scale"],
        channels=tuple(scalar_arguments["channels"]),
        sinks=sinks,
        softcap=scalar_arguments["softcap"],
    )
    return full.counts, full.indices, partial.counts, partial.indices


@_select_op.register_fake
def _(
    q,
    stored_keys,
    key_scale_exponents,
    sinks,
    start,
    end,
    key_valid,
    sequence_end,
    **scalar_arguments,
):
    config = _build_config(scalar_arguments)
    batch, heads, q_length, _ = q.shape
    q_blocks = -(-q_length // config.query_block)
    kv_blocks = -(-stored_keys.shape[2] // config.key_block)
    max_partial_blocks = kv_blocks
    if scalar_arguments["aligned"]:
        max_partial_blocks = min(crossed_blocks(config.query_block, config.key_block), kv_blocks)
    counts = start.new_empty(batch, heads, q_blocks)
    full = start.new_empty(batch, heads, q_blocks, kv_blocks)
    partial = start.new_empty(batch, heads, q_blocks, max_partial_blocks)
    return counts, full, torch.empty_like(counts), partial


def _build_config(scalar_arguments: dict[str, float]) -> CabConfig:
    """Build a `CabConfig` from the arguments of the registered op in `SCHEMA_TYPE_BY_FIELD`."""
    return CabConfig(
        **{field_name: scalar_arguments[field_name] for field_name in SCHEMA_TYPE_BY_FIELD},
        predictor="rows",
    )


def _quantize_on_gpu(k: Tensor, channels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantise k on a GPU, and return the values and exponents of `QuantizedKeys`."""
    from cab_hf.ops import launch
    from cab_hf.selection import gather

    with launch.on_device_of(k):
        return gather.quantize(k, channels, gather.choose_scoring_dtype(k))


@torch.library.custom_op("cab_hf::quantize_keys", mutates_args=())
def _quantize_op(k: Tensor, channels: list[int]) -> list[Tensor]:
    """Run `_quantize_on_gpu` as a registered op, and return the list [values, exponents]."""
    return list(_quantize_on_gpu(k, tuple(channels)))


@_quantize_op.register_fake
def _(k: Tensor, channels: list[int]) -> list[Tensor]:
    from cab_hf.selection import gather

    return list(gather.allocate_quantized_keys(k, tuple(channels), gather.choose_scoring_dtype(k)))
