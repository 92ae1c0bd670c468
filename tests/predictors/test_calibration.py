"""Budgets a head: what is lost at each option, and how a density is spent."""

import copy
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from tiny import qkv, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel
from words import make_tokenizer

import cab_hf
from cab_hf import CabConfig
from cab_hf.budgets import budgets_of
from cab_hf.calibration import passes as of_models
from cab_hf.calibration.budgets import (
    Needles,
    allocate,
    measure,
    tables,
)
from cab_hf.config import Origin
from cab_hf.eval.tiny_types import tiny_model as tiny_type
from cab_hf.needles import split_sentences
from cab_hf.plan import Spans
from cab_hf.predictors import LayerContext, make_predictor

SMALL = {"query_block": 16, "key_block": 16, "min_length": 0}
EVERYTHING = {"top_p": 1.0, "top_k_share": 0.0, "exact_queries": 0}
FORCED = {"top_p": 0.0, "top_k_share": 0.0, "exact_queries": 0}
EXACT = {"top_p": 0.9, "top_k_share": 0.0, "exact_queries": 2}
NO_NEEDLES = Needles(*torch.zeros(3, 0, dtype=torch.int64))


def losses_of(q, k, options, needles=NO_NEEDLES, **fields):
    config = CabConfig(**SMALL | fields)
    call = LayerContext(Spans.causal(1, q.shape[2], k.shape[2], "cpu"), q.shape[-1] ** -0.5, 3)
    return measure(q, k, call, config, options, needles)


