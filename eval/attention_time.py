"""The time of attention on a model's own queries and keys, compared with dense kernels.

The model reads a text once with dense attention. Each layer first times block selection and
attention on its q, k and v, and then computes its dense output. All methods are therefore timed on
the same inputs.

Baselines select blocks in plain PyTorch here, which is slower than necessary. The time of their
selection is therefore estimated from the share of dense attention's time that their authors report.
The time of attention is measured for all methods.
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
from cab_hf.patches.watching import watched
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext, make_predictor
from cab_hf.route import route

WARM_UP_CALLS = 1
RUNS = 3  # runs in each layer; the medians of all layers are summed
# predictor -> time of block selection / time of dense attention. Xu et al. 2025 (arXiv
# 2503.16428), figure 5, report 9.3 ms at stride 8, 3.6 ms at stride 16, and 73.8 ms for dense
# attention at one length. The figure also reports 89.6 ms for MInference and 20.8 ms for
# FlexPrefill, which are not used, because the authors of these methods did not report them.
REPORTED = {
    "antidiagonal": 9.3 / 73.8,
    "xattention": 9.3 / 73.8,
    "xattention_16": 3.6 / 73.8,
    # 0, in favour of these methods, because their authors report no share
    **dict.fromkeys(("flexprefill", "vertical_slash"), 0.0),
    # 0, because these methods do not score blocks, or are bounds that score by exact attention
    **dict.fromkeys(("mean_pooled", "oracle", "random", "streaming"), 0.0),
}
FLUSHES = 48  # flushes of the L2 cache before a run; the host queues the kernels in these 3 ms


def predictor_name(config: CabConfig) -> str:
    """Return the name of the predictor of ``config``, without a parameter after a colon."""
    return config.predictor.partition(":")[0]


class LayerBench(GpuBench):
    """A clock for one layer of a model: few runs, no CUDA graphs.

    A launch can take longer than a small kernel. The clock therefore keeps the GPU busy before
    every run while the host queues the timed kernels. The CUDA events then enclose only kernels,
    unless the call synchronises.
    """

    def time(self, call: Callable[[], Any], graph: bool = True) -> Timing:
        for _ in range(WARM_UP_CALLS):
            call()
        return Timing(self.by_events(call, RUNS, FLUSHES, torch.cuda.synchronize))


def layer_bench(device: torch.device | str) -> Bench | None:
    """Return the clock for layers on a GPU; None for a CPU, whose times are meaningless."""
    return LayerBench(str(device)) if torch.device(device).type == "cuda" else None


class AttentionClock:
    """A clock for the attention of all layers of a model.

    Args:
        bench: the clock that times one call.
    """

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self._dense: dict[tuple, tuple[str, float]] = {}

    @torch.no_grad()
    def time(self, model: Any, tokens: Tokens, config: CabConfig | None) -> dict[str, Any]:
        """Return the milliseconds of attention in one pass over ``tokens``, summed over layers.

        Layers with a sliding window are left out of all times.

        Args:
            model: the model.
            tokens: the tokens to read.
            config: CAB's config, or that of a baseline; None for dense attention alone.

        Returns:
            ``predict_ms``: selecting blocks, measured or estimated from `REPORTED`.
            ``attend_ms``: attending to the blocks, and dense attention in dense layers.
            ``dense_ms``: the fastest dense kernel in all layers.
            ``dense_kernel``: the name of this kernel.
            ``predict_reported``: the share from `REPORTED`, if selection is not measured.
        """
        spent = {"predict_ms": 0.0, "attend_ms": 0.0, "dense_ms": 0.0, "dense_kernel": None}
        reported = None if config is None else REPORTED.get(predictor_name(config))
        if reported is not None:
            spent["predict_reported"] = reported
        shared_state: dict[Any, Any] = {}

        def time_layer(call: Call) -> None:
            if call.mask.window is not None:
                return
            spent["dense_kernel"], dense_ms = self.dense(call.q, call.k, call.v, call.scale)
            batch, _, length, _ = call.q.shape
            layer = call.context(
                KeyRanges.causal(batch, length, length, call.q.device), shared_state
            )
            calls = None if config is None else sparse_calls(call, layer, config)
            predict_ms, attend_ms = 0.0, dense_ms
            if calls is not None:
                predict, attend = calls
                measured = reported is None
                predict_ms = self.bench.time(predict).ms if measured else reported * dense_ms
                attend_ms = self.bench.time(attend).ms
            spent["dense_ms"] += dense_ms
            spent["predict_ms"] += predict_ms
            spent["attend_ms"] += attend_ms

        ids = torch.tensor([tokens], device=model.device)
        with watched(model, time_layer):
            model(ids, use_cache=False, logits_to_keep=1)
        return spent

    def dense(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[str, float]:
        """Return the fastest dense kernel and its ms, measured once per shape of tensors.

        Raises:
            RuntimeError: no dense kernel runs.
        """
        key = (q.shape, k.shape, q.dtype)
        if key not in self._dense:
            result = dense.measure(q, k, v, scale=scale, bench=self.bench)
            if not result["baselines"]:
                raise RuntimeError(f"no dense kernel runs here: {result['not_measured']}")
            self._dense[key] = min(result["baselines"].items(), key=lambda item: item[1])
        return self._dense[key]


def sparse_calls(
    call: Call, layer: LayerContext, config: CabConfig
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return a function that selects blocks and a function that attends, for one layer.

    Args:
        call: the attention call of the layer.
        layer: the context for the predictor.
        config: the config.

    Returns:
        Two functions without arguments; None if the layer attends densely.
    """
    q, k, v = call.q, call.k, call.v
    work = Workload.of(q, k, v, (config.query_block, config.key_block))
    chosen_route = route(call.mask, config, work, sparse=True, layer=call.layer)
    if chosen_route.method != "sparse":
        return None
    predict = partial(make_predictor(config), q, k, layer)
    # the first call fills caches that later layers of a pass find filled
    plan = predict()
    return predict, partial(chosen_route.engine.attention, q, k, v, plan, scale=layer.scale)
