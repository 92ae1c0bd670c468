"""Dense causal attention, the baseline of sparse attention: the fastest available kernels.

Kernels are imported only when they are needed. A baseline that is not installed is reported with a
reason instead of an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cab_hf.engines import REFERENCE
from cab_hf.eval.experiment import Row
from cab_hf.eval.report import digits, percent
from cab_hf.eval.speed.timing import Bench, in_a_sentence
from cab_hf.plan import BlockPlan, KeyRanges

# q [B, H, N, D], k and v [B, H_kv, N, D], scale -> [B, H, N, D]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# no multiple of any kernel's tile; below 512 tokens ffpa calls SDPA
CHECK_LENGTH = 600
# bf16 operands have errors up to 1e-2, gradients a few times that; a wrong layout about 1
CHECK_TOLERANCE = 2e-2
CHECK_GRADIENT_TOLERANCE = 5e-2
CHECK_BLOCKS = (128, 64)
CHECKED_QUERIES = 32  # consecutive queries at the start, in the middle and at the end
MEASURED = ("baselines", "not_measured", "without_graph")
COMPARED = ("baseline", "baseline_ms", "extrapolated", "ratio")
PREFERRED = ("FA3", "cuDNN")  # baselines of ratios: the first that ran
BREAK_EVEN = "A break-even lies between two measured lengths, on a line through their logarithms."
FLASH_DIMS = range(1, 257)
WIDE_DIMS = range(257, 1025)
# the wheel with the forward pass alone has its own module
FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
FA4_MODULES = ("flash_attn.cute",)


@dataclass(frozen=True)
class Baseline:
    """One dense kernel; ``load`` imports and returns it, or raises ImportError."""

    load: Callable[[], Attend]
    # version of its library; None for torch itself
    version: Callable[[], str | None] = lambda: None
    # supported inputs
    head_dims: range = range(1, 1 << 16)
    # True if the kernel takes fewer key heads; else they are repeated before the clock starts
    grouped: bool = True
    # True if fewer queries than keys are the last ones, as in a call over a cache; PyTorch's
    # kernels take them for the first ones
    continues: bool = False

    def heads(self, q: Tensor, *keys: Tensor) -> list[Tensor]:
        """Return q, and ``keys`` with the number of heads that the kernel takes."""
        group = 1 if self.grouped else q.shape[1] // keys[0].shape[1]
        return [q, *(x.repeat_interleave(group, dim=1) if group > 1 else x for x in keys)]


def on(device: torch.device | str) -> dict[str, Baseline]:
    """Return the baselines for ``device`` by name."""
    return ON_GPU if torch.device(device).type == "cuda" else ON_CPU


def against(measured: Mapping[str, float], preferred: Iterable[str] = PREFERRED) -> str | None:
    """Return the baseline for a ratio: the first preferred of name -> ms, else the fastest."""
    first = next((name for name in preferred if name in measured), None)
    return first or min(measured, key=measured.__getitem__, default=None)


def compared(row: Row, rows: Iterable[Row], preferred: Iterable[str] = PREFERRED) -> dict[str, Any]:
    """Return `COMPARED`: a baseline of the row's length, its ms, and the ratio of ``row`` to it.

    Without one, the value is extrapolated from the longest of ``rows``, which differ in length
    alone; None if ``row`` is shorter.
    """
    measured = (each for each in rows if each["baselines"])
    longest = max(measured, key=lambda each: each["length"], default=None)
    source = row if row["baselines"] else longest
    if source is None or source["length"] > row["length"]:
        return dict.fromkeys(COMPARED)
    name = against(source["baselines"], preferred)
    # quadratic in the length
    ms = source["baselines"][name] * (row["length"] / source["length"]) ** 2
    ratio = None if row["ms"] is None else row["ms"] / ms
    return dict(zip(COMPARED, (name, ms, source is not row, ratio), strict=True))


def time_shown(row: Row) -> str | None:
    """Format the time that a row is compared with: ``≈ 842 FA3`` if it is extrapolated."""
    if row["baseline_ms"] is None:
        return None
    return f"{'≈ ' * row['extrapolated']}{digits(row['baseline_ms'])} {row['baseline']}"


def break_even(points: Sequence[tuple[int, float]]) -> float | None:
    """Return the length from which a ratio stays below 1, for (length, ratio) by length, or None.

    Between two measured lengths it is on a straight line through the logarithms of both.
    """
    lost = max((place for place, (_, ratio) in enumerate(points) if ratio >= 1), default=None)
    if lost is None:
        return points[0][0]
    if lost == len(points) - 1:
        return None
    (length, ratio), (longer, lower) = points[lost : lost + 2]
    return length * (longer / length) ** (math.log(ratio) / math.log(ratio / lower))


def break_even_shown(rows: Iterable[Row]) -> str | None:
    """Format the break-even of the ``ratio`` of rows by length, for a cell or a sentence."""
    points = [(row["length"], row["ratio"]) for row in rows if row["ratio"] is not None]
    if not points:
        return None
    length = break_even(points)
    if length is None:
        return f"at no length up to {points[-1][0]:,} tokens"
    always = all(ratio < 1 for _, ratio in points)
    return f"{'at every length from' if always else 'from about'} {round(length):,} tokens on"


def reading(rows: Sequence[Row], what: str) -> str:
    """Compare ``what`` with dense attention in a sentence, for rows by length with a ``ratio``."""
    last = rows[-1]
    return (
        f"At {last['length']:,} tokens {what} takes {percent(last['ratio'])} of "
        f"{last['baseline']}'s time{' (extrapolated)' * last['extrapolated']}; it is faster "
        f"{break_even_shown(rows)}."
    )


@torch.enable_grad()
def gradients_of(
    attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, *more: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that computes the gradients of q, k and v after one forward pass.

    Raises:
        RuntimeError: nothing can be differentiated.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    # a compiled backward that may overwrite saved tensors runs only once
    with torch._functorch.config.patch(donated_buffer=False):
        out = attend(*leaves, *more)
    if not out.requires_grad:
        raise RuntimeError("it has no backward")
    # equal for every layout: a gradient is compared with that of another kernel
    generator = torch.Generator(out.device).manual_seed(0)
    drawn = torch.randn(out.shape[2:], generator=generator, device=out.device)
    gradient = torch.empty_like(out).copy_(drawn)
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def close(result: Tensor, expected: Tensor, where: str, tolerance: float = CHECK_TOLERANCE) -> None:
    """Raise ArithmeticError with the relative error unless the two agree."""
    error = float((result.float() - expected).norm() / expected.norm())
    if not error <= tolerance:  # written so that NaN fails too
        raise ArithmeticError(f"wrong by {error:.2g} (relative) {where}")


def check_rows(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
    """Compare some rows with float32 attention under the plan; padding queries are left out."""
    last = max(0, plan.q_length - CHECKED_QUERIES)
    for start in dict.fromkeys((0, last // 2, last)):
        stop = min(start + CHECKED_QUERIES, plan.q_length)
        where = f"in queries {start} to {stop - 1}"
        padding = (plan.ranges.end[:, start:stop] < 0)[:, None, :, None]
        if not padding.all():
            pair = out[:, :, start:stop], exact_rows(q, k, v, plan, start, stop)
            close(*(x.masked_fill(padding, 0.0) for x in pair), where)


def exact_rows(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, start: int, stop: int) -> Tensor:
    """Return float32 attention of queries ``start`` to ``stop`` under the plan, [B, H, rows, D]."""
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]

    def grouped(x: Tensor) -> Tensor:
        # [B, H, rows, .] -> [B, H_kv, group * rows, .]: no key is repeated
        return x.unflatten(1, (kv_heads, group)).flatten(2, 3)

    mask = plan.token_mask(start, stop).repeat_interleave(plan.shared_by(q.shape[1]), dim=1)
    rows = grouped(q[:, :, start:stop].float()) * q.shape[-1] ** -0.5
    logits = rows @ k.float().transpose(-1, -2)
    weights = logits.masked_fill_(~grouped(mask), -torch.inf).softmax(dim=-1)
    return (weights @ v.float()).unflatten(2, (group, -1)).flatten(1, 2)


def check_gradients(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planner: Callable[[Tensor, Tensor, KeyRanges], BlockPlan],
) -> None:
    """Compare gradients with those of the float32 reference, on the first tokens."""
    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    batch, _, length, dim = q.shape
    plan = planner(q, k, KeyRanges.causal(batch, length, length, q.device))
    floats = (x.float() for x in (q, k, v))
    result = gradients_of(attend, q, k, v, plan, dim**-0.5)()
    exact = gradients_of(REFERENCE.attention, *floats, plan, dim**-0.5)()
    for name, ours, theirs in zip("qkv", result, exact, strict=True):
        where = f"in the gradient of {name} at {length} tokens"
        close(ours, theirs, where, CHECK_GRADIENT_TOLERANCE)


def check_dense(attend: Attend, q: Tensor, k: Tensor, v: Tensor, backward: bool = False) -> None:
    """Run `check_rows` of causal attention on the first tokens, and `check_gradients` if asked."""

    def causal(q: Tensor, k: Tensor, ranges: KeyRanges) -> BlockPlan:
        return BlockPlan.causal(ranges, q.shape[1], *CHECK_BLOCKS)

    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    check_rows(attend(q, k, v, q.shape[-1] ** -0.5), q, k, v, causal(q, k, ranges))
    if backward:
        check_gradients(lambda q, k, v, plan, scale: attend(q, k, v, scale), q, k, v, causal)


@torch.no_grad()
def measure(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bench: Bench,
    backward: bool = False,
    baselines: Mapping[str, Baseline] | None = None,
    check: Callable[[Attend, Tensor, Tensor, Tensor, bool], None] = check_dense,
) -> dict[str, dict[str, Any]]:
    """Time every baseline on q [B, H, N, D], k and v [B, H_kv, N, D], or record why it did not run.

    The result contains, by `MEASURED` and name: ms, the reason for missing ms, and the reason for a
    time without a graph. ``backward`` times the backward pass alone, called from Python.
    """
    result = {field: {} for field in MEASURED}
    for name, baseline in (on(bench.device) if baselines is None else baselines).items():
        try:
            if q.shape[-1] not in baseline.head_dims:
                low, high = baseline.head_dims[0], baseline.head_dims[-1]
                raise RuntimeError(f"it supports head dims {low} to {high}, not {q.shape[-1]}")
            attend, heads = baseline.load(), baseline.heads(q, k, v)
            check(attend, *heads, backward)
            call = (gradients_of if backward else partial)(attend, *heads, scale)
            timing = bench.time(call, graph=not backward)
        except Exception as error:
            # a kernel that is missing, raises an error or is wrong is reported and not measured
            result["not_measured"][name] = in_a_sentence(error)
            continue
        finally:
            # free the tensors that one baseline saved for its backward before the next one
            call = heads = None
        result["baselines"][name] = timing.ms
        if timing.why_not:
            result["without_graph"][name] = timing.why_not
    return result


def _sdpa(backend: SDPBackend) -> Callable[[], Attend]:
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        gqa = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=gqa
            )

    return lambda: attend


def flash_attn(name: str, modules: Sequence[str]) -> Callable[..., Tensor]:
    """Return a causal function of flash-attn, from the first of ``modules`` that is installed.

    Raises:
        ImportError: none is installed.
    """
    kernel = getattr(import_module(next(filter(find_spec, modules), modules[-1])), name)

    def attend(*tensors: Tensor, **more: Any) -> Tensor:
        out = kernel(*tensors, causal=True, **more)
        # some versions return the log-sum-exp too
        return out[0] if isinstance(out, tuple) else out

    return attend


def _flash(*modules: str) -> Callable[[], Attend]:
    """Return flash-attn's function, which takes [B, N, H, D], for views without copies."""

    def load() -> Attend:
        kernel = flash_attn("flash_attn_func", modules)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            turned = (x.transpose(1, 2) for x in (q, k, v))
            return kernel(*turned, softmax_scale=scale).transpose(1, 2)

        return attend

    return load


