"""``speed context-parallel``: time a layer's attention on several ranks and on one rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from cab_hf import engines
from cab_hf.call.layout import make_plan_of_visible_blocks
from cab_hf.config import CabConfig
from cab_hf.distributed import predict, zigzag_attention
from cab_hf.distributed.sharding import Sharding, get_sharding
from cab_hf.engines import REFERENCE, Workload
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import format_percent, group_rows
from cab_hf.eval.speed.dense import CHECK_GRADIENT_TOLERANCE, CHECK_TOLERANCE, require_close
from cab_hf.eval.speed.rank_group import MAX_RUN_SECONDS, RankedSpeed, RankGroup
from cab_hf.eval.speed.runner import (
    ALL_BLOCKS_FIELDS,
    INPUTS_DESCRIPTION,
    Panel,
    Speed,
    SpeedSettings,
    format_run_description,
    make_densities_option,
    make_list_option,
)
from cab_hf.eval.speed.schemes import ring_attention
from cab_hf.eval.speed.timing import MAX_RUNS
from cab_hf.experiment.settings import by_device, option, parse_length
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.plan import DENSE_BLOCK_SIZE, BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

FORWARD, FORWARD_BACKWARD = DIRECTIONS = ("forward", "forward+backward")
# KV heads whose output is checked. Two are the fewest with which `zigzag_attention` transfers the
# keys of one head while it computes the attention of another head.
CHECKED_KV_HEADS = 2


class Scheme(NamedTuple):
    """An algorithm that computes attention on one rank, or over several ranks.

    Attributes:
        function: function over several ranks with the signature of `zigzag_attention`; None if one
            rank computes attention by itself.
        is_sparse: True if CAB selects blocks; False for dense attention.
    """

    function: Callable[..., tuple[Tensor, Tensor]] | None
    is_sparse: bool = False

    @property
    def baseline_scheme(self) -> str:
        """The name of the scheme on one rank that is the baseline of this scheme's efficiency."""
        return "alone+cab" if self.is_sparse else "alone"


ONE_RANK_SCHEMES = {"alone": Scheme(None), "alone+cab": Scheme(None, is_sparse=True)}
RANK_SCHEMES = {
    "ring": Scheme(ring_attention),
    "grouped": Scheme(zigzag_attention),
    "grouped+cab": Scheme(zigzag_attention, is_sparse=True),
}
SCHEMES = ONE_RANK_SCHEMES | RANK_SCHEMES
EFFICIENCY_FIELDS = ("iterations_s", "alone_ms", "efficiency")
# name -> (query heads, KV heads, channels per head)
HEAD_SHAPES = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "tiny": (4, 2, 16)}
# largest number of calls in a timed run, which takes at most `MAX_RUN_SECONDS`
MAX_CALLS_PER_RUN = 8
SELECTION_SECONDS = 0.5  # total time of the runs that time block selection
# Dense attention of more than WARM_UP_TOKENS tokens warms up on a sequence of WARM_UP_TOKENS. The
# first call on the whole sequence then counts as a timed run if it takes more than WARM_UP_SECONDS.
# CAB warms up on the whole sequence, because it compiles kernels for every length.
WARM_UP_TOKENS = 2**17
WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class Settings(SpeedSettings):
    """Settings of a run of ``speed context-parallel``."""

    CONFIG_DEFAULTS = {**ALL_BLOCKS_FIELDS, "min_length": 0}
    POSITIVE = ("runs",)
    NON_NEGATIVE = ("seconds",)
    CHOICES = {"shape": HEAD_SHAPES, "directions": DIRECTIONS, "schemes": RANK_SCHEMES}

    lengths: tuple[int, ...] | None = make_list_option(
        tuple(2**n for n in range(16, 21)), (1024,), "tokens of the whole sequence", parse_length
    )
    shape: str | None = by_device(
        "llama3-8b", "tiny", f"shape of the heads: {', '.join(HEAD_SHAPES)}"
    )
    max_density: tuple[str, ...] = make_densities_option("0.1")
    directions: tuple[str, ...] = make_list_option(DIRECTIONS, None, " or ".join(DIRECTIONS))
    schemes: tuple[str, ...] = make_list_option(
        tuple(RANK_SCHEMES), None, "schemes to compare over ranks"
    )
    runs: int = option(3, "timed runs of a case, at least", int)
    seconds: float = option(5.0, "seconds for timing one case, at least --runs runs", float)

    def __post_init__(self) -> None:
        super().__post_init__()
        accepted_devices = "cuda or cpu, because every rank uses the GPU with its number"
        self.require_option("device", self.device in ("cuda", "cpu"), accepted_devices)

    def configs(self) -> list[CabConfig]:
        return [self.make_config_with_density(length) for length in self.lengths]

    batch = 1
    heads = property(lambda self: HEAD_SHAPES[self.shape][0])
    kv_heads = property(lambda self: HEAD_SHAPES[self.shape][1])
    head_dim = property(lambda self: HEAD_SHAPES[self.shape][2])

    def make_config_with_density(self, length: int) -> CabConfig:
        """Return CAB's config with the ``max_density`` for sequences of ``length`` tokens."""
        config = self.make_measured_config(max_density=self.get_density_at_length(length))
        max_block_tokens = max(config.query_block, config.key_block)
        if DENSE_BLOCK_SIZE % max_block_tokens:
            raise ValueError(
                f"config must have blocks that divide {DENSE_BLOCK_SIZE}, because the chunks of "
                f"ranks are multiples of it, got {max_block_tokens}. Change --cab."
            )
        return config

    @property
    def method_description(self) -> str:
        return (
            f"median of {self.runs} to {MAX_RUNS} runs ({self.seconds} s if there is time for "
            f"more) by time.perf_counter after one warm-up run (of {WARM_UP_TOKENS:,} tokens if "
            f"dense attention takes more than {WARM_UP_SECONDS:g} s), a run being "
            f"{MAX_CALLS_PER_RUN} turns in a row, fewer if they take more than "
            f"{MAX_RUN_SECONDS:g} s: all ranks start together, and the slowest rank of each "
            "run counts; the timed part includes CAB's plan; the peak is the highest of any rank, "
            "including inputs; every scheme is compared with float32 attention of one process, "
            "including gradients, before it is timed"
        )


