"""Classify the model classes of vLLM by the attention of their prompts: sparse, dense, refused.

Run ``python tests/vllm/classes.py`` in an environment with vLLM to rewrite the table in
docs/serving.md. `verdict` classifies a class by its source code. Tests check the verdict with the
layers that `layers_of` builds without weights.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

BEGIN, END = "<!-- classes -->", "<!-- end -->"
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"

# name in the source of a model class -> kind of layers with this name, which have dense attention
DENSE_LAYERS = {
    "per_layer_sliding_window": "a sliding window",
    "sinks": "attention sinks",
    "logits_soft_cap": "soft-capped logits",
    "alibi_slopes": "ALiBi",
    "ChunkedLocalAttention": "chunked attention",
}
# kind in `DENSE_LAYERS` -> reason that `cab_hf.vllm.layers.why_dense` returns, for kinds whose
# reason is not the name of the kind
REASONS = {"chunked attention": "batches that vLLM rewrites"}
# classes of vLLM's attention layers: latent attention, causal attention, and attention in both
# directions within a prefix
LATENT = {"MLAAttention", "MultiHeadLatentAttentionWrapper"}
CAUSAL = {"Attention", "ChunkedLocalAttention"}
PREFIX = {"PrefillPrefixLMAttention"}


class Verdict(NamedTuple):
    """Support for sparse prefill of one model class.

    Attributes:
        prompts: "sparse", "dense", "refused", or "sparse or refused": the attention of prompts.
        why: the kinds of layers that are dense, or the reason why all layers are dense.
    """

    prompts: str
    why: str


NOTHING = Verdict("dense", "no attention over pages of keys and values")
# verdict on models that vLLM runs by transformers: the model config determines which layers are
# dense
BY_CONFIG = Verdict(
    "sparse", "a sliding window, attention sinks or soft-capped logits, if the config has them"
)


def source_of(models: Path, module: str) -> str:
    """Return the source code of a module, or of all files of a package, in vLLM's registry.

    ``models`` is the folder of vLLM's models.
    """
    if module.startswith("vllm."):
        path = models.parents[1] / module.removeprefix("vllm.").replace(".", "/")
    else:
        path = models / module.replace(".", "/")
    file = path.with_suffix(".py")
    files = [file] if file.is_file() else sorted(path.rglob("*.py"))
    return "\n".join(file.read_text("utf-8") for file in files)


def verdict(models: Path, module: str, seen: frozenset[str] = frozenset()) -> Verdict:
    """Return the verdict on a module of vLLM's registry.

    Args:
        models: folder of vLLM's models.
        module: name of the module in the registry.
        seen: modules that import ``module``; the recursion over imports stops at these modules.
    """
    if module == "transformers":
        return BY_CONFIG
    source = source_of(models, module)
    words = words_of(source)
    latent = "multi-head latent attention"
    if module.startswith("vllm."):
        is_latent = bool(words & LATENT)
        return Verdict("refused", latent) if is_latent else Verdict("dense", "attention of its own")
    if words & CAUSAL:
        dense_kinds = [kind for word, kind in DENSE_LAYERS.items() if word in words]
        if words & LATENT:
            return Verdict("sparse or refused", ", ".join([*dense_kinds, latent]))
        return Verdict("sparse", ", ".join(dense_kinds) or "none")
    if words & LATENT:
        return Verdict("refused", latent)
    if words & PREFIX:
        return Verdict("dense", "prompts that attend in both directions")
    # a module without attention layers may import layers from other models: use their verdicts
    bases = re.findall(r"from (?:\.|vllm\.model_executor\.models\.)(\w+) import", source)
    results = [verdict(models, base, seen | {module}) for base in bases if base not in seen]
    results = [result for result in results if result != NOTHING]
    # if verdicts of imported modules differ, prefer a sparse verdict
    return min(results, key=lambda result: result.prompts != "sparse", default=NOTHING)


def words_of(source: str) -> set[str]:
    """Return all names and all keywords of calls in the source code ``source``."""
    # remove this import, which Python does not allow in the middle of concatenated files
    source = source.replace("from __future__ import annotations", "")
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


@cache
def verdicts() -> dict[str, Verdict]:
    """Return the `Verdict` on every text generation model of the installed vLLM, by class name."""
    from vllm.model_executor.models import registry

    models = Path(registry.__file__).parent
    classes = registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS
    return {name: verdict(models, module) for name, (module, _) in sorted(classes.items())}


def table() -> str:
    """Return the Markdown table of `verdicts` for docs/serving.md."""
    from vllm import __version__

    rows = defaultdict(list)
    for name, found_verdict in verdicts().items():
        rows[found_verdict].append(name.removesuffix("ForCausalLM"))
    lines = ["| prompts are | what makes a layer dense | model classes |", "| --- | --- | --- |"]
    order = ("sparse", "sparse or refused", "dense", "refused")
    for row in sorted(rows, key=lambda row: (order.index(row.prompts), -len(rows[row]))):
        lines.append(f"| {row.prompts} | {row.why} | {', '.join(rows[row])} |")
    return "\n".join([*lines, "", f"Text models of vLLM {__version__}, without `ForCausalLM`."])


def page_with_table() -> str:
    """Return the text of docs/serving.md, with `table` between the markers `BEGIN` and `END`."""
    before, _, table_and_after = DOCS.read_text("utf-8").partition(BEGIN)
    _, _, after = table_and_after.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


@cache
def model_types() -> dict[str, str]:
    """Return {class name: model type} of all causal language models in transformers."""
    from transformers.models.auto import modeling_auto

    types = {}
    for model_type, names in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            types.setdefault(name, model_type)
    return types


def layers_of(name: str) -> Counter[str | None] | None:
    """Build a model class on the meta device, and count its attention layers by reason.

    The config is the default of transformers.

    Returns:
        {reason why the layers are dense, or None for sparse layers: number of layers}; None if
        vLLM cannot build the class from this config on a CPU.
    """
    import torch
    from transformers import CONFIG_MAPPING
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from cab_hf.vllm import layers

    model_type = model_types().get(name)
    if model_type is None:
        return None
    try:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [name]
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            model_config = ModelConfig(folder, skip_tokenizer_init=True, dtype="bfloat16")
            vllm_config = VllmConfig(
                model_config=model_config,
                device_config=DeviceConfig("cpu"),
                additional_config={"cab": {}},
            )
        with set_current_vllm_config(vllm_config):
            begin_process_groups()
            with torch.device("meta"):
                model = initialize_model(vllm_config)
    except Exception:
        return None
    return Counter(layers.why_dense(attention) for _, attention in layers.attentions(model))


def begin_process_groups() -> None:
    """Create vLLM's process groups of a single rank for the current config of vLLM."""
    import torch
    from vllm import distributed

    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        distributed.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{store}",
            local_rank=0,
            backend="gloo",
        )
    # create model-parallel groups again: models with experts need a group that others do not create
    distributed.destroy_model_parallel()
    distributed.ensure_model_parallel_initialized(1, 1)


if __name__ == "__main__":
    DOCS.write_text(page_with_table(), "utf-8")
