"""Quantise a model's linear layers to 8 bits by torchao, or to 4 bits by bitsandbytes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn


def list_linear_layers(model: Any) -> list[nn.Linear]:
    """Return the linear layers in the decoder layers of a causal LM of transformers."""
    return [module for module in model.model.modules() if isinstance(module, nn.Linear)]


def to_8_bits(model: Any) -> None:
    """Convert the linear layers of a causal LM to torchao's FP8.

    Each row of the weights has a quantisation scale, and so has each token of the inputs.
    """
    from torchao.quantization import (
        Float8DynamicActivationFloat8WeightConfig,
        PerRow,
        quantize_,
    )

    quantize_(model.model, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
    _compile_rounding()


@cache
def _compile_rounding() -> None:
    """Compile the two functions with which torchao rounds the inputs of a layer to FP8.

    Without compilation, rounding takes as much time as FP8 products save. Dynamo of torch 2.11
    cannot compile whole layers, because it does not support the quantised weights.
    """
    from torchao.quantization.quantize_.workflows.float8 import float8_tensor

    for function_name in ("_choose_scale_float8", "_quantize_affine_float8"):
        setattr(float8_tensor, function_name, torch.compile(getattr(float8_tensor, function_name)))


def to_4_bits(model: Any, dtype: str) -> None:
    """Convert the linear layers of a causal LM to NF4, with the options of `finetune.load_model`.

    Args:
        model: a causal LM of transformers.
        dtype: name of the dtype in which matrix products are computed, such as "bfloat16".
    """
    from bitsandbytes.nn import Linear4bit, Params4bit

    from cab_hf.finetune.models import make_four_bit_options

    quantization = make_four_bit_options(dtype, model.device)["quantization_config"]
    weight_options = {
        "quant_type": quantization.bnb_4bit_quant_type,
        "compress_statistics": quantization.bnb_4bit_use_double_quant,
        "quant_storage": quantization.bnb_4bit_quant_storage,
    }
    for module_path, module in [*model.model.named_modules()]:
        if isinstance(module, nn.Linear):
            packed_linear = Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=quantization.bnb_4bit_compute_dtype,
                **weight_options,
                device="meta",
            )
            packed_linear.weight = Params4bit(
                module.weight.data, requires_grad=False, **weight_options
            )
            # bitsandbytes packs the weights when they move to the device
            model.model.set_submodule(module_path, packed_linear.to(model.device))
    # PEFT reads this attribute to choose LoRA layers for 4-bit weights
    model.is_loaded_in_4bit = True
