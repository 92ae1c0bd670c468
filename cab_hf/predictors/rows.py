"""The default predictor: score a few sampled queries of each query block against the keys.

Typical queries, at equal strides in the block, estimate the mean attention share of a key block.
Outlier queries, a farthest-point sample of the block, find keys that only single queries need.

SampleAttention (arXiv 2406.15486) samples queries at a stride. FlashPrefill and BLASST select
blocks above a threshold. This package contributes the outlier queries, the strided keys, and the
weights of outlier queries and typical queries.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from cab_hf.config import tail_and_query_block_sizes
from cab_hf.plan import BlockPlan
from cab_hf.predictors.base import LayerContext, Predictor
from cab_hf.selection import QuantizedKeys, quantize_keys, select_blocks


class RowsPredictor(Predictor):
    """The default predictor: selects key blocks whose mean or maximum attention share is large.

    For query block m and key block j, with the shares of `cab_hf.selection.reference`::

        selected[m, j] = mean_share[m, j] >= mass_threshold * min(1, 32768 / num_visible_keys[m])
                         or max_share[m, j] >= share_threshold

    Of each query block, ``config.outlier_queries`` queries are scored on ``LayerContext.channels``
    of every key, and ``config.typical_queries`` queries are scored on all channels of every
    ``config.typical_key_stride``-th key. Query blocks with very many visible keys have a smaller
    sample (`cab_hf.selection.reference.shrink_sample`). Sinks take part in the softmax but are
    never selected.
    """

    def encode_keys(
        self, k: Tensor, valid: Tensor | None = None, channels: tuple[int, ...] = ()
    ) -> QuantizedKeys:
        """Return the quantised keys that `choose` scores.

        Args:
            k: [B, H_kv, N_k, D], after RoPE.
            valid: not used, because padding keys are excluded later by ``LayerContext.ranges``.
            channels: ascending channels that outlier queries are scored on; () for all channels.
        """
        return quantize_keys(k, channels, check_finite=self.config.check_finite)

    def summary_of(self, k: Tensor, valid: Tensor, layer_context: LayerContext) -> QuantizedKeys:
        """Return the quantised keys, with channels ordered by ``layer_context.channels``."""
        return self.encode_keys(k, valid, layer_context.channels)

    def required_inputs(
        self, layer_context: LayerContext, heads: tuple[int, int]
    ) -> Collection[str]:
        """Return "summaries": every rank quantises its keys, and `merge` joins the keys."""
        return ("summaries",)

    def merge(
        self,
        summary: QuantizedKeys,
        layer_context: LayerContext,
        heads: tuple[int, int],
        layout: Any,
    ) -> QuantizedKeys:
        """Return the quantised keys of all ranks."""
        exponents = summary.exponents
        values_of_all_ranks = layout.all_gather_tokens(summary.values)
        return QuantizedKeys(
            values_of_all_ranks, None if exponents is None else layout.all_gather_tokens(exponents)
        )

    def choose(self, q: Tensor, summary: QuantizedKeys, layer_context: LayerContext) -> BlockPlan:
        """Return the plan for q over the quantised keys ``summary``; see `select_blocks`."""
        config, key_ranges = self.config, layer_context.ranges
        full, partial = select_blocks(
            q,
            summary,
            key_ranges,
            config,
            scale=layer_context.scale,
            channels=layer_context.channels,
            sinks=layer_context.sinks,
            softcap=layer_context.softcap,
        )
        tail_tokens, query_block = tail_and_query_block_sizes(config)
        return BlockPlan(
            full,
            partial,
            key_ranges,
            query_block=query_block,
            key_block=config.key_block,
            dense_rows=key_ranges.tail_rows(tail_tokens, query_block),
        )
