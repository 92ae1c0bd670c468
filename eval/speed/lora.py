"""``speed lora``: time a step of LoRA fine-tuning of a whole model, by attention.

Under torchrun, the command also measures scaling over ranks: each rank trains on another sequence
(ddp, fsdp2), or one sequence is sharded over the ranks (cp).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from cab_hf import context_parallel
from cab_hf.config import IMPLEMENTATION_NAMES
from cab_hf.eval.experiment import Row
from cab_hf.eval.quantised import to_4_bits
from cab_hf.eval.report import group_rows
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import SDPA
from cab_hf.eval.speed.rank_group import RankedSpeed, RankGroup, is_torchrun
from cab_hf.eval.speed.runner import CAB_DENSE, Panel
from cab_hf.eval.speed.ttft import SPEED_UP_PANEL, add_dense_ratios, describe_speed_ups
from cab_hf.experiment.settings import by_device, flag, option, parse_number_or_auto
from cab_hf.finetune.cost_model import (
    GIB,
    AvailableMemory,
    Cost,
    MemoryFit,
    choose_offloading,
    estimate_plan_bytes,
    get_host_bytes,
)
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Batch, Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.parallel import get_block_tokens, shard_batch
from cab_hf.finetune.tiles import choose_tile_tokens, compute_in_tiles

# how ranks share a training step, see `PARALLELISM_NOTE`
ONE_RANK, DDP, FSDP2, CP = PARALLELISMS = ("alone", "ddp", "fsdp2", "cp")
CAB = "cab"
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA_ALPHA = 32.0
LEARNING_RATE = 1e-4
MAX_GRADIENT_NORM = 1.0
MAX_ESTIMATED_TOKENS = 2**20  # largest estimated length of a step, in tokens
# largest number of tokens of the warm-up step, which compiles all kernels. A longer warm-up step
# would take up to a minute.
WARM_UP_TOKENS = 2**15
PARALLELISM_NOTE = (
    "Alone is one rank while the others wait. ddp: torch's DistributedDataParallel, a sequence "
    "per rank; fsdp2: torch's fully_shard of each decoder layer and of the remaining modules, a "
    "sequence per rank; cp: one sequence sharded over all ranks by cab_hf.context_parallel. "
    "Efficiency is tokens per second and rank divided by those of one rank alone with the same "
    "attention and length; TFLOP/s are per rank as well."
)


@dataclass(frozen=True)
class Settings(models.LongestSettings):
    """Settings of a run of ``speed lora``."""

    CASE_OPTIONS = {"length": "lengths", "implementation": "implementations"}
    # with key blocks of 128, the backward pass is fastest
    CONFIG_DEFAULTS = {**runner.ALL_BLOCKS_FIELDS, "key_block": 128}
    POSITIVE = (*models.LongestSettings.POSITIVE, "rank", "runs", "multiple")
    NON_NEGATIVE = (*models.LongestSettings.NON_NEGATIVE, "tile_tokens", "offload_layers")
    CHOICES = {"spread": PARALLELISMS}

    lengths: tuple[int, ...] | None = runner.make_lengths_option(13, 17)
    implementations: tuple[str, ...] | None = runner.make_list_option(
        (SDPA, "cuDNN", "FA4", CAB), (SDPA, "SDPA", CAB), "attention implementations"
    )
    rank: int = option(16, f"rank of the LoRA adapters in {', '.join(LORA_TARGETS)}", int)
    runs: int = option(3, "timed steps per row", int)
    spread: tuple[str, ...] = runner.make_list_option(
        (), None, f"how ranks share a step: {', '.join(PARALLELISMS)}; default under torchrun: all"
    )
    tile_tokens: int | None = option(
        None, "tokens per tile of MLPs; 0: no tiles; auto: as in fine-tuning", parse_number_or_auto
    )
    offload_layers: int | None = option(
        None, "layers with inputs on the host; auto: as few as fit", parse_number_or_auto
    )
    qlora: bool = flag("keep weights in 4 bits, as `finetune/lora.py --qlora` does")
    longest: bool = flag("also search for the longest sequence whose step fits")
    multiple: int | None = by_device(
        2**13, 64, "tokens of which the longest sequence is a multiple", int
    )

    def __post_init__(self) -> None:
        requested_implementations = self.implementations
        if not self.spread:
            self._set_option("spread", PARALLELISMS if is_torchrun() else (ONE_RANK,))
        super().__post_init__()
        if self.is_on_several_ranks and not requested_implementations:
            self._set_option("implementations", (CAB_DENSE, CAB))
        accepted_names = (SDPA, CAB_DENSE, CAB, *dense.get_baselines(self.device))
        self.check_choice("implementations", accepted_names)
        self.require_option(
            "experts", not self.experts, "0, because the adapters and tiles are of one MLP"
        )
        supports_cp = CP not in self.spread or set(self.implementations) & set(IMPLEMENTATION_NAMES)
        sharded_implementations = ", ".join(
            implementation_name
            for implementation_name in IMPLEMENTATION_NAMES
            if implementation_name in accepted_names
        )
        self.require_option(
            "implementations",
            supports_cp,
            f"some of {sharded_implementations} if a sequence is sharded ({CP})",
        )
        self.require_option(
            "qlora", not (self.qlora and self.is_on_several_ranks), "left out if ranks share a step"
        )
        has_default_density = not self.longest or any(
            ":" not in density_part for density_part in self.max_density
        )
        self.require_option(
            "max_density", has_default_density, "one share for all lengths with --longest"
        )

    @property
    def is_on_several_ranks(self) -> bool:
        """True if a training step runs on several ranks in at least one case."""
        return self.spread != (ONE_RANK,)

    @property
    def method_description(self) -> str:
        ranks_phrase = models.RANKS_NOTE if self.is_on_several_ranks or is_torchrun() else ""
        return (
            f"median of {self.runs} steps by time.perf_counter after one warm-up step of at most "
            f"{WARM_UP_TOKENS:,} tokens; a step is forward and backward of a sequence of random "
            "tokens under gradient checkpointing, clipping and AdamW, in tiles and offloaded as "
            f"in fine-tuning; the peak is all allocated memory{ranks_phrase}"
        )


class LoraStep(RankedSpeed):
    """The experiment that times steps of LoRA fine-tuning.

    A case is one length, one attention implementation, one number of ranks, and one spread. The
    spread is how the ranks share a step, one of `PARALLELISMS`.
    """

    name = "speed lora"
    purpose = "time a step of LoRA fine-tuning of a LLaMA, by attention"
    title = "A step of LoRA fine-tuning"
    caption = "seconds of a training step by length, and the speed-up of CAB"
    Settings = Settings
    CASE_FIELDS = (*Settings.CASE_OPTIONS, "spread", "world")
    ADDED_DEFAULTS = {
        "spread": ONE_RANK,
        "world": 1,
        "sought": False,
        "fits": None,
        "room_gib": None,
    }
    ADDED_DEFAULTS |= {"tile_tokens": 0, "offloaded": 0, "host_gib": None}
    EXTENSIBLE_SETTINGS = (
        *Settings.CASE_OPTIONS.values(),
        "cab",
        "worlds",
        "spread",
        "longest",
        "multiple",
    )
    EXTENSIBLE_SETTINGS += ("tile_tokens", "offload_layers")
    COPIED_SETTINGS = ("dtype", "rank")
    GROUP_FIELDS = {"way": "implementation", "ranks": "world", "spread": "spread"}
    PANELS = (
        Panel("training step", "tokens/s per rank", ("tokens_s",)),
        SPEED_UP_PANEL,
        Panel("relative to one rank alone", "efficiency", ("efficiency",), is_logarithmic=False),
    )
    NOTES = {
        "": f"LoRA in {', '.join(LORA_TARGETS)}, all other weights frozen. "
        f"{models.IMPLEMENTATIONS_NOTE} {models.UPPER_BOUND_NOTE} "
        "Operations are those of the forward and backward pass, without recomputation. Room: "
        "all memory that torch can allocate.",
        "worlds": PARALLELISM_NOTE,
    }
    describe_run = staticmethod(models.describe_run)
    RESULT_FIELDS = ("ms", "peak_gib", "density", "ceiling", "tflops", "ran_as", "fits", "room_gib")
    RESULT_FIELDS += ("tile_tokens", "offloaded", "host_gib")

    @staticmethod
    def needs_ranks(settings: Settings) -> bool:
        return settings.is_on_several_ranks or is_torchrun()

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        settings = self.settings
        for parallelism in settings.spread:
            case_fields = {
                "spread": parallelism,
                "world": 1 if parallelism == ONE_RANK else self.ranks.num_ranks,
            }
            cases = [
                case
                for case in settings.list_requested_cases()
                if parallelism != CP or case["implementation"] in IMPLEMENTATION_NAMES
            ]
            for case in cases:
                yield {**case, **case_fields, "sought": False}
            if settings.longest:
                for implementation in dict.fromkeys(case["implementation"] for case in cases):
                    search_fields = {**case_fields, "implementation": implementation}
                    estimated_length = self.estimate_tokens(search_fields)
                    yield from self.search_longest(
                        search_fields, samples, settings.multiple, estimated_length
                    )

    def estimate_tokens(self, case: Mapping[str, Any]) -> int:
        """Return the longest sequence, in tokens, whose step fits into memory by the cost model.

        Returns 0 on a CPU, or if no sequence fits.

        Args:
            case: spread, number of ranks and implementation.
        """
        step_tokens = self.settings.multiple
        memory = get_available_memory(self.bench.available_gib())
        lengths = (
            range(step_tokens, MAX_ESTIMATED_TOKENS, step_tokens)
            if memory.device_bytes < inf
            else range(0)
        )
        # no bisection: memory does not grow monotonically, because long sequences use tiles
        for length in reversed(lengths):
            if memory.can_hold(self.choose_memory_savings(case, length, memory)[1].memory):
                return length
        return 0

    def choose_memory_savings(
        self, case: Mapping[str, Any], length: int, memory: AvailableMemory
    ) -> tuple[int, MemoryFit]:
        """Return the MLP tile and the number of offloaded layers that fine-tuning would choose.

        Args:
            case: spread, number of ranks and implementation.
            length: tokens of the sequence.
            memory: available memory of the device and of the host.

        Returns:
            The tokens of an MLP tile, or 0 without tiles; and a `MemoryFit`, which has the number
            of layers whose inputs are offloaded to the host, and the estimated memory.
        """
        settings, parallelism, num_ranks = self.settings, case["spread"], case["world"]
        num_cp_ranks, cost = num_ranks if parallelism == CP else 1, make_train_state(settings).cost
        tile_tokens = choose_tile_tokens(length // num_cp_ranks, settings.tile_tokens)
        plan_options = {}
        if case["implementation"] == CAB:
            plan_options["plan_bytes"] = estimate_plan_bytes(
                cost, settings.make_config_with_density(length), length, cp=num_cp_ranks
            )
        return tile_tokens, choose_offloading(
            cost,
            length,
            memory,
            settings.offload_layers,
            itemsize=settings.torch_dtype.itemsize,
            tile_tokens=tile_tokens,
            cp=num_cp_ranks,
            num_shards=num_ranks if parallelism == FSDP2 else 1,
            **plan_options,
        )

    def fill_sample_on_ranks(self, sample: dict[str, Any], ranks: RankGroup) -> None:
        settings, length, parallelism = self.settings, sample["length"], sample["spread"]
        # free the hooks of an earlier distributed step, which are in reference cycles
        gc.collect()
        sample["room_gib"] = self.bench.available_gib()
        tile_tokens, (num_offloaded_layers, _) = self.choose_memory_savings(
            sample, length, get_available_memory(sample["room_gib"])
        )
        num_sharing_ranks = ranks.num_ranks if parallelism == CP else 1
        host_gib = apply_memory_savings(
            settings, length // num_sharing_ranks, tile_tokens, num_offloaded_layers
        )
        sample |= {
            "tile_tokens": tile_tokens,
            "offloaded": num_offloaded_layers,
            "host_gib": host_gib,
        }
        num_runs = 1 if sample["sought"] else settings.runs
        with prepare_training(
            settings=settings,
            length=length,
            implementation=sample["implementation"],
            parallelism=parallelism,
            ranks=ranks,
        ) as (run_step, read_attention_fields):
            ranks.call_on_all_ranks(lambda: run_step(min(length, WARM_UP_TOKENS)))
            # reset the measured density, which includes the warm-up step
            read_attention_fields()
            ranks.call_on_all_ranks(self.bench.free_memory)
            slowest_time = ranks.time_slowest(
                self.bench, lambda: run_step(length), num_runs, warm_up_seconds=0
            )
            sample |= {"fits": True, **read_attention_fields()}
        cost, density = make_train_state(settings).cost, sample["density"]
        sparse_flops = count_step_flops(cost, length, density)
        sample |= {
            "ms": slowest_time.ms,
            "peak_gib": slowest_time.peak_gib,
            "ceiling": count_step_flops(cost, length) / sparse_flops,
            "tflops": sparse_flops / num_sharing_ranks / slowest_time.ms / 1e9,
        }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample, with speed-ups over dense attention and the efficiency of ranks.

        ``efficiency`` is the rate per rank, relative to one rank alone.
        """
        rows, one_rank_tokens_s = [], {}
        for comparable_rows in group_rows(samples, ["spread", "world"]):
            rows += add_dense_ratios(comparable_rows)
        for row in rows:
            num_sequences = row["world"] if row["spread"] in (DDP, FSDP2) else 1
            tokens_per_rank = num_sequences * row["length"] / row["world"]
            row |= {"tokens_s": row["ms"] and tokens_per_rank / row["ms"] * 1e3, "efficiency": None}
            if row["spread"] == ONE_RANK:
                one_rank_tokens_s[row["length"], row["implementation"]] = row["tokens_s"]
        for row in rows:
            baseline_tokens_s = one_rank_tokens_s.get((row["length"], row["implementation"]))
            if baseline_tokens_s and row["tokens_s"]:
                row["efficiency"] = row["tokens_s"] / baseline_tokens_s
        return rows

    @classmethod
    def summary_sentences(cls, rows: Sequence[Row]) -> list[str]:
        return [*describe_speed_ups(rows), *runner.describe_longest(rows, cls.GROUP_FIELDS)]


