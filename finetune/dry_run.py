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

from cab_hf.config import SPARSE
from cab_hf.experiment import models as run_models
from cab_hf.experiment.settings import UsageError
from cab_hf.finetune import cost_model
from cab_hf.finetune.loss import CHUNK_LOGITS
from cab_hf.finetune.models import stretch_positions
from cab_hf.finetune.prepare import adapted, open_sources
from cab_hf.finetune.settings import Settings
from cab_hf.finetune.sources import is_local
from cab_hf.finetune.tiles import tile_of
from cab_hf.hf.model_config import cab_config_of

# bytes per weight of NF4 with double quantisation: 4 bits and the scales
FOUR_BIT_BYTES = 0.52
# keyword arguments ``shards`` and ``weights_on_host`` of `cost_model.memory`
Spread = Mapping[str, Any]
# tokens; the longest length in an error message is a multiple of this number
STEP = 2**10
# options that save memory, the fastest first
SAVINGS = "--micro-batch, --checkpointing, --tile-tokens, --qlora, --cp or --length"


def skeleton(settings: Settings) -> nn.Module:
    """Build the model that ``settings`` name on the meta device, without loading weights.

    Errors are those of `models.load_model`.
    """
    config = run_models.load_config(settings.model, settings.trust_remote_code)
    stretch_positions(config, settings.model, **settings.positions())
    return run_models.skeleton(
        config,
        settings.trust_remote_code,
        attn_implementation=settings.attention,
        dtype=settings.dtype,
    )


def report(
    settings: Settings,
    cost: cost_model.Cost,
    processes: int,
    fitted: cost_model.Fit,
    room: cost_model.Room,
) -> str:
    """Return the text that ``--dry-run`` prints.

    Args:
        settings: the settings of the run.
        cost: the cost of the model with its adapter.
        processes: number of processes.
        fitted: offloaded layers and memory of a step.
        room: available memory of a process.
    """
    replicas, accumulation = settings.replicas(processes), settings.accumulation(processes)
    tokens = replicas * settings.length * settings.micro_batch * accumulation
    # an upper bound: sequences of one document have the most pairs
    pairs = cost.pairs(torch.arange(settings.length)[None])
    attention_flops = sum(cost.attention(pairs)) * tokens / settings.length
    flops, needed = cost.products(tokens) + attention_flops, fitted.memory
    attention_share = attention_flops / flops
    flops_text = f"{flops:.3e} with dense attention, which is {attention_share:.0%} of them"
    sizes = [f"{name} {x / cost_model.GIB:.2f}" for name, x in needed._asdict().items()]
    per_replica = "each" if settings.cp == 1 else f"for every {settings.cp} processes"
    return "\n".join(
        [
            json.dumps(asdict(settings), indent=2),
            f"parameters: {cost.parameters:,}, trained: {cost.trained_parameters:,}",
            f"step: {tokens:,} tokens in {processes} processes, {accumulation} micro batches "
            + per_replica,
            f"FLOPs per step: {f'unknown: {cost.uncounted}' if cost.uncounted else flops_text}",
            f"estimated memory per process: {needed.total / cost_model.GIB:.2f} GiB "
            f"({', '.join(sizes[:4])}); on its host: {needed.host / cost_model.GIB:.2f} GiB "
            f"({', '.join(sizes[4:])})",
            transfer(settings, fitted),
            f"{'fits into' if room.holds(needed) else 'does not fit into'} "
            f"{room.device / cost_model.GIB:.1f} GiB",
        ]
    )


def room_of(settings: Settings, device: torch.device) -> cost_model.Room:
    """Return the memory of this machine, or the memory in ``--gpu-gib`` and ``--host-gib``."""
    host_bytes = cost_model.host_bytes(settings.host_gib)
    device_bytes = settings.gpu_gib * cost_model.GIB
    if not device_bytes and device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(device).total_memory
    # without a GPU the host is the device
    return cost_model.Room(device_bytes or host_bytes, host_bytes if device_bytes else 0)


