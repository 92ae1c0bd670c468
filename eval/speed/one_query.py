"""Attention of one decode step over the cache of one layer: by dense kernels, and by cab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cab_hf.eval.speed.checks import close
from cab_hf.eval.speed.dense import FA3_MODULES, FA4_MODULES, first_of
from cab_hf.eval.speed.heads import RandomHeads
from cab_hf.eval.speed.timing import Bench, Timing
from cab_hf.hf.rotary import llama_channels
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice, reference

READ_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}  # of a sum that tells the bandwidth


class Step(NamedTuple):
    """One query a head and the cache that it attends, and what comes of it in float32.

    Attributes:
        q: [B, H, 1, D].
        k, v: [B, H_kv, N, D], contiguous, as caches of transformers are.
        weights: float32 [B, H_kv, H / H_kv, N], of all keys.
        expected: float32 [B, H, 1, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    expected: Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def bytes_a_key(self) -> int:
        """Of K and V of one key of one KV head."""
        return 2 * self.k.shape[-1] * self.k.element_size()


# once for all that attends it
@lru_cache(maxsize=1)
def random_step(
    settings: RandomHeads, length: int, batch: int, head_dim: int, device: torch.device
) -> Step:
    """The last token of random inputs, and the cache of all of them."""
    q, k, v = settings.random_heads(length, head_dim, device, "qkv", batch)
    q, k, v = q[:, :, -1:].contiguous(), k.contiguous(), v.contiguous()
    grouped = q.float().unflatten(1, (k.shape[1], -1)).squeeze(3) * head_dim**-0.5
    # a text at a time: a cache in float32 is twice the cache
    logits = [one @ keys.float().transpose(-1, -2) for one, keys in zip(grouped, k, strict=True)]
    weights = torch.stack(logits).softmax(-1)
    return Step(q, k, v, weights, weighted(weights, v))


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    """float32 [B, H, 1, D] of weights [B, H_kv, G, N] and v [B, H_kv, N, D]."""
    sums = [one @ values.float() for one, values in zip(weights, v, strict=True)]
    return torch.stack(sums).flatten(1, 2).unsqueeze(2)


@lru_cache(maxsize=1)
def bandwidth(bench: Bench) -> float:
    """GB/s at which a large tensor is read and summed."""
    count = READ_BYTES[bench.device.type] // torch.bfloat16.itemsize
    source = torch.zeros(count, dtype=torch.bfloat16, device=bench.device)
    return source.nbytes / bench.time(lambda: source.sum(dtype=torch.float32)).ms / 1e6


# a call that gives [B, H, 1, D]
Call = Callable[[], Tensor]


def _sdpa(backend: SDPBackend | None, step: Step) -> Call:
    def attend() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*step[:3], scale=step.scale, enable_gqa=True)

    return attend


def _transformers(step: Step) -> Call:
    """What transformers calls where the cache is static: a mask of its slots."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v, _, _ = step
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    mask = torch.ones(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool, device=q.device)

    def attend() -> Tensor:
        return sdpa_attention_forward(module, q, k, v, mask, scaling=step.scale)[0].transpose(1, 2)

    return attend


def _flash(modules: tuple[str, ...], name: str, step: Step) -> Call:
    """A function of flash-attn, which takes [B, N, H, D]: views, nothing is copied."""
    kernel = getattr(first_of(modules), name)
    q, k, v = (x.transpose(1, 2) for x in step[:3])
    more: dict[str, Any] = {"softmax_scale": step.scale, "causal": True}
    if name == "flash_attn_with_kvcache":
        batch, length, *_ = k.shape
        more["cache_seqlens"] = torch.full((batch,), length, dtype=torch.int32, device=k.device)

    def attend() -> Tensor:
        out = kernel(q, k, v, **more)
        # some versions return the log-sum-exp as well
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


DENSE: Mapping[str, Callable[[Step], Call]] = {
    "SDPA": partial(_sdpa, None),
    "transformers": _transformers,
    "FA3": partial(_flash, FA3_MODULES, "flash_attn_with_kvcache"),
    "FA4": partial(_flash, FA4_MODULES, "flash_attn_func"),
    "cuDNN": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
}


@torch.no_grad()
def time_dense(step: Step, name: str, bench: Bench) -> Timing:
    """The time of one of `DENSE`; ArithmeticError where it computes something else."""
    call = DENSE[name](step)
    close(call(), step.expected, "of one query")
    return bench.time(call)


@torch.no_grad()
def time_cab(step: Step, wanted: int, bench: Bench) -> dict[str, Any]:
    """Times of a step of cab that reads ``wanted`` keys, and what it reads, checked before.

    Fields are ``timing`` and those of its parts, ``index``, ``choose``, ``attend``; ``kept``, keys
    read a KV head; ``mass``, the share of attention on them; ``bytes`` read; ``full_error``, the
    relative error where everything is chosen.

    Raises:
        ArithmeticError: where it computes something else than float32 attention over its choice, or
            than the reference with what is not read.
    """
    q, k, v, weights, expected = step
    channels, length = llama_channels(q.shape[-1]), k.shape[2]
    index = decode.index_keys(k, channels)
    place = torch.tensor([length - 1], device=q.device)
    so_far, most = (
        torch.tensor([count], dtype=torch.int32, device=q.device) for count in (length, wanted)
    )

    def write() -> None:
        decode.write_index(index, k[:, :, -1:], channels, place)

    def choose(most: Tensor = most) -> Choice:
        return decode.choose(q, index, step.scale, so_far, most, channels)

    def attend(choice: Choice) -> Tensor:
        return decode.attend(q, k, v, choice, step.scale, so_far)

    def complete() -> Tensor:
        write()
        return attend(choose())

    everything, choice = attend(choose(so_far)), choose()
    close(everything, expected, "where everything is chosen")
    kept = weights * choice.kept().unsqueeze(2)
    alone = attend(choice.elsewhere(q.device))
    close(alone, weighted(kept / kept.sum(-1, keepdim=True), v), "over what is chosen")
    # a text at a time, as a cache in float32 is twice the cache
    exact = [
        reference.attend(
            q[[i]].float(), k[[i]], v[[i]], Choice(*(x[[i]] for x in choice)), step.scale, so_far
        )
        for i in range(len(q))
    ]
    close(complete(), torch.cat(exact), "with what is not read")
    count = int(choice.counts.sum())
    return {
        "timing": bench.time(complete),
        "index": bench.time(write),
        "choose": bench.time(choose),
        "attend": bench.time(partial(attend, choice)),
        "kept": count / (k.shape[0] * k.shape[1]),
        "mass": float(kept.sum(-1).mean()),
        "bytes": index.nbytes + count * step.bytes_a_key,
        "full_error": float((everything.float() - expected).norm() / expected.norm()),
    }
