"""The kernels of choosing and of decode compile for Hopper and fit its shared memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow_but

SHARED_MEMORY = 227 << 10  # of a multiprocessor with compute capability 9.0
DECODE = {
    *("_index_kernel", "sample_kernel", "limit_kernel", "_choose_kernel", "_list_kernel"),
    *("_attend_kernel", "_merge_kernel"),
}
SCRIPT = Path(__file__).parents[1] / "shared" / "compiling.py"
ALWAYS = {"_pairs_kernel", "_merge_rows_kernel"}
ROWS = {"_scored_keys_kernel", "_scored_rows_kernel", "_sweep_kernel", "_lists_kernel"}


def compiling(what, *given):
    """What `SCRIPT` prints."""
    ran = subprocess.run(
        [sys.executable, SCRIPT, what, json.dumps(given)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("settings", "dtype", "dim", "eight_bits", "kernels"),
    slow_but(
        [
            pytest.param({}, "bfloat16", 128, True, ROWS, id="rows"),
            pytest.param({}, "float32", 256, False, ROWS, id="rows-float32-256"),
            pytest.param(
                {"max_density": 0.1},
                *("bfloat16", 128, True, ROWS - {"_lists_kernel"} | {"_select_kernel"}),
                id="rows-capped",
            ),
            pytest.param({}, "bfloat16", 80, False, ROWS, id="rows-16-bits"),
            pytest.param(
                {"query_block": 64, "key_block": 128, "exact_queries": 0},
                *("float16", 256, True, ROWS - {"_outliers_kernel"}),
                id="rows-typical-alone",
            ),
        ],
        0,
    ),
)
def test_choosing_compiles_for_hopper(settings, dtype, dim, eight_bits, kernels):
    shared = compiling("once", settings, dtype, dim, eight_bits)
    assert kernels | ALWAYS <= shared.keys()
    assert shared.keys() >= DECODE
    assert max(shared.values()) <= SHARED_MEMORY


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        pytest.param({}, ROWS, id="rows"),
    ],
)
def test_no_length_is_compiled_for(settings, kernels):
    times = compiling("lengths", settings, "bfloat16", 128, True)
    assert kernels <= times.keys()
    # outliers on their channels, typical queries on all
    assert times.pop("_scored_rows_kernel", 0) <= 2
    assert set(times.values()) == {1}, times


@pytest.mark.parametrize(
    ("dtype", "dim"), slow_but([("bfloat16", 128), ("float32", 256), ("float16", 80)], 0)
)
def test_frc_compiles_for_hopper(dtype, dim):
    settings = {"predictor": "frc", "query_block": 64, "curvature": "forman"}
    result = compiling("frc", settings, dtype, dim, False)
    assert result.keys() == {"_largest_kernel", "_select_kernel"}
    assert max(shared for shared, _ in result.values()) <= SHARED_MEMORY
    # not for every length, but for rows of few columns and of many
    assert result["_largest_kernel"][1] <= 2 and result["_select_kernel"][1] <= 3