class ContextParallel(RankedSpeed):
    """The experiment that times attention of one layer over ranks.

    A case is one number of ranks, length, direction and scheme.
    """

    name = "speed context-parallel"
    purpose = "time attention of one layer over the ranks of torchrun, next to one rank"
    title = "Context parallelism"
    caption = "efficiency over ranks by length"
    Settings = Settings
    CASE_FIELDS = ("world", "length", "direction", "scheme")
    EXTENSIBLE_SETTINGS = (*Speed.EXTENSIBLE_SETTINGS, "worlds", "directions", "schemes")
    COPIED_SETTINGS = ("shape", "dtype")
    RESULT_FIELDS = (
        *("ms", "runs", "in_a_row", "each_ms", "peak_gib"),
        *("ran_as", "density", "choose_ms"),
    )
    ADDED_DEFAULTS = {"each_ms": None}
    MIN_RANKS = 1  # a run on one rank measures the baseline of runs on several ranks
    GROUP_FIELDS = {"direction": "direction", "ranks": "world", "scheme": "scheme"}
    PANEL_HEADINGS = ("direction",)
    HIDDEN_FIELDS = (
        *("runs", "in_a_row", "batch"),
        *("needed", "collectives_ms", "received_bytes"),  # fields of earlier versions
    )
    LONGEST_FIRST = True
    PANELS = (Panel("efficiency over ranks", "efficiency", ("efficiency",), is_logarithmic=False),)
    NOTES = {
        "": "Alone is one rank with the whole sequence. Efficiency is its time divided by the "
        "number of ranks and their time."
    }

    @staticmethod
    def describe_run(settings: Mapping[str, Any]) -> str:
        heads, kv_heads, head_dim = HEAD_SHAPES[settings["shape"]]
        return format_run_description(
            f"One layer of {settings['shape']}: {heads} query and {kv_heads} key heads of "
            f"{head_dim}, {settings['dtype']}; inputs are {INPUTS_DESCRIPTION}; max_density "
            f"{', '.join(settings['max_density'])}",
            settings,
        )

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        return True

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings, num_ranks = self.settings, self.ranks.num_ranks
        rank_schemes = settings.schemes if num_ranks > 1 else ()
        one_rank_schemes = dict.fromkeys(
            SCHEMES[scheme].baseline_scheme for scheme in settings.schemes
        )
        for length in settings.lengths:
            for scheme in (*one_rank_schemes, *rank_schemes):
                for direction in settings.directions:
                    num_case_ranks = 1 if scheme in ONE_RANK_SCHEMES else num_ranks
                    case = {"world": num_case_ranks, "length": length, "direction": direction}
                    yield {**case, "scheme": scheme}

    def make_bench_case(
        self, sample: Mapping[str, Any], ranks: RankGroup, length: int
    ) -> BenchCase:
        """Return the scheme of a case, applied to a sequence of ``length`` tokens.

        Args:
            sample: the fields of the case. Its length determines ``max_density``.
            ranks: the ranks that compute attention.
            length: tokens of the whole sequence, which may differ from the length of the case.
        """
        return BenchCase(
            scheme=SCHEMES[sample["scheme"]],
            length=length,
            process_group=ranks.process_group,
            config=self.settings.make_config_with_density(sample["length"]),
        )

    def fill_sample_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, bench = self.settings, self.bench
        backward = sample["direction"] == FORWARD_BACKWARD
        # for the check, each rank has two chunks of two blocks, and the last block is incomplete
        check_case = self.make_bench_case(
            sample, ranks, 4 * ranks.num_ranks * DENSE_BLOCK_SIZE - 37
        )
        ranks.call_on_all_ranks(
            lambda: check_scheme(check_case, self.make_full_inputs(check_case), backward)
        )
        bench_case, warm_up_seconds = (
            self.make_bench_case(sample, ranks, sample["length"]),
            math.inf,
        )
        if bench_case.length > WARM_UP_TOKENS and not bench_case.scheme.is_sparse:
            warm_up_seconds = WARM_UP_SECONDS
            warm_up_case = self.make_bench_case(sample, ranks, WARM_UP_TOKENS)
            ranks.call_on_all_ranks(
                warm_up_case.make_call(self.make_local_inputs(warm_up_case, ranks, backward))
            )
        bench.free_memory()
        inputs = self.make_local_inputs(bench_case, ranks, backward)
        sample["ran_as"] = bench_case.get_kernel_label(inputs)
        sample |= ranks.time_slowest(
            bench,
            bench_case.make_call(inputs),
            settings.runs,
            settings.seconds,
            max_calls_per_run=MAX_CALLS_PER_RUN,
            warm_up_seconds=warm_up_seconds,
        )._asdict()
        if bench_case.scheme.is_sparse:
            select_blocks = partial(bench_case.select_blocks, inputs.q, inputs.k)
            pair_counts = ranks.all_gather(
                ranks.call_on_all_ranks(lambda: tuple(map(int, select_blocks().pairs())))
            )
            num_attended_pairs = sum(rank_attended_pairs for rank_attended_pairs, _ in pair_counts)
            sample["density"] = num_attended_pairs / sum(
                rank_causal_pairs for _, rank_causal_pairs in pair_counts
            )
            sample["choose_ms"] = ranks.time_slowest(
                bench, select_blocks, settings.runs, SELECTION_SECONDS
            ).ms

    def make_full_inputs(self, bench_case: BenchCase) -> Inputs:
        """Return q, k and v of the whole sequence of a turn, equal on every rank."""
        settings = self.settings
        q, k, v = settings.draw_random_heads(
            bench_case.length, settings.head_dim, self.bench.device, "qkv"
        )
        return Inputs(q, k, v)

    def make_local_inputs(self, bench_case: BenchCase, ranks: RankGroup, backward: bool) -> Inputs:
        """Return this rank's shards of random q, k and v.

        Args:
            bench_case: the scheme and the sequence.
            ranks: the ranks.
            backward: True to add a random gradient of the output.
        """

        def make_shards() -> Inputs:
            full_inputs = self.make_full_inputs(bench_case)
            q, k, v = (
                bench_case.take_shard(x) for x in (full_inputs.q, full_inputs.k, full_inputs.v)
            )
            return Inputs(q, k, v, gradient=torch.randn_like(q) if backward else None)

        return ranks.call_on_all_ranks(make_shards)

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample with the fields `EFFICIENCY_FIELDS`, among them the efficiency.

        Rows are sorted by direction, length, number of ranks and scheme.
        """
        rows = [
            {**sample, "measured": True, **dict.fromkeys(EFFICIENCY_FIELDS)} for sample in samples
        ]
        rows.sort(key=lambda row: list(SCHEMES).index(row["scheme"]))
        rows.sort(key=lambda row: (DIRECTIONS.index(row["direction"]), row["length"], row["world"]))
        ms_by_case = {(row["scheme"], row["direction"], row["length"]): row["ms"] for row in rows}
        for row in rows:
            ms, scheme = row["ms"], SCHEMES[row["scheme"]]
            row["iterations_s"] = ms and 1e3 / ms
            if scheme.function is not None:
                one_rank_ms = ms_by_case.get(
                    (scheme.baseline_scheme, row["direction"], row["length"])
                )
                row["alone_ms"] = one_rank_ms
                row["efficiency"] = one_rank_ms / ms / row["world"] if ms and one_rank_ms else None
        return rows

    @staticmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        """Return a sentence per direction that lists the efficiency of each scheme.

        The sentence covers the largest number of ranks, and the longest sequence on these ranks.
        """
        sentences = []
        rows_with_efficiency = [row for row in rows if row["efficiency"] is not None]
        for direction_rows in group_rows(rows_with_efficiency, ["direction"]):
            longest_row = max(direction_rows, key=lambda row: (row["world"], row["length"]))
            (largest_rows,) = (
                rows_of_length
                for rows_of_length in group_rows(direction_rows, ["world", "length"])
                if longest_row in rows_of_length
            )
            largest_rows.sort(key=lambda row: -row["efficiency"])
            scheme_phrases = ", ".join(
                f"{row['scheme']} {format_percent(row['efficiency'])}" for row in largest_rows
            )
            sentences.append(
                f"{longest_row['direction'].capitalize()} of {longest_row['length']:,} tokens on "
                f"{longest_row['world']} ranks: rate as a share of {longest_row['world']} times "
                f"the rate of one rank: {scheme_phrases}."
            )
        return sentences


EXPERIMENT = ContextParallel


class Inputs(NamedTuple):
    """The inputs of attention: of the whole sequence (n = N), or one rank's shards of these inputs.

    Attributes:
        q: queries [1, H, n, D].
        k, v: keys and values [1, H_kv, n, D].
        gradient: gradient of the output, [1, H, n, D]; None if only the forward pass runs.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor | None = None


