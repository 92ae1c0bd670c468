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

from cab_hf.eval.methods.base import Cell, Dense, LayerDensities, Method, layers_of
from cab_hf.plan import KeyRanges
from cab_hf.predictors.attention_mass import attention_rows

SNAP_WINDOW, SNAP_KERNEL = 32, 5  # SnapKV: queries that select, keys per average
SINKS = 4  # StreamingLLM


class SinkLayer(DynamicLayer):
    """A layer's cache of the first ``sinks`` tokens and the latest, ``tokens`` in all."""

    def __init__(self, sinks: int, tokens: int) -> None:
        super().__init__()
        self.sinks, self.tokens = sinks, tokens
        self.cumulative_length = 0  # tokens read so far

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        """Return the stored and the new tokens [B, H_kv, N, D]; the latest replace the oldest."""
        keys, values = super().update(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        gone = keys.shape[-2] - self.tokens
        if gone > 0:
            self.keys, self.values = (
                torch.cat([x[:, :, : self.sinks], x[:, :, self.sinks + gone :]], dim=2)
                for x in (keys, values)
            )
        return keys, values

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = super().get_seq_length()
        # all kept tokens precede the queries
        return kept + query_length, self.cumulative_length - kept


def sink_cache(model: PreTrainedModel, sinks: int, tokens: int) -> Cache:
    """Return a cache whose layers keep the first ``sinks`` and the latest of ``tokens`` tokens."""
    layers = range(layers_of(model))
    return Cache(layers=[SinkLayer(sinks, max(tokens, sinks + 1)) for _ in layers])


@dataclass(frozen=True)
class StreamingCache(Dense):
    """StreamingLLM's cache after a dense prefill: 4 sinks and the latest of ``tokens`` tokens.

    Tokens keep their positions in the text, as in `Streaming`.
    """

    name = "streaming"
    decodes = "sinks and window"
    tokens: int

    def cache(self, model: PreTrainedModel) -> Cache:
        return sink_cache(model, SINKS, self.tokens)

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.tokens, length)


class Kept(NamedTuple):
    """The tokens that remain in a layer, in the order of the text.

    Attributes:
        k, v: [B, H_kv, M, D].
        received: float32 [B, H_kv, M], attention received, by which tokens are ranked.
    """

    k: Tensor
    v: Tensor
    received: Tensor

    def evicted(self, tokens: int, recent: int) -> Kept:
        """Keep ``tokens`` tokens or all: the ``recent`` latest, and those that received most."""
        length = self.received.shape[-1]
        if length <= tokens:
            return self
        old = length - recent
        heavy = self.received[..., :old].topk(tokens - recent, dim=-1, sorted=False).indices
        latest = torch.arange(old, length, device=heavy.device).expand(*heavy.shape[:2], -1)
        at = torch.cat([heavy.sort(-1).values, latest], dim=-1)
        k, v = (x.gather(2, at.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1])) for x in self[:2])
        return Kept(k, v, self.received.gather(2, at))


