"""``speed ttft``: time to the first token of a prompt, or of a question after cached tokens.

``--longest`` also searches for the longest prompt that fits into memory. Under torchrun, the prompt
is sharded over the ranks.
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
from cab_hf.eval.fits import DYNAMIC_CACHE, GIB, STATIC_CACHE, MemoryModel
from cab_hf.eval.report import format_percent, group_rows
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import CAB_IMPLEMENTATIONS, PLAIN_VARIANT, SDPA, VARIANTS
from cab_hf.eval.speed.rank_group import RankedSpeed, RankGroup, is_torchrun
from cab_hf.eval.speed.runner import CAB_DENSE, Panel, format_speed_up
from cab_hf.experiment.settings import by_device, flag, option, parse_length

# largest number of tokens per MLP call if ranks share a prompt: a call on half a million tokens
# would need tensors of 14 GiB
MAX_MLP_TOKENS = 2**16
# largest number of warm-up tokens, which compile all kernels, if ranks share a prompt
WARM_UP_TOKENS = 2**17
# tokens of the warm-up prompt of a search, which compiles all kernels. A search runs each length
# once, so that no run of the same length precedes the timed run.
SHORT_WARM_UP_TOKENS = 2**14
# warm-up chunks: the first compiles the kernels for an empty cache, the second for a filled cache
WARM_UP_CHUNKS = 2
CACHE_NOTE = (
    "A DynamicCache is cropped before every run, untimed. It copies keys and values of a layer "
    "to append new ones, for every implementation alike. sdpa gets a mask of all pairs from "
    "transformers, which then repeats keys and values for every query head. The last "
    "dense_tail_blocks query blocks of a question attend to everything, a large share of a short "
    "question."
)
RANKS_NOTE = (
    "Ranks share one prompt inside cab_hf.context_parallel, and the rank with its last token "
    "computes the logits; the cache stays sharded like the prompt. MLPs compute tiles of "
    f"{MAX_MLP_TOKENS:,} tokens, as in fine-tuning. TFLOP/s are per rank."
)
SEARCH_NOTE = (
    "Room: all memory that torch can allocate. Rest: the peak minus weights and cache. Estimate: "
    "the longest prompt by the estimate of `python -m cab_hf.eval fits`."
)
SPEED_UP_PANEL = Panel(
    "relative to the fastest dense attention",
    "times as fast",
    ("over_best", "ceiling"),
    is_logarithmic=False,
)


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """Settings of a run of ``speed ttft``."""

    CASE_OPTIONS = {"variant": "variants", "length": "lengths", "implementation": "implementations"}
    POSITIVE = (*models.LongestSettings.POSITIVE, "runs", "multiple")
    NON_NEGATIVE = (*models.LongestSettings.NON_NEGATIVE, "behind", "chunk")
    CHOICES = {"variants": VARIANTS}

    lengths: tuple[int, ...] | None = runner.make_lengths_option(12, 17)
    implementations: tuple[str, ...] | None = runner.make_list_option(
        (SDPA, "cuDNN", "FA3", "FA4", *CAB_IMPLEMENTATIONS),
        (SDPA, "SDPA", *CAB_IMPLEMENTATIONS),
        "attention implementations",
    )
    variants: tuple[str, ...] = runner.make_list_option(
        (PLAIN_VARIANT,), None, f"implementation of norms, RoPE and MLPs: {', '.join(VARIANTS)}"
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
        requested_implementations = self.implementations
        super().__post_init__()
        self._set_option("variants", tuple(sorted(self.variants, key=VARIANTS.index)))
        supports_ranks = not is_torchrun() or self.variants == (PLAIN_VARIANT,)
        self.require_option("variants", supports_ranks, f"{PLAIN_VARIANT} if ranks share a prompt")
        supports_variants = not self.experts or self.variants == (PLAIN_VARIANT,)
        self.require_option("variants", supports_variants, f"{PLAIN_VARIANT} with --experts")
        # attention implementations that support a sequence sharded over ranks
        supported_names = (CAB_DENSE, *CAB_IMPLEMENTATIONS)
        if not is_torchrun():
            supported_names = (SDPA, *supported_names, *dense.get_baselines(self.device))
        elif not requested_implementations:
            self._set_option("implementations", supported_names)
        self.check_choice("implementations", supported_names)
        query_block = self.cab_config.query_block
        if self.chunk:
            self.require_option(
                "chunk", not is_torchrun() and not self.behind, "0 for ranks or a question"
            )
            self.require_option(
                "chunk", self.chunk % query_block == 0, f"a multiple of query_block={query_block}"
            )
            unsupported_names = sorted(
                set(self.implementations) - {SDPA, CAB_DENSE, *CAB_IMPLEMENTATIONS}
            )
            self.require_option(
                "chunk",
                not unsupported_names,
                f"0 for {', '.join(unsupported_names)}, which reads no static cache",
            )
        if self.longest:
            self.require_option(
                "longest", not is_torchrun() and not self.behind, "off for ranks or a question"
            )
            has_default_density = any(":" not in density_part for density_part in self.max_density)
            self.require_option(
                "max_density", has_default_density, "one share for all lengths with --longest"
            )
        if self.behind:
            self.require_option("behind", not is_torchrun(), "0 if ranks share a prompt")
            accepted_lengths = (
                f"at least query_block={query_block} each after a cache, because fewer tokens are "
                "read densely"
            )
            self.require_option("lengths", self.lengths[0] >= query_block, accepted_lengths)

    @property
    def max_positions(self) -> int:
        return super().max_positions + self.behind

    @property
    def method_description(self) -> str:
        cache_phrase = f", after {self.behind:,} random ones in the cache" if self.behind else ""
        method_phrase = (
            f"median of {self.runs} runs by time.perf_counter after one warm-up run, from the "
            f"call of the model on random tokens{cache_phrase} to the logits of the last one; the "
            "peak is all allocated memory"
        )
        if self.chunk:
            method_phrase += (
                f"; chunks of {self.chunk:,} tokens are read into a static cache of their length"
            )
        if self.longest:
            method_phrase += "; prompts of the search are read once, after a short warm-up prompt"
        if is_torchrun():
            method_phrase += models.RANKS_NOTE
            method_phrase += f"; the warm-up run has at most {WARM_UP_TOKENS:,} tokens"
        return method_phrase


class TimeToFirstToken(RankedSpeed):
    """The experiment that times prefills of a whole model.

    A case is one length, one attention, one variant of the model, and one number of ranks.
    """

    name = "speed ttft"
    purpose = "time to the first token of a LLaMA, by attention"
    title = "Time to the first token"
    caption = "time to the first token by length, and the speed-up of CAB"
    Settings = Settings
    CASE_FIELDS = (*Settings.CASE_OPTIONS, "world")
    MEMORY_FIELDS = ("cache_gib", "weights_gib", "rest_gib", "room_gib")
    ADDED_DEFAULTS = {
        "world": 1,
        "behind": 0,
        "variant": PLAIN_VARIANT,
        "chunk": 0,
        "sought": False,
        "fits": None,
    }
    ADDED_DEFAULTS |= {"tokens_s": None, "estimate": 0, **dict.fromkeys(MEMORY_FIELDS)}
    EXTENSIBLE_SETTINGS = (*Settings.CASE_OPTIONS.values(), "cab", "worlds", "longest", "multiple")
    COPIED_SETTINGS = ("dtype", "behind", "chunk")
    RESULT_FIELDS = (
        "ms",
        "tokens_s",
        "peak_gib",
        *MEMORY_FIELDS,
        "density",
        "ceiling",
        "tflops",
        "ran_as",
    )
    RESULT_FIELDS += ("estimate", "fits")
    GROUP_FIELDS = {"way": "implementation", "ranks": "world", "rest": "variant"}
    PANELS = (Panel("time to the first token", "ms", ("ms",)), SPEED_UP_PANEL)
    NOTES = {
        "": f"{models.IMPLEMENTATIONS_NOTE} {models.UPPER_BOUND_NOTE}",
        "behind": CACHE_NOTE,
        "worlds": RANKS_NOTE,
    }
    NOTES |= {"longest": SEARCH_NOTE}
    describe_run = staticmethod(models.describe_run)

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for case in settings.list_requested_cases():
            yield {**case, "world": self.ranks.num_ranks, "sought": False}
        for case in settings.list_requested_cases() if settings.longest else ():
            # one search per variant and implementation: the search chooses the lengths
            if case["length"] == settings.lengths[0]:
                search_fields = {
                    "variant": case["variant"],
                    "implementation": case["implementation"],
                }
                estimated_length = self.estimate_tokens(case["implementation"])
                yield from self.search_longest(
                    {**search_fields, "world": 1}, samples, settings.multiple, estimated_length
                )

    def estimate_tokens(self, implementation: str) -> int:
        """Return the tokens of the longest prompt that fits, estimated by `cab_hf.eval.fits`.

        Returns 0 if the memory of the device is unknown.
        """
        settings, available_gib = self.settings, self.bench.available_gib()
        if available_gib is None:
            return 0
        memory_model = replace(make_memory_model(settings), config=settings.cab_config)
        if implementation not in CAB_IMPLEMENTATIONS:
            # dense attention needs no memory for selecting blocks
            memory_model = replace(memory_model, head_shapes=frozenset())
        cache_kind = STATIC_CACHE if settings.chunk else DYNAMIC_CACHE
        return memory_model.find_longest_prompt(
            available_gib * GIB, settings.chunk or None, cache_kind
        )

    def fill_sample_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, bench = self.settings, self.bench
        length, implementation = sample["length"], sample["implementation"]
        num_cached = settings.behind
        num_runs = 1 if sample["sought"] else settings.runs
        if ranks.num_ranks > 1:
            ranks.call_on_all_ranks(bench.free_memory)
            # `prepare_sharded_prefill` warms up on a shorter prompt, so the first call is timed
            prefill_context, warm_up_seconds = (
                prepare_sharded_prefill(settings, length, implementation, ranks),
                0.0,
            )
        else:
            variant, warm_up_seconds = sample["variant"], inf
            if sample["sought"]:
                warm_up_tokens = WARM_UP_CHUNKS * settings.chunk or SHORT_WARM_UP_TOKENS
                warm_up_prefill(settings, min(length, warm_up_tokens), implementation, variant)
                warm_up_seconds = 0.0
            sample |= self.read_memory_fields(length, implementation, variant)
            prefill_context = models.prepare_prefill(
                settings,
                length,
                implementation,
                chunk_tokens=settings.chunk,
                num_cached=num_cached,
                variant=variant,
            )
        with prefill_context as (run_prefill, read_attention_fields, crop_cache):
            ms, peak_gib, *_ = ranks.time_slowest(
                bench, run_prefill, num_runs, warm_up_seconds=warm_up_seconds, before_run=crop_cache
            )
            sample |= read_attention_fields()
        sparse_flops = settings.count_flops(length, sample["density"], num_cached)
        if peak_gib is not None and sample["cache_gib"] is not None:
            sample["rest_gib"] = peak_gib - sample["weights_gib"] - sample["cache_gib"]
        sample |= {
            "ms": ms,
            "tokens_s": length / ms * 1e3,
            "fits": True,
            "peak_gib": peak_gib,
            "ceiling": settings.count_flops(length, 1.0, num_cached) / sparse_flops,
            "tflops": sparse_flops / ms / 1e9 / ranks.num_ranks,
        }

    def read_memory_fields(self, length: int, implementation: str, variant: str) -> dict[str, Any]:
        """Return the fields of a result record on memory.

        Returns:
            ``cache_gib``, ``weights_gib``: GiB of the KV cache and of the weights.
            ``room_gib``: GiB that torch can allocate.
            ``estimate``: result of `estimate_tokens`; 0 without --longest.
        """
        settings = self.settings
        # load the model before asking for free memory
        model = models.make_random_model(settings, variant)
        weights_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        estimated_tokens = self.estimate_tokens(implementation) if settings.longest else 0
        return {
            "cache_gib": settings.compute_cache_gib(length + settings.behind),
            "weights_gib": weights_bytes / 2**30,
            "room_gib": self.bench.available_gib(),
            "estimate": estimated_tokens,
        }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            row for group in group_rows(samples, ["variant"]) for row in add_dense_ratios(group)
        ]

    @classmethod
    def summary_sentences(cls, rows: Sequence[Row]) -> list[str]:
        return [*describe_speed_ups(rows), *runner.describe_longest(rows, cls.GROUP_FIELDS)]


EXPERIMENT = TimeToFirstToken


def describe_speed_ups(rows: Sequence[Row]) -> list[str]:
    """Return a sentence per variant of CAB on its speed-up at the longest prompt.

    Rows that differ in model variant, cached tokens or number of ranks get separate sentences.
    """
    sentences = []
    cab_rows = [
        {**row, "where": describe_row_conditions(row)}
        for row in rows
        if row["ratio"] is not None and row["implementation"] in CAB_IMPLEMENTATIONS
    ]
    for group in group_rows(cab_rows, ["where", "implementation"]):
        longest_row = group[-1]
        sentences.append(
            f"At {longest_row['length']:,} tokens{longest_row['where']} "
            f"{longest_row['implementation']} is {format_speed_up(longest_row['over_best'])} as "
            f"fast as {longest_row['baseline']}, the fastest dense attention. Attending"
            f" {format_percent(longest_row['density'])} of the pairs can make it at "
            f"most {format_speed_up(longest_row['ceiling'])} as fast. It is faster "
            f"{dense.describe_break_even(group)}."
        )
    return sentences


@lru_cache
def make_memory_model(settings: Settings) -> MemoryModel:
    """Return the memory model of prompts, from which the longest prompt is estimated."""
    return MemoryModel.from_config(models.make_model_config(settings))


# lru_cache skips repeated calls, because compiled kernels stay in the process
@lru_cache
def warm_up_prefill(settings: Settings, length: int, implementation: str, variant: str) -> None:
    """Run the model on a prompt of ``length`` tokens, so that all kernels are compiled."""
    with models.prepare_prefill(
        settings, length, implementation, chunk_tokens=settings.chunk, variant=variant
    ) as (run_prefill, *_):
        run_prefill()


def add_dense_ratios(samples: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row per sample, sorted by length, with its time relative to dense attention.

    At equal length and number of ranks, ``ratio`` is the time divided by that of the fastest dense
    attention. ``over_best`` and ``over_sdpa`` are the speed-ups over the fastest dense attention
    and over sdpa.
    """
    derived_fields = ("baseline", "baseline_ms", "ratio", "over_sdpa", "over_best")
    rows = runner.sort_by_length(samples, derived_fields)
    for group in group_rows(rows, ["length", "world"]):
        dense_ms = {
            row["implementation"]: row["ms"]
            for row in group
            if row["ms"] and row["implementation"] not in CAB_IMPLEMENTATIONS
        }
        fastest_dense = dense.choose_baseline(dense_ms, preferred_names=())
        for row in group:
            if fastest_dense is None or row["ms"] is None:
                continue
            ms, fastest_ms = row["ms"], dense_ms[fastest_dense]
            row |= {"baseline": fastest_dense, "baseline_ms": fastest_ms, "ratio": ms / fastest_ms}
            row["over_best"] = fastest_ms / ms
            row["over_sdpa"] = dense_ms[SDPA] / ms if SDPA in dense_ms else None
    return rows


