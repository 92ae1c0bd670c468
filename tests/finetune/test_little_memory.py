"""Tiled MLPs and offloaded checkpoints: equal gradients, less memory."""

import gc
import weakref
from functools import partial

import pytest
import torch
from tensor_bytes import TensorBytes
from tiny import SIZES, tiny_model
from trained import adapted, batch, left_halfway, train_step
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from cab_hf.finetune import cost_model, loss
from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective
from cab_hf.finetune.offload import Offload
from cab_hf.finetune.tiles import compute_in_tiles, untiled_mlps

TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
LENGTH, TILE_TOKENS = 300, 64
tiled = partial(adapted, TARGETS)
step = partial(train_step, length=LENGTH)


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
def test_tiled_losses_and_gradients_equal_untiled(kind, checkpointing):
    made, norms = KINDS[kind]
    expected = step(tiled(made, checkpointing, norms=norms))
    model = tiled(made, checkpointing, norms=norms)
    assert untiled_mlps(model) == []
    compute_in_tiles(model, TILE_TOKENS)
    check_alike(step(model), expected)
    # and without gradients
    with torch.no_grad():
        torch.testing.assert_close(Objective(model)(batch(LENGTH)), expected["loss"])


def test_batch_rows_share_tiles():
    model = tiled()
    expected = train_step(model, length=100, rows=3)
    compute_in_tiles(model, 70)
    check_alike(train_step(model, length=100, rows=3), expected)


def test_recompute_repeats_dropout():
    # with repeated dropout masks, the gradient equals the slope of the loss
    model = tiled(dropout=0.3).double()
    compute_in_tiles(model, TILE_TOKENS)
    before = step(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter += 1e-6 * parameter.grad
    slope = sum((p.grad**2).sum() for p in trained).item()
    model.zero_grad()
    after = step(model)["loss"] - before["loss"]
    assert after.item() == pytest.approx(1e-6 * slope, rel=1e-3)


def test_tiles_limit_largest_mlp_tensor(monkeypatch):
    inner, length = 1024, 2048
    # logits of 128 tokens
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 2**16)
    model = tiny_model(intermediate_size=inner, num_hidden_layers=1, vocab_size=512)
    model = with_lora(model.bfloat16(), TARGETS, 4, 8).train()
    enable_gradient_checkpointing(model)

    def largest(tile):
        compute_in_tiles(model, tile)
        with TensorBytes(*model.parameters()) as tensor_bytes:
            Objective(model)(batch(length)).backward()
        return tensor_bytes.largest

    assert largest(length) >= length * inner * 2
    # q is the largest then: not float32, not of inner channels, not of the vocabulary
    assert largest(TILE_TOKENS) == length * 96 * 2


def test_checkpointed_mlp_runs_twice():
    model, calls = tiled(), []
    compute_in_tiles(model, 100)
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    step(model)
    assert len(calls) == 2 * 3


def test_experts_are_not_tiled_and_are_reported():
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes))
    model.set_experts_implementation("eager")
    model = with_lora(model, ("q_proj",), 4, 8).train()
    expected = step(model)
    model.zero_grad()
    assert untiled_mlps(model) == ["MixtralSparseMoeBlock"]
    compute_in_tiles(model, TILE_TOKENS)
    check_alike(step(model), expected)
    # the estimate does not count on tiles then
    cost = cost_model.Cost.of(model)
    assert cost_model.memory(cost, LENGTH, tile=TILE_TOKENS) == cost_model.memory(cost, LENGTH)


# --- checkpoints of layers in the host's memory

LAYERS, HIDDEN = 4, 48
CHECKPOINT = LENGTH * HIDDEN * 4
# no divisor of a checkpoint
CHUNK = 10_000
CPU = torch.device("cpu")


def four_layers(dropout=0.0):
    made = partial(tiny_model, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    return adapted(("q_proj", "o_proj", "up_proj"), made, dropout=dropout)


def offloaded(layers):
    """Return a model with the checkpoints of ``layers`` layers offloaded, and its `Offload`."""
    model, offload = four_layers(), Offload(layers, CPU, CHUNK)
    offload.reserve(CHECKPOINT)
    offload.enable(model)
    return model, offload


def free(offload):
    return sum(chunk.nbytes for chunk in offload._free)


@pytest.mark.parametrize("layers", [0, 1, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])
def test_offloaded_step_is_bit_identical(layers, dropout):
    model = four_layers(dropout)
    expected = step(model).values()
    Offload(layers, CPU, CHUNK).enable(model)
    # the second step reuses the memory of the first
    for _ in range(2):
        assert all(map(torch.equal, step(model).values(), expected))


def test_pinned_memory_is_allocated_once_and_released():
    model, offload = offloaded(3)
    # 57,600 bytes are six chunks
    for length in (LENGTH, 100, LENGTH):
        assert offload.host_bytes == free(offload) == 3 * 6 * CHUNK
        train_step(model, length)
    assert offload.host_bytes == free(offload) == 3 * 6 * CHUNK


def test_two_checkpoints_at_most_are_on_the_device():
    model, offload = offloaded(LAYERS)
    kept, most = weakref.WeakSet(), []
    pack, unpack = offload._pack, offload._unpack

    def on_device():
        return sum(each.tensor is not None for each in kept)

    def packing(*args):
        made = pack(*args)
        if not isinstance(made, torch.Tensor):
            kept.add(made)
            most.append(on_device())
        return made

    def unpacking(made):
        result = unpack(made)
        # torch also saves tensors other than checkpoints
        if not isinstance(made, torch.Tensor):
            most.append(on_device())
        return result

    offload._pack, offload._unpack = packing, unpacking
    step(model)
    assert most == [1] * LAYERS + [2] * (LAYERS - 1) + [1] and not kept


def test_aborted_backward_releases_memory():
    model, offload = offloaded(LAYERS)
    expected = step(model).values()
    with left_halfway(model, 2):
        step(model)
    gc.collect()
    assert free(offload) == offload.host_bytes
    assert all(map(torch.equal, step(model).values(), expected))


def test_two_forward_passes_can_be_open():
    model = four_layers()
    _, *expected = step(model).values()
    Offload(3, CPU, CHUNK).enable(model)
    model.zero_grad()
    losses = [Objective(model)(batch(LENGTH)) for _ in range(2)]
    sum(losses).backward()
    trained = (p for p in model.parameters() if p.requires_grad)
    for parameter, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_offloading_more_layers_than_model_has_raises():
    with pytest.raises(ValueError, match="offload_layers must be at most 4, .*, got 5"):
        Offload(LAYERS + 1, CPU).enable(four_layers())
