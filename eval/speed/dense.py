"""Dense causal attention, the baseline of sparse attention: the fastest available kernels.

Kernels are imported only when they are timed. If a kernel is not installed, results record the
reason, and the run continues.
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
from cab_hf.eval.report import format_digits, format_percent
from cab_hf.eval.speed.timing import Bench, summarise_error
from cab_hf.plan import BlockPlan, KeyRanges

# q [B, H, N, D], k and v [B, H_kv, N, D], scale -> [B, H, N, D]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]

# tokens in a check of a kernel: no multiple of a tile, and at least 512, because ffpa calls SDPA
# for shorter sequences
CHECK_LENGTH = 600
# largest relative error in a check: rounding to bf16 causes up to 1e-2, and a wrong layout about 1
CHECK_TOLERANCE = 2e-2
CHECK_GRADIENT_TOLERANCE = 5e-2
CHECK_BLOCKS = (128, 64)  # query block and key block of the plans in a check
CHECKED_QUERIES = 32  # number of checked queries at each of the start, middle and end of a sequence
BASELINE_FIELDS = ("baselines", "not_measured", "without_graph")
COMPARISON_FIELDS = ("baseline", "baseline_ms", "extrapolated", "ratio")
PREFERRED_BASELINES = ("FA3", "cuDNN")  # baselines of ratios, in order of preference
BREAK_EVEN_NOTE = (
    "A break-even lies between two measured lengths, on a line through their logarithms."
)
FLASH_HEAD_DIMS = range(1, 257)
WIDE_HEAD_DIMS = range(257, 1025)
# a wheel of FlashAttention-3 with only the forward pass has the module fa3_fwd_interface
FA3_MODULES = ("flash_attn_interface", "fa3_fwd_interface")
FA4_MODULES = ("flash_attn.cute",)


@dataclass(frozen=True)
class Baseline:
    """One dense kernel.

    Attributes:
        load_kernel: function that imports and returns the kernel, or raises ImportError.
        get_version: function that returns the version of the kernel's library; None for torch.
        head_dims: supported head dims.
        supports_gqa: True if the kernel supports fewer KV heads than query heads. For other
            kernels, KV heads are repeated before the timed call.
        aligns_to_last_key: True if the kernel aligns the causal mask to the last key when there
            are fewer queries than keys, as in a call with a KV cache. PyTorch's kernels align the
            mask to the first key.
    """

    load_kernel: Callable[[], Attend]
    get_version: Callable[[], str | None] = lambda: None
    head_dims: range = range(1, 1 << 16)
    supports_gqa: bool = True
    aligns_to_last_key: bool = False

    def match_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v; k and v have as many heads as q if the kernel requires this."""
        queries_per_kv_head = 1 if self.supports_gqa else q.shape[1] // k.shape[1]
        if queries_per_kv_head == 1:
            return q, k, v
        return (
            q,
            k.repeat_interleave(queries_per_kv_head, dim=1),
            v.repeat_interleave(queries_per_kv_head, dim=1),
        )


def get_baselines(device: torch.device | str) -> dict[str, Baseline]:
    """Return a mapping from names to the baselines for ``device``."""
    return GPU_BASELINES if torch.device(device).type == "cuda" else CPU_BASELINES


def choose_baseline(
    baseline_ms: Mapping[str, float], preferred_names: Iterable[str] = PREFERRED_BASELINES
) -> str | None:
    """Return the name of the baseline to which a time is compared; None without measurements.

    Args:
        baseline_ms: name -> ms of each measured baseline.
        preferred_names: names in order of preference. If none was measured, the fastest baseline
            counts.
    """
    preferred_name = next((name for name in preferred_names if name in baseline_ms), None)
    return preferred_name or min(baseline_ms, key=baseline_ms.__getitem__, default=None)


