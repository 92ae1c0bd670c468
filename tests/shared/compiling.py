"""Compile the kernels of choosing and of decode for Hopper, on a machine without a GPU.

Triton's interpreter runs what its compiler refuses: names that change their type, tiles that no
multiprocessor has room for. Run as a script: whether kernels are interpreted is fixed at import.
"""

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from cab_hf import CabConfig
from cab_hf.hf.rotary import llama_channels
from cab_hf.ops import launch, lists, pairs, rows
from cab_hf.ops.attention import merge
from cab_hf.ops.decode import attend_kernels, choose_kernels, index_kernel, kernels
from cab_hf.plan import BlockPlan, Spans
from cab_hf.predictors import LayerContext, frc

LENGTH, HEADS, KV_HEADS = 1024, 4, 2
# (queries, keys) whose numbers of query blocks, key blocks and rows Triton would tell apart: 1,
# multiples of 16, and others
CHUNKS = [(2048, 4096), (1920, 4000), (128, 4032), (160, 2500)]


class NoDevice:
    """What Triton asks of a driver to compile for compute capability 9.0."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def compiled(config, dtype, dim, eight_bits):
    """Names of the kernels of choosing and of decode -> bytes of shared memory that each takes."""
    result = record(dtype, eight_bits)
    channels, spans = llama_channels(dim), Spans.causal(1, LENGTH, LENGTH, "cpu")
    q, k = (torch.zeros(1, heads, LENGTH, dim, dtype=dtype) for heads in (HEADS, KV_HEADS))
    chosen = choose(q, k, spans, config, channels)
    sinks = torch.zeros(HEADS)
    choose(q, k, spans, config, channels, sinks, 30.0)
    tail = spans.tail_rows(config.query_block, config.query_block)
    plan = BlockPlan(*chosen, spans, config.query_block, config.key_block, dense_rows=tail)
    pairs.add_pairs(plan)
    pairs.add_pairs(replace(plan, dense_rows=None, sampled=plan.full))
    sums, some = torch.zeros(1, HEADS, 2 * 128), torch.arange(128)[None]
    merge.write_merged(q, sums, q[:, :, :256], sums, some, some >= 0)
    for module in (attend_kernels, choose_kernels, index_kernel):
        module.on_device_of = lambda x: nullcontext()
    launch.packed, launch.early = lambda x: True, lambda x: {"EARLY": True}
    index = kernels.index_keys(k, channels)
    numbers = torch.tensor([LENGTH]), torch.tensor([128], dtype=torch.int32)
    choice = kernels.choose(q[:, :, :1], index, 1.0, *numbers, channels, spans.key_valid)
    kernels.attend(q[:, :, :1], k, k, choice, 1.0, numbers[0], spans.key_valid)
    kernels.attend(q[:, :, :1], k, k, choice.elsewhere(k.device), 1.0)
    kernels.choose(q[:, :, :1], index, 1.0, *numbers, channels, sinks=sinks)
    kernels.attend(q[:, :, :1], k, k, choice.elsewhere(k.device), 1.0, sinks=sinks)
    return {name: max(each.metadata.shared for each in all_of) for name, all_of in result.items()}


def compiled_for_lengths(config, dtype, dim, eight_bits):
    """Names of the kernels of choosing -> how often each is compiled for `CHUNKS`."""
    result, channels = record(dtype, eight_bits), llama_channels(dim)
    for queries, keys in CHUNKS:
        q, k = torch.zeros(1, HEADS, queries, dim), torch.zeros(1, KV_HEADS, keys, dim)
        q, k, spans = q.to(dtype), k.to(dtype), Spans.causal(1, queries, keys, "cpu")
        choose(q, k, spans, config, channels)
    return {name: len(all_of) for name, all_of in result.items()}


def choose(q, k, spans, config, channels, *logits):
    """(full, partial) lists, by the kernels that choose by rows."""
    keys = lists.keys_of(k, channels)
    exponents = keys[1] if len(keys) > 1 else None
    return lists.choose(q, keys[0], exponents, spans, 1.0, channels, config, *logits)


def frc_compiled(config, dtype, dim, eight_bits):
    """Names of the kernels of predictor "frc" -> (bytes of shared memory, how often compiled)."""
    result = record(dtype, eight_bits)
    frc.has_kernels = lambda x: True
    for queries, keys in CHUNKS:
        q, k = torch.zeros(1, HEADS, queries, dim), torch.zeros(1, KV_HEADS, keys, dim)
        call = LayerContext(Spans.causal(1, queries, keys, "cpu"), 1.0, 0)
        frc.FrcPredictor(config)(q.to(dtype), k.to(dtype), call)
    shared = {name: max(x.metadata.shared for x in all_of) for name, all_of in result.items()}
    return {name: (most, len(result[name])) for name, most in shared.items()}


def record(dtype, eight_bits):
    """A dict that gets the kernels, by name, that are launched from now on, of which none runs."""
    driver.set_active(NoDevice())
    run, result = jit.JITFunction.run, {}

    def compile_only(self, *arguments, grid, warmup=False, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        result.setdefault(self.fn.__name__, set()).add(kernel)
        return kernel

    jit.JITFunction.run = compile_only
    scored = rows.FP8 if eight_bits else dtype
    rows.scored_dtype = lambda x: scored
    return result


if __name__ == "__main__":
    what, (settings, dtype, dim, eight_bits) = sys.argv[1], json.loads(sys.argv[2])
    given = CabConfig(**settings), getattr(torch, dtype), dim, eight_bits
    ways = {"once": compiled, "lengths": compiled_for_lengths, "frc": frc_compiled}
    print(json.dumps(ways[what](*given)))
