"""One threshold for a model: what it would attend at each, and the one that meets a density."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from selecting import loud
from tiny import SPARSE, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.calibration import anchors as of_anchors
from cab_hf.calibration import passes as of_models
from cab_hf.calibration.density import THRESHOLDS, densities, fitted, least_density
from cab_hf.config import Origin
from cab_hf.eval import methods  # noqa: F401  it registers rivals
from cab_hf.eval.tiny_types import tiny_model as tiny_type
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.spans import Spans

SMALL = {"query_block": 16, "key_block": 16, "min_length": 0}
# of few blocks nearly every one has a share that a query needs
CALIBRATED = CabConfig(**SMALL, share_threshold=1.0)
BY_MASS = SPARSE.changed(share_threshold=1.0, dense_tail_blocks=1)


def measured(config, length=400):
    """(q, k, call, densities) of one layer."""
    q, k = loud(q_length=length, heads=4, kv_heads=2)
    call = LayerContext(Spans.causal(1, length, length, "cpu"), 0.25, 0)
    return q, k, call, densities(q, k, call, config)


@pytest.mark.parametrize(
    "fields", [{}, {"share_threshold": 0.9}, {"dense_tail_blocks": 0}], ids=str
)
def test_densities_are_those_of_the_plans(fields):
    config = BY_MASS.changed(**fields)
    q, k, call, actual = measured(config)
    for at in range(0, len(THRESHOLDS), 5):
        plan = make_predictor(config.changed(mass_threshold=THRESHOLDS[at]))(q, k, call)
        assert float(actual[at + 1]) == pytest.approx(plan.density(), abs=1e-6)
    assert (actual.diff() >= 0).all() and actual[1] < 0.9


def test_the_least_density_is_that_of_forced_blocks():
    assert float(measured(BY_MASS)[3][0]) == pytest.approx(least_density(BY_MASS, 400))


@pytest.mark.parametrize("target", [0.55, 0.6, 0.8])
def test_the_threshold_found_meets_the_target(target):
    q, k, call, of_layer = measured(BY_MASS)
    config = fitted(BY_MASS, [{0: of_layer}], target)
    assert make_predictor(config)(q, k, call).density() == pytest.approx(target, abs=0.03)
    assert fitted(BY_MASS, [{0: of_layer}] * 2, target) == config
    # of another layer that attends nothing more than this one, in the mean
    other = torch.full_like(of_layer, float(of_layer[0]))
    assert fitted(BY_MASS, [{0: of_layer, 1: other}], target).mass_threshold < config.mass_threshold


def test_layers_of_a_cascade_count_what_their_anchor_chooses():
    of_layer = measured(BY_MASS)[3]
    config = BY_MASS.changed(predictor="cascade", anchors=(0,))
    both = {0: of_layer, 1: torch.ones_like(of_layer)}
    assert fitted(config, [both], 0.6) == fitted(config, [{0: of_layer}], 0.6)


def test_everything_is_kept_where_everything_may_be():
    assert fitted(BY_MASS, [{0: measured(BY_MASS)[3]}], 1.0).mass_threshold == 0


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(of_models, "KEYS", 2)
    # of few blocks each has more of the attention than one among many
    monkeypatch.setattr(of_anchors, "THRESHOLDS", (1.0, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01))
    tokenizer = make_tokenizer()
    return tiny_model(vocab_size=len(tokenizer)), tokenizer


def test_a_model_is_calibrated_and_saved(model, tmp_path):
    model, tokenizer = model
    fields = {"config": CALIBRATED, "length": 300, "documents": 1}
    given = cab_hf.calibrate(model, tokenizer, ["Nobody knows. So it goes."], 0.7, **fields)
    # it attends by what was found
    assert model.config._attn_implementation == "cab"
    assert model.config.cab_config == given.to_dict()
    assert given.origin == Origin("llama", layers=3, heads=6, kv_heads=2, length=300)
    given.save(tmp_path / "own.json")
    assert CabConfig.calibrated(tmp_path / "own.json") == given
    ids = torch.randint(2, 50, (1, 300), generator=torch.Generator().manual_seed(0))
    model(ids)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    assert all(0 < density < 1 for density in densities)
    assert sum(densities) / len(densities) < 0.8
    cab_hf.remove_cab(model)
    assert (model.config._attn_implementation, model.config.cab_config) == ("sdpa", None)


QUICK = {
    "target_density": 0.7,
    "config": CALIBRATED,
    "length": 300,
    "documents": 1,
}


def test_two_models_are_calibrated_at_a_time(model):
    tokenizer = model[1]
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1}
    models = [tiny_model(**sizes)]
    # of the same config
    models.append(type(models[0])(models[0].config).eval())

    def calibrated(model):
        return cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)

    alone = [calibrated(copy.deepcopy(each)) for each in models]
    with ThreadPoolExecutor(len(models)) as threads:
        assert list(threads.map(calibrated, models)) == alone


def test_a_model_in_training_is_read_as_in_eval_mode_and_left_training(model):
    tokenizer = model[1]
    torch.manual_seed(0)
    shape = {"n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 512}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), resid_pdrop=0.5, **shape))
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    training = cab_hf.calibrate(copy.deepcopy(model), tokenizer, "So it goes.", **QUICK)
    assert training == cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)
    assert [module.training for module in model.modules()] == modes
    assert training == cab_hf.calibrate(model.eval(), tokenizer, "So it goes.", **QUICK)


def test_one_text_is_one_text(model):
    model, tokenizer = model
    given = [cab_hf.calibrate(model, tokenizer, x, **QUICK) for x in ("So it.", ["So it."])]
    assert given[0] == given[1]


@pytest.mark.parametrize("anchors", [None, 1])
def test_a_density_that_cannot_be_reached_is_refused_before_anything_is_measured(model, anchors):
    model, tokenizer = model
    fields = {**QUICK, "target_density": 0.2, "anchors": anchors}
    model.forward = None
    with pytest.raises(ValueError, match=r"target_density is 0\.2; it must be at least") as refused:
        cab_hf.calibrate(model, tokenizer, "So it goes.", **fields)
    del model.forward
    fields["target_density"] = float(re.search(r"at least ([.\d]+)", str(refused.value))[1])
    cab_hf.calibrate(model, tokenizer, "So it goes.", **fields)


@pytest.mark.parametrize("kind", ["llama", "qwen3-some-sliding"])
def test_how_far_it_is_is_shown(model, kind, capfd):
    tokenizer = model[1]
    model = tiny_model(kind, vocab_size=len(tokenizer))
    cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)
    assert "calibrate: 100%" in capfd.readouterr().err


@pytest.mark.parametrize(("kind", "layers"), [("llama", 3), ("qwen3-some-sliding", 1)])
def test_more_anchors_than_sparse_layers_are_refused_before_anything_is_measured(
    model, kind, layers
):
    tokenizer = model[1]
    model = tiny_model(kind, vocab_size=len(tokenizer))
    model.forward = None
    fields = {**QUICK, "anchors": layers + 1}
    with pytest.raises(ValueError, match=f"it must be 1 to {layers}, the sparse layers"):
        cab_hf.calibrate(model, tokenizer, "So it goes.", **fields)


def test_the_tokenizer_of_another_model_is_refused(model):
    model, tokenizer = tiny_model(vocab_size=8), model[1]
    with pytest.raises(ValueError, match=r"tokenizer produced token \d+, and the model knows"):
        cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)


@pytest.mark.parametrize("anchors", [None, 1])
@pytest.mark.parametrize(
    ("weights", "damage"),
    [
        pytest.param("model.embed_tokens.weight", float("nan"), id="not-a-number"),
        # of the last layer, which no q or k shows
        pytest.param("model.layers.2.mlp.down_proj.weight", float("inf"), id="infinite"),
    ],
)
def test_a_model_that_is_not_finite_is_refused(model, anchors, weights, damage):
    model, tokenizer = model
    model.get_parameter(weights).data[:] = damage
    with pytest.raises(ValueError, match=r"outputs are not finite \(NaN or infinite\) under dense"):
        cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK, anchors=anchors)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_given_a_cascade(model):
    model, tokenizer = model
    ids = torch.randint(2, 50, (1, 300), generator=torch.Generator().manual_seed(0))
    fields = {"config": CALIBRATED, "length": 300, "documents": 2, "anchors": 2}
    given = cab_hf.calibrate(model, tokenizer, ["Nobody knows. So it goes."], 0.7, **fields)
    assert given.predictor == "cascade" and len(given.anchors) == 2 and given.anchors[0] == 0
    assert model.config.cab_config == given.to_dict()
    cab_hf.apply_cab(model)
    model(ids)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    assert sum(densities) / len(densities) < 0.8
    # another threshold for the anchors that were found, which stay
    del fields["anchors"]
    again = cab_hf.calibrate(model, tokenizer, ["So it goes."], 0.7, **fields | {"config": given})
    assert (again.anchors, again.head_map) == (given.anchors, given.head_map)


@pytest.mark.parametrize(
    ("kind", "layers", "anchors"),
    [
        pytest.param("longcat_flash", 8, None, id="two attentions a layer", marks=pytest.mark.slow),
        pytest.param("longcat_flash", 8, 2, id="two attentions a layer, anchors"),
        pytest.param("laguna", 4, 2, id="heads are told by layer", marks=pytest.mark.slow),
    ],
)
def test_layers_of_another_making_are_calibrated(model, kind, layers, anchors):
    tokenizer, model = model[1], tiny_type(kind).eval()
    fields = {"config": CALIBRATED, "length": 300, "documents": 1, "anchors": anchors}
    given = cab_hf.calibrate(model, tokenizer, ["Nobody knows. So it goes."], 0.8, **fields)
    assert given.predictor == ("cascade" if anchors else "rows")
    with cab_hf.cab(model), torch.no_grad():
        model(torch.arange(300)[None] % 90 + 32)
        assert len(cab_hf.stats(model)) == layers


@pytest.mark.parametrize("anchors", [None, 2])
def test_a_layer_without_an_index_has_no_place_in_a_table(model, anchors):
    tokenizer, model = model[1], tiny_type("zamba").eval()
    fields = {"config": CALIBRATED, "length": 300, "documents": 1, "anchors": anchors}
    with pytest.raises(ValueError, match="serves several layers and has no index"):
        cab_hf.calibrate(model, tokenizer, ["So it goes."], 0.8, **fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"target_density": 2}, r"target_density is 2; it must be in \(0, 1\]"),
        ({"target_density": 0.01}, r"target_density is 0\.01; it must be at least 0\."),
        ({"documents": 0}, "documents is 0; it must be a whole number"),
        ({"anchors": 0}, "anchors is 0; it must be a whole number"),
        ({"anchors": 9}, "anchors is 9; it must be 1 to 3, the sparse layers"),
        ({"length": 50}, "length 50 has no room for the 2 keys that are hidden in a document"),
        ({"length": 2049}, "length is 2049; it must be at most 2048, as far as the model's"),
        ({"texts": []}, r"texts is \[\]; it must be a text or a list of them, with words"),
        ({"texts": [" "]}, "it must be a text or a list of them, with words in it"),
        ({"texts": 3}, "texts is 3; it must be a text or a list of them"),
        (
            {"config": CabConfig(predictor="streaming")},
            "'streaming' does not choose blocks by their mass",
        ),
        ({"config": CabConfig(**SMALL, dense_layers=(0, 1, 2))}, "there is nothing to calibrate"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, bad, message):
    model, tokenizer = model
    fields = {"target_density": 0.6, "config": CALIBRATED, "length": 300, "documents": 1}
    fields["texts"] = ["So it goes."]
    with pytest.raises(ValueError, match=message):
        cab_hf.calibrate(model, tokenizer, **fields | bad)
    assert model.config._attn_implementation == "sdpa"


def test_what_is_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'gpt-5' is no file; give one that CabConfig.save wrote"):
        CabConfig.calibrated("gpt-5")
    (tmp_path / "own.json").write_text("mass: 0.5")
    with pytest.raises(ValueError, match="own.json must be a JSON file of CabConfig fields"):
        CabConfig.calibrated(tmp_path / "own.json")


def test_models_that_share_a_config_do_not_share_a_threshold(model):
    model, tokenizer = model
    other = type(model)(model.config)
    assert other.config is model.config
    cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)
    assert (other.config._attn_implementation, other.config.cab_config) == ("sdpa", None)


def test_another_density_gives_another_threshold(model):
    model, tokenizer = model
    fields = {"config": CALIBRATED, "length": 300, "documents": 1}
    ids = torch.arange(300)[None] % len(tokenizer)
    attended = []
    for density in (0.6, 0.8):
        cab_hf.calibrate(model, tokenizer, ["So it goes."], density, **fields)
        with torch.no_grad():
            model(ids)
        attended.append(sum(layer["density"] for layer in cab_hf.stats(model)))
        cab_hf.remove_cab(model)
    assert attended[0] < attended[1]


def test_documents_and_densities_are_the_same_twice(model):
    model, tokenizer = model
    sentences = ["Nobody knows.", "So it goes."]
    document = of_models.recall_document(tokenizer, sentences, 500, 3, 0)
    one, other = (of_models.densities_of(model, document, CALIBRATED) for _ in range(2))
    assert one.keys() == other.keys() == {0, 1, 2}
    assert all(torch.equal(one[i], other[i]) for i in range(3))
