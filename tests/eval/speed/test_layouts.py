"""Layouts of ``speed attention``: places of sequences, their masks and kernels, whole rows."""

import sys
from types import ModuleType

import pytest
import torch
from bench import sample_of

from cab_hf.eval.speed import dense, layouts
from cab_hf.eval.speed.attention import Attention, Settings
from cab_hf.eval.speed.layouts import LAYOUTS, PACKED, PADDED, WHOLE, Sequences
from cab_hf.ops import reference

# small blocks, so that 192 tokens have blocks to skip
BLOCKS = ("local_blocks=1", "dense_tail_blocks=0")


def tiny(**more):
    shape = {"heads": 4, "kv_heads": 2, "head_dims": (16,), "batch": 2, "seconds": 0.0}
    return Settings(device="cpu", cab=BLOCKS, **{**shape, **more})


def measured(layout, **more):
    case = {"length": 192, "head_dim": 16, "direction": "forward", "blocks": "32x16"}
    settings = tiny(layouts=(layout,), directions=("forward",))
    return sample_of(Attention, settings, {**case, "layout": layout, "budget": 0.3, **more})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_have_half_to_all_of_the_length(layout):
    sequences = Sequences.drawn(layout, 3, 200, 0, "cpu")
    *most, last = sequences.lengths
    assert all(100 <= length <= 200 for length in most) and last <= 200
    assert sequences.cu_seq_lens.tolist()[-1] == sum(sequences.lengths)
    if layout == PACKED:
        assert (sequences.rows, sequences.slots, sum(sequences.lengths)) == (1, 600, 600)
        starts = [start for _, start, _ in sequences.places]
        assert starts == sequences.cu_seq_lens.tolist()[:-1]
    else:
        assert (sequences.rows, sequences.slots, len(sequences.places)) == (3, 200, 3)
        assert all(stop == 200 for _, _, stop in sequences.places)
        assert (sequences.lengths == [200] * 3) == (layout == WHOLE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_equals_key_ranges(layout):
    sequences = Sequences.drawn(layout, 2, 40, 0, "cpu")
    seen = sequences.mask().dense_rows(0, sequences.slots, 0, sequences.slots, "cpu")[:, 0]
    key, ranges = torch.arange(sequences.slots), sequences.ranges
    allowed = (key >= ranges.start[..., None]) & (key <= ranges.end[..., None])
    real = ranges.end >= 0
    assert torch.equal(seen.expand_as(allowed)[real], allowed[real])


def flash_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Compute varlen attention as in flash-attn, one sequence at a time."""
    assert max_seqlen_q == max_seqlen_k and options.pop("causal")
    out = torch.empty_like(q)
    borders = cu_seqlens_q.tolist()
    assert cu_seqlens_k.tolist() == borders and borders[-1] == len(q)
    for start, stop in zip(borders, borders[1:], strict=False):
        one = [x[None, start:stop].transpose(1, 2) for x in (q, k, v)]
        causal = {"is_causal": True, "enable_gqa": True, "scale": options["softmax_scale"]}
        attended = torch.nn.functional.scaled_dot_product_attention(*one, **causal)
        out[start:stop] = attended[0].transpose(0, 1)
    return out, None


@pytest.mark.parametrize("layout", [PADDED, PACKED])
def test_varlen_kernels_attend_within_sequences(monkeypatch, layout):
    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = flash_varlen
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    sequences = Sequences.drawn(layout, 2, 96, 0, "cpu")
    q, k, v = tiny().random_heads(sequences.slots, 16, "cpu", "qkv", sequences.rows)
    sequences.check(layouts._varlen(sequences, layouts.VARLEN[0][1]), q, k, v, backward=False)
    # and the check fails for attention across sequences
    across = dense.on("cpu")["SDPA"].load()
    with pytest.raises(ArithmeticError, match="wrong by"):
        sequences.check(across, q, k, v, backward=False)


def test_kernel_attending_across_sequences_is_not_timed(monkeypatch):
    wrong = dense.on("cpu")["SDPA"].load()
    monkeypatch.setattr(layouts, "_masked", lambda *_: wrong)
    row = measured(PACKED, length=160)
    assert row["not_measured"]["masked SDPA"].startswith("ArithmeticError: wrong by")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selection_and_attention_are_timed_in_every_layout(layout):
    row = measured(layout)
    assert row["error"] is None and row["not_measured"] == {}
    assert row["predict_ms"] == row["attend_ms"]["reference"] == 2.0
    assert row["total_eager_ms"]["reference"] == 3.0 and 0.2 < row["density"] < 0.5
    sequences = Sequences.drawn(layout, 2, 192, 0, "cpu")
    assert row["causal_pairs"] == sum(length**2 for length in sequences.lengths) // 2
    (shown,) = Attention.rows([row], {})
    assert shown["ratio"] == 1.0


def test_wrong_engine_with_padding_is_not_timed(monkeypatch):
    attend = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *q, **x: attend(*q, **x).roll(1, dims=1))
    row = measured(PADDED)
    assert row["not_measured"]["reference"].startswith("ArithmeticError: wrong by")
    assert row["attend_ms"] == {} and "masked SDPA" in row["baselines"]