def compare_with_dense(
    row: Row, rows: Iterable[Row], preferred_names: Iterable[str] = PREFERRED_BASELINES
) -> dict[str, Any]:
    """Return the fields `COMPARISON_FIELDS`, which compare the time of a row with a dense baseline.

    If no baseline was measured at the row's length, the time of the baseline is extrapolated from
    the longest length with a measured baseline. All fields are None if the row is shorter than that
    length, or if there is no such length.

    Args:
        row: the row.
        rows: rows that differ from ``row`` only in length.
        preferred_names: as in `choose_baseline`.
    """
    rows_with_baselines = (candidate_row for candidate_row in rows if candidate_row["baselines"])
    longest_row = max(
        rows_with_baselines, key=lambda candidate_row: candidate_row["length"], default=None
    )
    baseline_row = row if row["baselines"] else longest_row
    if baseline_row is None or baseline_row["length"] > row["length"]:
        return dict.fromkeys(COMPARISON_FIELDS)
    baseline_name = choose_baseline(baseline_row["baselines"], preferred_names)
    # dense attention is quadratic in the length
    baseline_ms = (
        baseline_row["baselines"][baseline_name] * (row["length"] / baseline_row["length"]) ** 2
    )
    return {
        "baseline": baseline_name,
        "baseline_ms": baseline_ms,
        "extrapolated": baseline_row is not row,
        "ratio": None if row["ms"] is None else row["ms"] / baseline_ms,
    }


def format_dense_time(row: Row) -> str | None:
    """Format the dense time of a row, such as ``842 FA3``, or ``≈ 842 FA3`` if extrapolated.

    Returns None if the row has no dense time.
    """
    if row["baseline_ms"] is None:
        return None
    return f"{'≈ ' * row['extrapolated']}{format_digits(row['baseline_ms'])} {row['baseline']}"


def find_break_even(length_ratios: Sequence[tuple[int, float]]) -> float | None:
    """Return the length from which a ratio stays below 1; None if the last ratio is 1 or above.

    Between two measured lengths, the logarithm of the ratio is interpolated linearly in the
    logarithm of the length.

    Args:
        length_ratios: (length, ratio), ascending in length.
    """
    last_slower_index = max(
        (index for index, (_, ratio) in enumerate(length_ratios) if ratio >= 1), default=None
    )
    if last_slower_index is None:
        return length_ratios[0][0]
    if last_slower_index == len(length_ratios) - 1:
        return None
    (length, ratio), (next_length, next_ratio) = length_ratios[
        last_slower_index : last_slower_index + 2
    ]
    return length * (next_length / length) ** (math.log(ratio) / math.log(ratio / next_ratio))


def describe_break_even(rows: Iterable[Row]) -> str | None:
    """Return a phrase with the length from which ``ratio`` stays below 1, by `find_break_even`.

    Returns None if no row has a ratio.

    Args:
        rows: rows of one configuration, ascending in length.
    """
    length_ratios = [(row["length"], row["ratio"]) for row in rows if row["ratio"] is not None]
    if not length_ratios:
        return None
    length = find_break_even(length_ratios)
    if length is None:
        return f"at no length up to {length_ratios[-1][0]:,} tokens"
    is_always_faster = all(ratio < 1 for _, ratio in length_ratios)
    phrase_start = "at every length from" if is_always_faster else "from about"
    return f"{phrase_start} {round(length):,} tokens on"


def describe_speed(rows: Sequence[Row], subject: str) -> str:
    """Return a sentence that compares the times of rows with dense attention.

    Args:
        rows: rows of one configuration with a ``ratio``, ascending in length.
        subject: subject of the sentence.
    """
    longest_row = rows[-1]
    return (
        f"At {longest_row['length']:,} tokens {subject} takes "
        f"{format_percent(longest_row['ratio'])} of {longest_row['baseline']}'s "
        f"time{' (extrapolated)' * longest_row['extrapolated']}; "
        f"it is faster {describe_break_even(rows)}."
    )


