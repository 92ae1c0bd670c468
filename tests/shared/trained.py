"""Tiny models with LoRA adapters, and a training step of such a model."""

from contextlib import contextmanager

import pytest
import torch
from tiny import tiny_model, tokens

from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective


def make_lora_model(targets, make_base_model=tiny_model, checkpointing=True, **options):
    """Return a model in training mode with random LoRA adapters.

    Args:
        targets: names of the adapted layers.
        make_base_model: function that returns the base model.
        checkpointing: True for gradient checkpointing.
        options: further arguments of `with_lora`.
    """
    torch.manual_seed(0)
    model = with_lora(make_base_model(), targets, 4, 8, **options).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    if checkpointing:
        enable_gradient_checkpointing(model)
    return model


def make_batch(length, rows=1):
    """Return a batch of random tokens for `Objective`."""
    ids = tokens(rows, length)
    positions = torch.arange(length).expand(rows, -1)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def run_train_step(model, length, rows=1):
    """Run one forward and backward pass; return the gradients by name, and the loss as "loss"."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = Objective(model)(make_batch(length, rows))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **gradients}


@contextmanager
def interrupt_backward(model, layer):
    """Interrupt a backward pass inside the ``with`` block by KeyboardInterrupt.

    The exception is raised at the input of layer ``layer``, and must reach the end of the block.
    """

    def interrupt(_gradient):
        raise KeyboardInterrupt

    def add_hook(_layer, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(interrupt)

    handle = model.get_base_model().model.layers[layer].register_forward_pre_hook(add_hook)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()
