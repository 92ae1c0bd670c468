"""Estimates of the FLOPs and the memory of a run, without its weights, and of whether it fits."""

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

# 4 bits and the scales of NF4 with double quantisation
FOUR_BIT_BYTES = 0.52
# ``shards`` and ``weights_on_host`` of `cost_model.memory`
Spread = Mapping[str, Any]
# the longest length is a multiple of it
STEP = 2**10
# options that save memory, the cheapest first
SAVINGS = "--micro-batch, --checkpointing, --tile-tokens, --qlora, --cp or --length"


def skeleton(settings: Settings) -> nn.Module:
    """Build the `runs.models.skeleton` of the model to train; errors as for `models.load_model`."""
    trusted = settings.trust_remote_code
    config = run_models.load_config(settings.model, trusted)
    stretch_positions(config, settings.model, **settings.positions())
    how = {"attn_implementation": settings.attention, "dtype": settings.dtype}
    return run_models.skeleton(config, trusted, **how)


def report(
    settings: Settings,
    cost: cost_model.Cost,
    processes: int,
    fitted: cost_model.Fit,
    room: cost_model.Room,
) -> str:
    """Return the text of `--dry-run` for a model with its adapter, trained by ``processes``."""
    replicas, accumulation = settings.replicas(processes), settings.accumulation(processes)
    tokens = replicas * settings.length * settings.micro_batch * accumulation
    # one document per sequence has the most pairs
    pairs = cost.pairs(torch.arange(settings.length)[None])
    attention = sum(cost.attention(pairs)) * tokens / settings.length
    flops, needed = cost.products(tokens) + attention, fitted.memory
    flops_note = f"{flops:.3e} with dense attention, which is {attention / flops:.0%} of them"
    parts = [f"{name} {x / cost_model.GIB:.2f}" for name, x in needed._asdict().items()]
    each = "each" if settings.cp == 1 else f"for every {settings.cp} processes"
    return "\n".join(
        [
            json.dumps(asdict(settings), indent=2),
            f"parameters: {cost.parameters:,}, trained: {cost.trained_parameters:,}",
            f"step: {tokens:,} tokens in {processes} processes, {accumulation} micro batches "
            + each,
            f"FLOPs per step: {f'unknown: {cost.uncounted}' if cost.uncounted else flops_note}",
            f"estimated memory per process: {needed.total / cost_model.GIB:.2f} GiB "
            f"({', '.join(parts[:4])}); on its host: {needed.host / cost_model.GIB:.2f} GiB "
            f"({', '.join(parts[4:])})",
            transfer(settings, fitted),
            f"{'fits into' if room.holds(needed) else 'does not fit into'} "
            f"{room.device / cost_model.GIB:.1f} GiB",
        ]
    )


def room_of(settings: Settings, device: torch.device) -> cost_model.Room:
    """Return the available memory, or the memory that the settings give."""
    host, given = cost_model.host_bytes(settings.host_gib), settings.gpu_gib * cost_model.GIB
    if not given and device.type == "cuda":
        given = torch.cuda.get_device_properties(device).total_memory
    # without a GPU the model is on the host
    return cost_model.Room(given, host) if given else cost_model.Room(host, 0)


def fit(
    settings: Settings,
    cost: cost_model.Cost,
    spread: Spread,
    room: cost_model.Room,
    length: int = 0,
) -> cost_model.Fit:
    """Return the `cost_model.fit` of these settings, or of another ``length`` of a sequence."""
    length, rows, plans = length or settings.length, settings.micro_batch, 0.0
    if settings.attention in SPARSE and settings.checkpointing and room.host:
        config = cab_config_of(cost.config, settings.attention).changed(**settings.cab_config())
        plans = cost_model.plan_bytes(cost, config, length, rows, settings.cp)
    return cost_model.fit(
        cost,
        length * rows,
        room,
        # on a CPU checkpoints and plans share the memory of the model
        settings.offload_layers if room.host else 0,
        # if all weights are trained, norms and sums of layers are float32
        itemsize=getattr(torch, settings.weights_dtype).itemsize,
        checkpointing=settings.checkpointing,
        **spread,
        cp=settings.cp,
        loss_tokens=CHUNK_LOGITS // cost.config.vocab_size,
        # the weights of a loaded model are in 4 bits already
        quantised=FOUR_BIT_BYTES if settings.qlora and settings.dry_run else None,
        tile=tile_of(length * rows // settings.cp, settings.tile_tokens),
        plans=plans,
        short_texts=settings.attention in SPARSE,
        # transformers passes a mask of all pairs to SDPA for packed documents
        mask_pairs=rows * length**2 if settings.attention == "sdpa" else 0,
        mask_itemsize=getattr(torch, settings.dtype).itemsize,
    )


def transfer(settings: Settings, fitted: cost_model.Fit) -> str:
    """Return a line about the copies between host and GPU per micro batch, and their time."""
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
    """Raise a UsageError with the longest length that fits if a step does not fit."""
    if room.holds(fitted.memory):
        return
    step = STEP * settings.cp
    lengths = range((settings.length - 1) // step * step, 0, -step)
    # one by one: where tiles start, a longer sequence needs less memory than a shorter one
    fitting = (n for n in lengths if room.holds(fit(settings, cost, spread, room, n).memory))
    most = next(fitting, None)
    longest = "no length fits" if most is None else f"the longest length that fits is {most}"
    raise UsageError(
        f"length must be small enough for a step in {room.device / cost_model.GIB:.1f} GiB of a "
        f"device and {room.host / cost_model.GIB:.1f} GiB of the host, got "
        f"{settings.length}; {longest}. Change {SAVINGS}. A run with a number for "
        "--offload-layers skips the estimate."
    )


def print_report(settings: Settings, accelerator: Accelerator) -> None:
    """Print the settings, the cost of a step and whether it fits."""
    processes, spread = accelerator.num_processes, spread_of(accelerator)
    settings.accumulation(processes)
    # sources that need a network are not opened for an estimate
    named = [*settings.sources(), *settings.sources("validation")]
    open_sources(settings, [each for each in named if is_local(each[0])])
    model = adapted(settings, skeleton(settings))
    cost, room = cost_model.Cost.of(model), room_of(settings, accelerator.device)
    fitted = fit(settings, cost, spread, room)
    if accelerator.is_main_process:
        print(report(settings, cost, processes, fitted, room))
    refuse_too_long(settings, cost, spread, room, fitted)


def spread_of(accelerator: Accelerator) -> dict[str, Any]:
    """Return where accelerate puts the weights, for `fit`."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return {}
    offloaded = isinstance(accelerator.state.fsdp_plugin.cpu_offload, CPUOffloadPolicy)
    return {"shards": accelerator.num_processes, "weights_on_host": offloaded}