@contextmanager
def prepare_sharded_prefill(
    settings: models.ModelSettings, length: int, implementation: str, ranks: RankGroup
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]], Callable[[], None]]]:
    """Yield the functions of `models.prepare_prefill` for a prompt that is sharded over ranks.

    A warm-up prompt of at most `WARM_UP_TOKENS` tokens compiles all kernels first.
    """
    from cab_hf import context_parallel
    from cab_hf.finetune.parallel import get_block_tokens
    from cab_hf.finetune.tiles import compute_in_tiles

    model, prompt = models.make_random_model(settings), models.draw_random_tokens(settings, length)
    with models.use_attention(
        model, implementation, settings.make_config_with_density(length, implementation)
    ):
        block_tokens = get_block_tokens(model)

        def read_attention_fields() -> dict[str, Any]:
            density = models.read_attention_fields(model, length, implementation)["density"]
            return {
                "density": ranks.compute_mean(density, ranks.count_rank_pairs(length, block_tokens))
            }

        compute_in_tiles(model, MAX_MLP_TOKENS)
        try:
            with context_parallel(model, ranks.process_group, block=block_tokens):
                ranks.call_on_all_ranks(
                    make_prefill(model, prompt[:, :WARM_UP_TOKENS], ranks, block_tokens)
                )
                # do not count the attention of the warm-up prompt
                models.read_attention_fields(model, length, implementation, reset=True)
                yield (
                    make_prefill(model, prompt, ranks, block_tokens),
                    read_attention_fields,
                    lambda: None,
                )
        finally:
            # one tile of all tokens means no tiles
            compute_in_tiles(model, sys.maxsize)