EXPERIMENT = LoraStep


def count_step_flops(cost: Cost, length: int, density: float = 1.0) -> float:
    """Return the floating-point operations of a training step on one sequence.

    Args:
        cost: cost model of the model.
        length: tokens of the sequence.
        density: fraction of the causal (query, key) pairs whose attention is computed.
    """
    attention_flops = sum(cost.count_attention_flops(cost.count_pairs(torch.arange(length)[None])))
    return cost.count_product_flops(length) + density * attention_flops


def get_available_memory(available_gib: float | None) -> AvailableMemory:
    """Return the available memory of the device and of the host.

    Args:
        available_gib: GiB that torch can allocate; None: unlimited, as on a CPU.
    """
    return AvailableMemory(inf if available_gib is None else available_gib * GIB, get_host_bytes())


class TrainState(NamedTuple):
    """The model that is trained, and its cost model.

    Attributes:
        objective: module that contains the model and returns its loss.
        cost: cost model of a step.
    """

    objective: Objective
    cost: Cost

    @property
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The weights of the adapters."""
        return [parameter for parameter in self.objective.parameters() if parameter.requires_grad]


@lru_cache(maxsize=1)
def make_train_state(settings: Settings) -> TrainState:
    """Return the random model with trainable LoRA adapters, and the cost model of its step.

    The last result is cached, so that successive cases use the same model.
    """
    model = models.make_random_model(settings)
    if settings.qlora:
        to_4_bits(model, settings.dtype)
    model = with_lora(model, LORA_TARGETS, settings.rank, LORA_ALPHA)
    enable_gradient_checkpointing(model)
    model.train()
    return TrainState(Objective(model), Cost.from_model(model))


def apply_memory_savings(
    settings: Settings, tokens_per_rank: int, tile_tokens: int, num_offloaded_layers: int
) -> float:
    """Apply MLP tiles and offloading to the model, and return the GiB of pinned host memory.

    Args:
        settings: the settings.
        tokens_per_rank: tokens per rank.
        tile_tokens: tokens of a tile; 0: no tiles.
        num_offloaded_layers: number of layers whose inputs are offloaded to the host.
    """
    model = make_train_state(settings).objective.model
    # a larger tile than any sequence disables tiling: one tile contains all tokens and padding
    compute_in_tiles(model, tile_tokens or sys.maxsize)
    offload = Offload(num_offloaded_layers, torch.device(settings.device))
    # `install_in_layers` frees the pinned memory of an earlier case, before `reserve_host_memory`
    # pins more
    offload.install_in_layers(model)
    # pin memory now, so that the timed step does not
    offload.reserve_host_memory(tokens_per_rank * settings.hidden * settings.torch_dtype.itemsize)
    return offload.host_bytes / GIB


def make_batch(settings: Settings, num_tokens: int, sequence_number: int = 0) -> Batch:
    """Return a batch of one random sequence [1, tokens]; labels are the next random tokens.

    Args:
        settings: vocabulary, device and seed.
        num_tokens: length of the sequence.
        sequence_number: sequences of different numbers have different tokens.
    """
    token_ids = models.draw_random_tokens(settings, num_tokens + 1, sequence_number)
    position_ids = torch.arange(num_tokens, device=settings.device)[None]
    return {
        "input_ids": token_ids[:, :-1],
        "position_ids": position_ids,
        "labels": token_ids[:, 1:],
    }


@contextmanager
def prepare_training(
    settings: Settings,
    length: int,
    implementation: str,
    parallelism: str = ONE_RANK,
    ranks: RankGroup | None = None,
) -> Iterator[tuple[Callable[[int], None], Callable[[], dict[str, Any]]]]:
    """Yield functions for training steps; inside the block, the model uses ``implementation``.

    Args:
        settings: the settings.
        length: tokens of the sequence, for the budget of CAB.
        implementation: name of the attention implementation.
        parallelism: one of `PARALLELISMS`.
        ranks: the ranks that train together; None: one rank.

    Yields:
        A function of a number of tokens that takes a training step on a random sequence of this
        length; and a function that returns `models.read_attention_fields` for all steps since its
        last call, with the mean density of all ranks.
    """
    ranks = RankGroup() if ranks is None else ranks
    model = models.make_random_model(settings)
    cab_config = settings.make_config_with_density(length)

    def read_attention_fields() -> dict[str, Any]:
        density_fields = models.read_attention_fields(model, length, implementation, reset=True)
        if parallelism != CP:
            return density_fields | {"density": ranks.compute_mean(density_fields["density"])}
        density = ranks.compute_mean(
            density_fields["density"], ranks.count_rank_pairs(length, get_block_tokens(model))
        )
        # `describe` does not describe attention over ranks
        return {"density": density, "ran_as": None}

    if parallelism != ONE_RANK:
        # LoRA initialises half of the adapter weights with zeros, for which half of the gradients
        # are zero
        generator = torch.Generator(settings.device).manual_seed(settings.seed)
        with torch.no_grad():
            for parameter in make_train_state(settings).trainable_parameters:
                parameter.normal_(std=models.INITIAL_WEIGHT_STD, generator=generator)
    try:
        with (
            models.use_attention(model, implementation, cab_config),
            prepare_backward(settings, parallelism, ranks) as add_gradients,
        ):
            # read the parameters after `prepare_backward`, because FSDP2 replaces them
            trainable_parameters = make_train_state(settings).trainable_parameters
            is_cuda = torch.device(settings.device).type == "cuda"
            optimizer = torch.optim.AdamW(trainable_parameters, LEARNING_RATE, fused=is_cuda)
            try:
                yield (
                    partial(train_step, add_gradients, trainable_parameters, optimizer),
                    read_attention_fields,
                )
            finally:
                for parameter in trainable_parameters:
                    parameter.grad = None
    finally:
        if parallelism == FSDP2:
            # the cached model is sharded, and other cases need a whole model
            models.clear_model_cache()
            make_train_state.cache_clear()


@contextmanager
def prepare_backward(
    settings: Settings, parallelism: str, ranks: RankGroup
) -> Iterator[Callable[[int], None]]:
    """Distribute the model over ranks, and yield a function that computes gradients.

    The function takes a number of tokens. It runs forward and backward on a random sequence of this
    length, and adds the result to this rank's gradients. With `FSDP2`, the weights remain sharded
    after the block.
    """
    objective = wrapped_objective = make_train_state(settings).objective
    make_rank_batch, loss_scale, parallel_context = partial(make_batch, settings), 1, nullcontext()
    if parallelism in (DDP, FSDP2):
        make_rank_batch = partial(make_rank_batch, sequence_number=ranks.rank)
    if parallelism == FSDP2:
        # as accelerate does: one FSDP unit per decoder layer, and one unit of all other modules
        device_mesh = DeviceMesh.from_group(ranks.process_group, torch.device(settings.device).type)
        for layer in models.make_random_model(settings).model.layers:
            fully_shard(layer, mesh=device_mesh, reshard_after_forward=True)
        fully_shard(objective, mesh=device_mesh)
    if parallelism in (DDP, CP):
        wrapped_objective = DistributedDataParallel(objective, process_group=ranks.process_group)
    if parallelism == CP:
        block_tokens, loss_scale = get_block_tokens(objective.model), ranks.num_ranks
        # gradient checkpointing recomputes a layer, which gathers K and V again in any case
        parallel_context = context_parallel(
            objective.model, ranks.process_group, block=block_tokens, regather_kv=False
        )

    def add_gradients(num_tokens: int) -> None:
        rank_batch = make_rank_batch(num_tokens)
        if parallelism == CP:
            rank_batch = shard_batch(rank_batch, ranks.process_group, block_tokens)
        # DDP averages gradients over ranks; ``loss_scale`` undoes this if ranks share a sequence
        (wrapped_objective(rank_batch) * (loss_scale / num_tokens)).backward()

    with parallel_context:
        yield add_gradients


def train_step(
    add_gradients: Callable[[int], None],
    trainable_parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    num_tokens: int,
) -> None:
    """Take an optimizer step on a sequence of ``num_tokens`` tokens.

    Args:
        add_gradients: function that computes gradients, from `prepare_backward`.
        trainable_parameters: the trained parameters.
        optimizer: the optimizer of these parameters.
        num_tokens: tokens of the sequence.
    """
    add_gradients(num_tokens)
    torch.nn.utils.clip_grad_norm_(trainable_parameters, MAX_GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
