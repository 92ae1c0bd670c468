"""Sort the model classes of vLLM by what "cab" does with their attention layers.

Run ``python tests/vllm/classes.py`` in the environment of vLLM to write the table in
docs/serving.md again. Nothing is imported but the registry: classes are sorted by their source.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

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
LATENT = {"MLAAttention", "MultiHeadLatentAttentionWrapper"}
CAUSAL = {"Attention", "ChunkedLocalAttention"}
NOTHING = "no attention over pages of keys and values"


def source_of(models: Path, module: str) -> str | None:
    """Return the source of a module of vLLM's registry; None for one outside its models."""
    file = models / f"{module.replace('.', '/')}.py"
    return file.read_text("utf-8") if file.is_file() else None


def verdict(models: Path, module: str, seen: frozenset[str] = frozenset()) -> tuple[str, str]:
    """Return ("sparse" or "dense", which layers are dense or why all are) for a module."""
    if module == "transformers":
        return (
            "sparse",
            "a sliding window, attention sinks or soft-capped logits, if the config has them",
        )
    source = source_of(models, module)
    if source is None:
        return "dense", "attention outside of the common layers of vLLM"
    words = words_of(source)
    if words & CAUSAL:
        found = [why for word, why in DENSE_LAYERS.items() if word in words]
        if words & LATENT:
            return "sparse or dense", ", ".join([*found, "multi-head latent attention"])
        return "sparse", ", ".join(found) or "none"
    if words & LATENT:
        return "dense", "multi-head latent attention"
    bases = re.findall(r"from (?:\.|vllm\.model_executor\.models\.)(\w+) import", source)
    others = [verdict(models, each, seen | {module}) for each in bases if each not in seen]
    kept = [each for each in others if each[1] != NOTHING]
    return min(kept, key=lambda each: each[0] != "sparse", default=("dense", NOTHING))


def words_of(source: str) -> set[str]:
    """Return the names and the keywords of calls in a source."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}


@cache
def table() -> str:
    """Return the table of docs/serving.md for the vLLM that is installed."""
    from vllm import __version__
    from vllm.model_executor.models import registry

    models, rows = Path(registry.__file__).parent, defaultdict(list)
    sorted_names = registry._TEXT_GENERATION_MODELS | registry._TRANSFORMERS_SUPPORTED_MODELS
    for name, (module, _) in sorted(sorted_names.items()):
        rows[verdict(models, module)].append(name.removesuffix("ForCausalLM"))
    lines = ["| prompts are | what makes a layer dense | model classes |", "| --- | --- | --- |"]
    order = sorted(rows, key=lambda x: (x[0] != "sparse", -len(rows[x])))
    for kind, why in order:
        lines.append(f"| {kind} | {why} | {', '.join(rows[kind, why])} |")
    return "\n".join([*lines, "", f"Text models of vLLM {__version__}, without `ForCausalLM`."])


def written() -> str:
    """Return docs/serving.md with the table."""
    text = DOCS.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    DOCS.write_text(written(), "utf-8")
