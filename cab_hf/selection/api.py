"""Selection of the key blocks that every query block attends to: validation, dispatch, the op.

`select_blocks` runs `reference.selected_blocks` or the kernels, which compute the same selection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cab_hf.checks import require
from cab_hf.config import CabConfig, tail_of
from cab_hf.ops import has_kernels
from cab_hf.ops import reference as definitions
from cab_hf.plan import BlockIndices, BlockPlan, KeyRanges, crossed_blocks
from cab_hf.selection import cpu, reference

# fields of CabConfig that select blocks, with their types in the registered op
FIELDS = {
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
    """The keys of a sequence in the format in which queries are scored against them.

    Attributes:
        values: [B, H_kv, N_k, C]. k itself for the reference. For kernels, channels in the order of
            `gather.Channels`, in 8-bit floats if the device multiplies them.
        exponents: int8 [B, H_kv, N_k, 1], exponents of the units of 8-bit keys, see
            `gather.quantize`; None for the reference.
    """

    values: Tensor
    exponents: Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.values.shape[1]


def quantize_keys(
    k: Tensor, channels: tuple[int, ...] = (), *, check_finite: bool = False
) -> QuantizedKeys:
    """Return the keys [B, H_kv, N_k, D] that `select_blocks` scores.

    The result of a key depends on this key alone, so that chunks, caches and ranks can store it.

    Args:
        channels: Ascending channels that outliers are scored on; () for all.
        check_finite: Raise a ValueError if k is not finite.
    """
    if check_finite:
        definitions.refuse_infinite("k", k)
    if not has_kernels(k):
        return QuantizedKeys(k)
    if torch.compiler.is_compiling():
        values, exponents = torch.ops.cab_hf.quantize_keys(k, channels)
    else:
        values, exponents = _quantize(k, channels)
    return QuantizedKeys(values, exponents)


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
    """Return the lists of full and of partial key blocks that each query block attends.

    Query blocks of ``ranges.tail_rows``, if any, list nothing: the plan must name these rows. The
    kernels are safe in a CUDA graph after a first call.

    Args:
        q: [B, H, N_q, D], after RoPE.
        keys: Result of `quantize_keys` for the same ``channels``.
        ranges: Keys that each query may attend to.
        config: Settings of predictor "rows" or "cascade".
        scale: Factor of the logits, usually 1 / sqrt(D).
        channels: Ascending channels that outliers are scored on; () for all.
        sinks: [H], one logit per head that takes part in the softmax; None without.
        softcap: Soft cap of the logits, see `capped` of `cab_hf.ops.reference`; None for no cap.

    Raises:
        ValueError: An argument has another shape than q, k and ``ranges`` allow, or
            ``config.check_finite`` is set and q is not finite.
    """
    if config.check_finite:
        definitions.refuse_infinite("q", q)
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
    _validate(q, keys, ranges, channels, sinks)
    select = _select_by_kernels if has_kernels(q) else _select_by_reference
    return select(
        q, keys, ranges, config, scale=scale, channels=channels, sinks=sinks, softcap=softcap
    )


def _validate(
    q: Tensor,
    keys: QuantizedKeys,
    ranges: KeyRanges,
    channels: tuple[int, ...],
    sinks: Tensor | None,
) -> None:
    """Raise a ValueError if shapes do not fit; no check reads the device."""
    _, heads, q_length, head_dim = q.shape
    kv_length = keys.values.shape[2]
    require(
        heads % keys.kv_heads == 0,
        "q.shape[1]",
        heads,
        f"a multiple of the {keys.kv_heads} heads of keys",
    )
    require(
        ranges.q_length == q_length and ranges.kv_length == kv_length,
        "ranges",
        f"{ranges.q_length} queries and {ranges.kv_length} keys",
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
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `select_blocks` by its definition, with the scores of `cpu` on a CPU."""
    selected = reference.selected_blocks(
        q,
        keys.values,
        ranges,
        config,
        scale=scale,
        channels=channels,
        sinks=sinks,
        softcap=softcap,
        score=cpu.scores if q.device.type == "cpu" and scale > 0 else None,
    )
    tail_tokens, query_block = tail_of(config)
    plan = BlockPlan.from_dense(
        selected,
        ranges,
        query_block=query_block,
        key_block=config.key_block,
        dense_rows=ranges.tail_rows(tail_tokens, query_block),
    )
    return plan.full, plan.partial


