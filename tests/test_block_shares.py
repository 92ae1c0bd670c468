"""Block shares, what exact anchors go by: by hand, and against whole attention."""

import pytest
import torch
from attention_cases import laid_out
from selecting import laid_in, loud
from torch.nn import functional as F

from cab_hf import BlockPlan
from cab_hf.ops import reference
from cab_hf.ops.block_shares import block_shares
from cab_hf.plan import Spans

REDUCTIONS = ["max", "mean"]


def test_shares_by_hand():
    # two key blocks; all queries but one see keys that are alike
    q, k = torch.zeros(1, 1, 32, 1), torch.zeros(1, 1, 32, 1)
    q[..., 20, 0], k[..., 3, 0] = 1.0, 4.0
    spans = Spans.causal(1, 32, 32, "cpu")
    most, mean = (
        reference.block_shares(q, k, spans, 1.0, 16, 16, reduction)[0, 0]
        for reduction in REDUCTIONS
    )
    # query i sees 16 keys of the first block and i - 15 of the second
    first = torch.tensor([16 / (i + 1) for i in range(16, 32)])
    loud = torch.tensor(4.0).exp()
    first[4] = (15 + loud) / (20 + loud)
    torch.testing.assert_close(most[0], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(most[1], torch.stack((first.max(), (1 - first).max())))
    torch.testing.assert_close(mean[1], torch.stack((first.mean(), 1 - first.mean())))


def brute_force(q, k, spans, scale, query_block, key_block, reduction):
    """The same of whole attention, in double precision."""
    heads = q.shape[1]
    seen = BlockPlan.causal(spans, heads, query_block, key_block).token_mask()
    keys = k.repeat_interleave(heads // k.shape[1], 1)
    logits = (q.double() @ keys.double().transpose(-1, -2)) * scale
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    shares = F.pad(shares, (0, -k.shape[2] % key_block)).unflatten(3, (-1, key_block)).sum(-1)
    rows = zip(shares.split(query_block, 2), (spans.last >= 0).split(query_block, 1), strict=True)
    reduced = []
    for row, real in rows:
        each = [
            (x[:, mine].amax(1) if reduction == "max" else x[:, mine].mean(1))
            if mine.any()
            else torch.zeros_like(x[:, 0])
            for x, mine in zip(row, real, strict=True)
        ]
        reduced.append(torch.stack(each))
    return torch.stack(reduced, dim=2).float()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", ["causal", "padded", "packed", "chunk"])
def test_the_reference_is_what_whole_attention_gives(layout, reduction):
    q, k = loud(q_length=75, kv_length=130 if layout == "chunk" else 75, batch=2)
    frame = laid_out(layout, 2, 75, k.shape[2], 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    found = reference.block_shares(q, k, spans, 0.3, 32, 16, reduction)
    meant = brute_force(q, k, spans, 0.3, 32, 16, reduction)
    torch.testing.assert_close(found, meant, atol=1e-6, rtol=1e-5)


def test_rows_at_a_time_change_nothing(monkeypatch):
    q, k = loud(q_length=205)
    spans = Spans.causal(1, 205, 205, "cpu")
    meant = reference.block_shares(q, k, spans, 0.25, 32, 16, "mean")
    monkeypatch.setattr(reference, "QUERIES_AT_A_TIME", 1)
    assert torch.equal(reference.block_shares(q, k, spans, 0.25, 32, 16, "mean"), meant)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_counts_nothing(reduction):
    q, k = loud(q_length=100, batch=2)
    frame = laid_out("padded", 2, 100, 100, 32, "cpu")
    q, k, spans = frame.queries(q), frame.keys(k), frame.spans
    quiet = reference.block_shares(q, k, spans, 0.25, 32, 16, reduction)
    padding = spans.last < 0
    assert padding.any() and (~spans.key_valid).any()
    q = q.masked_fill(padding[:, None, :, None], 1e4)
    k = k.masked_fill(~spans.key_valid[:, None, :, None], 1e4)
    assert torch.equal(reference.block_shares(q, k, spans, 0.25, 32, 16, reduction), quiet)
    if reduction == "mean":
        inhabited = (spans.rows(32).queries > 0).float()[:, None].expand(*quiet.shape[:3])
        torch.testing.assert_close(quiet.sum(-1), inhabited)


def test_no_earlier_row_feels_the_future():
    q, k = loud(q_length=150)
    spans = Spans.causal(1, 150, 150, "cpu")
    before = reference.block_shares(q, k, spans, 0.25, 32, 16, "max")
    q[:, :, 96:], k[:, :, 96:] = 5.0, -7.0
    after = reference.block_shares(q, k, spans, 0.25, 32, 16, "max")
    assert torch.equal(before[:, :, :3], after[:, :, :3])
    assert not torch.equal(before[:, :, 3:], after[:, :, 3:])


# --- the kernel


def case(blocks, layout="causal", **shape):
    return {"blocks": blocks, "layout": layout, "shape": shape}


KERNEL_CASES = [
    pytest.param(case((32, 16), q_length=75), id="q32"),
    pytest.param(case((128, 64), q_length=300, heads=2, kv_heads=1), id="default-blocks"),
    pytest.param(case((16, 16), q_length=63, heads=2, kv_heads=1), id="q16"),
    pytest.param(case((48, 48), q_length=111, heads=2, kv_heads=1), id="q48-k48"),
    pytest.param(case((16, 256), q_length=301, heads=2, kv_heads=1), id="k256-over-q16"),
    pytest.param(case((32, 16), q_length=75, dim=24), id="d24"),
    pytest.param(case((32, 16), q_length=75, kv_heads=6), id="no-groups"),
    pytest.param(case((32, 16), "padded", q_length=111, batch=2), id="padded"),
    # long enough for tiles that no mask is needed for
    pytest.param(
        case((32, 16), "padded", q_length=301, batch=2, heads=2, kv_heads=1), id="padded-long"
    ),
    pytest.param(case((32, 16), "packed", q_length=111, batch=2), id="packed"),
    pytest.param(case((32, 16), "in-place", q_length=111, batch=2), id="in-place"),
    pytest.param(case((32, 16), "chunk", q_length=75, kv_length=205), id="chunk"),
    pytest.param(case((32, 16), q_length=3), id="below-one-block"),
]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_the_kernel_finds_what_the_reference_finds(case, reduction, uninitialised_is_nan):
    blocks = case["blocks"]
    q, k, spans = laid_in(case["layout"], *loud(**case["shape"]), max(blocks))
    told = spans, q.shape[-1] ** -0.5, *blocks, reduction
    meant = reference.block_shares(q, k, *told)
    torch.testing.assert_close(block_shares(q, k, *told), meant, atol=2e-6, rtol=1e-4)


def test_sixteen_bits_find_the_same():
    # bfloat16 is for a GPU: the interpreter multiplies its bits as whole numbers
    q, k = (x.half() for x in loud(q_length=111, heads=2, kv_heads=1))
    told = Spans.causal(1, 111, 111, "cpu"), 0.25, 32, 16, "mean"
    meant = reference.block_shares(q, k, *told)
    # there products are summed in 16 bits
    torch.testing.assert_close(block_shares(q, k, *told), meant, atol=2e-2, rtol=2e-2)


def test_the_registered_op_says_what_it_returns():
    q, k = loud(q_length=75, heads=2, kv_heads=1)
    spans = Spans.causal(1, 75, 75, "cpu")
    told = q, k, spans.first, spans.last, 0.25, 32, 16, True
    torch.library.opcheck(torch.ops.cab_hf.block_shares, told, test_utils=("test_faketensor",))
