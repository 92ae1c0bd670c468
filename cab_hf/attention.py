"""What transformers calls: the mask hook, and the attention function behind "cab" and "cab_dense".

A call is routed (decode, dense or sparse), then a plan is predicted and an engine runs it. The mask
hook hands every layer one small `CabMask` instead of a 4-D tensor.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from cab_hf import engines
from cab_hf.config import CabConfig
from cab_hf.frame import Frame
from cab_hf.ops.attention import ffpa
from cab_hf.plan import BlockPlan
from cab_hf.predictors import make_predictor

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# query rows of a dense layer that share one mask tensor, and the elements it may have: they bound
# memory, not the result
DENSE_CHUNK = 1024
MASK_AT_A_TIME = 1 << 28


# --- the mask hook


class CabMask:
    """What may be attended, for one forward pass; every layer of one kind gets the same object.

    Slots are indices into the key tensor a layer hands over.

    Attributes:
        batch, q_length, kv_length: of this call; ``kv_length`` counts the keys written so far,
            less than the key tensor's length for a static cache. None where that would take a
            device sync (decoding on a static cache).
        q_slot: slot of the first query, int or 0-d tensor.
        valid: bool [B, N_k], False for padding keys; None when no key is padding.
        document: int [B, N_k], equal for tokens of one packed document; None when not packed.
        window: sliding-window width in tokens; None without one.
    """

    # transformers asks these two of a mask to tell 2-D and 4-D tensors; this is neither
    ndim = 0
    shape = ()

    def __init__(
        self,
        batch: int,
        q_length: int,
        kv_length: int | None,
        q_slot: int | Tensor,
        valid: Tensor | None = None,
        document: Tensor | None = None,
        window: int | None = None,
    ) -> None:
        self.batch = batch
        self.q_length = q_length
        self.kv_length = kv_length
        self.q_slot = q_slot
        self.valid = valid
        self.document = document
        self.window = window
        self._looked_for_documents = document is not None
        self._frames: dict[tuple[Any, ...], Frame] = {}
        self._plans: dict[Frame, BlockPlan] = {}

    def contiguous(self) -> CabMask:
        """Itself: generate() tidies the masks of static caches this way."""
        return self

    @property
    def plain(self) -> bool:
        """Nothing but causality."""
        return self.valid is None and self.document is None and self.window is None

    def find_documents(self, position_ids: Tensor | None, cu_seq_lens: Tensor | None) -> None:
        """Recognise packing that only the attention call can see, once a forward pass.

        transformers looks for restarting positions only where there is no cache; ``cu_seq_lens``
        reach the attention function alone.
        """
        if self._looked_for_documents or self.q_length == 1 or self.q_length != self.kv_length:
            return
        self._looked_for_documents = True
        if cu_seq_lens is not None:
            slot = torch.arange(self.kv_length, device=cu_seq_lens.device)
            document = torch.bucketize(slot, cu_seq_lens[1:], right=True)
            self.document = document.expand(self.batch, -1)
        elif (
            self.valid is None
            and position_ids is not None
            and position_ids.shape[-1] == self.q_length
            and position_ids.ndim == 2
            and not torch.compiler.is_compiling()
        ):
            restarts = F.pad(position_ids[:, 1:] < position_ids[:, :-1], (1, 0))
            if restarts.any():
                self.document = restarts.cumsum(-1).expand(self.batch, -1)

    def frame(self, query_block: int, key_block: int, device: torch.device) -> Frame:
        """Where the tokens of this call stand on the block grid; made once for all layers."""
        key = (query_block, key_block, device)
        if key not in self._frames:
            # layers of a model spread over devices share this mask
            valid = None if self.valid is None else self.valid.to(device)
            document = None if self.document is None else self.document.to(device)
            self._frames[key] = Frame.build(
                self.batch,
                self.q_length,
                self.kv_length,
                self.q_slot,
                valid,
                document,
                align=max(query_block, key_block),
                device=device,
            )
        return self._frames[key]

    def everything(self, frame: Frame) -> BlockPlan:
        """The plan that leaves out nothing of ``frame``; made once for all layers and heads."""
        if frame not in self._plans:
            block = engines.EXACT_BLOCK
            self._plans[frame] = BlockPlan.causal(frame.spans, 1, block, block)
        return self._plans[frame]

    def dense_rows(self, start: int, stop: int, low: int, high: int, device: Any) -> Tensor:
        """bool [B or 1, 1, stop - start, high - low]: keys that these queries may see."""
        query = self.q_slot + torch.arange(start, stop, device=device).unsqueeze(-1)
        key = torch.arange(low, high, device=device)
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        seen = seen.unsqueeze(0)
        if self.valid is not None:
            seen = seen & self.valid[:, None, low:high].to(device)
        if self.document is not None:
            document = self.document.to(device)
            seen = seen & (document[:, start:stop, None] == document[:, None, low:high])
        # a padding query would see nothing, and softmax over nothing is NaN: let it see itself
        return (seen | (key == query)).unsqueeze(1)


def cab_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | CabMask | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> CabMask:
    """The mask hook registered beside "cab": a `CabMask` instead of a [B, 1, N_q, N_k] tensor.

    Called by transformers once a forward pass and kind of layer, with its own arguments.

    Raises:
        NotImplementedError: for patterns other than causal, sliding-window and packed.
    """
    # generate() with a static cache calls the hook, then the model does again with what it returned
    if isinstance(attention_mask, CabMask):
        return attention_mask
    if use_vmap:
        raise NotImplementedError(
            "attn_implementation='cab' computes causal attention; this model adds an "
            "or_mask_function or and_mask_function. Load it with attn_implementation='sdpa'."
        )
    eager = not torch.compiler.is_compiling()
    decode = q_length == 1
    if isinstance(q_offset, Tensor):
        # a static cache that has begun: its counter is live
        q_offset = int(q_offset) if eager and not decode else q_offset.clone()
    q_slot = q_offset - kv_offset
    # a static cache's keys reach beyond what is written
    written = None if isinstance(q_slot, Tensor) else min(kv_length, q_slot + q_length)

    valid = None
    if attention_mask is not None:
        valid = attention_mask[:, kv_offset : kv_offset + (written or kv_length)].to(
            device, torch.bool
        )
        valid = F.pad(valid, (0, (written or kv_length) - valid.shape[1]), value=False)
        # one sync a prefill buys the mask-free kernels; a decode step is too short to pay it
        if eager and not decode and bool(valid.all()):
            valid = None

    document = None
    if mask_function is not causal_mask_function and not decode:
        document = _documents(mask_function, batch_size, q_length, q_offset, device)
    return CabMask(batch_size, q_length, written, q_slot, valid, document, local_size)


def _documents(
    mask_function: Any, batch: int, q_length: int, q_offset: int | Tensor, device: Any
) -> Tensor | None:
    """Document ids int [B, N_q], read off transformers' own mask function.

    A document starts at a token that may not see the token before it.
    """
    row = torch.arange(batch, device=device).unsqueeze(-1)
    head = torch.zeros_like(row)
    slot = torch.arange(q_length, device=device).unsqueeze(0)
    before = (slot - 1).clamp(min=0)
    eager = not torch.compiler.is_compiling()
    if eager and bool((mask_function(row, head, before, slot) & (slot > before)).any()):
        raise NotImplementedError(
            "attn_implementation='cab' computes causal attention; this model's mask lets tokens "
            "see later ones. Load it with attn_implementation='sdpa'."
        )
    starts = ~mask_function(row, head, slot, before).expand(batch, q_length) & (slot > 0)
    if eager and not bool(starts.any()):
        return None
    return starts.cumsum(-1)


# --- the attention function


def cab_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Block-sparse attention under the signature of transformers' attention functions.

    Args:
        query: [B, H, N_q, D] after RoPE.
        key, value: [B, H_kv, N_k, D] after the cache update.
        attention_mask: what `cab_mask` made, or None for plain causal attention.
        kwargs: what transformers adds; ``scaling`` (1/sqrt(D) by default), ``position_ids`` int
            [B, N_q], which mark packed documents where they fall back, and ``cu_seq_lens_q`` int
            [documents + 1], their cumulative lengths, are used.

    Returns:
        [B, N_q, H, D], and None for the attention weights, which never exist.

    Raises:
        ValueError, NotImplementedError: for what cannot be computed exactly as asked.
    """
    return _attend(module, query, key, value, attention_mask, sparse=True, **kwargs)


