"""Methods that drop tokens from the KV cache for good, after a dense prefill."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import sdpa_mask

from cab_hf.eval.methods.base import Cell, Dense, LayerDensities, Method, count_layers
from cab_hf.plan import KeyRanges
from cab_hf.predictors.attention_mass import iterate_attention_rows

SNAPKV_LAST_QUERIES = 32  # SnapKV: number of the last queries, whose attention ranks keys
SNAPKV_POOLED_KEYS = 5  # SnapKV: number of neighbouring keys whose attention is averaged
STREAMING_SINK_TOKENS = 4  # StreamingLLM: sink tokens


class SinkLayer(DynamicLayer):
    """A layer's KV cache that keeps only the first tokens (sinks) and the latest tokens.

    Args:
        num_sinks: number of the first tokens, which are never dropped.
        max_tokens: largest number of tokens in the cache, including the sinks.
    """

    def __init__(self, num_sinks: int, max_tokens: int) -> None:
        super().__init__()
        self.num_sinks, self.max_tokens = num_sinks, max_tokens
        self.cumulative_length = 0  # number of tokens that were ever added

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        """Add tokens, then drop tokens beyond `max_tokens`. Returns all tokens before the drop.

        Args:
            key_states, value_states: new tokens, [B, H_kv, n, D].

        Returns:
            Keys and values of the cached and the new tokens, [B, H_kv, N, D].
        """
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        num_dropped = keys.shape[-2] - self.max_tokens
        if num_dropped > 0:
            self.keys, self.values = (
                torch.cat(
                    [x[:, :, : self.num_sinks], x[:, :, self.num_sinks + num_dropped :]], dim=2
                )
                for x in (keys, values)
            )
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        num_cached = super().get_seq_length()
        # (number of keys, position of the first key): all cached tokens precede the queries
        return num_cached + query_length, self.cumulative_length - num_cached


def make_sink_cache(model: PreTrainedModel, num_sinks: int, max_tokens: int) -> Cache:
    """Return a cache of `SinkLayer` for every layer of ``model``."""
    layer_indices = range(count_layers(model))
    return Cache(
        layers=[SinkLayer(num_sinks, max(max_tokens, num_sinks + 1)) for _ in layer_indices]
    )


@dataclass(frozen=True)
class StreamingCache(Dense):
    """StreamingLLM's cache after a dense prefill: 4 sink tokens and the latest tokens.

    Cached tokens keep their position ids, as in `Streaming`.

    Attributes:
        max_tokens: largest number of tokens in the cache, including the sinks.
    """

    name = "streaming"
    decode_description = "sinks and window"
    max_tokens: int

    def make_cache(self, model: PreTrainedModel) -> Cache:
        return make_sink_cache(model, STREAMING_SINK_TOKENS, self.max_tokens)

    def count_step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.max_tokens, length)


class CachedTokens(NamedTuple):
    """The tokens that remain in the cache of a layer, in the order of the sequence.

    Attributes:
        k, v: keys and values, [B, H_kv, M, D].
        received_attention: attention that each token has received from earlier queries, float32
            [B, H_kv, M]. Tokens that received the least are dropped first.
    """

    k: Tensor
    v: Tensor
    received_attention: Tensor

    def evict(self, num_kept_tokens: int, num_recent_tokens: int) -> CachedTokens:
        """Return at most ``num_kept_tokens``: the latest, and those that received most attention.

        Args:
            num_kept_tokens: number of tokens to keep.
            num_recent_tokens: number of the latest tokens, which are never dropped.
        """
        num_cached = self.received_attention.shape[-1]
        if num_cached <= num_kept_tokens:
            return self
        num_old_tokens = num_cached - num_recent_tokens
        heavy_indices = (
            self.received_attention[..., :num_old_tokens]
            .topk(num_kept_tokens - num_recent_tokens, dim=-1, sorted=False)
            .indices
        )
        latest_indices = torch.arange(num_old_tokens, num_cached, device=heavy_indices.device)
        latest_indices = latest_indices.expand(*heavy_indices.shape[:2], -1)
        # [B, H_kv, tokens]
        kept_indices = torch.cat([heavy_indices.sort(-1).values, latest_indices], dim=-1)
        k, v = (
            x.gather(2, kept_indices.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))
            for x in (self.k, self.v)
        )
        return CachedTokens(k, v, self.received_attention.gather(2, kept_indices))


@dataclass(frozen=True)
class EvictingMethod(Method):
    """The base class of methods that keep some tokens per KV head after a dense prefill.

    The tokens that receive the most attention remain in the cache. The reported density is the
    fraction of the prompt's keys that remain after the prompt, although prefill itself is dense.
    Prompts must have no padding.

    Attributes:
        num_kept_tokens: number of tokens per KV head that remain after the prompt.
    """

    is_budget_matched = True
    has_dense_prefill = True
    num_kept_tokens: int

    @classmethod
    def fit(cls, cell: Cell) -> EvictingMethod:
        if cell.budget is None:
            raise ValueError(
                f"budget must be the share of the prompt's keys that {cls.name} keeps, got None. "
                "Give a budget."
            )
        return cls(max(2, round(cell.budget * cell.length)))

    @abstractmethod
    def evict_after_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float
    ) -> CachedTokens:
        """Return the tokens that remain in the cache after the prefill of a prompt.

        Args:
            q: [B, H, N, D].
            k, v: [B, H_kv, N, D].
            ranges: causal ranges of the prompt.
            scale: factor of the logits.
        """

    @abstractmethod
    def evict_after_step(self, cached_tokens: CachedTokens, attention: Tensor) -> CachedTokens:
        """Return the tokens that remain in the cache after a decode step.

        Args:
            cached_tokens: the tokens before the step, and the new token.
            attention: attention of the step's query to these tokens, float32 [B, H_kv, M].
        """

    @contextmanager
    def apply_to(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        cached_tokens_by_module: WeakKeyDictionary[nn.Module, CachedTokens] = WeakKeyDictionary()
        kept_share_by_module: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
        implementation_name = f"cab_{self.name}"
        AttentionInterface.register(
            implementation_name, partial(self.attend, cached_tokens_by_module, kept_share_by_module)
        )
        AttentionMaskInterface.register(implementation_name, sdpa_mask)
        original_implementation = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation(implementation_name)
        try:
            yield lambda: list(kept_share_by_module.values())
        finally:
            model.set_attn_implementation(original_implementation)

    def count_step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.num_kept_tokens, length)

    @torch.no_grad()
    def attend(
        self,
        cached_tokens_by_module: MutableMapping[nn.Module, CachedTokens],
        kept_share_by_module: MutableMapping[nn.Module, float],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Compute attention, and update the cached tokens of the module.

        Transformers calls this method as a registered attention function.

        Args:
            cached_tokens_by_module: attention module -> tokens in its cache. A prefill replaces the
                entry, and a decode step updates the entry.
            kept_share_by_module: attention module -> fraction of the prompt's keys that remain in
                its cache.
            module: the attention module.
            query: [B, H, N_q, D].
            key, value: [B, H_kv, N_k, D]. In a decode step, only the last token is read.
            attention_mask: must be None.
            scaling: factor of the logits; None: head_dim**-0.5.

        Returns:
            Attention [B, N_q, H, D], and None.
        """
        q_length, kv_length = query.shape[2], key.shape[2]
        is_prefill = q_length == kv_length
        if attention_mask is not None or not (is_prefill or q_length == 1):
            mask_phrase = "" if attention_mask is None else " with a mask"
            raise ValueError(
                f"{self.name} must get a whole prompt without padding, then single tokens, got "
                f"{q_length} queries on {kv_length} keys{mask_phrase}. Pass one prompt in one call."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if is_prefill:
            ranges = KeyRanges.causal(query.shape[0], q_length, kv_length, query.device)
            cached_tokens_by_module[module] = self.evict_after_prompt(
                q=query, k=key, v=value, ranges=ranges, scale=scale
            )
            kept_share_by_module[module] = min(1.0, self.num_kept_tokens / kv_length)
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            k, v, received_attention = cached_tokens_by_module[module]
            k, v = (
                torch.cat([x, new_states[:, :, -1:]], 2) for x, new_states in ((k, key), (v, value))
            )
            # [B, H_kv, H / H_kv, D]
            grouped_queries = query.unflatten(1, (key.shape[1], -1)).squeeze(3).float()
            weights = (grouped_queries @ k.float().transpose(-1, -2) * scale).softmax(-1)
            cached_tokens_by_module[module] = self.evict_after_step(
                CachedTokens(k, v, F.pad(received_attention, (0, 1))), weights.sum(2)
            )
            out = (weights @ v.float()).to(query.dtype).flatten(1, 2).unsqueeze(2)
        return out.transpose(1, 2).contiguous(), None


def sum_query_heads(attention: Tensor, k: Tensor) -> Tensor:
    """Return the sums of ``attention`` [B, H, N] over the query heads of each KV head.

    Args:
        attention: attention per query head and key.
        k: keys, [B, H_kv, N, D].

    Returns:
        [B, H_kv, N].
    """
    return attention.unflatten(1, (k.shape[1], -1)).sum(2)


@dataclass(frozen=True)
class H2O(EvictingMethod):
    """Heavy-hitter oracle: evict tokens that received little attention.

    Zhang et al. 2023, arXiv 2306.14048. Each KV head keeps ``num_kept_tokens`` tokens: half are the
    latest, and half received the most attention from all queries of the prompt and of the steps.
    Every step evicts one token for good. The paper has no rule for grouped queries: attention is
    summed over the query heads of a group.
    """

    name = "h2o"
    decode_description = "heavy hitters and window"

    def evict_after_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float
    ) -> CachedTokens:
        received_attention = sum_query_heads(sum_columns(q, k, ranges, scale), k)
        return CachedTokens(k, v, received_attention).evict(
            self.num_kept_tokens, self.num_kept_tokens // 2
        )

    def evict_after_step(self, cached_tokens: CachedTokens, attention: Tensor) -> CachedTokens:
        updated_tokens = cached_tokens._replace(
            received_attention=cached_tokens.received_attention + attention
        )
        return updated_tokens.evict(self.num_kept_tokens, self.num_kept_tokens // 2)


@dataclass(frozen=True)
class SnapKV(EvictingMethod):
    """SnapKV: keep the keys that the end of the prompt attends to.

    Li et al. 2024, arXiv 2404.14469. Keys are ranked by the attention that they receive from the
    prompt's last 32 queries, averaged over 5 neighbouring keys. The best keys and the last 32 keys
    remain, ``num_kept_tokens`` in total. Decoded tokens remain as well, so that later steps read
    more tokens; `count_step_tokens` counts the first step. The numbers 32 and 5 are the defaults of
    the authors' code; the paper's runs on LongBench use, as far as we know, the maximum over 7
    keys.

    The original repeats keys and values, and selects keys per query head. Here attention is summed
    over the query heads of a group, so that a KV head has one set of keys.
    """

    name = "snapkv"
    decode_description = "keys that the end of the prompt attends to"

    def evict_after_prompt(
        self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float
    ) -> CachedTokens:
        num_window_queries = min(SNAPKV_LAST_QUERIES, self.num_kept_tokens, q.shape[2])
        received_attention, _ = sum_columns_and_diagonals(
            q=q, k=k, ranges=ranges, scale=scale, num_queries=num_window_queries
        )
        attention_before_window = sum_query_heads(received_attention, k)[
            ..., : k.shape[2] - num_window_queries
        ]
        padded_attention = F.pad(
            attention_before_window, (SNAPKV_POOLED_KEYS // 2, SNAPKV_POOLED_KEYS // 2)
        )
        pooled_attention = padded_attention.unfold(-1, SNAPKV_POOLED_KEYS, 1).mean(-1)
        return CachedTokens(k, v, F.pad(pooled_attention, (0, num_window_queries))).evict(
            self.num_kept_tokens, num_window_queries
        )

    def evict_after_step(self, cached_tokens: CachedTokens, attention: Tensor) -> CachedTokens:
        return cached_tokens


def sum_columns(q: Tensor, k: Tensor, ranges: KeyRanges, scale: float) -> Tensor:
    """Return the attention that each key receives from all queries, float32 [B, H, N_k]."""
    column_sums = torch.zeros(*q.shape[:2], k.shape[2], device=q.device)
    for _, attention_rows in iterate_attention_rows(q, k, ranges, scale):
        column_sums[..., : attention_rows.shape[-1]] += attention_rows.sum(2)
    return column_sums


def find_last_queries(ranges: KeyRanges, num_queries: int) -> Tensor:
    """Return the indices of the last ``num_queries`` queries of each batch row, int64 [B, R].

    Padding queries do not count. R is at most ``num_queries``. Rows with fewer queries than R have
    entries of -1.
    """
    query_indices = torch.arange(ranges.q_length, device=ranges.end.device).where(
        ranges.end >= 0, -1
    )
    return query_indices.topk(min(num_queries, ranges.q_length), dim=-1).values


def sum_columns_and_diagonals(
    q: Tensor, k: Tensor, ranges: KeyRanges, scale: float, num_queries: int
) -> tuple[Tensor, Tensor]:
    """Return the attention of the last queries, summed per key and per distance.

    The sums per key are those of columns, and the sums per distance those of diagonals.

    Padding queries do not count.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].
        ranges: ranges of the queries over the keys.
        scale: factor of the logits.
        num_queries: number of the last queries of a row that count.

    Returns:
        Attention per key, and attention per distance from query to key, both float32 [B, H, N_k].
    """
    # [B, R], -1 for missing queries
    query_indices = find_last_queries(ranges, num_queries)
    gather_indices = query_indices.clamp(min=0)
    # [B, R]: positions of these queries among the keys
    positions = ranges.end.gather(1, gather_indices).where(query_indices >= 0, -1)
    query_ranges = KeyRanges(ranges.start.gather(1, gather_indices), positions, ranges.key_valid)
    queries = q.gather(2, gather_indices[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    distances = torch.arange(k.shape[2], device=q.device)
    shape = (2, *q.shape[:2], k.shape[2])
    column_sums, diagonal_sums = torch.zeros(shape, device=q.device)
    for first_row, attention_rows in iterate_attention_rows(queries, k, query_ranges, scale):
        num_keys = attention_rows.shape[-1]
        column_sums[..., :num_keys] += attention_rows.sum(2)
        # [B, 1, R, num_keys]: the key at each distance before a query
        key_indices = (
            positions[:, first_row : first_row + attention_rows.shape[2], None]
            - distances[:num_keys]
        )
        key_indices = key_indices.unsqueeze(1)
        attention_by_distance = attention_rows.gather(
            -1, key_indices.clamp(min=0).expand_as(attention_rows)
        )
        diagonal_sums[..., :num_keys] += attention_by_distance.masked_fill(
            key_indices < 0, 0.0
        ).sum(2)
    return column_sums, diagonal_sums