def _ffpa(backend: str) -> Callable[[], Attend]:
    """Return ffpa-attn with its Triton or its CuTe kernels; it selects no other kernel."""

    def load() -> Attend:
        from ffpa_attn import ffpa_attn_func
        from ffpa_attn.functional import FFPAAttnMeta

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if FFPAAttnMeta.from_kwargs(backend=backend).fallback(q, k, None, 0.0):
                raise RuntimeError("it would call SDPA instead")
            return ffpa_attn_func(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True, backend=backend
            )

        return attend

    return load


def _package(*names: str) -> Callable[[], str | None]:
    """Return the version of the first of these packages that is installed."""

    def version() -> str | None:
        for name in names:
            with suppress(metadata.PackageNotFoundError):
                return f"{name} {metadata.version(name)}"
        return None

    return version


def _cudnn_version() -> str | None:
    version = torch.backends.cudnn.version()
    return None if version is None else f"cuDNN {version}"


ON_GPU = {
    "FA3": Baseline(
        _flash(*FA3_MODULES),
        _package("flash_attn_3", "flash-attn-3", "fa3-fwd"),
        head_dims=FLASH_DIMS,
        continues=True,
    ),
    "FA4": Baseline(
        _flash(*FA4_MODULES), _package("flash-attn-4"), head_dims=FLASH_DIMS, continues=True
    ),
    "cuDNN": Baseline(_sdpa(SDPBackend.CUDNN_ATTENTION), _cudnn_version, head_dims=FLASH_DIMS),
    "flash": Baseline(_sdpa(SDPBackend.FLASH_ATTENTION), head_dims=FLASH_DIMS),
    "efficient": Baseline(_sdpa(SDPBackend.EFFICIENT_ATTENTION), grouped=False),
    "ffpa CuTe": Baseline(_ffpa("cutedsl"), _package("ffpa-attn"), head_dims=WIDE_DIMS),
    "ffpa Triton": Baseline(_ffpa("triton"), _package("ffpa-attn"), head_dims=WIDE_DIMS),
}
ON_CPU = {"SDPA": Baseline(_sdpa(SDPBackend.FLASH_ATTENTION))}