def cab_dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CabMask | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Exact attention through the same door as `cab_attention`, with the same arguments."""
    return _attend(module, query, key, value, attention_mask, sparse=False, **kwargs)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: CabMask | None,
    sparse: bool,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _refuse(module, query, key, mask, dropout, sliding_window, kwargs)
    query, key, value = _one_dtype(module, query, key, value)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mask is None:
        kv_length = key.shape[2]
        mask = CabMask(query.shape[0], query.shape[2], kv_length, kv_length - query.shape[2])
    mask.find_documents(position_ids, cu_seq_lens_q)
    config = settings(module.config)
    layer = getattr(module, "layer_idx", None)
    if not sparse or dense_reason(config, layer, mask.q_length, mask.kv_length, mask.window):
        return _dense(module, query, key, value, mask, scale), None
    return _sparse(module, query, key, value, mask, scale, config), None


def dense_reason(
    config: CabConfig,
    layer: int | None,
    q_length: int,
    kv_length: int | None,
    window: int | None = None,
) -> str | None:
    """Why a layer is computed with exact attention; None when it is sparse."""
    if window is not None:
        return f"sliding window of {window} tokens"
    if layer in config.dense_layers:
        return "in dense_layers"
    if kv_length is None or (q_length < config.query_block and not config.sparse_decode):
        return f"fewer than query_block={config.query_block} queries (decode)"
    if kv_length < config.min_length:
        return f"input shorter than min_length={config.min_length}"
    return None


def _sparse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: CabMask,
    scale: float,
    config: CabConfig,
) -> Tensor:
    frame = mask.frame(config.query_block, config.key_block, query.device)
    q, k, v = frame.queries(query), frame.keys(key), frame.keys(value)
    plan = make_predictor(config)(q, k, frame.spans, scale)
    work = _workload(q, k, v, config.query_block, config.key_block)
    out = engines.run(engines.choose(config.engine, work), q, k, v, plan, scale)
    if not torch.compiler.is_compiling():
        _record(module, plan)
    return frame.restore(out).transpose(1, 2)


def _dense(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: CabMask, scale: float
) -> Tensor:
    """Exact attention by SDPA, [B, N_q, H, D]; masks, where needed, cover some rows at a time."""
    q_length = query.shape[2]
    if mask.kv_length is not None:
        key, value = key[:, :, : mask.kv_length], value[:, :, : mask.kv_length]
    kv_length = key.shape[2]
    written = mask.kv_length is not None
    if q_length >= engines.EXACT_BLOCK and mask.window is None and written:
        work = _workload(query, key, value, engines.EXACT_BLOCK, engines.EXACT_BLOCK)
        name = engines.exact(work, q_length if mask.plain and q_length == kv_length else None)
        if name == "ffpa":
            return ffpa.attention(query, key, value, scale).transpose(1, 2)
        if name != "sdpa":
            return _dense_by_blocks(query, key, value, mask, scale, name)
    if mask.plain and written and q_length in (1, kv_length):
        return sdpa_attention_forward(module, query, key, value, None, scaling=scale)[0]
    known = isinstance(mask.q_slot, int)
    reach = kv_length if mask.window is None else min(kv_length, mask.window + DENSE_CHUNK)
    a_query = query.shape[0] * (query.shape[1] // key.shape[1]) * reach
    step = min(DENSE_CHUNK, max(1, MASK_AT_A_TIME // a_query))
    pieces = []
    for start in range(0, q_length, step):
        stop = min(start + step, q_length)
        high = min(kv_length, mask.q_slot + stop) if known else kv_length
        low = max(0, mask.q_slot + start + 1 - mask.window) if known and mask.window else 0
        rows = mask.dense_rows(start, stop, low, high, query.device)
        keys, values = key[:, :, low:high], value[:, :, low:high]
        pieces.append(_masked(query[:, :, start:stop], keys, values, rows, scale))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _masked(query: Tensor, key: Tensor, value: Tensor, rows: Tensor, scale: float) -> Tensor:
    """SDPA under the mask ``rows``, bool [B or 1, 1, N_q, N_k]: [B, N_q, H, D].

    SDPA's fast kernels take a mask only where every query head has keys of its own. The queries of
    a group become more queries of their KV head, so that no key is repeated.
    """
    batch, kv_heads = key.shape[:2]
    group, length = query.shape[1] // kv_heads, query.shape[2]
    folded = query.unflatten(1, (kv_heads, group)).flatten(2, 3)
    seen = rows.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3).expand(batch, -1, -1, -1)
    out = F.scaled_dot_product_attention(folded, key, value, attn_mask=seen, scale=scale)
    return out.unflatten(2, (group, length)).flatten(1, 2).transpose(1, 2)


def _dense_by_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: CabMask, scale: float, name: str
) -> Tensor:
    """Exact attention by an engine, under a plan that keeps everything."""
    frame = mask.frame(engines.EXACT_BLOCK, engines.EXACT_BLOCK, query.device)
    q, k, v = frame.queries(query), frame.keys(key), frame.keys(value)
    out = engines.run(name, q, k, v, mask.everything(frame), scale)
    return frame.restore(out).transpose(1, 2)


def _workload(
    q: Tensor, k: Tensor, v: Tensor, query_block: int, key_block: int
) -> engines.Workload:
    return engines.Workload(
        device=q.device.type,
        head_dim=q.shape[-1],
        dtype=q.dtype,
        training=engines.needs_grad(q, k, v),
        query_block=query_block,
        key_block=key_block,
    )


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Any,
    dropout: float,
    sliding_window: int | None,
    kwargs: dict[str, Any],
) -> None:
    """One sentence for everything that would otherwise quietly change meaning."""
    if _context_parallel_active():
        raise ValueError(
            "a context-parallel mesh is active; 'cab' would attend to this rank's shard only. "
            "Leave the context_parallel region, or use attn_implementation='sdpa' inside it."
        )
    if dropout:
        raise ValueError(
            f"dropout is {dropout}; 'cab' has no attention dropout. "
            "Set config.attention_dropout = 0.0 or call model.eval()."
        )
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal:
        raise ValueError(
            "is_causal is False; 'cab' computes causal self-attention only. "
            "Use attn_implementation='sdpa' for bidirectional and cross attention."
        )
    if key.shape[2] < query.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} tokens and query {query.shape[2]}; 'cab' computes causal "
            "self-attention, where no query lies behind the keys."
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "output_attentions is True; 'cab' never forms attention weights. "
            "Use attn_implementation='eager' to read them."
        )
    for name, meaning in (("softcap", "soft-capped logits"), ("s_aux", "sink logits")):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{name} is set ({meaning}); 'cab' does not compute them. "
                "Use attn_implementation='eager' or a flash implementation for this model."
            )
    if kwargs.get("cache") is not None:
        raise NotImplementedError(
            "cache is a paged cache (continuous batching); 'cab' does not read one. "
            "Use attn_implementation='sdpa' for generate_batch."
        )
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError(
            "position_bias is set; 'cab' adds no bias to logits. Use attn_implementation='sdpa'."
        )
    if mask is not None and not isinstance(mask, CabMask):
        seen = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(
            f"attention_mask is {seen}; 'cab' takes the 2-D padding mask [batch, tokens] of the "
            "tokenizer, or none. Use attn_implementation='sdpa' for a mask of your own."
        )
    if mask is not None and mask.window is not None and sliding_window is None:
        raise NotImplementedError(
            f"this layer attends in chunks of {mask.window}; 'cab' knows sliding windows and full "
            "attention. Use attn_implementation='sdpa' for this model."
        )
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query is {query.dtype}; 'cab' takes float16, bfloat16 and float32. "
            "Load the model with one of these dtypes."
        )


def _context_parallel_active() -> bool:
    """Whether torch's context_parallel has taken over SDPA in this process."""
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    return torch.ops.aten._scaled_dot_product_flash_attention.default in handlers