def test_what_attends_everything_loses_nothing():
    q, k, _ = qkv(q_length=150, heads=4, kv_heads=2)
    actual = losses_of(q, k, [EVERYTHING, FORCED])
    torch.testing.assert_close(actual.missed[:, 0], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(actual.density[:, 0], torch.ones(4, dtype=torch.float64))
    assert (actual.missed[:, 1] > 0).all() and (actual.density[:, 1] < 0.9).all()


def test_missed_mass_is_that_of_the_true_shares_by_hand():
    q, k, _ = qkv(q_length=70, heads=2, kv_heads=1)
    actual = losses_of(q, k, [FORCED], dense_tail_blocks=0)
    plan = make_predictor(
        CabConfig(**SMALL, dense_tail_blocks=0, top_p=((0.0, 0.0),), top_k_share=0)
    )(q, k, LayerContext(Spans.causal(1, 70, 70, "cpu"), q.shape[-1] ** -0.5, 0))
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    seen = torch.ones(70, 70, dtype=torch.bool).tril()
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    left = (shares * ~plan.token_mask()).sum(-1).square().mean(-1)
    torch.testing.assert_close(actual.missed[:, 0].float(), left[0], atol=1e-5, rtol=1e-4)
    attended = plan.token_mask().sum((-1, -2)) / seen.sum()
    torch.testing.assert_close(actual.density[:, 0].float(), attended[0])


def test_a_needle_outside_the_kept_blocks_is_missed():
    q, k, _ = qkv(q_length=160, heads=2, kv_heads=2)
    # head 0 looks for keys 40 to 43 from query 100 on, head 1 for nothing
    k[0, 0, 40:44] = 8.0
    q[0, 0, 100] = 8.0
    needles = Needles(torch.tensor([100]), torch.tensor([40]), torch.tensor([44]))
    actual = losses_of(q, k, [FORCED, EXACT, EVERYTHING], needles, dense_tail_blocks=0)
    assert actual.needle[0, 0] > 0.9
    assert actual.needle[0, 2] == 0 and actual.needle[1, 0] < 0.2


@pytest.mark.parametrize("target", [0.3, 0.5, 0.8])
def test_a_density_is_spent_where_it_saves_most(target):
    torch.manual_seed(0)
    loss = torch.rand(2, 2, 4).sort(-1, descending=True).values
    cost = torch.rand(2, 2, 4).sort(-1).values * 0.9
    choice = allocate(loss, cost, target)
    spent = cost.gather(-1, choice.unsqueeze(-1)).mean()
    assert spent <= target
    lost = loss.gather(-1, choice.unsqueeze(-1)).sum()
    # nobody who spends no more loses less
    flat_loss, flat_cost = loss.reshape(4, 4), cost.reshape(4, 4)
    for other in product(range(4), repeat=4):
        picked = torch.tensor(other).unsqueeze(-1)
        if flat_cost.gather(-1, picked).mean() <= spent:
            assert flat_loss.gather(-1, picked).sum() >= lost - 1e-6


def test_the_same_losses_are_allocated_alike():
    torch.manual_seed(1)
    loss, cost = torch.rand(3, 5, 6), torch.rand(3, 5, 6)
    assert torch.equal(allocate(loss, cost, 0.4), allocate(loss.clone(), cost.clone(), 0.4))


def test_a_target_below_what_is_forced_is_refused():
    with pytest.raises(ValueError, match=r"target_density is 0\.1; it must be at least 0\.300"):
        allocate(torch.rand(1, 2, 2), torch.full((1, 2, 2), 0.3, dtype=torch.float64), 0.1)


def test_heads_are_scored_alike():
    # heads that differ in how they are scored take launches of their own
    exact = make_predictor(CabConfig(**SMALL, exact_queries=4)).options()
    assert {tuple(option) for option in exact} == {("top_p", "top_k_share")}
    assert all(option["top_p"] < 1 for option in exact)
    estimated = make_predictor(CabConfig(**SMALL, exact_queries=0)).options()
    assert {"top_p": 1.0, "top_k_share": 0.0} in estimated


def test_tables_give_each_head_its_option():
    made = tables([FORCED, EXACT], torch.tensor([[0, 1], [1, 1]]))
    assert made["top_p"] == ((0.0, 0.9), (0.9, 0.9))
    assert made["exact_queries"] == ((0, 2), (2, 2))
    assert budgets_of(CabConfig(**made), 0, 2).exact(2) == (1,)


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(of_models, "KEYS", 2)
    tokenizer = make_tokenizer()
    return tiny_model(vocab_size=len(tokenizer)), tokenizer


@pytest.mark.parametrize("predictor", ["curvature", "antidiagonal"])
def test_a_model_is_calibrated_and_saved(model, predictor, tmp_path):
    model, tokenizer = model
    config = CabConfig(**SMALL, predictor=predictor)
    given = cab_hf.calibrate(
        model, tokenizer, ["Nobody knows. So it goes."], 0.7, config=config, length=300, documents=1
    )
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


# few options, so that there is little to measure
QUICK = {
    "target_density": 0.7,
    "config": CabConfig(**SMALL, predictor="antidiagonal"),
    "length": 300,
    "documents": 1,
}


def test_models_that_share_a_config_do_not_share_budgets(model):
    model, tokenizer = model
    other = type(model)(model.config)
    assert other.config is model.config
    cab_hf.calibrate(model, tokenizer, "So it goes.", **QUICK)
    assert (other.config._attn_implementation, other.config.cab_config) == ("sdpa", None)


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


def test_one_text_is_one_text(model, monkeypatch):
    model, tokenizer = model
    read = []
    monkeypatch.setattr(
        of_models, "split_sentences", lambda text: read.append(text) or split_sentences(text)
    )
    for texts in ("So it goes.", ["So it goes."]):
        cab_hf.calibrate(model, tokenizer, texts, **QUICK)
    assert read == ["So it goes."] * 2


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
    with pytest.raises(ValueError, match=r"tokenizer has made token \d+, and the model knows"):
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
    fields = {"config": CabConfig(**SMALL), "length": 300, "documents": 2, "anchors": 2}
    given = cab_hf.calibrate(model, tokenizer, ["Nobody knows. So it goes."], 0.7, **fields)
    assert given.predictor == "cascade" and len(given.anchors) == 2 and given.anchors[0] == 0
    assert model.config.cab_config == given.to_dict()
    cab_hf.apply_cab(model)
    model(ids)
    densities = [layer["density"] for layer in cab_hf.stats(model)]
    assert sum(densities) / len(densities) < 0.8
    # budgets of the anchors that were found, which stay
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
    fields = {"config": CabConfig(**SMALL), "length": 300, "documents": 1, "anchors": anchors}
    given = cab_hf.calibrate(model, tokenizer, ["Nobody knows. So it goes."], 0.8, **fields)
    assert len(given.top_p) == layers
    with cab_hf.cab(model), torch.no_grad():
        model(torch.arange(300)[None] % 90 + 32)
        assert len(cab_hf.stats(model)) == layers


@pytest.mark.parametrize("anchors", [None, 2])
def test_a_layer_without_an_index_has_no_place_in_a_table(model, anchors):
    tokenizer, model = model[1], tiny_type("zamba").eval()
    fields = {"config": CabConfig(**SMALL), "length": 300, "documents": 1, "anchors": anchors}
    with pytest.raises(ValueError, match="serves several layers and has no index"):
        cab_hf.calibrate(model, tokenizer, ["So it goes."], 0.8, **fields)


def test_another_density_gives_other_budgets(model):
    model, tokenizer = model
    fields = {"config": CabConfig(**SMALL), "length": 300, "documents": 1}
    ids = torch.arange(300)[None] % len(tokenizer)
    attended = []
    for density in (0.6, 0.8):
        cab_hf.calibrate(model, tokenizer, ["So it goes."], density, **fields)
        with torch.no_grad():
            model(ids)
        attended.append(sum(layer["density"] for layer in cab_hf.stats(model)))
        cab_hf.remove_cab(model)
    assert attended[0] < attended[1]


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
        ({"config": CabConfig(predictor="streaming")}, "'streaming' knows no budgets a head"),
        ({"config": CabConfig(**SMALL, dense_layers=(0, 1, 2))}, "there is nothing to share"),
    ],
)
def test_what_cannot_be_calibrated_is_refused(model, bad, message):
    model, tokenizer = model
    fields = {"target_density": 0.6, "config": CabConfig(**SMALL), "length": 300, "documents": 1}
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


def test_documents_and_losses_are_the_same_twice(model):
    model, tokenizer = model
    options = make_predictor(CabConfig(**SMALL)).options()
    sentences = ["Nobody knows.", "So it goes."]
    document = of_models.recall_document(tokenizer, sentences, 500, 3, 0)
    one, other = (of_models.losses(model, document, CabConfig(**SMALL), options) for _ in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[0][i], other[0][i]) for i in range(3))
