"""`select_blocks` and `quantize_keys` validate their arguments."""

from dataclasses import replace

import pytest
import torch
from selecting import draw_peaked_qk

from cab_hf import CabConfig
from cab_hf.plan import KeyRanges
from cab_hf.selection import quantize_keys, select_blocks

CONFIG = CabConfig(
    32, 16, outlier_queries=4, typical_queries=4, typical_key_stride=1, dense_tail_blocks=0
)  # fmt: skip
NUM_TOKENS, NUM_HEADS = 64, 4


def select_lists(config=CONFIG, ranges=None, q=None, **select_options):
    """Return the (full, partial) block lists of `select_blocks` for one causal sequence."""
    default_q, k = draw_peaked_qk(q_length=NUM_TOKENS, heads=NUM_HEADS, kv_heads=2)
    ranges = ranges or KeyRanges.causal(1, NUM_TOKENS, NUM_TOKENS, "cpu")
    q = default_q if q is None else q
    return select_blocks(q, quantize_keys(k), ranges, config, **{"scale": 0.25, **select_options})


def test_full_and_partial_lists_cover_the_diagonal():
    full_lists, partial_lists = select_lists()
    assert full_lists.counts.shape == partial_lists.counts.shape == (1, NUM_HEADS, 2)
    assert (partial_lists.counts >= 1).all()


@pytest.mark.parametrize(
    ("select_options", "argument_name"),
    [
        ({"ranges": KeyRanges.causal(1, NUM_TOKENS, NUM_TOKENS + 1, "cpu")}, "ranges"),
        ({"ranges": KeyRanges.causal(1, NUM_TOKENS - 1, NUM_TOKENS, "cpu")}, "ranges"),
        ({"q": torch.zeros(1, 3, NUM_TOKENS, 16)}, "q.shape"),
        ({"channels": (1, 16)}, "channels"),
        ({"sinks": torch.zeros(NUM_HEADS + 1)}, "sinks"),
    ],
    ids=["more-keys", "fewer-queries", "heads", "channels", "sinks"],
)
def test_mismatched_shape_raises_error_that_names_argument(select_options, argument_name):
    with pytest.raises(ValueError, match=rf"^{argument_name}.* must be .*, got "):
        select_lists(**select_options)


def test_check_finite_names_the_tensor_that_is_not_finite():
    infinite_tensor = torch.full((1, NUM_HEADS, NUM_TOKENS, 16), torch.inf)
    with pytest.raises(ValueError, match="^q must be finite"):
        select_lists(replace(CONFIG, check_finite=True), q=infinite_tensor)
    with pytest.raises(ValueError, match="^k must be finite"):
        quantize_keys(infinite_tensor, check_finite=True)
