"""Sparse prefill of many architectures in vLLM equals "cab" in transformers."""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
import transformers
import vllm.model_executor.models as models
from test_vllm import (
    FULL_BUDGET_SETTINGS,
    SPARSE_SETTINGS,
    TransformersReference,
    assert_answers_close,
    compute_density,
    generate_with_logprobs,
)
from vllm.v1.worker import gpu_model_runner

from cab_hf.config import CabConfig
from cab_hf.dispatch import attended_pairs
from cab_hf.vllm import layers

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

MODEL_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
SLIDING_ATTENTION, FULL_ATTENTION = "sliding_attention", "full_attention"
SLIDING_WINDOW_FIELDS = {
    "sliding_window": 64,
    "layer_types": [SLIDING_ATTENTION, FULL_ATTENTION] * 2,
}
# by name: (model class, config class, fields of the config, number of sparse layers)
MODEL_CASES = {
    "interleaved": ("Ernie4_5ForCausalLM", "Ernie4_5Config", {}, 4),
    "half-of-the-channels": ("StableLmForCausalLM", "StableLmConfig", {"head_dim": None}, 4),
    "norm-of-heads": ("Qwen3ForCausalLM", "Qwen3Config", {}, 4),
    "windows": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        SLIDING_WINDOW_FIELDS | {"query_pre_attn_scalar": 64},
        2,
    ),
    "rotated-in-windows": (
        "Exaone4ForCausalLM",
        "Exaone4Config",
        SLIDING_WINDOW_FIELDS | {"sliding_window_pattern": 2},
        2,
    ),
    "every-other-layer-unrotated": (
        "SmolLM3ForCausalLM",
        "SmolLM3Config",
        {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": False,
            "layer_types": [FULL_ATTENTION] * 4,
        },
        4,
    ),
}


def draw_prompt(length, seed=0):
    return torch.randint(3, 510, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture
def save_tiny_model(tmp_path, monkeypatch):
    """Return a function that saves a tiny model and returns its folder.

    The arguments of the function are the model class, the config class and fields of the config.
    """
    # use a new cache of rotary embeddings, because ERNIE changes an embedding that models share
    monkeypatch.setattr("vllm.model_executor.layers.rotary_embedding._ROPE_DICT", {})

    def make_and_save(model_class, config_class, config_fields, weight_scale=3):
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**MODEL_SIZES | config_fields)
        model = getattr(transformers, model_class)(config)
        for parameter in model.parameters():
            parameter.data.mul_(weight_scale if parameter.ndim > 1 else 1)
        model.save_pretrained(tmp_path)
        return tmp_path

    return make_and_save


@pytest.fixture
def start_small_cache_engine(start_engine):
    """Return the function `engine` with a small KV cache, for models of a single test."""
    return partial(start_engine, num_gpu_blocks_override=128)


@pytest.mark.parametrize("case_name", MODEL_CASES)
def test_sparse_answers_of_architecture_equal_transformers(
    case_name, save_tiny_model, start_small_cache_engine, plugin_messages
):
    model_class, config_class, config_fields, num_sparse_layers = MODEL_CASES[case_name]
    model_folder = save_tiny_model(model_class, config_class, config_fields)
    cab_settings = SPARSE_SETTINGS | {"mass_threshold": 0.05}
    prompts = [draw_prompt(300), draw_prompt(500, 1)]
    expected = [TransformersReference(model_folder, cab_settings)(prompt) for prompt in prompts]
    attended_pairs.clear()
    actual = generate_with_logprobs(start_small_cache_engine(cab_settings, model_folder), prompts)
    assert f"{num_sparse_layers} of 4 attention layers are sparse" in " ".join(plugin_messages)
    assert compute_density() < 0.95
    assert_answers_close(actual, expected, 1e-3)


def test_kv_sharing_layers_equal_reference(save_tiny_model, start_small_cache_engine):
    """Test Gemma 3n, whose last layers read the keys and values of earlier layers."""
    config_fields = {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING_ATTENTION, FULL_ATTENTION] * 3,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 32,
        "laurel_rank": 8,
        "sliding_window": 100,
        "activation_sparsity_pattern": [0.0] * 6,
    }
    model_folder = save_tiny_model(
        "Gemma3nForCausalLM", "Gemma3nTextConfig", config_fields, weight_scale=1.5
    )
    # one batch has two prompts above min_length and one below
    prompts = [draw_prompt(300), draw_prompt(90, 1), draw_prompt(200, 2)]
    engine_options = {"max_num_batched_tokens": 160}
    expected = generate_with_logprobs(
        start_small_cache_engine(None, model_folder, **engine_options), prompts
    )
    actual = generate_with_logprobs(
        start_small_cache_engine(
            FULL_BUDGET_SETTINGS | {"min_length": 150}, model_folder, **engine_options
        ),
        prompts,
    )
    assert_answers_close(actual, expected, 1e-4)


