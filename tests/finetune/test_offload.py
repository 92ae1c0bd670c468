"""Checkpoints of layers in the host's memory: the same gradients, and what stays where."""

import gc
import weakref
from functools import partial

import pytest
import torch
import trained
from tiny import tiny_model
from trained import batch

from cab_hf.finetune.objective import Objective
from cab_hf.finetune.offload import Offload

LAYERS, LENGTH, HIDDEN = 4, 300, 48
CHECKPOINT = LENGTH * HIDDEN * 4
# no divisor of a checkpoint
CHUNK = 10_000
CPU = torch.device("cpu")


def adapted(dropout=0.0):
    made = partial(tiny_model, num_hidden_layers=LAYERS, hidden_size=HIDDEN)
    return trained.adapted(("q_proj", "o_proj", "up_proj"), made, dropout=dropout)


def learnt(model, length=LENGTH):
    """The loss and all gradients of a step."""
    return [*trained.learnt(model, length).values()]


@pytest.mark.parametrize("layers", [0, 1, 3, 4])
@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["plain", "dropout"])
def test_a_step_learns_the_same_bit_for_bit(layers, dropout):
    expected = learnt(adapted(dropout))
    model = adapted(dropout)
    Offload(layers, CPU, CHUNK).enable(model)
    # the second step takes the memory of the first
    for _ in range(2):
        assert all(map(torch.equal, learnt(model), expected))


def test_memory_is_pinned_once_and_goes_back():
    model, offload = adapted(), Offload(3, CPU, CHUNK)
    offload.reserve(CHECKPOINT)
    # 57,600 bytes are six chunks
    reserved = 3 * 6 * CHUNK
    assert offload.host_bytes == reserved
    offload.enable(model)
    for length in (LENGTH, 100, LENGTH):
        learnt(model, length)
        assert offload.host_bytes == reserved
        assert sum(chunk.nbytes for chunk in offload._free) == reserved


def test_one_checkpoint_is_on_the_device_beside_that_of_the_layer_at_work():
    model, offload = adapted(), Offload(LAYERS, CPU, CHUNK)
    offload.reserve(CHECKPOINT)
    offload.enable(model)
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
        # torch may save more than what comes in
        if not isinstance(made, torch.Tensor):
            most.append(on_device())
        return result

    offload._pack, offload._unpack = packing, unpacking
    learnt(model)
    assert most == [1] * LAYERS + [2] * (LAYERS - 1) + [1] and not kept


def test_a_backward_pass_that_is_left_halfway_gives_memory_back():
    model, offload = adapted(), Offload(LAYERS, CPU, CHUNK)
    offload.enable(model)
    expected = learnt(model)

    def stop(_gradient):
        raise KeyboardInterrupt

    def watch(_layer, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(stop)

    handle = model.get_base_model().model.layers[2].register_forward_pre_hook(watch)
    with pytest.raises(KeyboardInterrupt):
        learnt(model)
    handle.remove()
    gc.collect()
    assert sum(chunk.nbytes for chunk in offload._free) == offload.host_bytes
    assert all(map(torch.equal, learnt(model), expected))


def test_two_passes_may_be_open_at_once():
    model = adapted()
    expected = [2 * gradient for gradient in learnt(model)[1:]]
    Offload(3, CPU, CHUNK).enable(model)
    model.zero_grad()
    losses = [Objective(model)(batch(LENGTH)) for _ in range(2)]
    sum(losses).backward()
    for parameter, gradient in zip(
        (p for p in model.parameters() if p.requires_grad), expected, strict=True
    ):
        torch.testing.assert_close(parameter.grad, gradient)


def test_more_layers_than_there_are_are_refused():
    with pytest.raises(ValueError, match="offload_layers is 5; it must be at most 4"):
        Offload(LAYERS + 1, CPU).enable(adapted())