@torch.enable_grad()
def make_backward(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Run one forward pass, and return a function that computes the gradients of q, k and v.

    Args:
        attend: function of q, k and v that returns attention.
        q: [B, H, N, D].
        k, v: [B, H_kv, N, D].

    Raises:
        RuntimeError: the kernel has no backward.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    # without donated buffers, a compiled backward can run more than once
    with torch._functorch.config.patch(donated_buffer=False):
        out = attend(q, k, v)
    if not out.requires_grad:
        raise RuntimeError("it has no backward")
    # the same gradient of the output for every kernel, whatever its memory layout
    generator = torch.Generator(out.device).manual_seed(0)
    random_gradient = torch.randn(out.shape[2:], generator=generator, device=out.device)
    output_gradient = torch.empty_like(out).copy_(random_gradient)
    return lambda: torch.autograd.grad(out, (q, k, v), output_gradient, retain_graph=True)


def require_close(
    actual: Tensor, expected: Tensor, location: str, tolerance: float = CHECK_TOLERANCE
) -> None:
    """Raise ArithmeticError if the relative error of ``actual`` exceeds ``tolerance``.

    Args:
        actual: the tensor to check.
        expected: float32 tensor of the same shape.
        location: end of the message, which names the tensor.
        tolerance: largest relative error in the 2-norm.
    """
    relative_error = float((actual.float() - expected).norm() / expected.norm())
    if not relative_error <= tolerance:  # a NaN also fails this comparison
        raise ArithmeticError(f"wrong by {relative_error:.2g} (relative) {location}")


def check_attention(out: Tensor, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> None:
    """Compare attention of some queries with float32 attention; padding queries are left out.

    Args:
        out: attention to check, [B, H, N, D].
        q: [B, H, N, D].
        k, v: [B, H_kv, N, D].
        plan: the plan of the attention.

    Raises:
        ArithmeticError: the relative error exceeds `CHECK_TOLERANCE`.
    """
    last_start = max(0, plan.q_length - CHECKED_QUERIES)
    for first_query in dict.fromkeys((0, last_start // 2, last_start)):
        stop_query = min(first_query + CHECKED_QUERIES, plan.q_length)
        padding = (plan.ranges.end[:, first_query:stop_query] < 0)[:, None, :, None]
        if not padding.all():
            expected = compute_exact_attention(
                q=q, k=k, v=v, plan=plan, start_query=first_query, stop_query=stop_query
            )
            require_close(
                out[:, :, first_query:stop_query].masked_fill(padding, 0.0),
                expected.masked_fill(padding, 0.0),
                location=f"in queries {first_query} to {stop_query - 1}",
            )


def compute_exact_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, start_query: int, stop_query: int
) -> Tensor:
    """Return float32 attention of queries ``start_query`` to ``stop_query`` - 1 in the plan's mask.

    Returns:
        [B, H, stop - start, D].
    """
    num_kv_heads, group_size = k.shape[1], q.shape[1] // k.shape[1]

    def group_heads(x: Tensor) -> Tensor:
        # [B, H, rows, .] -> [B, H_kv, group * rows, .], so that no key is repeated
        return x.unflatten(1, (num_kv_heads, group_size)).flatten(2, 3)

    mask = plan.token_mask(start_query, stop_query).repeat_interleave(
        plan.shared_by(q.shape[1]), dim=1
    )
    query_rows = group_heads(q[:, :, start_query:stop_query].float()) * q.shape[-1] ** -0.5
    logits = query_rows @ k.float().transpose(-1, -2)
    weights = logits.masked_fill_(~group_heads(mask), -torch.inf).softmax(dim=-1)
    return (weights @ v.float()).unflatten(2, (group_size, -1)).flatten(1, 2)


def check_gradients(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planner: Callable[[Tensor, Tensor, KeyRanges], BlockPlan],
) -> None:
    """Compare the gradients of q, k and v with those of the float32 reference.

    Only the first `CHECK_LENGTH` tokens are checked.

    Args:
        attend: function of q, k, v, plan and ``scale`` that returns attention.
        q: [B, H, N, D].
        k, v: [B, H_kv, N, D].
        planner: function of q, k and ranges that returns a plan.

    Raises:
        ArithmeticError: a relative error exceeds `CHECK_GRADIENT_TOLERANCE`.
    """
    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    batch, _, length, head_dim = q.shape
    plan = planner(q, k, KeyRanges.causal(batch, length, length, q.device))
    attention_options = {"plan": plan, "scale": head_dim**-0.5}
    actual_gradients = make_backward(partial(attend, **attention_options), q, k, v)()
    reference_attend = partial(REFERENCE.attention, **attention_options)
    expected_gradients = make_backward(reference_attend, q.float(), k.float(), v.float())()
    for tensor_name, gradient, expected in zip(
        "qkv", actual_gradients, expected_gradients, strict=True
    ):
        location = f"in the gradient of {tensor_name} at {length} tokens"
        require_close(gradient, expected, location, CHECK_GRADIENT_TOLERANCE)


def check_dense(attend: Attend, q: Tensor, k: Tensor, v: Tensor, backward: bool = False) -> None:
    """Compare causal attention of the first `CHECK_LENGTH` tokens with float32 attention.

    Args:
        attend: the kernel to check.
        q: [B, H, N_q, D].
        k, v: [B, H_kv, N_k, D].
        backward: True to compare gradients too.

    Raises:
        ArithmeticError: a relative error exceeds its tolerance.
    """

    def plan_causal_blocks(q: Tensor, k: Tensor, ranges: KeyRanges) -> BlockPlan:
        return make_causal_plan(ranges, q.shape[1])

    q, k, v = (x[:, :, :CHECK_LENGTH] for x in (q, k, v))
    ranges = KeyRanges.causal(q.shape[0], q.shape[2], k.shape[2], q.device)
    out = attend(q, k, v, q.shape[-1] ** -0.5)
    check_attention(out=out, q=q, k=k, v=v, plan=plan_causal_blocks(q, k, ranges))
    if backward:
        check_gradients(
            lambda q, k, v, plan, scale: attend(q, k, v, scale),
            q=q,
            k=k,
            v=v,
            planner=plan_causal_blocks,
        )


def make_causal_plan(ranges: KeyRanges, num_heads: int) -> BlockPlan:
    """Return a plan of all visible blocks, with the block sizes `CHECK_BLOCKS`."""
    query_block, key_block = CHECK_BLOCKS
    return BlockPlan.causal(ranges, num_heads, query_block=query_block, key_block=key_block)


@torch.no_grad()
def measure_baselines(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bench: Bench,
    backward: bool = False,
    baselines: Mapping[str, Baseline] | None = None,
    check_kernel: Callable[[Attend, Tensor, Tensor, Tensor, bool], None] = check_dense,
) -> dict[str, dict[str, Any]]:
    """Time every baseline, or record why it did not run.

    Args:
        q: [B, H, N, D].
        k, v: [B, H_kv, N, D].
        scale: factor of the logits.
        bench: the timer.
        backward: True to time only the backward pass, called from Python without a CUDA graph.
        baselines: the baselines by name; None: those for the device.
        check_kernel: function that raises an error if a kernel is wrong, as `check_dense` does.

    Returns:
        Three mappings from names of baselines, under the keys `BASELINE_FIELDS`. ``baselines``: ms.
        ``not_measured``: the reason why there are no ms. ``without_graph``: the reason why the ms
        are not those of a CUDA graph.
    """
    results_by_field = {field_name: {} for field_name in BASELINE_FIELDS}
    for baseline_name, baseline in (
        get_baselines(bench.device) if baselines is None else baselines
    ).items():
        try:
            if q.shape[-1] not in baseline.head_dims:
                min_head_dim, max_head_dim = baseline.head_dims[0], baseline.head_dims[-1]
                raise RuntimeError(
                    f"it supports head dims {min_head_dim} to {max_head_dim}, not {q.shape[-1]}"
                )
            attend, kernel_inputs = baseline.load_kernel(), baseline.match_heads(q, k, v)
            query, key, value = kernel_inputs
            check_kernel(attend, query, key, value, backward=backward)
            timed_call = _make_timed_call(attend, kernel_inputs, scale, backward)
            timing = bench.time(timed_call, has_graph=not backward)
        except Exception as error:
            # a kernel that is missing, raises an error or is wrong is reported and not measured
            results_by_field["not_measured"][baseline_name] = summarise_error(error)
            continue
        finally:
            # free repeated heads and tensors saved for the backward before the next baseline
            timed_call = kernel_inputs = query = key = value = None
        results_by_field["baselines"][baseline_name] = timing.ms
        if timing.no_graph_reason:
            results_by_field["without_graph"][baseline_name] = timing.no_graph_reason
    return results_by_field


def _make_timed_call(
    attend: Attend, kernel_inputs: tuple[Tensor, Tensor, Tensor], scale: float, backward: bool
) -> Callable[[], Any]:
    """Return a function without arguments that computes attention, or its gradients."""
    q, k, v = kernel_inputs
    if backward:
        return make_backward(lambda q, k, v: attend(q, k, v, scale), q, k, v)
    return lambda: attend(q, k, v, scale)


def _make_sdpa_loader(backend: SDPBackend) -> Callable[[], Attend]:
    """Return a function for `Baseline.load_kernel` that returns torch's SDPA with one backend."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        has_groups = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=has_groups
            )

    return lambda: attend


def load_flash_function(function_name: str, module_names: Sequence[str]) -> Callable[..., Tensor]:
    """Wrap a function of flash-attn, so that it is causal and returns only the output.

    Args:
        function_name: name of the function.
        module_names: modules that may define the function; the first installed module is used.

    Raises:
        ImportError: no module is installed.
    """
    kernel = getattr(
        import_module(next(filter(find_spec, module_names), module_names[-1])), function_name
    )

    def attend(q: Tensor, k: Tensor, v: Tensor, **kernel_options: Any) -> Tensor:
        out = kernel(q, k, v, causal=True, **kernel_options)
        # some versions return the log-sum-exp too
        return out[0] if isinstance(out, tuple) else out

    return attend


def _make_flash_loader(module_names: Sequence[str]) -> Callable[[], Attend]:
    """Return a function for `Baseline.load_kernel` that returns flash_attn_func for [B, H, N, D].

    The inputs are passed to flash_attn_func as transposed views, without copies.

    Args:
        module_names: as in `load_flash_function`.
    """

    def load_kernel() -> Attend:
        kernel = load_flash_function("flash_attn_func", module_names)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return kernel(q, k, v, softmax_scale=scale).transpose(1, 2)

        return attend

    return load_kernel


def _make_ffpa_loader(backend: str) -> Callable[[], Attend]:
    """Return a function for `Baseline.load_kernel` that returns the kernel of ffpa-attn.

    Args:
        backend: "triton" or "cutedsl". An input for which ffpa-attn would use SDPA raises an error.
    """

    def load_kernel() -> Attend:
        from ffpa_attn import ffpa_attn_func
        from ffpa_attn.functional import FFPAAttnMeta

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            if FFPAAttnMeta.from_kwargs(backend=backend).fallback(q, k, None, 0.0):
                raise RuntimeError("it would call SDPA instead")
            return ffpa_attn_func(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True, backend=backend
            )

        return attend

    return load_kernel


def _make_version_getter(*package_names: str) -> Callable[[], str | None]:
    """Return a function for `Baseline.get_version`.

    The function returns name and version of the first installed package in ``package_names``, or
    None.
    """

    def get_version() -> str | None:
        for package_name in package_names:
            with suppress(metadata.PackageNotFoundError):
                return f"{package_name} {metadata.version(package_name)}"
        return None

    return get_version


def _get_cudnn_version() -> str | None:
    version = torch.backends.cudnn.version()
    return None if version is None else f"cuDNN {version}"


GPU_BASELINES = {
    "FA3": Baseline(
        _make_flash_loader(FA3_MODULES),
        _make_version_getter("flash_attn_3", "flash-attn-3", "fa3-fwd"),
        head_dims=FLASH_HEAD_DIMS,
        aligns_to_last_key=True,
    ),
    "FA4": Baseline(
        _make_flash_loader(FA4_MODULES),
        _make_version_getter("flash-attn-4"),
        head_dims=FLASH_HEAD_DIMS,
        aligns_to_last_key=True,
    ),
    "cuDNN": Baseline(
        _make_sdpa_loader(SDPBackend.CUDNN_ATTENTION), _get_cudnn_version, head_dims=FLASH_HEAD_DIMS
    ),
    "flash": Baseline(_make_sdpa_loader(SDPBackend.FLASH_ATTENTION), head_dims=FLASH_HEAD_DIMS),
    "efficient": Baseline(_make_sdpa_loader(SDPBackend.EFFICIENT_ATTENTION), supports_gqa=False),
    "ffpa CuTe": Baseline(
        _make_ffpa_loader("cutedsl"), _make_version_getter("ffpa-attn"), head_dims=WIDE_HEAD_DIMS
    ),
    "ffpa Triton": Baseline(
        _make_ffpa_loader("triton"), _make_version_getter("ffpa-attn"), head_dims=WIDE_HEAD_DIMS
    ),
}
CPU_BASELINES = {"SDPA": Baseline(_make_sdpa_loader(SDPBackend.FLASH_ATTENTION))}
