"""Invalid input raises errors that name the argument, the value and the remedy."""

import inspect

import pytest
import torch
import transformers
from tiny import (
    FULL_BUDGET_CONFIG,
    SMALL_BLOCKS_CONFIG,
    draw_token_ids,
    make_tiny_llava,
    make_tiny_model,
)
from tiny_types import make_tiny_model as make_model_of_type
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    LlamaForCausalLM,
)

import cab_hf
from cab_hf import apply_cab, engines
from cab_hf.attention import cab_attention, cab_dense_attention
from cab_hf.call.hook import cab_mask
from cab_hf.call.mask import MaskInfo
from cab_hf.call.validate import IGNORED_KEYWORDS, UNSUPPORTED_FEATURES
from cab_hf.config import ENGINES


@pytest.fixture(scope="module")
def model():
    """Return a tiny LLaMA with "cab"."""
    return cab_hf.apply_cab(make_tiny_model(), FULL_BUDGET_CONFIG)


MODEL_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
MOE_FIELDS = {
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 32,
}
MLA_FIELDS = {
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


# by name: function that runs `call_model(ids)` under a transform of PyTorch
TRANSFORMS = {
    "torch.jit.trace": lambda call, ids: torch.jit.trace(call, (ids,), check_trace=False),
    "torch.vmap": lambda call, ids: torch.vmap(lambda row: call(row[None]))(ids),
    "torch.vmap over gradients": lambda call, ids: torch.vmap(
        torch.func.grad(lambda scale, row: call(row[None], scale).sum()), in_dims=(None, 0)
    )(torch.ones(()), ids),
    "torch.func.functionalize": lambda call, ids: torch.func.functionalize(call)(ids),
    "fake tensors": lambda call, ids: _call_with_fake_tensors(call, ids),
}


def _call_with_fake_tensors(call_model, ids):
    """Run ``call_model(ids)`` with fake tensors, which have shapes but no values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake_mode:
        return call_model(fake_mode.from_tensor(ids))


@pytest.mark.parametrize("attention_kind", ["sparse", "full", "exact", "dense"])
@pytest.mark.parametrize("transform_name", TRANSFORMS)
def test_functional_transforms_raise_or_equal_plain_call(transform_name, attention_kind):
    """Assert that a transform raises an error with its name, or equals a plain call."""
    config_by_kind = {
        "full": FULL_BUDGET_CONFIG,
        "exact": SMALL_BLOCKS_CONFIG.changed(min_length=500),
    }
    model, ids = (
        apply_cab(make_tiny_model(), config_by_kind.get(attention_kind, SMALL_BLOCKS_CONFIG)),
        draw_token_ids(2, 200),
    )
    # torch.jit.trace rejects constants that require gradients, such as weights
    model.requires_grad_(False)
    if attention_kind == "dense":
        model.set_attn_implementation("cab_dense")

    def call_model(ids, scale=1.0):
        embeddings = model.get_input_embeddings()(ids) * scale
        return model(inputs_embeds=embeddings, use_cache=False).logits

    transform = TRANSFORMS[transform_name]
    if attention_kind in ("exact", "dense") and transform_name == "torch.vmap":
        torch.testing.assert_close(transform(call_model, ids)[:, 0], call_model(ids))
        return
    if attention_kind in ("exact", "dense") and "gradients" in transform_name:
        actual = transform(call_model, ids)
        for row, gradient in zip(ids, actual, strict=True):
            scale = torch.ones((), requires_grad=True)
            call_model(row[None], scale).sum().backward()
            torch.testing.assert_close(gradient, scale.grad, rtol=1e-3, atol=1e-3)
        return
    with pytest.raises(NotImplementedError, match=transform_name.split(" over ")[0]) as error_info:
        transform(call_model, ids)
    if "trace" in transform_name:
        assert "torch.export" in str(error_info.value)


def test_active_context_parallel_mesh_raises(model, monkeypatch):
    from torch.distributed.tensor import DTensor

    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    handlers[torch.ops.aten._scaled_dot_product_flash_attention.default] = None
    monkeypatch.setattr(DTensor._op_dispatcher, "_custom_op_handlers", handlers)
    with pytest.raises(ValueError, match="context-parallel mesh is active"):
        model(draw_token_ids(1, 40))


def make_bert():
    """Return a BERT model, whose attention is bidirectional, with "cab"."""
    model_sizes = {
        size_name: MODEL_SIZES[size_name]
        for size_name in ("vocab_size", "hidden_size", "intermediate_size")
    }
    model = BertModel(BertConfig(**model_sizes, num_attention_heads=2, num_hidden_layers=1))
    model.set_attn_implementation("cab")
    return model


@pytest.mark.parametrize(
    ("model_type", "config_field", "remedy"),
    [
        ("llama", "attention_dropout", "attention_dropout = 0.0 in every LlamaAttention"),
        ("opt", "attention_dropout", "dropout = 0.0 in every OPTAttention"),
        ("gpt2", "attn_pdrop", "attn_dropout.p = 0.0 in every GPT2Attention"),
        ("gpt_bigcode", "attn_pdrop", "attn_dropout = 0.0 in every GPTBigCodeAttention"),
        ("biogpt", "attention_probs_dropout_prob", "dropout = 0.0 in every BioGptAttention"),
        ("persimmon", "attention_dropout", "model.config.attention_dropout = 0.0"),
    ],
)
def test_remedies_named_by_dropout_error_work(model_type, config_field, remedy, tmp_path):
    model = make_model_of_type(model_type, **{config_field: 0.2})
    model.save_pretrained(tmp_path)
    cab_hf.apply_cab(model, FULL_BUDGET_CONFIG).train()
    with pytest.raises(
        ValueError, match="dropout must be 0, got 0.2: 'cab' has no attention"
    ) as error_info:
        model(draw_token_ids(1, 40), use_cache=False)
    assert f"Load the model with {config_field}=0.0 in its config" in str(error_info.value)
    assert f"set {remedy}" in str(error_info.value)
    attribute_path, _, class_name = remedy.partition(" = 0.0 in every ")
    *parent_names, attribute_name = (
        attribute_path.removeprefix("model.").removesuffix(" = 0.0").split(".")
    )
    for module in model.modules():
        if type(module).__name__ == (class_name or type(model).__name__):
            for parent_name in parent_names:
                module = getattr(module, parent_name)
            setattr(module, attribute_name, 0.0)
    model(draw_token_ids(1, 40), use_cache=False)
    reloaded_model = type(model).from_pretrained(tmp_path, **{config_field: 0.0})
    cab_hf.apply_cab(reloaded_model, FULL_BUDGET_CONFIG).train()(
        draw_token_ids(1, 40), use_cache=False
    )


def test_unexplained_dropout_error_names_eval(model):
    module = model.model.layers[0].self_attn
    q = torch.randn(1, 6, 40, 8)
    with pytest.raises(ValueError, match=r"has no attention dropout\. Call model\.eval\(\)\.$"):
        cab_attention(module, q, q, q, attention_mask=None, dropout=0.3)


@pytest.mark.parametrize(
    "saved_config",
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
def test_invalid_saved_config_raises(saved_config):
    model = make_tiny_model()
    model.config.cab_config = saved_config
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model.set_attn_implementation("cab")
    assert model.config._attn_implementation == "sdpa"
    model.config.cab_config = None
    model.set_attn_implementation("cab")
    # after an assignment that raises, a model with "cab" has its previous settings
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model.config.cab_config = saved_config
    assert model.config.cab_config is None
    # setting the attribute past the assignment check raises an error in the next call
    vars(model.config)["cab_config"] = saved_config
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        model(draw_token_ids(1, 40))
    with pytest.raises(ValueError, match="CabConfig|cab_config"):
        cab_hf.describe(model)


@pytest.mark.parametrize("calibration_name", ["mass_threshold=0.08", "", "nowhere.json"])
def test_unknown_calibration_name_raises(calibration_name):
    model = make_tiny_model()
    for set_config in (
        lambda: setattr(model.config, "cab_config", calibration_name),
        lambda: apply_cab(model, calibration_name),
    ):
        with pytest.raises(
            ValueError, match=f"{calibration_name!r} is not a file. Pass a file written by"
        ):
            set_config()
    assert model.config.cab_config is None


@pytest.mark.parametrize(
    "invalid_config", [3, 0.8, [("redundancy", 0.8)], type(SMALL_BLOCKS_CONFIG)], ids=repr
)
def test_settings_of_wrong_type_raise(invalid_config):
    model = make_tiny_model()
    error_pattern = "config must be a CabConfig, a dict of its fields, or the path of a .*, got "
    with pytest.raises(ValueError, match=error_pattern):
        apply_cab(model, invalid_config)
    with pytest.raises(ValueError, match=error_pattern), cab_hf.cab(model, invalid_config):
        pass
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("saved_config", [{"redundancy": {}}, {"min_length": 2**70}], ids=repr)
def test_invalid_saved_config_raises_when_compiled(saved_config):
    model = make_tiny_model(num_hidden_layers=1)
    model.set_attn_implementation("cab")
    vars(model.config)["cab_config"] = saved_config
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"CabConfig.{next(iter(saved_config))} must be"):
        torch.compile(model, fullgraph=True, backend="aot_eager")(draw_token_ids(1, 40))


def call_attention(query, key=None, mask=None, attend=cab_attention, **attention_options):
    """Call an attention function as a model's layer does; ``key`` None: use the query as key."""
    module = torch.nn.Module()
    module.config = make_tiny_model().config
    module.config.cab_config = FULL_BUDGET_CONFIG
    module.layer_idx = 0
    module.num_key_value_groups = 1
    key = query if key is None else key
    return attend(module, query, key, key, attention_mask=mask, **attention_options)


EIGHT_QUERIES = torch.zeros(1, 1, 8, 16)  # queries of eight tokens


def is_causal_or_in_prefix(batch, head, query, key):
    """Return True for causal (query, key) pairs and for the keys 0 to 3: a mask function."""
    return (key <= query) | (key < 4)


def make_prefix_mask(**mask_options):
    """Return the mask of a function that is not causal; a layer raises when it uses the mask."""
    return cab_mask(
        1, 8, 8, mask_function=is_causal_or_in_prefix, config=BertConfig(), **mask_options
    )


def make_forward_call(**model_inputs):
    """Return a function that takes a model and calls it with two sequences of 40 tokens."""
    return lambda model: model(draw_token_ids(2, 40), use_cache=False, **model_inputs)


def make_padded_forward_call(num_rows, length):
    """Return the result of `make_forward_call` with a padding mask [num_rows, length]."""
    return make_forward_call(attention_mask=(torch.arange(length) > 0).expand(num_rows, -1))


def make_attention_call(**attention_arguments):
    """Return a function that ignores its model, and calls attention directly with 8 tokens."""
    return lambda _: call_attention(**{"query": EIGHT_QUERIES, **attention_arguments})


def make_apply_cab_call(config=None, **config_fields):
    """Return a function that takes a model and calls `apply_cab` with these settings."""
    return lambda model: apply_cab(model, config, **config_fields)


def make_training_step(**config_fields):
    """Return a function that ignores its model, and runs a training step of a new model.

    ``config_fields`` are fields of CabConfig, or ``attention_dropout`` of the model config.
    """
    model_fields = {
        field_name: config_fields.pop(field_name)
        for field_name in ("attention_dropout",)
        if field_name in config_fields
    }

    def run_training_step(_):
        model = apply_cab(
            make_tiny_model(**model_fields), FULL_BUDGET_CONFIG, **config_fields
        ).train()
        model(draw_token_ids(1, 40), labels=draw_token_ids(1, 40))

    return run_training_step


def make_decode_after_crop(num_cropped_tokens):
    """Return a function that crops ``num_cropped_tokens`` of layer 1 of a cache, then decodes."""

    def crop_and_decode(model):
        cache, ids = DynamicCache(config=model.config), draw_token_ids(1, 201)
        model(ids[:, :200], past_key_values=cache)
        cache.layers[1].crop(-num_cropped_tokens)
        model(ids[:, 200:], past_key_values=cache)

    return crop_and_decode


def call_under_vmap(model):
    """Call a model under torch.vmap with a padding mask per row."""

    def compute_row_logits(row):
        return model(row[None], attention_mask=torch.ones_like(row[None])).logits

    torch.vmap(compute_row_logits)(draw_token_ids(2, 200))


# by name: (function of a model, which raises; type of the error; argument that the message names)
INVALID_CALLS = {
    "output_attentions": (
        make_forward_call(output_attentions=True),
        ValueError,
        "output_attentions",
    ),
    "unknown-keyword": (make_forward_call(foo=3), ValueError, "foo"),
    **{
        f"mask-{'x'.join(map(str, mask_shape))}": (
            make_forward_call(attention_mask=torch.ones(mask_shape)),
            ValueError,
            "attention_mask",
        )
        for mask_shape in [(40,), (2,), (2, 40, 40), (2, 1, 40), (2, 1, 40, 40), (2, 1, 1, 40, 40)]
    },
    **{
        f"padding-{num_rows}x{length}": (
            make_padded_forward_call(num_rows, length),
            ValueError,
            "attention_mask",
        )
        for num_rows, length in [(3, 40), (1, 40), (2, 50), (2, 30)]
    },
    "vmap-over-mask": (call_under_vmap, NotImplementedError, "attention_mask"),
    "dropout": (make_training_step(attention_dropout=0.1), ValueError, "dropout"),
    "engine-without-backward": (make_training_step(engine="flex"), ValueError, "engine"),
    "bidirectional-model": (lambda _: make_bert()(draw_token_ids(1, 40)), ValueError, "is_causal"),
    "cropped-layer": (make_decode_after_crop(50), ValueError, "key"),
    "empty-layer": (make_decode_after_crop(200), ValueError, "key"),
    "engine": (make_apply_cab_call(engine="warp"), ValueError, "engine"),
    "unknown-field": (make_apply_cab_call(top_pp=0.5), ValueError, "top_pp"),
    "predictor": (
        make_apply_cab_call(SMALL_BLOCKS_CONFIG, predictor="none"),
        ValueError,
        "predictor",
    ),
    "dense_layers": (
        make_apply_cab_call(SMALL_BLOCKS_CONFIG, dense_layers=(3,)),
        ValueError,
        "dense_layers",
    ),
    "dtype": (make_attention_call(query=EIGHT_QUERIES.to(torch.complex64)), ValueError, "query"),
    "not-causal": (make_attention_call(is_causal=False), ValueError, "is_causal"),
    "keys": (make_attention_call(key=EIGHT_QUERIES[:, :, :4]), ValueError, "key"),
    "paged-cache": (make_attention_call(cache=object()), NotImplementedError, "cache"),
    "cache": (make_attention_call(cache=DynamicCache()), ValueError, "past_key_values"),
    "window": (
        make_attention_call(mask=MaskInfo(1, 8, 8, 0), sliding_window=4),
        NotImplementedError,
        "sliding_window",
    ),
    "non-causal-mask": (make_attention_call(mask=make_prefix_mask()), NotImplementedError, "mask"),
    "mask-function": (
        make_attention_call(mask=make_prefix_mask(use_vmap=True)),
        NotImplementedError,
        "or_mask_function",
    ),
    "sinks": (make_attention_call(s_aux=torch.zeros(2)), ValueError, "s_aux"),
    **{
        f"tokens-{tokens!r}": (
            lambda model, tokens=tokens: cab_hf.describe(model, tokens=tokens),
            ValueError,
            "tokens",
        )
        for tokens in (-5, 0, 1.5, True, "many")
    },
}


@pytest.mark.parametrize(
    ("call_model", "error_type", "argument_name"), INVALID_CALLS.values(), ids=INVALID_CALLS
)
def test_refused_call_raises_and_names_argument(call_model, error_type, argument_name):
    with pytest.raises(error_type, match=rf"\b{argument_name}\b"):
        call_model(apply_cab(make_tiny_model(), FULL_BUDGET_CONFIG))


def test_config_lists_all_engines():
    assert set(ENGINES) == {"auto", *engines.ENGINES}


def test_window_as_wide_as_sequence_has_no_effect():
    call_attention(EIGHT_QUERIES, mask=MaskInfo(1, 8, 8, 0), sliding_window=8)


@pytest.mark.parametrize("attend", [cab_attention, cab_dense_attention])
@pytest.mark.parametrize(
    "keyword",
    [*sorted(UNSUPPORTED_FEATURES), "softmax_scale", "cu_seq_lens_k", "temperature", "logits_mask"],
)
def test_unsupported_keyword_raises(keyword, attend):
    with pytest.raises(
        (NotImplementedError, ValueError), match=f"^{keyword} must be None"
    ) as error_info:
        call_attention(EIGHT_QUERIES, attend=attend, **{keyword: torch.ones(1, 1, 8, 8)})
    assert str(error_info.value).count(". ") <= 1
    # the value None is accepted
    call_attention(EIGHT_QUERIES, attend=attend, **{keyword: None})


def test_keywords_unrelated_to_attention_are_accepted():
    q = torch.randn(1, 1, 40, 16, generator=torch.Generator().manual_seed(0))
    ignored_keywords = dict.fromkeys(IGNORED_KEYWORDS, torch.ones(1, 40)) | {
        "cu_seq_lens_q": torch.tensor([0, 40])
    }
    assert torch.equal(call_attention(q, **ignored_keywords)[0], call_attention(q)[0])


# keyword arguments without effect on attention: outputs of tokenizers, and columns of `Trainer`
HARMLESS_ARGUMENTS = {
    "special_tokens_mask": torch.zeros(1, 40, dtype=torch.int64),
    "offset_mapping": torch.zeros(1, 40, 2, dtype=torch.int64),
    "overflow_to_sample_mapping": torch.tensor([0]),
    "length": torch.tensor([40]),
    "return_loss": True,
}


@pytest.mark.parametrize("argument_name", HARMLESS_ARGUMENTS)
@torch.no_grad()
def test_tokenizer_outputs_and_trainer_columns_do_not_change_logits(model, argument_name):
    ids = draw_token_ids(1, 40)
    actual = model(ids, **{argument_name: HARMLESS_ARGUMENTS[argument_name]}).logits
    assert torch.equal(actual, model(ids).logits)


@pytest.mark.parametrize("attend", [cab_attention, cab_dense_attention])
def test_window_applies_without_mask(attend):
    q = torch.randn(1, 1, 60, 16, generator=torch.Generator().manual_seed(0))
    token_indices = torch.arange(60)
    is_visible = (token_indices <= token_indices[:, None]) & (
        token_indices > token_indices[:, None] - 7
    )
    expected = F.scaled_dot_product_attention(q, q, q, attn_mask=is_visible).transpose(1, 2)
    torch.testing.assert_close(call_attention(q, attend=attend, sliding_window=7)[0], expected)


@pytest.mark.parametrize(
    ("class_prefix", "model_fields", "error_pattern"),
    [
        pytest.param(
            "MiniMaxM3VL",
            {
                "config": "MiniMaxM3VLTextConfig",
                **MOE_FIELDS,
                "layer_types": ["minimax_m3_sparse"] * 2,
            },
            "block_indices must be None.*minimax_m3",
            id="minimax-m3",
        ),
        pytest.param("DeepseekV32", MLA_FIELDS, "deepseek_v32 computes with", id="deepseek-v3.2"),
        pytest.param("GlmMoeDsa", MLA_FIELDS, "glm_moe_dsa computes with", id="glm-moe-dsa"),
        pytest.param("Doge", {}, "doge computes with its attention mask .*'dtype'", id="doge"),
        pytest.param(
            "DeepseekV4", MOE_FIELDS, "DeepseekV4Attention attends to compressed", id="deepseek-v4"
        ),
    ],
)
def test_model_known_unsupported_only_at_call_raises(class_prefix, model_fields, error_pattern):
    model_fields = {**MODEL_SIZES, **model_fields}
    config_class = getattr(transformers, model_fields.pop("config", f"{class_prefix}Config"))
    model = getattr(transformers, f"{class_prefix}ForCausalLM")(config_class(**model_fields)).eval()
    model.set_attn_implementation("cab")
    with pytest.raises(NotImplementedError, match=error_pattern):
        model(draw_token_ids(1, 40))
    # `describe` also reports that the layer raises an error
    assert ": refused, " in cab_hf.describe(model, tokens=40)


@pytest.mark.parametrize(
    ("class_prefix", "model_fields", "other_implementation"),
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
def test_model_without_attention_interface_raises_at_load(
    class_prefix, model_fields, other_implementation, implementation
):
    model_class = getattr(transformers, class_prefix)
    config = model_class.config_class(**model_fields)
    config._attn_implementation = implementation
    with (
        torch.device("meta"),
        pytest.raises(
            ValueError, match=f"^{class_prefix} computes no attention .* '{other_implementation}'"
        ),
    ):
        model_class(config)


def test_model_without_attention_interface_raises_at_apply_cab():
    """Check in `apply_cab`: transformers accepts any implementation name for such a model."""
    config = transformers.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ValueError, match="MambaForCausalLM computes no attention"):
        model.set_attn_implementation("cab")


def test_model_with_unreadable_source_is_accepted(monkeypatch):
    """Accept models whose source code is not available, such as classes in a notebook."""

    class UserLlama(LlamaForCausalLM):
        pass

    config = make_tiny_model().config
    config._attn_implementation = "cab"
    UserLlama(config)
    monkeypatch.setattr(inspect, "getsource", lambda module: "class Attention(nn.Module):")

    class Unreachable(LlamaForCausalLM):
        pass

    with pytest.raises(ValueError, match="Unreachable computes no attention"):
        Unreachable(config)

    def raise_os_error(module):
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", raise_os_error)

    class NotebookLlama(LlamaForCausalLM):
        pass

    NotebookLlama(config)


def test_vision_language_model_error_names_language_model_setting():
    ids = torch.cat([torch.full((1, 4), 2), draw_token_ids(1, 40)], dim=1)
    inputs = {"input_ids": ids, "pixel_values": torch.ones(1, 3, 8, 8)}
    model = make_tiny_llava()
    with torch.no_grad():
        expected = model(**inputs).logits
        model.set_attn_implementation("cab")
        with pytest.raises(
            ValueError, match="is_causal must be True, got False .*{'text_config': 'cab'}"
        ):
            model(**inputs)
        model.set_attn_implementation({"": "sdpa", "text_config": "cab", "vision_config": "sdpa"})
        model.config.get_text_config().cab_config = FULL_BUDGET_CONFIG
        torch.testing.assert_close(model(**inputs).logits, expected, atol=2e-5, rtol=1e-4)


def test_settings_outside_of_language_model_raise():
    config = make_tiny_llava().config
    config.cab_config = FULL_BUDGET_CONFIG
    transformers.LlavaForConditionalGeneration(config)
    config._attn_implementation = {"text_config": "cab"}
    with pytest.raises(ValueError, match="cab_config is set on LlavaConfig"):
        transformers.LlavaForConditionalGeneration(config)
