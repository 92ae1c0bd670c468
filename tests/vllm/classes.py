"""Classify the model classes of vLLM by the attention of their prompts: sparse, dense, refused.

Run ``python tests/vllm/classes.py`` in an environment with vLLM to rewrite the table in
docs/serving.md. `classify_module` classifies a class by its source code. Tests check the verdict
with the layers that `count_layers_by_reason` builds without weights.
"""

from __future__ import annotations

import ast
import re
import tempfile
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

TABLE_BEGIN_MARKER, TABLE_END_MARKER = "<!-- classes -->", "<!-- end -->"
DOCS_PAGE = Path(__file__).parents[2] / "docs" / "serving.md"

# name in the source of a model class -> kind of layers with this name, which have dense attention
LAYER_KIND_BY_DENSE_NAME = {
    "per_layer_sliding_window": "a sliding window",
    "sinks": "attention sinks",
    "logits_soft_cap": "soft-capped logits",
    "alibi_slopes": "ALiBi",
    "ChunkedLocalAttention": "chunked attention",
}
# kind in `LAYER_KIND_BY_DENSE_NAME` -> reason that `cab_hf.vllm.layers.find_dense_reason` returns,
# for kinds whose reason is not the name of the kind
REASON_BY_LAYER_KIND = {"chunked attention": "batches that vLLM rewrites"}
# classes of vLLM's attention layers: latent attention, causal attention, and attention in both
# directions within a prefix
LATENT_CLASSES = {"MLAAttention", "MultiHeadLatentAttentionWrapper"}
CAUSAL_CLASSES = {"Attention", "ChunkedLocalAttention"}
PREFIX_CLASSES = {"PrefillPrefixLMAttention"}


class Verdict(NamedTuple):
    """Support for sparse prefill of one model class.

    Attributes:
        prompt_attention: "sparse", "dense", "refused", or "sparse or refused": the attention of
            prompts.
        dense_reason: the kinds of layers that are dense, or the reason why all layers are dense.
    """

    prompt_attention: str
    dense_reason: str


NO_ATTENTION_VERDICT = Verdict("dense", "no attention over pages of keys and values")
# verdict on models that vLLM runs by transformers: the model config determines which layers are
# dense
CONFIG_DEPENDENT_VERDICT = Verdict(
    "sparse", "a sliding window, attention sinks or soft-capped logits, if the config has them"
)


def read_source(models_folder: Path, module_name: str) -> str:
    """Return the source code of a module, or of all files of a package, in vLLM's registry.

    ``models_folder`` is the folder of vLLM's models.
    """
    if module_name.startswith("vllm."):
        module_path = models_folder.parents[1] / module_name.removeprefix("vllm.").replace(".", "/")
    else:
        module_path = models_folder / module_name.replace(".", "/")
    module_file = module_path.with_suffix(".py")
    source_files = [module_file] if module_file.is_file() else sorted(module_path.rglob("*.py"))
    return "\n".join(module_file.read_text("utf-8") for module_file in source_files)


def classify_module(
    models_folder: Path, module_name: str, importing_modules: frozenset[str] = frozenset()
) -> Verdict:
    """Return the verdict on a module of vLLM's registry.

    Args:
        models_folder: folder of vLLM's models.
        module_name: name of the module in the registry.
        importing_modules: modules that import ``module_name``; the recursion over imports stops at
            these modules.
    """
    if module_name == "transformers":
        return CONFIG_DEPENDENT_VERDICT
    source = read_source(models_folder, module_name)
    source_words = collect_words(source)
    latent_reason = "multi-head latent attention"
    if module_name.startswith("vllm."):
        is_latent = bool(source_words & LATENT_CLASSES)
        return (
            Verdict("refused", latent_reason)
            if is_latent
            else Verdict("dense", "attention of its own")
        )
    if source_words & CAUSAL_CLASSES:
        dense_kinds = [
            layer_kind
            for dense_name, layer_kind in LAYER_KIND_BY_DENSE_NAME.items()
            if dense_name in source_words
        ]
        if source_words & LATENT_CLASSES:
            return Verdict("sparse or refused", ", ".join([*dense_kinds, latent_reason]))
        return Verdict("sparse", ", ".join(dense_kinds) or "none")
    if source_words & LATENT_CLASSES:
        return Verdict("refused", latent_reason)
    if source_words & PREFIX_CLASSES:
        return Verdict("dense", "prompts that attend in both directions")
    # a module without attention layers may import layers from other models: use their verdicts
    imported_modules = re.findall(r"from (?:\.|vllm\.model_executor\.models\.)(\w+) import", source)
    verdicts = [
        classify_module(models_folder, imported_module, importing_modules | {module_name})
        for imported_module in imported_modules
        if imported_module not in importing_modules
    ]
    verdicts = [
        found_verdict for found_verdict in verdicts if found_verdict != NO_ATTENTION_VERDICT
    ]
    # if verdicts of imported modules differ, prefer a sparse verdict
    return min(
        verdicts,
        key=lambda found_verdict: found_verdict.prompt_attention != "sparse",
        default=NO_ATTENTION_VERDICT,
    )


