"""Merge an adapter into its base: ``python -m cab_hf.finetune.merge ADAPTER OUT``.

The command writes the merged model to a temporary folder, loads it again, and compares its logits
with the logits of the base with the adapter. If the logits agree, the folder is renamed to OUT.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cab_hf.experiment import models as run_models
from cab_hf.experiment.log import convert_write_errors, write_atomically
from cab_hf.experiment.markdown import escape_markdown, format_code
from cab_hf.experiment.provenance import package_versions
from cab_hf.experiment.settings import UsageError, flag, option, read_settings, require
from cab_hf.finetune import adapters

PROG = "python -m cab_hf.finetune.merge"
# number of random sequences for which logits are compared, and tokens per sequence
NUM_PROBE_SEQUENCES, PROBE_SEQUENCE_TOKENS = 2, 64
# largest allowed difference of a logit, divided by the largest logit. Differences measured with
# SmolLM2 were a third of the bound in bfloat16 and float16, and 3e-6 in float32
MAX_RELATIVE_LOGIT_DIFFERENCES = {
    "bfloat16": 0.13,
    "float16": 0.015,
    "float32": 1e-4,
    "float64": 1e-9,
}
MODEL_CARD_TEMPLATE = """---
{front}
---

# {title}

An adapter for long documents, trained with cab_hf and merged into its base.
Its config has the settings of the sparse attention it was trained with:

```python
import cab_hf
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", attn_implementation="cab")
```

Without `cab_hf`, and without `attn_implementation`, attention is dense.