@dataclass(frozen=True)
class KeepsSome(Method):
    """The base class of caches that keep some tokens per KV head after a dense prefill.

    The kept tokens are those that receive most attention. Density is the kept share of the prompt's
    keys. It is no share of prefill work, because prefill is dense. Prompts must have no padding.
    """

    matched = True
    dense_prefill = True
    tokens: int

    @classmethod
    def fit(cls, cell: Cell) -> KeepsSome:
        if cell.budget is None:
            raise ValueError(
                f"budget must be the share of the prompt's keys that {cls.name} keeps, got None. "
                "Give a budget."
            )
        return cls(max(2, round(cell.budget * cell.length)))

    @abstractmethod
    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float) -> Kept:
        """Return the tokens kept after a prompt: q [B, H, N, D], k and v [B, H_kv, N, D]."""

    @abstractmethod
    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        """Return the tokens kept after a step whose query gave attention ``given`` [B, H_kv, M]."""

    @contextmanager
    def applied(self, model: PreTrainedModel) -> Iterator[LayerDensities]:
        kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()
        shares: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()
        attention = f"cab_{self.name}"
        AttentionInterface.register(attention, partial(self.attend, kept, shares))
        AttentionMaskInterface.register(attention, sdpa_mask)
        before = model.config.get_text_config()._attn_implementation
        model.set_attn_implementation(attention)
        try:
            yield lambda: list(shares.values())
        finally:
            model.set_attn_implementation(before)

    def step_tokens(self, model: PreTrainedModel, length: int) -> float:
        return min(self.tokens, length)

    @torch.no_grad()
    def attend(
        self,
        kept: MutableMapping[nn.Module, Kept],
        shares: MutableMapping[nn.Module, float],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs,
    ) -> tuple[Tensor, None]:
        """Compute attention for transformers: query [B, H, N_q, D] -> ([B, N_q, H, D], None).

        ``kept`` maps modules to their remaining tokens, ``shares`` to the kept share of the prompt.
        """
        q_length, kv_length = query.shape[2], key.shape[2]
        prefill = q_length == kv_length
        if attention_mask is not None or not (prefill or q_length == 1):
            masked = "" if attention_mask is None else " with a mask"
            raise ValueError(
                f"{self.name} must get a whole prompt without padding, then single tokens, got "
                f"{q_length} queries on {kv_length} keys{masked}. Pass one prompt in one call."
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if prefill:
            ranges = KeyRanges.causal(query.shape[0], q_length, kv_length, query.device)
            kept[module] = self.of_prompt(query, key, value, ranges, scale)
            shares[module] = min(1.0, self.tokens / kv_length)
            out = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            k, v, received = kept[module]
            k, v = (torch.cat([x, new[:, :, -1:]], 2) for x, new in ((k, key), (v, value)))
            grouped = query.unflatten(1, (key.shape[1], -1)).squeeze(3).float()
            weights = (grouped @ k.float().transpose(-1, -2) * scale).softmax(-1)
            kept[module] = self.of_step(Kept(k, v, F.pad(received, (0, 1))), weights.sum(2))
            out = (weights @ v.float()).to(query.dtype).flatten(1, 2).unsqueeze(2)
        return out.transpose(1, 2).contiguous(), None


def by_kv_head(received: Tensor, k: Tensor) -> Tensor:
    """Sum attention over the query heads of a group, [B, H, N] -> [B, H_kv, N]."""
    return received.unflatten(1, (k.shape[1], -1)).sum(2)


@dataclass(frozen=True)
class H2O(KeepsSome):
    """Heavy-hitter oracle: evict tokens that received little attention.

    Zhang et al. 2023, arXiv 2306.14048. Each KV head keeps ``tokens`` tokens: half are the latest,
    and half received the most attention from all queries of the prompt and of the steps. Every step
    evicts one token for good. The paper has no rule for grouped queries: attention is summed over
    the query heads of a group.
    """

    name = "h2o"
    decodes = "heavy hitters and window"

    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float) -> Kept:
        received = by_kv_head(column_sums(q, k, ranges, scale), k)
        return Kept(k, v, received).evicted(self.tokens, self.tokens // 2)

    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        heard = kept._replace(received=kept.received + given)
        return heard.evicted(self.tokens, self.tokens // 2)


@dataclass(frozen=True)
class SnapKV(KeepsSome):
    """SnapKV: keep the keys that the end of the prompt attends to.

    Li et al. 2024, arXiv 2404.14469. The attention of the prompt's last 32 queries to each key
    before them, averaged over 5 neighbouring keys, ranks the keys. The best keys and the last 32
    form ``tokens`` keys, fixed from then on. Decoded tokens are kept as well, so that later steps
    read more: `step_tokens` counts the first step. Window, average and kernel are the defaults of
    its code; the paper's runs on LongBench use, as far as we know, the maximum over 7.

    The original selects keys per query head, and repeats keys and values for that. Here attention
    is summed over the query heads of a group, so that a KV head has one copy.
    """

    name = "snapkv"
    decodes = "keys that the end of the prompt attends to"

    def of_prompt(self, q: Tensor, k: Tensor, v: Tensor, ranges: KeyRanges, scale: float) -> Kept:
        window = min(SNAP_WINDOW, self.tokens, q.shape[2])
        received, _ = columns_and_diagonals(q, k, ranges, scale, window)
        before = by_kv_head(received, k)[..., : k.shape[2] - window]
        pooled = F.pad(before, (SNAP_KERNEL // 2, SNAP_KERNEL // 2)).unfold(-1, SNAP_KERNEL, 1)
        return Kept(k, v, F.pad(pooled.mean(-1), (0, window))).evicted(self.tokens, window)

    def of_step(self, kept: Kept, given: Tensor) -> Kept:
        return kept


def column_sums(q: Tensor, k: Tensor, ranges: KeyRanges, scale: float) -> Tensor:
    """Return the attention that each key receives from all queries, float32 [B, H, N_k]."""
    sums = torch.zeros(*q.shape[:2], k.shape[2], device=q.device)
    for _, rows in attention_rows(q, k, ranges, scale):
        sums[..., : rows.shape[-1]] += rows.sum(2)
    return sums


def last_queries(ranges: KeyRanges, count: int) -> Tensor:
    """Return the last ``count`` queries per batch row, int64 [B, R], filled with -1.

    Padding queries do not count.
    """
    query = torch.arange(ranges.q_length, device=ranges.end.device).where(ranges.end >= 0, -1)
    return query.topk(min(count, ranges.q_length), dim=-1).values


def columns_and_diagonals(
    q: Tensor, k: Tensor, ranges: KeyRanges, scale: float, asking: int
) -> tuple[Tensor, Tensor]:
    """Sum the attention of the last ``asking`` queries by key, and by distance.

    Padding queries do not count.

    Args:
        q: [B, H, N_q, D].
        k: [B, H_kv, N_k, D].

    Returns:
        Two float32 [B, H, N_k]: attention per key, and per distance from query to key.
    """
    query = last_queries(ranges, asking)
    at = query.clamp(min=0)
    # [B, R]: positions of these queries among the keys
    last = ranges.end.gather(1, at).where(query >= 0, -1)
    asked = KeyRanges(ranges.start.gather(1, at), last, ranges.key_valid)
    own = q.gather(2, at[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
    key = torch.arange(k.shape[2], device=q.device)
    vertical, slash = torch.zeros(2, *q.shape[:2], k.shape[2], device=q.device)
    for start, rows in attention_rows(own, k, asked, scale):
        num_keys = rows.shape[-1]
        # [B, 1, R, T]: the key at each distance before a query
        far = (last[:, start : start + rows.shape[2], None] - key[:num_keys]).unsqueeze(1)
        vertical[..., :num_keys] += rows.sum(2)
        by_distance = rows.gather(-1, far.clamp(min=0).expand_as(rows))
        slash[..., :num_keys] += by_distance.masked_fill(far < 0, 0.0).sum(2)
    return vertical, slash
