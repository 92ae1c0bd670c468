"""Check that every kernel compiles for untested GPUs and fits into their shared memory."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# maximum shared memory per program, in KiB, by compute capability or AMD's GPU name
SHARED_MEMORY_KIB = {
    **{"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99},
    "gfx942": 64,
}
# maximum stack per thread, in bytes, to which registers are spilled
# most kernels: 128 bytes are 32 spilled registers, in addition to 255 registers
MAX_STACK_BYTES = 128
# the 8-bit scoring kernel: has fewer registers, because three programs share a multiprocessor
MAX_SCORE_STACK_BYTES = 384
# all kernels on compute capability 10.0, whose tile sizes are those of 9.0
MAX_BLACKWELL_STACK_BYTES = 768
FRC_FIELDS = {"predictor": "frc", "query_block": 64, "curvature": "forman"}
# (name of a function of `COMPILE_SCRIPT`, fields of CabConfig, dtype, head dim)
DEFAULT_CASES = [("launch_selection", {}, "bfloat16", 128), ("launch_decode", {}, "bfloat16", 128)]
CASES = [
    *DEFAULT_CASES,
    ("launch_selection", {"max_density": 0.1}, "bfloat16", 64),
    ("launch_frc", FRC_FIELDS, "bfloat16", 128),
    ("launch_decode", {}, "float16", 80),
    *(("launch_attention", {}, "bfloat16", dim) for dim in (64, 80, 96, 128, 192, 256, 512)),
]
# cases for which only shared memory is checked, because most of these kernels spill registers
SHARED_MEMORY_CASES = [
    (
        "launch_selection",
        {"query_block": 64, "key_block": 128, "outlier_queries": 0},
        "float16",
        256,
    ),
    ("launch_selection", {}, "float32", 256),
    ("launch_frc", FRC_FIELDS, "float32", 256),
    ("launch_decode", {}, "float32", 256),
    ("launch_attention", {}, "float32", 64),
    ("launch_selection", {}, "bfloat16", 128, [[1024, 1024]], 30.0),
    *(("launch_attention", {}, "bfloat16", dim, 30.0) for dim in (128, 256, 512)),
]
# (queries, keys): Triton specialises on integers that are 1 or multiples of 16, so block counts
# and rows cover 1, multiples of 16 and other numbers
QUERY_AND_KEY_LENGTHS = [(2048, 4096), (1920, 4000), (128, 4032), (160, 2500)]
COMPILE_SCRIPT = ROOT / "tests" / "shared" / "compiling.py"


def compile_cases(chip, cases):
    """Compile the kernels of ``cases`` for a GPU in a new process that runs `COMPILE_SCRIPT`.

    Returns:
        {kernel name: (number of compilations, largest shared memory in bytes, stack in bytes)}.
    """
    capability = chip if chip[0].isdigit() else "0.0"
    environment = {"CAB_HF_CAPABILITY": capability, "TRITON_INTERPRET": "0"}
    process = subprocess.run(
        [sys.executable, COMPILE_SCRIPT, chip, json.dumps(cases)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def require_shared_memory_fits(chip, kernel_sizes):
    """Assert that the shared memory of every kernel is within the limit of the chip."""
    max_bytes = SHARED_MEMORY_KIB[chip] << 10
    assert not {
        kernel_name: shared_bytes
        for kernel_name, (_, shared_bytes, _) in kernel_sizes.items()
        if shared_bytes > max_bytes
    }


def require_small_stacks(chip, kernel_sizes):
    """Assert that the stack of every kernel, to which registers are spilled, is within limits."""
    default_max_bytes = MAX_BLACKWELL_STACK_BYTES if chip == "10.0" else MAX_STACK_BYTES
    max_bytes_by_kernel = {"_score_kernel": max(default_max_bytes, MAX_SCORE_STACK_BYTES)}
    stack_bytes_by_kernel = {
        kernel_name: stack_bytes for kernel_name, (_, _, stack_bytes) in kernel_sizes.items()
    }
    assert not {
        kernel_name: stack_bytes
        for kernel_name, stack_bytes in stack_bytes_by_kernel.items()
        if stack_bytes > max_bytes_by_kernel.get(kernel_name, default_max_bytes)
    }


def test_selection_and_decode_compile_for_hopper():
    kernel_sizes = compile_cases("9.0", DEFAULT_CASES)
    require_shared_memory_fits("9.0", kernel_sizes)
    require_small_stacks("9.0", kernel_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_MEMORY_KIB)
def test_every_kernel_compiles_and_fits_into_shared_memory(chip):
    kernel_sizes = compile_cases(chip, CASES)
    sources = [path.read_text() for path in (ROOT / "cab_hf").rglob("*.py")]
    kernel_names = {
        kernel_name
        for source in sources
        for kernel_name in re.findall(r"^def (\w+_kernel)\(", source, re.M)
    }
    assert kernel_sizes.keys() == kernel_names
    require_shared_memory_fits(chip, kernel_sizes)
    require_small_stacks(chip, kernel_sizes)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["8.6", "9.0", "gfx942"])
def test_large_head_dims_and_soft_caps_fit_into_shared_memory(chip):
    require_shared_memory_fits(chip, compile_cases(chip, SHARED_MEMORY_CASES))


def test_lengths_do_not_recompile_kernels():
    kernel_sizes = compile_cases(
        "9.0", [("launch_selection", {}, "bfloat16", 128, QUERY_AND_KEY_LENGTHS)]
    )
    compilation_counts = {
        kernel_name: num_compilations
        for kernel_name, (num_compilations, *_) in kernel_sizes.items()
    }
    # two compilations: for outlier and typical queries, or for plans with and without dense rows
    for kernel_name in ("_gather_queries_kernel", "_score_kernel", "_pairs_kernel"):
        assert compilation_counts.pop(kernel_name) <= 2
    assert set(compilation_counts.values()) == {1}, compilation_counts


def test_frc_compiles_for_few_and_many_columns():
    kernel_sizes = compile_cases(
        "9.0", [("launch_frc", FRC_FIELDS, "bfloat16", 128, QUERY_AND_KEY_LENGTHS)]
    )
    assert kernel_sizes.keys() == {"_largest_norm_tokens_kernel", "_select_kernel"}
    require_shared_memory_fits("9.0", kernel_sizes)
    assert (
        kernel_sizes["_largest_norm_tokens_kernel"][0] <= 2
        and kernel_sizes["_select_kernel"][0] <= 3
    )
