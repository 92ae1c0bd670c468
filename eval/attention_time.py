"""The time of attention on a model's own queries and keys, compared with dense kernels.

The model reads a text once with dense attention. Each layer first times block selection and
attention on its q, k and v, and then computes its dense output. All methods are therefore timed on
the same inputs.

Baselines select blocks in plain PyTorch here, which is slower than the kernels of their authors.
Their selection time is therefore not measured: it is the measured time of dense attention times the
ratio in `REPORTED_SELECTION_SHARES`. The time of attention to the selected blocks is measured for
all methods.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cab_hf.call.call import Call
from cab_hf.config import CabConfig
from cab_hf.data.needles import Tokens
from cab_hf.engines import Workload
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.timing import Bench, GpuBench, Timing
from cab_hf.patches.watching import observe_calls
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.route import route

NUM_WARM_UP_CALLS = 1
NUM_TIMED_RUNS = 3  # timed runs per layer; the time of a model is the sum of the layers' medians
# predictor -> time of block selection / time of dense attention. Xu et al. 2025 (arXiv
# 2503.16428), figure 5, report 9.3 ms at stride 8, 3.6 ms at stride 16, and 73.8 ms for dense
# attention at one length. The figure also reports 89.6 ms for MInference and 20.8 ms for
# FlexPrefill, which are not used, because the authors of these methods did not report them.
REPORTED_SELECTION_SHARES = {
    "antidiagonal": 9.3 / 73.8,
    "xattention": 9.3 / 73.8,
    "xattention_16": 3.6 / 73.8,
    # 0, in favour of these methods, because their authors report no share
    **dict.fromkeys(("flexprefill", "vertical_slash"), 0.0),
    # random and streaming score no blocks; for the others, 0 is a lower bound of the time
    **dict.fromkeys(("mean_pooled", "oracle", "random", "streaming"), 0.0),
}
# flushes of the L2 cache before a run: they take 3 ms, in which the host queues the timed kernels
NUM_CACHE_FLUSHES = 48


def get_predictor_name(config: CabConfig) -> str:
    """Return the name of the predictor of ``config``: ``"name"`` if the field is ``"name:0.9"``."""
    return config.predictor.partition(":")[0]


class LayerBench(GpuBench):
    """A clock for one layer of a model: few runs, no CUDA graphs.

    The host can need longer to launch a small kernel than the GPU needs to run the kernel. Before
    every run, the clock therefore keeps the GPU busy while the host queues the timed kernels. The
    time between the CUDA events then contains no launches, unless the timed call waits for the GPU.
    """

    def time(self, call: Callable[[], Any], has_graph: bool = True) -> Timing:
        for _ in range(NUM_WARM_UP_CALLS):
            call()
        return Timing(
            self.time_by_events(call, NUM_TIMED_RUNS, NUM_CACHE_FLUSHES, torch.cuda.synchronize)
        )


def make_layer_bench(device: torch.device | str) -> Bench | None:
    """Return a `LayerBench` for a GPU; None for a CPU, where attention is not timed by default."""
    return LayerBench(str(device)) if torch.device(device).type == "cuda" else None


class AttentionClock:
    """A clock for the attention of all layers of a model.

    Args:
        bench: the clock that times one call.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._fastest_dense: dict[tuple, tuple[str, float]] = {}

    @torch.no_grad()
    def time(self, model: Any, tokens: Tokens, config: CabConfig | None) -> dict[str, Any]:
        """Return the milliseconds of attention in one pass over ``tokens``, summed over layers.

        Layers with a sliding window are left out of all times.

        Args:
            model: the model.
            tokens: the tokens to read.
            config: the config of CAB or of a baseline; None to time dense attention only.

        Returns:
            ``predict_ms``: time of selecting blocks, measured or estimated from
            `REPORTED_SELECTION_SHARES`.
            ``attend_ms``: time of attention to the selected blocks, or of dense attention in layers
            that attend densely.
            ``dense_ms``: time of the fastest dense kernel in all layers.
            ``dense_kernel``: the name of this kernel.
            ``predict_reported``: the ratio from `REPORTED_SELECTION_SHARES`; missing if selection
                is measured.
        """
        time_fields = {"predict_ms": 0.0, "attend_ms": 0.0, "dense_ms": 0.0, "dense_kernel": None}
        selection_share = (
            None if config is None else REPORTED_SELECTION_SHARES.get(get_predictor_name(config))
        )
        if selection_share is not None:
            time_fields["predict_reported"] = selection_share
        shared_state: dict[Any, Any] = {}

        def time_layer(call: Call) -> None:
            if call.mask.window is not None:
                return
            time_fields["dense_kernel"], dense_ms = self.find_fastest_dense(
                call.q, call.k, call.v, call.scale
            )
            batch, _, length, _ = call.q.shape
            layer_context = call.make_layer_context(
                KeyRanges.causal(batch, length, length, call.q.device), shared_state
            )
            sparse_functions = (
                None if config is None else make_sparse_functions(call, layer_context, config)
            )
            predict_ms, attend_ms = 0.0, dense_ms
            if sparse_functions is not None:
                predict, attend = sparse_functions
                is_measured = selection_share is None
                predict_ms = (
                    self.bench.time(predict).ms if is_measured else selection_share * dense_ms
                )
                attend_ms = self.bench.time(attend).ms
            time_fields["dense_ms"] += dense_ms
            time_fields["predict_ms"] += predict_ms
            time_fields["attend_ms"] += attend_ms

        ids = torch.tensor([tokens], device=model.device)
        with observe_calls(model, time_layer):
            model(ids, use_cache=False, logits_to_keep=1)
        return time_fields

    def find_fastest_dense(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[str, float]:
        """Return name and milliseconds of the fastest dense kernel.

        Kernels are timed once for each combination of shapes and dtype.

        Raises:
            RuntimeError: no dense kernel runs.
        """
        shapes_and_dtype = (q.shape, k.shape, q.dtype)
        if shapes_and_dtype not in self._fastest_dense:
            kernel_results = dense.measure_baselines(q, k, v, scale=scale, bench=self.bench)
            if not kernel_results["baselines"]:
                raise RuntimeError(f"no dense kernel runs here: {kernel_results['not_measured']}")
            self._fastest_dense[shapes_and_dtype] = min(
                kernel_results["baselines"].items(), key=lambda item: item[1]
            )
        return self._fastest_dense[shapes_and_dtype]


def make_sparse_functions(
    call: Call, layer_context: LayerContext, config: CabConfig
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return two functions to time: one selects blocks, the other attends to these blocks.

    Args:
        call: the attention call of the layer.
        layer_context: the context that the predictor receives.
        config: the config of CAB or of a baseline.

    Returns:
        Two functions without arguments; None if the layer attends densely with ``config``.
    """
    q, k, v = call.q, call.k, call.v
    workload = Workload.from_tensors(q, k, v, (config.query_block, config.key_block))
    chosen_route = route(call.mask, config, workload, is_sparse=True, layer=call.layer)
    if chosen_route.method != "sparse":
        return None
    predict = partial(make_predictor(config), q, k, layer_context)
    # This call also computes what the layers of a pass share, such as masks. Only the first layer
    # of a model computes it, so that the time of a typical layer excludes it.
    plan = predict()
    return predict, partial(chosen_route.engine.attention, q, k, v, plan, scale=layer_context.scale)
