"""What the layers of one forward pass share: each is told who it is, and may hand plans on."""

import torch
from tiny import SPARSE, tiny_model, tokens

import cab_hf
from cab_hf.predictors import CurvaturePredictor, register_predictor

DECIDED = []


class FirstLayerDecides(CurvaturePredictor):
    def summarise(self, k, valid=None):
        return k, valid

    def choose(self, q, summary, call):
        if "plan" not in call.handed:
            DECIDED.append(call.layer)
            call.handed["plan"] = super().choose(q, super().summarise(*summary), call)
        return call.handed["plan"]


register_predictor("first-layer-decides", FirstLayerDecides)


def test_a_plan_is_handed_from_layer_to_layer_and_not_to_the_next_pass():
    DECIDED.clear()
    model = tiny_model()
    with cab_hf.cab(model, SPARSE, predictor="first-layer-decides"), torch.no_grad():
        model(tokens(1, 300))
        densities = {row["density"] for row in cab_hf.stats(model, reset=True)}
        assert DECIDED == [0] and len(densities) == 1
        model(tokens(1, 300))
    assert DECIDED == [0, 0]


def test_a_layer_run_again_by_checkpointing_finds_what_was_handed():
    ids = tokens(1, 300)
    model = tiny_model().train()

    def gradients():
        DECIDED.clear()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    with cab_hf.cab(model, SPARSE, predictor="first-layer-decides"):
        expected = gradients()
        model.gradient_checkpointing_enable()
        for found, wanted in zip(gradients(), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert DECIDED == [0]
