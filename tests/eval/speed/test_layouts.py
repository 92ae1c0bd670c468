"""Layouts of ``speed attention``: positions of sequences in rows, masks, and varlen kernels."""

import sys
from types import ModuleType

import pytest
import torch
from bench import measure_sample

from cab_hf.eval.speed import dense, layouts
from cab_hf.eval.speed.attention import Attention, Settings
from cab_hf.eval.speed.layouts import LAYOUTS, PACKED_LAYOUT, PADDED_LAYOUT, WHOLE_LAYOUT, Sequences
from cab_hf.ops import reference

# few forced blocks, so that blocks of 192 tokens can be skipped
FORCED_BLOCK_ASSIGNMENTS = ("local_blocks=1", "dense_tail_blocks=0")


def make_tiny_settings(**setting_fields):
    """Return settings of a layer with few heads and channels, and a batch of two."""
    shape_fields = {"heads": 4, "kv_heads": 2, "head_dims": (16,), "batch": 2, "seconds": 0.0}
    return Settings(
        device="cpu", cab=FORCED_BLOCK_ASSIGNMENTS, **{**shape_fields, **setting_fields}
    )


def measure_case(layout, **replaced_fields):
    """Return the result record of a case with this layout and with ``replaced_fields``."""
    case_fields = {"length": 192, "head_dim": 16, "direction": "forward", "blocks": "32x16"}
    settings = make_tiny_settings(layouts=(layout,), directions=("forward",))
    return measure_sample(
        Attention, settings, {**case_fields, "layout": layout, "budget": 0.3, **replaced_fields}
    )


def draw_sequences(layout, batch, length):
    """Return random `Sequences` on the CPU, drawn with seed 0."""
    return Sequences.draw_random(layout, batch, length, 0, "cpu")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drawn_lengths_are_between_half_and_full_length(layout):
    sequences = draw_sequences(layout, batch=3, length=200)
    *other_lengths, last_length = sequences.sequence_lengths
    assert all(100 <= length <= 200 for length in other_lengths) and last_length <= 200
    assert sequences.cu_seqlens.tolist()[-1] == sum(sequences.sequence_lengths)
    if layout == PACKED_LAYOUT:
        assert (sequences.num_rows, sequences.num_slots, sum(sequences.sequence_lengths)) == (
            1,
            600,
            600,
        )
        starts = [start for _, start, _ in sequences.spans]
        assert starts == sequences.cu_seqlens.tolist()[:-1]
    else:
        assert (sequences.num_rows, sequences.num_slots, len(sequences.spans)) == (3, 200, 3)
        assert all(stop == 200 for _, _, stop in sequences.spans)
        assert (sequences.sequence_lengths == [200] * 3) == (layout == WHOLE_LAYOUT)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mask_equals_key_ranges(layout):
    sequences = draw_sequences(layout, batch=2, length=40)
    num_slots, key_ranges = sequences.num_slots, sequences.key_ranges
    mask = sequences.make_mask().dense_mask(0, num_slots, 0, num_slots, "cpu")[:, 0]
    key_index = torch.arange(num_slots)
    is_in_range = (key_index >= key_ranges.start[..., None]) & (
        key_index <= key_ranges.end[..., None]
    )
    is_real = key_ranges.end >= 0
    assert torch.equal(mask.expand_as(is_in_range)[is_real], is_in_range[is_real])


def attend_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
    """Compute varlen attention as in flash-attn, one sequence at a time."""
    assert max_seqlen_q == max_seqlen_k and options.pop("causal")
    out = torch.empty_like(q)
    boundaries = cu_seqlens_q.tolist()
    assert cu_seqlens_k.tolist() == boundaries and boundaries[-1] == len(q)
    for start, stop in zip(boundaries, boundaries[1:], strict=False):
        q_sequence, k_sequence, v_sequence = (
            x[None, start:stop].transpose(1, 2) for x in (q, k, v)
        )
        out_sequence = torch.nn.functional.scaled_dot_product_attention(
            q_sequence,
            k_sequence,
            v_sequence,
            is_causal=True,
            enable_gqa=True,
            scale=options["softmax_scale"],
        )
        out[start:stop] = out_sequence[0].transpose(0, 1)
    return out, None


@pytest.mark.parametrize("layout", [PADDED_LAYOUT, PACKED_LAYOUT])
def test_varlen_kernels_attend_within_sequences(monkeypatch, layout):
    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = attend_varlen
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    sequences = draw_sequences(layout, batch=2, length=96)
    q, k, v = make_tiny_settings().draw_random_heads(
        sequences.num_slots, 16, "cpu", "qkv", sequences.num_rows
    )
    sequences.check_kernel(
        layouts._wrap_varlen(sequences, layouts.VARLEN_KERNELS[0][1]), q, k, v, backward=False
    )
    # the check fails for attention across sequences
    attend_across_sequences = dense.get_baselines("cpu")["SDPA"].load_kernel()
    with pytest.raises(ArithmeticError, match="wrong by"):
        sequences.check_kernel(attend_across_sequences, q, k, v, backward=False)


def test_kernel_attending_across_sequences_is_not_timed(monkeypatch):
    attend_across_sequences = dense.get_baselines("cpu")["SDPA"].load_kernel()
    monkeypatch.setattr(layouts, "_make_masked_sdpa", lambda *_: attend_across_sequences)
    row = measure_case(PACKED_LAYOUT, length=160)
    assert row["not_measured"]["masked SDPA"].startswith("ArithmeticError: wrong by")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_selection_and_attention_are_timed_in_every_layout(layout):
    row = measure_case(layout)
    assert row["error"] is None and row["not_measured"] == {}
    assert row["predict_ms"] == row["attend_ms"]["reference"] == 2.0
    assert row["total_eager_ms"]["reference"] == 3.0 and 0.2 < row["density"] < 0.5
    sequences = draw_sequences(layout, batch=2, length=192)
    assert row["causal_pairs"] == sum(length**2 for length in sequences.sequence_lengths) // 2
    (report_row,) = Attention.rows([row], {})
    assert report_row["ratio"] == 1.0


def test_wrong_engine_with_padding_is_not_timed(monkeypatch):
    reference_attention = reference.attention

    def attend_with_other_heads(q, k, v, plan, **options):
        return reference_attention(q, k, v, plan, **options).roll(1, dims=1)

    monkeypatch.setattr(reference, "attention", attend_with_other_heads)
    row = measure_case(PADDED_LAYOUT)
    assert row["not_measured"]["reference"].startswith("ArithmeticError: wrong by")
    assert row["attend_ms"] == {} and "masked SDPA" in row["baselines"]
