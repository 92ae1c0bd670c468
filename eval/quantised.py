"""Weights of a model in 8 or in 4 bits, as libraries quantise them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn


def linear_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers in the decoder layers of a causal LM of transformers."""
    return [x for x in model.model.modules() if isinstance(x, nn.Linear)]


def to_8_bits(model: Any) -> None:
    """Convert weights, and the input of every product, to torchao's FP8 with a scale per row."""
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    quantize_(model.model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    _compile_rounding()


@cache
def _compile_rounding() -> None:
    """Compile torchao's rounding of inputs to two kernels.

    Separately, its operations take as long as 8-bit products save. Whole layers cannot be compiled:
    Dynamo of torch 2.11 stops at the weights.
    """
    from torchao.quantization.quantize_.workflows.float8 import float8_tensor

    for name in ("_choose_scale_float8", "_quantize_affine_float8"):
        setattr(float8_tensor, name, torch.compile(getattr(float8_tensor, name)))


def to_4_bits(model: Any, dtype: str) -> None:
    """Convert weights to NF4 by bitsandbytes, as `finetune.load_model` does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    from cab_hf.finetune.models import four_bits

    quantization = four_bits(dtype, model.device)["quantization_config"]
    how = {
        "quant_type": quantization.bnb_4bit_quant_type,
        "compress_statistics": quantization.bnb_4bit_use_double_quant,
        "quant_storage": quantization.bnb_4bit_quant_storage,
    }
    for path, linear in [*model.model.named_modules()]:
        if isinstance(linear, nn.Linear):
            sizes, compute = (
                (linear.in_features, linear.out_features),
                quantization.bnb_4bit_compute_dtype,
            )
            packed = Linear4bit(*sizes, False, compute, **how, device="meta")
            packed.weight = Params4bit(linear.weight.data, False, **how)
            # bitsandbytes packs weights when they move to the device
            model.model.set_submodule(path, packed.to(model.device))
    # PEFT reads this attribute
    model.is_loaded_in_4bit = True