def fit(
    settings: Settings,
    cost: cost_model.Cost,
    spread: Spread,
    room: cost_model.Room,
    length: int = 0,
) -> cost_model.Fit:
    """Return the result of `cost_model.fit` for the settings of a run.

    Args:
        settings: the settings of the run.
        cost: the cost of the model with its adapter.
        spread: the result of `spread_of`.
        room: available memory of a process.
        length: tokens of a sequence; 0: the length in the settings.
    """
    length, rows, plans = length or settings.length, settings.micro_batch, 0.0
    if settings.attention in SPARSE and settings.checkpointing and room.host:
        config = cab_config_of(cost.config, settings.attention).changed(**settings.cab_config())
        plans = cost_model.plan_bytes(cost, config, length=length, rows=rows, cp=settings.cp)
    return cost_model.fit(
        cost=cost,
        tokens=length * rows,
        room=room,
        # on a CPU, offloading saves no memory
        offloaded=settings.offload_layers if room.host else 0,
        # the dtype of weights: norms and residual sums are float32 if all weights are trained
        itemsize=getattr(torch, settings.weights_dtype).itemsize,
        checkpointing=settings.checkpointing,
        **spread,
        cp=settings.cp,
        loss_tokens=CHUNK_LOGITS // cost.config.vocab_size,
        # `cost` counts 4-bit weights correctly only if the model is loaded
        quantised=FOUR_BIT_BYTES if settings.qlora and settings.dry_run else None,
        tile=tile_of(length * rows // settings.cp, settings.tile_tokens),
        plans=plans,
        short_texts=settings.attention in SPARSE,
        # transformers passes a mask of all pairs to SDPA for packed documents
        mask_pairs=rows * length**2 if settings.attention == "sdpa" else 0,
        mask_itemsize=getattr(torch, settings.dtype).itemsize,
    )


def transfer(settings: Settings, fitted: cost_model.Fit) -> str:
    """Return the line of the report about the bytes and seconds of copies between host and GPU."""
    if not fitted.offloaded:
        return "offloaded: no checkpoints"
    size, speed = 2 * fitted.memory.checkpoints, settings.link_gbs
    return (
        f"offloaded: checkpoints of the first {fitted.offloaded} layers; each micro batch copies "
        f"{size / cost_model.GIB:.1f} GiB out and back in {size / speed / 1e9:.1f} s at {speed:g} "
        "GB/s, while it computes"
    )


def refuse_too_long(
    settings: Settings,
    cost: cost_model.Cost,
    spread: Spread,
    room: cost_model.Room,
    fitted: cost_model.Fit,
) -> None:
    """Raise a UsageError if a step does not fit into memory.

    The message contains the longest length that fits.

    Args:
        settings, cost, spread, room: as in `fit`.
        fitted: the result of `fit`.
    """
    if room.holds(fitted.memory):
        return
    step = STEP * settings.cp

    def fits(length: int) -> bool:
        shorter = fit(settings=settings, cost=cost, spread=spread, room=room, length=length)
        return room.holds(shorter.memory)

    # no bisection: memory is not monotonic in the length, because MLPs compute in tiles above
    # `TILED_ABOVE` tokens
    lengths = range((settings.length - 1) // step * step, 0, -step)
    most = next(filter(fits, lengths), None)
    longest = "no length fits" if most is None else f"the longest length that fits is {most}"
    raise UsageError(
        f"length must be small enough for a step in {room.device / cost_model.GIB:.1f} GiB of a "
        f"device and {room.host / cost_model.GIB:.1f} GiB of the host, got "
        f"{settings.length}; {longest}. Change {SAVINGS}. A run with a number for "
        "--offload-layers skips the estimate."
    )


def print_report(settings: Settings, accelerator: Accelerator) -> None:
    """Print the settings and the cost of a step; raise a UsageError if the step does not fit."""
    processes, spread = accelerator.num_processes, spread_of(accelerator)
    settings.accumulation(processes)
    # check sources that need no network
    pairs = [*settings.sources(), *settings.sources("validation")]
    open_sources(settings, [(name, share) for name, share in pairs if is_local(name)])
    model = adapted(settings, skeleton(settings))
    cost, room = cost_model.Cost.of(model), room_of(settings, accelerator.device)
    fitted = fit(settings=settings, cost=cost, spread=spread, room=room)
    if accelerator.is_main_process:
        text = report(settings=settings, cost=cost, processes=processes, fitted=fitted, room=room)
        print(text)
    refuse_too_long(settings=settings, cost=cost, spread=spread, room=room, fitted=fitted)


def spread_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return the arguments ``shards`` and ``weights_on_host`` of `cost_model.memory`.

    The dict is empty without FSDP; the defaults of `cost_model.memory` then apply.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    offloaded = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    return {"shards": accelerator.num_processes, "weights_on_host": offloaded}
