"""Bad input gets one sentence that names the argument, the value seen and what to do."""

import copy
import inspect
import re

import pytest
import torch
import transformers
from tiny import FULL, SMALL, tiny_model, tokens
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
)
from transformers.masking_utils import (
    and_masks,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_overlay,
)

import cab_hf
from cab_hf import apply_cab, engines
from cab_hf.attention import cab_attention, cab_dense_attention
from cab_hf.call.mask import CabMask, cab_mask
from cab_hf.call.refusals import HARMLESS, MEANINGS
from cab_hf.config import ENGINES
from cab_hf.eval.tiny_types import tiny_model as tiny_model_of


@pytest.fixture(scope="module")
def model():
    return cab_hf.apply_cab(tiny_model(), FULL)


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
MOE = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 32,
}
MLA = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
}


def tiny(config_class, model_class, **fields):
    return model_class(config_class(**{**SIZES, **fields})).eval()


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


@pytest.mark.parametrize(
    "shape", [(40,), (2,), (2, 40, 40), (2, 1, 40), (2, 1, 40, 40), (2, 1, 1, 40, 40)]
)
def test_a_mask_of_other_dimensions(model, shape):
    sentence = re.escape(f"attention_mask is a tensor of shape {shape}; 'cab' takes the 2-D")
    with pytest.raises(ValueError, match=sentence):
        model(tokens(2, 40), attention_mask=torch.ones(shape))


@pytest.mark.parametrize(("lost", "keys"), [(50, 151), (200, 1)])
def test_a_cache_whose_layers_hold_other_tokens(model, lost, keys):
    cache, ids = transformers.DynamicCache(config=model.config), tokens(1, 201)
    model(ids[:, :200], past_key_values=cache)
    cache.layers[1].crop(-lost)
    with pytest.raises(ValueError, match=f"key has {keys} tokens, .* the text has 201"):
        model(ids[:, 200:], past_key_values=cache)


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
    with pytest.raises(ValueError, match="engine is 'warp'; it must be one of 'auto', 'flex'"):
        cab_hf.apply_cab(model, engine="warp")
    assert set(ENGINES) == {"auto", *engines.ENGINES}


@pytest.mark.parametrize(
    "saved",
    [
        *(
            {"budget": 3},
            {"redundancy": 7},
            0,
            ["redundancy", 0.9],
            {"redundancy": {}},
            {"min_length": 2**70},
        ),
        *({"dense_layers": [99]}, {1: 2, "a": 3}),
    ],
    ids=repr,
)
def test_a_bad_saved_config(saved):
    model = tiny_model()
    model.config.cab_config = saved
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model.set_attn_implementation("cab")
    assert model.config._attn_implementation == "sdpa"
    # given to a model that attends so already it is refused where it is used
    model.config.cab_config = None
    model.set_attn_implementation("cab")
    model.config.cab_config = saved
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model(tokens(1, 40))
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        cab_hf.describe(model)


@pytest.mark.parametrize("message", ["mass_threshold=0.08", "", "nowhere.json"])
def test_a_name_that_is_no_calibration(message):
    model = tiny_model()
    for give in (
        lambda: setattr(model.config, "cab_config", message),
        lambda: apply_cab(model, message),
    ):
        with pytest.raises(ValueError, match=f"{message!r} is no file; give one that"):
            give()
    assert model.config.cab_config is None


@pytest.mark.parametrize("message", [3, 0.8, [("redundancy", 0.8)], type(SMALL)], ids=repr)
def test_settings_of_another_kind(message):
    model = tiny_model()
    sentence = "config is .*; it must be a CabConfig, a dict of its fields, or the file of a calib"
    with pytest.raises(ValueError, match=sentence):
        apply_cab(model, message)
    with pytest.raises(ValueError, match=sentence), cab_hf.cab(model, message):
        pass
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("saved", [{"redundancy": {}}, {"min_length": 2**70}], ids=repr)
def test_a_bad_saved_config_is_named_where_it_is_compiled(saved):
    model = tiny_model(num_hidden_layers=1)
    model.set_attn_implementation("cab")
    model.config.cab_config = saved
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"CabConfig.{next(iter(saved))} is"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(tokens(1, 40))


