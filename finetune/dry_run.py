"""What a run would be, without its weights: its FLOPs, its memory, and whether it fits."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cab_hf.finetune import meter
from cab_hf.finetune.loss import CHUNK_LOGITS
from cab_hf.finetune.models import load_model, stretch_positions
from cab_hf.finetune.settings import ACROSS, Settings
from cab_hf.runs.models import TINY, load_config

# 4 bits and the scales of NF4, quantised twice
FOUR_BIT_BYTES = 0.52
# what an allocator and libraries need beside tensors
USABLE = 0.94


def skeleton(settings: Settings) -> nn.Module:
    """The model to be trained with parameters that take no memory; errors as of `load_model`."""
    stretched = settings.positions()
    how = {"attn_implementation": settings.attention, "dtype": settings.dtype}
    if settings.model == TINY:
        return load_model(TINY, **stretched, **how)[0]
    trusted = settings.trust_remote_code
    config = load_config(settings.model, trusted)
    stretch_positions(config, settings.model, *stretched.values())
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=trusted, **how)


def report(
    settings: Settings, model: nn.Module, processes: int, shards: int, device: torch.device
) -> str:
    """What `--dry-run` prints.

    Args:
        model: with its adapter.
        processes: that take part; ``shards`` of them hold the frozen weights together.
    """
    cost = meter.Cost.of(model)
    replicas, accumulation = settings.replicas(processes), settings.accumulation(processes)
    tokens = replicas * settings.length * settings.micro_batch * accumulation
    # one document a sequence: the most pairs there can be
    pairs = cost.pairs(torch.arange(settings.length)[None])
    attention = sum(map(cost.attention, pairs)) * tokens / settings.length
    products = cost.products(tokens)
    needed = memory(settings, cost, shards)
    parts = ", ".join(f"{name} {size / meter.GIB:.2f}" for name, size in asdict(needed).items())
    flops = f"not known: {cost.uncounted}"
    if not cost.uncounted:
        share = attention / (products + attention)
        flops = f"{products + attention:.3e}, with dense attention, which is {share:.0%} of them"
    lines = [
        json.dumps(asdict(settings), indent=2),
        f"parameters: {cost.parameters:,}, {cost.trained_parameters:,} of them trained",
        f"a step: {tokens:,} tokens of {processes} processes, {accumulation} micro batches "
        + ("each" if settings.cp == 1 else f"of each {settings.cp} of them"),
        f"FLOPs of a step: {flops}",
        f"memory of a process, estimated: {needed.total / meter.GIB:.2f} GiB ({parts})",
        verdict(settings, needed, device),
    ]
    return "\n".join(lines)


def memory(settings: Settings, cost: meter.Cost, shards: int) -> meter.Memory:
    """The estimate for these settings."""
    return meter.memory(
        cost,
        settings.length * settings.micro_batch,
        itemsize=2 if settings.dtype == "bfloat16" else 4,
        checkpointing=settings.checkpointing,
        shards=shards,
        cp=settings.cp,
        loss_tokens=CHUNK_LOGITS // cost.config.vocab_size,
        quantised=FOUR_BIT_BYTES if settings.qlora else None,
    )


def capacity(device: torch.device) -> int:
    """Bytes that a process may have: of its GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def verdict(settings: Settings, needed: meter.Memory, device: torch.device) -> str:
    """Whether it fits, and what to change where it does not."""
    has = capacity(device)
    text = f"{has / meter.GIB:.1f} GiB of {'a GPU' if device.type == 'cuda' else 'this machine'}"
    if needed.total <= USABLE * has:
        return f"fits into {text}"
    return f"does not fit into {text}; change, in this order, {savings(settings)}"


def savings(settings: Settings) -> str:
    """Three settings that take less memory, what costs least first."""
    known: list[tuple[Any, str]] = [
        (settings.micro_batch > 1, "--micro-batch 1"),
        (not settings.checkpointing, "--checkpointing true"),
        (settings.embeddings, "--embeddings false"),
        (not settings.qlora, "--qlora (or more GPUs by accelerate's fsdp2 config)"),
        (settings.dtype == "float32", "--dtype bfloat16"),
        (settings.attention in ACROSS, f"--cp {2 * settings.cp} (on as many GPUs)"),
        (True, f"--length {settings.length // 2}"),
        (settings.rank > 8, f"--rank {settings.rank // 2}"),
        (True, "--passkeys 0"),
    ]
    return ", ".join([given for saves, given in known if saves][:3])