def make_prefill(
    model: nn.Module, prompt: Tensor, ranks: RankGroup, block_tokens: int
) -> Callable[[], Any]:
    """Return a function that runs ``model`` on this rank's shard of a prompt.

    The function returns the output of ``model``. Only the rank with the prompt's last token
    computes logits, those of this token.

    Args:
        model: the model.
        prompt: token ids of the whole prompt, int64 [1, N].
        ranks: the ranks.
        block_tokens: tokens of which the chunks of ranks are multiples.
    """
    from cab_hf.distributed import shard

    rank_shard = shard({"input_ids": prompt}, ranks.process_group, block_tokens)
    # the first slot with the last position; padding slots after it have the same position
    last_token_slot = torch.where(rank_shard["position_ids"][0] == prompt.shape[1] - 1)[0][:1]

    @torch.inference_mode()
    def run_shard() -> Any:
        return model(**rank_shard, use_cache=True, logits_to_keep=last_token_slot)

    return run_shard


def describe_row_conditions(row: Row) -> str:
    """Return a phrase on model variant, cached tokens and ranks of a row, such as " on 2 ranks".

    Returns "" if all three have their defaults.
    """
    # rows of training steps lack the fields of caches and variants
    variant_phrase = (
        "" if row.get("variant", PLAIN_VARIANT) == PLAIN_VARIANT else f" with {row['variant']}"
    )
    cache_phrase = f" after {row['behind']:,} in the cache" if row.get("behind") else ""
    spread_phrase = "" if row.get("spread", "alone") == "alone" else f" by {row['spread']}"
    ranks_phrase = f" on {row['world']} ranks{spread_phrase}" if row["world"] > 1 else ""
    return variant_phrase + cache_phrase + ranks_phrase
