"""Compile every kernel as its launcher does, for a GPU that this machine does not have.

Triton's interpreter runs kernels that its compiler rejects: names that change their type, tiles
that exceed shared memory. Run as a script, in an environment of its own: whether kernels are
interpreted, and which GPU they are chosen for, is fixed at import.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from cab_hf import CabConfig
from cab_hf.hf.rotary import llama_channels
from cab_hf.ops import pairs
from cab_hf.ops.attention import block, flash, merge
from cab_hf.ops.decode import kernels
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, frc
from cab_hf.selection import QuantizedKeys, api
from cab_hf.selection.reference import ScoreOptions

# a compute capability, or AMD's name of a GPU
CHIP = sys.argv[1]
NVIDIA = CHIP[0].isdigit()
LENGTH, HEADS, KV_HEADS = 1024, 4, 2


class NoDevice:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self):
        if NVIDIA:
            return GPUTarget("cuda", int(CHIP.replace(".", "")), 32)
        return GPUTarget("hip", CHIP, 64)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def drawn(dtype, dim, queries=LENGTH, keys=LENGTH):
    """Return q and k of zeros, and their ranges."""
    q, k = (
        torch.zeros(1, heads, length, dim, dtype=dtype)
        for heads, length in ((HEADS, queries), (KV_HEADS, keys))
    )
    return q, k, KeyRanges.causal(1, queries, keys, "cpu")


def choose(config, dtype, dim, lengths=((LENGTH, LENGTH),), softcap=None):
    """Launch the selection kernels of "rows" and the pair count; with sinks if capped."""
    logits = {"sinks": torch.zeros(HEADS) if softcap else None, "softcap": softcap}
    channels = llama_channels(dim)
    for sizes in lengths:
        q, k, ranges = drawn(dtype, dim, *sizes)
        keys = QuantizedKeys(*api._quantize(k, channels))
        options = ScoreOptions(1.0, channels, **logits)
        chosen = api._select_by_kernels(q, keys, ranges=ranges, config=config, options=options)
    tail = ranges.tail_rows(config.query_block, config.query_block)
    plan = BlockPlan(*chosen, ranges, config.query_block, config.key_block, dense_rows=tail)
    pairs.add_pairs(plan)
    pairs.add_pairs(replace(plan, dense_rows=None, sampled=plan.full))


def choose_by_frc(config, dtype, dim, lengths=((LENGTH, LENGTH),)):
    """Launch the kernels of predictor "frc"."""
    frc.has_kernels = lambda x: True
    for sizes in lengths:
        q, k, ranges = drawn(dtype, dim, *sizes)
        frc.FrcPredictor(config)(q, k, LayerContext(ranges, 1.0, 0))


def decode(config, dtype, dim):
    """Launch a sparse decode step and a dense one."""
    q, k, ranges = drawn(dtype, dim)
    channels, q = llama_channels(dim), q[:, :, :1]
    index = kernels.index_keys(k, channels)
    numbers = torch.tensor([LENGTH]), torch.tensor([128], dtype=torch.int32)
    choice = kernels.choose(q, index, 1.0, *numbers, channels, ranges.key_valid)
    kernels.attend(q, k, k, choice, 1.0, numbers[0], ranges.key_valid)
    kernels.attend(q, k, k, choice.for_layer(k.device), 1.0)
    sinks = torch.zeros(HEADS)
    kernels.choose(q, index, 1.0, *numbers, channels, sinks=sinks)
    kernels.attend(q, k, k, choice.for_layer(k.device), 1.0, sinks=sinks)


def attend(config, dtype, dim, softcap=None):
    """Launch attention under a plan, its backward pass, and the kernels around an engine."""
    q, k, ranges = drawn(dtype, dim)
    plan = BlockPlan.causal(ranges, HEADS, config.query_block, config.key_block)
    plan_arguments = block.op_arguments(plan, 1.0, softcap)
    out, lse = block.forward_op(q, k, k, **plan_arguments)
    block.backward_op(
        grad=torch.zeros_like(q),
        grad_lse=lse,
        q=q,
        k=k,
        v=k,
        out=out,
        lse=lse,
        **plan_arguments,
    )
    some = torch.arange(128)[None]
    merge.write_merged(q, lse, q[:, :, :256], lse[:, :, :256], some, some >= 0)
    merge.share_with_sinks(out, lse, torch.zeros(HEADS))
    flash._blank(out, lse, ranges.end)


def record():
    """Return lists, by name, of the kernels launched from now on; none of them runs."""
    driver.set_active(NoDevice())
    run, result = jit.JITFunction.run, {}

    def compile_only(self, *arguments, grid, warmup=False, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        result.setdefault(self.fn.__name__, {})[kernel.hash] = kernel
        return kernel

    jit.JITFunction.run = compile_only
    return result


def stack(kernel):
    """Return the bytes of register spills per thread."""
    if not NVIDIA:
        return int(re.search(r"private_segment_fixed_size: *(\d+)", kernel.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", said)[1])


if __name__ == "__main__":
    launched = record()
    for what, settings, dtype, *given in json.loads(sys.argv[2]):
        globals()[what](CabConfig(**settings), getattr(torch, dtype), *given)
    seen = {name: list(each.values()) for name, each in launched.items()}
    # of all kernels of a name: how many, and the most shared memory and stack
    print(
        json.dumps(
            {
                name: (len(each), max(x.metadata.shared for x in each), max(map(stack, each)))
                for name, each in seen.items()
            }
        )
    )
