"""Settings, request options and metrics of the vLLM plugin."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
import vllm
from prometheus_client import REGISTRY, generate_latest
from test_models import prompt
from test_vllm import SPARSE, Reference, assert_same, read, served
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.v1.metrics.prometheus import get_prometheus_registry

import cab_hf.vllm
from cab_hf.config import CabConfig
from cab_hf.vllm import metrics, never_sparse, settings_of
from cab_hf.vllm.requests import salt_of

# ignore warnings, which vLLM and its libraries cause
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

START = {"skip_tokenizer_init": True, "max_model_len": 64}


def config_of(cache=(), backend=None, extra=None, instance_id="", **model):
    """Return a stand-in for vLLM's `VllmConfig` with the fields that the plugin reads."""
    hf_text_config = SimpleNamespace(num_hidden_layers=4)
    defaults = {"runner_type": "generate", "max_model_len": 32768, "use_mla": False}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=hf_text_config, **defaults | model),
        cache_config=SimpleNamespace(**{"cache_dtype": "auto"} | dict(cache)),
        attention_config=SimpleNamespace(backend=SimpleNamespace(name=backend)),
        additional_config={} if extra is None else extra,
        instance_id=instance_id,
    )


def test_settings_are_read_from_calibration_file(tmp_path):
    file = tmp_path / "calibration.json"
    CabConfig(mass_threshold=0.01).save(file)
    assert settings_of(config_of(extra={"cab": str(file)})).mass_threshold == 0.01
    with pytest.raises(ValueError, match="nowhere"):
        settings_of(config_of(extra={"cab": "nowhere.json"}))
    with pytest.raises(ValueError, match=r"additional_config\['cab'\] must be a dict"):
        settings_of(config_of(extra={"cab": [1]}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"cache": {"cache_dtype": "fp8"}}, "kv_cache_dtype is fp8"),
        ({"use_mla": True}, "multi-head latent attention"),
        ({"is_attention_free": True}, "no attention"),
        ({"runner_type": "pooling"}, "runs as pooling"),
        ({"max_model_len": 8192}, "min_length is 16,384 and max_model_len 8,192"),
    ],
)
def test_never_sparse_returns_the_reason(fields, expected):
    reason = never_sparse(CabConfig(), config_of(**fields))
    assert reason is None if expected is None else expected in reason


def test_dense_engine_logs_reason_and_no_sparse_layers(engine, llama, plugin_messages):
    engine({"min_length": 2000})
    assert "min_length is 2,000 and max_model_len 1,024" in " ".join(plugin_messages)
    assert "layers are sparse" not in " ".join(plugin_messages)


def test_vllm_extra_pins_supported_versions():
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    oldest, below = re.search(r"^vllm = vllm>=([\d.]+),<([\d.]+)$", setup, re.M).groups()
    major, minor = map(int, cab_hf.vllm.NEWEST.split("."))
    assert (oldest, below) == (cab_hf.vllm.OLDEST, f"{major}.{minor + 1}")


@pytest.mark.parametrize(("version", "runs"), [("0.33.0", True), ("0.34.0", False)])
def test_newest_version_is_supported_and_next_is_not(version, runs, monkeypatch):
    monkeypatch.setattr("vllm.__version__", version)
    assert (cab_hf.vllm._unsupported() is None) == runs


def test_options_in_serving_recipes_exist_in_vllm():
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text("utf-8")
    recipes = [code for code in page.split("```")[1::2] if "vllm serve" in code]
    options = set(re.findall(r"(?<!\S)--[a-z-]+", " ".join(recipes)))
    assert len(options) > 5
    folder = Path(vllm.__file__).parent
    files = [folder / "engine" / "arg_utils.py", *(folder / "entrypoints").rglob("*.py")]
    source = " ".join(file.read_text("utf-8") for file in files)
    assert {name for name in options if f'"{name}"' not in source} == set()


def test_custom_backend_on_cpu_enables_default_config():
    assert settings_of(config_of(backend="CUSTOM")) == CabConfig()
    assert settings_of(config_of()) is None


def test_engine_with_custom_backend_uses_cab_scheduler(engine):
    ours = engine(None, attention_backend="CUSTOM").llm_engine
    assert ours.vllm_config.additional_config["cab"] == settings_of(ours.vllm_config).to_dict()
    assert "Cab" in type(ours.engine_core.engine_core.scheduler).__name__


def test_settings_without_registered_plugin_raise(monkeypatch):
    monkeypatch.setattr(cab_hf.vllm, "_registered", False)
    with pytest.raises(ValueError, match="VLLM_PLUGINS must contain cab_hf"):
        settings_of(config_of(extra={"cab": {}}))