def collect_words(source: str) -> set[str]:
    """Return all names and all keywords of calls in the source code ``source``."""
    # remove this import, which Python does not allow in the middle of concatenated files
    source = source.replace("from __future__ import annotations", "")
    syntax_nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in syntax_nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in syntax_nodes if isinstance(node, ast.keyword) and node.arg}


@cache
def classify_all_classes() -> dict[str, Verdict]:
    """Return the `Verdict` on every text generation model of the installed vLLM, by class name."""
    from vllm.model_executor.models import registry

    models_folder = Path(registry.__file__).parent
    modules_by_class = registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS
    return {
        class_name: classify_module(models_folder, module_name)
        for class_name, (module_name, _) in sorted(modules_by_class.items())
    }


def render_table() -> str:
    """Return the Markdown table of `classify_all_classes` for docs/serving.md."""
    from vllm import __version__

    names_by_verdict = defaultdict(list)
    for class_name, found_verdict in classify_all_classes().items():
        names_by_verdict[found_verdict].append(class_name.removesuffix("ForCausalLM"))
    table_lines = [
        "| prompts are | what makes a layer dense | model classes |",
        "| --- | --- | --- |",
    ]
    prompt_attention_order = ("sparse", "sparse or refused", "dense", "refused")
    for row_verdict in sorted(
        names_by_verdict,
        key=lambda row_verdict: (
            prompt_attention_order.index(row_verdict.prompt_attention),
            -len(names_by_verdict[row_verdict]),
        ),
    ):
        class_names = ", ".join(names_by_verdict[row_verdict])
        table_lines.append(
            f"| {row_verdict.prompt_attention} | {row_verdict.dense_reason} | {class_names} |"
        )
    return "\n".join(
        [*table_lines, "", f"Text models of vLLM {__version__}, without `ForCausalLM`."]
    )


def render_page() -> str:
    """Return the text of docs/serving.md with a new table between its two markers."""
    text_before, _, table_and_after = DOCS_PAGE.read_text("utf-8").partition(TABLE_BEGIN_MARKER)
    _, _, text_after = table_and_after.partition(TABLE_END_MARKER)
    return f"{text_before}{TABLE_BEGIN_MARKER}\n{render_table()}\n{TABLE_END_MARKER}{text_after}"


@cache
def map_model_types() -> dict[str, str]:
    """Return {class name: model type} of all causal language models in transformers."""
    from transformers.models.auto import modeling_auto

    type_by_class = {}
    for model_type, class_names in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for class_name in [class_names] if isinstance(class_names, str) else class_names:
            type_by_class.setdefault(class_name, model_type)
    return type_by_class


def count_layers_by_reason(class_name: str) -> Counter[str | None] | None:
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

    model_type = map_model_types().get(class_name)
    if model_type is None:
        return None
    try:
        config = CONFIG_MAPPING[model_type]()
        config.architectures = [class_name]
        with tempfile.TemporaryDirectory() as model_folder:
            config.save_pretrained(model_folder)
            model_config = ModelConfig(model_folder, skip_tokenizer_init=True, dtype="bfloat16")
            vllm_config = VllmConfig(
                model_config=model_config,
                device_config=DeviceConfig("cpu"),
                additional_config={"cab": {}},
            )
        with set_current_vllm_config(vllm_config):
            create_process_groups()
            with torch.device("meta"):
                model = initialize_model(vllm_config)
    except Exception:
        return None
    return Counter(
        layers.find_dense_reason(attention)
        for _, attention in layers.iterate_attention_layers(model)
    )


def create_process_groups() -> None:
    """Create vLLM's process groups of a single rank for the current config of vLLM."""
    import torch
    from vllm import distributed

    if not torch.distributed.is_initialized():
        store_file = Path(tempfile.mkdtemp()) / "store"
        distributed.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=f"file://{store_file}",
            local_rank=0,
            backend="gloo",
        )
    # create model-parallel groups again: models with experts need a group that others do not create
    distributed.destroy_model_parallel()
    distributed.ensure_model_parallel_initialized(1, 1)


if __name__ == "__main__":
    DOCS_PAGE.write_text(render_page(), "utf-8")
