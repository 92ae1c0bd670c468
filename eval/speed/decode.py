"""``speed decode``: time sparse and dense decode steps, of one layer's attention and of a model."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from cab_hf.config import CabConfig
from cab_hf.decode.step import decodes_sparsely
from cab_hf.eval.experiment import Row
from cab_hf.eval.kv_cache import make_cache_arguments
from cab_hf.eval.report import group_rows
from cab_hf.eval.speed import dense, runner
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.dense import FA3_MODULES, FA4_MODULES, load_flash_function, require_close
from cab_hf.eval.speed.model import SDPA
from cab_hf.eval.speed.runner import Panel
from cab_hf.eval.speed.timing import Bench, describe_timing
from cab_hf.experiment.settings import option, parse_length
from cab_hf.hf.rotary import slow_channels_of_llama
from cab_hf.ops import decode
from cab_hf.ops.decode import Choice, reference

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

BANDWIDTH_TEST_BYTES = {
    "cuda": 4 << 30,
    "cpu": 16 << 20,
}  # bytes of the tensor that `measure_bandwidth` sums
CAB = "cab"
ATTENTION_PART, MODEL_PART = BENCHMARK_PARTS = (
    "attention",
    "model",
)  # in the order of measurement, the faster first
CASE_FIELDS = ("part", "length", "batch", "way", "mode", "budget")
CAB_STAGES = ("index", "choose", "attend")  # stages of a cab step, which are also timed separately


COMPILED_MODE, DYNAMIC_MODE = "compiled", "dynamic"
MODES = {
    COMPILED_MODE: 'a static cache, torch.compile(mode="reduce-overhead", fullgraph=True)',
    "static": "a static cache, eager",
    DYNAMIC_MODE: "a dynamic cache, eager",
}
# the number of slots of a static cache is a multiple of this number, because kernels with a mask
# would pad K and V to such a multiple in every step
SLOT_MULTIPLE = 128
# in a compiled model, the first step compiles, the second records a CUDA graph, and later steps
# replay the graph
WARM_UP_STEPS = 5
NOTES = (
    "Attention is that of one layer of this model. All kernels read the cache as transformers "
    "stores it; transformers is the call of its sdpa over a static cache, with a mask of the "
    "slots. cab writes the new key into the index, selects keys and attends to them; the parts "
    "are timed separately too, so that they do not add up. Bytes: K and V once for dense "
    "kernels, without copies; for cab its index, and K and V of the keys that are read. Of "
    "bandwidth: GB/s divided by that of summing a large tensor in the same run. Mass: the share "
    "of attention on the selected keys. Full error: relative error of cab with all keys "
    "selected.\n\nThe model attends by transformers' sdpa or by cab, here at any min_length, but "
    "never below four times decode_tokens. "
    f"{'; '.join(f'{mode}: {description}' for mode, description in MODES.items())}. "
    "First s includes compiling."
)


def parse_budget(budget_text: str) -> int | float:
    """Parse ``decode_tokens``: a number of tokens such as 4096 or 4k, or a fraction such as 0.1."""
    return float(budget_text) if "." in budget_text else parse_length(budget_text)


def count_budget_keys(budget: float, length: int) -> int:
    """Return the number of keys that a step reads.

    Args:
        budget: ``decode_tokens``. An int is a number of keys, and a float a fraction of the cached
            keys.
        length: number of cached keys.
    """
    return budget if isinstance(budget, int) else round(budget * length)


class Step(NamedTuple):
    """The inputs of a decode step in one layer, and its exact result.

    Attributes:
        q: one query per head, [B, H, 1, D].
        k, v: cached keys and values, [B, H_kv, N, D], contiguous like caches of transformers.
        weights: attention weights over all keys, float32 [B, H_kv, H / H_kv, N].
        expected_out: attention over all keys, float32 [B, H, 1, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    expected_out: Tensor

    @property
    def softmax_scale(self) -> float:
        """The factor of the logits."""
        return self.q.shape[-1] ** -0.5

    @property
    def bytes_per_key(self) -> int:
        """The number of bytes of one token's key and value in one KV head."""
        return 2 * self.k.shape[-1] * self.k.element_size()


# all kernels with equal length and batch use the same cached inputs
@lru_cache(maxsize=1)
def make_random_step(
    settings: Settings, length: int, batch: int, head_dim: int, device: torch.device
) -> Step:
    """Return the inputs and the exact attention of a decode step of random sequences.

    The query of a sequence is that of its last token.

    Args:
        settings: the settings.
        length: number of cached tokens, including the last token.
        batch: number of sequences.
        head_dim: channels per head.
        device: device of all tensors.
    """
    q, k, v = settings.draw_random_heads(
        length, head_dim=head_dim, device=device, tensor_names="qkv", batch=batch
    )
    q, k, v = q[:, :, -1:].contiguous(), k.contiguous(), v.contiguous()
    # [B, H_kv, H / H_kv, D]
    queries = q.float().unflatten(1, (k.shape[1], -1)).squeeze(3) * head_dim**-0.5
    # one sequence at a time, because a float32 copy of the whole cache needs twice its memory
    logits = [
        sequence_queries @ keys.float().transpose(-1, -2)
        for sequence_queries, keys in zip(queries, k, strict=True)
    ]
    weights = torch.stack(logits).softmax(-1)
    return Step(q=q, k=k, v=v, weights=weights, expected_out=sum_weighted_values(weights, v))


def sum_weighted_values(weights: Tensor, v: Tensor) -> Tensor:
    """Return the weighted sums of values, float32 [B, H, 1, D].

    Args:
        weights: [B, H_kv, H / H_kv, N].
        v: [B, H_kv, N, D].
    """
    weighted_sums = [
        row_weights @ row_values.float() for row_weights, row_values in zip(weights, v, strict=True)
    ]
    return torch.stack(weighted_sums).flatten(1, 2).unsqueeze(2)


@lru_cache(maxsize=1)
def measure_bandwidth(bench: Bench) -> float:
    """Return the GB/s at which a large tensor is read and summed."""
    num_elements = BANDWIDTH_TEST_BYTES[bench.device.type] // torch.bfloat16.itemsize
    summed_tensor = torch.zeros(num_elements, dtype=torch.bfloat16, device=bench.device)
    return (
        summed_tensor.nbytes / bench.time(lambda: summed_tensor.sum(dtype=torch.float32)).ms / 1e6
    )


# function without arguments that computes the attention of a decode step, [B, H, 1, D]
DecodeCall = Callable[[], Tensor]


def _make_sdpa_call(backend: SDPBackend | None, step: Step) -> DecodeCall:
    """Return a function that computes ``step`` by torch's SDPA.

    Args:
        backend: the backend of SDPA; None: the backend that torch chooses.
        step: the inputs.
    """

    def attend() -> Tensor:
        with nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                step.q, step.k, step.v, scale=step.softmax_scale, enable_gqa=True
            )

    return attend