def _select_by_kernels(
    q: Tensor,
    keys: QuantizedKeys,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `select_blocks` by kernels: gather, score, threshold, compact."""
    # models on the CPU never need Triton
    from cab_hf.ops import launch
    from cab_hf.selection import compact, gather, threshold, tiles

    (batch, num_heads, q_length, head_dim), kv_length = q.shape, keys.values.shape[2]
    with launch.on_device_of(q):
        rules = threshold.SelectionRules.create(keys.exponents, ranges, config)
        bitmap = threshold.Bitmap.empty(rules, num_heads)
        is_capped = config.max_density < 1
        capped = compact.CappedLists.empty(bitmap, rules, ranges, config) if is_capped else None
        for heads in compact.head_groups(bitmap, rules.marked.shape[2], config):
            scores = compact.empty_scores(bitmap, rules, heads) if is_capped else None
            samples = gather.sample_queries(
                q,
                ranges,
                config,
                heads,
                scale=scale,
                channels=channels,
                dtype=keys.values.dtype,
            )
            plan = tiles.plan_tiles(
                config,
                q_length=q_length,
                kv_length=kv_length,
                num_heads=heads.count,
                num_kv_heads=batch * keys.kv_heads,
                widths=tiles.channel_widths(channels, head_dim),
                dtype=keys.values.dtype,
                is_whole_sequence=q_length == kv_length and ranges.consecutive,
                has_descriptors=launch.reads_by_descriptor(q.device),
            )
            threshold.fill_bitmap(
                bitmap=bitmap,
                samples=samples,
                values=keys.values,
                exponents=keys.exponents,
                plan=plan,
                rules=rules,
                heads=heads,
                config=config,
                scores=scores,
                logits=threshold.LogitRules(sinks, softcap),
            )
            if is_capped:
                compact.fill_capped(capped, scores, bitmap=bitmap, rules=rules, heads=heads)
        return capped.lists if is_capped else compact.lists_of_bitmap(bitmap, rules, ranges, config)


def _select_as_op(
    q: Tensor,
    keys: QuantizedKeys,
    ranges: KeyRanges,
    config: CabConfig,
    *,
    scale: float,
    channels: tuple[int, ...],
    sinks: Tensor | None,
    softcap: float | None,
) -> tuple[BlockIndices, BlockIndices]:
    """Compute `select_blocks` as one op: torch.compile would trace a graph per length of loops."""
    end = ranges.sequence_end
    if end is not None and not isinstance(end, Tensor):
        end = torch.full((1, 1), end, device=q.device, dtype=torch.int32)
    full_counts, full, partial_counts, partial = torch.ops.cab_hf.select_blocks(
        q,
        keys.values,
        keys.exponents,
        sinks,
        ranges.start,
        ranges.end,
        ranges.key_valid,
        end,
        softcap=softcap,
        scale=scale,
        channels=channels,
        aligned=ranges.aligned,
        consecutive=ranges.consecutive,
        documents=ranges.documents,
        **{name: getattr(config, name) for name in FIELDS},
    )
    return BlockIndices(full_counts, full), BlockIndices(partial_counts, partial)


@torch.library.custom_op(
    "cab_hf::select_blocks",
    mutates_args=(),
    schema="(Tensor q, Tensor values, Tensor? exponents, Tensor? sinks, Tensor start, Tensor end,"
    " Tensor key_valid, Tensor? sequence_end, *, float? softcap, float scale, int[] channels,"
    " bool aligned, bool consecutive, int? documents, "
    + ", ".join(f"{kind} {name}" for name, kind in FIELDS.items())
    + ") -> (Tensor, Tensor, Tensor, Tensor)",
)
def _select_op(q, values, exponents, sinks, start, end, key_valid, sequence_end, **options):
    ranges = KeyRanges(
        start,
        end,
        key_valid,
        aligned=options["aligned"],
        consecutive=options["consecutive"],
        documents=options["documents"],
        sequence_end=sequence_end,
    )
    full, partial = select_blocks(
        q,
        QuantizedKeys(values, exponents),
        ranges,
        _config_of(options),
        scale=options["scale"],
        channels=tuple(options["channels"]),
        sinks=sinks,
        softcap=options["softcap"],
    )
    return full.counts, full.indices, partial.counts, partial.indices


@_select_op.register_fake
def _(q, values, exponents, sinks, start, end, key_valid, sequence_end, **options):
    config = _config_of(options)
    batch, heads, q_length, _ = q.shape
    q_blocks, kv_blocks = (
        -(-q_length // config.query_block),
        -(-values.shape[2] // config.key_block),
    )
    crossed = (
        crossed_blocks(config.query_block, config.key_block) if options["aligned"] else kv_blocks
    )
    counts = start.new_empty(batch, heads, q_blocks)
    full = start.new_empty(batch, heads, q_blocks, kv_blocks)
    partial = start.new_empty(batch, heads, q_blocks, min(crossed, kv_blocks))
    return counts, full, torch.empty_like(counts), partial


def _config_of(options: dict[str, float]) -> CabConfig:
    """Return the settings that the registered op receives."""
    return CabConfig(**{name: options[name] for name in FIELDS}, predictor="rows")


def _quantize(k: Tensor, channels: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Launch the kernel of `quantize_keys`, in the dtype that the device multiplies."""
    from cab_hf.ops import launch
    from cab_hf.selection import gather

    with launch.on_device_of(k):
        return gather.quantize(k, channels, gather.scored_dtype(k))


@torch.library.custom_op("cab_hf::quantize_keys", mutates_args=())
def _quantize_op(k: Tensor, channels: list[int]) -> list[Tensor]:
    return list(_quantize(k, tuple(channels)))


@_quantize_op.register_fake
def _(k: Tensor, channels: list[int]) -> list[Tensor]:
    from cab_hf.selection import gather

    return list(gather.empty_keys(k, tuple(channels), gather.scored_dtype(k)))