def test_a_bad_override(model):
    with pytest.raises(ValueError, match="no field 'top_pp'"), cab_hf.cab(model, top_pp=0.5):
        pass
    with pytest.raises(ValueError, match="predictor is 'nobody'"):
        cab_hf.apply_cab(model, SMALL, predictor="nobody")
    with pytest.raises(ValueError, match="dense_layers has 3; this model has layers 0 to 2"):
        cab_hf.apply_cab(model, SMALL, dense_layers=(3,))


def call(query, key=None, mask=None, attend=cab_attention, **kwargs):
    module = torch.nn.Module()
    module.config = tiny_model().config
    module.config.cab_config = FULL
    module.layer_idx = 0
    module.num_key_value_groups = 1
    key = query if key is None else key
    return attend(module, query, key, key, mask, **kwargs)


def test_an_unsupported_dtype():
    with pytest.raises(ValueError, match="query is torch.complex64"):
        call(torch.zeros(1, 1, 8, 16, dtype=torch.complex64))


def test_cross_attention():
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(ValueError, match="is_causal is False"):
        call(q, is_causal=False)
    with pytest.raises(ValueError, match="key has 4 tokens and query 8"):
        call(q, q[:, :, :4])


@pytest.mark.parametrize("attend", [cab_attention, cab_dense_attention])
@pytest.mark.parametrize(
    "name", [*sorted(MEANINGS), "softmax_scale", "cu_seq_lens_k", "temperature", "logits_mask"]
)
def test_an_argument_that_would_be_swallowed(name, attend):
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises((NotImplementedError, ValueError), match=f"^{name} is ") as refused:
        call(q, attend=attend, **{name: torch.ones(1, 1, 8, 8)})
    assert str(refused.value).count(". ") <= 1
    # what is not there changes nothing
    call(q, attend=attend, **{name: None})


def test_an_argument_of_the_callers_own(model):
    with pytest.raises(ValueError, match="foo is 3; .*llama"):
        model(tokens(1, 40), foo=3)


def test_what_says_nothing_about_attention_is_taken():
    q = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    values = dict.fromkeys(HARMLESS, torch.ones(1, 40)) | {"cu_seq_lens_q": torch.tensor([0, 40])}
    assert torch.equal(call(q, **values)[0], call(q)[0])


@pytest.mark.parametrize("attend", [cab_attention, cab_dense_attention])
def test_a_window_without_a_mask_is_a_window(attend):
    q = torch.randn(1, 1, 60, 16, generator=torch.Generator().manual_seed(0))
    slot = torch.arange(60)
    seen = (slot <= slot[:, None]) & (slot > slot[:, None] - 7)
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=seen).transpose(1, 2)
    torch.testing.assert_close(call(q, attend=attend, sliding_window=7)[0], expected)


def test_a_window_that_the_mask_does_not_have():
    q = torch.zeros(1, 1, 8, 16)
    with pytest.raises(NotImplementedError, match="sliding_window is 4, and the mask"):
        call(q, mask=CabMask(1, 8, 8, 0), sliding_window=4)
    # as wide as the text: no window
    call(q, mask=CabMask(1, 8, 8, 0), sliding_window=8)


def test_continuous_batching():
    with pytest.raises(NotImplementedError, match="paged cache"):
        call(torch.zeros(1, 1, 8, 16), cache=object())


def test_chunked_attention_layers():
    config = transformers.Llama4TextConfig(attention_chunk_size=4)
    chunked = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    mask = cab_mask(1, 8, 8, mask_function=chunked, local_size=4, config=config)
    with pytest.raises(NotImplementedError, match="llama4_text attends in chunks of 4"):
        call(torch.zeros(1, 1, 8, 16), mask=mask)


@pytest.mark.parametrize(
    ("vmap", "sentence"),
    [
        pytest.param(False, "bert has a mask that lets tokens see later ones", id="looks-ahead"),
        pytest.param(True, "bert adds an or_mask_function", id="of-its-own"),
    ],
)
def test_a_mask_function_that_looks_ahead(vmap, sentence):
    def prefix(batch, head, query, key):
        return (key <= query) | (key < 4)

    # a mask that no layer uses is nobody's mistake
    mask = cab_mask(1, 8, 8, mask_function=prefix, use_vmap=vmap, config=BertConfig())
    with pytest.raises(NotImplementedError, match=sentence):
        call(torch.zeros(1, 1, 8, 16), mask=mask)


