"""Models and KV caches for which vLLM has a special layout, batching or chunking."""

from random import Random
from types import SimpleNamespace

import pytest
import torch
import transformers

pytest.importorskip("vllm")
from vllm import SamplingParams
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backend import subclass_attention_backend

from cab_hf.dispatch import attended_pairs
from cab_hf.vllm.backend import (
    CabBackend,
    CabBuilder,
    SparseBuilder,
    gather_pages,
    page_element_indices,
)

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


MODEL_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
}
LLAMA4_FIELDS = MODEL_SIZES | {
    "intermediate_size": 192,
    "head_dim": 64,
    "intermediate_size_mlp": 192,
    "num_local_experts": 2,
    "attention_chunk_size": 128,
}
LFM2_FIELDS = MODEL_SIZES | {
    "intermediate_size": 192,
    "layer_types": ["conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "block_dim": 128,
    "block_ff_dim": 192,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 128,
}
FULL_BUDGET_SETTINGS = {"query_block": 32, "key_block": 16, "min_length": 0, "mass_threshold": 0.0}


def save_model(model_folder, model_class, config_class, **config_fields):
    """Save a random model with large weights, whose answers depend on attention; return folder."""
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**config_fields)
    model = getattr(transformers, model_class)(config)
    for parameter in model.parameters():
        parameter.data.mul_(2 if parameter.ndim > 1 else 1)
    model.save_pretrained(model_folder)
    return model_folder


def generate_with_logprobs(engine, prompts):
    """Generate four tokens per prompt; return a list with a tuple for each prompt.

    The tuple is ([(token, its log-probability) of each step], number of cached prompt tokens).
    """
    sampling_params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0
    )
    request_outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], sampling_params, use_tqdm=False
    )
    return [
        (
            [next(iter(step.items())) for step in prompt.outputs[0].logprobs],
            prompt.num_cached_tokens,
        )
        for prompt in request_outputs
    ]


def assert_answers_close(actual, expected):
    """Assert that answers have equal tokens and close log-probabilities.

    ``actual`` and ``expected`` are results of `generate_with_logprobs`.
    """
    for (answer, _), (expected_answer, _) in zip(actual, expected, strict=True):
        assert [token for token, _ in answer] == [token for token, _ in expected_answer]
        torch.testing.assert_close(
            torch.tensor([step.logprob for _, step in answer]),
            torch.tensor([step.logprob for _, step in expected_answer]),
            atol=1e-4,
            rtol=0,
        )


def draw_prompt(length, seed=0):
    generator = Random(seed)
    return [generator.randrange(3, 510) for _ in range(length)]


def test_chunked_attention_layers_stay_dense(start_engine, tmp_path):
    model_folder = save_model(tmp_path, "Llama4ForCausalLM", "Llama4TextConfig", **LLAMA4_FIELDS)
    prompts = [draw_prompt(300), draw_prompt(700, 1)]
    attended_pairs.clear()
    actual = generate_with_logprobs(
        start_engine(FULL_BUDGET_SETTINGS, model_folder, max_num_batched_tokens=2048), prompts
    )
    # only layer 3, the last, has full attention, and is sparse
    assert {layer.layer_idx for layer in attended_pairs} == {3}
    assert_answers_close(
        actual,
        generate_with_logprobs(
            start_engine(None, model_folder, max_num_batched_tokens=2048), prompts
        ),
    )


def test_derived_builders_are_dense(monkeypatch):
    def init_without_engine(self, spec):
        self.kv_cache_spec, self.device = spec, torch.device("cpu")
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32))

    parent_builder = CabBuilder.__mro__[CabBuilder.__mro__.index(SparseBuilder) + 1]
    monkeypatch.setattr(parent_builder, "__init__", init_without_engine)
    monkeypatch.setattr("cab_hf.vllm.backend.settings_of", lambda _: "settings")
    monkeypatch.setattr(CabBuilder, "isa", "vec", raising=False)

    class DerivedBuilder(CabBuilder):
        """Subclass of the builder, as vLLM derives for static sinks or chunked attention."""

    derived_builder = subclass_attention_backend(
        "DerivedBuilder", CabBackend, DerivedBuilder
    ).get_builder_cls()
    spec_fields = {"block_size": 32, "head_size": 64, "dtype": torch.float32}
    assert CabBuilder(SimpleNamespace(**spec_fields)).cab_settings == "settings"
    assert derived_builder(SimpleNamespace(**spec_fields)).cab_settings is None
    for local_fields in ({"attention_chunk_size": 128}, {"sliding_window": 128}):
        assert CabBuilder(SimpleNamespace(**spec_fields, **local_fields)).cab_settings is None


