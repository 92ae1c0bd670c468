"""Settings, request options and metrics of the vLLM plugin."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import vllm
from prometheus_client import REGISTRY, generate_latest
from test_models import draw_prompt
from test_vllm import (
    SPARSE_SETTINGS,
    TransformersReference,
    assert_answers_close,
    generate_with_logprobs,
    read_logprobs,
)
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.metrics.prometheus import get_prometheus_registry

import cab_hf.vllm
from cab_hf.config import CabConfig
from cab_hf.vllm import metrics, never_sparse_reason, settings_of
from cab_hf.vllm.requests import make_cache_salt

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ENGINE_OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 64}


def make_vllm_config(
    cache_fields=(), backend_name=None, additional_config=None, instance_id="", **model_fields
):
    """Return a stand-in for vLLM's `VllmConfig` with the fields that the plugin reads."""
    hf_text_config = SimpleNamespace(num_hidden_layers=4)
    default_fields = {"runner_type": "generate", "max_model_len": 32768, "use_mla": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_text_config=hf_text_config, **default_fields | model_fields
        ),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto"} | dict(cache_fields)),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name=backend_name)),
        additional_config={} if additional_config is None else additional_config,
        instance_id=instance_id,
    )


def test_settings_are_read_from_calibration_file(tmp_path):
    calibration_file = tmp_path / "calibration.json"
    CabConfig(mass_threshold=0.01).save(calibration_file)
    assert (
        settings_of(
            make_vllm_config(additional_config={"cab": str(calibration_file)})
        ).mass_threshold
        == 0.01
    )
    with pytest.raises(ValueError, match="nowhere"):
        settings_of(make_vllm_config(additional_config={"cab": "nowhere.json"}))
    with pytest.raises(ValueError, match=r"additional_config\['cab'\] must be a dict"):
        settings_of(make_vllm_config(additional_config={"cab": [1]}))


@pytest.mark.parametrize(
    ("config_fields", "expected_reason"),
    [
        ({}, None),
        ({"cache_fields": {"cache_dtype": "fp8"}}, "kv_cache_dtype is fp8"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"is_attention_free": True}, "no attention"),
        ({"runner_type": "pooling"}, "runs as pooling"),
        ({"max_model_len": 8192}, "min_length is 16,384 and max_model_len 8,192"),
    ],
)
def test_never_sparse_reason_names_unsupported_option(config_fields, expected_reason):
    reason = never_sparse_reason(CabConfig(), make_vllm_config(**config_fields))
    assert reason is None if expected_reason is None else expected_reason in reason


def test_dense_engine_logs_reason_and_no_sparse_layers(start_engine, llama_folder, plugin_messages):
    start_engine({"min_length": 2000})
    assert "min_length is 2,000 and max_model_len 1,024" in " ".join(plugin_messages)
    assert "layers are sparse" not in " ".join(plugin_messages)


def test_vllm_extra_pins_supported_versions():
    setup_text = (Path(__file__).parents[2] / "setup.cfg").read_text()
    oldest_version, first_excluded_version = re.search(
        r"^vllm = vllm>=([\d.]+),<([\d.]+)$", setup_text, re.M
    ).groups()
    major, minor = map(int, cab_hf.vllm.NEWEST_VLLM_VERSION.split("."))
    assert (oldest_version, first_excluded_version) == (
        cab_hf.vllm.OLDEST_VLLM_VERSION,
        f"{major}.{minor + 1}",
    )


@pytest.mark.parametrize(("version", "is_supported"), [("0.33.0", True), ("0.34.0", False)])
def test_newest_version_is_supported_and_next_is_not(version, is_supported, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    assert (cab_hf.vllm._unsupported_version_error() is None) == is_supported


def test_options_in_serving_recipes_exist_in_vllm():
    serving_page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    recipes = [
        code_block for code_block in serving_page.split("```")[1::2] if "vllm serve" in code_block
    ]
    recipe_options = set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(recipes)))
    assert len(recipe_options) > 5
    vllm_folder = Path(vllm.__file__).parent
    source_files = [
        vllm_folder / "engine" / "arg_utils.py",
        *(vllm_folder / "entrypoints").rglob("*.py"),
    ]
    source_text = " ".join(source_file.read_text("utf-8") for source_file in source_files)
    assert {option for option in recipe_options if f'"{option}"' not in source_text} == set()


