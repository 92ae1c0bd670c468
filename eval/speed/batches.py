"""``speed batches``: time a layer's attention over batches, next to dense kernels."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cab_hf.attention import cab_attention, cab_dense_attention
from cab_hf.call.call import Call
from cab_hf.call.hook import cab_mask
from cab_hf.call.mask import MaskInfo
from cab_hf.config import CabConfig
from cab_hf.dispatch import select_blocks
from cab_hf.engines import Workload
from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import base, dense
from cab_hf.eval.speed.dense import Attend, Baseline, check_rows
from cab_hf.eval.speed.heads import HeadSpeed, RandomHeads
from cab_hf.eval.speed.reported import Panel
from cab_hf.eval.speed.timing import method_on
from cab_hf.experiment.settings import option, parse_length
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.route import route

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention

WHOLE, PADDED, PACKED = "whole", "padded", "packed"
LAYOUTS = {
    WHOLE: "every sequence fills its row",
    PADDED: "left padding; sequences of half to all of the length, drawn by the seed",
    PACKED: "one row of batch x length tokens, filled with documents of such lengths",
}
NOTES = (
    f"Layouts: {'; '.join(f'{name}: {text}' for name, text in LAYOUTS.items())}. A budget is a "
    "max_density, density is the result, attended over causal pairs within sequences. Choose: "
    "block selection of one layer, including moving q and k to their blocks. Attend: attention, "
    "including moving v there and the output back. ms is the layer as a model calls it, which "
    "also counts pairs. Frame: finding padding and documents, once for all layers. Masks and "
    "lengths of dense kernels are made before the clock starts; removing and restoring padding "
    "counts. Masked SDPA, flash varlen and efficient attention get repeated k and v before the "
    "clock starts. cab_dense is the exact attention of cab_hf."
)


@dataclass(frozen=True)
class Settings(RandomHeads, base.SpeedSettings):
    """Settings of a run of batches."""

    KEYS = {"layout": "layouts", "batch": "batches", "length": "lengths", "budget": "densities"}
    # short sequences would be read densely
    DEFAULTS = {**base.KEEPS_ALL, "min_length": 0}
    POSITIVE = ("kv_heads", "head_dim", "batches")
    FROM_0 = ("seconds",)
    CHOICES = {"layouts": LAYOUTS}

    lengths: tuple[int, ...] | None = base.listed((4096, 8192), (256,), "tokens", parse_length)
    batches: tuple[int, ...] | None = base.listed(
        (1, 8, 32), (1, 2), "sequences of that length", int
    )
    layouts: tuple[str, ...] = base.listed(tuple(LAYOUTS), None, f"layouts: {', '.join(LAYOUTS)}")
    densities: tuple[float, ...] = base.listed(
        (0.2,), None, "max_density, which is used completely", float
    )
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    head_dim: int = option(128, "head dim", int)
    seconds: float = option(0.5, "seconds for timing one call, at least five runs", float)

    def configs(self) -> list[CabConfig]:
        return [self.budgeted(case) for case in self.asked()]

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, self.seconds)}; every kernel is compared with float32 "
            "attention before it is timed, cab with float32 attention over its selection; the "
            "peak excludes the inputs"
        )

    def budgeted(self, case: Mapping[str, Any]) -> CabConfig:
        """Return the config with the budget of a case."""
        return self.configured(max_density=case["budget"])


class Batches(base.Speed):
    """The experiment; a case is one layout, batch size, length and budget."""

    name = "speed batches"
    purpose = "time a layer's attention over batches, padded and packed, next to dense kernels"
    title = "Speed of batches"
    caption = "time of a layer's attention by length"
    Settings = Settings
    CASE = tuple(Settings.KEYS)
    GROWS = (*Settings.KEYS.values(), "cab")

    SHAPE = ("heads", "kv_heads", "head_dim", "dtype")
    FOUND = (
        *("texts", "tokens", "density", "engine"),
        *("frame_ms", "choose_ms", "attend_ms", "ms", "eager_ms", "peak_mib"),
    )
    BY_NAME = dense.MEASURED
    BY = {"layout": "layout", "batch": "batch", "budget": "budget"}
    APART = ("layout",)
    DENSE = ("layout", "batch")
    OF_DENSE = {}
    PANELS = (
        Panel("time of a layer", "ms", ("ms",)),
        Panel("relative to the fastest dense kernel", "share of its time", ("ratio",), log=False),
    )
    NOTES = {"": NOTES}
    described = HeadSpeed.described

    def layer(self, config: CabConfig) -> LlamaAttention:
        """Return an attention layer of a LLaMA with ``config``; its weights use no memory."""
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaAttention

        settings = self.settings
        index = config.anchors[0] if config.anchors else 0
        shape = {
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.kv_heads,
            "head_dim": settings.head_dim,
            "num_hidden_layers": 1 + max((index, *config.anchors, *config.dense_layers)),
            "max_position_embeddings": max(settings.batches) * max(settings.lengths),
        }
        with torch.device("meta"):
            return LlamaAttention(LlamaConfig(**shape, cab_config=config.to_dict()), index)

    @torch.no_grad()
    def find(self, sample: dict[str, Any]) -> None:
        settings, bench = self.settings, self.bench
        config, place = settings.budgeted(sample), itemgetter("layout", "batch", "length")(sample)
        texts = Texts.drawn(*place, settings.seed, settings.device)
        layer, scale = self.layer(config), sample["head_dim"] ** -0.5
        sample |= {"texts": len(texts.places), "tokens": sum(texts.lengths)}
        # padding has values as well
        shape = texts.slots, settings.head_dim, texts.device
        q, k, v = settings.random_heads(*shape, "qkv", texts.rows)
        ways = baselines(texts, layer)
        sample |= dense.measure(q, k, v, scale, bench, baselines=ways, check=texts.check)
        blocks = config.query_block, config.key_block
        mask = texts.mask(layer.config)
        way = route(mask, config, Workload.of(q, k, v, blocks), sparse=True, layer=layer)
        if way.method != "sparse":
            raise RuntimeError(f"the layer is dense: {way.reason}")
        call = Call.create(
            module=layer, query=q, key=k, value=v, mask=mask, scaling=scale, sparse=True
        )
        layout = mask.layout(*blocks, texts.device)
        laid = layout.queries(q), layout.keys(k), layout.keys(v)

        def choose() -> BlockPlan:
            return select_blocks(call, layout, layout.queries(q), layout.keys(k), config=way.config)

        def attend() -> Tensor:
            out = layout.attend(way.engine, *laid[:2], layout.keys(v), plan, scale)
            return layout.restore(out)

        def complete() -> Tensor:
            return cab_attention(layer, q, k, v, mask, scaling=scale)[0].transpose(1, 2)

        def look() -> None:
            texts.mask(layer.config).layout(*blocks, texts.device)

        plan = choose()
        check_rows(layout.queries(complete()), *laid, plan)
        sample |= {"density": plan.density(), "peak_mib": bench.peak(complete)[1]}
        sample["engine"] = way.engine.label(Workload.of(q, k, v, plan.blocks))
        sample["frame_ms"] = bench.time(look, graph=False).ms
        sample["choose_ms"] = self.time(sample, "choosing", choose).ms
        sample["attend_ms"] = self.time(sample, "attending", attend).ms
        timing = self.time(sample, "the layer", complete)
        sample |= {"ms": timing.ms, "eager_ms": timing.eager}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows by layout, batch, length and budget, with ratios to dense kernels."""
        rows = sorted(map(dict, samples), key=itemgetter("batch", "length", "budget"))
        rows.sort(key=lambda row: list(LAYOUTS).index(row["layout"]))
        for row in rows:
            # other batches do not predict this one: nothing is extrapolated
            row |= dense.compared(row, [row], preferred=())
        return rows


