"""Tiles of a sequence: the same losses and gradients, and nothing of the size of all tokens."""

from functools import partial

import pytest
import torch
import trained
from held import Held
from tiny import SIZES, tiny_model
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from cab_hf.finetune import loss, meter
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective
from cab_hf.finetune.tiles import compute_in_tiles, untiled_mlps

TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
LENGTH, TILE_TOKENS = 300, 64


adapted = partial(trained.adapted, TARGETS)
batch, learnt = (partial(each, length=LENGTH) for each in (trained.batch, trained.learnt))


def check_alike(results, expected):
    assert results.keys() == expected.keys()
    for name, wanted in expected.items():
        assert (results[name] - wanted).norm() <= 3e-6 * wanted.norm(), name


KINDS = {
    "llama": (tiny_model, False),
    "norms trained": (tiny_model, True),
    "norms of heads": (partial(tiny_model, "qwen3"), False),
    "norms behind": (lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)), False),
    "a norm for each head": (
        lambda: CohereForCausalLM(CohereConfig(**SIZES, use_qk_norm=True)),
        False,
    ),
}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointed", "all kept"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_are_those_of_all_tokens_at_once(kind, checkpointing):
    made, norms = KINDS[kind]
    expected = learnt(adapted(made, checkpointing, norms=norms))
    model = adapted(made, checkpointing, norms=norms)
    assert untiled_mlps(model) == []
    compute_in_tiles(model, TILE_TOKENS)
    check_alike(learnt(model), expected)


def test_rows_of_a_batch_share_tiles():
    expected = learnt(adapted(), length=100, rows=3)
    model = adapted()
    compute_in_tiles(model, 70)
    check_alike(learnt(model, length=100, rows=3), expected)


def test_dropout_is_the_same_again_in_the_backward_pass():
    # the gradient of a loss whose dropout is drawn alike is its slope
    model = adapted(dropout=0.3).double()
    compute_in_tiles(model, TILE_TOKENS)
    before = learnt(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter += 1e-6 * parameter.grad
    slope = sum((p.grad**2).sum() for p in trained).item()
    model.zero_grad()
    after = learnt(model)["loss"] - before["loss"]
    assert after.item() == pytest.approx(1e-6 * slope, rel=1e-3)


def test_nothing_of_all_tokens_by_all_inner_channels_is_made(monkeypatch):
    inner, length = 1024, 2048
    # logits of 128 tokens
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 2**16)
    model = tiny_model(intermediate_size=inner, num_hidden_layers=2, vocab_size=512)
    model = with_lora(model.bfloat16(), TARGETS, 4, 8).train()
    enable_gradient_checkpointing(model)

    def largest(tile):
        compute_in_tiles(model, tile)
        with Held(*model.parameters()) as held:
            Objective(model)(batch(length=length)).backward()
        return held.largest

    assert largest(length) >= length * inner * 2
    # q is the largest then: not float32, not of inner channels, not of the vocabulary
    assert largest(TILE_TOKENS) == length * 96 * 2


def test_an_mlp_is_computed_twice_and_not_three_times():
    model, calls = adapted(), []
    compute_in_tiles(model, 100)
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    learnt(model)
    assert len(calls) == 2 * 3


def test_without_gradients_results_are_the_same():
    model = adapted()
    with torch.no_grad():
        expected = Objective(model)(batch())
        compute_in_tiles(model, TILE_TOKENS)
        torch.testing.assert_close(Objective(model)(batch()), expected)


def test_experts_are_left_as_they_are_and_named():
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    model.set_experts_implementation("eager")
    model = with_lora(model, ("q_proj",), 4, 8).train()
    expected = learnt(model)
    model.zero_grad()
    assert untiled_mlps(model) == ["MixtralSparseMoeBlock"]
    compute_in_tiles(model, TILE_TOKENS)
    check_alike(learnt(model), expected)
    # the estimate does not count on tiles then
    cost = meter.Cost.of(model)
    assert meter.memory(cost, LENGTH, tile=TILE_TOKENS) == meter.memory(cost, LENGTH)
