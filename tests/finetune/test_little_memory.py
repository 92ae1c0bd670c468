"""MLPs in tiles of tokens and offloaded checkpoints save memory with the same gradients."""

import gc
import weakref
from functools import partial

import pytest
import torch
from tensor_bytes import TensorBytes
from tiny import MODEL_SIZES, make_tiny_model
from trained import interrupt_backward, make_batch, make_lora_model, run_train_step
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
from cab_hf.finetune.tiles import compute_in_tiles, find_untiled_mlps

LORA_TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")
SEQUENCE_TOKENS, TILE_TOKENS = 300, 64
make_targeted_lora_model = partial(make_lora_model, LORA_TARGETS)
run_step_of_sequence = partial(run_train_step, num_tokens=SEQUENCE_TOKENS)


def assert_close_tensors(actual, expected):
    """Assert that two dicts, of the loss and the gradients by name, are equal up to rounding."""
    assert actual.keys() == expected.keys()
    for tensor_name, tensor in expected.items():
        assert (actual[tensor_name] - tensor).norm() <= 3e-6 * tensor.norm(), tensor_name


# by name: (function that returns the model, True if norms are trained)
MODEL_KINDS = {
    "llama": (make_tiny_model, False),
    "trained norms": (make_tiny_model, True),
    "norms of queries": (partial(make_tiny_model, "qwen3"), False),
    "norms after layers": (lambda: Olmo2ForCausalLM(Olmo2Config(**MODEL_SIZES)), False),
    "norms with a weight per head": (
        lambda: CohereForCausalLM(CohereConfig(**MODEL_SIZES, use_qk_norm=True)),
        False,
    ),
}


@pytest.mark.parametrize(
    "has_checkpointing", [True, False], ids=["checkpointing", "no checkpointing"]
)
@pytest.mark.parametrize("model_kind", MODEL_KINDS)
def test_tiled_losses_and_gradients_equal_untiled(model_kind, has_checkpointing):
    make_base_model, trains_norms = MODEL_KINDS[model_kind]
    untiled_results = run_step_of_sequence(
        make_targeted_lora_model(make_base_model, has_checkpointing, trains_norms=trains_norms)
    )
    model = make_targeted_lora_model(make_base_model, has_checkpointing, trains_norms=trains_norms)
    assert find_untiled_mlps(model) == []
    compute_in_tiles(model, TILE_TOKENS)
    assert_close_tensors(run_step_of_sequence(model), untiled_results)
    # the loss under no_grad is computed in tiles, too
    with torch.no_grad():
        torch.testing.assert_close(
            Objective(model)(make_batch(SEQUENCE_TOKENS)), untiled_results["loss"]
        )


def test_batch_rows_share_tiles():
    model = make_targeted_lora_model()
    untiled_results = run_train_step(model, num_tokens=100, num_rows=3)
    compute_in_tiles(model, 70)
    assert_close_tensors(run_train_step(model, num_tokens=100, num_rows=3), untiled_results)


def test_recompute_repeats_dropout():
    # the gradient equals the slope of the loss only if recompute draws the same dropout masks
    model = make_targeted_lora_model(dropout=0.3).double()
    compute_in_tiles(model, TILE_TOKENS)
    first_results = run_step_of_sequence(model)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained_parameters:
            parameter += 1e-6 * parameter.grad
    squared_gradient_norm = sum(
        (parameter.grad**2).sum() for parameter in trained_parameters
    ).item()
    model.zero_grad()
    loss_change = run_step_of_sequence(model)["loss"] - first_results["loss"]
    assert loss_change.item() == pytest.approx(1e-6 * squared_gradient_norm, rel=1e-3)


def test_tiles_limit_largest_mlp_tensor(monkeypatch):
    intermediate_size, length = 1024, 2048
    # limit a chunk of logits to 2^16 elements: 128 tokens x 512 words
    monkeypatch.setattr(loss, "LOGITS_PER_CHUNK", 2**16)
    model = make_tiny_model(
        intermediate_size=intermediate_size, num_hidden_layers=1, vocab_size=512
    )
    model = with_lora(model.bfloat16(), LORA_TARGETS, 4, 8).train()
    enable_gradient_checkpointing(model)

    def measure_largest_tensor(tile_tokens):
        compute_in_tiles(model, tile_tokens)
        with TensorBytes(*model.parameters()) as tensor_bytes:
            Objective(model)(make_batch(length)).backward()
        return tensor_bytes.largest_tensor_bytes

    assert measure_largest_tensor(length) >= length * intermediate_size * 2
    # in tiles, the largest tensor is q in bfloat16; MLP tensors and logits are smaller
    assert measure_largest_tensor(TILE_TOKENS) == length * 96 * 2


def test_checkpointed_mlp_runs_twice():
    model, mlp_calls = make_targeted_lora_model(), []
    compute_in_tiles(model, 100)
    mlp = model.get_base_model().model.layers[0].mlp
    mlp.act_fn.register_forward_hook(lambda *_: mlp_calls.append(1))
    run_step_of_sequence(model)
    assert len(mlp_calls) == 2 * 3


