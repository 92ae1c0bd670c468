"""``speed batches``: a layer's attention over batches, whole, padded and packed, beside dense."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from cab_hf.attention import cab_attention
from cab_hf.call.call import Call
from cab_hf.config import CabConfig
from cab_hf.engines import Workload
from cab_hf.eval.experiment import Row
from cab_hf.eval.speed import base, dense
from cab_hf.eval.speed.checks import check_rows
from cab_hf.eval.speed.heads import RandomHeads, described
from cab_hf.eval.speed.layouts import LAYOUTS, Texts, baselines
from cab_hf.eval.speed.reported import Panel
from cab_hf.eval.speed.timing import method_on
from cab_hf.plan import BlockPlan
from cab_hf.route import route
from cab_hf.runs.settings import comma_separated, option, parse_length

if TYPE_CHECKING:
    from transformers.models.llama.modeling_llama import LlamaAttention

NOTES = (
    f"Layouts: {'; '.join(f'{name}: {text}' for name, text in LAYOUTS.items())}. A budget is "
    "max_density, density what came of it, attended over causal pairs within texts. Choosing is "
    "that of one layer, with q and k moved to their blocks; attending moves v there and the output "
    "back. ms is the layer as a model calls it, which also counts pairs. Frame: padding and "
    "documents found, once for all layers. Dense ways find their masks and lengths made; taking "
    "padding out and putting it back counts. Masked SDPA, flash varlen and efficient attention get "
    "k and v repeated before the clock starts. cab_dense is what cab_hf computes exactly."
)


@dataclass(frozen=True)
class Settings(RandomHeads, base.SpeedSettings):
    """What a run of batches is told."""

    KEYS: ClassVar[Mapping[str, str]] = {
        "layout": "layouts",
        "batch": "batches",
        "length": "lengths",
        "budget": "densities",
    }
    # a short text would be read densely
    DEFAULTS: ClassVar[Mapping[str, Any]] = {**base.KEEPS_ALL, "min_length": 0}
    POSITIVE = ("kv_heads", "head_dim", "batches")
    FROM_0 = ("seconds",)
    CHOICES: ClassVar[Mapping[str, Any]] = {"layouts": LAYOUTS}

    lengths: tuple[int, ...] | None = base.listed((4096, 8192), (256,), "tokens", parse_length)
    batches: tuple[int, ...] | None = base.listed((1, 8, 32), (1, 2), "texts of that length", int)
    layouts: tuple[str, ...] = option(
        tuple(LAYOUTS), f"of {', '.join(LAYOUTS)}", comma_separated(str)
    )
    densities: tuple[float, ...] = option(
        (0.2,), "max_density of the predictor, which fills it", comma_separated(float)
    )
    heads: int = option(32, "query heads", int)
    kv_heads: int = option(8, "key and value heads", int)
    head_dim: int = option(128, "head dim", int)
    seconds: float = option(0.5, "seconds of timing one call, or what five take", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_heads()
        for case in self.asked():
            self.budgeted(case)

    @property
    def method(self) -> str:
        return (
            f"{method_on(self.device, self.seconds)}; every way is compared with float32 attention "
            "before it is timed, cab with that over its choice; the peak is that of an eager call "
            "over its inputs, its result included"
        )

    def budgeted(self, case: Mapping[str, Any]) -> CabConfig:
        """The config with the budget of a case."""
        return self.configured(max_density=case["budget"])

    def texts(self, case: Mapping[str, Any]) -> Texts:
        """The texts of a case, always the same ones."""
        return Texts.drawn(case["layout"], case["batch"], case["length"], self.seed, self.device)


class Batches(base.Speed):
    """A case is one layout, batch, length and budget."""

    name = "speed batches"
    purpose = "time a layer's attention over batches, padded and packed, beside dense ways"
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
    BY: ClassVar[Mapping[str, str]] = {"layout": "layout", "batch": "batch", "budget": "budget"}
    APART = ("layout",)
    DENSE = ("layout", "batch")
    OF_DENSE: ClassVar[Mapping[str, str]] = {}
    PANELS = (
        Panel("a layer", "ms", ("ms",)),
        Panel("over the fastest dense way", "share of its time", ("ratio",), log=False),
    )
    NOTES: ClassVar[Mapping[str, str]] = {"": NOTES}
    described = staticmethod(described)

    def layer(self, config: CabConfig) -> LlamaAttention:
        """An attention layer of a LLaMA that carries ``config``; its weights take no room."""
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
        texts, config = settings.texts(sample), settings.budgeted(sample)
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
        if way.kind != "sparse":
            raise RuntimeError(f"the layer is dense: {way.reason}")
        call = Call.of(layer, q, k, v, mask, scaling=scale, sparse=True)
        layout = mask.layout(*blocks, texts.device)
        laid = layout.queries(q), layout.keys(k), layout.keys(v)

        def choose() -> BlockPlan:
            return way.choose(call, layout, layout.queries(q), layout.keys(k))

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
        """By layout, batch, length and budget, each with its ratio over the fastest dense way."""
        rows = sorted(map(dict, samples), key=itemgetter("batch", "length", "budget"))
        rows.sort(key=lambda row: list(LAYOUTS).index(row["layout"]))
        for row in rows:
            # other batches tell nothing of this one: nothing is extrapolated
            row |= dense.compared(row, [row], preferred=())
        return rows


EXPERIMENT = Batches
