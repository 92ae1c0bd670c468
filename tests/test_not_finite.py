"""A NaN or an infinity in one key and value reaches no query block that cannot see it."""

from dataclasses import replace

import pytest
import torch
from marks import slow_but
from selecting import by_kernels, loud, on_the_cpu
from tiny import SMALL, VOCABULARY, qkv, tiny_model, tokens

from cab_hf import CabConfig, apply_cab
from cab_hf.ops import reference
from cab_hf.ops.attention import block, gather
from cab_hf.plan import BlockPlan, Spans

BLOCKS = {"query_block": 32, "key_block": 16, "dense_tail_blocks": 0, "local_blocks": 1}
GRID = {"query_block": 16, "key_block": 16}
LENGTH = 232
AT = 170
VALUES = [torch.nan, torch.inf, -torch.inf]


def config(**fields):
    return CabConfig(**{**BLOCKS, "mass_threshold": 0.05, "share_threshold": 0.3, **fields})


CONFIGS = [
    pytest.param(config(outlier_queries=8), id="rows"),
    pytest.param(config(outlier_queries=0), id="typical"),
    pytest.param(CabConfig.published(0.7, **GRID), id="published"),
    pytest.param(CabConfig.published(0.7, "additive", **GRID), id="published-additive"),
    pytest.param(CabConfig.published(0.7, "none", **GRID), id="published-magnitude"),
    pytest.param(config(predictor="cascade", anchors=(0,), outlier_queries=8), id="cascade"),
]
# the interpreter is slow
KERNELS = [case for case in CONFIGS if case.id in ("rows", "typical", "published")]


def spoilt(x, at, value):
    x = x.clone()
    x[:, :, at] = value
    return x


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("prefix", [pytest.param(0, id="text"), pytest.param(16, id="chunk")])
@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_are_chosen_as_if_it_were_not_there(config, prefix, value):
    _same_choice(on_the_cpu, config, prefix, value)


@pytest.mark.parametrize("config", slow_but(KERNELS, 0))
def test_kernels_choose_as_if_it_were_not_there(config):
    _same_choice(by_kernels, config, 16, torch.nan)


def _same_choice(select, config, prefix, value):
    """A token is spoilt, as in the layers behind the first one that spoils it."""
    shape = {"q_length": LENGTH, "kv_length": LENGTH + prefix, "heads": 2, "kv_heads": 1}
    q, k = loud(**shape)
    spans = Spans.causal(1, LENGTH, LENGTH + prefix, "cpu")
    meant = select(config, q, k, spans).to_dense()
    broken = spoilt(q, slice(AT, None), value), spoilt(k, AT + prefix, value)
    actual = select(config, *broken, spans).to_dense()
    blind = AT // config.query_block
    assert blind > 3 and not meant[:, :, blind - 1].all()
    assert torch.equal(actual[:, :, :blind], meant[:, :, :blind])


ENGINES = [
    pytest.param(reference.attention, id="reference"),
    pytest.param(block.attention, id="kernels"),
    pytest.param(gather.attention, id="gather"),
]
SHAPES = [
    pytest.param(16, 96, 96, (32, 16), id="text"),
    pytest.param(16, 96, 96, (16, 32), id="wide-keys"),
    pytest.param(16, 96, 120, (32, 16), id="chunk"),
    pytest.param(264, 96, 120, (32, 16), id="split-chunk"),
]


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize(("dim", "q_length", "kv_length", "blocks"), SHAPES)
@pytest.mark.parametrize("attend", ENGINES)
def test_blocks_attend_as_if_it_were_not_there(attend, dim, q_length, kv_length, blocks, value):
    """The spoilt key is the first that query block 1 or 2 sees, and no query before it does."""
    q, k, v = qkv(q_length=q_length, kv_length=kv_length, heads=2, kv_heads=1, dim=dim)
    query_block, key_block = blocks
    spans = Spans.causal(1, q_length, kv_length, "cpu")
    plan = BlockPlan.causal(spans, 2, query_block, key_block)
    seen = int(spans.last[0, 2 * query_block - 1]) + 1
    meant = attend(q, k, v, plan, 0.2)
    actual = attend(q, spoilt(k, seen, value), spoilt(v, seen, value), plan, 0.2)
    blind = 2 * query_block
    torch.testing.assert_close(actual[:, :, :blind], meant[:, :, :blind])
    assert not actual[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("exact", [0, 8], ids=["estimate", "exact-queries"])
def test_a_models_earlier_logits_stay_finite(exact):
    model = tiny_model()
    ids = tokens(1, 160)
    settings = replace(SMALL, mass_threshold=0.08, outlier_queries=exact)
    apply_cab(model, settings)
    with torch.no_grad():
        model.model.embed_tokens.weight[VOCABULARY - 1] = torch.nan
        ids[ids == VOCABULARY - 1] = 3
        meant = model(ids).logits
        ids[0, 100] = VOCABULARY - 1
        actual = model(ids).logits
    assert actual[0, 100].isnan().all()
    assert torch.equal(actual[:, :96], meant[:, :96])