@pytest.mark.parametrize(
    ("rows", "length", "sentence"),
    [
        pytest.param(3, 40, "attention_mask has 3 rows and the batch 2", id="more-rows"),
        pytest.param(1, 40, "attention_mask has 1 rows and the batch 2", id="one-row"),
        pytest.param(2, 50, "attention_mask has 50 tokens and there are 40 keys", id="longer"),
        pytest.param(2, 30, "attention_mask has 30 tokens and there are 40 keys", id="shorter"),
    ],
)
def test_a_padding_mask_of_another_size(model, rows, length, sentence):
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match=sentence):
        model(tokens(2, 40), attention_mask=mask, use_cache=False)


KEPT = 200  # tokens in a cache, before 60 others are read


def read_behind_a_cache(model, mask, kind="dynamic"):
    """Two calls, of which the second has this mask for 260 tokens."""
    ids = tokens(2, 260)
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(model.config, max_cache_len=400)
    model(ids[:, :KEPT], cache=cache, use_cache=True)
    return model(ids[:, KEPT:], attention_mask=mask, cache=cache, use_cache=True).logits


SHORT = [
    pytest.param(slice(KEPT, 260), id="of-the-new-tokens"),
    pytest.param(slice(0, KEPT), id="of-the-old-tokens"),
    pytest.param(slice(0, 259), id="one-short"),
]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("part", SHORT)
@torch.no_grad()
def test_a_padding_mask_that_lacks_tokens_of_the_cache_or_the_call(model, part, kind):
    mask = torch.ones(2, 260, dtype=torch.int64)
    mask[0, :7] = 0
    read_behind_a_cache(model, mask, kind)
    sentence = f"attention_mask has {mask[:, part].shape[1]} tokens and there are 260 keys"
    with pytest.raises(ValueError, match=sentence):
        read_behind_a_cache(model, mask[:, part], kind)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_a_loop_that_never_extends_its_mask(model, kind, compiled):
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(model.config, max_cache_len=400)
    ids, mask = tokens(2, 60), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :7] = 0
    model(ids, attention_mask=mask, cache=cache, use_cache=True)
    step = torch.compile(model, backend="eager") if compiled else model
    with pytest.raises((ValueError, NotImplementedError), match="attention_mask has 60 tokens"):
        step(ids[:, :1], attention_mask=mask, cache=cache, use_cache=True)


def prefix_model():
    """One whose tokens see each other where ``token_type_ids`` are 1."""
    depth = {"num_layers_per_stack": 1, "num_hidden_layers": 2, "H_cycles": 1, "L_cycles": 1}
    return cab_hf.apply_cab(tiny_model_of("hrm_text", **depth, L_bp_cycles=[1]), FULL)


def prefixed(prefix):
    types = (torch.arange(64) < prefix).long()[None]
    return {"input_ids": tokens(1, 64), "token_type_ids": types, "use_cache": False}


GRAPHS = {
    "eager": lambda model, given: model(**given).logits,
    "compiled": lambda model, given: torch.compile(model, backend="eager")(**given).logits,
    "traced": lambda model, given: torch.compile(model, backend="aot_eager")(**given).logits,
    "exported": lambda model, given: (
        torch.export.export(model, (), given, strict=False).module()(**given).logits
    ),
}


@pytest.mark.parametrize("way", GRAPHS.values(), ids=GRAPHS)
@torch.no_grad()
def test_tokens_that_see_later_ones_are_refused_in_graphs_too(way):
    with pytest.raises(NotImplementedError, match="lets tokens see later ones"):
        way(prefix_model(), prefixed(30))


@pytest.mark.parametrize("way", GRAPHS.values(), ids=GRAPHS)
@torch.no_grad()
def test_the_same_model_reads_text_without_a_prefix(way):
    model = prefix_model()
    found = way(model, prefixed(0))
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(**prefixed(0)).logits, rtol=1e-4, atol=1e-4)


