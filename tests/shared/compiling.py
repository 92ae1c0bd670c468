"""Compile all kernels for a GPU that this machine does not have, without running them.

Triton's interpreter runs kernels that its compiler rejects, for example because a variable changes
its type or tiles exceed shared memory. This module is a script for a new process, because Triton
reads TRITON_INTERPRET at import.

Usage: ``compiling.py CHIP LAUNCHES``. LAUNCHES is JSON: a list of [function of this module, fields
of CabConfig, dtype, further arguments].
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
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.ops import pairs
from cab_hf.ops.attention import block, flash, merge
from cab_hf.ops.decode import kernels
from cab_hf.plan import BlockPlan, KeyRanges
from cab_hf.predictors import LayerContext, frc
from cab_hf.selection import QuantizedKeys, api
from cab_hf.selection.reference import ScoreOptions

# compute capability of an NVIDIA GPU, such as 9.0, or architecture of an AMD GPU, such as gfx942
CHIP = sys.argv[1]
IS_NVIDIA = CHIP[0].isdigit()
SEQUENCE_LENGTH, NUM_HEADS, NUM_KV_HEADS = 1024, 4, 2


class AbsentGpuDriver:
    """Triton driver of a GPU that is not present, with the methods that compilation calls."""

    def get_current_target(self):
        if IS_NVIDIA:
            return GPUTarget("cuda", int(CHIP.replace(".", "")), 32)
        return GPUTarget("hip", CHIP, 64)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=0):
        return 0


def make_zero_qk_and_ranges(dtype, dim, num_queries=SEQUENCE_LENGTH, num_keys=SEQUENCE_LENGTH):
    """Return (q, k, `KeyRanges`): zeros [B, H, N, D] and the ranges of causal attention."""
    q, k = (
        torch.zeros(1, num_heads, length, dim, dtype=dtype)
        for num_heads, length in ((NUM_HEADS, num_queries), (NUM_KV_HEADS, num_keys))
    )
    return q, k, KeyRanges.causal(1, num_queries, num_keys, "cpu")


def launch_selection(
    config, dtype, dim, launch_sizes=((SEQUENCE_LENGTH, SEQUENCE_LENGTH),), softcap=None
):
    """Launch the selection kernels of predictor "rows" and the kernel that counts pairs.

    ``launch_sizes`` lists (number of queries, number of keys) of each launch. With ``softcap``,
    heads also have sinks.
    """
    logit_options = {"sinks": torch.zeros(NUM_HEADS) if softcap else None, "softcap": softcap}
    channels = slow_channels_of_llama(dim)
    score_options = ScoreOptions(1.0, channels, **logit_options)
    for num_queries, num_keys in launch_sizes:
        q, k, ranges = make_zero_qk_and_ranges(dtype, dim, num_queries, num_keys)
        quantized_values, key_scale_exponents = api._quantize_on_gpu(k, channels)
        quantized_keys = QuantizedKeys(quantized_values, key_scale_exponents)
        full_blocks, partial_blocks = api._select_by_kernels(
            q, quantized_keys, key_ranges=ranges, config=config, score_options=score_options
        )
    plan = BlockPlan(
        full=full_blocks,
        partial=partial_blocks,
        ranges=ranges,
        query_block=config.query_block,
        key_block=config.key_block,
        dense_rows=ranges.tail_rows(config.query_block, config.query_block),
    )
    pairs.count_query_key_pairs(plan)
    pairs.count_query_key_pairs(replace(plan, dense_rows=None, sampled=plan.full))


def launch_frc(config, dtype, dim, launch_sizes=((SEQUENCE_LENGTH, SEQUENCE_LENGTH),)):
    """Launch the kernels of predictor "frc"; ``launch_sizes`` as in `launch_selection`."""
    frc.has_kernels = lambda x: True
    for num_queries, num_keys in launch_sizes:
        q, k, ranges = make_zero_qk_and_ranges(dtype, dim, num_queries, num_keys)
        frc.FrcPredictor(config)(q, k, LayerContext(ranges, 1.0, 0))


def launch_decode(config, dtype, dim):
    """Launch the kernels of a sparse and of a dense decode step, without and with sinks."""
    q, k, ranges = make_zero_qk_and_ranges(dtype, dim)
    channels, q = slow_channels_of_llama(dim), q[:, :, :1]
    key_index = kernels.index_keys(k, channels)
    length, num_keys = torch.tensor([SEQUENCE_LENGTH]), torch.tensor([128], dtype=torch.int32)
    choose_arguments = {"scale": 1.0, "length": length, "num_keys": num_keys, "channels": channels}
    selected_keys = kernels.choose(q, key_index, padding_mask=ranges.key_valid, **choose_arguments)
    kernels.attend(q, k, k, selected_keys, scale=1.0, length=length, padding_mask=ranges.key_valid)
    kernels.attend(q, k, k, selected_keys.map_to_layer(k.device), scale=1.0)
    sinks = torch.zeros(NUM_HEADS)
    kernels.choose(q, key_index, sinks=sinks, **choose_arguments)
    kernels.attend(q, k, k, selected_keys.map_to_layer(k.device), scale=1.0, sinks=sinks)


def launch_attention(config, dtype, dim, softcap=None):
    """Launch block attention, its backward pass, and the kernels that merge and mask outputs."""
    q, k, ranges = make_zero_qk_and_ranges(dtype, dim)
    plan = BlockPlan.causal(ranges, NUM_HEADS, config.query_block, config.key_block)
    plan_arguments = block.make_op_arguments(plan, 1.0, softcap)
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
    query_indices = torch.arange(128)[None]
    merge.write_merged(
        out=q,
        lse=lse,
        part_outs=q[:, :, :256],
        part_lses=lse[:, :, :256],
        query_indices=query_indices,
        is_real_query=query_indices >= 0,
    )
    merge.share_with_sinks(out, lse, torch.zeros(NUM_HEADS))
    flash._blank_padding_queries(out, lse, ranges.end)


def record_compilations():
    """Patch Triton, so that a kernel launch compiles the kernel and does not run it.

    Returns:
        {kernel name: {hash: compiled kernel}}, to which each launch adds its kernel.
    """
    driver.set_active(AbsentGpuDriver())
    original_run, compiled_kernels = jit.JITFunction.run, {}

    def compile_only(self, *args, grid, warmup=False, **kwargs):
        kernel = original_run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled_kernels.setdefault(self.fn.__name__, {})[kernel.hash] = kernel
        return kernel

    jit.JITFunction.run = compile_only
    return compiled_kernels


def read_stack_bytes(kernel):
    """Return the stack of a compiled kernel in bytes per thread, to which registers are spilled."""
    if not IS_NVIDIA:
        return int(re.search(r"private_segment_fixed_size: *(\d+)", kernel.asm["amdgcn"])[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin_file:
        cubin_file.write(kernel.asm["cubin"])
        cubin_file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin_file.name]
        usage_report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage_report)[1])


if __name__ == "__main__":
    kernels_by_name = record_compilations()
    for launch_function, config_fields, dtype, *launch_arguments in json.loads(sys.argv[2]):
        globals()[launch_function](
            CabConfig(**config_fields), getattr(torch, dtype), *launch_arguments
        )
    # by kernel name: (number of compilations, largest shared memory, largest stack), in bytes
    usage_by_kernel = {}
    for kernel_name, kernels_by_hash in kernels_by_name.items():
        compiled_kernels = kernels_by_hash.values()
        max_shared_bytes = max(kernel.metadata.shared for kernel in compiled_kernels)
        usage_by_kernel[kernel_name] = (
            len(compiled_kernels),
            max_shared_bytes,
            max(map(read_stack_bytes, compiled_kernels)),
        )
    print(json.dumps(usage_by_kernel))