def test_hybrid_model_reuses_cached_mamba_states(start_engine, tmp_path):
    model_folder = save_model(tmp_path, "Lfm2ForCausalLM", "Lfm2Config", **LFM2_FIELDS)
    engine_options = {
        "max_num_batched_tokens": 512,
        "block_size": 96,
        "enable_prefix_caching": True,
    }
    cab_settings = FULL_BUDGET_SETTINGS | {"query_block": 128, "key_block": 64}
    cab_engine, vllm_engine = (
        start_engine(cab_settings, model_folder, **engine_options),
        start_engine(None, model_folder, **engine_options),
    )
    prompt = draw_prompt(700)
    later_prompt = [*prompt[:690], *draw_prompt(150, 1)]
    # vLLM's results for this model depend on where chunks end: make its chunks end where ours end
    scheduler = vllm_engine.llm_engine.engine_core.engine_core.scheduler
    chunk_ends = {0: 384, 384: 672}
    original_split = scheduler._mamba_block_aligned_split

    def split_at_chunk_ends(request, max_tokens, num_cached_tokens=0, num_loaded_tokens=0):
        start = request.num_computed_tokens + num_cached_tokens
        if start in chunk_ends:
            return chunk_ends[start] - start
        return original_split(request, max_tokens, num_cached_tokens, num_loaded_tokens)

    scheduler._mamba_block_aligned_split = split_at_chunk_ends
    for tokens, num_cached_tokens in ((prompt, 0), (later_prompt, 672)):
        (actual,), (expected,) = (
            generate_with_logprobs(cab_engine, [tokens]),
            generate_with_logprobs(vllm_engine, [tokens]),
        )
        assert actual[1] == expected[1] == num_cached_tokens
        assert_answers_close([actual], [expected])


@pytest.mark.parametrize(
    ("isa", "dtype", "page_size", "head_dim"),
    [
        ("vec", torch.float32, 128, 64),
        ("vec", torch.bfloat16, 32, 128),
        ("vec16", torch.float32, 48, 80),
        # layout "amx" interleaves pairs of channels (keys) or tokens (values). vLLM's build for
        # some CPUs, such as AMD's, cannot write this layout.
        ("amx", torch.bfloat16, 32, 64),
        ("amx", torch.bfloat16, 128, 128),
        ("amx", torch.bfloat16, 96, 32),
    ],
)
def test_gather_pages_equals_written_keys_and_values(isa, dtype, page_size, head_dim):
    current_platform.import_kernels()
    generator = torch.Generator().manual_seed(0)
    # page table of two and a half pages, whose page numbers are not ascending
    page_ids, num_tokens = torch.tensor([3, 0, 4]), 2 * page_size + page_size // 2
    key, value = (torch.randn(num_tokens, 2, head_dim, generator=generator).to(dtype) for _ in "kv")
    token_index = torch.arange(num_tokens)
    slots = page_ids[token_index // page_size] * page_size + token_index % page_size
    joint_cache = torch.full((5, 2, page_size, 2 * head_dim), torch.nan, dtype=dtype)
    key_cache, value_cache = joint_cache.view(5, 2, 2 * page_size, head_dim).chunk(2, dim=2)
    try:
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    except RuntimeError as error:
        if isa != "amx" or "Unsupported CPU attention configuration" not in str(error):
            raise
        pytest.skip("vLLM's build for this CPU cannot write layout amx")
    # in vLLM 0.22, keys and values are separate halves of the cache
    separate_cache = torch.stack(
        [half_cache.reshape(5, 2, page_size, head_dim) for half_cache in (key_cache, value_cache)]
    )
    for kv_cache in (joint_cache, separate_cache):
        gathered_key, gathered_value = gather_pages(kv_cache, page_ids, isa)
        assert torch.equal(gathered_key[:, :num_tokens], key.transpose(0, 1))
        assert torch.equal(gathered_value[:, :num_tokens], value.transpose(0, 1))


def test_unknown_kv_cache_layout_raises(monkeypatch):
    monkeypatch.setattr(ops, "cpu_attn_reshape_and_cache", lambda *_: None)
    with pytest.raises(NotImplementedError, match="'unknown'.*float32"):
        page_element_indices("unknown", torch.bfloat16, 32, 64)