def turn(picture, q_offset, q_length=8):
    """The mask of a call behind a cache, of a text with a picture in these slots."""
    groups = torch.full((1, 16), -1)
    groups[:, picture] = 0
    pattern = or_masks(causal_mask_function, blockwise_overlay(groups))
    keys = q_offset + q_length
    return cab_mask(1, q_length, keys, q_offset, mask_function=pattern, config=BertConfig())


def test_a_picture_is_looked_for_among_the_tokens_of_the_call():
    assert turn(slice(2, 5), q_offset=8).refusal is None
    assert "see later ones" in turn(slice(10, 12), q_offset=8).refusal
    assert "see later ones" in turn(slice(2, 5), q_offset=0).refusal


def test_windows_of_models_that_read_pictures():
    # as Gemma 3 makes them, of a text without a picture
    groups = torch.full((1, 60), -1)
    pattern = and_masks(
        or_masks(causal_mask_function, blockwise_overlay(groups)), sliding_window_overlay(7)
    )
    given = {"mask_function": pattern, "use_vmap": True, "config": BertConfig()}
    mask = cab_mask(1, 60, 60, **given)
    assert mask.refusal is None and mask.window == 7
    groups[:, 3:9] = 0
    assert "see later ones" in cab_mask(1, 60, 60, **given).refusal


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda mask: mask[:, 0], id="index"),
        pytest.param(lambda mask: mask.dtype, id="dtype"),
        pytest.param(lambda mask: mask.to(torch.bool), id="method"),
        pytest.param(lambda mask: mask.shape[-1], id="size"),
        pytest.param(lambda mask: torch.zeros(2, 2) + mask, id="added-to-a-tensor"),
        pytest.param(lambda mask: mask + torch.zeros(2, 2), id="adds-a-tensor"),
        pytest.param(lambda mask: 1.0 - mask, id="subtracted"),
        pytest.param(lambda mask: mask & True, id="and"),
        pytest.param(lambda mask: ~mask, id="not"),
        pytest.param(lambda mask: mask > 0, id="compared"),
        pytest.param(lambda mask: torch.where(mask, 0.0, 1.0), id="torch"),
        pytest.param(lambda mask: torch.zeros(2).masked_fill(mask, 1.0), id="torch-method"),
        pytest.param(lambda mask: 0.0 in mask, id="searched"),
    ],
)
def test_a_mask_that_a_model_computes_with(use):
    mask = cab_mask(1, 8, 8, config=transformers.DogeConfig())
    with pytest.raises(NotImplementedError, match="^doge computes with its attention mask .*eager"):
        use(mask)


def test_a_mask_says_what_it_has_not_and_survives_copies():
    mask = cab_mask(1, 8, 8)
    assert not hasattr(mask, "to") and mask.ndim == len(mask.shape) == 0
    assert copy.deepcopy(mask).kv_length == copy.copy(mask).kv_length == 8


def test_an_active_context_parallel_mesh(model, monkeypatch):
    from torch.distributed.tensor import DTensor

    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    handlers[torch.ops.aten._scaled_dot_product_flash_attention.default] = None
    monkeypatch.setattr(DTensor._op_dispatcher, "_custom_op_handlers", handlers)
    with pytest.raises(ValueError, match="context-parallel mesh is active"):
        model(tokens(1, 40))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        pytest.param(
            "MiniMaxM3VL",
            {"config": "MiniMaxM3VLTextConfig", **MOE, "layer_types": ["minimax_m3_sparse"] * 2},
            "block_indices is set .*minimax_m3",
            id="minimax-m3",
        ),
        pytest.param("DeepseekV32", MLA, "deepseek_v32 computes with", id="deepseek-v3.2"),
        pytest.param("GlmMoeDsa", MLA, "glm_moe_dsa computes with", id="glm-moe-dsa"),
        pytest.param("Doge", {}, "doge computes with its attention mask .*'dtype'", id="doge"),
        pytest.param("GptOss", MOE, "s_aux is set .*gpt_oss", id="gpt-oss"),
        pytest.param("Gemma2", {}, "softcap is set .*gemma2", id="gemma2"),
        pytest.param("VaultGemma", {}, "softcap is set .*vaultgemma", id="vaultgemma"),
        pytest.param(
            "Llama4",
            {"config": "Llama4TextConfig", **MOE, "attention_chunk_size": 16},
            "llama4_text attends in chunks of 16",
            id="llama4",
        ),
    ],
)
def test_a_model_of_which_only_a_call_knows(name, fields, sentence):
    fields = {**SIZES, **fields}
    config_class = getattr(transformers, fields.pop("config", f"{name}Config"))
    model = getattr(transformers, f"{name}ForCausalLM")(config_class(**fields)).eval()
    model.set_attn_implementation("cab")
    with pytest.raises(NotImplementedError, match=sentence):
        model(tokens(1, 40))
    # what describe can see of it, it says
    assert ": refused, " in cab_hf.describe(model, tokens=40)


