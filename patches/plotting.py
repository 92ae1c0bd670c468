"""`plot_plan`: draw the key blocks that one layer selects for a prompt, as a matplotlib figure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cab_hf.call.call import Call
from cab_hf.call.scope import set_context_during_calls
from cab_hf.checks import require
from cab_hf.config import SPARSE_IMPLEMENTATIONS, block_sizes
from cab_hf.dispatch import select_blocks
from cab_hf.hf.fit import read_int_field
from cab_hf.hf.layers import attention_layers, transformers_model
from cab_hf.plan import BlockPlan, block_visibility
from cab_hf.route import route

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# panels per row of a figure
MAX_COLUMNS = 4
# width and height of a panel in inches
PANEL_INCHES = 3.5


class _PlanSelected(Exception):
    """An exception that ends the forward pass after the drawn layer has selected its blocks."""


def plot_plan(
    model: PreTrainedModel, input_ids: Tensor, layer: int, heads: Sequence[int] | None = None
) -> Figure:
    """Draw the blocks that one layer of ``model`` attends to in a prompt.

    Queries run from top to bottom and keys from left to right, both in tokens. Blocks without a
    visible (query, key) pair are blank. The title of a panel shows the density. The model computes
    the prompt once, without gradients, up to this layer. `stats` counts this pass for earlier
    layers.

    Args:
        model: a causal language model of transformers that attends by CAB.
        input_ids: integers [1, N], the tokens of the prompt.
        layer: index of the layer.
        heads: a list, an array or a 1-D tensor of query heads, with a panel for each head. By
            default one panel shows, for each block, the fraction of heads that attend to it.

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
    plan, num_heads = _select_plan(model, input_ids, layer)
    if heads is None:
        plan_by_title = {f"layer {layer}, {num_heads} heads": plan}
    else:
        # number of query heads for which the plan has one common list of blocks
        group_size = plan.shared_by(num_heads)
        plan_by_title = {
            f"layer {layer}, head {head}": plan.select_heads([head // group_size])
            for head in _parse_head_indices(heads, num_heads)
        }
    num_columns = min(len(plan_by_title), MAX_COLUMNS)
    num_rows = -(-len(plan_by_title) // num_columns)
    figure = Figure(
        figsize=(PANEL_INCHES * num_columns + 1, PANEL_INCHES * num_rows), layout="constrained"
    )
    axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
    is_invisible = ~block_visibility(plan.ranges, plan.query_block, plan.key_block)[0].cpu()
    # left, right, bottom and top in tokens
    extent_tokens = 0, plan.kv_blocks * plan.key_block, plan.q_blocks * plan.query_block, 0
    for (title, panel_plan), panel_axes in zip(plan_by_title.items(), axes, strict=False):
        head_share = (
            panel_plan.to_dense()[0].float().mean(0).cpu().masked_fill(is_invisible, torch.nan)
        )
        heat_map = panel_axes.imshow(
            head_share.numpy(),
            cmap="viridis",
            extent=extent_tokens,
            vmin=0,
            vmax=1,
            interpolation="nearest",
        )
        density_text = f"density {panel_plan.density():.2f}"
        panel_axes.set(title=f"{title}\n{density_text}", xlabel="key", ylabel="query")
    for panel_axes in axes[len(plan_by_title) :]:
        panel_axes.remove()
    if heads is None:
        figure.colorbar(heat_map, ax=axes[0], label="share of heads")
    return figure


def _to_index(value: Any) -> int | None:
    """Convert an integer of Python, NumPy or torch to an int; return None for other values."""
    if isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _parse_head_indices(heads: Any, num_heads: int) -> list[int]:
    """Return ``heads`` as ints, or raise a ValueError if an item of ``heads`` is no query head."""
    try:
        head_indices = [_to_index(head) for head in heads]
    except TypeError:
        # a number, or a tensor or an array without dimensions
        head_indices = []
    are_valid_heads = bool(head_indices) and all(
        head_index in range(num_heads) for head_index in head_indices
    )
    require(are_valid_heads, "heads", heads, f"a list of query heads, 0 to {num_heads - 1}")
    return head_indices


def _require_prompt(input_ids: Any, model: PreTrainedModel) -> None:
    """Raise a ValueError unless ``input_ids`` is one prompt with tokens of the vocabulary."""
    is_tensor = isinstance(input_ids, Tensor)
    is_prompt = is_tensor and input_ids.ndim == 2 and len(input_ids) == 1 and input_ids.numel()
    require(is_prompt, "input_ids", input_ids, "the tokens of one prompt, a tensor [1, N]")
    dtype = input_ids.dtype
    is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    require(is_integer, "input_ids", dtype, "a tensor of integers, such as torch.int64")
    vocabulary_size = read_int_field(model.config.get_text_config(), "vocab_size")
    lowest_token, highest_token = (int(token) for token in input_ids.aminmax())
    is_in_vocabulary = lowest_token >= 0 and (
        vocabulary_size is None or highest_token < vocabulary_size
    )
    requirement = "tokens that the model knows, 0 or more"
    if vocabulary_size is not None:
        requirement = f"tokens that the model knows, 0 to {vocabulary_size - 1}"
    require(
        is_in_vocabulary,
        "input_ids",
        lowest_token if lowest_token < 0 else highest_token,
        requirement,
    )


@torch.no_grad()
def _select_plan(model: PreTrainedModel, input_ids: Tensor, layer: int) -> tuple[BlockPlan, int]:
    """Run the model up to a layer, and return the plan that the layer selects for a prompt.

    Arguments and errors as in `plot_plan`.

    Returns:
        plan: the plan of the layer.
        num_heads: number of query heads of the layer.
    """
    inner_model = transformers_model(model)
    _require_prompt(input_ids, inner_model)
    implementation = inner_model.config.get_text_config()._attn_implementation
    requirement = f"{' or '.join(SPARSE_IMPLEMENTATIONS)}, as cab_hf.apply_cab sets it"
    require(
        implementation in SPARSE_IMPLEMENTATIONS, "attn_implementation", implementation, requirement
    )
    module_by_layer = dict(attention_layers(inner_model))
    layer_index = _to_index(layer)
    requirement = f"the index of an attention layer, one of {[*module_by_layer]}"
    # the index of a module that serves several layers is None
    is_integer = layer is None or layer_index is not None
    require(is_integer and layer_index in module_by_layer, "layer", layer, requirement)
    selected_plans: list[tuple[BlockPlan, int]] = []

    def select_and_stop(call: Call) -> None:
        if call.layer is not module_by_layer[layer_index]:
            return
        chosen_route = route(
            call.mask,
            call.config,
            call.workload,
            is_sparse=call.is_sparse,
            layer=call.layer,
            key_index=call.key_index,
        )
        if chosen_route.method != "sparse":
            raise ValueError(
                f"layer must attend sparsely, got {layer_index}, which attends to every block: "
                f"{chosen_route.dense_reason}. Choose another layer, or change CabConfig."
            )
        query_block, key_block = block_sizes(chosen_route.config)
        layout = call.mask.layout(query_block, key_block, call.q.device)
        plan = select_blocks(
            call,
            layout,
            q=layout.queries(call.q),
            k=layout.keys(call.k),
            config=chosen_route.config,
        )
        selected_plans.append((plan, call.q.shape[1]))
        raise _PlanSelected

    with set_context_during_calls(model, observer=select_and_stop), suppress(_PlanSelected):
        model(input_ids.to(inner_model.device, torch.int64), use_cache=False)
    if not selected_plans:
        raise ValueError(
            f"layer must be a layer that {type(inner_model).__name__} runs for this prompt, got "
            f"{layer_index}. Choose another layer."
        )
    return selected_plans[0]
