"""Block shares, what exact anchors go by: by hand, and against whole attention."""

import pytest
import torch
from attention_cases import laid_out
from selecting import loud
from torch.nn import functional as F

from cab_hf import BlockPlan
from cab_hf.ops import reference
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
