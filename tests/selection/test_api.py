"""`select_blocks` and `quantize_keys` validate their arguments."""

from dataclasses import replace

import pytest
import torch
from selecting import random_peaked_qk

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.selection import quantize_keys, select_blocks

CONFIG = CabConfig(
    32, 16, outlier_queries=4, typical_queries=4, typical_key_stride=1, dense_tail_blocks=0
)  # fmt: skip
LENGTH, HEADS = 64, 4


def select(config=CONFIG, ranges=None, q=None, **options):
    """Return the (full, partial) block lists of `select_blocks` for one causal sequence."""
    default_q, k = random_peaked_qk(q_length=LENGTH, heads=HEADS, kv_heads=2)
    ranges = ranges or KeyRanges.causal(1, LENGTH, LENGTH, "cpu")
    q = default_q if q is None else q
    return select_blocks(q, quantize_keys(k), ranges, config, **{"scale": 0.25, **options})


def test_full_and_partial_lists_cover_the_diagonal():
    full, partial = select()
    assert full.counts.shape == partial.counts.shape == (1, HEADS, 2)
    assert (partial.counts >= 1).all()


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"ranges": KeyRanges.causal(1, LENGTH, LENGTH + 1, "cpu")}, "ranges"),
        ({"ranges": KeyRanges.causal(1, LENGTH - 1, LENGTH, "cpu")}, "ranges"),
        ({"q": torch.zeros(1, 3, LENGTH, 16)}, "q.shape"),
        ({"channels": (1, 16)}, "channels"),
        ({"sinks": torch.zeros(HEADS + 1)}, "sinks"),
    ],
    ids=["more-keys", "fewer-queries", "heads", "channels", "sinks"],
)
def test_mismatched_shape_raises_error_that_names_argument(options, argument):
    with pytest.raises(ValueError, match=rf"^{argument}.* must be .*, got "):
        select(**options)


def test_check_finite_names_the_tensor_that_is_not_finite():
    infinite_tensor = torch.full((1, HEADS, LENGTH, 16), torch.inf)
    with pytest.raises(ValueError, match="^q must be finite"):
        select(replace(CONFIG, check_finite=True), q=infinite_tensor)
    with pytest.raises(ValueError, match="^k must be finite"):
        quantize_keys(infinite_tensor, check_finite=True)