@dataclass(eq=False)
class BenchCase:
    """The computation of one sequence's attention by one scheme, as this rank takes part in it.

    Attributes:
        scheme: the scheme.
        length: tokens of the whole sequence.
        process_group: the ranks of the sequence; None for one rank.
        config: CAB's config. Dense schemes use only its engine.
        key_ranges: ranges of the keys of this rank's queries. The first call sets the ranges, and
            later calls reuse the ranges, as the layers of a model do. None before the first call.
    """

    scheme: Scheme
    length: int
    process_group: ProcessGroup | None
    config: CabConfig
    key_ranges: KeyRanges | None = None

    @cached_property
    def sharding(self) -> Sharding | None:
        """The distribution of the tokens over ranks; None for one rank."""
        if self.scheme.function is None:
            return None
        return get_sharding((self.length,), self.process_group.size(), DENSE_BLOCK_SIZE)

    @property
    def sharding_options(self) -> dict[str, Any]:
        """The keyword arguments of `zigzag_attention` and `predict` that describe the sharding."""
        return {
            "group": self.process_group,
            "cu_seqlens": (0, self.length),
            "block": DENSE_BLOCK_SIZE,
        }

    def take_shard(self, x: Tensor) -> Tensor:
        """Return this rank's shard [B, H, n, D] of ``x`` [B, H, N, D]; ``x`` itself on one rank."""
        if self.sharding is None:
            return x
        slots = self.sharding.sequence_index[self.process_group.rank()].to(x.device)
        return x.transpose(1, 2).index_select(1, slots).transpose(1, 2)

    def set_padding_to_zero(self, x: Tensor) -> Tensor:
        """Return this rank's ``x`` [B, H, n, D] with zeros at padding tokens."""
        if self.sharding is None:
            return x
        return x.masked_fill(
            ~self.sharding.is_real[self.process_group.rank()].to(x.device)[:, None], 0.0
        )

    @torch.no_grad()
    def select_blocks(self, q: Tensor, k: Tensor) -> BlockPlan | None:
        """Return the block plan of this rank's queries; None for dense schemes over ranks."""
        head_dim = q.shape[-1]
        channels = slow_channels_of_llama(head_dim)
        if self.sharding is not None:
            if not self.scheme.is_sparse:
                return None
            plan = predict(
                q,
                k,
                ranges=self.key_ranges,
                config=self.config,
                channels=channels,
                **self.sharding_options,
            )
            self.key_ranges = plan.ranges
            return plan
        if self.key_ranges is None:
            self.key_ranges = KeyRanges.causal(q.shape[0], self.length, self.length, q.device)
        if not self.scheme.is_sparse:
            return make_plan_of_visible_blocks(self.key_ranges, DENSE_BLOCK_SIZE)
        layer_context = LayerContext(self.key_ranges, head_dim**-0.5, channels=channels)
        return make_predictor(self.config)(q, k, layer_context)

    def make_workload(self, q: Tensor, k: Tensor, v: Tensor) -> Workload:
        """Return the workload of the engine, for training if the inputs require gradients."""
        block_sizes = self.config.query_block, self.config.key_block
        return Workload.from_tensors(
            q, k, v, block_sizes if self.scheme.is_sparse else (DENSE_BLOCK_SIZE, DENSE_BLOCK_SIZE)
        )

    def get_kernel_label(self, inputs: Inputs) -> str:
        """Return the name of the kernels that compute attention of ``inputs``."""
        has_gradient = inputs.gradient is not None
        with torch.set_grad_enabled(has_gradient):
            q, k, v = (x.detach().requires_grad_(has_gradient) for x in inputs[:3])
            workload = self.make_workload(q, k, v)
        return engines.choose(self.config.engine, workload).label(workload)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Select blocks if the scheme is sparse, and return attention [B, H, n, D].

        Args:
            q, k, v: results of `take_shard`.
        """
        plan = self.select_blocks(q, k)
        if self.sharding is None:
            engine = engines.choose(self.config.engine, self.make_workload(q, k, v))
            return engine.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5, return_lse=True)[0]
        attention_options = {"plan": plan, "engine": self.config.engine, "check": False}
        return self.scheme.function(q, k, v, **attention_options, **self.sharding_options)[0]

    def make_call(self, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
        """Return a function that computes attention, and gradients if ``inputs`` has a gradient.

        The function returns a tuple: attention [B, H, n, D], then the gradients of q, k and v if
        they are computed.
        """
        if inputs.gradient is not None:
            return lambda: attend_with_gradients(self.attend, inputs)
        return torch.no_grad()(lambda: (self.attend(inputs.q, inputs.k, inputs.v),))


@torch.enable_grad()
def attend_with_gradients(attend: Callable[..., Tensor], inputs: Inputs) -> tuple[Tensor, ...]:
    """Return a tuple of attention and the gradients of q, k and v.

    Args:
        attend: function of q, k and v that returns attention.
        inputs: the inputs with a gradient of the output.
    """
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = attend(q, k, v)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), inputs.gradient)


def check_scheme(bench_case: BenchCase, inputs: Inputs, backward: bool) -> None:
    """Compare a scheme with float32 attention that this process computes over the whole sequence.

    Only the first `CHECKED_KV_HEADS` KV heads are compared.

    Args:
        bench_case: the scheme and the length of the sequence.
        inputs: q, k and v of the whole sequence, equal on every rank.
        backward: True to compare gradients too.

    Raises:
        ArithmeticError: a relative error exceeds its tolerance. The message names the tensor.
    """
    queries_per_kv_head = inputs.q.shape[1] // inputs.k.shape[1]
    q = inputs.q[:, : CHECKED_KV_HEADS * queries_per_kv_head]
    k, v = inputs.k[:, :CHECKED_KV_HEADS], inputs.v[:, :CHECKED_KV_HEADS]
    generator = torch.Generator(q.device).manual_seed(0)
    gradient = torch.randn(q.shape, device=q.device, generator=generator).to(q.dtype)
    plan = replace(
        bench_case, scheme=ONE_RANK_SCHEMES[bench_case.scheme.baseline_scheme], key_ranges=None
    ).select_blocks(q, k)

    def attend_by_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return REFERENCE.attention(q, k, v, plan, scale=q.shape[-1] ** -0.5)

    local_inputs = Inputs(
        bench_case.take_shard(q), bench_case.take_shard(k), bench_case.take_shard(v)
    )
    exact_inputs = Inputs(q.float(), k.float(), v.float())
    if backward:
        # padding queries have no loss, so that the gradient of their output is zero
        local_inputs = local_inputs._replace(
            gradient=bench_case.set_padding_to_zero(bench_case.take_shard(gradient))
        )
        expected_tensors = attend_with_gradients(
            attend_by_reference, exact_inputs._replace(gradient=gradient.float())
        )
    else:
        expected_tensors = (attend_by_reference(exact_inputs.q, exact_inputs.k, exact_inputs.v),)
    actual_tensors = bench_case.make_call(local_inputs)()
    tensor_names = ("output", "gradient of q", "gradient of k", "gradient of v")
    for name, actual, expected in zip(tensor_names, actual_tensors, expected_tensors, strict=False):
        require_close(
            bench_case.set_padding_to_zero(actual),
            bench_case.set_padding_to_zero(bench_case.take_shard(expected)),
            location=f"in the {name} at {bench_case.length} tokens",
            tolerance=CHECK_TOLERANCE if name == "output" else CHECK_GRADIENT_TOLERANCE,
        )
