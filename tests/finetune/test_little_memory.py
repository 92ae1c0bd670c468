"""MLPs in tiles of tokens and offloaded checkpoints save memory with the same gradients."""

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


def assert_close(actual, expected):
    """Assert that two dicts, of the loss and the gradients by name, are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] - tensor).norm() <= 3e-6 * tensor.norm(), name


# by name: (function that returns the model, True if norms are trained)
KINDS = {
    "llama": (tiny_model, False),
    "trained norms": (tiny_model, True),
    "norms of queries": (partial(tiny_model, "qwen3"), False),
    "norms after layers": (lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)), False),
    "norms with a weight per head": (
        lambda: CohereForCausalLM(CohereConfig(**SIZES, use_qk_norm=True)),
        False,
    ),
}


@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
@pytest.mark.parametrize("kind", KINDS)
def test_tiled_losses_and_gradients_equal_untiled(kind, checkpointing):
    make, norms = KINDS[kind]
    expected = step(tiled(make, checkpointing, norms=norms))
    model = tiled(make, checkpointing, norms=norms)
    assert untiled_mlps(model) == []
    compute_in_tiles(model, TILE_TOKENS)
    assert_close(step(model), expected)
    # the loss under no_grad is computed in tiles, too
    with torch.no_grad():
        torch.testing.assert_close(Objective(model)(batch(LENGTH)), expected["loss"])


def test_batch_rows_share_tiles():
    model = tiled()
    expected = train_step(model, length=100, rows=3)
    compute_in_tiles(model, 70)
    assert_close(train_step(model, length=100, rows=3), expected)


def test_recompute_repeats_dropout():
    # the gradient equals the slope of the loss only if recompute draws the same dropout masks
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
    # limit a chunk of logits to 2^16 elements: 128 tokens x 512 words
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
    # in tiles, the largest tensor is q in bfloat16; MLP tensors and logits are smaller
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
    assert_close(step(model), expected)
    # the memory estimate also ignores the tile size for this model
    cost = cost_model.Cost.of(model)
    assert cost_model.memory(cost, LENGTH, tile=TILE_TOKENS) == cost_model.memory(cost, LENGTH)


LAYERS, HIDDEN = 4, 48
CHECKPOINT_BYTES = LENGTH * HIDDEN * 4
# bytes per chunk of host memory; the bytes of a checkpoint are no multiple of this number
CHUNK_BYTES = 10_000
CPU = torch.device("cpu")


def four_layers(dropout=0.0):
    """Return a four-layer model with LoRA adapters and gradient checkpointing."""
    make = partial(tiny_model, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    return adapted(("q_proj", "o_proj", "up_proj"), make, dropout=dropout)


def offloaded(layers):
    """Return (model, its `Offload`), which offloads the checkpoints of the first ``layers``."""
    model, offload = four_layers(), Offload(layers, CPU, CHUNK_BYTES)
    offload.reserve(CHECKPOINT_BYTES)
    offload.enable(model)
    return model, offload


def free_bytes(offload):
    """Return the bytes of all unused chunks of host memory."""
    return sum(chunk.nbytes for chunk in offload._free)


@pytest.mark.parametrize("layers", [0, 1, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])
def test_offloaded_step_is_bit_identical(layers, dropout):
    model = four_layers(dropout)
    expected = step(model).values()
    Offload(layers, CPU, CHUNK_BYTES).enable(model)
    # the second step reuses the host memory of the first
    for _ in range(2):
        assert all(map(torch.equal, step(model).values(), expected))


def test_pinned_memory_is_allocated_once_and_released():
    model, offload = offloaded(3)
    # the 57,600 bytes of a checkpoint take six chunks
    for length in (LENGTH, 100, LENGTH):
        assert offload.host_bytes == free_bytes(offload) == 3 * 6 * CHUNK_BYTES
        train_step(model, length)
    assert offload.host_bytes == free_bytes(offload) == 3 * 6 * CHUNK_BYTES


def test_two_checkpoints_at_most_are_on_the_device():
    model, offload = offloaded(LAYERS)
    checkpoints, counts = weakref.WeakSet(), []
    pack, unpack = offload._pack, offload._unpack

    def num_on_device():
        return sum(each.tensor is not None for each in checkpoints)

    def counting_pack(index, hidden_address, x):
        packed = pack(index, hidden_address, x)
        # only offloaded checkpoints are packed; other saved tensors stay tensors
        if not isinstance(packed, torch.Tensor):
            checkpoints.add(packed)
            counts.append(num_on_device())
        return packed

    def counting_unpack(packed):
        tensor = unpack(packed)
        if not isinstance(packed, torch.Tensor):
            counts.append(num_on_device())
        return tensor

    offload._pack, offload._unpack = counting_pack, counting_unpack
    step(model)
    assert counts == [1] * LAYERS + [2] * (LAYERS - 1) + [1] and not checkpoints


def test_aborted_backward_releases_memory():
    model, offload = offloaded(LAYERS)
    expected = step(model).values()
    with left_halfway(model, 2):
        step(model)
    gc.collect()
    assert free_bytes(offload) == offload.host_bytes
    assert all(map(torch.equal, step(model).values(), expected))


def test_two_forward_passes_can_be_open():
    model = four_layers()
    _, *expected = step(model).values()
    Offload(3, CPU, CHUNK_BYTES).enable(model)
    model.zero_grad()
    losses = [Objective(model)(batch(LENGTH)) for _ in range(2)]
    sum(losses).backward()
    trained = (p for p in model.parameters() if p.requires_grad)
    for parameter, gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_offloading_more_layers_than_model_has_raises():
    with pytest.raises(ValueError, match="offload_layers must be at most 4, .*, got 5"):
        Offload(LAYERS + 1, CPU).enable(four_layers())
