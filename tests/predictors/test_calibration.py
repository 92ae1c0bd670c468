"""Calibration: measure the density at each threshold, and fit a threshold to a density."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from selecting import draw_peaked_qk
from tiny import SPARSE_CONFIG, make_tiny_model
from tiny_types import make_tiny_model as make_model_of_type
from transformers import GPT2Config, GPT2LMHeadModel
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.calibration import anchors as anchor_calibration
from cab_hf.calibration.density import (
    THRESHOLDS,
    compute_max_density,
    compute_min_density,
    fit_threshold,
    measure_densities,
)
from cab_hf.config import Origin
from cab_hf.eval import methods  # noqa: F401  registers predictors of other methods
from cab_hf.patches import calibration as model_calibration
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

SMALL_BLOCKS_FIELDS = {"query_block": 16, "key_block": 16, "min_length": 0}
# share_threshold 1.0 turns off selection by maximum share, which in short sequences would select
# nearly every block
CALIBRATION_CONFIG = CabConfig(**SMALL_BLOCKS_FIELDS, share_threshold=1.0)
MASS_CONFIG = SPARSE_CONFIG.changed(share_threshold=1.0, dense_tail_blocks=1)


def measure_layer_densities(config, length=400):
    """Return (q, k, `LayerContext`, density at each threshold) of one layer."""
    q, k = draw_peaked_qk(q_length=length, heads=4, kv_heads=2)
    layer_context = LayerContext(KeyRanges.causal(1, length, length, "cpu"), 0.25, 0)
    return q, k, layer_context, measure_densities(q, k, layer_context, config)


@pytest.mark.parametrize(
    "config_fields",
    [{}, {"share_threshold": 0.9}, {"dense_tail_blocks": 0}, {"max_density": 0.7}],
    ids=str,
)
def test_densities_equal_plan_densities(config_fields):
    config = MASS_CONFIG.changed(**config_fields)
    q, k, layer_context, actual = measure_layer_densities(config)
    for threshold_index in range(0, len(THRESHOLDS), 5):
        plan = make_predictor(config.changed(mass_threshold=THRESHOLDS[threshold_index]))(
            q, k, layer_context
        )
        assert float(actual[threshold_index + 1]) == pytest.approx(plan.density(), abs=1e-6)
    assert (actual.diff() >= 0).all() and actual[1] < 0.9
    # the last threshold is 0, at which all blocks within max_density are selected
    assert float(actual[-1]) == pytest.approx(compute_max_density(config, 400))


def test_first_density_equals_density_of_forced_blocks():
    assert float(measure_layer_densities(MASS_CONFIG)[3][0]) == pytest.approx(
        compute_min_density(MASS_CONFIG, 400)
    )


@pytest.mark.parametrize("target_density", [0.55, 0.6, 0.8])
def test_fitted_threshold_reaches_target(target_density):
    q, k, layer_context, layer_densities = measure_layer_densities(MASS_CONFIG)
    config = fit_threshold(MASS_CONFIG, [{0: layer_densities}], target_density)
    assert make_predictor(config)(q, k, layer_context).density() == pytest.approx(
        target_density, abs=0.03
    )
    assert fit_threshold(MASS_CONFIG, [{0: layer_densities}] * 2, target_density) == config
    # with a second layer whose density never grows, the same mean needs a lower threshold
    constant_densities = torch.full_like(layer_densities, float(layer_densities[0]))
    assert (
        fit_threshold(
            MASS_CONFIG, [{0: layer_densities, 1: constant_densities}], target_density
        ).mass_threshold
        < config.mass_threshold
    )


@pytest.mark.parametrize(
    ("density_at_zero", "target_density", "expected_threshold"),
    [(1.0, 1.0, 0.0), (0.9, 0.85, 0.0), (0.9, 0.72, THRESHOLDS[-1]), (0.7, 0.8, 0.0)],
)
def test_unreachable_target_selects_nearest_density(
    density_at_zero, target_density, expected_threshold
):
    densities = torch.linspace(0.3, 0.7, len(THRESHOLDS) + 1)
    layer_densities = torch.cat((densities, torch.tensor([density_at_zero]))).double()
    fitted_threshold = fit_threshold(
        MASS_CONFIG, [{0: layer_densities}], target_density
    ).mass_threshold
    assert fitted_threshold == pytest.approx(expected_threshold, rel=0.01)


def test_cascade_layers_count_the_density_of_their_anchor():
    layer_densities = measure_layer_densities(MASS_CONFIG)[3]
    config = MASS_CONFIG.changed(predictor="cascade", anchors=(0,))
    densities_of_layers = {0: layer_densities, 1: torch.ones_like(layer_densities)}
    assert fit_threshold(config, [densities_of_layers], 0.6) == fit_threshold(
        config, [{0: layer_densities}], 0.6
    )


def test_target_density_1_selects_threshold_0():
    assert (
        fit_threshold(
            MASS_CONFIG, [{0: measure_layer_densities(MASS_CONFIG)[3]}], 1.0
        ).mass_threshold
        == 0
    )


@pytest.fixture(autouse=True)
def _set_few_keys_and_thresholds(monkeypatch):
    monkeypatch.setattr(model_calibration, "KEYS_PER_DOCUMENT", 2)
    # higher than the defaults: a short sequence has few blocks, each with a large share of the mass
    monkeypatch.setattr(
        anchor_calibration, "THRESHOLDS", (1.0, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
    )


TOKENIZER = make_tokenizer()
INPUT_IDS = torch.randint(2, 50, (1, 300), generator=torch.Generator().manual_seed(0))


def make_model(family="llama", **model_fields):
    """Return a tiny model whose vocabulary has the size of `TOKENIZER`."""
    return make_tiny_model(family, **{"vocab_size": len(TOKENIZER)} | model_fields)


def calibrate_model(model, texts="So it goes.", target_density=0.7, **changed_arguments):
    """Calibrate the model on one sequence of 300 tokens, and return the calibrated config."""
    calibrate_arguments = {
        "config": CALIBRATION_CONFIG,
        "length": 300,
        "documents": 1,
        **changed_arguments,
    }
    return cab_hf.calibrate(model, TOKENIZER, texts, target_density, **calibrate_arguments)


def get_attention_settings(model):
    """Return the attention implementation and the cab config of a model."""
    return model.config._attn_implementation, model.config.cab_config


@torch.no_grad()
def measure_mean_density(model):
    """Return the mean density of the layers of a model for `INPUT_IDS`."""
    cab_hf.stats(model, reset=True)
    model(INPUT_IDS)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    return sum(densities) / len(densities)


def test_calibrate_sets_and_saves_config(tmp_path):
    model = make_model()
    config = calibrate_model(model)
    # `calibrate` has applied the config to the model
    assert get_attention_settings(model) == ("cab", config.to_dict())
    assert config.origin == Origin("llama", layers=3, heads=6, kv_heads=2, length=300)
    config.save(tmp_path / "own.json")
    assert CabConfig.calibrated(tmp_path / "own.json") == config
    assert 0.5 < measure_mean_density(model) < 0.8
    assert get_attention_settings(cab_hf.remove_cab(model)) == ("sdpa", None)
    # a string and a list with this string are equivalent
    assert calibrate_model(model, ["So it goes."]) == config


def test_calibrating_one_model_leaves_another_unchanged():
    first_model = make_model(num_hidden_layers=1)
    # both models share a config object, which calibration of one model must not change
    second_model = type(first_model)(first_model.config).eval()
    expected = [calibrate_model(copy.deepcopy(second_model)), calibrate_model(first_model)][::-1]
    assert get_attention_settings(second_model) == ("sdpa", None)
    with ThreadPoolExecutor(2) as thread_pool:
        assert list(thread_pool.map(calibrate_model, (first_model, second_model))) == expected


def test_calibrate_uses_eval_mode_and_restores_training_mode():
    torch.manual_seed(0)
    model_sizes = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), resid_pdrop=0.5, **model_sizes))
    model.transformer.h[0].eval()
    is_training_before = [module.training for module in model.modules()]
    config_from_training_mode = calibrate_model(copy.deepcopy(model))
    assert config_from_training_mode == calibrate_model(model)
    assert [module.training for module in model.modules()] == is_training_before
    assert config_from_training_mode == calibrate_model(model.eval())


@pytest.mark.parametrize("anchors", [None, 1])
def test_unreachable_density_raises_before_forward_pass(anchors):
    model = make_model()
    model.forward = None
    with pytest.raises(
        ValueError, match=r"target_density must be at least .*, got 0\.2"
    ) as error_info:
        calibrate_model(model, target_density=0.2, anchors=anchors)
    del model.forward
    min_density = float(re.search(r"at least ([.\d]+)", str(error_info.value))[1])
    calibrate_model(model, target_density=min_density, anchors=anchors)


@pytest.mark.parametrize("anchors", [None, 1])
def test_max_density_is_part_of_calibration(anchors):
    model, config = make_model(), CALIBRATION_CONFIG.changed(max_density=0.75)
    calibrate_model(model, target_density=0.65, config=config, anchors=anchors)
    assert measure_mean_density(model) == pytest.approx(0.65, abs=0.05)


@pytest.mark.parametrize("anchors", [None, 1])
def test_target_above_max_density_raises_before_forward_pass(anchors):
    model, config = make_model(), CALIBRATION_CONFIG.changed(max_density=0.6)
    model.forward = None
    with pytest.raises(
        ValueError, match=r"must be at most .* max_density=0\.6 .*, got 0\.8"
    ) as error_info:
        calibrate_model(model, target_density=0.8, config=config, anchors=anchors)
    del model.forward
    max_density = float(re.search(r"at most ([.\d]+)", str(error_info.value))[1])
    calibrate_model(model, target_density=max_density, config=config, anchors=anchors)
    assert measure_mean_density(model) == pytest.approx(max_density, abs=0.03)


def test_cascade_reaches_density_below_anchor_thresholds(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", (1.0, 0.5))
    model = make_model()
    config = calibrate_model(model, anchors=1)
    assert config.predictor == "cascade" and config.mass_threshold < 0.5
    assert measure_mean_density(model) == pytest.approx(0.7, abs=0.1)


def test_calibrate_accepts_dict_or_file(tmp_path):
    CALIBRATION_CONFIG.save(tmp_path / "own.json")
    config_path = tmp_path / "own.json"
    expected = calibrate_model(make_model())
    for config in (CALIBRATION_CONFIG.to_dict(), str(config_path), config_path):
        assert calibrate_model(make_model(), config=config) == expected


parametrize_model_families = pytest.mark.parametrize(
    ("family", "num_layers"), [("llama", 3), ("qwen3-some-sliding", 1)]
)


@parametrize_model_families
def test_calibrate_shows_progress_per_layer(family, num_layers, capfd):
    calibrate_model(make_model(family))
    progress_output = capfd.readouterr().err
    assert "calibrate: 100%" in progress_output and f"{num_layers}/{num_layers}" in progress_output


@parametrize_model_families
def test_too_many_anchors_raise_before_forward_pass(family, num_layers):
    model = make_model(family)
    model.forward = None
    with pytest.raises(
        ValueError, match=f"anchors must be 1 to {num_layers}, the number of sparse layers"
    ):
        calibrate_model(model, anchors=num_layers + 1)


@pytest.mark.parametrize("anchors", [None, 1])
@pytest.mark.parametrize(
    ("weight_name", "weight_value"),
    [
        pytest.param("model.embed_tokens.weight", float("nan"), id="not-a-number"),
        # no q or k depends on the last MLP, so only its output is not finite
        pytest.param("model.layers.2.mlp.down_proj.weight", float("inf"), id="infinite"),
    ],
)
def test_calibrating_nonfinite_model_raises(anchors, weight_name, weight_value):
    model = make_model()
    model.get_parameter(weight_name).data[:] = weight_value
    with pytest.raises(ValueError, match=r"outputs are not finite \(NaN or infinite\) under dense"):
        calibrate_model(model, anchors=anchors)
    assert get_attention_settings(model) == ("sdpa", None)


def test_calibrate_with_anchors_sets_cascade_config():
    model = make_model()
    config = calibrate_model(model, documents=2, anchors=2)
    assert config.predictor == "cascade" and len(config.anchors) == 2 and config.anchors[0] == 0
    assert get_attention_settings(model) == ("cab", config.to_dict())
    assert 0.5 < measure_mean_density(model) < 0.8
    # calibrating a cascade config again keeps anchors and head map, and changes the threshold
    recalibrated_config = calibrate_model(model, target_density=0.6, config=config)
    assert (recalibrated_config.anchors, recalibrated_config.head_map) == (
        config.anchors,
        config.head_map,
    )
    assert recalibrated_config.mass_threshold > config.mass_threshold


@pytest.mark.parametrize(
    ("model_type", "num_layers", "anchors"),
    [
        pytest.param("longcat_flash", 8, None, id="two attentions a layer", marks=pytest.mark.slow),
        pytest.param("longcat_flash", 8, 2, id="two attentions a layer, anchors"),
        pytest.param("laguna", 4, 2, id="head numbers per layer", marks=pytest.mark.slow),
    ],
)
def test_unusual_layer_structures_are_calibrated(model_type, num_layers, anchors):
    model = make_model_of_type(model_type).eval()
    config = calibrate_model(model, ["Nobody knows. So it goes."], 0.8, anchors=anchors)
    assert config.predictor == ("cascade" if anchors else "rows")
    with cab_hf.cab(model), torch.no_grad():
        model(torch.arange(300)[None] % 90 + 32)
        assert len(cab_hf.stats(model)) == num_layers


@pytest.mark.parametrize("anchors", [None, 2])
def test_calibrating_shared_attention_module_raises(anchors):
    with pytest.raises(
        ValueError, match="one attention module per layer, got .*, which serves several"
    ):
        calibrate_model(make_model_of_type("zamba").eval(), target_density=0.8, anchors=anchors)


@pytest.mark.parametrize(
    ("invalid_arguments", "error_pattern"),
    [
        ({"target_density": 2}, r"target_density must be in \(0, 1\], got 2"),
        ({"documents": 0}, "documents must be a whole number >= 1, got 0"),
        ({"documents": None}, "documents must be a whole number >= 1, got None"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"config": {"coarsen": "minmax"}}, "CabConfig has no field 'coarsen'"),
        ({"config": "none.json"}, "'none.json' is not a file"),
        ({"config": 3}, "config must be a CabConfig, a dict of its fields.*, got 3"),
        ({"config": CabConfig(**SMALL_BLOCKS_FIELDS, dense_layers=(7,))}, "dense_layers has 7"),
        ({"anchors": 0}, "anchors must be a whole number >= 1, got 0"),
        ({"length": 50}, "length must have room for 2 hidden keys per document, got 50"),
        ({"length": 2049}, "length must be at most 2048, the number of positions"),
        ({"texts": []}, r"texts must be a text or a list of texts.*got \[\]"),
        ({"texts": [" "]}, "must be a text or a list of texts that contain words"),
        ({"texts": 3}, "texts must be a text or a list of texts.*got 3"),
        (
            {"config": CabConfig(predictor="streaming")},
            "got 'streaming', which does not select blocks by mass",
        ),
        (
            {"config": CabConfig(**SMALL_BLOCKS_FIELDS, dense_layers=(0, 1, 2))},
            "must have at least one sparse layer",
        ),
    ],
)
def test_invalid_calibrate_arguments_raise(invalid_arguments, error_pattern):
    model = make_model()
    with pytest.raises(ValueError, match=error_pattern):
        calibrate_model(model, **invalid_arguments)
    assert get_attention_settings(model) == ("sdpa", None)


def test_tokenizer_of_another_model_raises():
    with pytest.raises(
        ValueError, match=r"tokenizer must produce tokens below 8, .*, got token \d+"
    ):
        calibrate_model(make_model(vocab_size=8))


def test_calibrated_config_from_invalid_file_raises(tmp_path):
    with pytest.raises(ValueError, match="'gpt-5' is not a file. Pass a file written by"):
        CabConfig.calibrated("gpt-5")
    (tmp_path / "own.json").write_text("mass: 0.5")
    with pytest.raises(ValueError, match="own.json must be a JSON file of CabConfig fields"):
        CabConfig.calibrated(tmp_path / "own.json")