def test_experts_are_not_tiled_and_are_reported():
    config_sizes = {
        **MODEL_SIZES,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    model = MixtralForCausalLM(MixtralConfig(**config_sizes))
    model.set_experts_implementation("eager")
    model = with_lora(model, ("q_proj",), 4, 8).train()
    untiled_results = run_step_of_sequence(model)
    model.zero_grad()
    assert find_untiled_mlps(model) == ["MixtralSparseMoeBlock"]
    compute_in_tiles(model, TILE_TOKENS)
    assert_close_tensors(run_step_of_sequence(model), untiled_results)
    # the memory estimate also ignores the tile size for this model
    cost = cost_model.Cost.from_model(model)
    assert cost_model.estimate_memory(
        cost, SEQUENCE_TOKENS, tile_tokens=TILE_TOKENS
    ) == cost_model.estimate_memory(cost, SEQUENCE_TOKENS)


NUM_LAYERS, HIDDEN_SIZE = 4, 48
CHECKPOINT_BYTES = SEQUENCE_TOKENS * HIDDEN_SIZE * 4
# bytes per chunk of host memory; the bytes of a checkpoint are no multiple of this number
CHUNK_BYTES = 10_000
CPU_DEVICE = torch.device("cpu")


def make_four_layer_model(dropout=0.0):
    """Return a four-layer model with LoRA adapters and gradient checkpointing."""
    make_base_model = partial(
        make_tiny_model, num_hidden_layers=NUM_LAYERS, hidden_size=HIDDEN_SIZE
    )
    return make_lora_model(("q_proj", "o_proj", "up_proj"), make_base_model, dropout=dropout)


def make_offloaded_model(num_offloaded_layers):
    """Return (model, its `Offload`); the first ``num_offloaded_layers`` layers are offloaded."""
    model, offload = make_four_layer_model(), Offload(num_offloaded_layers, CPU_DEVICE, CHUNK_BYTES)
    offload.reserve_host_memory(CHECKPOINT_BYTES)
    offload.install_in_layers(model)
    return model, offload


def count_free_bytes(offload):
    """Return the bytes of all unused chunks of host memory."""
    return sum(chunk.nbytes for chunk in offload._free_chunks)


@pytest.mark.parametrize("num_offloaded_layers", [0, 1, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])
def test_offloaded_step_is_bit_identical(num_offloaded_layers, dropout):
    model = make_four_layer_model(dropout)
    expected_tensors = run_step_of_sequence(model).values()
    Offload(num_offloaded_layers, CPU_DEVICE, CHUNK_BYTES).install_in_layers(model)
    # the second step reuses the host memory of the first
    for _ in range(2):
        assert all(map(torch.equal, run_step_of_sequence(model).values(), expected_tensors))


def test_pinned_memory_is_allocated_once_and_released():
    model, offload = make_offloaded_model(3)
    # the 57,600 bytes of a checkpoint take six chunks
    for length in (SEQUENCE_TOKENS, 100, SEQUENCE_TOKENS):
        assert offload.host_bytes == count_free_bytes(offload) == 3 * 6 * CHUNK_BYTES
        run_train_step(model, length)
    assert offload.host_bytes == count_free_bytes(offload) == 3 * 6 * CHUNK_BYTES


def test_two_checkpoints_at_most_are_on_the_device():
    model, offload = make_offloaded_model(NUM_LAYERS)
    live_checkpoints, checkpoint_counts = weakref.WeakSet(), []
    original_pack, original_unpack = offload._pack, offload._unpack

    def count_checkpoints_on_device():
        return sum(saved_input.tensor is not None for saved_input in live_checkpoints)

    def pack_and_count(layer_index, hidden_address, hidden):
        packed_object = original_pack(layer_index, hidden_address, hidden)
        # only offloaded checkpoints are packed; other saved tensors stay tensors
        if not isinstance(packed_object, torch.Tensor):
            live_checkpoints.add(packed_object)
            checkpoint_counts.append(count_checkpoints_on_device())
        return packed_object

    def unpack_and_count(packed_object):
        tensor = original_unpack(packed_object)
        if not isinstance(packed_object, torch.Tensor):
            checkpoint_counts.append(count_checkpoints_on_device())
        return tensor

    offload._pack, offload._unpack = pack_and_count, unpack_and_count
    run_step_of_sequence(model)
    assert (
        checkpoint_counts == [1] * NUM_LAYERS + [2] * (NUM_LAYERS - 1) + [1]
        and not live_checkpoints
    )


def test_aborted_backward_releases_memory():
    model, offload = make_offloaded_model(NUM_LAYERS)
    expected_tensors = run_step_of_sequence(model).values()
    with interrupt_backward(model, 2):
        run_step_of_sequence(model)
    gc.collect()
    assert count_free_bytes(offload) == offload.host_bytes
    assert all(map(torch.equal, run_step_of_sequence(model).values(), expected_tensors))


def test_two_forward_passes_can_be_open():
    model = make_four_layer_model()
    _, *expected_gradients = run_step_of_sequence(model).values()
    Offload(3, CPU_DEVICE, CHUNK_BYTES).install_in_layers(model)
    model.zero_grad()
    losses = [Objective(model)(make_batch(SEQUENCE_TOKENS)) for _ in range(2)]
    sum(losses).backward()
    trained_parameters = (parameter for parameter in model.parameters() if parameter.requires_grad)
    for parameter, gradient in zip(trained_parameters, expected_gradients, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * gradient)


def test_offloading_more_layers_than_model_has_raises():
    with pytest.raises(ValueError, match="offload_layers must be at most 4, .*, got 5"):
        Offload(NUM_LAYERS + 1, CPU_DEVICE).install_in_layers(make_four_layer_model())