def test_custom_backend_on_cpu_enables_default_config():
    assert settings_of(make_vllm_config(backend_name="CUSTOM")) == CabConfig()
    assert settings_of(make_vllm_config()) is None


def test_engine_with_custom_backend_uses_cab_scheduler(start_engine):
    llm_engine = start_engine(None, attention_backend="CUSTOM").llm_engine
    assert (
        llm_engine.vllm_config.additional_config["cab"]
        == settings_of(llm_engine.vllm_config).to_dict()
    )
    assert "Cab" in type(llm_engine.engine_core.engine_core.scheduler).__name__


def test_settings_without_registered_plugin_raise(monkeypatch):
    monkeypatch.setattr(cab_hf.vllm, "_is_registered", False)
    with pytest.raises(ValueError, match="VLLM_PLUGINS must contain cab_hf"):
        settings_of(make_vllm_config(additional_config={"cab": {}}))


@pytest.mark.parametrize(
    ("used_backend_name", "backend_per_kind", "is_refused"),
    [
        ("CUSTOM", None, True),
        ("CUSTOM", {"mla_attention": "any"}, False),
        ("CPU_ATTN", None, False),
    ],
    ids=["gpu", "gpu-with-a-backend-per-kind", "cpu"],
)
def test_latent_attention_on_gpu_raises(
    monkeypatch, used_backend_name, backend_per_kind, is_refused
):
    monkeypatch.setattr(cab_hf.vllm, "backend_name", lambda: used_backend_name)
    vllm_config = make_vllm_config(use_mla=True)
    vllm_config.attention_config.backend_per_kind = backend_per_kind
    vllm_config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    vllm_config.kv_transfer_config = None
    error_message = cab_hf.vllm._unrunnable_settings_error(CabConfig(), vllm_config)
    assert ("latent attention, got CUSTOM" in (error_message or "")) == is_refused


def test_draft_model_has_no_settings():
    additional_config = {"cab": {"dense_layers": [3]}}
    assert (
        settings_of(make_vllm_config(additional_config=additional_config, runner_type="draft"))
        is None
    )
    # vLLM selects the backend of a draft model separately, after `prepare_engine` has set
    # PREPARED_KEY
    with pytest.MonkeyPatch.context() as patch_context:
        patch_context.setattr(cab_hf.vllm, "backend_name", lambda: "CUSTOM")
        with pytest.raises(ValueError, match="--attention-backend CUSTOM"):
            settings_of(make_vllm_config(additional_config=additional_config))
        assert (
            settings_of(
                make_vllm_config(
                    additional_config=additional_config | {cab_hf.vllm.PREPARED_KEY: True}
                )
            )
            is None
        )


@pytest.mark.parametrize(
    ("cab_settings", "engine_options", "error_pattern"),
    [
        ({"predictor": "rowz"}, {}, "rowz"),
        ({"engine": "flax"}, {}, "flax"),
        ({"engine": "triton"}, {}, "triton"),
        (
            {},
            {"kv_transfer_config": KVTransferConfig("NixlConnector", kv_role="kv_both")},
            "kv_connector must be .*, got NixlConnector",
        ),
    ],
)
def test_unsupported_options_raise_at_start(
    llama_folder, cab_settings, engine_options, error_pattern
):
    with pytest.raises((ValueError, RuntimeError), match=error_pattern):
        LLM(
            str(llama_folder),
            additional_config={"cab": cab_settings},
            **ENGINE_OPTIONS | engine_options,
        )


def test_prefix_cache_salt_depends_on_settings():
    sparse_params, dense_params = SamplingParams(), SamplingParams(extra_args={"cab": False})
    default_config, changed_config = CabConfig(), CabConfig(mass_threshold=0.01)
    salt_by_case = {
        "default": make_cache_salt(default_config, sparse_params, None),
        "changed": make_cache_salt(changed_config, sparse_params, None),
        "dense": make_cache_salt(default_config, dense_params, None),
        "salted": make_cache_salt(default_config, sparse_params, "tenant"),
    }
    assert len(set(salt_by_case.values())) == 4
    assert salt_by_case["default"] == make_cache_salt(CabConfig(), sparse_params, None)
    assert salt_by_case["dense"] == make_cache_salt(changed_config, dense_params, None)