def _make_transformers_call(step: Step) -> DecodeCall:
    """Return a function that computes ``step`` by the sdpa attention of transformers.

    The call has a mask of all slots, as transformers passes for a static cache.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    q, k, v, _, _ = step
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    mask = torch.ones(q.shape[0], 1, 1, k.shape[2], dtype=torch.bool, device=q.device)

    def attend() -> Tensor:
        out, _ = sdpa_attention_forward(
            module, q, k, v, attention_mask=mask, scaling=step.softmax_scale
        )
        return out.transpose(1, 2)

    return attend


def _make_flash_call(module_names: tuple[str, ...], function_name: str, step: Step) -> DecodeCall:
    """Return a function that computes ``step`` by flash-attn, on transposed views of the cache.

    Args:
        module_names: as in `load_flash_function`.
        function_name: name of the function.
        step: the inputs.
    """
    kernel = load_flash_function(function_name, module_names)
    q, k, v = (x.transpose(1, 2) for x in (step.q, step.k, step.v))
    kernel_options: dict[str, Any] = {"softmax_scale": step.softmax_scale}
    if function_name == "flash_attn_with_kvcache":
        batch, length, *_ = k.shape
        kernel_options["cache_seqlens"] = torch.full(
            (batch,), length, dtype=torch.int32, device=k.device
        )
    return lambda: kernel(q, k, v, **kernel_options).transpose(1, 2)


DENSE_KERNELS: Mapping[str, Callable[[Step], DecodeCall]] = {
    "SDPA": partial(_make_sdpa_call, None),
    "transformers": _make_transformers_call,
    "FA3": partial(_make_flash_call, FA3_MODULES, "flash_attn_with_kvcache"),
    "FA4": partial(_make_flash_call, FA4_MODULES, "flash_attn_func"),
    "cuDNN": partial(_make_sdpa_call, SDPBackend.CUDNN_ATTENTION),
    "flash": partial(_make_sdpa_call, SDPBackend.FLASH_ATTENTION),
}


@dataclass(frozen=True)
class Settings(models.ModelShape):
    """Settings of a run of ``speed decode``."""

    CONFIG_DEFAULTS = {"min_length": 0, "sparse_decode": True}
    POSITIVE = (*models.ModelShape.POSITIVE, "steps", "batches")
    NON_NEGATIVE = (*models.ModelShape.NON_NEGATIVE, "seconds")
    CHOICES = {"parts": BENCHMARK_PARTS, "kernels": DENSE_KERNELS, "modes": MODES}

    lengths: tuple[int, ...] | None = runner.make_list_option(
        (2**15, 2**17), (1024,), "tokens", parse_length
    )
    batches: tuple[int, ...] | None = runner.make_list_option((1, 4, 8), (1, 2), "batch sizes", int)
    budgets: tuple[int | float, ...] | None = runner.make_list_option(
        (4096,), (128,), "decode_tokens, a number of tokens or a share", parse_budget
    )
    parts: tuple[str, ...] = runner.make_list_option(
        BENCHMARK_PARTS, None, "parts to time: attention of a layer, steps of the model"
    )
    kernels: tuple[str, ...] = runner.make_list_option(
        tuple(DENSE_KERNELS), None, "dense kernels to compare with"
    )
    modes: tuple[str, ...] = runner.make_list_option(
        tuple(MODES), None, "modes in which the model runs"
    )
    steps: int | None = option(32, "timed steps of the model", int)
    seconds: float = option(0.5, "seconds for timing one call, at least five runs", float)

    def configs(self) -> list[CabConfig]:
        return [self.make_config_with_budget(budget) for budget in self.budgets]

    @property
    def method_description(self) -> str:
        return (
            f"attention: {describe_timing(self.device, self.seconds)}; every kernel is compared "
            "with float32 attention before it is timed, cab with float32 attention over its "
            f"selection. Model: median of {self.steps} steps by time.perf_counter after "
            f"{WARM_UP_STEPS} warm-up steps, each of which writes its token into a cache of "
            "random keys and values; the peak is all allocated memory, including warm-up"
        )

    def make_config_with_budget(self, budget: float) -> CabConfig:
        """Return CAB's config with ``budget`` as decode_tokens."""
        return self.make_measured_config(decode_tokens=budget)

    def list_requested_cases(self) -> list[dict[str, Any]]:
        cab_attentions = [(CAB, budget) for budget in self.budgets]
        dense_attentions = {ATTENTION_PART: self.kernels, MODEL_PART: (SDPA,)}
        return [
            {
                "part": part,
                "length": length,
                "batch": batch,
                "way": implementation,
                "mode": mode,
                "budget": budget,
            }
            for part in BENCHMARK_PARTS
            if part in self.parts
            for length, batch in itertools.product(self.lengths, self.batches)
            for mode in (self.modes if part == MODEL_PART else (None,))
            for implementation, budget in (
                *((kernel_name, None) for kernel_name in dense_attentions[part]),
                *cab_attentions,
            )
        ]