def _one_dtype(module: nn.Module, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast as transformers' flash path does: an adapter may hand float32 to a model in bfloat16."""
    query = tensors[0]
    device = query.device.type
    target = query.dtype
    if torch.is_autocast_enabled(device):
        target = torch.get_autocast_dtype(device)
    elif query.dtype == torch.float32:
        weights = (m.weight.dtype for m in module.modules() if isinstance(m, nn.Linear))
        target = next(weights, query.dtype)
        if not target.is_floating_point or target.itemsize == 1:
            # quantised weights: their dtype is a container, the config has the compute dtype
            target = module.config.dtype or query.dtype
    return tuple(x.to(target) for x in tensors)


def settings(config: PreTrainedConfig) -> CabConfig:
    """The CabConfig a model's config carries, the defaults when it carries none."""
    saved = getattr(config, "cab_config", None) or {}
    if isinstance(saved, CabConfig):
        return saved
    if not isinstance(saved, dict):
        return CabConfig.from_dict(saved)
    return _constant(tuple((name, _plain(value)) for name, value in saved.items()))


def _plain(value: Any) -> Any:
    """The same value, hashable; under torch.compile a constant.

    A number that differed in an earlier compilation is symbolic to dynamo. It becomes a constant
    where Python needs one: as the length of a range, as text.
    """
    if isinstance(value, list):
        return tuple(map(_plain, value))
    if isinstance(value, float):
        return float.fromhex(value.hex())
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return len(range(value))
    return value


# a constant to torch.compile, which wants plain arguments and would look into a cached function
@torch.compiler.assume_constant_result
def _constant(items: tuple[tuple[str, Any], ...]) -> CabConfig:
    return _parsed(items)


@lru_cache
def _parsed(items: tuple[tuple[str, Any], ...]) -> CabConfig:
    return CabConfig.from_dict(dict(items))


# --- what was attended


@dataclass
class Attended:
    """(query, key) pairs a layer attended and could have attended, int64 scalars on its device."""

    attended: Tensor
    causal: Tensor


attended: WeakKeyDictionary[nn.Module, Attended] = WeakKeyDictionary()


def _record(module: nn.Module, plan: Any) -> None:
    pairs = Attended(*plan.pairs())
    before = attended.get(module)
    if before is not None:
        pairs = Attended(before.attended + pairs.attended, before.causal + pairs.causal)
    attended[module] = pairs
