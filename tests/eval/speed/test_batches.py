"""``speed batches``: where texts stand, what is not timed, rows by hand, a whole run."""

import sys
from types import ModuleType

import pytest
import torch
from bench import sample_of

from cab_hf.eval.speed import batches, dense
from cab_hf.eval.speed.batches import PACKED, PADDED, WHOLE, Batches, Settings, Texts
from cab_hf.ops import reference

# so few that 192 tokens have blocks to leave out
BLOCKS = ("query_block=32", "key_block=16", "local_blocks=1", "dense_tail_blocks=0")


def case_of(layout, batch=2, length=192, budget=0.3):
    return {"layout": layout, "batch": batch, "length": length, "budget": budget}


def tiny(**more):
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 16, "seconds": 0.0}
    return Settings(device="cpu", cab=BLOCKS, **shape, **more)


def measured(layout, bench=None, **more):
    return sample_of(Batches, tiny(), case_of(layout, **more), bench)


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_texts_are_of_a_half_to_all_of_the_length(layout):
    texts = Texts.drawn(layout, 3, 200, 0, "cpu")
    *most, last = texts.lengths
    assert all(100 <= length <= 200 for length in most) and last <= 200
    assert texts.cu_seq_lens.tolist()[-1] == sum(texts.lengths)
    if layout == PACKED:
        assert (texts.rows, texts.slots, sum(texts.lengths)) == (1, 600, 600)
        assert [start for _, start, _ in texts.places] == texts.cu_seq_lens.tolist()[:-1]
    else:
        assert (texts.rows, texts.slots, len(texts.places)) == (3, 200, 3)
        assert all(stop == 200 for _, _, stop in texts.places)
        assert (texts.lengths == [200] * 3) == (layout == WHOLE)


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_a_mask_says_what_the_spans_say(layout):
    texts = Texts.drawn(layout, 2, 40, 0, "cpu")
    seen = texts.mask(None).dense_rows(0, texts.slots, 0, texts.slots, "cpu")[:, 0]
    key, ranges = torch.arange(texts.slots), texts.ranges
    allowed = (key >= ranges.start[..., None]) & (key <= ranges.end[..., None])
    real = ranges.end >= 0
    assert torch.equal(seen.expand_as(allowed)[real], allowed[real])


def varlen_of_flash(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **how):
    """Compute the varlen attention of flash-attn, one sequence at a time."""
    assert max_seqlen_q == max_seqlen_k and how.pop("causal")
    out = torch.empty_like(q)
    borders = cu_seqlens_q.tolist()
    assert cu_seqlens_k.tolist() == borders and borders[-1] == len(q)
    for start, stop in zip(borders, borders[1:], strict=False):
        one = [x[None, start:stop].transpose(1, 2) for x in (q, k, v)]
        causal = {"is_causal": True, "enable_gqa": True, "scale": how["softmax_scale"]}
        attended = torch.nn.functional.scaled_dot_product_attention(*one, **causal)
        out[start:stop] = attended[0].transpose(0, 1)
    return out, None


@pytest.mark.parametrize("layout", [PADDED, PACKED])
def test_a_varlen_kernel_attends_texts_where_they_stand(monkeypatch, layout):
    module = ModuleType("flash_attn_interface")
    module.flash_attn_varlen_func = varlen_of_flash
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dense, "find_spec", lambda name: True)
    texts = Texts.drawn(layout, 2, 96, 0, "cpu")
    q, k, v = tiny().random_heads(texts.slots, 16, "cpu", "qkv", texts.rows)
    texts.check(batches._varlen(texts, batches.VARLEN[0][1]), q, k, v)
    # and the check is one
    whole = dense.on("cpu")["SDPA"].load()
    with pytest.raises(ArithmeticError, match="wrong by"):
        texts.check(whole, q, k, v)


def test_a_way_that_attends_across_texts_is_told_of_and_not_timed(monkeypatch):
    wrong = dense.on("cpu")["SDPA"].load()
    monkeypatch.setattr(batches, "_cab_dense", lambda *_: wrong)
    row = measured(PACKED)
    assert row["not_measured"]["cab_dense"].startswith("ArithmeticError: wrong by")
    assert row["baselines"].keys() == {"masked SDPA"}


@pytest.mark.parametrize("layout", batches.LAYOUTS)
def test_a_row_has_what_a_layer_took(layout):
    row = measured(layout)
    assert row["error"] is None and row["engine"] == "reference"
    assert (row["choose_ms"], row["attend_ms"], row["ms"], row["frame_ms"]) == (2.0, 2.0, 2.0, 3.0)
    assert (row["eager_ms"], row["peak_mib"]) == (3.0, 5.0) and 0.2 < row["density"] < 0.5
    texts = Texts.drawn(layout, 2, 192, 0, "cpu")
    assert (row["texts"], row["tokens"]) == (len(texts.places), sum(texts.lengths))


def test_a_wrong_engine_is_not_timed(monkeypatch):
    attend = reference.attention
    monkeypatch.setattr(reference, "attention", lambda *q, **x: attend(*q, **x).roll(1, dims=1))
    row = measured(PADDED)
    assert row["error"].startswith("ArithmeticError: wrong by") and row["ms"] is None
    assert "masked SDPA" in row["baselines"]


def test_a_layer_that_would_be_dense_is_told_of():
    settings = tiny(lengths=(96,))
    object.__setattr__(settings, "cab", (*BLOCKS, "min_length=4096"))
    row = sample_of(Batches, settings, case_of(PACKED, length=96))
    assert row["error"] == "the layer is dense: input shorter than min_length=4096"


def test_a_ratio_is_over_the_fastest_dense_way_of_the_same_row():
    samples = [
        case_of(PACKED, 32, 8192) | {"ms": 9.0, "baselines": {}},
        case_of(PADDED, 8, 8192) | {"ms": 3.0, "baselines": {"FA3 varlen": 6.0, "FA4 varlen": 4.0}},
        case_of(PADDED, 1, 8192)
        | {"ms": 3.0, "baselines": {"FA3 varlen": 2.0, "masked SDPA": 9.0}},
    ]
    quick, slow, unknown = Batches.rows(samples, {})
    assert (quick["batch"], quick["baseline"], quick["ratio"]) == (1, "FA3 varlen", 1.5)
    assert (slow["batch"], slow["baseline"], slow["ratio"]) == (8, "FA4 varlen", 0.75)
    assert (unknown["layout"], unknown["baseline"], unknown["ratio"]) == (PACKED, None, None)