class Decode(runner.Speed):
    """The experiment that times decode steps.

    A case is one kernel on the cache of one layer; or one attention implementation of the whole
    model, in one of `MODES`.
    """

    name = "speed decode"
    purpose = "time decode steps that read a part of the cache, next to dense steps"
    title = "Speed of decoding"
    caption = "time of a step by length"
    Settings = Settings
    CASE_FIELDS = CASE_FIELDS
    EXTENSIBLE_SETTINGS = (
        *runner.Speed.EXTENSIBLE_SETTINGS,
        "parts",
        "batches",
        "budgets",
        "kernels",
        "modes",
    )
    COPIED_SETTINGS = ("heads", "kv_heads", "head_dim", "layers", "dtype")
    RESULT_FIELDS = (
        *("ms", "eager_ms", *(f"{part}_ms" for part in CAB_STAGES), "bytes", "bandwidth"),
        *("kept", "mass", "full_error", "tokens_s", "first_s"),
        *("peak_gib", "cache_gib", "index_gib", "ran_as", "without_graph"),
    )
    GROUP_FIELDS = {"part": "part", "texts": "batch", "way": "way", "run": "mode", "keys": "budget"}
    PANEL_HEADINGS = ("part", "texts")
    PANELS = (Panel("decode step", "ms", ("ms",)), Panel("model", "tokens/s", ("tokens_s",)))
    NOTES = {"": NOTES}
    describe_run = staticmethod(models.describe_run)

    @torch.no_grad()
    def fill_sample(self, sample: dict[str, Any]) -> None:
        if sample["part"] == ATTENTION_PART:
            self.fill_attention_sample(sample)
        else:
            make_random_step.cache_clear()
            self.fill_model_sample(sample)

    def fill_attention_sample(self, sample: dict[str, Any]) -> None:
        """Time a decode step of one layer by one kernel, and add the results to ``sample``."""
        settings, bench = self.settings, self.bench
        length, batch, budget = sample["length"], sample["batch"], sample["budget"]
        sample["bandwidth"] = measure_bandwidth(bench)
        step = make_random_step(
            settings,
            length=length,
            batch=batch,
            head_dim=settings.head_dim,
            device=bench.device,
        )
        if budget is None:
            dense_call = DENSE_KERNELS[sample["way"]](step)
            require_close(dense_call(), step.expected_out, "of one query")
            timing = bench.time(dense_call)
            read_bytes = batch * settings.kv_heads * length * step.bytes_per_key
            sample |= {"kept": length, "mass": 1.0, "bytes": read_bytes}
        else:
            cab_fields = time_cab(step, count_budget_keys(budget, length), bench)
            timing = cab_fields.pop("timing")
            sample |= {f"{stage}_ms": cab_fields.pop(stage).ms for stage in CAB_STAGES} | cab_fields
        sample |= {
            "ms": timing.ms,
            "eager_ms": timing.eager_ms,
            "without_graph": timing.no_graph_reason,
        }

    def fill_model_sample(self, sample: dict[str, Any]) -> None:
        """Time decode steps of the model, and add the results to ``sample``.

        Each step appends its token to the cache.
        """
        settings, bench = self.settings, self.bench
        length, batch, budget = sample["length"], sample["batch"], sample["budget"]
        is_compiled = sample["mode"] == COMPILED_MODE
        if is_compiled and bench.device.type != "cuda":
            raise RuntimeError("reduce-overhead makes CUDA graphs, which need a GPU")
        model = models.make_random_model(settings)
        config = None if budget is None else settings.make_config_with_budget(budget)
        num_slots = -(-(length + WARM_UP_STEPS + settings.steps) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        num_slots = 0 if sample["mode"] == DYNAMIC_MODE else num_slots
        with models.use_attention(model, CAB if config else SDPA, config):
            cache = models.make_random_cache(
                model, length, batch=batch, num_slots=num_slots, has_index=config is not None
            )
            bench.free_memory()
            counters.clear()
            try:
                decode_step = make_decode_step(model, cache, batch, is_compiled)
                warm_up_ms, warm_up_peak_gib = bench.time_runs(decode_step, WARM_UP_STEPS)
                step_ms, step_peak_gib = bench.time_runs(decode_step, settings.steps)
            finally:
                if is_compiled:
                    # free the CUDA graphs and their memory
                    torch._dynamo.reset()
        median_ms = statistics.median(step_ms)
        cache_bytes = sum(
            tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values)
        )
        sample |= {
            "ms": median_ms,
            "first_s": warm_up_ms[0] / 1e3,
            "tokens_s": batch / median_ms * 1e3,
            "peak_gib": warm_up_peak_gib and max(warm_up_peak_gib, step_peak_gib),
            "cache_gib": cache_bytes / 2**30,
        }
        if config is not None:
            layer_indices = (getattr(layer, "index", None) for layer in cache.layers)
            key_indices = [index for index in layer_indices if index is not None]
            sample["index_gib"] = sum(index.nbytes for index in key_indices) / 2**30
            is_sparse = decodes_sparsely(config, cache.layers[0].keys.shape[2])
            sample["ran_as"] = (
                f"{len(key_indices)} layers select the keys they read"
                if is_sparse
                else "dense: too few tokens to save time"
            )
        if num_skipped_graphs := counters["inductor"]["cudagraph_skips"]:
            sample["without_graph"] = f"inductor makes no CUDA graph of {num_skipped_graphs} graphs"

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return a row per sample, sorted by part, length and batch, with speed-ups.

        In rows of CAB, ``over_best`` is the speed-up over the fastest dense row of equal part,
        length and batch, and ``over_same`` the speed-up over sdpa in the same mode.
        """
        comparison_fields = ("baseline", "baseline_ms", "over_best", "over_same")
        rows = runner.sort_by_length(samples, (*comparison_fields, "gb_s", "of_bandwidth"))
        rows.sort(key=lambda row: (BENCHMARK_PARTS.index(row["part"]), row["length"], row["batch"]))

        def make_row_label(row: Row) -> str:
            return " ".join(filter(None, (row["way"], row["mode"])))

        for comparable_rows in group_rows(rows, ["part", "length", "batch"]):
            timed_rows = [row for row in comparable_rows if row["ms"] is not None]
            dense_ms = {
                make_row_label(row): row["ms"] for row in timed_rows if row["budget"] is None
            }
            fastest_dense = dense.choose_baseline(dense_ms, preferred_names=())
            for row in timed_rows:
                if row["bytes"]:
                    row["gb_s"] = row["bytes"] / row["ms"] / 1e6
                    row["of_bandwidth"] = row["gb_s"] / row["bandwidth"]
                if row["budget"] is None or fastest_dense is None:
                    continue
                row |= {"baseline": fastest_dense, "baseline_ms": dense_ms[fastest_dense]}
                row["over_best"] = dense_ms[fastest_dense] / row["ms"]
                sdpa_ms = dense_ms.get(make_row_label({**row, "way": SDPA}))
                row["over_same"] = sdpa_ms and sdpa_ms / row["ms"]
        return rows


EXPERIMENT = Decode


def make_decode_step(
    model: PreTrainedModel, cache: Cache, batch: int, is_compiled: bool
) -> Callable[[], Any]:
    """Return a function that runs one greedy decode step of all sequences.

    Each call passes the tokens that the call before has generated.

    Args:
        model: the model.
        cache: the cache, to which each step appends its token.
        batch: number of sequences.
        is_compiled: True to compile the forward pass.
    """
    forward_pass = model.__call__
    if is_compiled:
        forward_pass = torch.compile(forward_pass, mode="reduce-overhead", fullgraph=True)
    # not token 0, which is padding and has a zero embedding
    tokens = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    cache_options = make_cache_arguments(model, cache)

    def run_step() -> None:
        if is_compiled:
            # the graph may overwrite the result of the step before
            torch.compiler.cudagraph_mark_step_begin()
        logits = forward_pass(tokens, **cache_options).logits
        tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))

    return run_step


@torch.no_grad()
def time_cab(step: Step, num_selected: int, bench: Bench) -> dict[str, Any]:
    """Check and time a sparse decode step of CAB in one layer.

    Args:
        step: the inputs.
        num_selected: number of keys to select per KV head.
        bench: the timer.

    Returns:
        ``timing``: the `Timing` of the whole step.
        ``index``, ``choose``, ``attend``: the `Timing` of each stage.
        ``kept``: mean number of selected keys per KV head.
        ``mass``: sum of the attention weights of the selected keys, mean over query heads.
        ``bytes``: bytes that the step reads.
        ``full_error``: relative error of attention if all keys are selected.

    Raises:
        ArithmeticError: attention over the selected keys differs from float32 attention over these
            keys; or the step differs from the float32 reference, in which one mean key and value
            stand for all unread keys.
    """
    q, k, v, weights, expected_out = step
    rotary_channels, length = slow_channels_of_llama(q.shape[-1]), k.shape[2]
    # the index contains all keys; each step writes the last key again
    key_index = decode.index_keys(k, rotary_channels)
    last_slot = torch.tensor([length - 1], device=q.device)
    num_all_keys, num_selected_keys = (
        torch.tensor([num_read_keys], dtype=torch.int32, device=q.device)
        for num_read_keys in (length, num_selected)
    )

    def write_last_key() -> None:
        decode.write_index(key_index, k[:, :, -1:], rotary_channels, last_slot)

    def choose_keys(num_keys: Tensor = num_selected_keys) -> Choice:
        return decode.choose(
            q,
            key_index,
            scale=step.softmax_scale,
            length=num_all_keys,
            num_keys=num_keys,
            channels=rotary_channels,
        )

    def attend_to_choice(key_choice: Choice) -> Tensor:
        return decode.attend(q, k, v, key_choice, scale=step.softmax_scale, length=num_all_keys)

    def run_cab_step() -> Tensor:
        write_last_key()
        return attend_to_choice(choose_keys())

    full_attention, key_choice = attend_to_choice(choose_keys(num_all_keys)), choose_keys()
    require_close(full_attention, expected_out, "with all keys selected")
    selected_weights = weights * key_choice.to_mask().unsqueeze(2)
    require_close(
        attend_to_choice(key_choice.map_to_layer(q.device)),
        sum_weighted_values(selected_weights / selected_weights.sum(-1, keepdim=True), v),
        "over the selected keys",
    )
    # one sequence at a time, because a float32 copy of the whole cache needs twice its memory
    expected_per_sequence = [
        reference.attend(
            q=q[[sequence_index]].float(),
            k=k[[sequence_index]],
            v=v[[sequence_index]],
            choice=Choice(*(choice_tensor[[sequence_index]] for choice_tensor in key_choice)),
            scale=step.softmax_scale,
            length=num_all_keys,
        )
        for sequence_index in range(len(q))
    ]
    require_close(run_cab_step(), torch.cat(expected_per_sequence), "with the unread keys")
    num_read_keys = int(key_choice.counts.sum())
    return {
        "timing": bench.time(run_cab_step),
        "index": bench.time(write_last_key),
        "choose": bench.time(choose_keys),
        "attend": bench.time(partial(attend_to_choice, key_choice)),
        "kept": num_read_keys / (k.shape[0] * k.shape[1]),
        "mass": float(selected_weights.sum(-1).mean()),
        "bytes": key_index.nbytes + num_read_keys * step.bytes_per_key,
        "full_error": float((full_attention.float() - expected_out).norm() / expected_out.norm()),
    }
