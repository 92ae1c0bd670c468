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
from cab_hf.budgets import budgets_of
from cab_hf.ops import exact_scores, pairs, predict
from cab_hf.ops.attention import merge
from cab_hf.ops.decode import attend_kernels, choose_kernels, index_kernel, kernels, launch
from cab_hf.plan import BlockPlan, Spans
from cab_hf.rotary import llama_channels

LENGTH, HEADS, KV_HEADS = 1024, 4, 2


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
    driver.set_active(NoDevice())
    run, result = jit.JITFunction.run, {}

    def compile_only(self, *arguments, grid, warmup=False, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        result[self.fn.__name__] = kernel.metadata.shared
        return kernel

    jit.JITFunction.run = compile_only
    scored = exact_scores.FP8 if eight_bits else dtype
    predict.scored_dtype = lambda x: scored
    channels, spans = llama_channels(dim), Spans.causal(1, LENGTH, LENGTH, "cpu")
    q, k = (torch.zeros(1, heads, LENGTH, dim, dtype=dtype) for heads in (HEADS, KV_HEADS))
    summary = predict.summarise(k, spans.key_valid, config, channels)
    budgets = budgets_of(config, 0, HEADS)
    lists = predict.choose(q, summary, spans, 1.0, config, budgets, channels)
    rows = spans.tail_rows(config.query_block, config.query_block)
    plan = BlockPlan(*lists, spans, config.query_block, config.key_block, (1,), rows)
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
    return result


if __name__ == "__main__":
    settings, dtype, dim, eight_bits = json.loads(sys.argv[1])
    print(json.dumps(compiled(CabConfig(**settings), getattr(torch, dtype), dim, eight_bits)))
