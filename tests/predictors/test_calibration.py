"""Calibration: measure the density at each threshold, and fit a threshold to a density."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from selecting import loud
from tiny import SPARSE, tiny_model
from tiny_types import tiny_model as tiny_type
from transformers import GPT2Config, GPT2LMHeadModel
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.calibration import anchors as anchor_calibration
from cab_hf.calibration.density import (
    THRESHOLDS,
    densities,
    fit_threshold,
    least_density,
    most_density,
)
from cab_hf.config import Origin
from cab_hf.eval import methods  # noqa: F401  registers predictors of other methods
from cab_hf.patches import calibration as model_calibration
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor

SMALL = {"query_block": 16, "key_block": 16, "min_length": 0}
# share_threshold 1.0 turns off selection by maximum share, which in short sequences would select
# nearly every block
CALIBRATED = CabConfig(**SMALL, share_threshold=1.0)
BY_MASS = SPARSE.changed(share_threshold=1.0, dense_tail_blocks=1)


def measured_layer(config, length=400):
    """Return (q, k, `LayerContext`, density at each threshold) of one layer."""
    q, k = loud(q_length=length, heads=4, kv_heads=2)
    call = LayerContext(KeyRanges.causal(1, length, length, "cpu"), 0.25, 0)
    return q, k, call, densities(q, k, call, config)


@pytest.mark.parametrize(
    "fields",
    [{}, {"share_threshold": 0.9}, {"dense_tail_blocks": 0}, {"max_density": 0.7}],
    ids=str,
)
def test_densities_equal_plan_densities(fields):
    config = BY_MASS.changed(**fields)
    q, k, call, actual = measured_layer(config)
    for index in range(0, len(THRESHOLDS), 5):
        plan = make_predictor(config.changed(mass_threshold=THRESHOLDS[index]))(q, k, call)
        assert float(actual[index + 1]) == pytest.approx(plan.density(), abs=1e-6)
    assert (actual.diff() >= 0).all() and actual[1] < 0.9
    # the last threshold is 0, at which all blocks within max_density are selected
    assert float(actual[-1]) == pytest.approx(most_density(config, 400))


def test_least_density_equals_forced_blocks():
    assert float(measured_layer(BY_MASS)[3][0]) == pytest.approx(least_density(BY_MASS, 400))


@pytest.mark.parametrize("target", [0.55, 0.6, 0.8])
def test_fitted_threshold_reaches_target(target):
    q, k, call, of_layer = measured_layer(BY_MASS)
    config = fit_threshold(BY_MASS, [{0: of_layer}], target)
    assert make_predictor(config)(q, k, call).density() == pytest.approx(target, abs=0.03)
    assert fit_threshold(BY_MASS, [{0: of_layer}] * 2, target) == config
    # with a second layer whose density never grows, the same mean needs a lower threshold
    other = torch.full_like(of_layer, float(of_layer[0]))
    assert (
        fit_threshold(BY_MASS, [{0: of_layer, 1: other}], target).mass_threshold
        < config.mass_threshold
    )


@pytest.mark.parametrize(
    ("at_zero", "target", "threshold"),
    [(1.0, 1.0, 0.0), (0.9, 0.85, 0.0), (0.9, 0.72, THRESHOLDS[-1]), (0.7, 0.8, 0.0)],
)
def test_unreachable_target_selects_nearest_density(at_zero, target, threshold):
    at_thresholds = torch.linspace(0.3, 0.7, len(THRESHOLDS) + 1)
    of_layer = torch.cat((at_thresholds, torch.tensor([at_zero]))).double()
    found = fit_threshold(BY_MASS, [{0: of_layer}], target).mass_threshold
    assert found == pytest.approx(threshold, rel=0.01)


def test_cascade_layers_count_the_density_of_their_anchor():
    of_layer = measured_layer(BY_MASS)[3]
    config = BY_MASS.changed(predictor="cascade", anchors=(0,))
    both = {0: of_layer, 1: torch.ones_like(of_layer)}
    assert fit_threshold(config, [both], 0.6) == fit_threshold(config, [{0: of_layer}], 0.6)


def test_target_density_1_selects_threshold_0():
    assert fit_threshold(BY_MASS, [{0: measured_layer(BY_MASS)[3]}], 1.0).mass_threshold == 0


@pytest.fixture(autouse=True)
def _few_keys_and_thresholds(monkeypatch):
    monkeypatch.setattr(model_calibration, "KEYS", 2)
    # higher than the defaults: a short sequence has few blocks, each with a large share of the mass
    monkeypatch.setattr(
        anchor_calibration, "THRESHOLDS", (1.0, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01)
    )


TOKENIZER = make_tokenizer()
IDS = torch.randint(2, 50, (1, 300), generator=torch.Generator().manual_seed(0))


def new_model(kind="llama", **changes):
    """Return a tiny model whose vocabulary has the size of `TOKENIZER`."""
    return tiny_model(kind, **{"vocab_size": len(TOKENIZER)} | changes)


def calibrated(model, texts="So it goes.", target_density=0.7, **changes):
    """Calibrate the model on one sequence of 300 tokens, and return the calibrated config."""
    fields = {"config": CALIBRATED, "length": 300, "documents": 1, **changes}
    return cab_hf.calibrate(model, TOKENIZER, texts, target_density, **fields)


def attention_settings(model):
    """Return the attention implementation and the cab config of a model."""
    return model.config._attn_implementation, model.config.cab_config


@torch.no_grad()
def mean_density(model):
    """Return the mean density of the layers of a model for `IDS`."""
    cab_hf.stats(model, reset=True)
    model(IDS)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    return sum(densities) / len(densities)


def test_calibrate_sets_and_saves_config(tmp_path):
    model = new_model()
    config = calibrated(model)
    # `calibrate` has applied the config to the model
    assert attention_settings(model) == ("cab", config.to_dict())
    assert config.origin == Origin("llama", layers=3, heads=6, kv_heads=2, length=300)
    config.save(tmp_path / "own.json")
    assert CabConfig.calibrated(tmp_path / "own.json") == config
    assert 0.5 < mean_density(model) < 0.8
    assert attention_settings(cab_hf.remove_cab(model)) == ("sdpa", None)
    # a string and a list with this string are equivalent
    assert calibrated(model, ["So it goes."]) == config


def test_calibrating_one_model_leaves_another_unchanged():
    one = new_model(num_hidden_layers=1)
    # ``one`` and ``other`` share a config object, which calibration of one must not change
    other = type(one)(one.config).eval()
    expected = [calibrated(copy.deepcopy(other)), calibrated(one)][::-1]
    assert attention_settings(other) == ("sdpa", None)
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(calibrated, (one, other))) == expected


def test_calibrate_uses_eval_mode_and_restores_training_mode():
    torch.manual_seed(0)
    shape = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(TOKENIZER), resid_pdrop=0.5, **shape))
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    training = calibrated(copy.deepcopy(model))
    assert training == calibrated(model)
    assert [module.training for module in model.modules()] == modes
    assert training == calibrated(model.eval())


@pytest.mark.parametrize("anchors", [None, 1])
def test_unreachable_density_raises_before_forward_pass(anchors):
    model = new_model()
    model.forward = None
    with pytest.raises(
        ValueError, match=r"target_density must be at least .*, got 0\.2"
    ) as refused:
        calibrated(model, target_density=0.2, anchors=anchors)
    del model.forward
    least = float(re.search(r"at least ([.\d]+)", str(refused.value))[1])
    calibrated(model, target_density=least, anchors=anchors)


@pytest.mark.parametrize("anchors", [None, 1])
def test_max_density_is_part_of_calibration(anchors):
    model, config = new_model(), CALIBRATED.changed(max_density=0.75)
    calibrated(model, target_density=0.65, config=config, anchors=anchors)
    assert mean_density(model) == pytest.approx(0.65, abs=0.05)


@pytest.mark.parametrize("anchors", [None, 1])
def test_target_above_max_density_raises_before_forward_pass(anchors):
    model, config = new_model(), CALIBRATED.changed(max_density=0.6)
    model.forward = None
    with pytest.raises(
        ValueError, match=r"must be at most .* max_density=0\.6 .*, got 0\.8"
    ) as error:
        calibrated(model, target_density=0.8, config=config, anchors=anchors)
    del model.forward
    most = float(re.search(r"at most ([.\d]+)", str(error.value))[1])
    calibrated(model, target_density=most, config=config, anchors=anchors)
    assert mean_density(model) == pytest.approx(most, abs=0.03)


def test_cascade_reaches_density_below_anchor_thresholds(monkeypatch):
    monkeypatch.setattr(anchor_calibration, "THRESHOLDS", (1.0, 0.5))
    model = new_model()
    config = calibrated(model, anchors=1)
    assert config.predictor == "cascade" and config.mass_threshold < 0.5
    assert mean_density(model) == pytest.approx(0.7, abs=0.1)


def test_calibrate_accepts_dict_or_file(tmp_path):
    CALIBRATED.save(tmp_path / "own.json")
    path = tmp_path / "own.json"
    by_config = calibrated(new_model())
    for config in (CALIBRATED.to_dict(), str(path), path):
        assert calibrated(new_model(), config=config) == by_config


sliding = pytest.mark.parametrize(("kind", "layers"), [("llama", 3), ("qwen3-some-sliding", 1)])


@sliding
def test_calibrate_shows_progress_per_layer(kind, layers, capfd):
    calibrated(new_model(kind))
    shown = capfd.readouterr().err
    assert "calibrate: 100%" in shown and f"{layers}/{layers}" in shown


@sliding
def test_too_many_anchors_raise_before_forward_pass(kind, layers):
    model = new_model(kind)
    model.forward = None
    with pytest.raises(
        ValueError, match=f"anchors must be 1 to {layers}, the number of sparse layers"
    ):
        calibrated(model, anchors=layers + 1)


@pytest.mark.parametrize("anchors", [None, 1])
@pytest.mark.parametrize(
    ("weights", "damage"),
    [
        pytest.param("model.embed_tokens.weight", float("nan"), id="not-a-number"),
        # no q or k depends on the last MLP, so only its output is not finite
        pytest.param("model.layers.2.mlp.down_proj.weight", float("inf"), id="infinite"),
    ],
)
def test_nonfinite_model_raises(anchors, weights, damage):
    model = new_model()
    model.get_parameter(weights).data[:] = damage
    with pytest.raises(ValueError, match=r"outputs are not finite \(NaN or infinite\) under dense"):
        calibrated(model, anchors=anchors)
    assert attention_settings(model) == ("sdpa", None)


def test_calibrate_with_anchors_sets_cascade_config():
    model = new_model()
    config = calibrated(model, documents=2, anchors=2)
    assert config.predictor == "cascade" and len(config.anchors) == 2 and config.anchors[0] == 0
    assert attention_settings(model) == ("cab", config.to_dict())
    assert 0.5 < mean_density(model) < 0.8
    # calibrating a cascade config again keeps anchors and head map, and changes the threshold
    again = calibrated(model, target_density=0.6, config=config)
    assert (again.anchors, again.head_map) == (config.anchors, config.head_map)
    assert again.mass_threshold > config.mass_threshold


@pytest.mark.parametrize(
    ("kind", "layers", "anchors"),
    [
        pytest.param("longcat_flash", 8, None, id="two attentions a layer", marks=pytest.mark.slow),
        pytest.param("longcat_flash", 8, 2, id="two attentions a layer, anchors"),
        pytest.param("laguna", 4, 2, id="head numbers per layer", marks=pytest.mark.slow),
    ],
)
def test_unusual_layer_structures_are_calibrated(kind, layers, anchors):
    model = tiny_type(kind).eval()
    config = calibrated(model, ["Nobody knows. So it goes."], 0.8, anchors=anchors)
    assert config.predictor == ("cascade" if anchors else "rows")
    with cab_hf.cab(model), torch.no_grad():
        model(torch.arange(300)[None] % 90 + 32)
        assert len(cab_hf.stats(model)) == layers


@pytest.mark.parametrize("anchors", [None, 2])
def test_shared_attention_module_raises(anchors):
    with pytest.raises(
        ValueError, match="one attention module per layer, got .*, which serves several"
    ):
        calibrated(tiny_type("zamba").eval(), target_density=0.8, anchors=anchors)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"target_density": 2}, r"target_density must be in \(0, 1\], got 2"),
        ({"documents": 0}, "documents must be a whole number >= 1, got 0"),
        ({"documents": None}, "documents must be a whole number >= 1, got None"),
        ({"seed": 1.5}, "seed must be a whole number, got 1.5"),
        ({"config": {"coarsen": "minmax"}}, "CabConfig has no field 'coarsen'"),
        ({"config": "none.json"}, "'none.json' is not a file"),
        ({"config": 3}, "config must be a CabConfig, a dict of its fields.*, got 3"),
        ({"config": CabConfig(**SMALL, dense_layers=(7,))}, "dense_layers has 7"),
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
            {"config": CabConfig(**SMALL, dense_layers=(0, 1, 2))},
            "must have at least one sparse layer",
        ),
    ],
)
def test_invalid_calibrate_arguments_raise(bad, message):
    model = new_model()
    with pytest.raises(ValueError, match=message):
        calibrated(model, **bad)
    assert attention_settings(model) == ("sdpa", None)


def test_tokenizer_of_another_model_raises():
    with pytest.raises(
        ValueError, match=r"tokenizer must produce tokens below 8, .*, got token \d+"
    ):
        calibrated(new_model(vocab_size=8))


def test_calibrated_config_from_invalid_file_raises(tmp_path):
    with pytest.raises(ValueError, match="'gpt-5' is not a file. Pass a file written by"):
        CabConfig.calibrated("gpt-5")
    (tmp_path / "own.json").write_text("mass: 0.5")
    with pytest.raises(ValueError, match="own.json must be a JSON file of CabConfig fields"):
        CabConfig.calibrated(tmp_path / "own.json")