def test_cascade_shares_plans_between_kv_cache_groups(save_tiny_model, start_small_cache_engine):
    """Check that plans pass between groups: vLLM splits the four full-attention layers in two."""
    layer_types = [
        SLIDING_ATTENTION,
        FULL_ATTENTION,
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        FULL_ATTENTION,
        FULL_ATTENTION,
    ]
    config_fields = {"num_hidden_layers": 6, "layer_types": layer_types, "sliding_window": 64}
    model_folder = save_tiny_model(
        "Gemma3ForCausalLM", "Gemma3TextConfig", config_fields | {"query_pre_attn_scalar": 64}
    )
    cab_settings = SPARSE_SETTINGS | {
        "mass_threshold": 0.05,
        "predictor": "cascade",
        "anchors": [1],
    }
    cab_engine, prompts = (
        start_small_cache_engine(cab_settings, model_folder),
        [draw_prompt(300), draw_prompt(500, 1)],
    )
    kv_cache_groups = (
        cab_engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
    )
    assert len(kv_cache_groups) == 3
    expected = [TransformersReference(model_folder, cab_settings)(prompt) for prompt in prompts]
    assert_answers_close(generate_with_logprobs(cab_engine, prompts), expected, 1e-3)


def test_only_prompts_without_images_are_sparse(start_engine, llama_folder, monkeypatch):
    """Simulate the image ranges that vLLM passes; {0: []} means a prompt without images."""
    cab_engine, metadata_class = (
        start_engine(SPARSE_SETTINGS),
        gpu_model_runner.CommonAttentionMetadata,
    )
    prompts = [draw_prompt(300), draw_prompt(280, 1)]
    sparse_answers = [
        TransformersReference(llama_folder, SPARSE_SETTINGS)(prompt) for prompt in prompts
    ]
    dense_answers = generate_with_logprobs(start_engine(None), prompts)

    def answer_with_ranges(image_ranges):
        monkeypatch.setattr(
            gpu_model_runner,
            "CommonAttentionMetadata",
            lambda **fields: metadata_class(**fields | {"mm_req_doc_ranges": image_ranges}),
        )
        return generate_with_logprobs(cab_engine, prompts)

    assert_answers_close(answer_with_ranges({0: [], 1: []}), sparse_answers)
    assert_answers_close(
        answer_with_ranges({0: [], 1: [(40, 60)]}), [sparse_answers[0], dense_answers[1]]
    )


def test_speculative_draft_model_needs_no_settings(start_engine, llama_folder, tmp_path):
    """Use settings that name layer 2, which the draft model of one layer does not have."""
    draft_config = transformers.LlamaConfig.from_pretrained(llama_folder, num_hidden_layers=1)
    transformers.LlamaForCausalLM(draft_config).save_pretrained(tmp_path)
    speculative_config = {
        "method": "draft_model",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
    }
    cab_settings, prompts = (
        SPARSE_SETTINGS | {"dense_layers": [2]},
        [draw_prompt(300), draw_prompt(170, 1)],
    )
    cab_engine = start_engine(
        cab_settings, max_num_batched_tokens=160, speculative_config=speculative_config
    )
    expected = [
        TransformersReference(llama_folder, cab_settings)(prompt, has_prompt_logprobs=False)
        for prompt in prompts
    ]
    assert_answers_close(
        generate_with_logprobs(cab_engine, prompts, has_prompt_logprobs=False), expected, 1e-4
    )


def test_dense_anchor_layer_raises():
    config = CabConfig(predictor="cascade", anchors=(0, 2))
    layers._require_sparse_anchors(config, [0, 1, 2])
    with pytest.raises(ValueError, match="anchors must be layers that vLLM attends sparsely"):
        layers._require_sparse_anchors(config, [1, 2])


@pytest.mark.parametrize(
    ("impl_fields", "builder_module", "reason"),
    [
        ({}, "vllm.v1.attention", "another backend"),
        ({"cab_dense_reason": "ALiBi"}, "cab_hf.vllm.backend", "ALiBi"),
        ({"cab_dense_reason": None}, "vllm.attention.chunked", "batches that vLLM rewrites"),
        ({"cab_dense_reason": None}, "cab_hf.vllm.backend", None),
    ],
)
def test_dense_layers_report_reasons(impl_fields, builder_module, reason):
    builder_class = type("Builder", (), {"__module__": builder_module})
    attention_backend = SimpleNamespace(get_builder_cls=lambda: builder_class)
    attention_layer = SimpleNamespace(
        impl=SimpleNamespace(**impl_fields), attn_backend=attention_backend
    )
    assert layers.find_dense_reason(attention_layer) == reason


def test_rotary_embedding_conditions_of_vllm_are_covered():
    """Find all conditions in vLLM's sources under which a layer applies RoPE.

    `cab_hf.vllm.layers` must list every attribute in these conditions.
    """
    listed_attributes = {
        *layers.ROTARY_SWITCH_ATTRIBUTES,
        *(
            attribute
            for attribute_names in layers.ROTARY_CONDITION_ATTRIBUTES.values()
            for attribute in attribute_names
        ),
    }
    rotary_conditions = set()
    for model_file in Path(models.__file__).parent.glob("*.py"):
        for condition_text in re.findall(
            r"if (.*):\n +\w+, \w+ = self\.rotary_emb\(", model_file.read_text("utf-8")
        ):
            rotary_conditions |= {
                (model_file.stem, attribute)
                for attribute in re.findall(r"self\.([\w.]+)", condition_text)
            }
    assert len(rotary_conditions) > 5
    listed_attributes |= {"rotary_emb", "config.use_mem_rope"}
    unlisted_conditions = {
        (module_name, attribute_name)
        for module_name, attribute_name in rotary_conditions
        if attribute_name not in listed_attributes
    }
    # in Molmo, the condition decides about norms, and RoPE is always applied
    assert unlisted_conditions <= {("molmo", "q_norm"), ("molmo", "k_norm")}