@pytest.mark.parametrize(
    ("name", "fields", "works"),
    [
        pytest.param("FalconForCausalLM", {}, "sdpa", id="falcon"),
        pytest.param("GPTNeoForCausalLM", {}, "eager", id="gpt-neo"),
        pytest.param("BloomForCausalLM", {}, "eager", id="bloom"),
        pytest.param("MptForCausalLM", {"n_layers": 1}, "eager", id="mpt"),
        pytest.param("XGLMForCausalLM", {}, "eager", id="xglm"),
        pytest.param("OpenAIGPTLMHeadModel", {}, "eager", id="openai-gpt"),
        pytest.param("MambaForCausalLM", {}, "eager", id="mamba"),
        pytest.param("RwkvForCausalLM", {}, "eager", id="rwkv"),
        pytest.param("GitForCausalLM", {}, "eager", id="git"),
    ],
)
@pytest.mark.parametrize("implementation", ["cab", "cab_dense"])
def test_a_model_that_cannot_be_reached_is_refused_when_it_is_loaded(
    name, fields, works, implementation
):
    model_class = getattr(transformers, name)
    config = model_class.config_class(**fields)
    config._attn_implementation = implementation
    with (
        torch.device("meta"),
        pytest.raises(ValueError, match=f"^{name} computes no attention .* '{works}'"),
    ):
        model_class(config)


def test_a_model_that_cannot_be_reached_is_refused_when_it_is_switched():
    """One that has no attention at all would take any name."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ValueError, match="MambaForCausalLM computes no attention"):
        model.set_attn_implementation("cab")


def test_a_model_of_the_users_own_is_let_through(monkeypatch):
    """Nobody can read the source of a notebook."""

    class Own(LlamaForCausalLM):
        pass

    config = tiny_model().config
    config._attn_implementation = "cab"
    Own(config)
    monkeypatch.setattr(inspect, "getsource", lambda module: "class Attention(nn.Module):")

    class Unreachable(LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match="Unreachable computes no attention"):
        Unreachable(config)

    def unreadable(module):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", unreadable)

    class Notebook(LlamaForCausalLM):
        pass

    Notebook(config)


def llava():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=tiny_model().config,
        image_token_id=2,
    )
    return transformers.LlavaForConditionalGeneration(config).eval()


def test_a_vision_language_model_is_told_how_to_name_its_language_model():
    ids = torch.cat([torch.full((1, 4), 2), tokens(1, 40)], dim=1)
    inputs = {"input_ids": ids, "pixel_values": torch.ones(1, 3, 8, 8)}
    model = llava()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("cab")
        with pytest.raises(ValueError, match="is_causal is False .*{'text_config': 'cab'}"):
            model(**inputs)
        model.set_attn_implementation({"": "sdpa", "text_config": "cab", "vision_config": "sdpa"})
        model.config.get_text_config().cab_config = FULL
        torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-5, rtol=1e-4)


def test_settings_beside_the_language_model_are_refused():
    config = llava().config
    config.cab_config = FULL
    transformers.LlavaForConditionalGeneration(config)
    config._attn_implementation = {"text_config": "cab"}
    with pytest.raises(ValueError, match="cab_config is set on LlavaConfig"):
        transformers.LlavaForConditionalGeneration(config)


@pytest.mark.parametrize("tokens", [-5, 0, 1.5, True, "many"], ids=repr)
def test_a_prompt_of_no_length(model, tokens):
    with pytest.raises(ValueError, match=f"tokens is {tokens!r}; it must be a whole number >= 1"):
        cab_hf.describe(model, tokens=tokens)
