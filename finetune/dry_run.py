"""Estimate the FLOPs and the memory of a run without loading weights, and check that it fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from cab_hf.config import SPARSE_IMPLEMENTATIONS
from cab_hf.experiment import models as run_models
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model
from cab_hf.finetune.loss import LOGITS_PER_CHUNK
from cab_hf.finetune.models import stretch_positions
from cab_hf.finetune.prepare import make_trainable, open_sources
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.sources import is_local_source
from cab_hf.finetune.tiles import choose_tile_tokens
from cab_hf.hf.model_config import cab_config_of

# bytes per weight of NF4 with double quantisation: 4 bits and the scales
BYTES_PER_4_BIT_WEIGHT = 0.52
# keyword arguments ``num_shards`` and ``are_weights_on_host`` of `cost_model.estimate_memory`
ShardingArguments = Mapping[str, Any]
# tokens; the longest length in an error message is a multiple of this number
LENGTH_STEP_TOKENS = 2**10
# words of the report for the fields of `cost_model.StepMemory`, in their order
MEMORY_USES = ("weights", "optimizer", "layers", "working", "checkpoints", "plans", "sharded")
# options that save memory, the fastest first
MEMORY_SAVING_OPTIONS = "--micro-batch, --checkpointing, --tile-tokens, --qlora, --cp or --length"


def build_skeleton(settings: Settings) -> nn.Module:
    """Build the model that ``settings`` name on the meta device, without loading weights.

    Errors are those of `models.load_model`.
    """
    config = run_models.load_config(settings.model, settings.trust_remote_code)
    stretch_positions(config, settings.model, **settings.get_rope_arguments())
    return run_models.build_skeleton(
        config,
        settings.trust_remote_code,
        attn_implementation=settings.attention,
        dtype=settings.dtype,
    )


def format_report(
    settings: Settings,
    cost: cost_model.Cost,
    num_processes: int,
    memory_fit: cost_model.MemoryFit,
    available_memory: cost_model.AvailableMemory,
) -> str:
    """Return the text that ``--dry-run`` prints.

    Args:
        settings: the settings of the run.
        cost: the cost of the model with its adapter.
        num_processes: number of processes.
        memory_fit: offloaded layers and memory of a step.
        available_memory: available memory of a process.
    """
    num_replicas, num_micro_batches = (
        settings.count_replicas(num_processes),
        settings.count_micro_batches(num_processes),
    )
    tokens_per_step = num_replicas * settings.length * settings.micro_batch * num_micro_batches
    # an upper bound: sequences of one document have the most pairs
    pairs_per_layer = cost.count_pairs(torch.arange(settings.length)[None])
    attention_flops = (
        sum(cost.count_attention_flops(pairs_per_layer)) * tokens_per_step / settings.length
    )
    step_flops, step_memory = (
        cost.count_product_flops(tokens_per_step) + attention_flops,
        memory_fit.memory,
    )
    attention_share = attention_flops / step_flops
    flops_text = f"{step_flops:.3e} with dense attention, which is {attention_share:.0%} of them"
    if cost.unknown_flops_reason:
        flops_text = f"unknown: {cost.unknown_flops_reason}"
    memory_phrases = [
        f"{memory_use} {memory_use_bytes / cost_model.GIB:.2f}"
        for memory_use, memory_use_bytes in zip(MEMORY_USES, step_memory, strict=True)
    ]
    replica_phrase = "each" if settings.cp == 1 else f"for every {settings.cp} processes"
    return "\n".join(
        [
            json.dumps(asdict(settings), indent=2),
            f"parameters: {cost.num_parameters:,}, trained: {cost.num_trained_parameters:,}",
            f"step: {tokens_per_step:,} tokens in {num_processes} processes, {num_micro_batches} "
            f"micro batches {replica_phrase}",
            f"FLOPs per step: {flops_text}",
            f"estimated memory per process: {step_memory.device_bytes / cost_model.GIB:.2f} GiB "
            f"({', '.join(memory_phrases[:4])}); on its host: "
            f"{step_memory.host_bytes / cost_model.GIB:.2f} GiB ({', '.join(memory_phrases[4:])})",
            format_offloading(settings, memory_fit),
            f"{'fits into' if available_memory.can_hold(step_memory) else 'does not fit into'} "
            f"{available_memory.device_bytes / cost_model.GIB:.1f} GiB",
        ]
    )


def get_available_memory(settings: Settings, device: torch.device) -> cost_model.AvailableMemory:
    """Return the memory of this machine, or the memory in ``--gpu-gib`` and ``--host-gib``."""
    host_memory_bytes = cost_model.get_host_bytes(settings.host_gib)
    device_memory_bytes = settings.gpu_gib * cost_model.GIB
    if not device_memory_bytes and device.type == "cuda":
        device_memory_bytes = torch.cuda.get_device_properties(device).total_memory
    # without a GPU the host is the device
    return cost_model.AvailableMemory(
        device_memory_bytes or host_memory_bytes, host_memory_bytes if device_memory_bytes else 0
    )


def choose_offloading(
    settings: Settings,
    cost: cost_model.Cost,
    sharding_arguments: ShardingArguments,
    available_memory: cost_model.AvailableMemory,
    length: int = 0,
) -> cost_model.MemoryFit:
    """Return the result of `cost_model.choose_offloading` for the settings of a run.

    Args:
        settings: the settings of the run.
        cost: the cost of the model with its adapter.
        sharding_arguments: the result of `make_sharding_arguments`.
        available_memory: available memory of a process.
        length: tokens of a sequence; 0: the length in the settings.
    """
    length, num_rows, plan_bytes = length or settings.length, settings.micro_batch, 0.0
    if (
        settings.attention in SPARSE_IMPLEMENTATIONS
        and settings.checkpointing
        and available_memory.host_bytes
    ):
        cab_config = cab_config_of(cost.config, settings.attention).changed(
            **settings.get_cab_fields()
        )
        plan_bytes = cost_model.estimate_plan_bytes(
            cost, cab_config, length=length, num_rows=num_rows, cp=settings.cp
        )
    return cost_model.choose_offloading(
        cost=cost,
        num_tokens=length * num_rows,
        available_memory=available_memory,
        # on a CPU, offloading saves no memory
        num_offloaded_layers=settings.offload_layers if available_memory.host_bytes else 0,
        # the dtype of weights: norms and residual sums are float32 if all weights are trained
        itemsize=getattr(torch, settings.weights_dtype).itemsize,
        has_checkpointing=settings.checkpointing,
        **sharding_arguments,
        cp=settings.cp,
        loss_chunk_tokens=LOGITS_PER_CHUNK // cost.config.vocab_size,
        # `cost` counts 4-bit weights correctly only if the model is loaded
        bytes_per_quantised_weight=BYTES_PER_4_BIT_WEIGHT
        if settings.qlora and settings.dry_run
        else None,
        tile_tokens=choose_tile_tokens(length * num_rows // settings.cp, settings.tile_tokens),
        plan_bytes=plan_bytes,
        has_short_documents=settings.attention in SPARSE_IMPLEMENTATIONS,
        # transformers passes a mask of all pairs to SDPA for packed documents
        num_mask_pairs=num_rows * length**2 if settings.attention == "sdpa" else 0,
        mask_itemsize=getattr(torch, settings.dtype).itemsize,
    )


def format_offloading(settings: Settings, memory_fit: cost_model.MemoryFit) -> str:
    """Return the line of the report about the bytes and seconds of copies between host and GPU."""
    if not memory_fit.num_offloaded_layers:
        return "offloaded: no checkpoints"
    copied_bytes, link_gb_per_second = (
        2 * memory_fit.memory.offloaded_checkpoint_bytes,
        settings.link_gbs,
    )
    return (
        f"offloaded: checkpoints of the first {memory_fit.num_offloaded_layers} layers; each "
        "micro batch "
        f"copies {copied_bytes / cost_model.GIB:.1f} GiB out and back in "
        f"{copied_bytes / link_gb_per_second / 1e9:.1f} s at {link_gb_per_second:g} GB/s, while "
        "it computes"
    )


def refuse_too_long_sequences(
    settings: Settings,
    cost: cost_model.Cost,
    sharding_arguments: ShardingArguments,
    available_memory: cost_model.AvailableMemory,
    memory_fit: cost_model.MemoryFit,
) -> None:
    """Raise a UsageError if a step does not fit into memory.

    The message contains the longest length that fits.

    Args:
        settings, cost, sharding_arguments, available_memory: as in `choose_offloading`.
        memory_fit: the result of `choose_offloading`.
    """
    if available_memory.can_hold(memory_fit.memory):
        return
    length_step_tokens = LENGTH_STEP_TOKENS * settings.cp

    def fits_into_memory(length: int) -> bool:
        shorter_fit = choose_offloading(
            settings=settings,
            cost=cost,
            sharding_arguments=sharding_arguments,
            available_memory=available_memory,
            length=length,
        )
        return available_memory.can_hold(shorter_fit.memory)

    # no bisection: memory is not monotonic in the length, because MLPs compute in tiles above
    # `MAX_UNTILED_TOKENS` tokens
    shorter_lengths = range(
        (settings.length - 1) // length_step_tokens * length_step_tokens, 0, -length_step_tokens
    )
    longest_fitting_length = next(filter(fits_into_memory, shorter_lengths), None)
    longest_phrase = (
        "no length fits"
        if longest_fitting_length is None
        else f"the longest length that fits is {longest_fitting_length}"
    )
    raise UsageError(
        "length must be small enough for a step in "
        f"{available_memory.device_bytes / cost_model.GIB:.1f} GiB of a device and "
        f"{available_memory.host_bytes / cost_model.GIB:.1f} GiB of the host, got "
        f"{settings.length}; {longest_phrase}. Change {MEMORY_SAVING_OPTIONS}. A run with a "
        "number for "
        "--offload-layers skips the estimate."
    )


def print_report(settings: Settings, accelerator: Accelerator) -> None:
    """Print the settings and the cost of a step; raise a UsageError if the step does not fit."""
    num_processes, sharding_arguments = (
        accelerator.num_processes,
        make_sharding_arguments(accelerator),
    )
    settings.count_micro_batches(num_processes)
    # check sources that need no network
    source_shares = [*settings.parse_sources(), *settings.parse_sources("validation")]
    open_sources(
        settings,
        [
            (source_name, share)
            for source_name, share in source_shares
            if is_local_source(source_name)
        ],
    )
    model = make_trainable(settings, build_skeleton(settings))
    cost, available_memory = (
        cost_model.Cost.from_model(model),
        get_available_memory(settings, accelerator.device),
    )
    memory_fit = choose_offloading(
        settings=settings,
        cost=cost,
        sharding_arguments=sharding_arguments,
        available_memory=available_memory,
    )
    if accelerator.is_main_process:
        report_text = format_report(
            settings=settings,
            cost=cost,
            num_processes=num_processes,
            memory_fit=memory_fit,
            available_memory=available_memory,
        )
        print(report_text)
    refuse_too_long_sequences(
        settings=settings,
        cost=cost,
        sharding_arguments=sharding_arguments,
        available_memory=available_memory,
        memory_fit=memory_fit,
    )


def make_sharding_arguments(accelerator: Accelerator) -> dict[str, Any]:
    """Return the arguments ``num_shards`` and ``are_weights_on_host`` of
    `cost_model.estimate_memory`.

    The dict is empty without FSDP; the defaults of `cost_model.estimate_memory` then apply.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    are_weights_on_host = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    return {"num_shards": accelerator.num_processes, "are_weights_on_host": are_weights_on_host}
