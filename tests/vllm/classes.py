"""Classify the model classes of vLLM by the support for their attention layers.

Run ``python tests/vllm/classes.py`` in the environment of vLLM to write the table in
docs/serving.md again. `verdict` reads the source of a class, and `layers_of` builds its layers
without weights, to check the verdict.
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

# features of the attention layers of a source, and the layers that stay dense because of them
DENSE_LAYERS = {
    "per_layer_sliding_window": "a sliding window",
    "sinks": "attention sinks",
    "logits_soft_cap": "soft-capped logits",
    "alibi_slopes": "ALiBi",
    "ChunkedLocalAttention": "chunked attention",
}
# words of `DENSE_LAYERS` -> reasons of `cab_hf.vllm.layers.why_dense`
REASONS = {"chunked attention": "batches that vLLM rewrites"}
LATENT = {"MLAAttention", "MultiHeadLatentAttentionWrapper"}
CAUSAL = {"Attention", "ChunkedLocalAttention"}
PREFIX = {"PrefillPrefixLMAttention"}


class Verdict(NamedTuple):
    """The support for sparse prompts of one model class.

    Attributes:
        prompts: "sparse", "dense", "refused", or two of these words.
        why: which layers are dense, or why all are.
    """

    prompts: str
    why: str


NOTHING = Verdict("dense", "no attention over pages of keys and values")
# the class in transformers decides which layers a model from transformers has
BY_CONFIG = Verdict(
    "sparse", "a sliding window, attention sinks or soft-capped logits, if the config has them"
)


def source_of(models: Path, module: str) -> str:
    """Return the source of a module of vLLM's registry, or of all files of a package."""
    if module.startswith("vllm."):
        place = models.parents[1] / module.removeprefix("vllm.").replace(".", "/")
    else:
        place = models / module.replace(".", "/")
    file = place.with_suffix(".py")
    files = [file] if file.is_file() else sorted(place.rglob("*.py"))
    return "\n".join(each.read_text("utf-8") for each in files)


def verdict(models: Path, module: str, seen: frozenset[str] = frozenset()) -> Verdict:
    """Return the verdict on a module of vLLM's registry."""
    if module == "transformers":
        return BY_CONFIG
    source = source_of(models, module)
    words = words_of(source)
    latent = "multi-head latent attention"
    if module.startswith("vllm."):
        is_latent = bool(words & LATENT)
        return Verdict("refused", latent) if is_latent else Verdict("dense", "attention of its own")
    if words & CAUSAL:
        found = [why for word, why in DENSE_LAYERS.items() if word in words]
        if words & LATENT:
            return Verdict("sparse or refused", ", ".join([*found, latent]))
        return Verdict("sparse", ", ".join(found) or "none")
    if words & LATENT:
        return Verdict("refused", latent)
    if words & PREFIX:
        return Verdict("dense", "prompts that attend in both directions")
    bases = re.findall(r"from (?:\.|vllm\.model_executor\.models\.)(\w+) import", source)
    others = [verdict(models, each, seen | {module}) for each in bases if each not in seen]
    kept = [each for each in others if each != NOTHING]
    return min(kept, key=lambda each: each.prompts != "sparse", default=NOTHING)


def words_of(source: str) -> set[str]:
    """Return the names and the keywords of calls in a source."""
    # files of a package may not begin with their imports from __future__
    source = source.replace("from __future__ import annotations", "")
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


@cache
def verdicts() -> dict[str, Verdict]:
    """Return the verdict on every text model of the vLLM that is installed."""
    from vllm.model_executor.models import registry

    models = Path(registry.__file__).parent
    classes = registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS
    return {name: verdict(models, module) for name, (module, _) in sorted(classes.items())}


def table() -> str:
    """Return the table of docs/serving.md."""
    from vllm import __version__

    rows = defaultdict(list)
    for name, found in verdicts().items():
        rows[found].append(name.removesuffix("ForCausalLM"))
    lines = ["| prompts are | what makes a layer dense | model classes |", "| --- | --- | --- |"]
    kinds = ("sparse", "sparse or refused", "dense", "refused")
    for found in sorted(rows, key=lambda each: (kinds.index(each.prompts), -len(rows[each]))):
        lines.append(f"| {found.prompts} | {found.why} | {', '.join(rows[found])} |")
    return "\n".join([*lines, "", f"Text models of vLLM {__version__}, without `ForCausalLM`."])


def written() -> str:
    """Return docs/serving.md with the table."""
    text = DOCS.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


@cache
def model_types() -> dict[str, str]:
    """Return the model type of every class that transformers has a config for."""
    from transformers.models.auto import modeling_auto

    found = {}
    for kind, names in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in [names] if isinstance(names, str) else names:
            found.setdefault(name, kind)
    return found


def layers_of(name: str) -> Counter[str | None] | None:
    """Build a model class with transformers' default config, without weights.

    Returns the number of attention layers per reason for which they are dense; the reason of
    sparse layers is None. Returns None if vLLM cannot build the class that way on a CPU.
    """
    import torch
    from transformers import CONFIG_MAPPING
    from vllm.config import DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    from cab_hf.vllm import layers

    kind = model_types().get(name)
    if kind is None:
        return None
    try:
        config = CONFIG_MAPPING[kind]()
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
    """Start the process groups of one rank for the current config of vLLM."""
    import torch
    from vllm import distributed

    if not torch.distributed.is_initialized():
        store = Path(tempfile.mkdtemp()) / "store"
        distributed.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    # experts need a group that other models do not have
    distributed.destroy_model_parallel()
    distributed.ensure_model_parallel_initialized(1, 1)


if __name__ == "__main__":
    DOCS.write_text(written(), "utf-8")
