"""Tiny models with LoRA adapters, and a training step of such a model."""

from contextlib import contextmanager

import pytest
import torch
from tiny import draw_token_ids, make_tiny_model

from cab_hf.finetune.models import enable_gradient_checkpointing, with_lora
from cab_hf.finetune.objective import Objective


def make_lora_model(
    target_modules, make_base_model=make_tiny_model, has_checkpointing=True, **lora_options
):
    """Return a model in training mode with random LoRA adapters.

    Args:
        target_modules: names of the adapted layers.
        make_base_model: function that returns the base model.
        has_checkpointing: True for gradient checkpointing.
        lora_options: further arguments of `with_lora`.
    """
    torch.manual_seed(0)
    model = with_lora(make_base_model(), target_modules, 4, 8, **lora_options).train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    if has_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def make_batch(num_tokens, num_rows=1):
    """Return a batch of random tokens for `Objective`."""
    ids = draw_token_ids(num_rows, num_tokens)
    positions = torch.arange(num_tokens).expand(num_rows, -1)
    return {"input_ids": ids, "position_ids": positions, "labels": ids}


def run_train_step(model, num_tokens, num_rows=1):
    """Run one forward and backward pass; return the gradients by name, and the loss as "loss"."""
    torch.manual_seed(1)
    model.zero_grad()
    loss = Objective(model)(make_batch(num_tokens, num_rows))
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return {"loss": loss.detach(), **gradients}


@contextmanager
def interrupt_backward(model, layer_index):
    """Interrupt a backward pass inside the ``with`` block by KeyboardInterrupt.

    The exception is raised at the input of layer ``layer_index``, and must leave the block.
    """

    def raise_interrupt(_gradient):
        raise KeyboardInterrupt

    def add_hook(_layer, inputs):
        if inputs[0].requires_grad:
            inputs[0].register_hook(raise_interrupt)

    handle = model.get_base_model().model.layers[layer_index].register_forward_pre_hook(add_hook)
    with pytest.raises(KeyboardInterrupt):
        yield
    handle.remove()
