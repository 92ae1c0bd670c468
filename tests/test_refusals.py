"""Bad input gets one sentence that names the argument, the value seen and what to do."""

import pytest
import torch
from tiny import FULL, SMALL, tiny_model, tokens
from transformers import (
    BertConfig,
    BertModel,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
)

import cab_hf
from cab_hf.attention import cab_attention
from cab_hf.call import CabMask, cab_mask


@pytest.fixture(scope="module")
def model():
    return cab_hf.apply_cab(tiny_model(), FULL)


def tiny(config_class, model_class, **fields):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    return model_class(config_class(**{**sizes, **fields})).eval()


def test_dropout_while_training():
    model = cab_hf.apply_cab(tiny_model(attention_dropout=0.1), FULL).train()
    with pytest.raises(ValueError, match="dropout is 0.1; .*attention_dropout = 0.0"):
        model(tokens(1, 40))


def test_attention_weights(model):
    with pytest.raises(ValueError, match="output_attentions is True; .*eager"):
        model(tokens(1, 40), output_attentions=True)


def test_a_mask_of_the_callers_own(model):
    with pytest.raises(ValueError, match=r"attention_mask is a tensor of shape \(1, 1, 40, 40\)"):
        model(tokens(1, 40), attention_mask=torch.ones(1, 1, 40, 40, dtype=torch.bool))


def test_soft_capped_logits():
    model = tiny(Gemma2Config, Gemma2ForCausalLM, sliding_window=16)
    model.set_attn_implementation("cab")
    with pytest.raises(NotImplementedError, match="softcap is set .*eager"):
        model(tokens(1, 40))


def test_sink_logits():
    model = tiny(GptOssConfig, GptOssForCausalLM, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises((NotImplementedError, ValueError), match="s_aux is set|attn_implementation"):
        model.set_attn_implementation("cab")
        model(tokens(1, 40))


def test_bidirectional_attention():
    model = BertModel(
        BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_attention_heads=2,
            num_hidden_layers=1,
            intermediate_size=32,
        )
    )
    model.set_attn_implementation("cab")
    with pytest.raises((ValueError, NotImplementedError), match="causal"):
        model(tokens(1, 40))


def test_a_model_that_does_not_ask_the_interface():
    model = FalconForCausalLM(
        FalconConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    )
    with pytest.raises(ValueError, match="'cab'"):
        cab_hf.apply_cab(model)


def test_an_engine_that_cannot_run_here():
    model = cab_hf.apply_cab(tiny_model(), FULL, engine="flex").train()
    with pytest.raises(ValueError, match="engine is 'flex', which has no backward on CPU"):
        model(tokens(1, 40), labels=tokens(1, 40))


def test_an_unknown_engine(model):
    with cab_hf.cab(model, engine="warp"), pytest.raises(ValueError, match="engine is 'warp'"):
        model(tokens(1, 40))


@pytest.mark.parametrize("saved", [{"budget": 3}, {"mass": 7}, "mass=0.9"], ids=repr)
def test_a_bad_saved_config(saved):
    model = tiny_model()
    model.config.cab_config = saved
    model.set_attn_implementation("cab")
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model(tokens(1, 40))


def test_a_bad_override(model):
    with pytest.raises(ValueError, match="no field 'masss'"), cab_hf.cab(model, masss=0.5):
        pass
    with pytest.raises(ValueError, match="predictor is 'nobody'"):
        cab_hf.apply_cab(model, SMALL, predictor="nobody")


def call(query, key=None, mask=None, **kwargs):
    module = torch.nn.Module()
    module.config = tiny_model().config
    module.layer_idx = 0
    module.num_key_value_groups = 1
    key = query if key is None else key
    return cab_attention(module, query, key, key, mask, **kwargs)


def test_an_unsupported_dtype():
    with pytest.raises(ValueError, match="query is torch.complex64"):
        call(torch.zeros(1, 1, 8, 16, dtype=torch.complex64))


def test_cross_attention():
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="is_causal is False"):
        call(q, is_causal=False)
    with pytest.raises(ValueError, match="key has 4 tokens and query 8"):
        call(q, q[:, :, :4])


def test_position_bias():
    with pytest.raises(NotImplementedError, match="position_bias"):
        call(torch.zeros(1, 1, 8, 16), position_bias=torch.zeros(1, 1, 8, 8))


def test_continuous_batching():
    with pytest.raises(NotImplementedError, match="paged cache"):
        call(torch.zeros(1, 1, 8, 16), cache=object())


def test_chunked_attention_layers():
    with pytest.raises(NotImplementedError, match="chunks of 4"):
        call(torch.zeros(1, 1, 8, 16), mask=CabMask(1, 8, 8, 0, window=4))


def test_a_mask_function_that_looks_ahead():
    def prefix(batch, head, query, key):
        return (key <= query) | (key < 4)

    with pytest.raises(NotImplementedError, match="later ones"):
        cab_mask(1, 8, 8, mask_function=prefix)
    with pytest.raises(NotImplementedError, match="or_mask_function"):
        cab_mask(1, 8, 8, mask_function=prefix, use_vmap=True)


def test_an_active_context_parallel_mesh(model, monkeypatch):
    from torch.distributed.tensor import DTensor

    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    handlers[torch.ops.aten._scaled_dot_product_flash_attention.default] = None
    monkeypatch.setattr(DTensor._op_dispatcher, "_custom_op_handlers", handlers)
    with pytest.raises(ValueError, match="context-parallel mesh is active"):
        model(tokens(1, 40))