EXPERIMENT = Batches


@dataclass(frozen=True, eq=False)
class Texts:
    """The places of tokens in a batch, in tensors with ``rows`` rows of slots.

    ``places`` are (row, first slot, slot after the last) of every sequence, in order.
    """

    layout: str
    rows: int
    slots: int
    places: tuple[tuple[int, int, int], ...]
    device: torch.device

    @classmethod
    def drawn(
        cls, layout: str, batch: int, length: int, seed: int, device: torch.device | str
    ) -> Texts:
        """Draw sequences of a ``layout``; larger batches start with the lengths of smaller ones."""
        draw = partial(random.Random(seed).randint, -(-length // 2), length)
        device = torch.device(device)
        if layout == PACKED:
            borders, end = [0], batch * length
            while borders[-1] < end:
                borders.append(min(borders[-1] + draw(), end))
            return cls(layout, 1, end, tuple((0, *pair) for pair in pairwise(borders)), device)
        lengths = [length if layout == WHOLE else draw() for _ in range(batch)]
        places = tuple((row, length - own, length) for row, own in enumerate(lengths))
        return cls(layout, batch, length, places, device)

    @property
    def lengths(self) -> list[int]:
        """The tokens of each sequence."""
        return [stop - start for _, start, stop in self.places]

    @cached_property
    def cu_seq_lens(self) -> Tensor:
        """The cumulative lengths of sequences without padding, int32 [texts + 1]."""
        ends = accumulate(self.lengths, initial=0)
        return torch.tensor(list(ends), dtype=torch.int32, device=self.device)

    @cached_property
    def ranges(self) -> KeyRanges:
        """The ranges of the token in each slot."""
        first = torch.zeros(self.rows, self.slots, dtype=torch.int32)
        last = torch.full_like(first, -1)
        for row, start, stop in self.places:
            first[row, start:stop] = start
            last[row, start:stop] = torch.arange(start, stop)
        first, last = first.to(self.device), last.to(self.device)
        return KeyRanges(first, last, last >= 0)

    def mask(self, config: Any) -> MaskInfo:
        """Return the mask for the layers of a model with ``config`` in one forward pass."""
        padding = self.ranges.key_valid if self.layout == PADDED else None
        shape = (self.rows, self.slots, self.slots)
        mask = cab_mask(*shape, attention_mask=padding, device=self.device, config=config)
        return mask.with_documents(None, self.cu_seq_lens if self.layout == PACKED else None)[0]

    def check(self, attend: Attend, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> None:
        """Run `check_rows` of dense attention within each sequence."""
        out = attend(q, k, v, q.shape[-1] ** -0.5)
        check_rows(out, q, k, v, BlockPlan.causal(self.ranges, 1, *dense.CHECK_BLOCKS))


def baselines(texts: Texts, layer: nn.Module) -> dict[str, Baseline]:
    """Return kernels for dense attention of ``texts`` on their device, by name.

    Masks, lengths and places are made before the clock starts, because a model makes them once for
    all layers. Removing and restoring padding is part of a layer.
    """
    if texts.layout == WHOLE:
        return dense.on(texts.device)
    shipped = Baseline(lambda: _cab_dense(texts, layer))
    masked = Baseline(lambda: _masked(texts, layer), grouped=False)
    varlen = {
        name: Baseline(partial(_varlen, texts, load), head_dims=dense.FLASH_DIMS, grouped=grouped)
        for name, load, grouped in VARLEN
    }
    # a mask of all pairs is the largest tensor, so it comes last
    on_gpu = varlen if texts.device.type == "cuda" else {}
    return {**on_gpu, "cab_dense": shipped, "masked SDPA": masked}


def _cab_dense(texts: Texts, layer: nn.Module) -> Attend:
    mask = texts.mask(layer.config)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return cab_dense_attention(layer, q, k, v, mask, scaling=scale)[0].transpose(1, 2)

    return attend


def _masked(texts: Texts, layer: nn.Module) -> Attend:
    """Return SDPA with a mask of all pairs, bool [B or 1, 1, N, N], as transformers makes it."""
    mask, slots = texts.mask(layer.config), texts.slots
    seen = mask.dense_rows(0, slots, 0, slots, texts.device)

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    return attend


# q, k and v [tokens, H or H_kv, D] of concatenated sequences, cumulative lengths int32 [texts + 1],
# the longest, a scale -> [tokens, H, D]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def _varlen(texts: Texts, load: Callable[[], Kernel]) -> Attend:
    """Return a kernel of concatenated sequences as a kernel of rows, with zeros at padding."""
    kernel, cu_seq_lens, longest = load(), texts.cu_seq_lens, max(texts.lengths)
    padded = texts.layout == PADDED
    real = texts.ranges.key_valid.flatten().nonzero().squeeze(1) if padded else None

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        # [B, H, N, D] -> [B * N, H, D]
        tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        if padded:
            tokens = [x.index_select(0, real) for x in tokens]
        out = kernel(*tokens, cu_seq_lens, longest, scale)
        if padded:
            slots = out.new_zeros(texts.rows * texts.slots, *out.shape[1:])
            out = slots.index_copy_(0, real, out)
        return out.unflatten(0, (texts.rows, texts.slots)).transpose(1, 2)

    return attend


def _flash(*modules: str) -> Kernel:
    kernel = dense.flash_attn("flash_attn_varlen_func", modules)
    return lambda q, k, v, borders, longest, scale: kernel(
        *(q, k, v),
        **{"cu_seqlens_q": borders, "cu_seqlens_k": borders, "softmax_scale": scale},
        **{"max_seqlen_q": longest, "max_seqlen_k": longest},
    )


def _torch_varlen() -> Kernel:
    from torch.nn.attention.varlen import varlen_attn

    # no keys after a query: causal
    return lambda q, k, v, borders, longest, scale: varlen_attn(
        *(q, k, v, borders, borders, longest, longest), scale=scale, window_size=(-1, 0)
    )


# name, loader, True if all versions take fewer key heads
VARLEN = (
    ("FA3 varlen", partial(_flash, *dense.FA3_MODULES), True),
    ("FA4 varlen", partial(_flash, *dense.FA4_MODULES), True),
    ("flash varlen", _torch_varlen, False),
)