|   |   |
|---|---|
{table}
"""


@dataclass(frozen=True)
class MergeSettings:
    """Options of ``python -m cab_hf.finetune.merge``.

    Raises:
        UsageError: ``adapter`` or ``out`` is missing, or ``dtype`` is unknown.
    """

    adapter: str = option(
        "", "folder that finetune/lora.py or PEFT saved; may be the first word without --adapter"
    )
    out: str = option("", "new folder for the merged model; may be the second word without --out")
    base: str = option(
        "", "name or folder of the base model (default: the base in the adapter's config)"
    )
    dtype: str = option("", "dtype of the merged weights (default: the dtype of the base)")
    device: str = option("cpu", "torch device for merging and comparing")
    trust_remote_code: bool = flag("run Python code that comes with the model")

    def __post_init__(self) -> None:
        require(self, "adapter", self.adapter, "a folder with an adapter")
        require(self, "out", self.out, "a folder to write")
        accepted_dtypes = f"one of {', '.join(MAX_RELATIVE_LOGIT_DIFFERENCES)}"
        require(self, "dtype", self.dtype in ("", *MAX_RELATIVE_LOGIT_DIFFERENCES), accepted_dtypes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge an adapter with the options in ``arguments``; return the exit status.

    ``arguments`` are the words of a command line; None: the arguments of this process.
    """
    arguments, named_arguments = list(sys.argv[1:] if arguments is None else arguments), []
    # ADAPTER and OUT may come first without the names of their options
    for option_name in ("--adapter", "--out"):
        if arguments and not arguments[0].startswith("-"):
            named_arguments += [option_name, arguments.pop(0)]
    settings = read_settings(
        MergeSettings, named_arguments + arguments, PROG, __doc__.partition("\n")[0]
    )
    try:
        max_difference = merge(settings)
    except (UsageError, NotImplementedError) as error:
        print(f"{PROG}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(f"{settings.out}: merged; the largest difference of a logit is {max_difference:.2g}")
    return 0


def merge(settings: MergeSettings) -> float:
    """Write the merged model to ``settings.out``; return the largest difference of a logit.

    Raises:
        UsageError: the adapter is missing or belongs to another base, ``settings.out`` exists, or
            the logits of the merged model exceed the bound of `compare_logits`.
    """
    adapter_folder, out_folder = Path(settings.adapter), Path(settings.out)
    if out_folder.exists():
        raise UsageError(f"out must be a new folder, got {settings.out!r}, which exists already.")
    adapter_config = adapters.read_adapter_config(adapter_folder)
    base = settings.base or adapter_config.base_model_name_or_path
    if not base or not isinstance(base, str):
        raise UsageError(
            f"base must be given for adapter {adapter_folder.name}, which does not record its "
            "base. Give "
            "--base."
        )
    out_folder.parent.mkdir(parents=True, exist_ok=True)
    temporary_folder = tempfile.TemporaryDirectory(
        prefix=f".{out_folder.name}.", dir=out_folder.parent
    )
    with temporary_folder, warnings.catch_warnings():
        # the warning does not apply: logits are compared with dense attention on purpose
        warnings.filterwarnings("ignore", message=".* has a cab_config, which nothing uses")
        merged_folder = Path(temporary_folder.name) / "merged"
        base_logits = _write_merged_model(
            merged_folder,
            adapter_folder=adapter_folder,
            base=base,
            adapter_config=adapter_config,
            settings=settings,
        )
        max_difference = compare_logits(merged_folder, base_logits, settings)
        card_text = format_model_card(
            model_name=out_folder.name,
            merged_folder=merged_folder,
            base=base,
            adapter_config=adapter_config,
            max_difference=max_difference,
        )
        write_atomically(merged_folder / "README.md", card_text)
        os.rename(merged_folder, out_folder)
    return max_difference


def _write_merged_model(
    merged_folder: Path,
    adapter_folder: Path,
    base: str,
    adapter_config: Any,
    settings: MergeSettings,
) -> Tensor:
    """Write the merged model to ``merged_folder``; return the logits of the base with the adapter.

    Args:
        merged_folder: folder of the merged model.
        adapter_folder: folder of the adapter.
        base: name or folder of the base model.
        adapter_config: PEFT's config of the adapter.
        settings: options of the command.

    Returns:
        The result of `compute_probe_logits`.
    """
    base_fields, is_code_trusted = (
        adapters.read_base_model_fields(adapter_folder),
        settings.trust_remote_code,
    )
    model_config = run_models.load_config(base, is_code_trusted)
    with adapters.convert_read_errors(adapter_folder, run_models.BASE_MODEL_FILE):
        run_models.restore_config_fields(model_config.get_text_config(), base_fields)
    dtype = settings.dtype or _get_dtype_name(model_config.dtype or torch.float32)
    if dtype not in MAX_RELATIVE_LOGIT_DIFFERENCES:
        raise UsageError(
            f"base {adapters.format_model_name(base)!r} must have floating-point weights, got "
            f"{dtype}. "
            "Give --dtype bfloat16."
        )
    model, tokenizer = run_models.load_model(
        base, settings.device, dtype, config=model_config, trust_remote_code=is_code_trusted
    )
    # PEFT warns if the name of the model differs from the base in the adapter's config
    model.name_or_path = base
    # checked after loading, because the files of a model on the hub are then in the cache
    adapters.require_base_model(
        adapter_folder=adapter_folder,
        base=base,
        base_fields=base_fields,
        recorded_base_name=adapter_config.base_model_name_or_path,
    )
    peft_model = attach_adapter(model, adapter_folder, adapter_config)
    adapter_logits = compute_probe_logits(peft_model)
    _untie_head(peft_model)
    with warnings.catch_warnings():
        # PEFT warns about tied weights, which `_untie_head` has separated
        warnings.simplefilter("ignore")
        merged_model = peft_model.merge_and_unload()
    merged_model.config.use_cache = True
    with convert_write_errors(settings.out):
        merged_model.save_pretrained(merged_folder)
        tokenizer.save_pretrained(merged_folder)
    return adapter_logits


def attach_adapter(model: PreTrainedModel, adapter_folder: Path, adapter_config: Any) -> Any:
    """Return ``model`` with the weights of an adapter, a PeftModel in eval mode.

    Args:
        model: the base model.
        adapter_folder: folder of the adapter.
        adapter_config: PEFT's config of the adapter.

    Raises:
        UsageError: the adapter does not fit the model.
    """
    from peft import get_peft_model

    # get_peft_model raises a ValueError if modules do not fit, and other errors for bad config
    # values, which PEFT does not check when it reads the config
    with adapters.convert_read_errors(adapter_folder, run_models.ADAPTER_CONFIG_FILE):
        try:
            peft_model = get_peft_model(model, adapter_config).eval()
        except ValueError as error:
            raise adapters.make_misfit_error(
                adapter_folder, model, adapters.get_first_sentence(error)
            ) from error
    adapters.load_weights(peft_model, adapter_folder)
    return peft_model


def _untie_head(peft_model: Any) -> None:
    """Give the head its own copy of a weight tied to the embeddings, if either has an adapter."""
    causal_lm = peft_model.get_base_model()
    head_and_embeddings = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    head, embeddings = (getattr(module, "base_layer", module) for module in head_and_embeddings)
    if (head, embeddings) == head_and_embeddings or head.weight is not embeddings.weight:
        return
    head.weight = nn.Parameter(head.weight.detach().clone())
    causal_lm.config.get_text_config().tie_word_embeddings = False
    causal_lm.config.tie_word_embeddings = False


@torch.no_grad()
def compute_probe_logits(model: nn.Module) -> Tensor:
    """Return the logits for fixed random tokens on the CPU.

    The logits are [NUM_PROBE_SEQUENCES, PROBE_SEQUENCE_TOKENS, V].
    """
    vocabulary_size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        vocabulary_size, (NUM_PROBE_SEQUENCES, PROBE_SEQUENCE_TOKENS), generator=generator
    ).to(model.device)
    return model(tokens, use_cache=False).logits.cpu()


