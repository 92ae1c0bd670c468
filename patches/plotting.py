"""`plot_plan`: draw the blocks that a layer attends to."""

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
INCHES = 3.5  # inches per panel


class _Chosen(Exception):
    """An exception that ends a forward pass after the drawn layer."""


def plot_plan(
    model: PreTrainedModel, input_ids: Tensor, layer: int, heads: Sequence[int] | None = None
) -> Figure:
    """Draw the blocks that one layer of ``model`` attends to for a prompt.

    Query blocks run from top to bottom and key blocks from left to right, both in tokens. Keys
    after a query are blank. The title of each panel contains its density. The model computes the
    prompt up to this layer once, without gradients. `stats` counts the layers before it.

    Args:
        model: a causal language model of transformers that attends by CAB.
        input_ids: int [1, N], the tokens of the prompt.
        layer: index of the layer.
        heads: query heads, one panel each. By default one panel shows the share of heads that
            attend to each block.

    Returns:
        The matplotlib figure. A notebook shows it if ``matplotlib.pyplot`` is imported, and
        ``figure.savefig(path)`` writes it to a file.

    Raises:
        ValueError: an argument is invalid, or the layer attends exactly.
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "matplotlib is not installed, and plot_plan needs it. Run `pip install matplotlib`."
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
    """Return the plan of ``layer`` for a prompt, and the number of its query heads."""
    inner = transformers_model(model)
    is_text = isinstance(input_ids, Tensor) and input_ids.ndim == 2 and len(input_ids) == 1
    require(is_text, "input_ids", input_ids, "the tokens of one prompt, a tensor [1, N]")
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
            raise ValueError(
                f"layer must attend sparsely, got {layer}, which attends to every block: "
                f"{way.reason}. Choose another layer, or change CabConfig."
            )
        layout = call.text.layout(*blocks_of(way.config), call.q.device)
        plan = way.choose(call, layout, layout.queries(call.q), layout.keys(call.k))
        seen.append((plan, call.q.shape[1]))
        raise _Chosen

    with during_calls(model, observer=look), suppress(_Chosen):
        model(input_ids.to(inner.device), use_cache=False)
    return seen[0]