def test_dense_request_does_not_share_sparse_prefix_cache(start_engine, llama_folder):
    cab_engine, prompts = start_engine(SPARSE_SETTINGS), [draw_prompt(400, 5)]

    def answer_with_switch(switch_value):
        sampling_params = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0
        )
        sampling_params.extra_args = {"cab": switch_value}
        (request_output,) = cab_engine.generate(
            [{"prompt_token_ids": prompts[0]}], sampling_params, use_tqdm=False
        )
        return request_output

    sparse_answers = [
        TransformersReference(llama_folder, SPARSE_SETTINGS)(prompts[0], has_prompt_logprobs=False)
    ]
    dense_answers = generate_with_logprobs(start_engine(None), prompts, has_prompt_logprobs=False)
    assert abs(sparse_answers[0][1][0] - dense_answers[0][1][0]) > 1e-3
    assert_answers_close([read_logprobs(answer_with_switch(True))], sparse_answers)
    first_output, second_output = answer_with_switch("false"), answer_with_switch(0)
    assert (first_output.num_cached_tokens, second_output.num_cached_tokens) == (0, 384)
    assert_answers_close(
        [read_logprobs(first_output), read_logprobs(second_output)], dense_answers * 2
    )
    with pytest.raises(ValueError, match="must be true or false, got 'maybe'"):
        answer_with_switch("maybe")


def test_metrics_count_sparse_prompts_and_pairs(start_engine, plugin_messages):
    cab_engine = start_engine(SPARSE_SETTINGS)
    meter = metrics.METER_BY_INSTANCE_ID[cab_engine.llm_engine.vllm_config.instance_id]
    meter.publish_totals()
    totals_before, num_messages = meter.read_totals(), len(plugin_messages)
    generate_with_logprobs(
        cab_engine,
        [draw_prompt(300, 7), draw_prompt(20, 8), draw_prompt(500, 9)],
        has_prompt_logprobs=False,
    )
    meter.publish_totals()
    new_totals = {
        counter_name: total - totals_before[counter_name]
        for counter_name, total in meter.read_totals().items()
    }
    # the prompt of 20 tokens is shorter than a query block, and is not counted as sparse
    assert new_totals["sparse_prompts"] == 2
    num_pairs = 3 * 4 * sum(length * (length + 1) // 2 for length in (300, 500))
    assert 0.1 < new_totals["attended_pairs"] / new_totals["possible_pairs"] < 1
    assert new_totals["possible_pairs"] == num_pairs
    assert "2 sparse prompts, density 0." in " ".join(plugin_messages[num_messages:])
    metrics_page = generate_latest(REGISTRY).decode()
    # /metrics has the sums over all engines of this test module
    totals = Counter()
    for engine_meter in metrics.METER_BY_INSTANCE_ID.values():
        totals.update(engine_meter.logged_totals if engine_meter.totals_file.exists() else {})
    assert parse_counters(metrics_page) == dict(totals)


def parse_counters(metrics_page):
    """Return {name of a counter of the plugin: value} from the text of a ``/metrics`` page."""
    counter_matches = re.findall(r"^cab_hf:(\w+)_total (\S+)$", metrics_page, re.M)
    return {counter_name: int(float(value)) for counter_name, value in counter_matches}


def test_aggregated_api_servers_sum_counters(tmp_path, monkeypatch):
    """Write counters of two engines, and read their sums from ``/metrics`` of an API server."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "_totals_collector", None)
    metrics.export_counters(make_vllm_config(instance_id="an API server, whose id no worker knows"))
    totals = {"sparse_prompts": 1, "attended_pairs": 30, "possible_pairs": 100}
    for instance_id, should_count_prompts in (("engine 0", True), ("engine 1", False)):
        meter = metrics.Meter(instance_id, [], should_count_prompts, is_logged=False)
        meter.write_totals(meter.read_totals())
        meter.write_totals(totals)
    metrics_page = generate_latest(get_prometheus_registry()).decode()
    assert parse_counters(metrics_page) == {
        counter_name: 2 * total for counter_name, total in totals.items()
    }
    assert metrics._totals_collector is None