@pytest.mark.parametrize(
    ("backend", "per_kind", "is_refused"),
    [
        ("CUSTOM", None, True),
        ("CUSTOM", {"mla_attention": "any"}, False),
        ("CPU_ATTN", None, False),
    ],
    ids=["gpu", "gpu-with-a-backend-per-kind", "cpu"],
)
def test_latent_attention_on_gpu_raises(monkeypatch, backend, per_kind, is_refused):
    monkeypatch.setattr(cab_hf.vllm, "backend_name", lambda: backend)
    config = config_of(use_mla=True)
    config.attention_config.backend_per_kind = per_kind
    config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    config.kv_transfer_config = None
    refusal = cab_hf.vllm._unrunnable(CabConfig(), config)
    assert ("latent attention, got CUSTOM" in (refusal or "")) == is_refused


def test_draft_model_has_no_settings():
    extra = {"cab": {"dense_layers": [3]}}
    assert settings_of(config_of(extra=extra, runner_type="draft")) is None
    # vLLM selects the backend of a draft model separately, after `prepare` has set PREPARED
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cab_hf.vllm, "backend_name", lambda: "CUSTOM")
        with pytest.raises(ValueError, match="--attention-backend CUSTOM"):
            settings_of(config_of(extra=extra))
        assert settings_of(config_of(extra=extra | {cab_hf.vllm.PREPARED: True})) is None


@pytest.mark.parametrize(
    ("cab", "options", "named"),
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
def test_unsupported_options_raise_at_start(llama, cab, options, named):
    with pytest.raises((ValueError, RuntimeError), match=named):
        LLM(str(llama), additional_config={"cab": cab}, **START | options)


def test_prefix_cache_salt_depends_on_settings():
    sparse, dense = SamplingParams(), SamplingParams(extra_args={"cab": False})
    default, changed = CabConfig(), CabConfig(mass_threshold=0.01)
    salts = {
        "default": salt_of(default, sparse, None),
        "changed": salt_of(changed, sparse, None),
        "dense": salt_of(default, dense, None),
        "salted": salt_of(default, sparse, "tenant"),
    }
    assert len(set(salts.values())) == 4
    assert salts["default"] == salt_of(CabConfig(), sparse, None)
    assert salts["dense"] == salt_of(changed, dense, None)


def test_dense_request_does_not_share_sparse_prefix_cache(engine, llama):
    ours, prompts = engine(SPARSE), [prompt(400, 5)]

    def answer(value):
        sampling = SamplingParams(
            temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0
        )
        sampling.extra_args = {"cab": value}
        (output,) = ours.generate([{"prompt_token_ids": prompts[0]}], sampling, use_tqdm=False)
        return output

    sparse = [Reference(llama, SPARSE)(prompts[0], prompt_too=False)]
    dense = served(engine(None), prompts, prompt_too=False)
    assert abs(sparse[0][1][0] - dense[0][1][0]) > 1e-3
    assert_same([read(answer(True))], sparse)
    first, second = answer("false"), answer(0)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 384)
    assert_same([read(first), read(second)], dense * 2)
    with pytest.raises(ValueError, match="must be true or false, got 'maybe'"):
        answer("maybe")


def test_metrics_count_sparse_prompts_and_pairs(engine, plugin_messages):
    ours = engine(SPARSE)
    meter = metrics.METERS[ours.llm_engine.vllm_config.instance_id]
    meter.publish()
    before, num_messages = meter.totals(), len(plugin_messages)
    served(ours, [prompt(300, 7), prompt(20, 8), prompt(500, 9)], prompt_too=False)
    meter.publish()
    new = {name: total - before[name] for name, total in meter.totals().items()}
    # the prompt of 20 tokens is shorter than a query block, and is not counted as sparse
    assert new["sparse_prompts"] == 2
    pairs = 3 * 4 * sum(n * (n + 1) // 2 for n in (300, 500))
    assert 0.1 < new["attended_pairs"] / new["possible_pairs"] < 1
    assert new["possible_pairs"] == pairs
    assert "2 sparse prompts, density 0." in " ".join(plugin_messages[num_messages:])
    page = generate_latest(REGISTRY).decode()
    # /metrics has the sums over all engines of this test module
    totals = Counter()
    for any_meter in metrics.METERS.values():
        totals.update(any_meter.logged if any_meter.file.exists() else {})
    assert shown_in(page) == dict(totals)


def shown_in(page):
    """Return {name of a counter of the plugin: value} from the text of a ``/metrics`` page."""
    counters = re.findall(r"^cab_hf:(\w+)_total (\S+)$", page, re.M)
    return {name: int(float(value)) for name, value in counters}


def test_aggregated_api_servers_sum_counters(tmp_path, monkeypatch):
    """Write counters of two engines, and read their sums from ``/metrics`` of an API server."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(metrics, "_totals", None)
    metrics.export(config_of(instance_id="an API server, whose id no worker knows"))
    totals = {"sparse_prompts": 1, "attended_pairs": 30, "possible_pairs": 100}
    for instance, counts_prompts in (("engine 0", True), ("engine 1", False)):
        meter = metrics.Meter(instance, [], counts_prompts, is_logged=False)
        meter.write(meter.totals())
        meter.write(totals)
    page = generate_latest(get_prometheus_registry()).decode()
    assert shown_in(page) == {name: 2 * total for name, total in totals.items()}
    assert metrics._totals is None
