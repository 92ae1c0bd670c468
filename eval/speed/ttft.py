"""``speed ttft``: time to the first token of a prompt, or of a question after a cache.

``--longest`` also searches for the longest prompt that fits. Under torchrun, the prompt is sharded
over the ranks, which read it together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from cab_hf.eval.experiment import Row
from cab_hf.eval.fits import DYNAMIC, GIB, STATIC, Prompts
from cab_hf.eval.report import grouped, percent
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import CAB, PLAIN, SDPA, VARIANTS
from cab_hf.eval.speed.rank_group import Ranked, RankGroup, by_torchrun
from cab_hf.eval.speed.runner import CAB_DENSE, TIMES, Panel
from cab_hf.experiment.settings import by_device, flag, option, parse_length

# tokens per rank and MLP call: half a million tokens make tensors of 14 GiB
MLP_TOKENS = 2**16
# warm-up tokens that compile all kernels if ranks share a prompt
WARM_UP_TOKENS = 2**17
# warm-up tokens that compile all kernels for the single prefills of a search
SHORT_WARM_UP_TOKENS = 2**14
# chunks that start a cache and continue one, so that the kernels of both are compiled
WARM_UP_CHUNKS = 2
CONTINUED = (
    "A DynamicCache is cropped before every run, untimed. It copies keys and values of a layer "
    "to append new ones, for every implementation alike. sdpa gets a mask of all pairs from "
    "transformers, which then repeats keys and values for every query head. The last "
    "dense_tail_blocks query blocks of a question attend to everything, a large share of a short "
    "question."
)
ACROSS = (
    "Ranks share one prompt inside cab_hf.context_parallel, and the rank with its last token "
    "computes the logits; the cache stays sharded like the prompt. MLPs compute tiles of "
    f"{MLP_TOKENS:,} tokens, as in fine-tuning. TFLOP/s are per rank."
)
SEARCHED = (
    "Room: all memory that torch can allocate. Rest: the peak minus weights and cache. Estimate: "
    "the longest prompt by the estimate of `python -m cab_hf.eval fits`."
)
GAIN = Panel(
    "relative to the fastest dense attention", "times as fast", ("over_best", "ceiling"), log=False
)


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """Settings of a run of whole prefills."""

    KEYS = {"variant": "variants", "length": "lengths", "implementation": "implementations"}
    POSITIVE = (*models.LongestSettings.POSITIVE, "runs", "multiple")
    FROM_0 = (*models.LongestSettings.FROM_0, "behind", "chunk")
    CHOICES = {"variants": VARIANTS}

    lengths: tuple[int, ...] | None = runner.powers(12, 17)
    implementations: tuple[str, ...] | None = runner.listed(
        (SDPA, "cuDNN", "FA3", "FA4", *CAB), (SDPA, "SDPA", *CAB), "attention implementations"
    )
    variants: tuple[str, ...] = runner.listed(
        (PLAIN,), None, f"implementation of norms, RoPE and MLPs: {', '.join(VARIANTS)}"
    )
    runs: int = option(3, "timed runs per row", int)
    behind: int = option(
        0, "tokens in the cache before the prompt, which is then a question", parse_length
    )
    chunk: int = option(0, "tokens per call into a static cache; 0: the whole prompt", parse_length)
    longest: bool = flag("also search for the longest prompt that fits")
    multiple: int | None = by_device(
        2**15, 128, "tokens of which the longest prompt is a multiple", parse_length
    )

    def __post_init__(self) -> None:
        implementations = self.implementations
        super().__post_init__()
        self._set("variants", tuple(sorted(self.variants, key=VARIANTS.index)))
        alone = not by_torchrun() or self.variants == (PLAIN,)
        self.check("variants", alone, f"{PLAIN} if ranks share a prompt")
        # attentions that work over ranks
        known = (CAB_DENSE, *CAB)
        if not by_torchrun():
            known = (SDPA, *known, *dense.on(self.device))
        elif not implementations:
            self._set("implementations", known)
        self.check_choice("implementations", known)
        block = self.cab_config.query_block
        if self.chunk:
            self.check("chunk", not by_torchrun() and not self.behind, "0 for ranks or a question")
            self.check("chunk", self.chunk % block == 0, f"a multiple of query_block={block}")
            others = sorted(set(self.implementations) - {SDPA, CAB_DENSE, *CAB})
            self.check(
                "chunk", not others, f"0 for {', '.join(others)}, which reads no static cache"
            )
        if self.longest:
            self.check(
                "longest", not by_torchrun() and not self.behind, "off for ranks or a question"
            )
            every = any(":" not in part for part in self.max_density)
            self.check("max_density", every, "one share for all lengths with --longest")
        if self.behind:
            self.check("behind", not by_torchrun(), "0 if ranks share a prompt")
            enough = (
                f"at least query_block={block} each after a cache, because fewer tokens are read "
                "densely"
            )
            self.check("lengths", self.lengths[0] >= block, enough)

    @property
    def positions(self) -> int:
        return super().positions + self.behind

    @property
    def method(self) -> str:
        behind = f", after {self.behind:,} random ones in the cache" if self.behind else ""
        text = (
            f"median of {self.runs} runs by time.perf_counter after one warm-up run, from the "
            f"call of the model on random tokens{behind} to the logits of the last one; the peak "
            "is all allocated memory"
        )
        if self.chunk:
            text += (
                f"; chunks of {self.chunk:,} tokens are read into a static cache of their length"
            )
        if self.longest:
            text += "; prompts of the search are read once, after a short warm-up prompt"
        warming = f"{models.TOGETHER}; the warm-up run has at most {WARM_UP_TOKENS:,} tokens"
        return text + (warming if by_torchrun() else "")


class TimeToFirstToken(Ranked):
    """The experiment; a case is one length, one attention, and one number of ranks."""

    name = "speed ttft"
    purpose = "time to the first token of a LLaMA, by attention"
    title = "Time to the first token"
    caption = "time to the first token by length, and the speed-up of CAB"
    Settings = Settings
    CASE = (*Settings.KEYS, "world")
    MEMORY = ("cache_gib", "weights_gib", "rest_gib", "room_gib")
    ADDED = {"world": 1, "behind": 0, "variant": PLAIN, "chunk": 0, "sought": False, "fits": None}
    ADDED |= {"tokens_s": None, "estimate": 0, **dict.fromkeys(MEMORY)}
    GROWS = (*Settings.KEYS.values(), "cab", "worlds", "longest", "multiple")
    SHAPE = ("dtype", "behind", "chunk")
    FOUND = ("ms", "tokens_s", "peak_gib", *MEMORY, "density", "ceiling", "tflops", "ran_as")
    FOUND += ("estimate", "fits")
    BY = {"way": "implementation", "ranks": "world", "rest": "variant"}
    PANELS = (Panel("time to the first token", "ms", ("ms",)), GAIN)
    NOTES = {"": f"{models.WAYS} {models.GAINS}", "behind": CONTINUED, "worlds": ACROSS}
    NOTES |= {"longest": SEARCHED}
    described = staticmethod(models.described)

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for case in settings.asked():
            yield {**case, "world": self.ranks.size, "sought": False}
        for case in settings.asked() if settings.longest else ():
            # the search chooses the lengths
            if case["length"] == settings.lengths[0]:
                place = {"variant": case["variant"], "implementation": case["implementation"]}
                estimate = self.estimated(case["implementation"])
                yield from self.search({**place, "world": 1}, samples, settings.multiple, estimate)

    def estimated(self, way: str) -> int:
        """Return the longest prompt by `cab_hf.eval.fits`; 0 if the memory is unknown."""
        settings, room_gib = self.settings, self.bench.room()
        if room_gib is None:
            return 0
        prompts = replace(prompts_of(settings), config=settings.cab_config)
        if way not in CAB:
            # no blocks are selected
            prompts = replace(prompts, heads=frozenset())
        cache = STATIC if settings.chunk else DYNAMIC
        return prompts.longest(room_gib * GIB, settings.chunk or None, cache)

    def find_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, bench = self.settings, self.bench
        length, implementation, behind = sample["length"], sample["implementation"], settings.behind
        runs = 1 if sample["sought"] else settings.runs
        if ranks.size > 1:
            ranks.together(bench.settle)
            # a shorter prompt has warmed it up, so that the first call counts
            prefill, warm_up = prefilling_across(settings, length, implementation, ranks), 0.0
        else:
            variant, warm_up = sample["variant"], inf
            if sample["sought"]:
                short = WARM_UP_CHUNKS * settings.chunk or SHORT_WARM_UP_TOKENS
                read_once(settings, min(length, short), implementation, variant)
                warm_up = 0.0
            sample |= self.memory(length, implementation, variant)
            prefill = models.prefilling(
                settings, length, implementation, settings.chunk, behind, variant
            )
        with prefill as (call, known, crop):
            ms, peak, *_ = ranks.time_slowest(bench, call, runs, warm_up=warm_up, before=crop)
            sample |= known()
        done = settings.flops(length, sample["density"], behind)
        if peak is not None and sample["cache_gib"] is not None:
            sample["rest_gib"] = peak - sample["weights_gib"] - sample["cache_gib"]
        sample |= {
            "ms": ms,
            "tokens_s": length / ms * 1e3,
            "fits": True,
            "peak_gib": peak,
            "ceiling": settings.flops(length, 1.0, behind) / done,
            "tflops": done / ms / 1e9 / ranks.size,
        }

    def memory(self, length: int, way: str, variant: str) -> dict[str, Any]:
        """Return the GiB of cache and weights, the GiB that can be allocated, and the estimate."""
        settings = self.settings
        model = models.random_model(settings, variant)
        weights = sum(x.nbytes for x in (*model.parameters(), *model.buffers())) / 2**30
        sizes = {"cache_gib": settings.cache_gib(length + settings.behind), "weights_gib": weights}
        estimate = self.estimated(way) if settings.longest else 0
        return {**sizes, "room_gib": self.bench.room(), "estimate": estimate}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [row for alike in grouped(samples, "variant") for row in beside_dense(alike)]

    @classmethod
    def readings(cls, rows: Sequence[Row]) -> list[str]:
        return [*speed_ups(rows), *runner.longest(rows, cls.BY)]


EXPERIMENT = TimeToFirstToken


def speed_ups(rows: Sequence[Row]) -> list[str]:
    """Summarise the speed-up of each of `CAB` at the longest prompt, with its upper bound."""
    parts = []
    ours = [
        {**row, "where": where(row)}
        for row in rows
        if row["ratio"] is not None and row["implementation"] in CAB
    ]
    for group in grouped(ours, "where", "implementation"):
        last = group[-1]
        parts.append(
            f"At {last['length']:,} tokens{last['where']} {last['implementation']} is "
            f"{TIMES(last['over_best'])} as fast as {last['baseline']}, the fastest dense "
            f"attention. Attending {percent(last['density'])} of the pairs can make it at "
            f"most {TIMES(last['ceiling'])} as fast. It is faster "
            f"{dense.break_even_shown(group)}."
        )
    return parts


@lru_cache
def prompts_of(settings: Settings) -> Prompts:
    """Return the shapes from which `cab_hf.eval.fits` estimates the longest prompt."""
    return Prompts.of(models.llama_config(settings))


# once per process, because compiled kernels are cached
@lru_cache
def read_once(settings: Settings, length: int, way: str, variant: str) -> None:
    """Read a prompt, so that all kernels are compiled."""
    with models.prefilling(settings, length, way, settings.chunk, variant=variant) as (call, *_):
        call()


def beside_dense(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """Return rows by length, each with sdpa and the fastest dense attention at its length."""
    derived = ("baseline", "baseline_ms", "ratio", "over_sdpa", "over_best")
    # attentions keep their order
    rows = runner.by_length(samples, derived)
    for alike in grouped(rows, "length", "world"):
        timed = {row["implementation"]: row["ms"] for row in alike if row["ms"]}
        others = {name: ms for name, ms in timed.items() if name not in CAB}
        best = dense.against(others, preferred=())
        for row in alike:
            if best is None or row["ms"] is None:
                continue
            ms, first = row["ms"], others[best]
            row |= {"baseline": best, "baseline_ms": first, "ratio": ms / first}
            row["over_best"] = first / ms
            row["over_sdpa"] = others[SDPA] / ms if SDPA in others else None
    return rows


@contextmanager
def prefilling_across(
    settings: models.ModelSettings, length: int, way: str, ranks: RankGroup
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]], Callable[[], None]]]:
    """Return `models.prefilling` over the ranks of ``ranks``, with compiled kernels."""
    from cab_hf import context_parallel
    from cab_hf.finetune.parallel import block_of
    from cab_hf.finetune.tiles import compute_in_tiles

    model, prompt = models.random_model(settings), models.random_tokens(settings, length)
    with models.attending(model, way, settings.budgeted(length, way)):
        block = block_of(model)

        def known() -> dict[str, Any]:
            density = models.attended_by(model, length, way)["density"]
            return {"density": ranks.mean(density, ranks.pairs(length, block))}

        compute_in_tiles(model, MLP_TOKENS)
        try:
            with context_parallel(model, ranks.group, block=block):
                ranks.together(reading(model, prompt[:, :WARM_UP_TOKENS], ranks, block))
                # do not count the attention of the warm-up prompt
                models.attended_by(model, length, way, reset=True)
                yield reading(model, prompt, ranks, block), known, lambda: None
        finally:
            # one tile of all tokens means no tiles
            compute_in_tiles(model, sys.maxsize)


def reading(model: nn.Module, prompt: Tensor, ranks: RankGroup, block: int) -> Callable[[], Any]:
    """Return a function that reads this rank's tokens of a prompt [1, N].

    The rank with the last token returns its logits.
    """
    from cab_hf.distributed import shard

    own_shard = shard({"input_ids": prompt}, ranks.group, block)
    # later padding has the same position
    last = torch.where(own_shard["position_ids"][0] == prompt.shape[1] - 1)[0][:1]

    @torch.inference_mode()
    def call() -> Any:
        return model(**own_shard, use_cache=True, logits_to_keep=last)

    return call


def where(row: Row) -> str:
    """Describe variant, cache and ranks of a row, as the end of a clause."""
    # training steps have no cache, and one variant
    made = "" if row.get("variant", PLAIN) == PLAIN else f" with {row['variant']}"
    behind = f" after {row['behind']:,} in the cache" if row.get("behind") else ""
    by = "" if row.get("spread", "alone") == "alone" else f" by {row['spread']}"
    return made + behind + (f" on {row['world']} ranks{by}" if row["world"] > 1 else "")
