"""`plot_plan`: a figure of the blocks that a layer attends to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cab_hf.call.call import Call
from cab_hf.call.scope import during_calls
from cab_hf.checks import require
from cab_hf.config import SPARSE, blocks_of
from cab_hf.hf.layers import attention_layers, transformers_model
from cab_hf.plan import BlockPlan, block_visibility
from cab_hf.route import route

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 4
INCHES = 3.5  # of a panel


class _Chosen(Exception):
    """Ends a forward pass whose further layers are not drawn."""


def plot_plan(
    model: PreTrainedModel, input_ids: Tensor, layer: int, heads: Sequence[int] | None = None
) -> Figure:
    """A figure of the blocks that one layer of ``model`` attends to while it reads a text.

    Query blocks are drawn from top to bottom, key blocks from left to right, both in tokens; what
    comes later than a query is blank. The title of a panel has its density. The model reads the
    text once, without gradients, as far as this layer; `stats` counts the layers before it.

    Args:
        model: a causal language model of transformers that attends by CAB.
        input_ids: int [1, N], the tokens of the text.
        layer: index of the layer.
        heads: query heads, which get a panel each; by default there is one panel for all of them,
            whose colours are the share of heads that attend to a block.

    Returns:
        The figure. A notebook shows it where ``matplotlib.pyplot`` is imported, and
        ``figure.savefig(path)`` writes it to a file.

    Raises:
        ValueError: for a bad argument, or a layer that attends exactly.
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot_plan draws with matplotlib, which cannot be imported; "
            "`pip install matplotlib` brings it."
        ) from error
    plan, of_query_heads = _plan_of(model, input_ids, layer)
    if heads is None:
        panels = {f"layer {layer}, {of_query_heads} heads": plan}
    else:
        known = all(head in range(of_query_heads) for head in heads)
        require(heads and known, "heads", heads, f"query heads, 0 to {of_query_heads - 1}")
        shared = plan.shared_by(of_query_heads)
        panels = {
            f"layer {layer}, head {head}": plan.select_heads([head // shared]) for head in heads
        }
    columns = min(len(panels), COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(INCHES * columns + 1, INCHES * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    later = ~block_visibility(plan.spans, *plan.blocks)[0].cpu()
    edges = 0, plan.kv_blocks * plan.key_block, plan.q_blocks * plan.query_block, 0
    for (title, part), panel in zip(panels.items(), axes, strict=False):
        share = part.to_dense()[0].float().mean(0).cpu().masked_fill(later, torch.nan)
        drawn = {"extent": edges, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
        image = panel.imshow(share.numpy(), cmap="viridis", **drawn)
        panel.set(title=f"{title}\ndensity {part.density():.2f}", xlabel="key", ylabel="query")
    for panel in axes[len(panels) :]:
        panel.remove()
    if heads is None:
        figure.colorbar(image, ax=axes[0], label="share of heads")
    return figure


@torch.no_grad()
def _plan_of(model: PreTrainedModel, input_ids: Tensor, layer: int) -> tuple[BlockPlan, int]:
    """The plan by which ``layer`` attends while the model reads a text, and its query heads."""
    inner = transformers_model(model)
    is_text = isinstance(input_ids, Tensor) and input_ids.ndim == 2 and len(input_ids) == 1
    require(is_text, "input_ids", input_ids, "the tokens of one text, a tensor [1, N]")
    name = inner.config.get_text_config()._attn_implementation
    by_cab = " or ".join(SPARSE)
    require(name in SPARSE, "attn_implementation", name, f"{by_cab}; cab_hf.apply_cab sets it")
    modules = dict(attention_layers(inner))
    require(layer in [*modules], "layer", layer, f"the index of an attention layer: {[*modules]}")
    seen: list[tuple[BlockPlan, int]] = []

    def look(call: Call) -> None:
        if call.layer is not modules[layer]:
            return
        facts = {"sparse": call.sparse, "layer": call.layer, "index": call.index}
        way = route(call.text, call.config, call.work, **facts)
        if way.kind != "sparse":
            raise ValueError(f"Layer {layer} attends to every block: {way.reason}.")
        layout = call.text.layout(*blocks_of(way.config), call.q.device)
        plan = way.choose(call, layout, layout.queries(call.q), layout.keys(call.k))
        seen.append((plan, call.q.shape[1]))
        raise _Chosen

    with during_calls(model, observer=look), suppress(_Chosen):
        model(input_ids.to(inner.device), use_cache=False)
    return seen[0]