def compare_logits(merged_folder: Path, expected_logits: Tensor, settings: MergeSettings) -> float:
    """Load a merged model, and return the largest absolute difference of its logits.

    Args:
        merged_folder: folder of the merged model.
        expected_logits: the result of `compute_probe_logits` for the base with the adapter.
        settings: options of the command.

    Raises:
        UsageError: the difference is larger than `MAX_RELATIVE_LOGIT_DIFFERENCES` allows, or is
            NaN.
    """
    merged_model = AutoModelForCausalLM.from_pretrained(
        merged_folder, dtype="auto", trust_remote_code=settings.trust_remote_code
    )
    logits, dtype = (
        compute_probe_logits(merged_model.to(settings.device).eval()),
        _get_dtype_name(merged_model.dtype),
    )
    max_difference = (logits.double() - expected_logits.double()).abs().max().item()
    max_allowed_difference = (
        MAX_RELATIVE_LOGIT_DIFFERENCES[dtype] * expected_logits.double().abs().max().item()
    )
    if not max_difference <= max_allowed_difference:
        raise UsageError(
            f"the merged model has a logit that differs by {max_difference:.2g} from that of "
            f"base and adapter, more than {max_allowed_difference:.2g}, the rounding of {dtype}. "
            "Merge in a "
            "wider --dtype."
        )
    return max_difference


def _get_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def format_model_card(
    model_name: str, merged_folder: Path, base: str, adapter_config: Any, max_difference: float
) -> str:
    """Return the model card of a merged model, with front matter for the hub.

    Args:
        model_name: name of the merged model.
        merged_folder: folder of the merged model.
        base: name or folder of the base model.
        adapter_config: PEFT's config of the adapter.
        max_difference: the result of `compare_logits`.
    """
    model_config = json.loads((merged_folder / "config.json").read_text("utf-8"))
    model_config = model_config.get("text_config", model_config)
    rope_type = (model_config.get("rope_parameters") or {}).get("rope_type", "default")
    rope_phrase = "" if rope_type == "default" else f", stretched by {rope_type}"
    targets = adapter_config.target_modules or ()
    if isinstance(targets, str):
        layers_phrase = f"modules whose full name matches {format_code(targets)}"
    else:
        layer_names = [*targets, *(getattr(adapter_config, "target_parameters", None) or ())]
        layers_phrase = ", ".join(map(escape_markdown, sorted(layer_names)))
    trained_module_names = {
        module_name.rpartition(".")[2] for module_name in adapter_config.modules_to_save or ()
    }
    table_rows = {
        "base": escape_markdown(adapters.format_model_name(base)),
        "adapter": f"LoRA, rank {adapter_config.r}, alpha {adapter_config.lora_alpha:g}",
        "layers": layers_phrase,
        "trained completely": ", ".join(map(escape_markdown, sorted(trained_module_names))),
        "positions": f"{model_config.get('max_position_embeddings')}{rope_phrase}",
        "largest logit difference to base with adapter": f"{max_difference:.2g}",
        "made with": ", ".join(
            f"{package} {version}" for package, version in package_versions().items()
        ),
    }
    front_matter = ModelCardData(
        base_model=adapters.format_model_name(base),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["cab", "long-context"],
    )
    table = "\n".join(
        f"| {row_name} | {row_text} |" for row_name, row_text in table_rows.items() if row_text
    )
    return MODEL_CARD_TEMPLATE.format(
        name=model_name,
        title=escape_markdown(model_name),
        front=front_matter.to_yaml(),
        table=table,
    )


if __name__ == "__main__":
    raise SystemExit(main())
