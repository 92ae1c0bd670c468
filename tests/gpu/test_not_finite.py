"""NaN and infinity on a GPU: blocks with such keys are always selected."""

from dataclasses import replace

import pytest
import torch
from decode_cases import make_step_inputs
from selecting import draw_topic_qk
from tiny import draw_token_ids, make_tiny_model

from cab_hf import CabConfig, apply_cab
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.ops.decode import kernels, reference
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

pytestmark = pytest.mark.gpu

NONFINITE_VALUES = [torch.nan, torch.inf, -torch.inf]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS_CONFIG = CabConfig(mass_threshold=0.01, share_threshold=0.2, dense_tail_blocks=0)
CONFIGS = {
    "rows": ROWS_CONFIG,
    "full": replace(ROWS_CONFIG, mass_threshold=0.0),
    "capped": replace(ROWS_CONFIG, max_density=0.05),
    "typical": replace(ROWS_CONFIG, outlier_queries=0),
    "published": CabConfig.published(0.9),
}


def select_blocks(config, q, k):
    """Return the selected blocks, bool [B, H, M_q, M_k]."""
    key_ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    dim = q.shape[3]
    layer_context = LayerContext(key_ranges, dim**-0.5, 0, channels=slow_channels_of_llama(dim))
    return make_predictor(config)(q, k, layer_context).to_dense()


def choose_keys(q, key_index, choose_args):
    """Call `kernels.choose` with the arguments ``choose_args`` from `make_step_inputs`."""
    scale, length, num_keys, channels, padding_mask, sinks = choose_args
    return kernels.choose(
        q,
        key_index,
        scale=scale,
        length=length,
        num_keys=num_keys,
        channels=channels,
        padding_mask=padding_mask,
        sinks=sinks,
    )


@pytest.mark.parametrize("nonfinite_value", NONFINITE_VALUES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_blocks_with_nan_key_are_selected(gpu, config, dtype, nonfinite_value):
    q, k = draw_topic_qk(gpu, length=4000, dtype=dtype)
    nonfinite_slot = 1000
    expected = select_blocks(config, q, k)
    k[:, 1, nonfinite_slot, 5] = nonfinite_value
    actual = select_blocks(config, q, k)
    row, column = nonfinite_slot // config.query_block, nonfinite_slot // config.key_block
    assert actual[:, 4:, row:, column].all()
    # heads of the other KV head, and earlier query blocks, select the same blocks as before
    assert torch.equal(actual[:, :4], expected[:, :4])
    assert torch.equal(actual[:, :, :row], expected[:, :, :row])
    if config is not CONFIGS["published"]:
        assert actual.float().mean() < expected.float().mean() + 0.1


@pytest.mark.parametrize("nonfinite_value", NONFINITE_VALUES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_scored_query_selects_all_blocks(gpu, dtype, nonfinite_value):
    q, k = draw_topic_qk(gpu, length=4000, dtype=dtype)
    config = replace(ROWS_CONFIG, outlier_queries=0)
    expected = select_blocks(config, q, k)
    query_stride = config.query_block // config.typical_queries
    row = 2000 // config.query_block
    q[:, 3, row * config.query_block + query_stride // 2, 9] = nonfinite_value
    actual = select_blocks(config, q, k)
    assert actual[:, 3, row, : row * config.query_block // config.key_block].all()
    expected[:, 3, row] = actual[:, 3, row]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("projection", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config_name", ["full", "rows", "capped", "published"])
def test_nan_token_reaches_all_later_logits(gpu, config_name, dtype, projection):
    """Set the q, k or v of one token in the first layer to NaN.

    The hidden state of this token is NaN from then on, so that later queries must become NaN.
    """
    config = replace(CONFIGS[config_name], min_length=0)
    model, ids = (
        make_tiny_model(max_position_embeddings=4096).to(gpu, dtype),
        draw_token_ids(1, 2000).to(gpu),
    )
    apply_cab(model, config)

    def set_nan(module, args, output):
        output[:, 600] = torch.nan
        return output

    attention_layer = model.model.layers[0].self_attn
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        getattr(attention_layer, f"{projection}_proj").register_forward_hook(set_nan)
        actual = model(ids, use_cache=False).logits
    first_token_of_block = 600 // config.query_block * config.query_block
    torch.testing.assert_close(actual[:, :first_token_of_block], expected[:, :first_token_of_block])
    assert actual[:, 600].isnan().all()
    # the token is a NaN key in the second layer, which all later query blocks must read
    if projection != "v" or config_name == "full":
        assert actual[:, first_token_of_block + config.query_block :].isnan().all()


@pytest.mark.parametrize("nonfinite_value", NONFINITE_VALUES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channel", [40, 3], ids=["scored", "other-channel"])
def test_decode_step_reads_nan_key(gpu, channel, dtype, nonfinite_value):
    step_case = (8, 2, 16384, 16000, 128, 128, 256, {})
    q, k, v, choose_args = make_step_inputs(step_case, dtype, gpu)
    scale, length, _, channels, *_ = choose_args
    assert (channel in channels) == (channel == 40)
    expected = choose_keys(q, kernels.index_keys(k, channels), choose_args).to_mask()
    nonfinite_slot = int((~expected[1, 0, :16000]).nonzero()[0])
    k[1, 0, nonfinite_slot, channel] = nonfinite_value
    key_index = kernels.index_keys(k, channels)
    assert all(map(torch.equal, key_index, reference.index_keys(k, channels)))
    choice = choose_keys(q, key_index, choose_args)
    is_selected = choice.to_mask()
    assert (
        is_selected[1, 0, nonfinite_slot] and is_selected[1, 0].sum() <= expected[1, 0].sum() + 64
    )
    assert torch.equal(is_selected[0], expected[0])
    assert torch.equal(is_selected[1, 1], expected[1, 1])
    out = kernels.attend(q, k, v, choice, scale=scale, length=length)
    is_finite = out[1, :4, 0].isfinite().all(-1)
    assert torch.equal(is_finite, q[1, :4, 0, channel] * nonfinite_value == -torch.inf)
    assert out[1, 4:].isfinite().all() and out[0].isfinite().all()


@pytest.mark.parametrize("nonfinite_value", [torch.nan, torch.inf], ids=str)
def test_nan_query_of_step_leaves_selection_to_other_queries(gpu, nonfinite_value):
    step_case = (8, 2, 16384, 16000, 128, 128, 1024, {})
    q, k, v, choose_args = make_step_inputs(step_case, torch.bfloat16, gpu)
    scale, length, _, channels, *_ = choose_args
    q[1, 1, 0, channels[0]] = nonfinite_value
    choice = choose_keys(q, kernels.index_keys(k, channels), choose_args)
    assert (choice.counts > 800).all() and (choice.counts < 1400).all()
    out = kernels.attend(q, k, v, choice, scale=scale, length=length)
    assert not out[1, 1].isfinite().any() and out[1, [0, 2, 3]].isfinite().all()


def test_forward_mode_differentiation_raises(gpu):
    model = apply_cab(make_tiny_model().to(gpu), replace(ROWS_CONFIG, min_length=0))
    embeddings = model.get_input_embeddings()(draw_token_ids(1, 400).to(gpu)).detach()

    def compute_logits(x):
        return model(inputs_embeds=x, use_cache=False).logits

    with pytest.raises(NotImplementedError, match="forward-mode differentiation"):
        torch.func.jvp(compute_logits, (embeddings,), (torch.ones_like(embeddings),))
